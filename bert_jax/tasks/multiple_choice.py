"""Multiple choice: SWAG (Zellers et al., 2018; section 4.4 of the paper), and your own in JSONL.

A line of JSONL is `{"context": ..., "question": ..., "choices": [...], "label": 0}`, with a
context, a question, or both.
"""

import itertools
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict
from scipy.special import softmax

from bert_jax.data.features import ModelInput
from bert_jax.data.tfds import tfds_source
from bert_jax.model import heads
from bert_jax.tasks.labels import read_labels
from bert_jax.tasks.scores import accuracy
from bert_jax.tasks.tables import (
    Record,
    check_columns,
    check_empty_texts,
    drop_blank_rows,
    files_from_config,
    find_unused_keys,
    id_field,
    iterate_objects,
    iterate_rows,
    note_unused_columns,
    note_unused_keys,
    read_table,
    text_field,
    with_ids,
    with_split,
)
from bert_jax.tasks.task import Outputs, Split, Task, TrainedHead, limit_examples
from bert_jax.tasks.text_classification import (
    ClassScores,
    TextPredictor,
    make_split,
    text_features,
)
from bert_jax.tokenizers.tokenizer import Tokenizer

ENDINGS = ("ending0", "ending1", "ending2", "ending3")
CHOICES = ("0", "1", "2", "3")
UNLABELED = {"-1": "", "-1.0": ""}
COLUMNS = ("sent1", "sent2", *ENDINGS)
TEXTS = ("context", "question")
"""Keys of the texts of an example with "choices"; the first that it has is the first of a pair."""
FILES = {"train": "train.csv", "dev": "val.csv", "test": "test.csv"}


class Ranked(NamedTuple):
    """A candidate, its index in the input, its logit, and the softmax of the logits."""

    text: str
    index: int
    score: float
    probability: float


def rank_candidates(candidates: Sequence[str], scores: np.ndarray) -> list[Ranked]:
    """Returns the candidates, best first, given the logit of each."""
    probabilities = softmax(scores).tolist() if len(candidates) else []
    columns = candidates, itertools.count(), scores.tolist(), probabilities
    return sorted(map(Ranked, *columns), key=lambda candidate: -candidate.score)


def get_task(config: ConfigDict, tokenizer: Tokenizer) -> Task:
    """Reads choices in JSONL, or SWAG from `config.data.directory`, CSV files or TFDS.

    See configs/finetune/multiple_choice.py.
    """
    data, directory = config.data, config.data.directory
    is_own = bool(data.train or data.dev or data.test)
    if is_own == bool(directory):
        files = "the directory of train.csv and val.csv, or a prepared TFDS set"
        own = "or config.data.train=FILE.jsonl and config.data.dev=FILE.jsonl, not both"
        raise ValueError(f"set config.data.directory=DIR or tfds:NAME, {files}, {own}")
    return read_own(config, tokenizer) if is_own else read_swag(config, tokenizer)


def read_own(config: ConfigDict, tokenizer: Tokenizer) -> Task:
    """Reads the files that `config.data` names; all examples have the same number of choices."""
    data, files, notes = config.data, files_from_config(config.data), {}
    train, splits, number, first = [], [], 0, ""
    for name, path in files.items():
        records = with_ids(read_choices(path, data.data_dir, name, notes), "")
        for record in records:
            choices = record.columns["choices"]
            number, first = number or len(choices), first or record.location
            if len(choices) != number:
                raise ValueError(
                    f"{record.location}: {len(choices)} choices, but {number} in {first}: give all "
                    "examples of a run the same number; a trained head predicts any number"
                )
        labels = read_labels(records, "label", choice_names(number), name == "train")
        empty = [(each.location, "a text") for each in records if has_empty_choice(each.columns)]
        check_empty_texts(name, empty, labels[0] is not None, bool(data.train), notes)
        records, labels = (limit_examples(each, config, name, notes) for each in (records, labels))
        if labels[0] is None:
            notes[f"{name} examples without labels, so not scored"] = len(labels)
        pairs = [pair for record in records for pair in pair_with_choices(record.columns)]
        features, truncated = text_features(pairs, labels, tokenizer, config.max_seq_length)
        notes[f"{name} examples truncated"] = truncated
        if name == "train":
            train = features
        else:
            names = choice_names(number)
            splits.append(make_split(name, features, records, names, {"accuracy": accuracy}))
    return Task(
        head=heads.MULTIPLE_CHOICE,
        labels=("score",),
        train=train,
        splits=tuple(splits),
        metric="dev/accuracy",
        notes=notes,
        files=files,
    )


