"""Word tagging, from CoNLL columns or JSONL: named entities, chunks, parts of speech."""

import collections
import csv
import itertools
import operator
import pathlib
import statistics
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from typing import NamedTuple

import numpy as np
from absl import logging
from ml_collections import ConfigDict
from scipy.special import softmax

from bert_jax.data.features import NO_LABEL, ModelInput, make_sequence
from bert_jax.model import heads
from bert_jax.model.feature_based import FEATURES
from bert_jax.tasks import scores
from bert_jax.tasks.conll import (
    SCHEMES,
    Sentence,
    convert_tags,
    iterate_sentences,
    read_sentences,
)
from bert_jax.tasks.labels import labels_from_config
from bert_jax.tasks.sequences import tokenize
from bert_jax.tasks.tables import check_empty_texts, files_from_config, note_unused_keys
from bert_jax.tasks.tag_sets import (
    check_labels,
    check_tags,
    convert_sentences,
    find_tag_set,
    scheme_of_labels,
)
from bert_jax.tasks.tagging_scores import (
    Entity,
    are_plain,
    count_all_entities,
    count_entities,
    entity_scores,
    find_entities,
    find_runs,
    find_strict_entities,
    scores_of_counts,
    type_table,
)
from bert_jax.tasks.task import (
    Outputs,
    Split,
    Task,
    TrainedHead,
    files_with_suffix,
    limit_examples,
    write_json_blocks,
)
from bert_jax.tasks.words import SplitText, split_words
from bert_jax.tokenizers.tokenizer import Tokenizer


def get_head(config: ConfigDict) -> heads.Head:
    return heads.FEATURE_BASED if "features" in config else heads.TAGGING


def get_task(config: ConfigDict, tokenizer: Tokenizer) -> Task:
    """Reads the files named in `config.data`; see configs/finetune/tagging.py."""
    data, labels, files = config.data, labels_from_config(config), files_from_config(config.data)
    settings = {name: data[name] for name in ("scheme", "document_context")}
    if config.get("features", "last") not in FEATURES:
        raise ValueError(f"features is {config.features!r}: expected one of {', '.join(FEATURES)}")
    if "features" in config:
        settings |= {"features": config.features, "lstm_size": config.lstm_size}
    if data.scheme not in (*SCHEMES, "none"):
        expected = f"{', '.join(SCHEMES)} to train, or none for tags that mark no entities"
        raise ValueError(f"config.data.scheme={data.scheme}: expected {expected}")
    check_labels(labels, data.scheme)
    if data.repair_tags and data.scheme == "none":
        raise ValueError("set config.data.repair_tags=False: with scheme=none all tags are legal")
    notes: dict[str, int] = {}
    names = labels  # Of tags that are numbers: only given ones, as we order those found in files.
    train, splits, columns = [], [], 2
    for name, path in files.items():
        # A dev file is scored even if it has fewer columns than train, unless it has only words.
        min_columns = columns if name == "test" else 2
        unused: dict[str, int] = {}
        counts: dict[str, int] = {}
        sentences = read_sentences(
            path,
            data.word_column,
            data.tag_column,
            min_columns,
            tags_key=data.tags,
            names=names,
            known_tags=labels,
            unused=unused,
            counts=counts,
        )
        note_unused_keys(unused, f"{name} lines", notes)
        notes |= {f"{name} {what}": count for what, count in counts.items()}
        is_labeled = sentences[0].tags is not None
        _check_empty(path, name, sentences, bool(data.train), notes)
        if is_labeled:
            original = sentences
            if data.scheme != "none":
                sentences, counts = convert_sentences(path, original, data.scheme, data.repair_tags)
                notes |= {f"{name} {what}": count for what, count in counts.items()}
            labels = labels or find_tag_set(sentences, data.scheme)
            check_tags(path, original, sentences, labels)
        elif name == "train":
            needed = 'training needs tags: a column, or "tags" or "spans" in JSONL'
            raise ValueError(f"{path} has only words, but {needed}")
        else:
            notes[f"{name} sentences without tags, so not scored"] = len(sentences)
        sentences = limit_examples(sentences, config, name, notes)
        features, positions, counts = tagging_features(
            sentences, labels, tokenizer, config.max_seq_length, data.document_context
        )
        notes |= {f"{name} {what}": count for what, count in counts.items()}
        if name == "train":
            train, columns = features, sentences[0].columns
        else:
            weighted_by = "class_weights" if config.class_weights else ""
            arguments = sentences, features, positions, labels, data.scheme, weighted_by
            splits.append(make_split(name, *arguments))
    return Task(
        head=get_head(config),
        labels=labels,
        train=train,
        splits=tuple(splits),
        metric="dev/accuracy" if data.scheme == "none" else "dev/f1",
        notes=notes,
        head_settings=settings,
        files=files,
    )


