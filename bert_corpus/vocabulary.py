"""Trains vocabularies on text: WordPiece, SentencePiece and byte-level BPE.

All cores read the text as the corpus builder does, into a temporary file with one sentence per
line, from which the vocabulary is trained. The same text always gives the same bytes.
"""

import collections
import dataclasses
import functools
import io
import json
import re
import tempfile
from typing import BinaryIO

import sentencepiece
import tokenizers
import tqdm

from bert_corpus.inputs import Unit, find_inputs, split_into_units
from bert_corpus.manifest import check_skipped
from bert_corpus.parallel import worker_processes
from bert_corpus.readers import read_documents
from bert_corpus.sentences import UNREADABLE, split_sentences
from bert_jax.tokenization import SPECIAL_TOKENS
from bert_jax.tokenizers.byte_pair import ROBERTA_TOKENS, roberta_processing, roberta_spec
from bert_jax.tokenizers.stored import describe_casing, store_as_json
from bert_jax.tokenizers.wordpiece import MAX_WORD_CHARACTERS

# Number of characters with a piece of their own, about as many as in the released vocabularies.
MAX_ALPHABET = 1000
# SentencePiece trains in memory, on a random sample of this many sentences.
MAX_SENTENCES = 10_000_000
MIN_BYTE_PAIR_SIZE = 256 + len(ROBERTA_TOKENS)
MAX_SENTENCE_BYTES = 4192  # SentencePiece's default; longer ones are not trained on


@dataclasses.dataclass
class CharacterCounts:
    """Counts how often each character begins or continues a word, how many "words" (for
    WordPiece) and "sentences" (for SentencePiece) are too long to train on, and what readers
    skipped."""

    word_initial: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    word_internal: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    too_long: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    skipped: collections.Counter = dataclasses.field(default_factory=collections.Counter)


def text_of_units(units: list[Unit], lower_case: bool) -> tuple[list[str], CharacterCounts]:
    """Returns the sentences of units of the input, and their counts."""
    sentences: list[str] = []
    counts = CharacterCounts()
    for unit in units:
        skipped: collections.Counter = collections.Counter()
        for document in read_documents(unit, skipped):
            try:
                sentences += split_sentences(document)
            except UNREADABLE:
                continue  # prepare_corpus counts these
        counts.skipped.update(skipped)
    normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lower_case)
    splitter = tokenizers.pre_tokenizers.BertPreTokenizer()
    words: collections.Counter = collections.Counter()
    for sentence in sentences:
        text = normalizer.normalize_str(sentence)
        words.update(word for word, _ in splitter.pre_tokenize_str(text))
    counts.too_long["sentences"] = sum(
        len(text.encode()) > MAX_SENTENCE_BYTES for text in sentences
    )
    for word, count in words.items():
        if len(word) > MAX_WORD_CHARACTERS:
            counts.too_long["words"] += count
            continue
        counts.word_initial[word[0]] += count
        for character in word[1:]:
            counts.word_internal[character] += count
    return sentences, counts


def spool_text(
    inputs: list[str],
    lower_case: bool,
    stream: BinaryIO,
    num_processes: int = 0,
    data_dir: str = "",
    text_field: str = "text",
) -> CharacterCounts:
    """Writes the sentences of `inputs` to `stream`, one per line, and returns their counts.

    Raises:
      FileNotFoundError, ValueError: see `find_inputs`, `read_documents` and `check_skipped`; or
        there are no words.
    """
    sources = find_inputs(inputs, text_field, data_dir)
    units = split_into_units(sources)
    counts = CharacterCounts()
    split = functools.partial(text_of_units, lower_case=lower_case)
    with worker_processes(split, num_processes) as ordered_map:
        for sentences, unit_counts in tqdm.tqdm(ordered_map(units), "text", len(units)):
            stream.writelines(f"{sentence}\n".encode() for sentence in sentences)
            counts.word_initial.update(unit_counts.word_initial)
            counts.word_internal.update(unit_counts.word_internal)
            counts.too_long.update(unit_counts.too_long)
            counts.skipped.update(unit_counts.skipped)
    stream.flush()
    check_skipped(counts.skipped, text_field)
    if not counts.word_initial:
        raise ValueError("the input holds no words to train on")
    return counts


