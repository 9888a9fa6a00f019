"""Times in a plan have two units."""

import pytest

from bert_jax.sweeps.plan import format_seconds, print_table


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.96, "10.0 s"),
        (12.4, "12 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (18_600, "5 h 10 min"),
        (400_000, "111 h 6 min"),
    ],
)
def test_time_has_two_units(seconds, text):
    assert format_seconds(seconds) == text


def test_columns_of_a_table_are_aligned(capsys):
    print_table([("trial", "time"), ("seed=10", "1 s")])
    assert capsys.readouterr().out == "trial    time\nseed=10  1 s\n"
