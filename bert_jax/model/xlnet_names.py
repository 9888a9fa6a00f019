"""How transformers stores XLNet: the names of its tensors, and `config.json`."""

from collections.abc import Mapping

from absl import logging

from bert_jax.model.transformers_format import (
    ACTIVATION_NAMES,
    HeadNames,
    TransformersFormat,
    build_config,
    read_activation,
    read_numbers,
)
from bert_jax.model.xlnet import XlnetConfig

# Fields of `XlnetConfig` -> keys of `config.json`.
_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "intermediate_size": "d_inner",
    "dropout_rate": "dropout",
    "classifier_dropout_rate": "summary_last_dropout",
    "initializer_range": "initializer_range",
    "layer_norm_epsilon": "layer_norm_eps",
}
# Other names of the same, which transformers reads, too.
_OTHER_NAMES = {
    "n_token": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
}
# Of keys that `config.json` may lack.
_DEFAULTS = {
    "d_model": 1024,
    "n_layer": 24,
    "n_head": 16,
    "d_inner": 4096,
    "summary_last_dropout": 0.1,
}
# Keys of `config.json` whose only supported values are these; the first is assumed.
_REQUIRED = {
    "bi_data": (False,),  # Half of a batch would be read from right to left.
    "same_length": (False,),
    "summary_type": ("last", "cls_index"),  # Without an index, also the last token.
    "summary_use_proj": (True,),
    "summary_first_dropout": (0,),  # Before the pooler; in the released models it has none.
    "tie_word_embeddings": (True,),
    "quantization_config": (None,),
}
_CAUSAL = {"bi": False, "uni": True}
# `config.json` says nothing about lengths, which no table limits: the released models were trained
# on up to 512 tokens. `model_max_length` of `tokenizer_config.json` may state more; very large
# numbers there mean none.
_TRAINED_LENGTH, _LARGEST_LENGTH = 512, 1 << 20
_BEAM_CLASS = "XLNetForQuestionAnswering"


def config_from_json(values: Mapping) -> XlnetConfig:
    """Reads the model config from the contents of `config.json`.

    Keys of the memory (`mem_len`, `reuse_len`, `use_mems_eval`, `use_mems_train`) have no effect on
    a sequence that is read alone, and neither has `untie_r`, as each layer has its own tensors.
    Raises ValueError for what is not supported.
    """
    if _BEAM_CLASS in (values.get("architectures") or ()):
        raise ValueError(
            f"config.json: architectures has {_BEAM_CLASS}, whose head beam-searches over "
            f"spans, which is not supported, expected {_BEAM_CLASS}Simple. Remove "
            "`architectures` to read the encoder alone"
        )
    renamed = {_OTHER_NAMES.get(key, key): value for key, value in values.items()}
    values = {**_DEFAULTS, **renamed}
    for key, expected in _REQUIRED.items():
        if values.get(key, expected[0]) not in expected:
            raise ValueError(f"config.json: {key} is {values[key]!r}, expected {expected[0]!r}")
    fields = read_numbers(values, _KEYS | {"max_distance": "clamp_len"})
    fields["max_distance"] = max(fields.get("max_distance", 0), 0)  # -1 means none.
    head_dim = values["d_model"] // max(values["n_head"], 1)
    if values.get("d_head") not in (None, head_dim):
        raise ValueError(f"config.json: d_head is {values['d_head']!r}, expected {head_dim}")
    kind = values.get("attn_type", "bi")
    if kind not in _CAUSAL:
        expected = f"expected one of {', '.join(_CAUSAL)}"
        raise ValueError(f"config.json: attn_type is {kind!r}, {expected}")
    fields["causal"] = _CAUSAL[kind]
    fields["activation"] = read_activation(values, "ff_activation")
    fields["pooler_activation"] = read_activation(values, "summary_activation", "tanh")
    length = values.get("model_max_length")
    states_more = isinstance(length, int) and _TRAINED_LENGTH < length <= _LARGEST_LENGTH
    fields["max_position_embeddings"] = length if states_more else _TRAINED_LENGTH
    return build_config(XlnetConfig, fields)


