"""Trains a vocabulary on text: WordPiece as BERT's, or SentencePiece (unigram).

python tools/train_vocab.py --input='texts/*.txt' --output=vocab.txt --size=30522
python tools/train_vocab.py --input=dump.xml.bz2 --output=spiece.model --size=32000 \
    --kind=sentencepiece

The same text gives the same bytes. Text is read as tools/prepare_corpus.py reads it, by all cores,
and spooled to a temporary file, one sentence a line, from which the trainers work.
"""

import collections
import contextlib
import functools
import io
import os
import re
import sys
import tempfile
from concurrent.futures.process import BrokenProcessPool
from typing import BinaryIO, NamedTuple

import sentencepiece
import tokenizers
import tqdm
from absl import app, flags

from bert_jax.corpus.build import CorpusSettings, Group, make_groups
from bert_jax.corpus.parallel import ordered_map
from bert_jax.corpus.readers import find_inputs, input_bytes, read_documents
from bert_jax.corpus.sentences import UnreadableDocument, split_sentences
from bert_jax.tokenization import (
    MAX_WORD_CHARACTERS,
    SENTENCEPIECE_FILENAME,
    WORDPIECE_FILENAME,
    WORDPIECE_SPECIAL_TOKENS,
    bert_normalizer,
    tokenizer_from_bytes,
)

INPUT = flags.DEFINE_list("input", None, "As for tools/prepare_corpus.py.", required=True)
OUTPUT = flags.DEFINE_string("output", None, "vocab.txt, or NAME.model.", required=True)
SIZE = flags.DEFINE_integer("size", 30_522, "Number of pieces.", lower_bound=16, upper_bound=65_536)
KIND = flags.DEFINE_enum("kind", "wordpiece", ["wordpiece", "sentencepiece"], "Of vocabulary.")
CASED = flags.DEFINE_bool("cased", False, "Keep upper case (and accents, in WordPiece).")

# Characters that get a piece of their own; the released vocabularies have about as many.
MAX_ALPHABET = 1000
# What SentencePiece holds in memory, drawn at random from all sentences.
MAX_SENTENCES = 10_000_000
MAX_SENTENCE_BYTES = 4192  # SentencePiece's own limit, in training alone.


class GroupText(NamedTuple):
    """The sentences of a group, how often a character begins or continues a word in them, and how
    many words are too long for WordPiece, and sentences for SentencePiece, to learn from."""

    sentences: list[str]
    beginning: collections.Counter
    continuing: collections.Counter
    too_long: collections.Counter
    bytes_read: int


def text_of_group(group: Group, lower_case: bool) -> GroupText:
    """Splits a group of documents into sentences, and counts characters as WordPiece sees them."""
    sentences: list[str] = []
    for document in group.documents:
        try:
            sentences += split_sentences(document)
        except UnreadableDocument:
            continue  # prepare_corpus counts these
    normalizer = bert_normalizer(lower_case)
    splitter = tokenizers.pre_tokenizers.BertPreTokenizer()
    words: collections.Counter = collections.Counter()
    for sentence in sentences:
        text = normalizer.normalize_str(sentence)
        words.update(word for word, _ in splitter.pre_tokenize_str(text))
    beginning: collections.Counter = collections.Counter()
    continuing: collections.Counter = collections.Counter()
    too_long: collections.Counter = collections.Counter()
    too_long["sentences"] = sum(len(text.encode()) > MAX_SENTENCE_BYTES for text in sentences)
    for word, count in words.items():
        if len(word) > MAX_WORD_CHARACTERS:
            too_long["words"] += count
            continue
        beginning[word[0]] += count
        for character in word[1:]:
            continuing[character] += count
    bytes_read = sum(document.bytes_read for document in group.documents)
    return GroupText(sentences, beginning, continuing, too_long, bytes_read)


def spool_text(
    inputs: list[str], lower_case: bool, stream: BinaryIO, num_processes: int = 0
) -> tuple[collections.Counter, collections.Counter, collections.Counter]:
    """Writes the sentences of `inputs` to `stream`, one a line, in order.

    Returns:
      How often each character begins, and continues, a word; and how much is too long.

    Raises:
      FileNotFoundError, ValueError: as `find_inputs` and `read_documents`, or no sentence is found.
    """
    paths = find_inputs(inputs)
    documents = (document for path in paths for document in read_documents(path))
    groups = make_groups(documents, CorpusSettings(heldout_fraction=0))
    beginning: collections.Counter = collections.Counter()
    continuing: collections.Counter = collections.Counter()
    too_long: collections.Counter = collections.Counter()
    split = functools.partial(text_of_group, lower_case=lower_case)
    with tqdm.tqdm(
        total=sum(map(input_bytes, paths)), desc="text", unit="B", unit_scale=True
    ) as bar:
        for text in ordered_map(split, groups, num_processes):
            stream.writelines(f"{sentence}\n".encode() for sentence in text.sentences)
            beginning.update(text.beginning)
            continuing.update(text.continuing)
            too_long.update(text.too_long)
            bar.update(text.bytes_read)
    stream.flush()
    if not beginning:
        raise ValueError("the input holds no words; nothing to train on")
    return beginning, continuing, too_long


