"""Fine-tunes a BERT: `python -m bert_jax.finetune --config=FILE --workdir=DIR`.

Top to bottom: weights and task, devices, and for each seed a run of its own: step -> evaluate ->
save, then the predictions of the checkpoint that did best on the development set.
"""

import contextlib
import dataclasses
import importlib
import json
import math
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping
from types import ModuleType

import jax
import jax.numpy as jnp
import tqdm
from absl import logging
from ml_collections import ConfigDict

from bert_jax import partitioning
from bert_jax.data.features import RowShape, batch_features, steps_per_epoch, train_batches
from bert_jax.interop.parameters import LoadedModel, table_of_tensors
from bert_jax.interop.read import abstract_params, read_model
from bert_jax.model.config import BertConfig
from bert_jax.model.heads import POOLED, make_model
from bert_jax.runtime import distributed
from bert_jax.runtime import main as command
from bert_jax.runtime.huge_pages import restart_with_huge_pages
from bert_jax.runtime.watchdog import Watchdog
from bert_jax.tasks.seeds import collapsed, directories_of_seeds, shown, summary, table_of_seeds
from bert_jax.tasks.task import Task
from bert_jax.tokenization import Tokenizer
from bert_jax.training import finetune_step as task_step
from bert_jax.training import metrics
from bert_jax.training.checkpoint import (
    Checkpointer,
    load_checkpoint,
    load_settings,
    saved_steps,
    write_checkpoint,
)
from bert_jax.training.optimizer import frozen, linear_schedule, make_optimizer
from bert_jax.training.pretrain_step import TrainState
from bert_jax.training.settings import check_bounds
from bert_jax.training.workdir import claim_together, write_json


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What all seeds share: the task and the model, laid out and ready to compile once."""

    config: ConfigDict
    task: Task
    tokenizer: Tokenizer
    loaded: dict
    settings: dict
    shape: RowShape
    chunk_rows: int  # In training.
    eval_rows: int
    num_steps: int
    schedule: Callable
    init: Callable[[jax.Array, dict], TrainState]
    layout: TrainState
    update_step: Callable
    predict_step: Callable


def train_and_evaluate(config: ConfigDict, workdir: str) -> dict:
    """Runs, or goes on with, the fine-tuning in `workdir`; returns what `result.json` holds.

    With several seeds each has a directory of its own, `seed_N`. Every process of a run of several
    calls it, after `distributed.join`.
    """
    workdir = pathlib.Path(workdir)
    command.keep_compiled(workdir)
    with distributed.errors_shared():
        experiment = prepare(config)
        directories = directories_of_seeds(workdir, config.seed, config.num_seeds)
    if config.num_seeds == 1:
        return run_seed(experiment, config.seed, workdir)
    results = []
    for seed, directory in directories.items():
        results.append(run_seed(experiment, seed, directory))
        logging.info("Seeds so far:\n%s", table_of_seeds(results))
    result = summary(results, experiment.task.metric)
    if jax.process_index() == 0:
        write_json(workdir / "result.json", result)
    return result


def prepare(config: ConfigDict) -> Experiment:
    """Reads weights and examples, and lays the model out; raises for all that can be wrong."""
    check_numbers(config)
    if not config.init_from:
        raise ValueError(
            "give the weights to start from: --config.init_from=DIR, a workdir or checkpoint, or a "
            "directory of transformers or of Google's release"
        )
    source = read_model(config.init_from)
    logging.info("Read from %s:\n%s", config.init_from, table_of_tensors(source.report))
    task = task_module(config.task).get_task(with_labels(config, source), source.tokenizer)
    fields = {name: value for name, value in config.model.items() if value is not None}
    bert = BertConfig(**(source.settings["bert"] | {"dtype": "float32"} | fields))
    head = {"task": task.kind, "labels": list(task.labels), **task.settings}
    loaded = wanted_params(source, head, config.new_head)
    if "head" in loaded:
        found = source.settings["head"]
        task.settings.update({name: found[name] for name in task.tuned if name in found})
        head |= task.settings
    model = make_model(bert, head)
    num_steps = round(config.num_epochs * steps_per_epoch(len(task.train), config.batch_size))
    if not num_steps and task.labels and "head" not in loaded:
        why = (
            f"num_epochs is {config.num_epochs:g}" if task.train else "there is nothing to train on"
        )
        raise ValueError(
            f"{why}, and {config.init_from} has no head for this task, or new_head leaves it out: "
            "give the workdir of a run that trained one"
        )

    mesh = partitioning.make_mesh(**config.mesh)
    shape = row_shape(config, task, source.tokenizer.pad_id)
    eval_rows = task_step.rows_at_once(shape.length, config.per_device_batch_size, mesh)
    chunk_rows = eval_rows
    if task.train and not config.per_device_batch_size:
        in_batches, num_shards = rows_of_batches(task, shape, config), mesh.shape["data"]
        chunk_rows = task_step.fit_chunks(eval_rows, in_batches, num_shards * mesh.shape["fsdp"])
    if shape.length > bert.max_position_embeddings * shape.sequences_per_feature:
        raise ValueError(
            f"max_seq_length is {config.max_seq_length}, but the position table of "
            f"{config.init_from} ends at {bert.max_position_embeddings}"
        )
    schedule = linear_schedule(
        config.learning_rate, max(num_steps, 1), round(config.warmup_fraction * num_steps)
    )
    optimizer = make_optimizer(
        config.optimizer, schedule, weight_decay=config.weight_decay, clip_norm=config.clip_norm
    )
    if head["task"] == "feature_based":
        optimizer = frozen(optimizer, ("bert",))

    def init(key, loaded):
        row = {name: jnp.asarray(values) for name, values in shape.empty(1).items()}
        fresh = model.init(key, row)["params"]
        params = fresh | loaded | {"bert": fresh["bert"] | loaded["bert"]}
        return TrainState(jnp.zeros([], jnp.int32), params, optimizer.init(params))

    abstract = jax.eval_shape(init, jax.random.key(0), loaded)
    layout = partitioning.shardings(abstract, mesh, partitioning.TASK_RULES)
    absent = ["mlm", "nsp", *([] if task.kind in POOLED else ["bert/pooler"])]
    resolved = config.to_dict() | {
        "bert": dataclasses.asdict(bert),
        "head": head,
        "absent": absent,
        "num_steps": num_steps,
    }
    log_task(task, shape, num_steps)
    return Experiment(
        config=config,
        task=task,
        tokenizer=source.tokenizer,
        loaded=loaded,
        settings=resolved,
        shape=shape,
        chunk_rows=chunk_rows,
        eval_rows=eval_rows,
        num_steps=num_steps,
        schedule=schedule,
        init=init,
        layout=layout,
        update_step=task_step.make_update_step(model, optimizer, layout, chunk_rows),
        predict_step=task_step.make_predict_step(model, mesh),
    )


def task_module(name: str) -> ModuleType:
    """The file of `bert_jax.tasks` with this name; ValueError if there is none."""
    try:
        return importlib.import_module(f"bert_jax.tasks.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"bert_jax.tasks.{name}":
            raise
        raise ValueError(
            f"--config.task={name}: expected the name of a file in bert_jax/tasks"
        ) from error


def with_labels(config: ConfigDict, source: LoadedModel) -> ConfigDict:
    """With nothing to train on the labels are those of the head, unless they are given.

    Raises ValueError if there is no head for the task either, and as `check_alike`.
    """
    data = config.data
    # An empty flag is one empty label.
    if data.get("train", True) or "labels" not in data or any(map(str, data.labels)):
        return config
    found = source.settings["head"] if "head" in source.params else None
    wanted = {
        "text_classification": "regression" if data.get("regression") else "classification",
        "tagging": "tagging",
        "feature_based": "feature_based",
    }.get(config.task)  # None: of a task of one's own.
    if not found or wanted not in (None, found["task"]):
        has, mend = "no head", ""
        if found:
            has = f"a head for {found['task']}, not for {wanted}"
            if {wanted, found["task"]} == {"classification", "regression"}:
                mend = f", or set --config.data.regression={found['task'] == 'regression'}"
        raise ValueError(
            f"there is nothing to train on, and {config.init_from} has {has}: give "
            "--config.data.train=FILE, or as --config.init_from the workdir of a run that trained "
            f"one{mend}"
        )
    check_alike(found, data)
    config = config.copy_and_resolve_references()
    config.data.labels = tuple(found["labels"])
    return config


def check_numbers(config: ConfigDict) -> None:
    """ValueError for a number that can mean nothing."""
    check_bounds(
        config,
        ("num_epochs per_device_batch_size eval_every weight_decay seed", 0, math.inf),
        ("num_seeds batch_size log_every stall_seconds", 1, math.inf),
        ("max_seq_length", 8, math.inf),
        ("learning_rate clip_norm", 1e-30, math.inf),
        ("warmup_fraction", 0, 1),
    )


def wanted_params(source: LoadedModel, head: dict, new_head: bool) -> dict:
    """Of the weights read, those that the task's model has: the encoder, and a head that fits.

    Raises ValueError if `source` has a head for the same kind of task with other labels, and as
    `check_alike`.
    """
    bert = dict(source.params["bert"])
    if head["task"] not in POOLED:
        bert.pop("pooler", None)
    elif "pooler" not in bert:
        logging.warning(
            "The weights have no pooler: it starts from random values, as the head does"
        )
    if "head" not in source.params:
        return {"bert": bert}
    found = source.settings["head"]
    if found["task"] != head["task"] or new_head:
        why = "new_head is set" if new_head else f"this task's is for {head['task']}"
        logging.info("The head that the weights have, for %s, is left out: %s", found["task"], why)
        return {"bert": bert}
    check_alike(found, head)
    if found["labels"] != head["labels"] and head["task"] != "regression":  # A value has no labels.
        raise ValueError(
            f"the weights have a head for the labels {', '.join(found['labels'])}, and the task "
            f"has {', '.join(head['labels'])}: set --config.new_head=True to put a new one on, or "
            "name the labels in the head's order in --config.data.labels"
        )
    if "scheme" in head and "scheme" not in found:
        logging.warning(
            "The head does not say which scheme its tags are of: they are taken for "
            "--config.data.scheme=%s",
            head["scheme"],
        )
    logging.info("Starting from the head that the weights have for these labels")
    return {"bert": bert, "head": source.params["head"]}


def check_alike(found: Mapping, given: Mapping) -> None:
    """ValueError if the head `found` reads other features, or was trained on other tags, than are
    `given`; what either does not say is not compared."""
    for flag in ("features", "lstm_size", "data.scheme", "data.document_context"):
        name = flag.removeprefix("data.")
        if name in found and name in given and found[name] != given[name]:
            raise ValueError(
                f"the weights have a head with {name}={found[name]}, and the task says "
                f"{given[name]}: set --config.new_head=True to put a new one on, or "
                f"--config.{flag}={found[name]}"
            )


def row_shape(config: ConfigDict, task: Task, pad_id: int) -> RowShape:
    """Rows that hold any feature of the task: `max_seq_length` for each of its sequences."""
    each = len((task.train or task.splits[0].features)[0].sequences)
    return RowShape(
        length=config.max_seq_length * each,
        num_sequences=max(config.max_seq_length // 8, 1) * each,
        kind=task.kind,
        pad_id=pad_id,
        sequences_per_feature=each,
    )


def rows_of_batches(task: Task, shape: RowShape, config: ConfigDict) -> list[int]:
    """How many rows the first batches take, which stand for all."""
    count, rows = len(task.train), []
    for step in range(min(50, steps_per_epoch(count, config.batch_size))):
        chosen = batch_features(count, config.batch_size, config.seed, step)
        rows.append(len(shape.pack([task.train[index] for index in chosen])))
    return rows


def run_seed(experiment: Experiment, seed: int, workdir: pathlib.Path) -> dict:
    """One run, resumed if `workdir` holds its beginning; what its `result.json` holds."""
    with contextlib.ExitStack() as cleanup:  # Whatever ends the run, what is being saved is saved.
        return _run_seed(experiment, seed, workdir, cleanup)


def _run_seed(
    experiment: Experiment, seed: int, workdir: pathlib.Path, cleanup: contextlib.ExitStack
) -> dict:
    config, task, layout = experiment.config, experiment.task, experiment.layout
    num_steps, is_first = experiment.num_steps, jax.process_index() == 0
    own_settings = experiment.settings | {"seed": seed}
    result_path = workdir / "result.json"
    claim_together(workdir, own_settings)
    if result_path.exists():
        logging.info("%s is finished; there is nothing left to do", workdir)
        return json.loads(result_path.read_text())
    checkpointer = cleanup.enter_context(
        contextlib.closing(Checkpointer(workdir, own_settings, experiment.tokenizer, keep_last=1))
    )
    first_step = checkpointer.latest_step() or 0
    key = jax.random.key(seed)
    if first_step:
        logging.info("Going on from the checkpoint of step %d in %s", first_step, workdir)
        shapes = jax.eval_shape(experiment.init, key, experiment.loaded)
        state = checkpointer.restore(first_step, partitioning.placed(shapes, layout))
    else:
        state = jax.jit(experiment.init, out_shardings=layout)(key, experiment.loaded)

    sharding = partitioning.batch_sharding(layout.step.mesh)
    writer = metrics.MetricsWriter(workdir, first_step, writes=is_first)
    progress = tqdm.tqdm(
        total=num_steps, initial=first_step, unit="step", mininterval=1.0, disable=not is_first
    )
    preemption = cleanup.enter_context(contextlib.closing(distributed.Preemption()))
    watchdog = cleanup.enter_context(contextlib.closing(Watchdog(config.stall_seconds)))
    began = time.monotonic() - writer.seconds
    per_epoch = steps_per_epoch(len(task.train), config.batch_size)
    chooser, metric = choosing_split(task)
    best_step, best = best_so_far(workdir / "best")
    dropout_key = jax.random.fold_in(key, 1)

    def predict(split, params):
        return task_step.predict(
            experiment.predict_step,
            params,
            split.features,
            experiment.shape,
            experiment.eval_rows,
            sharding,
        )

    def keep(step, params, scores):
        """Makes `params` the one checkpoint in `best`, and its `scores` a part of it."""
        directory = workdir / "best"
        described = own_settings | {"step": step, "score": scores.get(metric), "scores": scores}
        # Not in "head", which must stay the same when a run goes on; `read_model` joins them.
        described["scored_head"] = {name: task.settings[name] for name in task.tuned}
        write_checkpoint(directory / str(step), params, described, experiment.tokenizer)
        for other in saved_steps(directory):
            if other != step and is_first:
                shutil.rmtree(directory / str(other))

    batches = train_batches(
        task.train,
        experiment.shape,
        sharding,
        batch_size=config.batch_size,
        chunk_rows=experiment.chunk_rows,
        seed=seed,
        start=first_step,
        stop=num_steps,
    )
    unreported = []
    for step, (rows, num_chunks) in enumerate(batches, first_step + 1):
        watchdog.beat(f"running step {step}")
        state, step_metrics = experiment.update_step(state, rows, num_chunks, dropout_key)
        unreported.append(step_metrics)
        command.wait_for_step(unreported)
        progress.update()
        ends_epoch = step % (config.eval_every or per_epoch) == 0 or step == num_steps
        stops = preemption.stops_after(step)
        if step % config.log_every == 0 or ends_epoch or stops:
            values = command.check_finite(jax.device_get(unreported), step)
            values = {f"train/{name}": float(value) for name, value in values.items()}
            values["learning_rate"] = float(experiment.schedule(step - 1))
            values["seconds"] = time.monotonic() - began
            writer.write(step, values)
            progress.set_postfix_str(f"loss={values['train/loss']:.3f}")
            unreported = []
        if ends_epoch and chooser:
            watchdog.beat(f"evaluating after step {step}")
            scores = chooser.score(predict(chooser, state.params))
            writer.write(step, {f"{chooser.name}/{name}": score for name, score in scores.items()})
            logging.info("Epoch %.2f, %s: %s", step / per_epoch, chooser.name, shown(scores))
            if best is None or scores[metric] > best:
                best_step, best = step, scores[metric]
                keep(step, state.params, scores)
        if (ends_epoch and config.save_training_state and step < num_steps) or stops:
            watchdog.beat(f"saving step {step}")
            checkpointer.save(state)
        if stops:
            checkpointer.wait()
            raise command.Preempted(step, preemption.interrupted)
    progress.close()

    # The checkpoint that is kept predicts every split.
    watchdog.beat("predicting with the checkpoint that is kept")
    params = state.params
    is_kept = best_step is not None
    if not is_kept:  # There was nothing to choose by, or to train on.
        best_step = num_steps
        if not chooser:
            keep(num_steps, params, {})
    if best_step != num_steps:
        params = load_checkpoint(workdir / "best" / str(best_step), abstract_params)[0]
        params = jax.device_put(params, layout.params)
    result = {"seed": seed, "metric": task.metric, "steps": num_steps, "best_step": best_step}
    predictions = workdir / "predictions"
    # The first with labels, or else the first.
    judged = chooser or min(task.splits, key=lambda split: not split.score, default=None)
    for split in task.splits:
        outputs = predict(split, params)
        if split.score:
            scores = split.score(outputs)
            result[split.name] = scores
            writer.write(num_steps, {f"final/{split.name}/{k}": v for k, v in scores.items()})
            if split is chooser and not is_kept:
                keep(num_steps, params, scores)
        if split is judged:
            result["collapsed"] = collapsed(task.kind, split.features, outputs)
        if is_first:
            predictions.mkdir(exist_ok=True)
            split.write(outputs, predictions)
    result["seconds"] = time.monotonic() - began
    writer.close()
    checkpointer.close()
    if is_first:
        write_json(result_path, result)
        shutil.rmtree(workdir / "checkpoints", ignore_errors=True)  # Nothing goes on from there.
    return result


def choosing_split(task: Task):
    """The split that decides which checkpoint is kept, and by which metric; (None, "") if none."""
    name, _, metric = task.metric.rpartition("/")
    for split in task.splits:
        if split.name == name and split.score:
            return split, metric
    return None, ""


def best_so_far(directory: pathlib.Path) -> tuple[int | None, float | None]:
    """Step and score of the checkpoint that an interrupted run has kept."""
    if not (steps := saved_steps(directory)):
        return None, None
    return steps[-1], load_settings(directory / str(steps[-1]))["score"]


def log_task(task: Task, shape: RowShape, num_steps: int) -> None:
    """Says what was read before anything is computed."""
    tokens, rows = sum(map(len, task.train)), len(shape.pack(task.train))
    logging.info(
        "%d training features of %.1f tokens on average, in rows of %d that would be %.0f %% full; "
        "%d steps; splits: %s; %s",
        len(task.train),
        tokens / max(len(task.train), 1),
        shape.length,
        100 * tokens / max(rows * shape.length, 1),
        num_steps,
        ", ".join(f"{split.name} ({len(split.features)})" for split in task.splits),
        ", ".join(f"{name}: {count}" for name, count in task.notes.items()),
    )


if __name__ == "__main__":
    restart_with_huge_pages()
    command.start(train_and_evaluate)
