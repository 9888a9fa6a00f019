"""Compares fine-tuning and inference on the CPU with transformers and KerasHub: scores and time.

make .venv-parity/installed .venv-keras/installed
for name in reuters-r8 conll2003 minilm; do
    .venv-parity/bin/python tools/fetch_data.py $name runs/data/$name; done
.venv-parity/bin/python benchmarks/finetune.py --task=r8

All sides start from the MiniLM weights and use the same examples, hyperparameters and number of
seeds. Each seed of each side runs in its own process on the same cores; the sides alternate. Times
include reading, tokenization, compilation and scoring. bert_jax predicts from the checkpoint on
disk, the others with the model still in memory. All sides have glibc ask for huge pages, as the
entry points of bert_jax do, or with `--huge_pages=none` no side. transformers pads each batch to
its longest example; KerasHub trains with `fit` and predicts with `predict`, on texts that its
preprocessor pads to `max_seq_length` (benchmarks/keras_side.py). It has no BERT for tags or
answers, so it runs only with `--task=r8`. `--task=xquad` needs the English part of XQuAD as
`--xquad=FILE`, and holds out eight articles.
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
from sides import define_peers, python_of

from bert_jax.runtime.command_line import TUNABLE

TASK = flags.DEFINE_enum("task", "r8", ["r8", "conll2003", "xquad"], "Task to compare on.")
EXAMPLES = flags.DEFINE_integer(
    "examples", 1000, "Number of training examples, from the start of the file."
)
TEST_EXAMPLES = flags.DEFINE_integer(
    "test_examples", 1000, "Number of test examples, from the start of the file."
)
SEEDS = flags.DEFINE_integer("seeds", 3, "Number of runs of each side.")
EPOCHS = flags.DEFINE_float("epochs", 3.0, "Number of epochs.")
LEARNING_RATE = flags.DEFINE_float("learning_rate", 1e-4, "Peak learning rate.")
BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "Examples per update.")
DROPOUT = flags.DEFINE_float("dropout_rate", 0.1, "Dropout rate of all sides.")
LENGTH = flags.DEFINE_integer("length", 0, "max_seq_length; 0: the configuration's.")
DATA = flags.DEFINE_string(
    "data", "runs/data", "Directory of the data fetched by tools/fetch_data.py."
)
XQUAD = flags.DEFINE_string("xquad", None, "XQuAD's English file.")
HUGE_PAGES = flags.DEFINE_enum("huge_pages", "all", ["all", "none"], "Which sides use huge pages.")
PEERS = define_peers("transformers", "keras_hub")
SIDE = flags.DEFINE_enum(
    "side",
    None,
    ["bert_jax", "transformers", "keras_hub"],
    "Run only this side, in this process.",
)
SEED = flags.DEFINE_integer("seed", 0, "Seed of the run with --side.")

METRIC = {"r8": "accuracy", "conll2003": "f1", "xquad": "f1"}


def configuration(directory: pathlib.Path):
    """Returns the task's config, with files of as many examples as the flags say.

    Raises ValueError for missing data, or for fewer examples.
    """
    if TASK.value == "r8":
        from bert_jax.configs.finetune import reuters_r8 as task_config

        separator, names, header = "\n", ("train", "test"), 3
        source, suffix = f"{DATA.value}/reuters-r8/reuters-r8-%s.tab", ".tab"
    elif TASK.value == "conll2003":
        from bert_jax.configs.finetune import conll2003 as task_config

        separator, names, header = "\n\n", ("train", "test"), 0
        source, suffix = f"{DATA.value}/conll2003/%s.txt", ".txt"
    else:
        from bert_jax.configs.finetune import squad as task_config

        names = ("train", "dev")
        command = [sys.executable, "tools/split_squad.py", XQUAD.value, str(directory)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        source = None
    config = task_config.get_config()
    counts = (EXAMPLES.value, TEST_EXAMPLES.value)
    config.data.dev = ""  # All sides score their last step.
    for name, split, count in zip(names, ("train", "test"), counts, strict=True):
        path = directory / f"{name}.json"
        if source:
            parts = read_data(source % name).rstrip("\n").split(separator)
            path = directory / f"{name}{suffix}"
            path.write_text(
                separator.join(first_examples(parts, header, count)) + separator, encoding="utf-8"
            )
        config.data[split] = str(path)
    config.num_epochs, config.seed = EPOCHS.value, SEED.value
    config.learning_rate, config.batch_size = LEARNING_RATE.value, BATCH_SIZE.value
    config.max_seq_length = LENGTH.value or config.max_seq_length
    config.model.dropout_rate = DROPOUT.value
    config.init_from = f"{DATA.value}/minilm"
    config.save_training_state = False
    return config


def read_data(path: str) -> str:
    """Reads a file of DATA. Raises ValueError if it is missing."""
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        name = pathlib.Path(path).parent.name
        fix = f"run tools/fetch_data.py {name} {DATA.value}/{name}"
        raise ValueError(f"--data={DATA.value}: no file {path}; {fix}") from None


def first_examples(parts: list[str], header: int, count: int) -> list[str]:
    """Returns the first `count` examples of a file, with the header and lines between documents.

    Raises ValueError if there are fewer.
    """
    examples = [n for n, part in enumerate(parts[header:]) if not part.startswith("-DOCSTART-")]
    if len(examples) < count:
        raise ValueError(f"expected {count} examples, and the file has {len(examples)}")
    return parts[: header + examples[count - 1] + 1]


def bert_jax_run(directory: pathlib.Path) -> dict:
    from bert_jax.finetune import train_and_evaluate
    from bert_jax.predict import predict

    config, run = configuration(directory), str(directory / "run")
    test, config.data.test = config.data.test, ""
    started = time.perf_counter()
    train_and_evaluate(config, run)
    trained = time.perf_counter()
    (scores,) = predict(run, test, str(directory / "predictions.jsonl")).values()
    return {
        "score": scores[METRIC[TASK.value]],
        "train_seconds": trained - started,
        "predict_seconds": time.perf_counter() - trained,
    }


def labeled_texts(path: str) -> tuple[list[str], list[str]]:
    """Returns the texts of R8 in a file, and their labels."""
    from bert_jax.tasks.tables import read_table

    columns = [record.columns for record in read_table(path, ("Text", "Category"), 3)]
    return [each["Text"] for each in columns], [each["Category"] for each in columns]


def keras_hub_run(directory: pathlib.Path) -> dict:
    import keras_side

    config = configuration(directory)
    train_set, test_set = labeled_texts(config.data.train), labeled_texts(config.data.test)
    return keras_side.classification(config, train_set, test_set, SEED.value)


def transformers_run(directory: pathlib.Path) -> dict:
    import transformers_side

    config = configuration(directory)
    files = (config.data.train, config.data.test)
    if TASK.value == "r8":
        train_set, test_set = (labeled_texts(path) for path in files)
        return transformers_side.classification(config, train_set, test_set, SEED.value)
    if TASK.value == "conll2003":
        from bert_jax.tasks.conll import read_sentences
        from bert_jax.tasks.tagging_scores import entity_scores

        sentences = [read_sentences(path, 0, -1) for path in files]
        sets = [[(sentence.words, sentence.tags) for sentence in split] for split in sentences]
        return transformers_side.tagging(
            config, *sets, lambda *tags: entity_scores(*tags)["f1"], SEED.value
        )
    from bert_jax.tasks.squad import read_questions
    from bert_jax.tasks.squad_scores import evaluate_v1

    questions = [read_questions(path, False) for path in files]
    sets = [
        [(q.id, q.question, q.context, q.answers[0][1], q.answers[0][0]) for q in split]
        for split in questions
    ]
    gold = {q.id: [text for text, _ in q.answers] for q in questions[1]}
    return transformers_side.answers(
        config, *sets, lambda texts: evaluate_v1(gold, texts)["f1"], SEED.value
    )


def run_in_subprocess(side: str, seed: int) -> dict:
    """Runs one seed of one side in its own process."""
    environment = os.environ | {
        "GLIBC_TUNABLES": TUNABLE if HUGE_PAGES.value == "all" else "",
        "JAX_PLATFORMS": "cpu",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": str(pathlib.Path(__file__).parents[1]),  # For configs/.
    }
    command = [python_of(side), *sys.argv, f"--side={side}", f"--seed={seed}"]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
    return json.loads(output.splitlines()[-1])


def table_of_sides(runs: dict[str, list[dict]]) -> str:
    """Formats median, mean, min and max of each number over the seeds, and the ratios of times."""
    lines = [f"{'over the seeds':16} {'':13} median    mean     min     max"]
    for name in runs["bert_jax"][0]:
        medians = []
        for side, side_runs in runs.items():
            values = [run[name] for run in side_runs]
            medians.append(statistics.median(values))
            numbers = medians[-1], statistics.mean(values), min(values), max(values)
            lines.append(f"{name:16} {side:12} " + " ".join(f"{number:7.4g}" for number in numbers))
        if name != "score":
            if TASK.value != "xquad":  # Its number of examples is not a flag.
                is_training = name == "train_seconds"
                count = EXAMPLES.value * EPOCHS.value if is_training else TEST_EXAMPLES.value
                rates = ", ".join(f"{count / median:.4g}" for median in medians)
                lines.append(f"{name:16} examples per second: {rates}")
            for side, median in list(zip(runs, medians, strict=True))[1:]:
                lines.append(f"{name:16} {side + ' / ours':12} {median / medians[0]:7.2f}")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    del argv
    if SIDE.value:
        logging.set_verbosity(logging.WARNING)
        run = {
            "bert_jax": bert_jax_run,
            "transformers": transformers_run,
            "keras_hub": keras_hub_run,
        }[SIDE.value]
        with tempfile.TemporaryDirectory() as directory:
            print(json.dumps(run(pathlib.Path(directory))))
        return
    sizes = (
        "" if TASK.value == "xquad" else f"{EXAMPLES.value} and {TEST_EXAMPLES.value} examples, "
    )
    print(
        f"{TASK.value}: {sizes}{EPOCHS.value:g} epochs, batch {BATCH_SIZE.value}, learning rate "
        f"{LEARNING_RATE.value:g}, dropout {DROPOUT.value:g}, "
        f"max_seq_length {LENGTH.value or 'as configured'}, huge pages {HUGE_PAGES.value}, "
        f"load average {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    peers = list(PEERS.value)
    if TASK.value == "xquad" and not XQUAD.value:
        raise ValueError("--task=xquad needs XQuAD's English file: set --xquad=FILE")
    with tempfile.TemporaryDirectory() as directory:
        configuration(pathlib.Path(directory))  # Raises an error before the first measurement.
    if not os.path.exists(f"{DATA.value}/minilm"):
        fix = f"run tools/fetch_data.py minilm {DATA.value}/minilm"
        raise ValueError(f"--data={DATA.value}: no directory minilm; {fix}")
    if TASK.value != "r8" and "keras_hub" in peers:
        print(f"KerasHub is left out: it has no BERT for {TASK.value}.")
        peers.remove("keras_hub")
    runs = {side: [] for side in ("bert_jax", *peers)}
    for side in runs:
        python_of(side)  # Raises an error before the first measurement.
    for seed in range(SEEDS.value):
        for side, side_runs in runs.items():
            side_runs.append(run_in_subprocess(side, seed))
            numbers = ", ".join(f"{name} {value:.4g}" for name, value in side_runs[-1].items())
            print(f"  seed {seed}, {side:12} {numbers}", flush=True)
    print(table_of_sides(runs))


if __name__ == "__main__":
    app.run(main)
