"""Fine-tunes a BERT model: `python -m bert_jax.finetune --config=FILE --workdir=DIR`.

Top to bottom: weights, task and devices, then the trials: runs that differ only in their seed or in
other numbers train together, as one stack. The loop is batch -> step -> report -> evaluate -> save;
then the checkpoint of each trial with the best score on the dev split predicts every split.
"""

from bert_jax.runtime.command_line import restart_with_huge_pages

if __name__ == "__main__":
    restart_with_huge_pages()  # Before the other imports, which take longer than a second.

import contextlib
import functools
import pathlib
import time
from collections.abc import Sequence

import jax
from absl import logging
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from bert_jax.checkpoints.native import Checkpointer
from bert_jax.checkpoints.parameters import LoadedModel, log_report
from bert_jax.checkpoints.read import read_model
from bert_jax.data.features import finetune_batches
from bert_jax.finetuning.finetune_fields import (
    MAY_CHANGE,
    check_numbers,
    check_required_fields,
    known_fields,
)
from bert_jax.finetuning.finetune_setup import (
    FinetuneSetup,
    check_against_weights,
    check_trains,
    setup_finetuning,
)
from bert_jax.finetuning.finetune_teacher import with_teacher
from bert_jax.finetuning.stacks import Stack, saved_trials, trial_name
from bert_jax.finetuning.step import Prediction, predict
from bert_jax.finetuning.task_data import read_task_data
from bert_jax.finetuning.trials import (
    Trial,
    labels_of_run,
    rank_of,
    seed_directories,
    stack_trees,
    summarize_seeds,
)
from bert_jax.runtime import distributed, main
from bert_jax.runtime.buckets import as_path, remove_tree
from bert_jax.runtime.errors import Diverged, RunStopped
from bert_jax.runtime.watchdog import Watchdog
from bert_jax.sharding.mesh import batch_sharding
from bert_jax.tasks.task import Split
from bert_jax.training import monitoring
from bert_jax.training.trackers import check_tracker
from bert_jax.training.workdir import claim_workdir, write_json


def train_and_evaluate(config: ConfigDict, workdir: str | pathlib.Path) -> dict:
    """Runs or resumes the fine-tuning in `workdir` and returns the contents of `result.json`.

    Adds "model", the directory that `bert_jax.load` takes: of several seeds, the one
    with the best score on the selection split (the first without such a split). From Python, lock
    the configuration, so that a mistyped field is an error; an interrupted run raises RunStopped
    and resumes when called again. In a multi-process run every process must call it, after
    `distributed.initialize`. Raises ValueError or OSError for invalid settings or files, and
    Diverged if no seed has a finite loss.
    """
    with distributed.raise_on_all_processes():
        workdir = as_path(workdir)
        directories = seed_directories(workdir, config.seed, config.num_seeds)
        setup = prepare(config, labels_of_run(directories.values()))
    monitoring.enable_compilation_cache(workdir)
    trials = [Trial(with_seed(config, seed), path) for seed, path in directories.items()]
    results = run_trials(setup, trials, workdir)
    finished = [result for result in results if "diverged" not in result]
    diverged = [result for result in results if "diverged" in result]
    if not finished:
        raise Diverged(results[0]["message"], results[0]["diverged"])
    if config.num_seeds == 1:
        return results[0] | {"model": str(workdir)}
    result = summarize_seeds(finished, setup.data.task.metric) | {
        "diverged_seeds": [{"seed": each["seed"], "step": each["diverged"]} for each in diverged]
    }
    if jax.process_index() == 0:
        write_json(workdir / "result.json", result)
    best = max(finished, key=lambda each: rank_of(each, setup.data.task.metric))
    return result | {"model": str(directories[best["seed"]])}


