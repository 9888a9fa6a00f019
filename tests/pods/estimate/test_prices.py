"""The file of prices."""

import datetime

import pytest

from bert_jax.pods.estimate.prices import describe_prices, read_prices
from tests.helpers.commands import ROOT

GOOD = 'date = 2026-11-30\ncurrency = "EUR"\n[on_demand]\nv5e = 2\n[spot]\nv5e = 0.5\n'


def test_prices_are_read_by_kind_and_chip(tmp_path):
    file = tmp_path / "prices.toml"
    file.write_text(GOOD, encoding="utf-8")
    prices = read_prices(str(file))
    assert prices.date == datetime.date(2026, 11, 30) and prices.currency == "EUR"
    assert prices.per_chip_hour == {"on_demand": {"v5e": 2}, "spot": {"v5e": 0.5}}


def test_prices_say_their_date_and_that_they_are_to_be_checked(tmp_path):
    file = tmp_path / "prices.toml"
    file.write_text(GOOD, encoding="utf-8")
    prices = read_prices(str(file))
    new, old, future = (
        describe_prices(prices, "prices.toml", prices.date + datetime.timedelta(days=days))
        for days in (5, 31, -1)
    )
    assert "prices.toml, of 2026-11-30: check them at https://" in new
    assert "of 2026-11-30, 31 days old: check" in old
    assert "of 2026-11-30, in the future: check" in future


def test_example_is_valid():
    prices = read_prices(str(ROOT / "configs" / "tpu_prices.toml"))
    assert prices.per_chip_hour["on_demand"]["v4"] > 0


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("date = 2026-11-30", "", "date=None"),
        ("date = 2026-11-30", 'date = "2026-11-30"', "date=2026-11-30"),
        ("date = 2026-11-30", "date = 2026-11-30T10:00:00", "date=2026"),
        ('currency = "EUR"', "", "currency=None"),
        ('currency = "EUR"', "currency = 7", "currency=7"),
        ('currency = "EUR"', 'currency = ""', "currency="),
        ("[spot]", "[spots]", "no field 'spots'"),
        ("[on_demand]\nv5e = 2\n[spot]", "[on_demand.v5e]", "on_demand"),
        ("v5e = 2\n", "v5litepod = 2\n", r"\[on_demand\] has no chip 'v5litepod'"),
        ("v5e = 2\n", 'v5e = "2"\n', r"\[on_demand\] v5e=2"),
        ("v5e = 2\n", "v5e = -1\n", r"\[on_demand\] v5e=-1"),
        ("v5e = 2\n", "v5e = inf\n", r"\[on_demand\] v5e=inf"),
        ("v5e = 2\n", "v5e = nan\n", r"\[on_demand\] v5e=nan"),
        ("v5e = 2\n", "v5e = true\n", r"\[on_demand\] v5e=True"),
        ("v5e = 2\n", "v5e = 2\nv5e = 3\n", "line 5"),
        (GOOD, "price: 3", "line 1"),
        (GOOD, '{"v5e": 3}', "line 1"),
        ('"EUR"', '"EUR', "line 2"),
    ],
)
def test_wrong_file_is_refused_with_its_name_and_the_field(tmp_path, old, new, place):
    file = tmp_path / "prices.toml"
    file.write_text(GOOD.replace(old, new), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"prices\.toml.*{place}"):
        read_prices(str(file))


def test_bytes_that_are_not_text_are_refused(tmp_path):
    file = tmp_path / "prices.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"prices\.toml"):
        read_prices(str(file))
