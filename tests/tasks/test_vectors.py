"""Vectors in files, without a model: their ids, complete folders, and scores of a search."""

import json
import types

import numpy as np
import pytest

from bert_jax.inference.prediction_files import describe_model
from bert_jax.tasks import vectors as vectors_module
from bert_jax.tasks.retrieval_scores import rank_scores
from bert_jax.tasks.search import Found
from bert_jax.tasks.task import TrainedHead
from bert_jax.tasks.vectors import (
    SearchPredictor,
    VectorPredictor,
    check_model,
    open_vectors,
    write_vectors,
)
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import write_vocabulary
from tests.helpers.json_lines import write_lines

PASSAGES = ["the king", "the river", "The  river", "old", "day"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "vocab.txt")
    return TrainedHead({}, {}, load_tokenizer(path), 64)


@pytest.fixture(autouse=True)
def search_without_compilation(monkeypatch):
    def by_sorting(queries, shards, top_k):
        scores = queries @ np.concatenate(shards).T
        indices = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
        return Found(np.take_along_axis(scores, indices, axis=1), indices)

    monkeypatch.setattr(vectors_module, "search", by_sorting)


def write(path, texts=PASSAGES, ids=None):
    """Writes vectors of passages; their first values are 5, 4, ..., those of the rivers 4."""
    ids = [str(n) for n in range(len(texts))] if ids is None else ids
    vectors = [np.float32([4 if "river" in each else 5 - n]) for n, each in enumerate(texts)]
    named = [{"id": id_, "text": text} for id_, text in zip(ids, texts, strict=True)]
    write_vectors(path, [list(zip(named, vectors, strict=True))])
    return path


def search(trained, tmp_path, lines, top_k=10):
    """Returns the ids and results of a run, and its scores."""
    options = {"passages": str(tmp_path / "passages.npy"), "top_k": top_k}
    predictor = SearchPredictor(trained, options)
    groups = list(predictor.read(write_lines(tmp_path / "queries.jsonl", lines)))
    predictor.features(groups)
    found = predictor.describe(groups, [np.ones((1, 1), np.float32)] * len(groups))
    return found, predictor.scores()


@pytest.mark.parametrize(
    ("lines", "ranks", "grades"),
    [
        # Twice a positive, on one line and on another, and as a copy: one of rank 2.
        (
            [
                {"query": "a", "positives": ["the river", "THE river"]},
                {"query": "b", "positive": "old"},
                {"query": "a", "positive": "the river"},
            ],
            [[2], [3]],
            [[1], [1]],
        ),
        # Two that are not wrong before each other; one that no passage equals.
        ([{"query": "a", "positives": ["the king", "the river", "road"]}], [[1, 2, np.inf]], None),
        # Grades order a tie and weigh.
        (
            [
                {"query": "a", "passage": "the king", "label": 1},
                {"query": "a", "passage": "old", "label": 3},
            ],
            [[1, 3]],
            [[1, 3]],
        ),
    ],
)
def test_scores_are_those_of_distinct_graded_positives(lines, ranks, grades, trained, tmp_path):
    write(tmp_path / "passages.npy")
    found, scores = search(trained, tmp_path, lines)
    grades = None if grades is None else [np.array(each) for each in grades]
    expected = rank_scores([np.array(each) for each in ranks], grades, cutoffs=(1, 10))
    assert scores == pytest.approx(expected | {"queries": len(ranks)})
    # The lines of labels of a query have one id.
    assert len(found) == (1 if "label" in lines[0] else len(lines))


def test_two_positives_with_equal_scores_at_the_top_have_ranks_1_and_2(trained, tmp_path):
    write(tmp_path / "passages.npy", ["the river", "a river", "old"])
    lines = [{"query": "a", "positives": ["the river", "a river"]}]
    assert search(trained, tmp_path, lines)[1]["ndcg_at_10"] == 1


