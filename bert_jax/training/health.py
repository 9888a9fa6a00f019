"""Says in words whether a pre-training run is healthy, from the lines of its metrics.jsonl.

The alarms are functions of these lines: a resumed run raises the same alarms as an uninterrupted
one, and tools/plot.py finds those of any run. A run whose loss has risen far above the lowest of
its phase is stopped.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.configs.pretrain.fields import phases_of
from bert_jax.runtime.errors import Diverged

Line = Mapping[str, float]
"""An object of metrics.jsonl: a report on the steps since the last one, or an evaluation."""

# A run has diverged if the loss exceeds the lowest one of its phase by this factor and difference.
DIVERGED, DIVERGED_BY = 2.0, 1.0
SPIKE_WINDOW = 100  # Steps that the loss of the next one is compared with.
MIN_SPIKE_WINDOW = 20
# A spike is this many standard deviations above their mean, and this fraction of it.
SPIKE_DEVIATIONS = 6.0
SPIKE_FRACTION = 0.1
# A loss near the unigram entropy is usual in this part of the run, and in this many steps.
PLATEAU_WARMUP_FRACTION, PLATEAU_WARMUP_STEPS = 0.25, 20_000
UNIGRAM_TOLERANCE = 0.99  # of the entropy
PLATEAU_LINES = 20  # Reports, over whose halves the loss of a plateau does not fall ...
PLATEAU_FALL = 0.01  # ... by this fraction.
MIN_PLATEAU_LINES = 4
TIMED_LINES = 5  # Consecutive regular reports that must all be slow, or wait for data.
INPUT_BOUND = 0.5  # of the time of a step
SLOW_HOST = 2.0  # times the median host time of the others, and `HOST_BOUND` of a step
HOST_BOUND = 0.5
MAX_LINES = 1000  # The last ones that are read.
RECENT_LINES = 100  # An alarm is repeated if none of these before has raised it.
SLOW = 0.9  # of the lowest estimated rows per second


class Alarm(NamedTuple):
    """What is wrong, the step after which it was first seen, and what may help."""

    name: str
    step: int
    text: str


def check_diverged(
    loss: float, lowest_loss: float, step: int, *, learning_rate: float, warmup_steps: int
) -> None:
    """Raises Diverged if the mean loss of a report is far above the lowest one of the phase.

    The learning rate is the peak of the schedule.
    """
    if loss <= max(DIVERGED * lowest_loss, lowest_loss + DIVERGED_BY):
        return
    raise Diverged(
        f"the mean loss before step {step:,} is {loss:.4g}, more than {DIVERGED:g} times the "
        f"lowest of this phase, {lowest_loss:.4g}: the run has diverged. Start it in a new workdir "
        f"with a lower learning rate than {learning_rate:g}, such as {learning_rate / 3:.1g}, or a "
        f"longer warm-up than {warmup_steps:,} steps; or from weights saved before the "
        "loss rose (train/loss in metrics.jsonl): config.init_from=WORKDIR/checkpoints/STEP. "
        "To continue anyway, set config.stop_diverged=False",
        step,
    )


def extremes(
    step_metrics: Sequence[Mapping[str, float]], recent_losses: Sequence[float], config: Mapping
) -> dict[str, float]:
    """Returns maxima and counts over the steps of a report, for its line in metrics.jsonl.

    `step_metrics` are the `loss` and `gradient_norm` of these steps, and `recent_losses` those of
    up to `SPIKE_WINDOW` steps before, in the same phase.
    """
    losses = [float(each["loss"]) for each in step_metrics]
    norms = [float(each["gradient_norm"]) for each in step_metrics]
    values = {"max_loss": max(losses), "max_gradient_norm": max(norms)}
    if config["optimizer"] != "stable_adamw":  # It clips updates instead.
        values["clipped_steps"] = sum(norm > config["clip_norm"] for norm in norms)
    losses, num_spikes = [*recent_losses, *losses], 0
    for index in range(len(recent_losses), len(losses)):
        before = losses[max(index - SPIKE_WINDOW, 0) : index]
        if len(before) >= MIN_SPIKE_WINDOW:
            mean = np.mean(before)
            limit = max(SPIKE_DEVIATIONS * np.std(before, ddof=1), SPIKE_FRACTION * mean)
            num_spikes += int(losses[index] - mean > limit)
    values["loss_spikes"] = num_spikes
    return {f"train/{name}": value for name, value in values.items()}


def describe(lines: Sequence[Line], config: Mapping) -> str:
    """Returns the state of the run: its last evaluation, and the reports before it."""
    *before, last = lines
    parts, loss = [], _main_loss(last)
    if loss is not None:
        entropy = last["heldout/unigram_entropy"]
        parts.append(
            f"held-out loss {loss:.3f}, {abs(entropy - loss):.3f} nats "
            f"{'above' if loss >= entropy else 'below'} the unigram entropy ({entropy:.3f})"
        )
    reports = [line for line in before[_last_evaluation(before) :] if "train/max_loss" in line]
    if reports:
        means, maxima, clipped, spikes = (
            [line.get(f"train/{name}", 0) for line in reports]
            for name in ("gradient_norm", "max_gradient_norm", "clipped_steps", "loss_spikes")
        )
        norms = f"gradient norm: median {statistics.median(means):.3g}, max {max(maxima):.3g}"
        if "train/clipped_steps" in reports[-1]:
            norms += f", above clip_norm={config['clip_norm']:g} in {sum(clipped):,} steps"
        parts += [norms, f"loss spikes: {sum(spikes) or 'none'}"]
        parts += filter(None, [describe_speed(reports[-1]), _describe_hosts(reports[-1])])
    return "; ".join(parts)


def describe_speed(line: Line) -> str:
    """Returns the speed in a report, and what was estimated; "" if it has no speed."""
    if "rows_per_second" not in line:
        return ""
    names = {"rows_per_second": "{:,.4g} rows per second", "mfu": "MFU {:.1%}"}
    measured = ", ".join(form.format(line[name]) for name, form in names.items() if name in line)
    estimated = [
        form.format(line[f"estimated_{name}"])
        for name, form in names.items()
        if f"estimated_{name}" in line
    ]
    return f"{measured} (estimated: {', '.join(estimated)})" if estimated else measured


def _describe_hosts(line: Line) -> str:
    """Returns which process is the slowest in a report; "" if there is one, or without times."""
    if "slowest_process" not in line:
        return ""
    return (
        f"slowest host: process {line['slowest_process']:g}, with a host time of "
        f"{line['slowest_host_seconds']:.3g} s per step (median of the others: "
        f"{line['host_seconds']:.3g} s)"
    )


def new_alarms(lines: Sequence[Line], config: Mapping) -> list[Alarm]:
    """Returns the alarms of the last line that no recent line since the last evaluation has raised.

    What stays wrong is thus repeated after each evaluation.

    Args:
      lines: the last `MAX_LINES` of metrics.jsonl.
      config: the configuration of the run, as its config.json has it.
    """
    raised = _raised(lines, config)
    first = max(_last_evaluation(lines[:-1]), len(lines) - 1 - RECENT_LINES)
    for end in range(first + 1, len(lines)):
        if not raised:
            break
        for name in _raised(lines[:end], config):
            raised.pop(name, None)
    return [Alarm(name, int(lines[-1]["step"]), text) for name, text in raised.items()]


def all_alarms(lines: Sequence[Line], config: Mapping) -> list[Alarm]:
    """Returns the new alarms of each line, in order."""
    alarms = []
    for end in range(1, len(lines) + 1):
        alarms += new_alarms(lines[max(end - MAX_LINES, 0) : end], config)
    return alarms


def unchecked_alarms(lines: Sequence[Line]) -> dict[str, str]:
    """Returns the alarms that no line can raise, each with the metric that all lines lack.

    It may be of a later version, of runs of several processes, or need `config.estimate`.
    """
    return {
        name: metric
        for name, metric in METRICS.items()
        if not any(metric in line for line in lines)
    }


def _raised(lines: Sequence[Line], config: Mapping) -> dict[str, str]:
    texts = {name: alarm(lines, config) for name, alarm in ALARMS.items()}
    return {name: text for name, text in texts.items() if text}


def _last_evaluation(lines: Sequence[Line]) -> int:
    """Returns the number of lines up to the last one of an evaluation, 0 if there is none."""
    ends = (end for end in range(len(lines), 0, -1) if "train/loss" not in lines[end - 1])
    return next(ends, 0)


def _main_loss(line: Line) -> float | None:
    """Returns the held-out loss that compares with the unigram entropy, if a line has both."""
    if "heldout/unigram_entropy" not in line:
        return None
    return math.log(line["heldout/perplexity"])


def _spikes(lines: Sequence[Line], config: Mapping) -> str:
    """Returns the alarm text if a report has steps with a loss far above that of those before."""
    *before, line = lines
    if not line.get("train/loss_spikes"):
        return ""
    usual = next((each["train/loss"] for each in reversed(before) if "train/loss" in each), None)
    after = "" if usual is None else f" after a mean of {usual:.3f}"
    count = line["train/loss_spikes"]
    spikes = "a spike" if count == 1 else f"{count:g} spikes"
    return (
        f"the loss has {spikes}, of up to {line['train/max_loss']:.3f}{after}. If they grow, try "
        f"half the learning rate, a longer warm-up, or a smaller beta2 than {config['beta2']:g}"
    )


def _plateau(lines: Sequence[Line], config: Mapping) -> str:
    """Returns the alarm text if an evaluation is like a unigram model's, and the loss stays.

    Compares training losses of the same phase only, after its warm-up.
    """
    line = lines[-1]
    loss = _main_loss(line)
    usual = min(PLATEAU_WARMUP_FRACTION * num_steps(config), PLATEAU_WARMUP_STEPS)
    if loss is None or line["step"] <= config["warmup_steps"] + usual:
        return ""
    first_step = _last_step_of_warmup(line["step"], config)
    losses = [
        each["train/loss"] for each in lines if "train/loss" in each and each["step"] > first_step
    ][-PLATEAU_LINES:]
    half = len(losses) // 2
    if len(losses) < MIN_PLATEAU_LINES:
        return ""
    if loss < UNIGRAM_TOLERANCE * line["heldout/unigram_entropy"]:
        return ""
    if statistics.fmean(losses[-half:]) < (1 - PLATEAU_FALL) * statistics.fmean(losses[:half]):
        return ""
    return (
        "the model predicts no better than token frequencies: its held-out loss is "
        f"{loss:.3f}, their entropy {line['heldout/unigram_entropy']:.3f}, and the training loss "
        f"has not fallen for {len(losses)} reports. Try three times the learning rate or a third "
        "of it, a first phase of shorter rows, or to continue from existing weights "
        "(config.init_from)"
    )


def _input_bound(lines: Sequence[Line], config: Mapping) -> str:
    """Returns the alarm text if the last reports waited for data in a large part of each step."""
    reports = _timed(lines, config)
    waits = [line["data_wait_seconds"] / line["step_seconds"] for line in reports]
    if not waits or min(waits) <= INPUT_BOUND:
        return ""
    return (
        f"input-bound: in the last {len(reports)} reports a step waited for its batch in "
        f"{statistics.fmean(waits):.0%} of its time. Copy the corpus to a local disk, or use "
        "hosts with more or faster cores"
    )


def _slow(lines: Sequence[Line], config: Mapping) -> str:
    """Returns the alarm text if the last reports are slower than the estimated range."""
    name = "lowest_estimated_rows_per_second"
    reports = [line for line in _timed(lines, config) if name in line]
    ratios = [line["rows_per_second"] / line[name] for line in reports]
    if len(ratios) < TIMED_LINES or max(ratios) >= SLOW:
        return ""
    return (
        f"slower than estimated: the last {len(reports)} reports have "
        f"{statistics.fmean(ratios):.0%} of the lowest speed of the estimate; "
        f"{describe_speed(reports[-1])}. docs/pretraining.md, Is it healthy, lists causes"
    )


def _slow_host(lines: Sequence[Line], config: Mapping) -> str:
    """Returns the alarm text if all others waited for one host in the last reports."""
    reports = [line for line in _timed(lines, config) if "slowest_process" in line]
    is_slow = [
        line["slowest_host_seconds"]
        > max(SLOW_HOST * line["host_seconds"], HOST_BOUND * line["step_seconds"])
        for line in reports
    ]
    if len(reports) < TIMED_LINES or not all(is_slow):
        return ""
    if len({line["slowest_process"] for line in reports}) > 1:
        return ""
    return (
        f"the others wait for one host: {_describe_hosts(reports[-1]).partition(': ')[2]}. The "
        "start of the log names its host; see what else runs there, and how fast it reads the "
        "corpus"
    )


def _timed(lines: Sequence[Line], config: Mapping) -> list[Line]:
    """Returns the last `TIMED_LINES` regular reports with timings, if the last line is one.

    Skips early reports and those whose only step compiled.
    """

    def is_timed(line: Line) -> bool:
        return "step_seconds" in line and not line["step"] % config["log_every"]

    if not is_timed(lines[-1]):
        return []
    timed = [line for line in lines[-RECENT_LINES:] if is_timed(line)][-TIMED_LINES:]
    return timed if len(timed) == TIMED_LINES else []


def _last_step_of_warmup(step: int, config: Mapping) -> int:
    """Returns the step after which losses of the phase that has `step` are not of a warm-up.

    A phase begins one if it sets a learning rate or a warm-up, as in `phases.scheduled_steps`.
    """
    start, last_of_warmup = 0, config["warmup_steps"]
    for name, phase in phases_of(config).items():
        own = phase.get("learning_rate"), phase.get("warmup_steps")
        if not phase.get("num_steps"):
            continue
        if name and own != (None, None):
            last_of_warmup = start + (phase.get("warmup_steps") or 0)
        if step <= start + phase["num_steps"]:
            break
        start += phase["num_steps"]
    return max(start, last_of_warmup)


def num_steps(config: Mapping) -> int:
    """Returns the steps of all phases of a configuration."""
    return sum(phase.get("num_steps") or 0 for phase in phases_of(config).values())


ALARMS: dict[str, Callable[[Sequence[Line], Mapping], str]] = {
    "loss spike": _spikes,
    "plateau": _plateau,
    "input-bound": _input_bound,
    "slow host": _slow_host,
    "slow": _slow,
}
# What the lines need to have for an alarm to be raised.
METRICS = {
    "loss spike": "train/loss_spikes",
    "plateau": "heldout/unigram_entropy",
    "input-bound": "step_seconds",
    "slow host": "slowest_process",
    "slow": "lowest_estimated_rows_per_second",
}
