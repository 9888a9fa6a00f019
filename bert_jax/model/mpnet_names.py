"""How transformers stores MPNet: the names of its tensors, and `config.json`."""

from collections.abc import Mapping

from bert_jax.model.mpnet import NUM_BUCKETS, MpnetConfig
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

# Fields of `MpnetConfig` -> keys of `config.json`.
_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "dropout_rate": "hidden_dropout_prob",
    "attention_dropout_rate": "attention_probs_dropout_prob",
    "initializer_range": "initializer_range",
    "layer_norm_epsilon": "layer_norm_eps",
}
# Values of keys that `config.json` may lack, in transformers, where they differ from ours.
_DEFAULTS = {"max_position_embeddings": 512, "attention_probs_dropout_prob": 0.1}
# Keys of `config.json` whose only supported value is this, which transformers assumes.
_REQUIRED = {
    "pad_token_id": MpnetConfig.position_offset - 1,
    "relative_attention_num_buckets": NUM_BUCKETS,
    "quantization_config": None,
}


def config_from_json(values: Mapping) -> MpnetConfig:
    """Reads the model config from the contents of `config.json`.

    Raises ValueError for what is not supported.
    """
    check_required(values, _REQUIRED)
    fields = read_numbers(_DEFAULTS | values, _KEYS)
    fields["max_position_embeddings"] -= MpnetConfig.position_offset
    fields["activation"] = read_activation(values, "hidden_act")
    return build_config(MpnetConfig, fields)


def config_to_json(config: MpnetConfig) -> dict:
    """Returns the contents of `config.json`, without its class and head."""
    values = {"model_type": "mpnet", **_REQUIRED} | fields_to_json(config, _KEYS)
    values["max_position_embeddings"] += config.position_offset
    return values | {"hidden_act": ACTIVATION_NAMES[config.activation], "dtype": "float32"}


_LAYER = "mpnet.encoder.layer.{layer}"
TRANSFORMERS = TransformersFormat(
    class_prefix="MPNet",
    prefix="mpnet.",
    names={
        "encoder/embeddings/token_embedding": "mpnet.embeddings.word_embeddings",
        "encoder/embeddings/position_embedding": "mpnet.embeddings.position_embeddings",
        "encoder/embeddings/layer_norm": "mpnet.embeddings.LayerNorm",
        "encoder/layer_inputs/distance_bias": "mpnet.encoder.relative_attention_bias",
        "encoder/layers/query": f"{_LAYER}.attention.attn.q",
        "encoder/layers/key": f"{_LAYER}.attention.attn.k",
        "encoder/layers/value": f"{_LAYER}.attention.attn.v",
        "encoder/layers/attention_output": f"{_LAYER}.attention.attn.o",
        "encoder/layers/attention_layer_norm": f"{_LAYER}.attention.LayerNorm",
        "encoder/layers/intermediate": f"{_LAYER}.intermediate.dense",
        "encoder/layers/output": f"{_LAYER}.output.dense",
        "encoder/layers/output_layer_norm": f"{_LAYER}.output.LayerNorm",
        "encoder/pooler/dense": "mpnet.pooler.dense",
        "mlm": "lm_head",
        "mlm/transform": "lm_head.dense",
        "mlm/layer_norm": "lm_head.layer_norm",
    },
    parts={},
    padded=("encoder/embeddings/token_embedding/embedding", "mlm/bias"),
    tied={
        "lm_head.decoder.weight": "mpnet.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    heads={
        # The class has a pooler of its own; the others have the encoder's, if any.
        "ForSequenceClassification": HeadNames("classifier.out_proj", "classifier.dense"),
        "ForTokenClassification": HeadNames(),
        "ForQuestionAnswering": HeadNames("qa_outputs"),
        "ForMultipleChoice": HeadNames(),
    },
    headless={("mlm",): "MPNetForMaskedLM", (): "MPNetModel"},
    config_from_json=config_from_json,
    config_to_json=config_to_json,
    reads_vocabulary=False,
)
