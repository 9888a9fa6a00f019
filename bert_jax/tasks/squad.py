"""SQuAD 1.1 and 2.0: the span of a context that answers a question, if there is one.

Questions are read from the official JSON, your own JSONL, or TFDS.
"""

import json
import pathlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from absl import logging
from ml_collections import ConfigDict
from scipy.special import softmax

from bert_jax.data.features import ModelInput
from bert_jax.model import heads
from bert_jax.tasks import spans, tables
from bert_jax.tasks.labels import check_labeled
from bert_jax.tasks.spans import Passage, SpanConfig
from bert_jax.tasks.squad_scores import best_null_threshold, evaluate_v1, evaluate_v2
from bert_jax.tasks.tables import field, id_field, text_field
from bert_jax.tasks.task import Outputs, Split, Task, limit_examples
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.bounds import AT_LEAST_1, Bounds, check_bounds

QUESTION_KEYS = ("id", "question", "context", "answers", "is_impossible")
NBEST = ("text", "probability", "start_logit", "end_logit")  # In nbest_predictions.json.


class Question(NamedTuple):
    """A question about a context, and its location in the file, for error messages."""

    id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...] | None  # (text, answer_start) pairs, if known.
    location: str


def get_task(config: ConfigDict, tokenizer: Tokenizer) -> Task:
    """Reads the files named in `config.data`; see configs/finetune/squad.py."""
    data, files = config.data, tables.files_from_config(config.data)
    check_bounds(config, Bounds(1, config.max_seq_length - 4), "data.max_query_length")
    check_bounds(config, AT_LEAST_1, "data.doc_stride", "data.max_answer_length")
    options = {name: data[name] for name in SpanConfig._fields if data.get(name) is not None}
    span_config = SpanConfig(config.max_seq_length, **options)
    head_settings = span_config._asdict()
    tunes_threshold = span_config.null_answers and data.null_threshold is None
    notes: dict[str, int] = {}
    train, splits = [], []
    for name, source in files.items():
        unused: dict[str, int] = {}
        questions = read_questions(source, span_config.null_answers, data.data_dir, True, unused)
        for key, count in unused.items():
            notes[f"{name} lines with {key!r}, which is not used"] = count
        empty = [
            (question.location, f"the {field_name}")
            for question in questions
            for field_name in ("question", "context")
            if not getattr(question, field_name).strip()
        ]
        is_labeled = questions[0].answers is not None
        tables.check_empty_texts(name, empty, is_labeled, bool(data.train), notes)
        questions = limit_examples(questions, config, name, notes)
        pairs = [(question.question, question.context) for question in questions]
        passages = spans.make_passages(pairs, tokenizer, span_config)
        examples = list(zip(questions, passages, strict=True))
        max_answers = 1 if name == "train" else None  # Training uses only the first.
        windows, misplaced = [], []
        for question, passage in examples:
            answers = (question.answers or ())[:max_answers]
            tokens = [spans.locate(answer, passage) for answer in answers]
            misplaced += [question.location] * tokens.count(None)
            is_known = question.answers is not None and tokens[:1] != [None]
            label = tokens[0] if tokens else None
            windows += spans.label_windows(passage, label) if is_known else passage.features
        if misplaced:
            locations = "; ".join(list(dict.fromkeys(misplaced))[:5])
            logging.warning("Answers not at answer_start: %d (%s)", len(misplaced), locations)
        if name != "train":
            notes[f"{name} answers not at answer_start"] = len(misplaced)
            splits.append(make_split(name, examples, windows, head_settings, tunes_threshold))
            continue
        notes["train questions skipped, as the answer is not at answer_start"] = len(misplaced)
        train = [window for window in windows if window.label is not None]
        if not train:
            expected = "training needs one at its answer_start, in characters"
            raise ValueError(f"{questions[0].location}: no question has an answer: {expected}")
    return Task(
        head=heads.SPAN,
        labels=spans.LABELS,
        train=train,
        splits=tuple(splits),
        metric="dev/f1",
        notes=notes,
        head_settings=head_settings,
        tuned=("null_threshold",) if tunes_threshold else (),
        files=files,
    )


