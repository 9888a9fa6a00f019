"""The formats of transformers that are read and written, and BERT's `config.json`."""

import functools
from collections.abc import Mapping

from bert_jax.checkpoints.transformers_names import FAMILIES
from bert_jax.model import (
    deberta_names,
    esm_names,
    longformer_names,
    modernbert_names,
    mpnet_names,
    xlnet_names,
)
from bert_jax.model.architecture import architecture_of
from bert_jax.model.config import BertConfig
from bert_jax.model.transformers_format import (
    ACTIVATION_NAMES,
    TransformersFormat,
    build_config,
    check_required,
    read_activation,
)


def _from_json(name: str, values: Mapping) -> BertConfig:
    """Reads the model config of the family `name`. Raises ValueError if it is not supported."""
    family = FAMILIES[name]
    check_required(values, family.required)
    keys = family.config_keys
    values = {**family.defaults, **values}
    fields = {field: values[key] for field, key in keys.items() if key in values}
    for key in (*keys.values(), family.attention_dropout_key, family.classifier_dropout_key):
        is_optional = key == family.classifier_dropout_key and values.get(key) is None
        if not is_optional and not isinstance(values.get(key, 0), int | float):
            raise ValueError(f"config.json: {key} is {values[key]!r}, expected a number")
    fields |= {"family": name, **family.fields}
    if "num_task_embeddings" in fields and not values.get("use_task_id", False):
        fields["num_task_embeddings"] = 0
    fields["activation"] = read_activation(values, family.activation_key)
    attention_dropout = values.get(family.attention_dropout_key, fields["dropout_rate"])
    if attention_dropout != fields["dropout_rate"]:
        fields["attention_dropout_rate"] = attention_dropout
    fields["classifier_dropout_rate"] = values.get(family.classifier_dropout_key)
    if "max_position_embeddings" in fields:
        fields["max_position_embeddings"] -= fields.get("position_offset", 0)
    if fields.get("embedding_size", 0) == fields.get("hidden_size") and name != "albert":
        fields["embedding_size"] = None  # No projection.
    return build_config(BertConfig, fields)


def _to_json(config: BertConfig) -> dict:
    """Returns the contents of `config.json`, without its class and head."""
    family = FAMILIES[config.family]
    attention_dropout = config.attention_dropout_rate
    classifier_dropout = config.classifier_dropout_rate
    if attention_dropout is None:
        attention_dropout = config.dropout_rate
    if classifier_dropout is None and family.classifier_dropout_key in family.defaults:
        classifier_dropout = config.dropout_rate
    values = {
        "model_type": config.family,
        **family.required,
        **{key: getattr(config, field) for field, key in family.config_keys.items()},
        family.activation_key: ACTIVATION_NAMES[config.activation],
        family.attention_dropout_key: attention_dropout,
        "dtype": "float32",
    }
    if classifier_dropout is not None and family.classifier_dropout_key:
        values[family.classifier_dropout_key] = classifier_dropout
    values["max_position_embeddings"] += config.position_offset
    if "num_task_embeddings" in family.config_keys:
        values["use_task_id"] = config.num_task_embeddings > 0
    if "embedding_size" in values and config.embedding_size is None:
        values["embedding_size"] = config.hidden_size
    return values


def _bert_format(name: str) -> TransformersFormat:
    family = FAMILIES[name]
    return TransformersFormat(
        class_prefix=family.class_prefix,
        prefix=family.prefix,
        names=family.names,
        parts={},
        padded=("encoder/embeddings/token_embedding/embedding", "mlm/bias"),
        tied=family.tied,
        heads=family.heads,
        headless=family.headless,
        config_from_json=functools.partial(_from_json, name),
        config_to_json=_to_json,
        causal_class=family.causal_class,
    )


FORMATS = {name: _bert_format(name) for name in FAMILIES}
FORMATS["modernbert"] = modernbert_names.TRANSFORMERS
FORMATS["mpnet"] = mpnet_names.TRANSFORMERS
FORMATS["esm"] = esm_names.TRANSFORMERS
FORMATS["deberta-v2"] = deberta_names.TRANSFORMERS
FORMATS["longformer"] = longformer_names.TRANSFORMERS
FORMATS["xlnet"] = xlnet_names.TRANSFORMERS
"""How transformers stores the models of each `model_type` of `config.json`."""


def format_of(config) -> TransformersFormat | None:
    """Returns how transformers stores the models of a model config; None if it has none.

    An architecture elsewhere may define its own format, as `TRANSFORMERS`.
    """
    own = getattr(architecture_of(config), "TRANSFORMERS", None)
    stored = own or FORMATS.get(getattr(config, "family", config.architecture))
    return stored.for_config(config) if stored and stored.for_config else stored
