"""The two steps of building a corpus: the text of a unit to tokens, the tokens of a shard to rows.

Between them, tokens are shuffled: each part of a document goes to a shard that a hash chooses. The
result of a step depends only on its input and the configuration, so it can run anywhere.
"""

import bisect
import collections
import dataclasses
import hashlib
import itertools
import math
import random
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from bert_corpus.cleaning import count_later_words, drop_reason, near_duplicate_keys
from bert_corpus.config import LABELED_ROWS, CorpusConfig
from bert_corpus.encoding import TYPECODES, Encoder
from bert_corpus.full_sentences import make_full_sentences, make_segments
from bert_corpus.identity import text_hash, visible_text
from bert_corpus.inputs import Unit
from bert_corpus.packing import BERT_LAYOUT, pack_pairs
from bert_corpus.pairs import IS_NEXT, NOT_NEXT, Pair, make_pairs
from bert_corpus.readers import Document, read_documents
from bert_corpus.sentences import UNREADABLE, cut_sentence, split_sentences
from bert_jax.data.packing import token_dtype
from bert_jax.tokenizers.stored import Layout
from bert_jax.tokenizers.tokenizer import Tokenizer

# About 32 KiB of text: even a few long documents have many parts, each with many pairs. Long rows
# have longer parts: after the end of a part, the rest of a row is of another document.
MAX_PART_TOKENS = 1 << 13
PART_ROWS = 16  # Minimum, in the longest parts.
# Enough parts to draw random next sentences from: 32 of the longest.
GROUP_TOKENS = 1 << 18
MAX_SAMPLES = 20  # of dropped documents, for each reason
SAMPLE_CHARACTERS = 200
HISTOGRAM_BINS = 16
# Of the documents of a corpus, a random sample of beginnings, to check the language and vocabulary.
MAX_TEXTS = 200
TEXT_CHARACTERS = 1000
# Lengths of an input, in tokens, at which is counted what would be cut off.
INPUT_LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
# Text in a natural language has it; sequences of symbols, such as DNA, have none.
PUNCTUATION = re.compile(r"[^\w\s*-]")


class Part(NamedTuple):
    """Consecutive sentences of one document.

    Attributes:
      document: number of the document, ascending in the order of the input.
      number: of the part in the document.
      digest: hash of the token ids of the document, up to the end of the piece that was read with
        this part; equal for the parts of copies.
      sentences: token ids of `typecode`; Python integers take 20 times the memory.
      typecode: of their arrays, "H" (uint16) or "I" (uint32).
      repeats: the number of times that it is used for training.
    """

    document: int
    number: int
    digest: bytes
    sentences: list[bytes]
    typecode: str = "H"
    repeats: int = 1

    def ids(self) -> list[array]:
        """Returns the token ids of each sentence."""
        return [array(self.typecode, sentence) for sentence in self.sentences]

    def num_tokens(self) -> int:
        """Returns the number of tokens."""
        return sum(map(len, self.sentences)) // array(self.typecode).itemsize


