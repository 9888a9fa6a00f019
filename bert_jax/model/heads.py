"""The heads of fine-tuning tasks (Devlin et al., 2018, section 4), each described by one `Head`.

A head is one dense layer, `head` in the parameter tree; "embedding" has none and returns a vector
per sequence, "feature_based" is a BiLSTM on a frozen encoder. Rows may hold several sequences;
outputs and losses are per sequence, so that packing changes no result.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.data.features import NO_LABEL, LabelLayout, ModelInput, unpack_rows
from bert_jax.model.dropout import Dropout, as_dropout, dropout_at
from bert_jax.model.encoder import Encoder
from bert_jax.model.execution import Execution
from bert_jax.model.feature_based import BiLstm, FeatureBasedTagger
from bert_jax.model.layers import cross_entropy, gather_positions
from bert_jax.model.pooling import pool_tokens

Outputs = Sequence[np.ndarray]
"""A head's float32 output for each feature: classification and multi-label `[classes]`, regression
`[1]`, multiple choice `[choices]`, tagging `[length, tags]`, span `[length, 2]`, embedding
`[sequences, H]`."""


def _one_class(features, outputs):
    if outputs[0].size == 1:  # A cross-encoder scores passages one by one.
        return _equal_vectors(features, outputs)
    return len({int(scores.argmax()) for scores in outputs}) == 1


def _one_label_set(features, outputs):
    return len(np.unique(np.stack(outputs) > 0, axis=0)) == 1


def _one_value(features, outputs):
    """Returns whether the outputs vary by at most 5 % of the labels' standard deviation.

    Such outputs explain at most 0.25 % of the labels' variance. Without labels, or if all are
    equal, returns whether the range of the outputs is at most 1/1000 of the largest one.
    """
    labels = [feature.label for feature in features if feature.label is not None]
    if labels and np.ptp(labels):
        return bool(np.std(outputs) <= 0.05 * np.std(labels))
    return bool(np.ptp(outputs) <= 1e-3 * np.abs(outputs).max())


def _equal_vectors(features, outputs):
    return float(np.ptp(np.concatenate(outputs), axis=0).max()) < 1e-3


def _one_tag(features, outputs):
    """Compares tags at the labeled positions, or without labels those between [CLS] and [SEP]."""
    tags = [
        output[slice(1, -1) if feature.label is None else feature.label != NO_LABEL].argmax(-1)
        for feature, output in zip(features, outputs, strict=True)
    ]
    return len(np.unique(np.concatenate(tags))) == 1


def _no_spans(features, outputs):
    """Returns whether every span is at [CLS], which means no answer anywhere."""
    return not any(logits.argmax(axis=0).any() for logits in outputs)


@dataclasses.dataclass(frozen=True)
class Head:
    """Everything that distinguishes one kind of head from the others.

    Attributes:
      name: the name under which checkpoints store it.
      loss: (outputs of the model, rows) -> float32 loss of each label in nats, with the shape
        of `label_weights`, and any value where the weight is 0; None if there is a `batch_loss`.
      input_kind: "pooled" (`Encoder.pool`), "sequences" or "positions": each gives one output.
      label_layout: layout of the labels in rows.
      is_collapsed: (features, outputs) -> whether all predictions are the same, as in a failed run.
      batch_loss: loss of a batch whose examples are compared with each other: `in_batch_loss`.
      has_dropout: whether the input of the dense layer has dropout, as in the released code.
      is_classifier: whether it classifies sequences: in some families dropout then also precedes
        the pooler (`BertConfig.has_pooler_input_dropout`).
      trains_encoder: False if the encoder is frozen.
      module: its Flax module; None for `TaskModel`.
      options: names of the module's fields that are stored in the settings.
      class_weights: weight of each class in the mean over labels; if empty, all weigh the same.
    """

    name: str
    loss: Callable[[jax.Array, dict], jax.Array] | None
    input_kind: str = "pooled"
    label_layout: LabelLayout = dataclasses.field(default=LabelLayout())
    is_collapsed: Callable[[Sequence[ModelInput], Outputs], bool] = _one_class
    batch_loss: Callable[..., jax.Array] | None = None
    has_dropout: bool = True
    is_classifier: bool = False
    trains_encoder: bool = True
    module: type[nn.Module] | None = None
    options: tuple[str, ...] = ("lstm_size",)
    class_weights: tuple[float, ...] = ()

    def feature_output(self, outputs: np.ndarray) -> np.ndarray:
        """Maps the outputs at a feature's sequences or positions to its entry in `Outputs`."""
        return outputs.ravel() if self.input_kind == "pooled" else outputs


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "identity": lambda x: x,
    "tanh": jnp.tanh,
    "relu": nn.relu,
    "gelu": functools.partial(nn.gelu, approximate=False),
    "sigmoid": nn.sigmoid,
    "silu": nn.silu,
}
"""Activations of a `Projection`."""


