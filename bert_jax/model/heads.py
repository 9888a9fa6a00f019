"""The heads of fine-tuning tasks (Devlin et al., 2018, section 4), each described by one `Head`.

`HEADS` is the only table of them: what differs between heads anywhere is a field of `Head`. Rows
may hold several sequences; outputs and losses are per sequence, so that packing changes no result.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse import csr_array, issparse, vstack

from bert_jax.data.features import NO_LABEL, LabelLayout, ModelInput
from bert_jax.losses.in_batch import in_batch_loss, late_interaction_loss
from bert_jax.model.execution import ExecutionPlan
from bert_jax.model.feature_based import FeatureBasedTagger
from bert_jax.model.layers import cross_entropy, kl_divergence
from bert_jax.model.lstm_models import PooledLstmModel, PositionLstmModel
from bert_jax.model.task_models import (
    PooledModel,
    PositionModel,
    multi_vector_model,
    sparse_model,
    vector_model,
)
from bert_jax.runtime.named_modules import import_part

Outputs = Sequence[np.ndarray | csr_array]
"""A head's float32 output for each feature: classification and multi-label `[classes]`, regression
`[1]`, multiple choice `[choices]`, tagging `[length, tags]`, span `[length, 2]`, embedding
`[sequences, H]`, multi-vector `[length, size]`, 0 for tokens whose vectors do not count;
sparse embedding `[sequences, vocabulary]`, a SciPy array."""


def _one_class(features, outputs, cls_last=False):
    if outputs[0].size == 1:  # A cross-encoder scores passages one by one.
        return _equal_vectors(features, outputs)
    return len({int(scores.argmax()) for scores in outputs}) == 1


def _one_label_set(features, outputs, cls_last=False):
    return len(np.unique(np.stack(outputs) > 0, axis=0)) == 1


def _one_value(features, outputs, cls_last=False):
    """Returns whether the outputs vary by at most 5 % of the labels' standard deviation.

    Such outputs explain at most 0.25 % of the labels' variance. Without labels, or if all are
    equal, returns whether the range of the outputs is at most 1/1000 of the largest one.
    """
    labels = [feature.label for feature in features if feature.label is not None]
    if labels and np.ptp(labels):
        return bool(np.std(outputs) <= 0.05 * np.std(labels))
    return bool(np.ptp(outputs) <= 1e-3 * np.abs(outputs).max())


def _equal_vectors(features, outputs, cls_last=False):
    if issparse(outputs[0]):
        vectors = vstack(outputs, format="csr")
        return float((vectors.max(axis=0) - vectors.min(axis=0)).max()) < 1e-3
    return float(np.ptp(np.concatenate(outputs), axis=0).max()) < 1e-3


def _equal_token_vectors(features, outputs, cls_last=False):
    """Compares the first tokens, which all texts have."""
    return _equal_vectors(features, [tokens[:1] for tokens in outputs])


def _one_tag(features, outputs, cls_last=False):
    """Compares tags at the labeled positions, or without labels those of the text's tokens."""
    text = slice(0, -2) if cls_last else slice(1, -1)
    tags = [
        output[text if feature.label is None else feature.label != NO_LABEL].argmax(-1)
        for feature, output in zip(features, outputs, strict=True)
    ]
    return len(np.unique(np.concatenate(tags))) == 1


def _no_spans(features, outputs, cls_last=False):
    """Returns whether every span is at [CLS], which means no answer anywhere."""
    return all(
        np.all(logits.argmax(axis=0) == (len(logits) - 1 if cls_last else 0)) for logits in outputs
    )


