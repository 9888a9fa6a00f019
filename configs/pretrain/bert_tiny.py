"""BERT_TINY, uncased: 2 layers, hidden 128, 2 heads.

Source: Turc et al. (2019), table 1 of the released models; all but the size is as in bert_base.py.

Expected time: not run at full size.
Expected result: not run at full size; the paper gives downstream scores only.

    python -m bert_jax.pretrain --config=configs/pretrain/bert_tiny.py --workdir=runs/tiny \
        --config.corpus=corpus/128 --config.long_phase.corpus=corpus/512

`bert_tiny.py:runlocal` is the same run cut down to a few steps of eight rows.
"""

from ml_collections import ConfigDict

from configs.pretrain import bert_base


def get_config(arg: str = "") -> ConfigDict:
    config = bert_base.get_config(arg)
    config.model.size = "tiny"
    return config
