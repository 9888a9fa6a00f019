"""BERT_BASE, uncased: 12 layers, hidden 768, 12 heads, 110 M parameters.

Source: Devlin et al. (2018), section 3.1 and appendix A.2: batch 256, 1 M steps, of which 900,000
on rows of 128 tokens and the last 100,000 on rows of 512; Adam, learning rate 1e-4, 10,000 steps
of warm-up. Every other configuration in this directory starts from this one.

Expected time: 4 days on 16 TPU chips in the paper. Not run at full size here.
Expected result: held-out perplexity 3.99 (the paper's table 6). Not run at full size here.

    python -m bert_jax.pretrain --config=configs/pretrain/bert_base.py --workdir=runs/base \
        --config.corpus=corpus/128 --config.long_phase.corpus=corpus/512

`bert_base.py:runlocal` is the same run cut down to a few steps of eight rows.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config(arg: str = "") -> ConfigDict:
    config = ConfigDict()
    config.seed = 0

    config.corpus = ""  # Directory that tools/prepare_corpus.py wrote, with rows of 128.
    config.num_steps = 900_000
    config.batch_size = 256  # Rows in one update, over all devices.
    config.max_predictions = 20  # Most masked positions of one row.

    # Then so many steps on longer rows; the learning rate decays over both phases together.
    config.long_phase = ConfigDict()
    config.long_phase.corpus = ""
    config.long_phase.num_steps = 100_000
    config.long_phase.batch_size = 256
    config.long_phase.max_predictions = 77

    config.model = ConfigDict()  # Any field of bert_jax.BertConfig but the vocabulary's size.
    config.model.size = "base"
    for name in ("num_layers", "hidden_size", "num_heads", "intermediate_size"):
        config.model[name] = placeholder(int)  # As the size says, if not given.
    config.model.dropout_rate = 0.1
    config.model.initializer_range = 0.02
    config.model.layer_norm_epsilon = 1e-12
    config.model.max_position_embeddings = 512
    config.model.dtype = "bfloat16"
    config.model.scan_layers = True
    config.model.remat = "none"

    config.masking = ConfigDict()
    config.masking.rate = 0.15
    config.masking.unit = "token"  # Or "whole_word", or "span".
    config.masking.repeat_after = 0  # Epochs after which a row's masks repeat; 0: never.

    config.optimizer = "bert_adam"  # Or "adamw", or "lamb".
    config.learning_rate = 1e-4
    config.warmup_steps = 10_000
    config.weight_decay = 0.01
    config.clip_norm = 1.0
    config.beta1 = 0.9
    config.beta2 = 0.999
    config.epsilon = 1e-6

    # Devices along each axis of the mesh; -1 takes what the others leave.
    config.mesh = ConfigDict({"data": -1, "fsdp": 1, "tensor": 1})
    # Divide parameters and optimizer state over `data` too; each device then updates a part.
    config.shard_weight_update = False
    # Rows that one device takes at once; gradients accumulate over the rest. 0: all at once.
    config.per_device_batch_size = 0

    config.log_every = 100
    config.eval_every = 10_000
    config.eval_batch_size = 256
    config.checkpoint_every = 5_000
    config.keep_checkpoints = 3  # The last so many,
    config.keep_every = 0  # and those of every so many steps; 0: none.
    config.stall_seconds = 600  # Without a step for so long, the stacks of all threads are shown.

    return cut_down(config, arg)


def cut_down(config: ConfigDict, arg: str) -> ConfigDict:
    """With "runlocal", a few steps of eight rows: it shows that all works, no more."""
    if not arg:
        return config
    if arg != "runlocal":
        raise ValueError(f"unknown argument {arg!r} after the colon: expected 'runlocal' or none")
    config.model.dtype = "float32"
    config.num_steps = 10
    config.batch_size = config.long_phase.batch_size = config.eval_batch_size = 8
    config.long_phase.num_steps = 4 if config.long_phase.num_steps else 0
    config.warmup_steps = 2
    config.log_every = config.eval_every = config.checkpoint_every = 5
    return config
