"""BERT_MINI, uncased: 4 layers, hidden 256, 4 heads.

Source: Turc et al. (2019), table 1 of the released models; all but the size is as in bert_base.py.

Expected time: not run at full size.
Expected result: not run at full size; the paper gives downstream scores only.

    python -m bert_jax.pretrain --config=configs/pretrain/bert_mini.py --workdir=runs/mini \
        --config.corpus=corpus/128 --config.long_phase.corpus=corpus/512

`bert_mini.py:runlocal` is the same run cut down to a few steps of eight rows.
"""

from ml_collections import ConfigDict

from configs.pretrain import bert_base


def get_config(arg: str = "") -> ConfigDict:
    config = bert_base.get_config(arg)
    config.model.size = "mini"
    return config
