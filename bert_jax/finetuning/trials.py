"""Trials of a fine-tuning run: the files of each one, and median, min and max scores over seeds."""

import json
import math
import pathlib
import shutil
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bert_jax.checkpoints import native
from bert_jax.finetuning.finetune_setup import FinetuneSetup
from bert_jax.finetuning.hyperparameters import finetune_schedule
from bert_jax.finetuning.step import Prediction
from bert_jax.runtime.buckets import absolute, is_bucket
from bert_jax.runtime.errors import Diverged
from bert_jax.tasks.resampling import bootstrap_interval
from bert_jax.tasks.scored_predictions import MAX_DIFFERENCE, read_scored
from bert_jax.tasks.task import Split, Task
from bert_jax.training import monitoring
from bert_jax.training.metrics import METRICS, MetricsWriter
from bert_jax.training.workdir import write_json


class Trial(NamedTuple):
    """The configuration of one run, and its workdir."""

    config: ConfigDict
    workdir: pathlib.Path

    @property
    def result_path(self) -> pathlib.Path:
        return self.workdir / "result.json"

    @property
    def result(self) -> dict | None:
        """The contents of its `result.json`, or None before it is finished."""
        if not self.result_path.exists():
            return None
        return json.loads(self.result_path.read_text(encoding="utf-8"))