def train_wordpiece(
    path: str,
    beginning: collections.Counter,
    continuing: collections.Counter,
    size: int,
    lower_case: bool,
) -> bytes:
    """Trains WordPiece on the sentences in the file `path`; returns the bytes of a vocab.txt.

    The trainer goes through the characters and their "##" forms in the order of a hash table, which
    differs from run to run, and breaks ties between merges by that order. Naming all of them
    beforehand takes the chance out of it.
    """
    counts = beginning + continuing
    alphabet = sorted(counts, key=lambda c: (-counts[c], c))[: min(MAX_ALPHABET, size // 4)]
    continuations = sorted(f"##{c}" for c in alphabet if continuing[c])
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = bert_normalizer(lower_case)
    too_long = tokenizers.Regex(f".{{{MAX_WORD_CHARACTERS + 1},}}")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.BertPreTokenizer(),
            tokenizers.pre_tokenizers.Split(too_long, "removed"),
        ]
    )
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=[*WORDPIECE_SPECIAL_TOKENS, *continuations],
        initial_alphabet=sorted(alphabet),
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train([path], trainer)
    ids = tokenizer.get_vocab()
    return "".join(f"{piece}\n" for piece in sorted(ids, key=ids.get)).encode()


def train_sentencepiece(path: str, size: int, lower_case: bool) -> bytes:
    """Trains a SentencePiece unigram model on the sentences in the file `path`; returns its bytes.

    Raises:
      ValueError: the text has more characters than `size` has room for.
    """
    pad, unk, *control = WORDPIECE_SPECIAL_TOKENS
    model = io.BytesIO()
    try:
        with open(path, encoding="utf-8", newline="\n") as sentences:
            sentencepiece.SentencePieceTrainer.train(
                # Not input=path, which the model would record.
                sentence_iterator=(sentence.rstrip("\n") for sentence in sentences),
                model_writer=model,
                vocab_size=size,
                hard_vocab_limit=False,
                normalization_rule_name="nmt_nfkc_cf" if lower_case else "nmt_nfkc",
                pad_id=0,
                pad_piece=pad,
                unk_id=1,
                unk_piece=unk,
                bos_id=-1,
                eos_id=-1,
                control_symbols=control,
                input_sentence_size=MAX_SENTENCES,
                max_sentence_length=MAX_SENTENCE_BYTES,
                minloglevel=2,
            )
    except RuntimeError as error:
        if needed := re.search(r"required_chars\. \d+ vs (\d+)", str(error)):
            raise ValueError(
                f"--size={size} is too small: the characters of this text alone are {needed[1]} "
                "pieces of SentencePiece"
            ) from error
        raise ValueError(f"SentencePiece cannot train --size={size}: {error}") from error
    return model.getvalue()


def train_vocabulary(
    inputs: list[str], kind: str, size: int, lower_case: bool, num_processes: int = 0
) -> bytes:
    """Returns the bytes of a vocabulary of at most `size` pieces. Raises: as the steps it takes."""
    with tempfile.NamedTemporaryFile(suffix=".txt") as spool:
        beginning, continuing, too_long = spool_text(inputs, lower_case, spool, num_processes)
        unit, limit = (
            ("words", f"{MAX_WORD_CHARACTERS} characters, which are [UNK] to WordPiece")
            if kind == "wordpiece"
            else ("sentences", f"{MAX_SENTENCE_BYTES:,} bytes")
        )
        if too_long[unit]:
            print(f"left out of the training: {too_long[unit]:,} {unit} of over {limit}")
        if kind == "wordpiece":
            return train_wordpiece(spool.name, beginning, continuing, size, lower_case)
        return train_sentencepiece(spool.name, size, lower_case)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"train_vocab: unexpected arguments {argv[1:]}; quote a glob: --input='*.txt'")
    output, partial = OUTPUT.value, f"{OUTPUT.value}.partial"
    filename = WORDPIECE_FILENAME if KIND.value == "wordpiece" else SENTENCEPIECE_FILENAME
    if output.endswith(".model") != filename.endswith(".model"):
        sys.exit(
            f"train_vocab: --output={output} and --kind={KIND.value} do not go together: a "
            "SentencePiece model, and no other vocabulary, is named *.model"
        )
    try:  # Better to know before the training than after it.
        if os.path.isdir(output):
            raise IsADirectoryError("it is a directory")
        os.makedirs(os.path.dirname(os.path.abspath(output)), exist_ok=True)
        open(partial, "wb").close()
    except OSError as error:
        sys.exit(
            f"train_vocab: cannot write --output={output} ({error}); expected a file in a "
            "directory, new or not, with write permission"
        )
    try:
        content = train_vocabulary(INPUT.value, KIND.value, SIZE.value, not CASED.value)
        tokenizer = tokenizer_from_bytes(filename, content)
        with open(partial, "wb") as stream:
            stream.write(content)
        os.replace(partial, output)
    except (BrokenProcessPool, ImportError, OSError, ValueError) as error:
        sys.exit(f"train_vocab: {error}")
    except KeyboardInterrupt:
        sys.exit("\ntrain_vocab: interrupted; the same command begins anew")
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(partial)
    case = "uncased" if tokenizer.lower_case else "cased"
    print(f"{output}: {tokenizer.vocab_size:,} pieces, {case} {KIND.value}")
    if tokenizer.lower_case == CASED.value:
        print(
            f"warning: --cased={CASED.value} was asked, but by its pieces this vocabulary is "
            f"{case}, and text will be treated so: is all of the text in one case?",
            file=sys.stderr,
        )
    if tokenizer.vocab_size < SIZE.value:
        print(
            f"warning: --size={SIZE.value:,} was asked; the text has no more pieces to give. Give "
            "more text, or leave it: a model is as large as the vocabulary of its corpus.",
            file=sys.stderr,
        )


if __name__ == "__main__":
    app.run(main)
