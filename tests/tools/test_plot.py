"""Every panel of a plot shows a curve, of a pre-training and of a fine-tuning run."""

import json
import pathlib

import pytest

from bert_jax.tools import plot
from bert_jax.training import health


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plot.pyplot.close("all")


def write_metrics(workdir, names: str, num_records: int = 4) -> None:
    workdir.mkdir(parents=True)
    records = [
        {"step": 10 * number} | dict.fromkeys(names.split(), 1 / number)
        for number in range(1, num_records + 1)
    ]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))


def curves(workdir) -> dict[str, list[str]]:
    """Returns the labels of the curves by the title of their panel; all must have points."""
    panels = {}
    for axis in plot.draw(workdir).axes:
        assert axis.lines and all(len(line.get_xdata()) for line in axis.lines)
        assert axis.get_xlabel() == "step"
        labels = [line.get_label() for line in axis.lines]
        panels[axis.get_title()] = [label for label in labels if not label.startswith("_")]
    return panels


def test_pretraining(tmp_path):
    names = "train/loss train/mlm_loss train/mlm_accuracy train/nsp_accuracy learning_rate seconds"
    names += " productive_seconds goodput train/max_loss rows_per_second data_wait_seconds"
    names += " train/gradient_norm train/max_gradient_norm estimated_rows_per_second step_seconds"
    names += " host_seconds"
    names += " heldout/mlm_loss heldout/mlm_accuracy heldout/nsp_accuracy heldout/perplexity"
    write_metrics(tmp_path / "run", names)
    (tmp_path / "run" / "result.json").write_text(json.dumps({"unigram_entropy": 6.8}))
    assert curves(tmp_path / "run") == {
        "masked-LM loss (nats)": ["train", "held-out", "unigram entropy"],
        "masked-LM accuracy": ["train", "held-out"],
        "next-sentence accuracy": ["train", "held-out", "chance"],
        "goodput, since the first start": [],
        "loss": ["train", "max of a step"],
        "gradient norm": ["train", "max of a step"],
        "rows per second": ["estimated"],
        "seconds per step": ["wait for a batch", "whole step", "host time"],
        "learning rate": [],
    }


