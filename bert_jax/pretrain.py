"""Pre-trains a BERT: `python -m bert_jax.pretrain --config=FILE --workdir=DIR`.

Top to bottom: what to train, on which devices and rows, from which state; then the loop
evaluate -> save -> next batch -> step, so that a run started again repeats and skips nothing.
"""

import contextlib
import dataclasses
import functools
import json
import logging as std_logging
import math
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import tqdm
from absl import app, flags, logging
from ml_collections import config_dict, config_flags

from bert_jax import metrics, partitioning, train
from bert_jax.checkpoint import Checkpointer, CheckpointError, saved_steps
from bert_jax.config import BertConfig
from bert_jax.data.batches import eval_batches, local_rows, train_batches
from bert_jax.data.rows import Rows
from bert_jax.huge_pages import restart_with_huge_pages
from bert_jax.masking import UNITS
from bert_jax.model import BertForPreTraining
from bert_jax.optimizer import linear_schedule, make_optimizer
from bert_jax.tokenization import Tokenizer

config_flags.DEFINE_config_file("config", None, "One of configs/pretrain/.", lock_config=True)
flags.DEFINE_string("workdir", None, "Where the run keeps everything; created if it is not there.")
flags.mark_flags_as_required(["config", "workdir"])


# What the progress bar shows: label, metric, digits.
PROGRESS = (
    ("loss", "train/loss", 3),
    ("mlm_accuracy", "train/mlm_accuracy", 3),
    ("sequences/s", "sequences_per_second", 1),
    ("mfu", "mfu", 3),
)


# Settings that a run may be continued with differently: they change nothing, or (the layout over
# devices) rounding and which elements dropout takes. Where a corpus lies is one of them, since what
# it holds is compared by itself.
FREE_TO_CHANGE = (
    "corpus",
    "long_phase.corpus",
    "mesh.",
    "per_device_batch_size",
    "log_every",
    "eval_",
    "checkpoint_every",
    "keep_checkpoints",
    "model.remat",
    "model.scan_layers",
    "bert.remat",
    "bert.scan_layers",
)


class NonFiniteLoss(RuntimeError):
    """The loss of a step is not a number, or infinite."""


@dataclasses.dataclass(frozen=True)
class Phase:
    """Consecutive steps on rows of one length: those before `stop` and not before `start`."""

    rows: Rows
    heldout: Rows
    start: int
    stop: int
    batch_size: int
    max_predictions: int


def train_and_evaluate(config: config_dict.ConfigDict, workdir: str) -> dict[str, float]:
    """Runs, or goes on with, the pre-training in `workdir`; returns what `result.json` holds."""
    with contextlib.ExitStack() as cleanup:  # Whatever ends the run, what is being saved is saved.
        return _train_and_evaluate(config, workdir, cleanup)


