"""Fine-tunes a BERT model: `python -m bert_jax.finetune --config=FILE --workdir=DIR`.

Top to bottom: weights, task and devices, then a run for each seed: the loop batch -> step -> report
-> evaluate -> save, and the predictions of the checkpoint with the best score on the dev split.
"""

import contextlib
import json
import pathlib
import shutil
import time

import jax
import tqdm
from absl import logging
from ml_collections import ConfigDict

from bert_jax import partitioning
from bert_jax.data.features import finetune_batches
from bert_jax.interop.parameters import LoadedModel, log_report
from bert_jax.interop.read import read_model
from bert_jax.runtime import distributed, main
from bert_jax.runtime.command_line import NonFiniteLoss, Preempted
from bert_jax.runtime.watchdog import Watchdog
from bert_jax.tasks.seeds import format_scores, seed_directories, summarize_seeds
from bert_jax.tasks.setup import FinetuneSetup, check_numbers, setup_finetuning
from bert_jax.training import finetune_step, metrics
from bert_jax.training.checkpoint import Checkpointer, load_settings, saved_steps, write_checkpoint
from bert_jax.training.workdir import claim_workdir, write_json


def train_and_evaluate(config: ConfigDict, workdir: str | pathlib.Path) -> dict:
    """Runs or resumes the fine-tuning in `workdir` and returns the contents of `result.json`.

    In a multi-process run every process must call it, after `distributed.initialize`.
    """
    workdir = pathlib.Path(workdir)
    main.enable_compilation_cache(workdir)

    # Weights, task and model, and the compiled steps that all seeds share.
    with distributed.raise_on_all_processes():
        setup = prepare(config)
        directories = seed_directories(workdir, config.seed, config.num_seeds)
    update_step = finetune_step.make_finetune_step(
        setup.model, setup.task.head, setup.optimizer, setup.shardings, setup.microbatch_rows
    )
    predict_step = finetune_step.make_predict_step(setup.model, setup.mesh, setup.task.head)

    results, diverged = [], []
    for seed, directory in directories.items():
        try:
            with contextlib.ExitStack() as stack:  # Completes the save in progress.
                results.append(run_seed(setup, update_step, predict_step, seed, directory, stack))
        except NonFiniteLoss as error:
            if len(diverged) + 1 == config.num_seeds:  # All seeds diverged.
                raise
            logging.error("Seed %d diverged: %s", seed, error)
            diverged.append({"seed": seed, "step": error.step})
    if config.num_seeds == 1:
        return results[0]
    result = summarize_seeds(results, setup.task.metric) | {"diverged_seeds": diverged}
    if jax.process_index() == 0:
        write_json(workdir / "result.json", result)
    return result


def prepare(config: ConfigDict) -> FinetuneSetup:
    """Validates the configuration, and reads the weights to start from and the task."""
    check_numbers(config)
    return setup_finetuning(config, *read_weights(config)[:3])


def read_weights(config: ConfigDict) -> LoadedModel:
    """Reads the weights to start from, and logs which tensors were found."""
    if not config.init_from:
        sources = "a workdir, a checkpoint, or a directory of transformers or of Google's release"
        raise ValueError(f"give the weights to start from: --config.init_from=DIR, {sources}")
    source = read_model(config.init_from)
    log_report(config.init_from, source.report)
    return source


