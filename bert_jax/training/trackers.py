"""Sends the metrics of a run to an experiment tracker, too: Weights & Biases, MLflow or Trackio.

Off by default; `config.tracker` names one. The destination is set by the
environment variables of its library (WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID, ...).
"""

import contextvars
import importlib.util
import os
import pathlib
import secrets
from collections.abc import Callable, Mapping
from typing import NamedTuple

from absl import logging
from flax.traverse_util import flatten_dict

from bert_jax.training.workdir import write_text

DEFAULT_PROJECT = "bert_jax"


class Tracker(NamedTuple):
    """A run at a tracker: its id there, `log(step, metrics)` and `close()`."""

    run_id: str
    log: Callable[[int, dict[str, float]], None]
    close: Callable[[], None]


def _start_wandb(name: str, settings: dict, run_id: str | None) -> Tracker:
    import wandb

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", DEFAULT_PROJECT),
        name=name,
        config=settings,
        id=run_id or secrets.token_hex(4),
        resume="allow",
        reinit="create_new",  # The trials of a stack log side by side.
    )
    # Not `log(..., step=)`: W&B already has the steps after the last checkpoint, and would drop or
    # renumber them when a resumed run repeats them.
    run.define_metric("*", step_metric="step")
    return Tracker(run.id, lambda step, metrics: run.log({"step": step} | metrics), run.finish)


def _start_mlflow(name: str, settings: dict, run_id: str | None) -> Tracker:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param
    from mlflow.utils.time import get_current_time_millis as now

    client = MlflowClient()
    if not run_id:
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME", DEFAULT_PROJECT)
        experiment = client.get_experiment_by_name(project)
        experiment_id = (
            experiment.experiment_id if experiment else client.create_experiment(project)
        )
        run_id = client.create_run(experiment_id, run_name=name).info.run_id
        params = [Param(key, str(value)) for key, value in flatten_dict(settings, sep=".").items()]
        client.log_batch(run_id, params=params)
    client.update_run(run_id, "RUNNING")

    def log(step, metrics):
        values = [Metric(key, value, now(), step) for key, value in metrics.items()]
        client.log_batch(run_id, metrics=values)

    return Tracker(run_id, log, lambda: client.set_terminated(run_id))


def _start_trackio(name: str, settings: dict, run_id: str | None) -> Tracker:
    import trackio

    run_id = run_id or f"{name}-{secrets.token_hex(4)}"  # Runs are resumed by name.
    # Runs in its own context: `init` would otherwise finish the run of another trial of the stack.
    run = contextvars.Context().run(
        trackio.init,
        project=os.environ.get("TRACKIO_PROJECT", DEFAULT_PROJECT),
        name=run_id,
        config=settings,
        resume="allow",
        embed=False,
    )
    return Tracker(run_id, lambda step, metrics: run.log(metrics, step=step), run.finish)


# Name in `config.tracker` -> what starts or resumes a run (name, settings, id of an earlier start).
TRACKERS = {"wandb": _start_wandb, "mlflow": _start_mlflow, "trackio": _start_trackio}


def check_tracker(name: str) -> None:
    """Raises ValueError for an unknown tracker, ImportError for one that is not installed."""
    if name and name not in TRACKERS:
        raise ValueError(f"config.tracker={name}: expected {', '.join(TRACKERS)}, or '' for none")
    if name and not importlib.util.find_spec(name):
        raise ImportError(
            f"config.tracker={name}: {name} is not installed: pip install 'bert_jax[trackers]'"
        )


def start_tracker(name: str, workdir: pathlib.Path, settings: Mapping) -> Tracker:
    """Starts the run of `workdir` at a tracker, or resumes it.

    `settings` are the fields of its configuration. The run's id there is kept in the workdir, in
    `NAME_run_id`. Raises what the library raises: a run that cannot be tracked as asked does not
    start.
    """
    path = workdir / f"{name}_run_id"
    run_id = path.read_text(encoding="utf-8").strip() if path.exists() else None
    tracker = TRACKERS[name](str(workdir), dict(settings), run_id)
    write_text(path, f"{tracker.run_id}\n")
    return _never_failing(name, tracker)


def _never_failing(name: str, tracker: Tracker) -> Tracker:
    """Returns a tracker that logs the first error, and then sends no more: training continues."""
    failed = []

    def call(function: Callable, *arguments) -> None:
        if failed:
            return
        try:
            function(*arguments)
        except Exception as error:  # From its service, the network or its files: many types.
            failed.append(error)
            rest = "No more metrics are sent to it; metrics.jsonl is complete"
            logging.error("%s failed: %s. %s", name, error, rest)

    def log(step, metrics):
        call(tracker.log, step, metrics)

    return tracker._replace(log=log, close=lambda: call(tracker.close))
