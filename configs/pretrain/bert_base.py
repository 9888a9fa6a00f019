"""BERT_BASE, uncased: 12 layers, hidden 768, 12 heads, 110 M parameters.

Source: Devlin et al. (2018), section 3.1 and appendix A.2: batch 256; 900,000 steps on rows of 128
tokens, then 100,000 on rows of 512; Adam, learning rate 1e-4, 10,000 steps of warm-up. Every other
configuration in this directory derives from this one.

Expected time: 4 days on 16 TPU chips in the paper. Not run at full size here.
Expected result: held-out perplexity 3.99 (the paper's table 6). Not run at full size here.

    python -m bert_jax.pretrain --config=configs/pretrain/bert_base.py --workdir=runs/base \
        --config.corpus=corpus/128 --config.long_phase.corpus=corpus/512

`bert_base.py:runlocal` runs a few steps of eight rows instead.
"""

from ml_collections import ConfigDict

from bert_jax.configs.pretrain.fields import FIELDS, apply_runlocal
from bert_jax.runtime.config_fields import make_config


def get_config(arg: str = "") -> ConfigDict:
    config = make_config(FIELDS)
    config.program = "pretrain"
    return apply_runlocal(config, arg)
