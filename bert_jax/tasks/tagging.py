"""Tagging of words from CoNLL column files: named entities, chunks, parts of speech."""

import itertools
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from bert_jax.data.features import NO_LABEL, Feature
from bert_jax.model import heads
from bert_jax.tasks import scores
from bert_jax.tasks.conll import SCHEMES, Sentence, convert_tags, find_scheme, read_conll
from bert_jax.tasks.labels import given_labels
from bert_jax.tasks.sequences import tokenize
from bert_jax.tasks.tables import check_files_given
from bert_jax.tasks.tagging_scores import entity_scores, find_strict_entities, split_tag
from bert_jax.tasks.task import Outputs, Split, Task
from bert_jax.tasks.windows import split_into_windows, window_tokens
from bert_jax.tokenization import Tokenizer


class TaggedFile(NamedTuple):
    """Sentences, the features that predict them, and the positions in those that predict a word.

    The words of all features in order are the words of all sentences in order.
    """

    sentences: list[Sentence]
    features: list[Feature]
    positions: list[np.ndarray]


def get_task(config: ConfigDict, tokenizer: Tokenizer) -> Task:
    """Reads the files named in `config.data`; see configs/finetune/conll2003.py."""
    data = config.data
    check_files_given(data)
    if data.scheme not in (*SCHEMES, "none"):
        raise ValueError(
            f"--config.data.scheme={data.scheme}: expected {', '.join(SCHEMES)}, or none for tags "
            "that mark no entities"
        )
    notes: dict[str, int] = {}
    labels, columns = given_labels(config), 2
    if data.scheme.startswith("iob") and any(split_tag(each)[0] in "ES" for each in labels):
        raise ValueError(
            f"the labels {', '.join(labels)} are BIOES tags, but the scheme is {data.scheme}: set "
            "--config.data.scheme=bioes"
        )

    def read(name: str) -> TaggedFile:
        """Reads a file; train, the first one, sets the labels and columns of the others."""
        nonlocal labels, columns
        # A dev file is scored even if it has fewer columns than train, unless it has only words.
        min_columns = columns if name == "test" else 2
        sentences = read_conll(data[name], data.word_column, data.tag_column, min_columns)
        if sentences[0].tags is not None:
            original = sentences
            if data.scheme != "none":
                scheme = find_scheme(data[name], sentences)
                sentences = [
                    sentence._replace(tags=convert_tags(sentence.tags, data.scheme))
                    for sentence in sentences
                ]
                notes[f"{name} sentences in {scheme.upper()}"] = len(sentences)
            labels = labels or find_tag_set(sentences, data.scheme)
            check_tags(data[name], original, sentences, labels)
        elif name == "train":
            raise ValueError(f"{data.train} has only words, but training needs their tags")
        else:
            notes[f"{name} sentences without tags, so not scored"] = len(sentences)
        if name == "train":
            columns = sentences[0].columns
        features, positions, counts = tagging_features(
            sentences, labels, tokenizer, config.max_seq_length, data.document_context
        )
        notes.update({f"{name} {what}": count for what, count in counts.items()})
        return TaggedFile(sentences, features, positions)

    train = read("train").features if data.train else []  # Without: predictions only.
    splits = tuple(
        make_split(name, read(name), labels, data.scheme) for name in ("dev", "test") if data[name]
    )
    return Task(
        head=heads.TAGGING,
        labels=labels,
        train=train,
        splits=splits,
        metric="dev/accuracy" if data.scheme == "none" else "dev/f1",
        notes=notes,
        head_settings={
            "max_seq_length": config.max_seq_length,
            "scheme": data.scheme,
            "document_context": data.document_context,
        },
    )


def find_tag_set(sentences: Sequence[Sentence], scheme: str) -> tuple[str, ...]:
    """Returns "O" and all tags of `scheme` for the types that occur; with "none" those that occur.

    Raises ValueError if the sentences have a single tag.
    """
    found = {tag for sentence in sentences for tag in sentence.tags}
    if len(found) < 2:
        raise ValueError(
            f"the training file has a single tag, {found.pop()!r}: expected at least two; is "
            "--config.data.tag_column correct?"
        )
    if scheme == "none":
        return tuple(sorted(found))
    types = sorted({split_tag(tag)[1] for tag in found - {"O"}})
    prefixes = "BIES" if scheme == "bioes" else "BI"
    return ("O", *(f"{prefix}-{each}" for each in types for prefix in prefixes))


