r"""Adds words of a domain or language to the vocabulary of a model, each as one token.

python tools/extend_vocab.py --model=DIR --input='texts/*.txt'                     # suggests
python tools/extend_vocab.py --model=DIR --input='texts/*.txt' --output=extended --add=2000
python tools/extend_vocab.py --model=DIR --words=words.txt --output=extended

The words of --input that save the most tokens become tokens: count x (pieces - 1). Each begins as
the mean of its pieces, in all tables. Texts without new words, or words that begin with one, keep
their ids, and the logits of old tokens bit for bit. (With byte-level BPE, longer words never
change.) Probabilities change, since new tokens take part in the softmax.

The result is a checkpoint: `bert_jax.load`, `config.init_from` and prepare_corpus's --vocab take
it, and tools/convert_checkpoint.py exports it. docs/vocabularies.md has an example.
"""

import os
import sys

from absl import app, flags

# The accelerator may be busy training. Before JAX is imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from bert_corpus.word_counts import count_spaced_words
from bert_jax.checkpoints.change_vocabulary import MIN_COUNT, NUM_WORDS, extend_vocab
from bert_jax.runtime.command_line import (
    describe_error,
    keep_running_without_log,
    log_warnings_only,
    parse_flags,
)
from bert_jax.runtime.errors import CheckpointError
from bert_jax.tools.commands import exit_interrupted

MODEL = flags.DEFINE_string("model", None, "Anything that bert_jax.load reads.", required=True)
INPUT = flags.DEFINE_list(
    "input", None, "Texts, as for tools/prepare_corpus.py. Optional with --words."
)
OUTPUT = flags.DEFINE_string(
    "output", None, "The new directory. If omitted, prints the words and writes nothing."
)
ADD = flags.DEFINE_integer(
    "add", None, f"Number of words to suggest and add; by default {NUM_WORDS:,}.", lower_bound=1
)
MIN = flags.DEFINE_integer(
    "min_count",
    None,
    f"Minimum number of occurrences of a suggested word; by default {MIN_COUNT}.",
    lower_bound=1,
)
WORDS = flags.DEFINE_string(
    "words", None, "A file with the words to add, one per line, in place of suggestions."
)
DATA_DIR = flags.DEFINE_string("data_dir", "", "The same as for tools/prepare_corpus.py.")
TEXT_FIELD = flags.DEFINE_string("text_field", "text", "The same as for tools/prepare_corpus.py.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"extend_vocab: unexpected arguments {argv[1:]}; quote a glob: --input='*.txt'")
    log_warnings_only()

    def count_words():
        return count_spaced_words(INPUT.value, TEXT_FIELD.value, DATA_DIR.value)

    try:
        extend_vocab(
            MODEL.value,
            OUTPUT.value,
            count_words=count_words if INPUT.value else None,
            words_path=WORDS.value,
            number=ADD.value,
            min_count=MIN.value,
        )
    except (CheckpointError, ImportError, OSError, ValueError) as error:
        sys.exit(f"extend_vocab: {describe_error(error)}")
    except KeyboardInterrupt:
        exit_interrupted("run the same command to start again")


if __name__ == "__main__":
    keep_running_without_log()
    app.run(main, flags_parser=parse_flags)
