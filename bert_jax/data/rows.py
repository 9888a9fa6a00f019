"""Reads the rows of a corpus from disk: checked, shuffled anew each epoch, and at any position.

The rows of a split form an endless stream: epoch 0, epoch 1, and so on. An epoch permutes the
blocks, and the rows inside each, by the seed and the epoch's number, so that the rows at [start,
stop) are a pure function of the seed and these two numbers: reading can begin anywhere, and any
number of hosts can read their parts. No JAX here.
"""

import collections
import json
import os
import pathlib
import threading

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader

from bert_jax.corpus.packing import row_dtype
from bert_jax.corpus.writing import FORMAT_VERSION, MANIFEST
from bert_jax.tokenization import Tokenizer, load_tokenizer

REBUILD = "build the corpus again with tools/prepare_corpus.py --overwrite, or copy it anew"
CACHED_BLOCKS = 64


class CorpusError(ValueError):
    """A corpus on disk is incomplete or damaged."""


class Rows:
    """The rows of one split of a corpus. Safe to share between threads.

    Attributes:
      manifest: of the whole corpus, as `tools/prepare_corpus.py` wrote it.
      num_rows: rows of this split, which is one epoch.
      max_seq_length, max_pairs: the sizes of a row.
      vocab_size: of the corpus's vocabulary.
      vocabulary_path: of the copy of the vocabulary beside the rows.
    """

    def __init__(
        self, directory: str | os.PathLike, split: str = "train", shuffle_seed: int | None = None
    ):
        """Opens a split and checks that it is all there.

        Args:
          directory: of the corpus.
          split: "train" or "heldout".
          shuffle_seed: of the order of the rows; None reads them as they lie, for one epoch.

        Raises:
          FileNotFoundError: `directory` holds no complete corpus.
          CorpusError: a shard is missing, cut off or not the manifest's, or so is the vocabulary.
          ValueError: there is no such split.
        """
        self._arguments = (directory, split, shuffle_seed)
        self.directory = pathlib.Path(directory)
        self.split = split
        self.shuffle_seed = shuffle_seed
        self.manifest = read_manifest(self.directory)
        try:
            if split not in self.manifest["splits"]:
                raise ValueError(
                    f"{self.directory} has no split {split!r}, only "
                    f"{', '.join(self.manifest['splits'])}; build it again with "
                    "tools/prepare_corpus.py --overwrite, and a --heldout_fraction above 0 for "
                    "held-out rows"
                )
            settings = self.manifest["settings"]
            self.max_seq_length: int = settings["max_seq_length"]
            self.max_pairs: int = settings["max_pairs_per_row"]
            self.num_rows: int = self.manifest["splits"][split]["rows"]
            self.vocab_size: int = self.manifest["vocabulary"]["size"]
            self.vocabulary_path = self.directory / self.manifest["vocabulary"]["filename"]
            self._dtype = row_dtype(self.max_seq_length, self.max_pairs)
            self._open_shards(settings["block_rows"])
            self.load_tokenizer()  # for its check; it is quick
        except (KeyError, TypeError) as error:
            raise CorpusError(
                f"{self.directory / MANIFEST} is damaged ({type(error).__name__}: {error}); "
                f"{REBUILD}"
            ) from error
        self._lock = threading.Lock()
        self._blocks: collections.OrderedDict[tuple[int, int], tuple] = collections.OrderedDict()
        self._epochs: collections.OrderedDict[int, tuple] = collections.OrderedDict()

    def __reduce__(self):  # readers hold open files; another process opens its own
        return Rows, self._arguments

    def load_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer of the corpus. Raises CorpusError if it is not the manifest's."""
        expected = self.manifest["vocabulary"]["sha256"]
        try:
            tokenizer = load_tokenizer(self.vocabulary_path)
        except (OSError, ValueError) as error:
            raise CorpusError(f"{error}: the corpus lost its vocabulary; {REBUILD}") from error
        if tokenizer.sha256 != expected:
            raise CorpusError(
                f"{self.vocabulary_path} has SHA-256 {tokenizer.sha256}, but the corpus was built "
                f"with {expected}: its ids would mean other words. Put the vocabulary back, or "
                f"{REBUILD}"
            )
        return tokenizer

    def stream(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Returns the rows at positions [start, stop) of the stream.

        Returns:
          tokens: uint16 [num_rows, max_seq_length].
          pairs: uint16 [num_rows, max_pairs, 3], (start, second_start, end), zero where unused.
          nsp_labels: uint8 [num_rows, max_pairs].
          row_ids: uint32 [num_rows], the row's number in the split, in the order on disk.
          epochs: uint32 [num_rows].

        Raises:
          IndexError: the positions are reversed or negative, or beyond the end of a split that is
            read without shuffling.
          CorpusError: a block is damaged.
        """
        if not 0 <= start <= stop or (self.shuffle_seed is None and stop > self.num_rows):
            raise IndexError(
                f"rows {start} to {stop} of the {self.num_rows:,} of split {self.split!r}; without "
                "a shuffle_seed there is one epoch"
            )
        rows = np.empty(stop - start, self._dtype)
        row_ids = np.empty(stop - start, np.uint32)
        epochs = np.empty(stop - start, np.uint32)
        position = start
        while position < stop:
            epoch, offset = divmod(position, self.num_rows)
            order, ends = self._epoch_order(epoch)
            place = int(np.searchsorted(ends, offset, side="right"))
            block_rows, block_row_ids = self._block(epoch, int(order[place]))
            first = offset - (int(ends[place]) - len(block_rows))
            count = min(len(block_rows) - first, stop - position)
            filled = slice(position - start, position - start + count)
            rows[filled] = block_rows[first : first + count]
            row_ids[filled] = block_row_ids[first : first + count]
            epochs[filled] = epoch
            position += count
        return {name: rows[name] for name in self._dtype.names} | {
            "row_ids": row_ids,
            "epochs": epochs,
        }

    def count_tokens(self) -> np.ndarray:
        """Returns how often each token occurs in the split, padding too: int64 [vocab_size]."""
        counts = np.zeros(self.vocab_size, np.int64)
        for block in range(len(self._block_sizes)):
            tokens = self._read_block(block)["tokens"]
            counts += np.bincount(tokens.ravel(), minlength=self.vocab_size)
        return counts

    def _open_shards(self, block_rows: int) -> None:
        self._readers, shard_of_block, record_of_block, sizes = [], [], [], []
        for shard, entry in enumerate(self.manifest["splits"][self.split]["shards"]):
            path = self.directory / entry["file"]
            if not path.is_file():
                raise CorpusError(f"{path} is missing; {REBUILD}")
            if path.stat().st_size != entry["bytes"]:
                raise CorpusError(
                    f"{path} has {path.stat().st_size:,} bytes, expected {entry['bytes']:,}: it is "
                    f"cut off or from another build; {REBUILD}"
                )
            num_blocks = -(-entry["rows"] // block_rows)
            try:
                reader = ArrayRecordReader(str(path), "readahead_buffer_size:0")
                found = reader.num_records()
            except (RuntimeError, ValueError, IndexError) as error:
                raise CorpusError(f"{path} is damaged ({error}); {REBUILD}") from error
            if found != num_blocks:
                raise CorpusError(f"{path} has {found} blocks, expected {num_blocks}; {REBUILD}")
            self._readers.append(reader)
            shard_of_block += [shard] * num_blocks
            record_of_block += range(num_blocks)
            starts = range(0, entry["rows"], block_rows)
            sizes += [min(block_rows, entry["rows"] - start) for start in starts]
        self._shard_of_block = np.array(shard_of_block)
        self._record_of_block = np.array(record_of_block)
        if sum(sizes) != self.num_rows:
            raise CorpusError(
                f"{self.directory / MANIFEST} counts {self.num_rows} rows of split {self.split!r}, "
                f"but {sum(sizes)} in its shards; {REBUILD}"
            )
        self._block_sizes = np.array(sizes, np.int64)
        self._block_starts = np.cumsum(self._block_sizes) - self._block_sizes

    def _epoch_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the blocks of an epoch in order, and the number of rows up to the end of each."""
        with self._lock:
            if epoch not in self._epochs:
                order = np.arange(len(self._block_sizes))
                if self.shuffle_seed is not None:
                    order = np.random.default_rng((self.shuffle_seed, epoch)).permutation(order)
                self._epochs[epoch] = (order, np.cumsum(self._block_sizes[order]))
                if len(self._epochs) > 2:  # a batch may cross from one to the next
                    self._epochs.popitem(last=False)
            return self._epochs[epoch]

    def _block(self, epoch: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows of a block in the epoch's order, and their row ids."""
        # Consecutive batches, and prefetching threads, mostly want the same few blocks. The lock is
        # held while reading: the reader is not said to be thread-safe.
        with self._lock:
            if (epoch, block) in self._blocks:
                self._blocks.move_to_end((epoch, block))
                return self._blocks[epoch, block]
            rows = self._read_block(block)
            row_ids = np.arange(len(rows), dtype=np.uint32) + np.uint32(self._block_starts[block])
            if self.shuffle_seed is not None:
                generator = np.random.default_rng((self.shuffle_seed, epoch, block))
                order = generator.permutation(len(rows))
                rows, row_ids = rows[order], row_ids[order]
            self._blocks[epoch, block] = rows, row_ids
            if len(self._blocks) > CACHED_BLOCKS:
                self._blocks.popitem(last=False)
            return rows, row_ids

    def _read_block(self, block: int) -> np.ndarray:
        shard, record = self._shard_of_block[block], int(self._record_of_block[block])
        path = self.directory / self.manifest["splits"][self.split]["shards"][shard]["file"]
        try:
            (content,) = self._readers[shard].read([record])
        except (RuntimeError, ValueError, IndexError) as error:
            raise CorpusError(f"{path}, block {record}: damaged ({error}); {REBUILD}") from error
        expected = int(self._block_sizes[block]) * self._dtype.itemsize
        if len(content) != expected:
            raise CorpusError(
                f"{path}, block {record}: {len(content):,} bytes, expected {expected:,}; {REBUILD}"
            )
        rows = np.frombuffer(content, self._dtype)
        largest = int(rows["tokens"].max())
        if largest >= self.vocab_size:
            raise CorpusError(
                f"{path}, block {record}: token id {largest} is outside the corpus's vocabulary of "
                f"{self.vocab_size:,}; {REBUILD}"
            )
        return rows


def read_manifest(directory: str | os.PathLike) -> dict:
    """Returns the manifest of a corpus.

    Raises:
      FileNotFoundError: there is none: no corpus, or one whose build was interrupted.
      CorpusError: it is not intact, or of another format.
    """
    path = pathlib.Path(directory) / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: {directory} holds no corpus, or one whose build was interrupted; "
            "build it with tools/prepare_corpus.py"
        )
    try:
        manifest = json.loads(path.read_bytes())
    except ValueError as error:
        raise CorpusError(f"{path} is not intact JSON ({error}); {REBUILD}") from error
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        raise CorpusError(
            f"{path} has format_version {version}, expected {FORMAT_VERSION}; {REBUILD}"
        )
    return manifest
