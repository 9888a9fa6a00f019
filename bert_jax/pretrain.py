"""Pre-trains a BERT model: `python -m bert_jax.pretrain --config=FILE --workdir=DIR`.

Top to bottom: corpus, model and devices, state, then the loop: batch -> step -> report -> evaluate
-> save. A run resumes from the last checkpoint, bit for bit as if it had not been interrupted.
"""

from bert_jax.runtime.command_line import restart_with_huge_pages

if __name__ == "__main__":
    restart_with_huge_pages()  # Before the other imports, which take longer than a second.

import contextlib
import functools
import json
import pathlib
import socket
import time
from collections.abc import Callable, Iterable

import jax
from absl import logging
from ml_collections import ConfigDict

from bert_jax.checkpoints.native import Checkpointer, load_settings, saved_steps
from bert_jax.checkpoints.parameters import LoadedModel, modules_of
from bert_jax.configs.pretrain.fields import FIELDS, known_fields, may_change
from bert_jax.data.batches import heldout_batches, pretrain_batches
from bert_jax.model.architecture import config_to_settings
from bert_jax.objectives import Objective, mean_metrics
from bert_jax.runtime import distributed, main
from bert_jax.runtime.buckets import as_path
from bert_jax.runtime.config_fields import check_required
from bert_jax.runtime.errors import RunStopped
from bert_jax.runtime.watchdog import Watchdog
from bert_jax.sharding.mesh import batch_sharding
from bert_jax.training import forecast, health, metrics, monitoring
from bert_jax.training.branch import find_branch
from bert_jax.training.goodput import StepTimer
from bert_jax.training.initial_weights import (
    choose_weights,
    initial_state,
    read_source,
    trained_lengths,
)
from bert_jax.training.phases import (
    Phase,
    check_numbers,
    check_segments,
    check_special_tokens,
    open_phases,
    schedule_of,
)
from bert_jax.training.pretrain_setup import PretrainSetup, setup_pretraining
from bert_jax.training.pretrain_step import make_eval_step, make_pretrain_step
from bert_jax.training.pretrain_teacher import place_frozen, read_teacher
from bert_jax.training.state import parameters_hash
from bert_jax.training.trackers import check_tracker
from bert_jax.training.workdir import claim_workdir, write_json


def train_and_evaluate(config: ConfigDict, workdir: str | pathlib.Path) -> dict[str, float]:
    """Runs or resumes the pre-training in `workdir` and returns the contents of `result.json`.

    In a multi-process run every process must call it, after `distributed.initialize`.
    """
    with distributed.raise_on_all_processes():
        workdir = as_path(workdir)
        monitoring.check_profile(workdir, config.profile_steps)
    with contextlib.ExitStack() as exit_stack:  # Completes the current save, however the run ends.
        return _run(config, workdir, exit_stack)


