"""Pre-trains a BERT model: `python -m bert_jax.pretrain --config=FILE --workdir=DIR`.

Top to bottom: corpus, model and devices, state, then the loop: batch -> step -> report -> evaluate
-> save. A run resumes from the last checkpoint, and neither repeats nor skips a step.
"""

from bert_jax.runtime.command_line import restart_with_huge_pages

if __name__ == "__main__":
    restart_with_huge_pages()  # Before the other imports, which take longer than a second.

import contextlib
import functools
import itertools
import json
import pathlib
import time
from collections.abc import Callable

import jax
from absl import logging
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict

from bert_jax.checkpoints.native import Checkpointer, find_checkpoint, load_settings
from bert_jax.checkpoints.parameters import (
    LoadedModel,
    log_report,
    modules_of,
    trained_length,
)
from bert_jax.checkpoints.read import read_model
from bert_jax.configs.pretrain import bert_base
from bert_jax.data.batches import heldout_batches, pretrain_batches
from bert_jax.model.architecture import config_to_settings
from bert_jax.objectives import Objective, mean_metrics
from bert_jax.runtime import distributed, main
from bert_jax.runtime.buckets import as_path
from bert_jax.runtime.config_fields import check_fields
from bert_jax.runtime.errors import RunStopped
from bert_jax.runtime.watchdog import Watchdog
from bert_jax.sharding.mesh import batch_sharding
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training import forecast, metrics, monitoring
from bert_jax.training.goodput import StepTimer
from bert_jax.training.optimizer import with_moments
from bert_jax.training.pretrain_setup import (
    Phase,
    PretrainSetup,
    check_numbers,
    check_segments,
    open_phases,
    setup_pretraining,
)
from bert_jax.training.pretrain_step import make_eval_step, make_pretrain_step
from bert_jax.training.pretrain_teacher import place_frozen, read_teacher, student_weights
from bert_jax.training.state import TrainState, parameters_hash
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
        check_required_fields(config)
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
            source_settings=source and source.settings,
            teacher_settings=teacher and teacher.settings,
        )
        check_segments(phases, setup.model.config)
        modules = modules_of(setup.abstract_state.params)
        source = source and keep_modules(source, setup)
        source = source or student_weights(setup, phases[0], teacher)
        sharding = batch_sharding(setup.mesh)

    # The configuration is valid: claim the workdir.
    watchdog.beat("claiming the workdir with all processes")
    settings = run_settings(setup, phases, modules, {"init_from": source, "teacher": teacher})
    exit_stack.enter_context(claim_workdir(workdir, settings))
    monitoring.enable_compilation_cache(workdir)
    kept = {"keep_last": config.keep_checkpoints, "keep_every": config.keep_every}
    checkpointer = Checkpointer(workdir, settings, tokenizer, checksums=config.checksums, **kept)
    exit_stack.callback(checkpointer.close)

    # Initial or restored state.
    first_step = checkpointer.latest_step() or 0
    result_path = workdir / "result.json"
    if first_step == num_steps and result_path.exists():
        logging.info("%s is already finished", workdir)
        return json.loads(result_path.read_text(encoding="utf-8"))
    profile_steps = min(config.profile_steps, max(num_steps - first_step - 2, 0))
    forecast.log_run(setup, phases, first_step)
    if first_step:
        logging.info("Resuming from step %d in %s", first_step, workdir)
        watchdog.beat(f"restoring step {first_step}")
        state = checkpointer.restore(first_step, setup.abstract_state)
        saved = load_settings(checkpointer.directory / str(first_step))
        # Metrics since the last report: with them, the next one is that of an uninterrupted run.
        unreported, owes_evaluation = read_unreported(saved), saved.get("owes_evaluation", False)
    else:
        unreported, owes_evaluation = [], False
        watchdog.beat("initializing the parameters")
        state = initial_state(setup, source, checkpointer)
    frozen = place_frozen(setup, phases[0], teacher)
    lengths = trained_lengths(phases, source)
    del source, teacher

    writer = metrics.MetricsWriter(
        workdir, first_step, writes=is_main, tracker=config.tracker, settings=config.to_dict()
    )
    exit_stack.callback(writer.close)
    timer = StepTimer(workdir, writer, started, writes=is_main)
    progress = monitoring.progress_bar(first_step, num_steps)
    preemption = exit_stack.enter_context(contextlib.closing(distributed.Preemption()))

    objectives = [setup.objective(phase) for phase in phases]
    eval_steps = make_eval_steps(setup, objectives, frozen)

    def evaluate_after(step: int, params: dict) -> dict[str, float]:
        """Writes and returns the scores on the held-out rows of the phase of `step`."""
        index = next(index for index, phase in enumerate(phases) if step <= phase.stop)
        beat = functools.partial(watchdog.beat, f"evaluating after step {step}")
        objective, eval_step = objectives[index], eval_steps[index]
        scores = evaluate(objective, eval_step, params, phases[index], sharding, config, beat)
        writer.write(step, {f"heldout/{name}": value for name, value in scores.items()})
        return scores

    if owes_evaluation:
        evaluate_after(first_step, state.params)
    for phase, objective, length in zip(phases, objectives, lengths, strict=True):
        if first_step >= phase.stop and phase.stop != num_steps:
            continue
        update_step = make_pretrain_step(
            setup.model,
            setup.optimizer,
            setup.shardings,
            objective,
            seed=config.seed,
            num_microbatches=setup.num_microbatches(phase),
            overlap_collectives=config.overlap_collectives,
        )
        rows, row_flops = phase.train, setup.flops_per_row(phase)
        start = max(first_step, phase.start)
        batches = pretrain_batches(
            rows, sharding, phase.batch_size, start - phase.start, phase.num_steps
        )
        progress.clear()
        logging.info("Compiling the training step ...")
        waits = []
        for step, batch in enumerate(metrics.timed(batches, waits), start + 1):
            compiles = step == start + 1
            watchdog.beat(f"running step {step}", limited=not compiles)
            state, step_metrics = update_step(state, batch, frozen)
            unreported.append(step_metrics)
            monitoring.limit_dispatch(unreported)
            monitoring.profile(workdir / "profile", step - first_step, profile_steps, state)
            if compiles:
                progress.unpause()  # The time left does not count the compilation.
            progress.update()
            if compiles:
                monitoring.log_first_step(state, f" on rows of {rows.max_seq_length} tokens")
                timer.start(step)

            is_early = forecast.is_early(step, phase, config.log_every)
            should_report = is_early or step % config.log_every == 0 or step == phase.stop
            is_due = config.eval_every and step % config.eval_every == 0
            should_evaluate = is_due and step != num_steps
            should_stop = preemption.should_stop()
            should_save = step % config.checkpoint_every == 0 or step == phase.stop or should_stop
            if should_report or should_save:  # Never save a state with a non-finite loss.
                values = monitoring.check_finite(jax.device_get(unreported), step)
            if pauses := should_report or should_evaluate or should_save:
                timer.stop()
            if should_report:
                values = train_metrics(setup, objective, step, values)
                values["data_wait_seconds"] = sum(waits) / len(waits)  # per step
                values |= timer.measure(step, phase.batch_size, row_flops)
                writer.write(step, values)
                if is_early or step - start <= config.log_every:
                    progress.clear()  # The line of the log replaces the bar, which follows it.
                    flops = forecast.flops_left(setup, phases, step)
                    forecast.log_step(step, values, phase.batch_size, flops / row_flops)
                monitoring.show(progress, values, objective.main_accuracy)
                unreported, waits[:] = [], []
                checkpointer.check()
            # A stop leaves no time for it: the resumed run does it.
            owes_evaluation = bool(should_evaluate and should_stop)
            if should_evaluate and not should_stop:
                evaluate_after(step, state.params)
            if should_save:
                watchdog.beat(f"saving step {step}", limited=False)
                writer.sync()
                waiting = jax.tree.map(float, jax.device_get(unreported))
                checkpointer.settings = settings | {
                    "trained_length": length,
                    "unreported": waiting,
                    "owes_evaluation": owes_evaluation,
                }
                checkpointer.save(state)
            if should_stop:
                checkpointer.wait()
                raise RunStopped(step, preemption.interrupted)
            if pauses:
                timer.start(step)

    # The evaluation on the last phase's rows is the result of the run.
    watchdog.beat("waiting for the last save", limited=False)
    checkpointer.wait()
    progress.close()
    scores = evaluate_after(num_steps, state.params)
    result = scores | metrics.unigram_baseline(
        phases[-1].heldout.count_tokens(), tokenizer.special_ids
    )
    result |= {"steps": num_steps, "seconds": timer.seconds()}
    timer.log()
    if is_main:
        write_json(result_path, result)
    return result


