"""How transformers stores Longformer: the names of its tensors, and `config.json`."""

from collections.abc import Mapping

from bert_jax.model.longformer import LongformerConfig
from bert_jax.model.transformers_format import (
    ACTIVATION_NAMES,
    HeadNames,
    TransformersFormat,
    build_config,
    check_required,
    fields_to_json,
    read_activation,
    read_numbers,
)

# Fields of `LongformerConfig` -> keys of `config.json`.
_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "sep_id": "sep_token_id",
    "type_vocab_size": "type_vocab_size",
    "dropout_rate": "hidden_dropout_prob",
    "attention_dropout_rate": "attention_probs_dropout_prob",
    "initializer_range": "initializer_range",
    "layer_norm_epsilon": "layer_norm_eps",
}
# Values of keys that `config.json` may lack, in transformers, where they differ from ours.
_DEFAULTS = {
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "attention_probs_dropout_prob": 0.1,
    "layer_norm_eps": 1e-12,
}
# Keys whose only supported value is this, which transformers assumes.
_REQUIRED = {
    "pad_token_id": LongformerConfig.position_offset - 1,
    "tie_word_embeddings": True,
    "quantization_config": None,
}


def config_from_json(values: Mapping) -> LongformerConfig:
    """Reads the model config from the contents of `config.json`.

    Raises ValueError for what is not supported.
    """
    check_required(values, _REQUIRED)
    fields = read_numbers(_DEFAULTS | values, _KEYS)
    fields["max_position_embeddings"] -= LongformerConfig.position_offset
    fields["activation"] = read_activation(values, "hidden_act")
    windows = values.get("attention_window", 512)
    if not all(type(each) is int for each in (windows if isinstance(windows, list) else [windows])):
        expected = "expected a number, or a list of one for each layer"
        raise ValueError(f"config.json: attention_window is {windows!r}, {expected}")
    fields["attention_window"] = tuple(windows) if isinstance(windows, list) else windows
    return build_config(LongformerConfig, fields)


def config_to_json(config: LongformerConfig) -> dict:
    """Returns the contents of `config.json`, without its class and head."""
    values = {"model_type": "longformer", **_REQUIRED} | fields_to_json(config, _KEYS)
    values["max_position_embeddings"] += config.position_offset
    return values | {
        "hidden_act": ACTIVATION_NAMES[config.activation],
        "attention_window": list(config.windows),
        "dtype": "float32",
    }


_LAYER = "longformer.encoder.layer.{layer}"
_ATTENTION = f"{_LAYER}.attention.self"
TRANSFORMERS = TransformersFormat(
    class_prefix="Longformer",
    prefix="longformer.",
    names={
        "encoder/embeddings/token_embedding": "longformer.embeddings.word_embeddings",
        "encoder/embeddings/position_embedding": "longformer.embeddings.position_embeddings",
        "encoder/embeddings/segment_embedding": "longformer.embeddings.token_type_embeddings",
        "encoder/embeddings/layer_norm": "longformer.embeddings.LayerNorm",
        "encoder/layers/query": f"{_ATTENTION}.query",
        "encoder/layers/key": f"{_ATTENTION}.key",
        "encoder/layers/value": f"{_ATTENTION}.value",
        "encoder/layers/query_global": f"{_ATTENTION}.query_global",
        "encoder/layers/key_global": f"{_ATTENTION}.key_global",
        "encoder/layers/value_global": f"{_ATTENTION}.value_global",
        "encoder/layers/attention_output": f"{_LAYER}.attention.output.dense",
        "encoder/layers/attention_layer_norm": f"{_LAYER}.attention.output.LayerNorm",
        "encoder/layers/intermediate": f"{_LAYER}.intermediate.dense",
        "encoder/layers/output": f"{_LAYER}.output.dense",
        "encoder/layers/output_layer_norm": f"{_LAYER}.output.LayerNorm",
        "encoder/pooler/dense": "longformer.pooler.dense",
        "mlm": "lm_head",
        "mlm/transform": "lm_head.dense",
        "mlm/layer_norm": "lm_head.layer_norm",
    },
    parts={},
    padded=("encoder/embeddings/token_embedding/embedding", "mlm/bias"),
    tied={
        "lm_head.decoder.weight": "longformer.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    heads={
        # The class has a pooler of its own; the others have the encoder's, if any.
        "ForSequenceClassification": HeadNames("classifier.out_proj", "classifier.dense"),
        "ForTokenClassification": HeadNames(),
        "ForQuestionAnswering": HeadNames("qa_outputs"),
        "ForMultipleChoice": HeadNames(),
    },
    headless={("mlm",): "LongformerForMaskedLM", (): "LongformerModel"},
    config_from_json=config_from_json,
    config_to_json=config_to_json,
    reads_vocabulary=False,
)