class InTransformers(NamedTuple):
    """How transformers, or for retrieval sentence-transformers, stores and applies a head.

    Attributes:
      class_suffix: the end of its class, after the name of the family; "": the encoder alone.
      pipeline: what the hub calls the task.
      loader: what loads the model: "pipeline", or a class.
      problem_type: the key of `config.json` that selects what the class predicts; "": it has none.
      labels: those of a class that has no names for them; empty: the head's own are stored.
    """

    class_suffix: str
    pipeline: str
    loader: str = "pipeline"
    problem_type: str = ""
    labels: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Head:
    """Everything that distinguishes one kind of head from the others.

    Attributes:
      name: the name under which checkpoints store it: for a head elsewhere, the dotted name of the
        module that offers it as `HEAD`.
      predicts: what one output means: "class", "label_set", "value", "choice", "tag" (a class for
        each position), "span", "vector", "sparse_vector" or "token_vectors". The methods of a
        loaded model follow from it.
      loss: (outputs of the model, rows) -> float32 loss of each label in nats, with the shape
        of `label_weights`, and any value where the weight is 0; None if there is a `batch_loss`.
      batch_loss: (outputs `[examples, outputs of an example, size]`, rows of these examples) -> the
        loss, summed over them, of a batch whose examples are compared with each other. Outputs of
        positions are `[examples, sequences, positions, size]`, 0 after each sequence. The rows are
        their "labels", "weights" and, if there is a teacher, "teacher_outputs"; beside them are the
        number of updates before this one, "step", and of all updates, "num_steps".
      takes_part: whether `batch_loss` takes `part`, as in `losses.in_batch`, so that each device
        computes one; otherwise each computes the whole.
      takes_guide: whether `batch_loss` needs the vectors of a teacher.
      soft_loss: (outputs, a teacher's outputs, rows, temperature) -> float32 loss like `loss`; None
        if it cannot learn from a teacher.
      module: (model config, number of labels, plan=..., options) -> its Flax module, which has a
        `config` and maps a batch to outputs. Its parameters are "encoder" and below "head".
      pretrained_modules: other modules, which start from those of pre-training and must be there.
      lstm_module: the module with a BiLSTM between encoder and dense layer; None: there is none.
      options: names of the module's fields that are stored in the settings.
      input_kind: "pooled" (`Encoder.pool`), "sequences" or "positions": each gives one output.
      label_layout: layout of the labels in rows.
      tokens_per_slot: a packed row has one slot for a feature per this many tokens of a sequence;
        larger where the outputs of a slot are large.
      is_collapsed: (features, outputs, whether [CLS] is the last token) -> whether all predictions
        are the same, as in a failed run.
      trains_encoder: False if the encoder is frozen.
      class_weights: weight of each class in the mean over labels; if empty, all are equal.
      global_tokens: which tokens are global, in an architecture that has such (Longformer): one of
        its `GLOBAL_TOKENS`. They are those of transformers' class.
      task: the file in `tasks/` that reads its examples where the checkpoint names none.
      scores: names of its scores, the first of which selects a checkpoint; empty: the task's own.
      transformers: None if transformers has no class for it.
    """

    name: str
    predicts: str
    loss: Callable[[jax.Array, dict], jax.Array] | None
    batch_loss: Callable[..., jax.Array] | None = None
    takes_part: bool = False
    takes_guide: bool = False
    soft_loss: Callable[[jax.Array, jax.Array, dict, float], jax.Array] | None = None
    module: Callable[..., nn.Module] = PooledModel
    pretrained_modules: tuple[str, ...] = ()
    lstm_module: Callable[..., nn.Module] | None = None
    options: tuple[str, ...] = ()
    input_kind: str = "pooled"
    label_layout: LabelLayout = dataclasses.field(default=LabelLayout())
    tokens_per_slot: int = 8
    is_collapsed: Callable[[Sequence[ModelInput], Outputs, bool], bool] = _one_class
    trains_encoder: bool = True
    class_weights: tuple[float, ...] = ()
    global_tokens: str = "none"
    task: str = ""
    scores: tuple[str, ...] = ()
    transformers: InTransformers | None = None

    def feature_output(self, outputs: np.ndarray) -> np.ndarray | csr_array:
        """Maps the outputs at a feature's sequences or positions to its entry in `Outputs`."""
        if self.predicts == "sparse_vector":
            return csr_array(outputs)
        return outputs.ravel() if self.input_kind == "pooled" else outputs


