"""Builds a small task in SWAG's format from tales: choose the true next sentence among four.

    python tools/fetch_data.py tales runs/data/tales
    python experiments/story_endings.py runs/data/tales runs/data/story-endings

The three wrong sentences are from the same tale, so that its words alone do not give the answer.
No tale is in both splits. This is not SWAG, whose wrong endings were written by a
model and filtered so that they are hard to tell from the true one.
"""

import csv
import pathlib
import random
import sys

from bert_corpus.readers import Document
from bert_corpus.sentences import split_sentences

FILES = {"grimm-tales.tab": 3, "andersen.tab": 1}  # The column of the text.
COLUMNS = ("sent1", "sent2", "ending0", "ending1", "ending2", "ending3", "label")
WORDS = range(4, 26)  # Of a sentence.


def read_tales(directory: pathlib.Path) -> list[list[str]]:
    """Returns the sentences of each tale."""
    tales = []
    for name, column in FILES.items():
        with (directory / name).open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file, delimiter="\t"))[3:]  # After three lines of header.
        texts = [row[column] for row in rows if len(row) > column]
        tales += [split_sentences(Document(text)) for text in texts]
    return tales


def make_examples(sentences: list[str], rng: random.Random) -> list[dict[str, str]]:
    """Returns an example for each usable sentence that is followed by another usable one."""
    usable = [len(sentence.split()) in WORDS for sentence in sentences]
    examples = []
    for index in range(len(sentences) - 1):
        others = [n for n, good in enumerate(usable) if good and n not in (index, index + 1)]
        if not (usable[index] and usable[index + 1]) or len(others) < 3:
            continue
        choices = [index + 1, *rng.sample(others, 3)]
        rng.shuffle(choices)
        texts = [sentences[index], "", *(sentences[choice] for choice in choices)]
        label = str(choices.index(index + 1))
        examples.append(dict(zip(COLUMNS, [*texts, label], strict=True)))
    return examples


def main(source: str, output: str) -> None:
    rng = random.Random(0)
    tales = [make_examples(sentences, rng) for sentences in read_tales(pathlib.Path(source))]
    rng.shuffle(tales)
    total, splits = sum(map(len, tales)), {"val": [], "train": []}
    for tale in tales:  # A quarter of the examples for val, whole tales.
        splits["val" if len(splits["val"]) < total / 4 else "train"] += tale
    pathlib.Path(output).mkdir(parents=True, exist_ok=True)
    for split, examples in splits.items():
        rng.shuffle(examples)
        with pathlib.Path(output, f"{split}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(examples)
        print(f"{split}: {len(examples):,} examples")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("story_endings: expected the directory of the tales, and the one to write")
    main(*sys.argv[1:])
