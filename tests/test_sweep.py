"""A sweep runs every configuration once, in few programs, resumes, and reports its results."""

import csv
import json
import math
import os
import pathlib
import random
import re
import signal
import time
from threading import Event
from types import SimpleNamespace

import jax
import pytest
from ml_collections import ConfigDict

import bert_jax
from bert_jax import finetune, sweep
from bert_jax.checkpoints.native import saved_steps
from bert_jax.configs.sweeps import paper, search
from bert_jax.finetuning import finetune_fields, task_data
from bert_jax.finetuning.finetune_fields import PER_TRIAL
from bert_jax.finetuning.trials import Trial, TrialRun
from bert_jax.runtime.errors import PREEMPTED, RunStopped
from bert_jax.sweeps import (
    claims,
    configurations,
    memory,
    plan,
    programs,
    report,
    settings,
    summaries,
)
from tests.helpers import commands
from tests.helpers.corpora import WORDS, write_vocabulary
from tests.helpers.models import write_weights

pytestmark = pytest.mark.usefixtures("two_devices")

# Few by default, 10 in `make faults`.
KILLS = int(os.environ.get("BERT_JAX_KILLS", 2))
REPORT = ("report.html", "report.md", "trials.csv")
FIELDS = {"max_seq_length": 16, "batch_size": 16, "num_epochs": 1.0, "eval_every": 2}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A directory with weights/, train.csv, dev.csv and test.csv."""
    directory = tmp_path_factory.mktemp("given")
    vocabulary = write_vocabulary(directory / "vocab.txt")
    write_weights(directory / "weights", vocabulary, num_layers=2)
    for seed, (name, count) in enumerate({"train": 61, "dev": 30, "test": 20}.items()):
        rng, lines = random.Random(seed), ["text,label"]
        for _ in range(count):
            label = rng.randrange(2)
            words = rng.choices(WORDS[label::2], k=rng.randint(2, 9))
            lines.append(f"{' '.join(words)},{('north', 'south')[label]}")
        (directory / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return directory


def small_sweep(given, grid: dict, trials: tuple = (), seeds: int = 1, **base):
    config = paper.get_config("text_classification").unlock()
    config.base.init_from = str(given / "weights")
    files = {f"data.{name}": str(given / f"{name}.csv") for name in ("train", "dev", "test")}
    fields = {name.replace("__", "."): value for name, value in base.items()}
    config.base.update_from_flattened_dict(FIELDS | files | fields)
    del config.grid
    config.grid = {}
    for name, values in grid.items():
        *parents, field = name.split(".")
        node = config.grid
        for parent in parents:
            node[parent] = {}
            node = node[parent]
        node[field] = values
    config.trials, config.num_seeds = trials, seeds
    config.max_stacked_trials = 100  # Without it one per program, on a CPU.
    return config.lock()


def make_grid(config, directory) -> list:
    overrides = configurations.grid_overrides(config)
    return configurations.make_configurations(config, overrides, directory)


def names_of(points) -> list[list[str]]:
    return [[trial.workdir.name for trial in point.trials] for point in points]


def report_of(workdir) -> dict[str, str]:
    return {name: (workdir / name).read_text() for name in REPORT}


@pytest.fixture(scope="module")
def finished(given, tmp_path_factory):
    """A sweep of one program, with a configuration that diverges; each program takes long.

    Its memory is not planned, for which its step would be compiled once more.
    """
    workdir = tmp_path_factory.mktemp("finished")
    grid = {"warmup_fraction": (0.1, 0.5), "learning_rate": (3e-3, 1e-3)}
    trials = ({"learning_rate": 1e30},)
    config = small_sweep(given, grid, trials, seeds=2, batch_size=8, eval_every=4)
    with config.unlocked():
        config.keep_trials = 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "bytes_per_trial", lambda setup: 1)
        return workdir, config, sweep.sweep(config, workdir)


def test_every_configuration_of_grid_and_trials_is_a_trial_for_each_seed(given, tmp_path):
    grid = {"learning_rate": (1e-3, 2e-3), "model.dropout_rate": (0.1,), "num_epochs": (2, 3.0)}
    trials = ({"learning_rate": 1e-3, "model.dropout_rate": 0.0, "data.text": "a/b c"},)
    config = small_sweep(given, grid, trials, seeds=2, seed=7)
    points = make_grid(config, tmp_path)
    assert len(points) == 5 and {len(point.trials) for point in points} == {2}
    assert points[0].values == {
        "learning_rate": 1e-3,
        "model.dropout_rate": 0.1,
        "num_epochs": 2.0,
        "data.text": "text",
    }
    names = names_of(points)
    assert names[0][0] == (
        "learning_rate=0.001,model.dropout_rate=0.1,num_epochs=2,data.text=text,seed=7"
    )
    assert names[4][1].endswith("num_epochs=1,data.text=a_b_c,seed=8")
    last = points[-1].trials[1].config
    assert last.seed == 8 and last.data.text == "a/b c" and last.batch_size == 16
    # Only what varies is in a name.
    points = make_grid(small_sweep(given, {"batch_size": (8,)}), tmp_path)
    assert names_of(points) == [["seed=0"]] and points[0].trials[0].config.batch_size == 8


def test_trials_that_differ_in_per_trial_fields_only_are_one_program(given, tmp_path):
    values = {"learning_rate": 1.0, "weight_decay": 0.5, "warmup_fraction": 0.5, "num_epochs": 9.0}
    values |= {"warmup_steps": 2, "patience": 3, "model.dropout_rate": 0.5}
    assert {"seed", *values, "model.attention_dropout_rate"} == set(PER_TRIAL)
    trials = tuple({name: value} for name, value in values.items())
    config = small_sweep(given, {}, ({}, *trials, {"batch_size": 4}), seeds=2)
    points = make_grid(config, tmp_path)
    groups = list(programs.group_trials(points).values())
    assert [len(group) for group in groups] == [16, 2]
    first, *rest = sweep.split(groups[0], 5, 3).items()
    assert first == ("3.1", groups[0][:5]) and [len(part) for _, part in rest] == [5, 5, 1]
    assert list(sweep.split(groups[0], 0, 1)) == ["1.1"]
    # More seeds are added at the end.
    config = small_sweep(given, {}, ({}, *trials, {"batch_size": 4}), seeds=3)
    more, _ = programs.group_trials(make_grid(config, tmp_path)).values()
    assert [t.workdir.name for t in more[:16]] == [t.workdir.name for t in groups[0]]


def test_paper_grid_over_any_finetuning_configuration(tmp_path):
    config = paper.get_config("glue:mrpc,runlocal")
    assert config.base.data.name == "mrpc" and config.is_locked
    points = make_grid(config, tmp_path)
    assert len(points) == 18 and [len(g) for g in programs.group_trials(points).values()] == [9, 9]
    assert paper.get_config("squad:v2").base.data.null_answers
    assert paper.get_config("squad").base.task == "squad"
    with pytest.raises(ValueError, match=r"unknown argument 'gleu:mrpc' after the colon"):
        paper.get_config("gleu:mrpc")


def test_dry_run_lists_trials_and_totals_and_writes_nothing(given, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plan, "measure", lambda setup: plan.Cost(2**20, 0.5, 0.25))
    monkeypatch.setattr(memory, "device_memory", lambda: 2**30)
    grid = {"batch_size": (8, 16), "num_epochs": (1.0, 2.0)}
    config = small_sweep(given, grid, seeds=2)
    with config.unlocked():
        config.max_stacked_trials = 3
    result = sweep.sweep(config, tmp_path / "run", dry_run=True)
    seconds = sum(2 * (steps / 2 + (30 * math.ceil(steps / 2) + 20) / 4) for steps in (8, 16, 4, 8))
    assert result == {
        "trials": 8,
        "ended": 0,
        "programs": 4,
        "steps_of_all_trials": 2 * (8 + 16 + 4 + 8),
        "gib_per_device": 3 / 1024,
        "gib_of_device": 1,
        "trials_that_fit": 1024,
        "estimated_seconds": seconds,
        "estimated_seconds_left": seconds,
    }
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["trial", "program", "state"] and lines[9] == []
    assert ["batch_size=16,num_epochs=2,seed=1", "2.2", "to", "run"] in lines[:9]
    assert lines[10][:5] == ["8", "trials", "in", "4", "programs."]
    start = lines.index(["trial", "program", "steps", "time"])
    assert ["batch_size=16,num_epochs=2,seed=1", "2.2", "8", "about", "39", "s"] in lines[start:]
    assert lines[start + 10][:6] == ["8", "trials", "(0", "ended)", "in", "4"]
    assert not (tmp_path / "run").exists()


def test_dry_run_lists_the_trials_before_anything_is_read(given, tmp_path, capsys):
    (given / "broken.csv").write_text("no,header\nof,these\n")
    grid = {"batch_size": (8, 16), "max_seq_length": (8, 16)}
    config = small_sweep(given, grid, seeds=2, data__train=str(given / "broken.csv"))
    with pytest.raises(ValueError, match=r"broken\.csv"):
        sweep.sweep(config, tmp_path / "run", dry_run=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:9]] == [
        f"batch_size={size},max_seq_length={length},seed={seed}"
        for size in (8, 16)
        for length in (8, 16)
        for seed in (0, 1)
    ]
    assert lines[10].startswith("8 trials in 4 programs. Reading the weights and examples")


@pytest.mark.slow
def test_examples_and_weights_are_read_and_hashed_once_for_all_trials(given, tmp_path, monkeypatch):
    calls = []

    def count(module, name):
        function = getattr(module, name)

        def counted(*arguments):
            calls.append(name)
            return function(*arguments)

        monkeypatch.setattr(module, name, counted)

    for name in ("read_task", "parameters_hash"):
        count(task_data, name)
    count(finetune, "read_weights")
    grid = {"batch_size": (4, 8), "optimizer": ("adamw", "bert_adam"), "freeze_layers": (0, 1)}
    config = small_sweep(given, grid, seeds=2)

    def setups_of(config):
        groups, setups = sweep.make_groups(config, make_grid(config, tmp_path), 1), {}
        sweep.make_programs(groups, setups)
        return [*setups.values()]

    setups = setups_of(config)
    assert len(setups) == 8 and sorted(calls) == ["parameters_hash", "read_task", "read_weights"]
    assert len({setup.steps_per_epoch for setup in setups}) == 2
    assert len({id(setup.data) for setup in setups}) == 1
    alone = finetune.prepare(setups[-1].config)
    assert setups[-1].settings(alone.config) == alone.settings(alone.config)
    calls.clear()
    varied = small_sweep(given, {"max_seq_length": (8, 16), "batch_size": (4, 8)})
    data = [setup.data for setup in setups_of(varied)]
    lengths = [(each.shape.length, max(map(len, each.task.train))) for each in data]
    assert calls.count("read_task") == 2 and sorted(lengths) == [(8, 8), (8, 8), (16, 11), (16, 11)]


def test_no_task_reads_a_field_of_training():
    """Examples that one trial has read are those of all that differ in these fields only."""
    files = [*commands.ROOT.glob("bert_jax/tasks/*.py")]
    for name in ("class_weights", "pretrained_head", "task_data"):
        files.append(commands.ROOT / f"bert_jax/finetuning/{name}.py")
    found = {
        match[1] for path in files for match in re.finditer(r"config\.([\w.]+)", path.read_text())
    }
    assert {"max_seq_length", "model.lstm_size"} <= found
    for field in finetune_fields.KEEPING_EXAMPLES:  # Neither alone nor with the others of its part.
        assert not {field, field.split(".")[0]} & found


def test_dry_run_of_a_sweep_that_grows_names_the_finished_trials(
    given, tmp_path, capsys, monkeypatch, fake_trials
):
    monkeypatch.setattr(plan, "measure", lambda setup: plan.Cost(2**20, 0.5, 0.0))
    sweep.sweep(small_sweep(given, {"learning_rate": (1e-3,)}), tmp_path)
    grown = small_sweep(given, {"learning_rate": (1e-3, 2e-3)})
    result = sweep.sweep(grown, tmp_path, dry_run=True)
    assert result["ended"] == 1 and result["estimated_seconds_left"] == 2
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["learning_rate=0.001,seed=0", "1.1", "4", "finished", "in", "1.0", "s"] in lines
    assert [path.name for path in (tmp_path / "trials").glob("*")] == ["seed=0"]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["seed=0"], "Program 1.2 (2 of 5): 1 trial, seed=0"),
        (["seed=0", "seed=1", "seed=2"], "Program 1.2 (2 of 5): 3 trials, seed=0 to seed=2"),
    ],
)
def test_log_says_which_program_starts_with_which_trials(names, text, caplog):
    caplog.set_level("INFO", "absl")
    trials = [Trial(ConfigDict(), pathlib.Path("trials", name)) for name in names]
    sweep.log_program(programs.Program("1.2", None, trials), 2, 5)
    assert caplog.messages == [text]


def test_dry_run_has_no_result_to_print_beside_its_plan(
    given, tmp_path, capsys, monkeypatch, fake_trials
):
    monkeypatch.setattr(plan, "measure", lambda setup: plan.Cost(2**20, 0.5, 0.0))
    config = small_sweep(given, {"learning_rate": (1e-3,)})
    assert sweep.run(config, tmp_path, dry_run=True) is None
    assert capsys.readouterr().out.startswith("trial ")
    shown = sweep.run(config, tmp_path)
    assert shown["trials"] == {"finished": 1}
    assert shown["scores_of_best_configuration"] == {"dev/accuracy": 0.4991}  # 0.49910000000000004


@pytest.mark.slow
def test_trials_on_a_cpu_run_one_after_another_and_compile_once(given, tmp_path, monkeypatch):
    jax.clear_caches()  # Otherwise `pick` also counts the programs of earlier tests.
    setups, prepare = [], sweep.prepare
    monkeypatch.setattr(sweep, "prepare", lambda *each: setups.append(prepare(*each)) or setups[-1])
    config = small_sweep(given, {"learning_rate": (1e-3, 2e-3), "num_epochs": (0.5, 1.0)})
    with config.unlocked():
        config.max_stacked_trials = 0
    sweep.sweep(config, tmp_path)
    programs = json.loads((tmp_path / "sweep.json").read_text())["programs"]
    assert [len(trials) for trials in programs.values()] == [1] * 4
    (setup,) = setups
    steps = setup.steps
    for function in (steps.init, steps.update, steps.predict, steps.pick, steps.replicate):
        assert function._cache_size() == 1


@pytest.mark.slow
def test_each_trial_has_the_workdir_of_a_finetuning(finished):
    workdir, config, _ = finished
    for trials in (point.trials for point in make_grid(config, workdir / "trials")):
        for trial in trials:
            settings = json.loads((trial.workdir / "config.json").read_text())
            for name in ("seed", "learning_rate", "warmup_fraction"):
                assert settings[name] == trial.config[name]
            result = json.loads(trial.result_path.read_text())
            assert result["seed"] == trial.config.seed
            if "diverged" not in result:
                assert (trial.workdir / "predictions/test.jsonl").exists()


@pytest.mark.slow
def test_only_the_best_trials_have_weights(finished):
    workdir, _, result = finished
    kept = sorted(path.parent.name for path in workdir.glob("trials/*/best"))
    assert len(kept) == 3 and pathlib.Path(result["best_trial"]).name in kept
    for name in kept:
        assert bert_jax.load(workdir / "trials" / name).head["labels"] == ["north", "south"]


@pytest.mark.slow
def test_report_ranks_the_configurations_and_names_diverged_ones(finished):
    workdir, _, result = finished
    with (workdir / "trials.csv").open() as file:
        trials = list(csv.DictReader(file))
    assert len(trials) == sum(result["trials"].values()) == 10
    assert result["trials"]["diverged"] == 2
    scores = {}
    for trial in trials:
        if trial["status"].startswith("diverged"):
            assert trial["learning_rate"] == "1e+30" and not trial["dev/accuracy"]
        else:
            point = trial["learning_rate"], trial["warmup_fraction"]
            scores.setdefault(point, []).append(float(trial["dev/accuracy"]))
    medians = {point: sum(values) / 2 for point, values in scores.items()}
    best = max(medians, key=medians.get)
    assert tuple(map(configurations.format_value, result["best_configuration"].values())) == best
    assert result["scores_of_best_configuration"]["dev/accuracy"] == pytest.approx(medians[best])
    assert "test/accuracy" in result["scores_of_best_configuration"]
    best_trial = pathlib.Path(result["best_trial"])
    highest = max(scores[best])
    assert json.loads((best_trial / "result.json").read_text())["dev"]["accuracy"] == highest
    with pytest.raises(FileNotFoundError, match=r"runs of several trials"):
        bert_jax.load(workdir)

    text = (workdir / "report.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    start = [row[0] for row in rows].index("learning_rate")
    assert rows[start][2:] == ["median", "std", "min", "max", "scores by seed", "notes"]
    points = rows[start + 2 :]
    name = best_trial.name
    assert f'model = bert_jax.load("trials/{name}")' in text
    assert re.search(r"--config=configs/finetune/text_classification\.py .*\n", text)
    assert ["label", "examples", "precision", "recall", "f1"] in [row[:5] for row in rows]
    assert [float(row[2]) for row in points[:4]] == pytest.approx(
        sorted(medians.values(), reverse=True), abs=1e-4
    )
    for row in points[:4]:
        listed = sorted(map(float, row[6].split(", ")))
        assert listed == pytest.approx(sorted(scores[tuple(row[:2])]), abs=1e-4)
    assert points[4][0] == "1e+30" and re.search(r"diverged at step \d: seed 0", points[4][-1])


@pytest.mark.slow
def test_page_needs_no_other_file(finished):
    page = (finished[0] / "report.html").read_text()
    assert not re.search(r"(src|href)=(?!.data:)|url\(|@import|<script|http", page)
    assert page.count("<img ") == 1 + 2  # The curves, and a panel for each field.
    for name in ("learning_rate", "warmup_fraction", "during training"):
        assert re.search(f'<img alt="Score (by )?{name}" src="data:image/svg', page)


@pytest.mark.slow
def test_same_command_runs_nothing_again_and_writes_the_same_report(finished, monkeypatch):
    workdir, config, result = finished
    report = report_of(workdir)
    monkeypatch.setattr(finetune, "finetune_batches", None)
    assert sweep.sweep(config, workdir) == result
    assert report_of(workdir) == report


@pytest.fixture
def fake_trials(monkeypatch):
    """Replaces training by results; returns the names of the programs and trials that ran."""
    ran = []

    def run_trials(setup, trials, directory, prune_from):
        waiting = [trial for trial in trials if not trial.result]
        ran.append((directory.name, [trial.workdir.name for trial in waiting]))
        for trial in waiting:
            trial.workdir.mkdir(parents=True, exist_ok=True)
            config = trial.config
            score = 0.5 + config.seed / 10 - config.learning_rate + config.weight_decay / 100
            (trial.workdir / "metrics.jsonl").write_text(f'{{"step": 3, "dev/accuracy": {score}}}')
            result = {"seed": config.seed, "metric": setup.data.task.metric, "seconds": 1.0}
            result |= {"dev": {"accuracy": score}, "steps": 3, "best_step": 3}
            trial.result_path.write_text(json.dumps(result))

    monkeypatch.setattr(finetune, "run_trials", run_trials)
    monkeypatch.setattr(sweep, "check_settings", lambda *_: None)  # There are no checkpoints.
    monkeypatch.setattr(memory, "bytes_per_trial", lambda setup: 1)  # Nor a step to compile.
    return ran


@pytest.mark.slow
def test_more_seeds_can_be_added_and_other_fields_cannot_change(given, tmp_path, fake_trials):
    grid = {"learning_rate": (3e-3, 1e-3)}
    sweep.sweep(small_sweep(given, grid), tmp_path)
    result = sweep.sweep(small_sweep(given, grid, seeds=2), tmp_path)
    assert result["trials"] == {"finished": 4}
    first = ["learning_rate=0.003,seed=0", "learning_rate=0.001,seed=0"]
    more = ["learning_rate=0.003,seed=1", "learning_rate=0.001,seed=1"]
    assert fake_trials == [("1.1", first), ("1.1", more)]
    with pytest.raises(ValueError, match=r"settings:\n  base\.weight_decay: 0\.01 in .* now"):
        sweep.sweep(small_sweep(given, grid, weight_decay=0.0), tmp_path)
    for smaller in ({"grid": {"learning_rate": (1e-3,)}, "seeds": 2}, {"grid": grid}):
        with pytest.raises(ValueError, match=r"has the trial .* and 1 more, .* does not shrink"):
            sweep.sweep(small_sweep(given, **smaller), tmp_path)


GROWTH = {
    "another value": {"grid": {"learning_rate": (1e-3, 2e-3), "batch_size": (16,)}},
    "a value in front": {"grid": {"learning_rate": (1e-3,), "batch_size": (8, 16)}},
    "another field": {"grid": {"learning_rate": (1e-3,), "weight_decay": (0.01, 0.1)}},
    "a configuration": {
        "grid": {"batch_size": (16,), "learning_rate": (1e-3,)},
        "trials": ({"weight_decay": 0.1},),
        "seeds": 2,
    },
}


@pytest.mark.parametrize("case", GROWTH)
@pytest.mark.slow
def test_sweep_that_has_grown_has_the_report_of_the_wide_one(case, given, tmp_path, fake_trials):
    wide = small_sweep(given, **GROWTH[case])
    sweep.sweep(small_sweep(given, {"learning_rate": (1e-3,)}), tmp_path / "grown")
    assert fake_trials == [("1.1", ["seed=0"])]
    sweep.sweep(wide, tmp_path / "grown")
    ran = [name for _, names in fake_trials for name in names]
    assert len(ran) == len(GROWTH[case].get("trials", ())) * 2 + 2  # None ran twice.
    sweep.sweep(wide, tmp_path / "wide")
    assert report_of(tmp_path / "grown") == report_of(tmp_path / "wide")
    trials = [
        {path.name for path in tmp_path.glob(f"{each}/trials/*")} for each in ("grown", "wide")
    ]
    assert trials[0] == trials[1]


@pytest.mark.slow
def test_sweep_does_not_grow_while_another_worker_runs_it(given, tmp_path, fake_trials):
    sweep.sweep(small_sweep(given, {"learning_rate": (1e-3,)}), tmp_path)
    grown = small_sweep(given, {"learning_rate": (1e-3, 2e-3)})
    claim = claims.try_claim(tmp_path / "programs/1.1", {})
    running = r"grid\.learning_rate=.*: process .* is running program"
    with claim, pytest.raises(ValueError, match=running):
        sweep.sweep(grown, tmp_path)
    assert [path.name for path in (tmp_path / "trials").glob("*")] == ["seed=0"]
    sweep.sweep(grown, tmp_path)


@pytest.mark.exhaustive
def test_trained_sweep_that_has_grown_has_the_report_of_the_wide_one(given, tmp_path):
    def unstacked(grid):
        config = small_sweep(given, grid).unlock()
        del config.max_stacked_trials  # The default, which on a CPU stacks none.
        return config.lock()

    wide = unstacked({"learning_rate": (3e-3, 1e-3, 1e30), "batch_size": (16, 32)})
    sweep.sweep(unstacked({"learning_rate": (1e-3, 1e30)}), tmp_path / "grown")
    results = results_of(tmp_path / "grown")
    sweep.sweep(wide, tmp_path / "grown")
    kept = {written for written in results_of(tmp_path / "grown").values()}
    assert len(results) == 2 and set(results.values()) <= kept
    sweep.sweep(wide, tmp_path / "wide")
    assert report_of(tmp_path / "grown") == report_of(tmp_path / "wide")


def small_search(given):
    config = search.get_config("text_classification").unlock()
    config.update(num_trials=5, trials_per_round=3, max_stacked_trials=100)
    config.base = small_sweep(given, {}).base
    return config.lock()


@pytest.mark.slow
def test_search_runs_all_its_rounds_and_resumes_from_their_results(given, tmp_path, fake_trials):
    config = small_search(given)
    result = sweep.sweep(config, tmp_path)
    assert result["trials"] == {"finished": 3 + 1 + 2 + 1}
    assert result["best_configuration"].keys() == {*config.search, "num_epochs"}
    text = (tmp_path / "report.md").read_text()
    assert "| distribution of learning_rate | log-uniform from 1e-05 to 0.0001 |" in text
    assert "| distribution of batch_size | one of 16; 32 |" in text
    for plot in ("Score_by_configuration.svg", "All_configurations.svg"):
        assert f"]({plot})" in text and (tmp_path / plot).exists()
    ran = list(fake_trials)
    epochs = [re.search("num_epochs=(.)", name)[1] for _, names in ran for name in names]
    assert epochs == ["1"] * 3 + ["3"] + ["1"] * 2 + ["3"]
    report = report_of(tmp_path)
    assert sweep.sweep(config, tmp_path) == result
    assert fake_trials == ran and report_of(tmp_path) == report


@pytest.mark.exhaustive
def test_report_of_a_widened_search_is_that_of_the_wide_one_run_at_once(
    given, tmp_path, fake_trials
):
    narrow, wide = small_search(given), small_search(given)
    with narrow.unlocked(), wide.unlocked():
        narrow.num_trials, wide.num_trials = 3, 6
    sweep.sweep(narrow, tmp_path / "grown")
    sweep.sweep(wide, tmp_path / "grown")
    sweep.sweep(wide, tmp_path / "wide")
    assert report_of(tmp_path / "grown") == report_of(tmp_path / "wide")
    ran = [name for _, names in fake_trials for name in names]
    assert ran[: len(ran) // 2] == ran[len(ran) // 2 :]  # None twice in the grown one.


def test_dry_run_of_a_search_tells_the_first_round_from_the_total(given, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "measure", lambda setup: plan.Cost(2**20, 0.5, 0.25))
    planned = sweep.sweep(small_search(given), tmp_path / "run", dry_run=True)
    first = planned["first_round"]
    assert planned["max_trials"] == 7 and first["trials"] == 3
    # Epochs: 3 of the first stage, and (3 + 1 * 3) + (2 + 1 * 3) of all.
    assert planned["estimated_seconds"] == pytest.approx(
        first["estimated_seconds"] * 11 / 3, abs=0.1
    )


@pytest.mark.parametrize("run", [".", "seed_0"])
def test_directory_of_a_run_that_is_not_a_sweep_is_refused(given, tmp_path, run):
    (tmp_path / run).mkdir(exist_ok=True)
    (tmp_path / run / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds a run \(.*config\.json\), not a sweep"):
        sweep.sweep(small_sweep(given, {"batch_size": (16,)}), tmp_path)
    with pytest.raises(ValueError, match=r"config\.json is a file"):
        sweep.sweep(small_sweep(given, {"batch_size": (16,)}), tmp_path / run / "config.json")
    assert not (tmp_path / "sweep.json").exists()


def test_configuration_of_which_a_seed_diverged_does_not_win_by_a_lucky_one(given, tmp_path):
    """The scores by seed; None: diverged."""
    scores = {1e-3: (0.9, None, None), 2e-3: (0.5, 0.7, 0.6), 3e-3: (None, 0.8, 0.65)}
    grid = {"batch_size": (16,), "learning_rate": tuple(scores)}
    config = small_sweep(given, grid, seeds=3)
    points = make_grid(config, tmp_path / "trials")
    for point in points:
        for trial, score in zip(point.trials, scores[point.values["learning_rate"]], strict=True):
            trial.workdir.mkdir(parents=True)
            (trial.workdir / "metrics.jsonl").touch()
            result = {"dev": {"accuracy": score}, "seconds": 1.0} if score else {"diverged": 3}
            trial.result_path.write_text(json.dumps({"seed": trial.config.seed} | result))
    summary = report.write(tmp_path, config, points, "dev/accuracy")
    assert summary["best_configuration"] == {"learning_rate": 3e-3}
    text = (tmp_path / "report.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| 0.0")]
    assert re.search(r"^\| batch_size +\| 16 +\|$", text, re.MULTILINE)
    assert [row[:2] for row in rows] == [["0.003", "0.6500"], ["0.002", "0.6000"], ["0.001", ""]]
    assert "0.003: median dev/accuracy 0.6500." in text and "2 of 3 seeds with a score" in text
    for page in (text, (tmp_path / "report.html").read_text()):
        assert "A diverged seed counts as worse than any score" in page
    plots = re.findall(r"^!\[(.+)\]\((.+\.svg)\)$", text, re.MULTILINE)
    assert [name for name, _ in plots] == ["Score during training", "Score by learning_rate"]
    assert all("</svg>" in (tmp_path / path).read_text() for _, path in plots)
    assert "- blue: learning_rate=0.003\n" in text
    with (tmp_path / "trials.csv").open() as file:
        trials = list(csv.DictReader(file))
    medians = [trial["median_with_diverged_as_worst"] for trial in trials]
    assert medians == [""] * 3 + ["0.6"] * 3 + ["0.65"] * 3


def test_many_values_of_a_field_are_a_range_if_all_are_numbers(given, tmp_path):
    rates = tuple(0.01 * n for n in range(13))
    grids = {"learning_rate": (*rates[1:], 0.2)}, {"model.dropout_rate": rates}
    texts = []
    for grid, trials in zip(grids, ((), ({"weight_decay": 0.1},)), strict=True):
        config = small_sweep(given, grid, trials)
        points = make_grid(config, tmp_path / "trials")
        scores = [summaries.summarize(point, "dev/accuracy") for point in points]
        table = dict(report.run_table(config, scores).rows)
        texts.append(table[f"values of {next(iter(grid))}"])
    assert texts[0] == "13 values from 0.01 to 0.2"
    assert re.fullmatch(r"0; 0\.01; .*; 0\.12; default", texts[1])


@pytest.mark.exhaustive
def test_program_without_a_finite_loss_does_not_stop_the_others(given, tmp_path):
    """Program 1.1 is a single trial, 2.1 one of two trials that both diverge."""
    diverging = {"learning_rate": 1e30, "num_epochs": 0.5}
    trials = (
        diverging,
        diverging | {"batch_size": 8},
        diverging | {"batch_size": 8, "weight_decay": 0.1},
        {"batch_size": 8, "max_seq_length": 8, "learning_rate": 1e-3, "num_epochs": 0.5},
    )
    config = small_sweep(given, {}, trials)
    for _ in range(2):
        result = sweep.sweep(config, tmp_path)
        assert result["trials"].pop("diverged") == 3 and sum(result["trials"].values()) == 1
        assert result["best_configuration"]["max_seq_length"] == 8
        assert not list(tmp_path.glob("programs/*/checkpoints"))
    config = small_sweep(given, {}, (diverging,))
    result = sweep.sweep(config, tmp_path / "none")
    assert result["trials"] == {"diverged": 1} and result["best_configuration"] is None
    assert (
        "No configuration has a score: dev/accuracy." in (tmp_path / "none/report.md").read_text()
    )


def test_out_of_memory_says_how_many_trials_fit(given, tmp_path, monkeypatch):
    def fail(*_):
        raise sweep.jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(finetune, "run_trials", fail)
    monkeypatch.setattr(memory, "bytes_per_trial", lambda setup: 2**20)
    config = small_sweep(given, {"learning_rate": (1e-3, 2e-3, 3e-3)})
    fit_2 = "about 2 fit: set config.max_stacked_trials=2"
    for size, advice in ((5 << 19, fit_2), (1, "not"), (1 << 30, fit_2)):  # The last one runs.
        monkeypatch.setattr(memory, "device_memory", lambda size=size: size)
        with pytest.raises(ValueError, match=f"program 1.1, with 3 trials: {advice}"):
            sweep.sweep(config, tmp_path)


def test_more_trials_than_the_memory_of_the_cpu_holds_are_refused_before_the_first_step(
    given, tmp_path, monkeypatch, fake_trials
):
    monkeypatch.setattr(memory, "bytes_per_trial", lambda setup: 2**20)
    host = SimpleNamespace(total=sweep.jax.local_device_count() * (5 << 19))
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: host)
    config = small_sweep(given, {"learning_rate": (1e-3, 2e-3), "num_epochs": (1.0, 2.0)})
    message = "program 1.1, with 4 trials: about 2 fit: set config.max_stacked_trials=2"
    with pytest.raises(ValueError, match=message):
        sweep.sweep(config, tmp_path)
    assert not fake_trials and not (tmp_path / "sweep.json").exists()
    with config.unlocked():
        config.max_stacked_trials = 2
    sweep.sweep(config, tmp_path)
    assert [name for name, _ in fake_trials] == ["1.1", "1.2"]


def test_setups_share_the_encoder(given, tmp_path):
    """Each kind of program has a setup, and all of them live as long as the sweep."""
    config = small_sweep(given, {"batch_size": (2, 4)}, lora__rank=2)
    groups = sweep.make_groups(config, make_grid(config, tmp_path), 1)
    before = sweep.jax.live_arrays()  # Kept, so that no id is given again.
    first, second = sweep.make_programs(groups, {})
    assert first.setup is not second.setup
    known = {id(array) for array in before}
    added = sum(array.nbytes for array in sweep.jax.live_arrays() if id(array) not in known)
    assert added <= memory.shared_bytes(second.setup)  # Those of `init_from`, as they were read.


@pytest.mark.slow
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.exhaustive), 2])
def test_planned_memory_equals_the_compiled_stack(given, tmp_path, rank):
    config = small_sweep(given, {"learning_rate": (1e-3, 2e-3)}, lora__rank=rank)
    groups = sweep.make_groups(config, make_grid(config, tmp_path), 1)
    (program,) = sweep.make_programs(groups, {})
    one = memory.bytes_per_trial(program.setup)
    stacked = memory.bytes_per_trial(program.setup, num_trials=8)
    assert stacked == pytest.approx(memory.program_bytes(program.setup, 8, one), rel=0.15)


@pytest.mark.exhaustive
def test_dry_run_of_trials_with_a_teacher_estimates_them(given, tmp_path):
    write_weights(tmp_path / "teacher", given / "vocab.txt", head=("north", "south"), bias=0.5)
    config = small_sweep(given, {"learning_rate": (1e-3,)}, teacher=str(tmp_path / "teacher"))
    assert sweep.sweep(config, tmp_path / "sweep", dry_run=True)["trials"] == 1


WRONG = {
    "unknown tracker": (
        {"base": {"tracker": "wandbb"}},
        r"^config\.base with seed=0: config\.tracker=wandbb",
    ),
    "seeds of another type": ({"num_seeds": 2.0}, r"config\.num_seeds=2\.0"),
    "rounds of another type": (
        {
            "search": {"learning_rate": ("uniform", 1e-4, 1e-3)},
            "halving": 1.0,
            "without": ("grid", "trials", "train_fractions"),
        },
        r"config\.halving=1\.0",
    ),
    "empty grid": ({"grid": {}}, r"config\.grid is empty"),
    "empty values": ({"grid": {"learning_rate": ()}}, r"config\.grid\.learning_rate=\(\)"),
    "one value": (
        {"grid": {"data.train": "a.csv"}},
        r"config\.grid\.data\.train='a\.csv'",
    ),
    "unknown field": (
        {"grid": {"learning_rat": (1e-3,)}},
        r"grid\.learning_rat: .* learning_rate\?",
    ),
    "unknown field of a trial": (
        {"trials": ({"learning_rate": 1e-3}, {"dropout_rate": 0.1})},
        r"trials\[1\]\.dropout_rate: .* model\.dropout_rate\?",
    ),
    "trial is no dict": ({"trials": (0.1,)}, r"trials\[0\]=0\.1"),
    "wrong type": (
        {"grid": {"learning_rate": (1e-3, "fast")}},
        r"grid\.learning_rate: 'fast' is of type str; expected float",
    ),
    "fraction": ({"grid": {"batch_size": (8.5,)}}, r"batch_size: 8\.5 is .* float; expected int"),
    "bool": ({"grid": {"batch_size": (True,)}}, r"batch_size: True is .* bool; expected int"),
    "none": ({"grid": {"batch_size": (None,)}}, r"batch_size: None is .* NoneType; expected int"),
    "placeholder": (
        {"grid": {"model.dropout_rate": ("a",)}},
        r"model\.dropout_rate: 'a' is of type str; expected float",
    ),
    "twice in the grid": (
        {"grid": {"learning_rate": (1e-3, 2e-3, 0.001)}},
        r"config\.grid\.learning_rate=\(0\.001, 0\.002, 0\.001\): 0\.001 is given twice",
    ),
    "twice": (
        {"grid": {"learning_rate": (1e-3, 2e-3)}, "trials": ({"learning_rate": 2e-3},)},
        r"trials\[0\]: duplicate configuration learning_rate=0\.002, already in grid",
    ),
    "same name": (
        {"grid": {"data.text": ("a b", "a/b")}},
        r"grid: duplicate configuration data\.text=a_b",
    ),
    "misspelled field": (
        {"max_stacked_trial": 3},
        r"config\.max_stacked_trial: .* max_stacked_trials",
    ),
    "grid and search": ({"search": {}}, r"config\.grid: .* either a grid or a search"),
    "no base": ({"without": ["base"]}, r"no `base`"),
    "nothing to run": ({"without": ["grid", "trials"]}, r"config\.grid is empty"),
    "file of base": (
        {"base_config": "configs/finetune/gleu.py:mrpc"},
        r"config\.base_config=configs/finetune/gleu\.py:mrpc: .*no config file .*glue\.py",
    ),
    "fraction of seeds": ({"num_seeds": 1.5}, r"config\.num_seeds=1\.5"),
    "seeds in the grid": ({"grid": {"seed": (0, 1)}}, r"grid\.seed=0: .* config\.num_seeds"),
    "seeds in base": ({"base": {"num_seeds": 3}}, r"config\.base\.num_seeds=3: expected 1"),
    "no seeds": ({"seeds": 0}, r"config\.num_seeds=0"),
    "value out of bounds": (
        {"grid": {"learning_rate": (1e-3, -1.0)}},
        r"^config\.base with learning_rate=-1,seed=0: config\.learning_rate=-1\.0",
    ),
    "value that does not fit the weights": (
        {"grid": {"max_seq_length": (16, 4096)}},
        r"^config\.base with max_seq_length=4096,seed=0: config\.max_seq_length=4096: .* 32",
    ),
    "value out of bounds of a later trial": (
        {"grid": {"model.dropout_rate": (0.1, 1.5)}},
        r"^config\.base with model\.dropout_rate=1\.5,seed=0: BertConfig\.dropout_rate",
    ),
    "later trial without a step": (
        {"grid": {"num_epochs": (1.0, 0.01)}},
        r"^config\.base with num_epochs=0\.01,seed=0: config\.num_epochs=0\.01 rounds to 0 steps",
    ),
    "no weights": (
        {"base": {"init_from": ""}},
        r"^config\.base with seed=0: no weights .*config\.init_from",
    ),
    "two metrics": (
        {"grid": {"data.metric": ("accuracy", "macro_f1"), "batch_size": (16,)}},
        r"configurations have different metrics \(dev/accuracy, dev/macro_f1\)",
    ),
    "metric that the task does not have": (
        {"grid": {"data.metric": ("accuracy", "f7")}},
        r"^config\.base with data\.metric=f7,seed=0: config\.data\.metric=f7",
    ),
    "no dev split": (
        {"base": {"data__dev": ""}},
        r"configurations cannot be ranked: .* config\.base\.data\.dev",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_clear_error_before_anything_is_written(case, given, tmp_path):
    fields, message = WRONG[case]
    fields = {"grid": {"weight_decay": (0.01,)}} | fields
    base, without = fields.pop("base", {}), fields.pop("without", ())
    names = ("grid", "trials", "seeds")
    own = {name: fields.pop(name) for name in fields.keys() - names}
    config = small_sweep(given, **fields, **base).unlock()
    for name in (*without, *own.keys() & config.keys()):
        del config[name]
    config.update(own)
    config.lock()
    with pytest.raises(ValueError, match=message):
        sweep.sweep(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_own_configuration_needs_only_base_and_what_is_varied(given, tmp_path, fake_trials):
    grid = {"class_weights": ("balanced", (), (1, 5))}
    config = ConfigDict({"base": small_sweep(given, {}).base, "grid": grid})
    result = sweep.sweep(config, tmp_path)
    names = [name for _, names in fake_trials for name in names]
    values = ("balanced", "none", "1,5")
    assert names == [f"class_weights={value},seed=0" for value in values]
    assert result["trials"] == {"finished": 3}
    own = ConfigDict({"base": config.base, "trials": [{"class_weights": "balanced"}]})
    points = make_grid(settings.complete(own), tmp_path)
    assert points[0].trials[0].config.class_weights == ("balanced",)


def test_sweep_without_training_data_is_an_error(given, tmp_path):
    weights = write_weights(tmp_path / "weights", given / "vocab.txt", head=("north", "south"))
    config = small_sweep(given, {"learning_rate": (1e-3, 2e-3)}, data__train="")
    with config.unlocked():
        config.base.init_from = str(weights)
    with pytest.raises(ValueError, match=r"needs training data"):
        sweep.sweep(config, tmp_path / "sweep", dry_run=True)


def test_address_of_a_bucket_is_refused(given):
    with pytest.raises(ValueError, match="workdir gs:/bucket/sweep"):
        sweep.sweep(small_sweep(given, {"batch_size": (16,)}), "gs://bucket/sweep")


def test_one_of_two_workers_claims_a_program_and_takes_over_from_a_dead_one(tmp_path, monkeypatch):
    seen = {}
    with claims.try_claim(tmp_path, seen):
        assert claims.try_claim(tmp_path, seen) is None
        assert claims.holder(tmp_path, {}).startswith("process ")
    with claims.try_claim(tmp_path, seen):  # Ended: free at once.
        pass
    # Its process has ended: the lock is free. On another machine, only its heartbeat shows that.
    dead = json.loads((tmp_path / "claims/1/heartbeat").read_text())
    mount = claims._mount(tmp_path)
    for elsewhere, waits in ((mount, False), ("another machine", True)):
        heartbeat = {"worker": "w", "mount": elsewhere, "count": 3}
        (tmp_path / "claims/1/heartbeat").write_text(json.dumps(heartbeat))
        assert bool(claims.holder(tmp_path, seen)) is waits
    clock = time.monotonic() + claims.TIMEOUT
    monkeypatch.setattr(claims.time, "monotonic", lambda: clock)
    assert claims.try_claim(tmp_path, {}) is None  # Seen for the first time.
    heartbeat["count"] += 1
    (tmp_path / "claims/1/heartbeat").write_text(json.dumps(heartbeat))
    assert claims.try_claim(tmp_path, seen) is None  # It lives.
    clock += claims.TIMEOUT + 1
    with claims.try_claim(tmp_path, seen):
        assert dead == {"ended": True} and (tmp_path / "claims/2/heartbeat").exists()


def test_an_error_of_the_disk_does_not_end_the_heartbeat(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "INTERVAL", 0.001)
    errors, exists, recovered = [OSError("Input/output error")] * 2, pathlib.Path.exists, Event()

    def exists_after_errors(path):
        if errors:
            raise errors.pop()
        recovered.set()
        return exists(path)

    with claims.try_claim(tmp_path, {}) as claim:
        monkeypatch.setattr(type(claim._successor), "exists", exists_after_errors)
        assert recovered.wait(60)


def sweep_command(given) -> list[str]:
    """Two programs of six trials, of which two diverge and two end before the others."""
    return [
        "bert_jax.sweep",
        "--config=configs/sweeps/paper.py:text_classification",
        f"--config.base.init_from={given / 'weights'}",
        *(f"--config.base.data.{name}={given / name}.csv" for name in ("train", "dev", "test")),
        "--config.base.max_seq_length=16",
        "--config.base.eval_every=5",
        "--config.grid.learning_rate=1e-3,3e-3,1e30",
        "--config.grid.batch_size=8,32",
        "--config.grid.num_epochs=(6.0,12.0)",
        "--config.max_stacked_trials=100",
    ]


@pytest.fixture(scope="module")
def uninterrupted(given, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("uninterrupted") / "run"
    with commands.ended(commands.launch(sweep_command(given), workdir)) as started:
        assert commands.finish(started) == [0], commands.log_of(workdir).read_text()
    return workdir


def latest(workdir) -> int:
    """Returns the number of steps of both programs that are saved."""
    programs = [workdir / f"programs/{name}" for name in ("1.1", "2.1")]
    ended = [96 if (path / "claims/0").exists() else 0 for path in programs]
    saved = [max(saved_steps(path / "checkpoints"), default=0) for path in programs]
    return max(saved[0], ended[1]) + saved[1]


def results_of(workdir) -> dict:
    """Returns the result of each trial, with the time at which it was written."""
    paths = workdir.glob("trials/*/result.json")
    return {path: (path.stat().st_mtime_ns, path.read_text()) for path in paths}


def assert_each_trial_ended_once(workdir):
    names = {path.parent.name for path in results_of(workdir)}
    assert len(names) == 12
    for name in names:
        lines = (workdir / "trials" / name / "metrics.jsonl").read_text().splitlines()
        ends = [line for line in lines if "final/dev/accuracy" in line]
        assert len(ends) == ("1e+30" not in name)


@pytest.mark.exhaustive
def test_sweep_killed_at_random_ends_with_the_report_of_an_uninterrupted_one(
    given, uninterrupted, tmp_path
):
    workdir, rng, results = tmp_path / "killed", random.Random(KILLS), {}
    for kill in range(KILLS):
        before = latest(workdir)
        with commands.ended(commands.launch(sweep_command(given), workdir)) as started:
            if rng.random() < 0.25:
                wanted, delay = before, rng.uniform(0, 12)
            else:
                wanted, delay = before + rng.randint(1, 12), rng.uniform(0, 0.3)
            deadline = time.monotonic() + 600
            while latest(workdir) < wanted and started[0].poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(delay)
        after = results_of(workdir)
        assert results.items() <= after.items()  # None was written again.
        print(f"kill {kill + 1}: {latest(workdir)} steps, {len(after)} of 12 trials have ended")
        results = after
    with commands.ended(commands.launch(sweep_command(given), workdir)) as started:
        assert commands.finish(started) == [0], commands.log_of(workdir).read_text()
    assert results.items() <= results_of(workdir).items()
    assert_each_trial_ended_once(workdir)
    assert report_of(workdir) == report_of(uninterrupted)


@pytest.mark.exhaustive
def test_preempted_sweep_saves_and_resumes(given, uninterrupted, tmp_path):
    workdir = tmp_path / "run"
    with commands.ended(commands.launch(sweep_command(given), workdir)) as started:
        commands.wait_until(lambda: latest(workdir) >= 10, "step 10 is not saved", started)
        started[0].send_signal(signal.SIGTERM)
        assert commands.finish(started) == [PREEMPTED], commands.log_of(workdir).read_text()
    with commands.ended(commands.launch(sweep_command(given), workdir)) as started:
        assert commands.finish(started) == [0], commands.log_of(workdir).read_text()
    assert "Resuming from step" in commands.log_of(workdir).read_text()
    assert report_of(workdir) == report_of(uninterrupted)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "victim", [0, *(pytest.param(victim, marks=pytest.mark.exhaustive) for victim in (None, 1))]
)
def test_workers_that_share_a_directory_run_each_trial_once(given, uninterrupted, tmp_path, victim):
    """Also if one of the two is killed: the other takes over."""
    workdir = tmp_path / "shared"
    workdir.mkdir()
    names = [tmp_path / f"worker{number}" for number in range(2)]  # Each has its own log.
    for name in names:
        name.symlink_to(workdir)
    workers = [commands.launch(sweep_command(given), name)[0] for name in names]
    with commands.ended(workers):
        if victim is not None:
            log = commands.log_of(names[victim])
            commands.wait_for(log, "First step ", workers)
            workers[victim].kill()
            workers.pop(victim)
        assert not any(commands.finish(workers)), [commands.log_of(n).read_text() for n in names]
    logs = "".join(commands.log_of(name).read_text() for name in names)
    runs = re.findall(r"Program (\S+) \([12] of 2\): 6 trials, ", logs)
    assert len(runs) == 2 + (victim is not None) and set(runs) == {"1.1", "2.1"}
    assert_each_trial_ended_once(workdir)
    assert report_of(workdir) == report_of(uninterrupted)


@pytest.mark.slow
def test_ctrl_c_after_the_last_step_of_a_program_stops_the_sweep(given, tmp_path, monkeypatch):
    finish = TrialRun.finish

    def interrupt_and_finish(run, *args):
        signal.raise_signal(signal.SIGINT)
        finish(run, *args)

    config = small_sweep(given, {"batch_size": (8, 16)}, num_epochs=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(TrialRun, "finish", interrupt_and_finish)
        with pytest.raises(RunStopped):
            sweep.sweep(config, tmp_path)
    assert len(list(tmp_path.glob("trials/*/result.json"))) == 1
    sweep.sweep(config, tmp_path)
    assert len(list(tmp_path.glob("trials/*/result.json"))) == 2
