"""How transformers stores ModernBERT: the names of its tensors, and `config.json`."""

from collections.abc import Mapping, Sequence

from bert_jax.model.modernbert import ModernBertConfig
from bert_jax.model.transformers_format import HeadNames, TransformersFormat

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Names of activations in transformers -> in `ModernBertConfig`."""

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
# Fields whose default in transformers is another.
_DEFAULTS = {
    "embedding_dropout_rate": 0.0,
    "attention_dropout_rate": 0.0,
    "classifier_dropout_rate": 0.0,
}
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
        kind = str if isinstance(default, str) else int | float  # As bool is.
        if not isinstance(value, kind):
            expected = "a string" if kind is str else "a number"
            raise ValueError(f"config.json: {_KEYS[field]} is {value!r}, expected {expected}")
    for field, key in _ACTIVATION_KEYS.items():
        name = values.get(key, "gelu")
        if name not in ACTIVATIONS:
            expected = f"expected one of {', '.join(ACTIVATIONS)}"
            raise ValueError(f"config.json: {key} is {name!r}, {expected}")
        fields[field] = ACTIVATIONS[name]
    fields["attention_pattern"] = _pattern(values)
    fields["global_rope_base"] = _rope_base(values, "full_attention", "global_rope_theta", 160e3)
    fields["local_rope_base"] = _rope_base(values, "sliding_attention", "local_rope_theta", 10e3)
    try:
        return ModernBertConfig(**_DEFAULTS | fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"config.json: {error}") from None


def _pattern(values: Mapping) -> str:
    """Returns `attention_pattern`: of `layer_types`, or of the key that they had before."""
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
    return _shortest_period("".join(letters[name] for name in types))


def _shortest_period(letters: str) -> str:
    """Returns the shortest string of which `letters` are the beginning of repetitions."""
    sizes = range(1, len(letters) + 1)
    return next(
        letters[:size]
        for size in sizes
        if all(letter == letters[i % size] for i, letter in enumerate(letters))
    )


def _rope_base(values: Mapping, layer_type: str, old_key: str, default: float) -> float:
    """Returns the base of the rotations of a type of layers; refuses other kinds of rotation."""
    parameters = (values.get("rope_parameters") or {}).get(layer_type) or {}
    for name, found in (
        (f"rope_parameters.{layer_type}.rope_type", parameters.get("rope_type", "default")),
        ("rope_scaling", values.get("rope_scaling")),
    ):
        if found not in (None, "default"):
            raise ValueError(f"config.json: {name} is {found!r}: only 'default' is supported")
    return float(parameters.get("rope_theta", values.get(old_key, default)))


def config_to_json(config: ModernBertConfig) -> dict:
    """Returns the contents of `config.json`, without its class and head."""
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    values = {"model_type": "modernbert"}
    values |= {key: getattr(config, field) for field, key in _KEYS.items()}
    for field in ("embedding_dropout_rate", "attention_dropout_rate", "classifier_dropout_rate"):
        if getattr(config, field) is None:
            values[_KEYS[field]] = config.dropout_rate
    values |= {key: names[getattr(config, field)] for field, key in _ACTIVATION_KEYS.items()}
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
)
