"""The state that a training step updates and a checkpoint stores, and the update itself."""

import flax
import jax
import optax


@flax.struct.dataclass
class TrainState:
    """Number of updates done, parameters, and optimizer state."""

    step: jax.Array
    params: dict
    opt_state: optax.OptState


def apply_gradients(
    state: TrainState, gradients: dict, optimizer: optax.GradientTransformation
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Returns the state after one update, and the norms of gradients and new parameters."""
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    norms = {
        "gradient_norm": optax.tree.norm(gradients),
        "parameter_norm": optax.tree.norm(params),
    }
    return TrainState(state.step + 1, params, opt_state), norms
