"""BERT_MINI from scratch on little text, 1 to 100 MB: short rows first.

Source: none; the settings of demo.py, for a larger model and longer runs. On little text the
paper's recipe learns slowly: a small model stays at the loss of word frequencies. Where weights for
the language exist, `continue.py` needs less text and time: docs/pretraining.md says what to expect.

Expected time: about 160 minutes on two cores of an AMD EPYC, computed from the demo's speed of
2026-11-26 (25 TFLOP in 574 s; this is 419 TFLOP with a vocabulary of 8,192 pieces). It has not been
run to the end.
Expected result: a held-out masked-LM loss below `unigram_entropy` in result.json, the loss of word
frequencies (an estimate).

    python tools/prepare_corpus.py --input='texts/*.txt' --documents=files --vocab=vocab.txt \
        --output=corpus/16 --max_seq_length=16 --dupe_factor=10 --heldout_fraction=0.1
    python tools/prepare_corpus.py --input='texts/*.txt' --documents=files --vocab=vocab.txt \
        --output=corpus/64 --max_seq_length=64 --dupe_factor=4 --heldout_fraction=0.1
    python -m bert_jax.pretrain --config=configs/pretrain/small_corpus.py --workdir=runs/small \
        --config.corpus=corpus/16 --config.long_phase.corpus=corpus/64

`small_corpus.py:runlocal` runs a few steps of eight rows instead.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import bert_base, fields


def get_config(arg: str = "") -> ConfigDict:
    config = bert_base.get_config()
    # Short rows first: with 16 tokens a small model soon learns that neighbors predict a word best;
    # with 64 or more, learning it takes many times as long.
    config.num_steps = 10_000
    config.batch_size = 64
    config.long_phase.num_steps = 5_000
    config.long_phase.batch_size = 32

    config.model.size = "mini"  # 4 layers, hidden 256; "tiny" takes a sixth of the time.
    config.model.dtype = "float32"  # A CPU is slower in bfloat16.
    config.model.dropout_rate = 0.0  # The run is too short to overfit; the log counts the epochs.
    config.model.initializer_range = 0.04  # 0.02 suits a hidden size of 768.

    config.optimizer = "adamw"
    config.learning_rate = 5e-4  # 1e-3 suits "tiny".
    config.warmup_steps = 500
    config.decay_power = 0.5  # Keeps the rate high until the long rows, which learn most.

    config.log_every = 100
    config.eval_every = config.checkpoint_every = 1_000
    config.eval_batch_size = 64
    return fields.apply_runlocal(config, arg)
