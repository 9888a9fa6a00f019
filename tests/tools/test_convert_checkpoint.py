"""The conversion tool, run as a user runs it."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bert_jax.runtime.errors import CheckpointError
from bert_jax.tools.convert_checkpoint import convert, read_result
from tests.helpers.commands import run_each
from tests.helpers.corpora import write_vocabulary
from tests.helpers.models import CONFIG_JSON, PIECES, state_dict, write_weights


def write_source(directory):
    """Writes a directory with transformers' BertModel and an unknown tensor."""
    tensors = {"extra": np.ones(1)}
    for name, value in state_dict().items():
        if name.startswith("bert."):
            tensors[name.removeprefix("bert.")] = value.astype(np.float32)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG_JSON))
    (directory / "vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES))
    return directory


def test_round_trip_keeps_all_tensors_and_prints_a_table(tmp_path, capsys):
    source = write_source(tmp_path / "source")
    convert(source, tmp_path / "made" / "native", "native")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["loaded", "2", "encoder.layer.*.attention.self.query.weight"] in lines
    assert ["missing", "1", "cls.predictions.bias"] in lines
    assert ["unused", "1", "extra"] in lines
    convert(tmp_path / "made" / "native", tmp_path / "back", "huggingface")
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line.endswith("fill in the license before you publish the model")
    assert "\n# back\n" in (tmp_path / "back" / "README.md").read_text()
    found = load_file(tmp_path / "back" / "model.safetensors")
    expected = load_file(source / "model.safetensors")
    del expected["extra"]
    np.testing.assert_equal(found, expected)
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["native"]


def test_result_is_read_only_of_the_checkpoint_that_it_scores(tmp_path):
    for path in ("run/best/20/params", "run/checkpoints/30/params", "huggingface"):
        (tmp_path / path).mkdir(parents=True)
    result = {"best_step": 20, "steps": 30, "dev": {"f1": 0.5}}
    (tmp_path / "run/result.json").write_text(json.dumps(result))
    assert read_result(tmp_path / "run") == read_result(tmp_path / "run/best/20") == result
    assert (
        read_result(tmp_path / "run/checkpoints/30") == read_result(tmp_path / "huggingface") == {}
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path.parent / "out").mkdir(), "out exists already"),
        (lambda path: (path / "vocab.txt").write_text("a\n"), "lacks [PAD], [UNK]"),
        (lambda path: (path / "model.safetensors").unlink(), "holds config.json, but no weights"),
    ],
)
def test_bad_input_is_a_one_line_error_and_leaves_nothing(damage, message, tmp_path, capsys):
    source = write_source(tmp_path / "source")
    damage(source)
    with pytest.raises((CheckpointError, OSError, ValueError), match=re.escape(message)) as error:
        convert(source, tmp_path / "out", "native")
    assert "\n" not in str(error.value) and capsys.readouterr().out == ""
    assert not list(tmp_path.glob("out*/*")) and not list(tmp_path.glob("out?*"))


def test_refused_export_leaves_nothing(tmp_path):
    vocabulary = write_vocabulary(tmp_path / "vocab.txt")
    source = write_weights(tmp_path / "tuned", vocabulary, head=("north", "south"), causal=True)
    with pytest.raises(ValueError, match=r"transformers pools \[CLS\], which"):
        convert(source, tmp_path / "out", "huggingface")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.slow
def test_only_errors_are_printed_as_errors_and_end_the_tool_with_one(tmp_path):
    good, bad = (write_source(tmp_path / name) for name in ("good", "bad"))
    (bad / "vocab.txt").write_text("a\n")
    cases = [["--to=native", str(source), str(tmp_path / "made")] for source in (bad, good)]
    (bad_code, bad_errors), (good_code, good_errors) = run_each("tools.convert_checkpoint", cases)
    assert bad_code == 1 and bad_errors.strip().startswith("convert_checkpoint: ")
    assert "lacks [PAD], [UNK]" in bad_errors and "\n" not in bad_errors.strip()
    assert good_code == 0 and good_errors.strip() == "" and (tmp_path / "made").is_dir()