def _train_and_evaluate(
    config: config_dict.ConfigDict, workdir: str, cleanup: contextlib.ExitStack
) -> dict[str, float]:
    started = time.monotonic()
    workdir = pathlib.Path(workdir)

    # Rows, tokenizer, model.
    phases = open_phases(config)
    num_steps = phases[-1].stop
    tokenizer = phases[0].rows.load_tokenizer()
    bert = model_config(config, tokenizer.vocab_size)
    longest = max(phase.rows.max_seq_length for phase in phases)
    if longest > bert.max_position_embeddings:
        raise ValueError(
            f"the corpus has rows of {longest} tokens, but the model's position table ends at "
            f"{bert.max_position_embeddings}: build it with a smaller --max_seq_length, or set "
            f"--config.model.max_position_embeddings={longest}"
        )
    model = BertForPreTraining(bert)
    masking = masking_settings(config, tokenizer)

    # Devices, and a state that is laid out over them from its first moment.
    mesh = partitioning.make_mesh(**config.mesh)
    batch_sharding = partitioning.batch_sharding(mesh)
    local_rows(batch_sharding, config.eval_batch_size)  # Raises now, not at the first evaluation.
    slices = [
        accumulation(phase.batch_size, config.per_device_batch_size, mesh) for phase in phases
    ]
    schedule, optimizer = optimizer_settings(config, num_steps)
    init = functools.partial(train.init_state, model=model, optimizer=optimizer)
    key = jax.random.key(config.seed)
    abstract = jax.eval_shape(init, key)
    layout = partitioning.shardings(abstract, mesh)

    # All that can be wrong with the settings has been found by now: take the workdir.
    settings = config.to_dict() | {"bert": dataclasses.asdict(bert)}
    settings["rows"] = [
        {name: phase.rows.manifest[name] for name in ("splits", "vocabulary")} for phase in phases
    ]
    claim_workdir(workdir, settings)
    checkpointer = cleanup.enter_context(
        contextlib.closing(Checkpointer(workdir, settings, tokenizer, keep=config.keep_checkpoints))
    )
    first_step = checkpointer.latest_step() or 0
    result_path = workdir / "result.json"
    if first_step == num_steps and result_path.exists():
        logging.info("%s is finished; there is nothing left to do", workdir)
        return json.loads(result_path.read_text())
    if first_step:
        logging.info("Going on from the checkpoint of step %d in %s", first_step, workdir)
        abstract = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            abstract,
            layout,
        )
        state = checkpointer.restore(first_step, abstract)
    else:
        state = jax.jit(init, out_shardings=layout)(key)

    writer = metrics.MetricsWriter(workdir, first_step)
    progress = tqdm.tqdm(total=num_steps, initial=first_step, unit="step", mininterval=1.0)
    began = started - writer.seconds  # As if all processes of this run had run without a gap.

    for phase, accumulate in zip(phases, slices, strict=True):
        if first_step >= phase.stop and phase.stop != num_steps:
            continue
        update_step = train.make_update_step(
            model,
            optimizer,
            config.seed,
            accumulate=accumulate,
            repeat_after=config.masking.repeat_after,
            max_predictions=phase.max_predictions,
            **masking,
        )
        eval_step = train.make_eval_step(
            model, config.seed, max_predictions=phase.max_predictions, **masking
        )
        row_flops = metrics.flops_per_row(
            bert, phase.rows.max_seq_length, phase.max_predictions, phase.rows.max_pairs
        )
        start = max(first_step, phase.start)
        batches = train_batches(
            phase.rows,
            batch_sharding,
            phase.batch_size,
            start - phase.start,
            phase.stop - phase.start,
        )
        unreported, last_report, timed_from = [], time.monotonic(), start
        for step, rows in enumerate(batches, start + 1):
            state, step_metrics = update_step(state, rows)
            unreported.append(step_metrics)
            progress.update()
            if step == start + 1:
                jax.block_until_ready(state)
                now = time.monotonic()
                logging.info("First step done %.1f s after the start, compiled", now - started)
                last_report, timed_from = now, step

            reports = step % config.log_every == 0 or step == phase.stop
            evaluates = step % config.eval_every == 0 and step != num_steps
            saves = step % config.checkpoint_every == 0 or step == phase.stop
            if reports or saves:  # Whatever is saved has been looked at.
                values = check_finite(jax.device_get(unreported), step)
            if reports:
                now = time.monotonic()
                values = {f"train/{name}": float(value) for name, value in values.items()}
                values["learning_rate"] = float(schedule(step - 1))
                values["seconds"] = now - began
                if step > timed_from:
                    rate = (step - timed_from) * phase.batch_size / (now - last_report)
                    values["sequences_per_second"] = rate
                    utilization = metrics.model_flops_utilization(row_flops * rate)
                    if utilization is not None:
                        values["mfu"] = utilization
                writer.write(step, values)
                progress.set_postfix_str(
                    " ".join(
                        f"{label}={values[name]:.{digits}f}"
                        for label, name, digits in PROGRESS
                        if name in values
                    )
                )
                unreported = []
            if evaluates:
                scores = evaluate(eval_step, state.params, phase, batch_sharding, config)
                writer.write(step, {f"heldout/{name}": value for name, value in scores.items()})
            if saves:
                checkpointer.save(state)
            if reports or evaluates:
                last_report, timed_from = time.monotonic(), step

    # The last phase's evaluation is the run's result.
    checkpointer.wait()
    progress.close()
    scores = evaluate(eval_step, state.params, phase, batch_sharding, config)
    writer.write(num_steps, {f"heldout/{name}": value for name, value in scores.items()})
    writer.close()
    result = scores | metrics.unigram_baseline(
        phase.heldout.count_tokens(), tuple(tokenizer.special_ids)
    )
    result |= {"steps": num_steps, "seconds": time.monotonic() - began}
    write_json(result_path, result)
    return result


