"""Mining: which passages are never negatives, and that all others are accounted for.

tests/parity/test_mining.py compares with sentence-transformers.
"""

import collections
import itertools
import types

import numpy as np
import pytest

import bert_jax
from bert_jax import predict as program
from bert_jax.inference import mining
from bert_jax.inference.mining import (
    Corpus,
    MiningRules,
    apply_rules,
    load_corpus,
    mine,
)
from bert_jax.tasks.queries import Query
from bert_jax.tasks.search import Found
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import texts, write_vocabulary
from tests.helpers.json_lines import write_lines
from tests.helpers.models import write_head


def choose(rules, scores, positive=0.5, left_out=(), number=0):
    counts = collections.Counter()
    is_left_out = np.isin(np.arange(len(scores)), left_out)
    last_rank = rules.last_rank(max_positives=1, has_cross_encoder=True)
    given = np.float32(scores), is_left_out, np.float32([positive, 0.9])
    chosen = apply_rules(*given, rules, last_rank, number, counts)
    assert counts.total() + len(chosen) + len(left_out) == len(scores)
    return chosen.tolist(), counts


@pytest.mark.parametrize(
    ("rules", "chosen", "reason"),
    [
        ({}, [0, 2], "in the range, but not chosen"),
        ({"range_min": 1, "range_max": 3}, [2, 3], "ranked after range_max"),
        ({"range_min": 2, "range_max": 9}, [3, 4], "ranked before range_min"),
        ({"absolute_margin": 0.1}, [3, 4], "dropped by absolute_margin"),
        ({"relative_margin": 0.5}, [4, 5], "dropped by relative_margin"),
        ({"max_score": 0.45}, [2, 3], "dropped by max_score"),
        ({"min_score": 0.42}, [0, 2], "dropped by min_score"),
    ],
)
def test_each_rule_drops_and_counts(rules, chosen, reason):
    rules = MiningRules(num_negatives=2, **rules)
    found, counts = choose(rules, [0.6, 0.55, 0.44, 0.39, 0.2, 0.1], left_out=[1])
    assert found == chosen and counts[reason]


def test_margins_are_below_a_negative_score_of_the_positive():
    rules = MiningRules(num_negatives=1, relative_margin=0.1)
    assert choose(rules, [-1.0, -1.05, -1.2], positive=-1.0)[0] == [2]


def test_draws_depend_on_the_seed_and_the_query_alone():
    scores = np.linspace(1, 0, 40)
    drawn = {
        (seed, number): choose(
            MiningRules(5, 3, 33, sampling="random", seed=seed), scores, number=number
        )[0]
        for seed, number in itertools.product(range(2), range(2))
    }
    assert len(set(map(tuple, drawn.values()))) == 4
    for each in drawn.values():
        assert len(each) == 5 and each == sorted(each) and min(each) >= 3 and max(each) < 33


@pytest.fixture
def encoder(tmp_path, monkeypatch):
    """A model whose vectors are numbers, 1 for all texts; counts them by prompt."""

    def encode(texts, normalize, prompt_name=None):
        prompts[prompt_name] += len(texts)
        return np.ones((len(texts), 1), np.float32)

    def all_equal(queries, vectors, depth):
        shape = len(queries), min(depth, sum(map(len, vectors)))
        return Found(np.ones(shape, np.float32), np.tile(np.arange(shape[1]), (shape[0], 1)))

    prompts = collections.Counter()
    monkeypatch.setattr(mining, "search", all_equal)
    return types.SimpleNamespace(
        tokenizer=load_tokenizer(write_vocabulary(tmp_path / "vocab.txt")),
        config=types.SimpleNamespace(max_position_embeddings=64),
        head={"task": "embedding", "labels": []},
        settings={},
        encode=encode,
        prompts=prompts,
    )


