"""Trackers, with modules in place of the libraries."""

import sys
import types

import pytest

from bert_jax.training import trackers
from bert_jax.training.metrics import MetricsWriter
from bert_jax.training.trackers import check_tracker

SETTINGS = {"learning_rate": 0.1, "model": {"size": "tiny"}}


class FakeRun:
    def __init__(self, **arguments):
        self.arguments, self.logged, self.finished = arguments, [], False
        self.id = arguments.get("id")

    def define_metric(self, name, step_metric):
        self.axes = name, step_metric

    def log(self, metrics, step=None):
        if step is None:  # Of W&B, which logs the step as one of the metrics.
            assert self.axes == ("*", "step")
            step, metrics = metrics["step"], {n: v for n, v in metrics.items() if n != "step"}
        self.logged.append((step, metrics))

    def finish(self):
        self.finished = True


@pytest.fixture(params=["wandb", "trackio"])
def runs(request, monkeypatch):
    """The runs that were started at a tracker whose `init` is faked."""
    started = []

    def init(**arguments):
        started.append(FakeRun(**arguments))
        return started[-1]

    monkeypatch.setitem(sys.modules, request.param, types.SimpleNamespace(init=init))
    started_by = types.SimpleNamespace(runs=started, name=request.param)
    return started_by


def write(workdir, steps, **arguments):
    workdir.mkdir(exist_ok=True)
    writer = MetricsWriter(workdir, settings=SETTINGS, **arguments)
    for step in steps:
        writer.write(step, {"loss": 1.0 / step})
    return writer


def test_tracker_gets_settings_and_every_metric_that_is_written(runs, tmp_path):
    writer = write(tmp_path / "run", (1, 2), tracker=runs.name)
    [run] = runs.runs
    assert run.arguments["config"] == SETTINGS and run.arguments["project"] == "bert_jax"
    assert run.arguments["name"].startswith(str(tmp_path / "run"))
    assert run.logged == [(1, {"loss": 1.0}), (2, {"loss": 0.5})] and not run.finished
    writer.close()
    writer.close()
    assert run.finished


def test_resumed_run_is_the_same_at_the_tracker_and_repeats_nothing(runs, tmp_path):
    write(tmp_path / "run", (1, 2), tracker=runs.name).close()
    write(tmp_path / "run", (1, 2, 4), tracker=runs.name, first_step=2).close()
    write(tmp_path / "other", (1,), tracker=runs.name).close()
    key = {"wandb": "id", "trackio": "name"}[runs.name]
    first, resumed, other = (run.arguments[key] for run in runs.runs)
    assert first == resumed != other
    assert all(run.arguments["resume"] == "allow" for run in runs.runs)
    assert runs.runs[1].logged == [(4, {"loss": 0.25})]


def test_failing_tracker_is_reported_once_and_the_run_continues(
    runs, tmp_path, caplog, monkeypatch
):
    def fail(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(FakeRun, "log", fail)
    write(tmp_path / "run", (1, 2, 3), tracker=runs.name).close()
    assert caplog.text.count("no route to host") == 1
    assert (
        f"{runs.name} failed: no route to host. No more metrics are sent to it; metrics"
        in caplog.text
    )
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 3


def test_only_the_writing_process_starts_a_run(runs, tmp_path):
    write(tmp_path / "run", (1,), tracker=runs.name, writes=False).close()
    assert not runs.runs and not list((tmp_path / "run").iterdir())


def test_mlflow_gets_flat_settings_once_and_metrics_with_their_steps(tmp_path, monkeypatch):
    calls = []

    class Client:
        def __getattr__(self, name):
            def method(*arguments, params=(), metrics=(), **_):
                calls.append((name, *arguments, *params, *metrics))
                # Of the experiment and of the run.
                return types.SimpleNamespace(
                    experiment_id="e", info=types.SimpleNamespace(run_id="r")
                )

            return method

    def metric(key, value, timestamp, step):
        return key, value, step

    def param(key, value):
        return key, value

    fakes = {
        "mlflow": types.SimpleNamespace(MlflowClient=Client),
        "mlflow.entities": types.SimpleNamespace(Metric=metric, Param=param),
        "mlflow.utils.time": types.SimpleNamespace(get_current_time_millis=lambda: 0),
    }
    for name, module in fakes.items():
        monkeypatch.setitem(sys.modules, name, module)
    write(tmp_path / "run", (1,), tracker="mlflow").close()
    assert [call for call in calls if call[0] == "log_batch"] == [
        ("log_batch", "r", ("learning_rate", "0.1"), ("model.size", "tiny")),
        ("log_batch", "r", ("loss", 1.0, 1)),
    ]
    assert calls[-1] == ("set_terminated", "r")
    calls.clear()
    write(tmp_path / "run", (2,), tracker="mlflow", first_step=1).close()
    assert [call[0] for call in calls] == ["update_run", "log_batch", "set_terminated"]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("wandbb", ValueError, "config.tracker=wandbb"),
        ("wandb", ImportError, r"wandb is not installed: pip install 'bert_jax\[trackers\]'"),
    ],
)
def test_unknown_or_absent_tracker_says_what_to_do(name, error, message, monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda _: None)
    check_tracker("")
    with pytest.raises(error, match=message):
        check_tracker(name)
