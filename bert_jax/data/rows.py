"""Reads the rows of a corpus from disk: checked, reshuffled every epoch, from any position.

The rows of a split form an endless stream of epochs. Each epoch permutes the blocks, and the rows
inside each window of several blocks, by the seed and the epoch's number: rows [start, stop) of the
stream are a function of (seed, start, stop), for a run that resumes and for any number of hosts.
"""

import concurrent.futures
import functools
import hashlib
import json
import math
import os
import pathlib
import threading
import zlib

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader

from bert_jax.data.packing import row_dtype
from bert_jax.runtime.buckets import as_path, copy_to_cache, is_bucket
from bert_jax.tokenizers.tokenizer import Tokenizer, load_tokenizer

MANIFEST = "manifest.json"
FORMAT_VERSION = 3
END_BYTES = 1 << 16  # At each end of a shard: in its first block, and in the index of all blocks.
# Decides the order of rows: with another number, a resumed run would continue on other rows. If
# batches are as large as blocks, rows that share a batch share one in the next epoch with a
# probability of about 1 / WINDOW_BLOCKS**2, plus chance. A host reads whole windows.
WINDOW_BLOCKS = 8
# Only for speed.
CACHED_WINDOWS = 8
# Enough where each read takes 50 ms, as on a bucket: see `benchmarks/loader.py`.
WINDOWS_AHEAD = 3
READS_IN_FLIGHT = (1 + WINDOWS_AHEAD) * WINDOW_BLOCKS


class CorpusError(ValueError):
    """Raised for an incomplete or damaged corpus."""

    def __str__(self) -> str:
        fix = "build the corpus again with tools/prepare_corpus.py --overwrite, or copy it again"
        return f"{super().__str__()}; {fix}"