def prepare(config: ConfigDict, labels_of_run: Sequence[str] = ()) -> FinetuneSetup:
    """Validates the configuration, and reads the weights to start from and the task.

    `labels_of_run` are the labels of the run to resume, whose order it keeps; () for a new run.
    """
    check_required_fields(config)
    check_numbers(config)
    check_trains(config)
    check_tracker(config.tracker)
    source = read_weights(config.init_from)
    check_against_weights(config, source.settings)
    data = read_task_data(config, source, labels_of_run)
    data = with_teacher(config, data)
    return setup_finetuning(config, source, data)


def read_weights(init_from: str) -> LoadedModel:
    """Reads the weights to start from, and logs which tensors were found."""
    if not init_from:
        sources = "a workdir, a checkpoint, or a transformers or Google directory"
        raise ValueError(f"no weights to start from: set config.init_from=DIR, {sources}")
    source = read_model(init_from)
    log_report(init_from, source.report)
    return source


def with_seed(config: ConfigDict, seed: int) -> ConfigDict:
    """Returns a copy of the configuration with another seed."""
    config = config.copy_and_resolve_references()
    config.seed = seed
    return config


def run_trials(
    setup: FinetuneSetup, trials: Sequence[Trial], directory: pathlib.Path, prune_from: int = 0
) -> list[dict]:
    """Runs or resumes `trials` as one stack; returns the contents of their `result.json`.

    Trials differ at most in `PER_TRIAL`; each gets the result of a run alone, up to rounding. Their
    common training state is in `directory`. A trial that diverged has its step under "diverged".
    From evaluation number `prune_from` on (0: never), trials below the median of the others stop.
    """
    all_finished = all(trial.result for trial in trials)
    saved = [] if all_finished else saved_trials(directory)
    with contextlib.ExitStack() as claims:
        for trial in trials:
            settings = setup.settings(trial.config)
            claims.enter_context(claim_workdir(trial.workdir, settings, MAY_CHANGE))
        # A resumed stack includes its finished trials: its size changes the rounding of the others.
        # Trials that were added since then train as another stack.
        begun = [trial for trial in trials if trial_name(trial, directory) in saved]
        added = [trial for trial in trials if not trial.result and trial not in begun]
        for stack in (begun, added):
            if all(trial.result for trial in stack):
                remove_training_state(directory)  # A run killed after its last result leaves it.
            else:
                others = [trial.result or {} for trial in trials if trial not in stack]
                num_diverged = sum("diverged" in result for result in others)
                run_stack(setup, stack, directory, prune_from, num_diverged)
    return [trial.result for trial in trials]


