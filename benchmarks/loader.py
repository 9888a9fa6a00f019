"""Measures whether one host's loader, on one core, keeps its share of a pod fed.

python benchmarks/loader.py [--corpus=DIR]

Assumes 64 chips that each train on 192 rows of 512 tokens per second, or 1,000 of 128; 16 hosts.
A host reads all blocks, shuffles them, and takes its share of each batch, as in training. Prints
the rows per second of all hosts' batches and the ratio to the need; then the same where each read
of a block takes 50 ms longer, as on a bucket. The targets are 3 and 1. Without --corpus, uses
synthetic ones with Zipf-distributed ids, which compress about as well as text. Then measures a
mixture of two corpora and one of them in turns: the median of the ratios is to be at least 0.95.
"""

import hashlib
import os
import shutil
import statistics
import tempfile
import time

import jax
import numpy as np
from absl import app, flags

from bert_corpus import writing
from bert_jax.data.batches import local_batches
from bert_jax.data.packing import row_dtype
from bert_jax.data.row_stream import RowStream
from bert_jax.data.rows import FORMAT_VERSION, Rows
from bert_jax.tokenizers.tokenizer import SPECIAL_TOKENS, tokenizer_from_bytes

CORPUS = flags.DEFINE_string("corpus", None, "Directory of a corpus of rows of 128 or 512 tokens.")
SECONDS = flags.DEFINE_integer("seconds", 10, "Duration of each measurement.")
CHIPS, HOSTS, ROWS_PER_CHIP = 64, 16, 64
NEEDED = {128: 1000 * CHIPS, 512: 192 * CHIPS}  # rows per second
NUM_SHARDS, SHARD_ROWS = 64, 8192
REPEATS = 5  # of one corpus and a mixture, in turns


def write_synthetic_corpus(directory: str, length: int) -> None:
    vocabulary = [*SPECIAL_TOKENS, *(f"w{index}" for index in range(30_517))]
    tokenizer = tokenizer_from_bytes("vocab.txt", "\n".join(vocabulary).encode())
    rows = np.zeros(SHARD_ROWS, row_dtype(length, 8))
    zipf = np.random.default_rng(0).zipf(1.3, (SHARD_ROWS, length))
    rows["tokens"] = 5 + zipf % (tokenizer.vocab_size - 5)
    rows["sequence_bounds"][:, 0] = (0, length // 2, length)
    with writing.open_scratch(directory, []) as scratch:
        names = [f"train-{n:05d}-of-{NUM_SHARDS:05d}.array_record" for n in range(NUM_SHARDS)]
        shards = [writing.write_shard(scratch / name, rows, 256) for name in names]
        files = tokenizer.files()
        for name, content in files.items():
            (scratch / name).write_bytes(content)
        manifest = {
            "format_version": FORMAT_VERSION,
            "splits": {"train": {"rows": NUM_SHARDS * SHARD_ROWS, "shards": shards}},
            "config": {"max_seq_length": length, "max_sequences": 8, "block_rows": 256},
            "vocabulary": {
                "files": {name: hashlib.sha256(each).hexdigest() for name, each in files.items()},
                "size": tokenizer.vocab_size,
            },
        }
        writing.publish(scratch, directory, [*names, *files], manifest)


class SlowRows(Rows):
    """Rows on a bucket whose reads take 50 ms longer."""

    def _read_block(self, block: int) -> np.ndarray:
        time.sleep(0.05)
        return super()._read_block(block)


def rows_per_second(rows: Rows | RowStream) -> float:
    """Returns the rate of global batches, of which a host copies its share to a device."""
    batch_size = CHIPS * ROWS_PER_CHIP
    share = batch_size // HOSTS
    batches = local_batches(rows, [(3 * share, 4 * share)], batch_size, 0, 1 << 30)
    jax.block_until_ready(jax.device_put(next(batches)))
    started, count = time.perf_counter(), 0
    while (seconds := time.perf_counter() - started) < SECONDS.value:
        jax.block_until_ready(jax.device_put(next(batches)))
        count += 1
    return count * batch_size / seconds


def mixture_ratio(directory: str, other: str) -> float:
    """Returns the rate of a mixture relative to that of one corpus: the median of five pairs."""
    ratios = []
    for _ in range(REPEATS):
        one = rows_per_second(Rows(directory, "train", shuffle_seed=0))
        corpora = [Rows(each, "train", shuffle_seed=0) for each in (directory, other)]
        ratios.append(rows_per_second(RowStream(corpora, (0.7, 0.3), (0, 0))) / one)
    return statistics.median(ratios)


def main(argv: list[str]) -> None:
    del argv
    if hasattr(os, "sched_setaffinity"):  # All threads share one core.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as scratch:
        directories = [CORPUS.value] if CORPUS.value else []
        for length in () if directories else NEEDED:
            directories.append(f"{scratch}/{length}")
            write_synthetic_corpus(directories[-1], length)
        for directory in directories:
            for kind, name in ((Rows, "local disk"), (SlowRows, "50 ms more per read")):
                rows = kind(directory, "train", shuffle_seed=0)
                rate = rows_per_second(rows)
                length = rows.max_seq_length
                print(
                    f"{length} tokens, {name}: {rate:,.0f} rows/s, "
                    f"{rate / NEEDED[length]:.1f} times the need of {NEEDED[length]:,}",
                    flush=True,
                )
            other = f"{scratch}/other"
            shutil.copytree(directory, other)
            ratio = mixture_ratio(directory, other)
            shutil.rmtree(other)
            print(f"a mixture of two such corpora: {ratio:.2f} times the rows/s of one", flush=True)


if __name__ == "__main__":
    app.run(main)
