"""The stages of experiments/search.py: a small model goes through all; what they hand on."""

import itertools
import json
import random

import numpy as np
import pytest
import search

import bert_jax
from tests.helpers.corpora import WORDS, write_vocabulary
from tests.helpers.json_lines import read_lines
from tests.helpers.models import write_weights


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """Makes the study one of a small model and eight words a paragraph."""
    rng = random.Random(0)
    articles = []
    for number in range(search.HELDOUT_ARTICLES + 4):
        paragraphs = []
        for part in range(2):
            words = rng.choices(WORDS, k=8)
            identity = f"{number}-{part}"
            answers = [{"text": words[0], "answer_start": 0}]
            question = {"id": identity, "question": " ".join(words[:3]), "answers": answers}
            paragraphs.append({"context": " ".join(words), "qas": [question]})
        articles.append({"title": str(number), "paragraphs": paragraphs})
    (tmp_path / "xquad.json").write_text(json.dumps({"data": articles}))
    vocabulary = write_vocabulary(tmp_path / "vocab.txt")
    monkeypatch.setattr(
        search, "fetch", lambda _, path: path.exists() or write_weights(path, vocabulary)
    )
    monkeypatch.setattr(search, "REPORT", tmp_path / "report.md")
    monkeypatch.setattr(search, "SEARCHED_LENGTH", 16)
    monkeypatch.setattr(search, "LENGTHS", {"max_seq_length": 16, "data.max_query_length": 8})
    cross_encoder = search.CROSS_ENCODER | {"max_seq_length": 16, "data.max_query_length": 8}
    monkeypatch.setattr(search, "CROSS_ENCODER", cross_encoder)
    monkeypatch.setattr(search, "SIZES", (32, 8))
    monkeypatch.setattr(search, "QUARTER", 8)
    monkeypatch.setitem(search.BI_ENCODER, "loss.matryoshka_sizes", (32, 8))
    for settings in (search.BI_ENCODER, search.STUDENT):
        monkeypatch.setitem(settings, "similarity.vector_size", 32)
        monkeypatch.setitem(settings, "freeze_layers", 0)
    monkeypatch.setattr(search, "MINING", ("--relative_margin=-1", "--min_score=-1"))
    return tmp_path


@pytest.mark.exhaustive
def test_all_stages_of_a_small_model_are_reported(workdir, monkeypatch):
    search.run_study(workdir / "xquad.json", workdir / "runs", num_seeds=1)
    report = (workdir / "report.md").read_text()
    scores = [line for line in report.splitlines() if line.startswith("| ")][2:]
    assert len(scores) == 11
    seed = workdir / "runs/test/seed_0"
    logits, taught = read_lines(seed / "taught_logits.jsonl"), read_lines(seed / "taught.jsonl")
    for one, two in zip(logits, taught, strict=True):
        own = [one["positive_score"], *one["scores"]]
        expected = np.multiply(own, search.TEMPERATURE)
        np.testing.assert_allclose([two["positive_score"], *two["scores"]], expected)
    heldout = {line["id"] for line in read_lines(workdir / "runs/test/data/dev.jsonl")}
    assert not heldout & {line["id"] for line in read_lines(seed / "mined.jsonl")}

    monkeypatch.setattr(search, "run_command", None)  # All is there: nothing runs again.
    search.run_study(workdir / "xquad.json", workdir / "runs", num_seeds=1)
    assert (workdir / "report.md").read_text() == report


@pytest.mark.slow
def test_choosing_settings_leaves_the_test_articles_out(workdir, monkeypatch):
    monkeypatch.setattr(search, "HELDOUT_ARTICLES", 3)
    articles = json.loads((workdir / "xquad.json").read_text())["data"]
    contexts = [paragraph["context"] for article in articles for paragraph in article["paragraphs"]]
    data = search.prepare(workdir / "runs", workdir / "xquad.json", chooses=True)
    assert [line["text"] for line in read_lines(data / "passages.jsonl")] == contexts[:-6]
    assert [line["positive"] for line in read_lines(data / "dev.jsonl")] == contexts[-12:-6]


def test_score_of_a_passage_is_the_mean_of_it_and_its_best_sentence():
    rng = np.random.default_rng(0)
    sizes = {"queries": 5, "passages": 3, "sentences": 6}
    arrays = {name: rng.normal(size=(size, 4)) for name, size in sizes.items()}
    vectors = search.TextVectors(arrays, np.array([0, 1, 1, 1, 2, 2]), positives=[])
    similarities = search.add_sentences(vectors)

    def cosine(x, y):
        return x @ y / np.sqrt((x @ x) * (y @ y))

    for query, row in zip(arrays["queries"], similarities, strict=True):
        for index, passage in enumerate(arrays["passages"]):
            own = arrays["sentences"][vectors.owners == index]
            best = max(cosine(query, sentence) for sentence in own)
            np.testing.assert_allclose(row[index], (cosine(query, passage) + best) / 2)


def test_rotations_are_multiplied(tmp_path):
    vocabulary = write_vocabulary(tmp_path / "vocab.txt")
    models = [tmp_path / name for name in ("first", "second", "third")]
    write_weights(models[0], vocabulary)
    size = bert_jax.load(models[0]).config.hidden_size
    rng, expected = np.random.default_rng(0), np.eye(size)
    for source, output in itertools.pairwise(models):
        vectors = rng.normal(size=(9, size)).astype(np.float32)
        components = search.principal_components(vectors)
        np.testing.assert_allclose(components.T @ components, np.eye(size), atol=1e-5)
        search.write_rotated(source, components, output)
        expected = expected @ components
        rotated = bert_jax.load(output)
        np.testing.assert_allclose(rotated.params["projection_0"]["kernel"], expected, atol=1e-5)
        assert rotated.settings["head"]["projections"] == [search.dense_layer(size)]