def check_required_fields(config: ConfigDict) -> None:
    """Raises ValueError if `config` lacks a field, instead of a default that would hide a typo.

    Those of `model` have defaults: the size's, or the weights' to start from.
    """
    expected = bert_base.get_config()
    del expected.program
    expected.model = ConfigDict()
    check_fields(config, expected, "configs/pretrain/bert_base.py")


def train_metrics(
    setup: PretrainSetup, objective: Objective, step: int, values: dict
) -> dict[str, float]:
    """Returns the metrics of training up to `step` from the mean `values` of its steps."""
    values = values | mean_metrics(values["sums"])
    del values["sums"]
    values["loss"] = objective.total_loss(values)
    values = {f"train/{name}": value for name, value in values.items()}
    return values | {"learning_rate": float(setup.schedule(step - 1))}


def make_eval_steps(
    setup: PretrainSetup, objectives: list[Objective], frozen: dict
) -> list[Callable]:
    """Builds the jitted (params, rows) -> sums of each objective."""
    steps = []
    for objective in objectives:
        step = make_eval_step(setup.model, setup.mesh, objective, seed=setup.config.seed)
        steps.append(functools.partial(step, frozen=frozen))
    return steps


def initial_state(
    setup: PretrainSetup, source: LoadedModel | None, checkpointer: Checkpointer
) -> TrainState:
    """Returns the state before the first step, with the weights and moments to start from."""
    config, init = setup.config, jax.jit(setup.init, out_shardings=setup.shardings)
    state = init(jax.random.key(config.seed), pretrained=source and source.params)
    if not config.init_optimizer:
        return state
    saved = checkpointer.restore(find_checkpoint(config.init_from), setup.abstract_state)
    return state.replace(opt_state=with_moments(state.opt_state, saved.opt_state))


