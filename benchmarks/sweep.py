"""Compares a sweep with running its trials one after another, with bert_jax and with transformers.

make .venv-parity/installed
for name in reuters-r8 minilm; do
    .venv-parity/bin/python tools/fetch_data.py $name runs/data/$name; done
.venv-parity/bin/python benchmarks/sweep.py

The grid is the paper's at batch size 32: three learning rates, three numbers of epochs and three
seeds, on the first texts of R8. The model is a BERT_TINY with random weights, the same file for all
sides; its learning rates are a hundred times the paper's, which are too low to train it. `workers`
is one `bert_jax.sweep` process per core, each on its own core, in one directory; `sweep` is one
such process on all cores. `finetune` is one process of `python -m bert_jax.finetune` per trial,
`transformers` one with torch, both on all cores. Times cover each command from start to end: start
of Python, reading, compilation, evaluation and writing. All sides score dev once, after the last
epoch, and do not scan over layers; all but transformers also write a checkpoint of each trial to
resume from and one to use.
"""

import concurrent.futures
import functools
import itertools
import json
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import types

from absl import app, flags

ROOT = pathlib.Path(__file__).parents[1]
HIDDEN_SIZE, NUM_LAYERS = 128, 2

SIDES = flags.DEFINE_list(
    "sides", ["workers", "sweep", "finetune", "transformers"], "Sides to run."
)
RATES = flags.DEFINE_list("learning_rates", ["5e-3", "3e-3", "2e-3"], "Peak learning rates.")
EPOCHS = flags.DEFINE_list("epochs", ["2", "3", "4"], "Numbers of epochs.")
SEEDS = flags.DEFINE_integer("seeds", 3, "Number of seeds, from 0.", 1)
EXAMPLES = flags.DEFINE_integer("examples", 500, "Number of training examples.")
DEV_EXAMPLES = flags.DEFINE_integer("dev_examples", 200, "Number of dev texts, after those.")
LENGTH = flags.DEFINE_integer("length", 128, "max_seq_length.")
DATA = flags.DEFINE_string(
    "data", "runs/data", "Directory of the data fetched by tools/fetch_data.py."
)
OUTPUT = flags.DEFINE_string("output", None, "Directory for all runs. Default: a temporary one.")
TRIAL = flags.DEFINE_list("trial", None, "Only run this trial of transformers: rate,epochs,seed.")


def prepare(directory: pathlib.Path) -> None:
    """Writes train.tab, dev.tab and, in `model`, random weights for all sides."""
    import torch
    import transformers

    rows = (
        (pathlib.Path(DATA.value) / "reuters-r8/reuters-r8-train.tab")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    header, rows = rows[:3], rows[3:]
    end = EXAMPLES.value + DEV_EXAMPLES.value
    for name, part in (("train", rows[: EXAMPLES.value]), ("dev", rows[EXAMPLES.value : end])):
        (directory / f"{name}.tab").write_text("\n".join([*header, *part, ""]), encoding="utf-8")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=HIDDEN_SIZE // 64,
        intermediate_size=4 * HIDDEN_SIZE,
    )
    transformers.BertModel(config).save_pretrained(directory / "model")
    for name in ("vocab.txt", "tokenizer_config.json"):
        shutil.copy(f"{DATA.value}/minilm/{name}", directory / "model")


def settings(directory: pathlib.Path) -> dict[str, object]:
    """Returns the fields of configs/finetune/reuters_r8.py that all trials of bert_jax set."""
    return {
        "init_from": directory / "model",
        "data.train": directory / "train.tab",
        "data.dev": directory / "dev.tab",
        "data.test": "",
        "max_seq_length": LENGTH.value,
        "batch_size": 32,
        "eval_every": 10**6,  # Only after the last step.
    }


def run_sweep(directory: pathlib.Path, cores: list[set[int]]) -> list[float]:
    """Runs the sweep with a process on each set of `cores`."""
    flags_of_base = [f"--config.base.{name}={v}" for name, v in settings(directory).items()]
    command = (
        sys.executable,
        "-m",
        "bert_jax.sweep",
        "--config=configs/sweeps/paper.py:reuters_r8",
        *flags_of_base,
        "--config.grid.batch_size=(32,)",
        f"--config.num_seeds={SEEDS.value}",
        f"--config.grid.learning_rate=({','.join(RATES.value)},)",
        f"--config.grid.num_epochs=({','.join(map(str, map(float, EPOCHS.value)))},)",
        f"--workdir={directory}/sweep-{len(cores)}",
    )
    with concurrent.futures.ThreadPoolExecutor(len(cores)) as pool:
        list(pool.map(lambda own: run(*command, cores=own), cores))
    results = directory.glob(f"sweep-{len(cores)}/trials/*/result.json")
    return [json.loads(path.read_text(encoding="utf-8"))["dev"]["accuracy"] for path in results]


