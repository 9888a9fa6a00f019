"""The matrix products of a training step alone: the rate that bounds what the step can reach."""

import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bert_jax.model.config import BertConfig
from bert_jax.model.encoder import is_few


class Product(NamedTuple):
    """Products `[stack, rows, inner] x [stack, inner, columns]` that occur `count` times."""

    count: int
    stack: int
    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> int:
        """FLOPs of all `count`, each forward and for the gradients of both factors."""
        return 3 * 2 * self.count * self.stack * self.rows * self.inner * self.columns


def step_products(config: BertConfig, batch: int, length: int, num_targets: int) -> list[Product]:
    """Returns the products of a step that predicts tokens and one pair per row.

    Their FLOPs are those of `bert_jax.objectives.masked_lm.flops_per_row`: the last layer finishes
    only the positions that are predicted, where they are few. The two columns of the
    next-sentence head are left out.
    """
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_layers
    heads, width, tokens = config.num_heads, config.hidden_size // config.num_heads, batch * length
    num_outputs = num_targets + 1
    last = batch * (num_outputs if is_few(num_outputs, length) else length)
    products = [
        Product(3 * layers, 1, tokens, hidden, hidden),  # Queries, keys and values.
        Product(layers, batch * heads, length, width, length),  # Scores.
        Product(layers, batch * heads, length, length, width),  # Weighted values.
    ]
    for count, rows in ((layers - 1, tokens), (1, last)):
        products += [
            Product(count, 1, rows, hidden, hidden),
            Product(count, 1, rows, hidden, inner),
            Product(count, 1, rows, inner, hidden),
        ]
    return [
        *products,
        Product(1, 1, batch * num_targets, hidden, hidden),
        Product(1, 1, batch * num_targets, hidden, config.padded_vocab_size),
        Product(1, 1, batch, hidden, hidden),  # The pooler.
    ]


@jax.jit
def product_and_gradients(x, y, gradient):
    """Computes a product, and the gradients of both factors for the gradient of the result."""
    product, gradients = jax.vjp(jnp.matmul, x, y)
    return product, gradients(gradient)


def seconds_of(product: Product, dtype: str, repeats: int) -> float:
    """Returns the median time of all `count`, forward and backward."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (
        (product.stack, product.rows, product.inner),
        (product.stack, product.inner, product.columns),
        (product.stack, product.rows, product.columns),
    )
    x, y, gradient = (
        jax.random.normal(key, shape if product.stack > 1 else shape[1:], dtype)
        for key, shape in zip(keys, shapes, strict=True)
    )
    seconds = []
    for _ in range(2 + repeats):
        started = time.perf_counter()
        results = [product_and_gradients(x, y, gradient) for _ in range(product.count)]
        jax.block_until_ready(results)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])


def flops_per_second(products: list[Product], dtype: str, repeats: int) -> float:
    """Returns the rate of the products one after the other, in this process."""
    seconds = sum(seconds_of(product, dtype, repeats) for product in products)
    return sum(product.flops for product in products) / seconds
