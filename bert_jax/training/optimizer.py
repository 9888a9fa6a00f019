"""The optimizers of BERT pre-training as optax transformations.

- `bert_adam`: the released one: Adam without bias correction, decoupled weight decay.
- `adamw`: the same with bias correction (Loshchilov & Hutter, 2019).
- `lamb`: You et al. (2020), with one trust ratio for each layer of a stacked parameter.

All clip by global norm first, leave LayerNorm and biases undecayed, and follow the released
schedule: linear decay counted from step 0, its first `warmup_steps` replaced by a linear ramp.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

OPTIMIZERS = ("bert_adam", "adamw", "lamb")


def linear_schedule(
    peak: float, num_steps: int, warmup_steps: int
) -> Callable[[jax.Array], jax.Array]:
    """Learning rate of a step (0-based): float32 scalar.

    As released (`optimization.py`), the ramp starts at 0 and the decay counts from step 0, not
    from the end of the warm-up: the rate steps down to `peak * (1 - warmup_steps / num_steps)`.
    """

    def learning_rate(step):
        step = jnp.asarray(step, jnp.float32)
        # Not 1 - step / num_steps, which has few digits left at the end of a long run.
        decayed = peak * jnp.maximum(0.0, num_steps - step) / num_steps
        ramp = peak * step / max(warmup_steps, 1)
        return jnp.where(step < warmup_steps, ramp, decayed)

    return learning_rate


def make_optimizer(
    name: str,
    learning_rate: Callable[[jax.Array], jax.Array],
    *,
    weight_decay: float = 0.01,
    clip_norm: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-6,
) -> optax.GradientTransformation:
    """The optimizer called `name`; raises ValueError for any other than `OPTIMIZERS`."""
    if name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {name!r}: expected one of {', '.join(OPTIMIZERS)}")
    steps = [
        optax.clip_by_global_norm(clip_norm),
        _scale_by_adam(beta1, beta2, epsilon, bias_correction=name != "bert_adam"),
        optax.add_decayed_weights(weight_decay, mask=is_decayed),
    ]
    if name == "lamb":
        steps.append(_scale_by_layer_trust_ratio())
    steps.append(optax.scale_by_learning_rate(learning_rate))
    return optax.chain(*steps)


def frozen(
    optimizer: optax.GradientTransformation, parts: tuple[str, ...]
) -> optax.GradientTransformation:
    """`optimizer` for all parameters but those in the `parts` of the tree's top, which stay."""
    return optax.partition(
        {"trained": optimizer, "frozen": optax.set_to_zero()},
        lambda params: {part: "frozen" if part in parts else "trained" for part in params},
    )


def is_decayed(params: optax.Params) -> optax.Params:
    """True for each parameter but biases and LayerNorm, as released."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key not in ("bias", "scale"), params
    )


def _scale_by_adam(beta1, beta2, epsilon, bias_correction):
    """m / (sqrt(v) + epsilon); with `bias_correction`, of m / (1 - b1^t) and v / (1 - b2^t)."""

    def init(params):
        # Two trees: one buffer under both names could not be donated.
        mu, nu = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return optax.ScaleByAdamState(count=jnp.zeros([], jnp.int32), mu=mu, nu=nu)

    def update(gradients, state, params=None):
        del params
        count = state.count + 1
        mu = jax.tree.map(lambda g, m: beta1 * m + (1 - beta1) * g, gradients, state.mu)
        nu = jax.tree.map(lambda g, v: beta2 * v + (1 - beta2) * g * g, gradients, state.nu)
        # expm1, because 1 - 0.999^t loses five of float32's seven digits in the first steps.
        correct1, correct2 = (
            -jnp.expm1(count * math.log(beta)) if bias_correction else 1.0
            for beta in (beta1, beta2)
        )
        updates = jax.tree.map(
            lambda m, v: (m / correct1) / (jnp.sqrt(v / correct2) + epsilon), mu, nu
        )
        return updates, optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

    return optax.GradientTransformation(init, update)


def _scale_by_layer_trust_ratio():
    """LAMB's phi(|x|) / |update| with phi the identity, 1 where either norm is 0.

    Parameters under `layers` are stacked on axis 0: each layer keeps its own ratio, as if they
    were separate parameters. Biases and LayerNorm are not adapted, as in the authors' code.
    """

    def scale(path, update, param):
        if path[-1].key in ("bias", "scale"):
            return update
        stacked = any(getattr(entry, "key", None) == "layers" for entry in path)
        axes = tuple(range(1 if stacked else 0, param.ndim))
        param_norm = jnp.sqrt(jnp.sum(jnp.square(param), axes, keepdims=True))
        update_norm = jnp.sqrt(jnp.sum(jnp.square(update), axes, keepdims=True))
        defined = (param_norm > 0) & (update_norm > 0)
        return update * jnp.where(defined, param_norm / jnp.where(defined, update_norm, 1.0), 1.0)

    def update(updates, state, params):
        return jax.tree_util.tree_map_with_path(scale, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
