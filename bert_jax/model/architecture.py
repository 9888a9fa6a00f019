"""Finds the file that defines a model, by the `architecture` that its model config names.

That file offers:

- `Config`, a frozen dataclass with at least `vocab_size`, `hidden_size`, `num_layers`, `num_heads`,
  `max_position_embeddings`, `dropout_rate`, `attention_dropout_rate`, `causal` and
  `initializer_range`. Its class attribute `architecture` is the name of the file, and
  `fixed_fields` are those that are known from a model's weights. Optional: a class method
  `named(size, **overrides)`, which returns published sizes, and the `size_fields` that they set;
  `num_stacked_layers`, the number of layers that have parameters of their own, if some share them;
  `has_pooler_input_dropout`, whether classifiers have dropout before the pooler, too;
- `Embeddings(config, dtype)`, whose `token_embedding` is a `layers.TokenEmbedding`;
- `EncoderLayer(config)`, with the methods `attend`, and `finish`, which treats each position on its
  own;
- `Pooler(config)`, `LmHead(config)` and `PairHead(config)`;
- `RULES`, the sharding of its parameters; `flops_per_row`; and `queries_and_keys(params, x)`, which
  attention maps and distillation read.

`model/bert.py` documents the arguments. The name is a file's in `bert_jax/model`, or the
dotted name of a module elsewhere, which needs no edit in this package.
"""

from types import ModuleType

from bert_jax.runtime.named_modules import import_part


def architecture_of(config) -> ModuleType:
    """Returns the module that defines the model of a model config."""
    return import_part("bert_jax.model", config.architecture, "EncoderLayer")


def config_from_settings(settings: dict):
    """Returns the model config from the settings of a checkpoint."""
    fields = dict(settings["architecture"])
    module = import_part("bert_jax.model", fields.pop("name"), "EncoderLayer", only_imported=True)
    return module.Config(**fields)


def config_to_settings(config) -> dict:
    """Returns what a checkpoint stores of a model config: the architecture's name, and fields."""
    return {"name": config.architecture} | vars(config)
