"""A tag for each word, out of CoNLL column files: named entities, chunks, parts of speech."""

import itertools
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from bert_jax.data.features import NO_LABEL, Feature
from bert_jax.tasks import scores
from bert_jax.tasks.conll import SCHEMES, Sentence, convert_tags, find_scheme, read_conll
from bert_jax.tasks.tagging_scores import entity_scores, find_strict_entities, split_tag
from bert_jax.tasks.task import Outputs, Split, Task
from bert_jax.tasks.text_classification import given_labels
from bert_jax.tasks.windows import split_into_windows, window_tokens, word_pieces
from bert_jax.tokenization import Tokenizer


class TaggedFile(NamedTuple):
    """Sentences, the features that predict them, and where each word's tag stands in those.

    The words of all features, one after the other, are those of all sentences.
    """

    sentences: list[Sentence]
    features: list[Feature]
    positions: list[np.ndarray]


def get_task(config: ConfigDict, tokenizer: Tokenizer) -> Task:
    """Reads the files that `config.data` names; see configs/finetune/conll2003.py.

    Raises FileNotFoundError and ValueError, with file and line, for what cannot be read.
    """
    data = config.data
    if not (data.train or data.dev or data.test):
        raise ValueError(
            "give the sentences to train on: --config.data.train=FILE; or, for a head that is "
            "trained already, those to tag: --config.data.test=FILE"
        )
    if data.scheme not in (*SCHEMES, "none"):
        raise ValueError(
            f"data.scheme is {data.scheme!r}: expected {', '.join(SCHEMES)}, or none for tags that "
            "mark no entities"
        )
    notes: dict[str, int] = {}
    labels, columns = given_labels(config), 2
    if data.scheme.startswith("iob") and any(split_tag(each)[0] in tuple("ES") for each in labels):
        raise ValueError(
            f"the labels {', '.join(labels)} are of BIOES, and the scheme is {data.scheme}: set "
            "--config.data.scheme=bioes"
        )

    def read(name):
        """Uses the labels and columns of the training file, which is the first to be read."""
        nonlocal labels, columns
        # In dev fewer columns are no reason to go without a score, unless there are words only.
        fewest = columns if name == "test" else 2
        sentences = read_conll(data[name], data.word_column, data.tag_column, fewest)
        if sentences[0].tags is None and name == "train":
            raise ValueError(f"{data.train} has words only, and training needs a tag for each")
        if sentences[0].tags is None:
            notes[f"{name} sentences without tags, so not scored"] = len(sentences)
        else:
            given = sentences
            if data.scheme != "none":
                scheme = find_scheme(data[name], sentences)
                sentences = [
                    sentence._replace(tags=convert_tags(sentence.tags, data.scheme))
                    for sentence in sentences
                ]
                notes[f"{name} sentences in {scheme.upper()}"] = len(sentences)
            labels = labels or find_labels(sentences, data.scheme)
            check_tags(data[name], given, sentences, labels)
        if name == "train":
            columns = sentences[0].columns
        features, positions, counts = tagging_features(
            sentences, labels, tokenizer, config.max_seq_length, data.document_context
        )
        notes.update({f"{name} {what}": count for what, count in counts.items()})
        return TaggedFile(sentences, features, positions)

    train = read("train").features if data.train else []  # None: predictions only.
    splits = tuple(
        make_split(name, read(name), labels, data.scheme) for name in ("dev", "test") if data[name]
    )
    return Task(
        kind="tagging",
        labels=labels,
        train=train,
        splits=splits,
        metric="dev/accuracy" if data.scheme == "none" else "dev/f1",
        notes=notes,
        settings={
            "max_seq_length": config.max_seq_length,
            "scheme": data.scheme,
            "document_context": data.document_context,
        },
    )


def find_labels(sentences: Sequence[Sentence], scheme: str) -> tuple[str, ...]:
    """All tags that `scheme` has for the types that occur, "O" first; with none, those found.

    Raises ValueError for one tag only.
    """
    found = {tag for sentence in sentences for tag in sentence.tags}
    if len(found) < 2:
        raise ValueError(
            f"the training file has the one tag {', '.join(found)!r}: expected at least two; is it "
            "the right --config.data.tag_column?"
        )
    if scheme == "none":
        return tuple(sorted(found))
    types = sorted({split_tag(tag)[1] for tag in found - {"O"}})
    prefixes = "BIES" if scheme == "bioes" else "BI"
    return ("O", *(f"{prefix}-{each}" for each in types for prefix in prefixes))


