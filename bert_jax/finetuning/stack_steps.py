"""The jitted functions of a stack of trials, whose state has a leading axis of trials."""

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax.data.features import unpack_rows
from bert_jax.finetuning.step import make_finetune_step, make_predict_step
from bert_jax.model.architecture import architecture_of
from bert_jax.model.config import pools_last
from bert_jax.model.heads import Head
from bert_jax.model.lora import Lora, init_adapters, merge, split_params
from bert_jax.sharding.rules import (
    TASK_RULES,
    infer_shardings,
    stack_shardings,
    with_shardings,
)
from bert_jax.training.optimizer import Hyperparameters
from bert_jax.training.state import TRIAL_AXES, TrainState

# For `optimizer.init`: the initial state of an optimizer does not depend on their values.
ANY_HYPERPARAMETERS = Hyperparameters(*np.ones(len(Hyperparameters._fields), np.float32))


@dataclasses.dataclass(frozen=True)
class StackSteps:
    """The jitted functions of a stack of trials: compiled once for all stacks of one size.

    Attributes:
      shapes, shardings: of the state of one trial.
      stack_shardings: of the state of a stack.
      init: (keys `[trials]`, pretrained parameters) -> the initial state of a stack.
      update: as `make_finetune_step` describes it.
      predict: as `make_predict_step` describes it.
      select: (state of a stack, indices of trials) -> the state of these trials.
      pick: (parameters of a stack, index of a trial) -> its parameters.
      freeze: (pretrained parameters) -> those that all trials share, on the devices; None without
        LoRA.
      frozen_shapes: of these, with their shardings; None without LoRA.
      merge: (parameters of a trial, frozen ones) -> the parameters of a plain model.
      model_shapes: of the parameters of a plain model.
      model_shardings: of a stack of them.
      replicate: (metrics of a stack) -> the same on all devices.
    """

    shapes: TrainState
    shardings: TrainState
    stack_shardings: TrainState
    init: Callable
    update: Callable
    predict: Callable
    select: Callable
    pick: Callable
    freeze: Callable
    frozen_shapes: dict | None
    merge: Callable
    model_shapes: dict
    model_shardings: dict
    replicate: Callable

    def abstract_state(self, num_trials: int) -> TrainState:
        """Returns the shapes, dtypes and shardings of the state of `num_trials`."""

        def stacked(leaf):
            return jax.ShapeDtypeStruct((num_trials, *leaf.shape), leaf.dtype)

        shapes = self.shapes.map_trials(lambda tree: jax.tree.map(stacked, tree))
        return with_shardings(shapes, self.stack_shardings)


def build_stack_steps(
    model: nn.Module,
    mesh: Mesh,
    *,
    head: Head,
    train_head: Head,
    optimizer: Callable[[Hyperparameters], optax.GradientTransformation],
    row: dict[str, jax.Array],
    pretrained: dict,
    rows_per_microbatch: int,
    batch_size: int,
    lora: Lora | None = None,
) -> StackSteps:
    """Builds the functions; computes and compiles nothing.

    Args:
      model, mesh: of all trials.
      head: the task's, for predictions.
      train_head: the same head with the loss to minimize, which a teacher may be part of.
      optimizer: hyperparameters of a trial -> its optimizer.
      row: the arrays of an example row, for the shapes.
      pretrained: the parameters to start from, or their shapes.
      rows_per_microbatch: over all devices.
      batch_size: the maximum number of examples.
      lora: the adapters to train beside the frozen parameters; None: trains all parameters.
    """

    def init(key, pretrained):
        rows = jax.tree.map(jnp.asarray, row)
        batch = rows | unpack_rows(rows, pools_last(model.config))
        fresh = model.init(key, batch)["params"]
        params = fresh | pretrained | {"encoder": fresh["encoder"] | pretrained["encoder"]}
        if lora:
            params, frozen = split_params(params, pretrained)
            # The key 1 is that of dropout, which folds the step into it: bert_jax/finetune.py.
            params["lora"] = init_adapters(jax.random.fold_in(key, 2), lora, frozen["encoder"])
        opt_state = optimizer(ANY_HYPERPARAMETERS).init(params)
        return TrainState(jnp.zeros([], jnp.int32), params, opt_state)

    def init_stack(keys, pretrained):
        return jax.vmap(init, in_axes=(0, None), out_axes=TRIAL_AXES)(keys, pretrained)

    def select(state, indices):
        return state.map_trials(lambda tree: index_leaves(tree, indices))

    def join(params, frozen):
        return merge(lora, params, frozen) if lora else params

    def freeze(pretrained):
        if not lora:
            return None
        frozen = {"encoder": pretrained["encoder"]}
        return jax.device_put(frozen, jax.tree.map(lambda leaf: leaf.sharding, frozen_shapes))

    shapes = jax.eval_shape(init, jax.random.key(0), pretrained)
    model_shapes = jax.eval_shape(join, shapes.params, {"encoder": pretrained["encoder"]})
    rules = (*TASK_RULES, *architecture_of(model.config).RULES)
    shardings = infer_shardings(shapes, mesh, rules)
    model_shardings = infer_shardings(model_shapes, mesh, rules) if lora else shardings.params
    stacked = shardings.map_trials(stack_shardings)
    frozen_shapes = None
    if lora:
        encoder = jax.eval_shape(lambda tree: tree, pretrained["encoder"])
        of_encoder = {name: model_shardings["encoder"][name] for name in encoder}
        frozen_shapes = {"encoder": with_shardings(encoder, of_encoder)}
    return StackSteps(
        shapes=shapes,
        shardings=shardings,
        stack_shardings=stacked,
        init=jax.jit(init_stack, out_shardings=stacked),
        update=make_finetune_step(
            model, train_head, optimizer, shardings, rows_per_microbatch, batch_size, lora
        ),
        predict=make_predict_step(model, mesh, head, lora),
        select=jax.jit(select, out_shardings=stacked),
        pick=jax.jit(index_leaves, out_shardings=shardings.params),
        freeze=freeze,
        frozen_shapes=frozen_shapes,
        merge=jax.jit(join, out_shardings=model_shardings) if lora else join,
        model_shapes=model_shapes,
        model_shardings=stack_shardings(model_shardings),
        replicate=jax.jit(lambda metrics: metrics, out_shardings=NamedSharding(mesh, P())),
    )


def index_leaves(tree, index):
    """Returns the tree of the leaves at `index` of their leading axis."""
    return jax.tree.map(lambda leaf: leaf[index], tree)
