"""Stored tokenizers do what they did when earlier versions stored them in another form."""

import base64
import gzip
import itertools
import json
import pickle
import warnings

import pytest
import tokenizers

from bert_jax.data.features import make_sequence
from bert_jax.tokenizers.tokenizer import load_tokenizer, tokenizer_from_bytes
from tests.golden import make_stored_tokenizers as golden
from tests.helpers.commands import ROOT
from tests.helpers.corpora import store_tokenizer, write_vocabulary

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


def read_earlier(name):
    stored = EARLIER[name]["stored"]
    return tokenizer_from_bytes(stored["filename"], base64.b64decode(stored["base64"]))


@pytest.mark.parametrize("name", EARLIER)
def test_stored_tokenizer_is_the_same_tokenizer(name, tmp_path):
    tokenizer = read_earlier(name)
    stored = store_tokenizer(tokenizer, tmp_path / "stored")
    assert_does_the_same(stored, name)
    assert stored.files() == tokenizer.files()
    for filename in tokenizer.files():
        assert load_tokenizer(tmp_path / "stored" / filename).sha256 == tokenizer.sha256
    assert_does_the_same(pickle.loads(pickle.dumps(stored)), name)


@pytest.mark.parametrize("name", [name for name in EARLIER if name != "sentencepiece"])
def test_the_library_alone_joins_texts_as_the_tokenizer_does(name):
    tokenizer = read_earlier(name)
    alone = tokenizers.Tokenizer.from_str(tokenizer.files()["tokenizer.json"].decode())
    special = tokenizer.stored.special_tokens
    texts = [
        text for text in GOLDEN["texts"] if not any(token in text for token in special if token)
    ]
    assert len(texts) > 40
    for first, second in itertools.pairwise(texts):
        pair = alone.encode(first, second)
        tokens, start = make_sequence(tokenizer, *tokenizer.encode_batch([first, second]))
        assert pair.ids == tokens.tolist(), (first, second)
        assert pair.type_ids == [0] * start + [1] * (len(tokens) - start)
    # It reads the special tokens in a text, which a tokenizer here does not.
    for token, index in zip(special, EARLIER[name]["does"]["special_ids"], strict=True):
        if token not in (None, special.unk):
            assert index in alone.encode(f"the {token}", add_special_tokens=False).ids
            assert index not in tokenizer.encode(f"the {token}")


def change_token(directory):
    path = directory / "tokenizer.json"
    path.write_text(path.read_text().replace("river", "rover"))


def change_layout(directory, **changes):
    path = directory / "layout.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change_token, r"tokenizer\.json is damaged, or was changed"),
        (lambda c: (c / "layout.json").write_text("{"), r"layout\.json is not JSON"),
        (lambda c: change_layout(c, sequence={"x": 1}), r"layout\.json is damaged: TypeError"),
        (lambda c: change_layout(c, special_tokens={"pad": "[P]"}), r"json lacks \[P\]"),
    ],
)
def test_damaged_files_are_clear_errors(damage, message, tmp_path):
    store_tokenizer(load_tokenizer(write_vocabulary(tmp_path / "vocab.txt")), tmp_path / "stored")
    damage(tmp_path / "stored")
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path / "stored")


def test_vocabulary_beside_a_stored_tokenizer_is_read_alone(tmp_path):
    """As of a corpus that was built where the vocabulary is."""
    tokenizer = store_tokenizer(read_earlier("cased"), tmp_path / "stored")
    path = write_vocabulary(tmp_path / "stored/vocab.txt")
    assert load_tokenizer(tmp_path / "stored").sha256 == tokenizer.sha256
    assert (
        load_tokenizer(path).sha256 == load_tokenizer(write_vocabulary(tmp_path / "v.txt")).sha256
    )
