r"""Long documents: a part or windows of each, global tokens (Longformer), or ModernBERT.

    python experiments/long_documents.py --scale=laptop --workdir=runs/studies
    python experiments/long_documents.py --scale=pod --workdir=/gcs/studies

At pod scale, put the released models into WORKDIR/data first: roberta-base, longformer-base-4096
and modernbert-base, directories of transformers.

Source: Beltagy et al. (2020), section 6, whose tasks cannot be fetched: long documents, against a
RoBERTa that reads 512 tokens.
"""

import collections
import itertools
import json
import math
import pathlib
import time

import joined_news
import numpy as np
import study
import study_tasks

import bert_jax

SPLITS = {"train": "train", "dev": "test"}  # The file of each split.
NUM_TIMED = 16
LENGTH = 4096  # Tokens of a document, about.
WINDOW = LENGTH // joined_news.WINDOWS_PER_DOCUMENT  # [CLS] and [SEP] included.
WINDOWS = "RoBERTa, windows, averaged"
ROWS = {  # Name -> encoder at laptop scale and at pod scale.
    "RoBERTa, the first window": ("roberta", "roberta-base"),
    WINDOWS: ("roberta", "roberta-base"),
    "Longformer": ("longformer", "longformer-base-4096"),
    "ModernBERT": ("modernbert", "modernbert-base"),
}
ENCODERS = ("roberta", "longformer", "modernbert")
SIZES = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 128}
SHORT_ROWS = 32
PRETRAINING = {  # Of the encoders at laptop scale.
    "max_seq_length": SHORT_ROWS,
    "num_steps": 600,
    "batch_size": 64,
    "long_phase.num_steps": 100,
    "long_phase.batch_size": 8,
    "model.dtype": "float32",
    "model.dropout_rate": 0.0,
    "model.initializer_range": 0.1,
    "model.max_position_embeddings": 512,
    "optimizer": "adamw",
    "learning_rate": 2e-3,
    "decay_from": "step_0",
    "decay_power": 1.0,
    "warmup_steps": 100,
    "clip_norm": 1.0,
    "per_device_batch_size": 0,
    "shard_weight_update": False,
    "eval_every": 0,
    "eval_batch_size": 16,
    "checkpoint_every": 10_000,
}
OWN_SETTINGS = {  # Of the configuration of each encoder at laptop scale.
    "roberta": {},
    "modernbert": study_tasks.SMALL_MODERNBERT
    | {
        "model.attention_pattern": "gl",
        "model.attention_window": 128,
        "masking.rate": 0.15,
        "decay_steps": 350,
    },
}
FINETUNING = {"batch_size": 4, "num_epochs": 5.0, "learning_rate": 1e-3}
WINDOWS_PER_BATCH = 16


def preparations(scale: str) -> list[study.Command]:
    """Returns the commands that make the encoders of the laptop scale."""
    if scale == "pod":
        return []
    return [*itertools.chain.from_iterable(encoder_commands(name) for name in ENCODERS)]


def encoder_commands(name: str) -> list[study.Command]:
    """Returns the commands that pre-train an encoder of the laptop scale on the training items."""
    files, commands, corpora = study.joined_news(), [], []
    for length in (SHORT_ROWS, WINDOW):
        corpora.append(f"{files}/corpus-{length}")
        arguments = ["tools/prepare_corpus.py", f"--input={files}/text.txt"]
        arguments += [f"--vocab={files}/bpe.json", f"--output={corpora[-1]}"]
        arguments += [f"--max_seq_length={length}", "--rows=full_sentences", "--min_words=1"]
        arguments += ["--heldout_fraction=0.05"]
        commands.append(study.Command(arguments, f"{corpora[-1]}/manifest.json"))
    source = "roberta" if name == "longformer" else name
    workdir = f"{files}/encoders/{source}"
    settings = {"corpus": corpora[0], "long_phase.corpus": corpora[1]} | PRETRAINING
    settings |= {"long_phase.max_seq_length": WINDOW}
    settings |= {f"model.{field}": value for field, value in SIZES.items()}
    settings |= OWN_SETTINGS[source] | {"model.max_position_embeddings": LENGTH}
    if source == "roberta":
        settings["model.max_position_embeddings"] = WINDOW
    arguments = ["-m", "bert_jax.pretrain", f"--config=configs/pretrain/{source}_base.py"]
    arguments += [f"--workdir={workdir}", *study.overrides(settings)]
    commands.append(study.Command(arguments, f"{workdir}/result.json"))
    if name == "longformer":
        output = f"{files}/encoders/{name}"
        arguments = ["tools/make_longformer.py", f"--model={workdir}", f"--output={output}"]
        arguments += [f"--max_seq_length={LENGTH}", f"--attention_window={WINDOW}"]
        commands.append(study.Command(arguments, output))
    return commands


def rows(scale: str) -> list[study.Row]:
    files, result = study.joined_news(), []
    for name, (small, released) in ROWS.items():
        is_laptop = scale == "laptop"
        weights = f"{files}/encoders/{small}" if is_laptop else study.fetched(released)
        finetuning, score = {}, None
        if small == "roberta":
            finetuning["max_seq_length"] = WINDOW
        if name == WINDOWS:
            finetuning["batch_size"] = WINDOWS_PER_BATCH
            finetuning |= {f"max_{split}_examples": 0 for split in ("train", "eval")}
            for split, file in SPLITS.items():
                finetuning[f"data.{split}"] = f"{files}/{file}_windows.jsonl"
            score = document_accuracy
        result.append(study.Row(name, weights=weights, finetuning=finetuning, score=score))
    return result


