"""BERT's encoder layer on a GPU, with attention in one kernel for each direction.

Nothing of size length x length reaches memory (Dao et al., 2022): a program of the forward pass
takes one block of queries of a head, and goes over the keys block by block with a running maximum
and sum; the backward pass recomputes the probabilities from the saved logarithms of their sums, and
the dropout mask from the same hash words. Pallas compiles the kernels with Triton, which multiplies
float32 as TF32, as XLA does there by default.
"""

import functools
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from bert_jax.model import bert
from bert_jax.model.dropout import AttentionDropout, LayerDropout, random_bits
from bert_jax.sharding.mesh import mesh_and_device

try:
    from jax.experimental.pallas import triton
except ImportError:  # Deprecated since JAX 0.11.
    triton = None

# Positions of a block, not tuned on a GPU yet. Products in Triton need sides of at least 16.
MIN_BLOCK, MAX_BLOCK = 16, 64
# Of a block of queries, keys or values of a head: the backward kernel holds several, in the shared
# memory of a GPU.
MAX_BLOCK_BYTES = 8192
HEAD_DIMS = 16, 32, 64, 128  # Powers of two, as all sides of products in Triton.


class GpuEncoderLayer(bert.EncoderLayer):
    """`bert.EncoderLayer` with attention in GPU kernels; it has the same parameters."""

    def attend(self, x: jax.Array, sequence_ids: jax.Array, dropout: LayerDropout) -> jax.Array:
        """Returns the weighted values of all heads, joined, `[B, L, H]`."""
        return attention(
            self.query(x),
            self.key(x),
            self.value(x),
            sequence_ids,
            num_heads=self.config.num_heads,
            causal=self.config.causal,
            dropout=dropout.attention,
        )


def why_unsupported(device: jax.Device, head_dim: int) -> str:
    """Returns why the kernels cannot compute this attention on `device`; "" if they can.

    Devices other than GPUs interpret the kernels, for tests.
    """
    if triton is None:
        return "Pallas has no Triton backend in this JAX; versions 0.10 to 0.12 have it"
    if head_dim not in HEAD_DIMS:
        expected = ", ".join(map(str, HEAD_DIMS))
        return f"the head size is {head_dim}: expected one of {expected}"
    capabilities = [
        each.compute_capability
        for each in jax.devices()
        if each.platform == "gpu" and each.device_kind == device.device_kind
    ]  # Empty if the program is compiled for a GPU that is not here.
    if capabilities and not re.fullmatch(r"([89]|\d\d)\.\d", capabilities[0]):
        found = f"{device.device_kind} has compute capability {capabilities[0]}"
        return f"{found}: expected an NVIDIA GPU with 8.0 or higher"
    return ""


class _Options(NamedTuple):
    num_heads: int  # On this device, if they are sharded.
    causal: bool
    interpret: bool


class _Inputs(NamedTuple):
    """What both kernels read. A program sees one row of a batch, and of `hidden` one head."""

    query: jax.Array  # [batch, length, hidden]
    key: jax.Array  # [batch, length, hidden]
    value: jax.Array  # [batch, length, hidden]
    sequence_ids: jax.Array  # int32 [batch, length]
    query_words: jax.Array | None = None  # int32 [batch, pairs of heads, 2, length]
    key_words: jax.Array | None = None  # int32 [2, length]
    threshold: jax.Array | None = None  # int32 [1]
    scale: jax.Array | None = None  # float32 [1]


class _GradientInputs(NamedTuple):
    """What only the backward kernel reads."""

    dcontext: jax.Array  # [batch, length, hidden]: the gradient of the result
    logsumexp: jax.Array  # float32 [batch, heads, length]: of the scores of a query
    # float32 [batch, heads, length]: the sum of a query's probabilities x their gradients.
    delta: jax.Array


