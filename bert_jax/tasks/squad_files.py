"""Reads questions about contexts: SQuAD's official JSON, your own JSONL, or TFDS."""

import json
import pathlib
from collections.abc import Iterator
from itertools import zip_longest
from typing import NamedTuple

from bert_jax.tasks.labels import check_labeled
from bert_jax.tasks.tables import check_unique, read_objects, read_text


class Question(NamedTuple):
    """A question about a context, and its location in the file, for error messages."""

    id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...] | None  # (text, answer_start) pairs, if known.
    location: str


def read_questions(source: str, null_answers: bool, data_dir: str = "") -> list[Question]:
    """Reads questions from a `.jsonl` file (one per line), "tfds:NAME#SPLIT" or official JSON.

    Without `null_answers`, as in version 1.1, each question needs an answer. Raises
    FileNotFoundError if the file is missing, and ValueError if it is malformed.
    """
    has_lines = source.startswith("tfds:") or source.endswith(".jsonl")
    objects = read_objects(source, data_dir) if has_lines else _read_json(pathlib.Path(source))
    questions = check_unique([_question(*each, number) for number, each in enumerate(objects)])
    if not questions:
        raise ValueError(f"{source} holds no questions")
    check_labeled(questions, [question.answers for question in questions], "answers", False)
    for question in questions:
        if question.answers == () and not null_answers:
            fix = "only SQuAD 2.0 allows: --config=configs/finetune/squad.py:v2"
            raise ValueError(f"{question.location}: no answer, which {fix}")
    return questions


def _read_json(path: pathlib.Path) -> Iterator[tuple[dict, str]]:
    text = read_text(path, "SQuAD's JSON, a .jsonl file, or tfds:NAME")
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; name a file of lines .jsonl") from None
    for a, article in enumerate(_get(content, "data", list, f"{path}"), start=1):
        location = f"{path}, article {a}"
        for p, paragraph in enumerate(_get(article, "paragraphs", list, location), start=1):
            location = f"{path}, article {a}, paragraph {p}"
            context = _get(paragraph, "context", str, location)
            for q, entry in enumerate(_get(paragraph, "qas", list, location), start=1):
                location = f"{path}, article {a}, paragraph {p}, question {q}"
                id_ = _get(entry, "id", str, location)
                yield entry | {"context": context}, f"{location} (id {id_})"


def _question(values: dict, location: str, number: int) -> Question:
    for name in ("question", "context"):
        if not _get(values, name, str, location).strip():
            raise ValueError(f"{location}: the {name} is empty")
    answers = values.get("answers")
    if isinstance(answers, dict):  # A dict of lists, as in TFDS and Hugging Face datasets.
        lists = [_get(answers, name, list, location) for name in ("text", "answer_start")]
        answers = [{"text": text, "answer_start": start} for text, start in zip_longest(*lists)]
    if answers is not None:
        answers = tuple(
            (_get(answer, "text", str, location), _get(answer, "answer_start", int, location))
            for answer in _get({"answers": answers}, "answers", list, location)
        )
    if values.get("is_impossible") and _get(values, "is_impossible", bool, location):
        if answers:
            raise ValueError(f"{location}: is_impossible, but it has answers: remove one")
        answers = ()
    id_ = str(values.get("id", number))
    return Question(id_, values["question"], values["context"], answers, location)


def _get(holder: object, name: str, expected: type, location: str):
    """Returns `holder[name]`; raises ValueError unless it has the type `expected`."""
    value = holder.get(name) if isinstance(holder, dict) else None
    if not isinstance(value, expected):
        actual = "none" if value is None else type(value).__name__
        if isinstance(holder, dict) and name not in holder:
            actual = f"only {', '.join(holder) or 'an empty object'}"
        raise ValueError(f"{location}: expected {name!r}, a {expected.__name__}; found {actual}")
    return value
