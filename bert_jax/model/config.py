"""The model config of BERT and of its descendants, and the published sizes by name."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

# Layers and hidden size of the published models: Devlin et al. (2018), section 3, and Turc et al.
# (2019). All have hidden_size / 64 heads and a feed-forward layer of 4 * hidden_size.
SIZES = {
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024),
}
FAMILIES = (
    "bert",
    "roberta",
    "xlm-roberta",
    "camembert",
    "data2vec-text",
    "ernie",
    "distilbert",
    "albert",
    "electra",
)
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "tanh")
SIZE_FIELDS = ("num_layers", "hidden_size", "num_heads", "intermediate_size")
"""Fields of a model config that a published size sets."""


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """The sizes and options of a model; hashable, so it can be static under jit.

    The defaults are BERT_BASE, uncased (Devlin et al., 2018). Raises ValueError for sizes below 1,
    heads that do not divide the hidden size, an epsilon that is not positive, groups that do not
    divide the layers, unknown names, and dropout rates outside of [0, 1).
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    dropout_rate: float = 0.1
    """In training, the dropout of embeddings, sublayers and, by default, attention."""
    attention_dropout_rate: float | None = None
    """In training, the dropout of attention probabilities; None means `dropout_rate`."""
    classifier_dropout_rate: float | None = None
    """In training, the dropout before the last dense layer of a task; None means `dropout_rate`."""
    causal: bool = False
    """Each position attends only to itself and earlier ones of its sequence (left to right)."""
    initializer_range: float = 0.02
    layer_norm_epsilon: float = 1e-12
    family: str = "bert"
    """Which of `FAMILIES` it belongs to: how other libraries store it."""
    embedding_size: int | None = None
    """Width of the embeddings, which a dense layer then widens to `hidden_size`; None: the same."""
    position_offset: int = 0
    """Rows of the position table before the one of the first token of a sequence."""
    num_task_embeddings: int = 0
    """Rows of ERNIE's table of task embeddings, of which all tokens get the first; 0: no table."""
    activation: str = "gelu"
    """Of feed-forward layers and of the head for tokens, one of `ACTIVATIONS`."""
    pooler_activation: str = "tanh"
    shares_layers: bool = False
    """All layers have the parameters of one or, see below, of a few."""
    num_layer_groups: int = 1
    """With `shares_layers`: number of groups of consecutive layers that share parameters."""

    architecture: ClassVar[str] = "bert"
    """The file in `bert_jax/model` that defines the model; see `model/architecture.py`."""
    size_fields: ClassVar[tuple[str, ...]] = SIZE_FIELDS
    """Fields that a published size sets."""
    fixed_fields: ClassVar[tuple[str, ...]] = (
        *size_fields,
        "max_position_embeddings",
        "layer_norm_epsilon",
        "type_vocab_size",
        "num_task_embeddings",
        "position_offset",
        "embedding_size",
        "activation",
        "shares_layers",
    )
    """Fields that are known from a model's weights, and cannot be chosen anew."""

    def __post_init__(self):
        check_minimum(self, 1, SIZE_NAMES)
        if self.embedding_size is not None and self.embedding_size < 1:
            expected = "expected None, for hidden_size, or at least 1"
            raise ValueError(f"BertConfig.embedding_size is {self.embedding_size}: {expected}")
        check_minimum(self, 0, ("type_vocab_size", "num_task_embeddings", "initializer_range"))
        check_heads(self)
        if self.num_layers % self.num_layer_groups or (
            self.num_layer_groups > 1 and not self.shares_layers
        ):
            raise ValueError(
                f"BertConfig.num_layer_groups is {self.num_layer_groups}: expected a divisor of "
                f"num_layers ({self.num_layers}), and 1 without shares_layers"
            )
        check_choices(self, family=FAMILIES, activation=ACTIVATIONS, pooler_activation=ACTIVATIONS)
        check_positive(self, ("layer_norm_epsilon",))
        rates = ("dropout_rate", "attention_dropout_rate", "classifier_dropout_rate")
        check_rates(self, rates)

    @classmethod
    def named(cls, size: str, **overrides) -> "BertConfig":
        """Returns a published size with `overrides`; heads and inner size follow `hidden_size`."""
        if size not in SIZES:
            raise ValueError(f"unknown model size {size!r}: expected one of {', '.join(SIZES)}")
        num_layers, hidden_size = SIZES[size]
        hidden_size = overrides.get("hidden_size", hidden_size)
        if hidden_size % 64 and "num_heads" not in overrides:
            raise ValueError(
                f"hidden_size is {hidden_size}: expected a multiple of 64, or an explicit num_heads"
            )
        sizes = {"num_layers": num_layers, "hidden_size": hidden_size}
        sizes |= {"num_heads": hidden_size // 64, "intermediate_size": 4 * hidden_size}
        return cls(**(sizes | overrides))

    @property
    def num_stacked_layers(self) -> int:
        """The number of layers that have parameters of their own."""
        return self.num_layer_groups if self.shares_layers else self.num_layers

    @property
    def has_pooler_input_dropout(self) -> bool:
        """Whether a classifier has dropout before its pooler, too, and not only after it."""
        return self.family in ("roberta", "xlm-roberta", "camembert", "data2vec-text", "electra")

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary size rounded up to whole tiles of 128: the rows of the embedding."""
        return pad_to_tiles(self.vocab_size)


def pools_last(config) -> bool:
    """Returns whether the pooler reads the last token of a sequence, not the first.

    In a causal model only that one sees all others; `cls_last` of a config says it of an
    architecture whose sequences end in [CLS].
    """
    return config.causal or getattr(config, "cls_last", False)


def pad_to_tiles(vocab_size: int) -> int:
    """Returns the vocabulary size rounded up to whole tiles of 128."""
    return -(-vocab_size // 128) * 128


def published_size(sizes: Mapping[str, Sequence[int]], name: str) -> dict[str, int]:
    """Returns the `SIZE_FIELDS` of one of the published `sizes`. Raises ValueError if unknown."""
    if name not in sizes:
        raise ValueError(f"unknown model size {name!r}: expected one of {', '.join(sizes)}")
    return dict(zip(SIZE_FIELDS, sizes[name], strict=True))


SIZE_NAMES = ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size")


def check_ranges(config) -> None:
    """Raises ValueError for a number that is out of the range that it has in all architectures."""
    check_minimum(config, 1, (*SIZE_NAMES, "max_position_embeddings"))
    check_minimum(config, 0, ("initializer_range",))
    check_positive(config, ("layer_norm_epsilon",))
    check_rates(config, [field for field in vars(config) if field.endswith("dropout_rate")])


def check_heads(config) -> None:
    """Raises ValueError if the heads do not divide the hidden size."""
    if config.hidden_size % config.num_heads:
        multiple = f"a multiple of num_heads ({config.num_heads})"
        kind = type(config).__name__
        raise ValueError(f"{kind}.hidden_size ({config.hidden_size}) must be {multiple}")


def check_minimum(config, minimum: int, names: Sequence[str]) -> None:
    """Raises ValueError for a field of a model config below `minimum`, or that is not a number."""
    for name in names:
        if not (value := getattr(config, name)) >= minimum:
            kind = type(config).__name__
            raise ValueError(f"{kind}.{name} must be at least {minimum}, got {value}")


def check_positive(config, names: Sequence[str]) -> None:
    """Raises ValueError for a field of a model config that is not above 0, such as NaN."""
    for name in names:
        if not (value := getattr(config, name)) > 0:
            raise ValueError(f"{type(config).__name__}.{name} must be positive, got {value}")


def check_rates(config, names: Sequence[str]) -> None:
    """Raises ValueError for a rate of dropout in a model config that is not in [0, 1), nor None."""
    for name in names:
        rate = getattr(config, name)
        if rate is not None and not 0.0 <= rate < 1.0:
            raise ValueError(f"{type(config).__name__}.{name} must be in [0, 1), got {rate}")


def check_choices(config, **choices: Sequence[str]) -> None:
    """Raises ValueError for a field of a model config that is none of its `choices`."""
    for name, allowed in choices.items():
        if (value := getattr(config, name)) not in allowed:
            expected, kind = ", ".join(allowed), type(config).__name__
            raise ValueError(f"{kind}.{name} is {value!r}: expected one of {expected}")
