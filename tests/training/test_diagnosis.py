"""The diagnosis of a run: unigram entropy, spikes, gradient norms, divergence."""

import logging

import pytest
from ml_collections import ConfigDict

from bert_jax.runtime.errors import Diverged
from bert_jax.training.diagnosis import StepHistory, check_diverged
from bert_jax.training.phases import ScheduledSteps

CONFIG = ConfigDict({"optimizer": "adamw", "clip_norm": 1.0, "beta2": 0.999})
SCHEDULE = ScheduledSteps([""], peak=1e-3, num_steps=100, warmup_steps=10)


def steps(losses, norm=0.5):
    return [{"loss": loss, "gradient_norm": norm} for loss in losses]


def logged(caplog, history, step=50, loss=5.0, **changes) -> tuple[str, list[str]]:
    """Returns the line of a diagnosis, and its warnings."""
    caplog.clear()
    caplog.set_level("INFO", "absl")
    history.log(step, 100, loss, 6.0, SCHEDULE, ConfigDict(CONFIG.to_dict() | changes))
    by_level = {logging.INFO: [], logging.WARNING: []}
    for record in caplog.records:
        by_level[record.levelno].append(record.getMessage())
    return "".join(by_level[logging.INFO]), by_level[logging.WARNING]


def test_a_run_that_learns_is_described_without_a_warning(caplog):
    history = StepHistory()
    history.add(steps([5.0, 5.1] * 20), 40)
    history.add(steps([5.0] * 10, norm=3.0), 50)
    line, warnings = logged(caplog, history, step=1050)
    assert line == (
        "Step 1,050: held-out loss 5.000, 1.000 nats below the unigram entropy (6.000); gradient "
        "norm: median 0.5, max 3, above clip_norm=1 in 20% of 50 steps; loss spikes: none"
    )
    assert not warnings
    # The next one is about the steps since then, of which there is none.
    assert logged(caplog, history)[0].endswith("below the unigram entropy (6.000)")
    history.add(steps([5.0]), 51)
    unclipped = logged(caplog, history, loss=None, optimizer="stable_adamw")[0]
    assert unclipped == "Step 50: gradient norm: median 0.5, max 0.5 of 1 steps; loss spikes: none"


def test_spikes_are_counted_and_named_and_noise_is_none(caplog):
    history = StepHistory()
    noisy = [5.0 + 0.1 * (index % 3) for index in range(60)]
    noisy[40] = 8.0
    history.add(steps(noisy[:30]), 130)
    history.add(steps(noisy[30:]), 160)
    line, (warning,) = logged(caplog, history)
    assert line.endswith("; loss spikes: 1") and "the last at step 141: 8.000 after" in warning
    assert "a learning rate of 0.0005, a longer warm-up, or a smaller beta2 than 0.999" in warning
    # Too few steps before it to tell.
    history = StepHistory()
    history.add(steps([5.0] * 10 + [50.0]), 11)
    assert logged(caplog, history)[1] == []


@pytest.mark.parametrize(
    ("step", "loss", "warns"),
    [(60, 6.5, True), (60, 5.9, False), (20, 6.5, False), (60, None, False)],
)
def test_a_loss_above_the_unigram_entropy_is_a_warning_after_a_quarter_of_the_run(
    caplog, step, loss, warns
):
    line, warnings = logged(caplog, StepHistory(), step, loss)
    assert ("above the unigram entropy" in line) == (loss == 6.5)
    assert bool(line) == (loss is not None)
    assert [each.startswith("The model predicts no better") for each in warnings] == [True] * warns
    assert all("a learning rate of 0.003 or 0.0003, a first phase" in each for each in warnings)


def test_a_loss_far_above_the_lowest_ends_the_run():
    check_diverged(17.9, 9.0, 100, SCHEDULE)
    check_diverged(1.1, 0.2, 100, SCHEDULE)  # A small loss is noisy.
    with pytest.raises(Diverged, match=r"before step 1,200 is 18\.1, more than 2 times the lowest"):
        check_diverged(18.1, 9.0, 1200, SCHEDULE)
