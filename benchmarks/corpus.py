r"""Measures the speed and memory of corpus building, compared with the script released with BERT.

python benchmarks/corpus.py --dump=enwiki-latest-pages-articles1.xml.bz2 --vocab=vocab.txt \
    [--released=DIR --tensorflow_python=PYTHON]

The text of a Wikipedia dump, a sentence per line, is copied once, 10 and 100 times; each document
begins with the number of its copy, so that none is dropped. Builds rows of 128 tokens in fresh
processes pinned to one core and to two, and prints medians of words per second from the start of
the process to its end, and peak memory. DIR holds `create_pretraining_data.py` and
`tokenization.py` of github.com/google-research/bert, which then make the pairs of ten copies with
`dupe_factor=1` in PYTHON, an environment with TensorFlow.
"""

import collections
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

from absl import app, flags

from bert_corpus.build import build_corpus
from bert_corpus.config import CorpusConfig
from bert_corpus.inputs import Unit, find_inputs
from bert_corpus.readers import read_documents
from bert_corpus.sentences import split_sentences
from bert_jax.tokenizers.tokenizer import load_tokenizer

DUMP = flags.DEFINE_string("dump", None, "A Wikipedia dump.", required=True)
VOCAB = flags.DEFINE_string("vocab", None, "A WordPiece vocabulary.", required=True)
RELEASED = flags.DEFINE_string("released", None, "Directory of the released script.")
PYTHON = flags.DEFINE_string("tensorflow_python", sys.executable, "Python with TensorFlow.")
REPEATS = flags.DEFINE_integer("repeats", 3, "Runs of each measurement; the median is printed.")
BUILD = flags.DEFINE_string("build", None, "Internal: build a corpus of this text and exit.")
CONFIG = CorpusConfig(sentences="lines", heldout_fraction=0.1)
WORDS_OF_BERT = 3.3e9  # Devlin et al. (2018), section 3.1
CORES = 96

# Runs the script, which is written for TensorFlow 1, unchanged.
SHIM = """
import runpy, sys
import tensorflow.compat.v1 as tensorflow
sys.modules["tensorflow"] = tensorflow
sys.path.insert(0, sys.argv[1])
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0] + "/create_pretraining_data.py", run_name="__main__")
"""


def write_copies(documents: list[list[str]], path: pathlib.Path, copies: int) -> None:
    with open(path, "w", encoding="utf-8") as stream:
        for copy in range(copies):
            for sentences in documents:
                stream.write("\n".join([f"Copy {copy} .", *sentences]) + "\n\n")


def build(text: str) -> None:
    """Builds a corpus on the cores of this process; prints seconds of work and peak memory."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as output:
        build_corpus(text, load_tokenizer(VOCAB.value), output, CONFIG)
    parent, workers = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    result = {
        "wall": time.perf_counter() - started,
        "parent_cpu": parent.ru_utime + parent.ru_stime,
        "parent_mib": parent.ru_maxrss >> 10,
        "worker_mib": workers.ru_maxrss >> 10,
    }
    print(json.dumps(result))


def run(command: list[str], cores: int) -> tuple[float, str, int]:
    """Returns the seconds, output and peak memory in MiB of a process pinned to some cores."""
    chosen = sorted(os.sched_getaffinity(0))[:cores]
    started = time.perf_counter()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, chosen),
        encoding="utf-8",
    ) as process:
        output = process.stdout.read()
        _, exit_code, usage = os.wait4(process.pid, 0)
    if exit_code:
        sys.exit(f"{' '.join(command)} failed")
    return time.perf_counter() - started, output, usage.ru_maxrss >> 10


def main(argv: list[str]) -> None:
    del argv
    if BUILD.value:
        build(BUILD.value)
        return
    documents = [
        sentences
        for source in find_inputs(DUMP.value)
        for document in read_documents(Unit(source, 0, 1), collections.Counter())
        if (sentences := split_sentences(document))
    ]
    words = sum(3 + sum(len(s.split()) for s in sentences) for sentences in documents)
    with tempfile.TemporaryDirectory() as scratch:
        texts = {copies: pathlib.Path(scratch, f"{copies}.txt") for copies in (1, 10, 100)}
        for copies, path in texts.items():
            write_copies(documents, path, copies)
        command = [sys.executable, __file__, *sys.argv[1:]]
        seconds, parent_cpu = {}, {}
        for cores, copies in ((2, 1), (1, 10), (2, 10), (1, 100), (2, 100)):
            # Of a hundred copies, one run is long enough.
            repeats = 1 if copies == 100 else REPEATS.value
            runs = [run([*command, f"--build={texts[copies]}"], cores) for _ in range(repeats)]
            seconds[cores, copies] = statistics.median(taken for taken, _, _ in runs)
            reports = [json.loads(output.splitlines()[-1]) for _, output, _ in runs]
            parent, worker = (max(r[n] for r in reports) for n in ("parent_mib", "worker_mib"))
            parent_cpu[cores, copies] = statistics.median(r["parent_cpu"] for r in reports)
            share = parent_cpu[cores, copies] / seconds[cores, copies]
            busy = f"; parent busy {share:.1%} of the time" if cores > 1 else ""
            print(
                f"{copies:>3} copies, {cores} cores: {seconds[cores, copies]:6.2f} s, "
                f"{copies * words / seconds[cores, copies]:9,.0f} words/s; peak MiB: parent "
                f"{parent}, largest worker {worker}{busy}",
                flush=True,
            )
        for copies in (10, 100):
            ratio = seconds[1, copies] / seconds[2, copies]
            print(f"{copies} copies: two cores are {ratio:.2f} times as fast as one")
        more = [seconds[cores, 100] - seconds[cores, 10] for cores in (1, 2)]  # without the start
        print(f"90 further copies: two cores are {more[0] / more[1]:.2f} times as fast as one")
        per_core = 100 * words / seconds[1, 100]
        minutes = WORDS_OF_BERT / per_core / CORES / 60
        print(f"3.3 billion words on {CORES} cores, at the rate of one core: {minutes:.1f} minutes")
        # Without the start, which does not depend on the input.
        work = (parent_cpu[2, 100] - parent_cpu[2, 10]) / (seconds[1, 100] - seconds[1, 10])
        print(f"the parent works {work:.2%} of the time of a worker: {work * CORES:.0%} at {CORES}")
        if RELEASED.value:
            flags_of_script = {
                "input_file": texts[10],
                "output_file": f"{scratch}/out.tfrecord",
                "vocab_file": VOCAB.value,
                "max_seq_length": 128,
                "max_predictions_per_seq": 20,
                "dupe_factor": 1,
            }
            arguments = [f"--{name}={value}" for name, value in flags_of_script.items()]
            command = [PYTHON.value, "-c", SHIM, RELEASED.value, *arguments]
            runs = [run(command, 1) for _ in range(REPEATS.value)]
            released = statistics.median(taken for taken, _, _ in runs)
            ratio = released / seconds[1, 10]
            print(
                f"released script, 10 copies, one core: {released:.1f} s, "
                f"{10 * words / released:,.0f} words/s, {max(mib for *_, mib in runs)} MiB; "
                f"ours is {ratio:.1f} times as fast"
            )


if __name__ == "__main__":
    app.run(main)
