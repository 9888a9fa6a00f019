"""The layers of every model: embeddings, dense layers, GELU, LayerNorm, and losses of logits.

Parameters are float32; dense layers compute in the dtype of their input. Where a parameter is
sharded over `fsdp`, the layer gathers it. GELU, LayerNorm and cross-entropy have hand-written
gradients (benchmarks/gradients.py compares the first two with JAX's).
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from bert_jax.model.config import pad_to_tiles
from bert_jax.model.cpu import product_with_flat_gradient, sum_over_positions, values_at
from bert_jax.sharding.collectives import gather_fsdp, map_fsdp_shards
from bert_jax.sharding.mesh import FSDP_BATCH_SPEC
from bert_jax.sharding.rules import EMBEDDING_SPEC

TANH_SCALE = math.sqrt(2 / math.pi)  # In the tanh approximation of GELU.


def activate(name: str, x: jax.Array) -> jax.Array:
    """Applies the activation `name`, one of `config.ACTIVATIONS`, to `x`."""
    if name in ("gelu", "gelu_tanh"):
        return gelu(name, x)
    return {"relu": nn.relu, "silu": nn.silu, "tanh": jnp.tanh}[name](x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gelu(name: str, x: jax.Array) -> jax.Array:
    """Applies GELU, computed in float32; saves only `x` for the gradient.

    "gelu" is x * Phi(x), as in the first released code (`gelu_and_slope` says how in bfloat16);
    "gelu_tanh" is its approximation by a tanh, as in later versions.
    """
    return gelu_and_slope(name, x.astype(jnp.float32), x.dtype)[0].astype(x.dtype)


def _gelu_backward(name, x, dy):
    _, slope = gelu_and_slope(name, x.astype(jnp.float32), x.dtype)
    return ((dy.astype(jnp.float32) * slope).astype(x.dtype),)


gelu.defvjp(lambda name, x: (gelu(name, x), x), _gelu_backward)


def gelu_and_slope(name: str, x: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """Returns the activation `name` and its derivative at float32 `x`, for results in `dtype`.

    For bfloat16, the Phi(x) of "gelu" is (1 + tanh(p(x))) / 2, with an absolute error up to 5.1e-5
    (GELU: 2.6e-5), which exceeds the rounding below x = -2.7.
    """
    if name == "gelu_tanh":
        square = x * x
        cdf = 0.5 + 0.5 * jnp.tanh(x * (TANH_SCALE + TANH_SCALE * 0.044715 * square))
        slope_of_exponent = TANH_SCALE + 3 * TANH_SCALE * 0.044715 * square
        return x * cdf, cdf + 2 * x * cdf * (1 - cdf) * slope_of_exponent
    cdf = _normal_cdf(x) if dtype == jnp.bfloat16 else 0.5 + 0.5 * lax.erf(x * 2**-0.5)
    # In bfloat16, the exact density takes fewer operations than the derivative of the polynomial.
    density = (2 * math.pi) ** -0.5 * jnp.exp(-0.5 * (x * x))
    return x * cdf, cdf + x * density


def _normal_cdf(x):
    square = jnp.minimum(x * x, 36.0)  # Beyond, the polynomial would change its sign.
    exponent = x * (0.7975065864 + square * (0.0370068271 + square * -0.0003517086))
    return 0.5 + 0.5 * jnp.tanh(exponent)


@jax.custom_vjp
def cross_entropy(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes -log softmax(logits)[target] in nats, and whether the target has the maximum logit.

    For float32 `[..., classes]` and int32 `[...]` returns float32 and bool `[...]`. A target that
    is no class, such as NO_LABEL, has a finite loss without a meaning, and needs a weight of 0. The
    gradient saves the logits, and no second array of their size.
    """
    return _cross_entropy_forward(logits, targets)[0]


def _cross_entropy_forward(logits, targets):
    maximum = jnp.max(logits, axis=-1)
    total = jnp.sum(jnp.exp(logits - maximum[..., None]), axis=-1)
    target_logit = values_at(logits, targets)
    loss = maximum + jnp.log(total) - target_logit
    return (loss, target_logit >= maximum), (logits, targets, maximum, total)