@dataclasses.dataclass
class Report:
    """Counts of a step.

    Attributes:
      counts: of each split, for the manifest.
      skipped: what readers skipped before there was a document.
      samples: the beginnings of some of the dropped documents, by reason.
      rows: the text of the first rows, with their special tokens.
      keys: number and keys of each document, to find near duplicates.
      texts: (hash, beginning) of the documents with the smallest hashes, a random sample.
    """

    counts: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    skipped: dict[str, int] = dataclasses.field(default_factory=collections.Counter)
    samples: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    rows: list[str] = dataclasses.field(default_factory=list)
    keys: list[list[int]] = dataclasses.field(default_factory=list)
    texts: list[tuple[int, str]] = dataclasses.field(default_factory=list)

    def count(self, split: str) -> collections.Counter:
        """Returns the counts of a split, to add to."""
        return self.counts.setdefault(split, collections.Counter())

    def drop(self, split: str, reason: str, text: str) -> None:
        """Counts a dropped document, and keeps its text if there are few others."""
        self.count(split)[f"dropped_{reason}"] += 1
        if len(samples := self.samples.setdefault(reason, [])) < MAX_SAMPLES:
            samples.append(" ".join(text[:SAMPLE_CHARACTERS].split()))

    def sample(self, number: int, text: str) -> None:
        """Keeps the beginning of a document if its hash is among the smallest; of copies, one."""
        place = bisect.bisect_left(self.texts, number, key=lambda each: each[0])
        is_copy = place < len(self.texts) and self.texts[place][0] == number
        if not is_copy:
            self.texts.insert(place, (number, text[:TEXT_CHARACTERS]))
            del self.texts[MAX_TEXTS:]

    def add(self, other: "Report") -> None:
        """Adds the counts and samples of another report, but not its keys."""
        for split, counts in other.counts.items():
            self.count(split).update(counts)
        self.skipped.update(other.skipped)
        for reason, texts in other.samples.items():
            self.samples[reason] = (self.samples.get(reason, []) + texts)[:MAX_SAMPLES]
        self.rows = (self.rows + other.rows)[:MAX_SAMPLES]
        for number, text in other.texts:
            self.sample(number, text)


def split_hash(document: Document, config: CorpusConfig) -> int:
    """Returns the 64-bit hash that decides the split of a document, from its text and the seed."""
    return text_hash(_shown_text(document, _split(document, config)), config.seed)


def _split(
    document: Document, config: CorpusConfig, skipped: collections.Counter | None = None
) -> list[str] | None:
    """Returns the sentences of a document, None if its markup cannot be parsed."""
    try:
        return split_sentences(document, config.sentences, config.language, skipped)
    except UNREADABLE:
        return None


def _shown_text(document: Document, sentences: list[str] | None) -> str:
    """Returns the text of a document without its markup."""
    return " ".join(sentences) if document.markup and sentences else document.text


def find_heldout_limit(
    units: Iterable[Sequence[Unit]], encoder: Encoder, config: CorpusConfig
) -> float:
    """Returns the limit below which the `split_hash` of a document puts it into the held-out split.

    The limit is `heldout_fraction` of the range of hashes. If the documents below it yield no rows,
    the documents with the smallest hashes that yield rows are held out, if others remain to train
    on. Reads documents until it finds enough below the limit: about 1 / `heldout_fraction`. No near
    duplicate is chosen.
    """
    limit, needed = config.heldout_fraction * 2**64, 2 if config.rows in LABELED_ROWS else 1
    if not limit:
        return limit
    smallest: dict[int, int] = {}  # Hash -> number of spans, of documents that suffice together.
    has_others = False
    seen_keys: set[tuple[int, int]] = set()
    documents = (read_documents(unit, collections.Counter()) for unit in chain.from_iterable(units))
    for document, later_words in count_later_words(chain.from_iterable(documents), config):
        if document.continues:
            continue
        texts = _split(document, config)
        number = text_hash(_shown_text(document, texts), config.seed)
        suffices = sum(smallest.values()) >= needed
        is_smaller = not suffices or number < max(smallest)
        # The first of several near duplicates is kept, so the keys of all documents are needed.
        is_read = config.near_duplicates or is_smaller or not has_others
        if not is_read or texts is None or drop_reason(texts, config, later_words):
            continue
        num_spans = _num_spans(texts, needed, encoder, config, seen_keys)
        if not num_spans or number in smallest or (has_others and not is_smaller):
            continue
        smallest[number] = num_spans
        while sum(smallest.values()) - smallest[max(smallest)] >= needed:
            del smallest[max(smallest)]
            has_others = True
        if sum(smallest.values()) >= needed and max(smallest) < limit:
            return limit
    return max(smallest) + 1 if has_others else limit


