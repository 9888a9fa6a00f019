r"""Adds words of a domain or language to the vocabulary of a model, each as one token.

python tools/extend_vocab.py --model=DIR --input='texts/*.txt'                     # suggests
python tools/extend_vocab.py --model=DIR --input='texts/*.txt' --output=extended --add=2000
python tools/extend_vocab.py --model=DIR --words=words.txt --output=extended

The words of --input that save the most tokens become tokens: count x (pieces - 1). Each begins as
the mean of its pieces, in all tables. Texts without new words keep their ids and outputs.

The result is a checkpoint: `bert_jax.load`, `config.init_from` and prepare_corpus's --vocab take
it, and tools/convert_checkpoint.py exports it. docs/vocabularies.md has an example.
"""

import os
import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags, logging

# The accelerator may be busy training. Before JAX is imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from bert_corpus.word_counts import count_spaced_words
from bert_jax.checkpoints.new_vocabulary import Extension, extend_vocabulary
from bert_jax.checkpoints.read import read_model
from bert_jax.checkpoints.save import save_model
from bert_jax.model.architecture import config_from_settings
from bert_jax.runtime.command_line import describe_error, keep_running_without_log, parse_flags
from bert_jax.runtime.errors import CheckpointError
from bert_jax.tokenizers.new_words import ids_after_space
from bert_jax.tokenizers.suggest_words import (
    NewWord,
    count_savings,
    given_words,
    suggest_words,
    words_of_text,
)
from bert_jax.tokenizers.tokenizer import Tokenizer, load_tokenizer
from bert_jax.tools.commands import exit_interrupted

MODEL = flags.DEFINE_string("model", None, "Anything that bert_jax.load reads.", required=True)
INPUT = flags.DEFINE_list(
    "input", None, "Texts, as for tools/prepare_corpus.py. Optional with --words."
)
OUTPUT = flags.DEFINE_string(
    "output", None, "The new directory. None: only prints the words, and writes nothing."
)
NUM_WORDS = 2000
ADD = flags.DEFINE_integer(
    "add", None, f"Number of words to suggest and add; None: {NUM_WORDS:,}.", lower_bound=1
)
MIN_COUNT = flags.DEFINE_integer(
    "min_count", 5, "How often a suggested word occurs at least.", lower_bound=1
)
WORDS = flags.DEFINE_string(
    "words", None, "A file with the words to add, one per line, in place of suggestions."
)
DATA_DIR = flags.DEFINE_string("data_dir", "", "The same as for tools/prepare_corpus.py.")
TEXT_FIELD = flags.DEFINE_string("text_field", "text", "The same as for tools/prepare_corpus.py.")
MAX_ROWS = 20  # of the table, if a model is written


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"extend_vocab: unexpected arguments {argv[1:]}; quote a glob: --input='*.txt'")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # Orbax logs a lot.
    try:
        extend_vocab(
            MODEL.value,
            OUTPUT.value,
            inputs=INPUT.value,
            words_path=WORDS.value,
            number=ADD.value,
            min_count=MIN_COUNT.value,
            text_field=TEXT_FIELD.value,
            data_dir=DATA_DIR.value,
        )
    except (CheckpointError, ImportError, OSError, ValueError) as error:
        sys.exit(f"extend_vocab: {describe_error(error)}")
    except KeyboardInterrupt:
        exit_interrupted("run the same command to start again")


def extend_vocab(
    source: str,
    output: str | None,
    *,
    inputs: list[str] | None = None,
    words_path: str | None = None,
    number: int | None = None,
    min_count: int = 5,
    text_field: str = "text",
    data_dir: str = "",
) -> None:
    """Prints the words of a text, or of a list, and writes a model to which they are added.

    `number` of words, None: 2,000. Raises ValueError, OSError, ImportError and CheckpointError.
    """
    if not inputs and not words_path:
        raise ValueError("there are no words: give texts as --input, or a list as --words")
    if words_path and number:
        raise ValueError("--words is the whole list: leave out --add, or --words")
    if output and pathlib.Path(output).exists():
        raise FileExistsError(f"{output} exists already: choose another --output")
    model = read_model(source) if output else None
    tokenizer = model.tokenizer if model else load_tokenizer(source)
    counts = count_spaced_words(inputs, text_field, data_dir) if inputs else {}
    split = words_of_text(tokenizer, counts)
    if words_path:
        words = _read_words(tokenizer, words_path, split)
    else:
        words = _suggest_words(tokenizer, split, number or NUM_WORDS, min_count)
    print_table(tokenizer, words, MAX_ROWS if output else len(words))
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
        print(f"not suggested: {count:,} words, {reason}")
    if not words:
        raise ValueError(
            f"none of the text's {len(split):,} words of several pieces can be suggested: give "
            "more text, a smaller --min_count, or a list as --words"
        )
    if len(words) < number:
        print(f"only {len(words):,} words are suggested, fewer than --add={number:,}")
    return words


def print_table(tokenizer: Tokenizer, words: Sequence[NewWord], num_rows: int) -> None:
    """Prints the first `num_rows` words, what they save and the pieces they are split into."""
    print(f"{'saves':>10} {'count':>10}  word, and the pieces that it is split into")
    for word in words[:num_rows]:
        pieces = " ".join(tokenizer.id_to_token(index) for index in word.ids)
        print(f"{word.saved:>10,} {word.count:>10,}  {word.text}: {pieces}")
    if len(words) > num_rows:
        rest = sum(word.saved for word in words[num_rows:])
        print(f"{rest:>10,} {'':>10}  {len(words) - num_rows:,} other words")


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
    tokenizer: Tokenizer, extended: Tokenizer, words: Sequence[NewWord], counts: dict[str, int]
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


if __name__ == "__main__":
    keep_running_without_log()
    app.run(main, flags_parser=parse_flags)
