"""Splits and columns of a data set of the Hub, without the library `datasets`."""

import sys

import pytest
from ml_collections import ConfigDict

from bert_jax.configs.finetune.text_classification import get_config
from bert_jax.data import hub
from bert_jax.tasks import tables
from bert_jax.tasks.hub_fields import find_columns, find_splits, with_hub_fields


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ("text label", {}),
        ("text sentence label", {}),
        ("sentence1 sentence2 label idx", {"text": "sentence1", "text_pair": "sentence2"}),
        ("premise hypothesis label", {"text": "premise", "text_pair": "hypothesis"}),
        ("question1 question2 label", {"text": "question1", "text_pair": "question2"}),
        ("question sentence label", {"text": "question", "text_pair": "sentence"}),
        ("sentence label idx", {"text": "sentence"}),
        ("text labels id", {"label": "labels"}),
        # Read as they are, which is an error that lists the columns.
        ("sentence1 sentence2 premise hypothesis label", {}),
        ("body topic", {}),
    ],
)
def test_columns_of_known_data_sets(columns, expected):
    assert find_columns(columns.split(), get_config().data) == expected


@pytest.mark.parametrize(
    "given", [{"text": "premise"}, {"text": "premise", "text_pair": "premise"}, {"text_pair": "a"}]
)
def test_given_columns_are_kept(given):
    data = get_config().data
    data.update(given)
    assert not find_columns(["premise", "hypothesis", "label"], data)


def test_columns_of_labels_take_the_place_of_labels():
    data = get_config().data
    data.label_columns = ("red", "blue")
    assert find_columns(["text", "red", "blue", "labels"], data) == {}


def test_splits_are_found_by_name(monkeypatch):
    names = dict.fromkeys(["train", "validation_mismatched", "dev", "test"])
    monkeypatch.setattr(hub, "open_hub_splits", lambda source: names)
    found = {"train": "hub:a:b#train", "dev": "hub:a:b#dev", "test": "hub:a:b#test"}
    assert find_splits("hub:a:b") == found
    names.pop("train")
    with pytest.raises(ValueError, match="only validation_mismatched, dev, test"):
        find_splits("hub:a:b")


@pytest.mark.parametrize(
    ("splits", "dev"),
    [
        ("validation_mismatched validation_matched", "validation_matched"),
        ("eval validation", "validation"),
        *((name, name) for name in ("dev", "valid", "val", "eval")),
        ("test", None),
    ],
)
def test_split_that_selects_the_checkpoint_is_found_or_missed(monkeypatch, caplog, splits, dev):
    names = dict.fromkeys(["train", *splits.split()])
    monkeypatch.setattr(hub, "open_hub_splits", lambda source: names)
    with caplog.at_level("WARNING"):
        assert find_splits("hub:a").get("dev") == (f"hub:a#{dev}" if dev else None)
    assert ("no split selects the checkpoint" in caplog.text) == (dev is None)


@pytest.mark.parametrize("field", ["train", "dev", "test"])
def test_hub_and_files_are_refused_together(field):
    config = get_config()
    config.data.hub, config.data[field] = "nyu-mll/glue:mrpc", "file.csv"
    with pytest.raises(ValueError, match=rf"config\.data\.hub.*config\.data\.{field}"):
        with_hub_fields(config)


def test_other_configurations_are_unchanged():
    for data in ({}, {"train": "tfds:a"}, {"hub": "", "train": [{"text": "river"}]}):
        config = ConfigDict({"data": data})
        assert with_hub_fields(config) is config


def test_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"hub:nyu-mll/glue:mrpc#train.*bert_jax\[datasets\]"):
        tables.read_table("hub:nyu-mll/glue:mrpc#train", ())


def test_default_splits_of_a_name():
    assert tables.with_split("hub:nyu-mll/glue:mrpc", "dev") == "hub:nyu-mll/glue:mrpc#validation"
    assert tables.with_split("hub:a#train[:9]", "dev") == "hub:a#train[:9]"
