"""Reads the file of TPU prices that a user keeps for tools/rent.py."""

import datetime
import math
import pathlib
import tomllib
from collections.abc import Mapping
from typing import NamedTuple

from bert_jax.pods.chips import CHIPS

KINDS = ("on_demand", "spot")
MAX_AGE_DAYS = 30  # Without a reminder to look prices up again.


class Prices(NamedTuple):
    """What a chip costs for an hour, by kind of capacity and chip, such as ["spot"]["v5e"]."""

    date: datetime.date
    currency: str
    per_chip_hour: Mapping[str, Mapping[str, float]]


def read_prices(file: str) -> Prices:
    """Reads a file like configs/tpu_prices.toml. Raises ValueError with its field, or OSError."""
    try:
        stored = tomllib.loads(pathlib.Path(file).read_text(encoding="utf-8"))
    except ValueError as error:  # Not TOML, or not text.
        raise ValueError(f"{file} is not a file like configs/tpu_prices.toml: {error}") from error
    date, currency = stored.get("date"), stored.get("currency")
    if not isinstance(date, datetime.date) or isinstance(date, datetime.datetime):
        expected = "expected a date without quotes and time: date = 2026-11-30"
        raise ValueError(f"{file}: date={date}: {expected}")
    if not isinstance(currency, str) or not currency:
        raise ValueError(
            f'{file}: currency={currency}: expected a string, such as currency = "USD"'
        )
    if unknown := stored.keys() - {"date", "currency", *KINDS}:
        expected = f"expected date, currency, [{KINDS[0]}] and [{KINDS[1]}]"
        raise ValueError(f"{file}: there is no field {min(unknown)!r}: {expected}")
    for kind in KINDS:
        table = stored.setdefault(kind, {})
        if not isinstance(table, dict):
            raise ValueError(f"{file}: {kind}={table}: expected a table, [{kind}], of chips")
        for chip, price in table.items():
            if chip not in CHIPS:
                known = ", ".join(CHIPS)
                raise ValueError(f"{file}: [{kind}] has no chip {chip!r}: expected one of {known}")
            is_number = isinstance(price, int | float) and not isinstance(price, bool)
            if not is_number or not 0 <= price < math.inf:
                expected = "expected a number, at least 0, not in quotes"
                raise ValueError(f"{file}: [{kind}] {chip}={price}: {expected}")
    return Prices(date, currency, {kind: stored[kind] for kind in KINDS})


def describe_prices(prices: Prices, file: str, today: datetime.date) -> str:
    """Returns a sentence on the origin and age of prices."""
    age = (today - prices.date).days
    old = f", {age} days old" if age > MAX_AGE_DAYS else ", in the future" if age < 0 else ""
    return (
        f"Prices in {prices.currency} are those of {file}, of {prices.date}{old}: check "
        "them at https://cloud.google.com/tpu/pricing"
    )