class TrialRun:
    """A running trial: its hyperparameters, its metrics, and the best checkpoint in its workdir.

    `best_step`, `score` and `score_loss` (on the selection split) belong to the best checkpoint;
    they are None if there is none. `tuned` are its settings of the head that were chosen on this
    split. `prediction` is its prediction for the split, computed in a stack of `prediction_size`
    trials; None if this process has not computed it. `diverged` is the step at which a loss or norm
    was not finite, or None. `num_steps`, the number of updates, is smaller than planned if the
    trial has `stopped_early`, after `config.patience` evaluations since the best checkpoint, or is
    `pruned`, as other trials of the stack score higher.
    """

    def __init__(self, setup: FinetuneSetup, trial: Trial, first_step: int):
        self.trial, self.seed = trial, trial.config.seed
        self.settings = setup.settings(trial.config)
        self.hyperparameters = setup.hyperparameters(trial.config)
        self._schedule = finetune_schedule(trial.config, self.hyperparameters)
        self._data, self._task, self._tokenizer = setup.data, setup.data.task, setup.tokenizer
        self._steps_per_epoch = setup.steps_per_epoch
        self.key = jax.random.key(self.seed)
        result = trial.result or {}
        self.num_steps = result.get("steps", setup.num_steps(trial.config))
        self.evaluations_since_best, self.stopped_early, self.pruned = 0, False, False
        self.finished, self.diverged = bool(result), result.get("diverged")
        self.loss, self.writes = math.inf, jax.process_index() == 0 and not self.finished
        self.writer = MetricsWriter(
            trial.workdir,
            first_step,
            writes=self.writes,
            tracker=trial.config.tracker,
            settings=trial.config.to_dict(),
        )
        self.best, self.best_step, self.tuned = trial.workdir / "best", None, {}
        self.score = self.score_loss = None
        self.prediction: Prediction | None = None
        self.prediction_size = 0
        if steps := native.saved_steps(self.best):
            self.best_step = steps[-1]
            settings = native.load_settings(self.best / str(self.best_step))
            self.score, self.score_loss = settings["score"], settings.get("scores", {}).get("loss")
            self.tuned = settings.get("tuned_head_settings", {})

    @property
    def last_step(self) -> int:
        """The step at which it diverged, or else its last update."""
        return self.diverged or self.num_steps

    def has_diverged(self, step: int) -> bool:
        """Returns whether it diverged up to `step`."""
        return self.diverged is not None and self.diverged <= step

    def report(self, step: int, step_metrics: list[dict], seconds: float) -> None:
        """Writes the mean metrics of the steps up to `step`; raises Diverged."""
        best = self.best / str(self.best_step) if self.best_step else None
        monitoring.check_finite(step_metrics, step, lambda: best, kind="best")
        values = monitoring.mean_over_steps(step_metrics)
        values = {f"train/{name}": float(value) for name, value in values.items()}
        values |= {"learning_rate": float(self._schedule(step - 1)), "seconds": seconds}
        self.loss = values["train/loss"]
        self.writer.write(step, values)

    def mark_diverged(self, error: Diverged) -> None:
        """Ends a trial that diverged, with a result that gives the step."""
        self.diverged, self.loss = error.step, math.inf
        logging.error("%s diverged: %s", self.trial.workdir.name, error)
        self._write_result({"diverged": error.step, "message": str(error)})

    def evaluate(self, step: int, split: str, scores: dict[str, float]) -> None:
        """Writes the scores of a split after `step`, and logs them without the scores by type.

        Of entities, `f1/LOC` is only in `metrics.jsonl`, where all are.
        """
        self.writer.write(step, {f"{split}/{name}": score for name, score in scores.items()})
        epoch, name = step / self._steps_per_epoch, self.trial.workdir.name
        whole = {metric: score for metric, score in scores.items() if "/" not in metric}
        shown = ", ".join(f"{metric} {score:.4f}" for metric, score in whole.items())
        logging.info("%s, epoch %.2f, %s: %s", name, epoch, split, shown)

    def is_better(self, scores: dict[str, float]) -> bool:
        """Returns whether the scores of the selection split exceed those of the best checkpoint.

        Where the metrics are equal, the lower loss wins: a metric such as F1 may stay at 0 for long
        while the model learns.
        """
        if self.score is None:
            return True
        score, loss = self.score_of(scores), scores.get("loss")
        if score != self.score:
            return score > self.score
        return loss is not None and self.score_loss is not None and loss < self.score_loss

    def count_evaluation(self, step: int) -> None:
        """Counts an evaluation that is over, and stops the trial if its patience is exhausted."""
        is_better = step <= self.best_step  # A resumed run may have saved a later step before.
        self.stop_early(step, 0 if is_better else self.evaluations_since_best + 1)

    def stop_early(self, step: int, evaluations_since_best: int) -> None:
        """Makes `step` the last one if there are `config.patience` evaluations since the best."""
        self.evaluations_since_best = evaluations_since_best
        patience = self.trial.config.patience
        if not patience or evaluations_since_best < patience or step >= self.num_steps:
            return
        logging.info(
            "%s has no better checkpoint than that of step %d after %d more evaluations: it stops "
            "at step %d of %d",
            self.trial.workdir.name,
            self.best_step,
            evaluations_since_best,
            step,
            self.num_steps,
        )
        self.num_steps, self.stopped_early = step, True

    def prune(self, step: int) -> None:
        """Makes `step` the last one, unless it is."""
        if step >= self.num_steps:
            return
        logging.info(
            "%s is pruned at step %d of %d: its best score %.4f is below the median of the others",
            *(self.trial.workdir.name, step, self.num_steps, self.score),
        )
        self.num_steps, self.pruned = step, True

    def score_of(self, scores: dict[str, float]) -> float:
        """Returns the score that selects checkpoints."""
        return scores[self._metric]

    def set_score(self, scores: dict[str, float]) -> None:
        """Sets the score and the loss of the best checkpoint on the selection split."""
        self.score, self.score_loss = scores.get(self._metric), scores.get("loss")

    @property
    def _metric(self) -> str:
        return self._task.metric.rpartition("/")[-1]

    def save_best(
        self,
        step: int,
        params: dict,
        scores: dict[str, float],
        tuned: dict,
        files: Mapping[str, bytes],
    ) -> None:
        """Writes `params`, their scores and the `tuned` head settings as the best checkpoint.

        `files` are as in `write_checkpoint`.
        """
        task, self.best_step = self._task, step
        self.set_score(scores)
        settings = self.settings | {"step": step, "score": self.score, "scores": scores}
        # Kept out of "head", which must not change when a run is resumed; `read_model` merges them.
        kept = {name: each for name, each in task.head_settings.items() if name in task.tuned}
        settings["tuned_head_settings"] = self.tuned = kept | tuned
        self.writer.sync()
        native.write_checkpoint(
            self.best / str(step), params, settings, self._tokenizer, files=files
        )
        for old_step in native.saved_steps(self.best):
            if old_step != step and self.writes:
                remove = native.remove_checkpoint if is_bucket(self.best) else shutil.rmtree
                remove(self.best / str(old_step))

    def read_best_params(self) -> dict:
        """Returns the parameters of the best checkpoint. Raises CheckpointError."""
        directory = absolute(self.best) / str(self.best_step)  # Orbax refuses relative paths.
        with native.reading(directory):
            return native.read_arrays(directory / "params")

    def finish(self, predictions: dict[str, Prediction], began: float) -> None:
        """Writes the result and the predictions of the best checkpoint for each split."""
        task, directory = self._task, self.writer.directory / "predictions"
        result, files = {"steps": self.num_steps, "best_step": self.best_step}, []
        result["train_features"] = len(task.train)  # An example is one, or several if it is long.
        if self.trial.config.patience:
            result["stopped_early"] = self.stopped_early
        if self.pruned:
            result["pruned"] = True
        collapse_split = split_for_collapse(task)
        if task.selection_split:
            # Those of the checkpoint, as `bert_jax.predict` has them. Tuned again, they would be
            # others, if merging the adapters has rounded the predictions.
            task = task.with_settings(self.tuned)
        for split in task.splits:
            scores = score_split(split, predictions[split.name])
            if scores:
                result[split.name] = scores
                values = {f"final/{split.name}/{name}": score for name, score in scores.items()}
                self.writer.write(self.num_steps, values)
            if split.name == collapse_split.name:
                outputs = predictions[split.name].outputs
                cls_last = self._tokenizer.layout.cls_last
                result["collapsed"] = task.head.is_collapsed(split.features, outputs, cls_last)
                if result["collapsed"]:
                    logging.warning(
                        "%s collapsed: its predictions are equal, or nearly so, for all of %s; see "
                        "Collapsed runs in docs/finetuning.md",
                        self.trial.workdir,
                        split.name,
                    )
            if self.writes:
                directory.mkdir(exist_ok=True)
                files.append(split.write(predictions[split.name].outputs, directory))
        if self.writes and task.selection_split:
            warn_of_constant_metric(self.writer.directory / METRICS, task.metric)
        result["predictions"] = [str(path.relative_to(self.writer.directory)) for path in files]
        result["seconds"] = time.monotonic() - began
        self._write_result(result)
        if self.writes:
            self._add_context(result)

    def _add_context(self, result: dict) -> None:
        """Adds intervals, baselines and duplicates to a result that is written already.

        They take up to minutes, and read what a task of your own may have written in any form: the
        run has ended, whatever happens here.
        """
        directory = self.writer.directory / "predictions"
        try:
            result["intervals"] = find_intervals(directory, result, self._metric, self.settings)
            result["baselines"] = self._data.baselines
            result["duplicates"] = self._data.duplicates
        except Exception:
            logging.exception("%s has its scores, but not all that compares them", directory.parent)
            return
        log_baselines_and_duplicates(result)
        self._write_result(result)

    def _write_result(self, result: dict) -> None:
        self.finished = True
        self.writer.close()
        if self.writes:
            start = {"seed": self.seed}
            if self._task.selection_split:  # Otherwise no metric has selected the checkpoint.
                start["metric"] = self._task.metric
            write_json(self.trial.result_path, start | result)


