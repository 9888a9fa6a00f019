r"""Gives a model another vocabulary, such as that of another language or domain.

python tools/train_vocab.py --input='texts/*.txt' --output=vocab.txt --size=30522
python tools/replace_vocab.py --model=DIR --vocab=vocab.txt --input='texts/*.txt' --output=replaced

Tokens that both vocabularies have keep their vectors. The others begin as means of these, weighted
by how similarly they are used in --input (FOCUS; Dobler and de Melo, 2023). All else, such as the
positions, is kept. The model then has to be trained on text of the new vocabulary.

The result is a checkpoint: `bert_jax.load`, `config.init_from` and prepare_corpus's --vocab take
it, and tools/convert_checkpoint.py exports it. docs/vocabularies.md has an example.
"""

import os
import sys

from absl import app, flags

# The accelerator may be busy training. Before JAX is imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from bert_corpus.token_vectors import token_vectors
from bert_jax.checkpoints.change_vocabulary import replace_vocab
from bert_jax.runtime.command_line import (
    describe_error,
    keep_running_without_log,
    log_warnings_only,
    parse_flags,
)
from bert_jax.runtime.errors import CheckpointError
from bert_jax.tools.commands import exit_interrupted

MODEL = flags.DEFINE_string("model", None, "Anything that bert_jax.load reads.", required=True)
VOCAB = flags.DEFINE_string(
    "vocab", None, "The new vocabulary, as for tools/prepare_corpus.py.", required=True
)
INPUT = flags.DEFINE_list(
    "input",
    None,
    "Texts of the new language or domain, as for tools/prepare_corpus.py.",
    required=True,
)
OUTPUT = flags.DEFINE_string("output", None, "The new directory.", required=True)
DATA_DIR = flags.DEFINE_string("data_dir", "", "The same as for tools/prepare_corpus.py.")
TEXT_FIELD = flags.DEFINE_string("text_field", "text", "The same as for tools/prepare_corpus.py.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"replace_vocab: unexpected arguments {argv[1:]}; quote a glob: --input='*.txt'")
    log_warnings_only()
    try:
        replace_vocab(
            MODEL.value,
            VOCAB.value,
            OUTPUT.value,
            lambda tokenizer: token_vectors(
                INPUT.value, tokenizer, TEXT_FIELD.value, DATA_DIR.value
            ),
        )
    except (CheckpointError, ImportError, OSError, ValueError) as error:
        sys.exit(f"replace_vocab: {describe_error(error)}")
    except KeyboardInterrupt:
        exit_interrupted("run the same command to start again")


if __name__ == "__main__":
    keep_running_without_log()
    app.run(main, flags_parser=parse_flags)
