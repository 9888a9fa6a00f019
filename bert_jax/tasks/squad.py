"""SQuAD 1.1 and 2.0: the span of a context that answers a question, if there is one.

Questions are read from the official JSON, your own JSONL, TFDS, or the Hugging Face Hub.
"""

import collections
import itertools
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import zip_longest
from typing import NamedTuple

from absl import logging
from ml_collections import ConfigDict
from scipy.special import softmax

from bert_jax.data.features import ModelInput
from bert_jax.model import heads
from bert_jax.runtime.config_fields import Bounds, check_bounds
from bert_jax.tasks import spans, tables
from bert_jax.tasks.labels import check_labeled
from bert_jax.tasks.spans import Passage, RankedAnswers, SpanConfig
from bert_jax.tasks.squad_scores import best_null_threshold, evaluate_v1, evaluate_v2
from bert_jax.tasks.tables import field, id_field, text_field
from bert_jax.tasks.task import (
    Outputs,
    Split,
    Task,
    TrainedHead,
    files_with_suffix,
    limit_examples,
    write_json_blocks,
)
from bert_jax.tokenizers.tokenizer import Tokenizer

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
    bounds, limit = Bounds(1, config.max_seq_length - 4), "max_seq_length - 4"
    check_bounds(config, bounds, "data.max_query_length", limited_by=limit)
    options = {name: data[name] for name in SpanConfig._fields if data.get(name) is not None}
    span_config = SpanConfig(config.max_seq_length, **options)
    head_settings = span_config._asdict()
    tunes_threshold = span_config.null_answers and data.null_threshold is None
    notes: dict[str, int] = {}
    train, splits = [], []
    for name, source in files.items():
        unused: dict[str, int] = {}
        questions = read_questions(source, span_config.null_answers, data.data_dir, True, unused)
        tables.note_unused_keys(unused, f"{name} lines", notes)
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
            null = spans.null_span(passage, outputs[start:end])
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
    """Reads questions from `.jsonl` (one per line), "tfds:...", "hub:..." or official JSON.

    Ids may be whole numbers and are read as text. Without `null_answers`, as in version 1.1, each
    question needs an answer, and without `empty_texts`, a text and a context. `unused` receives,
    for each key of `.jsonl` or "hub:..." that is not read, the number of lines that have it. Raises
    FileNotFoundError if the file is missing, and ValueError if it is malformed.
    """
    has_objects = tables.is_named(source) or source.endswith(".jsonl")
    objects = tables.read_objects(source, data_dir) if has_objects else _read_json(source)
    if has_objects and not source.startswith("tfds:"):
        for key, (count, _) in find_unused(objects).items():
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


def find_unused(objects: Iterable[tuple[dict, str]]) -> dict[str, tuple[int, str]]:
    """Returns the keys that are not read; raises ValueError for one that says what is right."""
    found = tables.find_unused_keys(objects, QUESTION_KEYS)
    for key, (_, location) in found.items():
        if key.startswith("answer"):
            expected = 'a list of {"text": ..., "answer_start": ...}'
            raise ValueError(f"{location}: {key!r} is not read: write 'answers', {expected}")
    return found


def _read_json(path: str) -> Iterator[tuple[dict, str]]:
    text = tables.read_text(
        pathlib.Path(path), "SQuAD's JSON, a .jsonl file, tfds:NAME or hub:NAME"
    )
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


PREDICT_OPTIONS: dict[str, object] = {}


def get_predictor(trained: TrainedHead, options: Mapping, given: Set[str]) -> "AnswerPredictor":
    """Returns the predictor of a head that answers questions."""
    return AnswerPredictor(trained)


