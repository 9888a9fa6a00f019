r"""The paper's grid for fine-tuning, over any configuration in configs/finetune: `paper.py:NAME`.

Source: Devlin et al. (2018), appendix A.3: batch size 16 or 32, learning rate 5e-5, 3e-5 or 2e-5,
2, 3 or 4 epochs. The paper chooses the best of the 18 configurations on dev; it does not say how
many seeds it ran, so `num_seeds` is 1 here.

Expected time: not measured.
Expected result: see the fine-tuning configuration; a sweep has not been run at full size.

    python -m bert_jax.sweep --config=configs/sweeps/paper.py:glue:mrpc --workdir=runs/mrpc_sweep \
        --config.base.init_from=runs/base --config.base.data.directory=glue_data

`--dry_run` lists the trials. After NAME may come the argument of that configuration, as in
`paper.py:glue:mrpc` or `paper.py:squad:v2`; `paper.py:text_classification:runlocal` is a smoke run.
`--config.grid.learning_rate=1e-4,2e-4` sets other values; for other fields, copy this file.
"""

import importlib
import importlib.util

from ml_collections import ConfigDict

from bert_jax.configs.sweeps.fields import FIELDS, GRID
from bert_jax.runtime.config_fields import make_config


def get_config(arg: str = "text_classification") -> ConfigDict:
    config = make_config(FIELDS | GRID)
    config.program = "sweep"  # python -m bert_jax.sweep reads it.
    config.base = finetuning(arg)
    config.base_config = path_of(arg)
    config.grid.batch_size = (16, 32)
    config.grid.learning_rate = (5e-5, 3e-5, 2e-5)
    config.grid.num_epochs = (2.0, 3.0, 4.0)
    return config.lock()


def finetuning(arg: str) -> ConfigDict:
    """Returns the configuration NAME of configs/finetune; `arg` is NAME or NAME:ARGUMENT."""
    name, _, rest = arg.partition(":")
    module = f"bert_jax.configs.finetune.{name}"
    if not name.isidentifier() or importlib.util.find_spec(module) is None:
        raise ValueError(
            f"unknown argument {arg!r} after the colon: expected the name of a file in "
            "configs/finetune and its argument, such as 'glue:mrpc' or 'text_classification'"
        )
    get = importlib.import_module(module).get_config
    return get(rest) if rest else get()


def path_of(arg: str) -> str:
    """Returns the `--config` of bert_jax.finetune for `arg`, NAME or NAME:ARGUMENT."""
    name, colon, rest = arg.partition(":")
    return f"configs/finetune/{name}.py{colon}{rest}"
