"""Trains vocabularies on text: WordPiece, SentencePiece and byte-level BPE; or k-mers.

All cores read the text as the corpus builder does, into a temporary file with one sentence per
line, from which the vocabulary is trained. The same text always gives the same bytes.
"""

import collections
import dataclasses
import functools
import io
import json
import re
import sys
import tempfile
import unicodedata
from collections.abc import Callable
from typing import BinaryIO

import sentencepiece
import tokenizers
import tqdm

from bert_corpus.inputs import Unit, find_inputs, split_into_units
from bert_corpus.manifest import MAX_UNKNOWN, check_skipped
from bert_corpus.parallel import worker_processes
from bert_corpus.readers import read_documents
from bert_corpus.sentences import UNREADABLE, split_sentences
from bert_corpus.words import cut_text
from bert_jax.tokenizers.byte_pair import ROBERTA_TOKENS, roberta_processing, roberta_spec
from bert_jax.tokenizers.kmer import kmer_spec
from bert_jax.tokenizers.stored import (
    Layout,
    SpecialTokens,
    ids_of_model,
    special_added_tokens,
    template,
)
from bert_jax.tokenizers.tokenizer import SPECIAL_TOKENS
from bert_jax.tokenizers.unigram import XLNET_ADDED, XLNET_TOKENS, xlnet_spec
from bert_jax.tokenizers.wordpiece import MAX_WORD_CHARACTERS, bert_spec

# Number of characters with a piece of their own, about as many as in the released vocabularies.
MAX_ALPHABET = 1000
# SentencePiece trains in memory, on a random sample of this many sentences.
MAX_SENTENCES = 10_000_000
MIN_BYTE_PAIR_SIZE = 256 + len(ROBERTA_TOKENS)
MAX_SENTENCE_BYTES = 4192  # SentencePiece's default; longer ones are cut
MAX_ACCENTED_WORDS = 1 << 18  # different ones whose spellings are counted
MAX_STRIPPED = 0.01  # share of the words that lose accents without a warning


@dataclasses.dataclass
class CharacterCounts:
    """Counts the characters and words of a text.

    Attributes:
      word_initial, word_internal: how often each character begins or continues a word.
      words: the number of words: "all"; "long" ones, which are [UNK] to WordPiece; "letters",
        words that are not numbers or punctuation; and "accented", those of them with accents.
      spellings: word without accents -> how often each spelling, with and without them, occurs.
      skipped: how much of each kind the readers skipped.
    """

    word_initial: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    word_internal: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    words: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    spellings: dict[str, collections.Counter] = dataclasses.field(default_factory=dict)
    skipped: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def add(self, other: "CharacterCounts") -> None:
        """Adds the counts of another text."""
        for name in ("word_initial", "word_internal", "words", "skipped"):
            getattr(self, name).update(getattr(other, name))
        for word, spellings in other.spellings.items():
            if word in self.spellings or len(self.spellings) < MAX_ACCENTED_WORDS:
                self.spellings.setdefault(word, collections.Counter()).update(spellings)

    def describe_accents(self) -> str:
        """Returns what stripping the accents loses; "" for a text without accents."""
        if not self.words["accented"]:
            return ""
        merged = [spellings for spellings in self.spellings.values() if len(spellings) > 1]
        # The best examples are those whose second spelling is frequent.
        merged.sort(key=lambda spellings: -spellings.most_common(2)[1][1])
        examples = [" and ".join(w for w, _ in each.most_common(2)) for each in merged[:3]]
        share = self.words["accented"] / self.words["letters"]
        return (
            f"{share:.2%} of the words have accents, which are stripped: "
            f"{len(merged):,} words become equal to others{' (' * bool(examples)}"
            f"{', '.join(examples)}{')' * bool(examples)}. Where accents carry meaning, keep them "
            "with --nostrip_accents and --output=NAME.json"
        )


