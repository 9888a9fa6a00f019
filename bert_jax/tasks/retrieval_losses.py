"""The losses of bi-encoders and cross-encoders, by the name in `config.loss.name`."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from bert_jax.data.features import LabelLayout
from bert_jax.losses import in_batch, lists, pairs, triplets
from bert_jax.losses.similarity import own_dot_products, own_max_similarities
from bert_jax.losses.wrappers import matryoshka, quadratic_warmup, splade
from bert_jax.model.heads import Head
from bert_jax.model.pooling import tokens_of_sequences
from bert_jax.runtime.config_fields import Bounds


@dataclasses.dataclass(frozen=True)
class TrainingLoss:
    """A loss, and what it needs.

    Attributes:
      function: (vectors `[examples, texts, size]`, or a cross-encoder's scores `[examples, texts]`,
        labels, weights, settings by name) -> the sum over the examples, as in `bert_jax.losses`; a
        loss with a guide takes its vectors as `guide_vectors`, and one that `takes_part` a `part`.
      labels: what the label of an example is. "passages": the numbers of its passages, as
        `in_batch` describes them; "first": the index of its positive, which is 0; "relevance": the
        grade of each passage; "teacher_scores": a teacher's score of each; "pair": the number with
        a pair of texts; "class": the index of the class of a text.
      settings: the fields of `config.loss` that it takes, and the "temperature" of
        `config.similarity`.
      compares: whether it compares the examples of a batch.
      takes_part: whether it can be computed in parts, as in `in_batch`.
      takes_guide: whether it needs the vectors of `config.teacher`.
      min_negatives: the fewest negatives per query.
      label_bounds: of the label of a pair; None: any number.
      is_binary: whether the label of a pair must be 0 or 1.
    """

    function: Callable[..., jax.Array]
    labels: str
    settings: tuple[str, ...] = ()
    compares: bool = False
    takes_part: bool = False
    takes_guide: bool = False
    min_negatives: int = 0
    label_bounds: Bounds | None = None
    is_binary: bool = False

    def check_label(self, label: float, location: str) -> None:
        """Raises ValueError if the label of a pair is out of the range of the loss."""
        if self.is_binary and label not in (0, 1):
            raise ValueError(f"{location}: the label {label:g}: expected 0 or 1 for this loss")
        if self.label_bounds and not self.label_bounds.contain(label):
            bounds = self.label_bounds.describe(label)
            raise ValueError(f"{location}: the label {label:g}: expected {bounds} for this loss")


def _triplet(vectors, labels, weights, **settings):
    return triplets.triplet_loss(vectors, weights, **settings)


def _binary_cross_entropy(scores, labels, weights, **settings):
    return lists.binary_cross_entropy_loss(scores, labels[:, None], weights, **settings)


def _guided_in_batch(vectors, labels, weights, guide_vectors, **settings):
    return in_batch.guided_in_batch_loss(vectors, guide_vectors, labels, weights, **settings)


def _of_own_passages(loss):
    """Returns the loss of a bi-encoder that compares each query with its own passages."""

    def of_vectors(vectors, labels, weights, **settings):
        return loss(own_dot_products(vectors), labels, weights, **settings)

    return of_vectors


def _of_own_tokens(loss):
    """Returns `_of_own_passages` for a vector of each token."""

    def of_vectors(vectors, labels, weights, max_query_tokens, **settings):
        return loss(own_max_similarities(vectors, max_query_tokens), labels, weights, **settings)

    return of_vectors


IN_BATCH = TrainingLoss(
    in_batch.in_batch_loss,
    "passages",
    ("temperature", "symmetric"),
    compares=True,
    takes_part=True,
)
LIST_SOFTMAX = TrainingLoss(lists.list_softmax_loss, "first", min_negatives=1)
LOSSES: Mapping[str, Mapping[str, TrainingLoss]] = {
    "bi_encoder": {
        "in_batch": IN_BATCH,
        "guided_in_batch": TrainingLoss(
            _guided_in_batch,
            "passages",
            ("temperature", "margin", "relative_margin"),
            compares=True,
            takes_guide=True,
        ),
        "triplet": TrainingLoss(_triplet, "first", ("margin", "distance"), min_negatives=1),
        "margin_mse": TrainingLoss(
            _of_own_passages(lists.margin_mse_loss), "teacher_scores", min_negatives=1
        ),
        "score_divergence": TrainingLoss(
            _of_own_passages(lists.score_divergence_loss),
            "teacher_scores",
            ("temperature", "teacher_temperature"),
            min_negatives=1,
        ),
        "cosent": TrainingLoss(pairs.cosent_loss, "pair", ("temperature",), compares=True),
        "angle": TrainingLoss(pairs.angle_loss, "pair", ("temperature",), compares=True),
        "cosine_similarity": TrainingLoss(
            pairs.cosine_similarity_loss, "pair", label_bounds=Bounds(-1, 1)
        ),
        "contrastive": TrainingLoss(
            pairs.contrastive_loss, "pair", ("margin", "distance"), label_bounds=Bounds(0, 1)
        ),
        "online_contrastive": TrainingLoss(
            pairs.online_contrastive_loss,
            "pair",
            ("margin", "distance"),
            compares=True,
            is_binary=True,
        ),
        "batch_hard_triplet": TrainingLoss(
            triplets.batch_hard_triplet_loss,
            "class",
            ("margin", "distance", "soft_margin"),
            compares=True,
        ),
    },
    "cross_encoder": {
        "list_softmax": LIST_SOFTMAX,
        "binary_cross_entropy": TrainingLoss(
            _binary_cross_entropy, "pair", ("positive_weight",), label_bounds=Bounds(0, 1)
        ),
        "list_net": TrainingLoss(lists.list_net_loss, "relevance", min_negatives=1),
        "lambda": TrainingLoss(
            lists.lambda_loss,
            "relevance",
            ("weighting", "k"),
            compares=True,
            min_negatives=1,
        ),
        "margin_mse": TrainingLoss(lists.margin_mse_loss, "teacher_scores", min_negatives=1),
        "score_divergence": TrainingLoss(
            lists.score_divergence_loss,
            "teacher_scores",
            ("teacher_temperature",),
            min_negatives=1,
        ),
    },
}
"""The losses of each role, the default first."""

_DENSE = LOSSES["bi_encoder"]
MULTI_VECTOR_LOSSES: Mapping[str, TrainingLoss] = {
    "in_batch": dataclasses.replace(
        IN_BATCH, function=in_batch.late_interaction_loss, settings=("temperature",)
    ),
    "margin_mse": dataclasses.replace(
        _DENSE["margin_mse"], function=_of_own_tokens(lists.margin_mse_loss)
    ),
    "score_divergence": dataclasses.replace(
        _DENSE["score_divergence"], function=_of_own_tokens(lists.score_divergence_loss)
    ),
}
"""The losses of a bi-encoder with a vector for each token, which compare texts by MaxSim.

