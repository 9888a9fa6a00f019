"""Finds the file that defines a model, by the `architecture` that its model config names.

That file offers:

- `Config`, the model config: a frozen dataclass with at least `vocab_size`, `hidden_size`,
  `num_layers`, `num_heads`, `max_position_embeddings`, `dropout_rate`, `attention_dropout_rate`,
  `causal` and `initializer_range`. Its class attribute `architecture` is the name of the file, and
  `fixed_fields` are those that are known from a model's weights. Optional: a class method
  `named(size, **overrides)`, which returns published sizes, and the `size_fields` that they set;
  `num_stacked_layers`, the number of layers that have parameters of their own, if consecutive ones
  share them; `has_pooler_input_dropout`, whether classifiers have dropout before the pooler, too;
  `pools_positions`, whether heads that predict each position read it through the pooler;
  `pooler_in_lm_head`, the part of the head for tokens from which the pooler of a task starts;
  `cls_last`, whether sequences end in [CLS], which poolers read (the tokenizer must agree);
  `has_query_stream`, whether a batch with `ranks` (`AttentionMask`) has hidden states of two
  streams, of which the head for tokens reads `query` (`model/xlnet.py`);
  `classifier_pooling`, "mean" if the pooler of a classifier reads the mean of all positions;
  `embedding_dropout_rate` and `classifier_dropout_rate`, if they are not `dropout_rate`;
  `global_tokens`, which tokens see all of a sequence, replaced by those of a task's head;
  `position_offset`, the rows of its table of positions before that of the first token; and
  `pretraining_rates`, the names of rates that fine-tuning sets to None;
- `Embeddings(config, dtype)`, whose `token_embedding` is a `layers.TokenEmbedding`; with a query
  stream, it also takes `ranks`;
- `LayerInputs(config)`, which builds from a batch what all layers read beside the hidden states: an
  `AttentionMask`, with whatever else they share, such as tables of rotations, or a `ScoreBias` of
  distances (`score_bias.py`); it may have parameters;
- `encoder_layers(config)`, all layers in their order, as Flax modules without a parent. Equal
  modules are alike, and compiled once (`layer_stack.py`). A layer has the methods `attend`;
  `finish`, which treats each position on its own; `scores`, which attention maps and distillation
  read; and `dropout_places`, where it drops elements, with the rate of each: "rate" or
  "attention_rate" of `Dropout`, which a step sets, or a number, which the model config fixes; or
  `OfTable`, with the rate of a place in a table that all rows of a batch share. The first layer
  has all places;
- `Last(config)`, between the last layer and all heads: `layers.Identity`, or a LayerNorm;
- `Pooler(config)`, `LmHead(config)` and `PairHead(config)`;
- `RULES`, the sharding of its parameters, and `flops_per_row`.

It may offer `FAST_PATH`, the name of a module that computes its layers with kernels
(`execution.py`), and, in a module elsewhere, `TRANSFORMERS`, how it is exported
(`transformers_format.py`). `model/bert.py` documents the arguments. The name is a file's in
`bert_jax/model`, or the dotted name of a module elsewhere, which needs no edit in this package.
"""

from types import ModuleType

from bert_jax.runtime.named_modules import import_part


def architecture_of(config) -> ModuleType:
    """Returns the module that defines the model of a model config."""
    return import_part("bert_jax.model", config.architecture, "encoder_layers")


def config_from_settings(settings: dict):
    """Returns the model config from the settings of a checkpoint."""
    fields = dict(settings["architecture"])
    module = import_part("bert_jax.model", fields.pop("name"), "encoder_layers", only_imported=True)
    return module.Config(**fields)


def config_to_settings(config) -> dict:
    """Returns what a checkpoint stores of a model config: the architecture's name, and fields."""
    return {"name": config.architecture} | vars(config)