def write_run_with_a_spike(workdir) -> None:
    workdir.mkdir()
    lines = [{"step": step, "train/loss": 5.0, "learning_rate": 1.0} for step in (10, 20, 30)]
    lines[1] |= {"train/max_loss": 9.0, "train/loss_spikes": 1}
    (workdir / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    config = {"corpus": "c", "num_steps": 30, "warmup_steps": 0, "beta2": 0.9, "log_every": 10}
    (workdir / "config.json").write_text(json.dumps(config))


def test_alarms_are_marked_and_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = pathlib.Path("a")
    write_run_with_a_spike(run)
    assert curves(run) == {"loss": ["train", "max of a step", "alarm"], "learning rate": []}
    (mark,) = [line for line in plot.draw(run).axes[0].lines if line.get_label() == "alarm"]
    assert set(mark.get_xdata()) == {20}
    write_metrics(pathlib.Path("b"), "train/loss train/mlm_loss heldout/unigram_entropy")
    assert curves(pathlib.Path("b"))["masked-LM loss (nats)"] == ["train", "unigram entropy"]
    plot.main(["plot", "a", "b"])
    path, printed, unchecked = capsys.readouterr().out.splitlines()
    assert path == "curves.png"
    assert printed.startswith("a, step 20: the loss has a spike, of up to 9.000")
    assert unchecked.startswith("a: not checked") and "slow host (slowest_process)" in unchecked
    assert "loss spike" not in unchecked


def test_healthy_run_has_no_alarms_and_all_were_checked(tmp_path, capsys):
    write_run_with_a_spike(tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    line = {"step": 10, "train/loss": 5.0, "heldout/perplexity": 2.0}
    line |= dict.fromkeys(health.METRICS.values(), 1) | {"train/loss_spikes": 0}
    metrics.write_text(json.dumps(line) + "\n")
    plot.main(["plot", str(tmp_path / "run"), str(tmp_path / "run")], str(tmp_path / "a.png"))
    assert capsys.readouterr().out.splitlines()[1:] == [f"{tmp_path / 'run'}: no alarms"]


def test_starts_of_later_phases_are_marked_in_each_panel(tmp_path):
    write_metrics(tmp_path / "run", "train/mlm_loss heldout/mlm_loss learning_rate")
    later = {"phase_10": {"num_steps": 5}, "phase_9": {"num_steps": 10}}
    config = {"num_steps": 20, "long_phase": {"num_steps": 5}, "later_phases": later}
    path = tmp_path / "run" / "config.json"
    path.write_text(json.dumps(config))
    for axis in plot.draw(tmp_path / "run").axes:
        assert [line.get_xdata()[0] for line in axis.lines[-3:]] == [20, 25, 35]
        assert axis.lines[-3].get_label() == "start of a later phase"
    for num_steps in ((20, 0), (40, 40)):  # Without a long phase, or before it.
        config = {"num_steps": num_steps[0], "long_phase": {"num_steps": num_steps[1]}}
        path.write_text(json.dumps(config))
        assert "start of a later phase" not in str(curves(tmp_path / "run"))


def test_legend_is_beside_the_curves_and_names_each_once(tmp_path):
    write_metrics(tmp_path / "run", "train/loss dev/loss dev/f1 learning_rate")
    figure = plot.draw(tmp_path / "run")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["train", "dev"]
    figure.draw_without_rendering()
    left = legend.get_window_extent().x0
    assert all(axis.get_window_extent().x1 < left for axis in figure.axes)


@pytest.mark.parametrize("directories", [["run"], ["run/seed_0", "run/seed_1"]], ids=str)
def test_fine_tuning(tmp_path, directories):
    names = "train/loss train/gradient_norm learning_rate dev/loss dev/f1 final/dev/f1"
    for directory in directories:
        write_metrics(tmp_path / directory, names)
    expected = {"loss": ["train", "dev"], "f1": ["dev"], "learning rate": []}
    assert curves(tmp_path / "run") == expected
    for axis in plot.draw(tmp_path / "run").axes:
        assert len(axis.lines) % len(directories) == 0


def test_each_entity_type_has_its_own_color_in_all_panels(tmp_path):
    types = ("", "/LOC", "/MISC", "/ORG", "/PER")
    names = [f"dev/{metric}{suffix}" for metric in ("f1", "recall") for suffix in types]
    write_metrics(tmp_path / "run", " ".join([*names, "train/loss", "dev/loss"]))
    labels = ["dev", "dev LOC", "dev MISC", "dev ORG", "dev PER"]
    panels = {"loss": ["train", "dev"], "f1": labels, "recall": labels}
    assert curves(tmp_path / "run") == panels
    colors = {}
    for axis in plot.draw(tmp_path / "run").axes:
        for line in axis.lines:
            assert colors.setdefault(line.get_label(), line.get_color()) == line.get_color()
    assert len(set(colors.values())) == len(colors) == 6


@pytest.mark.parametrize(("num_records", "marker"), [(1, "o"), (8, "o"), (100, "")])
def test_few_points_are_marked(num_records, marker, tmp_path):
    write_metrics(tmp_path / "run", "train/loss dev/loss learning_rate", num_records)
    lines = [line for axis in plot.draw(tmp_path / "run").axes for line in axis.lines]
    assert len(lines) == 3 and {line.get_marker() for line in lines} == {marker}


def test_directory_without_a_run_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl is missing"):
        plot.draw(tmp_path)


def test_directory_of_a_sweep_names_its_report_and_a_trial(tmp_path):
    (tmp_path / "trials/seed=0").mkdir(parents=True)
    (tmp_path / "sweep.json").touch()
    with pytest.raises(FileNotFoundError, match=r"open .*/report\.html, .* such as .*/seed=0"):
        plot.draw(tmp_path)


def test_several_runs_are_in_each_panel_with_their_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [pathlib.Path("a"), pathlib.Path("b"), pathlib.Path("c")]
    for run in runs[:2]:
        write_metrics(run, "train/loss dev/loss dev/f1 learning_rate")
    for seed in (0, 1):
        write_metrics(runs[2] / f"seed_{seed}", "train/loss dev/loss dev/f1 learning_rate")
    colors = {}
    for axis in plot.draw(*runs).axes:
        shown = {line.get_label(): line for line in axis.lines}
        for run in runs:
            own = [line for label, line in shown.items() if label.split()[0] == str(run)]
            assert own, (axis.get_title(), run)
            colors.setdefault(run, own[0].get_color())
            assert {line.get_color() for line in own} == {colors[run]}
    assert len(set(colors.values())) == 3


def test_second_workdir_is_a_run_and_not_the_file_to_write(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_metrics(pathlib.Path(name), "train/loss dev/loss")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.jsonl")}
    plot.main(["plot", "a", "b"])
    plot.main(["plot", "a", "b"], "both.svg")
    plot.main(["plot", "a"])
    plot.main(["plot", "a"], "one.pdf")
    files = ["curves.png", "both.svg", "a/curves.png", "one.pdf"]
    assert capsys.readouterr().out.split() == files
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {*files, "a/metrics.jsonl", "b/metrics.jsonl"}
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(
    ("words", "output", "message"),
    [
        (["a", "new.png"], None, "new.png is not the workdir of a run"),
        (["a", "b"], None, "b/metrics.jsonl is missing"),
        (["a"], "x.abc", "Format 'abc' is not supported"),
        (["a"], "nowhere/x.png", "No such file or directory"),
        (["gs://bucket/a"], None, "gs://bucket/a"),
    ],
)
def test_mistake_ends_in_one_line(words, output, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_metrics(pathlib.Path("a"), "train/loss dev/loss")
    with pytest.raises(SystemExit, match=message) as error:
        plot.main(["plot", *words], output)
    assert "\n" not in error.value.code
