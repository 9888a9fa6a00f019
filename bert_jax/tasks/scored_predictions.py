"""Reads the predictions that a run has written, as examples whose score can be resampled."""

import csv
import dataclasses
import functools
import json
import pathlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import scipy

from bert_jax.tasks import glue, scores, tables
from bert_jax.tasks.labels import positive_of_two
from bert_jax.tasks.squad import read_questions
from bert_jax.tasks.squad_scores import scores_by_question
from bert_jax.tasks.tagging_scores import count_entities, find_entities
from bert_jax.tasks.text_classification import (
    ERRORS,
    RANKING_METRICS,
    SCORES,
    TWO_CLASS_METRICS,
    one_hot,
)

MAX_DIFFERENCE = 1e-3
"""Of a score from the files of predictions and in `result.json`, which rounding may cause."""
PREDICTED = ("prediction", "probabilities", "num_other_labels")
"""Keys of a line of predictions that are the model's; the others are the example's."""


@dataclasses.dataclass(frozen=True)
class ScoredPredictions:
    """What a model predicted for labeled examples.

    Attributes:
      examples: what the model was given and its label, in the order of the file: equal for runs
        that predicted the same examples.
      score: indices of examples, int `[any]`, some of them repeated -> their score.
      is_correct: bool `[examples]`, of one class for each; None where an example is not just right
        or wrong.
    """

    examples: Sequence
    score: Callable[[np.ndarray], float]
    is_correct: np.ndarray | None = None


def read_scored(
    predictions: pathlib.Path, split: str, metric: str, settings: Mapping
) -> ScoredPredictions:
    """Reads the predictions of a labeled split. Raises ValueError or OSError if it cannot.

    Args:
      predictions: the folder `predictions` of a run.
      split: such as "dev".
      metric: the name of a score of the split, such as "accuracy".
      settings: of the run, in its `config.json`.
    """
    queries, tags = predictions / f"{split}_queries.tsv", predictions / f"{split}.txt"
    answers, lines = predictions / split / "predictions.json", predictions / f"{split}.jsonl"
    if queries.exists():
        return _read_queries(queries, metric)
    if tags.exists():
        return _read_tags(tags, metric)
    if answers.exists():
        return _read_answers(answers, split, metric, settings)
    if not lines.exists():
        raise FileNotFoundError(f"{predictions} has no predictions of {split}")
    return _read_lines(lines, metric, settings)


def _read_lines(path: pathlib.Path, metric: str, settings: Mapping) -> ScoredPredictions:
    """Reads a line for each example, with a class, a set of labels or a value."""
    lines = [values for values, _ in tables.read_objects(path)]
    if not all("label" in line and "prediction" in line for line in lines):
        raise ValueError(f"{path}: expected lines with a label and a prediction")
    examples = [
        {name: value for name, value in line.items() if name not in PREDICTED} for line in lines
    ]
    columns = [[line[name] for line in lines] for name in ("prediction", "label")]
    first = columns[1][0]
    if isinstance(first, list):
        names = settings["head"]["labels"]  # The mean over labels counts those that do not occur.
        functions = _f1_of_sets(*(_label_table(path, column, names) for column in columns))
        return ScoredPredictions(examples, _function_of(path, metric, functions))
    if not isinstance(first, str):
        predicted, expected = (np.array(column, np.float64) for column in columns)
        function = _function_of(path, metric, SCORES | ERRORS)
        return ScoredPredictions(examples, lambda rows: function(predicted[rows], expected[rows]))
    names, codes = np.unique(columns, return_inverse=True)
    predicted, expected = np.reshape(codes, (2, -1))
    is_correct = predicted == expected
    if metric == "accuracy":  # The mean, without comparing them for each sample.
        return ScoredPredictions(examples, lambda rows: float(is_correct[rows].mean()), is_correct)
    if metric == "macro_f1":  # The mean over all these classes, also those that a sample lacks.
        functions = _f1_of_sets(one_hot(predicted, len(names)), one_hot(expected, len(names)))
        return ScoredPredictions(examples, functions[metric], is_correct)
    if metric in RANKING_METRICS:
        labels = settings["head"]["labels"]
        index = positive_of_two(labels)
        positive, negative = labels[index], labels[1 - index]
        # As margins: probabilities near 1 would be equal.
        margins = np.array(
            [
                np.log(max(line["probabilities"][positive], 1e-300))
                - np.log(max(line["probabilities"][negative], 1e-300))
                for line in lines
            ]
        )
        is_positive = names[expected] == positive
        rank = RANKING_METRICS[metric]
        return ScoredPredictions(
            examples, lambda rows: rank(margins[rows], is_positive[rows]), is_correct
        )
    functions = SCORES | TWO_CLASS_METRICS
    dataset = glue.DATASETS.get(settings.get("data", {}).get("name"))
    if dataset and "f1" in dataset.metrics:
        positive = [*names, dataset.labels[1]].index(dataset.labels[1])
        functions["f1"] = functools.partial(scores.f1, positive=positive)
    function = _function_of(path, metric, functions)
    return ScoredPredictions(
        examples, lambda rows: function(predicted[rows], expected[rows]), is_correct
    )