class AnswerPredictor:
    """Answers the questions of files; see `bert_jax.tasks.task.Predictor`."""

    def __init__(self, trained: TrainedHead):
        self.writers = {".jsonl": write_json_blocks, ".json": write_official}
        self.notes: dict[str, int] = collections.Counter()
        self._trained = trained
        self._config = spans.span_config(trained.settings, trained.max_position_embeddings)
        self._passages: list[Passage] = []  # In the block whose features were built last.
        self._gold: dict[str, list[str]] = {}  # By the number of the question.
        self._texts: dict[str, str] = {}
        self._odds: dict[str, float] = {}

    @property
    def null_threshold(self) -> float | None:
        """What the no-answer score difference must exceed; None: questions always have answers."""
        return self._config.null_threshold if self._config.null_answers else None

    def find_inputs(self, directory: pathlib.Path) -> list[tuple[pathlib.Path, str]]:
        paths = files_with_suffix(directory, (".json", ".jsonl"))
        return [(path, f"{path.stem}.jsonl") for path in paths]

    def read(self, path: str | pathlib.Path) -> Iterator[Question]:
        source = str(path)
        if tables.is_named(source):
            objects = tables.read_objects(source, self._trained.data.get("data_dir", ""))
        else:
            is_json_lines = source.endswith(".jsonl")
            objects = tables.iterate_objects(path) if is_json_lines else _read_json(source)
        is_empty, names_unused = True, source.endswith(".jsonl") or source.startswith("hub:")
        for number, (values, location) in enumerate(objects):
            is_empty = False
            for key in find_unused([(values, location)]) if names_unused else ():
                self.notes[f"lines with {key!r}, which is not used"] += 1
            yield _question(values, location, number, empty_texts=True)
        if is_empty:
            raise ValueError(f"{source} holds no questions")

    def features(self, examples: Sequence[Question]) -> list[ModelInput]:
        pairs = [(question.question, question.context) for question in examples]
        empty = (not all(map(str.strip, pair)) for pair in pairs)
        self.notes["questions with an empty question or context"] += sum(empty)
        self._passages = spans.make_passages(pairs, self._trained.tokenizer, self._config)
        return [window for passage in self._passages for window in passage.features]

    def describe(self, examples: Sequence[Question], outputs: Outputs) -> list[dict]:
        return self.describe_answers(examples, self.find_answers(outputs))

    def find_answers(self, outputs: Outputs) -> list[RankedAnswers]:
        """Returns the answers to each question of the block whose features were built last."""
        found, end = [], 0
        for passage in self._passages:
            start, end = end, end + len(passage.windows)
            found.append(spans.rank_answers(passage, outputs[start:end], self._config))
        return found

    def describe_answers(
        self, examples: Sequence[Question], found: Sequence[RankedAnswers]
    ) -> list[dict]:
        """Returns the predictions of a block, given its answers; keeps what the scores need."""
        lines = []
        for question, ranked in zip(examples, found, strict=True):
            best = ranked.answers[0]
            line = {"id": question.id, "question": question.question, "prediction": best.text}
            line |= {"start": best.start, "end": best.end, "probability": best.probability}
            line["answers"] = [answer._asdict() for answer in ranked.answers[: spans.N_BEST]]
            lines.append(line)
            self._keep(question, ranked)
        return lines

    def _keep(self, question: Question, ranked: RankedAnswers) -> None:
        """Keeps what the scores need of a question whose answers are known."""
        if question.answers is None:
            self.notes["questions without answers, not scored"] += 1
        elif not question.answers and not self._config.null_answers:
            self.notes["questions without an answer, which the head always gives, not scored"] += 1
        else:
            key = str(len(self._gold))
            self._gold[key] = [text for text, _ in question.answers]
            self._texts[key] = ranked.best_text
            self._odds[key] = ranked.null_odds

    def scores(self) -> dict[str, float]:
        gold, texts = self._gold, self._texts
        if not gold:
            return {}
        if self._config.null_answers:
            threshold = self._config.null_threshold
            texts = {key: "" if self._odds[key] > threshold else texts[key] for key in gold}
            return evaluate_v2(gold, texts, self._odds) | {"questions": len(gold)}
        return evaluate_v1(gold, texts) | {"questions": len(gold)}


def write_official(path: pathlib.Path, blocks: Iterable[Sequence[dict]]) -> None:
    """Writes {id: text}, the file that the official script scores. Raises ValueError.

    That is if two questions have one id.
    """
    ids: set[str] = set()
    with open(path, "w", encoding="utf-8") as stream:
        stream.write("{")
        for line in itertools.chain.from_iterable(blocks):
            if line["id"] in ids:
                fix = "make the ids unique, or write a .jsonl file"
                raise ValueError(f"two questions have the id {line['id']!r}: {fix}")
            stream.write(",\n" if ids else "\n")
            ids.add(line["id"])
            stream.write(f"{json.dumps(line['id'])}: {json.dumps(line['prediction'])}")
        stream.write("\n}\n")
