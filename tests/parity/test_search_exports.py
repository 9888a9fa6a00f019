"""Exports of search models in sentence-transformers' classes, and their files read back."""

import jax
import numpy as np
import pytest

import bert_jax
from bert_jax.checkpoints.export import save_huggingface
from tests.helpers.corpora import texts
from tests.helpers.models import write_head

st = pytest.importorskip("sentence_transformers")

DENSE = {
    "cosine": {"normalize": True},
    "dot": {"normalize": False, "pooling": ["cls", "max"]},
    "truncated": {"normalize": False, "truncate_dim": 5, "similarity": "euclidean"},
    "dense layers": {
        "normalize": True,
        "projections": [
            {"size": 24, "has_bias": True, "activation": "tanh"},
            {"size": 12, "has_bias": False, "activation": "identity"},
        ],
    },
}
SPARSE = {
    "splade": {},
    "sum": {"pooling": "sum", "similarity": "cosine"},
    "top-k and prompts": {
        "top_k": 5,
        "activation": "log1p_relu",
        "prompts": {"query": "the river ", "document": "a "},
        "prompt": "a ",
    },
}


def export(path, folder):
    """Exports a checkpoint; returns the loaded checkpoint."""
    model = bert_jax.load(path)
    # Sharp attention, as of weights near 1, would make rounding errors larger.
    model.params = jax.tree.map(lambda values: 0.3 * values, model.params)
    save_huggingface(folder, model.params, model.settings, model.tokenizer)
    return model


@pytest.mark.parametrize("name", DENSE)
def test_vectors_and_similarities_are_equal_there_and_back(name, tmp_path):
    head = {"task": "embedding", "labels": [], "pooling": "mean", "max_seq_length": 64}
    ours = export(write_head(tmp_path, **head | DENSE[name]), tmp_path / "st")
    theirs = st.SentenceTransformer(str(tmp_path / "st"), device="cpu")
    theirs.save_pretrained(str(tmp_path / "back"))
    back = bert_jax.load(tmp_path / "back")
    inputs = texts(500)
    expected = theirs.encode(inputs)
    for model in (ours, back):
        vectors = model.encode(inputs)
        np.testing.assert_allclose(vectors, expected, atol=1e-5 * np.abs(expected).max())
        np.testing.assert_allclose(
            model.similarity(vectors[:50], vectors[50:]),
            theirs.similarity(expected[:50], expected[50:]),
            atol=1e-5,
            rtol=5e-5,  # Torch computes distances from products.
        )
    # Theirs are divided by their length only on request.
    shorter = theirs.encode(inputs[:50], truncate_dim=4, normalize_embeddings=True)
    np.testing.assert_allclose(
        back.encode(inputs[:50], truncate_dim=4, normalize=True), shorter, atol=1e-5
    )


def test_scores_of_a_cross_encoder_are_equal_there_and_back(tmp_path):
    head = {"task": "multiple_choice", "labels": ["score"], "max_seq_length": 64}
    ours = export(write_head(tmp_path, **head, max_query_length=32), tmp_path / "st")
    theirs = st.CrossEncoder(str(tmp_path / "st"), device="cpu")
    pairs = list(zip(texts(500), texts(500, seed=1), strict=True))
    pairs = [(first[:60], second[:60]) for first, second in pairs]
    expected = theirs.predict(pairs)
    theirs.config.bert_jax_head = None  # As in a model that never was ours.
    theirs.save_pretrained(str(tmp_path / "back"))
    back = bert_jax.load(tmp_path / "back")
    assert back.head["max_seq_length"] == 64
    for model in (ours, back):
        np.testing.assert_allclose(model.score_pairs(pairs), expected, atol=1e-5)


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_vectors_are_equal_there_and_back(name, tmp_path):
    head = {"task": "sparse_embedding", "labels": [], "max_seq_length": 64} | SPARSE[name]
    ours = export(write_head(tmp_path, **head), tmp_path / "st")
    theirs = st.SparseEncoder(str(tmp_path / "st"), device="cpu")
    theirs[0].model.config.bert_jax_head = None  # As in a model that never was ours.
    theirs.save_pretrained(str(tmp_path / "back"))
    back = bert_jax.load(tmp_path / "back")
    assert back.head == ours.head == head
    inputs = texts(500)
    for prompt_name in (None, "query"):
        name = prompt_name if "prompts" in head else None
        expected = theirs.encode(inputs, prompt_name=name, convert_to_sparse_tensor=False)
        similarities = theirs.similarity(expected[:50], expected[50:])
        for model in (ours, back):
            vectors = model.encode_sparse(inputs, prompt_name=prompt_name)
            np.testing.assert_allclose(vectors.toarray(), expected.numpy(), atol=1e-5)
            found = model.similarity(vectors[:50], vectors[50:])
            np.testing.assert_allclose(found, similarities.numpy(), atol=1e-5, rtol=1e-5)
