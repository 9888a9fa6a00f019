"""Reports of the steps in both mains."""

import pytest

from bert_jax.errors import NonFiniteLoss
from bert_jax.objectives import mean_metrics
from bert_jax.training import loop


def step_metrics(loss: float, mlm_count: float = 1.0) -> dict:
    sums = {"mlm_loss": (loss * mlm_count, mlm_count), "mlm_accuracy": (1.0, mlm_count)}
    sums |= {"nsp_loss": (1.0, 2.0), "nsp_accuracy": (1.0, 2.0)}
    return {"loss": loss + 0.5, "gradient_norm": 1.0, "parameter_norm": 2.0, "sums": sums}


def test_report_is_the_mean_over_all_predictions_of_the_steps():
    values = loop.check_finite(
        [step_metrics(4.0, mlm_count=30), step_metrics(2.0, mlm_count=10)], 2
    )
    assert values["loss"] == 3.5 and values["gradient_norm"] == 1.0
    scores = mean_metrics(values["sums"])
    assert scores["mlm_loss"] == (4.0 * 30 + 2.0 * 10) / 40  # Not a mean of means.
    assert scores["mlm_accuracy"] == 2 / 40
    assert scores["nsp_loss"] == scores["nsp_accuracy"] == 0.5


def test_loss_of_any_step_that_is_not_finite_is_an_error_with_its_number():
    steps = [step_metrics(loss) for loss in (1.0, float("nan"), 1.0)]
    with pytest.raises(NonFiniteLoss, match="the loss of step 8 is nan"):
        loop.check_finite(steps, 9)


def test_first_step_is_logged_with_the_rows_of_its_phase(caplog):
    caplog.set_level("INFO", "absl")
    loop.log_first_step(None)
    loop.log_first_step(None, " on rows of 512 tokens")
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("First step ") and " s after the start, " in first
    assert second.startswith("First step on rows of 512 tokens ")
