"""SQuAD 1.1 and 2.0: the span of a context that answers a question, or that there is none."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence

from absl import logging
from ml_collections import ConfigDict

from bert_jax.data.features import Feature
from bert_jax.tasks import spans
from bert_jax.tasks.spans import Passage, Span, SpanSettings
from bert_jax.tasks.squad_files import Question, read_questions
from bert_jax.tasks.squad_scores import deciding_threshold, evaluate_v1, evaluate_v2
from bert_jax.tasks.task import Outputs, Split, Task
from bert_jax.tokenization import Tokenizer


def get_task(config: ConfigDict, tokenizer: Tokenizer) -> Task:
    """Reads the files that `config.data` names; see configs/finetune/squad.py.

    Raises FileNotFoundError and ValueError as `read_questions` does.
    """
    data = config.data
    if not (data.train or data.dev or data.test):
        raise ValueError(
            "give the questions to train on: --config.data.train=FILE.json; or, for a head that is "
            "trained already, those to answer: --config.data.test=FILE.json"
        )
    fields = [field.name for field in dataclasses.fields(SpanSettings)]
    given = {name: data[name] for name in fields if data.get(name) is not None}
    settings = SpanSettings(max_seq_length=config.max_seq_length, **given)
    kept = dataclasses.asdict(settings)
    searched = settings.null_answers and "null_threshold" not in given
    notes: dict[str, int] = {}
    splits, train = [], []
    for name in ("train", "dev", "test"):
        if not data[name]:
            continue
        questions = read_questions(data[name], name, settings.null_answers)
        passages = spans.make_passages(
            [question.question for question in questions],
            [question.context for question in questions],
            tokenizer,
            settings,
        )
        if name == "train":
            train, lost = training_features(questions, passages)
            notes["train questions skipped, whose answer is not in the context"] = len(lost)
        else:
            tunes = searched and name == "dev"
            splits.append(make_split(name, questions, passages, settings, kept, tunes))
            lost = [
                question.place
                for question, passage in zip(questions, passages, strict=True)
                for answer in question.answers or ()
                if not locate(answer, passage)
            ]
            notes[f"{name} answers not in the context"] = len(lost)
        if lost:
            places = list(dict.fromkeys(lost))
            logging.warning(
                "%d answers are not in their contexts where the file says, the first of %s",
                len(lost),
                "; ".join(places[:5]),
            )
    return Task(
        kind="span",
        labels=spans.LABELS,
        train=train,
        splits=tuple(splits),
        metric="dev/f1",
        notes=notes,
        settings=kept,
        tuned=("null_threshold",) if searched else (),
    )


def training_features(
    questions: Sequence[Question], passages: Sequence[Passage]
) -> tuple[list[Feature], list[str]]:
    """The windows of all questions, labeled, and the places of those that had to be left out."""
    features, skipped = [], []
    for question, passage in zip(questions, passages, strict=True):
        if question.answers is None:
            raise ValueError(f"{question.place}: no answers, and training needs them")
        tokens = find_answer(question, passage)
        if question.answers and not tokens:
            skipped.append(question.place)
        else:
            features += spans.label_windows(passage, tokens)
    if not features:
        raise ValueError(
            f"none of {len(questions)} questions can be trained on, for no answer stands at its "
            f"answer_start, a count of characters, in its context; the first is {skipped[0]}"
        )
    return features, skipped


def find_answer(question: Question, passage: Passage) -> tuple[int, int] | None:
    """First and last token of the first answer; None if it is not where it should be, or none."""
    return locate(question.answers[0], passage) if question.answers else None


def locate(answer: tuple[str, int], passage: Passage) -> tuple[int, int] | None:
    """First and last token of an answer; None if it is not where it should be."""
    text, begin = answer
    if not text.strip() or begin < 0 or not passage.context.startswith(text, begin):
        return None
    return spans.find_tokens(passage.offsets, begin, begin + len(text))


def make_split(
    name: str,
    questions: Sequence[Question],
    passages: Sequence[Passage],
    settings: SpanSettings,
    kept: dict,
    tunes: bool,
) -> Split:
    """Scores and writes answers; `write` in the official format, in a directory `name`.

    Above `kept["null_threshold"]` the answer is none. If it `tunes`, scoring sets that anew.
    """
    gold = {
        question.id: [text for text, _ in question.answers]
        for question in questions
        if question.answers is not None
    }

    def answers(outputs: Outputs, n_best: int) -> Iterator[tuple[str, Passage, list[Span], Span]]:
        """Id, passage, the best spans, and that of no answer."""
        end = 0
        for question, passage in zip(questions, passages, strict=True):
            begin, end = end, end + len(passage.windows)
            own = outputs[begin:end]
            best = spans.best_spans(passage, own, settings.max_answer_length, n_best)
            yield question.id, passage, best, spans.null_span(own)

    def score(outputs: Outputs) -> dict[str, float]:
        texts, odds = {}, {}
        for id_, passage, best, null in answers(outputs, 1):
            texts[id_], odds[id_] = passage.text(best[0]), null.score - best[0].score
        if not settings.null_answers:
            return evaluate_v1(gold, texts)
        if tunes:
            kept["null_threshold"] = deciding_threshold(gold, texts, odds)
        threshold = kept["null_threshold"]
        texts = {id_: "" if odds[id_] > threshold else text for id_, text in texts.items()}
        return evaluate_v2(gold, texts, odds)

    def write(outputs: Outputs, directory: pathlib.Path) -> None:
        predictions, nbest, odds = {}, {}, {}
        for id_, passage, best, null in answers(outputs, spans.N_BEST):
            predictions[id_] = passage.text(best[0])
            if settings.null_answers:
                odds[id_] = null.score - best[0].score
                if odds[id_] > kept["null_threshold"]:
                    predictions[id_] = ""
                best = sorted([*best, null], key=lambda span: -span.score)
            nbest[id_] = [
                {
                    "text": passage.text(span),
                    "probability": probability,
                    "start_logit": span.start_logit,
                    "end_logit": span.end_logit,
                }
                for span, probability in zip(best, spans.probabilities(best), strict=True)
            ]
        directory = directory / name
        directory.mkdir(exist_ok=True)
        files = {"predictions": predictions, "nbest_predictions": nbest}
        if settings.null_answers:
            files["null_odds"] = odds
        for stem, content in files.items():
            (directory / f"{stem}.json").write_text(json.dumps(content, indent=4) + "\n")

    features = [feature for passage in passages for feature in passage.features]
    return Split(name, features, score if gold else None, write)