def config_to_json(config: XlnetConfig) -> dict:
    """Returns the contents of `config.json`, without its class and head."""
    values = {"model_type": "xlnet"} | {key: each[0] for key, each in _REQUIRED.items()}
    values |= {key: getattr(config, field) for field, key in _KEYS.items()}
    if config.classifier_dropout_rate is None:
        values["summary_last_dropout"] = config.dropout_rate
    if config.attention_dropout_rate not in (None, config.dropout_rate):
        rate = config.attention_dropout_rate
        logging.warning("not exported: attention_dropout_rate=%g; transformers has none", rate)
    return values | {
        "d_head": config.hidden_size // config.num_heads,
        "attn_type": "uni" if config.causal else "bi",
        "clamp_len": config.max_distance or -1,
        "untie_r": True,
        "mem_len": None,
        "ff_activation": ACTIVATION_NAMES[config.activation],
        "summary_activation": ACTIVATION_NAMES[config.pooler_activation],
        "dtype": "float32",
    }


_LAYER = "transformer.layer.{layer}"
_ATTENTION = f"{_LAYER}.rel_attn"
TRANSFORMERS = TransformersFormat(
    class_prefix="XLNet",
    prefix="transformer.",
    names={
        "encoder/embeddings/token_embedding": "transformer.word_embedding",
        "encoder/layers/attention_layer_norm": f"{_ATTENTION}.layer_norm",
        "encoder/layers/intermediate": f"{_LAYER}.ff.layer_1",
        "encoder/layers/output": f"{_LAYER}.ff.layer_2",
        "encoder/layers/output_layer_norm": f"{_LAYER}.ff.layer_norm",
        "encoder/pooler/dense": "sequence_summary.summary",
        "mlm": "lm_loss",
    },
    whole_names={
        "encoder/embeddings/query": "transformer.mask_emb",
        "encoder/layers/query/kernel": f"{_ATTENTION}.q",
        "encoder/layers/key/kernel": f"{_ATTENTION}.k",
        "encoder/layers/value/kernel": f"{_ATTENTION}.v",
        "encoder/layers/distance_key/kernel": f"{_ATTENTION}.r",
        "encoder/layers/attention_output/kernel": f"{_ATTENTION}.o",
        "encoder/layers/content_bias/bias": f"{_ATTENTION}.r_w_bias",
        "encoder/layers/distance_bias/bias": f"{_ATTENTION}.r_r_bias",
        "encoder/layers/segment_bias/bias": f"{_ATTENTION}.r_s_bias",
        "encoder/layers/segment_key": f"{_ATTENTION}.seg_embed",
    },
    by_head={
        "encoder/layers/query/kernel": "inputs",
        "encoder/layers/key/kernel": "inputs",
        "encoder/layers/value/kernel": "inputs",
        "encoder/layers/distance_key/kernel": "inputs",
        "encoder/layers/attention_output/kernel": "outputs",
    },
    parts={},
    padded=("encoder/embeddings/token_embedding/embedding", "mlm/bias"),
    tied={"lm_loss.weight": "transformer.word_embedding.weight"},
    heads={
        "ForSequenceClassification": HeadNames("logits_proj"),
        "ForTokenClassification": HeadNames(),
        "ForQuestionAnswering": HeadNames("qa_outputs", class_suffix="ForQuestionAnsweringSimple"),
        "ForMultipleChoice": HeadNames("logits_proj"),
    },
    headless={("mlm",): "XLNetLMHeadModel", (): "XLNetModel"},
    causal_class="XLNetLMHeadModel",
    config_from_json=config_from_json,
    config_to_json=config_to_json,
    reads_vocabulary=False,
)
