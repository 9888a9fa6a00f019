"""Multi-vector models in MultiVectorEncoder: 500 texts there and back, and earlier formats."""

import json
import string

import jax
import numpy as np
import pytest
import safetensors.numpy
from tokenizers import AddedToken

import bert_jax
from bert_jax.checkpoints.export import save_huggingface
from tests.helpers.corpora import texts
from tests.helpers.models import write_head

st = pytest.importorskip("sentence_transformers")
transformers = pytest.importorskip("transformers")

HEAD = {
    "task": "multi_vector",
    "labels": [],
    "projections": [{"size": 12, "has_bias": False, "activation": "identity"}],
    "normalize": True,
    "query_expansion": {"strategy": "fixed", "length": 16, "attend": False, "token": None},
    "skip_words": list(string.punctuation),
    "prompts": {"query": "the king ", "document": "a "},
    "max_seq_length": 48,
    "max_query_length": 16,
}
CASES = {
    "hidden masks": {},
    "attended masks": {"query_expansion": HEAD["query_expansion"] | {"attend": True}},
    "long queries": {
        "query_expansion": HEAD["query_expansion"] | {"strategy": "min", "token": "king"},
        "max_query_length": 40,
    },
    "no masks": {"query_expansion": None, "skip_words": []},
    "not normalized": {"normalize": False, "similarity": "meanmaxsim"},
    "two dense layers": {
        "projections": [
            {"size": 24, "has_bias": True, "activation": "tanh"},
            *HEAD["projections"],
        ]
    },
}
ALL = texts(500)
QUERIES, PASSAGES = [text[:40] for text in ALL[:100]], ALL[100:]


def export(path, folder, **options):
    """Exports a checkpoint; returns the loaded checkpoint."""
    model = bert_jax.load(path)
    # Sharp attention, as of weights near 1, would make rounding errors larger.
    model.params = jax.tree.map(lambda values: 0.3 * values, model.params)
    save_huggingface(folder, model.params, model.settings, model.tokenizer, **options)
    return model


def vectors_of(model):
    return model.encode_tokens(QUERIES, "query"), model.encode_tokens(PASSAGES)


def assert_equals(model, theirs):
    """Compares the vectors of 500 texts, and their MaxSim, with those of MultiVectorEncoder."""
    expected = (
        theirs.encode_query(QUERIES, convert_to_numpy=True),
        theirs.encode_document(PASSAGES, convert_to_numpy=True),
    )
    found = vectors_of(model)
    for own, other in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        assert own.shape == other.shape
        np.testing.assert_allclose(own, other, atol=1e-5)
    scores = theirs.similarity(*expected).numpy()
    np.testing.assert_allclose(model.similarity(*found), scores, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*texts are truncated")
@pytest.mark.parametrize("name", CASES)
def test_vectors_and_scores_are_equal_there_and_back(name, tmp_path):
    head = HEAD | CASES[name]
    ours = export(write_head(tmp_path, **head), tmp_path / "st")
    theirs = st.MultiVectorEncoder(str(tmp_path / "st"), device="cpu")
    assert_equals(ours, theirs)
    theirs[0].model.config.bert_jax_head = None  # As in a model that never was ours.
    theirs.save_pretrained(str(tmp_path / "back"))
    back = bert_jax.load(tmp_path / "back")
    assert {key: back.head[key] for key in head} == head
    assert_equals(back, theirs)


@pytest.mark.filterwarnings("ignore:.*texts are truncated")
def test_files_for_pylate_are_read_by_both(tmp_path):
    ours = export(write_head(tmp_path, **HEAD), tmp_path / "pylate", for_pylate=True)
    stored = json.loads((tmp_path / "pylate/config_sentence_transformers.json").read_text())
    assert stored["model_type"] == "ColBERT" and stored["query_length"] == 16
    theirs = st.MultiVectorEncoder(str(tmp_path / "pylate"), device="cpu")
    assert_equals(ours, theirs)
    assert_equals(bert_jax.load(tmp_path / "pylate"), theirs)


@pytest.mark.filterwarnings("ignore:.*texts are truncated")
@pytest.mark.parametrize("normalized", [False, True])
def test_prefixes_of_pylate_are_one_token(tmp_path, normalized):
    """PyLate adds "[Q] " to the vocabulary, in files where it is not found in a text."""
    export(
        write_head(tmp_path, **HEAD | {"prompts": {"query": "", "document": ""}}), tmp_path / "st"
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "st")
    prefixes = {"query_prefix": "[Q] ", "document_prefix": "[D] "}
    tokenizer.add_tokens([AddedToken(each, normalized=normalized) for each in prefixes.values()])
    model = transformers.AutoModel.from_pretrained(tmp_path / "st")
    model.resize_token_embeddings(len(tokenizer))
    model.config.bert_jax_head = None
    directory = tmp_path / "pylate"
    export(write_head(tmp_path / "other", **HEAD), directory, for_pylate=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    path = directory / "config_sentence_transformers.json"
    values = json.loads(path.read_text()) | prefixes
    values["prompts"] = {}
    path.write_text(json.dumps(values))
    back = bert_jax.load(directory)
    ids = back.tokenizer.encode("[Q] the king")
    assert ids[0] == tokenizer.convert_tokens_to_ids("[Q] ") and len(ids) == 3
    theirs = st.MultiVectorEncoder(str(directory), device="cpu")
    assert_equals(back, theirs)
    # The same prefixes when written again.
    save_huggingface(tmp_path / "again", back.params, back.settings, back.tokenizer)
    assert_equals(back, st.MultiVectorEncoder(str(tmp_path / "again"), device="cpu"))
    options = {"for_pylate": True}
    save_huggingface(tmp_path / "new", back.params, back.settings, back.tokenizer, **options)
    stored = json.loads((tmp_path / "new/config_sentence_transformers.json").read_text())
    assert {key: stored[key] for key in prefixes} == prefixes
    assert_equals(back, st.MultiVectorEncoder(str(tmp_path / "new"), device="cpu"))


@pytest.mark.filterwarnings("ignore:.*texts are truncated")
def test_stanford_colbert_is_read(tmp_path):
    export(write_head(tmp_path, **HEAD), tmp_path / "st")
    model = transformers.AutoModel.from_pretrained(tmp_path / "st")
    tensors = {f"bert.{name}": each.numpy() for name, each in model.state_dict().items()}
    dense = safetensors.numpy.load_file(tmp_path / "st/1_Dense/model.safetensors")
    directory = tmp_path / "stanford"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "st")
    tokenizer.save_pretrained(directory)
    safetensors.numpy.save_file(tensors | dense, directory / "model.safetensors", {"format": "pt"})
    values = json.loads((tmp_path / "st/config.json").read_text())
    values["architectures"] = ["HF_ColBERT"]
    del values["bert_jax_head"]
    (directory / "config.json").write_text(json.dumps(values))
    metadata = {"query_maxlen": 12, "doc_maxlen": 40, "query_token_id": "king", "dim": 12}
    (directory / "artifact.metadata").write_text(json.dumps(metadata | {"doc_token_id": "river"}))
    ours = bert_jax.load(directory)
    assert ours.head["max_query_length"] == 12 and ours.head["max_seq_length"] == 40
    assert_equals(ours, st.MultiVectorEncoder(str(directory), device="cpu"))
