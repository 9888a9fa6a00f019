"""Builds a corpus: documents in, shuffled shards of packed rows and a manifest out.

The parent process assigns each document to a split and collects groups of about a megabyte of text.
Worker processes turn groups into rows. The parent appends these, in the order of the groups, to one
spill file per shard; in the end each shard is shuffled and written. Randomness depends only on the
seed and the index of the group or shard, so the output does not depend on the number of processes.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import os
import pathlib
import random
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tqdm

from bert_jax.corpus import pairs as pairing
from bert_jax.corpus import writing
from bert_jax.corpus.packing import pack_pairs, row_dtype
from bert_jax.corpus.parallel import ordered_map
from bert_jax.corpus.readers import Document, find_inputs, input_bytes, read_documents
from bert_jax.corpus.sentences import MODES, UnreadableDocument, split_sentences
from bert_jax.tokenization import Tokenizer

SPLITS = ("train", "heldout")
# Many documents to draw random next sentences from; a few groups per core fit into memory.
GROUP_CHARACTERS = 1 << 20
# Bounds the memory needed to shuffle a shard: rows take about as many bytes as a compressed dump.
INPUT_BYTES_PER_SHARD = 16 << 20
MAX_SHARDS = 512  # open files
MAX_VOCABULARY = 1 << 16  # rows hold uint16


@dataclasses.dataclass(frozen=True)
class CorpusConfig:
    """How to build a corpus; the manifest records it. Raises ValueError for an invalid field."""

    max_seq_length: int = 128  # tokens per row
    max_pairs_per_row: int = 8
    short_seq_prob: float = 0.1  # probability that a document is cut into shorter pairs
    dupe_factor: int = 1  # times that each training document is made into (different) pairs
    heldout_fraction: float = 0.01  # decided by a hash of the text, so that copies share a split
    seed: int = 0
    sentences: str = "split"  # "split" for free text, "lines" for one sentence per line
    language: str = "en"  # of the sentence splitter, ISO 639-1; an unknown one is split as English
    block_rows: int = 256  # rows per record
    num_shards: int = 0  # of the train split; 0 chooses by the size of the input

    def __post_init__(self):
        bounds = {
            "max_seq_length": (pairing.SPECIAL_TOKENS_PER_PAIR + 2, MAX_VOCABULARY - 1),
            "max_pairs_per_row": (1, math.inf),
            "short_seq_prob": (0, 1),
            "dupe_factor": (1, math.inf),
            "heldout_fraction": (0, 0.5),
            "seed": (0, math.inf),
            "block_rows": (1, math.inf),
            "num_shards": (0, 99_999),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name}={value}; expected {low} to {high}")
        if self.sentences not in MODES:
            raise ValueError(f"sentences={self.sentences!r}; expected one of {', '.join(MODES)}")


@dataclasses.dataclass(frozen=True)
class Group:
    """Documents of one split that are paired and packed together; `index` counts per split."""

    split: str
    index: int
    documents: list[Document]


@dataclasses.dataclass(frozen=True)
class GroupRows:
    """The rows of a group, assigned to shards, and counts for the manifest."""

    split: str
    bytes_read: int
    shards: list[np.ndarray]  # row_dtype [num_rows], one per shard of the split
    counts: collections.Counter


def make_groups(
    documents: Iterable[Document], config: CorpusConfig, group_characters: int = GROUP_CHARACTERS
) -> Iterator[Group]:
    """Yields groups of about `group_characters`; the last of a split has half to 1.5 times as many.

    A group never mixes splits, so no pair can join a train and a held-out document.
    """
    waiting: dict[str, list[Document]] = {split: [] for split in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)
    indices = {split: itertools.count() for split in SPLITS}
    for document in documents:
        if not document.continues:
            split = split_of(document.text, config)
        waiting[split].append(document)
        sizes[split] += len(document.text)
        # Hold back half a group, so that the last one has enough documents to draw from.
        if sizes[split] >= 1.5 * group_characters:
            count = characters = 0
            while characters < group_characters:
                characters += len(waiting[split][count].text)
                count += 1
            yield Group(split, next(indices[split]), waiting[split][:count])
            del waiting[split][:count]
            sizes[split] -= characters
    for split in SPLITS:
        if waiting[split]:
            yield Group(split, next(indices[split]), waiting[split])


def split_of(text: str, config: CorpusConfig) -> str:
    """Returns the split of a document, a function of its text and the seed."""
    key = str(config.seed).encode()
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=key).digest()
    is_heldout = int.from_bytes(digest) < config.heldout_fraction * 2**64
    return SPLITS[is_heldout]


def rows_of_group(
    group: Group, tokenizer: Tokenizer, config: CorpusConfig, num_shards: dict[str, int]
) -> GroupRows:
    """Splits, tokenizes, pairs and packs a group, and assigns each row to a random shard."""
    counts: collections.Counter = collections.Counter()
    documents, sources, source = [], [], 0
    for document in group.documents:
        counts["documents"] += not document.continues
        source += not document.continues
        try:
            texts = split_sentences(document, config.sentences, config.language)
        except UnreadableDocument:
            counts["dropped_unreadable_documents"] += 1
            continue
        sentences = [ids for ids in tokenizer.encode_batch(texts) if ids]
        counts["sentences"] += len(sentences)
        counts["dropped_empty_sentences"] += len(texts) - len(sentences)
        if sentences:
            documents.append(sentences)
            sources.append(source)
        else:
            counts["dropped_empty_documents"] += 1

    special_ids = (tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id)
    length, max_pairs = config.max_seq_length, config.max_pairs_per_row
    rows = []
    # Held-out documents are never duplicated.
    for repetition in range(config.dupe_factor if group.split == "train" else 1):
        rng = random.Random(f"{config.seed}/{group.split}/{group.index}/{repetition}")
        pairs = []
        for index in range(len(documents)):
            made = pairing.make_pairs(documents, index, length, config.short_seq_prob, rng, sources)
            counts["dropped_documents_without_pairs"] += not made
            pairs += made
        rows.append(pack_pairs(pairs, length, max_pairs, special_ids, rng))
        counts["pairs"] += len(pairs)
        counts["not_next"] += sum(pair.nsp_label == pairing.NOT_NEXT for pair in pairs)
    packed = np.concatenate(rows)
    counts["rows"] = len(packed)
    counts["tokens"] = int(packed["pairs"][:, :, 2].max(axis=1, initial=0).sum())

    seed = (config.seed, SPLITS.index(group.split), group.index)
    shard = np.random.default_rng(seed).integers(num_shards[group.split], size=len(packed))
    shards = [packed[shard == index] for index in range(num_shards[group.split])]
    return GroupRows(group.split, sum(d.bytes_read for d in group.documents), shards, counts)


def build_corpus(
    inputs: str | Sequence[str],
    tokenizer: Tokenizer,
    output: str | os.PathLike,
    config: CorpusConfig,
    overwrite: bool = False,
    num_processes: int = 0,
) -> dict:
    """Builds a corpus in the directory `output` and returns its manifest.

    Args:
      inputs: as for `find_inputs`.
      tokenizer: copied into the corpus.
      output: new, empty, or left by an interrupted build.
      overwrite: whether a complete corpus in `output` may be replaced.
      num_processes: 0 means one per core. The output is the same for any number.

    Raises OSError or ValueError for a missing or bad input, or an output that is not writable.
    """
    if tokenizer.vocab_size > MAX_VOCABULARY:
        raise ValueError(
            f"the vocabulary has {tokenizer.vocab_size:,} pieces; rows hold ids below "
            f"{MAX_VOCABULARY:,}, train a smaller one"
        )
    paths = find_inputs(inputs)
    sizes = [input_bytes(path) for path in paths]
    needed_shards = math.ceil(sum(sizes) * config.dupe_factor / INPUT_BYTES_PER_SHARD)
    num_shards = {"train": config.num_shards or min(needed_shards, MAX_SHARDS)}
    if config.heldout_fraction:
        num_shards["heldout"] = math.ceil(num_shards["train"] * config.heldout_fraction)
    documents = itertools.chain.from_iterable(map(read_documents, paths))
    make_rows = functools.partial(
        rows_of_group, tokenizer=tokenizer, config=config, num_shards=num_shards
    )
    group_rows = ordered_map(make_rows, make_groups(documents, config), num_processes)
    with writing.scratch_directory(output, overwrite) as scratch:
        shards = {
            split: [scratch / writing.shard_name(split, index, number) for index in range(number)]
            for split, number in num_shards.items()
        }
        counts = _spill_rows(group_rows, shards, sum(sizes))
        (scratch / tokenizer.filename).write_bytes(tokenizer.content)
        input_sizes = zip(paths, sizes, strict=True)
        manifest = {
            "format_version": writing.FORMAT_VERSION,
            "splits": _write_splits(shards, counts, config, num_processes),
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


def _spill_rows(
    group_rows: Iterable[GroupRows], shards: dict[str, list[pathlib.Path]], total_bytes: int
) -> dict[str, collections.Counter]:
    """Appends rows to the spill files of their shards; returns the counts of each split."""
    counts = {split: collections.Counter() for split in shards}
    with (
        contextlib.ExitStack() as stack,
        tqdm.tqdm(total=total_bytes, desc="corpus", unit="B", unit_scale=True) as bar,
    ):
        spills = {
            # Unbuffered, so that a full disk raises when writing, not when closing.
            split: [stack.enter_context(open(writing.spill_path(p), "wb", 0)) for p in paths]
            for split, paths in shards.items()
        }
        for group in group_rows:
            for spill, rows in zip(spills[group.split], group.shards, strict=True):
                try:
                    rows.tofile(spill)
                except OSError as error:
                    raise OSError(
                        f"cannot write {spill.name}: {error}; free the disk and run again"
                    ) from error
            counts[group.split].update(group.counts)
            bar.update(group.bytes_read)
            bar.set_postfix(rows=sum(count["rows"] for count in counts.values()), refresh=False)
    return counts


def _write_splits(
    shards: dict[str, list[pathlib.Path]],
    counts: dict[str, collections.Counter],
    config: CorpusConfig,
    num_processes: int,
) -> dict[str, dict]:
    """Shuffles every spill file into its shard; returns the manifest's entry of each split."""
    num_documents = sum(count["documents"] for count in counts.values())
    if not num_documents:
        raise ValueError("the input holds no document: it is blank, or a dump without articles")
    dtype = row_dtype(config.max_seq_length, config.max_pairs_per_row)
    write = functools.partial(writing.write_shard, dtype=dtype, block_rows=config.block_rows)
    splits = {}
    for split, paths in shards.items():
        count = counts[split]
        rows, pairs, tokens = count["rows"], count["pairs"], count["tokens"]
        dropped = {
            name.removeprefix("dropped_"): count[name]
            for name in sorted(count)
            if name.startswith("dropped_")
        }
        if not rows:
            raise ValueError(
                f"{count['documents']} of {num_documents} documents are in the {split} split and "
                f"made no sentence pair (dropped: {dropped}): a pair needs two sentences or two "
                "documents, separated by blank lines; give more text, or change "
                f"--heldout_fraction={config.heldout_fraction} or --seed"
            )
        jobs = [(path, (config.seed, SPLITS.index(split), i)) for i, path in enumerate(paths)]
        # Starting processes takes longer than writing two shards.
        entries = list(ordered_map(write, jobs, num_processes if len(jobs) > 2 else 1))
        splits[split] = {
            "documents": count["documents"],
            "sentences": count["sentences"],
            "pairs": pairs,
            "rows": rows,
            "blocks": sum(math.ceil(entry["rows"] / config.block_rows) for entry in entries),
            "tokens": tokens,
            "fill": round(tokens / (rows * config.max_seq_length), 4),
            "mean_pair_length": round(tokens / pairs, 2),
            "nsp_labels": {"is_next": pairs - count["not_next"], "not_next": count["not_next"]},
            "dropped": dropped,
            "shards": entries,
        }
    return splits
