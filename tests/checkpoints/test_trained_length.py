"""Up to which length positions are trained: stored, exported, and said where inputs are longer."""

import json
import warnings

import pytest

import bert_jax
from bert_jax.checkpoints.export import save_huggingface
from bert_jax.checkpoints.native import write_checkpoint
from bert_jax.checkpoints.parameters import LoadedModel, trained_length
from bert_jax.checkpoints.read import read_model
from bert_jax.pretrain import trained_lengths
from tests.helpers.corpora import write_vocabulary
from tests.helpers.models import write_weights

TRAINED = 8  # of the 32 positions of the model
LONG, SHORT = "river " * 20, "river water"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model whose training reached the first eight of its positions."""
    directory = tmp_path_factory.mktemp("models")
    write_weights(directory / "all", write_vocabulary(directory / "vocab.txt"), ("north", "south"))
    params, settings, tokenizer, _ = read_model(directory / "all")
    settings["head"]["max_seq_length"] = 32
    settings |= {"trained_length": TRAINED}
    write_checkpoint(directory / "short", params, settings, tokenizer)
    return directory / "short"


METHODS = {
    "encode": lambda model, text: model.encode(text),
    "hidden_states": lambda model, text: model.hidden_states(text),
    "attention": lambda model, text: model.attention(text),
    "classify": lambda model, text: model.classify(text),
}


@pytest.mark.parametrize("name", METHODS)
def test_input_beyond_the_trained_positions_warns_once(checkpoint, name):
    model = bert_jax.load(checkpoint)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        METHODS[name](model, SHORT)
    with pytest.warns(UserWarning, match="22 tokens, but the model was trained on at most 8"):
        METHODS[name](model, LONG)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        METHODS[name](model, LONG)


def test_saved_model_keeps_its_trained_length(checkpoint, tmp_path):
    bert_jax.load(checkpoint).save(tmp_path / "saved")
    assert bert_jax.load(tmp_path / "saved").settings["trained_length"] == TRAINED


def test_export_has_the_trained_length_as_the_maximum_of_its_tokenizer(checkpoint, tmp_path):
    params, settings, tokenizer, _ = read_model(checkpoint)
    params, settings = {"encoder": params["encoder"]}, {**settings, "modules": ["encoder"]}
    del settings["head"]
    save_huggingface(tmp_path / "export", params, settings, tokenizer)
    limits = {}
    for name in ("tokenizer_config.json", "config.json"):
        limits |= json.loads((tmp_path / "export" / name).read_text(encoding="utf-8"))
    assert limits["model_max_length"] == TRAINED and limits["max_position_embeddings"] == 32
    assert "at most: 8 tokens" in (tmp_path / "export/README.md").read_text(encoding="utf-8")
    assert trained_length(read_model(tmp_path / "export").settings) == TRAINED


def counts(rows: int, length: int, fill: float) -> dict:
    return {
        "splits": {"train": {"rows": rows, "tokens": round(rows * length * fill), "fill": fill}}
    }


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        ({"trained_length": 64}, 64),
        ({"corpora": [counts(1000, 128, 0.9713), counts(99, 512, 0.8766)]}, 512),
        ({"corpora": [counts(1000, 128, 0.9713)], "init_from": "other"}, None),
    ],
)
def test_checkpoints_of_earlier_versions_have_the_length_of_their_rows(settings, expected):
    assert trained_length(settings) == expected


class Phase:
    def __init__(self, length):
        self.train = self
        self.max_seq_length = length


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (None, [64, 128]),
        ({"trained_length": 16}, [64, 128]),
        ({"trained_length": 256}, [256, 256]),
        ({"init_from": "unknown"}, [None, None]),
    ],
)
def test_each_phase_trains_the_positions_of_its_rows_beside_those_of_the_weights(source, expected):
    model = None if source is None else LoadedModel({}, source, None, None)
    assert trained_lengths([Phase(64), Phase(128)], model) == expected