def train_wordpiece(path: str, counts: CharacterCounts, size: int, lower_case: bool) -> bytes:
    """Trains WordPiece on the sentences in the file `path`; returns the bytes of a vocab.txt.

    The trainer breaks ties between merges by the order of the characters and their "##" forms in a
    hash table, which differs between runs. Passing all of them makes it deterministic.
    """
    frequency = counts.word_initial + counts.word_internal
    alphabet = sorted(frequency, key=lambda c: (-frequency[c], c))[: min(MAX_ALPHABET, size // 4)]
    continuations = sorted(f"##{c}" for c in alphabet if counts.word_internal[c])
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lower_case)
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
        special_tokens=[*SPECIAL_TOKENS, *continuations],
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
      ValueError: the text has more distinct characters than `size` allows.
    """
    pad, unk, *control = SPECIAL_TOKENS
    model = io.BytesIO()
    try:
        with open(path, encoding="utf-8", newline="\n") as sentences:
            sentencepiece.SentencePieceTrainer.train(
                # Not input=path, which would be stored in the model.
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
                f"--size={size} is too small: the characters of this text alone need {needed[1]} "
                "pieces"
            ) from error
        raise ValueError(f"SentencePiece cannot train --size={size}: {error}") from error
    return model.getvalue()


def train_byte_pair(path: str, size: int) -> bytes:
    """Trains RoBERTa's byte-level BPE on the sentences in the file `path`; returns a bpe.json.

    Every byte has a piece, so that no text has unknown tokens.
    """
    pad, unk, cls, sep, mask = ROBERTA_TOKENS
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=[cls, pad, sep, unk, mask],  # RoBERTa's order
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train([path], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    spec = roberta_spec(model["vocab"], model["merges"])
    spec["post_processor"] = roberta_processing(spec, ROBERTA_TOKENS)
    casing = describe_casing(False, "byte-level BPE")
    return store_as_json(spec, ROBERTA_TOKENS, casing, "bpe.json", mask_lstrip=True).content


def train_vocabulary(
    inputs: list[str],
    kind: str,
    size: int,
    lower_case: bool,
    num_processes: int = 0,
    data_dir: str = "",
    text_field: str = "text",
) -> bytes:
    """Returns the bytes of a vocabulary of at most `size` pieces.

    `lower_case` has no effect on the kind "bpe". Raises like `spool_text`, and ValueError for a
    `size` that is too small.
    """
    if kind == "bpe" and size < MIN_BYTE_PAIR_SIZE:
        needed = f"bytes and special tokens need {MIN_BYTE_PAIR_SIZE} pieces"
        raise ValueError(f"--size={size} is too small: {needed}")
    with tempfile.NamedTemporaryFile(suffix=".txt") as spool:
        counts = spool_text(inputs, lower_case, spool, num_processes, data_dir, text_field)
        limits = {
            "words": f"{MAX_WORD_CHARACTERS} characters, which are [UNK] to WordPiece",
            "sentences": f"{MAX_SENTENCE_BYTES:,} bytes",
        }
        if without := counts.skipped["lines_without_text"]:
            print(f"lines without text in {text_field!r}, not trained on: {without:,}")
        unit = {"wordpiece": "words", "sentencepiece": "sentences"}.get(kind)
        if unit and counts.too_long[unit]:
            print(f"not trained on: {counts.too_long[unit]:,} {unit} of over {limits[unit]}")
        if kind == "bpe":
            return train_byte_pair(spool.name, size)
        if kind == "wordpiece":
            return train_wordpiece(spool.name, counts, size, lower_case)
        return train_sentencepiece(spool.name, size, lower_case)
