"""A training step of a bi-encoder, and `encode`, against sentence-transformers in torch on a CPU.

make .venv-parity/installed
.venv-parity/bin/python tools/fetch_data.py minilm runs/data/minilm
.venv-parity/bin/python benchmarks/embeddings.py --xquad=xquad.en.json

MiniLM weights and the questions of XQuAD with their paragraphs, of which both sides read at most
256 tokens. A step is one of `bert_jax.finetune` and of `SentenceTransformerTrainer` with
MultipleNegativesRankingLoss: the other paragraphs of the batch are negatives, AdamW with clipping,
float32, dropout 0.1, the same batches. It includes building the batch, where sentence-transformers
tokenizes, and bert_jax packs texts that it has tokenized before the first step. `encode` is that of
a loaded model, for all questions and distinct paragraphs, tokenization included, of the second call
of a process; sentence-transformers sorts by length and pads batches of 32. sentence-transformers
pads queries and passages to the longest of the batch, bert_jax packs them into rows: the tokens
that either side computes are printed.

Each measurement runs in its own process with as many threads as cores, and the sides alternate. The
aim is a ratio of medians of at least 1.3. In parentheses are the seconds of all cores, which depend
less on what else the machine runs. All sides have glibc ask for huge pages, as the entry
points of bert_jax do, or with `--huge_pages=none` no side.
"""

import json
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np
from absl import app, flags
from sides import python_of

from bert_jax.runtime.command_line import TUNABLE

XQUAD = flags.DEFINE_string("xquad", None, "XQuAD's English file.", required=True)
MODEL = flags.DEFINE_string("model", "runs/data/minilm", "Directory of the weights.")
MEASURE = flags.DEFINE_list(
    "measure", ["32", "64", "encode"], 'Batch sizes of a step to measure, and "encode".'
)
STEPS = flags.DEFINE_integer("steps", 3, "Number of timed steps, after two others.", 1)
REPEATS = flags.DEFINE_integer("repeats", 3, "Number of processes per side.", 1)
LENGTH = flags.DEFINE_integer("length", 256, "Maximum number of tokens of a text.", 8)
HUGE_PAGES = flags.DEFINE_enum("huge_pages", "all", ["all", "none"], "Which sides use huge pages.")
SIDES = "bert_jax", "sentence_transformers"
SIDE = flags.DEFINE_enum("side", None, SIDES, "Internal: measures this side in this process.")
WARM_UP = 2  # Steps.


class Clock:
    """Takes times: seconds, and those of all cores of this process."""

    def __init__(self):
        self.times = []
        self.read()

    def read(self) -> None:
        self.times.append((time.perf_counter(), time.process_time()))

    def differences(self, first: int = 0) -> list[list[float]]:
        return np.diff(self.times, axis=0)[first:].tolist()


def write_examples(directory: pathlib.Path) -> None:
    """Writes the questions with their paragraphs, as `bert_jax.finetune` reads them."""
    articles = json.loads(pathlib.Path(XQUAD.value).read_text(encoding="utf-8"))["data"]
    pairs = [
        {"query": question["question"], "positive": paragraph["context"]}
        for article in articles
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]
    lines = "".join(json.dumps(each) + "\n" for each in pairs)
    (directory / "train.jsonl").write_text(lines, encoding="utf-8")


def read_examples(directory: pathlib.Path) -> tuple[list[str], list[str]]:
    lines = (directory / "train.jsonl").read_text(encoding="utf-8").splitlines()
    examples = [json.loads(line) for line in lines]
    return [each["query"] for each in examples], [each["positive"] for each in examples]


def texts_to_encode(directory: pathlib.Path) -> list[str]:
    queries, passages = read_examples(directory)
    return [*queries, *dict.fromkeys(passages)]