def find_head(settings: Mapping) -> Head:
    """Returns the head that the settings of a checkpoint describe.

    It is one of `HEADS`, or the `HEAD` of a module elsewhere, which must have been imported, as a
    checkpoint must not run code of its choice. Raises ValueError.
    """
    name = settings["task"]
    if name not in HEADS and "." not in name:
        expected = f"expected {', '.join(HEADS)}, or the dotted name of a module with HEAD"
        raise ValueError(f"there is no head for {name!r}: {expected}")
    head = HEADS.get(name) or import_part("bert_jax.model", name, "HEAD", only_imported=True).HEAD
    if head is MULTIPLE_CHOICE and "max_query_length" in settings:
        head = CROSS_ENCODER
    return with_lstm(head) if head.lstm_module and settings.get("lstm_size") else head


def make_model(config, head_settings: Mapping, plan: ExecutionPlan = ExecutionPlan()) -> nn.Module:
    """Builds the model with the head that settings describe: its name ("task"), labels, options.

    `config` is the model config.
    """
    head = find_head(head_settings)
    options = {name: head_settings[name] for name in head.options if name in head_settings}
    if hasattr(config, "global_tokens"):
        config = dataclasses.replace(config, global_tokens=head.global_tokens)
    return head.module(config, len(head_settings["labels"]), plan=plan, **options)


def with_lstm(head: Head) -> Head:
    """Returns the variant of a head that has an `lstm_module`; transformers has no class for it."""
    return dataclasses.replace(
        head,
        module=head.lstm_module,
        lstm_module=None,
        options=(*head.options, "lstm_size"),
        transformers=None,
    )


def label_weights(head: Head, rows: dict[str, jax.Array]) -> jax.Array:
    """Returns float32 weights of the labels: 0 where there is no label, else 1 or the class weight.

    The loss of a batch is the mean with these weights: over examples, or for tagging over words.
    """
    weights = rows["weights"]
    if head.label_layout.per_position:
        weights = (rows["labels"] != NO_LABEL).astype(jnp.float32)
    if head.class_weights:
        weights *= jnp.asarray(head.class_weights)[jnp.maximum(rows["labels"], 0)]
    return weights


def _classification_loss(outputs, rows):
    return cross_entropy(outputs, rows["labels"])[0]


def _multi_label_loss(outputs, rows, positive_weights=()):
    """Averages the binary cross-entropy of each label's sigmoid over the labels.

    `positive_weights` weight the term of a positive label, as `pos_weight` of PyTorch's
    `BCEWithLogitsLoss`.
    """
    losses = jax.nn.softplus(outputs) - outputs * rows["labels"]
    if positive_weights:
        losses *= jnp.where(rows["labels"] > 0, jnp.asarray(positive_weights), 1)
    return jnp.mean(losses, axis=-1)


def _choice_loss(outputs, rows):
    scores = outputs[..., 0].reshape(*rows["labels"].shape, -1)  # [B, examples, choices]
    return cross_entropy(scores, rows["labels"])[0]


def span_logits(outputs: jax.Array, rows: dict[str, jax.Array]) -> jax.Array:
    """Returns the logits of a span's first and last position for each sequence: `[B, S, 2, L]`.

    `outputs` are `[B, L, 2]`. Positions of other sequences get the minimum float32.
    """
    position = jnp.arange(outputs.shape[1])[None, None]
    start, _, end = jnp.moveaxis(rows["sequence_bounds"], -1, 0)
    inside = (position >= start[..., None]) & (position < end[..., None])  # [B, S, L]
    outputs = jnp.swapaxes(outputs, 1, 2)[:, None]
    return jnp.where(inside[:, :, None], outputs, jnp.finfo(jnp.float32).min)


def _span_loss(outputs, rows):
    """Averages two losses over the sequence's own positions: of the span's first and last token."""
    return jnp.mean(cross_entropy(span_logits(outputs, rows), rows["labels"])[0], axis=-1)


def _in_batch_loss(outputs, rows, **part):
    return in_batch_loss(outputs, rows["labels"], rows["weights"], **part)


