"""Writes the card of a corpus: its inputs, what was dropped, and examples of rows.

python tools/corpus_card.py --corpus=DIR

`tools/prepare_corpus.py` writes the card, too; this tool rewrites it.
"""

from absl import app, flags

from bert_corpus.card import write_card
from bert_jax.runtime.command_line import parse_flags

CORPUS = flags.DEFINE_string("corpus", None, "Directory or address of a corpus.")


def main(argv: list[str]) -> None:
    del argv
    write_card(CORPUS.value)


if __name__ == "__main__":
    flags.mark_flag_as_required("corpus")
    app.run(main, flags_parser=parse_flags)
