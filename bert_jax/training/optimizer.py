"""The optimizers of BERT as optax transformations.

- `bert_adam`: the released optimizer, Adam without bias correction and with decoupled decay.
- `adamw`: the same with bias correction (Loshchilov & Hutter, 2019).
- `lamb`: You et al. (2020), with one trust ratio per layer of a stacked parameter.
- `stable_adamw`: AdamW with update clipping (Wortsman et al., 2023, algorithm 2), per layer, too.

All but the last first clip gradients by their global norm; LayerNorm parameters and biases are not
decayed.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bert_jax.model.layer_stack import layers_with

OPTIMIZERS = ("bert_adam", "adamw", "lamb", "stable_adamw")


class Hyperparameters(NamedTuple):
    """Float32 scalars or `[trials]`, passed to a compiled step: new values do not recompile it."""

    learning_rate: float
    weight_decay: float
    warmup_steps: float
    num_steps: float
    dropout_rate: float
    attention_dropout_rate: float | None = None  # None means `dropout_rate`.


def make_schedule(
    peak: float, num_steps: int, warmup_steps: int, decay_from: str = "step_0", power: float = 1.0
) -> optax.Schedule:
    """Returns the schedule: step, counted from 0 -> learning rate, a float32 scalar.

    After a linear ramp from 0 over `warmup_steps`, the rate is `peak` times the fraction of steps
    that remain, to the given `power`: 1 is linear, 0 constant. The fraction is counted from step 0
    ("step_0"), as in the released code, whose rate never quite reaches its peak, or from the end of
    the warm-up ("warmup_end"), as in transformers. Raises ValueError for another `decay_from`.
    """
    if decay_from not in ("step_0", "warmup_end"):
        raise ValueError(f"unknown decay_from {decay_from!r}: expected step_0 or warmup_end")

    def learning_rate(step):  # The numbers may be traced `Hyperparameters`.
        step = jnp.asarray(step, jnp.float32)
        first_step = warmup_steps if decay_from == "warmup_end" else 0
        decay_steps = jnp.maximum(num_steps - first_step, 1.0)
        # 1 - step / num_steps would lose precision at the end of a long run.
        remaining = jnp.maximum(0.0, num_steps - step) ** power
        ramp = peak * step / jnp.maximum(warmup_steps, 1.0)
        return jnp.where(step < warmup_steps, ramp, peak * remaining / decay_steps**power)

    return learning_rate


def make_stable_schedule(
    peak: float, num_steps: int, warmup_steps: int, decay_steps: int, shape: str | None = None
) -> optax.Schedule:
    """Returns a schedule of warm-up, constant rate and decay: step, from 0 -> learning rate.

    After a linear ramp from 0 over `warmup_steps`, the rate is `peak` until the last `decay_steps`
    of `num_steps`. Then it falls to 0: "linear", or "1-sqrt" (None), one minus the square root of
    the fraction of `decay_steps` that is done (Hägele et al., 2024). Raises ValueError for another
    `shape`.
    """
    if shape not in (None, "1-sqrt", "linear"):
        raise ValueError(f"unknown decay_shape {shape!r}: expected 1-sqrt or linear")

    # Whatever decay_steps, this compiles to the same instructions, so that runs with different
    # decays agree bit for bit until then. (With decay_steps=1 the only step has the peak rate.)
    per_step = 1.0 / max(decay_steps, 2)

    def learning_rate(step):
        step = jnp.asarray(step, jnp.float32)
        done = jnp.clip((step - (num_steps - decay_steps)) * per_step, 0.0, 1.0)
        falling = 1.0 - (done if shape == "linear" else jnp.sqrt(done))
        ramp = peak * step / max(warmup_steps, 1)
        return jnp.where(step < warmup_steps, ramp, peak * falling)

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
    """Builds the optimizer `name`, one of `OPTIMIZERS`; raises ValueError for another name.

    `stable_adamw` does not use `clip_norm`: its updates are clipped instead.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {name!r}: expected one of {', '.join(OPTIMIZERS)}")
    decayed_adam = (
        _scale_by_adam(beta1, beta2, epsilon, bias_correction=name != "bert_adam"),
        optax.add_decayed_weights(weight_decay, mask=is_decayed),
    )
    if name == "stable_adamw":
        transforms = [_clip_updates(optax.chain(*decayed_adam), beta2, epsilon)]
    else:
        transforms = [optax.clip_by_global_norm(clip_norm), *decayed_adam]
    if name == "lamb":
        transforms.append(_scale_by_layer_trust_ratio())
    transforms.append(optax.scale_by_learning_rate(learning_rate))
    return optax.chain(*transforms)


