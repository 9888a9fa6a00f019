"""Extends or replaces the vocabulary of a model in a directory, and prints what it does."""

import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from bert_jax.checkpoints.new_vocabulary import (
    Extension,
    Replacement,
    extend_vocabulary,
    replace_vocabulary,
)
from bert_jax.checkpoints.read import read_model
from bert_jax.checkpoints.save import save_model
from bert_jax.checkpoints.transformers_names import check_positions
from bert_jax.model.architecture import config_from_settings
from bert_jax.tokenizers.new_words import ids_after_space
from bert_jax.tokenizers.suggest_words import (
    NewWord,
    count_savings,
    given_words,
    suggest_words,
    words_of_text,
)
from bert_jax.tokenizers.tokenizer import Tokenizer, load_tokenizer

NUM_WORDS = 2000  # that are suggested
MIN_COUNT = 5  # of a suggested word
MAX_ROWS = 20  # of the table, if a model is written


def extend_vocab(
    source: str,
    output: str | None,
    *,
    count_words: Callable[[], Mapping[str, int]] | None = None,
    words_path: str | None = None,
    number: int | None = None,
    min_count: int | None = None,
) -> None:
    """Prints the words of a text, or of a list, and writes a model to which they are added.

    Args:
      source: what `read_model` reads; without `output`, a tokenizer is enough.
      output: the new directory. None: writes nothing.
      count_words: counts the words between the spaces of a text, once all else is known to be
        valid; None if there is no text.
      words_path: a file with the words, one per line. None: they are suggested from the text.
      number: how many are suggested. None: 2,000.
      min_count: how often a suggested word occurs at least. None: 5.

    Raises ValueError, OSError, CheckpointError, and what `count_words` raises.
    """
    if not count_words and not words_path:
        raise ValueError("there are no words: give texts as --input, or a list as --words")
    if words_path and number:
        raise ValueError("--words is the whole list: leave out --add, or --words")
    if words_path and min_count:
        raise ValueError("--words is the whole list: leave out --min_count, or --words")
    if output and pathlib.Path(output).exists():
        raise FileExistsError(f"{output} exists already: choose another --output")
    model = read_model(source) if output else None
    tokenizer = model.tokenizer if model else load_tokenizer(source)
    counts = count_words() if count_words else {}
    split = words_of_text(tokenizer, counts)
    if words_path:
        words = _read_words(tokenizer, words_path, split)
    else:
        words = _suggest_words(tokenizer, split, number or NUM_WORDS, min_count or MIN_COUNT)
    print_table(tokenizer, words, MAX_ROWS if output else len(words), bool(counts))
    if not output:
        print("nothing is written without --output")
        return
    extension = extend_vocabulary(model, words)
    model = extension.model
    config = config_from_settings(model.settings)
    save_model(output, config, model.tokenizer, model.params, model.settings)
    print(f"{output}: {describe_places(extension, config.vocab_size)}")
    if counts:
        _print_savings(tokenizer, model.tokenizer, words, counts)


def _read_words(tokenizer: Tokenizer, path: str, split: dict[str, NewWord]) -> list[NewWord]:
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
        words, repeated = given_words(tokenizer, lines, split)
    except ValueError as error:  # UnicodeDecodeError is one.
        raise ValueError(f"{path}: {error}") from None
    if repeated:
        print(f"{path}: left out {repeated:,} lines, blank or with the same word again")
    return words


def _suggest_words(
    tokenizer: Tokenizer, split: dict[str, NewWord], number: int, min_count: int
) -> list[NewWord]:
    """Returns the words to add, and prints why there are fewer than asked for."""
    words, reasons = suggest_words(tokenizer, split.values(), number, min_count)
    for reason, count in reasons.items():
        print(f"{count:,} words skipped: {reason}")
    if not words:
        raise ValueError(
            f"none of the text's {len(split):,} words of several pieces can be suggested: give "
            "more text, a smaller --min_count, or a list as --words"
        )
    if len(words) < number:
        print(f"only {len(words):,} words are suggested, fewer than --add={number:,}")
    return words


