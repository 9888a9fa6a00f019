"""The conversion tool as a user runs it."""

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bert_jax.interop.huggingface import huggingface_name
from bert_jax.interop.parameters import parameter_shapes
from bert_jax.model.config import BertConfig
from tests import helpers

ROOT = helpers.ROOT
CONFIG = BertConfig(vocab_size=9, hidden_size=8, num_layers=2, num_heads=2, intermediate_size=12)


def convert(*arguments):
    command = [sys.executable, ROOT / "tools" / "convert_checkpoint.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def theirs(tmp_path):
    """BertModel with a tensor that nobody knows."""
    directory, rng, tensors = tmp_path / "theirs", np.random.default_rng(0), {"extra": np.ones(1)}
    for path, shape in parameter_shapes(CONFIG).items():
        name = huggingface_name(path).removeprefix("bert.")
        shape = (9, *shape[1:]) if shape[0] == CONFIG.padded_vocab_size else shape
        for layer in range(2 if "{layer}" in name else 0 if name.startswith("cls.") else 1):
            size = shape[1:] if "{layer}" in name else shape
            size = size[::-1] if path.endswith("kernel") else size
            tensors[name.format(layer=layer)] = rng.standard_normal(size, np.float32)
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    values = {
        "model_type": "bert",
        "vocab_size": 9,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 12,
    }
    (directory / "config.json").write_text(json.dumps(values))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d"]
    (directory / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    return directory


def test_there_and_back_with_a_table_of_what_was_read(theirs, tmp_path):
    there = convert("--to=native", theirs, tmp_path / "made" / "native")
    assert there.returncode == 0 and there.stderr == ""
    lines = [line.split() for line in there.stdout.splitlines()]
    assert ["loaded", "2", "encoder.layer.*.attention.self.query.weight"] in lines
    assert ["missing", "1", "cls.predictions.bias"] in lines
    assert ["unused", "1", "extra"] in lines
    back = convert("--to=huggingface", tmp_path / "made" / "native", tmp_path / "back")
    assert back.returncode == 0, back.stderr
    found = load_file(tmp_path / "back" / "model.safetensors")
    expected = load_file(theirs / "model.safetensors")
    del expected["extra"]
    np.testing.assert_equal(found, expected)
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["native"]


@pytest.mark.parametrize(
    ("flag", "spoil", "message"),
    [
        (
            "--to=native",
            lambda path: (path.parent / "out").mkdir(),
            "out exists already: give a DST",
        ),
        ("--to=native", lambda path: (path / "vocab.txt").write_text("a\n"), "lacks [PAD], [UNK]"),
        (
            "--to=native",
            lambda path: (path / "model.safetensors").unlink(),
            "no complete checkpoint",
        ),
    ],
)
def test_bad_input_ends_in_one_line_and_leaves_nothing(flag, spoil, message, theirs, tmp_path):
    spoil(theirs)
    result = convert(flag, theirs, tmp_path / "out")
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith("convert_checkpoint: ") and message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.glob("out*/*")) and not list(tmp_path.glob("out?*"))
