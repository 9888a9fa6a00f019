"""Builds the model, optimizer, state shardings and phases of a pre-training configuration.

The run (`pretrain`) and the report on a TPU topology (`tpu`) share them, so that what is compiled
ahead of time is what runs.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import optax
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bert_jax import partitioning
from bert_jax.data.masking import Masking
from bert_jax.data.rows import Rows
from bert_jax.model.bert import BertForPreTraining
from bert_jax.model.config import BertConfig
from bert_jax.tokenization import Tokenizer
from bert_jax.training.optimizer import linear_schedule, make_optimizer
from bert_jax.training.pretrain_step import init_state
from bert_jax.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class Phase:
    """The steps from `start` up to `stop`, on rows of one length.

    To compile a step, `rows` needs only its sizes, and `heldout` may be None.
    """

    rows: Rows
    heldout: Rows | None
    start: int
    stop: int
    batch_size: int
    max_predictions: int

    @property
    def num_steps(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class PretrainSetup:
    """The model, optimizer and shardings from which the steps of a run are built.

    `schedule` is the learning rate of a step, counted from 0; `init` (key -> initial state) is
    jitted with `shardings`; `abstract_state` has shapes, dtypes and shardings.
    """

    config: ConfigDict
    tokenizer: Tokenizer
    model: BertForPreTraining
    mesh: Mesh
    schedule: Callable[[int], jax.Array]
    optimizer: optax.GradientTransformation
    init: Callable[[jax.Array], TrainState]
    abstract_state: TrainState

    @property
    def shardings(self) -> TrainState:
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)

    def masking(self, phase: Phase) -> Masking:
        return Masking(
            special_ids=tuple(self.tokenizer.special_ids),
            mask_id=self.tokenizer.mask_id,
            vocab_size=self.tokenizer.vocab_size,
            word_start=self.tokenizer.word_start,
            max_predictions=phase.max_predictions,
            **self.config.masking,
        )

    def num_microbatches(self, phase: Phase) -> int:
        """Returns the number of microbatches per update; `per_device_batch_size` 0 means one.

        Raises ValueError if the batch is not divisible by the devices that share it.
        """
        num_shards = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        rows_per_device = self.config.per_device_batch_size
        microbatch_size = rows_per_device * num_shards
        if phase.batch_size % max(microbatch_size, num_shards):
            raise ValueError(
                f"batch_size {phase.batch_size} is not divisible by {num_shards} devices x "
                f"per_device_batch_size {rows_per_device or 1}: choose a multiple of "
                f"{max(microbatch_size, num_shards)}"
            )
        return phase.batch_size // microbatch_size if microbatch_size else 1


def setup_pretraining(
    config: ConfigDict, phases: list[Phase], tokenizer: Tokenizer, devices=None
) -> PretrainSetup:
    """Builds what all `phases` run with, on `devices` (None: all of them); computes nothing.

    Raises ValueError if the mesh does not fit the devices, a batch does not fit the mesh, or rows
    are longer than the position table.
    """
    bert = model_config(config, tokenizer.vocab_size)
    max_length = max(phase.rows.max_seq_length for phase in phases)
    if max_length > bert.max_position_embeddings:
        raise ValueError(
            f"the corpus has rows of {max_length} tokens, but the model's position table ends at "
            f"{bert.max_position_embeddings}: build it with a smaller --max_seq_length, or set "
            f"--config.model.max_position_embeddings={max_length}"
        )
    model = BertForPreTraining(bert)
    mesh = partitioning.make_mesh(**config.mesh, devices=devices)
    schedule = linear_schedule(config.learning_rate, phases[-1].stop, config.warmup_steps)
    optimizer = make_optimizer(
        config.optimizer,
        schedule,
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
        beta1=config.beta1,
        beta2=config.beta2,
        epsilon=config.epsilon,
    )
    init = functools.partial(init_state, model=model, optimizer=optimizer)
    shapes = jax.eval_shape(init, jax.random.key(config.seed))
    shardings = partitioning.infer_shardings(shapes, mesh)
    if config.shard_weight_update:
        shardings = partitioning.shard_over_data(shardings, shapes)
    state = partitioning.with_shardings(shapes, shardings)
    setup = PretrainSetup(config, tokenizer, model, mesh, schedule, optimizer, init, state)
    for phase in phases:  # Raise now, not after hours of the phase before.
        setup.masking(phase)
        setup.num_microbatches(phase)
    return setup


def model_config(config: ConfigDict, vocab_size: int) -> BertConfig:
    """Returns the architecture that `config.model` describes; None leaves a field to the size."""
    fields = {
        name: value for name, value in config.model.items() if name != "size" and value is not None
    }
    return BertConfig.named(config.model.size, vocab_size=vocab_size, **fields)


def open_phases(config: ConfigDict) -> list[Phase]:
    """Opens the corpora of all phases with steps. Raises ValueError or CorpusError."""
    phases, start = [], 0
    for name, phase in (("corpus", config), ("long_phase.corpus", config.long_phase)):
        if not phase.num_steps:
            continue
        if not phase.corpus:
            raise ValueError(f"give the directory of a corpus: --config.{name}=DIR")
        rows = Rows(phase.corpus, "train", config.seed)
        if not 1 <= phase.max_predictions <= rows.max_seq_length:
            raise ValueError(
                f"max_predictions is {phase.max_predictions}, but the rows of {phase.corpus} have "
                f"{rows.max_seq_length} tokens: expected 1 to {rows.max_seq_length}"
            )
        stop = start + phase.num_steps
        heldout = Rows(phase.corpus, "heldout")
        phases.append(Phase(rows, heldout, start, stop, phase.batch_size, phase.max_predictions))
        start = stop
    if len({phase.rows.manifest["vocabulary"]["sha256"] for phase in phases}) != 1:
        raise ValueError(
            f"--config.corpus={config.corpus} and --config.long_phase.corpus="
            f"{config.long_phase.corpus} were built with different vocabularies: build both with "
            "the same one"
        )
    return phases


def check_numbers(config: ConfigDict) -> None:
    """Validates the numeric fields of a pre-training configuration. Raises ValueError."""
    check_bounds(
        config,
        ("num_steps long_phase.num_steps warmup_steps per_device_batch_size", 0, math.inf),
        ("keep_every weight_decay seed masking.repeat_after", 0, math.inf),
        ("batch_size long_phase.batch_size eval_batch_size keep_checkpoints", 1, math.inf),
        ("log_every eval_every checkpoint_every stall_seconds", 1, math.inf),
        ("learning_rate clip_norm epsilon", 1e-30, math.inf),
        ("masking.rate", 0.001, 0.999),
        ("beta1 beta2", 0, 1 - 1e-9),
        ("warmup_steps", 0, config.num_steps + config.long_phase.num_steps),
    )
    if not config.num_steps + config.long_phase.num_steps:
        raise ValueError("num_steps and long_phase.num_steps are both 0: there is nothing to train")


def check_bounds(config: ConfigDict, *bounds: tuple[str, float, float]) -> None:
    """Raises ValueError for a field outside its bounds (names, min, max)."""
    flat = flatten_dict(config.to_dict(), sep=".")
    for names, minimum, maximum in bounds:
        for name in names.split():
            if not minimum <= flat[name] <= maximum:
                raise ValueError(
                    f"--config.{name}={flat[name]}: expected at least {minimum:g}"
                    + (f" and at most {maximum:g}" if maximum < math.inf else "")
                )