def split_for_collapse(task: Task) -> Split | None:
    """Returns the split whose predictions show whether a trial has collapsed.

    That is the selection split, or else the first split with labels, or else the first one.
    """
    if task.selection_split:
        return task.selection_split
    candidates = [split for split in task.splits if split.score] or task.splits
    return candidates[0] if candidates else None


def warn_of_constant_metric(path: pathlib.Path, metric: str) -> None:
    """Warns if a metric in the lines of `path` was the same at all evaluations."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    values = [line[metric] for line in lines if metric in line]
    if len(values) > 1 and len(set(values)) == 1:
        logging.warning(
            "%s was %.4f at all %d evaluations, so the checkpoint was selected by the loss alone: "
            "train longer, or see Collapsed runs in docs/finetuning.md",
            metric,
            values[0],
            len(values),
        )


def find_intervals(
    predictions: pathlib.Path, result: dict, metric: str, settings: dict
) -> list[dict]:
    """Returns the bootstrap interval of `metric` on each split of `result` that has it.

    A score for which there is none, such as one of a task of your own, is named in the log.
    """
    intervals = []
    for split, scores in result.items():
        if not isinstance(scores, dict) or metric not in scores:
            continue
        try:
            scored = read_scored(predictions, split, metric, settings)
        except (ValueError, OSError) as error:
            logging.info("No interval of %s/%s: %s", split, metric, error)
            continue
        every = scored.score(np.arange(len(scored.examples)))
        if abs(every - scores[metric]) > MAX_DIFFERENCE:
            logging.info("No interval of %s/%s: the predictions have %.4f", split, metric, every)
            continue
        low, high = map(float, bootstrap_interval(scored.score, len(scored.examples)))
        examples = len(scored.examples)
        found = {"split": split, "metric": metric, "low": low, "high": high, "examples": examples}
        logging.info(
            "%s/%s is %.4f, with a 95 %% interval from %.4f to %.4f (bootstrap over %d examples)",
            *(split, metric, scores[metric], low, high, examples),
        )
        intervals.append(found)
    return intervals


def log_baselines_and_duplicates(result: dict) -> None:
    """Logs a line for the baselines of each split, and for its duplicates of training examples."""
    for split in dict.fromkeys(each["split"] for each in result["baselines"]):
        own = [each for each in result["baselines"] if each["split"] == split]
        scores = ", ".join(f"{each['baseline']} {each['score']:.4f}" for each in own)
        logging.info("Baselines of %s/%s: %s", split, own[0]["metric"], scores)
    for each in result["duplicates"]:
        if each["equal"] or each["near"]:
            near = "an unknown number (too many tokens)" if each["near"] is None else each["near"]
            logging.info(
                "%s: of %d inputs %d are equal to one of train and %s nearly equal, as the model "
                "reads them: their scores may be too good",
                *(each[name] for name in ("split", "inputs", "equal")),
                near,
            )


def tune_and_score(split: Split, prediction: Prediction) -> tuple[dict[str, float], dict]:
    """Returns the scores of the selection split, and the head settings tuned on it."""
    tuned = split.tune(prediction.outputs) if split.tune else {}
    split = split.with_settings(tuned) if tuned else split
    return score_split(split, prediction), tuned


def score_split(split: Split, prediction: Prediction) -> dict[str, float]:
    """Returns the scores and the loss of a split; {} if its labels are unknown."""
    scores = split.score(prediction.outputs) if split.score else {}
    if scores and prediction.loss is not None:
        scores = scores | {"loss": prediction.loss}
    return scores


def rank_of(result: dict, metric: str) -> tuple[float, float]:
    """Returns a key to sort results by: the score for `metric`, then the negated loss.

    The best result has the largest key, as with the checkpoints of a run. One that diverged ranks
    last; one without a score for the metric has the score 0.
    """
    if "diverged" in result:
        return -math.inf, -math.inf
    split, _, name = metric.rpartition("/")
    scores = result.get(split, {})
    return scores.get(name, 0.0), -scores.get("loss", math.inf)


def pad_to_trial_axis(items: Sequence, mesh: Mesh) -> list:
    """Repeats the last of `items` until their number is a multiple of the `trial` axis."""
    num_missing = -len(items) % mesh.shape["trial"]
    return [*items, *[items[-1]] * num_missing]


def stack_trees(trees: Sequence):
    """Returns one tree, with the leaves of `trees` stacked on a new axis 0."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def seed_directories(workdir: pathlib.Path, first: int, count: int) -> dict[int, pathlib.Path]:
    """Returns the workdir of each seed: `workdir` itself, or `workdir/seed_N` for several seeds.

    Raises ValueError if `workdir` holds runs of other seeds, which `result.json` would omit.
    """
    # Several seeds have their common training state in `workdir`, but a config.json each.
    if count > 1 and (workdir / "config.json").exists() and _holds_run(workdir):
        raise ValueError(f"{workdir} holds a run of one seed: use another workdir for several")
    wanted = range(first, first + count)
    seeds = sorted(int(path.name[5:]) for path in workdir.glob("seed_[0-9]*") if _holds_run(path))
    if seeds and (count == 1 or not set(seeds) <= set(wanted)):
        low, high = min(*seeds, *wanted), max(*seeds, *wanted)
        raise ValueError(
            f"{workdir} holds runs of the seeds {', '.join(map(str, seeds))}: use another "
            f"workdir, or resume these with config.seed={low} and "
            f"config.num_seeds={max(high - low + 1, 2)}"
        )
    return {seed: workdir / f"seed_{seed}" if count > 1 else workdir for seed in wanted}