@jax.named_scope("attention")
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sequence_ids: jax.Array,
    *,
    num_heads: int,
    causal: bool = False,
    dropout: AttentionDropout | None = None,
) -> jax.Array:
    """Computes what `bert_jax.model.attention.attention` does, with the same arguments.

    `why_unsupported` says which heads and devices the kernels are for.
    """
    mesh, device = mesh_and_device()
    num_heads //= mesh.shape.get("tensor", 1)
    options = _Options(num_heads, causal, interpret=device.platform != "gpu")
    rows, heads = P("fsdp", None, "tensor"), P("fsdp", "tensor")
    inputs = _Inputs(query, key, value, sequence_ids)
    specs = _Inputs(query=rows, key=rows, value=rows, sequence_ids=P("fsdp"))
    if dropout is not None:
        inputs = inputs._replace(
            query_words=dropout.words,
            key_words=dropout.key_words,
            threshold=dropout.threshold.reshape(1),
            scale=dropout.scale.reshape(1),
        )
        specs = specs._replace(query_words=heads, key_words=P(), threshold=P(), scale=P())
    kernel = functools.partial(_pad_and_attend, options)
    if axes := set(mesh.auto_axes):  # The compiler does not partition kernels.
        kernel = jax.shard_map(
            kernel, in_specs=(specs,), out_specs=rows, axis_names=axes, check_vma=False
        )
    return kernel(inputs)


def _pad_and_attend(options: _Options, inputs: _Inputs) -> jax.Array:
    """Pads rows to whole blocks, with positions that attend only to each other."""
    length = inputs.query.shape[1]
    head_dim = inputs.query.shape[2] // options.num_heads
    size = -length % _block_size(length, head_dim, inputs.query.dtype)
    if size == 0:
        return _attention(options, inputs)

    def pad(x, axis, value=0):
        widths = [(0, size if each == axis else 0) for each in range(x.ndim)]
        return jnp.pad(x, widths, constant_values=value)

    inputs = inputs._replace(
        query=pad(inputs.query, axis=1),
        key=pad(inputs.key, axis=1),
        value=pad(inputs.value, axis=1),
        sequence_ids=pad(inputs.sequence_ids, axis=1, value=-1),
    )
    if inputs.key_words is not None:
        inputs = inputs._replace(
            query_words=pad(inputs.query_words, axis=3), key_words=pad(inputs.key_words, axis=1)
        )
    return _attention(options, inputs)[:, :length]


