"""Data sets by name with the library `datasets`: folders of `save_to_disk`, and of files."""

import csv

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

import bert_jax
from bert_jax.configs.finetune import retrieval, squad, tagging, text_classification
from bert_jax.data.hub import open_hub
from bert_jax.finetuning.task_data import read_task
from bert_jax.predict import predict
from bert_jax.tasks.hub_fields import with_hub_fields
from bert_jax.tasks.tables import content_hash, iterate_rows, read_table
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import write_vocabulary
from tests.helpers.models import write_random_encoder

datasets = pytest.importorskip("datasets")

CLASSES = datasets.ClassLabel(names=["not_equivalent", "equivalent"])
MRPC = datasets.Features(
    sentence1=datasets.Value("string"),
    sentence2=datasets.Value("string"),
    label=CLASSES,
    idx=datasets.Value("int32"),
)
ROWS = [
    {"sentence1": "the river", "sentence2": "a river", "label": 1, "idx": 0},
    {"sentence1": "a town", "sentence2": "the war", "label": 0, "idx": 1},
    {"sentence1": "an old road", "sentence2": "the road", "label": 1, "idx": 2},
]


@pytest.fixture
def tokenizer(tmp_path):
    return load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))


@pytest.fixture
def mrpc(tmp_path):
    """A folder with GLUE's MRPC in its form on the Hub, where the labels of test are hidden."""
    hidden = [row | {"label": -1} for row in ROWS]
    splits = {"train": ROWS, "validation": ROWS[:2], "test": hidden}
    return save(tmp_path / "mrpc", splits, MRPC)


def save(folder, splits, features=None) -> str:
    datasets.DatasetDict(
        {name: datasets.Dataset.from_list(rows, features) for name, rows in splits.items()}
    ).save_to_disk(folder)
    return str(folder)


def task_of(module, tokenizer, hub: str, **data):
    config = module.get_config()
    config.max_seq_length = 32
    config.data.update({"hub": hub} | data)
    config = with_hub_fields(config)
    return config.data, read_task(config, None, tokenizer)


def test_splits_columns_and_classes_of_a_data_set_are_read(mrpc, tokenizer):
    data, task = task_of(text_classification, tokenizer, mrpc)
    assert [data.train, data.dev] == [f"hub:{mrpc}#train", f"hub:{mrpc}#validation"]
    assert [data.text, data.text_pair, data.label] == ["sentence1", "sentence2", "label"]
    assert task.labels == ("equivalent", "not_equivalent")
    assert [feature.label for feature in task.train] == [0, 1, 0]
    dev, test = task.splits
    assert dev.score and not test.score
    assert task.notes["test examples without labels, so not scored"] == 3


def test_examples_of_unknown_class_are_dropped_from_splits_with_classes(tmp_path, tokenizer):
    """Those of SNLI, in each of its splits."""
    hidden = [row | {"label": -1} for row in ROWS]
    mixed = [hidden[0], *ROWS, hidden[1]]
    folder = save(
        tmp_path / "snli", {"train": mixed, "dev": hidden[:1] + ROWS, "test": mixed}, MRPC
    )
    _, task = task_of(text_classification, tokenizer, folder)
    assert [feature.label for feature in task.train] == [0, 1, 0]
    assert [len(split.features) for split in task.splits] == [3, 3]
    assert all(split.score for split in task.splits)
    notes = {name: count for name, count in task.notes.items() if "unknown class" in name}
    assert [*notes.values()] == [2, 1, 2] and len(read_table(f"hub:{folder}#train", ())) == 5

    _, task = task_of(
        text_classification, tokenizer, save(tmp_path / "b", {"train": mixed, "dev": hidden}, MRPC)
    )
    assert task.splits[0].score is None and len(task.splits[0].features) == 3


