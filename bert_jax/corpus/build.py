"""Builds a corpus: documents in, shuffled shards of packed rows and a manifest out.

The parent process reads documents, decides each one's split, and collects them into *groups* of a
few megabytes; `rows_of_group`, a plain function, makes rows of a group in whatever process; the
parent spills the rows into files, one for each shard, in the order of the groups; and `write_shard`
shuffles each. A group's randomness comes from the seed and the group's number alone, so the bytes
written depend on the input and the settings, not on how many processes took part. Another runner
(Beam, say) can call `make_groups`, `rows_of_group` and `write_shard` as they are.
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
# Large enough that "another document of the group" is drawn from many, small enough that a few for
# each core fit into memory.
GROUP_CHARACTERS = 1 << 20
# A shard is shuffled in memory. Rows take fewer bytes than the text they were made from, and about
# as many as a compressed dump, so this bounds a shard's rows too, until there are so many shards
# that opening all of their spill files would meet the system's limit.
INPUT_BYTES_PER_SHARD = 16 << 20
MAX_SHARDS = 512
MAX_VOCABULARY = 1 << 16  # rows hold uint16


@dataclasses.dataclass(frozen=True)
class CorpusSettings:
    """How a corpus is made; the manifest records it. Raises ValueError for what cannot be.

    Attributes:
      max_seq_length: tokens in a row.
      max_pairs_per_row: the most sentence pairs packed into a row.
      short_seq_prob: probability that a document is cut into shorter pairs.
      dupe_factor: times that each document of the train split is made into (different) pairs.
      heldout_fraction: probability that a document goes to the held-out split, by its text's hash,
        so that copies of a document share a split.
      seed: of everything random.
      sentences: "split" for free text, "lines" for one sentence a line.
      language: of the sentence splitter, ISO 639-1; one that it does not know is split as English.
      block_rows: rows in a record.
      num_shards: of the train split; 0 chooses by the size of the input.
    """

    max_seq_length: int = 128
    max_pairs_per_row: int = 8
    short_seq_prob: float = 0.1
    dupe_factor: int = 1
    heldout_fraction: float = 0.01
    seed: int = 0
    sentences: str = "split"
    language: str = "en"
    block_rows: int = 256
    num_shards: int = 0

    def __post_init__(self):
        shortest = pairing.SPECIAL_TOKENS_PER_PAIR + 2
        bounds = {
            "max_seq_length": (shortest, MAX_VOCABULARY - 1),
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
    """Documents of one split that are paired and packed together; `index` counts in the split."""

    split: str
    index: int
    documents: list[Document]


@dataclasses.dataclass(frozen=True)
class GroupRows:
    """The rows of a group, already assigned to shards, and what was counted on the way."""

    split: str
    bytes_read: int
    shards: list[np.ndarray]  # row_dtype [num_rows], one for each shard of the split
    counts: collections.Counter


def make_groups(
    documents: Iterable[Document],
    settings: CorpusSettings,
    group_characters: int = GROUP_CHARACTERS,
) -> Iterator[Group]:
    """Yields groups of about `group_characters` of text; the last of a split differs by half.

    A group never mixes splits, so no pair can join a train and a held-out document.
    """
    waiting: dict[str, collections.deque[Document]] = {s: collections.deque() for s in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)
    indices = dict.fromkeys(SPLITS, 0)

    def next_group(split: str, characters: float) -> Group:
        taken, taken_characters = [], 0
        while waiting[split] and taken_characters < characters:
            taken.append(waiting[split].popleft())
            taken_characters += len(taken[-1].text)
        sizes[split] -= taken_characters
        indices[split] += 1
        return Group(split, indices[split] - 1, taken)

    split = SPLITS[0]
    for document in documents:
        if not document.continues:
            split = split_of(document.text, settings)
        waiting[split].append(document)
        sizes[split] += len(document.text)
        # Half a group is held back, so that the last one is not left with a document or two, which
        # would have nothing to draw a random next sentence from.
        if sizes[split] >= 1.5 * group_characters:
            yield next_group(split, group_characters)
    for split in SPLITS:
        if waiting[split]:
            yield next_group(split, math.inf)


def split_of(text: str, settings: CorpusSettings) -> str:
    """Returns the split of a document, which its text and the seed decide."""
    key = str(settings.seed).encode()
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=key).digest()
    is_heldout = int.from_bytes(digest) < settings.heldout_fraction * 2**64
    return SPLITS[is_heldout]


def rows_of_group(
    group: Group, tokenizer: Tokenizer, settings: CorpusSettings, num_shards: dict[str, int]
) -> GroupRows:
    """Makes the rows of a group: sentences, token ids, pairs, packing, and a random shard for each.

    Args:
      group: documents of one split.
      tokenizer: of fewer than 65,537 pieces.
      settings: of the corpus.
      num_shards: of each split.
    """
    counts: collections.Counter = collections.Counter()
    documents, sources, source = [], [], 0
    for document in group.documents:
        counts["documents"] += not document.continues
        source += not document.continues
        try:
            texts = split_sentences(document, settings.sentences, settings.language)
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
    length, max_pairs = settings.max_seq_length, settings.max_pairs_per_row
    rows = [np.zeros(0, row_dtype(length, max_pairs))]
    # Held-out documents are scored once each.
    repetitions = settings.dupe_factor if group.split == "train" else 1
    for repetition in range(repetitions):
        rng = random.Random(f"{settings.seed}/{group.split}/{group.index}/{repetition}")
        pairs = []
        for index in range(len(documents)):
            made = pairing.make_pairs(
                documents, index, length, settings.short_seq_prob, rng, sources
            )
            counts["dropped_documents_without_pairs"] += not made
            pairs += made
        rows.append(pack_pairs(pairs, length, max_pairs, special_ids, rng))
        counts["pairs"] += len(pairs)
        counts["not_next"] += sum(pair.nsp_label == pairing.NOT_NEXT for pair in pairs)
    packed = np.concatenate(rows)
    counts["rows"] = len(packed)
    counts["tokens"] = int(packed["pairs"][:, :, 2].max(axis=1, initial=0).sum())

    seed = (settings.seed, SPLITS.index(group.split), group.index)
    shard = np.random.default_rng(seed).integers(num_shards[group.split], size=len(packed))
    shards = [packed[shard == index] for index in range(num_shards[group.split])]
    return GroupRows(group.split, sum(d.bytes_read for d in group.documents), shards, counts)


def build_corpus(
    inputs: str | Sequence[str],
    tokenizer: Tokenizer,
    output: str | os.PathLike,
    settings: CorpusSettings | None = None,
    overwrite: bool = False,
    num_processes: int = 0,
) -> dict:
    """Builds a corpus in the directory `output` and returns its manifest.

    Args:
      inputs: glob patterns (comma-separated, or a list) of text files or Wikipedia dumps, or
        "tfds:NAME".
      tokenizer: whose vocabulary goes with the corpus.
      output: new, empty, or left by an interrupted build.
      settings: the defaults if None.
      overwrite: whether a complete corpus in `output` may be replaced.
      num_processes: 0 takes one for each core. The result is the same for any number.

    Raises:
      FileNotFoundError, FileExistsError, OSError: an input or the output is not as it must be.
      ValueError: unreadable input, a vocabulary too large, or a split without a single row.
    """
    settings = settings or CorpusSettings()
    if tokenizer.vocab_size > MAX_VOCABULARY:
        raise ValueError(
            f"the vocabulary has {tokenizer.vocab_size:,} pieces; rows hold ids below "
            f"{MAX_VOCABULARY:,}, train a smaller one"
        )
    paths = find_inputs(inputs)
    directory = pathlib.Path(output)
    sizes = [input_bytes(path) for path in paths]
    total_bytes = sum(sizes)
    scratch = writing.prepare_directory(directory, overwrite)
    splits = SPLITS if settings.heldout_fraction else SPLITS[:1]
    enough = math.ceil(total_bytes * settings.dupe_factor / INPUT_BYTES_PER_SHARD)
    num_shards = {"train": settings.num_shards or min(enough, MAX_SHARDS)}
    num_shards["heldout"] = math.ceil(num_shards["train"] * settings.heldout_fraction)
    try:
        make_rows = functools.partial(
            rows_of_group, tokenizer=tokenizer, settings=settings, num_shards=num_shards
        )
        documents = itertools.chain.from_iterable(map(read_documents, paths))
        groups = make_groups(documents, settings)
        group_rows = ordered_map(make_rows, groups, num_processes)
        counts = _spill_rows(group_rows, scratch, num_shards, total_bytes)
        for split in splits:
            if not counts[split]["rows"]:
                raise ValueError(_no_rows(split, counts, settings))
        shards = _write_shards(scratch, num_shards, settings, num_processes)
        (scratch / tokenizer.filename).write_bytes(tokenizer.content)
        manifest = {
            "format_version": writing.FORMAT_VERSION,
            "splits": {s: _describe(counts[s], shards[s], settings) for s in splits},
            "settings": {
                **dataclasses.asdict(settings),
                "inputs": [
                    {"path": path, "bytes": size} for path, size in zip(paths, sizes, strict=True)
                ],
            },
            "vocabulary": {
                "filename": tokenizer.filename,
                "sha256": tokenizer.sha256,
                "size": tokenizer.vocab_size,
            },
        }
        writing.publish(directory, scratch, manifest)
    finally:
        writing.remove_scratch(scratch)
    return manifest


def _spill_rows(
    group_rows: Iterable[GroupRows],
    scratch: pathlib.Path,
    num_shards: dict[str, int],
    total_bytes: int,
) -> dict[str, collections.Counter]:
    """Appends rows to the spill file of their shard; returns what was counted, by split."""
    counts: dict[str, collections.Counter] = {split: collections.Counter() for split in SPLITS}
    with contextlib.ExitStack() as stack:
        spills = {
            split: [
                # Unbuffered: a full disk shows where rows are written, not when files are closed.
                stack.enter_context(open(scratch / _spill_name(split, index, number), "wb", 0))
                for index in range(number)
            ]
            for split, number in num_shards.items()
        }
        bar = stack.enter_context(
            tqdm.tqdm(total=total_bytes, desc="corpus", unit="B", unit_scale=True)
        )
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


def _spill_name(split: str, index: int, num_shards: int) -> str:
    return writing.shard_name(split, index, num_shards).removesuffix(".array_record")


def _write_shards(
    scratch: pathlib.Path, num_shards: dict[str, int], settings: CorpusSettings, num_processes: int
) -> dict[str, list[dict]]:
    """Shuffles every spill file into its shard; returns the manifest's entries, by split."""
    shards = [(split, index) for split, number in num_shards.items() for index in range(number)]
    write = functools.partial(_write_shard, scratch, num_shards, settings)
    # Starting processes takes longer than writing a shard or two.
    written = ordered_map(write, shards, num_processes if len(shards) > 2 else 1)
    entries: dict[str, list[dict]] = {split: [] for split in num_shards}
    for (split, index), (rows, size) in zip(shards, written, strict=True):
        name = writing.shard_name(split, index, num_shards[split])
        entries[split].append({"file": name, "rows": rows, "bytes": size})
    return entries


