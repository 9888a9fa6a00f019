"""Writes the card of a corpus: what it was made of, what was dropped, and what its rows look like.

python tools/corpus_card.py --corpus=DIR

`tools/prepare_corpus.py` calls it; alone, it writes the card of a corpus again.
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