def scale_updates_by_layer(
    optimizer: optax.GradientTransformation, model_config, decay: float, num_frozen: int
) -> optax.GradientTransformation:
    """Multiplies the updates of layer i, from 0, by `decay ** (num_layers - i)`.

    Embeddings, and what all layers share, get one more factor of `decay`, head and pooler none
    (Howard & Ruder, 2018). `num_frozen` > 0 freezes the embeddings and the lowest `num_frozen`
    layers (zero gradients).
    """
    if decay == 1 and not num_frozen:
        return optimizer
    num_layers, layer_numbers = model_config.num_layers, layers_with(model_config)

    def scale(path, param):
        names = tuple(entry.key for entry in path)
        module, level = "/".join(names[:2]), np.array(num_layers + 1)  # As pooler and head.
        if module in ("encoder/embeddings", "encoder/layer_inputs"):
            level = np.array(0)
        elif module == "encoder/layers":
            levels = np.array(layer_numbers[names[2:]]) + 1
            level = levels.reshape((-1,) + (1,) * (param.ndim - 1))
        elif module == "encoder/last":
            level = np.array(num_layers)
        is_frozen = (num_frozen > 0) & (level <= num_frozen)
        return np.where(is_frozen, 0, decay ** (num_layers + 1.0 - level)).astype(np.float32)

    def label(params):
        scales = jax.tree_util.tree_map_with_path(scale, params)
        return jax.tree.map(lambda scale: "trained" if scale.any() else "frozen", scales)

    # Keeps no moments for parameters that are entirely frozen.
    optimizer = optax.partition({"trained": optimizer, "frozen": optax.set_to_zero()}, label)

    def update(gradients, state, params):
        scales = jax.tree_util.tree_map_with_path(scale, params)
        gradients = jax.tree.map(lambda g, s: jnp.where(s > 0, g, 0), gradients, scales)
        updates, state = optimizer.update(gradients, state, params)
        return jax.tree.map(jnp.multiply, updates, scales), state

    return optax.GradientTransformation(optimizer.init, update)


def with_moments(opt_state: optax.OptState, moments: optax.ScaleByAdamState) -> optax.OptState:
    """Returns `opt_state` with these moments, and their count for the bias correction."""

    def is_moments(state) -> bool:
        return isinstance(state, optax.ScaleByAdamState)

    return jax.tree.map(
        lambda own: moments if is_moments(own) else own, opt_state, is_leaf=is_moments
    )


def is_decayed(params: optax.Params) -> optax.Params:
    """Returns a tree of bools: False for biases and LayerNorm, as in the released code."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key not in ("bias", "scale"), params
    )


def _scale_by_adam(beta1, beta2, epsilon, bias_correction):
    """Scales by m / (sqrt(v) + epsilon), with m / (1 - b1^t), v / (1 - b2^t) if bias-corrected."""

    def update(gradients, state, params=None):
        count = state.count + 1
        mu = jax.tree.map(lambda g, m: beta1 * m + (1 - beta1) * g, gradients, state.mu)
        nu = jax.tree.map(lambda g, v: beta2 * v + (1 - beta2) * g * g, gradients, state.nu)
        correction1, correction2 = (
            _bias_correction(beta, count) if bias_correction else 1.0 for beta in (beta1, beta2)
        )
        updates = jax.tree.map(
            lambda m, v: (m / correction1) / (jnp.sqrt(v / correction2) + epsilon), mu, nu
        )
        return updates, optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

    return optax.GradientTransformation(optax.scale_by_adam().init, update)


def _bias_correction(beta: float, count: jax.Array) -> jax.Array | float:
    """Returns 1 - beta^count."""
    # expm1: 1 - 0.999^t loses five of float32's seven digits in the first steps.
    return -jnp.expm1(count * math.log(beta)) if beta else 1.0


def _clip_updates(adamw: optax.GradientTransformation, beta2: float, epsilon: float):
    """Divides the updates of `adamw` by max(1, RMS of g / sqrt(v)), of each layer's tensor.

    v is the corrected mean of squares, at least epsilon^2. So an update, weight decay included,
    shrinks where the gradient has outgrown its mean.
    """

    def update(gradients, state, params):
        updates, state = adamw.update(gradients, state, params)
        adam, _ = state
        correction = _bias_correction(beta2, adam.count)

        def clip(path, update, gradient, nu):
            ratios = jnp.square(gradient) / jnp.maximum(nu / correction, epsilon**2)
            rms = jnp.sqrt(jnp.mean(ratios, _axes_of_tensor(path, update), keepdims=True))
            return update / jnp.maximum(rms, 1.0)

        return jax.tree_util.tree_map_with_path(clip, updates, gradients, adam.nu), state

    return optax.GradientTransformation(adamw.init, update)


def _axes_of_tensor(path: tuple, leaf: jax.Array) -> tuple[int, ...]:
    """Returns the axes of a tensor: all, except that layers are stacked on axis 0."""
    is_stacked = any(entry.key == "layers" for entry in path)
    return tuple(range(1 if is_stacked else 0, leaf.ndim))


def _scale_by_layer_trust_ratio():
    """Scales by LAMB's ratio |param| / |update| (phi is the identity), 1 if either norm is 0.

    Each layer of the parameters under `layers`, stacked on axis 0, has its own ratio. Biases and
    LayerNorm are not scaled, as in the authors' code.
    """

    def scale(path, update, param):
        if path[-1].key in ("bias", "scale"):
            return update
        axes = _axes_of_tensor(path, param)
        squares = [jnp.sum(jnp.square(x), axes, keepdims=True) for x in (param, update)]
        param_norm, update_norm = map(jnp.sqrt, squares)
        defined = (param_norm > 0) & (update_norm > 0)
        return update * jnp.where(defined, param_norm / jnp.where(defined, update_norm, 1.0), 1.0)

    return optax.stateless(functools.partial(jax.tree_util.tree_map_with_path, scale))
