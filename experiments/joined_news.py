"""Builds long documents from R8, news items joined to one text, and small encoders to read them.

    python tools/fetch_data.py reuters-r8 runs/data/reuters-r8
    python experiments/joined_news.py runs/data/reuters-r8 runs/data/joined-news-1024 1024

Half of the items of a document, at random places, are of one topic, its label; the others are of
any other topics. So the first items tell the label only roughly. The arguments are the directories
of R8 and of the output, and the tokens of a document, about. Those for training are of R8's
training items, those for dev of its test items; an item is in several documents.

"encoders" in the output has three random encoders with the vocabulary of the documents, a
byte-level BPE: a RoBERTa with an eighth of the positions; a Longformer that
tools/make_longformer.py converts from it, with windows of that size; and a ModernBERT with global
layers, and with windows half as wide.
"""

import csv
import json
import pathlib
import random
import sys

import jax
import numpy as np

from bert_corpus.vocabulary import train_byte_pair
from bert_jax.checkpoints.make_longformer import write_longformer
from bert_jax.checkpoints.native import write_checkpoint
from bert_jax.checkpoints.parameters import model_settings
from bert_jax.model.config import BertConfig
from bert_jax.model.encoder import EncoderModel
from bert_jax.model.modernbert import ModernBertConfig
from bert_jax.tokenizers.tokenizer import load_tokenizer

TOKENS_PER_WORD = 1.15  # Of R8, with a vocabulary of 4,096.
VOCAB_SIZE = 4096
NUM_DOCUMENTS = {"train": 400, "test": 160}
SIZES = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 128}


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


def write_encoders(directory: pathlib.Path, tokenizer, length: int) -> None:
    """Writes the three random encoders."""
    window = length // 8
    sizes = SIZES | {"vocab_size": tokenizer.vocab_size, "initializer_range": 0.1}
    roberta = BertConfig(
        **sizes,
        family="roberta",
        position_offset=2,
        type_vocab_size=1,
        layer_norm_epsilon=1e-5,
        max_position_embeddings=window,
        dropout_rate=0.0,
    )
    modernbert = ModernBertConfig(
        **sizes,
        attention_pattern="gl",
        attention_window=window // 2,
        max_position_embeddings=length,
    )
    tokens = np.zeros((1, 2), np.int32)
    names = ("tokens", "segment_ids", "position_ids", "sequence_ids")
    for name, config in (("roberta", roberta), ("modernbert", modernbert)):
        model = EncoderModel(config)
        params = jax.jit(model.init)(jax.random.key(0), dict.fromkeys(names, tokens))["params"]
        settings = model_settings(config, params)
        write_checkpoint(directory / name, jax.device_get(params), settings, tokenizer)
    write_longformer(directory / "roberta", directory / "longformer", length, window)


def main(source: str, output: str, length: str) -> None:
    rng, directory, num_words = (
        random.Random(0),
        pathlib.Path(output),
        int(length) / TOKENS_PER_WORD,
    )
    unfinished = directory.with_name(f"{directory.name}.unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    for split, count in NUM_DOCUMENTS.items():
        topics = read_items(pathlib.Path(source, f"reuters-r8-{split}.tab"))
        documents = make_documents(topics, count, int(num_words), rng)
        lines = [json.dumps(document) + "\n" for document in documents]
        (unfinished / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        if split == "train":
            texts = [text for each in topics.values() for text in each]
            (unfinished / "text.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    content = train_byte_pair(str(unfinished / "text.txt"), VOCAB_SIZE)
    (unfinished / "bpe.json").write_bytes(content)
    tokenizer = load_tokenizer(unfinished / "bpe.json")
    lengths = [len(tokenizer.encode(document["text"])) for document in documents]
    print(f"tokens of a document: {np.mean(lengths):.0f} on average, at most {max(lengths)}")
    write_encoders(unfinished / "encoders", tokenizer, int(length))
    unfinished.rename(directory)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("joined_news: expected the directories of R8 and of the output, and the tokens")
    main(*sys.argv[1:])