def evaluate(eval_step, params, phase, batch_sharding, config) -> dict[str, float]:
    """Losses (nats), perplexity and accuracies over every held-out row of the phase, once."""
    batches = eval_batches(phase.heldout, batch_sharding, config.eval_batch_size)
    total = functools.reduce(
        lambda total, sums: jax.tree.map(jnp.add, total, sums),
        (eval_step(params, rows) for rows in batches),
    )
    scores = {name: float(value) for name, value in train.means(total).items()}
    return scores | {"perplexity": metrics.perplexity(scores["mlm_loss"])}


def check_finite(step_metrics: list[dict], last_step: int) -> dict[str, float]:
    """The metrics of `last_step`, the last of the list; NonFiniteLoss if any is not a number."""
    for step, values in enumerate(step_metrics, last_step - len(step_metrics) + 1):
        for name in ("loss", "gradient_norm", "parameter_norm"):
            if not math.isfinite(values[name]):
                raise NonFiniteLoss(
                    f"the {name} of step {step} is {values[name]}. Nothing was saved since the "
                    "last finite checkpoint; lower the learning rate, lengthen the warm-up, or "
                    "look at the rows of that step, and start in a new workdir"
                )
    return step_metrics[-1]


def open_phases(config: config_dict.ConfigDict) -> list[Phase]:
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
    for name in ("log_every", "eval_every", "checkpoint_every", "keep_checkpoints"):
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


def model_config(config: config_dict.ConfigDict, vocab_size: int) -> BertConfig:
    """The architecture that `config.model` describes, for a vocabulary of `vocab_size` pieces."""
    fields = {name: value for name, value in config.model.items() if name != "size"}
    return BertConfig.named(config.model.size, vocab_size=vocab_size, **fields)


def masking_settings(config: config_dict.ConfigDict, tokenizer: Tokenizer) -> dict:
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


def optimizer_settings(config: config_dict.ConfigDict, num_steps: int):
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


def accumulation(batch_size: int, per_device_batch_size: int, mesh: jax.sharding.Mesh) -> int:
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


def claim_workdir(workdir: pathlib.Path, settings: dict) -> None:
    """Writes config.json; ValueError if the workdir holds checkpoints of other settings."""
    path = workdir / "config.json"
    workdir.mkdir(parents=True, exist_ok=True)
    if not path.exists() or not saved_steps(workdir / "checkpoints"):
        write_json(path, settings)
        return
    found, wanted = _flatten(json.loads(path.read_text())), _flatten(settings)
    differences = [
        f"  {name}: {found.get(name)!r} in {path}, {wanted.get(name)!r} now"
        for name in sorted(found.keys() | wanted.keys())
        if found.get(name) != wanted.get(name) and not name.startswith(FREE_TO_CHANGE)
    ]
    if differences:
        raise ValueError(
            f"{workdir} belongs to a run with other settings:\n"
            + "\n".join(differences)
            + "\nGive these settings to go on with it, or another --workdir to start anew"
        )


def write_json(path: pathlib.Path, value: dict) -> None:
    """Writes `value` so that the file is whole or not there."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(value, indent=2) + "\n")
    unfinished.replace(path)


def _flatten(value, prefix: str = "") -> dict:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    if not isinstance(value, dict):
        return {prefix: value}
    flat = {}
    for name, inner in value.items():
        flat |= _flatten(inner, f"{prefix}.{name}" if prefix else name)
    return flat


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if flags.FLAGS["verbosity"].using_default_value:
        logging.set_verbosity(logging.INFO)
    logging.get_absl_handler().addFilter(  # Orbax tells of each thread and option.
        lambda record: "orbax" not in record.pathname or record.levelno > std_logging.INFO
    )
    workdir = flags.FLAGS.workdir
    try:
        result = train_and_evaluate(flags.FLAGS.config, workdir)
    except (ValueError, OSError, CheckpointError, NonFiniteLoss) as error:
        logging.debug("Where it came from:", exc_info=True)  # Shown with --verbosity=1.
        sys.exit(f"\npretrain: {error}")
    except KeyboardInterrupt:
        sys.exit(f"\nInterrupted. The same command goes on from the last checkpoint in {workdir}")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    restart_with_huge_pages()
    app.run(main)