def make_split(
    name: str,
    examples: Sequence[tuple[Question, Passage]],
    windows: list[ModelInput],
    head_settings: dict,
    tunes_threshold: bool,
) -> Split:
    """Builds a split that is scored by the official rules and writes the official files.

    Null odds above `head_settings["null_threshold"]` predict no answer. If `tunes_threshold`, the
    dev split chooses the threshold with the best F1.
    """
    null_answers, max_length = head_settings["null_answers"], head_settings["max_answer_length"]
    labeled = [question for question, _ in examples if question.answers is not None]
    gold = {question.id: [text for text, _ in question.answers] for question in labeled}

    def find_answers(outputs: Outputs, n_best: int) -> tuple[dict, dict, dict]:
        """Returns the best answer, the null odds and the ranked spans of each question, by id."""
        texts, odds, nbest, end = {}, {}, {}, 0
        for question, passage in examples:
            start, end = end, end + len(passage.windows)
            ranked = spans.best_spans(passage, outputs[start:end], max_length, n_best)
            null = spans.null_span(outputs[start:end])
            texts[question.id] = passage.text(ranked[0])
            odds[question.id] = null.score - ranked[0].score
            if null_answers:
                ranked = sorted([*ranked, null], key=lambda span: -span.score)
            probabilities = softmax([span.score for span in ranked]).tolist()
            nbest[question.id] = [
                dict(zip(NBEST, (passage.text(span), p, *span[2:]), strict=True))
                for span, p in zip(ranked, probabilities, strict=True)
            ]
        return texts, odds, nbest

    def decide(texts: dict[str, str], odds: dict[str, float]) -> dict[str, str]:
        threshold = head_settings["null_threshold"]
        return {id_: "" if odds[id_] > threshold else text for id_, text in texts.items()}

    def score(outputs: Outputs) -> dict[str, float]:
        texts, odds, _ = find_answers(outputs, 1)
        if not null_answers:
            return evaluate_v1(gold, texts)
        return evaluate_v2(gold, decide(texts, odds), odds)

    def write(outputs: Outputs, directory: pathlib.Path) -> pathlib.Path:
        texts, odds, nbest = find_answers(outputs, spans.N_BEST)
        files = {"predictions": texts, "nbest_predictions": nbest}
        if null_answers:
            files |= {"predictions": decide(texts, odds), "null_odds": odds}
        (directory / name).mkdir(exist_ok=True)
        for stem, content in files.items():
            (directory / name / f"{stem}.json").write_text(
                json.dumps(content, indent=4) + "\n", encoding="utf-8"
            )
        return directory / name / "predictions.json"

    def tune(outputs: Outputs) -> dict[str, float]:
        texts, odds, _ = find_answers(outputs, 1)
        return {"null_threshold": best_null_threshold(gold, texts, odds)}

    def with_settings(tuned: dict) -> Split:
        return make_split(name, examples, windows, head_settings | tuned, tunes_threshold)

    return Split(
        name=name,
        features=windows,
        score=score if gold else None,
        write=write,
        tune=tune if tunes_threshold and gold and name == "dev" else None,
        with_settings=with_settings,
        counts={"questions": len(examples)},
    )


def read_questions(
    source: str,
    null_answers: bool,
    data_dir: str = "",
    empty_texts: bool = False,
    unused: dict[str, int] | None = None,
) -> list[Question]:
    """Reads questions from a `.jsonl` file (one per line), "tfds:NAME#SPLIT" or official JSON.

    Ids may be whole numbers and are read as text. Without `null_answers`, as in version 1.1, each
    question needs an answer, and without `empty_texts`, a text and a context. `unused` receives the
    number of lines of a `.jsonl` file that have each key which nothing reads. Raises
    FileNotFoundError if the file is missing, and ValueError if it is malformed.
    """
    has_objects = source.startswith("tfds:") or source.endswith(".jsonl")
    objects = tables.read_objects(source, data_dir) if has_objects else _read_json(source)
    if source.endswith(".jsonl"):
        for key, (count, location) in tables.find_unused_keys(objects, QUESTION_KEYS).items():
            if key.startswith("answer"):
                expected = 'a list of {"text": ..., "answer_start": ...}'
                raise ValueError(f"{location}: {key!r} is not read: write 'answers', {expected}")
            if unused is not None:
                unused[key] = count
    questions = [_question(*each, number, empty_texts) for number, each in enumerate(objects)]
    if not questions:
        raise ValueError(f"{source} holds no questions")
    tables.check_unique(questions)
    check_labeled(questions, [question.answers for question in questions], "answers", False)
    for question in questions:
        if question.answers == () and not null_answers:
            fix = "only SQuAD 2.0 allows that: use --config=configs/finetune/squad.py:v2"
            raise ValueError(f"{question.location}: no answer; {fix}")
    return questions


def _read_json(path: str) -> Iterator[tuple[dict, str]]:
    text = tables.read_text(pathlib.Path(path), "SQuAD's JSON, a .jsonl file, or tfds:NAME")
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; rename JSON lines to .jsonl") from None
    for a, article in enumerate(field(content, "data", list, path), start=1):
        location = f"{path}, article {a}"
        for p, paragraph in enumerate(field(article, "paragraphs", list, location), start=1):
            location = f"{path}, article {a}, paragraph {p}"
            context = text_field(paragraph, "context", location, may_be_empty=True)
            for q, entry in enumerate(field(paragraph, "qas", list, location), start=1):
                location = f"{path}, article {a}, paragraph {p}, question {q}"
                id_ = field(entry, "id", str | int | float, location)
                yield entry | {"context": context}, f"{location} (id {id_})"


def _question(values: dict, location: str, number: int, empty_texts: bool) -> Question:
    names = ("question", "context")
    question, context = (text_field(values, name, location, empty_texts) for name in names)
    answers = values.get("answers")
    if isinstance(answers, dict):  # A dict of lists, as in TFDS and Hugging Face datasets.
        lists = [field(answers, name, list, location) for name in ("text", "answer_start")]
        answers = [{"text": text, "answer_start": start} for text, start in zip_longest(*lists)]
    if answers is not None:
        answers = tuple(
            (field(answer, "text", str, location), field(answer, "answer_start", int, location))
            for answer in field({"answers": answers}, "answers", list, location)
        )
    if values.get("is_impossible") and field(values, "is_impossible", bool, location):
        if answers:
            raise ValueError(f"{location}: is_impossible with answers: remove one or the other")
        answers = ()
    id_ = id_field(values, location, number)
    return Question(id_, question, context, answers, location)
