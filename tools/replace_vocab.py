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
import pathlib
import sys

from absl import app, flags, logging

# The accelerator may be busy training. Before JAX is imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from bert_corpus.token_vectors import token_vectors
from bert_jax.checkpoints.new_vocabulary import Replacement, replace_vocabulary
from bert_jax.checkpoints.read import read_model
from bert_jax.checkpoints.save import save_model
from bert_jax.checkpoints.transformers_names import check_positions
from bert_jax.model.architecture import config_from_settings
from bert_jax.runtime.command_line import describe_error, keep_running_without_log, parse_flags
from bert_jax.runtime.errors import CheckpointError
from bert_jax.tokenizers.tokenizer import load_tokenizer
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
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # Orbax logs a lot.
    try:
        replace_vocab(
            MODEL.value,
            VOCAB.value,
            INPUT.value,
            OUTPUT.value,
            text_field=TEXT_FIELD.value,
            data_dir=DATA_DIR.value,
        )
    except (CheckpointError, ImportError, OSError, ValueError) as error:
        sys.exit(f"replace_vocab: {describe_error(error)}")
    except KeyboardInterrupt:
        exit_interrupted("run the same command to start again")


def replace_vocab(
    source: str,
    vocabulary: str,
    inputs: list[str],
    output: str,
    text_field: str = "text",
    data_dir: str = "",
) -> None:
    """Writes a model with another vocabulary, and prints where its vectors come from.

    Raises ValueError, OSError, ImportError and CheckpointError.
    """
    if pathlib.Path(output).exists():
        raise FileExistsError(f"{output} exists already: choose another --output")
    model, tokenizer = read_model(source), load_tokenizer(vocabulary)
    if tokenizer.sha256 == model.tokenizer.sha256:
        raise ValueError(f"{vocabulary} is the vocabulary that {source} has already")
    vectors = token_vectors(inputs, tokenizer, text_field, data_dir)
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
        (replacement.num_mean, "are too rare, and have no old pieces: the mean of the shared"),
    ):
        print(f"{count:>10,} {origin}")
    for token, weights in replacement.examples.items():
        similar = ", ".join(f"{weight:.2f} {name}" for name, weight in weights)
        print(f"{token}: {similar}, ...")


if __name__ == "__main__":
    keep_running_without_log()
    app.run(main, flags_parser=parse_flags)
