"""Measures how long each command takes until it does something.

python benchmarks/startup.py

First the imports and flags: the time of every command with --help, each in --repeats new processes,
medians. Then, with BERT_TINY and random weights, the first update step of pre-training and of
fine-tuning, from the start of the process: with an empty compilation cache and with a filled one.
Each also prints how long it compiled, as the command logs it. Everything runs on CPUs.
"""

import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

from absl import app, flags

ROOT = pathlib.Path(__file__).resolve().parents[1]
REPEATS = flags.DEFINE_integer("repeats", 3, "Number of processes per command.", 1)
CONFIGS = ("configs/pretrain/bert_tiny.py:runlocal", "configs/finetune/text_classification.py")
WORDS = ("river", "town", "music", "winter", "garden", "letter", "bridge", "market")


def commands() -> list[list[str]]:
    """Returns the arguments of Python for each command of the README and of tools/."""
    modules = [["-m", f"bert_jax.{name}"] for name in ("pretrain", "finetune", "sweep")]
    tools = sorted(ROOT.glob("tools/*.py"))
    return modules + [
        [str(path)] for path in tools if "__main__" in path.read_text(encoding="utf-8")
    ]


def run(arguments: list[str], directory: str | pathlib.Path = ROOT) -> tuple[float, str]:
    """Runs Python; returns the seconds it took, and what it logged. Raises if it fails."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    started = time.perf_counter()
    done = subprocess.run(
        command,
        env=environment,
        cwd=directory,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    seconds = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    return seconds, done.stderr


def write_inputs(directory: pathlib.Path) -> None:
    """Writes a text of random words, a corpus of it, and texts with labels."""
    lines = [f"The {WORDS[n % 8]} is near the {WORDS[n // 8 % 8]} ." for n in range(640)]
    paragraphs = ["\n".join(lines[n : n + 8]) for n in range(0, len(lines), 8)]
    (directory / "text.txt").write_text("\n\n".join(paragraphs), encoding="utf-8")
    texts = [f"{line},{WORDS[n % 2]}" for n, line in enumerate(lines)]
    for split in ("train", "dev"):
        (directory / f"{split}.csv").write_text("\n".join(["text,label", *texts]), encoding="utf-8")
    vocab = [str(ROOT / "tools/train_vocab.py"), "--input=text.txt", "--output=vocab.txt"]
    run([*vocab, "--size=120"], directory)
    corpus = [str(ROOT / "tools/prepare_corpus.py"), "--input=text.txt", "--vocab=vocab.txt"]
    run([*corpus, "--output=corpus", "--max_seq_length=128", "--heldout_fraction=0.1"], directory)


def first_step(directory: pathlib.Path, module: str, *flags: str) -> str:
    """Returns what a command logs of its first step."""
    _, log = run(["-m", f"bert_jax.{module}", *flags], directory)
    return re.search(r"First step.*", log)[0]


def main(argv: list[str]) -> None:
    del argv
    for arguments in commands():
        seconds = statistics.median(run([*arguments, "--help"])[0] for _ in range(REPEATS.value))
        print(f"{os.path.relpath(arguments[-1], ROOT):28} {seconds:5.2f} s", flush=True)
    pretrain, finetune = CONFIGS
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        write_inputs(directory)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(directory / "compiled")
        for cache in ("empty", "filled"):
            flags = [f"--config={pretrain}", f"--workdir=pretrain-{cache}"]
            flags += ["--config.corpus=corpus", "--config.long_phase.num_steps=0"]
            step = first_step(directory, "pretrain", *flags)
            print(f"pretrain, {cache} cache: {step}", flush=True)
            flags = [f"--config={finetune}", f"--workdir=finetune-{cache}"]
            flags += ["--config.init_from=pretrain-empty", "--config.num_epochs=1"]
            flags += ["--config.data.train=train.csv", "--config.data.dev=dev.csv"]
            step = first_step(directory, "finetune", *flags)
            print(f"finetune, {cache} cache: {step}", flush=True)


if __name__ == "__main__":
    app.run(main)
