"""ALBERT_XLARGE: 24 layers that share their parameters, hidden 2048; 60 M parameters.

Source: Lan et al. (2020), table 1. Only the size differs from albert_base.py; the corpus is
the same.

Expected time: not run at full size; tools/tpu_report.py estimates it.
Expected result: MNLI-m 87.9, SQuAD 1.1 F1 92.9: the released version 2,
trained for 3 M steps on more text. Not run at full size.

    python -m bert_jax.pretrain --config=configs/pretrain/albert_xlarge.py --workdir=runs/albert \
        --config.long_phase.corpus=albert/512

`albert_xlarge.py:runlocal` runs a few steps of eight rows instead.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import albert_base


def get_config(arg: str = "") -> ConfigDict:
    config = albert_base.get_config(arg)
    config.model.size = "large"
    config.model.hidden_size = 2048
    config.model.num_heads = 16
    return config
