"""FLOPs agree with the compiler's count and with a count by hand."""

import jax
import jax.numpy as jnp
import pytest

from bert_jax.model.bert import BertForPreTraining
from bert_jax.model.config import BertConfig
from bert_jax.training.throughput import flops_per_row


def test_flops_agree_with_the_count_of_the_compiler():
    # Small enough to compile, wide enough for matrix products to dominate.
    config = BertConfig(
        vocab_size=1280,
        hidden_size=256,
        num_layers=3,
        num_heads=4,
        intermediate_size=1024,
        dropout_rate=0.0,
        scan_layers=False,
    )
    model = BertForPreTraining(config)
    length, predictions, pairs = 128, 20, 4
    ids = jnp.zeros((1, length), jnp.int32)
    inputs = (ids, ids, ids, ids, ids[:, :predictions], ids[:, :pairs])
    params = jax.eval_shape(model.init, jax.random.key(0), *inputs)

    def loss(params):
        return sum(jnp.sum(x) for x in model.apply(params, *inputs))

    forward = jax.jit(loss).lower(params).compile().cost_analysis()["flops"]
    by_hand = flops_per_row(config, length, predictions, pairs) / 3
    assert by_hand == pytest.approx(forward, rel=0.03)


def test_bert_base_takes_six_flops_per_parameter_and_token():
    config = BertConfig.named("base")
    encoder = 12 * (4 * 768**2 + 2 * 768 * 3072)
    attention = 12 * 2 * 128**2 * 768
    head = 20 * (768**2 + 768 * 30592)
    expected = 6 * (128 * encoder + attention + head + 768**2 + 2 * 768)
    assert flops_per_row(config, 128, 20, 1) == expected
