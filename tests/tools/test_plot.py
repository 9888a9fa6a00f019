"""Every panel of a plot shows a curve, of a pre-training and of a fine-tuning."""

import json

import pytest

from tools import plot


def write_metrics(workdir, names: str) -> None:
    workdir.mkdir(parents=True)
    records = [
        {"step": step} | dict.fromkeys(names.split(), 1 / step) for step in range(10, 50, 10)
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
    names += " heldout/mlm_loss heldout/mlm_accuracy heldout/nsp_accuracy heldout/perplexity"
    write_metrics(tmp_path / "run", names)
    (tmp_path / "run" / "result.json").write_text(json.dumps({"unigram_entropy": 6.8}))
    assert curves(tmp_path / "run") == {
        "masked-LM loss (nats)": ["train", "held-out", "unigram entropy"],
        "masked-LM accuracy": ["train", "held-out"],
        "next-sentence accuracy": ["train", "held-out", "chance"],
        "learning rate": [],
    }


@pytest.mark.parametrize("directories", [["run"], ["run/seed_0", "run/seed_1"]], ids=str)
def test_fine_tuning(tmp_path, directories):
    names = "train/loss train/gradient_norm learning_rate dev/loss dev/f1 final/dev/f1"
    for directory in directories:
        write_metrics(tmp_path / directory, names)
    expected = {"loss": ["train", "dev"], "f1": ["dev"], "learning rate": []}
    assert curves(tmp_path / "run") == expected
    for axis in plot.draw(tmp_path / "run").axes:
        assert len(axis.lines) % len(directories) == 0


def test_directory_without_a_run_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl is missing: expected the workdir"):
        plot.draw(tmp_path)