def _check_empty(
    path: str,
    split: str,
    sentences: Sequence[Sentence],
    is_training: bool,
    notes: dict[str, int],
) -> None:
    """Counts sentences without words and empty words; raises ValueError as `check_empty_texts`."""
    is_labeled = sentences[0].tags is not None
    empty = [(sentence.location, "'tokens'") for sentence in sentences if not sentence.words]
    check_empty_texts(split, empty, is_labeled, is_training, notes)
    empty = []
    for sentence in sentences:
        for index, (word, line) in enumerate(zip(sentence.words, sentence.lines, strict=True)):
            if not word:
                in_json = f"{sentence.location}, word {index}" if sentence.location else ""
                empty.append((in_json or f"{path}, line {line}", "the word"))
    what = "words that are empty, read as unknown"
    check_empty_texts(split, empty, is_labeled, is_training, notes, what)


def tagging_features(
    sentences: Sequence[Sentence],
    labels: tuple[str, ...],
    tokenizer: Tokenizer,
    max_seq_length: int,
    document_context: bool,
) -> tuple[list[ModelInput], list[np.ndarray], dict[str, int]]:
    """Returns features, the positions in each that predict its words, and counts for the notes.

    The first piece of a word predicts its tag (section 5.3 of the paper). Every word, the first
    too, is tokenized as one that follows another. A word that does not fit keeps its first pieces.
    A feature holds words of one sentence, or with `document_context` of one document. The features
    cover the words of all sentences in order.
    """
    layout = tokenizer.layout
    room = max_seq_length - layout.num_special_tokens(1)
    words = [word for sentence in sentences for word in sentence.words]
    tokens_of = tokenize(tokenizer, (tokenizer.word_prefix + word for word in words))
    ids_of = {word: tokens_of[tokenizer.word_prefix + word] for word in words}
    truncated = sum(len(ids_of[word]) > room for word in words)
    text_key = operator.attrgetter("document") if document_context else id
    features, positions = [], []
    for _, group in itertools.groupby(sentences, text_key):
        text = list(group)
        # A word such as a control character may have no pieces.
        words = itertools.chain(*(sentence.words for sentence in text))
        pieces = [ids_of[word][:room] or [tokenizer.unk_id] for word in words]
        sizes = list(map(len, pieces))
        ids, offsets = list(itertools.chain(*pieces)), np.cumsum([0, *sizes])
        tags = [labels.index(tag) for sentence in text for tag in sentence.tags or ()]
        ends = np.cumsum([0, *(len(sentence.words) for sentence in text)]).tolist()
        for window in split_into_windows(sizes, itertools.pairwise(ends), room):
            tokens, second_start = make_sequence(
                tokenizer, ids[offsets[window.start] : offsets[window.stop]]
            )
            predicted = slice(window.first_predicted, window.end_predicted)
            first_pieces = layout.num_before + offsets[predicted] - offsets[window.start]
            label = None
            if tags:
                label = np.full(len(tokens), NO_LABEL, np.int32)
                label[first_pieces] = tags[predicted]
            features.append(ModelInput((tokens,), (second_start,), label))
            positions.append(first_pieces)
    return features, positions, {"windows": len(features), "words truncated": truncated}


class WordWindow(NamedTuple):
    """Words `[start, stop)` of a text, of which `[first_predicted, end_predicted)` get a tag."""

    start: int
    first_predicted: int
    end_predicted: int
    stop: int