def text_of_units(
    units: list[Unit], lower_case: bool, strip_accents: bool
) -> tuple[list[str], CharacterCounts]:
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
    # Counts words with their accents first, so that each distinct word is stripped only once.
    normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lower_case, strip_accents=False)
    splitter = tokenizers.pre_tokenizers.BertPreTokenizer()
    spelled: collections.Counter = collections.Counter()
    for sentence in sentences:
        text = normalizer.normalize_str(sentence)
        spelled.update(word for word, _ in splitter.pre_tokenize_str(text))
    words = _strip_accents(spelled, counts) if strip_accents else spelled
    counts.words["all"] = words.total()
    for word, count in words.items():
        counts.words["letters"] += count * word[0].isalpha()
        if len(word) > MAX_WORD_CHARACTERS:
            counts.words["long"] += count
            continue
        counts.word_initial[word[0]] += count
        for character in word[1:]:
            counts.word_internal[character] += count
    return sentences, counts


def _strip_accents(spelled: collections.Counter, counts: CharacterCounts) -> collections.Counter:
    """Returns how often each word occurs without accents; adds the spellings to `counts`."""
    normalizer = tokenizers.normalizers.BertNormalizer(lowercase=False, strip_accents=True)
    splitter = tokenizers.pre_tokenizers.BertPreTokenizer()
    words = collections.Counter()
    for spelling, count in spelled.items():
        if spelling.isascii():
            words[spelling] += count
            continue
        stripped = [
            word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(spelling))
        ]
        for word in stripped:
            words[word] += count
        decomposed = unicodedata.normalize("NFD", spelling)
        if stripped and any(unicodedata.category(c) == "Mn" for c in decomposed):
            counts.words["accented"] += count
            counts.spellings.setdefault(stripped[0], collections.Counter())[spelling] = count
    for word, spellings in counts.spellings.items():
        if word in spelled:
            spellings[word] = spelled[word]
    return words


def spool_text(
    inputs: list[str],
    lower_case: bool,
    strip_accents: bool,
    stream: BinaryIO,
    num_processes: int = 0,
    data_dir: str = "",
    text_field: str = "text",
) -> CharacterCounts:
    """Writes the sentences of `inputs` to `stream`, one per line, and returns their counts.

    Raises:
      FileNotFoundError, ValueError: see `find_inputs`, `read_documents` and `check_skipped`; or
        there is no text.
    """
    sources = find_inputs(inputs, text_field, data_dir)
    units = split_into_units(sources)
    counts = CharacterCounts()
    split = functools.partial(text_of_units, lower_case=lower_case, strip_accents=strip_accents)
    with worker_processes(split, num_processes) as ordered_map:
        for sentences, unit_counts in tqdm.tqdm(ordered_map(units), "text", len(units)):
            stream.writelines(f"{sentence}\n".encode() for sentence in sentences)
            counts.add(unit_counts)
    stream.flush()
    check_skipped(counts.skipped, text_field)
    if not counts.words["all"]:
        raise ValueError("the input holds no words to train on: it is blank, or holds only markup")
    return counts


