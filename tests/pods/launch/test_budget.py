"""The limit and the cost of a job follow from the launchers' flags."""

import math

import pytest
from absl import flags

from bert_jax.pods.launch import budget
from bert_jax.pods.launch.job import LaunchError


def read(num_chips, **given):
    values = flags.FlagValues()
    budget.define_flags(values)
    values(["launch", *(f"--{name}={value}" for name, value in given.items())])
    return budget.read_budget(num_chips, values)


@pytest.mark.parametrize(
    ("given", "price_per_hour", "limit_hours"),
    [
        ({}, None, math.inf),
        ({"price_per_chip_hour": 2}, 32, math.inf),
        ({"max_hours": 3}, None, 3),
        ({"max_price": 80, "price_per_chip_hour": 2}, 32, 2.5),
        ({"max_price": 80, "price_per_chip_hour": 2, "max_hours": 2}, 32, 2),
        ({"max_price": 80, "price_per_chip_hour": 2, "max_hours": 3}, 32, 2.5),
    ],
)
def test_limit_is_the_smaller_of_the_hours_and_those_that_the_price_pays(
    given, price_per_hour, limit_hours
):
    assert read(16, **given) == budget.Budget(price_per_hour, limit_hours * 3600)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"max_price": 80}, "--max_price needs --price_per_chip_hour"),
        ({"max_hours": 0}, "--max_hours=0.0"),
        ({"max_hours": "nan"}, "--max_hours=nan"),
        ({"price_per_chip_hour": -1}, "--price_per_chip_hour=-1.0"),
        ({"max_price": "inf", "price_per_chip_hour": 1}, "--max_price=inf"),
    ],
)
def test_budget_without_meaning_is_refused(given, named):
    with pytest.raises(LaunchError, match=named):
        read(16, **given)


def test_cost_is_hours_times_their_price():
    assert read(16, price_per_chip_hour=2).describe(9000) == "2.5 hours, at 32.00 per hour: 80.00"
    assert read(16).describe(9000) == "2.5 hours"