def _run(config: ConfigDict, workdir: pathlib.Path, exit_stack: contextlib.ExitStack) -> dict:
    started = time.monotonic()
    is_main = jax.process_index() == 0  # Only this process writes shared files.

    # Corpus, model and optimizer on the devices.
    with distributed.raise_on_all_processes():
        check_required(config, FIELDS, "configs/pretrain/bert_base.py")
        check_numbers(config)
        check_tracker(config.tracker)
        watchdog = exit_stack.enter_context(contextlib.closing(Watchdog(config.stall_seconds)))
        watchdog.beat("opening the corpus on all processes")
        phases = open_phases(config)
        num_steps = phases[-1].stop
        tokenizer = phases[0].train.tokenizer
        teacher = read_teacher(config, phases[0].objective_class, tokenizer)
        source = read_source(config, tokenizer)
        setup = setup_pretraining(
            config,
            phases,
            tokenizer,
            source_settings=source.settings if source else None,
            teacher_settings=teacher.settings if teacher else None,
        )
        check_special_tokens(tokenizer, setup.model.config)
        check_segments(phases, setup.model.config)
        estimates = forecast.read_estimates(config.estimate, setup)
        weights = choose_weights(setup, source, teacher)
        sharding = batch_sharding(setup.mesh)

        settings = run_settings(setup, phases, {"init_from": weights, "teacher": teacher})
        branch = None
        if config.branch_from and not saved_steps(workdir / "checkpoints"):
            branch = find_branch(config, settings)

    # The configuration is valid: claim the workdir.
    watchdog.beat("claiming the workdir with all processes")
    exit_stack.enter_context(claim_workdir(workdir, settings, may_change(config)))
    monitoring.enable_compilation_cache(workdir)
    checkpointer = Checkpointer(
        workdir,
        settings,
        tokenizer,
        checksums=config.checksums,
        keep_last=config.keep_checkpoints,
        keep_every=config.keep_every,
        keep_step=setup.stable_step,
    )
    exit_stack.callback(checkpointer.close)

    # Initial or restored state.
    first_step = checkpointer.latest_step() or 0
    result_path = workdir / "result.json"
    if first_step == num_steps and result_path.exists():
        logging.info("%s is already finished", workdir)
        return json.loads(result_path.read_text(encoding="utf-8"))
    checkpoint = checkpointer.directory / str(first_step) if first_step else branch
    if branch:
        first_step = int(branch.name)
    # The first two steps that a process runs are not profiled.
    profile_steps = min(config.profile_steps, max(num_steps - first_step - 2, 0))
    forecast.log_run(setup, first_step)
    hosts = distributed.allgather_texts(socket.gethostname())
    if len(hosts) > 1:
        logging.info(
            "Hosts by process: %s", ", ".join(f"{n} {host}" for n, host in enumerate(hosts))
        )
    if checkpoint:
        logging.info("Resuming from step %d in %s", first_step, checkpoint.parents[1])
        watchdog.beat(f"restoring step {first_step}")
        state = checkpointer.restore(checkpoint, setup.abstract_state)
        saved = load_settings(checkpoint)
        # With these metrics, the next report equals that of an uninterrupted run.
        unreported, owes_evaluation = read_unreported(saved), saved.get("owes_evaluation", False)
        lowest_loss = saved.get("lowest_loss")  # Of the phase's reports.
        recent_losses = saved.get("recent_losses", [])  # Of its last steps that were reported.
    else:
        watchdog.beat("initializing the parameters")
        state = initial_state(setup, weights)
        unreported, owes_evaluation, lowest_loss, recent_losses = [], False, None, []
    frozen = place_frozen(setup, teacher)
    lengths = trained_lengths(phases, weights)
    del source, weights, teacher  # Frees their memory.

    writer = metrics.MetricsWriter(
        workdir, first_step, writes=is_main, tracker=config.tracker, settings=config.to_dict()
    )
    exit_stack.callback(writer.close)
    timer = StepTimer(workdir, writer, started, writes=is_main)
    progress = monitoring.progress_bar(first_step, num_steps)
    stop_request = exit_stack.enter_context(contextlib.closing(distributed.StopRequest()))

    eval_steps = make_eval_steps(setup, frozen)

    def write(step: int, values: dict[str, float]) -> None:
        """Writes a line of metrics, and logs the alarms that it raises."""
        writer.write(step, values)
        for alarm in health.new_alarms(writer.lines, config) if is_main else ():
            progress.clear()
            logging.warning("Step %s: %s", f"{step:,}", alarm.text)

    @functools.cache
    def baseline(index: int) -> dict[str, float]:
        """Returns the unigram baseline on all held-out rows of a phase."""
        by_source = {
            source: metrics.unigram_baseline(rows.count_tokens(), tokenizer.special_ids)
            for source, rows in phases[index].heldout.items()
        }
        return metrics.mean_over_sources(by_source, phases[index].stream.weights)

    def evaluate_after(step: int, params: dict) -> dict[str, float]:
        """Writes and returns the scores on the held-out rows of the phase that has `step`."""
        index = next(index for index, phase in enumerate(phases) if step <= phase.stop)
        objective, by_source = setup.phases[index].objective, {}
        for source, rows in phases[index].heldout.items():
            batches = heldout_batches(
                rows, sharding, config.eval_batch_size, config.max_eval_batches
            )
            beat = functools.partial(watchdog.beat, f"evaluating after step {step}")
            by_source[source] = evaluate(objective, eval_steps[index], params, batches, beat)
        scores = metrics.mean_over_sources(by_source, phases[index].stream.weights)
        scores |= perplexities(objective, scores)
        line = scores
        if "perplexity" in scores:
            line = scores | {"unigram_entropy": baseline(index)["unigram_entropy"]}
        write(step, {f"heldout/{name}": value for name, value in line.items()})
        if is_main:
            logging.info("Step %s: %s", f"{step:,}", health.describe(writer.lines, config))
        return scores

    if owes_evaluation:
        evaluate_after(first_step, state.params)
    for phase_setup, length in zip(setup.phases, lengths, strict=True):
        phase, objective = phase_setup.phase, phase_setup.objective
        if first_step >= phase.stop:
            continue
        update_step = make_pretrain_step(
            phase_setup.model,
            setup.optimizer,
            setup.shardings,
            objective,
            seed=config.seed,
            num_microbatches=phase_setup.num_microbatches,
            overlap_collectives=config.overlap_collectives,
        )
        start = max(first_step, phase.start)
        if start == phase.start:
            lowest_loss, recent_losses = None, []
        batches = pretrain_batches(
            phase.stream, sharding, phase.batch_size, start - phase.start, phase.num_steps
        )
        progress.clear()
        logging.info("Compiling the training step ...")
        for step, batch in enumerate(timer.batches(batches), start + 1):
            compiles = step == start + 1
            # The activity until the next beat: this step, its report, the wait for the next batch.
            watchdog.beat(f"running step {step}", limited=not compiles)
            state, step_metrics = update_step(state, batch, frozen)
            unreported.append(step_metrics)
            with timer.waiting_for_devices():
                monitoring.limit_dispatch(unreported)  # Lets the host run only a few steps ahead.
            monitoring.profile(workdir / "profile", step - first_step, profile_steps, state)
            if compiles:
                monitoring.log_first_step(state, f" on rows of {phase.train.max_seq_length} tokens")
                progress.unpause()  # The time left does not count the compilation.
                timer.start(step)  # The first batch waited for the readers to start.
            progress.update()

            stops = stop_request.should_stop()  # All processes agree on the step.
            ends_phase = step == phase.stop
            is_early = forecast.is_early(step, phase, config.log_every)
            reports = is_due(step, config.log_every) or is_early or ends_phase
            evaluates = is_due(step, config.eval_every) and step != num_steps
            saves = is_due(step, config.checkpoint_every) or ends_phase or stops
            saves = saves or step == setup.stable_step
            if not (reports or evaluates or saves):
                continue

            # Waits for the steps. No state is saved after a loss or norm that is not finite.
            with timer.waiting_for_devices():
                unreported = jax.device_get(unreported)
            monitoring.check_finite(unreported, step, checkpointer.last_checkpoint)
            timer.stop()
            if reports:
                values = train_metrics(objective, unreported)
                values |= health.extremes(unreported, recent_losses, config)
                values["learning_rate"] = float(setup.schedule(step - 1))
                values |= timer.measure(step, phase.batch_size, phase_setup.flops_per_row)
                values = metrics.over_processes(values | estimates[phase.name])
                write(step, values)
                if step - start <= config.log_every:
                    progress.clear()  # The log line takes its place; it is redrawn below.
                    rows_left = forecast.flops_left(setup.phases, step) / phase_setup.flops_per_row
                    forecast.log_step(step, values, phase.batch_size, rows_left)
                monitoring.show(progress, values, objective.main_accuracy)
                if not is_early:
                    loss = values["train/loss"]
                    lowest_loss = min(loss, lowest_loss or loss)
                    if config.stop_diverged:
                        schedule = schedule_of(config, phase.name)
                        health.check_diverged(
                            loss,
                            lowest_loss,
                            step,
                            learning_rate=schedule.peak,
                            warmup_steps=schedule.warmup_steps,
                        )
                recent_losses += [float(each["loss"]) for each in unreported]
                recent_losses = recent_losses[-health.SPIKE_WINDOW :]
                unreported.clear()
                checkpointer.check()  # Raises if the last save has failed.
            if evaluates and not stops:
                evaluate_after(step, state.params)
            if saves:
                watchdog.beat(f"saving step {step}", limited=False)
                writer.sync()
                checkpointer.settings = settings | {
                    "architecture": config_to_settings(phase_setup.model.config),
                    "trained_length": length,
                    "unreported": jax.tree.map(float, unreported),
                    # A stop leaves no time for it: the resumed run does it.
                    "owes_evaluation": evaluates and stops,
                    "lowest_loss": lowest_loss,
                    "recent_losses": recent_losses,
                }
                checkpointer.save(state)  # Returns once the state is copied; writes in background.
            if stops:
                checkpointer.wait()
                raise RunStopped(step, stop_request.interrupted)
            # A save has no time limit, the wait for the next batch does.
            watchdog.beat(f"waiting for the batch after step {step}")
            timer.start(step)

    watchdog.beat("waiting for the last save", limited=False)
    checkpointer.wait()
    progress.close()
    # The result of the run: the scores on the held-out rows of the last phase. The unigram baseline
    # is always computed on all of these rows, the scores on at most `max_eval_batches`.
    result = evaluate_after(num_steps, state.params)
    result |= baseline(len(phases) - 1)
    result |= {"steps": num_steps, "seconds": timer.seconds()}
    timer.log()
    if is_main:
        write_json(result_path, result)
    return result


