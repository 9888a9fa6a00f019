r"""Long documents: a part of each, windows with global tokens (Longformer), or ModernBERT.

    python experiments/long_documents.py --scale=laptop --workdir=runs/studies
    python experiments/long_documents.py --scale=pod --workdir=/gcs/studies

At pod scale, put the released models into WORKDIR/data first: roberta-base, longformer-base-4096
and modernbert-base, directories of transformers.

Source: Beltagy et al. (2020), section 6, whose tasks cannot be fetched: long documents, against a
RoBERTa that reads 512 tokens.
"""

import collections
import json
import math
import pathlib

import study

LENGTHS = {"laptop": 1024, "pod": 4096}
FIRST_PART = "the first eighth"
ROWS = {  # Name -> encoder at laptop scale and at pod scale, and whether it reads only a part.
    f"RoBERTa, {FIRST_PART}": ("roberta", "roberta-base", True),
    "Longformer": ("longformer", "longformer-base-4096", False),
    f"Longformer, {FIRST_PART}": ("longformer", "longformer-base-4096", True),
    "ModernBERT": ("modernbert", "modernbert-base", False),
}


def documents(scale: str) -> str:
    """Returns the directory of the documents, and at laptop scale of the encoders."""
    return study.joined_news(LENGTHS[scale])


def rows(scale: str) -> list[study.Row]:
    result = []
    for name, (small, released, is_part) in ROWS.items():
        is_laptop = scale == "laptop"
        weights = f"{documents(scale)}/encoders/{small}" if is_laptop else study.fetched(released)
        finetuning = {"max_seq_length": LENGTHS[scale] // 8} if is_part else {}
        result.append(study.Row(name, weights=weights, finetuning=finetuning))
    return result


def tasks(scale: str) -> list[study.Task]:
    files = documents(scale)
    settings = {"data.train": f"{files}/train.jsonl", "data.dev": f"{files}/test.jsonl"}
    settings |= {"max_seq_length": LENGTHS[scale]}
    if scale == "laptop":
        settings |= {"batch_size": 16, "num_epochs": 8.0, "learning_rate": 1e-3}
    return [study.Task("Topic accuracy", "text_classification", "dev/accuracy", settings)]


def naive_bayes_accuracy(train: list[dict[str, str]], dev: list[dict[str, str]]) -> float:
    """Returns the accuracy of word counts alone: naive Bayes with add-one smoothing."""
    counts = collections.defaultdict(collections.Counter)
    for document in train:
        counts[document["label"]].update(document["text"].split())
    known = set().union(*counts.values())
    num_words = {label: own.total() + len(known) for label, own in counts.items()}

    def predict(document: dict[str, str]) -> str:
        words = [word for word in document["text"].split() if word in known]
        scores = {
            label: sum(math.log((own[word] + 1) / num_words[label]) for word in words)
            for label, own in counts.items()
        }
        return max(scores, key=scores.get)

    return sum(predict(document) == document["label"] for document in dev) / len(dev)


def first_part(document: dict[str, str]) -> dict[str, str]:
    words = document["text"].split()
    return document | {"text": " ".join(words[: len(words) // 8])}


def appendix(scale: str, directory: pathlib.Path) -> str:
    """Returns what word counts alone reach, from whole documents and from a part of each."""
    (task,) = tasks(scale)
    splits = []
    for field in ("data.train", "data.dev"):
        text = pathlib.Path(task.settings[field]).read_text(encoding="utf-8")
        splits.append([json.loads(line) for line in text.splitlines()])
    whole = naive_bayes_accuracy(*splits)
    part = naive_bayes_accuracy(*([*map(first_part, split)] for split in splits))
    return (
        f"Word counts alone (naive Bayes) name the topic of {100 * whole:.1f} % of the documents, "
        f"and of {100 * part:.1f} % by {FIRST_PART} of their words."
    )


STUDY = study.Study(
    name="long_documents",
    title="Long documents: a part, Longformer, or ModernBERT",
    about="Documents of joined Reuters news (R8): half of the items, at random places, are of one "
    "topic of eight, which the model names (chance: 12.5 %). Rows read the whole document, or its "
    "first eighth: a RoBERTa has no positions for more.",
    laptop="Documents of about 1,000 tokens, not 4,000: 400 to train and 160 for dev. The encoders "
    "have 2 layers of hidden size 64 and random weights: none is pre-trained. RoBERTa has 128 "
    "positions; the Longformer is converted from it, with windows of 128; ModernBERT has a global "
    "layer and one with a window of 64.",
    limits="One seed, a few hundred documents and random weights of this size show that the three "
    "ways of reading a document run from end to end. They do not rank the architectures, whose "
    "point is what pre-training on long text gives them.",
    rows=rows,
    tasks=tasks,
    num_seeds=1,
    appendix=appendix,
)

if __name__ == "__main__":
    study.main(STUDY)
