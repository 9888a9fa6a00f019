"""A sweep runs each point once, goes on after a failure or Ctrl-C, and sorts by the median.

The runs are stand-ins of a few lines, found before the package because they lie in the current
directory.
"""

import json
import pathlib
import signal
import subprocess
import sys

import pytest

from tests import helpers
from tools import sweep

STAND_IN = """
import json, pathlib, signal, sys
given = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:])
workdir = pathlib.Path(given["workdir"])
rate = float(given["config.learning_rate"])
workdir.mkdir(parents=True, exist_ok=True)
runs = workdir / "runs"
runs.write_text((runs.read_text() if runs.exists() else "") + "x")
if rate == 0 and not pathlib.Path("mended").exists():
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
def stand_in(tmp_path, monkeypatch):
    package = tmp_path / "bert_jax"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "finetune.py").write_text(STAND_IN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def runs_of(directory: pathlib.Path) -> dict[str, int]:
    return {path.parent.name: len(path.read_text()) for path in directory.glob("*/runs")}


def test_grid_is_every_combination():
    assert sweep.points_of(["a=1,2", "b=x"]) == [{"a": "1", "b": "x"}, {"a": "2", "b": "x"}]
    assert len(sweep.points_of(list(sweep.PAPER))) == 24


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ([], "there is no grid"),
        (["rate"], "--grid=rate: expected FIELD=VALUE"),
        (["rate="], "expected FIELD=VALUE"),
        (["a=1", "a=2"], "given twice"),
        (["a=1,1"], "given twice"),
    ],
)
def test_unclear_grid_is_refused(grid, message):
    with pytest.raises(ValueError, match=message):
        sweep.points_of(grid)


def test_best_median_stands_first_and_failures_last(stand_in, capsys):
    rows = sweep.sweep(stand_in / "out", ["learning_rate=1,0,3"], ["--config=x"])
    assert [row["point"]["learning_rate"] for row in rows] == ["3", "1", "0"]
    assert rows[0]["median"] == 0.3 and rows[1]["collapsed_seeds"] == [0]
    assert rows[2]["error"] == "rate is 0: expected more"
    table = sweep.table_of(rows).splitlines()
    assert table[0].split() == [
        "learning_rate",
        "median",
        "least",
        "most",
        "collapsed",
        "seeds",
        "seconds",
    ]
    assert table[1].split() == ["3", "0.3000", "0.3000", "0.3000", "1"]
    assert "failed: rate is 0" in table[3]
    assert json.loads((stand_in / "out" / "sweep.json").read_text())["points"] == rows


def test_finished_points_are_not_run_again_and_failed_ones_are(stand_in):
    grid = ["learning_rate=2,0"]
    sweep.sweep(stand_in / "out", grid, ["--config=x"])
    (stand_in / "mended").touch()
    rows = sweep.sweep(stand_in / "out", ["learning_rate=2,0,4"], ["--config=x"])
    assert runs_of(stand_in / "out") == {
        "learning_rate=2": 1,
        "learning_rate=0": 2,
        "learning_rate=4": 1,
    }
    assert not any("error" in row for row in rows)


def test_directory_of_another_command_is_refused(stand_in):
    sweep.sweep(stand_in / "out", ["learning_rate=2"], ["--config=x"])
    with pytest.raises(ValueError, match="holds a sweep of another command"):
        sweep.sweep(stand_in / "out", ["learning_rate=2"], ["--config=y"])


def test_ctrl_c_ends_the_run_and_the_same_command_goes_on(stand_in):
    tool = pathlib.Path(sweep.__file__).resolve()
    command = [sys.executable, str(tool), f"--runs={stand_in / 'out'}"]
    command += ["--grid=learning_rate=3,7,4", "--", "--config=x"]
    with helpers.ended([subprocess.Popen(command, cwd=stand_in)]) as started:
        helpers.wait_for(stand_in / "out/learning_rate=7/waits", "waits", started)
        started[0].send_signal(signal.SIGINT)
        assert helpers.finish(started) == [130]
    assert "learning_rate=4" not in runs_of(stand_in / "out")
    said = subprocess.run(command, cwd=stand_in, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert runs_of(stand_in / "out") == {
        "learning_rate=3": 1,
        "learning_rate=7": 2,
        "learning_rate=4": 1,
    }
    assert said.stdout.splitlines()[-3].split()[0] == "7"


def test_several_seeds_are_read_from_their_summary():
    result = {
        "metric": "dev/f1",
        "scores": {"dev/f1": {"median": 0.5, "least": 0.4, "most": 0.6}},
        "collapsed_seeds": [2],
        "seeds": [],
    }
    expected = {"metric": "dev/f1", "median": 0.5, "least": 0.4, "most": 0.6}
    assert sweep.scores_of(result) == expected | {"collapsed_seeds": [2]}
    assert sweep.scores_of({"metric": "dev/f1", "seed": 0})["median"] is None
