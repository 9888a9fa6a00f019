"""Measures how many shuffled rows per second one core reads.

python benchmarks/loader.py [--corpus=DIR]

Measures reading from disk alone, and as in training, prefetched by Grain and copied to the device.
The target is 20,000 rows of length 128. Without --corpus, uses a synthetic one with
Zipf-distributed ids, which compress about as well as text.
"""

import json
import os
import tempfile
import time

import jax
import numpy as np
from absl import app, flags

from bert_corpus import writing
from bert_jax import partitioning
from bert_jax.data.batches import pretrain_batches
from bert_jax.data.packing import row_dtype
from bert_jax.data.rows import FORMAT_VERSION, Rows
from bert_jax.tokenization import SPECIAL_TOKENS, tokenizer_from_bytes

CORPUS = flags.DEFINE_string("corpus", None, "Directory of a corpus.")
BATCH_SIZE = flags.DEFINE_integer("batch_size", 256, "Rows per batch.")
NUM_ROWS = flags.DEFINE_integer("num_rows", 1_000_000, "Total number of rows to read.")
TARGET_ROWS_PER_SECOND = 20_000


def write_synthetic_corpus(directory: str, num_rows: int = 100_000) -> None:
    vocabulary = [*SPECIAL_TOKENS, *(f"w{index}" for index in range(30_517))]
    tokenizer = tokenizer_from_bytes("vocab.txt", "\n".join(vocabulary).encode())
    rows = np.zeros(num_rows, row_dtype(128, 8))
    zipf = np.random.default_rng(0).zipf(1.3, (num_rows, 128))
    rows["tokens"] = 5 + zipf % (tokenizer.vocab_size - 5)
    rows["sequence_bounds"][:, 0] = (0, 64, 128)
    scratch = writing.open_scratch(directory, [])
    path = scratch / "train-00000-of-00001.array_record"
    shard = writing.write_shard(path, rows, 256)
    (scratch / tokenizer.filename).write_bytes(tokenizer.content)
    manifest = {
        "format_version": FORMAT_VERSION,
        "splits": {"train": {"rows": num_rows, "shards": [shard]}},
        "config": {"max_seq_length": 128, "max_pairs_per_row": 8, "block_rows": 256},
        "vocabulary": {
            "filename": tokenizer.filename,
            "sha256": tokenizer.sha256,
            "size": tokenizer.vocab_size,
        },
    }
    writing.publish(scratch, [path.name, "vocab.txt"], manifest)


def main(argv: list[str]) -> None:
    del argv
    if hasattr(os, "sched_setaffinity"):  # The reader's threads share one core.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as scratch:
        if CORPUS.value is None:
            write_synthetic_corpus(scratch)
        rows = Rows(CORPUS.value or scratch, "train", shuffle_seed=0)
        started = time.perf_counter()
        for start in range(0, NUM_ROWS.value, BATCH_SIZE.value):
            rows.read(start, start + BATCH_SIZE.value)
        rows_read = NUM_ROWS.value / (time.perf_counter() - started)

        mesh = partitioning.make_mesh(devices=jax.devices("cpu")[:1])
        sharding = partitioning.batch_sharding(mesh)
        num_batches = NUM_ROWS.value // BATCH_SIZE.value
        batches = pretrain_batches(rows, sharding, BATCH_SIZE.value, 0, num_batches)
        started = time.perf_counter()
        for batch in batches:
            jax.block_until_ready(batch)
        on_device = num_batches * BATCH_SIZE.value / (time.perf_counter() - started)
    result = {
        "rows_read_per_second": round(rows_read),
        "rows_on_device_per_second": round(on_device),
        "ratio_to_target": round(on_device / TARGET_ROWS_PER_SECOND, 1),
        "max_seq_length": rows.max_seq_length,
        "rows_in_corpus": rows.num_rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