@pytest.mark.parametrize("kind", ["int32", "float32"])
def test_labels_that_are_all_minus_one_are_unknown(tmp_path, kind):
    rows = [{"text": "the river", "label": -1}] * 2
    features = datasets.Features(text=datasets.Value("string"), label=datasets.Value(kind))
    splits = {"train": [*rows, {"text": "war", "label": 2}], "test": rows}
    folder = save(tmp_path / "set", splits, features)
    assert [values["label"] for values, _ in iterate_rows(f"hub:{folder}#test")] == [None, None]
    assert [values["label"] for values, _ in iterate_rows(f"hub:{folder}#train")] == [-1, -1, 2]


def test_label_sets_and_values_are_read(tmp_path, tokenizer):
    names = datasets.ClassLabel(names=["joy", "fear"])
    features = datasets.Features(text=datasets.Value("string"), labels=datasets.List(names))
    rows = [{"text": "river", "labels": [0, 1]}, {"text": "war", "labels": []}]
    folder = save(tmp_path / "emotions", {"train": rows, "dev": rows}, features)
    data, task = task_of(text_classification, tokenizer, folder, label_separator="|")
    assert data.label == "labels" and data.dev == f"hub:{folder}#dev"
    np.testing.assert_array_equal([each.label for each in task.train], [[1, 1], [0, 0]])

    rows = [{"premise": "war", "hypothesis": "a war", "label": score} for score in (0.5, 4.8)]
    folder = save(tmp_path / "similarity", {"train": rows})
    data, task = task_of(text_classification, tokenizer, folder, regression=True)
    assert [data.text, data.text_pair] == ["premise", "hypothesis"]
    assert [each.label for each in task.train] == pytest.approx([0.5, 4.8])


def test_tags_are_read_by_name(tmp_path, tokenizer):
    names = datasets.ClassLabel(names=["O", "B-LOC", "I-LOC"])
    features = datasets.Features(
        tokens=datasets.List(datasets.Value("string")), ner_tags=datasets.List(names)
    )
    rows = [{"tokens": ["the", "river"], "ner_tags": [1, 2]}, {"tokens": ["war"], "ner_tags": [0]}]
    folder = save(tmp_path / "tags", {"train": rows, "validation": rows, "test": rows}, features)
    _, task = task_of(tagging, tokenizer, folder)
    assert task.labels == ("O", "B-LOC", "I-LOC")
    assert [each.label[1:-1].tolist() for each in task.train] == [[1, 2], [0]]
    assert [split.name for split in task.splits] == ["dev", "test"]


def test_questions_are_read(tmp_path, tokenizer):
    answers = {"text": ["old town"], "answer_start": [4]}
    row = {"id": "a", "title": "t", "context": "the old town", "question": "river"}
    folder = save(tmp_path / "squad", {"train": [row | {"answers": answers}]})
    _, task = task_of(squad, tokenizer, folder, max_query_length=8)
    assert [each.label for each in task.train] == [(4, 5)]
    assert task.notes["train lines with 'title', which is not used"] == 1


def test_queries_are_read(tmp_path, tokenizer):
    rows = [{"anchor": "river", "positive": "the river"}, {"anchor": "war", "positive": "a war"}]
    folder = save(tmp_path / "queries", {"train": rows, "validation": rows})
    data, task = task_of(retrieval, tokenizer, folder, max_query_length=16)
    assert data.dev and len(task.train) == 2 and [each.name for each in task.splits] == ["dev"]