def check_tags(
    path: str, original: Sequence[Sentence], converted: Sequence[Sentence], labels: tuple[str, ...]
) -> None:
    """Raises ValueError if a `converted` tag is not in `labels`; quotes the `original` tag too."""
    for before, after in zip(original, converted, strict=True):
        for line, tag, trained in zip(before.lines, before.tags, after.tags, strict=True):
            if trained not in labels:
                trained = "" if trained == tag else f", trained as {trained!r},"
                raise ValueError(
                    f"{path}, line {line}: tag {tag!r}{trained} is not one of the labels "
                    f"{', '.join(labels)}: fix it, or list all tags in --config.data.labels"
                )


def tagging_features(
    sentences: Sequence[Sentence],
    labels: tuple[str, ...],
    tokenizer: Tokenizer,
    max_seq_length: int,
    document_context: bool,
) -> tuple[list[Feature], list[np.ndarray], dict[str, int]]:
    """Returns features, the positions in each that predict its words, and counts for the notes.

    The first piece of a word predicts its tag (section 5.3 of the paper). A word that does not fit
    keeps its first pieces. A feature holds words of one sentence, or with `document_context` of one
    document.
    """
    room = max_seq_length - 2  # [CLS] and [SEP].
    ids_of = tokenize(tokenizer, (word for each in sentences for word in each.words))
    # A word such as a control character may have no pieces.
    pieces_of = {word: ids or [tokenizer.unk_id] for word, ids in ids_of.items()}
    numbers = {label: number for number, label in enumerate(labels)}
    features, positions = [], []
    texts = [[sentence] for sentence in sentences]
    if document_context:
        groups = itertools.groupby(sentences, lambda sentence: sentence.document)
        texts = [list(group) for _, group in groups]
    for text in texts:
        pieces = [pieces_of[word][:room] for sentence in text for word in sentence.words]
        tags = [numbers[tag] for sentence in text for tag in sentence.tags or ()]
        ends = np.cumsum([0, *(len(sentence.words) for sentence in text)]).tolist()
        sizes = [len(each) for each in pieces]
        for window in split_into_windows(sizes, itertools.pairwise(ends), room):
            tokens, places = window_tokens(tokenizer, pieces, window)
            label = None
            if tags:
                label = np.full(len(tokens), NO_LABEL, np.int32)
                label[places] = tags[window.begin : window.end]
            features.append(Feature((tokens,), (len(tokens),), label))
            positions.append(places)
    truncated = sum(len(pieces_of[word]) > room for each in sentences for word in each.words)
    return features, positions, {"windows": len(features), "words truncated": truncated}


def best_tags(outputs: Outputs, positions: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the index of the most probable tag of each word, over all features in order."""
    pairs = zip(outputs, positions, strict=True)
    return np.concatenate([output[places].argmax(axis=-1) for output, places in pairs])


def make_split(name: str, file: TaggedFile, labels: tuple[str, ...], scheme: str) -> Split:
    """Builds a split that is scored by conlleval's rules and writes files for that script.

    They hold the word, its tag if known, and the predicted tag; a blank line ends each sentence.
    """
    expected = [sentence.tags for sentence in file.sentences]
    is_labeled = expected[0] is not None

    def predicted_tags(outputs: Outputs) -> list[list[str]]:
        tags = (labels[number] for number in best_tags(outputs, file.positions))
        return [list(itertools.islice(tags, len(each.words))) for each in file.sentences]

    def score(outputs: Outputs) -> dict[str, float]:
        predicted = predicted_tags(outputs)
        words = [list(itertools.chain(*tags)) for tags in (predicted, expected)]
        accuracy = {"accuracy": scores.accuracy(*words)}
        if scheme == "none":
            return accuracy
        strict = entity_scores(predicted, expected, lambda tags: find_strict_entities(tags, scheme))
        return entity_scores(predicted, expected) | {"strict_f1": strict["f1"]} | accuracy

    def write(outputs: Outputs, directory: pathlib.Path) -> None:
        # conlleval does not know BIOES, and would count -DOCSTART- lines as words.
        columns = [expected] if is_labeled else []
        columns.append(predicted_tags(outputs))
        with open(directory / f"{name}.txt", "w", encoding="utf-8") as stream:
            for sentence, *tags in zip(file.sentences, *columns, strict=True):
                if scheme == "bioes":
                    tags = [convert_tags(each, "iob2") for each in tags]
                for fields in zip(sentence.words, *tags, strict=True):
                    stream.write(" ".join(fields) + "\n")
                stream.write("\n")

    return Split(name, file.features, score if is_labeled else None, write)