def is_due(step: int, interval: int) -> bool:
    """Returns whether `step` is a multiple of `interval`; never if that is 0."""
    return interval > 0 and step % interval == 0


def train_metrics(objective: Objective, step_metrics: list[dict]) -> dict[str, float]:
    """Returns the training metrics of a report: means over all targets and over the steps."""
    values = monitoring.mean_over_steps(step_metrics)
    values |= mean_metrics(values.pop("sums"))
    values["loss"] = objective.total_loss(values)
    return {f"train/{name}": value for name, value in values.items()}


def make_eval_steps(setup: PretrainSetup, frozen: dict) -> list[Callable]:
    """Returns the jitted (params, rows) -> sums for the objective of each phase."""
    steps = []
    for phase in setup.phases:
        step = make_eval_step(phase.model, setup.mesh, phase.objective, seed=setup.config.seed)
        steps.append(functools.partial(step, frozen=frozen))
    return steps


def run_settings(
    setup: PretrainSetup,
    phases: list[Phase],
    weights: dict[str, LoadedModel | None],
) -> dict:
    """Returns the settings of the run, which checkpoints store.

    A run is resumed only if they are equal, except for the fields of `may_change`. `weights` are
    the models that it reads, by the name of their field.
    """
    corpora = [contents_of(phase) for phase in phases]
    languages = [phase.train.manifest["config"].get("language") for phase in phases]
    return setup.config.to_dict() | {
        "languages": languages,
        "architecture": config_to_settings(setup.model.config),
        "modules": modules_of(setup.abstract_state.params),
        "corpora": corpora,
        "contents": {
            name: parameters_hash(model.params) for name, model in weights.items() if model
        },
    }


