"""The recipe of docs/python_api.md: an exported model in ONNX Runtime."""

import re

import numpy as np
import pytest

import bert_jax
from bert_jax.checkpoints.export import save_huggingface
from bert_jax.checkpoints.read import read_model
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.commands import ROOT
from tests.helpers.corpora import write_vocabulary
from tests.helpers.models import write_random_encoder

for package in ("torch", "onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(package)


def test_vectors_of_the_documented_recipe_equal_encode(tmp_path, monkeypatch):
    document = (ROOT / "docs/python_api.md").read_text()
    [recipe] = re.findall(r"### ONNX\n.*?```python\n(.*?)```", document, re.DOTALL)
    words = re.findall(r"\w+", "a boat crossed the river old king of village he paid in cash")
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt", words))
    model = read_model(write_random_encoder(tmp_path / "native", tokenizer))
    save_huggingface(tmp_path / "exported", model.params, model.settings, model.tokenizer)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(recipe, names)
    assert {path.name for path in (tmp_path / "exported/onnx").glob("model.*")} == {
        "model.onnx",
        "model.onnx.data",
    }
    vectors = bert_jax.load("native").encode(names["texts"], pooling="mean")
    assert np.std(vectors) > 0.1
    np.testing.assert_allclose(names["vectors"], vectors, atol=1e-4)
