r"""Builds a training corpus from text: sentence pairs, packed into rows, in shuffled shards.

python tools/prepare_corpus.py --input='texts/*.txt' --vocab=vocab.txt --output=corpus
python tools/prepare_corpus.py --input=enwiki-latest-pages-articles-multistream.xml.bz2 \
    --vocab=vocab.txt --output=corpus --max_seq_length=512

With --runner=NAME, a runner of Apache Beam does the work; further flags are its options:

python tools/prepare_corpus.py --input='gs://BUCKET/texts/*' --vocab=vocab.txt \
    --output=gs://BUCKET/corpus --runner=DataflowRunner --project=PROJECT --region=REGION \
    --temp_location=gs://BUCKET/temp --sdk_container_image=IMAGE
"""

import dataclasses
import importlib.util
import os
import sys
import time
from concurrent.futures.process import BrokenProcessPool

from absl import app, flags

from bert_corpus.build import run_processes
from bert_corpus.card import card_files, read_samples, write_card
from bert_corpus.config import DOCUMENTS, ROWS, CorpusConfig
from bert_corpus.plan import Plan
from bert_corpus.sentences import MODES
from bert_corpus.steps import MAX_SAMPLES, SAMPLE_CHARACTERS
from bert_corpus.summary import summarize, unknown_share
from bert_jax.data.rows import Rows
from bert_jax.runtime.buckets import is_bucket
from bert_jax.runtime.command_line import describe_error, keep_running_without_log, parse_flags
from bert_jax.tokenizers.tokenizer import load_tokenizer
from bert_jax.tools.commands import exit_interrupted

DEFAULT = CorpusConfig()

INPUT = flags.DEFINE_list(
    "input",
    None,
    "Globs of local files or files in a bucket: UTF-8 text (see --documents; "
    ".txt, .text or no suffix), Wikipedia dumps (.xml), JSON lines (.jsonl, .ndjson), .csv, .tsv, "
    ".html, .md and FASTA (.fa, .fna, .faa), all also as .gz, .bz2, .zst or .xz, or .parquet or "
    ".arrow; a folder of datasets.save_to_disk; hf:NAME[:CONFIG[:SPLIT]], a dataset of the "
    "Hugging Face Hub; or tfds:NAME, a TFDS dataset prepared with file_format=array_record.",
    required=True,
)
VOCAB = flags.DEFINE_string(
    "vocab",
    None,
    "Vocabulary file of train_vocab; or the directory of a corpus, of a run (its workdir, or a "
    "checkpoint), or of a transformers model, whose tokenizer is used with all of its options.",
    required=True,
)
CASED = flags.DEFINE_bool(
    "cased",
    None,
    "Keep upper case, or (--nocased) lower-case the text. By default, set by the model of --vocab, "
    "or else inferred from the pieces of the vocabulary.",
)
OUTPUT = flags.DEFINE_string(
    "output", None, "Directory or gs:// address to write the corpus to.", required=True
)
OVERWRITE = flags.DEFINE_bool(
    "overwrite",
    False,
    "Replace a complete corpus in --output: once the new one is finished, or with --runner before "
    "the pipeline starts.",
)
PROCESSES = flags.DEFINE_integer(
    "processes",
    0,
    "Number of worker processes; 0 means one per core. The corpus does not depend on it.",
    lower_bound=0,
)
RUNNER = flags.DEFINE_string(
    "runner",
    "",
    "Runner of Apache Beam, such as DataflowRunner; by default, processes of this machine. The "
    "corpus does not depend on it.",
)
DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Print the inputs, work units and output shards, check the options, and exit."
)
SAMPLES = flags.DEFINE_integer(
    "samples",
    0,
    f"Number of dropped documents to print for each reason, at most {MAX_SAMPLES}; the first "
    f"{SAMPLE_CHARACTERS} characters of each.",
    lower_bound=0,
)
# The fields of CorpusConfig.
flags.DEFINE_enum(
    "rows",
    DEFAULT.rows,
    ROWS,
    "Row format. sentence_pairs: with next-sentence labels, as in BERT, half of them NotNext; "
    "released_pairs: the same, but a span of one sentence is always NotNext, as the released code "
    "labels it; sentence_order: with the labels of ALBERT, whether two consecutive spans are "
    "swapped. The remaining formats have no labels. full_sentences: consecutive sentences up to "
    "the length of a row, which continue in another document after a [SEP]; document_sentences: "
    "the same, but never across documents (RoBERTa, section 4.2); single_segments: consecutive "
    "tokens of a document (SpanBERT).",
)
flags.DEFINE_integer("max_seq_length", DEFAULT.max_seq_length, "Tokens per row.")
flags.DEFINE_integer(
    "max_sequences",
    None,
    "Maximum sequences per row. Default: 8, or one per 64 tokens of rows of more than 512.",
)
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
    "documents",
    DEFAULT.documents,
    DOCUMENTS,
    "How text files are split into documents. blank_lines: at blank lines, as in the released "
    "code; lines: one document per line, such as a message, a log entry or a DNA sequence; files: "
    "one document per file, with blank lines between its paragraphs. Other formats define their "
    "own documents.",
)
flags.DEFINE_enum(
    "sentences",
    DEFAULT.sentences,
    MODES,
    "split: free text, where line breaks are ignored and a library splits the sentences; lines: "
    "one sentence per line.",
)
flags.DEFINE_string(
    "language",
    DEFAULT.language,
    "ISO 639-1 code of the text's language, whose abbreviations the sentence splitter knows.",
)
flags.DEFINE_integer("block_rows", DEFAULT.block_rows, "Rows per record of a shard.")
flags.DEFINE_string(
    "data_dir",
    DEFAULT.data_dir,
    "Directory of prepared TFDS datasets; by default, TFDS's own.",
)
flags.DEFINE_integer(
    "num_shards",
    DEFAULT.num_shards,
    "Number of shards of the train split; 0 chooses up to 2,048 by the size of the input. A worker "
    "holds the tokens of a shard in memory.",
)
flags.DEFINE_string(
    "repeat",
    DEFAULT.repeat,
    "FILE:N or GLOB:N, several separated by commas: the documents of these inputs are used N times "
    "for training, such as good prose among web pages.",
)
flags.DEFINE_string(
    "text_field",
    DEFAULT.text_field,
    "Field to read of JSON, tables and datasets. '*.csv:body,text' is body in CSV files, and text "
    "in others: of several globs, the first that matches an input counts.",
)
flags.DEFINE_bool(
    "drop_duplicates",
    DEFAULT.drop_duplicates,
    "Drop exact copies of earlier documents.",
)
flags.DEFINE_float(
    "near_duplicates",
    DEFAULT.near_duplicates,
    "Drop documents whose 5-word shingles have at least about this Jaccard similarity with an "
    "earlier document's (MinHash estimate), such as 0.8; 0 keeps all.",
)
flags.DEFINE_integer("min_words", DEFAULT.min_words, "Drop documents with fewer words than this.")
flags.DEFINE_integer(
    "max_words", DEFAULT.max_words, "Drop documents with more words than this; 0: no limit."
)
flags.DEFINE_string(
    "only_language",
    DEFAULT.only_language,
    "ISO 639-1 code; drop documents that are not identified as being in this language.",
)