def run_settings(
    setup: PretrainSetup,
    phases: list[Phase],
    modules: list[str],
    weights: dict[str, LoadedModel | None],
) -> dict:
    """Returns what checkpoints store of the run; it is resumed only with the same.

    `weights` are those that it reads, by the name of their field.
    """
    corpora = [
        {name: phase.train.manifest[name] for name in ("splits", "vocabulary")} for phase in phases
    ]
    languages = [phase.train.manifest["config"].get("language") for phase in phases]
    return setup.config.to_dict() | {
        "languages": languages,
        "architecture": config_to_settings(setup.model.config),
        "modules": modules,
        "corpora": corpora,
        "contents": {
            name: parameters_hash(model.params) for name, model in weights.items() if model
        },
    }


def read_unreported(settings: dict) -> list[dict]:
    """Returns the metrics of the steps up to a checkpoint that are not in a report yet."""

    def as_tuple(value):
        return tuple(value) if isinstance(value, list) else value

    return [
        jax.tree.map(as_tuple, step, is_leaf=lambda value: isinstance(value, list))
        for step in settings.get("unreported", [])
    ]


def trained_lengths(phases: list[Phase], source: LoadedModel | None) -> list[int | None]:
    """Returns the length up to which positions are trained after each phase; None if unknown."""
    trained = trained_length(source.settings) if source else 0
    if trained is None:
        return [None] * len(phases)
    lengths = itertools.accumulate((phase.train.max_seq_length for phase in phases), max)
    return [max(length, trained) for length in lengths]