def _late_interaction_loss(outputs, rows, **part):
    return late_interaction_loss(outputs, rows["labels"], rows["weights"], **part)


def _sparse_in_batch_loss(outputs, rows, **part):
    return in_batch_loss(outputs, rows["labels"], rows["weights"], temperature=1.0, **part)


def _regression_loss(outputs, rows, target_std=1.0):
    return jnp.square((outputs[..., 0] - rows["labels"]) / target_std)


def _soft_regression_loss(outputs, teacher, rows, temperature, target_std=1.0):
    """Takes the teacher's values, in the units of the labels, as labels."""
    return _regression_loss(outputs, rows | {"labels": teacher[..., 0]}, target_std)


def _soft_class_loss(outputs, teacher, rows, temperature):
    # The outputs for choices, one per sequence, become classes of their example.
    return kl_divergence(outputs.reshape(teacher.shape), teacher, temperature)


def _soft_span_loss(outputs, teacher, rows, temperature):
    logits = (span_logits(each, rows) for each in (outputs, teacher))
    return jnp.mean(kl_divergence(*logits, temperature), axis=-1)


def with_target_std(head: Head, target_std: float) -> Head:
    """Returns the head of a regression with the loss of standardized values and labels.

    Raises ValueError for a head with another loss, which this one would replace.
    """
    if head.loss is not _regression_loss:
        raise ValueError(
            f"the head {head.name} has a loss of its own, which cannot be given standardized "
            "labels: set config.data.raw_targets=True"
        )
    return dataclasses.replace(
        head,
        loss=functools.partial(_regression_loss, target_std=target_std),
        soft_loss=functools.partial(_soft_regression_loss, target_std=target_std),
    )


def with_positive_weights(head: Head, positive_weights: tuple[float, ...]) -> Head:
    """Returns a multi-label head whose loss weights the positive term of each label.

    Raises ValueError for a head with another loss, which this one would replace.
    """
    if head.loss is not _multi_label_loss:
        raise ValueError(
            f"the head {head.name} has a loss of its own, which cannot be given "
            "config.data.positive_weights: leave it empty"
        )
    loss = functools.partial(_multi_label_loss, positive_weights=positive_weights)
    return dataclasses.replace(head, loss=loss)


TARGET_SCALE = ("target_mean", "target_std")
"""Options of the head of a regression that was trained on standardized labels."""