def _cross_entropy_backward(residuals, cotangents):
    logits, targets, maximum, total = residuals
    dloss, _ = cotangents
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    dlogits = jnp.exp(logits - maximum[..., None]) * (dloss / total)[..., None]
    return dlogits - jnp.where(is_target, dloss[..., None], 0.0), None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def kl_divergence(logits: jax.Array, teacher_logits: jax.Array, temperature: float) -> jax.Array:
    """Computes temperature^2 * KL(teacher || student), in nats, of the softmax at `temperature`.

    The soft targets of Hinton et al. (2015, section 2): with the square, the size of the gradients
    hardly depends on the temperature. For float32 `[..., classes]` returns float32 `[...]`.
    """
    log_student = jax.nn.log_softmax(logits / temperature)
    log_teacher = jax.nn.log_softmax(teacher_logits / temperature)
    divergence = jnp.sum(jnp.exp(log_teacher) * (log_teacher - log_student), axis=-1)
    return temperature**2 * divergence


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def layer_norm(x, scale, bias, epsilon: float, dtype) -> jax.Array:
    """Normalizes the last axis in float32; saves `x`, mean and 1 / std for the gradient."""
    return layer_norm_forward(x, scale, bias, epsilon, dtype)[0]


def layer_norm_forward(x, scale, bias, epsilon, dtype):
    """Returns the result of `layer_norm`, and what `layer_norm_backward` reads."""
    y = x.astype(jnp.float32)
    mean = jnp.mean(y, axis=-1, keepdims=True)
    centered = y - mean
    # E[x^2] - E[x]^2 loses precision where the mean is large: less than rounding to bfloat16 does.
    squared = y if x.dtype == jnp.bfloat16 else centered
    variance = jnp.mean(jnp.square(squared), axis=-1, keepdims=True)
    variance -= jnp.square(mean) if x.dtype == jnp.bfloat16 else 0
    inverse_std = lax.rsqrt(jnp.maximum(variance, 0) + epsilon)
    return (centered * (inverse_std * scale) + bias).astype(dtype), (x, scale, mean, inverse_std)


def layer_norm_backward(epsilon, dtype, residuals, dy):
    """Returns the gradients of `x`, scale and bias."""
    x, scale, mean, inverse_std = residuals
    normalized = (x.astype(jnp.float32) - mean) * inverse_std
    dy = dy.astype(jnp.float32)
    dnormalized = dy * scale
    dx = dnormalized - jnp.mean(dnormalized, axis=-1, keepdims=True)
    dx -= normalized * jnp.mean(dnormalized * normalized, axis=-1, keepdims=True)
    batch_axes = tuple(range(x.ndim - 1))
    dscale, dbias = jnp.sum(dy * normalized, batch_axes), jnp.sum(dy, batch_axes)
    return (dx * inverse_std).astype(x.dtype), dscale, dbias


layer_norm.defvjp(layer_norm_forward, layer_norm_backward)


def dense_product(x: jax.Array, matrix: jax.Array, fsdp_axis: int) -> jax.Array:
    """Returns `x @ matrix` in the dtype of `x`; gathers the shards of `matrix` over `fsdp`."""

    def product(x, matrix):
        whole = gather_fsdp(matrix, x.dtype, fsdp_axis).astype(x.dtype)
        return product_with_flat_gradient(jnp.matmul, x, whole)

    matrix_spec = P("fsdp") if fsdp_axis == 0 else P(None, "fsdp")
    return map_fsdp_shards(product, (FSDP_BATCH_SPEC, matrix_spec), x, matrix)


class Dense(nn.Module):
    """A dense layer, in the dtype of its input.

    Its matrix is sharded over `fsdp` along the inputs, which it gathers here; over `tensor`, as the
    architecture's `RULES` say, along the outputs.
    """

    num_outputs: int
    initializer_range: float  # The standard deviation of the matrix at initialization.
    adds_bias: bool = True  # False: the bias is a parameter all the same, but has no effect.
    has_bias: bool = True  # False: there is no such parameter.

    fsdp_axis = 0  # The axis of the matrix that `fsdp` shards.

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        initializer = nn.initializers.truncated_normal(self.initializer_range)
        kernel = self.param("kernel", initializer, (x.shape[-1], self.num_outputs), jnp.float32)
        y = dense_product(x, kernel, self.fsdp_axis)
        if not self.has_bias:
            return y
        bias = self.param("bias", nn.initializers.zeros, (self.num_outputs,), jnp.float32)
        return y + bias.astype(x.dtype) if self.adds_bias else y


class RowParallelDense(Dense):
    """A dense layer that is sharded over `tensor` along the inputs, over `fsdp` along the outputs.

    For the last dense layer of a sublayer, as in Megatron (Shoeybi et al., 2019).
    """

    fsdp_axis = 1


