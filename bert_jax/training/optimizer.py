"""The optimizers of BERT as optax transformations.

- `bert_adam`: the released optimizer, Adam without bias correction and with decoupled decay.
- `adamw`: the same with bias correction (Loshchilov & Hutter, 2019).
- `lamb`: You et al. (2020), with one trust ratio per layer of a stacked parameter.

All first clip gradients by their global norm; LayerNorm parameters and biases are not decayed.
"""

import math

import jax
import jax.numpy as jnp
import optax

OPTIMIZERS = ("bert_adam", "adamw", "lamb")


def linear_schedule(peak: float, num_steps: int, warmup_steps: int) -> optax.Schedule:
    """Returns the released schedule: step, counted from 0 -> learning rate, a float32 scalar.

    The linear decay is counted from step 0; its first `warmup_steps` are replaced by a ramp from 0.
    """

    def learning_rate(step):
        step = jnp.asarray(step, jnp.float32)
        # 1 - step / num_steps would lose precision at the end of a long run.
        decayed = peak * jnp.maximum(0.0, num_steps - step) / num_steps
        ramp = peak * step / max(warmup_steps, 1)
        return jnp.where(step < warmup_steps, ramp, decayed)

    return learning_rate


def make_optimizer(
    name: str,
    learning_rate: optax.Schedule,
    *,
    weight_decay: float = 0.01,
    clip_norm: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-6,
) -> optax.GradientTransformation:
    """Builds the optimizer `name`, one of `OPTIMIZERS`; raises ValueError for another name."""
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


def freeze(
    optimizer: optax.GradientTransformation, modules: tuple[str, ...]
) -> optax.GradientTransformation:
    """Freezes the top-level `modules`; `optimizer` updates the other parameters."""
    return optax.partition(
        {"trained": optimizer, "frozen": optax.set_to_zero()},
        lambda params: {name: "frozen" if name in modules else "trained" for name in params},
    )


def is_decayed(params: optax.Params) -> optax.Params:
    """Returns a tree of bool: False for biases and LayerNorm, as released."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key not in ("bias", "scale"), params
    )


def _scale_by_adam(beta1, beta2, epsilon, bias_correction):
    """Scales by m / (sqrt(v) + epsilon), with m / (1 - b1^t), v / (1 - b2^t) if bias-corrected."""

    def update(gradients, state, params=None):
        count = state.count + 1
        mu = jax.tree.map(lambda g, m: beta1 * m + (1 - beta1) * g, gradients, state.mu)
        nu = jax.tree.map(lambda g, v: beta2 * v + (1 - beta2) * g * g, gradients, state.nu)
        # expm1: 1 - 0.999^t loses five of float32's seven digits in the first steps.
        correction1, correction2 = (
            -jnp.expm1(count * math.log(beta)) if bias_correction else 1.0
            for beta in (beta1, beta2)
        )
        updates = jax.tree.map(
            lambda m, v: (m / correction1) / (jnp.sqrt(v / correction2) + epsilon), mu, nu
        )
        return updates, optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

    return optax.GradientTransformation(optax.scale_by_adam().init, update)


def _scale_by_layer_trust_ratio():
    """Scales by LAMB's ratio |param| / |update| (phi is the identity), 1 if either norm is 0.

    Each layer of the parameters under `layers`, stacked on axis 0, has its own ratio. Biases and
    LayerNorm are not scaled, as in the authors' code.
    """

    def scale(path, update, param):
        if path[-1].key in ("bias", "scale"):
            return update
        stacked = any(entry.key == "layers" for entry in path)
        axes = tuple(range(1 if stacked else 0, param.ndim))
        squares = [jnp.sum(jnp.square(x), axes, keepdims=True) for x in (param, update)]
        param_norm, update_norm = map(jnp.sqrt, squares)
        defined = (param_norm > 0) & (update_norm > 0)
        return update * jnp.where(defined, param_norm / jnp.where(defined, update_norm, 1.0), 1.0)

    def update(updates, state, params):
        return jax.tree_util.tree_map_with_path(scale, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
