"""What a configuration comes to on given devices: the state, how it lies, and the step.

The run (`pretrain`) and the report on a pod that is not there (`tpu`) both take them from here, so
that what is compiled beforehand is what runs.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bert_jax import partitioning
from bert_jax.model.bert import BertForPreTraining
from bert_jax.model.config import BertConfig
from bert_jax.tokenization import Tokenizer
from bert_jax.training import pretrain_step as train
from bert_jax.training import settings
from bert_jax.training.settings import Phase


@dataclasses.dataclass(frozen=True)
class Assembly:
    """All that the steps of a run are made from.

    Fields:
      bert: the architecture, and `model` the module with it.
      mesh: of the devices.
      schedule: the learning rate of each step, from 0.
      init: key -> fresh state, to be jitted with `layout` as its `out_shardings`.
      state: its shapes and dtypes, each with its sharding.
      masking: what `train.corrupt` takes besides `max_predictions`.
    """

    config: ConfigDict
    bert: BertConfig
    model: BertForPreTraining
    mesh: Mesh
    schedule: Callable
    optimizer: object
    init: Callable[[jax.Array], train.TrainState]
    state: train.TrainState
    masking: dict

    @property
    def layout(self) -> train.TrainState:
        """The shardings of the state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.state)

    def slices(self, phase: Phase) -> int:
        """How many slices a batch goes through the model in."""
        per_device = self.config.per_device_batch_size
        return settings.accumulation(phase.batch_size, per_device, self.mesh)

    def update_step(self, phase: Phase) -> Callable:
        """See `train.make_update_step`."""
        return train.make_update_step(
            self.model,
            self.optimizer,
            self.layout,
            self.config.seed,
            accumulate=self.slices(phase),
            repeat_after=self.config.masking.repeat_after,
            max_predictions=phase.max_predictions,
            **self.masking,
        )

    def eval_step(self, phase: Phase) -> Callable:
        """See `train.make_eval_step`."""
        return train.make_eval_step(
            self.model,
            self.mesh,
            self.config.seed,
            max_predictions=phase.max_predictions,
            **self.masking,
        )


def assemble(
    config: ConfigDict, phases: list[Phase], tokenizer: Tokenizer, devices=None
) -> Assembly:
    """Puts together what all `phases` run with, on `devices` (all, if None); nothing is computed.

    ValueError for a mesh that does not divide the devices, a batch that does not divide over the
    mesh, and rows longer than the position table.
    """
    bert = settings.model_config(config, tokenizer.vocab_size)
    longest = max(phase.rows.max_seq_length for phase in phases)
    if longest > bert.max_position_embeddings:
        raise ValueError(
            f"the corpus has rows of {longest} tokens, but the model's position table ends at "
            f"{bert.max_position_embeddings}: build it with a smaller --max_seq_length, or set "
            f"--config.model.max_position_embeddings={longest}"
        )
    model = BertForPreTraining(bert)
    mesh = partitioning.make_mesh(**config.mesh, devices=devices)
    schedule, optimizer = settings.optimizer_settings(config, phases[-1].stop)
    init = functools.partial(train.init_state, model=model, optimizer=optimizer)
    shapes = jax.eval_shape(init, jax.random.key(config.seed))
    layout = partitioning.shardings(shapes, mesh)
    if config.shard_weight_update:
        layout = partitioning.divide_over_data(layout, shapes)
    state = partitioning.placed(shapes, layout)
    masking = settings.masking_settings(config, tokenizer)
    assembly = Assembly(config, bert, model, mesh, schedule, optimizer, init, state, masking)
    for phase in phases:
        assembly.slices(phase)
    return assembly