def _num_spans(
    texts: list[str],
    needed: int,
    encoder: Encoder,
    config: CorpusConfig,
    seen_keys: set[tuple[int, int]],
) -> int:
    """Returns how many sentences, or pieces of long ones, a document has, at most `needed`.

    Returns 0 for a near duplicate. `texts` are its sentences, `seen_keys` the (band, key) of the
    documents before it, to which its own are added.
    """
    if config.near_duplicates:
        keys = set(enumerate(near_duplicate_keys(texts, config.near_duplicates)))
        is_near_duplicate = not keys.isdisjoint(seen_keys)
        seen_keys |= keys
        if is_near_duplicate:
            return 0
    itemsize, num = array(encoder.typecode).itemsize, 0
    for text in texts:
        (ids,) = encoder.encode([text])
        num += len(cut_sentence(ids, config.max_seq_length, itemsize)) if ids else 0
        if num >= needed:
            return needed
    # The order of a single span cannot be predicted.
    return 0 if config.rows == "sentence_order" else num


def tokenize_unit(
    number: int,
    units: Sequence[Unit],
    encoder: Encoder,
    config: CorpusConfig,
    heldout_limit: float,
    shards: dict[str, range],
    report: Report,
) -> Iterator[tuple[int, Part]]:
    """Reads, cleans and tokenizes the documents of units; yields parts, each with its shard.

    `number` is the index of the list of units, `shards` holds the shard numbers of each split;
    `heldout_limit` comes from `find_heldout_limit`.
    """
    itemsize = array(encoder.typecode).itemsize
    document_number, part_number, digest, is_dropped = number << 32, 0, b"", False
    num_tokens = 0  # of the document, so far
    documents = (
        (unit.source.repeats, *each)
        for unit in units
        for each in count_later_words(read_documents(unit, report.skipped), config)
    )
    for repeats, document, later_words in documents:
        if document.continues and is_dropped:
            continue
        texts = _split(document, config, report.skipped)
        if not document.continues:
            document_number, part_number, digest, is_dropped = document_number + 1, 0, b"", False
            num_tokens = 0
            # Of all parts: no pair joins two splits.
            hashed = text_hash(_shown_text(document, texts), config.seed)
            split = "heldout" if hashed < heldout_limit else "train"
            count = report.count(split)
            count["documents"] += 1
        if texts is None:
            report.drop(split, "unreadable_documents", document.text)
            continue
        if not document.continues:
            if reason := drop_reason(texts, config, later_words):
                report.drop(split, reason, " ".join(texts))
                is_dropped = True
                continue
            if config.near_duplicates:
                keys = near_duplicate_keys(texts, config.near_duplicates)
                report.keys.append([document_number, *keys])
        if space := encoder.tokenizer.word_prefix:  # before a sentence that follows another
            first = 0 if document.continues else 1
            texts = [*texts[:first], *(space + text for text in texts[first:])]
        sentences = [ids for ids in encoder.encode(texts) if ids]
        content = b"".join(sentences)
        # Documents with other unknown words are no copies, though the model sees no difference.
        if np.any(np.frombuffer(content, encoder.typecode) == encoder.tokenizer.unk_id):
            content += visible_text(_shown_text(document, texts))
        digest = hashlib.blake2b(digest + content, digest_size=16).digest()
        count["sentences"] += len(sentences)
        count["dropped_empty_sentences"] += len(texts) - len(sentences)
        if not sentences:
            report.drop(split, "empty_documents", document.text)
            continue
        if not document.continues:
            count[f"documents_of_sentences_{len(sentences)}"] += 1
            count["documents_without_punctuation"] += not any(map(PUNCTUATION.search, texts))
            report.sample(hashed, " ".join(texts))
        before, num_tokens = num_tokens, num_tokens + sum(map(len, sentences)) // itemsize
        for length in INPUT_LENGTHS:
            count[f"tokens_beyond_{length}"] += max(num_tokens - length, 0) - max(
                before - length, 0
            )
        pieces = []
        for ids in sentences:
            pieces += cut_sentence(ids, config.max_seq_length, itemsize)
        for sentences in cut_into_parts(pieces, max_part_tokens(config), itemsize):
            part = Part(document_number, part_number, digest, sentences, encoder.typecode, repeats)
            count["text_tokens"] += part.num_tokens()
            part_number += 1
            yield _shard_of(part, shards[split], config), part


