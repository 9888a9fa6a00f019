"""How transformers stores ModernBERT: the names of its tensors, and `config.json`."""

from collections.abc import Mapping, Sequence

from absl import logging

from bert_jax.model.modernbert import ModernBertConfig
from bert_jax.model.transformers_format import (
    ACTIVATION_NAMES,
    HeadNames,
    TransformersFormat,
    build_config,
    read_activation,
)

# Fields of `ModernBertConfig` -> keys of `config.json`.
_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "attention_window": "local_attention",
    "classifier_pooling": "classifier_pooling",
    "attention_bias": "attention_bias",
    "feed_forward_bias": "mlp_bias",
    "norm_bias": "norm_bias",
    "pooler_bias": "classifier_bias",
    "decoder_bias": "decoder_bias",
    "ties_embeddings": "tie_word_embeddings",
    "dropout_rate": "mlp_dropout",
    "embedding_dropout_rate": "embedding_dropout",
    "attention_dropout_rate": "attention_dropout",
    "classifier_dropout_rate": "classifier_dropout",
    "initializer_range": "initializer_range",
    "layer_norm_epsilon": "norm_eps",
}
# Fields whose default is 0 in transformers; here it is that of `dropout_rate`.
_OTHER_RATES = ("embedding_dropout_rate", "attention_dropout_rate", "classifier_dropout_rate")
_ACTIVATION_KEYS = {
    "activation": "hidden_activation",
    "pooler_activation": "classifier_activation",
}
_LAYER_TYPES = {"g": "full_attention", "l": "sliding_attention"}


def config_from_json(values: Mapping) -> ModernBertConfig:
    """Reads the model config from the contents of `config.json`.

    Raises ValueError for what is not supported.
    """
    if values.get("quantization_config") is not None:
        raise ValueError("config.json: quantization_config is not supported: expected None")
    fields = {field: values[key] for field, key in _KEYS.items() if key in values}
    for field, value in fields.items():
        default = getattr(ModernBertConfig, field)
        _check_type(_KEYS[field], value, float if default is None else type(default))
    for field, key in _ACTIVATION_KEYS.items():
        fields[field] = read_activation(values, key)
    fields["attention_pattern"] = _pattern(values)
    fields["global_rope_base"] = _rope_base(values, "full_attention", "global_rope_theta", 160e3)
    fields["local_rope_base"] = _rope_base(values, "sliding_attention", "local_rope_theta", 10e3)
    return build_config(ModernBertConfig, dict.fromkeys(_OTHER_RATES, 0.0) | fields)


def _pattern(values: Mapping) -> str:
    """Returns `attention_pattern`: of `layer_types`, or of the older key."""
    types = values.get("layer_types")
    if types is None:
        every = values.get("global_attn_every_n_layers", 3)
        if not isinstance(every, int) or every < 1:
            key = "global_attn_every_n_layers"
            raise ValueError(f"config.json: {key} is {every!r}, expected at least 1")
        return "g" + "l" * (every - 1)
    letters = {name: letter for letter, name in _LAYER_TYPES.items()}
    if unknown := sorted(set(types) - set(letters)):
        expected = f"expected {' and '.join(letters)}"
        raise ValueError(f"config.json: layer_types has {', '.join(unknown)}, {expected}")
    num_layers = values.get("num_hidden_layers", 22)
    if len(types) != num_layers:
        raise ValueError(
            f"config.json: layer_types has {len(types)} entries for {num_layers} layers "
            "(num_hidden_layers)"
        )
    return "".join(letters[name] for name in types)


def _check_type(key: str, value, kind: type) -> None:
    """Raises ValueError for a value of `config.json` of another kind; 1 is a float, too."""
    allowed = {float: (int, float), int: (int,)}.get(kind, (kind,))
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        names = {float: "a number", int: "a whole number", str: "a string", bool: "true or false"}
        raise ValueError(f"config.json: {key} is {value!r}, expected {names[kind]}")


