"""Mined negatives against sentence-transformers' `mine_hard_negatives`."""

import collections

import numpy as np
import pytest

import bert_jax
from bert_jax.checkpoints.export import save_huggingface
from bert_jax.inference.mining import MiningRules, load_corpus, mine
from bert_jax.tasks.queries import Query
from tests.helpers.corpora import texts
from tests.helpers.json_lines import write_lines
from tests.helpers.models import write_head

datasets = pytest.importorskip("datasets")
st = pytest.importorskip("sentence_transformers")

RULES = {
    "top": {},
    "range": {"range_min": 3, "range_max": 9, "num_negatives": 4},
    "absolute margin": {"absolute_margin": -0.05, "range_min": 1},
    "relative margin": {"relative_margin": -0.04},
    "bounds": {"max_score": 0.9, "min_score": 0.4, "num_negatives": 2},
    "min score": {"min_score": 0.8},
    "long range": {"range_max": 500, "absolute_margin": 0.0},
}
OF_LOGITS = {
    "cross-encoder, absolute margin": {"absolute_margin": 0.3},
    "cross-encoder, relative margin": {"relative_margin": 0.5, "range_min": 2},
    "cross-encoder, min score": {"min_score": -1.0, "num_negatives": 2},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Returns our bi-encoder and cross-encoder, and the same in sentence-transformers."""
    folder = tmp_path_factory.mktemp("models")
    heads = {
        "bi": {"task": "embedding", "labels": [], "pooling": "mean", "normalize": True},
        "cross": {"task": "multiple_choice", "labels": ["score"], "max_query_length": 64},
    }
    ours, theirs = {}, {}
    for name, head in heads.items():
        path = write_head(folder / name, positions=128, max_seq_length=128, **head)
        ours[name] = bert_jax.load(path)
        model = ours[name]
        save_huggingface(folder / f"{name}_st", model.params, model.settings, model.tokenizer)
        kind = st.SentenceTransformer if name == "bi" else st.CrossEncoder
        theirs[name] = kind(str(folder / f"{name}_st"), device="cpu")
    return ours, theirs


@pytest.mark.parametrize("name", [*RULES, *OF_LOGITS])
def test_mined_negatives_are_those_of_sentence_transformers(name, models, tmp_path):
    ours, theirs = models
    rules = {**RULES, **OF_LOGITS}[name]
    rng = np.random.default_rng(0)
    passages, queries = list(dict.fromkeys(texts(120, seed=1))), list(dict.fromkeys(texts(15)))
    pairs = [  # One to three positives each, some of which the corpus lacks; one is near.
        (query, passage)
        for query in queries
        for passage in [
            f"{query} {passages[0]}"[:-7],
            *rng.choice(passages, rng.integers(0, 3), replace=False),
        ]
    ]
    corpus = passages[:90]
    expected = st.util.mine_hard_negatives(
        datasets.Dataset.from_dict(
            dict(zip(("query", "positive"), zip(*pairs, strict=True), strict=True))
        ),
        theirs["bi"],
        corpus=corpus,
        cross_encoder=theirs["cross"] if name in OF_LOGITS else None,
        output_format="n-tuple",
        output_scores=True,
        verbose=False,
        **rules,
    )
    lines = [Query(str(n), *pair, (), str(n)) for n, pair in enumerate(pairs)]
    path = write_lines(tmp_path / "corpus.jsonl", [{"text": text} for text in corpus])
    found, counts = mine(
        lines,
        load_corpus(path, ours["bi"], "", {}),
        ours["bi"],
        MiningRules(**rules),
        ours["cross"] if name in OF_LOGITS else None,
    )
    count = rules.get("num_negatives", 3)
    by_pair = {
        (row["query"], row["positive"]): (
            [row[f"negative_{n}"] for n in range(1, count + 1)],
            row["scores"],
        )
        for row in expected
    }
    assert {(line["query"], line["positive"]) for line in found} == by_pair.keys()
    assert 0 < len(found) <= len(pairs), counts
    for line in found:
        negatives, scores = by_pair[line["query"], line["positive"]]
        assert line["negatives"] == negatives
        own = [line["positive_score"], *line["scores"]]
        np.testing.assert_allclose(own, scores, atol=1e-4)
    print(name, len(found), len(pairs), collections.Counter(counts))
