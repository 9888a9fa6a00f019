"""RoBERTa_LARGE: 24 layers, hidden 1024, 16 heads; byte-level BPE, 355 M parameters.

Source: Liu et al. (2019), table 9: as roberta_base.py, with learning rate 4e-4 after 30,000 steps
of warm-up.

Expected time: a day on 1,024 V100 GPUs for 100,000 steps in the paper. Not run at full size.
Expected result: MNLI-m 90.2, SQuAD 1.1 F1 94.6 in the paper, on 160 GB of text. Not run at full
size.

    python -m bert_jax.pretrain --config=configs/pretrain/roberta_large.py --workdir=runs/roberta \
        --config.long_phase.corpus=roberta/512

The corpus is the same as for roberta_base.py. `roberta_large.py:runlocal` runs a few steps of eight
rows instead.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import roberta_base


def get_config(arg: str = "") -> ConfigDict:
    config = roberta_base.get_config(arg)
    config.model.size = "large"
    config.learning_rate = 4e-4
    if "runlocal" not in arg:
        config.warmup_steps = 30_000
        config.per_device_batch_size = 8
    return config