class Projection(NamedTuple):
    """A dense layer of `size` outputs, and an activation; "Dense" in sentence-transformers."""

    size: int
    has_bias: bool
    activation: str


class TaskModel(nn.Module):
    """Encoder and head.

    Attributes:
      num_outputs: number of classes or tags; 2 for a span, 1 for a value or a choice.
      pooling: one or several of `POOLINGS`, whose vectors are joined, or "pooler".
      projections: dense layers of the pooled vector, from sentence-transformers.
      normalize: whether embeddings have length 1, so that dot products are cosines.
      temperature: divides the dot products before the softmax in training.
      lstm_size: units per direction of a BiLSTM between encoder and head; 0: none.
      target_mean, target_std: mean and standard deviation of the labels that a regression was
        trained on. The dense layer computes standardized values; the outputs are scaled back.
      execution: how the encoder runs.
    """

    config: object
    task_head: Head
    num_outputs: int
    pooling: str | tuple[str, ...] = "mean"
    projections: tuple[Projection, ...] = ()
    normalize: bool = True
    temperature: float = 0.05
    lstm_size: int = 0
    target_mean: float = 0.0
    target_std: float = 1.0
    execution: Execution = Execution()

    @property
    def vector_size(self) -> int:
        """The size of an embedding."""
        if self.projections:
            return self.projections[-1].size
        is_joined = not isinstance(self.pooling, str)
        return (len(self.pooling) if is_joined else 1) * self.config.hidden_size

    def setup(self):
        if self.config.causal and "cls" in self.pooling:
            reason = "[CLS] of a left-to-right model sees no other token"
            raise ValueError(f"pooling is 'cls', but {reason}: choose 'mean'")
        self.encoder = Encoder(self.config, self.execution)
        if self.lstm_size:
            self.lstm = BiLstm(self.lstm_size)
        self.projection_layers = [
            nn.Dense(each.size, each.has_bias, dtype=jnp.float32, name=f"projection_{index}")
            for index, each in enumerate(self.projections)
        ]
        initializer = nn.initializers.truncated_normal(self.config.initializer_range)
        self.head = nn.Dense(self.num_outputs, dtype=jnp.float32, kernel_init=initializer)

    def __call__(
        self, rows: dict[str, jax.Array], *, dropout: Dropout | float | None = None
    ) -> jax.Array:
        """Returns float32 outputs: `[B, S, outputs]` if pooled, `[B, L, outputs]` per position.

        Embeddings are `[B, S, vector_size]`, 0 in unused slots. `rows` are those that `unpack_rows`
        takes; `dropout` is as in `Encoder`.
        """
        batch = unpack_rows(rows, self.config.causal)
        dropout = head_dropout = as_dropout(self, dropout, len(rows["tokens"]))
        head_rate = getattr(self.config, "classifier_dropout_rate", None)
        if dropout is not None and head_rate is not None:
            head_dropout = dropout._replace(rate=head_rate)
        positions = batch["pooled_positions"]
        is_pooled = self.task_head.input_kind == "pooled" or self.pooling == "pooler"
        read = positions if is_pooled and not self.lstm_size else None  # A BiLSTM reads all.
        x = self.encoder(batch, dropout, positions=read)
        if self.lstm_size:
            x = self.lstm(x, batch["sequence_ids"])
            x = gather_positions(x, positions) if is_pooled else x
        if is_pooled:
            if self._drops_pooler_input():
                x = dropout_at(head_dropout, "pooler", x)
            x = self.encoder.pool(x)
        if self.task_head.input_kind == "sequences":
            vectors = x
            if self.pooling != "pooler":
                poolings = (self.pooling,) if isinstance(self.pooling, str) else self.pooling
                vectors = pool_tokens(x, rows["sequence_bounds"], poolings)
            for layer, each in zip(self.projection_layers, self.projections, strict=True):
                vectors = ACTIVATIONS[each.activation](layer(vectors))
            squares = jnp.sum(vectors**2, axis=-1, keepdims=True)
            return vectors * jax.lax.rsqrt(squares + 1e-12) if self.normalize else vectors
        if self.task_head.has_dropout:
            x = dropout_at(head_dropout, "head", x)
        outputs = self.head(x)
        if (self.target_mean, self.target_std) != (0.0, 1.0):
            outputs = outputs * self.target_std + self.target_mean
        return outputs

    def _drops_pooler_input(self) -> bool:
        is_in_family = getattr(self.config, "has_pooler_input_dropout", False)
        return self.task_head.is_classifier and is_in_family


