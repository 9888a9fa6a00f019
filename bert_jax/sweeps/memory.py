"""Estimates the memory of stacked trials: what the compiler plans for one, times their number.

Parameters, optimizer state, gradients and activations are separate for each trial. The frozen
encoder of LoRA counts once.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
import psutil
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax.data.features import finetune_batches
from bert_jax.finetuning.finetune_setup import FinetuneSetup
from bert_jax.sharding.mesh import batch_sharding
from bert_jax.training.optimizer import Hyperparameters


class CompiledStep(NamedTuple):
    """The step of a stack of trials, compiled ahead of time, and what it is called with."""

    function: jax.stages.Compiled
    keys: jax.Array
    hyperparameters: Hyperparameters
    batches: Sequence[tuple[dict[str, jax.Array], int]]

    @property
    def bytes(self) -> int:
        """The bytes per device that the compiler plans."""
        plan = self.function.memory_analysis()
        outputs = plan.output_size_in_bytes - plan.alias_size_in_bytes
        return plan.argument_size_in_bytes + plan.temp_size_in_bytes + outputs


def compile_step(setup: FinetuneSetup, num_trials: int = 1, num_batches: int = 1) -> CompiledStep:
    """Compiles the step for `num_trials` per device of `trial`, and reads its first batches.

    Of these, it keeps those with the shapes of the first one, for which the step is compiled.
    """
    mesh, count = setup.mesh, num_trials * setup.mesh.shape["trial"]
    keys = jax.random.split(jax.random.key(0), count)
    batches = list(
        finetune_batches(
            setup.data.task.train,
            setup.data.train_shape,
            NamedSharding(mesh, P("trial", *batch_sharding(mesh).spec)),
            batch_size=setup.config.batch_size,
            rows_per_microbatch=setup.rows_per_microbatch,
            seeds=range(count),
            start=0,
            stop=num_batches,
            is_compared=setup.data.task.head.batch_loss is not None,
        )
    )
    first = jax.tree.map(np.shape, batches[0][0])
    batches = [batch for batch in batches if jax.tree.map(np.shape, batch[0]) == first]
    values = setup.hyperparameters(setup.config)
    hyperparameters = jax.tree.map(lambda value: value.repeat(count), values)
    state, frozen = setup.steps.abstract_state(count), setup.steps.frozen_shapes
    lowered = setup.steps.update.lower(state, *batches[0], keys, hyperparameters, frozen)
    return CompiledStep(lowered.compile(), keys, hyperparameters, batches)


def bytes_per_trial(setup: FinetuneSetup, num_trials: int = 1) -> int:
    """Compiles the step for `num_trials` per device of `trial`; returns its bytes per device."""
    return compile_step(setup, num_trials).bytes


def device_memory() -> int:
    """Returns the bytes that a device may use; CPU devices share the memory of the host."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    return limit or psutil.virtual_memory().total // jax.local_device_count()


def shared_bytes(setup: FinetuneSetup) -> int:
    """Returns the bytes per device of the frozen parameters that all trials share."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(setup.steps.frozen_shapes)
    )


def program_bytes(setup: FinetuneSetup, num_trials: int, trial_bytes: int) -> int:
    """Returns the memory per device of a program of which one trial alone takes `trial_bytes`."""
    shared = shared_bytes(setup)
    return shared + -(-num_trials // setup.mesh.shape["trial"]) * (trial_bytes - shared)


def trials_that_fit(setup: FinetuneSetup, trial_bytes: int) -> int:
    """Returns how many trials fit into one program, of which one alone takes `trial_bytes`."""
    shared = shared_bytes(setup)
    count = (device_memory() - shared) // (trial_bytes - shared)
    return max(count, 0) * setup.mesh.shape["trial"]
