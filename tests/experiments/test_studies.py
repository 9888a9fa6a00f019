"""Every study's runs are valid and distinct, at both scales, and its report shows their scores."""

import collections
import csv
import importlib
import itertools
import json
import random
import shlex

import pytest
import study
import study_report
import study_tasks  # noqa: F401  Defines the flags.
from absl import flags
from ml_collections import ConfigDict

from bert_jax.runtime.command_line import define_config
from bert_jax.tasks import setup as finetune_setup
from bert_jax.training.setup import check_numbers, model_config
from experiments import story_endings
from tests.helpers import ROOT
from tools import sweep

NAMES = sorted(
    path.stem
    for path in (ROOT / "experiments").glob("*.py")
    if path.stem not in ("study", "study_report", "study_tasks", "story_endings")
)


@pytest.fixture(autouse=True)
def given_directories(monkeypatch):
    flags.FLAGS.mark_as_parsed()  # Other modules in this process may have required flags.
    monkeypatch.setattr(flags.FLAGS["squad_dir"], "value", "squad")


def load(name: str) -> study.Study:
    return importlib.import_module(name).STUDY


def resolve(command: list[str]) -> ConfigDict:
    """Returns the configuration of a command, as the program would parse its flags."""
    values, argv = flags.FlagValues(), [word for word in command if word != "-m"]
    holder = define_config("", values, argv)
    flags.DEFINE_string("workdir", "", "", flag_values=values)
    values(argv)
    return holder.value


@pytest.mark.parametrize("scale", ["laptop", "pod"])
@pytest.mark.parametrize("name", NAMES)
def test_runs_are_distinct_and_their_settings_resolve(name, scale):
    each = load(name)
    steps = study.plan(each, scale)
    workdirs = collections.Counter(
        word for step in steps for word in step.command if word.startswith("--workdir=")
    )
    assert workdirs and set(workdirs.values()) == {1}
    for step in steps:
        if "bert_jax.pretrain" in step.command:
            config = resolve(step.command)
            check_numbers(config)
            model_config(config, vocab_size=4096)
        elif step.command[0] == "tools/sweep.py":
            config = resolve(step.command)
            sweep.check_sweep(config)
            points = sweep.make_points(config, sweep.grid_overrides(config), ROOT)
            finetune_setup.check_numbers(points[0].trials[0].config)
            assert len(points) == 1 or scale == "pod"


@pytest.mark.parametrize("name", NAMES)
def test_script_of_the_pod_runs_every_step_and_then_reports(name):
    each = load(name)
    steps = study.plan(each, "pod")
    lines = [line for line in study.script(each, steps).splitlines() if "python" in line]
    assert len(lines) == len(steps) + 1
    assert [
        shlex.split(line)[-len(step.command) :] for line, step in zip(lines, steps, strict=False)
    ] == [step.command for step in steps]
    assert lines[-1].endswith("--report_only")


@pytest.mark.parametrize("name", NAMES)
def test_report_has_our_scores_beside_those_of_the_paper(name, tmp_path):
    each = load(name)
    rows, columns = each.rows("laptop"), [task.name for task in each.tasks("laptop")]
    rng = random.Random(0)
    scores = {
        (row.name, column): [rng.random() for _ in range(each.num_seeds)]
        for row in study.rows_to_run(each, "laptop")
        for column in columns
    }
    study_report.write(each, "laptop", columns, scores, tmp_path, "python command")
    text = (tmp_path / f"{name}.md").read_text()
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line[:1] == "|"}
    for row in rows:
        assert all(f"| {score} |" in lines[row.name] for score in row.paper.values())
    for (row, _), values in scores.items():
        assert study_report.show(values, 100) in lines[row]
    assert each.limits in text and "python command" in text
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000


def test_scores_are_those_of_the_best_point_of_a_sweep(tmp_path):
    for trial, score in {"a=1,seed=0": 0.9, "a=1,seed=1": 0.1, "a=2,seed=0": 0.6}.items():
        (tmp_path / "trials" / trial).mkdir(parents=True)
        result = {"dev": {"accuracy": score}}
        (tmp_path / "trials" / trial / "result.json").write_text(json.dumps(result))
    (tmp_path / "trials" / "a=2,seed=1").mkdir()
    diverged = {"diverged": 3}
    (tmp_path / "trials" / "a=2,seed=1" / "result.json").write_text(json.dumps(diverged))
    assert study_report.best_scores(tmp_path, "dev/accuracy") == [0.6]
    assert study_report.show([], 100) == "diverged"
    assert study_report.show(None, 100) == ""


def test_perplexity_has_a_panel_of_its_own_beside_the_scores():
    rows = [study.Row("small"), study.Row("large")]
    scores = {(row.name, "topics, accuracy"): [0.5, 0.7] for row in rows}
    scores |= {("small", "held-out perplexity"): [250.0], ("large", "held-out perplexity"): [90.0]}
    figure = study_report.draw_scores("Size", rows, ["topics, accuracy"], scores)
    perplexity, accuracy = figure.axes
    assert [perplexity.get_xlabel(), accuracy.get_xlabel()] == [
        "held-out perplexity",
        "accuracy on dev (%)",
    ]
    values = [[x for line in axis.lines for x in line.get_xdata()] for axis in figure.axes]
    assert values[0] == [250, 250, 90, 90] and max(values[1]) == 70


def test_report_of_runs_that_are_missing_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no results: run the study"):
        study_report.best_scores(tmp_path, "dev/accuracy")


def test_questions_that_cannot_be_fetched_are_an_error(monkeypatch):
    monkeypatch.setattr(flags.FLAGS["squad_dir"], "value", "")
    with pytest.raises(ValueError, match="give --squad_dir"):
        load("squad").tasks("laptop")


def test_finished_steps_are_not_run_again(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(
        study.subprocess,
        "run",
        lambda command, **_: (
            commands.append(command[1:]) or study.subprocess.CompletedProcess(command, 3)
        ),
    )
    (tmp_path / "done").touch()
    steps = [study.Step(["first"], str(tmp_path / "done")), study.Step(["second"], "x")]
    with pytest.raises(SystemExit) as error:
        study.run([*steps, study.Step(["third"])])
    assert commands == [["second"]] and error.value.code == 3


def test_endings_are_of_the_same_tale_and_labels_name_the_true_one(tmp_path):
    tales = {}
    for name, column in story_endings.FILES.items():
        texts = []
        for number in range(6):
            sentences = [f"{name[0]}{number} then came day {index}." for index in range(20)]
            tales |= dict(itertools.pairwise(sentences))
            texts.append(" ".join(sentences))
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.writer(file, delimiter="\t")
            writer.writerows([["header"]] * 3 + [["x"] * column + [text] for text in texts])
    story_endings.main(str(tmp_path), str(tmp_path / "out"))
    first_words = {}
    for split in ("train", "val"):
        with (tmp_path / "out" / f"{split}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        first_words[split] = {row["sent1"].split()[0] for row in rows}
        for row in rows:
            endings = [row[f"ending{index}"] for index in range(4)]
            assert endings[int(row["label"])] == tales[row["sent1"]]
            assert {each.split()[0] for each in endings} == {row["sent1"].split()[0]}
            assert len({*endings, row["sent1"]}) == 5
    assert first_words["train"] and first_words["val"]
    assert not first_words["train"] & first_words["val"]
