"""The tool that adds words: from a text to a model that is trained further and exported."""

import functools
import importlib
import re

import numpy as np
import pytest

import bert_jax
from bert_corpus.word_counts import count_spaced_words
from bert_jax import pretrain
from bert_jax.checkpoints.change_vocabulary import extend_vocab
from bert_jax.checkpoints.read import read_model
from bert_jax.runtime.errors import CheckpointError
from bert_jax.tokenizers.tokenizer import load_tokenizer
from bert_jax.tools.convert_checkpoint import convert
from tests.helpers.commands import run_each
from tests.helpers.corpora import WORDS, build_small_corpus, random_text, write_vocabulary
from tests.helpers.json_lines import read_lines
from tests.helpers.models import write_weights

# Without three words of the texts, of which it has the letters.
PIECES = [word for word in WORDS if word not in ("mountain", "village", "people")]
LETTERS = [letter for letter in "abcdefghijklmnopqrstuvwxyz" if letter != "a"]
PIECES += [*LETTERS, *(f"##{letter}" for letter in "abcdefghijklmnopqrtuvwxyz")]


@pytest.fixture
def given(tmp_path):
    """A model in `model`, whose vocabulary lacks some words of `text.txt`."""
    vocabulary = write_vocabulary(tmp_path / "vocab.txt", ["[unused0]", *PIECES])
    write_weights(tmp_path / "model", vocabulary)
    (tmp_path / "text.txt").write_text(random_text(60) + "\n\nfield! 12 ünïq✓ village\n")
    (tmp_path / "words.txt").write_text("village\npeople\n")
    return tmp_path


def arguments_of(text) -> dict:
    return {"count_words": functools.partial(count_spaced_words, [str(text)])}


def extend(given, **changes):
    arguments = arguments_of(given / "text.txt") | changes
    output = arguments.pop("output", "new")
    extend_vocab(str(given / "model"), output and str(given / output), **arguments)


@pytest.mark.slow
def test_an_extended_model_is_trained_saved_loaded_and_exported(given, capsys):
    extend(given)
    printed = capsys.readouterr().out
    saved = re.search(r"([\d,]+) +([\d,]+)  mountain: m ##o ##u ##n ##t ##a ##i ##n\n", printed)
    count = random_text(60).split().count("mountain")
    assert [int(each.replace(",", "")) for each in saved.groups()] == [7 * count, count]
    assert "3 words are suggested, fewer than --add=2,000" in printed
    assert "3 new words, 1 in the place of [unused] pieces, 2 in new rows" in printed
    before, after = map(float, re.search(r"([\d.]+) before, ([\d.]+) after", printed).groups())
    assert before > 1.3 and after < 1.01

    new = bert_jax.load(given / "new")
    assert len(new.tokenizer.encode("mountain village people")) == 3
    corpus = build_small_corpus(given / "data", given / "new", max_seq_length=32)
    config = importlib.import_module("bert_jax.configs.pretrain.continue").get_config("runlocal")
    config.init_from, config.corpus = str(given / "new"), str(corpus)
    config.num_steps, config.log_every = 4, 1
    pretrain.train_and_evaluate(config, given / "run")
    trained = bert_jax.load(given / "run")
    assert trained.tokenizer.sha256 == new.tokenizer.sha256
    assert trained.config.vocab_size == new.config.vocab_size
    table, old = (
        np.asarray(each.params["encoder"]["embeddings"]["token_embedding"]["embedding"])
        for each in (trained, new)
    )
    assert np.abs(table - old).max() > 0
    assert read_lines(given / "run/metrics.jsonl")[-1]["step"] == 4
    convert(given / "run", given / "exported", "huggingface")
    exported = read_model(given / "exported")
    assert exported.tokenizer.encode("a mountain.") == new.tokenizer.encode("a mountain.")
    np.testing.assert_array_equal(
        exported.params["encoder"]["embeddings"]["token_embedding"]["embedding"], table
    )