def train_wordpiece(
    path: str, counts: CharacterCounts, size: int, lower_case: bool, strip_accents: bool
) -> bytes:
    """Trains WordPiece on the sentences in the file `path`; returns the bytes of a vocab.txt.

    A vocab.txt cannot say that accents of lower-cased text are kept, or those of cased text
    stripped: then returns the bytes of a tokenizer.json. Raises ValueError without words.

    The trainer breaks ties between merges by the order of the characters and their "##" forms in a
    hash table, which differs between runs. Passing all of them makes it deterministic.
    """
    if not counts.word_initial:
        raise ValueError(
            f"all {counts.words['long']:,} words between spaces are longer than "
            f"{MAX_WORD_CHARACTERS} characters, which WordPiece cannot read: put spaces into the "
            "text, or train --kind=bpe or sentencepiece, which need none, or for DNA --kind=kmer"
        )
    frequency = counts.word_initial + counts.word_internal
    alphabet = sorted(frequency, key=lambda c: (-frequency[c], c))[: min(MAX_ALPHABET, size // 4)]
    continuations = sorted(f"##{c}" for c in alphabet if counts.word_internal[c])
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(
        lowercase=lower_case, strip_accents=strip_accents
    )
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
    ids = dict(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))
    if strip_accents != lower_case:
        spec = bert_spec(ids, lower_case, MAX_WORD_CHARACTERS)
        spec["normalizer"]["strip_accents"] = strip_accents
        spec["post_processor"] = template(Layout(), spec, SpecialTokens())
        spec["added_tokens"] = special_added_tokens(ids, SpecialTokens(), mask_lstrip=False)
        return json.dumps(spec, ensure_ascii=False).encode()
    return "".join(f"{piece}\n" for piece in ids).encode()


def train_sentencepiece(path: str, size: int, lower_case: bool) -> bytes:
    """Trains a SentencePiece unigram model on the sentences in the file `path`; returns its bytes.

    Raises ValueError like `_train_unigram`.
    """
    pad, unk, *control = SPECIAL_TOKENS
    return _train_unigram(
        path,
        size,
        normalization_rule_name="nmt_nfkc_cf" if lower_case else "nmt_nfkc",
        pad_id=0,
        pad_piece=pad,
        unk_id=1,
        unk_piece=unk,
        bos_id=-1,
        eos_id=-1,
        control_symbols=control,
    )


def train_xlnet(path: str, size: int) -> bytes:
    """Trains XLNet's tokenizer, a cased unigram model, on the sentences in the file `path`.

    Returns the bytes of a tokenizer.json, whose sequences end in <cls>. The special pieces have the
    ids of the released models. Raises ValueError like `_train_unigram`.
    """
    names, others = XLNET_TOKENS, XLNET_ADDED["additional_special_tokens"]
    bos, eos = XLNET_ADDED["bos_token"], XLNET_ADDED["eos_token"]
    accents = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.NFKD(), tokenizers.normalizers.StripAccents()]
    )
    content = _train_unigram(
        path,
        size,
        accents.normalize_str,
        normalization_rule_name="nmt_nfkc",
        unk_id=0,
        unk_piece=names.unk,
        bos_id=1,
        bos_piece=bos,
        eos_id=2,
        eos_piece=eos,
        pad_id=5,
        pad_piece=names.pad,
        # They get the ids that are left: 3, 4 and 6 to 8.
        control_symbols=[names.cls, names.sep, names.mask, *reversed(others)],
    )
    spec = xlnet_spec(content, {}, "the trained model")
    ids = ids_of_model(spec)
    added = special_added_tokens(ids, names, mask_lstrip=False)
    added += [added[0] | {"id": ids[name], "content": name} for name in (bos, eos, *others)]
    spec["added_tokens"] = added
    spec["post_processor"] = template(Layout(cls_last=True), spec, names)
    return json.dumps(spec, ensure_ascii=False).encode()


