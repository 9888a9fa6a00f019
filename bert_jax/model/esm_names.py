"""How transformers stores ESM: the names of its tensors, and `config.json`."""

from collections.abc import Mapping

from bert_jax.model.esm import EsmConfig
from bert_jax.model.transformers_format import (
    HeadNames,
    TransformersFormat,
    build_config,
    check_required,
    fields_to_json,
)

# Fields of `EsmConfig` -> keys of `config.json`.
_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "rope_base": "rope_theta",
    "normalizes_embeddings": "emb_layer_norm_before",
    "token_dropout": "token_dropout",
    "mask_id": "mask_token_id",
    "dropout_rate": "hidden_dropout_prob",
    "attention_dropout_rate": "attention_probs_dropout_prob",
    "initializer_range": "initializer_range",
    "layer_norm_epsilon": "layer_norm_eps",
}
# Values of keys that `config.json` may lack, in transformers.
_DEFAULTS = {
    "vocab_size": 33,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 1026,
    "emb_layer_norm_before": False,
    "token_dropout": False,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "layer_norm_eps": 1e-12,
}
# Keys whose only supported value is this.
_REQUIRED = {
    "pad_token_id": EsmConfig.position_offset - 1,
    "is_folding_model": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "quantization_config": None,
    "head_dim": None,
}
_SWITCHES = ("emb_layer_norm_before", "token_dropout")
_POSITIONS = {"absolute": "learned", "rotary": "rotary"}


def config_from_json(values: Mapping) -> EsmConfig:
    """Reads the model config from the contents of `config.json`.

    Raises ValueError for what is not supported.
    """
    check_required(values, _REQUIRED)
    kind = values.get("position_embedding_type", "absolute")
    if kind not in _POSITIONS:
        expected = f"expected {' or '.join(_POSITIONS)}"
        raise ValueError(f"config.json: position_embedding_type is {kind!r}, {expected}")
    # None is the default of some keys.
    values = _DEFAULTS | {key: value for key, value in values.items() if value is not None}
    fields = {field: values[key] for field, key in _KEYS.items() if key in values}
    for field, value in fields.items():
        is_switch = _KEYS[field] in _SWITCHES
        if isinstance(value, bool) != is_switch or not isinstance(value, int | float):
            expected = "true or false" if is_switch else "a number"
            raise ValueError(f"config.json: {_KEYS[field]} is {value!r}, expected {expected}")
    if fields["token_dropout"] and "mask_id" not in fields:
        raise ValueError("config.json: token_dropout needs mask_token_id, which is missing")
    fields["max_position_embeddings"] -= EsmConfig.position_offset
    return build_config(EsmConfig, fields | {"positions": _POSITIONS[kind]})


def config_to_json(config: EsmConfig) -> dict:
    """Returns the contents of `config.json`, without its class and head."""
    values = {"model_type": "esm", **_REQUIRED} | fields_to_json(config, _KEYS)
    del values["head_dim"]
    values["max_position_embeddings"] += config.position_offset
    values["position_embedding_type"] = {ours: theirs for theirs, ours in _POSITIONS.items()}[
        config.positions
    ]
    return values | {"dtype": "float32"}


_LAYER = "esm.encoder.layer.{layer}"
_FREQUENCIES = "esm.rotary_embeddings.inv_freq"
TRANSFORMERS = TransformersFormat(
    class_prefix="Esm",
    prefix="esm.",
    names={
        "encoder/embeddings/token_embedding": "esm.embeddings.word_embeddings",
        "encoder/embeddings/position_embedding": "esm.embeddings.position_embeddings",
        "encoder/embeddings/layer_norm": "esm.embeddings.layer_norm",
        "encoder/layers/attention_norm": f"{_LAYER}.attention.LayerNorm",
        "encoder/layers/query": f"{_LAYER}.attention.self.query",
        "encoder/layers/key": f"{_LAYER}.attention.self.key",
        "encoder/layers/value": f"{_LAYER}.attention.self.value",
        "encoder/layers/attention_output": f"{_LAYER}.attention.output.dense",
        "encoder/layers/feed_forward_norm": f"{_LAYER}.LayerNorm",
        "encoder/layers/intermediate": f"{_LAYER}.intermediate.dense",
        "encoder/layers/output": f"{_LAYER}.output.dense",
        "encoder/last/layer_norm": "esm.encoder.emb_layer_norm_after",
        "encoder/pooler/dense": "esm.pooler.dense",
        "mlm": "lm_head",
        "mlm/transform": "lm_head.dense",
        "mlm/layer_norm": "lm_head.layer_norm",
    },
    whole_names={"encoder/layer_inputs/frequencies/scale": _FREQUENCIES},
    parts={},
    padded=("encoder/embeddings/token_embedding/embedding", "mlm/bias"),
    tied={
        "lm_head.decoder.weight": "esm.embeddings.word_embeddings.weight",
        # In files of transformers 4, each layer has them; those of 5 have the star for its number.
        **{
            f"{_LAYER.format(layer=layer)}.attention.self.rotary_embeddings.inv_freq": _FREQUENCIES
            for layer in ("*", *range(100))
        },
    },
    # It has no class for spans and for multiple choice.
    heads={
        "ForSequenceClassification": HeadNames("classifier.out_proj", "classifier.dense"),
        "ForTokenClassification": HeadNames(),
    },
    headless={("mlm",): "EsmForMaskedLM", (): "EsmModel"},
    config_from_json=config_from_json,
    config_to_json=config_to_json,
    reads_vocabulary=False,
)
