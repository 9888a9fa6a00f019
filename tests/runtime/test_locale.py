"""A locale without UTF-8 changes no byte of what is written, and its terminal ends no run."""

import os
import subprocess
import sys

import pytest

from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers import commands
from tests.helpers.models import write_random_encoder

TEXTS = ("schöne Größe", "体育 und Straße", "ein gutes Wort", "新闻")
LOCALES = {
    "utf8": {"LC_ALL": "C.UTF-8"},
    "ascii": {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
}


def run_commands(directory, locale: dict[str, str]) -> None:
    """Trains a vocabulary and a classifier in `directory`, and exports the classifier."""
    directory.mkdir()
    (directory / "text.txt").write_text("\n\n".join(TEXTS * 8), encoding="utf-8")
    rows = [f"{text},{label}" for text, label in zip(TEXTS * 2, ["体育", "Größe"] * 4, strict=True)]
    (directory / "rows.csv").write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    flags = "--config=configs/finetune/text_classification.py --config.init_from=encoder"
    flags += " --config.data.train=rows.csv --config.data.dev=rows.csv --config.num_epochs=1"
    flags += " --config.batch_size=4 --config.max_seq_length=16 --workdir=run"
    programs = (
        f"{commands.ROOT}/tools/train_vocab.py --input=text.txt --output=vocab.txt --size=200",
        f"-m bert_jax.finetune {flags}",
        f"{commands.ROOT}/tools/convert_checkpoint.py --to=huggingface run export",
    )
    for number, command in enumerate(programs):
        if number == 1:
            write_random_encoder(directory / "encoder", load_tokenizer(directory / "vocab.txt"))
        subprocess.run(
            [sys.executable, *command.split()], cwd=directory, env=os.environ | locale, check=True
        )


@pytest.mark.slow
def test_files_have_the_same_bytes_in_every_locale(tmp_path):
    for name, locale in LOCALES.items():
        run_commands(tmp_path / name, locale)
    written = [tmp_path / "utf8/vocab.txt", tmp_path / "utf8/run/config.json"]
    written += (tmp_path / "utf8/run/predictions").iterdir()
    written += (tmp_path / "utf8/export").iterdir()
    assert len(written) > 8
    for path in written:
        other = tmp_path / "ascii" / path.relative_to(tmp_path / "utf8")
        assert other.read_bytes() == path.read_bytes(), other
    classes = (tmp_path / "ascii/run/predictions/dev_classes.tsv").read_bytes()
    assert "体育".encode() in classes and "Größe".encode() in classes


def test_tool_prints_what_the_locale_lacks_as_escapes(tmp_path):
    code = r'from bert_jax.runtime.command_line import parse_flags; parse_flags(["x"]); '
    code += r'print("Gr\xf6\xdfe \u4f53\u80b2")'
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-c", code]
    printed = subprocess.check_output(command, env=environment, cwd=commands.ROOT)
    assert printed.rstrip() == b"Gr\xf6\xdfe \\u4f53\\u80b2"