def run_finetune(directory: pathlib.Path, trials: list[tuple]) -> list[float]:
    scores = []
    for number, trial in enumerate(trials):
        workdir = directory / f"finetune/{number}"
        fields = dict(zip(("learning_rate", "num_epochs", "seed"), trial, strict=True))
        run(
            sys.executable,
            "-m",
            "bert_jax.finetune",
            "--config=configs/finetune/reuters_r8.py",
            f"--workdir={workdir}",
            *(f"--config.{name}={v}" for name, v in (settings(directory) | fields).items()),
        )
        scores.append(
            json.loads((workdir / "result.json").read_text(encoding="utf-8"))["dev"]["accuracy"]
        )
    return scores


def run_transformers(directory: pathlib.Path, trials: list[tuple]) -> list[float]:
    scores = []
    for trial in trials:
        values = ",".join(map(str, trial))
        output = run(
            sys.executable, __file__, *sys.argv[1:], f"--output={directory}", f"--trial={values}"
        )
        scores.append(json.loads(output.splitlines()[-1])["score"])
    return scores


def run(*command: object, cores: set[int] | None = None) -> str:
    """Runs a command in the root of the repository, on some cores; returns what it prints."""
    set_cores = functools.partial(os.sched_setaffinity, 0, cores or os.sched_getaffinity(0))
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
    }
    result = subprocess.run(
        [*map(str, command)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=set_cores,
        encoding="utf-8",
    )
    if result.returncode:
        sys.exit(f"{result.stderr}\n{command} failed")
    return result.stdout


def transformers_trial(directory: pathlib.Path) -> dict:
    """Runs the trial of --trial with torch, in this process."""
    import transformers_side

    rate, epochs, seed = TRIAL.value
    config = types.SimpleNamespace(  # Otherwise as in configs/finetune/reuters_r8.py.
        init_from=str(directory / "model"),
        model=types.SimpleNamespace(dropout_rate=0.1),
        max_seq_length=LENGTH.value,
        batch_size=32,
        num_epochs=float(epochs),
        learning_rate=float(rate),
        warmup_fraction=0.1,
        weight_decay=0.01,
        clip_norm=1.0,
    )

    def read(path):
        rows = [row.split("\t") for row in path.read_text(encoding="utf-8").splitlines()[3:] if row]
        return [text for _, text in rows], [label for label, _ in rows]

    sets = read(directory / "train.tab"), read(directory / "dev.tab")
    return transformers_side.classification(config, *sets, int(seed))


def main(argv: list[str]) -> None:
    del argv
    if TRIAL.value:
        print(json.dumps(transformers_trial(pathlib.Path(OUTPUT.value))))
        return
    rates, epochs = map(float, RATES.value), map(float, EPOCHS.value)
    trials = list(itertools.product(rates, epochs, range(SEEDS.value)))
    cores = os.sched_getaffinity(0)
    functions = {
        "workers": lambda directory, _: run_sweep(directory, [{core} for core in cores]),
        "sweep": lambda directory, _: run_sweep(directory, [cores]),
        "finetune": run_finetune,
        "transformers": run_transformers,
    }
    with tempfile.TemporaryDirectory() as temporary:
        directory = pathlib.Path(OUTPUT.value or temporary).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        prepare(directory)
        print(
            f"{len(trials)} trials of {NUM_LAYERS} layers, hidden size {HIDDEN_SIZE}: "
            f"{EXAMPLES.value} texts of up to {LENGTH.value} tokens, batch size 32; "
            f"{len(cores)} cores, load average {os.getloadavg()[0]:.1f}\n\n"
            "| side | seconds | of the CPU | time of the first side relative to it | "
            "median dev accuracy | min | max |\n| --- | --- | --- | --- | --- | --- | --- |",
            flush=True,
        )
        seconds = {}
        for side in SIDES.value:
            started, cpu_started = time.perf_counter(), cpu_seconds()
            scores = functions[side](directory, trials)
            seconds[side] = time.perf_counter() - started
            ratio = f"{seconds[SIDES.value[0]] / seconds[side]:.2f}"
            cells = [side, f"{seconds[side]:.0f}", f"{cpu_seconds() - cpu_started:.0f}", ratio]
            cells += [f"{f(scores):.3f}" for f in (statistics.median, min, max)]
            print(f"| {' | '.join(cells)} |", flush=True)


def cpu_seconds() -> float:
    """Returns the CPU time of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    app.run(main)
