"""The sweep, with a stub of bert_jax.finetune that is imported from the current directory."""

import json
import pathlib
import signal
import subprocess
import sys

import pytest

from tests import helpers
from tools import sweep

STUB = """
import json, pathlib, signal, sys
given = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:])
workdir = pathlib.Path(given["workdir"])
rate = float(given["config.learning_rate"])
workdir.mkdir(parents=True, exist_ok=True)
runs = workdir / "runs"
runs.write_text((runs.read_text() if runs.exists() else "") + "x")
if rate == 0 and not pathlib.Path("fixed").exists():
    sys.exit("rate is 0: expected more")
if rate == 7 and len(runs.read_text()) == 1:
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    (workdir / "waits").write_text("waits")
    signal.pause()
result = {"metric": "dev/accuracy", "seed": 0, "dev": {"accuracy": rate / 10}, "seconds": 1.0,
          "collapsed": rate == 1}
(workdir / "result.json").write_text(json.dumps(result))
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    package = tmp_path / "bert_jax"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "finetune.py").write_text(STUB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def num_runs(directory: pathlib.Path) -> dict[str, int]:
    """Returns how often each point was run."""
    return {path.parent.name: len(path.read_text()) for path in directory.glob("*/runs")}


def test_grid_contains_every_combination():
    assert sweep.grid_points(["a=1,2", "b=x"]) == [{"a": "1", "b": "x"}, {"a": "2", "b": "x"}]
    assert len(sweep.grid_points(list(sweep.PAPER))) == 24


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ([], "the grid is empty"),
        (["rate"], "--grid=rate: expected FIELD=VALUE"),
        (["rate="], "expected FIELD=VALUE"),
        (["a=1", "a=2"], "given twice"),
        (["a=1,1"], "given twice"),
    ],
)
def test_invalid_grid_is_an_error(grid, message):
    with pytest.raises(ValueError, match=message):
        sweep.grid_points(grid)


def test_best_median_comes_first_and_failures_last(stub, capsys):
    rows = sweep.sweep(stub / "out", ["learning_rate=1,0,3"], ["--config=x"])
    assert [row["point"]["learning_rate"] for row in rows] == ["3", "1", "0"]
    assert rows[0]["median"] == 0.3 and rows[1]["collapsed_seeds"] == [0]
    assert rows[2]["error"] == "rate is 0: expected more"
    table = sweep.format_table(rows).splitlines()
    columns = ["learning_rate", "median", "min", "max", "collapsed", "seeds", "seconds"]
    assert table[0].split() == columns
    assert table[1].split() == ["3", "0.3000", "0.3000", "0.3000", "1"]
    assert "failed: rate is 0" in table[3]
    assert json.loads((stub / "out" / "sweep.json").read_text())["points"] == rows


def test_same_command_skips_finished_points_and_retries_failed_ones(stub):
    grid = ["learning_rate=2,0"]
    sweep.sweep(stub / "out", grid, ["--config=x"])
    (stub / "fixed").touch()
    rows = sweep.sweep(stub / "out", ["learning_rate=2,0,4"], ["--config=x"])
    assert num_runs(stub / "out") == {
        "learning_rate=2": 1,
        "learning_rate=0": 2,
        "learning_rate=4": 1,
    }
    assert not any("error" in row for row in rows)


def test_directory_of_another_command_is_an_error(stub):
    sweep.sweep(stub / "out", ["learning_rate=2"], ["--config=x"])
    with pytest.raises(ValueError, match="holds a sweep with another command"):
        sweep.sweep(stub / "out", ["learning_rate=2"], ["--config=y"])


def test_ctrl_c_stops_the_run_and_the_same_command_resumes(stub):
    tool = pathlib.Path(sweep.__file__).resolve()
    command = [sys.executable, str(tool), f"--runs={stub / 'out'}"]
    command += ["--grid=learning_rate=3,7,4", "--", "--config=x"]
    with helpers.ended([subprocess.Popen(command, cwd=stub)]) as started:
        helpers.wait_for(stub / "out/learning_rate=7/waits", "waits", started)
        started[0].send_signal(signal.SIGINT)
        assert helpers.finish(started) == [130]
    assert "learning_rate=4" not in num_runs(stub / "out")
    resumed = subprocess.run(command, cwd=stub, capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stderr
    assert num_runs(stub / "out") == {
        "learning_rate=3": 1,
        "learning_rate=7": 2,
        "learning_rate=4": 1,
    }
    assert resumed.stdout.splitlines()[-3].split()[0] == "7"


def test_scores_of_several_seeds_come_from_their_summary():
    scores = {"median": 0.5, "min": 0.4, "max": 0.6}
    result = {
        "metric": "dev/f1",
        "scores": {"dev/f1": scores},
        "collapsed_seeds": [2],
        "seeds": [],
    }
    expected = {"metric": "dev/f1", **scores, "collapsed_seeds": [2]}
    assert sweep.score_summary(result) == expected
    assert sweep.score_summary({"metric": "dev/f1", "seed": 0})["median"] is None
