"""Every study's runs are valid and distinct, at both scales, and its report shows their scores."""

import collections
import csv
import dataclasses
import importlib
import itertools
import json
import math
import os
import pathlib
import random
import shlex
import signal
import subprocess
import sys

import long_documents
import numpy as np
import pytest
import study
import study_report
from absl import flags
from ml_collections import ConfigDict
from study_report import Seeds

from bert_jax.finetuning import finetune_fields
from bert_jax.runtime.command_line import define_config
from bert_jax.sweeps.configurations import grid_overrides, make_configurations
from bert_jax.sweeps.settings import check_sweep, known_fields
from bert_jax.tokenizers.tokenizer import load_tokenizer
from bert_jax.training.phases import check_numbers
from bert_jax.training.pretrain_setup import make_model_config
from experiments import family_data, joined_news, story_endings
from tests.helpers.commands import ROOT

NAMES = sorted(
    path.stem
    for path in (ROOT / "experiments").glob("*.py")
    if not path.stem.startswith("study")
    and path.stem
    not in ("all_tokens_mlm", "joined_news", "family_data", "story_endings", "toy_language")
    and path.stem not in ("search", "vocabulary", "text_sizes")  # Which are no lists of rows.
)


@pytest.fixture(autouse=True)
def set_flag(monkeypatch):
    """Sets a flag of the studies for the duration of a test."""
    flags.FLAGS.mark_as_parsed()  # Other modules in this process may have required flags.
    return lambda name, value: monkeypatch.setattr(flags.FLAGS[name], "value", value)


@pytest.fixture
def load(set_flag):
    def load_study(name: str) -> study.Study:
        set_flag("squad_dir", "squad" if name == "squad" else "")  # Its laptop scale needs it.
        return importlib.import_module(name).STUDY

    return load_study


def resolve(command: list[str]) -> ConfigDict:
    """Returns the configuration of a command, as the program would parse its flags."""
    values, argv = flags.FlagValues(), [word for word in command if word != "-m"]
    holder = define_config("", known_fields, values, argv)
    flags.DEFINE_string("workdir", "", "", flag_values=values)
    values(argv)
    return holder.value


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["laptop", "pod"])
@pytest.mark.parametrize("name", NAMES)
def test_runs_are_distinct_and_their_settings_resolve(name, scale, load):
    commands = [command.arguments for command in study.plan(load(name), scale)]
    workdirs = collections.Counter(
        word for command in commands for word in command if word.startswith("--workdir=")
    )
    assert workdirs and set(workdirs.values()) == {1}
    for command in commands:
        if "bert_jax.pretrain" in command:
            config = resolve(command)
            check_numbers(config)
            make_model_config(config, vocab_size=4096)
        elif command[1] == "bert_jax.sweep":
            config = resolve(command)
            check_sweep(config)
            points = make_configurations(config, grid_overrides(config), ROOT)
            finetune_fields.check_numbers(points[0].trials[0].config)
            assert len(points) == 1 or scale == "pod"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_script_of_the_pod_runs_every_command_and_then_reports(name, load, monkeypatch):
    each = load(name)
    monkeypatch.setattr("sys.argv", ["study.py", "--scale=pod", "--dry_run", "--launch=true"])
    commands = [command.arguments for command in study.plan(each, "pod")]
    script = study.script(each, study.plan(each, "pod"))
    lines = [line for line in script.splitlines() if "python" in line]
    assert len(lines) == len(commands) + 1
    assert [
        shlex.split(line)[-len(command) :] for line, command in zip(lines, commands, strict=False)
    ] == commands
    assert lines[-1] == "python study.py --scale=pod --report_only"


def stack_sizes(command: list[str]) -> tuple[int, int]:
    """Returns over how many chips a sweep distributes its trials, and how many it stacks."""
    config = resolve(command)
    return config.base.mesh.trial, config.max_stacked_trials


@pytest.mark.parametrize("name", NAMES)
def test_sweeps_train_at_most_one_trial_on_each_chip_of_a_host(name, load):
    commands = [command.arguments for command in study.plan(load(name), "pod")]
    sweeps = [command for command in commands if command[1] == "bert_jax.sweep"]
    assert {stack_sizes(command) for command in sweeps} == {(4, 4)}


