"""SQuAD's questions, from the official JSON or from TFDS."""

import json
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

from bert_jax.corpus.readers import import_tfds
from bert_jax.tasks.labels import check_labeled
from bert_jax.tasks.tables import check_unique, read_text


class Question(NamedTuple):
    """A question about a context, and its place in the file, for messages.

    `answers` are texts and the first character of each in the context; () if the question has no
    answer, None if that is unknown.
    """

    id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...] | None
    place: str


def read_questions(source: str, split: str, null_answers: bool) -> list[Question]:
    """Reads the questions of a file, or of a split of the prepared TFDS set "tfds:NAME".

    Without `null_answers`, as in version 1.1, each question needs an answer. Raises
    FileNotFoundError without the file, ImportError without TFDS, and ValueError for anything wrong
    in it.
    """
    if source.startswith("tfds:"):
        questions = list(_read_tfds(source, "validation" if split == "dev" else split))
    else:
        questions = list(_read_json(pathlib.Path(source)))
    if not questions:
        raise ValueError(f"{source} holds no questions")
    check_unique(questions, [each.id for each in questions])
    check_labeled(questions, [each.answers for each in questions], "answers", required=False)
    for question in questions:
        for name in ("question", "context"):
            if not getattr(question, name).strip():
                raise ValueError(f"{question.place}: the {name} is empty")
        if question.answers == () and not null_answers:
            raise ValueError(
                f"{question.place}: no answer, which only SQuAD 2.0 allows: "
                "--config=configs/finetune/squad.py:v2"
            )
    return questions


def _read_json(path: pathlib.Path) -> Iterator[Question]:
    text = read_text(path, "SQuAD's JSON, or tfds:NAME")
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    for a, article in enumerate(_get(content, "data", list, f"{path}"), start=1):
        place = f"{path}, article {a}"
        for p, paragraph in enumerate(_get(article, "paragraphs", list, place), start=1):
            place = f"{path}, article {a}, paragraph {p}"
            context = _get(paragraph, "context", str, place)
            for q, entry in enumerate(_get(paragraph, "qas", list, place), start=1):
                place = f"{path}, article {a}, paragraph {p}, question {q}"
                id_ = _get(entry, "id", str, place)
                place += f" (id {id_})"
                question, answers = _get(entry, "question", str, place), None
                if "answers" in entry:
                    answers = tuple(
                        (_get(answer, "text", str, place), _get(answer, "answer_start", int, place))
                        for answer in _get(entry, "answers", list, place)
                    )
                if entry.get("is_impossible") and _get(entry, "is_impossible", bool, place):
                    if answers:
                        raise ValueError(f"{place}: is_impossible, but it has answers: remove one")
                    answers = ()
                yield Question(id_, question, context, answers, place)


def _get(holder: object, name: str, kind: type, place: str):
    """Returns `holder[name]`; raises ValueError unless it is a `kind`."""
    value = holder.get(name) if isinstance(holder, dict) else None
    if not isinstance(value, kind):
        found = "none" if value is None else type(value).__name__
        raise ValueError(f"{place}: expected {name!r}, a {kind.__name__}; found {found}")
    return value


def _read_tfds(source: str, split: str) -> Iterator[Question]:
    name = source.removeprefix("tfds:")
    for number, example in enumerate(import_tfds(name).data_source(name, split=split)):
        texts = [bytes(example[field]).decode() for field in ("id", "question", "context")]
        answers = zip(example["answers"]["text"], example["answers"]["answer_start"], strict=True)
        answers = tuple((bytes(text).decode(), int(start)) for text, start in answers)
        yield Question(*texts, answers, f"{source}, {split} {number} (id {texts[0]})")