def read_source(config: ConfigDict, tokenizer: Tokenizer) -> LoadedModel | None:
    """Reads `config.init_from`, if given. Raises ValueError if the run cannot start from it."""
    source = read_model(config.init_from) if config.init_from else None
    settings = source.settings if source and "training" in source.report.unused else {}
    optimizer = None if "head" in settings else settings.get("optimizer")  # Not fine-tuning's.
    if config.init_optimizer and optimizer != config.optimizer:
        raise ValueError(
            f"--config.init_optimizer needs a pre-training run with optimizer {config.optimizer}, "
            f"and init_from={config.init_from!r} is none: set it to one, or init_optimizer=False"
        )
    if not source:
        return None
    log_report(config.init_from, source.report)
    if source.tokenizer.sha256 != tokenizer.sha256:
        raise ValueError(
            f"the corpus was not built with the tokenizer of the weights in {config.init_from}: "
            f"build it with their {source.tokenizer.filename} (SHA-256 {source.tokenizer.sha256}), "
            "or for a model of transformers with --vocab=DIR"
        )
    return source


def keep_modules(source: LoadedModel, setup: PretrainSetup) -> LoadedModel:
    """Returns the weights that the model of `setup` starts from; logs what is fresh.

    Raises ValueError if a module has other parameters in the weights.
    """
    config, modules = setup.config, modules_of(setup.abstract_state.params)
    fresh = sorted(set(modules) - set(source.settings["modules"]))
    names = ", ".join(fresh + ["optimizer"] * (not config.init_optimizer)) or "nothing"
    logging.info("Starting from %s; newly initialized: %s", config.init_from, names)
    params = flatten_dict(source.params, sep="/")
    kept = tuple(f"{module}/" for module in modules)
    params = {path: leaf for path, leaf in params.items() if path.startswith(kept)}
    expected = flatten_dict(setup.abstract_state.params, sep="/")
    for module in set(modules) - set(fresh):
        found, wanted = (
            {path: leaf.shape for path, leaf in tree.items() if path.startswith(f"{module}/")}
            for tree in (params, expected)
        )
        for path in sorted(found | wanted):
            if found.get(path) != wanted.get(path):
                raise ValueError(
                    f"{path} is {found.get(path, 'absent')} in {config.init_from}, but "
                    f"{wanted.get(path, 'absent')} in this run: set the fields that decide the "
                    f"size of {module}, such as config.generator's, as that run did"
                )
    return source._replace(params=unflatten_dict(params, sep="/"))


def evaluate(
    objective: Objective, eval_step, params, phase, sharding, config, beat
) -> dict[str, float]:
    """Returns losses (nats), perplexity and accuracies over the phase's held-out rows.

    Takes at most `config.max_eval_batches` batches (0: all), and calls `beat` for each.
    """
    sums = []
    batches = heldout_batches(phase.heldout, sharding, config.eval_batch_size)
    for index, rows in enumerate(itertools.islice(batches, config.max_eval_batches or None)):
        beat(limited=index > 0)  # The first one may compile.
        # Waits for the batch. Evaluations do not depend on each other, so devices may run several
        # at once in different orders, and their collectives then wait for each other forever.
        sums.append(jax.tree.map(float, eval_step(params, rows)))
    scores = mean_metrics(jax.tree.map(lambda *values: sum(values), *sums))
    if objective.main_loss not in scores:  # A distilled model may lack a masked-LM head.
        return scores
    return scores | {"perplexity": metrics.perplexity(scores[objective.main_loss])}


if __name__ == "__main__":
    main.start(train_and_evaluate, "pretrain")
