"""Builds a corpus: reads documents, writes shuffled shards of packed rows and a manifest.

The parent process assigns each document to a split. Workers tokenize batches of documents and
assign each part of a document to a random shard; the parent appends the parts to one file per
shard, whose parts workers then pair and pack in random groups. Randomness depends only on the seed
and the index of the batch or shard, not on the number of processes.
"""

import array
import bisect
import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import os
import pathlib
import pickle
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tqdm

from bert_jax.corpus import writing
from bert_jax.corpus.full_sentences import make_full_sentences
from bert_jax.corpus.packing import pack_pairs
from bert_jax.corpus.pairs import IS_NEXT, NOT_NEXT, SPECIAL_TOKENS_PER_PAIR, Pair, make_pairs
from bert_jax.corpus.parallel import ordered_map
from bert_jax.corpus.readers import Document, find_inputs, input_bytes, read_documents
from bert_jax.corpus.sentences import MODES, UNREADABLE, cut_sentence, split_sentences
from bert_jax.tokenization import Tokenizer

BATCH_CHARACTERS = 1 << 20  # tokenized at once; a few batches per core are read ahead
# About 32 KiB of text: even a few long documents give many parts, each with many pairs.
MAX_PART_TOKENS = 1 << 13
# Enough parts to draw random next sentences from; a worker holds a group as Python integers.
GROUP_TOKENS = 1 << 18
# A shard holds many parts and is shuffled in memory; a small input has shards for all cores.
INPUT_BYTES_PER_SHARD = 2 << 20
MAX_SHARDS = 512  # all are open while tokenizing
MAX_VOCABULARY = 1 << 16  # token ids in rows are uint16
ROWS = ("sentence_pairs", "full_sentences", "document_sentences")


@dataclasses.dataclass(frozen=True)
class CorpusConfig:
    """Settings of a corpus, recorded in its manifest. Raises ValueError for an invalid field."""

    # "sentence_pairs"; or, without next-sentence labels, "full_sentences" (a sequence may continue
    # in another document) or "document_sentences" (a sequence ends with its document).
    rows: str = "sentence_pairs"
    max_seq_length: int = 128  # tokens per row
    max_pairs_per_row: int = 8
    short_seq_prob: float = 0.1  # probability that a document is cut into shorter pairs
    dupe_factor: int = 1  # number of times each training document is turned into (different) pairs
    heldout_fraction: float = 0.01  # decided by a hash of the text, so that copies share a split
    seed: int = 0
    sentences: str = "split"  # "split" for free text, "lines" for one sentence per line
    language: str = "en"  # for the sentence splitter, ISO 639-1; unknown ones are split as English
    block_rows: int = 256  # rows per record
    num_shards: int = 0  # of the train split; 0 chooses by the size of the input
    data_dir: str = ""  # directory of prepared TFDS datasets; "" means TFDS's default

    def __post_init__(self):
        bounds = dict.fromkeys(("max_pairs_per_row", "dupe_factor", "block_rows"), (1, math.inf))
        bounds |= {
            "max_seq_length": (SPECIAL_TOKENS_PER_PAIR + 2, MAX_VOCABULARY - 1),
            "short_seq_prob": (0, 1),
            "heldout_fraction": (0, 0.5),
            "seed": (0, math.inf),
            "num_shards": (0, 99_999),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name}={value}; expected {low} to {high}")
        for name, values in (("sentences", MODES), ("rows", ROWS)):
            if (value := getattr(self, name)) not in values:
                raise ValueError(f"{name}={value!r}; expected one of {', '.join(values)}")


def make_batches(
    documents: Iterable[Document], config: CorpusConfig, batch_characters: int = BATCH_CHARACTERS
) -> Iterator[list[tuple[Document, str, int]]]:
    """Yields batches of at least `batch_characters`: (document, split, document index).

    All parts of a document share split and index, so no pair joins train and held-out documents.
    """
    batch, characters, document_index = [], 0, -1
    for document in documents:
        if not document.continues:
            split = split_of(document.text, config)
            document_index += 1
        batch.append((document, split, document_index))
        characters += len(document.text)
        if characters >= batch_characters:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def split_of(text: str, config: CorpusConfig) -> str:
    """Returns the split of a document, a function of its text and the seed."""
    key = str(config.seed).encode()
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=key).digest()
    is_heldout = int.from_bytes(digest) < config.heldout_fraction * 2**64
    return "heldout" if is_heldout else "train"


