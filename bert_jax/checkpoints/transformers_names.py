"""How transformers stores BERT and its descendants: one table of names for each family.

The families are `model.config.FAMILIES`, by the `model_type` of their `config.json`.
"""

from collections.abc import Mapping
from typing import NamedTuple

from bert_jax.model.transformers_format import HeadNames

PRETRAINING_HEADS = ("mlm", "nsp", "discriminator")


class Family(NamedTuple):
    """How transformers stores the models of one family.

    Attributes:
      class_prefix: what the names of its classes begin with, such as "Bert".
      prefix: of the encoder's tensors in a model with a head.
      names: paths of parameters or of their modules -> names in transformers, without ".weight" or
        ".bias". `{layer}` stands for one tensor per layer.
      tied: tensors that may be stored in addition to the original, or instead of it -> original.
      config_keys: fields of `BertConfig` -> keys of `config.json`.
      activation_key: key of the activation in `config.json`.
      attention_dropout_key: key of the dropout of attention probabilities.
      classifier_dropout_key: key of the dropout before the last layer of a task; "": not read.
      defaults: values of keys that `config.json` may lack, where they differ from `BertConfig`.
      fields: fields of `BertConfig` that are the same in all models of the family.
      required: keys of `config.json` whose only supported value is this.
      heads: end of the name of a class with a task's head, as in `Head.transformers` -> its names.
      headless: heads of pre-training that a model has, in the order of `PRETRAINING_HEADS` -> its
        class, without a task's head.
      causal_class: class of a left-to-right model, whose masked-LM head predicts the next token;
        "" if there is none.
    """

    class_prefix: str
    prefix: str
    names: Mapping[str, str]
    tied: Mapping[str, str]
    config_keys: Mapping[str, str]
    activation_key: str
    attention_dropout_key: str
    classifier_dropout_key: str
    defaults: Mapping[str, object]
    fields: Mapping[str, object]
    required: Mapping[str, object]
    heads: Mapping[str, HeadNames]
    headless: Mapping[tuple[str, ...], str]
    causal_class: str = ""


def _bert_layers(layer: str) -> dict[str, str]:
    return {
        "query": f"{layer}.attention.self.query",
        "key": f"{layer}.attention.self.key",
        "value": f"{layer}.attention.self.value",
        "attention_output": f"{layer}.attention.output.dense",
        "attention_layer_norm": f"{layer}.attention.output.LayerNorm",
        "intermediate": f"{layer}.intermediate.dense",
        "output": f"{layer}.output.dense",
        "output_layer_norm": f"{layer}.output.LayerNorm",
    }


def _names(
    encoder: str, layers: Mapping[str, str], heads: Mapping[str, str], segments: bool = True
) -> dict[str, str]:
    """Returns the names of a family whose embeddings are BERT's."""
    names = {
        "encoder/embeddings/token_embedding": f"{encoder}.embeddings.word_embeddings",
        "encoder/embeddings/position_embedding": f"{encoder}.embeddings.position_embeddings",
        "encoder/embeddings/layer_norm": f"{encoder}.embeddings.LayerNorm",
    }
    if segments:
        names["encoder/embeddings/segment_embedding"] = (
            f"{encoder}.embeddings.token_type_embeddings"
        )
    names |= {f"encoder/layers/{module}": name for module, name in layers.items()}
    return names | dict(heads)


def _heads(
    pooler: str | None = None, head: str = "classifier", choice_pooler: str | None = None
) -> dict[str, HeadNames]:
    """Returns the names in all classes; classifiers have a dense layer `pooler` of their own."""
    return {
        "ForSequenceClassification": HeadNames(head, pooler),
        "ForTokenClassification": HeadNames(),
        "ForQuestionAnswering": HeadNames("qa_outputs"),
        "ForMultipleChoice": HeadNames(pooler=choice_pooler),
    }


