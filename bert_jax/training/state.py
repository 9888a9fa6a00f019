"""The state that a training step updates and a checkpoint stores."""

import flax
import jax
import optax


@flax.struct.dataclass
class TrainState:
    """Number of updates done, parameters, and optimizer state."""

    step: jax.Array
    params: dict
    opt_state: optax.OptState
