"""What the benchmarks count is what the model computes."""

import sys

import pytest

from bert_jax.model.config import BertConfig
from bert_jax.objectives.masked_lm import flops_per_row


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
