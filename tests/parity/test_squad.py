"""SQuAD's scores against other implementations, and the labels of XQuAD's answers (`make parity`).

BERT_JAX_SQUAD_METRICS is the path of transformers' scorer, which tools/fetch_data.py fetches.
BERT_JAX_SQUAD_SCRIPTS may be a directory of the official evaluate-v1.1.py and evaluate-v2.0.py, to
compare with them too (tests/golden holds their results), and BERT_JAX_XQUAD the path of
xquad.en.json, to check its answers.
"""

import importlib.util
import os
import pathlib
import sys
import types

import numpy as np
import pytest

from bert_jax.tasks import spans
from bert_jax.tasks.spans import SpanConfig
from bert_jax.tasks.squad import read_questions
from bert_jax.tasks.squad_scores import evaluate_v1, evaluate_v2
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.golden import make_squad_scores as golden


def require_environment(variable: str, what: str) -> str:
    """Returns the value of an environment variable, or skips the test without one."""
    if not (value := os.environ.get(variable)):
        pytest.skip(f"{variable} is not set to {what}")
    return value


@pytest.fixture(scope="module")
def squad_metrics():
    """Returns transformers' scorer as a module, with stubs for imports that are not needed."""
    path = require_environment(
        "BERT_JAX_SQUAD_METRICS", "transformers' squad_metrics.py: `make parity` fetches it"
    )
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
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_same(ours: dict, reference: dict):
    """Compares scores; `reference` has percentages."""
    for name, value in ours.items():
        scale = 1 if name.endswith("thresh") else 100
        assert scale * value == pytest.approx(reference[name], abs=1e-9), name


def test_version_2_equals_transformers_over_1000_cases(squad_metrics):
    for gold, predictions, odds, threshold in golden.cases_v2(seed=2):
        examples = [
            types.SimpleNamespace(qas_id=id_, answers=[{"text": text} for text in texts])
            for id_, texts in gold.items()
        ]
        expected = squad_metrics.squad_evaluate(examples, predictions, odds, threshold)
        actual = evaluate_v2(gold, predictions, odds, threshold)
        assert_same(actual, expected)
        assert set(expected) - set(actual) == {name for name in expected if "total" in name}


def load_script(version: str):
    return golden.load_script(
        require_environment("BERT_JAX_SQUAD_SCRIPTS", "the official scripts"), version
    )


def test_version_1_equals_the_official_script_over_1000_cases():
    script = load_script("v1.1")
    for case in golden.cases_v1():
        assert_same(evaluate_v1(*case), golden.official_v1(script, *case))


def test_version_2_equals_the_official_script_over_1000_cases():
    script = load_script("v2.0")
    for case in golden.cases_v2(seed=3):
        assert_same(evaluate_v2(*case), golden.official_v2(script, *case))


@pytest.mark.parametrize("length", [96, 384])
def test_labels_of_xquad_decode_to_the_gold_answers_unless_an_answer_ends_within_a_piece(length):
    source = require_environment("BERT_JAX_XQUAD", "xquad.en.json")
    weights = require_environment("BERT_JAX_MINILM", "a vocabulary: `make parity` fetches it")
    tokenizer = load_tokenizer(pathlib.Path(weights) / "vocab.txt")
    questions = read_questions(source, null_answers=False)
    config = SpanConfig(max_seq_length=length, max_query_length=32, doc_stride=48)
    pairs = [(question.question, question.context) for question in questions]
    passages = spans.make_passages(pairs, tokenizer, config)
    exact, within_piece = 0, []
    for question, passage in zip(questions, passages, strict=True):
        ((gold, begin),) = question.answers
        features = spans.label_windows(passage, spans.locate(question.answers[0], passage))
        texts = set()
        for window, feature in zip(passage.windows, features, strict=True):
            if feature.label != (0, 0):
                low, high = np.array(feature.label) - feature.second_starts[0] + window.start
                texts.add(question.context[passage.offsets[low, 0] : passage.offsets[high, 1]])
        if texts == {gold}:
            exact += 1
        else:
            starts, ends = passage.offsets.T
            assert begin not in starts or begin + len(gold) not in ends
            within_piece.append((question.id, gold, *texts))
    print(f"{exact} of {len(questions)} recovered from windows of {length}; not: {within_piece}")
    assert len(within_piece) < 0.005 * len(questions)