class LayerNorm(nn.Module):
    """LayerNorm over the last axis, in float32; returns `dtype` (None: as its input)."""

    epsilon: float
    dtype: str | None = None
    has_bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = x.shape[-1:]
        scale = self.param("scale", nn.initializers.ones, shape, jnp.float32)
        bias = jnp.zeros(shape)
        if self.has_bias:
            bias = self.param("bias", nn.initializers.zeros, shape, jnp.float32)
        return layer_norm(x, scale, bias, self.epsilon, jnp.dtype(self.dtype or x.dtype))


class Identity(nn.Module):
    """Returns its input; takes the configuration of the place where it stands."""

    config: object

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


class Embedding(nn.Module):
    """A table of float32 vectors, `[rows, features]`."""

    num_rows: int
    num_features: int
    initializer_range: float

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        """Looks up int32 `[batch, length]`: returns float32 `[batch, length, features]`."""
        initializer = nn.initializers.truncated_normal(self.initializer_range)
        shape = self.num_rows, self.num_features
        table = self.param("embedding", initializer, shape, jnp.float32)
        if self.num_rows <= 16:  # A product with one-hot rows has a far cheaper gradient.
            return jax.nn.one_hot(ids, self.num_rows, dtype=jnp.float32) @ table
        return map_fsdp_shards(_lookup, (P(), FSDP_BATCH_SPEC), table, ids)


def _lookup(table, ids):
    return jnp.take(table, ids, axis=0)


class TokenEmbedding(nn.Module):
    """The table of token embeddings, which also computes logits over the vocabulary.

    It has a vector for each id, padded to whole tiles of 128, and is sharded over them. With `fsdp`
    it is gathered in `dtype` (the values stay float32), once for lookup and logits, whose gradients
    are added first and then summed over `fsdp` once.
    """

    vocab_size: int
    num_features: int
    initializer_range: float
    dtype: str

    @property
    def padded_vocab_size(self) -> int:
        """The number of vectors: the vocabulary, and its padding."""
        return pad_to_tiles(self.vocab_size)

    def setup(self):
        initializer = nn.initializers.truncated_normal(self.initializer_range)
        shape = self.padded_vocab_size, self.num_features
        table = self.param("embedding", initializer, shape, jnp.float32)
        # One whole table for each `fsdp` shard of the batch, `[fsdp, vocab, features]`.
        self.copies = map_fsdp_shards(
            lambda shard: gather_fsdp(shard, self.dtype, 0)[None],
            (EMBEDDING_SPEC,),
            table,
            out_specs=P("fsdp", "tensor"),
            axes=("fsdp", "tensor"),
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Looks up int32 `[batch, length]`: returns float32 `[batch, length, features]`."""
        return map_fsdp_shards(
            lambda copies, ids: _lookup(copies[0], ids),
            (FSDP_BATCH_SPEC, FSDP_BATCH_SPEC),
            self.copies,
            tokens,
        )

    def logits(self, x: jax.Array, bias: jax.Array) -> jax.Array:
        """Returns float32 `[batch, K, padded_vocab]`: `x`, `[batch, K, features]`, times the table.

        Ids beyond the vocabulary, which only pad it, get the minimum float32: they have zero
        probability and are never predicted.
        """

        def product(copies, x):
            return product_with_flat_gradient(_product_with_table, x, copies[0].astype(x.dtype))

        logits = map_fsdp_shards(product, (FSDP_BATCH_SPEC, FSDP_BATCH_SPEC), self.copies, x)
        is_token = jnp.arange(bias.shape[0]) < self.vocab_size
        # Adding a logit to the minimum float32 rounds back to the minimum.
        bias = jnp.where(is_token, bias, jnp.finfo(jnp.float32).min)
        return _add_bias(x.dtype, logits, bias)


def _product_with_table(x, table):
    axes = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, table, axes, preferred_element_type=jnp.float32)


def gather_positions(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns `[B, L, H]` at int32 `[B, K]` positions: `[B, K, H]`."""
    return jnp.take_along_axis(x, positions[:, :, None], axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _add_bias(dtype, logits, bias):
    """Adds a bias; the gradient computes dlogits in `dtype` once, for both of its products."""
    return logits + bias


def _add_bias_backward(dtype, _, dlogits):
    # Without the barrier, each product would compute the softmax again.
    dbias = sum_over_positions(dlogits)
    dlogits, dbias = lax.optimization_barrier((dlogits.astype(dtype), dbias))
    return dlogits.astype(jnp.float32), dbias


_add_bias.defvjp(lambda *args: (_add_bias(*args), None), _add_bias_backward)
