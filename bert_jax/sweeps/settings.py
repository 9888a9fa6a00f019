"""The settings of a sweep: what is valid, what is stored, and what may change between two runs."""

import copy
import difflib
import json
import pathlib
from collections.abc import Sequence

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from bert_jax.configs.pretrain import fields as pretrain_fields
from bert_jax.configs.sweeps import fields as sweep_fields
from bert_jax.finetuning import finetune_fields
from bert_jax.finetuning.finetune_fields import check_required_fields
from bert_jax.runtime.config_fields import Field, check_numbers
from bert_jax.sweeps import claims, search
from bert_jax.sweeps.commands import read_config
from bert_jax.sweeps.configurations import flatten, grid_overrides, make_configurations
from bert_jax.training.workdir import check_equal_settings

# Types of fields, with an example of each.
TYPES = {
    "grid": (ConfigDict, 'a dict such as {"batch_size": (16, 32)}'),
    "search": (ConfigDict, 'a dict such as {"learning_rate": ("log_uniform", 1e-5, 1e-4)}'),
    "trials": (Sequence, 'a tuple of dicts, such as ({"learning_rate": 1e-4},)'),
    "train_fractions": (Sequence, "a tuple of numbers, such as (0.1, 0.3, 1.0)"),
    "halving": (Sequence, "a tuple of numbers of epochs, such as (1.0, 3.0)"),
    "num_trials": (int, "a whole number"),
    "trials_per_round": (int, "a whole number"),
    "num_seeds": (int, "a whole number"),
    "max_stacked_trials": (int, "a whole number"),
    "prune_from_evaluation": (int, "a whole number"),
    "keep_trials": (int, "a whole number"),
    "base_config": (str, 'a file, such as "configs/finetune/glue.py:mrpc", or ""'),
}

# Fields that decide, with the grid's, which trials are run, and in which programs: workers
# must agree on them.
PROGRAM_FIELDS = ("trials", "train_fractions", "num_trials", "num_seeds", "max_stacked_trials")
MAY_CHANGE = (*sweep_fields.MAY_CHANGE, *(f"base.{name}" for name in finetune_fields.MAY_CHANGE))


def known_fields(config: ConfigDict) -> dict[str, Field]:
    """Returns the fields of a configuration: of a sweep with its `base`, or of another program."""
    if "base" not in config:
        program = finetune_fields if "task" in config else pretrain_fields
        return program.known_fields(config)
    base = finetune_fields.known_fields(config.base)
    return fields_of_sweep(config) | {f"base.{name}": field for name, field in base.items()}


def fields_of_sweep(config: ConfigDict) -> dict[str, Field]:
    """Returns the fields of a grid or of a search."""
    return sweep_fields.FIELDS | (sweep_fields.SEARCH if "search" in config else sweep_fields.GRID)


def complete(config: ConfigDict) -> ConfigDict:
    """Returns a valid configuration with defaults for what is not given. Raises ValueError."""
    fields = fields_of_sweep(config)
    for name in sorted(set(config) - fields.keys() - {"program"}):
        if name in sweep_fields.GRID:
            raise ValueError(f"config.{name}: a sweep has either a grid or a search: remove one")
        nearest = difflib.get_close_matches(name, fields, 1, cutoff=0)[0]
        raise ValueError(f"config.{name}: a sweep has no such field; did you mean {nearest}?")
    if not isinstance(config.get("base"), ConfigDict):
        fix = 'set config.base = paper.finetuning("text_classification"), as in'
        raise ValueError(f"the sweep has no `base`: {fix} configs/sweeps/paper.py")
    completed = copy.deepcopy(config).unlock()  # Keeps the types of fields that are None.
    for name, field in fields.items():
        if name not in completed:
            completed[name] = field.default
        elif type(completed[name]) is list:  # From JSON or a user's configuration.
            completed[name] = tuple(completed[name])
    for name, (field_type, expected) in TYPES.items():
        if name in completed and not isinstance(completed[name], field_type):
            raise ValueError(f"config.{name}={completed[name]!r}: expected {expected}")
    check_sweep(completed)
    return completed.lock()


def check_sweep(config: ConfigDict) -> None:
    """Validates the fields of a complete configuration. Raises ValueError."""
    check_required_fields(config.base, "config.base.")
    if config.base.num_seeds != 1:
        count = config.base.num_seeds
        raise ValueError(f"config.base.num_seeds={count}: expected 1; set config.num_seeds")
    check_numbers(config, fields_of_sweep(config))
    if config.base_config:
        read_config(config.base_config)
    if "search" in config:
        search.check_search(config)
        return
    grid = flatten(config.grid)
    if not grid and not config.trials and not config.train_fractions:
        fix = "set the values of one or more fields, such as batch_size=(16,), or `trials`"
        raise ValueError(f"config.grid is empty: {fix}")
    for name, values in grid.items():
        if not isinstance(values, tuple | list) or not values:
            fix = f"to keep one value, set config.base.{name}"
            raise ValueError(f"config.grid.{name}={values!r}: expected one or more values; {fix}")
        if twice := [value for n, value in enumerate(values) if value in values[:n]]:
            raise ValueError(f"config.grid.{name}={values!r}: {twice[0]!r} is given twice")
    for index, values in enumerate(config.trials):
        if not isinstance(values, dict):
            raise ValueError(f"trials[{index}]={values!r}: expected a dict of fields and values")
    check_train_fractions(config)


