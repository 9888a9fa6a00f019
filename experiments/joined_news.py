"""Builds long documents from R8: news items joined to one text.

    python tools/fetch_data.py reuters-r8 runs/data/reuters-r8
    python experiments/joined_news.py runs/data/reuters-r8 runs/data/joined-news-4096 4096

Half of the items of a document, at random places, are of one topic, its label; the others are of
any other topics. So the first items tell the label only roughly. The arguments are the directories
of R8 and of the output, and the tokens of a document, about. Documents to train on are of R8's
training items, those for dev of its test items; an item is in several documents.

Beside train.jsonl and test.jsonl, the output has their documents cut into windows of an eighth of
the tokens, each with the label and the number of its document (train_windows.jsonl,
test_windows.jsonl); the training items, to pre-train on (text.txt); and their vocabulary, a
byte-level BPE (bpe.json).
"""

import csv
import functools
import json
import pathlib
import random
import sys

import numpy as np

from bert_corpus.vocabulary import train_byte_pair
from bert_jax.tokenizers.tokenizer import Tokenizer, load_tokenizer

TOKENS_PER_WORD = 1.25  # Of R8, with a vocabulary of 4,096.
VOCAB_SIZE = 4096
NUM_DOCUMENTS = {"train": 160, "test": 80}
WINDOWS_PER_DOCUMENT = 8
NUM_SPECIAL = 2  # [CLS] and [SEP] of a window.


def read_items(path: pathlib.Path) -> dict[str, list[str]]:
    """Returns the texts of each topic in a file of R8."""
    with path.open(encoding="utf-8", newline="") as file:
        header, _, _, *rows = csv.reader(file, delimiter="\t")
    topics = {}
    for row in filter(None, rows):  # Some lines are empty.
        fields = dict(zip(header, row, strict=True))
        topics.setdefault(fields["Category"], []).append(" ".join(fields["Text"].split()))
    return topics


def make_documents(
    topics: dict[str, list[str]], count: int, num_words: int, rng: random.Random
) -> list[dict[str, str]]:
    """Returns documents of up to `num_words` words, equally many of each topic."""
    documents, names = [], sorted(topics)
    for number in range(count):
        label, items, size = names[number % len(names)], [], 0
        while True:
            topic = label
            if len(items) % 2:
                topic = rng.choice([name for name in names if name != label])
            item = rng.choice(topics[topic])
            size += len(item.split())
            if size > num_words and items:
                break
            items.append(item)
        rng.shuffle(items)
        text = " ".join(" ".join(items).split()[:num_words])
        documents.append({"text": text, "label": label})
    rng.shuffle(documents)
    return documents


def cut_windows(
    documents: list[dict[str, str]], tokenizer: Tokenizer, num_tokens: int
) -> list[dict[str, str]]:
    """Returns consecutive windows of up to `num_tokens` tokens, which end with a word."""

    @functools.cache
    def size_of(word: str, is_first: bool) -> int:  # The tokens of a byte-level BPE.
        return len(tokenizer.encode(word if is_first else f" {word}"))

    windows = []
    for number, document in enumerate(documents):
        groups, size = [], 0
        for word in document["text"].split():
            size += size_of(word, False)
            if not groups or size > num_tokens:
                groups.append([])
                size = size_of(word, True)
            groups[-1].append(word)
        for words in groups:
            window = {"text": " ".join(words), "label": document["label"]}
            windows.append(window | {"document": str(number)})
    return windows


def write_json_lines(path: pathlib.Path, lines: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def main(source: str, output: str, length: str) -> None:
    rng, directory, num_words = (
        random.Random(0),
        pathlib.Path(output),
        int(length) / TOKENS_PER_WORD,
    )
    unfinished = directory.with_name(f"{directory.name}.unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    splits = {
        split: read_items(pathlib.Path(source, f"reuters-r8-{split}.tab"))
        for split in NUM_DOCUMENTS
    }
    texts = [text for each in splits["train"].values() for text in each]
    (unfinished / "text.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    content = train_byte_pair(str(unfinished / "text.txt"), VOCAB_SIZE)
    (unfinished / "bpe.json").write_bytes(content)
    tokenizer = load_tokenizer(unfinished / "bpe.json")
    for split, count in NUM_DOCUMENTS.items():
        documents = make_documents(splits[split], count, int(num_words), rng)
        write_json_lines(unfinished / f"{split}.jsonl", documents)
        windows = cut_windows(
            documents, tokenizer, int(length) // WINDOWS_PER_DOCUMENT - NUM_SPECIAL
        )
        write_json_lines(unfinished / f"{split}_windows.jsonl", windows)
        lengths = [len(tokenizer.encode(document["text"])) for document in documents]
        print(
            f"{split}: {len(documents)} documents of {np.mean(lengths):.0f} tokens on average, at "
            f"most {max(lengths)}; {len(windows)} windows"
        )
    unfinished.rename(directory)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("joined_news: expected the directories of R8 and of the output, and the tokens")
    main(*sys.argv[1:])