def test_script_launches_a_slice_for_each_run(load, set_flag):
    set_flag("workdir", "/gcs/studies")
    set_flag("slice", "--name=s --zone='z 1'")
    each = load("squad")
    commands = study.plan(each, "pod")
    lines = [line for line in study.script(each, commands).splitlines() if "python" in line]
    types = []
    for line, command in zip(lines, commands, strict=False):
        words = shlex.split(line)
        words = words[words.index("python") + 1 :]
        if command.arguments[0] != "-m":
            assert words == command.arguments
            continue
        end = words.index("--")
        launch, arguments = words[:end], words[end + 1 :]
        assert launch[:2] == ["tools/launch_tpu.py", "launch"]
        assert launch[3:5] == ["--name=s", "--zone=z 1"]
        assert f"--program={command.arguments[1].removeprefix('bert_jax.')}" in launch
        assert arguments == command.arguments[len(command.arguments) - len(arguments) :]
        is_large = any("pod_large.py" in word for word in arguments)
        assert launch[2] == f"--accelerator_type=v4-{128 if is_large else 32}"
        types.append(launch[2])
        if "--program=sweep" in launch:
            chips = int(launch[2].rpartition("-")[2]) // 2  # A v4 chip has two cores.
            assert stack_sizes(command.arguments) == (chips, chips)
    assert {"--accelerator_type=v4-32", "--accelerator_type=v4-128"} <= set(types)


def test_dry_run_at_pod_scale_only_prints_the_script(load, set_flag, tmp_path, monkeypatch, capsys):
    launched = []
    monkeypatch.setattr(study, "run_command", launched.append)
    set_flag("workdir", str(tmp_path / "studies"))
    set_flag("launch", True)
    set_flag("dry_run", True)
    each = load("glue")
    study.run_study(each, "pod")
    assert capsys.readouterr().out.startswith("#!/bin/bash\n")
    assert not launched and not list(tmp_path.iterdir())
    set_flag("dry_run", False)
    study.run_study(each, "pod")
    assert launched == [["bash", str(tmp_path / "studies/pod/glue.sh")]]


@pytest.mark.parametrize(("name", "value"), [("launch", True), ("slice", "--name=s")])
def test_flags_of_the_pod_are_errors_at_laptop_scale(name, value, load, set_flag):
    each = load("glue")
    set_flag(name, value)
    with pytest.raises(ValueError, match=f"--{name} is for --scale=pod"):
        study.run_study(each, "laptop")