def contents_of(phase: Phase) -> dict:
    """Returns what identifies the rows of a phase, wherever its corpora are."""
    first, *others = (
        {name: rows.manifest[name] for name in ("splits", "vocabulary")} for rows in phase.corpora
    )
    if not others:
        return first
    return first | {"mixture": others, "weights": phase.stream.weights}


def read_unreported(settings: dict) -> list[dict]:
    """Returns the metrics, by step, that were not in a report yet when a checkpoint was saved.

    JSON has turned each (sum, count) into a list: these are tuples again.
    """

    def as_tuple(value):
        return tuple(value) if isinstance(value, list) else value

    return [
        jax.tree.map(as_tuple, step, is_leaf=lambda value: isinstance(value, list))
        for step in settings.get("unreported", [])
    ]


def evaluate(
    objective: Objective, eval_step: Callable, params: dict, batches: Iterable, beat: Callable
) -> dict[str, float]:
    """Returns losses (nats) and accuracies over `batches`; calls `beat` before each."""
    sums = []
    for index, rows in enumerate(batches):
        beat(limited=index > 0)  # The first one may compile.
        # `float` waits for the batch. Batches do not depend on each other: devices could otherwise
        # run several at once, in different orders, and their collectives would deadlock.
        sums.append(jax.tree.map(float, eval_step(params, rows)))
    return mean_metrics(jax.tree.map(lambda *values: sum(values), *sums))


def perplexities(objective: Objective, scores: dict[str, float]) -> dict[str, float]:
    """Returns the perplexity of each main loss: the mean's, and with several sources, of each.

    A distilled model may lack the head of the main loss.
    """
    return {
        name.replace(objective.main_loss, "perplexity"): metrics.perplexity(loss)
        for name, loss in scores.items()
        if name.partition("/")[0] == objective.main_loss
    }


if __name__ == "__main__":
    main.start(train_and_evaluate, "pretrain", known_fields)