class Rows:
    """The rows of one split of a corpus. Can be shared between threads.

    Attributes:
      manifest: the corpus's manifest, as written by `tools/prepare_corpus.py`.
      num_rows: number of rows in the split, which make up one epoch.
      max_seq_length, max_sequences, vocab_size: sizes of a row, and of the corpus's vocabulary.
    """

    def __init__(
        self, directory: str | os.PathLike, split: str = "train", shuffle_seed: int | None = None
    ):
        """Opens the "train" or "heldout" split, and checks that its files are complete.

        Without a `shuffle_seed` there is one epoch, in the order on disk. The files of a corpus on
        a bucket are copied to this host first, once. Raises FileNotFoundError without a complete
        corpus, CorpusError for a damaged one, ValueError for an unknown split, and what `as_path`
        raises for a bucket.
        """
        self.source, self.split = as_path(directory), split
        self.directory, self.shuffle_seed = self.source, shuffle_seed
        self.manifest = _read_manifest(self.directory)
        try:
            splits, config = self.manifest["splits"], self.manifest["config"]
            if split not in splits:
                raise ValueError(
                    f"{self.directory} has no split {split!r}, only {', '.join(splits)}; build it "
                    "again with --overwrite and a --heldout_fraction above 0"
                )
            self.max_seq_length: int = config["max_seq_length"]
            self.max_sequences: int = config["max_sequences"]
            self.num_rows: int = splits[split]["rows"]
            self.vocab_size: int = self.manifest["vocabulary"]["size"]
            token_dtype = self.manifest.get("token_dtype", "uint16")
            self._dtype = row_dtype(self.max_seq_length, self.max_sequences, token_dtype)
            shards = splits[split]["shards"]
            if is_bucket(self.source):
                names = [entry["file"] for entry in shards]
                names += self._tokenizer_files()
                try:
                    self.directory = copy_to_cache(self.source, MANIFEST, names)
                except FileNotFoundError as error:
                    raise CorpusError(f"a file of {self.source} is missing: {error}") from error
            self._open_shards(shards, config["block_rows"])
            self.tokenizer = self._load_tokenizer()
        except (KeyError, TypeError) as error:
            raise CorpusError(f"{self.directory / MANIFEST} is damaged: {error!r}") from error
        self._lock = threading.Lock()
        self._reads = concurrent.futures.ThreadPoolExecutor(READS_IN_FLIGHT, "read")
        # Consecutive batches, and prefetching threads, read the same few windows.
        self._window = functools.lru_cache(CACHED_WINDOWS)(self._read_window)
        self._started_reads = functools.lru_cache(CACHED_WINDOWS)(self._start_reads)
        self._epoch = functools.lru_cache(2)(self._epoch_windows)

    def __reduce__(self):  # Another process opens its own readers.
        return Rows, (str(self.source), self.split, self.shuffle_seed)

    def _tokenizer_files(self) -> dict[str, str]:
        """Returns the SHA-256 of each file of the tokenizer, by name."""
        vocabulary = self.manifest["vocabulary"]
        if "filename" in vocabulary:  # Earlier versions had one file.
            return {vocabulary["filename"]: vocabulary["sha256"]}
        return vocabulary["files"]

    def _load_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer of the corpus. Raises CorpusError if it is missing or changed."""
        files = self._tokenizer_files()
        try:
            found = {
                name: hashlib.sha256((self.directory / name).read_bytes()).hexdigest()
                for name in files
            }
            tokenizer = load_tokenizer(self.directory / next(iter(files)))
        except (OSError, ValueError) as error:
            raise CorpusError(f"cannot read the vocabulary of the corpus: {error}") from error
        if changed := [self.directory / name for name in files if found[name] != files[name]]:
            raise CorpusError(
                f"{changed[0]} is not the vocabulary of the corpus: its ids would stand for other "
                "tokens"
            )
        return tokenizer

    def read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Returns the rows at positions [start, stop) of the stream: the fields of `row_dtype`, and
        uint32 [num_rows] `row_ids`, the index in the split on disk, and `epochs`.

        Raises IndexError outside the stream, which without a `shuffle_seed` ends after one epoch,
        and CorpusError for a damaged block.
        """
        if not 0 <= start <= stop or (self.shuffle_seed is None and stop > self.num_rows):
            raise IndexError(
                f"rows {start} to {stop} of {self.num_rows:,}; unshuffled, there is one epoch"
            )
        rows = np.empty(stop - start, self._dtype)
        row_ids, epochs = np.empty((2, stop - start), np.uint32)
        position = start
        while position < stop:
            epoch, offset = divmod(position, self.num_rows)
            with self._lock:
                ends = self._epoch(epoch)[1]
                index = int(np.searchsorted(ends, offset, side="right"))
                for ahead in range(min(1 + WINDOWS_AHEAD, len(ends) - index)):
                    self._started_reads(epoch, index + ahead)
                window_rows, window_row_ids, order = self._window(epoch, index)
            first = offset - (int(ends[index]) - len(order))
            chosen = order[first : first + stop - position]
            filled = slice(position - start, position - start + len(chosen))
            np.take(window_rows, chosen, out=rows[filled], mode="clip")  # unbuffered
            row_ids[filled] = window_row_ids[chosen]
            epochs[filled] = epoch
            position += len(chosen)
        fields = {name: rows[name] for name in self._dtype.names}
        return fields | {"row_ids": row_ids, "epochs": epochs}

    def count_tokens(self) -> np.ndarray:
        """Returns the count of each token in the split, padding included: int64 [vocab_size]."""
        counts = np.zeros(self.vocab_size, np.int64)
        for block in range(len(self._block_sizes)):
            tokens = self._read_block(block)["tokens"]
            counts += np.bincount(tokens.ravel(), minlength=self.vocab_size)
        return counts

    def _open_shards(self, shards: list[dict], block_rows: int) -> None:
        self._blocks, sizes = [], []  # Blocks: path, reader, number in the shard.
        for entry in shards:
            path = self.directory / entry["file"]
            if not path.is_file():
                raise CorpusError(f"{path} is missing")
            if (size := path.stat().st_size) != entry["bytes"]:
                raise CorpusError(
                    f"{path} has {size:,} bytes, expected {entry['bytes']:,}: truncated or replaced"
                )
            starts = range(0, entry["rows"], block_rows)
            # Blocks have their own checksums; this one detects exchanged shards. Corpora of older
            # versions have none.
            if "crc32_of_ends" in entry and checksum_of_ends(path) != entry["crc32_of_ends"]:
                raise CorpusError(
                    f"{path} is damaged, or another shard: its checksum does not match"
                )
            reader = ArrayRecordReader(str(path), "readahead_buffer_size:0")
            if reader.num_records() != len(starts):
                raise CorpusError(
                    f"{path} has {reader.num_records()} blocks, expected {len(starts)}"
                )
            self._blocks += [(path, reader, number) for number in range(len(starts))]
            sizes += [min(block_rows, entry["rows"] - start) for start in starts]
        if sum(sizes) != self.num_rows:
            raise CorpusError(
                f"{self.directory / MANIFEST} counts {self.num_rows} rows of split {self.split!r}, "
                f"but {sum(sizes)} in its shards"
            )
        self._block_sizes = np.array(sizes, np.int64)
        self._block_starts = np.cumsum(self._block_sizes) - self._block_sizes

    def _epoch_windows(self, epoch: int) -> tuple[list[np.ndarray], np.ndarray]:
        """Returns the blocks of each window of an epoch, and the cumulative numbers of rows."""
        order = np.arange(len(self._block_sizes))
        if self.shuffle_seed is not None:
            order = np.random.default_rng((self.shuffle_seed, epoch)).permutation(order)
        windows = np.array_split(order, math.ceil(len(order) / WINDOW_BLOCKS))
        return windows, np.cumsum([self._block_sizes[blocks].sum() for blocks in windows])

    def _start_reads(self, epoch: int, index: int) -> list[concurrent.futures.Future]:
        return [self._reads.submit(self._read_block, n) for n in self._epoch(epoch)[0][index]]

    def _read_window(self, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the rows of a window, their row ids, and their order in the epoch."""
        blocks = self._epoch(epoch)[0][index]
        contents = [read.result() for read in self._started_reads(epoch, index)]
        # Joining bytes and np.take are several times as fast as concatenating and indexing here.
        rows = np.frombuffer(b"".join(contents), self._dtype)
        starts, sizes = self._block_starts[blocks], self._block_sizes[blocks]
        order = np.arange(len(rows))
        row_ids = order + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
        if self.shuffle_seed is not None:
            order = np.random.default_rng((self.shuffle_seed, epoch, index)).permutation(order)
        return rows, row_ids, order

    def _read_block(self, block: int) -> np.ndarray:
        path, reader, number = self._blocks[block]
        location = f"{path}, block {number}"
        try:
            (content,) = reader.read([number])  # thread-safe, as in array_record's data source
        except (RuntimeError, ValueError, IndexError) as error:
            raise CorpusError(f"{location}: damaged ({error})") from error
        rows = np.frombuffer(content, self._dtype)
        if (largest := rows["tokens"].max()) >= self.vocab_size:
            raise CorpusError(f"{location}: token id {largest} is outside the corpus's vocabulary")
        return rows


def checksum_of_ends(path: pathlib.Path) -> str:
    """Returns the CRC-32 of the first and last `END_BYTES` of a file."""
    with path.open("rb") as file:
        value = zlib.crc32(file.read(END_BYTES))
        file.seek(-min(END_BYTES, path.stat().st_size), os.SEEK_END)
        return f"{zlib.crc32(file.read(), value):08x}"


def manifest_checksum(manifest: dict) -> str:
    """Returns the CRC-32 of a manifest without its entry "crc32", whatever its white space."""
    content = {name: value for name, value in manifest.items() if name != "crc32"}
    return f"{zlib.crc32(json.dumps(content).encode()):08x}"


def _read_manifest(directory: pathlib.Path) -> dict:
    path = directory / MANIFEST
    if not path.is_file():
        exists = is_bucket(directory) or directory.exists()
        problem = "holds no corpus or its build was interrupted" if exists else "does not exist"
        raise FileNotFoundError(f"{directory} {problem}; run tools/prepare_corpus.py")
    try:
        manifest = json.loads(path.read_bytes())
    except ValueError as error:
        raise CorpusError(f"{path} is not intact JSON ({error})") from error
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        raise CorpusError(f"{path} has format_version {version}, expected {FORMAT_VERSION}")
    if manifest.get("crc32") not in (None, manifest_checksum(manifest)):  # Older ones have none.
        raise CorpusError(f"{path} is damaged: its CRC-32 does not match {manifest['crc32']}")
    return manifest


def corpus_warnings(manifest: dict) -> list[str]:
    """Returns what `prepare_corpus` warned of: about each split, and about the whole corpus."""
    warnings = [warning for split in manifest["splits"].values() for warning in split["warnings"]]
    return warnings + manifest["warnings"]