def test_queries_and_passages_have_their_own_prompts(encoder, tmp_path):
    path = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in ("the", "old", "king")])
    lines = [Query("a", "river", "the king", (), "line 1")]
    mine(lines, load_corpus(path, encoder, "", {}), encoder, MiningRules())
    assert encoder.prompts == {"document": 3 + 1, "query": 1}


def test_titles_of_a_corpus_are_joined_or_counted(encoder, tmp_path):
    rows = [{"title": "The River", "text": "old"}, {"text": ""}]
    path = write_lines(tmp_path / "in.jsonl", rows)
    notes = {}
    assert [*load_corpus(path, encoder, "title", notes).texts()] == ["The River old", ""]
    assert notes == {"passages without a 'title'": 1, "passages that are empty": 1}
    assert [*load_corpus(path, encoder, "", notes).texts()] == ["old", ""]
    assert notes["passages with a 'title', not used: set title"] == 1


def test_equal_lines_are_counted_and_ids_are_unused(encoder):
    lines = [
        Query(id_, "river", "the king", (), location)
        for id_, location in (("a", "line 1"), ("a", "line 1"), ("a-2", "line 2"), ("a", "line 1"))
    ] + [Query("b", "day", "old", (), "line 3")]
    found, counts = mine(lines, None, encoder, MiningRules(num_negatives=1))
    assert [line["id"] for line in found] == ["a", "a-3", "a-2", "a-4", "b"]
    assert counts["lines written"] == counts["lines"] == 5


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return write_head(folder, task="embedding", labels=[], pooling="mean", max_seq_length=64)


@pytest.mark.slow
def test_positives_of_any_line_and_their_copies_are_never_negatives(model_path, tmp_path):
    model, passages = bert_jax.load(model_path), texts(12)
    lines = [
        Query("a", "the old river", passages[0], (), "line 1"),
        Query("b", "The  old river", passages[1], (), "line 2"),
        Query("b", "a road", "the king", (), "line 3"),  # The id of an input line of two.
    ]
    copies = [passages[0].upper(), passages[5].replace(" ", "  ")]
    rules = MiningRules(num_negatives=9)
    path = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in [*passages, *copies]])
    found, counts = mine(lines, load_corpus(path, model, "", {}), model, rules)
    assert [line["id"] for line in found] == ["a", "b", "b-2"]
    for line in found[:2]:
        assert not {passages[0], passages[1], copies[0]} & set(line["negatives"])
        assert len({*line["negatives"]} & {passages[5], copies[1]}) == 1
        assert "the king" in line["negatives"] or len(set(line["negatives"])) == 9
    assert counts["positives and their copies"] == 3 + 1
    assert counts["copies of another passage"] == 1 + 2
    assert (counts["queries"], counts["lines written"]) == (2, 3)

    program.predict(model_path, path, tmp_path / "vectors", {"shard_size": 5}, num_devices=1)
    from_vectors, _ = mine(lines, load_corpus(tmp_path / "vectors", model, "", {}), model, rules)
    for line, expected in zip(from_vectors, found, strict=True):
        assert line["negatives"] == expected["negatives"]
        np.testing.assert_allclose(line["scores"], expected["scores"], atol=1e-5)


def test_rules_that_contradict_each_other_are_errors(model_path):
    model = bert_jax.load(model_path)
    lines = [Query("a", "the river", "the old king", (), "line 1")]
    for rules, name in (
        ({"range_max": 2, "num_negatives": 3}, "range_max=2"),
        ({"sampling": "all"}, "sampling=all"),
        ({"range_min": -1}, "range_min=-1"),
    ):
        with pytest.raises(ValueError, match=name):
            mine(lines, None, model, MiningRules(**rules))
    with pytest.raises(ValueError, match="cross_encoder"):
        mine(lines, Corpus([], list), model, MiningRules(), cross_encoder=model)
    found, counts = mine(lines, None, model, MiningRules())
    assert not found and counts["lines with too few negatives, left out"] == 1
