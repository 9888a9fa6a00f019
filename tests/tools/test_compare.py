"""Paired comparison of two runs from their predictions."""

import json

import numpy as np
import pytest

from bert_jax.tools.compare import compare, describe
from tests.helpers.json_lines import write_lines


def write_run(run, predictions, labels, metric="dev/accuracy", result=()):
    """Writes what a finished run of the classes a and b leaves."""
    (run / "predictions").mkdir(parents=True)
    lines = [
        {"id": str(n), "text": f"text {n}", "label": label, "prediction": predicted}
        for n, (label, predicted) in enumerate(zip(labels, predictions, strict=True))
    ]
    write_lines(run / "predictions/dev.jsonl", lines)
    accuracy = np.mean([one == other for one, other in zip(labels, predictions, strict=True)])
    scores = {"metric": metric, "dev": {"accuracy": accuracy, "loss": 1.0}} | dict(result)
    (run / "result.json").write_text(json.dumps(scores))
    (run / "config.json").write_text(json.dumps({"head": {"labels": ["a", "b"]}, "data": {}}))
    return run


def test_difference_has_a_paired_interval_and_an_exact_p_value(tmp_path):
    # Of 100 examples 10 are right in the first run only, and 1 in the second only.
    first = write_run(tmp_path / "one", "a" * 90 + "b" * 10, "a" * 89 + "b" * 11)
    second = write_run(tmp_path / "two", "b" * 10 + "a" * 79 + "b" * 11, "a" * 89 + "b" * 11)
    found = compare((first, second), num_samples=2000)
    assert (found.split, found.metric, found.num_examples) == ("dev", "accuracy", 100)
    assert found.scores == pytest.approx((0.99, 0.9))
    # The standard deviation of the differences -1, 0 and 1 is 0.32.
    assert (found.low, found.high) == pytest.approx((-0.15, -0.03), abs=0.015)
    assert (found.only_first, found.only_second) == (10, 1)
    assert found.p_value == pytest.approx(2 * (1 + 11) / 2**11)
    lines = describe((first, second), found)
    assert "0.9900" in lines[0] and "0.9000" in lines[1] and len(lines) == 4


def test_equal_runs_do_not_differ(tmp_path):
    run = write_run(tmp_path / "one", "ab" * 5, "aa" * 5)
    found = compare((run, run), "dev", "accuracy", num_samples=20)
    assert (found.low, found.high, found.only_first, found.only_second) == (0, 0, 0, 0)
    assert found.p_value == 1 and found.scores == (0.5, 0.5)


def test_values_have_no_test_of_right_and_wrong_examples(tmp_path):
    run = write_run(tmp_path / "one", [1.0, 2.5, 2.0], [1.0, 2.0, 3.0])
    result = {"metric": "dev/mean_squared_error", "dev": {"mean_squared_error": 1.25 / 3}}
    (run / "result.json").write_text(json.dumps(result))
    found = compare((run, run), num_samples=20)
    assert found.only_first is found.only_second is found.p_value is None
    assert len(describe((run, run), found)) == 3


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"labels": "ba"}, {}, r"one and .*two predicted other examples: number 0 is .*'b'"),
        ({"labels": "aba", "predictions": "aba"}, {}, r"number 2 is None and .*text 2"),
        ({"result": {"dev": {"accuracy": 0.7}}}, {}, r"two: .* accuracy 1\.0000, .* 0\.7000"),
        ({"result": {"seeds": []}}, {}, r"two has several seeds: .*two/seed_0"),
        ({"result": {"diverged": 7}}, {}, r"two diverged at step 7"),
        ({}, {"split": "test"}, r"one has no test/accuracy: expected one of dev/accuracy, dev/l"),
        ({}, {"metric": "loss"}, r"dev\.jsonl has no loss: expected one of accuracy"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(change, options, message, tmp_path):
    first = write_run(tmp_path / "one", "ab", "ab")
    second = write_run(tmp_path / "two", **{"predictions": "ab", "labels": "ab"} | change)
    with pytest.raises(ValueError, match=message):
        compare((first, second), **options, num_samples=2)


def test_a_run_without_a_selecting_score_needs_both_flags(tmp_path):
    run = write_run(tmp_path / "one", "ab", "ab", metric="")
    with pytest.raises(ValueError, match=r"one.*--split.*--metric"):
        compare((run, run), num_samples=2)
    assert compare((run, run), "dev", "accuracy", num_samples=2)
    with pytest.raises(FileNotFoundError, match=r"none/result\.json"):
        compare((tmp_path / "none", run))
