"""Questions out of SQuAD's official JSON, or TFDS."""

import json
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

TFDS_SPLITS = {"dev": "validation"}
"""SQuAD's names for splits -> those of TFDS, where they differ."""


class Question(NamedTuple):
    """A question about a context.

    Attributes:
      answers: (text, its first character in the context) each; none if the question has no answer;
        None if that is not known.
      place: where it was read, for messages.
    """

    id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...] | None
    place: str


def read_questions(source: str, split: str, null_answers: bool) -> list[Question]:
    """The questions of a file, or with `source` "tfds:NAME" of a split prepared beforehand.

    Args:
      null_answers: whether questions may have no answer (version 2.0).

    Raises:
      FileNotFoundError: no such file.
      ValueError: not SQuAD's JSON, an id twice, an empty question or context, answers to some
        questions only, no answer to one that needs it, answers to one that is impossible, or TFDS
        is not installed.
    """
    if source.startswith("tfds:"):
        questions = list(_read_tfds(source, TFDS_SPLITS.get(split, split)))
    else:
        questions = list(_read_json(pathlib.Path(source)))
    if not questions:
        raise ValueError(f"{source} holds no questions")
    places: dict[str, str] = {}
    labeled = questions[0].answers is not None
    for question in questions:
        if question.id in places:
            raise ValueError(f"{question.place}: its id stands at {places[question.id]} already")
        places[question.id] = question.place
        for name in ("question", "context"):
            if not getattr(question, name).strip():
                raise ValueError(f"{question.place}: the {name} is empty")
        if (question.answers is not None) != labeled:
            raise ValueError(
                f"{question.place}: {'no' if labeled else 'has'} answers, unlike the first "
                "question of the file: give all, or none for predictions without a score"
            )
        if question.answers == () and not null_answers:
            raise ValueError(
                f"{question.place}: no answer; SQuAD 2.0 allows that: "
                "--config=configs/finetune/squad.py:v2"
            )
    return questions


def _read_json(path: pathlib.Path) -> Iterator[Question]:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: expected SQuAD's JSON, or tfds:NAME")
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON in UTF-8: {error}") from None
    for a, article in enumerate(_get(content, "data", list, f"{path}"), start=1):
        place = f"{path}, article {a}"
        for p, paragraph in enumerate(_get(article, "paragraphs", list, place), start=1):
            place = f"{path}, article {a}, paragraph {p}"
            context = _get(paragraph, "context", str, place)
            for q, entry in enumerate(_get(paragraph, "qas", list, place), start=1):
                place = f"{path}, article {a}, paragraph {p}, question {q}"
                id_ = _get(entry, "id", str, place)
                place += f" (id {id_})"
                answers = None
                given = entry.get("is_impossible") is not None
                if given and _get(entry, "is_impossible", bool, place):
                    if entry.get("answers"):
                        raise ValueError(
                            f"{place}: is_impossible, but it has answers: take one of them away"
                        )
                    answers = ()
                elif "answers" in entry:
                    answers = tuple(
                        (_get(answer, "text", str, place), _get(answer, "answer_start", int, place))
                        for answer in _get(entry, "answers", list, place)
                    )
                yield Question(id_, _get(entry, "question", str, place), context, answers, place)


def _get(holder, name: str, kind: type, place: str):
    """`holder[name]`, which is a `kind`."""
    value = holder.get(name) if isinstance(holder, dict) else None
    if not isinstance(value, kind):
        raise ValueError(
            f"{place}: expected {name!r}, a {kind.__name__}, as in SQuAD's JSON; found "
            f"{type(value).__name__ if value is not None else 'none'}"
        )
    return value


def _read_tfds(source: str, split: str) -> Iterator[Question]:
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise ValueError(
            f"{source} needs TFDS: pip install tensorflow-datasets, and prepare the data with "
            "file_format=array_record"
        ) from error
    name = source.removeprefix("tfds:")
    for number, example in enumerate(tensorflow_datasets.data_source(name, split=split)):
        answers = example["answers"]
        pairs = zip(answers["text"], answers["answer_start"], strict=True)
        id_, question, context = (
            bytes(example[field]).decode() for field in ("id", "question", "context")
        )
        yield Question(
            id_,
            question,
            context,
            tuple((bytes(text).decode(), int(start)) for text, start in pairs),
            f"{source}, {split} {number} (id {id_})",
        )