def test_each_id_gets_the_results_of_its_query_and_has_one_text(trained, tmp_path):
    write(tmp_path / "passages.npy")
    lines = [{"id": "z", "query": "a"}, {"id": "y", "query": "b"}, {"id": "x", "query": "a"}]
    found, _ = search(trained, tmp_path, lines)
    assert sorted((line["id"], line["query"]) for line in found) == [
        ("x", "a"),
        ("y", "b"),
        ("z", "a"),
    ]
    with pytest.raises(ValueError, match=r"line 2: .*'x'"):
        search(trained, tmp_path, [{"id": "x", "query": "a"}, {"id": "x", "query": "b"}])


def test_an_id_of_two_passages_is_an_error_of_a_search(trained, tmp_path):
    write(tmp_path / "passages.npy", ids=["0", "1", "2", "3", "1"])
    with pytest.raises(ValueError, match=r"line 5: .*'1'"):
        search(trained, tmp_path, [{"query": "a"}])


def read(trained, path, predictor=None, **options):
    names = {"text": "text", "title": "", "id": "", "header_lines": 1}
    names |= {"shard_size": 0, "dtype": "float32"}
    predictor = predictor or VectorPredictor(trained, names | options)
    return [record.id for record in predictor.read(path)], predictor


def test_passages_without_ids_are_numbered_over_all_files(trained, tmp_path):
    path = write_lines(tmp_path / "in.jsonl", [{"text": "the"}] * 2)
    ids, predictor = read(trained, path)
    assert ids + read(trained, path, predictor)[0] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("column", ["", "id"])
@pytest.mark.parametrize("ids", [("1", ""), ("", "0")])
def test_ids_are_of_all_passages_or_of_none(ids, column, trained, tmp_path):
    path = write_lines(tmp_path / "in.jsonl", [{"id": each, "text": "the"} for each in ids])
    with pytest.raises(ValueError, match=r"line [12]: .*id"):
        read(trained, path, id=column)


def test_values_that_are_not_finite_name_the_passage_and_no_dtype(tmp_path):
    blocks = [[({"id": "a"}, np.ones(2))], [({"id": "b"}, np.ones(2)), ({"id": "c"}, [1, np.nan])]]
    with pytest.raises(ValueError, match=r"^the vector .*'c'"):
        write_vectors(tmp_path / "out.npy", blocks)
    with pytest.raises(ValueError, match=r"^dtype=float16"):
        write_vectors(tmp_path / "half.npy", [[({"id": "a"}, np.array([1e6]))]], "float16")


def test_a_model_is_its_parameters_tokenizer_and_head(trained):
    head = {"pooling": ("cls", "mean"), "prompts": {"query": "q: "}}
    model = types.SimpleNamespace(params={"a": np.ones(1)}, tokenizer=trained.tokenizer, head=head)
    described = describe_model(model)
    assert described == json.loads(json.dumps(described)) and described["head"]["prompts"]
    model.head = head | {"normalize": True}
    model.tokenizer = types.SimpleNamespace(sha256="0" * 64)
    model.params = {"a": np.zeros(1)}
    assert not any(described[name] == value for name, value in describe_model(model).items())


def test_an_unfinished_folder_or_another_model_is_an_error(tmp_path):
    for number in range(3):
        write(tmp_path / f"a-0000{number}.npy")
    settings = {"model": "m", "head": {"pooling": "mean"}}
    stored = tmp_path / "shards.json"
    for counts, message in (
        ({}, "unfinished"),
        ({"num_shards": {"a.npy": 4}}, "1 of 4 shards are missing, such as a-00003.npy"),
        ({"num_shards": {"a.npy": 2}}, "a-00002.npy"),
    ):
        stored.write_text(json.dumps(settings | counts))
        with pytest.raises(ValueError, match=message):
            open_vectors(tmp_path)
    stored.write_text(json.dumps(settings | {"num_shards": {"a.npy": 3}}))
    assert len(open_vectors(tmp_path)) == 3
    check_model(tmp_path, settings)
    for other in ({"model": "n"}, {"head": {"pooling": "cls"}}):
        with pytest.raises(ValueError, match=next(iter(other))):
            check_model(tmp_path, settings | other)
