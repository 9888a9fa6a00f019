"""What the benchmarks count is what the model computes."""

import importlib.util
import statistics
import sys

import pytest

from bert_jax.model.config import BertConfig
from bert_jax.objectives.masked_lm import flops_per_row
from bert_jax.pods.estimate import calibration


@pytest.fixture
def products(monkeypatch, request):
    monkeypatch.syspath_prepend(request.config.rootpath / "benchmarks")
    monkeypatch.delitem(sys.modules, "products", raising=False)
    import products

    return products


@pytest.mark.parametrize(
    ("size", "length", "num_targets"),
    [("tiny", 128, 20), ("mini", 128, 20), ("base", 512, 77), ("mini", 16, 10)],
)
def test_the_products_of_a_step_have_the_flops_of_its_rows(products, size, length, num_targets):
    config, batch = BertConfig.named(size), 32
    counted = sum(
        product.flops for product in products.step_products(config, batch, length, num_targets)
    )
    expected = batch * flops_per_row(config, length, num_targets, 1, next_sentence=True)
    assert counted == pytest.approx(expected, rel=1e-5)  # Without the next-sentence head.


@pytest.fixture
def published(monkeypatch, request):
    monkeypatch.syspath_prepend(request.config.rootpath / "benchmarks")
    import published

    return published


def test_every_published_measurement_is_stored_as_it_was_published(published):
    stored = calibration.read_published()
    for measurement, entry in zip(published.MEASUREMENTS, stored, strict=True):
        assert entry == entry | {
            "name": measurement.name,
            "chip": measurement.chip,
            "num_chips": measurement.num_chips,
            "is_product": isinstance(measurement.program, published.Product),
            "tokens_per_device": measurement.rows * measurement.length,
            "measured_seconds": measurement.seconds,
            "figure": measurement.figure,
            "source": measurement.source,
        }
    table = published.table(stored)
    assert all(f"`{entry['name']}`" in table for entry in stored)


def test_median_error_of_published_training_steps_is_at_most_a_quarter():
    steps = [entry for entry in calibration.read_published() if not entry["is_product"]]
    errors = [abs(calibration.ratio(entry) - 1) for entry in steps]
    assert len(errors) >= 6 and statistics.median(errors) <= 0.25


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        # 6 FLOPs per weight and token: 48 layers of 4 x 6144 x 24 x 256 and 2 x 6144 x 24576.
        ("v4-maxtext-22b", 6 * 48 * (4 * 6144 * 6144 + 2 * 6144 * 24_576) + 6 * 32_768 * 6144),
        # Attention too: 6 x 32 layers x 32 heads x 256 x 2048 pairs.
        (
            "v5e-maxtext-16b",
            6 * 32 * (4 * 5120 * 8192 + 2 * 5120 * 32_768)
            + 6 * 32_768 * 5120
            + 6 * 32 * 32 * 256 * 2048,
        ),
    ],
)
def test_rates_become_seconds_by_the_flops_of_their_source(published, name, flops):
    measurement = next(each for each in published.MEASUREMENTS if each.name == name)
    rate = float(measurement.figure.split()[0]) * 1e12
    tokens = measurement.rows * measurement.length
    assert measurement.seconds == pytest.approx(tokens * flops / rate)


@pytest.mark.parametrize(("block_q", "block_kv", "pairs"), [(512, 512, 10), (1024, 512, 6)])
def test_causal_attention_runs_the_blocks_that_see_a_key(published, block_q, block_kv, pairs):
    splash = published.Splash(q=block_q, kv=block_kv)
    assert splash.num_programs("fwd", 2048) == pairs


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.slow
def test_published_product_still_has_its_stored_estimate(published):
    name = "v6e-product-8192"
    measurement = next(each for each in published.MEASUREMENTS if each.name == name)
    (stored,) = (each for each in calibration.read_published() if each["name"] == name)
    cycles = published.estimated_cycles(measurement)
    entry = published.stored_entry(measurement, cycles)
    assert entry["estimated_seconds"] == pytest.approx(stored["estimated_seconds"], rel=0.05)


def test_layers_that_are_not_counted_as_often_as_the_model_has_them_are_refused(published):
    name = "v4-maxtext-22b"
    measurement = next(each for each in published.MEASUREMENTS if each.name == name)
    expected = measurement.program.flops(measurement.rows, measurement.length, False)
    published.check_flops(measurement, expected * 4 / 3)
    for counted in (expected * 2 / 48, 2 * expected):
        with pytest.raises(ValueError, match=name):
            published.check_flops(measurement, counted)
