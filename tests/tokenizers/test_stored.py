"""Tokenizers as earlier versions stored them do what they did: tests/golden/stored_tokenizers."""

import base64
import gzip
import json
import warnings

import pytest

from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.golden import make_stored_tokenizers as golden
from tests.helpers.commands import ROOT

GOLDEN = json.loads(gzip.decompress((ROOT / "tests/golden/stored_tokenizers.json.gz").read_bytes()))
EARLIER = {each["name"]: each for each in GOLDEN["tokenizers"]}


def assert_does_the_same(tokenizer, name):
    found = json.loads(json.dumps(golden.describe(tokenizer)))
    for key, expected in EARLIER[name]["does"].items():
        assert found[key] == expected, key
    # By it, a run knows whether it is resumed with the same tokenizer.
    assert tokenizer.sha256 == EARLIER[name]["stored"]["sha256"]


@pytest.mark.parametrize("name", EARLIER)
def test_vocabulary_of_an_earlier_checkpoint_is_the_same_tokenizer(name, tmp_path):
    path = tmp_path / "checkpoints/7/vocabulary/metadata"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(EARLIER[name]["stored"]))
    assert_does_the_same(load_tokenizer(tmp_path), name)


@pytest.mark.parametrize("name", EARLIER)
def test_vocabulary_of_an_earlier_corpus_is_the_same_tokenizer(name, tmp_path):
    stored = EARLIER[name]["stored"]
    path = tmp_path / stored["filename"]
    path.write_bytes(base64.b64decode(stored["base64"]))
    assert_does_the_same(load_tokenizer(path), name)
    assert_does_the_same(load_tokenizer(tmp_path), name)


@pytest.mark.parametrize("name", [name for name, each in EARLIER.items() if each["directory"]])
def test_directory_of_transformers_is_the_tokenizer_of_earlier_versions(name, tmp_path):
    for filename, content in EARLIER[name]["directory"].items():
        (tmp_path / filename).write_bytes(base64.b64decode(content))
    with warnings.catch_warnings(action="error"):
        assert_does_the_same(load_tokenizer(tmp_path), name)