def tasks(scale: str) -> list[study.Task]:
    files = study.joined_news()
    settings = {f"data.{split}": f"{files}/{file}.jsonl" for split, file in SPLITS.items()}
    settings |= {"max_seq_length": LENGTH}
    if scale == "laptop":
        settings |= FINETUNING
    return [study.Task("Topic accuracy", "text_classification", "dev/accuracy", settings)]


def document_accuracy(trial: pathlib.Path) -> float:
    """Returns the accuracy of the mean probabilities of each document's windows.

    `trial` is the directory of a model that was trained on windows.
    """
    probabilities, labels = collections.defaultdict(collections.Counter), {}
    with (trial / "predictions/dev.jsonl").open(encoding="utf-8") as file:
        for line in map(json.loads, file):
            probabilities[line["document"]].update(line["probabilities"])  # Their sums.
            labels[line["document"]] = line["label"]
    return float(
        np.mean(
            [labels[number] == max(sums, key=sums.get) for number, sums in probabilities.items()]
        )
    )


def read_lines(path: str) -> list[dict[str, str]]:
    return [*map(json.loads, pathlib.Path(path).read_text(encoding="utf-8").splitlines())]


def naive_bayes_accuracy(train: list[dict[str, str]], dev: list[dict[str, str]]) -> float:
    """Returns the accuracy of word counts alone: naive Bayes with add-one smoothing."""
    counts = collections.defaultdict(collections.Counter)
    for document in train:
        counts[document["label"]].update(document["text"].split())
    known = set().union(*counts.values())
    num_words = {label: own.total() + len(known) for label, own in counts.items()}

    def is_right(document: dict[str, str]) -> bool:
        words = [word for word in document["text"].split() if word in known]
        scores = {
            label: sum(math.log((own[word] + 1) / num_words[label]) for word in words)
            for label, own in counts.items()
        }
        return max(scores, key=scores.get) == document["label"]

    return float(np.mean([*map(is_right, dev)]))


def first_windows(windows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [*{each["document"]: each for each in reversed(windows)}.values()]


def seconds_per_document(row: study.Row, task: study.Task, scale: str) -> float:
    """Returns the CPU time of predicting a document with the model of the first seed."""
    first = [str(number) for number in range(NUM_TIMED)]
    lines = read_lines(f"{study.joined_news()}/{SPLITS['dev']}{'_windows' * bool(row.score)}.jsonl")
    if row.score:
        texts = [line["text"] for line in lines if line["document"] in first]
    else:
        texts = [line["text"] for line in lines[:NUM_TIMED]]
    trials = study.sweep_workdir(row, task, scale) / "trials"
    model = bert_jax.load(min(trials.iterdir()))
    model.classify(texts)  # Compiles.
    began = time.process_time()
    model.classify(texts)
    return (time.process_time() - began) / NUM_TIMED


def appendix(scale: str, directory: pathlib.Path) -> str:
    """Returns the accuracy of word counts, and the time of each model for a document."""
    files, (task,) = study.joined_news(), tasks(scale)
    texts = [read_lines(f"{files}/{file}.jsonl") for file in SPLITS.values()]
    windows = [read_lines(f"{files}/{file}_windows.jsonl") for file in SPLITS.values()]
    counts = naive_bayes_accuracy(*texts), naive_bayes_accuracy(*map(first_windows, windows))
    lines = ["| | CPU milliseconds per document |", "| --- | ---: |"]
    for row in rows(scale):
        lines.append(f"| {row.name} | {1000 * seconds_per_document(row, task, scale):.0f} |")
    return "\n\n".join(
        [
            f"Word counts alone (naive Bayes) name the topic of {counts[0]:.1%} of the documents, "
            f"and from their first windows of {counts[1]:.1%}.",
            f"The time of predicting a document, a mean over {NUM_TIMED}, compilation left out:",
            "\n".join(lines),
        ]
    )


STUDY = study.Study(
    name="long_documents",
    title="Long documents: a part, windows, Longformer, or ModernBERT",
    about="Documents of joined Reuters news (R8): half of the items, at random places, are of one "
    "topic of eight, which the model names (chance: 12.5 %). A RoBERTa has no positions for more "
    "than an eighth of a document: it reads the first window of that size, or all windows one by "
    "one, trained with the label of their document; then the mean of their probabilities decides.",
    laptop=f"{joined_news.NUM_DOCUMENTS['train']} documents of about 4,000 tokens to train and "
    f"{joined_news.NUM_DOCUMENTS['test']} for dev, to take minutes. The encoders have 2 layers of "
    "hidden size 64, and were pre-trained by masked LM on the training items, in "
    f"{PRETRAINING['num_steps']:,} steps on rows of {SHORT_ROWS} tokens "
    f"and {PRETRAINING['long_phase.num_steps']} on rows of {WINDOW}. RoBERTa has {WINDOW} "
    f"positions; the Longformer is converted from it, with windows of {WINDOW}; ModernBERT has a "
    "global layer and one with a window of 128.",
    limits="So few documents, and encoders that have learned little, show what is gained by "
    "reading all of a document. The topic is spread over it, so that windows need not know of each "
    "other; tasks that combine distant parts, or encoders of full size, may rank the three "
    "otherwise.",
    rows=rows,
    tasks=tasks,
    num_seeds=3,
    preparations=preparations,
    appendix=appendix,
)

if __name__ == "__main__":
    study.main(STUDY)
