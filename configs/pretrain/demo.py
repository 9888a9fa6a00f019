"""The demo: a small BERT on 106 articles of Wikipedia, in minutes on two CPU cores.

Source: none; sizes and schedule were chosen so that the held-out loss falls clearly below what
word frequencies alone allow. Not a model for any use.

Expected time: see README.md.
Expected result: see README.md.

    make demo
    python -m bert_jax.pretrain --config=configs/pretrain/demo.py --workdir=runs/demo
"""

from ml_collections import ConfigDict

from configs.pretrain import bert_base


def get_config(arg: str = "") -> ConfigDict:
    config = bert_base.get_config()
    config.corpus = "runs/demo-data/corpus"
    config.num_steps = 2000
    config.long_phase.num_steps = 0
    config.batch_size = 64

    config.model.size = "mini"
    config.model.dtype = "float32"
    config.model.scan_layers = False
    config.model.dropout_rate = 0.0

    config.optimizer = "adamw"
    config.learning_rate = 1e-3
    config.warmup_steps = 200

    config.log_every = 20
    config.eval_every = 200
    config.eval_batch_size = 64
    config.checkpoint_every = 200
    return bert_base.cut_down(config, arg)