def _write_shard(
    scratch: pathlib.Path,
    num_shards: dict[str, int],
    settings: CorpusSettings,
    shard: tuple[str, int],
) -> tuple[int, int]:
    split, index = shard
    return writing.write_shard(
        scratch / _spill_name(split, index, num_shards[split]),
        row_dtype(settings.max_seq_length, settings.max_pairs_per_row),
        settings.block_rows,
        (settings.seed, SPLITS.index(split), index),
    )


def _describe(counts: collections.Counter, shards: list[dict], settings: CorpusSettings) -> dict:
    """Returns the manifest's entry for a split."""
    rows, pairs, tokens = counts["rows"], counts["pairs"], counts["tokens"]
    return {
        "documents": counts["documents"],
        "sentences": counts["sentences"],
        "pairs": pairs,
        "rows": rows,
        "blocks": sum(math.ceil(shard["rows"] / settings.block_rows) for shard in shards),
        "tokens": tokens,
        "fill": round(tokens / (rows * settings.max_seq_length), 4),
        "mean_pair_length": round(tokens / pairs, 2),
        "nsp_labels": {"is_next": pairs - counts["not_next"], "not_next": counts["not_next"]},
        "dropped": _dropped(counts),
        "shards": shards,
    }


def _dropped(counts: collections.Counter) -> dict[str, int]:
    names = sorted(name for name in counts if name.startswith("dropped_"))
    return {name.removeprefix("dropped_"): counts[name] for name in names}


def _no_rows(split: str, counts: dict[str, collections.Counter], settings: CorpusSettings) -> str:
    documents = sum(count["documents"] for count in counts.values())
    if not documents:
        return "the input holds no document: it is blank, or a dump without articles"
    found = f"{counts[split]['documents']} of {documents} documents fell into the {split} split"
    if not counts[split]["documents"]:
        return (
            f"{found} with --heldout_fraction={settings.heldout_fraction}; give more documents "
            "(blank lines stand between them), or another fraction or --seed"
        )
    return (
        f"{found} and made no sentence pair (dropped: {_dropped(counts[split])}): a pair needs two "
        "sentences in a document, or another document; give more text, or another "
        "--heldout_fraction or --seed"
    )
