"""The TPU kernel for long rows, in interpret mode, equals attention in float64 NumPy."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.model.attention_mask import AttentionMask
from bert_jax.model.dropout import Dropout, attention_dropout
from bert_jax.model.modernbert import rotation
from bert_jax.model.tpu_kernels.layer import interleave
from bert_jax.model.tpu_kernels.long_attention_kernel import (
    SEGMENTS,
    Segments,
    choose_segments,
    long_attention,
    why_unsupported,
)

HIDDEN = 128


def packed_ids(*lengths: int) -> np.ndarray:
    """Returns the ids of a row of sequences; a negative length is padding."""
    ids = [0 if n < 0 else number for number, n in enumerate(lengths, 1)]
    return np.repeat(np.int32(ids), np.abs(lengths))


def split(x, num_heads: int) -> np.ndarray:
    """Returns float64 `[batch, heads, length, head_dim]`."""
    x = np.asarray(x, np.float64)
    return np.swapaxes(x.reshape(*x.shape[:2], num_heads, -1), 1, 2)


def join(x: np.ndarray) -> np.ndarray:
    x = np.swapaxes(x, 1, 2)
    return x.reshape(*x.shape[:2], -1)


def turn(x: np.ndarray, tables, sign: int = 1) -> np.ndarray:
    """Rotates `[batch, heads, length, head_dim]`; with a `sign` of -1, back."""
    if tables is None:
        return x
    cosines, sines = (np.asarray(table, np.float64)[:, None] for table in tables)
    first, second = np.split(x, 2, axis=-1)
    sines = sign * sines
    return np.concatenate([first * cosines - second * sines, second * cosines + first * sines], -1)


def reference(projections, biases, dout, num_heads, ids, window, causal, factors, tables):
    """Returns the result, and the gradients of query, key, value, in float64.

    `factors` are those of dropout, `[batch, heads, query, key]` or 1.
    """
    query, key, value = (
        split(np.float64(x) + np.float64(bias), num_heads)
        for x, bias in zip(projections, biases, strict=True)
    )
    query, key, dout = turn(query, tables), turn(key, tables), split(dout, num_heads)
    scale = 1 / math.sqrt(query.shape[-1])
    position = np.arange(ids.shape[1])
    offset = position[:, None] - position
    visible = ids[:, None, :, None] == ids[:, None, None, :]
    visible &= np.abs(offset) <= (ids.shape[1] if window is None else window)
    if causal:
        visible &= offset >= 0
    scores = np.where(visible, scale * query @ key.mT, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    probabilities = weights / weights.sum(-1, keepdims=True)
    kept = factors * probabilities
    dprobabilities = factors * (dout @ value.mT)
    mean = np.sum(probabilities * dprobabilities, -1, keepdims=True)
    dscores = scale * probabilities * (dprobabilities - mean)
    gradients = (
        turn(dscores @ key, tables, -1),
        turn(dscores.mT @ query, tables, -1),
        kept.mT @ dout,
    )
    return [join(x) for x in (kept @ value, *gradients)]


@functools.partial(jax.jit, static_argnames=("head_dim", "window", "causal", "segments"))
def run(
    projections, biases, dout, ids, dropout, tables, *, head_dim, window, causal, segments=None
):
    """Returns the kernel's result, and its gradients of query, key, value and the biases."""

    def attend(projections, biases):
        bias = interleave(*biases) if biases else None
        mask = AttentionMask(ids, causal, window)
        return long_attention(
            interleave(*projections),
            bias,
            mask,
            dropout,
            tables,
            head_dim=head_dim,
            segments=segments,
            interpret=True,
        )

    out, vjp = jax.vjp(attend, projections, biases)
    return out, *vjp(dout)


