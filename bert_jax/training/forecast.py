"""Logs the size of a pre-training run when it starts, and estimates the time that it will take."""

import json
import math
import os
from collections.abc import Sequence

import jax
from absl import logging

from bert_jax.data.rows import corpus_warnings
from bert_jax.runtime.buckets import as_path
from bert_jax.training.health import describe_speed
from bert_jax.training.metrics import throughput
from bert_jax.training.phases import Phase
from bert_jax.training.pretrain_setup import PhaseSetup, PretrainSetup

# Steps of a phase, from its first, that are reported before the regular interval.
EARLY_STEPS = tuple(factor * 10**power for power in range(4) for factor in (1, 2, 5))
# About what a core of a CPU computes in float32 (docs/results.md). Only the warning before the
# first step depends on it.
CORE_FLOPS = 5e10
MAX_CPU_DAYS = 2  # without a warning


def is_early(step: int, phase: Phase, log_every: int) -> bool:
    """Returns whether step 1, 2, 5, 10, ... of a phase precedes the first regular report."""
    return step - phase.start in EARLY_STEPS and step - phase.start < log_every


def flops_left(phases: Sequence[PhaseSetup], step: int) -> float:
    """Returns the FLOPs of all updates after `step`, without evaluations."""
    num_flops = 0.0
    for each in phases:
        num_steps = max(each.phase.stop - max(step, each.phase.start), 0)
        num_flops += num_steps * each.phase.batch_size * each.flops_per_row
    return num_flops


def read_estimates(path: str, setup: PretrainSetup) -> dict[str, dict[str, float]]:
    """Returns the estimated speed of each phase by its name, as the metrics of its reports.

    `path` is of the JSON file of tools/tpu_report.py, or "": no phase has an estimate. Nor has a
    phase that is not in the file. The estimated speed is that of the typical time of a step in the
    file, the lowest one that of the high end of its range. Raises ValueError if the file is of
    other devices, of none of these phases, or of another model, whose rows take other FLOPs.
    """
    estimates = {each.phase.name: {} for each in setup.phases}
    if not path:
        return estimates
    try:
        report = json.loads(as_path(path).read_text(encoding="utf-8"))
        devices = report["device_kind"], report["num_devices"]
        steps = ()
        if report["fits"]:
            steps = zip(report["phases"], report["likely_step_seconds"], strict=True)
        seconds = {
            (phase["max_seq_length"], phase["batch_size"], float(phase["model_flops_per_row"])): (
                float(likely["typical"]),
                float(likely["high"]),
            )
            for phase, likely in steps
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"config.estimate={path} is not a report of a pre-training run ({error!r}): write it "
            "with tools/tpu_report.py --config=... --topology=... --json=FILE"
        ) from error
    found = setup.mesh.devices.flat[0].device_kind, setup.mesh.devices.size
    if devices != found:
        raise ValueError(
            f"config.estimate={path} is of {devices[1]} devices {devices[0]}, but this run has "
            f"{found[1]} devices {found[0]}: write one with --topology of these, or leave it out"
        )
    for each in setup.phases:
        length, batch_size = each.phase.train.max_seq_length, each.phase.batch_size
        row_flops = [flops for *sizes, flops in seconds if sizes == [length, batch_size]]
        same = [flops for flops in row_flops if math.isclose(flops, each.flops_per_row)]
        if row_flops and not same:
            raise ValueError(
                f"config.estimate={path} is of {row_flops[0]:.4g} FLOPs per row of {length} tokens,"
                f" but the model of this run has {each.flops_per_row:.4g}: write one for this "
                "configuration, or leave it out"
            )
        if same:
            likely, longest = seconds[length, batch_size, same[0]]
            speed = throughput(batch_size, likely, each.flops_per_row)
            estimates[each.phase.name] = {f"estimated_{name}": speed[name] for name in speed}
            estimates[each.phase.name]["lowest_estimated_rows_per_second"] = batch_size / longest
    if not any(estimates.values()):
        sizes = " or ".join(f"{rows} rows of {length} tokens" for length, rows, _ in seconds)
        raise ValueError(
            f"config.estimate={path} is of steps of {sizes or 'a configuration that does not fit'}"
            f", but this run has none of these: write one for this configuration"
        )
    return estimates