They also take `max_query_tokens`, the maximum length of a query."""
_OF_SPARSE = ("triplet", "margin_mse", "score_divergence", "cosent", "angle", "cosine_similarity")
SPARSE_LOSSES: Mapping[str, TrainingLoss] = {
    "in_batch": dataclasses.replace(
        IN_BATCH, function=functools.partial(in_batch.in_batch_loss, temperature=1.0)
    ),
    **{name: _DENSE[name] for name in _OF_SPARSE},
}
"""The losses of a bi-encoder with sparse vectors, to which `splade` adds its regularizers.

Those that sentence-transformers has for them: with dot products, where the loss does not say
otherwise."""
SPLADE_FIELDS = ("query_flops_weight", "passage_flops_weight", "flops_warmup_fraction")
"""Fields of `config.loss` that belong to `splade`, whatever the loss."""
VECTORS = ("dense", "sparse", "multi_vector")
"""The kinds of vectors of a bi-encoder, `config.similarity.vectors`."""

CHOICES = {"distance": triplets.DISTANCES, "weighting": lists.WEIGHTINGS}


def find_loss(config: ConfigDict) -> TrainingLoss:
    """Returns the loss that `config.loss` names. Raises ValueError if a field is invalid.

    That is also the case for a field that this loss does not use.
    """
    role, name, vectors = config.data.role, config.loss.name, config.similarity.vectors
    if vectors not in VECTORS:
        raise ValueError(f"config.similarity.vectors={vectors}: expected {' or '.join(VECTORS)}")
    if vectors != "dense" and role != "bi_encoder":
        raise ValueError(f"config.similarity.vectors={vectors}: only a bi_encoder has vectors")
    by_vectors = {"sparse": SPARSE_LOSSES, "multi_vector": MULTI_VECTOR_LOSSES}
    losses = by_vectors.get(vectors, LOSSES[role])
    name = name or next(iter(losses))
    if name not in losses:
        why = f"config.data.role is {role}, and config.similarity.vectors {vectors}"
        raise ValueError(f"config.loss.name={name}: expected one of {', '.join(losses)}, as {why}")
    loss = losses[name]
    for field, value in _settings(config).items():
        if value is not None and field not in loss.settings:
            users = ", ".join(each for each in losses if field in losses[each].settings)
            used = f", only by {users}" if users else ""
            raise ValueError(
                f"config.{_path(field)}={value} is not used by the loss {name}{used}: leave it out"
            )
        if value is not None and value not in CHOICES.get(field, (value,)):
            expected = " or ".join(CHOICES[field])
            raise ValueError(f"config.{_path(field)}={value}: expected {expected}")
    _check_matryoshka(config)
    _check_splade(config)
    return loss


def _settings(config: ConfigDict) -> dict[str, object]:
    """Returns the settings of all losses; None for those that are not set."""
    others = ("name", "matryoshka_sizes", "matryoshka_weights", *SPLADE_FIELDS)
    settings = {name: value for name, value in config.loss.items() if name not in others}
    return settings | {"temperature": config.similarity.temperature}


def _path(setting: str) -> str:
    return f"{'similarity' if setting == 'temperature' else 'loss'}.{setting}"


def _check_matryoshka(config: ConfigDict) -> None:
    """Raises ValueError if the sizes of truncated vectors, or their weights, are invalid."""
    sizes, weights = tuple(config.loss.matryoshka_sizes), tuple(config.loss.matryoshka_weights)
    given = f"config.loss.matryoshka_sizes={sizes}"
    if not sizes:
        if weights:
            raise ValueError(f"config.loss.matryoshka_weights={weights}: there are no sizes")
        return
    is_dense = config.data.role == "bi_encoder" and config.similarity.vectors == "dense"
    if not is_dense or not config.similarity.normalize:
        expected = "a bi_encoder with similarity.vectors=dense and similarity.normalize=True"
        raise ValueError(f"{given}: truncated vectors are normalized: expected {expected}")
    if not all(isinstance(each, int) and each > 0 for each in sizes) or len({*sizes}) < len(sizes):
        raise ValueError(f"{given}: expected different whole numbers above 0")
    if weights and (len(weights) != len(sizes) or not all(Bounds(0).contain(w) for w in weights)):
        expected = f"{len(sizes)} numbers, one of at least 0 for each size"
        raise ValueError(f"config.loss.matryoshka_weights={weights}: expected {expected}")


def _check_splade(config: ConfigDict) -> None:
    """Raises ValueError if a regularizer is set for dense vectors, or not set for sparse ones."""
    is_sparse = config.similarity.vectors == "sparse"
    for name in SPLADE_FIELDS:
        value = config.loss[name]
        if not is_sparse and value is not None:
            expected = "only by those with similarity.vectors=sparse: leave it out"
            raise ValueError(f"config.loss.{name}={value} is not used by this loss, {expected}")
        if is_sparse and value is None and name != "flops_warmup_fraction":
            raise ValueError(
                f"config.loss.{name} is not set: set the weight of the FLOPS regularizer, such as "
                "0.001 (0: none), or use retrieval.py:bi_encoder,splade"
            )


def head_with_loss(head: Head, loss: TrainingLoss, config: ConfigDict, longest: int) -> Head:
    """Returns `head` with the loss that `config` describes, and the layout of its labels.

    `longest` is the number of entries of the longest label.
    """
    if loss is LIST_SOFTMAX:
        return head  # Its own loss.
    given = {name: value for name, value in _settings(config).items() if value is not None}
    is_per_token = head.predicts == "token_vectors"
    if is_per_token:
        given["max_query_tokens"] = config.data.max_query_length
    function = functools.partial(loss.function, **given)
    if sizes := config.loss.matryoshka_sizes:
        function = matryoshka(function, sizes, config.loss.matryoshka_weights or [1] * len(sizes))
    is_sparse = config.similarity.vectors == "sparse"
    compares = loss.compares or is_sparse  # FLOPS are those of all texts of a batch.
    if is_sparse:
        weights = config.loss.query_flops_weight, config.loss.passage_flops_weight
        function = splade(function, *weights)
    warmup_fraction = config.loss.flops_warmup_fraction
    warmup_fraction = 1 / 3 if warmup_fraction is None else warmup_fraction

    def batch_loss(outputs, rows, **part):
        if head.predicts == "choice":
            outputs = outputs[..., 0]
        others = {"guide_vectors": rows["teacher_outputs"]} if loss.takes_guide else {}
        if is_sparse:
            others = {"scale": quadratic_warmup(rows["step"], rows["num_steps"], warmup_fraction)}
        return function(outputs, rows["labels"], rows["weights"], **others, **part)

    def token_losses(vectors, bounds, labels):
        """Returns the loss of each example of one row, computed one by one to save memory."""
        max_tokens = len(vectors) // bounds.shape[1]

        @jax.checkpoint
        def example_loss(example):
            (start, _, end), label = jnp.moveaxis(example[0], -1, 0), example[1]
            tokens = tokens_of_sequences(vectors, start, end - start, max_tokens)
            return batch_loss(tokens[None], {"weights": jnp.ones(1), "labels": label[None]})

        return jax.lax.map(example_loss, (bounds, labels))

    def example_losses(outputs, rows):
        """Returns the loss of each example of packed rows, `[rows, examples]`."""
        shape = rows["labels"].shape[:2]
        if is_per_token:
            bounds = rows["sequence_bounds"].reshape(*shape, -1, 3)
            return jax.vmap(token_losses)(outputs, bounds, rows["labels"])
        examples = outputs.reshape(-1, 1, outputs.shape[1] // shape[1], outputs.shape[-1])
        labels = rows["labels"].reshape(-1, 1, *rows["labels"].shape[2:])
        one = {"weights": jnp.ones(1)}
        losses = jax.vmap(lambda output, label: batch_loss(output, one | {"labels": label}))
        return losses(examples, labels).reshape(shape)

    return dataclasses.replace(
        head,
        loss=None if compares else example_losses,
        batch_loss=batch_loss if compares else None,
        takes_part=loss.takes_part,
        takes_guide=loss.takes_guide,
        soft_loss=None,
        label_layout=LAYOUTS[loss.labels](longest),
    )


LAYOUTS: Mapping[str, Callable[[int], LabelLayout]] = {
    "passages": lambda longest: LabelLayout(shape=(longest,), is_ragged=True),
    "first": lambda longest: LabelLayout(),
    "relevance": lambda longest: LabelLayout(dtype=np.float32, shape=(longest,)),
    "teacher_scores": lambda longest: LabelLayout(dtype=np.float32, shape=(longest,)),
    "pair": lambda longest: LabelLayout(dtype=np.float32),
    "class": lambda longest: LabelLayout(),
}
"""How labels are laid out in rows, given the number of entries of the longest one."""