def test_parts_of_splits_single_datasets_and_folders_of_files(mrpc, tmp_path):
    def texts(source):
        return [record.columns["sentence1"] for record in read_table(source, ())]

    everything = [row["sentence1"] for row in ROWS]
    assert texts(f"hub:{mrpc}#train[1:]+validation[:1]") == [*everything[1:], everything[0]]
    datasets.Dataset.from_list(ROWS, MRPC).save_to_disk(tmp_path / "single")
    assert texts(f"hub:{tmp_path}/single") == everything
    files = tmp_path / "files"
    files.mkdir()
    datasets.Dataset.from_list(ROWS, MRPC).to_parquet(files / "train.parquet")
    assert texts(f"hub:{files}#train") == everything
    # The hash is of the contents, wherever they are, and of no other examples.
    hashes = [
        content_hash(source, "")
        for source in (f"hub:{files}#train", f"hub:{mrpc}#train", f"hub:{mrpc}#train[1:]")
    ]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize(
    ("source", "error", "named"),
    [
        ("hub:{mrpc}#tain", ValueError, "one of train, validation, test"),
        ("hub:{mrpc}", ValueError, "one of train, validation, test"),
        ("hub:{mrpc}#train[3:]", ValueError, "holds no examples"),
        ("hub:{single}#train", ValueError, "leave out #train"),
        ("hub:{mrpc}/nowhere#train", FileNotFoundError, "/nowhere"),
        ("hub:nobody/nothing:nil#train", OSError, "hub:nobody/nothing:nil"),
    ],
)
def test_what_cannot_be_read_is_named(mrpc, tmp_path, monkeypatch, source, error, named):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    single = tmp_path / "single"
    datasets.Dataset.from_list(ROWS, MRPC).save_to_disk(single)
    with pytest.raises(error) as raised:
        list(iterate_rows(source.format(mrpc=mrpc, single=single)))
    assert named in str(raised.value)


def test_unknown_columns_are_named_with_the_fields_to_set(tmp_path, tokenizer):
    folder = save(tmp_path / "set", {"train": [{"body": "the river", "label": "a"}]})
    with pytest.raises(ValueError, match=r"'text'.*body, label.*text_pair"):
        task_of(text_classification, tokenizer, folder)


def test_data_set_without_train_is_refused(tmp_path, tokenizer):
    folder = save(tmp_path / "set", {"fold_1": ROWS, "fold_2": ROWS})
    with pytest.raises(ValueError, match=r"fold_1, fold_2.*data\.train"):
        task_of(text_classification, tokenizer, folder)


def test_fine_tuning_by_name_is_that_of_a_file_and_resumes(mrpc, tokenizer, tmp_path):
    fields = {"batch_size": 2, "num_epochs": 1.0, "max_seq_length": 16}
    weights = write_random_encoder(tmp_path / "weights", tokenizer)
    paths = {}
    for name, rows in (("train", ROWS), ("dev", ROWS[:2])):
        paths[name] = tmp_path / f"{name}.csv"
        with open(paths[name], "w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, list(ROWS[0]))
            writer.writeheader()
            writer.writerows(row | {"label": CLASSES.int2str(row["label"])} for row in rows)
    data = {"text": "sentence1", "text_pair": "sentence2"}
    of_files = {"workdir": tmp_path / "of_files", "data": data}
    by_name = {"workdir": tmp_path / "by_name"}

    def fit(train, dev, **arguments):
        return bert_jax.fit(weights, train, dev, **arguments, **fields)

    expected, scores = fit(paths["train"], paths["dev"], **of_files)
    model, result = fit(f"hub:{mrpc}", f"hub:{mrpc}", **by_name)
    assert result["dev"] == scores["dev"]
    jax.tree.map(np.testing.assert_array_equal, model.params, expected.params)
    assert model.settings["data"]["text_pair"] == "sentence2"
    assert fit(f"hub:{mrpc}", f"hub:{mrpc}", **by_name)[1] == result
    # Predictions take the columns of the run.
    scored = predict(tmp_path / "by_name", f"hub:{mrpc}#validation", tmp_path / "out.jsonl")
    assert scored["out.jsonl"]["accuracy"] == result["dev"]["accuracy"]


def test_a_part_of_a_data_set_keeps_its_features(mrpc):
    assert open_hub(f"hub:{mrpc}#train[:1]").features == MRPC


def test_fields_that_are_set_remain(mrpc):
    data = {"hub": mrpc, "train": "", "dev": "", "test": "", "label": "idx"}
    data |= {"text": "sentence2", "text_pair": ""}
    found = with_hub_fields(ConfigDict({"data": data})).data
    assert [found.text, found.text_pair, found.label] == ["sentence2", "", "idx"]