def log_run(setup: PretrainSetup, first_step: int) -> None:
    """Logs the size of the model, and the steps, epochs, tokens and corpus warnings of each phase.

    Warns if the run would take days on a CPU.
    """
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(setup.abstract_state.params))
    logging.info("The model has %s parameters", format_count(num_parameters))
    limit = setup.config.max_eval_batches * setup.config.eval_batch_size
    warned = set()
    for phase in (each.phase for each in setup.phases):
        logging.info(describe_phase(phase))
        for rows in phase.corpora:
            warnings = () if rows.directory in warned else corpus_warnings(rows.manifest)
            warned.add(rows.directory)
            for warning in warnings:
                logging.warning("%s: %s", rows.directory, warning)
        for name, rows in phase.heldout.items() if limit else ():
            if limit < rows.num_rows:
                total = rows.num_rows
                logging.info("Evaluating on at most %d of %d rows of %s", limit, total, name)
    if jax.default_backend() != "cpu":
        return
    num_cores = len(os.sched_getaffinity(0))  # The cores that this process may use.
    days = flops_left(setup.phases, first_step) / (CORE_FLOPS * num_cores) / 86400
    if days > MAX_CPU_DAYS:
        logging.warning(
            "On this CPU the run takes about %s days (%d cores at %.0f GFLOP/s each). Use a "
            "smaller model (config.model.size=tiny) and fewer steps (config.num_steps), as in "
            "configs/pretrain/small_corpus.py, or continue from existing weights with "
            "configs/pretrain/continue.py; see docs/pretraining.md",
            f"{days:,.0f}",
            num_cores,
            CORE_FLOPS / 1e9,
        )


def describe_phase(phase: Phase) -> str:
    """Returns a sentence on the steps, epochs and tokens of a phase."""
    epochs, tokens = [], 0
    counts = phase.stream.rows_of_each(phase.num_rows)
    for rows, num_rows in zip(phase.corpora, counts, strict=True):
        tokens += num_rows * rows.manifest["splits"]["train"]["tokens"] / rows.num_rows
        factor, passes = rows.manifest["config"].get("dupe_factor", 1), ""
        if factor > 1:  # Each document is in the corpus several times, in different pairs.
            passes = f" (each text {_three_digits(factor * num_rows / rows.num_rows)} times)"
        epochs.append(
            f"{_three_digits(num_rows / rows.num_rows)} epochs of {rows.num_rows:,} rows"
            f"{f' of {rows.directory}' if len(phase.corpora) > 1 else ''}{passes}"
        )
    return (
        f"{phase.num_steps:,} steps of {phase.batch_size:,} rows of {phase.train.max_seq_length} "
        f"tokens: {' and '.join(epochs)}, {format_count(tokens)} tokens"
    )


def log_step(step: int, values: dict[str, float], batch_size: int, rows_left: float) -> None:
    """Logs the loss of one of the first steps, and an estimate of the time left.

    `values` are the metrics of the step. `rows_left` are all updates after it, as a number of rows
    of its phase.
    """
    text = f"Step {step:,}: loss {values['train/loss']:.3f}"
    if rate := values.get("rows_per_second"):  # The first step compiled.
        left = "; the rest takes about " + duration(rows_left / rate) if rows_left else ""
        text += f", {batch_size / rate:.3g} s per step, {describe_speed(values)}{left}"
    logging.info(text)


def format_count(count: float) -> str:
    """Returns a count with about three digits, such as "4.39 million"."""
    for name, size in (("billion", 1e9), ("million", 1e6)):
        if count >= size:
            return f"{_three_digits(count / size)} {name}"
    return f"{count:,.0f}"


def duration(seconds: float) -> str:
    """Returns a duration in the unit that suits it, such as "3.5 hours"."""
    for name, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{_three_digits(seconds / size)} {name}"
    return f"{_three_digits(seconds)} s"


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"
