"""Attention with a score bias equals float64, in short and in long rows, values and gradients."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.model.attention import attention, scaled_scores
from bert_jax.model.attention_mask import AttentionMask
from bert_jax.model.blocked_attention import BLOCK, blocked_attention
from bert_jax.model.score_bias import align_distances

BATCH, HEADS, HEAD_DIM, REACH = 2, 3, 4, 150
DISTANCES = 2 * REACH + 1


class Bias(NamedTuple):
    """A number for each distance, and vectors that queries and keys are multiplied with."""

    numbers: jax.Array  # [heads, distances]
    of_queries: jax.Array  # [heads, distances, head_dim]
    of_keys: jax.Array

    def scores(self, query, key, distance):
        num_queries, num_keys = query.shape[2], key.shape[2]
        distances = distance + jnp.arange(-num_queries, num_keys)
        index = jnp.clip(distances, -REACH, REACH) + REACH
        products = jnp.einsum("bhqd,hmd->bhqm", query, self.of_queries[:, index])
        scores = align_distances(products + self.numbers[:, None, index], num_keys)
        products = jnp.einsum("bhkd,hmd->bhkm", key, self.of_keys)
        pairs = distance + jnp.arange(num_keys) - jnp.arange(num_queries)[:, None]
        places = jnp.broadcast_to(
            jnp.clip(pairs, -REACH, REACH) + REACH, (*products.shape[:2], *pairs.shape)
        )
        return scores + jnp.take_along_axis(products.mT, places, axis=2)


def make_bias(seed: int = 1) -> Bias:
    rng, sizes = np.random.default_rng(seed), ((), (HEAD_DIM,), (HEAD_DIM,))
    return Bias(*(rng.normal(size=(HEADS, DISTANCES, *size)) for size in sizes))


def reference(query, key, value, dy, ids, window, bias):
    """Returns the output and all gradients, computed from all pairs in float64."""
    places = np.arange(len(ids[0])) - np.arange(len(ids[0]))[:, None]
    is_seen = (ids[:, None, :, None] == ids[:, None, None]) & (np.abs(places) <= window)
    index = np.clip(places, -REACH, REACH) + REACH
    of_queries, of_keys = bias.of_queries[:, index], bias.of_keys[:, index]  # [heads, q, k, d]
    scores = np.einsum("bhqd,bhkd->bhqk", query, key) + bias.numbers[:, index]
    scores += np.einsum("bhqd,hqkd->bhqk", query, of_queries)
    scores += np.einsum("bhkd,hqkd->bhqk", key, of_keys)
    weights = np.where(is_seen, np.exp(scores), 0)
    weights /= weights.sum(-1, keepdims=True)
    dweights = np.einsum("bhqd,bhkd->bhqk", dy, value)
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdims=True))
    dbias = jax.tree.map(np.zeros_like, bias)
    by_place = np.moveaxis(dscores, 0, -1)  # [heads, q, k, batch]
    for head in range(HEADS):
        np.add.at(dbias.numbers[head], index, by_place[head].sum(-1))
        each = np.einsum("qkb,bqd->qkd", by_place[head], query[:, head])
        np.add.at(dbias.of_queries[head], index, each)
        each = np.einsum("qkb,bkd->qkd", by_place[head], key[:, head])
        np.add.at(dbias.of_keys[head], index, each)
    dquery = np.einsum("bhqk,bhkd->bhqd", dscores, key)
    dquery += np.einsum("bhqk,hqkd->bhqd", dscores, of_queries)
    dkey = np.einsum("bhqk,bhqd->bhkd", dscores, query)
    dkey += np.einsum("bhqk,hqkd->bhkd", dscores, of_keys)
    dvalue = np.einsum("bhqk,bhqd->bhkd", weights, dy)
    return np.einsum("bhqk,bhkd->bhqd", weights, value), (dquery, dkey, dvalue), dbias


def join(x: jax.Array) -> jax.Array:
    return x.swapaxes(1, 2).reshape(BATCH, x.shape[2], -1)


@pytest.mark.parametrize(("length", "window"), [(20, 5), (2 * BLOCK + 3, None), (300, 90)])
def test_values_and_gradients_equal_float64(length, window):
    rng, bias = np.random.default_rng(0), make_bias()
    query, key, value, dy = rng.normal(size=(4, BATCH, HEADS, length, HEAD_DIM))
    ids = np.ones((BATCH, length), np.int32)
    ids[0, length // 3 :], ids[1, length // 2 :] = 2, 0
    mask = AttentionMask(jnp.asarray(ids), window=window)

    @jax.jit
    def compute(query, key, value, dy, bias):
        def attend(query, key, value, bias):
            if length > BLOCK:
                return join(blocked_attention(query, key, value, mask, None, bias))
            query *= jnp.sqrt(float(HEAD_DIM))
            joined = map(join, (query, key, value))
            return attention(*joined, mask, num_heads=HEADS, bias=bias)

        output, backward = jax.vjp(attend, query, key, value, bias)
        return output, backward(join(dy))

    output, gradients = compute(*jax.tree.map(np.float32, (query, key, value, dy, bias)))
    expected, *others = reference(query, key, value, dy, ids, window or length, bias)
    np.testing.assert_allclose(output, join(expected), atol=1e-5)
    for found, exact in zip(jax.tree.leaves(gradients), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-4)


def test_scores_of_maps_have_the_bias():
    bias = Bias(np.zeros((HEADS, DISTANCES)), *[np.zeros((HEADS, DISTANCES, HEAD_DIM))] * 2)
    bias.numbers[:] = np.arange(DISTANCES)
    x = jnp.zeros((1, 4, HEADS * HEAD_DIM))
    scores = scaled_scores(x, x, HEADS, bias)
    expected = REACH + np.arange(4) - np.arange(4)[:, None]
    np.testing.assert_array_equal(scores, np.broadcast_to(expected, (1, HEADS, 4, 4)))


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 4), (3, 2), (2, 5)])
def test_distances_are_aligned_with_their_pairs(num_queries, num_keys):
    x = np.random.default_rng(0).normal(size=(2, num_queries, num_queries + num_keys))
    found = align_distances(jnp.asarray(x, jnp.float32), num_keys)
    for i in range(num_queries):
        for j in range(num_keys):
            np.testing.assert_array_equal(found[:, i, j], np.float32(x[:, i, num_queries + j - i]))


def test_gradient_of_long_rows_keeps_no_array_of_pairs():
    length = 8 * BLOCK
    x = jnp.ones((BATCH, HEADS, length, HEAD_DIM))
    bias = jax.tree.map(jnp.float32, make_bias())
    mask = AttentionMask(jnp.ones((BATCH, length), jnp.int32))

    def loss(x, bias):
        return jnp.sum(blocked_attention(x, x, x, mask, None, bias) ** 2)

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(x, bias).compile()
    pairs = BATCH * HEADS * length**2 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < pairs / 2
