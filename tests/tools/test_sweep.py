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
import json, os, pathlib, signal, sys
given = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:])
workdir = pathlib.Path(given["workdir"])
rate = float(given["config.learning_rate"])
workdir.mkdir(parents=True, exist_ok=True)
runs = workdir / "runs"
runs.write_text((runs.read_text() if runs.exists() else "") + "x")
if rate == 0 and not pathlib.Path("fixed").exists():
    pathlib.Path(os.environ["BERT_JAX_ERROR_FILE"]).write_text("rate is 0: expected more")
    print("the last line of the log")
    sys.exit(1)
if rate == 7 and len(runs.read_text()) == 1:
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    signal.signal(signal.SIGTERM, lambda *_: (workdir / "stopped").write_text("stopped"))
    (workdir / "waits").write_text("waits")
    signal.pause()
if rate == 9:
    os.kill(os.getpid(), signal.SIGKILL)
result = {"metric": "dev/accuracy", "seed": 0, "dev": {"accuracy": rate / 10}, "seconds": 1.0,
          "collapsed": rate == 1}
(workdir / "result.json").write_text(json.dumps(result))
"""


# A sweep in a process of its own, without the checks before the first run. Its `bert_jax` is the
# real one: the current directory is not on its path.
SWEEP = f"""
import pathlib, sys
sys.path.append({str(helpers.ROOT)!r})
from tools import sweep
rows = sweep.sweep(pathlib.Path("out").absolute(), sys.argv[1:], ["--config=x"])
print(sweep.format_table(rows))
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    package = tmp_path / "bert_jax"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "finetune.py").write_text(STUB)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/sweep.py").write_text(SWEEP)
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
    columns = "learning_rate median min max collapsed seeds diverged seeds seconds"
    assert table[0].split() == columns.split()
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


def test_changed_contents_of_a_finished_sweep_are_an_error(stub):
    arguments = stub / "out", ["learning_rate=2"], ["--config=x"]
    sweep.sweep(*arguments, contents={"train": "a", "init_from": "b"})
    sweep.sweep(*arguments, contents={"train": "a", "init_from": "b"})
    with pytest.raises(ValueError, match="the contents of train have changed since the sweep in"):
        sweep.sweep(*arguments, contents={"train": "c", "init_from": "b"})


def test_ctrl_c_stops_the_run_and_the_same_command_resumes(stub):
    command = [sys.executable, "scripts/sweep.py", "learning_rate=3,7,4"]
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


def test_run_of_a_killed_sweep_stops_with_it(stub):
    command = [sys.executable, "scripts/sweep.py", "learning_rate=7"]
    with helpers.ended([subprocess.Popen(command, cwd=stub)]) as started:
        helpers.wait_for(stub / "out/learning_rate=7/waits", "waits", started)
        started[0].kill()
    helpers.wait_for(stub / "out/learning_rate=7/stopped", "stopped", [])


def test_run_that_was_killed_says_so(stub):
    (row,) = sweep.sweep(stub / "out", ["learning_rate=9"], ["--config=x"])
    assert row["error"] == "ended by SIGKILL"


def test_scores_of_several_seeds_come_from_their_summary():
    scores = {"median": 0.5, "min": 0.4, "max": 0.6}
    result = {
        "metric": "dev/f1",
        "scores": {"dev/f1": scores},
        "collapsed_seeds": [2],
        "diverged_seeds": [{"seed": 1, "step": 7}],
        "seeds": [],
    }
    failed = {"collapsed_seeds": [2], "diverged_seeds": [{"seed": 1, "step": 7}]}
    expected = {"metric": "dev/f1", **scores, **failed}
    assert sweep.score_summary(result) == expected
    assert sweep.score_summary({"metric": "dev/f1", "seed": 0})["median"] is None


def test_diverged_seeds_are_named_with_their_step():
    scores = {"median": 0.5, "min": 0.5, "max": 0.5, "collapsed_seeds": [], "seconds": 2.0}
    row = {"point": {"seed": "0"}, **scores, "diverged_seeds": [{"seed": 1, "step": 7}]}
    assert sweep.format_table([row]).splitlines()[1].split() == (
        ["0", "0.5000", "0.5000", "0.5000", "1", "(step", "7)", "2"]
    )


def test_more_seeds_are_added_to_the_finished_ones(tmp_path, monkeypatch):
    """From one, whose run is in the workdir itself, to two, to three with one that diverges."""
    started = []

    def finetune(command, log, files):
        given = dict(argument.removeprefix("--config.").split("=", 1) for argument in command[1:])
        workdir, count = pathlib.Path(given["--workdir"]), int(given["num_seeds"])
        found = sorted(path.name for path in workdir.glob("seed_*"))
        started.append((count, found))
        for seed in range(count):
            own = workdir / f"seed_{seed}" if count > 1 else workdir
            own.mkdir(parents=True, exist_ok=True)
            (own / "config.json").write_text(json.dumps({"seed": seed}))
        result = {"metric": "dev/accuracy", "seconds": 1.0, "seed": 0}
        if count > 1:
            result |= {"collapsed_seeds": [], "scores": {}, "seeds": [{}] * 2}
            result |= {"diverged_seeds": [{}] * (count - 2)}
        (workdir / "result.json").write_text(json.dumps(result))
        return 0

    monkeypatch.setattr(sweep, "_run", finetune)
    for num_seeds in (1, 2, 2, 3, 3, 2):
        sweep.sweep(tmp_path, ["learning_rate=1"], ["--config=x"], num_seeds)
    assert started == [(1, []), (2, ["seed_0"]), (3, ["seed_0", "seed_1"])]


@pytest.fixture
def arguments(tmp_path) -> list[str]:
    """The arguments of runs with two training examples."""
    weights = helpers.write_weights(
        tmp_path / "weights", helpers.write_vocabulary(tmp_path / "vocab.txt")
    )
    (tmp_path / "data.csv").write_text("text,label\nking,a\nwar,b\n")
    return [
        "--config=configs/finetune/text_classification.py:runlocal",
        f"--config.init_from={weights}",
        f"--config.data.train={tmp_path / 'data.csv'}",
    ]


def test_points_are_checked_before_the_first_run(arguments, tmp_path):
    points = sweep.grid_points(["learning_rate=1e-3,1e-4"])
    sweep.check_points(points, [*arguments, f"--config.data.dev={tmp_path / 'data.csv'}"])
    with pytest.raises(ValueError, match=r"dev/accuracy needs examples .* --config.data.dev=FILE"):
        sweep.check_points(points, arguments)
    with pytest.raises(ValueError, match=r"no configuration: give .* -- --config=FILE"):
        sweep.check_points(points, [])
    with pytest.raises(ValueError, match=r"--config.learning_rate=-1.0: expected at least"):
        sweep.check_points(sweep.grid_points(["learning_rate=1e-3,-1.0"]), arguments)
    with pytest.raises(SystemExit, match=r"learning_rat'.* Did you mean \"learning_rate\""):
        sweep.check_points(sweep.grid_points(["learning_rat=1e-3"]), arguments)
