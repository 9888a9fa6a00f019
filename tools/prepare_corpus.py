r"""Builds a training corpus from text: sentence pairs, packed into rows, in shuffled shards.

python tools/prepare_corpus.py --input='texts/*.txt' --vocab=vocab.txt --output=corpus
python tools/prepare_corpus.py --input=enwiki-latest-pages-articles.xml.bz2 --vocab=vocab.txt \
    --output=corpus --max_seq_length=512
"""

import dataclasses
import sys
import time
from concurrent.futures.process import BrokenProcessPool

from absl import app, flags

from bert_jax.corpus.build import ROWS, CorpusConfig, build_corpus
from bert_jax.corpus.sentences import MODES
from bert_jax.runtime.command_line import parse_flags
from bert_jax.tokenization import load_tokenizer

DEFAULT = CorpusConfig()

INPUT = flags.DEFINE_list(
    "input",
    None,
    "Globs of UTF-8 text files with blank lines between documents, a Wikipedia dump (.xml or "
    ".xml.bz2), or tfds:NAME, a TFDS dataset that was prepared with file_format=array_record.",
    required=True,
)
VOCAB = flags.DEFINE_string("vocab", None, "WordPiece or SentencePiece vocabulary.", required=True)
OUTPUT = flags.DEFINE_string("output", None, "Directory to write the corpus to.", required=True)
OVERWRITE = flags.DEFINE_bool("overwrite", False, "Replace a complete corpus in --output.")
PROCESSES = flags.DEFINE_integer(
    "processes",
    0,
    "Number of worker processes; 0 means one per core. The corpus does not depend on it.",
    lower_bound=0,
)
# The fields of CorpusConfig.
flags.DEFINE_enum(
    "rows",
    DEFAULT.rows,
    ROWS,
    "sentence_pairs: with next-sentence labels, as in BERT. The others have none (RoBERTa, section "
    "4.2). full_sentences: consecutive sentences up to the length of a row, which continue in "
    "another document after a [SEP]; document_sentences: the same, ending with their document.",
)
flags.DEFINE_integer("max_seq_length", DEFAULT.max_seq_length, "Tokens per row.")
flags.DEFINE_integer("max_pairs_per_row", DEFAULT.max_pairs_per_row, "Maximum pairs per row.")
flags.DEFINE_float(
    "short_seq_prob", DEFAULT.short_seq_prob, "Fraction of documents cut into shorter pairs."
)
flags.DEFINE_integer(
    "dupe_factor",
    DEFAULT.dupe_factor,
    "Number of passes over the training documents, each making different sentence pairs; 10 in the "
    "released data. "
    "Every epoch has the same pairs and labels, only with new masks: with 1, a run of many epochs "
    "repeats them. N makes the corpus, and so an epoch, N times as long.",
)
flags.DEFINE_float("heldout_fraction", DEFAULT.heldout_fraction, "Fraction of held-out documents.")
flags.DEFINE_integer("seed", DEFAULT.seed, "Random seed.")
flags.DEFINE_enum(
    "sentences",
    DEFAULT.sentences,
    MODES,
    "split: free text, in which line breaks mean nothing; lines: one sentence per line.",
)
flags.DEFINE_string(
    "language",
    DEFAULT.language,
    "ISO 639-1 code for the sentence splitter; an unknown one is split as English.",
)
flags.DEFINE_integer("block_rows", DEFAULT.block_rows, "Rows per record of a shard.")
flags.DEFINE_string(
    "data_dir",
    DEFAULT.data_dir,
    "Where prepared TFDS datasets are; by default as for TFDS itself.",
)
flags.DEFINE_integer(
    "num_shards",
    DEFAULT.num_shards,
    "Number of shards per split; 0 chooses it by the size of the input.",
)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"prepare_corpus: unexpected arguments {argv[1:]}; quote a glob: --input='*.txt'")
    started = time.monotonic()
    names = [field.name for field in dataclasses.fields(CorpusConfig)]
    try:
        manifest = build_corpus(
            INPUT.value,
            load_tokenizer(VOCAB.value),
            OUTPUT.value,
            CorpusConfig(**{name: flags.FLAGS[name].value for name in names}),
            overwrite=OVERWRITE.value,
            num_processes=PROCESSES.value,
        )
    except BrokenProcessPool as error:
        sys.exit(
            f"prepare_corpus: a worker process died, perhaps for lack of memory ({error}); use "
            "fewer --processes"
        )
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"prepare_corpus: {error}")
    except KeyboardInterrupt:
        sys.exit("\nprepare_corpus: interrupted; run the same command to start again")
    for split, counts in manifest["splits"].items():
        not_next = counts["nsp_labels"]["not_next"] / counts["pairs"]
        pairs = f"{counts['pairs']:,} pairs ({not_next:.1%} NotNext)"
        if flags.FLAGS.rows != "sentence_pairs":
            pairs = f"{counts['pairs']:,} sequences"
        print(
            f"{split}: {counts['documents']:,} documents, {counts['sentences']:,} sentences, "
            f"{pairs}, {counts['rows']:,} rows, {counts['tokens']:,} tokens, "
            f"fill {counts['fill']:.1%}, dropped {counts['dropped']}"
        )
        for warning in counts["warnings"]:
            print(f"warning: {warning}", file=sys.stderr)
    print(f"{OUTPUT.value}: complete after {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
