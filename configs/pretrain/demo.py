"""The demo: a small BERT on 106 articles of Wikipedia, in minutes on two CPU cores.

Source: none; size and schedule are chosen so that the held-out loss falls clearly below the
entropy of word frequencies. The model is not good enough for any real use.

Expected time: 5 minutes on two idle cores of an AMD EPYC (299 s, measured 2026-11-27).
Expected result: held-out MLM loss 5.20 nats, accuracy 25.3 %, next-sentence accuracy 56 %.

    make demo
    python -m bert_jax.pretrain --config=configs/pretrain/demo.py --workdir=runs/demo
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import bert_base, fields


def get_config(arg: str = "") -> ConfigDict:
    config = bert_base.get_config()
    # Short rows first, as in the paper, but much shorter: with 16 tokens a small model soon learns
    # that neighbors predict a word best; with 64 tokens, learning it takes longer than this run.
    config.corpus = "runs/demo-data/corpus-16"
    config.num_steps = 3000
    config.batch_size = 64

    config.long_phase.corpus = "runs/demo-data/corpus-64"
    config.long_phase.num_steps = 2300
    config.long_phase.batch_size = 32

    config.model.size = "tiny"
    config.model.dtype = "float32"
    config.model.dropout_rate = 0.0  # The run is too short to overfit.
    config.model.initializer_range = 0.04  # 0.02 suits a hidden size of 768.

    config.optimizer = "adamw"
    config.learning_rate = 1e-3  # 7e-4 learns less, 2e-3 diverges.
    config.warmup_steps = 100
    config.decay_power = 0.5  # Keeps the rate high until the long rows, which learn most.

    config.log_every = 100
    config.eval_every = 500
    config.eval_batch_size = 64
    config.checkpoint_every = 500
    return fields.apply_runlocal(config, arg)
