"""Measures the speed of corpus building, and that its memory does not grow with the corpus.

python benchmarks/corpus.py [--input=GLOB --vocab=vocab.txt]

Builds a corpus from the input and one from ten copies of it, each in a fresh process, and prints
both and their ratios; the target is a peak memory ratio of about 1. The input must be large enough
to occupy all processes (each with a megabyte of text), as the default synthetic text is.
"""

import concurrent.futures
import json
import multiprocessing
import pathlib
import resource
import sys
import tempfile
import time

import numpy as np
from absl import app, flags

from bert_corpus.build import build_corpus
from bert_corpus.config import CorpusConfig
from bert_corpus.parallel import usable_cores
from bert_corpus.readers import find_inputs
from bert_jax.tokenization import SPECIAL_TOKENS, load_tokenizer

INPUT = flags.DEFINE_string("input", None, "Glob of text files or dumps; default: synthetic text.")
VOCAB = flags.DEFINE_string("vocab", None, "Vocabulary for --input.")
COPIES = flags.DEFINE_integer("copies", 10, "Copies of the input in the large corpus.")
MEGABYTES = flags.DEFINE_integer("megabytes", 12, "Size of the synthetic text.")


def write_synthetic_text(path: pathlib.Path, vocabulary: pathlib.Path, megabytes: int) -> None:
    """Writes documents of 20 sentences with Zipf-distributed words, and their vocabulary."""
    words = np.array([f"word{index}" for index in range(20_000)])
    vocabulary.write_text("\n".join([*SPECIAL_TOKENS, ".", *words]) + "\n")
    generator = np.random.default_rng(0)
    with open(path, "w") as stream:
        while stream.tell() < megabytes * 1_000_000:
            for length in generator.integers(5, 40, size=20):
                ids = generator.zipf(1.3, length) % len(words)
                stream.write(" ".join(words[ids]) + ".\n")
            stream.write("\n")


def build_and_measure(inputs: list[str], vocabulary: str, output: str) -> dict:
    """Builds a corpus in this process and its workers; returns speed and peak memory."""
    started = time.perf_counter()
    manifest = build_corpus(inputs, load_tokenizer(vocabulary), output, CorpusConfig())
    seconds = time.perf_counter() - started
    rows = sum(split["rows"] for split in manifest["splits"].values())
    unit = 1 << (20 if sys.platform == "darwin" else 10)  # ru_maxrss is in bytes or in KiB
    return {
        "rows": rows,
        "seconds": round(seconds, 1),
        "rows_per_second": round(rows / seconds),
        "parent_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit,
        "worker_peak_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // unit,
    }


def main(argv: list[str]) -> None:
    del argv
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        if INPUT.value:
            inputs, vocabulary = find_inputs(INPUT.value), VOCAB.value
        else:
            inputs, vocabulary = [str(folder / "text.txt")], str(folder / "vocab.txt")
            write_synthetic_text(pathlib.Path(inputs[0]), pathlib.Path(vocabulary), MEGABYTES.value)
        measurements = []
        for copies in (1, COPIES.value):
            # Peak memory is measured over a process's lifetime, so each build gets a new one.
            with concurrent.futures.ProcessPoolExecutor(
                1, mp_context=multiprocessing.get_context("spawn")
            ) as process_pool:
                output = str(folder / f"corpus-{copies}")
                arguments = (inputs * copies, vocabulary, output)
                measurements.append(process_pool.submit(build_and_measure, *arguments).result())
    single, multiple = measurements
    result = {
        "cores": usable_cores(),
        "one": single,
        f"times_{COPIES.value}": multiple,
        "parent_peak_ratio": round(multiple["parent_peak_mib"] / single["parent_peak_mib"], 2),
        "worker_peak_ratio": round(multiple["worker_peak_mib"] / single["worker_peak_mib"], 2),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    app.run(main)