def read_choices(
    source: str | pathlib.Path, data_dir: str, what: str, notes: dict[str, int]
) -> list[Record]:
    """Reads examples with "choices"; their columns are the texts, the choices, and the label.

    `notes` counts the other keys of `what`. Raises ValueError for malformed examples.
    """
    objects = list(iterate_rows(source, data_dir))
    unused = find_unused_keys(objects, {*TEXTS, "choices", "label"})
    note_unused_keys({key: count for key, (count, _) in unused.items()}, f"{what} lines", notes)
    return [choice_record(*each) for each in objects]


def choice_record(values: dict, location: str) -> Record:
    """Returns the record of an example with "choices". Raises ValueError if it is malformed."""
    choices = values.get("choices")
    is_list = isinstance(choices, list) and all(isinstance(each, str) for each in choices)
    if not is_list or len(choices) < 2:
        expected = "a list of two or more texts"
        raise ValueError(f"{location}: 'choices' is {choices!r:.60}: expected {expected}")
    columns = {name: text_field(values, name, location, True) for name in TEXTS if name in values}
    if not columns:
        expected = "a 'context', a 'question' or both"
        raise ValueError(f"{location}: expected {expected}; found {', '.join(values)}")
    label = values.get("label")
    if isinstance(label, bool) or not isinstance(label, int | str | None):
        expected = f"the index of the correct choice, 0 to {len(choices) - 1}"
        raise ValueError(f"{location}: 'label' is {label!r:.60}: expected {expected}")
    columns |= {"choices": choices} | ({} if label is None else {"label": str(label)})
    return Record(columns, location)


def choice_names(number: int) -> tuple[str, ...]:
    """Returns the names of choices in the predictions: their indices."""
    return tuple(map(str, range(number)))


def pair_with_choices(row: Mapping) -> list[tuple[str, str]]:
    """Returns the first text with the second text, if there are two, and each choice."""
    first, *rest = [row[name] for name in TEXTS if name in row]
    return [(first, " ".join([*rest, choice]).lstrip()) for choice in row["choices"]]


def has_empty_choice(row: Mapping) -> bool:
    texts = [row[name] for name in TEXTS if name in row]
    return not all(text.strip() for text in (*texts, *row["choices"]))


def read_swag(config: ConfigDict, tokenizer: Tokenizer) -> Task:
    """Reads the splits of `config.data.directory`."""
    directory = config.data.directory
    is_tfds, folder = directory.startswith("tfds:"), pathlib.Path(directory)
    files, notes = {}, {}

    def read(split: str) -> Split:
        """Reads a split; a feature pairs sent1 with sent2 and each ending."""
        files[split] = with_split(directory, split) if is_tfds else str(folder / FILES[split])
        records = read_table(files[split], COLUMNS, data_dir=config.data.data_dir)
        records = drop_blank_rows(records, "label", split, notes)
        check_endings(records[0])
        note_unused_columns(records, {*COLUMNS, "label"}, split, notes)
        # Checks all labels, also of examples that are then left out.
        labels = read_labels(records, "label", CHOICES, split != "test", aliases=UNLABELED)
        records, labels = (limit_examples(each, config, split, notes) for each in (records, labels))
        records = with_ids(records, "")
        rows = [record.columns for record in records]
        pairs = [pair for row in rows for pair in pair_with_endings(row)]
        features, truncated = text_features(pairs, labels, tokenizer, config.max_seq_length)
        notes[f"{split} examples truncated"] = truncated
        notes[f"{split} examples with an empty text"] = sum(map(has_empty_text, rows))
        return make_split(split, features, records, CHOICES, {"accuracy": accuracy})

    available = {split for split, file in FILES.items() if (folder / file).exists()}
    if is_tfds:
        info = tfds_source(directory, "all", config.data.data_dir).dataset_info
        available = {split.replace("validation", "dev") for split in info.splits}
    available.add("dev")
    splits = [read(split) for split in ("dev", "test") if split in available]
    return Task(
        head=heads.MULTIPLE_CHOICE,
        labels=("score",),
        train=read("train").features,
        splits=tuple(splits),
        metric="dev/accuracy",
        notes=notes,
        files=files,
    )