def check_tags(
    path: str,
    given: Sequence[Sentence],
    sentences: Sequence[Sentence],
    labels: tuple[str, ...],
) -> None:
    """ValueError for a tag of `sentences` that is none of `labels`; it names the one `given`."""
    for original, sentence in zip(given, sentences, strict=True):
        for line, tag, trained in zip(original.lines, original.tags, sentence.tags, strict=True):
            if trained not in labels:
                trained = "" if trained == tag else f", trained as {trained!r},"
                raise ValueError(
                    f"{path}, line {line}: tag {tag!r}{trained} is none of those trained, "
                    f"which are {', '.join(labels)}: mend it, or name all tags in "
                    "--config.data.labels"
                )


def tagging_features(
    sentences: Sequence[Sentence],
    labels: tuple[str, ...],
    tokenizer: Tokenizer,
    max_seq_length: int,
    document_context: bool,
) -> tuple[list[Feature], list[np.ndarray], dict[str, int]]:
    """Features, the positions in each at which its words are predicted, and what was counted.

    A word's tag stands at its first piece (section 5.3 of the paper); of a word that does not fit
    the first pieces are kept. Without `document_context` a feature holds words of one sentence,
    with it of one document.
    """
    room = max_seq_length - 2  # [CLS] and [SEP].
    pieces_of = word_pieces(tokenizer, (word for each in sentences for word in each.words))
    numbers = {label: number for number, label in enumerate(labels)}
    features, positions = [], []
    texts = (
        [list(group) for _, group in itertools.groupby(sentences, lambda each: each.document)]
        if document_context
        else [[sentence] for sentence in sentences]
    )
    for text in texts:
        pieces = [pieces_of[word][:room] for sentence in text for word in sentence.words]
        tags = [numbers[tag] for sentence in text for tag in sentence.tags or ()]
        ends = np.cumsum([0, *(len(sentence.words) for sentence in text)]).tolist()
        for window in split_into_windows(
            [len(each) for each in pieces], itertools.pairwise(ends), room
        ):
            tokens, places = window_tokens(tokenizer, pieces, window)
            label = None
            if tags:
                label = np.full(len(tokens), NO_LABEL, np.int32)
                label[places] = tags[window.begin : window.end]
            features.append(Feature((tokens,), (len(tokens),), label))
            positions.append(places)
    cut = sum(len(pieces_of[word]) > room for each in sentences for word in each.words)
    return features, positions, {"windows": len(features), "words cut": cut}


def best_numbers(outputs: Outputs, positions: Sequence[np.ndarray]) -> np.ndarray:
    """The number of the likeliest tag of each word, all features' one after the other."""
    pairs = zip(outputs, positions, strict=True)
    return np.concatenate([output[places].argmax(axis=-1) for output, places in pairs])


def make_split(name: str, file: TaggedFile, labels: tuple[str, ...], scheme: str) -> Split:
    """Scores by the rules of conlleval, and writes files that its script can score: word, tag where
    it is known, predicted tag, and a blank line after each sentence."""
    expected = [sentence.tags for sentence in file.sentences]

    def predicted_tags(outputs: Outputs) -> list[list[str]]:
        chosen = (labels[number] for number in best_numbers(outputs, file.positions))
        return [list(itertools.islice(chosen, len(each.words))) for each in file.sentences]

    def score(outputs: Outputs) -> dict[str, float]:
        predicted = predicted_tags(outputs)
        right = {
            "accuracy": scores.accuracy(
                list(itertools.chain(*predicted)), list(itertools.chain(*expected))
            )
        }
        if scheme == "none":
            return right
        strict = entity_scores(predicted, expected, lambda tags: find_strict_entities(tags, scheme))
        return entity_scores(predicted, expected) | {"strict_f1": strict["f1"]} | right

    def write(outputs: Outputs, directory: pathlib.Path) -> None:
        # The script knows no BIOES. Without -DOCSTART- lines it counts the words that there are.
        columns = [[each.words for each in file.sentences], predicted_tags(outputs)]
        if expected[0] is not None:
            columns.insert(1, expected)
        with open(directory / f"{name}.txt", "w", encoding="utf-8") as stream:
            for words, *tags in zip(*columns, strict=True):
                if scheme == "bioes":
                    tags = [convert_tags(each, "iob2") for each in tags]
                for fields in zip(words, *tags, strict=True):
                    stream.write(" ".join(fields) + "\n")
                stream.write("\n")

    labeled = expected[0] is not None
    return Split(name, file.features, score if labeled else None, write)