def check_train_fractions(config: ConfigDict) -> None:
    """Raises ValueError if the fractions are invalid, or other fields set what they set."""
    fractions = config.train_fractions
    is_number = [isinstance(each, int | float) and 0 < each <= 1 for each in fractions]
    if not all(is_number) or len(set(fractions)) < len(fractions):
        raise ValueError(
            f"config.train_fractions={fractions}: expected different numbers, above 0 and up to 1"
        )
    given = [(f"config.grid.{name}", name) for name in flatten(config.grid)]
    given += [(f"trials[{n}].{name}", name) for n, own in enumerate(config.trials) for name in own]
    for place, name in given:
        if name == "train_fraction":
            raise ValueError(f"{place}: set config.train_fractions instead, for all configurations")
        if name == "max_train_examples" and fractions:
            raise ValueError(
                f"{place}: with config.train_fractions, which are of its examples, expected a "
                "single value: set config.base.max_train_examples"
            )


def settings_of(config: ConfigDict) -> dict:
    """Returns what sweep.json stores of a configuration."""
    if "search" in config:
        return config.to_dict() | {"version_of_optuna": search.version()}
    return config.to_dict()


def as_saved(settings: dict) -> dict[str, object]:
    """Returns settings by dotted name, as read from a JSON file: lists for tuples."""
    return flatten_dict(json.loads(json.dumps(settings)), sep=".")


def check_directory(workdir: pathlib.Path, config: ConfigDict) -> dict[pathlib.Path, pathlib.Path]:
    """Returns the new workdir of each trial in `workdir` whose name depends on other fields now.

    Raises ValueError if `workdir` is a file, holds another sweep or one with trials that `config`
    lacks, or if other workers run programs that `config` changes.
    """
    if ":/" in str(workdir):
        raise ValueError(f"workdir {workdir}: mount the bucket, and use a path below the mount")
    if workdir.is_file():
        raise ValueError(f"workdir {workdir} is a file: expected a directory")
    path = workdir / "sweep.json"
    if not path.exists():
        for run in (*workdir.glob("config.json"), *workdir.glob("seed_*/config.json")):
            raise ValueError(f"workdir {workdir} holds a run ({run}), not a sweep: use another")
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    defaults = {name: field.default for name, field in fields_of_sweep(config).items()}
    saved, settings = as_saved(defaults | content["config"]), as_saved(settings_of(config))
    changed = [
        name
        for name in sorted(saved.keys() | settings.keys())
        if saved.get(name) != settings.get(name) and is_program_field(name, config)
    ]
    # Pruning compares trials at their evaluations.
    fixed = ["base.eval_every"] if config.prune_from_evaluation else []
    check_equal_settings(
        {name: value for name, value in saved.items() if name not in changed},
        {name: value for name, value in settings.items() if name not in changed},
        path,
        {*MAY_CHANGE}.difference(fixed),
        "A sweep can be extended: by values of the grid, `trials`, train_fractions and num_seeds, "
        "or by num_trials of a search; but not with prune_from_evaluation",
    )
    for program in content["programs"] if changed else ():
        if worker := claims.holder(workdir / "programs" / program, {}):
            raise ValueError(
                f"config.{changed[0]}={settings.get(changed[0])}: {worker} is running program "
                f"{program} of this sweep with {saved.get(changed[0])}: wait for this worker to "
                f"finish, or stop it. If it died on another machine, remove "
                f"{workdir / 'programs' / program / 'claims'}"
            )
    if "search" in config:
        if (count := config.num_trials) < saved["num_trials"]:
            raise ValueError(
                f"config.num_trials={count}, but {saved['num_trials']} in {path}: a search can "
                "be extended, and nothing can be removed from it"
            )
        return {}
    return renamed_trials(workdir / "trials", config, content["config"], path) if changed else {}


def is_program_field(name: str, config: ConfigDict) -> bool:
    """Returns whether a sweep can grow by a change of field `name`."""
    if config.prune_from_evaluation:
        return False  # Which trials are pruned depends on the others of their program.
    if name == "num_seeds" and "search" in config:
        return False  # Its proposals depend on the scores, and so on the seeds.
    return name in PROGRAM_FIELDS or name.startswith("grid.")


def renamed_trials(
    directory: pathlib.Path, config: ConfigDict, saved: dict, path: pathlib.Path
) -> dict[pathlib.Path, pathlib.Path]:
    """Returns the new workdirs of the trials of the `saved` sweep that have another name now.

    A name has the fields that vary, and more may vary in a sweep that has grown. Raises ValueError
    if trials of the saved sweep are missing.
    """
    before = copy.deepcopy(config).unlock()
    del before.grid
    before.grid = saved["grid"]
    before.trials, before.num_seeds = tuple(saved["trials"]), saved["num_seeds"]
    before.train_fractions = tuple(saved.get("train_fractions", ()))  # Added later than the others.

    def workdirs(config):
        configurations = make_configurations(config, grid_overrides(config), directory)
        trials = [trial for configuration in configurations for trial in configuration.trials]
        return {repr(sorted(flatten(trial.config).items())): trial.workdir for trial in trials}

    old, new = workdirs(before), workdirs(config)
    if missing := [workdir.name for settings, workdir in old.items() if settings not in new]:
        more = f" and {len(missing) - 1} more" * (len(missing) > 1)
        raise ValueError(
            f"{path} has the trial {missing[0]}{more}, which the grid, `trials`, train_fractions "
            "and num_seeds no longer include: a sweep can grow, and does not shrink. Give the old "
            "values as well, or use another workdir"
        )
    return {workdir: new[key] for key, workdir in old.items() if workdir != new[key]}