CLASSIFICATION = Head(
    "classification",
    predicts="class",
    loss=_classification_loss,
    soft_loss=_soft_class_loss,
    module=functools.partial(PooledModel, is_classifier=True),
    lstm_module=functools.partial(PooledLstmModel, is_classifier=True),
    global_tokens="first",
    task="text_classification",
    scores=("accuracy", "macro_f1"),
    transformers=InTransformers(
        "ForSequenceClassification",
        "text-classification",
        problem_type="single_label_classification",
    ),
)
MULTI_LABEL = Head(
    "multi_label",  # Any number of labels per text.
    predicts="label_set",
    loss=_multi_label_loss,
    module=CLASSIFICATION.module,
    lstm_module=CLASSIFICATION.lstm_module,
    label_layout=LabelLayout(dtype=np.float32),  # Tasks set its shape.
    is_collapsed=_one_label_set,
    global_tokens=CLASSIFICATION.global_tokens,
    task="text_classification",
    scores=("micro_f1", "macro_f1"),
    transformers=InTransformers(
        "ForSequenceClassification",
        "text-classification",
        problem_type="multi_label_classification",
    ),
)
REGRESSION = Head(
    "regression",
    predicts="value",
    loss=_regression_loss,
    soft_loss=_soft_regression_loss,
    module=CLASSIFICATION.module,
    lstm_module=CLASSIFICATION.lstm_module,
    options=TARGET_SCALE,
    label_layout=LabelLayout(dtype=np.float32),
    is_collapsed=_one_value,
    global_tokens=CLASSIFICATION.global_tokens,
    task="text_classification",
    scores=("pearson", "spearman", "r2"),
    transformers=InTransformers(
        "ForSequenceClassification", "text-classification", problem_type="regression"
    ),
)
MULTIPLE_CHOICE = Head(
    "multiple_choice",
    predicts="choice",
    loss=_choice_loss,
    soft_loss=_soft_class_loss,
    lstm_module=PooledLstmModel,
    global_tokens="second_text",
    task="multiple_choice",
    scores=("accuracy",),
    transformers=InTransformers(
        "ForMultipleChoice",
        "multiple-choice",
        "AutoModelForMultipleChoice.from_pretrained",
        labels=("score",),
    ),
)
# A multiple choice of passages, which are scored one by one: its settings have "max_query_length".
CROSS_ENCODER = dataclasses.replace(
    MULTIPLE_CHOICE,
    global_tokens=CLASSIFICATION.global_tokens,
    task="retrieval",
    scores=(),
    transformers=InTransformers(
        "ForSequenceClassification", "text-ranking", "CrossEncoder", "regression"
    ),
)
TAGGING = Head(
    "tagging",
    predicts="tag",
    loss=_classification_loss,
    soft_loss=_soft_class_loss,
    module=PositionModel,
    lstm_module=PositionLstmModel,
    input_kind="positions",
    label_layout=LabelLayout(per_position=True),
    is_collapsed=_one_tag,
    task="tagging",
    transformers=InTransformers("ForTokenClassification", "token-classification"),
)
FEATURE_BASED = dataclasses.replace(
    TAGGING,
    name="feature_based",
    soft_loss=None,
    module=FeatureBasedTagger,
    lstm_module=None,
    options=("features", "lstm_size"),
    trains_encoder=False,
    transformers=None,
)
SPAN = Head(
    "span",
    predicts="span",
    loss=_span_loss,
    soft_loss=_soft_span_loss,
    module=functools.partial(PositionModel, has_dropout=False),
    lstm_module=functools.partial(PositionLstmModel, has_dropout=False),
    input_kind="positions",
    label_layout=LabelLayout(shape=(2,), holds_positions=True),
    is_collapsed=_no_spans,
    global_tokens="first_text",
    task="squad",
    transformers=InTransformers(
        "ForQuestionAnswering",
        "question-answering",
        "AutoModelForQuestionAnswering.from_pretrained",
        labels=("start", "end"),
    ),
)
EMBEDDING = Head(
    "embedding",
    predicts="vector",
    loss=None,
    batch_loss=_in_batch_loss,
    takes_part=True,
    module=vector_model,
    options=("pooling", "projections", "normalize", "truncate_dim"),
    input_kind="sequences",
    label_layout=LabelLayout(is_ragged=True),  # Tasks set its shape.
    is_collapsed=_equal_vectors,
    task="retrieval",
    transformers=InTransformers("", "sentence-similarity", "SentenceTransformer"),
)
SPARSE_EMBEDDING = dataclasses.replace(
    EMBEDDING,
    name="sparse_embedding",
    predicts="sparse_vector",
    batch_loss=_sparse_in_batch_loss,
    module=sparse_model,
    pretrained_modules=("mlm",),
    options=("pooling", "activation", "top_k"),
    tokens_per_slot=32,
    transformers=InTransformers("", "feature-extraction", "SparseEncoder"),
)

MULTI_VECTOR = dataclasses.replace(
    EMBEDDING,
    name="multi_vector",
    predicts="token_vectors",
    batch_loss=_late_interaction_loss,
    module=multi_vector_model,
    options=("projections", "normalize", "query_expansion"),
    input_kind="positions",
    is_collapsed=_equal_token_vectors,
    transformers=InTransformers("", "sentence-similarity", "MultiVectorEncoder"),
)

_POOLED = (CLASSIFICATION, MULTI_LABEL, REGRESSION, MULTIPLE_CHOICE)
_VECTORS = (EMBEDDING, SPARSE_EMBEDDING, MULTI_VECTOR)
HEADS = {head.name: head for head in (*_POOLED, TAGGING, FEATURE_BASED, SPAN, *_VECTORS)}
"""The heads by the name that checkpoints store; `find_head` also finds their variants."""
