"""Dense layers, GELU, LayerNorm, and the cross-entropy that all tasks share.

LayerNorm has a hand-written gradient, which needs less memory; see `benchmarks/gradients.py`.
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from bert_jax.model.config import BertConfig
from bert_jax.sharding.collectives import gather_fsdp, map_fsdp_shards
from bert_jax.sharding.mesh import FSDP_BATCH_SPEC


def gelu(x: jax.Array) -> jax.Array:
    """Computes x * Phi(x) with the exact erf, as in the released code.

    In bfloat16, Phi(x) is (1 + tanh(p(x))) / 2, with an absolute error up to 5.1e-5 (GELU: 2.6e-5):
    far fewer operations than erf on a TPU, but below x = -2.7 the error exceeds the rounding.
    """
    if x.dtype != jnp.bfloat16:
        return x * (0.5 + 0.5 * lax.erf(x * 2**-0.5))
    y = x.astype(jnp.float32)
    return (y * _normal_cdf(y)).astype(x.dtype)


@jax.custom_jvp
def _normal_cdf(x: jax.Array) -> jax.Array:
    square = jnp.minimum(x * x, 36.0)  # Beyond, the polynomial would change its sign.
    exponent = x * (0.7975065864 + square * (0.0370068271 + square * -0.0003517086))
    return 0.5 + 0.5 * jnp.tanh(exponent)


def _normal_density(x):
    return (2 * math.pi) ** -0.5 * jnp.exp(-0.5 * (x * x))


# The exact density takes fewer operations than the gradient of the polynomial.
_normal_cdf.defjvps(lambda dx, _, x: dx * _normal_density(x))


def gelu_and_slope(x: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """Returns GELU and its derivative at float32 `x`, as `gelu` computes them in `dtype`."""
    cdf = _normal_cdf(x) if dtype == jnp.bfloat16 else 0.5 + 0.5 * lax.erf(x * 2**-0.5)
    return x * cdf, cdf + x * _normal_density(x)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes -log softmax(logits)[target] in nats, and whether the target has the maximum logit.

    The target's logit is a masked sum, not a gather: its gradient then fuses with the softmax's
    instead of scattering into an array as large as the logits. Comparing it with the maximum, which
    the softmax needs anyway, saves the pass over the logits that an argmax takes. For float32
    `[..., classes]` and int32 `[...]` returns float32 and bool `[...]`.
    """
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    target_logit = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    maximum = lax.stop_gradient(jnp.max(logits, axis=-1))
    log_sum = maximum + jnp.log(jnp.sum(jnp.exp(logits - maximum[..., None]), axis=-1))
    return log_sum - target_logit, target_logit >= maximum


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def layer_norm(x, scale, bias, epsilon: float, dtype) -> jax.Array:
    """Normalizes the last axis in float32; saves `x`, mean and 1 / std for the gradient."""
    return _layer_norm_forward(x, scale, bias, epsilon, dtype)[0]


def _layer_norm_forward(x, scale, bias, epsilon, dtype):
    y = x.astype(jnp.float32)
    mean = jnp.mean(y, axis=-1, keepdims=True)
    centered = y - mean
    # E[x^2] - E[x]^2 loses precision where the mean is large: less than rounding to bfloat16 does.
    squared = y if x.dtype == jnp.bfloat16 else centered
    variance = jnp.mean(jnp.square(squared), axis=-1, keepdims=True)
    variance -= jnp.square(mean) if x.dtype == jnp.bfloat16 else 0
    inverse_std = lax.rsqrt(jnp.maximum(variance, 0) + epsilon)
    return (centered * (inverse_std * scale) + bias).astype(dtype), (x, scale, mean, inverse_std)


def _layer_norm_backward(epsilon, dtype, residuals, dy):
    x, scale, mean, inverse_std = residuals
    normalized = (x.astype(jnp.float32) - mean) * inverse_std
    dy = dy.astype(jnp.float32)
    dnormalized = dy * scale
    dx = dnormalized - jnp.mean(dnormalized, axis=-1, keepdims=True)
    dx -= normalized * jnp.mean(dnormalized * normalized, axis=-1, keepdims=True)
    batch_axes = tuple(range(x.ndim - 1))
    dscale, dbias = jnp.sum(dy * normalized, batch_axes), jnp.sum(dy, batch_axes)
    return (dx * inverse_std).astype(x.dtype), dscale, dbias


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


class Dense(nn.Module):
    """A dense layer in the model's dtype, whose kernel is sharded over `fsdp` on `fsdp_axis`.

    Without `adds_bias`, returns the product and the bias.
    """

    config: BertConfig
    features: int
    fsdp_axis: int = 0
    adds_bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array):
        initializer = nn.initializers.truncated_normal(self.config.initializer_range)
        kernel = self.param("kernel", initializer, (x.shape[-1], self.features), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)

        def dense(x, kernel, bias):
            kernel = gather_fsdp(kernel, x.dtype, self.fsdp_axis)
            y = x @ kernel.astype(x.dtype)
            return y + bias.astype(x.dtype) if self.adds_bias else y

        specs = FSDP_BATCH_SPEC, P(*[None] * self.fsdp_axis, "fsdp"), P()
        y = map_fsdp_shards(dense, specs, x.astype(self.config.dtype), kernel, bias)
        return y if self.adds_bias else (y, bias)


class LayerNorm(nn.Module):
    """LayerNorm over the last axis in float32; returns the model's dtype."""

    config: BertConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:], jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:], jnp.float32)
        return layer_norm(x, scale, bias, self.config.layer_norm_epsilon, self.config.dtype)
