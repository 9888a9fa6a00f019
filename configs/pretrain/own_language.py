"""An encoder of your own language, from scratch, on the TPUs that notebooks offer: 10 G tokens.

`own_language.py:bert_small` (4 layers, hidden 512; the default), `:bert_base`, `:modernbert_small`
(Ettin's 10 layers of hidden size 384) or `:modernbert_base`.

Source: no table of a paper. The sizes are published ones, the schedule is that of
modernbert_base.py (warm-up, stable, decay), and a batch is 131,072 tokens, as in BERT_BASE's long
rows. BERT has rows of 512 tokens and masks of 15 %, ModernBERT rows of 1,024 and masks of 30 %;
neither has a next-sentence loss.

The run may stop at any time and go on elsewhere from a checkpoint, as sessions of notebooks end
after some hours: `timeout --signal=TERM 8h python -m ...` ends one with exit code 75. A longer run
continues from a checkpoint of the stable rate, with --config.branch_from and another
--config.num_steps (docs/pretraining.md).

Expected time: by the compiler's estimates of 2026-11-29, on one v5e chip 2.3 hours (bert_small),
11.7 (bert_base), 4.4 (modernbert_small) and 19.8 (modernbert_base); docs/tpu.md has further slices.
None was run.
Expected result: not run at full size.

    python tools/train_vocab.py --input='texts/*.txt' --output=vocab.txt --size=32768
    python tools/prepare_corpus.py --input='texts/*.txt' --vocab=vocab.txt --rows=full_sentences \
        --max_seq_length=512 --language=sl --output=corpus/512
    python -m bert_jax.pretrain --config=configs/pretrain/own_language.py:bert_small \
        --workdir=runs/own --config.corpus=corpus/512

For ModernBERT: `train_vocab.py --kind=bpe --output=bpe.json` and --max_seq_length=1024. From
existing weights instead: continue.py, with the same steps. `own_language.py:runlocal` runs a few
steps of eight rows of BERT instead.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import bert_base, fields, modernbert_base

TOKENS = 10_000_000_000
BATCH_TOKENS = 131_072
# The size, the peak of the learning rate, and the rows of a microbatch, which fit into a chip of
# 16 GiB by the compiler's report.
MODELS = {
    "bert_small": ("small", 1e-3, 32),
    "bert_base": ("base", 4e-4, 16),
    "modernbert_small": ("ettin-32m", 1e-3, 16),
    "modernbert_base": ("base", 6e-4, 8),
}


def get_config(arg: str = "") -> ConfigDict:
    is_local = arg == "runlocal"
    name = "bert_small" if is_local or not arg else arg
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r} after the colon: expected {', '.join(MODELS)}")
    family = modernbert_base if name.startswith("modernbert") else bert_base
    config = family.get_config()
    config.model.size, config.learning_rate, config.per_device_batch_size = MODELS[name]
    config.next_sentence = False
    config.later_phases = ConfigDict()
    config.long_phase.num_steps = 0

    config.max_seq_length = 512
    if family is modernbert_base:
        config.max_seq_length = 1024
        config.model.max_position_embeddings = 1024
        config.model.attention_output_dropout_rate = 0.0
    config.batch_size = BATCH_TOKENS // config.max_seq_length
    config.num_steps = TOKENS // BATCH_TOKENS
    config.decay_steps = config.num_steps // 10
    config.warmup_steps = 2_000

    config.optimizer = "adamw"
    config.beta2 = 0.98
    config.weight_decay = 0.01
    config.checkpoint_every = config.eval_every = 1_000
    return fields.apply_runlocal(config, "runlocal" if is_local else "")
