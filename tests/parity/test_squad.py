"""SQuAD's scores against others' scorers, and the answers of XQuAD there and back (`make parity`).

BERT_JAX_SQUAD_METRICS names transformers' scorer, which tools/fetch_data.py fetches. Where
BERT_JAX_SQUAD_SCRIPTS names a directory with the official evaluate-v1.1.py and evaluate-v2.0.py,
they are compared with too, and where BERT_JAX_XQUAD names xquad.en.json, its answers are checked.
"""

import importlib.util
import os
import pathlib
import random
import sys
import types

import numpy as np
import pytest

from bert_jax.tasks import spans
from bert_jax.tasks.spans import SpanSettings
from bert_jax.tasks.squad import find_answer
from bert_jax.tasks.squad_files import read_questions
from bert_jax.tasks.squad_scores import evaluate_v1, evaluate_v2
from bert_jax.tokenization import load_tokenizer

NUM_CASES = 1000
WORDS = [
    "a",
    "an",
    "the",
    "The",
    "cat",
    "Cat's",
    "dog",
    "50%",
    "½",
    "—",
    "...",
    "İ",
    "a.m.",
    "\u00a0",
]
WORDS += ["", "北京", "naïve", "nai\u0308ve", "\u200bx", "theatre", "-", "1,000", "AN,", "\n"]


def random_text(rng: random.Random) -> str:
    return rng.choice([" ", " ", "  ", "-", ""]).join(rng.choices(WORDS, k=rng.randint(0, 4)))


def random_case(rng: random.Random, null_answers: bool):
    """Answers, predictions and null odds for up to 12 questions; odds have ties."""
    ids = [f"q{number}" for number in range(rng.randint(1, 12))]
    fewest = 0 if null_answers else 1
    gold = {id_: [random_text(rng) for _ in range(rng.randint(fewest, 3))] for id_ in ids}
    predictions = {
        id_: rng.choice(gold[id_]) if gold[id_] and rng.random() < 0.4 else random_text(rng)
        for id_ in ids
    }
    odds = {id_: rng.choice([rng.gauss(0, 3), float(rng.randint(-2, 2))]) for id_ in ids}
    return gold, predictions, odds


@pytest.fixture(scope="module")
def squad_metrics():
    """transformers' scorer as a module; what it imports beside is for other functions of it."""
    name = "transformers_squad.data.metrics.squad_metrics"
    for package in (
        "transformers_squad",
        "transformers_squad.data",
        "transformers_squad.data.metrics",
    ):
        sys.modules[package] = types.ModuleType(package)
    sys.modules["transformers_squad.models.bert"] = types.SimpleNamespace(BasicTokenizer=None)
    logging = types.SimpleNamespace(get_logger=lambda name: None)
    sys.modules["transformers_squad.utils"] = types.SimpleNamespace(logging=logging)
    spec = importlib.util.spec_from_file_location(name, os.environ["BERT_JAX_SQUAD_METRICS"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_same(ours: dict, theirs: dict):
    """Theirs are in percent, and count."""
    for name, value in ours.items():
        scale = 1 if name.endswith("thresh") else 100
        assert scale * value == pytest.approx(theirs[name], abs=1e-9), name


def test_version_2_equals_transformers_over_1000_cases(squad_metrics):
    rng = random.Random(2)
    for _ in range(NUM_CASES):
        gold, predictions, odds = random_case(rng, null_answers=True)
        threshold = rng.choice([1.0, rng.gauss(0, 3), 1e9])
        examples = [
            types.SimpleNamespace(qas_id=id_, answers=[{"text": text} for text in texts])
            for id_, texts in gold.items()
        ]
        expected = squad_metrics.squad_evaluate(examples, predictions, odds, threshold)
        found = evaluate_v2(gold, predictions, odds, threshold)
        assert_same(found, expected)
        assert set(expected) - set(found) == {name for name in expected if "total" in name}


def load_script(version: str):
    if "BERT_JAX_SQUAD_SCRIPTS" not in os.environ:
        pytest.skip("BERT_JAX_SQUAD_SCRIPTS names no directory with the official scripts")
    path = pathlib.Path(os.environ["BERT_JAX_SQUAD_SCRIPTS"]) / f"evaluate-{version}.py"
    spec = importlib.util.spec_from_file_location(f"evaluate_{version}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return path, module


def as_data(gold: dict) -> dict:
    entries = [
        {"id": id_, "answers": [{"text": text} for text in texts]} for id_, texts in gold.items()
    ]
    return {"version": "1.1", "data": [{"paragraphs": [{"qas": entries}]}]}


def test_version_1_equals_the_official_script_over_1000_cases():
    _, script = load_script("v1.1")
    rng = random.Random(1)
    for _ in range(NUM_CASES):
        gold, predictions, _ = random_case(rng, null_answers=False)
        expected = script.evaluate(as_data(gold)["data"], predictions)
        expected["exact"] = expected["exact_match"]
        assert_same(evaluate_v1(gold, predictions), expected)


def test_version_2_equals_the_official_script_over_1000_cases():
    _, script = load_script("v2.0")
    rng = random.Random(3)
    for _ in range(NUM_CASES):
        gold, predictions, odds = random_case(rng, null_answers=True)
        threshold = rng.choice([1.0, rng.gauss(0, 3), 1e9])
        answered = script.make_qid_to_has_ans(as_data(gold)["data"])
        raw = script.get_raw_scores(as_data(gold)["data"], predictions)
        applied = [script.apply_no_ans_threshold(each, odds, answered, threshold) for each in raw]
        expected = script.make_eval_dict(*applied)
        for kind, wanted in (("HasAns", True), ("NoAns", False)):
            if chosen := [id_ for id_, value in answered.items() if value == wanted]:
                script.merge_eval(expected, script.make_eval_dict(*applied, chosen), kind)
        script.find_all_best_thresh(expected, predictions, *raw, odds, answered)
        assert_same(evaluate_v2(gold, predictions, odds, threshold), expected)


@pytest.mark.parametrize("length", [96, 384])
def test_gold_answers_of_xquad_are_recovered_unless_they_end_within_a_piece(length):
    if "BERT_JAX_XQUAD" not in os.environ:
        pytest.skip("BERT_JAX_XQUAD names no file")
    tokenizer = load_tokenizer(pathlib.Path(os.environ["BERT_JAX_MINILM"]) / "vocab.txt")
    questions = read_questions(os.environ["BERT_JAX_XQUAD"], "dev", null_answers=False)
    settings = SpanSettings(max_seq_length=length, max_query_length=32, doc_stride=48)
    passages = spans.make_passages(
        [question.question for question in questions],
        [question.context for question in questions],
        tokenizer,
        settings,
    )
    exact, within_piece = 0, []
    for question, passage in zip(questions, passages, strict=True):
        ((gold, begin),) = question.answers
        features = spans.label_windows(passage, find_answer(question, passage))
        texts = set()
        for window, feature in zip(passage.windows, features, strict=True):
            if feature.label != spans.NO_ANSWER:
                low, high = np.array(feature.label) - window.offset + window.begin
                texts.add(question.context[passage.offsets[low, 0] : passage.offsets[high, 1]])
        if texts == {gold}:
            exact += 1
        else:
            starts, ends = passage.offsets.T
            assert begin not in starts or begin + len(gold) not in ends
            within_piece.append((question.id, gold, *texts))
    print(f"{exact} of {len(questions)} recovered from windows of {length}; not: {within_piece}")
    assert len(within_piece) < 0.005 * len(questions)
