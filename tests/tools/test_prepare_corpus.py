"""Runs the two corpus tools from the command line."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest

from bert_corpus.build import run_processes
from bert_corpus.card import read_samples
from bert_corpus.config import CorpusConfig
from bert_corpus.plan import Plan
from bert_corpus.summary import summarize
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers import commands
from tests.helpers.corpora import write_vocabulary

ROOT = commands.ROOT
SENTENCE = "The river runs past the old town. Boats pass under its stone bridge. "


def run_tool(name, *arguments):
    return subprocess.run(
        [sys.executable, ROOT / "tools" / f"{name}.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_text_to_vocabulary_to_corpus(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Tale {index}. " + SENTENCE * 6 for index in range(30)))
    vocab, output = tmp_path / "vocab.txt", tmp_path / "corpus"
    trained = run_tool("train_vocab", f"--input={text}", f"--output={vocab}", "--size=5000")
    assert trained.returncode == 0, trained.stderr
    assert "uncased wordpiece" in trained.stdout and "fewer than --size=5,000" in trained.stderr
    flags = [f"--input={text}", f"--vocab={vocab}", f"--output={output}", "--max_seq_length=64"]
    built = run_tool("prepare_corpus", *flags, "--heldout_fraction=0.2", "--processes=1")
    assert built.returncode == 0, built.stderr
    assert "found 30 documents in 1 input, between the blank lines of text" in built.stdout
    assert "train: " in built.stdout and "complete after" in built.stdout
    assert "\nwarning: only " in built.stderr  # Few documents are held out.
    assert not re.search("[{}]", built.stdout)  # Counts in words, no dictionaries.
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["config"]["max_seq_length"] == 64
    assert manifest["config"]["heldout_fraction"] == 0.2
    again = run_tool("prepare_corpus", *flags)
    assert again.returncode == 1 and "--overwrite" in again.stderr


def test_bad_arguments_give_one_line_and_no_traceback(tmp_path):
    (tmp_path / "text.txt").write_text(SENTENCE)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nriver\n")
    flags = {
        name: tmp_path / f"{file}"
        for name, file in (("input", "text.txt"), ("vocab", "vocab.txt"), ("output", "out"))
    }
    messages = [
        ({"processes": "-2"}, "flag --processes=-2: -2 is not a non-negative integer"),
        ({"input": "absent*.txt"}, "matches no file"),
        ({"vocab": "absent.txt"}, "no vocabulary at absent.txt"),
        ({"max_seq_length": "3"}, "max_seq_length=3; expected 5 to"),
    ]
    cases = [[f"--{n}={v}" for n, v in (flags | changes).items()] for changes, _ in messages]
    results = commands.run_each("tools.prepare_corpus", cases)
    for (code, errors), (_, message) in zip(results, messages, strict=True):
        assert code == 1
        assert message in errors and len(errors.strip().splitlines()) <= 3
        assert "Traceback" not in errors


def test_bad_training_arguments_give_one_line_before_training(tmp_path):
    (tmp_path / "text.txt").write_text(SENTENCE)
    messages = [
        (["--output={0}/x.txt", "--kind=sentencepiece"], "SentencePiece model, and only that"),
        (["--output={0}/x.txt", "--kind=bpe"], "BPE, XLNet's or k-mers *.json"),
        (["--output={0}/x.txt", "--kind=kmer"], "does not match --kind=kmer"),
        (["--output={0}/x.json", "--kind=kmer", "--size=99"], "has all k-mers: leave out --size"),
        (["--output={0}/x.json", "--kind=bpe", "--k=3"], "has no k-mers: leave out --k"),
        (["--output={0}/x.json", "--kind=kmer", "--letters=AA"], "expected distinct capital"),
        (["--output={0}/x.json"], "does not match --kind=wordpiece"),
        (["--output={0}/x.txt", "--nostrip_accents"], "accents are kept: name it *.json"),
        (["--output={0}/x.txt", "--cased", "--strip_accents"], "are stripped: name it *.json"),
        (["--output={0}/x.model", "--kind=sentencepiece", "--strip_accents"], "keeps accents: lea"),
        (["--output={0}/x.json", "--kind=bpe", "--nocased"], "keeps case: leave out --nocased"),
        (["--output={0}/x.json", "--kind=bpe", "--size=260"], "special tokens need 261 pieces"),
        (["--output={0}"], "(it is a directory); expected a file"),
        (["--output={0}/text.txt/v.txt"], "expected a file in a new or writable directory"),
        (["--output={0}/x.txt", "{0}/more.txt"], "more.txt']; quote a glob"),
        (["--output={0}/x.txt", "--input={0}/absent"], "absent matches no file"),
    ]
    cases = [
        [argument.format(tmp_path) for argument in ("--input={0}/text.txt", *arguments)]
        for arguments, _ in messages
    ]
    results = commands.run_each("tools.train_vocab", cases)
    for (code, errors), (_, message) in zip(results, messages, strict=True):
        assert code == 1
        assert errors.strip().startswith("train_vocab: ") and message in errors
        assert errors.strip().count("\n") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_warning_about_unbalanced_labels_names_the_cause(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"A river {n}.\n\n" for n in range(200)))
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nriver\n")
    config = CorpusConfig(max_seq_length=9, heldout_fraction=0)
    plan = Plan(str(tmp_path / "text.txt"), load_tokenizer(tmp_path / "vocab.txt"), config)
    manifest = run_processes(plan, tmp_path / "out", num_processes=1)
    summary, warnings = summarize(plan, manifest, read_samples(tmp_path / "out"), 0)
    assert any("(100.0% NotNext)" in line for line in summary)
    message = r"100\.0% of the train pairs are NotNext, .* no true next .*; remove"
    assert any(re.match(message, warning) for warning in warnings)
    for message in (
        "the median document has 1 sentence: the blank lines look",
        "no document is held out",
    ):
        assert any(message in warning for warning in warnings)


@pytest.mark.slow
def test_ctrl_c_exits_with_130_and_the_same_command_resumes(tmp_path):
    text, vocab, output = (tmp_path / name for name in ("text.txt", "vocab.txt", "corpus"))
    text.write_text("\n\n".join(f"Tale {index}. " + SENTENCE * 20 for index in range(4_000)))
    write_vocabulary(vocab)
    flags = [f"--input={text}", f"--vocab={vocab}", f"--output={output}", "--processes=2"]
    command = [sys.executable, ROOT / "tools" / "prepare_corpus.py", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not list(output.glob(".spill/unit-*.json")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)  # A second one must not leave it waiting.
        message = process.stderr.read()
    assert process.returncode == 130
    assert "prepare_corpus: interrupted; run the same command to resume" in message
    assert "Traceback" not in message
    assert run_tool("prepare_corpus", *flags).returncode == 0


@pytest.mark.slow
def test_casing_follows_the_pieces_or_the_flag_and_is_logged(tmp_path):
    (tmp_path / "text.txt").write_text(
        "\n\n".join(f"The River {index}. " * 9 for index in range(9))
    )
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "river", "<URL>", ".", "##1"]
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    flags = [f"--input={tmp_path}/text.txt", f"--vocab={tmp_path}/vocab.txt", "--dry_run"]
    flags += [f"--output={tmp_path}/out"]
    default = run_tool("prepare_corpus", *flags)
    assert "10 ids, lower-cased (0 of 2 pieces have upper case" in default.stdout
    assert "accents are stripped" in default.stdout
    cased = run_tool("prepare_corpus", *flags, "--cased")
    assert "10 ids, cased (as asked), accents are kept" in cased.stdout
