"""SQuAD 1.1 and 2.0: the span of a context that answers a question, if there is one."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence

from absl import logging
from ml_collections import ConfigDict

from bert_jax.data.features import Feature
from bert_jax.model import heads
from bert_jax.tasks import spans
from bert_jax.tasks.spans import Passage, SpanConfig
from bert_jax.tasks.squad_files import Question, read_questions
from bert_jax.tasks.squad_scores import deciding_threshold, evaluate_v1, evaluate_v2
from bert_jax.tasks.tables import check_files_given
from bert_jax.tasks.task import Outputs, Split, Task
from bert_jax.tokenization import Tokenizer


def get_task(config: ConfigDict, tokenizer: Tokenizer) -> Task:
    """Reads the files named in `config.data`; see configs/finetune/squad.py."""
    data = config.data
    check_files_given(data)
    files = ("train", "dev", "test")
    given = {name: value for name, value in data.items() if value is not None and name not in files}
    span_config = SpanConfig(max_seq_length=config.max_seq_length, **given)
    head_settings = dataclasses.asdict(span_config)
    tunes = span_config.null_answers and "null_threshold" not in given
    notes: dict[str, int] = {}
    train, splits = [], []
    for name in files:
        if not data[name]:
            continue
        questions = read_questions(data[name], name, span_config.null_answers)
        pairs = [(each.question, each.context) for each in questions]
        passages = spans.make_passages(pairs, tokenizer, span_config)
        if name == "train":
            train, lost = training_features(questions, passages)
            notes["train questions skipped, whose answer is not in the context"] = len(lost)
        else:
            tunes_here = tunes and name == "dev"
            splits.append(make_split(name, questions, passages, head_settings, tunes_here))
            lost = [
                question.place
                for question, passage in zip(questions, passages, strict=True)
                for answer in question.answers or ()
                if not spans.locate(answer, passage)
            ]
            notes[f"{name} answers not in the context"] = len(lost)
        if lost:
            places = "; ".join(list(dict.fromkeys(lost))[:5])
            logging.warning("%d answers are not at their answer_start: %s", len(lost), places)
    return Task(
        head=heads.SPAN,
        labels=spans.LABELS,
        train=train,
        splits=tuple(splits),
        metric="dev/f1",
        notes=notes,
        head_settings=head_settings,
        tuned=("null_threshold",) if tunes else (),
    )


def training_features(
    questions: Sequence[Question], passages: Sequence[Passage]
) -> tuple[list[Feature], list[str]]:
    """Returns the labeled windows of all questions, and the places of those that are skipped.

    The first answer counts; a question is skipped if it is not in the context.
    """
    if questions[0].answers is None:
        raise ValueError(f"{questions[0].place}: no answers, and training needs them")
    features, skipped = [], []
    for question, passage in zip(questions, passages, strict=True):
        tokens = spans.locate(question.answers[0], passage) if question.answers else None
        if question.answers and not tokens:
            skipped.append(question.place)
        else:
            features += spans.label_windows(passage, tokens)
    if not features:
        raise ValueError(
            f"no question to train on: the contexts of all {len(questions)} lack their answer at "
            f"its answer_start (in characters); the first is {skipped[0]}"
        )
    return features, skipped


def make_split(
    name: str,
    questions: Sequence[Question],
    passages: Sequence[Passage],
    head_settings: dict,
    tunes: bool,
) -> Split:
    """Builds a split that is scored by the official rules and writes the official files.

    The prediction is no answer above `head_settings["null_threshold"]`, which scoring sets anew if
    it `tunes`.
    """
    null_answers, max_length = head_settings["null_answers"], head_settings["max_answer_length"]
    gold = {
        question.id: [text for text, _ in question.answers]
        for question in questions
        if question.answers is not None
    }

    def find_answers(outputs: Outputs, n_best: int) -> tuple[dict, dict, dict]:
        """Returns the best answer, the null odds and the ranked spans of each question, by id."""
        texts, odds, nbest, end = {}, {}, {}, 0
        for question, passage in zip(questions, passages, strict=True):
            begin, end = end, end + len(passage.windows)
            ranked = spans.best_spans(passage, outputs[begin:end], max_length, n_best)
            null = spans.null_span(outputs[begin:end])
            texts[question.id] = passage.text(ranked[0])
            odds[question.id] = null.score - ranked[0].score
            if null_answers:
                ranked = sorted([*ranked, null], key=lambda span: -span.score)
            nbest[question.id] = [
                {
                    "text": passage.text(span),
                    "probability": probability,
                    "start_logit": span.start_logit,
                    "end_logit": span.end_logit,
                }
                for span, probability in zip(ranked, spans.probabilities(ranked), strict=True)
            ]
        return texts, odds, nbest

    def decide(texts: dict[str, str], odds: dict[str, float]) -> dict[str, str]:
        threshold = head_settings["null_threshold"]
        return {id_: "" if odds[id_] > threshold else text for id_, text in texts.items()}

    def score(outputs: Outputs) -> dict[str, float]:
        texts, odds, _ = find_answers(outputs, 1)
        if not null_answers:
            return evaluate_v1(gold, texts)
        if tunes:
            head_settings["null_threshold"] = deciding_threshold(gold, texts, odds)
        return evaluate_v2(gold, decide(texts, odds), odds)

    def write(outputs: Outputs, directory: pathlib.Path) -> None:
        texts, odds, nbest = find_answers(outputs, spans.N_BEST)
        files = {"predictions": texts, "nbest_predictions": nbest}
        if null_answers:
            files |= {"predictions": decide(texts, odds), "null_odds": odds}
        (directory / name).mkdir(exist_ok=True)
        for stem, content in files.items():
            (directory / name / f"{stem}.json").write_text(json.dumps(content, indent=4) + "\n")

    features = [feature for passage in passages for feature in passage.features]
    return Split(name, features, score if gold else None, write)
