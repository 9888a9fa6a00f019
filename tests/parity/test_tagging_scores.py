"""Entity scores against seqeval, and against conlleval, the script of the CoNLL shared tasks.

BERT_JAX_CONLLEVAL is the path of conlleval, which tools/fetch_data.py fetches; it needs Perl.
"""

import functools
import os
import random
import re
import shutil
import subprocess

import pytest

from bert_jax.tasks.tagging_scores import entity_scores, find_entities, find_strict_entities

SCHEMES = {"iob1": "IOB1", "iob2": "IOB2", "bioes": "IOBES"}


def random_case(number: int, prefixes: str):
    """Returns predicted and expected random tags of a few sentences; most are illegal."""
    rng = random.Random(number)
    types = rng.choice([["A"], ["A", "B"], ["PER", "X-Y", "B"]])
    tags = ["O", *(f"{prefix}-{each}" for prefix in prefixes for each in types)]
    weights = [rng.random() ** 2 + 0.01 for _ in tags]
    expected = [rng.choices(tags, weights, k=rng.randint(1, 12)) for _ in range(rng.randint(1, 4))]
    kept = rng.random()
    predicted = [
        [tag if rng.random() < kept else rng.choice(tags) for tag in sentence]
        for sentence in expected
    ]
    return predicted, expected


def assert_equal(ours, predicted, expected, **mode):
    from seqeval.metrics import classification_report

    reference = classification_report(
        expected, predicted, output_dict=True, zero_division=0, **mode
    )
    for ending, name in (("", "micro avg"), *((f"/{each}", each) for each in reference)):
        if ending.endswith(" avg"):
            continue
        for metric, key in (("precision", "precision"), ("recall", "recall"), ("f1", "f1-score")):
            assert ours[f"{metric}{ending}"] == pytest.approx(reference[name][key], abs=1e-12)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("prefixes", ["BI", "BIES"])
def test_conlleval_rules_equal_the_default_mode_of_seqeval_in_1000_cases(prefixes):
    for number in range(1000):
        predicted, expected = random_case(number, prefixes)
        if any(map(find_entities, predicted + expected)):
            assert_equal(entity_scores(predicted, expected), predicted, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_strict_scores_equal_seqeval_in_1000_cases(scheme):
    import seqeval.scheme

    find = functools.partial(find_strict_entities, scheme=scheme)
    mode = {"mode": "strict", "scheme": getattr(seqeval.scheme, SCHEMES[scheme])}
    for number in range(1000):
        predicted, expected = random_case(number, "BIES" if scheme == "bioes" else "BI")
        if any(map(find, predicted + expected)):  # Without any, seqeval raises.
            assert_equal(entity_scores(predicted, expected, find), predicted, expected, **mode)


def test_scores_equal_conlleval_in_1000_cases_of_iob():
    if not (script := os.environ.get("BERT_JAX_CONLLEVAL")):
        pytest.skip("BERT_JAX_CONLLEVAL is not set: `make parity` fetches it")
    if not shutil.which("perl"):
        pytest.skip("conlleval needs Perl")
    for number in range(1000):
        predicted, expected = random_case(number, "BI")
        sentences = (
            "".join(f"word {tag} {actual}\n" for actual, tag in zip(*pair, strict=True))
            for pair in zip(predicted, expected, strict=True)
        )
        report = subprocess.run(
            ["perl", script], input="\n".join(sentences), capture_output=True, text=True, check=True
        ).stdout
        ours, types = entity_scores(predicted, expected), set()
        row = r"(?m)^ *(\S+):  *(?:\S+%; )?precision: +(\S+)%; recall: +(\S+)%; FB1: +(\S+)"
        for name, *reference in re.findall(row, report):
            ending = "" if name == "accuracy" else f"/{name}"
            types.add(ending)
            for metric, percent in zip(("precision", "recall", "f1"), reference, strict=True):
                assert 100 * ours[f"{metric}{ending}"] == pytest.approx(float(percent), abs=5.1e-3)
        assert {f"f1{ending}" for ending in types} == {key for key in ours if key.startswith("f1")}
