"""Checks the checkpoint of another run from which a run of pre-training goes on."""

import json
import pathlib

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from bert_jax.checkpoints.native import find_checkpoint, load_settings
from bert_jax.configs.pretrain.fields import PHASE_TRAINING, known_fields, may_change, phases_of
from bert_jax.runtime.config_fields import flatten
from bert_jax.training.phases import phase_configs, stable_step
from bert_jax.training.workdir import describe_differences

# What may differ after the step at which the runs part.
OF_DECAY = ("decay_steps", "decay_shape", "branch_from")


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
                " only from a step at a constant rate can several runs go on"
            )
        if step > stable_step(each):
            raise ValueError(
                f"{where}: the learning rate of {name} has begun to fall after step "
                f"{stable_step(each)}: use an earlier checkpoint, or other numbers of steps"
            )
    if step == sum(each.num_steps for each in phases_of(config).values()):
        raise ValueError(f"{where}: this run has no step after {step}: set a larger num_steps")
    theirs, ours = phases_until(run, step), phases_until(config, step)
    corpora = saved["corpora"][: len(theirs)], json.loads(json.dumps(settings["corpora"]))
    if theirs != ours or corpora[0] != corpora[1][: len(ours)]:
        raise ValueError(
            f"{where}: the phases before step {step} must be those of that run, with the same "
            f"corpora: they are {theirs} there, and {ours} here"
        )
    ignored = may_change(config).union(may_change(run), OF_DECAY, ["corpora"])
    ignored |= PHASE_TRAINING.keys() - {"learning_rate", "warmup_steps"}
    for each in (run, config):
        ignored |= {name for name in known_fields(each) if "_phase" in name}
    flat = [flatten_dict(json.loads(json.dumps(each)), sep=".") for each in (saved, settings)]
    if differences := describe_differences(*flat, path, ignored):
        raise ValueError(f"{where} is of a run with other settings:\n{differences}")
    return path


def phases_until(config: ConfigDict, step: int) -> list[dict]:
    """Returns the fields of each phase that has steps before `step`, as if it ended there."""
    phases, start = [], 0
    for name, phase in phase_configs(config).items():
        if start < step:
            values = flatten(phase)
            values = {field: values[field] for field in PHASE_TRAINING if field in values}
            own = phases_of(config)[name]
            rates = {"learning_rate": own.learning_rate, "warmup_steps": own.warmup_steps}
            num_steps = min(phase.num_steps, step - start)
            phases.append(values | rates | {"num_steps": num_steps})
        start += phase.num_steps
    return phases