def _shard_of(part: Part, shards: range, config: CorpusConfig) -> int:
    """Returns a shard that depends on the text alone, so that copies meet and can be dropped."""
    copy = 0 if config.drop_duplicates else part.document
    identity = f"{config.seed}/{part.digest.hex()}/{copy}/{part.number}".encode()
    digest = hashlib.blake2b(identity, digest_size=8).digest()
    return shards[int.from_bytes(digest) * len(shards) >> 64]


def max_part_tokens(config: CorpusConfig) -> int:
    """Returns the maximum length of a part, about: that of rows of up to 512 tokens is 8,192."""
    return max(MAX_PART_TOKENS, PART_ROWS * config.max_seq_length)


def cut_into_parts(
    sentences: list[bytes], max_tokens: int, itemsize: int = 2
) -> Iterator[list[bytes]]:
    """Yields equal numbers of sentences, of at most about `max_tokens` tokens together.

    A token id has `itemsize` bytes.
    """
    num_tokens = sum(map(len, sentences)) // itemsize
    num_parts = min(math.ceil(num_tokens / max_tokens), len(sentences))
    bounds = (len(sentences) * part // num_parts for part in range(num_parts + 1))
    for start, stop in itertools.pairwise(bounds):
        yield sentences[start:stop]


def make_rows(
    parts: Sequence[Part],
    split: str,
    index: int,
    tokenizer: Tokenizer,
    config: CorpusConfig,
    near_duplicates: Sequence[int],
    report: Report,
) -> np.ndarray:
    """Returns the rows of a shard, `row_dtype` `[num_rows]`, shuffled.

    `parts` are in the order of the input, `index` is the shard's in its split.
    """
    parts = _drop_duplicates(parts, split, tokenizer, config, near_duplicates, report)
    if split == "train":  # Held-out documents are never repeated.
        repeated = [part for part in parts for _ in range(part.repeats - 1)]
        report.count(split)["repeated_tokens"] += sum(part.num_tokens() for part in repeated)
        parts += repeated
    group_tokens = GROUP_TOKENS * max_part_tokens(config) // MAX_PART_TOKENS
    num_groups = max(1, sum(part.num_tokens() for part in parts) // group_tokens)
    rng = random.Random(f"{config.seed}/{split}/{index}")
    special_ids = (tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id)
    typecode = TYPECODES[token_dtype(tokenizer.vocab_size)]
    rows = []
    # Held-out documents are never duplicated.
    for _ in range(config.dupe_factor if split == "train" else 1):
        rng.shuffle(parts)
        for group in range(num_groups):
            group_parts = parts[group::num_groups]
            group_rows, counts = rows_of_group(
                group_parts, special_ids, config, rng, typecode, tokenizer.layout
            )
            counts["unknown_tokens"] = int((group_rows["tokens"] == tokenizer.unk_id).sum())
            rows.append(group_rows)
            report.count(split).update(counts)
    rows = np.concatenate(rows)
    rows = rows[np.random.default_rng(rng.getrandbits(64)).permutation(len(rows))]
    if index == 0:
        ends = rows["sequence_bounds"][:MAX_SAMPLES, :, 2].max(axis=1, initial=0)
        tokens = (row[:end].tolist() for row, end in zip(rows["tokens"], ends, strict=False))
        report.rows += map(tokenizer.decode, tokens)
    return rows


def _drop_duplicates(parts, split, tokenizer, config, near_duplicates, report) -> list[Part]:
    """Returns the parts of documents that are not copies of earlier ones."""
    kept, seen, count = [], set(), report.count(split)
    documents = np.array([part.document for part in parts], np.uint64)
    is_near = np.isin(documents, np.asarray(near_duplicates, np.uint64)).tolist()
    for part, is_near_copy in zip(parts, is_near, strict=True):
        is_copy = config.drop_duplicates and (part.digest, part.number) in seen
        seen.add((part.digest, part.number))
        if not is_copy and not is_near_copy:
            kept.append(part)
            continue
        count["dropped_duplicate_tokens"] += part.num_tokens()
        if part.number == 0:
            text = tokenizer.decode(part.ids()[0].tolist())
            report.drop(split, "duplicates" if is_copy else "near_duplicates", text)
    return kept


def histogram(lengths: np.ndarray, max_length: int) -> list[int]:
    """Returns how many of the lengths are in each of equal bins, the last up to `max_length`."""
    bins = np.ceil(lengths * HISTOGRAM_BINS / max_length).astype(int) - 1
    return np.bincount(bins, minlength=HISTOGRAM_BINS).tolist()


def rows_of_group(
    parts: Sequence[Part],
    special_ids: tuple[int, int, int],
    config: CorpusConfig,
    rng: random.Random,
    typecode: str = "H",
    layout: Layout = BERT_LAYOUT,
) -> tuple[np.ndarray, collections.Counter]:
    """Makes rows of parts; returns them, `row_dtype` [num_rows], and counts for the manifest.

    `special_ids` are of [PAD], [CLS] and [SEP], `typecode` is the parts', and `layout` the
    tokenizer's.
    """
    length, counts = config.max_seq_length, collections.Counter()
    if config.rows in LABELED_ROWS:
        pairs = []
        parts = sorted(parts, key=lambda part: (part.document, part.number))
        indices = [part.document for part in parts]  # Ascending.
        documents = [part.ids() for part in parts]
        for position, index in enumerate(indices):
            own = range(bisect.bisect_left(indices, index), bisect.bisect_right(indices, index))
            if config.rows == "sentence_order":
                own = range(len(parts))  # So that all second spans are true.
            new_pairs = make_pairs(
                documents,
                position,
                length,
                config.short_seq_prob,
                rng,
                own,
                as_released=config.rows == "released_pairs",
                swaps_half=config.rows == "sentence_order",
            )
            if not new_pairs:
                counts["dropped_parts_without_pairs"] += 1
                counts["dropped_tokens_without_pairs"] += parts[position].num_tokens()
            pairs += new_pairs
        counts["dropped_truncated_tokens"] = sum(pair.num_truncated for pair in pairs)
        counts["copied_tokens"] = sum(pair.num_copied for pair in pairs)
    else:
        documents = (part.ids() for part in parts)
        if config.rows == "single_segments":
            sequences = make_segments(documents, length - 2, typecode)
        else:
            crosses = config.rows == "full_sentences"
            sep_id = special_ids[2]
            sequences = make_full_sentences(documents, length - 2, sep_id, crosses, typecode)
        pairs = [Pair(sequence, array(typecode), IS_NEXT) for sequence in sequences]
    rows = pack_pairs(pairs, length, config.max_sequences, special_ids, rng, typecode, layout)
    counts["pairs"] = len(pairs)
    counts["not_next"] = sum(pair.nsp_label == NOT_NEXT for pair in pairs)
    counts["rows"] = len(rows)
    start, _, end = np.moveaxis(rows["sequence_bounds"].astype(int), -1, 0)
    row_tokens = end.max(axis=1, initial=0)
    counts["tokens"] = int(row_tokens.sum())
    for name, lengths in (("pair_lengths", (end - start)[end > 0]), ("row_tokens", row_tokens)):
        for number, count in enumerate(histogram(lengths, length)):
            counts[f"{name}_{number:02d}"] = count
    counts["special_tokens"] = int(np.isin(rows["tokens"], special_ids[1:]).sum())
    return rows, counts