def check_endings(record: Record) -> None:
    """Raises ValueError for endings besides `ENDINGS`, which would be left out."""
    found = [name for name in record.columns if re.fullmatch(r"ending\d+", name)]
    if more := sorted(set(found) - set(ENDINGS)):
        raise ValueError(
            f"{record.location}: {', '.join(more)}: expected the four endings {', '.join(ENDINGS)}"
        )


def pair_with_endings(row: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns sent1 with sent2 and each ending."""
    # sent2 may be empty, and byte-level BPE encodes a word differently after a space.
    return [(row["sent1"], f"{row['sent2']} {row[name]}".lstrip()) for name in ENDINGS]


def has_empty_text(row: Mapping[str, str]) -> bool:
    return not all(row[name].strip() for name in ("sent1", *ENDINGS))


PREDICT_OPTIONS = {"label": "label", "id": "", "header_lines": 1}


def get_predictor(trained: TrainedHead, options: Mapping, given: Set[str]) -> "ChoicePredictor":
    """Returns the predictor of a head that chooses the ending of a story."""
    settings = {**trained.settings, "labels": CHOICES}
    columns = {"text": "sent1", "text_pair": "sent2", **options}
    scores = ClassScores(settings, {"accuracy": accuracy}, {})
    trained = trained._replace(settings=settings)
    return ChoicePredictor(trained, columns, scores, "label" in given, UNLABELED)


class ChoicePredictor(TextPredictor):
    """Chooses endings of SWAG, or in JSONL any number of choices; each choice is a feature."""

    def read(self, path: str | pathlib.Path) -> Iterator[Record]:
        if pathlib.Path(path).suffix == ".jsonl" and "choices" in next(iterate_objects(path))[0]:
            label, id_ = self._options["label"], self._options["id"]
            for number, (values, location) in enumerate(iterate_objects(path)):
                values = values | {"label": values.get(label)}
                record = choice_record(values, location)
                yield record._replace(id=id_field(values, location, number, id_ or "id"))
            return
        for record in super().read(path):
            check_columns([record], COLUMNS)
            check_endings(record)
            yield record

    def features(self, examples: Sequence[Record]) -> list[ModelInput]:
        rows = [record.columns for record in examples]
        pairs, empty = [], 0
        for row in rows:
            is_own = "choices" in row
            pairs += pair_with_choices(row) if is_own else pair_with_endings(row)
            empty += has_empty_choice(row) if is_own else has_empty_text(row)
        self.notes["examples with an empty text"] += empty
        length, unknown = self._trained.max_seq_length, [None] * len(pairs)
        features, truncated = text_features(pairs, unknown, self._trained.tokenizer, length)
        self.notes[f"endings truncated to {length} tokens"] += truncated
        return features

    def describe(self, examples: Sequence[Record], outputs: Outputs) -> list[dict]:
        scores, lines, start = np.ravel(outputs), [], 0
        for number, group in itertools.groupby(examples, number_of_choices):
            group = list(group)
            end = start + number * len(group)
            self._labels = choice_names(number)
            lines += super().describe(group, list(scores[start:end].reshape(-1, number)))
            start = end
        return lines


def number_of_choices(record: Record) -> int:
    return len(record.columns.get("choices", ENDINGS))
