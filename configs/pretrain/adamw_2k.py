"""BERT_BASE with batches of 2,048 rows of 512 tokens, from RoBERTa's study of batch sizes.

Source: Liu et al. (2019), table 3, which compares batch sizes at an equal number of rows: BASE on
BookCorpus and Wikipedia, with a byte-level vocabulary:

    batch   steps   learning rate   held-out perplexity   MNLI-m
    256     1 M     1e-4            3.99                  84.7
    2K      125 K   7e-4            3.68                  85.2     (this configuration)
    8K      31 K    1e-3            3.77                  84.6

As in section 3.1: Adam with beta2 0.98, epsilon 1e-6 and weight decay 0.01; rows of 512 tokens in
all steps; dynamic masking. Differences: your corpus and vocabulary; next-sentence prediction is
kept (the paper drops it, at little or no cost); gradients are clipped at 1.0; and the warm-up has
BERT's 10,000 steps, as the paper states none for this row.

Expected time: not run at full size; tools/tpu_report.py estimates it.
Expected result: not run at full size; held-out perplexity 3.68 in the paper, on its vocabulary.

    python tools/tpu_report.py --config=configs/pretrain/adamw_2k.py
    python -m bert_jax.pretrain --config=configs/pretrain/adamw_2k.py --workdir=/gcs/runs/2k \
        --config.long_phase.corpus=/gcs/corpus/512

`adamw_2k.py:runlocal` runs a few steps of eight rows instead.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import bert_base, fields, pod_base


def get_config(arg: str = "") -> ConfigDict:
    _, arg = pod_base.split_chip(arg)
    config = bert_base.get_config()
    config.shard_weight_update = True
    config.num_steps = 0  # Skips the phase with rows of 128.
    config.long_phase.num_steps = 125_000
    config.batch_size = config.long_phase.batch_size = 2048
    config.optimizer = "adamw"
    config.learning_rate = 7e-4
    config.beta2 = 0.98
    return fields.apply_runlocal(config, arg)
