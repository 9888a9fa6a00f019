"""Pre-trains a BERT: `python -m bert_jax.pretrain --config=FILE --workdir=DIR`.

Top to bottom: what to train, on which devices and rows, from which state; then the loop
evaluate -> save -> next batch -> step, so that a run started again repeats and skips nothing.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import tqdm
from absl import logging
from ml_collections import config_dict

from bert_jax import partitioning
from bert_jax.data.batches import eval_batches, local_rows, train_batches
from bert_jax.runtime import distributed
from bert_jax.runtime import main as command
from bert_jax.runtime.huge_pages import restart_with_huge_pages
from bert_jax.runtime.watchdog import Watchdog
from bert_jax.training import metrics, settings
from bert_jax.training import pretrain_step as train
from bert_jax.training.assembly import assemble
from bert_jax.training.checkpoint import Checkpointer
from bert_jax.training.workdir import claim_together, write_json

# What the progress bar shows: label, metric, digits.
PROGRESS = (
    ("loss", "train/loss", 3),
    ("mlm_accuracy", "train/mlm_accuracy", 3),
    ("sequences/s", "sequences_per_second", 1),
    ("mfu", "mfu", 3),
)


def train_and_evaluate(config: config_dict.ConfigDict, workdir: str) -> dict[str, float]:
    """Runs, or goes on with, the pre-training in `workdir`; returns what `result.json` holds.

    Every process of a run of several calls it, after `distributed.join`.
    """
    with contextlib.ExitStack() as cleanup:  # Whatever ends the run, what is being saved is saved.
        return _train_and_evaluate(config, workdir, cleanup)


def _train_and_evaluate(
    config: config_dict.ConfigDict, workdir: str, cleanup: contextlib.ExitStack
) -> dict[str, float]:
    started = time.monotonic()
    workdir = pathlib.Path(workdir)

    # Rows, and what the settings come to on these devices.
    with distributed.errors_shared():
        settings.check_numbers(config)
        watchdog = cleanup.enter_context(contextlib.closing(Watchdog(config.stall_seconds)))
        watchdog.beat("opening the corpus on all processes")
        phases = settings.open_phases(config)
        num_steps = phases[-1].stop
        tokenizer = phases[0].rows.load_tokenizer()
        assembly = assemble(config, phases, tokenizer)
        batch_sharding = partitioning.batch_sharding(assembly.mesh)
        local_rows(batch_sharding, config.eval_batch_size)  # Raises now, not at an evaluation.

    # All that can be wrong with the settings has been found by now: take the workdir.
    watchdog.beat("taking the workdir, with all processes")
    resolved = config.to_dict() | {"bert": dataclasses.asdict(assembly.bert)}
    resolved["rows"] = [
        {name: phase.rows.manifest[name] for name in ("splits", "vocabulary")} for phase in phases
    ]
    claim_together(workdir, resolved)
    is_first = jax.process_index() == 0  # The one that writes and shows what all share.
    command.keep_compiled(workdir)
    programs = cleanup.enter_context(command.compilations())
    checkpointer = cleanup.enter_context(
        contextlib.closing(
            Checkpointer(
                workdir,
                resolved,
                tokenizer,
                keep_last=config.keep_checkpoints,
                keep_every=config.keep_every,
            )
        )
    )
    first_step = checkpointer.latest_step() or 0
    result_path = workdir / "result.json"
    if first_step == num_steps and result_path.exists():
        logging.info("%s is finished; there is nothing left to do", workdir)
        return json.loads(result_path.read_text())
    if first_step:
        logging.info("Going on from the checkpoint of step %d in %s", first_step, workdir)
        watchdog.beat(f"restoring step {first_step}")
        state = checkpointer.restore(first_step, assembly.state)
    else:
        watchdog.beat("making the first parameters")
        init = jax.jit(assembly.init, out_shardings=assembly.layout)
        state = init(jax.random.key(config.seed))

    writer = metrics.MetricsWriter(workdir, first_step, writes=is_first)
    progress = tqdm.tqdm(
        total=num_steps, initial=first_step, unit="step", mininterval=1.0, disable=not is_first
    )
    preemption = cleanup.enter_context(contextlib.closing(distributed.Preemption()))
    began = started - writer.seconds  # As if all processes of this run had run without a gap.

    for phase in phases:
        if first_step >= phase.stop and phase.stop != num_steps:
            continue
        update_step, eval_step = assembly.update_step(phase), assembly.eval_step(phase)
        row_flops = metrics.flops_per_row(
            assembly.bert, phase.rows.max_seq_length, phase.max_predictions, phase.rows.max_pairs
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
            watchdog.beat(f"{'compiling and ' if step == start + 1 else ''}running step {step}")
            state, step_metrics = update_step(state, rows)
            unreported.append(step_metrics)
            command.wait_for_step(unreported)
            progress.update()
            if step == start + 1:
                jax.block_until_ready(state)
                now = time.monotonic()
                logging.info(
                    "First step done %.1f s after the process began; %d programs compiled, "
                    "%d found compiled before",
                    command.process_seconds(),
                    programs["compile_requests_use_cache"] - programs["cache_hits"],
                    programs["cache_hits"],
                )
                last_report, timed_from = now, step

            reports = step % config.log_every == 0 or step == phase.stop
            evaluates = step % config.eval_every == 0 and step != num_steps
            stops = preemption.stops_after(step)
            saves = step % config.checkpoint_every == 0 or step == phase.stop or stops
            if reports or saves:  # Whatever is saved has been looked at.
                values = command.check_finite(jax.device_get(unreported), step)
            if reports:
                now = time.monotonic()
                values = {f"train/{name}": float(value) for name, value in values.items()}
                values["learning_rate"] = float(assembly.schedule(step - 1))
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
                checkpointer.check()
            if evaluates and not stops:
                watchdog.beat(f"evaluating after step {step}")
                scores = evaluate(eval_step, state.params, phase, batch_sharding, config)
                writer.write(step, {f"heldout/{name}": value for name, value in scores.items()})
            if saves:
                watchdog.beat(f"saving step {step}")
                checkpointer.save(state)
            if stops:
                checkpointer.wait()
                raise command.Preempted(step, preemption.interrupted)
            if reports or evaluates:
                last_report, timed_from = time.monotonic(), step

    # The last phase's evaluation is the run's result.
    watchdog.beat("waiting for the last save")
    checkpointer.wait()
    progress.close()
    watchdog.beat("evaluating at the end")
    scores = evaluate(eval_step, state.params, phase, batch_sharding, config)
    writer.write(num_steps, {f"heldout/{name}": value for name, value in scores.items()})
    writer.close()
    result = scores | metrics.unigram_baseline(
        phase.heldout.count_tokens(), tuple(tokenizer.special_ids)
    )
    result |= {"steps": num_steps, "seconds": time.monotonic() - began}
    if is_first:
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


if __name__ == "__main__":
    restart_with_huge_pages()
    command.start(train_and_evaluate)