def _rope_base(values: Mapping, layer_type: str, old_key: str, default: float) -> float:
    """Returns the base of the rotations of a type of layers; refuses other kinds of rotation."""
    parameters = values.get("rope_parameters") or {}
    if unknown := sorted(set(parameters) - set(_LAYER_TYPES.values())):
        expected = f"expected one entry for each of {' and '.join(_LAYER_TYPES.values())}"
        raise ValueError(f"config.json: rope_parameters has {', '.join(unknown)}, {expected}")
    own, key = parameters.get(layer_type) or {}, f"rope_parameters.{layer_type}"
    for name, found in (
        (f"{key}.rope_type", own.get("rope_type", "default")),
        ("rope_scaling", values.get("rope_scaling")),
    ):
        if found not in (None, "default"):
            raise ValueError(f"config.json: {name} is {found!r}: only 'default' is supported")
    if unknown := sorted(set(own) - {"rope_type", "rope_theta"}):
        raise ValueError(f"config.json: {key} has {', '.join(unknown)}: it is not supported")
    for name, base in (
        (f"{key}.rope_theta", own.get("rope_theta")),
        (old_key, values.get(old_key)),
    ):
        if base is not None:
            _check_type(name, base, float)
            return float(base)
    # In transformers 4, no base of local layers meant that of global ones.
    if old_key in values and old_key == "local_rope_theta":
        return _rope_base(values, "full_attention", "global_rope_theta", 160e3)
    return default


def config_to_json(config: ModernBertConfig) -> dict:
    """Returns the contents of `config.json`, without its class and head."""
    values = {"model_type": "modernbert"}
    values |= {key: getattr(config, field) for field, key in _KEYS.items()}
    for field in _OTHER_RATES:
        if getattr(config, field) is None:
            values[_KEYS[field]] = config.dropout_rate
    if (rate := config.attention_output_dropout_rate) is not None:
        logging.warning(
            "not exported: attention_output_dropout_rate=%g; transformers has none of its own", rate
        )
    for field, key in _ACTIVATION_KEYS.items():
        values[key] = ACTIVATION_NAMES[getattr(config, field)]
    bases = {
        "full_attention": config.global_rope_base,
        "sliding_attention": config.local_rope_base,
    }
    letters = ["g" if config.is_global(layer) else "l" for layer in range(config.num_layers)]
    return values | {
        "layer_types": [_LAYER_TYPES[letter] for letter in letters],
        "rope_parameters": {
            layer_type: {"rope_type": "default", "rope_theta": base}
            for layer_type, base in bases.items()
        },
        "dtype": "float32",
    }


def _layer_names(names: Mapping[str, str]) -> dict[str, str]:
    return {
        f"encoder/layers/{path}": f"model.layers.{{layer}}.{name}" for path, name in names.items()
    }


def _joined(paths: Sequence[str]) -> dict[str, tuple[int, int]]:
    return {f"encoder/layers/{path}": (i, len(paths)) for i, path in enumerate(paths)}


TRANSFORMERS = TransformersFormat(
    class_prefix="ModernBert",
    prefix="model.",
    names={
        "encoder/embeddings/token_embedding": "model.embeddings.tok_embeddings",
        "encoder/embeddings/layer_norm": "model.embeddings.norm",
        **_layer_names(
            {
                "attention_norm": "attn_norm",
                "query": "attn.Wqkv",
                "key": "attn.Wqkv",
                "value": "attn.Wqkv",
                "attention_output": "attn.Wo",
                "feed_forward_norm": "mlp_norm",
                "intermediate": "mlp.Wi",
                "gate": "mlp.Wi",
                "output": "mlp.Wo",
            }
        ),
        "encoder/last/layer_norm": "model.final_norm",
        # Each class with a head has these, of its own task.
        "encoder/pooler/dense": "head.dense",
        "encoder/pooler/layer_norm": "head.norm",
        "mlm/transform/dense": "head.dense",
        "mlm/transform/layer_norm": "head.norm",
        "mlm/decoder": "decoder",
        "mlm/bias": "decoder",
    },
    parts=_joined(("query", "key", "value")) | _joined(("intermediate", "gate")),
    padded=(
        "encoder/embeddings/token_embedding/embedding",
        "mlm/decoder/embedding",
        "mlm/bias",
    ),
    tied={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
    heads={
        "ForSequenceClassification": HeadNames(),
        "ForTokenClassification": HeadNames(),
        "ForQuestionAnswering": HeadNames(),
        "ForMultipleChoice": HeadNames(),
    },
    headless={(): "ModernBertModel", ("mlm",): "ModernBertForMaskedLM"},
    config_from_json=config_from_json,
    config_to_json=config_to_json,
    reads_vocabulary=False,
)