def _label_table(
    path: pathlib.Path, sets: Sequence[Sequence[str]], names: Sequence[str]
) -> scipy.sparse.csr_array:
    """Returns int `[examples, labels]`, with 1 where an example has a label."""
    index = {name: number for number, name in enumerate(names)}
    pairs = [(row, name) for row, labels in enumerate(sets) for name in dict.fromkeys(labels)]
    unknown = {name for _, name in pairs} - index.keys()
    if unknown:
        raise ValueError(f"{path}: label {min(unknown)!r} is not in head.labels of config.json")
    places = [row for row, _ in pairs], [index[name] for _, name in pairs]
    return scipy.sparse.csr_array((np.ones(len(pairs), int), places), (len(sets), len(names)))


def _f1_of_sets(
    predicted: scipy.sparse.csr_array, expected: scipy.sparse.csr_array
) -> dict[str, Callable[[np.ndarray], float]]:
    """Returns the micro and macro F1 of rows, as in `SCORES`, of int `[examples, labels]`.

    What they add up is a sum over the examples, weighted by how often each occurs in the sample.
    """
    totals, correct = predicted + expected, predicted.multiply(expected).tocsr()

    def sums(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        weights = np.bincount(rows, minlength=totals.shape[0])
        return weights @ totals, weights @ correct

    def micro_f1(rows: np.ndarray) -> float:
        total, num_correct = (counts.sum() for counts in sums(rows))
        return float(2 * num_correct / max(total, 1))

    def macro_f1(rows: np.ndarray) -> float:
        total, num_correct = sums(rows)
        return float(np.mean(2 * num_correct / np.maximum(total, 1)))

    return {"micro_f1": micro_f1, "macro_f1": macro_f1}


def _read_tags(path: pathlib.Path, metric: str) -> ScoredPredictions:
    """Reads words with their tags, expected and predicted; an example is a sentence.

    A blank line ends each sentence, also one without words.
    """
    sentences: list[list[list[str]]] = [[]]
    with open(path, encoding="utf-8", newline="\n") as stream:
        for line in stream:
            fields = line.removesuffix("\n")
            if fields:
                sentences[-1].append(fields.split("\t" if "\t" in fields else " "))
            else:
                sentences.append([])
    if not sentences[-1]:  # The last one begins after the last blank line.
        sentences.pop()
    examples, counts = [], []
    for rows in sentences:
        if any(len(row) != 3 for row in rows):
            raise ValueError(f"{path}: expected a word, its tag and the predicted tag in each line")
        words, expected, predicted = zip(*rows, strict=True) if rows else ((), (), ())
        entities = Counter(), Counter(), Counter()
        count_entities(entities, find_entities(predicted), find_entities(expected))
        num_correct = sum(map(str.__eq__, predicted, expected))
        examples.append((words, expected))
        counts.append([*(each[""] for each in entities), num_correct, len(words)])
    table = np.array(counts)

    def entity_f1(rows: np.ndarray) -> float:
        predicted, expected, correct = table[rows, :3].sum(axis=0)
        return float(2 * correct / max(predicted + expected, 1))

    def accuracy(rows: np.ndarray) -> float:
        correct, words = table[rows, 3:].sum(axis=0)
        return float(correct / max(words, 1))

    functions = {"f1": entity_f1, "accuracy": accuracy}
    return ScoredPredictions(examples, _function_of(path, metric, functions))


def _read_answers(
    path: pathlib.Path, split: str, metric: str, settings: Mapping
) -> ScoredPredictions:
    """Reads the texts that answer questions, whose own answers are in the data file."""
    texts = json.loads(path.read_text(encoding="utf-8"))
    data, has_null = settings["data"], settings["head"]["null_answers"]
    source = tables.with_split(data[split], split)
    questions = read_questions(source, has_null, data.get("data_dir", ""), empty_texts=True)
    gold = {
        question.id: [text for text, _ in question.answers]
        for question in questions
        if question.id in texts and question.answers is not None
    }
    if gold.keys() != texts.keys():
        raise ValueError(f"{path}: expected an answer to questions of {source} only")
    values = _function_of(path, metric, scores_by_question(gold, texts, has_null))
    return _means(list(gold.items()), np.array([values[id_] for id_ in gold]))


def _read_queries(path: pathlib.Path, metric: str) -> ScoredPredictions:
    """Reads the scores of each query; an example is a query, of which only the id is known."""
    with open(path, encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream, delimiter="\t"))
    _function_of(path, metric, rows[0])
    return _means([row["id"] for row in rows], np.array([float(row[metric]) for row in rows]))


def _means(examples: Sequence, values: np.ndarray) -> ScoredPredictions:
    return ScoredPredictions(examples, lambda rows: float(values[rows].mean()))


def _function_of(path: pathlib.Path, metric: str, functions: Mapping):
    """Returns the entry of a metric. Raises ValueError if `path` does not have what it needs."""
    if metric not in functions:
        raise ValueError(f"{path} has no {metric}: expected one of {', '.join(functions)}")
    return functions[metric]
