"""metrics.jsonl survives interruptions; baseline and FLOPs agree with counts by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.data.rows import Rows
from bert_jax.model.config import BertConfig
from bert_jax.model.execution import ExecutionPlan
from bert_jax.objectives.masked_lm import PretrainingModel, flops_per_row
from bert_jax.training import metrics
from bert_jax.training.metrics import MetricsWriter, perplexity, unigram_baseline
from tests.helpers.json_lines import read_lines
from tests.helpers.models import example_batch


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
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (2, 0.5), (3, 0.5)]


@pytest.mark.parametrize(
    ("others", "median"),
    [([[0.125, 4.0], [1.0, 1.0]], 0.75), ([[1.0, 4.0]], 0.5)],  # Without the slowest.
)
def test_times_of_all_processes_name_the_slowest(monkeypatch, others, median):
    values = {"train/loss": 1.0, "data_wait_seconds": 0.25, "host_seconds": 0.5}
    assert metrics.over_processes(values) == values
    monkeypatch.setattr(jax, "process_count", lambda: 1 + len(others))
    gather = metrics.multihost_utils
    monkeypatch.setattr(gather, "process_allgather", lambda own: np.stack([own, *others]))
    assert metrics.over_processes(values) == {
        "train/loss": 1.0,
        "data_wait_seconds": 1.0,
        "host_seconds": median,
        "slowest_host_seconds": 4.0,
        "slowest_process": 1,
    }
    assert metrics.over_processes({"train/loss": 1.0}) == {"train/loss": 1.0}  # It compiled.


def test_unigram_baseline_equals_a_count_in_plain_python(corpus):
    rows = Rows(corpus, "heldout")
    special = (0, 1, 2, 3, 4)
    counts = {}
    for token in rows.read(0, rows.num_rows)["tokens"].ravel().tolist():
        if token not in special:
            counts[token] = counts.get(token, 0) + 1
    total = sum(counts.values())
    baseline = unigram_baseline(rows.count_tokens(), special)
    entropy = -sum(n / total * np.log(n / total) for n in counts.values())
    assert baseline["unigram_entropy"] == pytest.approx(entropy)
    assert baseline["unigram_accuracy"] == max(counts.values()) / total


def test_perplexity_does_not_overflow():
    assert perplexity(0.0) == 1.0 and perplexity(1e6) == float("inf")


def test_flops_agree_with_the_count_of_the_compiler():
    # Small enough to compile, wide enough for matrix products to dominate.
    config = BertConfig(
        vocab_size=1280,
        hidden_size=256,
        num_layers=3,
        num_heads=4,
        intermediate_size=1024,
        dropout_rate=0.0,
    )
    model = PretrainingModel(config, plan=ExecutionPlan())
    length, predictions, pairs = 128, 20, 4
    ids = jnp.zeros((1, length), jnp.int32)
    batch = dict.fromkeys(example_batch(), ids)
    batch |= {"target_positions": ids[:, :predictions], "pooled_positions": ids[:, :pairs]}
    params = jax.eval_shape(model.init, jax.random.key(0), batch)

    def loss(params):
        return sum(jnp.sum(x) for x in model.apply(params, batch))

    forward = jax.jit(loss).lower(params).compile().cost_analysis()["flops"]
    by_hand = flops_per_row(config, length, predictions, pairs, next_sentence=True) / 3
    assert by_hand == pytest.approx(forward, rel=0.03)


def test_bert_base_takes_six_flops_per_parameter_and_token():
    config = BertConfig.named("base")
    encoder = 12 * (4 * 768**2 + 2 * 768 * 3072)
    attention = 12 * 2 * 128**2 * 768
    unread = (128 - 21) * (768**2 + 2 * 768 * 3072)  # Positions of the last layer.
    head = 20 * (768**2 + 768 * 30592)
    expected = 6 * (128 * encoder + attention - unread + head + 768**2 + 2 * 768)
    assert flops_per_row(config, 128, 20, 1, True) == expected
    everywhere = 6 * (128 * encoder + attention + 127 * (768**2 + 768 * 30592) + 768**2 + 2 * 768)
    assert flops_per_row(config, 128, 127, 1, True) == everywhere