@pytest.mark.parametrize(
    ("wrong", "given"),
    [
        ("workdir", "runs/studies"),
        ("squad_dir", "runs/squad"),
        ("squad2_dir", "squad2"),  # By default.
    ],
)
def test_directories_that_a_slice_cannot_read_are_errors(
    wrong, given, load, set_flag, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    each = load("squad")
    set_flag("slice", "--name=s")
    set_flag("workdir", "/gcs/studies")
    set_flag("squad_dir", "/gcs/squad")
    set_flag("squad2_dir", "/gcs/squad2")
    study.check_slice(each.tasks("pod"))
    set_flag(wrong, "" if wrong == "squad2_dir" else given)
    with pytest.raises(ValueError, match=f"--{wrong}={given}: with --slice"):
        study.run_study(each, "pod")
    assert not list(tmp_path.iterdir())


def outputs(each: study.Study, scale: str) -> set[str]:
    """Returns what the commands of a study write, without the fetched data."""
    commands = study.plan(each, scale)
    words = [word for command in commands for word in command.arguments]
    paths = {word.partition("=")[2] for word in words if word.startswith(("--workdir", "--output"))}
    paths |= {command.product for command in commands} - {""}
    return {path for path in paths if not path.startswith(study.fetched(""))}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_runs_of_another_scale_or_text_write_to_other_directories(name, load, set_flag):
    each = load(name)
    laptop, pod = outputs(each, "laptop"), outputs(each, "pod")
    set_flag("text", "other/*.txt")
    other = outputs(each, "laptop")
    assert laptop and not (laptop & pod or laptop & other or pod & other)


def test_runs_with_another_constant_write_to_other_directories(load, monkeypatch):
    each = load("masking")
    before = outputs(each, "laptop")
    monkeypatch.setitem(study.FINETUNING, "max_train_examples", 7)
    tuned = outputs(each, "laptop")
    assert {path for path in before & tuned if "/finetune/" in path} == set()
    monkeypatch.setitem(study.PRETRAINING, "num_steps", 7)
    assert {path for path in tuned & outputs(each, "laptop") if "/pretrain/" in path} == set()


def test_tasks_are_fetched_into_any_workdir(load, set_flag):
    set_flag("workdir", "/data/studies")
    commands = study.plan(load("pretraining_tasks"), "laptop")
    fetched = [command.arguments[1:] for command in commands if "fetch_data" in str(command)]
    names = ("wikipedia-sample", "reuters-r8", "conll2003", "tales")
    assert fetched == [[name, f"/data/studies/data/{name}"] for name in names]


def test_given_directories_are_read_at_laptop_scale_too(load, set_flag):
    for name in ("glue", "masking", "model_size", "pretraining_tasks", "roberta", "training_steps"):
        each = load(name)
        set_flag("glue_dir", "glue_data")
        tasks = each.tasks("laptop")
        assert study.reads(tasks, "glue_data") and not study.reads(tasks, "reuters-r8")
    for name in ("pretraining_tasks", "squad"):
        each = load(name)
        set_flag("squad_dir", "questions")
        assert study.reads(each.tasks("laptop"), "questions")
    for name in ("roberta", "squad"):
        each = load(name)
        set_flag("squad_dir", "")
        set_flag("squad2_dir", "questions")
        assert study.reads(each.tasks("laptop"), "questions")


def test_a_directory_that_the_study_does_not_read_is_an_error(load, set_flag):
    each = load("model_size")
    set_flag("swag_dir", "endings")
    with pytest.raises(ValueError, match=r"--swag_dir=endings: model_size\.py reads no such files"):
        study.plan(each, "laptop")


# Drawing takes long: in the fast tier each way of drawing once, and the longest report.
DRAWN = {("masking", "laptop"), ("training_steps", "laptop"), ("glue", "pod")}
TIERS = {"laptop": pytest.mark.slow, "pod": pytest.mark.exhaustive}


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        pytest.param(name, scale, marks=() if (name, scale) in DRAWN else TIERS[scale])
        for name in NAMES
        for scale in ("laptop", "pod")
    ],
)
def test_report_has_our_scores_beside_the_papers(name, scale, tmp_path, load):
    each = load(name)
    rows, columns = each.rows(scale), [task.name for task in each.tasks(scale)]
    rng = random.Random(0)
    scores = {
        (row.name, column): Seeds(rng.random() for _ in range(each.num_seeds))
        for row in study.rows_to_run(each, scale)
        for column in [*columns, *each.pretraining_metrics]
    }
    baselines = {"sentence_pairs": 648.2}
    study_report.write(each, scale, columns, scores, baselines, tmp_path, "python command")
    text = (tmp_path / f"{name}.md").read_text()
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line[:1] == "|"}
    for row in rows:
        assert all(f"| {score} |" in lines[row.name] for score in row.paper.values())
    for (row, column), values in scores.items():
        shown = study_report.show(values, *((100, ".1f") if column in columns else (1, ".3g")))
        assert shown in lines[row]
    assert each.about in text and "python command" in text
    if columns:
        assert ("the median over the seeds" in text) == (each.num_seeds > 1)
        assert ("in percent: of one run" in text) == (each.num_seeds == 1)
    assert "Word frequencies alone have a perplexity of 648 (sentence pairs)." in text
    assert (each.limits in text) == (each.laptop in text) == (scale == "laptop")
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000


def test_metrics_are_collected_from_every_seed_of_pretraining(load, set_flag, tmp_path):
    set_flag("workdir", str(tmp_path))
    each = load("family")
    row = each.rows("laptop")[0]
    for seed, seeded in enumerate(study.with_seeds(row)):
        directory = pathlib.Path(study.encoder(seeded, "laptop"))
        directory.mkdir(parents=True)
        result = {"perplexity": 20.0 + seed, "unigram_entropy": math.log(60)}
        (directory / "result.json").write_text(json.dumps(result))
    small = dataclasses.replace(each, rows=lambda scale: [row])
    scores, baselines = study.collect(small, "laptop")
    assert scores == {(row.name, "held-out perplexity"): [20, 21, 22]}
    assert baselines == {"32-cls_first": pytest.approx(60)}


def test_loss_of_frequencies_is_that_of_the_best_prediction_from_the_place_itself():
    shares, visible = np.array([0.5, 0.3, 0.2, 0.0]), 0.2
    expected = -(1 - visible) * sum(p * math.log(p) for p in shares if p)
    for seen in range(4):
        both = [p * 0.5 * ((original == seen) + 1 / 4) for original, p in enumerate(shares)]
        expected -= visible * sum(each * math.log(each / sum(both)) for each in both if each)
    found = importlib.import_module("family").frequency_loss(shares, visible)
    assert found == pytest.approx(expected)


def test_proteins_are_written_one_on_a_line_and_their_tokenizer_reads_them(tmp_path):
    fasta = ">a 1\nMKT\nLL*\n>b 2\nMW*\n>c, equal to a\nMKTLL*\n"
    (tmp_path / "some.faa").write_text(fasta)
    family_data.main("proteins", str(tmp_path), str(tmp_path / "out"))
    assert (tmp_path / "out/proteins.txt").read_text() == "MKTLL\nMW\n"
    tokenizer = load_tokenizer(tmp_path / "out")
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("MKTLL")] == [*"MKTLL"]
    assert tokenizer.vocab_size == 33


