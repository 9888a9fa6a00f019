"""metrics.jsonl survives interruptions; the unigram baseline agrees with a count by hand."""

import json

import numpy as np
import pytest

from bert_jax.data.rows import Rows
from bert_jax.training.metrics import MetricsWriter, perplexity, unigram_baseline


def test_resuming_removes_later_and_broken_lines(tmp_path):
    writer = MetricsWriter(tmp_path)
    for step in (1, 2, 3):
        writer.write(step, {"loss": 1.0 / step, "seconds": 10.0 * step})
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # Killed during a write.
    resumed = MetricsWriter(tmp_path, first_step=2)
    assert resumed.seconds == 20.0
    resumed.write(3, {"loss": 0.5})
    resumed.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (2, 0.5), (3, 0.5)]


def test_unigram_baseline_equals_a_count_in_plain_python(corpus):
    rows = Rows(corpus, "heldout")
    special = (0, 1, 2, 3, 4)
    counts = {}
    for token in rows.stream(0, rows.num_rows)["tokens"].ravel().tolist():
        if token not in special:
            counts[token] = counts.get(token, 0) + 1
    total = sum(counts.values())
    baseline = unigram_baseline(rows.count_tokens(), special)
    entropy = -sum(n / total * np.log(n / total) for n in counts.values())
    assert baseline["unigram_entropy"] == pytest.approx(entropy)
    assert baseline["unigram_accuracy"] == max(counts.values()) / total


def test_perplexity_does_not_overflow():
    assert perplexity(0.0) == 1.0 and perplexity(1e6) == float("inf")