class DocumentPart(NamedTuple):
    """Consecutive sentences of one document."""

    document_index: int
    sentences: list[bytes]  # uint16 token ids; Python integers take 20 times the memory

    def ids(self) -> list[list[int]]:
        """Returns the token ids of each sentence."""
        return [memoryview(sentence).cast("H").tolist() for sentence in self.sentences]


def cut_into_parts(document_index: int, sentences: list[list[int]]) -> Iterator[DocumentPart]:
    """Yields parts with equal numbers of sentences, of at most about `MAX_PART_TOKENS` each."""
    num_parts = min(math.ceil(sum(map(len, sentences)) / MAX_PART_TOKENS), len(sentences))
    bounds = (len(sentences) * part // num_parts for part in range(num_parts + 1))
    encoded = [array.array("H", ids).tobytes() for ids in sentences]
    for start, stop in itertools.pairwise(bounds):
        yield DocumentPart(document_index, encoded[start:stop])


def tokenize_batch(
    batch: tuple[int, list[tuple[Document, str, int]]],
    tokenizer: Tokenizer,
    config: CorpusConfig,
    shards: dict[str, range],
) -> tuple[list[bytearray], dict[str, collections.Counter], int]:
    """Splits and tokenizes documents, cuts them into parts, and assigns each to a random shard.

    `batch` is (index, documents); `shards` holds the shard indices of each split. Returns the bytes
    of the parts in each shard, counts of each split for the manifest, and the number of bytes read.
    """
    index, documents = batch
    shard_bytes = [bytearray() for _ in range(sum(map(len, shards.values())))]
    counts = {split: collections.Counter() for split in shards}
    rng = random.Random(f"{config.seed}/{index}")
    for document, split, document_index in documents:
        count = counts[split]
        count["documents"] += not document.continues
        try:
            texts = split_sentences(document, config.sentences, config.language)
        except UNREADABLE:
            count["dropped_unreadable_documents"] += 1
            continue
        sentences = [ids for ids in tokenizer.encode_batch(texts) if ids]
        count["sentences"] += len(sentences)
        count["dropped_empty_sentences"] += len(texts) - len(sentences)
        if not sentences:
            count["dropped_empty_documents"] += 1
            continue
        pieces = [piece for ids in sentences for piece in cut_sentence(ids, config.max_seq_length)]
        for part in cut_into_parts(document_index, pieces):
            shard_bytes[rng.choice(shards[split])] += pickle.dumps(part)
    return shard_bytes, counts, sum(document.bytes_read for document, _, _ in documents)


def rows_of_group(
    parts: Sequence[DocumentPart],
    special_ids: tuple[int, int, int],
    config: CorpusConfig,
    rng: random.Random,
) -> tuple[np.ndarray, collections.Counter]:
    """Makes rows of parts; returns them, `row_dtype` [num_rows], and counts for the manifest."""
    length, counts = config.max_seq_length, collections.Counter()
    if config.rows == "sentence_pairs":
        pairs = []
        parts = sorted(parts, key=lambda part: part.document_index)
        indices = [part.document_index for part in parts]  # Ascending.
        documents = [part.ids() for part in parts]
        for position, index in enumerate(indices):
            own = range(bisect.bisect_left(indices, index), bisect.bisect_right(indices, index))
            new_pairs = make_pairs(documents, position, length, config.short_seq_prob, rng, own)
            counts["dropped_parts_without_pairs"] += not new_pairs
            pairs += new_pairs
        counts["dropped_truncated_tokens"] = sum(pair.num_truncated for pair in pairs)
    else:
        documents, crosses = (part.ids() for part in parts), config.rows == "full_sentences"
        sequences = make_full_sentences(documents, length - 2, special_ids[2], crosses)
        pairs = [Pair(sequence, [], IS_NEXT) for sequence in sequences]
    rows = pack_pairs(pairs, length, config.max_pairs_per_row, special_ids, rng)
    counts["pairs"] = len(pairs)
    counts["not_next"] = sum(pair.nsp_label == NOT_NEXT for pair in pairs)
    counts["rows"] = len(rows)
    counts["tokens"] = int(rows["sequence_bounds"][:, :, 2].max(axis=1, initial=0).sum())
    return rows, counts


def build_shard(
    job: tuple[str, int, pathlib.Path], special_ids: tuple[int, int, int], config: CorpusConfig
) -> tuple[str, dict, collections.Counter]:
    """Reads the parts of a shard from its file, and replaces the file with their rows, shuffled.

    `job` is (split, index, path). Returns the split, the entry for the manifest, and counts.
    """
    split, index, path = job
    parts = []
    with open(path, "rb") as stream:
        while stream.peek(1):
            parts.append(pickle.load(stream))
    num_tokens = sum(len(ids) // 2 for part in parts for ids in part.sentences)
    num_groups = max(1, num_tokens // GROUP_TOKENS)
    rng = random.Random(f"{config.seed}/{split}/{index}")
    rows, counts = [], collections.Counter()
    # Held-out documents are never duplicated.
    for _ in range(config.dupe_factor if split == "train" else 1):
        rng.shuffle(parts)
        for group in range(num_groups):
            group_parts = parts[group::num_groups]
            group_rows, group_counts = rows_of_group(group_parts, special_ids, config, rng)
            rows.append(group_rows)
            counts.update(group_counts)
    rows = np.concatenate(rows)
    order = np.random.default_rng(rng.getrandbits(64)).permutation(len(rows))
    return split, writing.write_shard(path, rows[order], config.block_rows), counts


def build_corpus(
    inputs: str | Sequence[str],
    tokenizer: Tokenizer,
    output: str | os.PathLike,
    config: CorpusConfig,
    overwrite: bool = False,
    num_processes: int = 0,
) -> dict:
    """Builds a corpus in the directory `output` and returns its manifest.

    `inputs` are as in `find_inputs`; `output` is new, empty, left by an interrupted build, or a
    corpus to `overwrite`. The output is the same for any `num_processes`; 0 means one per core.

    Raises OSError or ValueError for a missing or invalid input, or an output that is not writable.
    """
    if tokenizer.vocab_size > MAX_VOCABULARY:
        raise ValueError(
            f"the vocabulary has {tokenizer.vocab_size:,} pieces; rows hold ids below "
            f"{MAX_VOCABULARY:,}, train a smaller one"
        )
    paths = find_inputs(inputs)
    sizes = [input_bytes(path, config.data_dir) for path in paths]
    num_train = config.num_shards or min(math.ceil(sum(sizes) / INPUT_BYTES_PER_SHARD), MAX_SHARDS)
    shards = {"train": range(num_train)}
    if config.heldout_fraction:
        num_heldout = math.ceil(num_train * config.heldout_fraction)
        shards["heldout"] = range(num_train, num_train + num_heldout)
    documents = (document for path in paths for document in read_documents(path, config.data_dir))
    tokenize = functools.partial(tokenize_batch, tokenizer=tokenizer, config=config, shards=shards)
    batches = ordered_map(tokenize, enumerate(make_batches(documents, config)), num_processes)
    special_ids = (tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id)
    build = functools.partial(build_shard, special_ids=special_ids, config=config)
    with writing.scratch_directory(output, overwrite) as scratch:
        jobs = [
            (split, shard, scratch / f"{split}-{index:05d}-of-{len(indices):05d}.array_record")
            for split, indices in shards.items()
            for index, shard in enumerate(indices)
        ]
        counts = _spill_parts(batches, [path for _, _, path in jobs], sum(sizes))
        # Starting processes takes as long as building a few shards.
        use_processes = len(jobs) * config.dupe_factor > 8
        built = ordered_map(build, jobs, num_processes if use_processes else 1)
        entries = collections.defaultdict(list)
        for split, entry, shard_counts in tqdm.tqdm(built, "rows", len(jobs), unit=" shards"):
            entries[split].append(entry)
            counts[split].update(shard_counts)
        (scratch / tokenizer.filename).write_bytes(tokenizer.content)
        input_sizes = zip(paths, sizes, strict=True)
        manifest = {
            "format_version": writing.FORMAT_VERSION,
            "splits": {
                split: _describe_split(split, counts, entries[split], config) for split in shards
            },
            "config": {
                **dataclasses.asdict(config),
                "inputs": [{"path": path, "bytes": size} for path, size in input_sizes],
            },
            "vocabulary": {
                "filename": tokenizer.filename,
                "sha256": tokenizer.sha256,
                "size": tokenizer.vocab_size,
            },
        }
        writing.publish(scratch, manifest)
    return manifest


def _spill_parts(
    batches: Iterable[tuple], paths: list[pathlib.Path], total_bytes: int
) -> dict[str, collections.Counter]:
    """Appends tokenized batches to one file per shard; returns the counts of each split."""
    counts: dict = collections.defaultdict(collections.Counter)
    with (
        contextlib.ExitStack() as stack,
        tqdm.tqdm(total=total_bytes, desc="text", unit="B", unit_scale=True) as bar,
    ):
        # Unbuffered, so that a full disk raises when writing, not when closing.
        files = [stack.enter_context(open(path, "wb", 0)) for path in paths]
        for shard_bytes, batch_counts, bytes_read in batches:
            for file, content in zip(files, shard_bytes, strict=True):
                try:  # Unlike write(), raises after a partial write.
                    np.frombuffer(content, np.uint8).tofile(file)
                except OSError as error:
                    raise OSError(
                        f"cannot write {file.name}: {error}; free disk space and run again"
                    ) from error
            for split, count in batch_counts.items():
                counts[split].update(count)
            bar.update(bytes_read)
    return counts


def _describe_split(
    split: str, counts: dict[str, collections.Counter], shards: list[dict], config: CorpusConfig
) -> dict:
    """Returns the manifest's entry of a split. Raises ValueError if it has no rows."""
    count = counts[split]
    num_documents = sum(split_counts["documents"] for split_counts in counts.values())
    if not num_documents:
        raise ValueError("the input holds no document: it is blank, or a dump without articles")
    rows, pairs, tokens, not_next = (count[n] for n in ("rows", "pairs", "tokens", "not_next"))
    names = sorted(name for name in count if name.startswith("dropped_"))
    dropped = {name.removeprefix("dropped_"): count[name] for name in names}
    if not rows:
        reasons = f" (dropped: {dropped})" if any(dropped.values()) else ""
        raise ValueError(
            f"{count['documents']} of {num_documents} documents are in the {split} split, which "
            f"has no sentence pair{reasons}; pre-training needs both splits. Cut long documents by "
            f"blank lines, give more text, or change --heldout_fraction={config.heldout_fraction} "
            "(0.3 suits a few documents) or --seed"
        )
    warnings, has_pairs = [], config.rows == "sentence_pairs"
    # In small splits 3 standard deviations are more than 5 %.
    if has_pairs and abs(not_next / pairs - 0.5) > max(0.05, 1.5 / pairs**0.5):
        cause = (
            "a one-sentence document has no true next sentence; remove blank lines inside documents"
            if not_next > pairs / 2
            else "a random next sentence needs other documents: separate them by blank lines"
        )
        warnings.append(
            f"{not_next / pairs:.1%} of the {split} pairs are NotNext, expected 45 to 55 %: {cause}"
        )
    return {
        "documents": count["documents"],
        "sentences": count["sentences"],
        "pairs": pairs,
        "rows": rows,
        "blocks": sum(math.ceil(shard["rows"] / config.block_rows) for shard in shards),
        "tokens": tokens,
        "fill": round(tokens / (rows * config.max_seq_length), 4),
        "mean_pair_length": round(tokens / pairs, 2),
        "nsp_labels": {"is_next": has_pairs * (pairs - not_next), "not_next": not_next},
        "dropped": dropped,
        "warnings": warnings,
        "shards": shards,
    }