def write_trials(directory: pathlib.Path, scores: dict[str, float | None]) -> None:
    for trial, score in scores.items():
        (directory / "trials" / trial).mkdir(parents=True)
        result = {"diverged": 3} if score is None else {"dev": {"accuracy": score}}
        (directory / "trials" / trial / "result.json").write_text(json.dumps(result))


def test_scores_come_from_the_configuration_with_the_best_median(tmp_path):
    write_trials(tmp_path, {"a=1,seed=0": 0.9, "a=1,seed=1": 0.1})
    write_trials(tmp_path, {"a=2,seed=0": 0.6, "a=2,seed=1": 0.5})
    write_trials(tmp_path, {"a=3,seed=0": None, "a=3,seed=1": None})
    assert study_report.best_seeds(tmp_path, "dev/accuracy") == [0.6, 0.5]


def test_one_lucky_seed_does_not_make_a_configuration_the_best(tmp_path):
    write_trials(tmp_path, {"a=1,seed=0": 0.5, "a=1,seed=1": 0.4, "a=1,seed=2": None})
    write_trials(tmp_path, {"a=2,seed=0": 0.9, "a=2,seed=1": None, "a=2,seed=2": None})
    scores = study_report.best_seeds(tmp_path, "dev/accuracy")
    assert study_report.show(scores, 100) == "45.0 (40.0 to 50.0; 1 of 3 diverged)"
    assert study_report.show(Seeds([math.nan, 0.5]), 100) == "50.0 (1 of 2 diverged)"
    assert study_report.show(Seeds([math.nan] * 2), 100) == "2 of 2 diverged"
    assert study_report.show(None, 100) == ""


def test_report_names_the_seeds_that_predict_one_class_for_everything(tmp_path):
    write_trials(tmp_path, {"a=1,seed=0": 0.492, "a=1,seed=1": 0.6})
    path = tmp_path / "trials/a=1,seed=0/result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"collapsed": True}))
    seeds = study_report.best_seeds(tmp_path, "dev/accuracy")
    assert study_report.show(seeds, 100) == "54.6 (49.2 to 60.0; 1 of 2 collapsed)"


@pytest.mark.parametrize("name", ["masking", "training_steps"])
def test_a_row_whose_seeds_all_diverged_is_drawn_empty(name, load):
    each = load(name)
    rows, columns = each.rows("laptop"), [task.name for task in each.tasks("laptop")]
    scores = {(row.name, column): Seeds([0.5, math.nan]) for row in rows for column in columns}
    scores[rows[0].name, columns[0]] = Seeds([math.nan, math.nan])
    axis = each.draw(each.title, rows, columns, scores).axes[0]
    dots = [line for line in axis.lines if line.get_marker() == "o" and len(line.get_xdata())]
    assert len(dots) == len(rows) - 1


def test_every_column_of_many_has_a_panel_with_its_scores():
    columns = [f"task{number} accuracy" for number in range(10)]
    scores = {("row", column): [0.5, 0.7] for column in columns}
    axes = study_report.draw_scores("Tasks", [study.Row("row")], columns, scores).axes
    drawn = {axis.get_title(): axis for axis in axes if axis.get_visible()}
    assert set(drawn) == {f"task{number}" for number in range(10)}
    assert all(axis.lines for axis in drawn.values())


def test_perplexity_has_its_own_panel_beside_the_scores():
    rows = [study.Row("small"), study.Row("large")]
    scores = {(row.name, "R8 accuracy"): [0.5, 0.7] for row in rows}
    scores |= {("small", "held-out perplexity"): [250.0], ("large", "held-out perplexity"): [90.0]}
    figure = study_report.draw_scores("Size", rows, ["R8 accuracy"], scores)
    perplexity, accuracy = figure.axes
    assert [perplexity.get_xlabel(), accuracy.get_xlabel()] == [
        "held-out perplexity",
        "accuracy on dev (%)",
    ]
    values = [[x for line in axis.lines for x in line.get_xdata()] for axis in figure.axes]
    assert values[0] == [250, 250, 90, 90] and max(values[1]) == 70


def test_report_of_runs_that_are_missing_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no results"):
        study_report.best_seeds(tmp_path, "dev/accuracy")


def test_questions_that_cannot_be_fetched_are_an_error(load, set_flag):
    each = load("squad")
    set_flag("squad_dir", "")
    with pytest.raises(ValueError, match="give --squad_dir"):
        each.tasks("laptop")


