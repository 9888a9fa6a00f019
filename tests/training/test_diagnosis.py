"""The diagnosis of a run: word frequencies, spikes, gradient norms, divergence."""

import logging

import pytest
from ml_collections import ConfigDict

from bert_jax.runtime.errors import Diverged
from bert_jax.training.diagnosis import StepHistory, check_diverged

CONFIG = ConfigDict({"learning_rate": 1e-3, "warmup_steps": 10, "clip_norm": 1.0, "beta2": 0.999})


def steps(losses, norm=0.5):
    return [{"loss": loss, "gradient_norm": norm} for loss in losses]


def logged(caplog, history, step=50, loss=5.0, **changes) -> tuple[str, list[str]]:
    """Returns the line of a diagnosis, and its warnings."""
    caplog.clear()
    caplog.set_level("INFO", "absl")
    history.log(step, changes.pop("num_steps", 100), loss, changes.pop("entropy", 6.0), CONFIG)
    line, *warnings = caplog.records
    assert all(each.levelno == logging.WARNING for each in warnings)
    return line.getMessage(), [each.getMessage() for each in warnings]


def test_a_run_that_learns_is_described_without_a_warning(caplog):
    history = StepHistory()
    history.add(steps([5.0, 5.1] * 20), 40)
    history.add(steps([5.0] * 10, norm=3.0), 50)
    line, warnings = logged(caplog, history, step=1050)
    assert line == (
        "Step 1,050: held-out loss 5.000, 1.000 nats below word frequencies (6.000); gradient norm "
        "0.5, at most 3, above clip_norm=1 in 20% of 50 steps; spikes of the loss: none"
    )
    assert not warnings
    # The next one is about the steps since then.
    assert logged(caplog, history)[0].endswith("(6.000); spikes of the loss: none")


def test_spikes_are_counted_and_named_and_noise_is_none(caplog):
    history = StepHistory()
    noisy = [5.0 + 0.1 * (index % 3) for index in range(60)]
    noisy[40] = 8.0
    history.add(steps(noisy[:30]), 130)
    history.add(steps(noisy[30:]), 160)
    line, (warning,) = logged(caplog, history)
    assert (
        line.endswith("; spikes of the loss: 1") and "the last at step 141: 8.000 after" in warning
    )
    assert "config.learning_rate=0.0005, a longer warm-up, or a smaller beta2 than 0.999" in warning
    # Too few steps before it to tell.
    history = StepHistory()
    history.add(steps([5.0] * 10 + [50.0]), 11)
    assert logged(caplog, history)[1] == []


@pytest.mark.parametrize(
    ("step", "loss", "warns"),
    [(60, 6.5, True), (60, 5.9, False), (20, 6.5, False), (60, None, False)],
)
def test_a_loss_above_word_frequencies_is_a_warning_after_a_quarter_of_the_run(
    caplog, step, loss, warns
):
    line, warnings = logged(caplog, StepHistory(), step, loss)
    assert ("above word frequencies" in line) == (loss == 6.5)
    assert ("frequencies" in line) == (loss is not None)
    assert [each.startswith("The model has not learned more") for each in warnings] == [
        True
    ] * warns
    assert all("config.learning_rate=0.003 or 0.0003, a first phase" in each for each in warnings)


def test_a_loss_far_above_the_first_ends_the_run():
    check_diverged(17.9, 9.0, 100, CONFIG)
    with pytest.raises(
        Diverged, match=r"before step 1,200 is 18\.1, more than 2 times that of the"
    ):
        check_diverged(18.1, 9.0, 1200, CONFIG)
