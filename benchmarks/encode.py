"""`model.encode` on 10,000 Wikipedia sentences against PyTorch, ONNX Runtime and KerasHub.

make .venv-parity/installed .venv-onnx/installed .venv-keras/installed
.venv-parity/bin/python tools/fetch_data.py minilm runs/data/minilm
.venv-parity/bin/python tools/fetch_data.py wikipedia-sample runs/data/wikipedia-sample
.venv-parity/bin/python benchmarks/encode.py

MiniLM weights, mean pooling, float32. `torch` is transformers in torch; `onnx` is the backend of
sentence-transformers with ONNX Runtime (benchmarks/onnx_side.py); both sort the sentences by
length and pad batches of 32 to their longest sentence. `keras_hub` pads batches of 32 to powers of
two (benchmarks/keras_side.py); its approximate GELU changes the vectors, and it splits a few words
with Greek letters or accents into other tokens. bert_jax uses its default batch of 16 rows of 64
tokens, which hold about as many tokens. Each measurement runs in its own
process, and the sides alternate. No side has glibc ask for huge pages; with `--huge_pages` all do.
Seconds are for the call that turns strings into vectors: tokenization and compilation count,
loading does not. The aims are a ratio of at least 1.2 to torch and 1 to the others, and at most 8
compiled programs.

`--start` measures instead the time from the start of a process to the first vector.
"""

import collections
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
from absl import app, flags
from sides import define_peers, python_of

from bert_corpus.inputs import Unit, find_inputs
from bert_corpus.readers import read_documents
from bert_corpus.sentences import split_sentences
from bert_jax.runtime.command_line import TUNABLE

MODEL = flags.DEFINE_string("model", "runs/data/minilm", "Directory of the weights.")
DUMP = flags.DEFINE_string("dump", "runs/data/wikipedia-sample/*.bz2", "Text to encode.")
SENTENCES = flags.DEFINE_integer("sentences", 10_000, "Number of sentences.")
REPEATS = flags.DEFINE_integer("repeats", 5, "Number of processes per side.")
START = flags.DEFINE_boolean("start", False, "Only measures the time to the first vector.")
PEERS = define_peers("torch", "onnx", "keras_hub")
HUGE_PAGES = flags.DEFINE_boolean("huge_pages", False, "All sides ask for huge pages.")
SIDE = flags.DEFINE_enum(
    "side",
    None,
    ["bert_jax", "torch", "keras_hub"],
    "Internal: measures this side in this process.",
)
BATCH = 32
FETCH = "fetch it with tools/fetch_data.py wikipedia-sample runs/data/wikipedia-sample"
OTHER_VECTOR = 0.02  # KerasHub's approximate GELU alone changes vectors by 0.002.

FIRST_VECTOR = "import bert_jax, sys; bert_jax.load(sys.argv[1]).encode('A boat on the river.')"


def encode_with_bert_jax(sentences: list[str]) -> tuple[float, np.ndarray, int]:
    """Returns the seconds, the vectors, and the number of compiled programs."""
    import bert_jax
    from bert_jax.inference import forward

    model = bert_jax.load(MODEL.value)
    started = time.perf_counter()
    vectors = model.encode(sentences)
    seconds = time.perf_counter() - started
    return seconds, vectors, forward.head_outputs._cache_size()


def encode_with_torch(sentences: list[str]) -> tuple[float, np.ndarray, int]:
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL.value)
    model = transformers.AutoModel.from_pretrained(MODEL.value).eval()
    started = time.perf_counter()
    tokens = tokenizer(sentences, truncation=True, max_length=512)["input_ids"]
    order = sorted(range(len(tokens)), key=lambda index: -len(tokens[index]))
    vectors = np.empty((len(tokens), model.config.hidden_size), np.float32)
    with torch.inference_mode():
        for first in range(0, len(order), BATCH):
            indices = order[first : first + BATCH]
            batch = tokenizer.pad({"input_ids": [tokens[i] for i in indices]}, return_tensors="pt")
            mask = batch["attention_mask"][..., None]
            hidden = model(**batch).last_hidden_state
            vectors[indices] = ((hidden * mask).sum(1) / mask.sum(1)).numpy()
    return time.perf_counter() - started, vectors, 0


