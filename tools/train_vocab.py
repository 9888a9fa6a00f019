r"""Trains a vocabulary: WordPiece, SentencePiece (unigram), byte-level BPE, XLNet's, or of k-mers.

python tools/train_vocab.py --input='texts/*.txt' --output=vocab.txt --size=30522
python tools/train_vocab.py --input=dump.xml.bz2 --output=spiece.model --size=32000 \
    --kind=sentencepiece
python tools/train_vocab.py --input='texts/*.txt' --output=bpe.json --size=50265 --kind=bpe
python tools/train_vocab.py --input='texts/*.txt' --output=xlnet.json --size=32000 --kind=xlnet
python tools/train_vocab.py --input='genomes/*.fna.gz' --output=kmer.json --kind=kmer --k=6

The same text always gives the same bytes. tools/prepare_corpus.py lists the input formats.
"""

import contextlib
import os
import sys
from concurrent.futures.process import BrokenProcessPool

from absl import app, flags

from bert_corpus.vocabulary import train_vocabulary
from bert_jax.runtime.command_line import describe_error, keep_running_without_log, parse_flags
from bert_jax.tokenizers.stored import TOKENIZER_FILENAME
from bert_jax.tokenizers.tokenizer import (
    SENTENCEPIECE_FILENAME,
    SHA256_SUFFIX,
    tokenizer_from_bytes,
    write_sha256,
)
from bert_jax.tokenizers.wordpiece import VOCABULARY_FILENAME
from bert_jax.tools.commands import exit_interrupted