def run_stack(
    setup: FinetuneSetup,
    trials: Sequence[Trial],
    directory: pathlib.Path,
    prune_from: int = 0,
    num_diverged: int = 0,
) -> None:
    """Trains `trials` from their last checkpoint, if there is one, and writes their results.

    `num_diverged` trials have diverged and left the stack before. Raises RunStopped after a signal
    to stop.
    """
    config, data = setup.config, setup.data
    eval_every = config.eval_every or setup.steps_per_epoch
    sharding = NamedSharding(setup.mesh, P("trial", *batch_sharding(setup.mesh).spec))
    with contextlib.ExitStack() as exit_stack:  # Completes the current save, however it ends.
        watchdog = exit_stack.enter_context(contextlib.closing(Watchdog(config.stall_seconds)))
        checkpointer = Checkpointer(directory, {}, setup.tokenizer, keep_last=1)
        exit_stack.callback(checkpointer.close)
        stack = Stack(setup, trials, directory, checkpointer, num_diverged)
        for run in stack.runs:
            exit_stack.callback(run.writer.close)
        state = stack.initial_state()
        progress = monitoring.progress_bar(stack.first_step, stack.num_steps)
        stop_request = exit_stack.enter_context(contextlib.closing(distributed.StopRequest()))
        # When the run would have begun without its interruptions.
        began = time.monotonic() - max(run.writer.seconds for run in stack.runs)
        predict_with = functools.partial(predict_split, setup, watchdog)

        while not stack.is_finished:  # Up to the end of the shortest trials; the others continue.
            state = stack.begin(state)
            members = stack.members
            # The key of a run itself has initialized its parameters.
            dropout_keys = stack_trees([jax.random.fold_in(run.key, 1) for run in members])
            hyperparameters = stack_trees([run.hyperparameters for run in members])
            batches = finetune_batches(
                data.task.train,
                data.train_shape,
                sharding,
                batch_size=config.batch_size,
                rows_per_microbatch=setup.rows_per_microbatch,
                seeds=[run.seed for run in members],
                start=stack.start,
                stop=stack.stop,
                is_compared=data.task.head.batch_loss is not None,
            )
            logging.info("Compiling the training step ...")
            compiled_shapes = set()  # Of rows: a batch in one microbatch may have its own program.
            for step, (rows, num_microbatches) in enumerate(batches, stack.start + 1):
                shape = jax.tree.leaves(rows)[0].shape
                compiles = shape not in compiled_shapes
                compiled_shapes.add(shape)
                watchdog.beat(f"running step {step}", limited=not compiles)
                state, step_metrics = setup.steps.update(
                    state, rows, num_microbatches, dropout_keys, hyperparameters, stack.frozen
                )
                stack.unreported.append(step_metrics)
                monitoring.limit_dispatch(stack.unreported)
                if step == stack.first_step + 1:
                    progress.unpause()  # The time left does not count the compilation.
                    monitoring.log_first_step(state)
                progress.update()

                stops = stop_request.should_stop()  # All processes agree on the step.
                ends_trials = step == stack.stop
                ends_interval = step % eval_every == 0
                reports = step % config.log_every == 0 or ends_interval or ends_trials
                evaluates = data.task.selection_split and (ends_interval or ends_trials)
                if reports:
                    loss = stack.report(step, time.monotonic() - began)
                    progress.set_postfix_str(f"loss={loss:.3f}")
                if stack.is_finished:  # All trials have diverged.
                    break
                if evaluates:
                    evaluated = stack.runs if ends_interval else stack.ending
                    prunes = ends_interval and 0 < prune_from <= step // eval_every
                    stack.evaluate(
                        step, state.params, evaluated, predict_with, watchdog.beat, prunes
                    )
                    ends_trials = step == stack.stop  # Also by their patience, or by pruning.
                keeps_state = config.save_training_state and step < stack.num_steps
                if stops or (ends_interval and keeps_state):
                    watchdog.beat(f"saving step {step}", limited=False)
                    stack.save(state)
                if stops:
                    checkpointer.wait()
                    raise RunStopped(step, stop_request.interrupted)
                if ends_trials:
                    break
            stack.finish(state.params, predict_with, began, watchdog.beat)
        progress.close()
    remove_training_state(directory)
    if stop_request.requested_at_end:  # After the last step; other trials may be left to train.
        raise RunStopped(stack.stop, stop_request.interrupted)


def predict_split(
    setup: FinetuneSetup, watchdog: Watchdog, split: Split, params: dict, frozen: dict | None
) -> list[Prediction]:
    """Returns the prediction of each trial of a stack for a split; `frozen` as in `predict`."""
    predictions = predict(
        setup.steps.predict,
        params,
        setup.data.task.head,
        split.features,
        setup.data.shape,
        setup.rows_per_prediction,
        batch_sharding(setup.mesh),
        beat=functools.partial(watchdog.beat, f"predicting {split.name}"),
        frozen=frozen,
    )
    watchdog.beat(f"scoring {split.name}", limited=False)
    return predictions


def remove_training_state(directory: pathlib.Path) -> None:
    """Removes the checkpoints of a stack whose trials have ended, from which nothing resumes."""
    with distributed.raise_on_all_processes():
        if jax.process_index() == 0:
            remove_tree(directory / "checkpoints")


if __name__ == "__main__":
    main.start(train_and_evaluate, "finetune", known_fields)