def print_table(
    tokenizer: Tokenizer, words: Sequence[NewWord], num_rows: int, has_counts: bool
) -> None:
    """Prints the first `num_rows` words, what they save and the pieces they are split into."""
    if has_counts:
        print(f"{'saves':>10} {'count':>10}  word, and the pieces that it is split into")
    for word in words[:num_rows]:
        pieces = " ".join(tokenizer.id_to_token(index) for index in word.ids)
        saved = f"{word.saved:>10,} {word.count:>10,}  " if has_counts else ""
        print(f"{saved}{word.text}: {pieces}")
    if len(words) > num_rows:
        rest = sum(word.saved for word in words[num_rows:])
        saved = f"{rest:>10,} {'':>10}  " if has_counts else ""
        print(f"{saved}{len(words) - num_rows:,} other words")


def describe_places(extension: Extension, vocab_size: int) -> str:
    """Describes which rows of the tables the new words have."""
    places = (
        (extension.num_unused, "in the place of [unused] pieces"),
        (extension.num_spare, "in rows that no token had"),
        (extension.num_new, "in new rows"),
    )
    parts = ", ".join(f"{count:,} {place}" for count, place in places if count)
    return f"{len(extension.ids):,} new words, {parts}: {vocab_size:,} rows"


def _print_savings(
    tokenizer: Tokenizer, extended: Tokenizer, words: Sequence[NewWord], counts: Mapping[str, int]
) -> None:
    savings = count_savings(tokenizer, extended, [word.piece for word in words], counts)
    print(
        f"tokens per word of the text: {savings.tokens_before:.3f} before, "
        f"{savings.tokens_after:.3f} after"
    )
    if savings.changed:
        example = max(savings.changed, key=savings.changed.get)
        before, after = (
            " ".join(map(each.id_to_token, ids_after_space(each, [example])[0]))
            for each in (tokenizer, extended)
        )
        total = sum(savings.changed.values())
        print(
            f"{len(savings.changed):,} other words ({total:,} occurrences) begin with a new word "
            f"and are split anew, such as {example}: {before} -> {after}"
        )


def replace_vocab(
    source: str, vocabulary: str, output: str, token_vectors: Callable[[Tokenizer], np.ndarray]
) -> None:
    """Writes a model with another vocabulary, and prints where its vectors come from.

    `token_vectors` returns the static vectors of a tokenizer's tokens in a text, as
    `replace_vocabulary` takes them. Raises ValueError, OSError, CheckpointError, and what
    `token_vectors` raises.
    """
    if pathlib.Path(output).exists():
        raise FileExistsError(f"{output} exists already: choose another --output")
    model, tokenizer = read_model(source), load_tokenizer(vocabulary)
    if tokenizer.sha256 == model.tokenizer.sha256:
        raise ValueError(f"{vocabulary} is the vocabulary that {source} has already")
    vectors = token_vectors(tokenizer)
    replacement = replace_vocabulary(model, tokenizer, vectors)
    model = replacement.model
    config = config_from_settings(model.settings)
    save_model(output, config, tokenizer, model.params, model.settings)
    print_origins(output, replacement)
    try:
        check_positions(config, tokenizer.pad_id)
    except ValueError as error:
        print(f"warning: transformers could not read an export of it: {error}", file=sys.stderr)


def print_origins(output: str, replacement: Replacement) -> None:
    """Prints how many tokens have their vectors from where, with examples."""
    print(f"{output}: {replacement.model.tokenizer.vocab_size:,} tokens")
    for count, origin in (
        (replacement.num_shared, "have the vectors of the same tokens in the old vocabulary"),
        (replacement.num_similar, "are weighted means of these, by how they are used in the text"),
        (replacement.num_pieces, "are too rare in the text: means of their old pieces"),
        (replacement.num_mean, "are too rare, without old pieces: the mean of all shared tokens"),
    ):
        print(f"{count:>10,} {origin}")
    for token, weights in replacement.examples.items():
        similar = ", ".join(f"{weight:.2f} {name}" for name, weight in weights)
        print(f"{token}: {similar}, ...")
