"""What a configuration of pre-training means: its bounds, and the typed things made from it."""

import dataclasses
import math

from jax.sharding import Mesh
from ml_collections import ConfigDict

from bert_jax.data.masking import UNITS
from bert_jax.data.rows import Rows
from bert_jax.model.config import BertConfig
from bert_jax.tokenization import Tokenizer
from bert_jax.training.optimizer import linear_schedule, make_optimizer
from bert_jax.training.workdir import flatten


@dataclasses.dataclass(frozen=True)
class Phase:
    """Consecutive steps on rows of one length: those before `stop` and not before `start`.

    Where steps are only compiled, `rows` need no more than their sizes, and `heldout` is None.
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


def open_phases(config: ConfigDict) -> list[Phase]:
    """The phases of the run; all their corpora must share one vocabulary."""
    phases, start = [], 0
    for name, settings in (("corpus", config), ("long_phase.corpus", config.long_phase)):
        if not settings.num_steps:
            continue
        if not settings.corpus:
            raise ValueError(f"give the directory of a corpus: --config.{name}=DIR")
        rows = Rows(settings.corpus, "train", config.seed)
        if not 1 <= settings.max_predictions <= rows.max_seq_length:
            raise ValueError(
                f"max_predictions is {settings.max_predictions}, but the rows of {settings.corpus} "
                f"have {rows.max_seq_length} tokens: expected 1 to {rows.max_seq_length}"
            )
        heldout = Rows(settings.corpus, "heldout")
        stop = start + settings.num_steps
        phases.append(
            Phase(rows, heldout, start, stop, settings.batch_size, settings.max_predictions)
        )
        start = stop
    if not phases:
        raise ValueError("num_steps is 0, and so is long_phase.num_steps: there is nothing to do")
    for name in (
        "log_every",
        "eval_every",
        "checkpoint_every",
        "keep_checkpoints",
        "stall_seconds",
    ):
        if config[name] < 1:
            raise ValueError(f"{name} must be at least 1, got {config[name]}")
    hashes = {phase.rows.manifest["vocabulary"]["sha256"] for phase in phases}
    if len(hashes) != 1:
        raise ValueError(
            f"--config.corpus={config.corpus} and --config.long_phase.corpus="
            f"{config.long_phase.corpus} were built with different vocabularies: build both with "
            "one"
        )
    return phases


def check_numbers(config: ConfigDict) -> None:
    """ValueError for a number that can mean nothing, wherever else it would show or not show."""
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


def check_bounds(config: ConfigDict, *bounds: tuple[str, float, float]) -> None:
    """ValueError for a field outside its (names, lowest, highest)."""
    flat = flatten(config.to_dict())
    for names, lowest, highest in bounds:
        for name in names.split():
            if not lowest <= flat[name] <= highest:
                raise ValueError(
                    f"--config.{name}={flat[name]}: expected at least {lowest:g}"
                    + (f" and at most {highest:g}" if highest < math.inf else "")
                )


def model_config(config: ConfigDict, vocab_size: int) -> BertConfig:
    """The architecture that `config.model` describes, for a vocabulary of `vocab_size` pieces."""
    fields = {
        name: value
        for name, value in config.model.items()
        if name != "size" and value is not None  # None: as the size says.
    }
    return BertConfig.named(config.model.size, vocab_size=vocab_size, **fields)


def masking_settings(config: ConfigDict, tokenizer: Tokenizer) -> dict:
    """What `mask_tokens` takes besides a batch and `max_predictions`."""
    if config.masking.unit not in UNITS:
        raise ValueError(
            f"masking unit {config.masking.unit!r} is unknown: expected one of {', '.join(UNITS)}"
        )
    return {
        "special_ids": tuple(tokenizer.special_ids),
        "mask_id": tokenizer.mask_id,
        "vocab_size": tokenizer.vocab_size,
        "rate": config.masking.rate,
        "unit": config.masking.unit,
        "word_start": None if config.masking.unit == "token" else tokenizer.word_start,
    }


def optimizer_settings(config: ConfigDict, num_steps: int):
    """The learning rate of each step, and the optimizer that follows it."""
    schedule = linear_schedule(config.learning_rate, num_steps, config.warmup_steps)
    optimizer = make_optimizer(
        config.optimizer,
        schedule,
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
        beta1=config.beta1,
        beta2=config.beta2,
        epsilon=config.epsilon,
    )
    return schedule, optimizer


def accumulation(batch_size: int, per_device_batch_size: int, mesh: Mesh) -> int:
    """Slices that a global batch goes through the model in; `per_device_batch_size` 0 means one."""
    num_shards = mesh.shape["data"] * mesh.shape["fsdp"]
    per_pass = per_device_batch_size * num_shards
    if batch_size % max(per_pass, num_shards):
        raise ValueError(
            f"batch_size {batch_size} is not divisible by {num_shards} devices x "
            f"per_device_batch_size {per_device_batch_size or 1}: choose a multiple of "
            f"{max(per_pass, num_shards)}"
        )
    return batch_size // per_pass if per_pass else 1
