"""The hours of a run beside its steps, against a simulation and the figures of Daly's paper."""

import numpy as np
import pytest

from bert_jax.pods.estimate.run_hours import (
    Assumptions,
    best_interval,
    hours_of_run,
    time_with_preemptions,
)


def simulate(work, interval, pause, restart, between, num_runs: int) -> float:
    """Returns the mean time of simulated runs, each moment of which is played in float64."""
    rng = np.random.default_rng(0)
    total = 0.0
    for _ in range(num_runs):
        saved = now = 0.0
        next_failure = rng.exponential(between)
        restarting = False
        while saved < work:
            segment = restart if restarting else interval + pause
            if now + segment <= next_failure:
                now += segment
                saved += 0.0 if restarting else interval
                restarting = False
            else:
                now, restarting = next_failure, True
                next_failure = now + rng.exponential(between)
        total += now
    return total / num_runs


@pytest.mark.parametrize(
    ("work", "interval", "pause", "restart", "between"),
    [
        (50.0, 1.0, 0.05, 0.2, 10.0),
        (50.0, 5.0, 0.05, 0.2, 10.0),
        (20.0, 0.5, 0.3, 1.0, 2.0),  # Restarts are often interrupted, too.
    ],
)
def test_mean_time_is_that_of_simulated_runs(work, interval, pause, restart, between):
    expected = simulate(work, interval, pause, restart, between, num_runs=1500)
    found = time_with_preemptions(work, interval, pause, restart, between)
    assert found == pytest.approx(expected, rel=0.02)


# Figures 3 to 5 of Daly (2006), in minutes.
@pytest.mark.parametrize(("hours", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_best_interval_is_that_of_the_paper(hours, minutes):
    assert best_interval(5, 60 * hours) == pytest.approx(minutes, rel=0.01)


@pytest.mark.parametrize("between", [5.0, 50.0, 1000.0, 1e6])
@pytest.mark.parametrize("pause", [0.01, 0.3, 2.0])
def test_no_other_interval_is_better(pause, between):
    intervals = np.geomspace(pause / 10, 100 * between, 5000)
    times = [time_with_preemptions(1.0, each, pause, 1.0, between) for each in intervals[:4000]]
    best = time_with_preemptions(1.0, best_interval(pause, between), pause, 1.0, between)
    assert best <= min(times) * 1.001


def test_a_pause_longer_than_two_interruptions_still_has_an_interval():
    assert best_interval(10.0, 4.0) == 4.0


RUN = {
    "step": 0.5,
    "num_steps": 10_000,
    "evaluation": 20.0,
    "num_evaluations": 11,
    "checkpoint_every": 3_000,
    "checkpoint_bytes": 40e9,
    "num_hosts": 4,
}


def test_hours_on_demand_are_the_sum_of_their_parts():
    hours = hours_of_run(**RUN, assumptions=Assumptions(startup_minutes=9, compile_minutes=3))
    assert hours.steps == pytest.approx(5000 / 3600)
    assert hours.evaluation == pytest.approx(220 / 3600)
    assert hours.checkpoints == pytest.approx(4 * 10 / 3600)
    assert hours.startup == 0.2 and hours.preemptions == 0
    assert hours.checkpoint_every == 3_000
    assert hours.total == pytest.approx((5000 + 220 + 40 + 720) / 3600)


def test_preemptions_add_lost_work_and_restarts_and_set_the_interval():
    assumptions = Assumptions(preemptions_per_day=24)
    hours = hours_of_run(**RUN, assumptions=assumptions)
    interval = best_interval(10.0, 3600.0)
    assert hours.checkpoint_every == round(interval / 0.5)
    expected = simulate(5220, hours.checkpoint_every * 0.5, 10, 600, 3600, num_runs=1500)
    total = 3600 * hours.total - 600  # The first start.
    assert total == pytest.approx(expected, rel=0.03)


def test_rare_preemptions_never_ask_for_more_steps_than_the_run_has():
    hours = hours_of_run(**RUN, assumptions=Assumptions(preemptions_per_day=0.001))
    assert hours.checkpoint_every == RUN["num_steps"]


@pytest.mark.parametrize("per_day", [1e4, 1e6, 1e300])
def test_more_preemptions_than_a_start_survives_are_refused(per_day):
    with pytest.raises(ValueError, match="preemptions_per_day="):
        hours_of_run(**RUN, assumptions=Assumptions(preemptions_per_day=per_day))