def step_of_bert_jax(directory: pathlib.Path, batch_size: int) -> tuple[list[list[float]], int]:
    """Returns both times of each timed step, and the mean number of tokens that it computes."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from bert_jax.configs.finetune import retrieval
    from bert_jax.data.features import finetune_batches
    from bert_jax.finetune import prepare
    from bert_jax.finetuning.trials import stack_trees
    from bert_jax.sharding.mesh import batch_sharding

    config = retrieval.get_config("bi_encoder")
    config.init_from, config.max_seq_length = MODEL.value, LENGTH.value
    config.data.train = str(directory / "train.jsonl")
    config.data.num_negatives, config.batch_size = 0, batch_size
    setup = prepare(config.lock())
    keys = stack_trees([jax.random.key(0)])
    state = setup.steps.init(keys, setup.data.pretrained)
    hyperparameters = stack_trees([setup.hyperparameters(config)])
    batches = finetune_batches(
        setup.data.task.train,
        setup.data.train_shape,
        NamedSharding(setup.mesh, P("trial", *batch_sharding(setup.mesh).spec)),
        batch_size=batch_size,
        rows_per_microbatch=setup.rows_per_microbatch,
        seeds=[0],
        start=0,
        stop=WARM_UP + STEPS.value,
        is_compared=True,
    )
    clock, num_tokens = Clock(), []
    for rows, num_microbatches in batches:
        num_tokens.append(num_microbatches * setup.rows_per_microbatch * rows["tokens"].shape[-1])
        arguments = rows, num_microbatches, keys, hyperparameters
        state, _ = jax.block_until_ready(setup.steps.update(state, *arguments))
        clock.read()
    return clock.differences(WARM_UP), round(np.mean(num_tokens[WARM_UP:]))


def step_of_sentence_transformers(
    directory: pathlib.Path, batch_size: int
) -> tuple[list[list[float]], int]:
    """Returns the same as `step_of_bert_jax`."""
    import datasets
    import transformers
    from sentence_transformers.base.sampler import DefaultBatchSampler
    from sentence_transformers.sentence_transformer import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )

    from bert_jax.data.features import batch_indices

    model, num_tokens, clock = load_sentence_transformer(), [], Clock()

    class OurOrder(DefaultBatchSampler):
        def __iter__(self):
            for step in range(len(self)):
                yield batch_indices(len(passages), batch_size, 0, step).tolist()

    class Timer(transformers.TrainerCallback):
        def on_step_end(self, *arguments, **options):
            clock.read()

    def count_tokens(module, inputs):
        num_tokens[-1] += inputs[0]["input_ids"].numel()

    class CountingLoss(losses.MultipleNegativesRankingLoss):
        def forward(self, *arguments):
            num_tokens.append(0)
            return super().forward(*arguments)

    queries, passages = read_examples(directory)
    model.register_forward_pre_hook(count_tokens)
    arguments = SentenceTransformerTrainingArguments(
        str(directory / "trainer"),
        per_device_train_batch_size=batch_size,
        batch_sampler=OurOrder,
        max_steps=WARM_UP + STEPS.value,
        weight_decay=0.01,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
    )
    SentenceTransformerTrainer(
        model,
        arguments,
        datasets.Dataset.from_dict({"query": queries, "positive": passages}),
        loss=CountingLoss(model),
        callbacks=[Timer()],
    ).train()
    return clock.differences(WARM_UP), round(np.mean(num_tokens[WARM_UP:]))


def load_sentence_transformer():
    """Returns the model with mean pooling, in torch with a thread for each core."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformer = modules.Transformer(MODEL.value, max_seq_length=LENGTH.value)
    pooling = modules.Pooling(transformer.get_embedding_dimension(), "mean")
    return SentenceTransformer(modules=[transformer, pooling], device="cpu")


def encode(side: str, directory: pathlib.Path) -> list[list[float]]:
    """Returns both times of the second call of `encode`; writes its vectors."""
    texts = texts_to_encode(directory)
    if side == "bert_jax":
        import bert_jax

        model = bert_jax.load(MODEL.value)

        def call():
            return model.encode(texts, pooling="mean", max_length=LENGTH.value)
    else:
        model = load_sentence_transformer()

        def call():
            return model.encode(texts, batch_size=32)

    call()
    clock = Clock()
    vectors = call()
    clock.read()
    np.save(directory / f"{side}.npy", vectors)
    return clock.differences()


def run_side(side: str, work: str, directory: str) -> tuple[list[list[float]], int]:
    """Measures a side in its own process."""
    environment = os.environ | {
        "GLIBC_TUNABLES": TUNABLE if HUGE_PAGES.value == "all" else "",
        "JAX_PLATFORMS": "cpu",
        "PYTHONWARNINGS": "ignore",
    }
    own = [f"--side={side}", f"--measure={work}"]
    command = [python_of("torch"), __file__, *sys.argv[1:], *own, directory]
    run = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    return json.loads(run.stdout.splitlines()[-1])


def main(argv: list[str]) -> None:
    if SIDE.value:
        logging.disable(logging.INFO)
        (work,), directory = MEASURE.value, pathlib.Path(argv[-1])
        if work == "encode":
            measured = encode(SIDE.value, directory), 0
        elif SIDE.value == "bert_jax":
            measured = step_of_bert_jax(directory, int(work))
        else:
            measured = step_of_sentence_transformers(directory, int(work))
        print(json.dumps(measured))
        return
    with tempfile.TemporaryDirectory() as directory:
        write_examples(pathlib.Path(directory))
        num_texts = len(texts_to_encode(pathlib.Path(directory)))
        for work in MEASURE.value:
            is_step = work != "encode"
            count = int(work) if is_step else num_texts
            medians = {side: [] for side in SIDES}
            for _ in range(REPEATS.value):
                for side in SIDES:
                    load = os.getloadavg()[0]
                    times, num_tokens = run_side(side, work, directory)
                    medians[side].append(np.median(times, axis=0))
                    each = ", ".join(f"{seconds:.2f} ({cores:.2f})" for seconds, cores in times)
                    tokens = f", {num_tokens:,} tokens" if is_step else ""
                    print(f"  {side:21} {each} s{tokens}; load average {load:.1f}", flush=True)
            ours, theirs = (np.median(medians[side], axis=0) for side in SIDES)
            name = f"step, batch {work}" if is_step else f"encode, {count} texts"
            rates = " and ".join(f"{count / seconds:.1f}" for seconds, _ in (ours, theirs))
            ratios = " and ".join(f"{ratio:.2f}" for ratio in theirs / ours)
            print(f"{name}: {rates} examples per second; ratios of seconds and of cores': {ratios}")
            if not is_step:
                vectors = [np.load(f"{directory}/{side}.npy") for side in SIDES]
                print(f"vectors at most {np.abs(vectors[0] - vectors[1]).max():.1e} apart")


if __name__ == "__main__":
    app.run(main)