INPUT = flags.DEFINE_list("input", None, "The same as for tools/prepare_corpus.py.", required=True)
OUTPUT = flags.DEFINE_string(
    "output",
    None,
    "vocab.txt, NAME.model for SentencePiece, or NAME.json for BPE, XLNet and k-mers.",
    required=True,
)
SIZE = flags.DEFINE_integer(
    "size", 30_522, "Number of pieces.", lower_bound=16, upper_bound=1 << 20
)
FILENAME_OF_KIND = {
    "wordpiece": VOCABULARY_FILENAME,
    "sentencepiece": SENTENCEPIECE_FILENAME,
    "bpe": TOKENIZER_FILENAME,
    "xlnet": TOKENIZER_FILENAME,
    "kmer": TOKENIZER_FILENAME,
}
ALWAYS_CASED = ("bpe", "xlnet", "kmer")
KIND = flags.DEFINE_enum(
    "kind",
    "wordpiece",
    [*FILENAME_OF_KIND],
    "Algorithm. bpe: byte-level; xlnet: a unigram model whose sequences end in <cls>; kmer: all "
    "sequences of k letters, which do not overlap in a text.",
)
K = flags.DEFINE_integer("k", 6, "Number of letters per k-mer.", lower_bound=1, upper_bound=20)
LETTERS = flags.DEFINE_string(
    "letters", "ACGT", "Alphabet of the k-mers; other characters become [UNK]."
)
DATA_DIR = flags.DEFINE_string("data_dir", "", "The same as for tools/prepare_corpus.py.")
TEXT_FIELD = flags.DEFINE_string("text_field", "text", "The same as for tools/prepare_corpus.py.")
CASED = flags.DEFINE_bool(
    "cased", None, "Keep case (and, in WordPiece, accents). Byte-level BPE and XLNet always do."
)
STRIP_ACCENTS = flags.DEFINE_bool(
    "strip_accents",
    None,
    "Strip accents and other combining marks in WordPiece (--nostrip_accents keeps them). By "
    "default they are stripped from uncased text, as in BERT; any other choice needs an --output "
    "named *.json. XLNet strips them; the other kinds keep them.",
)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"train_vocab: unexpected arguments {argv[1:]}; quote a glob: --input='*.txt'")
    output, partial = OUTPUT.value, f"{OUTPUT.value}.partial"
    filename = FILENAME_OF_KIND[KIND.value]
    is_cased = bool(CASED.value) or KIND.value in ALWAYS_CASED
    is_kmer = KIND.value == "kmer"
    strip_accents = not is_cased if STRIP_ACCENTS.value is None else STRIP_ACCENTS.value
    suffix = os.path.splitext(output)[1]
    if KIND.value == "xlnet" and STRIP_ACCENTS.value is False:
        sys.exit("train_vocab: --kind=xlnet strips accents: leave out --nostrip_accents")
    if KIND.value not in ("wordpiece", "xlnet") and STRIP_ACCENTS.value:
        sys.exit(f"train_vocab: --kind={KIND.value} keeps accents: leave out --strip_accents")
    if KIND.value == "wordpiece" and strip_accents == is_cased:
        filename = TOKENIZER_FILENAME
        if suffix != ".json":
            sys.exit(
                f"train_vocab: --output={output} cannot store that accents are "
                f"{'stripped' if strip_accents else 'kept'}: name it *.json, which can"
            )
    if (suffix if suffix in (".model", ".json") else ".txt") != os.path.splitext(filename)[1]:
        sys.exit(
            f"train_vocab: --output={output} does not match --kind={KIND.value}: a SentencePiece "
            "model, and only that, is named *.model, and a byte-level BPE, XLNet's or k-mers *.json"
        )
    if KIND.value in ALWAYS_CASED and CASED.value is False:
        sys.exit(f"train_vocab: --kind={KIND.value} keeps case: leave out --nocased")
    for flag in (SIZE,) if is_kmer else (K, LETTERS):
        if flag.present:
            reason = "has all k-mers" if is_kmer else "has no k-mers"
            sys.exit(f"train_vocab: --kind={KIND.value} {reason}: leave out --{flag.name}")
    try:  # Check before training that the output can be written.
        if os.path.isdir(output):
            raise IsADirectoryError("it is a directory")
        os.makedirs(os.path.dirname(os.path.abspath(output)), exist_ok=True)
        open(partial, "wb").close()
    except OSError as error:
        sys.exit(
            f"train_vocab: cannot write --output={output} ({error}); expected a file in a new or "
            "writable directory"
        )
    try:
        content = train_vocabulary(
            INPUT.value,
            KIND.value,
            SIZE.value,
            not is_cased,
            data_dir=DATA_DIR.value,
            text_field=TEXT_FIELD.value,
            strip_accents=strip_accents,
            k=K.value,
            letters=LETTERS.value,
        )
        tokenizer = tokenizer_from_bytes(filename, content)
        with open(partial, "wb") as stream:
            stream.write(content)
        is_replaced = os.path.exists(output)
        with contextlib.suppress(FileNotFoundError):
            os.remove(output + SHA256_SUFFIX)
        os.replace(partial, output)
        write_sha256(output)
    except (BrokenProcessPool, ImportError, OSError, ValueError) as error:
        sys.exit(f"train_vocab: {describe_error(error)}")
    except KeyboardInterrupt:
        exit_interrupted("run the same command to start again")
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(partial)
    case = "uncased" if tokenizer.lower_case else "cased"
    accents = ", accents stripped" if tokenizer.strips_accents else ", accents kept"
    replaced = ", in place of the file that was there" * is_replaced
    print(f"{output}: {tokenizer.vocab_size:,} pieces, {case} {KIND.value}{accents}{replaced}")
    if tokenizer.lower_case == is_cased:
        print(
            f"warning: --cased={is_cased}, but by its pieces this vocabulary is {case}. Is all "
            "of the text in one case? If not, give the same flag to prepare_corpus",
            file=sys.stderr,
        )
    if tokenizer.vocab_size < SIZE.value and not is_kmer:
        print(
            f"warning: the text gives fewer than --size={SIZE.value:,} pieces. Add text, or keep "
            "this vocabulary: a model's size follows the vocabulary of its corpus.",
            file=sys.stderr,
        )


if __name__ == "__main__":
    keep_running_without_log()
    app.run(main, flags_parser=parse_flags)
