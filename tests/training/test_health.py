"""Alarms fire on synthetic series constructed to trigger them, and in no healthy run."""

import gzip
import json
import pathlib

import jax
import numpy as np
import pytest

from bert_jax.pods.estimate.calibration import MIN_SPREAD
from bert_jax.runtime.errors import Diverged
from bert_jax.training import metrics
from bert_jax.training.health import all_alarms, check_diverged, describe, extremes, new_alarms

CONFIG = {
    "optimizer": "adamw",
    "clip_norm": 1.0,
    "beta2": 0.999,
    "num_steps": 800,
    "long_phase": {"num_steps": 200},
    "warmup_steps": 100,
    "log_every": 10,
}
ENTROPY = 6.0
HEALTHY = pathlib.Path(__file__).parents[1] / "golden/healthy_runs.json.gz"


def report(step: int, loss: float = 5.0, **changes) -> dict:
    """A line of training at 0.5 s for a step of 8 rows; a changed value of None is left out."""
    values = {
        "train/loss": loss,
        "train/max_loss": loss + 0.1,
        "train/gradient_norm": 0.5,
        "train/max_gradient_norm": 2.0,
        "train/clipped_steps": 1,
        "train/loss_spikes": 0,
        "data_wait_seconds": 0.01,
        "step_seconds": 0.5,
        "rows_per_second": 16.0,
    }
    values |= changes
    return {"step": step} | {name: each for name, each in values.items() if each is not None}


def evaluation(step: int, loss: float = 5.0) -> dict:
    line = {"heldout/mlm_loss": loss, "heldout/perplexity": np.exp(loss)}
    return {"step": step, "heldout/unigram_entropy": ENTROPY} | line


def reports(last_step: int = 400, **changes) -> list[dict]:
    return [report(step, **changes) for step in range(10, last_step + 1, 10)]


def names_and_steps(lines, **changes) -> list[tuple[str, int]]:
    return [(alarm.name, alarm.step) for alarm in all_alarms(lines, CONFIG | changes)]


def step_metrics(losses, norm=0.5):
    return [{"loss": loss, "gradient_norm": norm} for loss in losses]


def test_a_report_has_what_the_means_of_its_steps_hide():
    steps = step_metrics([5.0, 5.2], norm=1.5) + step_metrics([4.8])
    values = extremes(steps, [], CONFIG)
    expected = {"max_loss": 5.2, "max_gradient_norm": 1.5, "clipped_steps": 2, "loss_spikes": 0}
    assert values == {f"train/{name}": value for name, value in expected.items()}
    assert "train/clipped_steps" not in extremes(steps, [], CONFIG | {"optimizer": "stable_adamw"})


@pytest.mark.parametrize("num_reported", [0, 10, 39])
def test_spikes_are_counted_and_noise_is_none(num_reported):
    losses = [5.0 + 0.1 * (index % 3) for index in range(60)]
    losses[40] = 8.0
    recent, steps = losses[:num_reported], step_metrics(losses[num_reported:])
    assert extremes(steps, recent, CONFIG)["train/loss_spikes"] == 1
    # Too few steps before it to tell; and a rise of less than a tenth.
    assert extremes(step_metrics([5.0] * 10 + [50.0]), [], CONFIG)["train/loss_spikes"] == 0
    assert extremes(step_metrics([5.4]), [5.0] * 60, CONFIG)["train/loss_spikes"] == 0


def test_a_spike_is_told_once_between_evaluations():
    lines = reports(400)
    for index in (20, 22, 30):
        lines[index] |= {"train/loss_spikes": 2, "train/max_loss": 9.0}
    lines.insert(25, evaluation(250))
    assert names_and_steps(lines) == [("loss spike", 210), ("loss spike", 310)]
    (alarm,) = new_alarms(lines[:21], CONFIG)
    assert "2 spikes, of up to 9.000 after a mean of 5.000" in alarm.text