def _train_unigram(
    path: str, size: int, prepare: Callable[[str], str] = str, **options: object
) -> bytes:
    """Returns the bytes of a SentencePiece unigram model of the sentences in the file `path`.

    `prepare` is what a tokenizer does to a text before the model's own normalization; `options` are
    those of SentencePiece's trainer. Raises ValueError if the text has more distinct characters
    than `size` allows.
    """
    model = io.BytesIO()
    try:
        with open(path, encoding="utf-8", newline="\n") as sentences:
            sentencepiece.SentencePieceTrainer.train(
                # Not input=path, which would be stored in the model.
                sentence_iterator=(
                    piece
                    for sentence in sentences
                    for piece in cut_text(prepare(sentence.rstrip("\n")), MAX_SENTENCE_BYTES)
                ),
                model_writer=model,
                vocab_size=size,
                hard_vocab_limit=False,
                input_sentence_size=MAX_SENTENCES,
                max_sentence_length=MAX_SENTENCE_BYTES,
                minloglevel=2,
                **options,
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
    """Trains RoBERTa's byte-level BPE on the sentences in the file `path`.

    Returns the bytes of a tokenizer.json. Every byte has a piece, so that no text has unknown
    tokens.
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
    spec["added_tokens"] = special_added_tokens(model["vocab"], ROBERTA_TOKENS, mask_lstrip=True)
    return json.dumps(spec, ensure_ascii=False).encode()


def kmer_vocabulary(path: str, k: int, letters: str) -> bytes:
    """Returns the bytes of a tokenizer.json whose pieces are k-mers; see `kmer_spec`.

    Of the sentences in the file `path`, says how many characters it does not know.
    """
    spec = kmer_spec(k, letters)
    known, total = (letters + letters.lower()).encode(), 0
    others: collections.Counter = collections.Counter()
    with open(path, "rb") as sentences:
        for sentence in sentences:
            characters = b"".join(sentence.split())
            total += len(characters)
            others.update(characters.translate(None, known).decode())
    if others:
        share, names = others.total() / total, "".join(sorted(others)[:20])
        is_much = share > MAX_UNKNOWN
        print(
            f"{'warning: ' * is_much}{share:.2%} of the characters are none of --letters={letters}:"
            f" each is [UNK] ({names})",
            file=sys.stderr if is_much else sys.stdout,
        )
    return json.dumps(spec, ensure_ascii=False).encode()


def train_vocabulary(
    inputs: list[str],
    kind: str,
    size: int,
    lower_case: bool,
    num_processes: int = 0,
    data_dir: str = "",
    text_field: str = "text",
    strip_accents: bool | None = None,
    k: int = 6,
    letters: str = "ACGT",
) -> bytes:
    """Returns the bytes of a vocabulary of at most `size` pieces, or of the kind "kmer".

    `lower_case` has no effect on the kinds "bpe", "xlnet" and "kmer", `strip_accents` (None: as
    `lower_case`) only on "wordpiece"; `k` and `letters` are of "kmer". Raises like `spool_text`,
    `train_wordpiece` and `kmer_spec`, and ValueError for a `size` that is too small.
    """
    if strip_accents is None:
        strip_accents = lower_case
    if kind == "kmer":
        kmer_spec(k, letters)  # Raises before the text is read.
    if kind == "bpe" and size < MIN_BYTE_PAIR_SIZE:
        needed = f"bytes and special tokens need {MIN_BYTE_PAIR_SIZE} pieces"
        raise ValueError(f"--size={size} is too small: {needed}")
    with tempfile.NamedTemporaryFile(suffix=".txt") as spool:
        casing = lower_case, strip_accents
        counts = spool_text(inputs, *casing, spool, num_processes, data_dir, text_field)
        if without := counts.skipped["lines_without_text"]:
            print(f"lines without text in {text_field!r}, not trained on: {without:,}")
        if kind == "wordpiece" and (long := counts.words["long"]):
            limit = f"{MAX_WORD_CHARACTERS} characters, which are [UNK] to WordPiece"
            print(f"not trained on: {long:,} words of over {limit}")
        if kind == "wordpiece" and (lost := counts.describe_accents()):
            is_much = counts.words["accented"] > MAX_STRIPPED * counts.words["letters"]
            print(f"{'warning: ' * is_much}{lost}", file=sys.stderr if is_much else sys.stdout)
        if kind == "kmer":
            return kmer_vocabulary(spool.name, k, letters)
        if kind == "bpe":
            return train_byte_pair(spool.name, size)
        if kind == "xlnet":
            return train_xlnet(spool.name, size)
        if kind == "wordpiece":
            return train_wordpiece(spool.name, counts, size, *casing)
        return train_sentencepiece(spool.name, size, lower_case)
