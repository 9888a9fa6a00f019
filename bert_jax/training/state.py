"""The state that a training step updates and a checkpoint stores, and the update itself."""

import hashlib
from collections.abc import Callable, Mapping

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax


@flax.struct.dataclass
class TrainState:
    """Number of updates done, parameters, and optimizer state."""

    step: jax.Array
    params: dict
    opt_state: optax.OptState

    def map_trials(self, function: Callable) -> "TrainState":
        """Returns the state with `function` applied to parameters and optimizer state."""
        return TrainState(self.step, function(self.params), function(self.opt_state))


TRIAL_AXES = TrainState(step=None, params=0, opt_state=0)
"""The axes of a stack of trials, for `jax.vmap`. All trials are at the same step."""


def init_state(
    key: jax.Array,
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    batch: dict[str, jax.ShapeDtypeStruct],
    pretrained: Mapping | None = None,
) -> TrainState:
    """Returns a fresh state at step 0, with the `pretrained` parameters if given; to be jitted.

    `batch` has the shapes and dtypes of an example batch.
    """
    params = model.lazy_init(key, batch)["params"]
    if pretrained:
        params |= pretrained | {"encoder": params["encoder"] | pretrained["encoder"]}
    return TrainState(jnp.zeros([], jnp.int32), params, optimizer.init(params))


def apply_gradients(
    state: TrainState, gradients: dict, optimizer: optax.GradientTransformation
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Returns the state after one update, and the norms of gradients and new parameters."""
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    norms = {"gradient_norm": optax.tree.norm(gradients), "parameter_norm": optax.tree.norm(params)}
    return TrainState(state.step + 1, params, opt_state), norms


def parameters_hash(params: dict) -> str:
    """Returns a hash of the names and values of `params`, wherever they were read from."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(params):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.ascontiguousarray(leaf))
    return digest.hexdigest()[:16]
