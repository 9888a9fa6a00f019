"""How transformers stores DeBERTa, versions 2 and 3: names of tensors, and `config.json`."""

from collections.abc import Mapping

from absl import logging

from bert_jax.model.deberta import DebertaConfig
from bert_jax.model.transformers_format import (
    ACTIVATION_NAMES,
    HeadNames,
    TransformersFormat,
    check_required,
    fields_to_json,
    read_activation,
)

# Fields of `DebertaConfig` -> keys of `config.json`.
_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "num_buckets": "position_buckets",
    "max_distance": "max_relative_positions",
    "shares_projections": "share_att_key",
    "has_positions": "position_biased_input",
    "type_vocab_size": "type_vocab_size",
    "embedding_size": "embedding_size",
    "convolution_width": "conv_kernel_size",
    "dropout_rate": "hidden_dropout_prob",
    "attention_dropout_rate": "attention_probs_dropout_prob",
    "classifier_dropout_rate": "cls_dropout",
    "initializer_range": "initializer_range",
    "layer_norm_epsilon": "layer_norm_eps",
    "legacy_head": "legacy",
}
# Of keys that `config.json` may lack.
_DEFAULTS = {
    "hidden_size": 1536,
    "num_hidden_layers": 24,
    "num_attention_heads": 24,
    "intermediate_size": 6144,
    "position_buckets": -1,
    "share_att_key": False,
    "position_biased_input": True,
    "conv_kernel_size": 0,
    "attention_probs_dropout_prob": 0.1,
}
_ACTIVATION_KEYS = {
    "activation": ("hidden_act", "gelu"),
    "pooler_activation": ("pooler_hidden_act", "gelu"),
    "convolution_activation": ("conv_act", "tanh"),
}
_NORMS = {"none": False, "layer_norm": True}


def config_from_json(values: Mapping) -> DebertaConfig:
    """Reads the model config from the contents of `config.json`.

    Raises ValueError for what is not supported.
    """
    values = {**_DEFAULTS, **values}
    fields = {field: values[key] for field, key in _KEYS.items() if values.get(key) is not None}
    for field, value in fields.items():
        default = getattr(DebertaConfig, field)
        kind = bool if isinstance(default, bool) else (int, float)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            expected = "true or false" if kind is bool else "a number"
            raise ValueError(f"config.json: {_KEYS[field]} is {value!r}, expected {expected}")
    for field in ("num_buckets", "max_distance", "convolution_width"):  # -1 and 0 mean none.
        if fields.get(field, 0) < 1:
            fields[field] = None if field == "max_distance" else 0
    if fields.get("embedding_size") == values["hidden_size"]:
        fields["embedding_size"] = None  # No projection.
    for field, (key, default) in _ACTIVATION_KEYS.items():
        fields[field] = read_activation(values, key, default)
    fields["position_scores"] = _position_scores(values)
    norm = str(values.get("norm_rel_ebd", "none")).strip().lower()
    if norm not in _NORMS:
        expected = f"expected one of {', '.join(_NORMS)}"
        raise ValueError(f"config.json: norm_rel_ebd is {norm!r}, {expected}")
    fields["normalizes_distances"] = _NORMS[norm]
    _check_others(values, fields)
    try:
        return DebertaConfig(**fields)
    except ValueError as error:
        names = [f"{field} is {key}" for field, key in _KEYS.items() if field in str(error)]
        raise ValueError(f"config.json: {'; '.join([str(error), *names])}") from None


def _position_scores(values: Mapping) -> str:
    """Returns the field `position_scores`."""
    kinds = values.get("pos_att_type") or []
    if isinstance(kinds, str):
        kinds = [kind.strip() for kind in kinds.lower().split("|")]
    if unknown := sorted(set(kinds) - {"c2p", "p2c"}):
        expected = "expected c2p and p2c"
        raise ValueError(f"config.json: pos_att_type has {', '.join(unknown)}, {expected}")
    has_distances = values.get("relative_attention", False)
    if bool(kinds) != has_distances:
        raise ValueError(
            f"config.json: relative_attention is {has_distances!r} and pos_att_type is {kinds!r}: "
            "expected true with some of c2p and p2c, or false without"
        )
    return "|".join(sorted(kinds))


def _check_others(values: Mapping, fields: Mapping) -> None:
    """Raises ValueError for a value that changes what a model computes, and is not supported."""
    head_size = values["hidden_size"] // max(values["num_attention_heads"], 1)
    required = {
        "attention_head_size": head_size,
        "pooler_hidden_size": values["hidden_size"],
        "conv_groups": 1,
        "talking_head": False,
        "tie_word_embeddings": True,
        "quantization_config": None,
        "pruned_heads": {},
    }
    check_required(values, required)
    if not fields.get("legacy_head", True) and fields.get("embedding_size"):
        raise ValueError(
            f"config.json: embedding_size is {fields['embedding_size']}, but with legacy=false the "
            f"head for tokens is as wide as hidden_size ({values['hidden_size']})"
        )
    if rate := values.get("pooler_dropout"):
        logging.warning(
            "config.json: pooler_dropout=%s has no effect: only the pooled vector has dropout", rate
        )