def test_without_an_output_it_only_suggests(given, capsys):
    files = {path.name for path in given.iterdir()}
    extend(given, output=None, number=2)
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "nothing is written without --output"
    counts = [random_text(60).split().count(word) for word in ("mountain", "village")]
    expected = [
        (7, "mountain: m ##o ##u ##n ##t ##a ##i ##n"),
        (6, "village: v ##i ##l ##l ##a ##g ##e"),
    ]
    counts[1] += 1  # In the last line of the text.
    for line, count, (fewer, split) in zip(printed[-3:-1], counts, expected, strict=True):
        assert line.split(maxsplit=2) == [f"{fewer * count:,}", f"{count:,}", split]
    assert {path.name for path in given.iterdir()} == files


def test_a_list_needs_no_text(given, capsys):
    extend(given, count_words=None, words_path=str(given / "words.txt"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["village: v ##i ##l ##l ##a ##g ##e", "people: p ##e ##o ##p ##l ##e"]
    assert len(lines) == 3 and "2 new words, 1 in the place of [unused] pieces" in lines[2]
    assert len(load_tokenizer(given / "new").encode("village people")) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count_words": None}, "there are no words: give texts as --input, or a list as --words"),
        ({"text": "nowhere*"}, "nowhere*"),
        ({"words_path": "words.txt", "number": 5}, "--words is the whole list: leave out --add"),
        ({"words_path": "words.txt", "min_count": 5}, "whole list: leave out --min_count"),
        ({"output": "model"}, "model exists already: choose another --output"),
        ({"words": "village\na b\n"}, "list.txt: line 2: 'a b' is not one word to the tokenizer"),
        ({"words": "river\n"}, "list.txt: line 1: 'river' is already the piece 'river'"),
        ({"words": "\n"}, "list.txt: it has no words"),
        ({"words": b"\xff"}, "list.txt: 'utf-8' codec can't decode"),
        ({"min_count": 10_000}, "words of several pieces can be suggested: give more text"),
        ({"model": "text.txt"}, "text.txt is a file: give its directory"),
        ({"model": "nowhere"}, "nowhere does not exist"),
        ({"model": "no_tokenizer"}, "no_tokenizer has neither vocab.txt nor"),
        ({"model": "too_few_rows"}, "too_few_rows: the tokenizer has 83 ids, expected 82"),
    ],
)
def test_bad_input_is_an_error_and_leaves_nothing(changes, message, given):
    if words := changes.pop("words", None):
        (given / "list.txt").write_bytes(words if isinstance(words, bytes) else words.encode())
        changes["words_path"] = str(given / "list.txt")
    source = given / changes.pop("model", "model")
    if source.name in ("no_tokenizer", "too_few_rows"):
        convert(given / "model", source, "huggingface")
        (source / "vocab.txt").unlink()
        if source.name == "too_few_rows":
            write_vocabulary(source / "vocab.txt", ["[unused0]", *PIECES, "more"])
    output = given / changes.pop("output", "new")
    existed = output.exists()
    arguments = arguments_of(given / changes.pop("text", "text.txt")) | changes
    with pytest.raises((CheckpointError, OSError, ValueError), match=re.escape(message)):
        extend_vocab(str(source), str(output), **arguments)
    assert output.exists() == existed and not list(given.glob("*.unfinished"))


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["extend_vocab", "replace_vocab"])
def test_a_user_sees_one_line_for_an_error(tool, given):
    paths = [f"--model={given / 'nowhere'}", f"--input={given / 'text.txt'}"]
    paths += [f"--output={given / 'new'}"]
    paths += [f"--vocab={given / 'vocab.txt'}"] * (tool == "replace_vocab")
    (refused, unexpected) = run_each(f"bert_jax.tools.{tool}", [paths, [*paths, "more"]])
    assert refused[0] == unexpected[0] == 1
    assert refused[1].strip().startswith(f"{tool}: {given / 'nowhere'} does not exist; ")
    assert "\n" not in refused[1].strip()
    assert "unexpected arguments ['more']" in unexpected[1]
