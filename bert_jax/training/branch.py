"""Checks the checkpoint of another run from which a run of pre-training continues."""

import json
import pathlib

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from bert_jax.checkpoints.native import find_checkpoint, load_settings
from bert_jax.configs.pretrain.fields import PHASE_TRAINING, may_change, phases_of
from bert_jax.runtime.config_fields import flatten
from bert_jax.training.phases import phase_configs, prefix_of, stable_step
from bert_jax.training.workdir import describe_differences

# Beside the phases.
MAY_DIFFER_AFTER_BRANCH = ("decay_steps", "decay_shape", "branch_from")


def find_branch(config: ConfigDict, settings: dict) -> pathlib.Path:
    """Returns the checkpoint `config.branch_from`.

    `settings` are those of this run, which has the steps of the checkpoint as if they were its own.
    Raises FileNotFoundError, or ValueError unless both runs have the same settings and phases and a
    constant learning rate up to its step, and this run has further steps.
    """
    path = find_checkpoint(config.branch_from)
    saved = load_settings(path)
    where = f"config.branch_from={config.branch_from}"
    if not path.name.isdecimal() or "long_phase" not in saved:
        raise ValueError(f"{where}: expected DIR/checkpoints/STEP of a run of pre-training")
    step, run = int(path.name), ConfigDict(saved)
    for name, each in ((f"the run of {path}", run), ("this run", config)):
        if each.get("decay_steps") is None:
            raise ValueError(
                f"{where}: the learning rate of {name} decays from its start (decay_steps is None):"
                " runs can only branch from the constant part of the schedule"
            )
        if step > stable_step(each):
            raise ValueError(
                f"{where}: the learning rate of {name} decays after step "
                f"{stable_step(each)}: use an earlier checkpoint, or other numbers of steps"
            )
    if step == sum(each.num_steps for each in phases_of(config).values()):
        raise ValueError(f"{where}: this run has no step after {step}: set a larger num_steps")
    ours, theirs = phases_until(config, step), phases_until(run, step)
    settings = json.loads(json.dumps(settings))  # JSON turns tuples into lists.
    # If one run has more phases before the step, the numbers of steps of a common one differ.
    for own, other in zip(ours.items(), theirs.values(), strict=False):
        check_same_phase(*own, other, f"{where}: up to step {step}, this run and that one differ")
    corpora = zip(ours, settings["corpora"], saved["corpora"], strict=False)
    for name, own_rows, other_rows in corpora:
        if own_rows != other_rows:
            raise ValueError(
                f"{where}: {prefix_of(name)}corpus has other rows, or weights, than in that "
                f"run: the rows before step {step} must be the same"
            )
    ignored = may_change(config).union(may_change(run), MAY_DIFFER_AFTER_BRANCH, ["corpora"])
    ignored |= PHASE_TRAINING.keys() - {"learning_rate", "warmup_steps"}
    flat = [flatten_dict(each, sep=".") for each in (saved, settings)]
    groups = tuple(f"{name}." for each in (run, config) for name in phases_of(each) if name)
    ignored |= {name for each in flat for name in each if name.startswith(groups)}
    if differences := describe_differences(*flat, path, ignored):
        raise ValueError(f"{where} is of a run with other settings:\n{differences}")
    return path


def check_same_phase(name: str, own: dict, other: dict, problem: str) -> None:
    """Raises ValueError, which begins with `problem`, if a field of the phase `name` differs."""
    for field in own | other:
        if own.get(field) != other.get(field):
            raise ValueError(
                f"{problem} in {prefix_of(name)}{field}: it is {own.get(field)} here, and "
                f"{other.get(field)} there"
            )


def phases_until(config: ConfigDict, step: int) -> dict[str, dict]:
    """Returns the fields of each phase that has steps before `step`, as if it ended there."""
    phases, start = {}, 0
    for name, phase in phase_configs(config).items():
        if start < step:
            values = flatten(phase)
            values = {field: values[field] for field in PHASE_TRAINING if field in values}
            own = phases_of(config)[name]
            rates = {"learning_rate": own.learning_rate, "warmup_steps": own.warmup_steps}
            num_steps = min(phase.num_steps, step - start)
            phases[name] = values | rates | {"num_steps": num_steps}
        start += phase.num_steps
    return phases
