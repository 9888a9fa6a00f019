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

from bert_jax.configs.sweeps.paper import finetuning, path_of


def get_config(arg: str = "text_classification") -> ConfigDict:
    config = ConfigDict()
    config.program = "sweep"  # python -m bert_jax.sweep reads it.
    config.base = finetuning(arg)  # All of its fields are set as --config.base.FIELD=VALUE.
    config.base_config = path_of(arg)  # For the command of the best trial, in the report.

    # The distribution of each field: ("uniform", LOW, HIGH), ("log_uniform", LOW, HIGH),
    # ("integer", LOW, HIGH) or ("choice", VALUE, ...). A field of `base.model` is nested here.
    config.search = ConfigDict()
    config.search.learning_rate = ("log_uniform", 1e-5, 1e-4)
    config.search.warmup_fraction = ("uniform", 0.0, 0.2)
    config.search.batch_size = ("choice", 16, 32)
    config.num_trials = 32  # Number of configurations in total.
    config.trials_per_round = 16  # Configurations proposed at once, which train as stacks.
    # Numbers of epochs: all configurations of a round get the first; the best third of them
    # (3 / 1 = 3) then get the second. Empty: all get `base.num_epochs`.
    config.halving = (1.0, 3.0)
    # Trials per configuration, with seeds starting at `base.seed`; their median is the score.
    config.num_seeds = 1
    config.max_stacked_trials = 0  # As in paper.py.
    config.keep_trials = 0  # As in paper.py.
    return config.lock()