@pytest.mark.parametrize(
    ("step", "loss", "falls_to", "changes", "raised"),
    [
        (400, 6.2, 6.2, {}, True),
        (400, 5.97, 6.2, {}, True),  # It may know the frequencies of short texts.
        (400, 5.5, 6.2, {}, False),
        (400, 6.2, 5.5, {}, False),
        (300, 6.2, 6.2, {}, False),  # Usual in the first quarter.
        (300, 6.2, 6.2, {"num_steps": 100}, True),
        (400, 6.2, 6.2, {"warmup_steps": 300}, False),
    ],
)
def test_a_plateau_is_a_loss_of_unigrams_that_no_longer_falls(
    step, loss, falls_to, changes, raised
):
    losses = np.linspace(6.2, falls_to, step // 10)
    lines = [report(10 * number, each) for number, each in enumerate(losses, 1)]
    found = names_and_steps([*lines, evaluation(step, loss)], **changes)
    assert found == [("plateau", step)] * raised


def test_a_plateau_is_repeated_by_each_evaluation_and_not_without_a_main_loss():
    lines = []
    for step in (400, 500, 600):
        lines += [*reports(step, loss=6.2)[(step - 100) // 10 :], evaluation(step, 6.2)]
    assert names_and_steps(lines) == [("plateau", step) for step in (400, 500, 600)]
    without = [
        {name: value for name, value in line.items() if name != "heldout/unigram_entropy"}
        for line in lines
    ]
    assert not names_and_steps(without)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("input-bound", {"data_wait_seconds": 0.4}),
        ("slow", {"lowest_estimated_rows_per_second": 18.0}),
        (
            "slow host",
            {"host_seconds": 0.1, "slowest_host_seconds": 0.4, "slowest_process": 3},
        ),
    ],
)
def test_slow_steps_are_told_after_several_regular_reports(name, changes):
    lines = reports(200)
    for index in range(10, 16):
        lines[index] |= changes
    assert names_and_steps(lines) == [(name, 150)]
    lines.insert(15, evaluation(150))  # It still holds, and is repeated.
    assert names_and_steps(lines) == [(name, 150), (name, 160)]
    lines[12] = report(130)
    assert not names_and_steps(lines)
    early = [report(step, **changes) for step in (1, 2, 5, 6, 7, 8)]
    assert not names_and_steps(early)
    compiled = [report(10 * n, **changes, step_seconds=None) for n in range(1, 9)]
    assert not names_and_steps(compiled)


@pytest.mark.parametrize(
    ("process", "own", "median", "raised"),
    [(3, 0.4, 0.1, True), (3, 0.4, 0.3, False), (3, 0.2, 0.01, False), (2, 0.4, 0.1, False)],
)
def test_a_slow_host_is_always_the_same_and_others_wait_for_it(process, own, median, raised):
    times = {"host_seconds": 0.1, "slowest_host_seconds": 0.4, "slowest_process": 3}
    lines = reports(50, **times)
    lines[2] |= {"host_seconds": median, "slowest_host_seconds": own, "slowest_process": process}
    alarms = new_alarms(lines, CONFIG)
    assert [alarm.name for alarm in alarms] == ["slow host"] * raised
    shown = "process 3, with a host time of 0.4 s per step (median of the others: 0.1 s)"
    assert all(shown in alarm.text for alarm in alarms)
    assert f"; slowest host: {shown}" in describe([*lines, evaluation(50)], CONFIG)


@pytest.mark.parametrize("seconds", [[0.01, 0.5], [0.5, 0.01], [0.01, 0.5, 0.02]])
def test_one_host_of_two_or_three_is_slow(monkeypatch, seconds):
    """`host_seconds` are as the run gathers them."""
    monkeypatch.setattr(jax, "process_count", lambda: len(seconds))
    times = np.array([[0.01, each] for each in seconds])
    monkeypatch.setattr(metrics.multihost_utils, "process_allgather", lambda own: times)
    own = {"data_wait_seconds": 0.01, "host_seconds": seconds[0]}
    (alarm,) = new_alarms(reports(50, **metrics.over_processes(own)), CONFIG)
    assert alarm.name == "slow host"
    assert f"process {seconds.index(0.5)}, with a host time of 0.5 s per step" in alarm.text


def test_spikes_far_from_each_other_are_repeated_without_evaluations():
    lines = reports(3000)
    for index in (20, 22, 150):
        lines[index] |= {"train/loss_spikes": 1}
    assert names_and_steps(lines) == [("loss spike", 210), ("loss spike", 1510)]


@pytest.mark.parametrize(
    ("phase", "first_loss", "raised"),
    [
        ({"learning_rate": None, "warmup_steps": None}, 6.2, True),
        # The loss of the phase before says nothing: it has shorter rows.
        ({"learning_rate": None, "warmup_steps": None}, 9.0, True),
        ({"warmup_steps": 50}, 6.2, True),
        ({"warmup_steps": 70}, 6.2, False),  # Too few reports after it.
        ({"learning_rate": 1e-3}, 6.2, True),  # A schedule without a warm-up.
    ],
)
def test_a_plateau_of_a_later_phase_is_of_its_own_losses_after_its_warmup(
    phase, first_loss, raised
):
    lines = [report(step, first_loss) for step in range(410, 801, 10)]
    lines += [report(step, 6.2) for step in range(810, 901, 10)]
    phase = {"long_phase": {"num_steps": 200} | phase}
    found = names_and_steps([*lines, evaluation(900, 6.2)], **phase)
    assert found == [("plateau", 900)] * raised


def test_the_text_of_a_slow_run_names_both_speeds():
    speed = {"mfu": 0.2, "estimated_mfu": 0.5, "estimated_rows_per_second": 40.0}
    speed["lowest_estimated_rows_per_second"] = 32.0
    (alarm,) = new_alarms(reports(50, **speed), CONFIG)
    nearly_in_range = reports(50, **speed, rows_per_second=0.91 * 32)
    assert not new_alarms(nearly_in_range, CONFIG)
    measured, estimated = "16 rows per second, MFU 20.0%", "40 rows per second, MFU 50.0%"
    assert (
        f"50% of the lowest speed of the estimate; {measured} (estimated: {estimated})"
        in alarm.text
    )


def test_an_evaluation_is_described_with_the_reports_since_the_last():
    earlier = [*reports(100, **{"train/max_gradient_norm": 9.0}), evaluation(100)]
    later = [report(step) for step in (110, 120, 130)]
    later[1] |= {"train/clipped_steps": 6, "train/loss_spikes": 2}
    assert describe([*earlier, *later, evaluation(130)], CONFIG) == (
        "held-out loss 5.000, 1.000 nats below the unigram entropy (6.000); gradient norm: median "
        "0.5, max 2, above clip_norm=1 in 8 steps; loss spikes: 2; 16 rows per second"
    )
    assert describe([evaluation(130, 6.5)], CONFIG) == (
        "held-out loss 6.500, 0.500 nats above the unigram entropy (6.000)"
    )
    (unclipped,) = reports(10, **{"train/clipped_steps": None}, rows_per_second=None)
    assert describe([unclipped, {"step": 10, "heldout/hidden_loss": 1.0}], CONFIG) == (
        "gradient norm: median 0.5, max 2; loss spikes: none"
    )


def test_runs_of_earlier_versions_raise_nothing():
    lines = [{"step": step, "train/loss": 5.0, "data_wait_seconds": 1.0} for step in (10, 20)]
    assert not names_and_steps([*lines, {"step": 20, "heldout/perplexity": 500.0}])


def healthy_runs() -> list[dict]:
    return json.loads(gzip.decompress(HEALTHY.read_bytes()))


def estimated_by_its_median(run: dict) -> list[dict]:
    """Returns the lines of a run with an estimate, and waits as the host times of two processes.

    The estimate of each phase is its median speed, and in the lowest case `MIN_SPREAD` less. The
    second process has the waits of the report before.
    """
    lines, previous = [dict(line) for line in run["lines"]], 0.0
    for is_later in (False, True):
        timed = [
            line
            for line in lines
            if "step_seconds" in line and (line["step"] > run["config"]["num_steps"]) == is_later
        ]
        median = np.median([each["rows_per_second"] for each in timed] or [0.0])
        for line in timed:
            line["lowest_estimated_rows_per_second"] = median / MIN_SPREAD
            both = sorted([previous, line["data_wait_seconds"]])
            line["host_seconds"], line["slowest_host_seconds"] = both
            line["slowest_process"] = 0
            previous = line["data_wait_seconds"]
    return lines


def test_ten_healthy_runs_raise_no_alarm():
    runs = healthy_runs()
    assert len(runs) == 10
    for run in runs:
        if run["config"]["log_every"] > 1:  # Five steps of 0.4 s are no speed.
            assert all_alarms(estimated_by_its_median(run), run["config"]) == []
        assert all_alarms(run["lines"], run["config"]) == []
        last = run["lines"][-1]  # They have learned more than frequencies.
        assert np.log(last["heldout/perplexity"]) < 0.95 * last["heldout/unigram_entropy"]


def test_the_steps_of_a_healthy_run_have_no_spikes():
    """By today's limits: each line of this run is of one step."""
    (run,) = [run for run in healthy_runs() if run["config"]["log_every"] == 1]
    lines = [line for line in run["lines"] if "train/loss" in line]
    assert len(lines) == 240
    steps = step_metrics([line["train/loss"] for line in lines])
    assert extremes(steps, [], run["config"])["train/loss_spikes"] == 0


def test_a_loss_far_above_the_lowest_ends_the_run():
    def check(loss, lowest_loss):
        check_diverged(loss, lowest_loss, 1200, learning_rate=1e-3, warmup_steps=10)

    check(17.9, 9.0)
    check(1.1, 0.2)  # A small loss is noisy.
    with pytest.raises(Diverged, match=r"before step 1,200 is 18\.1, more than 2 times the lowest"):
        check(18.1, 9.0)