def _renamed(
    family: Family, class_prefix: str, prefix: str, heads: Mapping[tuple[str, ...], str], **changes
) -> Family:
    """Returns a copy of a family with other names of its classes and its encoder.

    Args:
      family: the family that computes the same.
      class_prefix: what the names of its classes begin with, such as "Camembert".
      prefix: what the names of the encoder's tensors begin with, such as "roberta.".
      heads: the modules of each class without a task's head -> its name without `class_prefix`.
      **changes: other fields that differ.
    """

    def renamed(name: str) -> str:
        is_of_encoder = name.startswith(family.prefix)
        return prefix + name.removeprefix(family.prefix) if is_of_encoder else name

    return family._replace(
        class_prefix=class_prefix,
        prefix=prefix,
        names={path: renamed(name) for path, name in family.names.items()},
        tied={renamed(copy): renamed(original) for copy, original in family.tied.items()},
        headless={modules: class_prefix + name for modules, name in heads.items()},
        causal_class=f"{class_prefix}ForCausalLM",
    )._replace(**changes)


_CONFIG_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "type_vocab_size": "type_vocab_size",
    "initializer_range": "initializer_range",
    "layer_norm_epsilon": "layer_norm_eps",
    "dropout_rate": "hidden_dropout_prob",
}
_CAUSAL_KEY = {"causal": "is_decoder"}
_REQUIRED = {
    "position_embedding_type": "absolute",
    "add_cross_attention": False,
    "quantization_config": None,
    "pruned_heads": {},
}