def run_seed(
    setup: FinetuneSetup,
    update_step,
    predict_step,
    seed: int,
    workdir: pathlib.Path,
    stack: contextlib.ExitStack,
) -> dict:
    """Runs or resumes one seed in `workdir` and returns the contents of its `result.json`."""
    config, task, num_steps = setup.config, setup.task, setup.num_steps
    is_first = jax.process_index() == 0  # Only this process writes shared files.
    settings = setup.settings | {"seed": seed}
    stack.enter_context(claim_workdir(workdir, settings))
    result_path = workdir / "result.json"
    if result_path.exists():
        logging.info("%s is already finished", workdir)
        return json.loads(result_path.read_text())

    # Initial or restored state.
    watchdog = stack.enter_context(contextlib.closing(Watchdog(config.stall_seconds)))
    checkpointer = Checkpointer(workdir, settings, setup.tokenizer, keep_last=1)
    stack.callback(checkpointer.close)
    first_step = checkpointer.latest_step() or 0
    key = jax.random.key(seed)
    if first_step:
        logging.info("Resuming from step %d in %s", first_step, workdir)
        state = checkpointer.restore(first_step, setup.abstract_state)
    else:
        state = jax.jit(setup.init, out_shardings=setup.shardings)(key, setup.pretrained)

    sharding = partitioning.batch_sharding(setup.mesh)
    writer = metrics.MetricsWriter(workdir, first_step, writes=is_first)
    progress = tqdm.tqdm(
        total=num_steps, initial=first_step, unit="step", mininterval=1.0, disable=not is_first
    )
    preemption = stack.enter_context(contextlib.closing(distributed.Preemption()))
    began = time.monotonic() - writer.seconds  # As if the run had never been interrupted.
    selector, metric = task.selector, task.metric.rpartition("/")[-1]
    best = BestCheckpoint(workdir / "best", setup, settings)
    dropout_key = jax.random.fold_in(key, 1)

    def predict(split, params):
        """Returns the outputs for a split, and its scores and loss where its labels are known."""

        def predict_batch(params, rows):
            watchdog.beat(f"predicting {split.name}")
            return predict_step(params, rows)

        inputs = task.head, split.features, setup.shape, setup.predict_rows, sharding
        outputs, loss = finetune_step.predict(predict_batch, params, *inputs)
        watchdog.beat(f"scoring {split.name}", limited=False)
        scores = split.score(outputs) if split.score else {}
        return outputs, scores | ({"loss": loss} if scores and loss is not None else {})

    batches = finetune_batches(
        task.train,
        setup.shape,
        sharding,
        batch_size=config.batch_size,
        microbatch_rows=setup.microbatch_rows,
        seed=seed,
        start=first_step,
        stop=num_steps,
    )
    logging.info("Compiling the training step ...")
    unreported = []
    for step, (rows, num_microbatches) in enumerate(batches, first_step + 1):
        watchdog.beat(f"running step {step}", limited=step > first_step + 1)
        state, step_metrics = update_step(
            state, rows, num_microbatches, dropout_key, setup.hyperparameters
        )
        unreported.append(step_metrics)
        main.limit_dispatch(unreported)
        progress.update()
        if step == first_step + 1:
            main.log_first_step()
        should_evaluate = (
            step % (config.eval_every or setup.steps_per_epoch) == 0 or step == num_steps
        )
        should_stop = preemption.should_stop_after(step)
        if step % config.log_every == 0 or should_evaluate or should_stop:
            values = main.check_finite(jax.device_get(unreported), step)
            values = {f"train/{name}": float(value) for name, value in values.items()}
            values["learning_rate"] = float(setup.schedule(setup.hyperparameters)(step - 1))
            values["seconds"] = time.monotonic() - began
            writer.write(step, values)
            progress.set_postfix_str(f"loss={values['train/loss']:.3f}")
            unreported = []
        if should_evaluate and selector:
            _, scores = predict(selector, state.params)
            writer.write(step, {f"{selector.name}/{name}": score for name, score in scores.items()})
            epoch = step / setup.steps_per_epoch
            logging.info("Epoch %.2f, %s: %s", epoch, selector.name, format_scores(scores))
            if best.score is None or scores[metric] > best.score:
                watchdog.beat(f"saving step {step} as the best", limited=False)
                best.keep(step, state.params, scores)
        if (should_evaluate and config.save_training_state and step < num_steps) or should_stop:
            watchdog.beat(f"saving step {step}", limited=False)
            checkpointer.save(state)
        if should_stop:
            checkpointer.wait()
            raise Preempted(step, preemption.interrupted)
    progress.close()

    # The best checkpoint (without a dev split or training, the last one) predicts every split.
    watchdog.beat("predicting with the best checkpoint")
    params = state.params
    if best.step is None and not selector:
        best.keep(num_steps, params, {})
    elif best.step not in (None, num_steps):
        params = jax.device_put(read_model(best.directory).params, setup.shardings.params)
    best_step = num_steps if best.step is None else best.step
    result = {"seed": seed, "metric": task.metric, "steps": num_steps, "best_step": best_step}
    # Without a selector, collapse is judged on the first split with labels, or else on the first.
    collapse_split = selector or min(task.splits, key=lambda split: not split.score, default=None)
    predictions = workdir / "predictions"
    for split in task.splits:
        outputs, scores = predict(split, params)
        if scores:
            result[split.name] = scores
            writer.write(num_steps, {f"final/{split.name}/{k}": v for k, v in scores.items()})
            if split is selector and best.step is None:
                best.keep(num_steps, params, scores)
        if split is collapse_split:
            result["collapsed"] = task.head.collapsed(split.features, outputs)
        if is_first:
            predictions.mkdir(exist_ok=True)
            split.write(outputs, predictions)
    result["seconds"] = time.monotonic() - began
    writer.close()
    checkpointer.close()
    if is_first:
        write_json(result_path, result)
        shutil.rmtree(workdir / "checkpoints", ignore_errors=True)  # Nothing resumes from there.
    return result


class BestCheckpoint:
    """The only checkpoint in `directory`; its `step` and `score` are None if there is none."""

    def __init__(self, directory: pathlib.Path, setup: FinetuneSetup, settings: dict):
        self.directory, self.step, self.score = directory, None, None
        self._setup, self._settings = setup, settings
        if steps := saved_steps(directory):
            self.step = steps[-1]
            self.score = load_settings(directory / str(self.step))["score"]

    def keep(self, step: int, params: dict, scores: dict[str, float]) -> None:
        """Writes `params` and their scores as the best checkpoint."""
        task = self._setup.task
        self.step, self.score = step, scores.get(task.metric.rpartition("/")[-1])
        settings = self._settings | {"step": step, "score": self.score, "scores": scores}
        # Kept out of "head", which must not change when a run is resumed; `read_model` merges them.
        settings["tuned_head_settings"] = {name: task.head_settings[name] for name in task.tuned}
        write_checkpoint(self.directory / str(step), params, settings, self._setup.tokenizer)
        for other in saved_steps(self.directory):
            if other != step and jax.process_index() == 0:
                shutil.rmtree(self.directory / str(other))


if __name__ == "__main__":
    main.start(train_and_evaluate, "finetune")