def check(
    ids,
    window=None,
    causal=False,
    rate=0.0,
    rotates=False,
    has_bias=False,
    head_dim=64,
    hidden=HIDDEN,
    segments=None,
):
    rng = np.random.default_rng(0)
    ids, num_heads = np.atleast_2d(ids), hidden // head_dim
    *projections, dout = rng.normal(size=(4, *ids.shape, hidden)).astype(np.float32)
    biases = 0.3 * rng.normal(size=(3, hidden)).astype(np.float32)
    if not has_bias:
        biases *= 0
    dropout, factors, tables = None, np.float64(1), None
    if rate:
        rows = np.arange(len(ids)) + 3
        dropout = attention_dropout(Dropout(jax.random.key(1), rows, rate), num_heads, ids.shape[1])
        ones = jnp.ones((len(ids), num_heads, ids.shape[1], ids.shape[1]))
        factors = np.float64(dropout.apply(ones))
    if rotates:
        tables = tuple(rotation(jnp.arange(ids.shape[1]) + 0 * ids, 10_000.0, head_dim))
    expected = reference(projections, biases, dout, num_heads, ids, window, causal, factors, tables)
    out, gradients, dbiases = run(
        projections,
        list(biases) if has_bias else None,
        dout,
        ids,
        dropout,
        tables,
        head_dim=head_dim,
        window=window,
        causal=causal,
        segments=segments,
    )
    for actual, exact in zip((out, *gradients), expected, strict=True):
        assert np.isfinite(actual).all()
        np.testing.assert_allclose(actual, exact, rtol=1e-5, atol=1e-5)
    if has_bias:
        for name, actual, exact in zip("qkv", dbiases, expected[1:], strict=True):
            total = exact.sum((0, 1))
            if name == "k" and not rotates:
                total = np.zeros_like(total)  # It has no effect.
            np.testing.assert_allclose(
                actual, total, rtol=1e-5, atol=1e-5 * np.abs(exact).sum(1).max()
            )


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def exhaustive(*values):
    return pytest.param(*values, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ((640,), {}),
        slow((250, 300, 40, -50), {"rotates": True, "has_bias": True}),
        slow((300, 520, -204), {"window": 64, "rotates": True}),
        exhaustive((600, -40), {"rate": 0.1, "has_bias": True}),
        ((-640,), {"window": 64}),
        slow((500, 300, -324), {"causal": True}),
        exhaustive((700, -68), {"window": 9, "causal": True, "has_bias": True}),
        exhaustive((600, -40), {"window": 300}),
        exhaustive((500, 130), {"rate": 0.3, "window": 64}),
        exhaustive((-640,), {"rotates": True}),
        exhaustive((1024,), {"window": 128, "rotates": True, "has_bias": True}),
        exhaustive((1024,), {"rate": 0.1, "head_dim": 32, "rotates": True}),
        slow((900, -380), {"rate": 0.1, "head_dim": 128, "hidden": 256, "has_bias": True}),
        exhaustive((1500, 548), {"rotates": True}),
    ],
    ids=str,
)
def test_kernel_equals_attention_in_float64(lengths, options):
    check(packed_ids(*lengths), **options)


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        exhaustive((300, 180, -32), {"rotates": True, "has_bias": True}),
        slow((200, 520, -48), {"window": 64, "rotates": True}),
        exhaustive((768,), {}),
        slow((768,), {"rate": 0.1, "has_bias": True}),
        exhaustive((700, -68), {"causal": True, "rotates": True}),
        exhaustive((768,), {"window": 64, "rotates": True, "has_bias": True}),
        exhaustive((500, -12), {"window": 9}),
        slow((700, -68), {"rate": 0.3, "window": 64, "causal": True}),
        exhaustive((760,), {"window": 100, "rotates": True}),
        exhaustive((900, 124), {"rate": 0.1, "head_dim": 32, "rotates": True}),
        exhaustive((1000, -24), {"rate": 0.1, "head_dim": 128, "hidden": 256, "has_bias": True}),
    ],
    ids=str,
)
def test_rows_in_segments_equal_attention_in_float64(lengths, options):
    check(packed_ids(*lengths), segments=Segments(256, 128, keys=256, band=256), **options)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 64])
def test_rows_of_a_batch_have_their_own_sequences(window):
    ids = np.stack([packed_ids(1124), packed_ids(100, 500, 400, -124)])
    check(ids, window=window, rotates=True, rate=0.2, hidden=256)


@pytest.mark.slow
def test_bfloat16_differs_from_float32_by_its_rounding():
    ids = packed_ids(500, 268)[None]
    rng = np.random.default_rng(0)
    arrays = jnp.asarray(rng.normal(size=(4, 1, 768, HIDDEN)), jnp.bfloat16)
    tables = tuple(rotation(jnp.arange(768)[None], 10_000.0, 64))

    def compute(arrays):
        *projections, dout = arrays
        options = {"head_dim": 64, "window": 64, "causal": False}
        out, gradients, _ = run(projections, None, dout, ids, None, tables, **options)
        return [out, *gradients]

    rounded, exact = compute(arrays), compute(arrays.astype(jnp.float32))
    for actual, expected in zip(rounded, exact, strict=True):
        assert actual.dtype == jnp.bfloat16
        error = jnp.linalg.norm(actual.astype(jnp.float32) - expected)
        assert error < 2**-7 * jnp.linalg.norm(expected)


@pytest.mark.parametrize("field", ["is_global", "is_hidden", "ranks"])
def test_masks_that_the_kernel_does_not_support_are_rejected(field):
    mask = AttentionMask(jnp.ones((1, 640), int), **{field: jnp.zeros((1, 640), int)})
    with pytest.raises(ValueError, match=field):
        long_attention(jnp.zeros((1, 640, 3 * HIDDEN)), None, mask, head_dim=64)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        (
            (8200, 768, 64),
            "rows of 8200 tokens are longer than 8192, the limit of the attention kernel",
        ),
        ((1024, 192, 64), "heads of 64 in 192 lanes do not fill blocks of 128"),
        ((1024, 384, 96), "heads of 96 in 384 lanes do not fill blocks of 128"),
        ((8192, 768, 64), ""),
    ],
)
def test_what_the_kernel_does_not_compute_has_a_reason(sizes, reason):
    assert why_unsupported(*sizes, "cpu") == reason


def test_rows_that_do_not_fit_on_a_chip_are_in_segments():
    whole = [("TPU v4", "bfloat16", 2048), ("TPU v4", "float32", 512), ("TPU v5", "float32", 4096)]
    for device_kind, dtype, length in whole:
        assert choose_segments(length, device_kind, dtype, has_dropout=True) is None
        segments = choose_segments(length + 128, device_kind, dtype, has_dropout=False)
        assert segments == SEGMENTS[dtype]
    assert choose_segments(8192, "TPU v5 lite", "float32", has_dropout=True) is None