def test_finished_commands_are_not_run_again(tmp_path, monkeypatch):
    arguments = []
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda command, **_: (
            arguments.append(command[1:]) or subprocess.CompletedProcess(command, 3)
        ),
    )
    (tmp_path / "done").touch()
    commands = [study.Command(["first"], str(tmp_path / "done")), study.Command(["second"], "x")]
    with pytest.raises(SystemExit) as error:
        study.run([*commands, study.Command(["third"])])
    assert arguments == [["second"]] and error.value.code == 3


@pytest.mark.slow
def test_a_study_that_is_interrupted_lets_its_command_save():
    child = "import time\ntry:\n  print('running', flush=True)\n  while True: time.sleep(0.01)\n"
    child += "except KeyboardInterrupt:\n  time.sleep(1)\n  print('saved')\n  raise SystemExit(7)"
    code = "import study; study.flags.FLAGS.mark_as_parsed()\n"
    code += f"study.run([study.Command(['-c', {child!r}])])"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/experiments"}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.PIPE, text=True
    ) as process:
        while (line := process.stdout.readline()) != "running\n":
            assert line  # Empty if it has ended.
        os.killpg(process.pid, signal.SIGINT)  # Ctrl-C reaches all processes of a terminal.
        output, _ = process.communicate()
    assert output == "saved\n" and process.returncode == 7


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


def write_news(directory: pathlib.Path) -> None:
    """Writes items of three topics, each of five words that begin with its letter."""
    for split in ("train", "test"):
        lines = ["Text\tCategory", "string\td", "\tclass", ""]
        for topic, number in itertools.product("abc", range(9)):
            words = " ".join(f"{topic}{number}{split}{place}" for place in range(5))
            lines.append(f"{words}\t{topic}")
        (directory / f"reuters-r8-{split}.tab").write_text("\n".join(lines) + "\n")


def test_half_of_the_items_of_a_long_document_are_of_its_topic(tmp_path):
    write_news(tmp_path)
    topics = joined_news.read_items(tmp_path / "reuters-r8-train.tab")
    documents = joined_news.make_documents(topics, 9, 42, random.Random(0))
    assert collections.Counter(each["label"] for each in documents) == dict.fromkeys("abc", 3)
    for document in documents:
        letters = collections.Counter(word[0] for word in document["text"].split())
        assert letters.total() == 40 and letters[document["label"]] == 20
    firsts = {document["text"][0] == document["label"] for document in documents}
    assert firsts == {True, False}


def test_windows_are_the_words_of_their_document_and_fit(tmp_path):
    write_news(tmp_path)
    joined_news.main(str(tmp_path), str(tmp_path / "out"), "96")
    tokenizer = load_tokenizer(tmp_path / "out/bpe.json")
    for split, count in joined_news.NUM_DOCUMENTS.items():
        lines = (tmp_path / f"out/{split}.jsonl").read_text().splitlines()
        documents, texts = [json.loads(line) for line in lines], collections.defaultdict(list)
        assert len(documents) == count
        for line in (tmp_path / f"out/{split}_windows.jsonl").read_text().splitlines():
            window = json.loads(line)
            assert window["label"] == documents[int(window["document"])]["label"]
            assert len(tokenizer.encode(window["text"])) <= 96 // 8 - 2
            texts[int(window["document"])].append(window["text"])
        assert {number: " ".join(own) for number, own in texts.items()} == {
            number: document["text"] for number, document in enumerate(documents)
        }


def test_mean_probabilities_of_its_windows_decide_about_a_document(tmp_path):
    """Not the majority: two windows that are almost undecided yield to a certain one."""
    lines = [
        {"document": number, "label": "b", "probabilities": {"a": share, "b": 1 - share}}
        for number, shares in {"0": (0.51, 0.51, 0.1), "1": (0.9, 0.4)}.items()
        for share in shares
    ]
    write_trials(tmp_path, {"seed=0": 0.2, "seed=1": None})
    predictions = tmp_path / "trials/seed=0/predictions/dev.jsonl"
    predictions.parent.mkdir()
    predictions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    seeds = study_report.best_seeds(tmp_path, "dev/accuracy", long_documents.document_accuracy)
    assert seeds[0] == 0.5 and math.isnan(seeds[1])


def test_word_counts_name_the_topic_of_words_that_they_know():
    train = [{"text": "a a b", "label": "x"}, {"text": "b c c", "label": "y"}]
    dev = [{"text": "a b unknown", "label": "x"}, {"text": "c", "label": "x"}]
    assert long_documents.naive_bayes_accuracy(train, dev) == 0.5
