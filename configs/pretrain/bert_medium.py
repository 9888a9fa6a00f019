"""BERT_MEDIUM, uncased: 8 layers, hidden 512, 8 heads.

Source: Turc et al. (2019), table 1 of the released models. Only the size differs from bert_base.py.

Expected time: not run at full size.
Expected result: not run at full size; the paper only gives downstream scores.

    python -m bert_jax.pretrain --config=configs/pretrain/bert_medium.py --workdir=runs/medium \
        --config.corpus=corpus/128 --config.long_phase.corpus=corpus/512

`bert_medium.py:runlocal` runs a few steps of eight rows instead.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import bert_base


def get_config(arg: str = "") -> ConfigDict:
    config = bert_base.get_config(arg)
    config.model.size = "medium"
    return config