def split_into_windows(
    sizes: Sequence[int], sentences: Iterable[tuple[int, int]], room: int
) -> list[WordWindow]:
    """Splits a text, such as a document, into windows of at most `room` pieces.

    A window predicts one sentence, or up to `room // 2` pieces of a longer one. The rest are the
    surrounding words of any sentence, equally many pieces on both sides unless the text ends on one
    of them. `sizes` are the numbers of pieces of the words, 1 to `room`; `sentences` the ranges of
    their words.
    """
    before = [0, *itertools.accumulate(sizes)]  # Pieces before each word.
    windows = []
    for first, last in sentences:
        max_pieces = room if before[last] - before[first] <= room else room // 2
        while first < last:
            end = min(last, max(first + 1, bisect_right(before, before[first] + max_pieces) - 1))
            spare = room - (before[end] - before[first])
            left = max(spare // 2, spare - (before[-1] - before[end]))
            start = bisect_left(before, before[first] - left)
            stop = bisect_right(before, before[start] + room) - 1
            windows.append(WordWindow(start, first, end, stop))
            first = end
    return windows


def best_tags(
    outputs: Outputs, positions: Sequence[np.ndarray], labels: Sequence[str]
) -> Iterator[tuple[str, float]]:
    """Yields each word's most probable tag and its probability, over all features in order."""
    for output, first_pieces in zip(outputs, positions, strict=True):
        probabilities = softmax(output[first_pieces], axis=-1)
        best = (labels[index] for index in probabilities.argmax(axis=-1))
        yield from zip(best, probabilities.max(axis=-1).tolist(), strict=True)


def make_split(
    name: str,
    sentences: Sequence[Sentence],
    features: Sequence[ModelInput],
    positions: Sequence[np.ndarray],
    labels: tuple[str, ...],
    scheme: str,
    weighted_by: str = "",
) -> Split:
    """Builds a split that is scored by conlleval's rules and writes files for conlleval.

    A line holds a word, its tag if known, and the predicted tag, separated by spaces or, if a word
    is empty or a word or tag contains a space, by tabs (`conlleval -d '\\t'`); a blank line ends
    each sentence. Of known tags, NAME_types.tsv has the `type_table`; with `scheme` "none" each tag
    is a type. `weighted_by` is as in `scores.note_low_precision`.
    """
    expected = [sentence.tags for sentence in sentences]
    texts = itertools.chain(labels, *(sentence.words for sentence in sentences))
    separator = "\t" if any(" " in text or not text for text in texts) else " "
    is_labeled = expected[0] is not None

    def predicted_tags(outputs: Outputs) -> list[list[str]]:
        tags = (tag for tag, _ in best_tags(outputs, positions, labels))
        return [list(itertools.islice(tags, len(sentence.words))) for sentence in sentences]

    def score(outputs: Outputs) -> dict[str, float]:
        predicted = predicted_tags(outputs)
        words = [list(itertools.chain(*tags)) for tags in (predicted, expected)]
        accuracy = {"accuracy": scores.accuracy(*words)}
        if scheme == "none":
            return accuracy
        if scheme == "io":  # Any sequence of plain tags is legal.
            loose = strict = entity_scores(predicted, expected, find_runs)
        else:
            loose = entity_scores(predicted, expected)
            strict = entity_scores(
                predicted, expected, lambda tags: find_strict_entities(tags, scheme)
            )
        return loose | {"strict_f1": strict["f1"]} | accuracy

    def write(outputs: Outputs, directory: pathlib.Path) -> pathlib.Path:
        # conlleval knows neither BIOES, BILOU nor IO, and would count -DOCSTART- lines as words.
        columns = [expected] * is_labeled + [predicted_tags(outputs)]
        path = directory / f"{name}.txt"
        with open(path, "w", encoding="utf-8") as stream:
            for sentence, *tags in zip(sentences, *columns, strict=True):
                if not scheme.startswith("iob") and scheme != "none":
                    find = find_runs if scheme == "io" else find_entities
                    tags = [convert_tags(column, "iob2", find) for column in tags]
                for fields in zip(sentence.words, *tags, strict=True):
                    stream.write(separator.join(fields) + "\n")
                stream.write("\n")
        if is_labeled:
            find = {"io": find_runs, "none": each_word}.get(scheme, find_entities)
            table = type_table(count_all_entities(predicted_tags(outputs), expected, find))
            with open(directory / f"{name}_types.tsv", "w", newline="", encoding="utf-8") as stream:
                csv.writer(stream, delimiter="\t").writerows(table)
            lines = ("".join(f"{value:>10}" for value in row[1:5]) + f"  {row[0]}" for row in table)
            scores.note_low_precision(table, name, weighted_by)
            logging.info("%s, by type:\n%s", name, "\n".join(lines))
        return path

    counts = {"sentences": len(sentences)}
    return Split(name, features, score if is_labeled else None, write, counts=counts)


def each_word(tags: Sequence[str]) -> list[Entity]:
    """Returns an entity for each word, of tags that mark none, such as parts of speech."""
    return [Entity(tag, index, index + 1) for index, tag in enumerate(tags)]


class TaggedWord(NamedTuple):
    """A word, its tag, and the tag's probability."""

    word: str
    tag: str
    probability: float


class TaggedEntity(NamedTuple):
    """An entity: type, text, characters `[start, end)`, and the mean probability of its tags."""

    type: str
    text: str
    start: int
    end: int
    probability: float


class Tagging(NamedTuple):
    """The result of `PretrainedModel.tag`."""

    words: list[TaggedWord]
    entities: list[TaggedEntity]


def text_features(
    texts: Sequence[SplitText],
    documents: Sequence[object] | None,
    tokenizer: Tokenizer,
    max_seq_length: int,
) -> tuple[list[ModelInput], list[np.ndarray]]:
    """Returns features of texts, and the positions in each that predict its words.

    With `documents`, the document of each text, texts of one document are each other's context.
    """
    sentences = [
        Sentence([text[start:end] for start, end in spans], [], None, document)
        for (text, spans), document in zip(texts, documents or range(len(texts)), strict=True)
    ]
    features, positions, _ = tagging_features(
        sentences, (), tokenizer, max_seq_length, document_context=documents is not None
    )
    return features, positions


def describe_texts(
    texts: Sequence[SplitText],
    positions: Sequence[np.ndarray],
    outputs: Outputs,
    labels: Sequence[str],
    scheme: str | None,
) -> list[Tagging]:
    """Returns the tags of the words of each text, and the entities that they mark.

    `outputs` are those of the `text_features`. With `scheme` "none", tags mark no entities. In
    plain labels (O, PER, LOC), also of an imported head (`scheme` None), a run of equal tags other
    than O is an entity.
    """
    find = find_runs if are_plain(labels) else find_entities
    tags, described = best_tags(outputs, positions, labels), []
    for text, spans in texts:
        words = [TaggedWord(text[i:j], *next(tags)) for i, j in spans]
        found = [] if scheme == "none" else find([word.tag for word in words])
        described.append(Tagging(words, describe_entities(found, words, text, spans)))
    return described


def describe_entities(
    entities: Iterable[Entity],
    words: Sequence[TaggedWord],
    text: str,
    spans: Sequence[tuple[int, int]],
) -> list[TaggedEntity]:
    """Returns entities with their text and probability; `spans` are the characters of words."""
    described = []
    for entity in entities:
        start, end = spans[entity.start][0], spans[entity.end - 1][1]
        members = words[entity.start : entity.end]
        probability = statistics.fmean(word.probability for word in members)
        described.append(TaggedEntity(entity.type, text[start:end], start, end, probability))
    return described


PREDICT_OPTIONS = {"word_column": 0, "tag_column": -1, "tags": ""}


def get_predictor(trained: TrainedHead, options: Mapping, given: Set[str]) -> "TagPredictor":
    """Returns the predictor of a head that tags words."""
    return TagPredictor(trained, options)


class TagPredictor:
    """Tags the words of files of columns or JSONL; see `bert_jax.tasks.task.Predictor`.

    An example is a sentence, or for a head with document_context a document, in a list.
    """

    def __init__(self, trained: TrainedHead, options: Mapping):
        head = trained.settings
        self.writers = {".jsonl": write_json_blocks, ".txt": write_columns, ".conll": write_columns}
        self.notes: dict[str, int] = collections.Counter()
        self._trained, self._options = trained, options
        self._labels = tuple(head["labels"])
        self._scheme = head.get("scheme") or scheme_of_labels(self._labels)
        self._document_context = bool(head.get("document_context"))
        self._positions: list[np.ndarray] = []  # In the block whose features were built last.
        self._find = find_runs if are_plain(self._labels) else find_entities
        self._counts = [(Counter(), Counter(), Counter()) for _ in range(2)]  # Loose and strict.
        self._num_scored = self._num_words = self._num_correct = 0

    def find_inputs(self, directory: pathlib.Path) -> list[tuple[pathlib.Path, str]]:
        paths = files_with_suffix(directory, (".txt", ".conll", ".conllu", ".tsv", ".jsonl"))
        return [(path, f"{path.stem}.jsonl") for path in paths]

    def read(self, path: str | pathlib.Path) -> Iterator[list[Sentence]]:
        if pathlib.Path(path).suffix in (".csv", ".json"):
            expected = 'words and their columns, or a .jsonl file of {"tokens": [...]}'
            raise ValueError(f"{path}: expected {expected}")
        word_column, tag_column, tags_key = (self._options[name] for name in PREDICT_OPTIONS)
        columns = word_column, tag_column, 2
        sentences = iterate_sentences(
            path, *columns, tags_key, self._labels, self._labels, counts=self.notes
        )
        if not self._document_context:
            yield from ([sentence] for sentence in sentences)
            return
        for _, document in itertools.groupby(sentences, operator.attrgetter("document")):
            yield list(document)

    def features(self, examples: Sequence[list[Sentence]]) -> list[ModelInput]:
        features, self._positions = [], []
        for document in examples if self._document_context else [list(chain(*examples))]:
            unlabeled = [sentence._replace(tags=None) for sentence in document]
            self.notes["sentences without words"] += sum(not each.words for each in unlabeled)
            found, positions, counts = tagging_features(
                unlabeled,
                self._labels,
                self._trained.tokenizer,
                self._trained.max_seq_length,
                self._document_context,
            )
            features += found
            self._positions += positions
            self.notes["words truncated"] += counts["words truncated"]
        return features

    def describe(self, examples: Sequence[list[Sentence]], outputs: Outputs) -> list[dict]:
        tags, lines = best_tags(outputs, self._positions, self._labels), []
        for sentence in chain(*examples):
            text, spans = sentence.split_text or split_words(sentence.words)
            words = [TaggedWord(word, *next(tags)) for word in sentence.words]
            predicted = [word.tag for word in words]
            line = {"text": text} if sentence.split_text else {}
            line |= {"tokens": sentence.words, "prediction": predicted}
            if sentence.tags is not None:
                line["tags"] = sentence.tags
                self._score(predicted, sentence.tags)
            line["probabilities"] = [word.probability for word in words]
            if self._scheme != "none":
                entities = describe_entities(self._find(predicted), words, text, spans)
                line["entities"] = [entity._asdict() for entity in entities]
            lines.append(line)
        return lines

    def _score(self, predicted: list[str], tags: list[str]) -> None:
        """Adds a sentence to the scores, if the head has all of its tags."""
        expected = list(tags)
        if self._scheme != "none" and not (are_plain(tags) and self._scheme != "io"):
            find = find_runs if are_plain(tags) else find_entities
            expected = convert_tags(tags, self._scheme, find)
        if not set(expected) <= set(self._labels):
            self.notes["sentences with a tag that the head does not have, not scored"] += 1
            return
        self._num_scored += 1
        self._num_words += len(expected)
        self._num_correct += sum(map(operator.eq, predicted, expected))
        if self._scheme != "none":
            loose, strict = self._counts
            if self._scheme == "io":  # Any sequence of plain tags is legal.
                for counts in self._counts:
                    count_entities(counts, find_runs(predicted), find_runs(expected))
                return
            count_entities(loose, find_entities(predicted), find_entities(expected))
            legal = (find_strict_entities(tags, self._scheme) for tags in (predicted, expected))
            count_entities(strict, *legal)

    def scores(self) -> dict[str, float]:
        if not self._num_scored:
            return {}
        scores = {"accuracy": self._num_correct / max(self._num_words, 1)}
        if self._scheme != "none":
            loose, strict = map(scores_of_counts, self._counts)
            scores = loose | {"strict_f1": strict["f1"]} | scores
        return scores | {"sentences": self._num_scored}


def write_columns(path: pathlib.Path, blocks: Iterable[Sequence[dict]]) -> None:
    """Writes each word, its tag if known and the predicted tag in a line, separated by tabs.

    A blank line ends each sentence.
    """
    with open(path, "w", encoding="utf-8") as stream:
        for line in chain.from_iterable(blocks):
            names = ("tokens", "tags", "prediction")
            for fields in zip(*(line[name] for name in names if name in line), strict=True):
                stream.write("\t".join(fields) + "\n")
            stream.write("\n")
