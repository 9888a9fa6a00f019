"""BERT_LARGE, uncased: 24 layers, hidden 1024, 16 heads, 336 M parameters.

Source: Devlin et al. (2018), section 3.1 and appendix A.2. Only the size differs from bert_base.py.

Expected time: 4 days on 64 TPU chips in the paper. Not run at full size here.
Expected result: held-out perplexity 3.23 (the paper's table 6). Not run at full size here.

    python -m bert_jax.pretrain --config=configs/pretrain/bert_large.py --workdir=runs/large \
        --config.corpus=corpus/128 --config.long_phase.corpus=corpus/512

`bert_large.py:runlocal` runs a few steps of eight rows instead.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain import bert_base


def get_config(arg: str = "") -> ConfigDict:
    config = bert_base.get_config(arg)
    config.model.size = "large"
    return config