def config_to_json(config: DebertaConfig) -> dict:
    """Returns the contents of `config.json`, without its class and head."""
    values = {"model_type": "deberta-v2"} | fields_to_json(config, _KEYS)
    if config.embedding_size is None:
        values["embedding_size"] = config.hidden_size
    for field in ("num_buckets", "max_distance"):
        values[_KEYS[field]] = getattr(config, field) or -1
    for field, (key, _) in _ACTIVATION_KEYS.items():
        values[key] = ACTIVATION_NAMES[getattr(config, field)]
    return values | {
        "relative_attention": bool(config.score_terms),
        "pos_att_type": list(config.score_terms),
        "norm_rel_ebd": "layer_norm" if config.normalizes_distances else "none",
        "pooler_dropout": 0,
        "pooler_hidden_size": config.hidden_size,
        "dtype": "float32",
    }


def _layer_names(names: Mapping[str, str]) -> dict[str, str]:
    return {
        f"encoder/layers/{path}": f"deberta.encoder.layer.{{layer}}.{name}"
        for path, name in names.items()
    }


_ENCODER = {
    "encoder/embeddings/token_embedding": "deberta.embeddings.word_embeddings",
    "encoder/embeddings/position_embedding": "deberta.embeddings.position_embeddings",
    "encoder/embeddings/segment_embedding": "deberta.embeddings.token_type_embeddings",
    "encoder/embeddings/projection": "deberta.embeddings.embed_proj",
    "encoder/embeddings/layer_norm": "deberta.embeddings.LayerNorm",
    "encoder/layer_inputs/distances": "deberta.encoder.rel_embeddings",
    "encoder/layer_inputs/layer_norm": "deberta.encoder.LayerNorm",
    **_layer_names(
        {
            "query": "attention.self.query_proj",
            "key": "attention.self.key_proj",
            "value": "attention.self.value_proj",
            "distance_query": "attention.self.pos_query_proj",
            "distance_key": "attention.self.pos_key_proj",
            "attention_output": "attention.output.dense",
            "attention_layer_norm": "attention.output.LayerNorm",
            "intermediate": "intermediate.dense",
            "output": "output.dense",
            "output_layer_norm": "output.LayerNorm",
        }
    ),
    "encoder/layers/convolution": "deberta.encoder.conv.conv",  # Of the first layer.
    "encoder/layers/convolution_layer_norm": "deberta.encoder.conv.LayerNorm",
    "encoder/pooler/dense": "pooler.dense",  # Each class with a pooler has its own.
}
_LEGACY_HEAD = {
    "mlm": "cls.predictions",
    "mlm/transform": "cls.predictions.transform.dense",
    "mlm/layer_norm": "cls.predictions.transform.LayerNorm",
}
_HEAD = {
    "mlm": "lm_predictions.lm_head",
    "mlm/transform": "lm_predictions.lm_head.dense",
    "mlm/layer_norm": "lm_predictions.lm_head.LayerNorm",
}
_POSITIONS = "deberta.embeddings.position_embeddings.weight"


def _for_config(config: DebertaConfig) -> TransformersFormat:
    """Returns the format of the models of a config, whose head for tokens has one of two names."""
    if config.legacy_head:
        return TRANSFORMERS
    enhanced = (
        "the head of this model is an enhanced mask decoder, which adds these positions before its "
        "last layer; as a plain head (legacy=false in config.json) it would compute something "
        "else. To read the encoder alone, remove `legacy` from config.json"
    )
    return TRANSFORMERS._replace(
        names=_ENCODER | _HEAD,
        tied={},
        refused={} if config.has_positions else {_POSITIONS: enhanced},
    )


TRANSFORMERS = TransformersFormat(
    class_prefix="DebertaV2",
    prefix="deberta.",
    names=_ENCODER | _LEGACY_HEAD,
    parts={},
    padded=("encoder/embeddings/token_embedding/embedding", "mlm/bias"),
    tied={
        "cls.predictions.decoder.weight": "deberta.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    heads={
        "ForSequenceClassification": HeadNames(),
        "ForTokenClassification": HeadNames(),
        "ForQuestionAnswering": HeadNames("qa_outputs"),
        "ForMultipleChoice": HeadNames(),
    },
    headless={(): "DebertaV2Model", ("mlm",): "DebertaV2ForMaskedLM"},
    config_from_json=config_from_json,
    config_to_json=config_to_json,
    reads_vocabulary=False,
    for_config=_for_config,
)
