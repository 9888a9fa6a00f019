"""The conversion tool, run as a user runs it."""

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bert_jax.tools.convert_checkpoint import read_result
from tests.helpers import CONFIG_JSON, PIECES, ROOT, state_dict


def convert(*arguments):
    command = [sys.executable, ROOT / "tools" / "convert_checkpoint.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def source(tmp_path):
    """A directory with transformers' BertModel and an unknown tensor."""
    directory, tensors = tmp_path / "source", {"extra": np.ones(1)}
    for name, value in state_dict().items():
        if name.startswith("bert."):
            tensors[name.removeprefix("bert.")] = value.astype(np.float32)
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG_JSON))
    (directory / "vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES))
    return directory


def test_round_trip_keeps_all_tensors_and_prints_a_table(source, tmp_path):
    result = convert("--to=native", source, tmp_path / "made" / "native")
    assert result.returncode == 0 and result.stderr == ""
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["loaded", "2", "encoder.layer.*.attention.self.query.weight"] in lines
    assert ["missing", "1", "cls.predictions.bias"] in lines
    assert ["unused", "1", "extra"] in lines
    result = convert("--to=huggingface", tmp_path / "made" / "native", tmp_path / "back")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].endswith(
        "fill in the license before you publish the model"
    )
    assert (tmp_path / "back" / "README.md").read_text().startswith("---\n")
    found = load_file(tmp_path / "back" / "model.safetensors")
    expected = load_file(source / "model.safetensors")
    del expected["extra"]
    np.testing.assert_equal(found, expected)
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["native"]


def test_result_is_read_only_of_the_checkpoint_that_it_scores(tmp_path):
    for path in ("run/best/20/params", "run/checkpoints/30/params", "theirs"):
        (tmp_path / path).mkdir(parents=True)
    result = {"best_step": 20, "steps": 30, "dev": {"f1": 0.5}}
    (tmp_path / "run/result.json").write_text(json.dumps(result))
    assert read_result(tmp_path / "run") == read_result(tmp_path / "run/best/20") == result
    assert read_result(tmp_path / "run/checkpoints/30") == read_result(tmp_path / "theirs") == {}


@pytest.mark.parametrize(
    ("flag", "damage", "message"),
    [
        (
            "--to=native",
            lambda path: (path.parent / "out").mkdir(),
            "out exists already: choose another DST",
        ),
        ("--to=native", lambda path: (path / "vocab.txt").write_text("a\n"), "lacks [PAD], [UNK]"),
        (
            "--to=native",
            lambda path: (path / "model.safetensors").unlink(),
            "no complete checkpoint",
        ),
    ],
)
def test_bad_input_is_a_one_line_error_and_leaves_nothing(flag, damage, message, source, tmp_path):
    damage(source)
    result = convert(flag, source, tmp_path / "out")
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith("convert_checkpoint: ") and message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.glob("out*/*")) and not list(tmp_path.glob("out?*"))
