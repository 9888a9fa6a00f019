"""The small BERTs, uncased: BERT_TINY (2 layers, hidden 128, 2 heads), and three larger ones.

Source: Turc et al. (2019), table 1 of the released models. Only the size differs from bert_base.py:
`--config.model.size=mini` (4 layers, hidden 256), `small` (4, 512) or `medium` (8, 512).

Expected time: not run at full size.
Expected result: not run at full size; the paper only gives downstream scores.

    python -m bert_jax.pretrain --config=configs/pretrain/bert_tiny.py --workdir=runs/tiny \
        --config.corpus=corpus/128 --config.long_phase.corpus=corpus/512

`bert_tiny.py:runlocal` runs a few steps of eight rows instead.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import bert_base


def get_config(arg: str = "") -> ConfigDict:
    config = bert_base.get_config(arg)
    config.model.size = "tiny"
    return config
