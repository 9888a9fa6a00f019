"""Fine-tuning and inference on the CPU, beside transformers in torch: quality and time in one run.

make .venv-parity/installed
for name in reuters-r8 conll2003 minilm; do
    .venv-parity/bin/python tools/fetch_data.py $name runs/data/$name; done
.venv-parity/bin/python benchmarks/finetune.py --task=r8

Both sides start from the MiniLM weights and take the same examples, hyperparameters and number of
seeds. Each seed of each side is a process of its own on the same cores, and the sides take turns.
Seconds are those of the whole: tokenizing, compiling and scoring included. Ours asks glibc for huge
pages, as its entry points do; `--huge_pages=both` gives them to torch too.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from absl import app, flags, logging

from bert_jax.huge_pages import TUNABLE

TASK = flags.DEFINE_enum("task", "r8", ["r8"], "What to compare on.")
EXAMPLES = flags.DEFINE_integer("examples", 1000, "Of the training set, the first so many.")
TEST_EXAMPLES = flags.DEFINE_integer("test_examples", 2189, "Of the test set, the first so many.")
SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each side.")
EPOCHS = flags.DEFINE_float("epochs", 3.0, "Over the training examples.")
DATA = flags.DEFINE_string("data", "runs/data", "Where tools/fetch_data.py has put everything.")
HUGE_PAGES = flags.DEFINE_enum("huge_pages", "ours", ["ours", "both"], "Who asks for them.")
SIDE = flags.DEFINE_enum("side", None, ["bert_jax", "transformers"], "Only run this, here.")
SEED = flags.DEFINE_integer("seed", 0, "With --side.")


def r8_config(directory: pathlib.Path):
    """The configuration, on files cut down to what the flags say."""
    from configs.finetune import reuters_r8

    config = reuters_r8.get_config()
    for name, count in (("train", EXAMPLES.value), ("test", TEST_EXAMPLES.value)):
        lines = (
            pathlib.Path(DATA.value, f"reuters-r8/reuters-r8-{name}.tab").read_text().split("\n")
        )
        path = directory / f"{name}.tab"
        path.write_text("\n".join(lines[: count + 3]) + "\n")
        config.data[name] = str(path)
    config.num_epochs, config.seed = EPOCHS.value, SEED.value
    config.init_from = f"{DATA.value}/minilm"
    config.save_training_state = False
    return config


def bert_jax_run(directory: pathlib.Path) -> dict:
    import bert_jax
    from bert_jax.finetune import train_and_evaluate
    from bert_jax.tasks.tables import read_table

    config = r8_config(directory)
    started = time.perf_counter()
    result = train_and_evaluate(config, str(directory / "run"))
    trained = time.perf_counter()
    texts = [record.columns["Text"] for record in read_table(config.data.test, ("Text",), 3)]
    model = bert_jax.load(directory / "run")
    predictions = model.classify(texts)
    finished = time.perf_counter()
    del predictions
    return {
        "score": result["test"]["accuracy"],
        "train_seconds": trained - started,
        "predict_seconds": finished - trained,
    }


def transformers_run(directory: pathlib.Path) -> dict:
    import transformers_side

    from bert_jax.tasks.tables import read_table

    config = r8_config(directory)
    sets = []
    for path in (config.data.train, config.data.test):
        columns = [record.columns for record in read_table(path, ("Text", "Category"), 3)]
        sets.append(([c["Text"] for c in columns], [c["Category"] for c in columns]))
    labels = sorted(set(sets[0][1]))
    return transformers_side.classification(
        config.init_from, config, *sets, labels, seed=SEED.value
    )


def run_apart(side: str, seed: int) -> dict:
    """One seed of one side, in a process of its own."""
    huge = side == "bert_jax" or HUGE_PAGES.value == "both"
    environment = os.environ | {
        "GLIBC_TUNABLES": TUNABLE if huge else "",
        "JAX_PLATFORMS": "cpu",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, *sys.argv, f"--side={side}", f"--seed={seed}"]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
    return json.loads(output.splitlines()[-1])


def main(argv: list[str]) -> None:
    del argv
    if SIDE.value:
        logging.set_verbosity(logging.WARNING)
        run = {"bert_jax": bert_jax_run, "transformers": transformers_run}[SIDE.value]
        with tempfile.TemporaryDirectory() as directory:
            print(json.dumps(run(pathlib.Path(directory))))
        return
    print(f"{TASK.value}: {EXAMPLES.value} examples, {EPOCHS.value:g} epochs", flush=True)
    runs = {"bert_jax": [], "transformers": []}
    for seed in range(SEEDS.value):
        for side, found in runs.items():
            found.append(run_apart(side, seed))
            shown = ", ".join(f"{name} {value:.4g}" for name, value in found[-1].items())
            print(f"  seed {seed}, {side:12} {shown}", flush=True)
    medians = {
        name: [statistics.median(run[name] for run in runs[side]) for side in runs]
        for name in runs["bert_jax"][0]
    }
    print(f"{'median of seeds':18} {'bert_jax':>10} {'transformers':>13}   ratio")
    for name, (ours, theirs) in medians.items():
        ratio = "" if name == "score" else f"{theirs / ours:10.2f}"
        print(f"{name:18} {ours:10.4g} {theirs:13.4g} {ratio}")


if __name__ == "__main__":
    app.run(main)