BERT = Family(
    class_prefix="Bert",
    prefix="bert.",
    names=_names(
        "bert",
        _bert_layers("bert.encoder.layer.{layer}"),
        {
            "encoder/pooler/dense": "bert.pooler.dense",
            "mlm": "cls.predictions",
            "mlm/transform": "cls.predictions.transform.dense",
            "mlm/layer_norm": "cls.predictions.transform.LayerNorm",
            "nsp/dense": "cls.seq_relationship",
        },
    ),
    tied={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    config_keys=_CONFIG_KEYS | _CAUSAL_KEY,
    activation_key="hidden_act",
    attention_dropout_key="attention_probs_dropout_prob",
    classifier_dropout_key="classifier_dropout",
    defaults={"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    fields={},
    required=_REQUIRED,
    heads=_heads(),
    headless={
        ("mlm", "nsp"): "BertForPreTraining",
        ("mlm",): "BertForMaskedLM",
        ("nsp",): "BertForNextSentencePrediction",
        (): "BertModel",
    },
    causal_class="BertLMHeadModel",
)

ROBERTA = Family(
    class_prefix="Roberta",
    prefix="roberta.",
    names=_names(
        "roberta",
        _bert_layers("roberta.encoder.layer.{layer}"),
        {
            "encoder/pooler/dense": "roberta.pooler.dense",
            "mlm": "lm_head",
            "mlm/transform": "lm_head.dense",
            "mlm/layer_norm": "lm_head.layer_norm",
        },
    ),
    tied={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    config_keys=_CONFIG_KEYS | _CAUSAL_KEY,
    activation_key="hidden_act",
    attention_dropout_key="attention_probs_dropout_prob",
    classifier_dropout_key="classifier_dropout",
    defaults={
        "vocab_size": 50265,
        "max_position_embeddings": 512,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
    },
    fields={"position_offset": 2},  # Positions begin after the id of padding, 1.
    required=_REQUIRED | {"pad_token_id": 1, "hidden_act": "gelu"},
    heads=_heads(pooler="classifier.dense", head="classifier.out_proj"),
    headless={("mlm",): "RobertaForMaskedLM", (): "RobertaModel"},
    causal_class="RobertaForCausalLM",
)

# These differ from RoBERTa in their vocabulary.
_ROBERTA_HEADS = {("mlm",): "ForMaskedLM", (): "Model"}
_OTHER_VOCABULARY = ROBERTA.defaults | {"vocab_size": 30522}
XLM_ROBERTA = _renamed(
    ROBERTA, "XLMRoberta", "roberta.", _ROBERTA_HEADS, defaults=_OTHER_VOCABULARY
)
CAMEMBERT = _renamed(ROBERTA, "Camembert", "roberta.", _ROBERTA_HEADS, defaults=_OTHER_VOCABULARY)
DATA2VEC_TEXT = _renamed(
    ROBERTA, "Data2VecText", "data2vec_text.", _ROBERTA_HEADS, defaults=_OTHER_VOCABULARY
)

# ERNIE adds an embedding of the task, whose index is 0 by default.
ERNIE = _renamed(
    BERT,
    "Ernie",
    "ernie.",
    {
        ("mlm", "nsp"): "ForPreTraining",
        ("mlm",): "ForMaskedLM",
        ("nsp",): "ForNextSentencePrediction",
        (): "Model",
    },
    config_keys=_CONFIG_KEYS | _CAUSAL_KEY | {"num_task_embeddings": "task_type_vocab_size"},
    defaults=BERT.defaults | {"task_type_vocab_size": 3},
)
_TASK_EMBEDDING = {"encoder/embeddings/task_embedding": "ernie.embeddings.task_type_embeddings"}
ERNIE = ERNIE._replace(names={**ERNIE.names, **_TASK_EMBEDDING})

DISTILBERT = Family(
    class_prefix="DistilBert",
    prefix="distilbert.",
    names=_names(
        "distilbert",
        {
            "query": "distilbert.transformer.layer.{layer}.attention.q_lin",
            "key": "distilbert.transformer.layer.{layer}.attention.k_lin",
            "value": "distilbert.transformer.layer.{layer}.attention.v_lin",
            "attention_output": "distilbert.transformer.layer.{layer}.attention.out_lin",
            "attention_layer_norm": "distilbert.transformer.layer.{layer}.sa_layer_norm",
            "intermediate": "distilbert.transformer.layer.{layer}.ffn.lin1",
            "output": "distilbert.transformer.layer.{layer}.ffn.lin2",
            "output_layer_norm": "distilbert.transformer.layer.{layer}.output_layer_norm",
        },
        {
            "encoder/pooler/dense": "distilbert.pooler",  # Only below a classifier.
            "mlm": "vocab_projector",
            "mlm/transform": "vocab_transform",
            "mlm/layer_norm": "vocab_layer_norm",
        },
        segments=False,
    ),
    tied={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    config_keys={
        "vocab_size": "vocab_size",
        "hidden_size": "dim",
        "num_layers": "n_layers",
        "num_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "max_position_embeddings": "max_position_embeddings",
        "initializer_range": "initializer_range",
        "dropout_rate": "dropout",
    },
    activation_key="activation",
    attention_dropout_key="attention_dropout",
    classifier_dropout_key="",  # It has one for each task.
    defaults={"n_layers": 6, "dropout": 0.1, "attention_dropout": 0.1},
    fields={"type_vocab_size": 0, "pooler_activation": "relu"},
    required={"quantization_config": None, "pruned_heads": {}},
    heads=_heads(pooler="pre_classifier", choice_pooler="pre_classifier"),
    headless={("mlm",): "DistilBertForMaskedLM", (): "DistilBertModel"},
)

_ALBERT_LAYER = "albert.encoder.albert_layer_groups.{layer}.albert_layers.0"
ALBERT = Family(
    class_prefix="Albert",
    prefix="albert.",
    names=_names(
        "albert",
        {
            "query": f"{_ALBERT_LAYER}.attention.query",
            "key": f"{_ALBERT_LAYER}.attention.key",
            "value": f"{_ALBERT_LAYER}.attention.value",
            "attention_output": f"{_ALBERT_LAYER}.attention.dense",
            "attention_layer_norm": f"{_ALBERT_LAYER}.attention.LayerNorm",
            "intermediate": f"{_ALBERT_LAYER}.ffn",
            "output": f"{_ALBERT_LAYER}.ffn_output",
            "output_layer_norm": f"{_ALBERT_LAYER}.full_layer_layer_norm",
        },
        {
            "encoder/embeddings/projection": "albert.encoder.embedding_hidden_mapping_in",
            "encoder/pooler/dense": "albert.pooler",
            "mlm": "predictions",
            "mlm/transform": "predictions.dense",
            "mlm/layer_norm": "predictions.LayerNorm",
            "nsp/dense": "sop_classifier.classifier",
        },
    ),
    tied={
        "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
        "predictions.decoder.bias": "predictions.bias",
    },
    config_keys=_CONFIG_KEYS
    | {"embedding_size": "embedding_size", "num_layer_groups": "num_hidden_groups"},
    activation_key="hidden_act",
    attention_dropout_key="attention_probs_dropout_prob",
    classifier_dropout_key="classifier_dropout_prob",
    defaults={
        "vocab_size": 30000,
        "embedding_size": 128,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "intermediate_size": 16384,
        "hidden_act": "gelu_new",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "classifier_dropout_prob": 0.1,
    },
    fields={"shares_layers": True},
    required=_REQUIRED | {"inner_group_num": 1},
    heads=_heads(),
    headless={
        ("mlm", "nsp"): "AlbertForPreTraining",
        ("mlm",): "AlbertForMaskedLM",
        (): "AlbertModel",
    },
)

ELECTRA = Family(
    class_prefix="Electra",
    prefix="electra.",
    names=_names(
        "electra",
        _bert_layers("electra.encoder.layer.{layer}"),
        {
            "encoder/embeddings/projection": "electra.embeddings_project",
            "encoder/pooler/dense": "electra.pooler",  # Only below a classifier.
            "mlm": "generator_lm_head",
            "mlm/transform": "generator_predictions.dense",
            "mlm/layer_norm": "generator_predictions.LayerNorm",
            "discriminator/dense": "discriminator_predictions.dense",
            "discriminator/output": "discriminator_predictions.dense_prediction",
        },
    ),
    tied={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
    config_keys=_CONFIG_KEYS | _CAUSAL_KEY | {"embedding_size": "embedding_size"},
    activation_key="hidden_act",
    attention_dropout_key="attention_probs_dropout_prob",
    classifier_dropout_key="classifier_dropout",
    defaults={
        "embedding_size": 128,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
    },
    fields={"pooler_activation": "gelu"},
    required=_REQUIRED
    | {
        "hidden_act": "gelu",
        "summary_type": "first",
        "summary_use_proj": True,
        "summary_activation": "gelu",
    },
    heads=_heads(
        pooler="classifier.dense",
        head="classifier.out_proj",
        choice_pooler="sequence_summary.summary",
    ),
    headless={
        ("mlm",): "ElectraForMaskedLM",
        ("discriminator",): "ElectraForPreTraining",
        (): "ElectraModel",
    },
    causal_class="ElectraForCausalLM",
)

FAMILIES = {
    "bert": BERT,
    "roberta": ROBERTA,
    "xlm-roberta": XLM_ROBERTA,
    "camembert": CAMEMBERT,
    "data2vec-text": DATA2VEC_TEXT,
    "ernie": ERNIE,
    "distilbert": DISTILBERT,
    "albert": ALBERT,
    "electra": ELECTRA,
}

# `model_type` of unsupported encoders -> why they are not read, and the nearest alternative.
_PRE_LAYER_NORM = "its LayerNorm comes before each sublayer. Nearest: "
_ROTARY = "it has rotary positions, and layers that differ from ModernBERT's. Nearest: "
_RELATIVE = "its attention has relative positions. Nearest: "
UNSUPPORTED = {
    "xlm-roberta-xl": f"{_PRE_LAYER_NORM}xlm-roberta-large",
    "roberta-prelayernorm": f"{_PRE_LAYER_NORM}roberta-base",
    "megatron-bert": f"{_PRE_LAYER_NORM}bert-large",
    "nomic_bert": f"{_ROTARY}ModernBERT-base, or a BERT of sentence-transformers",
    "eurobert": f"{_ROTARY}ModernBERT-base, or xlm-roberta-base for other languages",
    "jina_embeddings_v3": f"{_ROTARY}xlm-roberta-base",
    "roformer": f"{_ROTARY}a BERT of the same language",
    "deberta": f"{_RELATIVE}deberta-v3-base",
    "big_bird": "its attention is block-sparse. Nearest: longformer, for up to 4,096 tokens",
    "mobilebert": "its layers have bottlenecks. Nearest: the distilbert and tinybert models",
    "rembert": "its output embeddings are not tied. Nearest: xlm-roberta-base",
    "convbert": "its layers have convolutions. Nearest: electra",
    "xmod": "its layers have an adapter for each language. Nearest: xlm-roberta-base",
    "luke": "it reads entities beside words. Nearest: roberta, with the same tokenizer",
    "bert-generation": "it has no pooler and another head. Nearest: a BERT of the same language",
}


def check_positions(config, pad_id: int) -> None:
    """Raises ValueError if transformers would count the positions of tokens from another row.

    `config` is a model config, or `config.model` of a run. transformers has no `position_offset`:
    RoBERTa's positions begin after the id of padding.
    """
    offset = getattr(config, "position_offset", 0)
    if offset not in (0, pad_id + 1):
        name = getattr(config, "family", config.architecture)
        raise ValueError(
            f"position_offset is {offset}, and so {name} expects padding to have the id "
            f"{offset - 1}, but in this vocabulary it has {pad_id}: use one that "
            "tools/train_vocab.py --kind=bpe trained"
        )