def encode_with_keras_hub(sentences: list[str]) -> tuple[float, np.ndarray, int]:
    import keras_side

    seconds, vectors = keras_side.encode(MODEL.value, sentences, BATCH)
    return seconds, vectors, 0


def command_of(side: str) -> list[str]:
    """Returns the command that measures a side, without its input and output files."""
    if side == "onnx":
        script = pathlib.Path(__file__).with_name("onnx_side.py")
        return [python_of(side), str(script), MODEL.value]
    return [python_of(side), __file__, f"--side={side}", f"--model={MODEL.value}"]


def run(command: list[str]) -> str:
    environment = os.environ | {
        "GLIBC_TUNABLES": TUNABLE if HUGE_PAGES.value else "",
        "JAX_PLATFORMS": "cpu",
        "PYTHONWARNINGS": "ignore",
    }
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout


def main(argv: list[str]) -> None:
    if SIDE.value:
        sentences = json.loads(pathlib.Path(argv[1]).read_text(encoding="utf-8"))
        encode = {
            "bert_jax": encode_with_bert_jax,
            "torch": encode_with_torch,
            "keras_hub": encode_with_keras_hub,
        }[SIDE.value]
        seconds, vectors, programs = encode(sentences)
        np.save(argv[2], vectors)
        print(json.dumps([seconds, programs]))
        return
    if os.getloadavg()[0] > 0.5:
        print(f"Other programs are running: load average {os.getloadavg()[0]:.1f}.")
    if START.value:
        seconds = []
        for _ in range(REPEATS.value):
            started = time.perf_counter()
            run([sys.executable, "-c", FIRST_VECTOR, MODEL.value])
            seconds.append(time.perf_counter() - started)
        times = " ".join(f"{s:.2f}" for s in seconds)
        print(f"start of the process to the first vector: {times} s", end="; ")
        print(f"median {statistics.median(seconds):.2f} s")
        return
    try:
        sources = find_inputs(DUMP.value)
    except FileNotFoundError:
        raise FileNotFoundError(f"--dump={DUMP.value} matches no file: {FETCH}") from None
    sentences = [
        sentence
        for source in sources
        for document in read_documents(Unit(source, 0, 1), collections.Counter())
        for sentence in split_sentences(document)
    ][: SENTENCES.value]
    counts = np.percentile([len(s.split()) for s in sentences], (10, 50, 90, 100)).astype(int)
    print(f"{len(sentences)} sentences; words at 10, 50, 90 and 100 %: {counts.tolist()}")
    seconds = {side: [] for side in ("bert_jax", *PEERS.value)}
    for side in seconds:
        command_of(side)  # Raises an error before the first measurement.
    with tempfile.TemporaryDirectory() as directory:
        texts = f"{directory}/sentences.json"
        pathlib.Path(texts).write_text(json.dumps(sentences), encoding="utf-8")
        for _ in range(REPEATS.value):
            for side, measured in seconds.items():
                output = run([*command_of(side), texts, f"{directory}/{side}.npy"])
                seconds_here, programs = json.loads(output.splitlines()[-1])
                measured.append(seconds_here)
                note = f", {programs} programs compiled" if programs else ""
                print(f"{side:>9}: {seconds_here:.1f} s{note}", flush=True)
        vectors = {side: np.load(f"{directory}/{side}.npy") for side in seconds}
    for side in PEERS.value:
        ratio = statistics.median(seconds[side]) / statistics.median(seconds["bert_jax"])
        distances = np.abs(vectors[side] - vectors["bert_jax"]).max(axis=1)
        others = np.count_nonzero(distances > OTHER_VECTOR)
        farthest = distances.max()
        print(f"{side:>9} / bert_jax, medians: {ratio:.2f}; vectors at most {farthest:.1e} apart,")
        print(f"{'':>9} {others} of them more than {OTHER_VECTOR}")
        if others and side != "keras_hub":  # It splits a few words into other tokens.
            raise ValueError(f"{side} computes other vectors: expected {OTHER_VECTOR} at most")


if __name__ == "__main__":
    app.run(main)