def make_model(config, head_settings: Mapping, execution: Execution = Execution()) -> nn.Module:
    """Builds the model with the head that settings describe: its name ("task"), labels, options.

    `config` is the configuration of an architecture.
    """
    head = HEADS[head_settings["task"]]
    options = {name: head_settings[name] for name in head.options if name in head_settings}
    # JSON has lists, which are not hashable.
    if not isinstance(options.get("pooling", ""), str):
        options["pooling"] = tuple(options["pooling"])
    if "projections" in options:
        options["projections"] = tuple(Projection(**each) for each in options["projections"])
    model = head.module or TaskModel
    return model(config, head, len(head_settings["labels"]), execution=execution, **options)


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


def _multi_label_loss(outputs, rows):
    """Averages the binary cross-entropy of each label's sigmoid over the labels."""
    return jnp.mean(jax.nn.softplus(outputs) - outputs * rows["labels"], axis=-1)


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


def in_batch_loss(
    vectors: jax.Array, passages: jax.Array, weights: jax.Array, temperature: float
) -> jax.Array:
    """Sums over queries -log softmax(similarities)[own passage], in nats: a float32 scalar.

    The softmax is over the passages of all examples (Karpukhin et al., 2020, section 3.2) without
    the others that answer the query: copies of its own passage, which occur if questions share a
    paragraph, and its other positives.

    Args:
      vectors: float32 `[examples, 1 + n, H]`, of a query, its passage and n - 1 hard negatives.
      passages: int32 `[examples, n + m]`, the numbers of these n passages, equal for equal ones,
        and of up to m others that answer the query; NO_LABEL in unused entries.
      weights: float32 `[examples]`, 0 for unused examples.
      temperature: divides the similarities.
    """
    queries, candidates = vectors[:, 0], vectors[:, 1:].reshape(-1, vectors.shape[-1])
    count = vectors.shape[1] - 1
    numbers, others = passages[:, :count].reshape(-1), passages[:, count:]
    scores = queries @ candidates.T / temperature
    own = jnp.sum(queries * vectors[:, 1], axis=-1, keepdims=True) / temperature
    positives = jnp.concatenate([passages[:, :1], others], axis=1)
    is_positive = jnp.any(numbers[:, None] == positives[:, None], axis=-1)
    excluded = is_positive | (jnp.repeat(weights, count) == 0)
    margins = jnp.where(excluded, jnp.finfo(jnp.float32).min, scores - own)
    # log(1 + sum of exp(margins)): unlike the softmax, it does not round a small loss to 0.
    return jnp.sum(jax.nn.softplus(jax.nn.logsumexp(margins, axis=-1)) * weights)


def _regression_loss(outputs, rows, target_std=1.0):
    return jnp.square((outputs[..., 0] - rows["labels"]) / target_std)


def with_target_std(head: Head, target_std: float) -> Head:
    """Returns the head of a regression with the loss of standardized values and labels."""
    loss = functools.partial(_regression_loss, target_std=target_std)
    return dataclasses.replace(head, loss=loss)


TARGET_SCALE = ("target_mean", "target_std")
"""Options of the head of a regression that was trained on standardized labels."""

CLASSIFICATION = Head("classification", _classification_loss, is_classifier=True)
REGRESSION = Head(
    "regression",
    _regression_loss,
    label_layout=LabelLayout(dtype=np.float32),
    is_collapsed=_one_value,
    is_classifier=True,
    options=("lstm_size", *TARGET_SCALE),
)
# Any number of labels per text. Tasks set the shape of `labels`.
MULTI_LABEL = dataclasses.replace(
    REGRESSION,
    name="multi_label",
    loss=_multi_label_loss,
    is_collapsed=_one_label_set,
    options=("lstm_size",),
)
MULTIPLE_CHOICE = Head("multiple_choice", _choice_loss)
TAGGING = Head(
    "tagging",
    _classification_loss,
    input_kind="positions",
    label_layout=LabelLayout(per_position=True),
    is_collapsed=_one_tag,
)
FEATURE_BASED = dataclasses.replace(
    TAGGING,
    name="feature_based",
    trains_encoder=False,
    module=FeatureBasedTagger,
    options=("features", "lstm_size"),
)
SPAN = Head(
    "span",
    _span_loss,
    input_kind="positions",
    label_layout=LabelLayout(shape=(2,), holds_positions=True),
    is_collapsed=_no_spans,
    has_dropout=False,
)
EMBEDDING = Head(
    "embedding",
    loss=None,
    batch_loss=in_batch_loss,
    input_kind="sequences",
    label_layout=LabelLayout(is_ragged=True),  # Tasks set its shape.
    is_collapsed=_equal_vectors,
    options=("pooling", "projections", "normalize", "temperature"),
)

_POOLED = (CLASSIFICATION, MULTI_LABEL, REGRESSION, MULTIPLE_CHOICE)
HEADS = {head.name: head for head in (*_POOLED, TAGGING, FEATURE_BASED, SPAN, EMBEDDING)}
