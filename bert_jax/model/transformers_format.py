"""How the transformers library stores the models of an architecture."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from absl import logging

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
"""Names of activations in transformers -> in `model.config.ACTIVATIONS`."""
ACTIVATION_NAMES = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
"""The reverse: of several names of the same, the first."""


def check_required(values: Mapping, required: Mapping) -> None:
    """Raises ValueError for a key of `config.json` with another value than the required one."""
    for key, expected in required.items():
        if values.get(key, expected) != expected:
            raise ValueError(f"config.json: {key} is {values[key]!r}, expected {expected!r}")


def read_numbers(values: Mapping, keys: Mapping[str, str]) -> dict:
    """Returns fields of a model config from the keys of `config.json` that it has.

    `keys` are those of each field. Raises ValueError for a value that is not a number.
    """
    fields = {field: values[key] for field, key in keys.items() if key in values}
    for field, value in fields.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"config.json: {keys[field]} is {value!r}, expected a number")
    return fields


def read_activation(values: Mapping, key: str, default: str = "gelu") -> str:
    """Returns the activation that a key of `config.json` names. Raises ValueError if unknown."""
    name = values.get(key, default)
    if name not in ACTIVATIONS:
        expected = f"expected one of {', '.join(ACTIVATIONS)}"
        raise ValueError(f"config.json: {key} is {name!r}, {expected}")
    return ACTIVATIONS[name]


def build_config(kind: type, fields: Mapping) -> object:
    """Returns a model config. Raises ValueError, which names the file, for what it refuses."""
    try:
        return kind(**fields)
    except ValueError as error:
        raise ValueError(f"config.json: {error}") from None


def fields_to_json(config: object, keys: Mapping[str, str]) -> dict:
    """Returns the keys of `config.json` with the values of the fields of a model config.

    Rates of dropout that are None get the number that they mean, and a rate before a task's last
    layer that has no key is reported.
    """
    values = {key: getattr(config, field) for field, key in keys.items()}
    if config.attention_dropout_rate is None:
        values[keys["attention_dropout_rate"]] = config.dropout_rate
    rate = config.classifier_dropout_rate
    if rate is not None and "classifier_dropout_rate" not in keys:
        logging.warning(
            "not exported: classifier_dropout_rate=%g; transformers has none of its own", rate
        )
    return values


class HeadNames(NamedTuple):
    """How a class of transformers names the layers of a task's head.

    Attributes:
      head: name of the last dense layer.
      pooler: name of the dense layer before it; None: the one of the encoder.
      class_suffix: end of the name of the class, if it is another than in `Head.transformers`.
    """

    head: str = "classifier"
    pooler: str | None = None
    class_suffix: str = ""


class TransformersFormat(NamedTuple):
    """The names of the tensors, and the model config as `config.json` has it.

    Attributes:
      class_prefix: what the names of its classes begin with, such as "Bert".
      prefix: the prefix of the encoder's tensors in a model with a head.
      names: paths of parameters or of their modules -> names in transformers, without ".weight" or
        ".bias". `{layer}` stands for one tensor per layer.
      parts: modules that are fused into one tensor, by path -> (index, number of parts), equal
        ones along the axis of outputs.
      padded: paths of parameters whose first axis is the vocabulary, which we pad to whole tiles.
      tied: tensors that may be stored in addition to the original, or instead of it -> original.
      heads: suffix of the name of a class with a task's head, as in `Head.transformers` -> its
        names.
      headless: tuple of heads of pre-training -> name of the class that has these, and no task's.
      config_from_json: (contents of `config.json`) -> model config; raises ValueError for what is
        not supported.
      config_to_json: (model config) -> the same contents, but for the class and the head.
      causal_class: class of a left-to-right model, whose masked-LM head predicts the next token;
        "" if there is none.
      reads_vocabulary: whether vocab.txt alone is enough for its class of tokenizers.
      whole_names: paths of parameters -> names in transformers that end otherwise.
      by_head: paths of matrices that are stored with an axis of heads and one of their elements,
        `[H, heads, head_dim]` -> what their first axis is: "inputs", or "outputs".
      refused: tensors with which a model computes something else -> what, and how to read it.
      for_config: (model config) -> the format of its models, where they differ in their names.
    """

    class_prefix: str
    prefix: str
    names: Mapping[str, str]
    parts: Mapping[str, tuple[int, int]]
    padded: tuple[str, ...]
    tied: Mapping[str, str]
    heads: Mapping[str, HeadNames]
    headless: Mapping[tuple[str, ...], str]
    config_from_json: Callable[[Mapping], object]
    config_to_json: Callable[[object], dict]
    causal_class: str = ""
    reads_vocabulary: bool = True
    whole_names: Mapping[str, str] = MappingProxyType({})
    by_head: Mapping[str, str] = MappingProxyType({})
    refused: Mapping[str, str] = MappingProxyType({})
    for_config: Callable[[object], "TransformersFormat"] | None = None

    def class_of(self, suffix: str) -> str:
        """Returns the class of a task's head, of which `suffix` is that in `Head.transformers`."""
        names = self.heads.get(suffix)
        return self.class_prefix + ((names and names.class_suffix) or suffix)

    def fused_layers(self) -> list[tuple[str, ...]]:
        """Returns the modules that are parts of one tensor, in order, for each such tensor."""
        groups = {}
        for path in sorted(self.parts, key=lambda path: self.parts[path]):
            groups.setdefault(self.names[path], []).append(path)
        return [tuple(paths) for paths in groups.values()]
