"""The settings of a sweep: what is valid, what is stored, and what may change between two runs."""

import json
import pathlib

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from bert_jax.sweeps import claims, search
from bert_jax.sweeps.configurations import flatten
from bert_jax.training.workdir import CHANGEABLE_ON_RESUME, check_equal_settings

# Fields of a sweep that may differ when it is resumed; PROGRAM_FIELDS must agree between workers.
PROGRAM_FIELDS = ("num_seeds", "max_stacked_trials")
CHANGEABLE = (*PROGRAM_FIELDS, *(f"base.{name}" for name in CHANGEABLE_ON_RESUME))


def check_sweep(config: ConfigDict) -> None:
    """Validates the fields of a sweep. Raises ValueError."""
    if config.base.num_seeds != 1:
        count = config.base.num_seeds
        raise ValueError(f"--config.base.num_seeds={count}: expected 1; set --config.num_seeds")
    for name, minimum in (("num_seeds", 1), ("max_stacked_trials", 0)):
        if config[name] < minimum:
            raise ValueError(f"--config.{name}={config[name]}: expected at least {minimum}")
    if "search" in config:
        search.check_search(config)
        return
    grid = flatten(config.grid)
    if not grid and not config.trials:
        fix = "set the values of one or more fields, such as batch_size=(16,), or `trials`"
        raise ValueError(f"--config.grid is empty: {fix}")
    for name, values in grid.items():
        if not isinstance(values, tuple | list) or not values:
            fix = f"to keep one value, set --config.base.{name}"
            raise ValueError(f"--config.grid.{name}={values!r}: expected one or more values; {fix}")
        if twice := [value for n, value in enumerate(values) if value in values[:n]]:
            raise ValueError(f"--config.grid.{name}={values!r}: {twice[0]!r} is given twice")
    for index, values in enumerate(config.trials):
        if not isinstance(values, dict):
            raise ValueError(f"trials[{index}]={values!r}: expected a dict of fields and values")


def settings_of(config: ConfigDict) -> dict:
    """Returns what sweep.json stores of a configuration."""
    if "search" in config:
        return config.to_dict() | {"version_of_optuna": search.version()}
    return config.to_dict()


def as_saved(settings: dict) -> dict[str, object]:
    """Returns settings by dotted name, as read from a JSON file: lists for tuples."""
    return flatten_dict(json.loads(json.dumps(settings)), sep=".")


def check_directory(workdir: pathlib.Path, config: ConfigDict) -> None:
    """Raises ValueError if `workdir` is a file, holds another sweep, or other workers' programs."""
    if ":/" in str(workdir):
        raise ValueError(f"--workdir={workdir}: mount the bucket, and use a path below the mount")
    if workdir.is_file():
        raise ValueError(f"--workdir={workdir} is a file: expected a directory")
    path = workdir / "sweep.json"
    if not path.exists():
        for run in (*workdir.glob("config.json"), *workdir.glob("seed_*/config.json")):
            raise ValueError(f"--workdir={workdir} holds a run ({run}), not a sweep: use another")
        return
    content = json.loads(path.read_text())
    saved, settings = as_saved(content["config"]), as_saved(settings_of(config))
    # The proposals of a search depend on the scores, and so on the seeds.
    changeable = set(CHANGEABLE) - ({"num_seeds"} if "search" in config else set())
    check_equal_settings(saved, settings, path, tuple(changeable))
    changed = [name for name in PROGRAM_FIELDS if saved[name] != settings[name]]
    for program in content["programs"] if changed else ():
        if worker := claims.holder(workdir / "programs" / program, {}):
            raise ValueError(
                f"--config.{changed[0]}={settings[changed[0]]}: {worker} is running program "
                f"{program} of this sweep with {saved[changed[0]]}: wait until it is finished, or "
                "stop it. If it died on another machine, remove "
                f"{workdir / 'programs' / program / 'claims'}"
            )