def parse_all_flags(argv: list[str]) -> list[str]:
    """Returns the arguments that are not flags of this tool: with --runner, Beam's options."""
    has_runner = any(argument.startswith(("--runner", "-runner")) for argument in argv)
    return parse_flags(argv, known_only=has_runner)


def main(argv: list[str]) -> None:
    if len(argv) > 1 and not RUNNER.value:
        sys.exit(f"prepare_corpus: unexpected arguments {argv[1:]}; quote a glob: --input='*.txt'")
    started = time.monotonic()
    names = [field.name for field in dataclasses.fields(CorpusConfig)]
    try:
        config = CorpusConfig(**{name: flags.FLAGS[name].value for name in names})
        # A shell does not expand the ~ of --output=~/corpus.
        output, vocabulary = map(os.path.expanduser, (OUTPUT.value, VOCAB.value))
        lower_case = None if CASED.value is None else not CASED.value
        tokenizer = load_tokenizer(vocabulary, lower_case)
        accents = "stripped" if tokenizer.strips_accents else "kept"
        print(
            f"{vocabulary}: {tokenizer.vocab_size:,} ids, {tokenizer.casing}, accents are {accents}"
        )
        if tokenizer.mask_id is None:
            raise ValueError(f"{vocabulary} has no mask token, which pre-training needs")
        plan = Plan(INPUT.value, tokenizer, config)
        if RUNNER.value:
            if not importlib.util.find_spec("apache_beam"):
                raise ImportError("--runner needs apache-beam: pip install 'bert_jax[beam]'")
            from bert_corpus import beam

            options = beam.parse_options([f"--runner={RUNNER.value}", *argv[1:]], plan, output)
        if DRY_RUN.value:
            print(plan.describe())
            return
        if RUNNER.value:
            manifest = beam.run_pipeline(plan, output, options, OVERWRITE.value)
            write_card(output)
        else:
            manifest = run_processes(plan, output, OVERWRITE.value, PROCESSES.value, card_files)
        if not is_bucket(output):  # Opens it, so that only a readable corpus is reported as built.
            for split in manifest["splits"]:
                Rows(output, split)
    except BrokenProcessPool as error:
        sys.exit(
            f"prepare_corpus: a worker process died, perhaps for lack of memory ({error}); use "
            "fewer --processes; the same command resumes"
        )
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"prepare_corpus: {describe_error(error)}")
    except KeyboardInterrupt:
        exit_interrupted("run the same command to resume")
    summary, warnings = summarize(plan, manifest, read_samples(output), SAMPLES.value)
    print("\n".join(summary))
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(
        f"{output}: complete after {time.monotonic() - started:.1f} s; "
        f"{unknown_share(manifest):.2%} of the tokens are [UNK]; see its card.md"
    )


if __name__ == "__main__":
    keep_running_without_log()
    app.run(main, flags_parser=parse_all_flags)