def labels_of_run(workdirs: Iterable[pathlib.Path]) -> tuple[str, ...]:
    """Returns the labels of the head of the run in the first workdir that has one; () if none."""
    for path in (workdir / "config.json" for workdir in workdirs):
        if path.exists():
            return tuple(
                json.loads(path.read_text(encoding="utf-8")).get("head", {}).get("labels", ())
            )
    return ()


def _holds_run(directory: pathlib.Path) -> bool:
    return any(native.saved_steps(directory / name) for name in ("best", "checkpoints"))


def summarize_seeds(results: list[dict], metric: str) -> dict:
    """Returns the median, minimum and maximum of each metric over seeds.

    A missing score counts as 0, as 0 / 0 does in `entity_scores`: a seed has none for an entity
    type that it never predicts and no example has.
    """
    combined = {}
    for split in (name for name, value in results[0].items() if isinstance(value, dict)):
        for name in dict.fromkeys(name for result in results for name in result[split]):
            values = [result[split].get(name, 0.0) for result in results]
            combined[f"{split}/{name}"] = {
                "median": statistics.median(values),
                "min": min(values),
                "max": max(values),
            }
    return {
        "metric": metric,
        "scores": combined,
        "collapsed_seeds": [result["seed"] for result in results if result.get("collapsed")],
        "seeds": results,
        "seconds": max(result["seconds"] for result in results),  # Seeds train together.
    }
