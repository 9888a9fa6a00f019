"""The loss that all tasks share: cross-entropy over the last axis."""

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes -log softmax(logits)[target] in nats, and whether the target has the maximum logit.

    The target's logit is a masked sum, not a gather: its gradient then fuses with the softmax's
    instead of scattering into an array as large as the logits. Comparing it with the maximum, which
    the softmax needs anyway, saves the pass over the logits that an argmax takes. For float32
    `[..., classes]` and int32 `[...]` returns float32 and bool `[...]`.
    """
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    target_logit = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    maximum = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    log_sum = maximum + jnp.log(jnp.sum(jnp.exp(logits - maximum[..., None]), axis=-1))
    return log_sum - target_logit, target_logit >= maximum