def _block_size(length: int, head_dim: int, dtype) -> int:
    """Returns the number of positions of a block: a power of two."""
    max_size = min(MAX_BLOCK, MAX_BLOCK_BYTES // (head_dim * jnp.dtype(dtype).itemsize))
    return max(MIN_BLOCK, min(max_size, pl.next_power_of_2(length)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: _Options, inputs: _Inputs) -> jax.Array:
    context, _ = _call_forward_kernel(options, inputs)
    return context


def _call_forward_kernel(options: _Options, inputs: _Inputs) -> tuple[jax.Array, jax.Array]:
    """Returns the result of attention, and what the gradient needs, `_GradientInputs.logsumexp`."""
    batch, length, hidden = inputs.query.shape
    head_dim = hidden // options.num_heads
    block = _block_size(length, head_dim, inputs.query.dtype)
    return pl.pallas_call(
        functools.partial(_forward_kernel, options, block),
        grid=(length // block, options.num_heads, batch),
        in_specs=[_input_specs(inputs, head_dim)],
        out_specs=[
            pl.BlockSpec((None, block, head_dim), lambda part, head, row: (row, part, head)),
            pl.BlockSpec((None, None, block), lambda part, head, row: (row, head, part)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct(inputs.query.shape, inputs.value.dtype),
            jax.ShapeDtypeStruct((batch, options.num_heads, length), jnp.float32),
        ],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=options.interpret,
        name="attention_forward",
    )(inputs)


def _attention_forward(options, inputs):
    context, logsumexp = _call_forward_kernel(options, inputs)
    return context, (inputs, context, logsumexp)


def _attention_backward(options, residuals, dcontext):
    inputs, context, logsumexp = residuals
    batch, length, hidden = inputs.query.shape
    head_dim = hidden // options.num_heads
    block = _block_size(length, head_dim, inputs.query.dtype)
    # A query's probabilities x their gradients sum to its result x the result's gradient, with
    # dropout, too.
    products = context.astype(jnp.float32) * dcontext.astype(jnp.float32)
    delta = jnp.sum(products.reshape(batch, length, options.num_heads, head_dim), axis=-1)
    gradient_inputs = _GradientInputs(dcontext, logsumexp, jnp.swapaxes(delta, 1, 2))
    row_spec = _row_spec(length, head_dim)
    sum_spec = pl.BlockSpec((None, None, length), lambda part, head, row: (row, head, 0))
    block_spec = pl.BlockSpec((None, block, head_dim), lambda part, head, row: (row, part, head))
    dquery, dkey, dvalue = pl.pallas_call(
        functools.partial(_backward_kernel, options, block),
        grid=(length // block, options.num_heads, batch),
        in_specs=[
            _input_specs(inputs, head_dim),
            _GradientInputs(dcontext=row_spec, logsumexp=sum_spec, delta=sum_spec),
        ],
        out_specs=[block_spec, block_spec, block_spec],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (inputs.query, inputs.key, inputs.value)
        ],
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=2),
        interpret=options.interpret,
        name="attention_backward",
    )(inputs, gradient_inputs)
    no_gradients = jax.tree.map(lambda _: None, inputs)
    return (no_gradients._replace(query=dquery, key=dkey, value=dvalue),)


_attention.defvjp(_attention_forward, _attention_backward)


def _row_spec(length: int, head_dim: int) -> pl.BlockSpec:
    """Returns the BlockSpec of all positions of a row and head in `[batch, length, hidden]`."""
    return pl.BlockSpec((None, length, head_dim), lambda part, head, row: (row, 0, head))


def _input_specs(inputs: _Inputs, head_dim: int) -> _Inputs:
    """Returns what a program sees of each input: whole rows, from which it loads blocks."""
    length = inputs.query.shape[1]
    row_spec = _row_spec(length, head_dim)
    specs = _Inputs(
        query=row_spec,
        key=row_spec,
        value=row_spec,
        sequence_ids=pl.BlockSpec((None, length), lambda part, head, row: (row, 0)),
    )
    if inputs.query_words is None:
        return specs
    scalar = pl.BlockSpec((1,), lambda part, head, row: (0,))
    return specs._replace(
        query_words=pl.BlockSpec(
            (None, None, 2, length), lambda part, head, row: (row, head // 2, 0, 0)
        ),
        key_words=pl.BlockSpec((2, length), lambda part, head, row: (0, 0)),
        threshold=scalar,
        scale=scalar,
    )


def _forward_kernel(options: _Options, block: int, inputs: _Inputs, context_ref, logsumexp_ref):
    """Computes the result for one block of queries."""
    head = pl.program_id(1)
    queries = pl.ds(pl.program_id(0) * block, block)
    query = inputs.query[queries, :]

    def add_keys(index, state):
        total, maximum, context = state  # Of the exponentials, so far, relative to the maximum.
        keys = pl.ds(index * block, block)
        scores = _scores(options, inputs, query, queries, inputs.key[keys, :], keys)
        next_maximum = jnp.maximum(maximum, jnp.max(scores, axis=1))
        shrink = jnp.exp(maximum - next_maximum)
        weights = jnp.exp(scores - next_maximum[:, None])
        total = total * shrink + jnp.sum(weights, axis=1)
        if inputs.key_words is not None:
            weights *= _dropout_factors(inputs, head, queries, keys)
        value = inputs.value[keys, :]
        context = context * shrink[:, None] + triton.dot(weights.astype(value.dtype), value)
        return total, next_maximum, context

    start = (
        jnp.zeros((block,), jnp.float32),
        jnp.full((block,), jnp.finfo(jnp.float32).min),
        jnp.zeros(query.shape, jnp.float32),
    )
    num_blocks = inputs.key.shape[0] // block
    total, maximum, context = lax.fori_loop(0, num_blocks, add_keys, start)
    context_ref[...] = (context / total[:, None]).astype(context_ref.dtype)
    logsumexp_ref[...] = maximum + jnp.log(total)


def _backward_kernel(
    options: _Options,
    block: int,
    inputs: _Inputs,
    gradient_inputs: _GradientInputs,
    dquery_ref,
    dkey_ref,
    dvalue_ref,
):
    """Computes the gradients of one block of queries, then those of the keys and values there."""
    here = pl.ds(pl.program_id(0) * block, block)
    num_blocks = inputs.key.shape[0] // block
    zeros = jnp.zeros(dquery_ref.shape, jnp.float32)
    scale = 1 / math.sqrt(dquery_ref.shape[-1])
    head = pl.program_id(1)
    gradients = functools.partial(_score_gradients, options, inputs, gradient_inputs, head)

    def add_keys(index, dquery):
        keys = pl.ds(index * block, block)
        dscores, _ = gradients(here, keys)
        key = inputs.key[keys, :]
        return dquery + triton.dot(dscores.astype(key.dtype), key)

    def add_queries(index, state):
        dkey, dvalue = state
        queries = pl.ds(index * block, block)
        dscores, weights = gradients(queries, here)
        query, dcontext = inputs.query[queries, :], gradient_inputs.dcontext[queries, :]
        dkey += triton.dot(dscores.astype(query.dtype), query, trans_a=True)
        dvalue += triton.dot(weights.astype(dcontext.dtype), dcontext, trans_a=True)
        return dkey, dvalue

    dquery = lax.fori_loop(0, num_blocks, add_keys, zeros)
    dquery_ref[...] = (dquery * scale).astype(dquery_ref.dtype)
    dkey, dvalue = lax.fori_loop(0, num_blocks, add_queries, (zeros, zeros))
    dkey_ref[...] = (dkey * scale).astype(dkey_ref.dtype)
    dvalue_ref[...] = dvalue.astype(dvalue_ref.dtype)


def _score_gradients(
    options: _Options,
    inputs: _Inputs,
    gradient_inputs: _GradientInputs,
    head: jax.Array,
    queries: pl.Slice,
    keys: pl.Slice,
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of scores, and the probabilities after dropout, `[queries, keys]`."""
    query, key, value = inputs.query[queries, :], inputs.key[keys, :], inputs.value[keys, :]
    scores = _scores(options, inputs, query, queries, key, keys)
    probabilities = jnp.exp(scores - gradient_inputs.logsumexp[queries][:, None])
    dprobabilities = triton.dot(gradient_inputs.dcontext[queries, :], value, trans_b=True)
    weights = probabilities
    if inputs.key_words is not None:
        factors = _dropout_factors(inputs, head, queries, keys)
        weights, dprobabilities = weights * factors, dprobabilities * factors
    return probabilities * (dprobabilities - gradient_inputs.delta[queries][:, None]), weights


def _scores(
    options: _Options,
    inputs: _Inputs,
    query: jax.Array,
    queries: pl.Slice,
    key: jax.Array,
    keys: pl.Slice,
) -> jax.Array:
    """Returns the scores of a block, float32 `[queries, keys]`; the lowest float32 where masked."""
    scores = triton.dot(query, key, trans_b=True) * (1 / math.sqrt(query.shape[-1]))
    ids = inputs.sequence_ids
    is_visible = ids[queries][:, None] == ids[keys][None, :]
    if options.causal:
        query_positions = queries.start + jnp.arange(query.shape[0])
        key_positions = keys.start + jnp.arange(key.shape[0])
        is_visible &= query_positions[:, None] >= key_positions[None, :]
    return jnp.where(is_visible, scores, jnp.finfo(jnp.float32).min)


def _dropout_factors(
    inputs: _Inputs, head: jax.Array, queries: pl.Slice, keys: pl.Slice
) -> jax.Array:
    """Returns 0 or 1 / (1 - rate) for each probability, as `AttentionDropout.apply` multiplies."""
    words = [inputs.query_words[index, queries][:, None] for index in (0, 1)]
    key_words = [inputs.key_words[index, keys][None, :] for index in (0, 1)]
    even, odd = random_bits(words, key_words)
    bits = jnp.where(head % 2 == 0, even, odd)
    return jnp.where(bits < inputs.threshold[0], 0.0, inputs.scale[0])
