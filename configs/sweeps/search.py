r"""A search with Optuna over any configuration in configs/finetune: `search.py:NAME`.

Source: Akiba et al. (2019), "Optuna", with its TPE sampler (Bergstra et al., 2011); trials are
dropped by successive halving (Jamieson and Talwalkar, 2016). The ranges contain the paper's grid.

Expected time: not measured.
Expected result: not measured; a search has not been run at full size.

    pip install 'bert_jax[optuna]'
    python -m bert_jax.sweep --config=configs/sweeps/search.py:glue:mrpc \
        --workdir=runs/mrpc_search --config.base.init_from=runs/base \
        --config.base.data.directory=glue_data

NAME is as in `paper.py:NAME`. For other fields or ranges, copy this file.
"""

from ml_collections import ConfigDict

from bert_jax.configs.sweeps import paper
from bert_jax.configs.sweeps.fields import FIELDS, SEARCH
from bert_jax.runtime.config_fields import make_config


def get_config(arg: str = "text_classification") -> ConfigDict:
    config = make_config(FIELDS | SEARCH)
    config.program = "sweep"  # python -m bert_jax.sweep reads it.
    config.base = paper.finetuning(arg)
    config.base_config = paper.path_of(arg)
    config.search.learning_rate = ("log_uniform", 1e-5, 1e-4)
    config.search.warmup_fraction = ("uniform", 0.0, 0.2)
    config.search.batch_size = ("choice", 16, 32)
    config.halving = (1.0, 3.0)
    return config.lock()
