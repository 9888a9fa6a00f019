"""Classification and regression on the user's own tables: CSV, TSV, JSONL and TFDS."""

import dataclasses
import json
import logging
import re

import numpy as np
import pyarrow
import pytest
import scipy
import tensorflow_datasets as tfds
from absl import flags
from ml_collections import ConfigDict, config_flags
from pyarrow import parquet

import bert_jax
from bert_jax import finetune
from bert_jax.configs.finetune.text_classification import get_config
from bert_jax.data.features import RowShape
from bert_jax.finetuning.task_data import read_task
from bert_jax.tasks import tables, text_classification
from bert_jax.tasks.labels import labels_from_config
from bert_jax.tasks.sequences import truncate_longest_first
from bert_jax.tasks.task import OUTSIDE_FRACTION
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import WORDS, write_tfds, write_vocabulary
from tests.helpers.json_lines import read_lines, write_lines
from tests.helpers.models import write_random_encoder

TRAIN = "text,label\nthe river,b\na town,a\nold road,b\n"
TRAIN_CLASS = TRAIN.replace("label", "class")
DEV = "text,label\nthe king,a\n"


@pytest.fixture
def tokenizer(tmp_path):
    return load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))


LABEL_SETS = "text,label\nthe,a|b\nroad,\nking,b\nwar,c\n"


@pytest.fixture
def read(tokenizer, tmp_path):
    def read_task(train=TRAIN, dev=DEV, test=None, suffix="csv", limit=0, **data):
        config = get_config()
        config.max_train_examples = config.max_eval_examples = limit
        for name, text in {"train": train, "dev": dev, "test": test}.items():
            if text is not None:
                path = tmp_path / f"{name}.{suffix}"
                path.write_bytes(text if isinstance(text, bytes) else text.encode())
                config.data[name] = str(path)
        config.data.update(data)
        return text_classification.get_task(config, tokenizer)

    return read_task


def test_labels_are_sorted_unless_given(read):
    task = read()
    assert task.labels == ("a", "b") and task.head.name == "classification"
    assert [feature.label for feature in task.train] == [1, 0, 1]
    assert [feature.label for feature in task.splits[0].features] == [0]
    named = read(labels=("b", "a", "c"))
    assert named.labels == ("b", "a", "c")
    assert [feature.label for feature in named.train] == [0, 1, 0]
    assert named.notes["labels"] == 3
    assert named.notes["train examples of the rarest label, 'c'"] == 0


def test_a_smoke_run_reports_each_of_its_few_steps():
    config = get_config("runlocal")
    assert config.max_train_examples / config.batch_size < 10 and config.log_every == 1


def test_equal_values_in_json_are_one_label(read):
    lines = [f'{{"text": "the", "label": {each}}}\n' for each in ("1", "1.0", '"1"', "true", "0")]
    task = read("".join(lines), dev=None, suffix="jsonl")
    assert task.labels == ("0", "1") and [each.label for each in task.train] == [1, 1, 1, 1, 0]


def test_numbers_are_the_same_labels_in_files_of_different_types(read, tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text('{"text": "war", "label": 1.0}\n{"text": "war", "label": false}\n')
    train = "text,label\nriver,0\ntown,1.0\nroad,1\n"
    task = read(train, None, test=train.replace("1.0", "01"))
    assert task.labels == ("0", "1") and task.notes["train examples of the rarest label, '0'"] == 1
    assert [each.label for each in task.train] == [0, 1, 1]
    assert [each.label for each in task.splits[0].features] == [0, 1, 1]
    config = get_config()
    config.data.update({"train": str(tmp_path / "train.csv"), "dev": str(path)})
    (dev,) = text_classification.get_task(config, load_tokenizer(tmp_path / "vocab.txt")).splits
    assert [each.label for each in dev.features] == [1, 0]


@pytest.mark.parametrize(
    ("splits", "counts"),
    [
        ({"test": "text,id\nthe king,1\n,2\n  ,3\n"}, {"test": 2}),
        ({"test": "text,label\n,a\nwar,b\n"}, {"test": 1}),
        ({"dev": "text,label\nof,a\n,\n", "test": 'text\nthe king\n""\nwar\n'}, {"test": 1}),
        ({"dev": "text,label,id\n,,1\nwar,,2\n"}, {"dev": 1}),
        ({"dev": "text,label\n,\nwar,\n"}, {"dev": 1}),
        ({"train": None, "dev": "text,label\n,a\nwar,b\n", "labels": ("a", "b")}, {"dev": 1}),
    ],
)
def test_an_empty_text_is_predicted_and_counted_unless_a_checkpoint_depends_on_it(
    read, splits, counts, tmp_path
):
    task = read(**splits)
    notes = {name: n for name, n in task.notes.items() if "empty" in name}
    assert notes == {f"{name} examples with an empty text": n for name, n in counts.items()}
    split = task.splits[-1]
    split.write([np.zeros(2)] * len(split.features), tmp_path)
    lines = (tmp_path / f"{split.name}.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"].strip() for line in lines]
    assert texts.count("") == counts[split.name]


def test_an_empty_text_of_a_pair_is_predicted(read):
    table = "text,other,label\nriver,town,a\nroad,war,b\n"
    (split,) = read(table, None, "text,other\nriver,\n,\n", text_pair="other").splits
    assert [len(each) for each in split.features] == [4, 3]


@pytest.mark.parametrize("name", ["train", "dev"])
def test_an_empty_text_to_train_on_or_to_select_by_is_an_error(read, name):
    with pytest.raises(ValueError, match=rf"{name}\.csv, line 5: 'text' is empty \(and 1 more\)"):
        read(**{name: TRAIN + " ,a\n,b\n"})


def test_tfds_gives_names_of_classes_and_any_split(tokenizer, tmp_path):
    features = {
        "text": tfds.features.Text(),
        "label": tfds.features.ClassLabel(names=["neg", "pos"]),
        "stars": np.float32,
        "parts": tfds.features.Sequence(tfds.features.Text()),  # Not read.
    }
    examples = [
        {"text": f"the {WORDS[i]} é", "label": i % 2, "stars": i + 0.2, "parts": ["a"]}
        for i in range(10)
    ]
    hidden = [examples[0] | {"label": -1}]
    write_tfds(tmp_path, "reviews", {"train": examples, "test": hidden}, features)
    files = {"train": "tfds:reviews#train[:60%]", "dev": "tfds:reviews#train[60%:]"}
    config = get_config()
    config.data.update(files | {"test": "tfds:reviews", "data_dir": str(tmp_path)})
    task = text_classification.get_task(config, tokenizer)
    dev, test = task.splits
    assert task.labels == ("neg", "pos") and task.files == files | {"test": "tfds:reviews#test"}
    assert sorted(each.label for each in [*task.train, *dev.features]) == [0] * 5 + [1] * 5
    assert len(dev.features) == 4 and test.score is None
    config.data.update({"regression": True, "label": "stars"})
    train = text_classification.get_task(config, tokenizer).train
    assert {each.label for each in train} < {np.float32(index + 0.2) for index in range(10)}


def test_pairs_are_two_segments_and_regression_labels_are_numbers(read, tokenizer):
    table = "text,other,label\nthe river,a town,0.5\nold road,new,-2\n"
    task = read(table, table, text_pair="other", regression=True)
    assert task.head.name == "regression" and [feature.label for feature in task.train] == [0.5, -2]
    first = [tokenizer.cls_id, *tokenizer.encode("the river"), tokenizer.sep_id]
    second = [*tokenizer.encode("a town"), tokenizer.sep_id]
    assert task.train[0].sequences[0].tolist() == first + second
    assert task.train[0].second_starts == (4,)
    scored = task.splits[0].score([np.float32([1.0]), np.float32([-1.5])])
    assert scored == pytest.approx(
        {
            "pearson": 1,
            "spearman": 1,
            "r2": 1 - 0.5 / 3.125,
            "mean_squared_error": 0.25,
            "mean_absolute_error": 0.5,
        }
    )
    assert task.head_settings == {"target_mean": -0.75, "target_std": 1.25}
    assert read(table, table, regression=True, raw_targets=True).head_settings == {}


@pytest.mark.parametrize(
    ("lengths", "room", "expected"),
    [
        ((2, 2), 4, (2, 2)),
        ((9, 1), 4, (3, 1)),
        ((1, 9), 4, (1, 3)),
        ((5, 4), 6, (3, 3)),
        ((4, 4), 5, (3, 2)),
        ((5, 5), 6, (3, 3)),
    ],
)
def test_the_longer_text_is_truncated_token_by_token(lengths, room, expected):
    first, second = (list(range(length)) for length in lengths)
    found = truncate_longest_first(first, second, room)
    assert tuple(map(len, found)) == expected
    while len(first) + len(second) > room:  # As released.
        (first if len(first) > len(second) else second).pop()
    assert found == (first, second)


@pytest.mark.parametrize(
    ("given", "labels"),
    [
        (["neg,pos"], ("neg", "pos")),
        (["neg, pos"], ("neg", "pos")),
        (["neg", "pos"], ("neg", "pos")),
        (["('neg','pos')"], ("neg", "pos")),
        (["0,1"], ("0", "1")),
        (["1", "0"], ("1", "0")),
        (["yes,no", "perhaps"], ("yes,no", "perhaps")),
        ([""], ()),
        ([], ()),
    ],
)
@pytest.mark.parametrize("name", ["text_classification", "glue", "conll2003"])
def test_labels_can_be_given_as_flags(name, given, labels):
    arguments = [f"--config=configs/finetune/{name}.py"]
    arguments += [f"--config.data.labels={each}" for each in given]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=arguments)
    values(["finetune", *arguments])
    assert labels_from_config(values.config) == labels


@pytest.mark.parametrize(
    ("labels", "options", "warns"),
    [
        ("1002.5 993 1010.25", {}, True),
        ("0.5 1.0", {}, True),
        ("1002.5 993 1010.25", {"regression": True}, False),
        ("1.1 1.10 1.2", {"labels": ("1.1", "1.10", "1.2")}, False),
        ("0 1.0 11", {}, False),
        ("1.5 many", {}, False),
    ],
)
def test_numbers_with_fractions_as_classes_are_a_warning(read, caplog, labels, options, warns):
    table = "text,label\n" + "".join(f"the king,{label}\n" for label in labels.split())
    read(table, table, **options)
    assert ("to predict a number, set config.data.regression=True" in caplog.text) == warns


def test_labels_given_as_numbers_match_the_text_of_the_file(read):
    table = "text,label\nthe king,0\nwar,1\n"
    task = read(table, table, labels=(1, 0))
    assert task.labels == ("1", "0") and [feature.label for feature in task.train] == [1, 0]
    with pytest.raises(ValueError, match=r"label 'b'"):
        read(labels=(0, 1))


def test_truncated_texts_are_counted(read):
    task = read(train="text,label\n" + "the " * 200 + ",a\nthe,b\n")
    assert task.notes["train examples truncated"] == 1 and task.notes["dev examples truncated"] == 0
    assert len(task.train[0]) == 128


def test_a_file_without_labels_is_predicted_but_not_scored(read, tmp_path):
    task = read(test="name,text\nx,the king\ny,war\n")
    dev, test = task.splits
    assert task.notes["test examples without labels, so not scored"] == 2
    scored = dev.score([np.array([2.0, 1.0])])
    assert scored["accuracy"] == scored["macro_f1"] == 1.0
    assert test.score is None
    test.write([np.log([0.25, 0.75]), np.log([0.5, 0.25])], tmp_path)
    lines = read_lines(tmp_path / "test.jsonl")
    probabilities = pytest.approx({"b": 0.75, "a": 0.25})
    assert lines[0] == {
        "id": "0",
        "name": "x",
        "text": "the king",
        "prediction": "b",
        "probabilities": probabilities,
    }
    assert list(lines[0]["probabilities"]) == ["b", "a"]  # The most probable first.
    assert lines[1]["prediction"] == "a"
    assert not list(tmp_path.glob("*_classes.tsv"))
    (dev,) = read(dev="text,label\nthe king,\n").splits
    assert dev.score is None


def test_two_classes_are_also_scored_by_rank_and_selected_by_it(read):
    """The positive class is the second label, here 'b'."""
    sigmoid = scipy.special.expit
    task = read(dev="text,label\nthe king,b\nwar,a\nroad,b\n", metric="average_precision")
    assert task.metric == "dev/average_precision"
    outputs = [np.float32([0, 1]), np.float32([0, 0.5]), np.float32([0, -1])]
    assert task.splits[0].score(outputs) == pytest.approx(
        {
            "accuracy": 1 / 3,
            "macro_f1": 0.25,
            "matthews": -0.5,
            "roc_auc": 0.5,
            "average_precision": (1 + 2 / 3) / 2,
            "ece": (2 * (sigmoid(1) - 0.5) + sigmoid(0.5)) / 3,  # Two are in one bin.
        }
    )
    three = "text,label\nthe king,c\nwar,a\nroad,b\n"
    outputs = [np.eye(3)[2], np.eye(3)[0], np.eye(3)[1]]
    (split,) = read(three, three).splits
    assert list(split.score(outputs)) == ["accuracy", "macro_f1", "ece"]
    with pytest.raises(ValueError, match=r"metric=roc_auc"):
        read(three, three, metric="roc_auc")


def test_predictions_have_the_label_and_the_scores_of_each_class_are_written(
    read, tmp_path, caplog
):
    task = read(dev="text,class\nthe king,b\nwar,a\nroad,b\n", label="class", train=TRAIN_CLASS)
    with caplog.at_level("INFO"):
        task.splits[0].write(
            [np.log([0.25, 0.75]), np.log([0.6, 0.4]), np.array([1.0, 0])], tmp_path
        )
    lines = read_lines(tmp_path / "dev.jsonl")
    assert [line["label"] for line in lines] == ["b", "a", "b"]
    assert [line["prediction"] for line in lines] == ["b", "a", "a"]
    table = (tmp_path / "dev_classes.tsv").read_text().splitlines()
    assert table[1:] == [
        "a\t1\t0.5\t1.0\t0.6667\t1\t0",
        "b\t2\t1.0\t0.5\t0.6667\t1\t1",
    ]
    assert "         2       1.0       0.5    0.6667  b" in caplog.text.splitlines()


@pytest.mark.parametrize(
    ("suffix", "train", "test"),
    [
        ("csv", "text,label\nriver,b|a\ntown,\nroad, b\nking,c\n", "text,label\nwar,\nking,\n"),
        ("jsonl", '{"text": "river", "label": ["b", "a"]}\n{"text": "town", "label": []}\n'
                  '{"text": "road", "label": "b"}\n{"text": "king", "label": ["c"]}\n',
                  '{"text": "war"}\n{"text": "king"}\n'),
    ],
    ids=["csv", "jsonl"],
)  # fmt: skip
def test_a_text_may_have_any_number_of_labels(suffix, train, test, read, tmp_path):
    task = read(train, train, test, suffix, label_separator="|")
    assert task.head.name == "multi_label" and task.labels == ("a", "b", "c")
    assert task.notes["train examples of the rarest label, 'a'"] == 1
    assert task.metric == "dev/micro_f1"
    labels = [[1, 1, 0], [0, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert [feature.label.tolist() for feature in task.train] == labels
    dev, unlabeled = task.splits
    assert unlabeled.score is None and unlabeled.features[0].label is None
    outputs = np.float32([[2, 1, -1], [-1, -1, -1], [-1, 1, 1], [-1, -1, -2]])
    # Of a, b and c: 1 of 1 predicted, 2 of 2, and 0 of 1 with one wrong.
    assert dev.score(list(outputs)) == pytest.approx({"micro_f1": 6 / 8, "macro_f1": 2 / 3})
    dev.write(list(outputs), tmp_path)
    lines = read_lines(tmp_path / "dev.jsonl")
    assert [line["label"] for line in lines] == [["a", "b"], [], ["b"], ["c"]]
    assert [line["prediction"] for line in lines] == [["a", "b"], [], ["b", "c"], []]
    assert lines[0]["probabilities"]["a"] == pytest.approx(1 / (1 + np.exp(-2)))
    shape = RowShape(16, 2, task.head.label_layout, 0)
    rows = shape.build([task.train[:2]], 1)
    assert rows["labels"].tolist() == [labels[:2]] and rows["weights"].tolist() == [[1, 1]]


COLUMNS = ("red", "old road", "blue")  # Not sorted.
LABELS = [["red", "blue"], [], ["red"], ["old road"]]
BITS = [["1", "0", "1.0"], ["FALSE", "False", "false"], ["true", "0", "0"], ["0", "1", "0"]]
TEXTS = ("river", "town", "the road", "king")


def write_bits(path, bits=BITS):
    """Writes a table with a column of 0 and 1 for each label, in JSON and Parquet as such."""
    by_column = (dict(zip(COLUMNS, row, strict=True)) for row in bits)
    rows = [{"text": text} | row for text, row in zip(TEXTS, by_column, strict=True)]
    if path.suffix in (".csv", ".tsv"):
        separator = "," if path.suffix == ".csv" else "\t"
        lines = [list(rows[0]), *(row.values() for row in rows)]
        path.write_text("".join(separator.join(line) + "\n" for line in lines))
        return str(path)
    values = [{name: json.loads(row[name].lower()) for name in COLUMNS} for row in rows]
    if path.suffix == ".parquet":
        values = [{name: bool(value) for name, value in row.items()} for row in values]
    rows = [row | typed for row, typed in zip(rows, values, strict=True)]
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return str(path)
    return str(write_lines(path, rows))


def read_files(tokenizer, **data):
    config = get_config()
    config.data.update(data)
    return text_classification.get_task(config, tokenizer)


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
def test_columns_of_0_and_1_are_read_as_lists_of_labels(suffix, tokenizer, tmp_path):
    pairs = zip(TEXTS, LABELS, strict=True)
    lists = write_lines(tmp_path / "l.jsonl", [{"text": x, "label": each} for x, each in pairs])
    bits = write_bits(tmp_path / f"bits.{suffix}")
    task, expected = (
        read_files(
            tokenizer,
            **dict.fromkeys(("train", "dev", "test"), str(path)),
            tune_thresholds=True,
            positive_weights=("blue=2",),
            **options,
        )
        for path, options in (
            (bits, {"label_columns": COLUMNS}),
            (lists, {"label_separator": "|", "labels": COLUMNS}),
        )
    )
    assert task.labels == COLUMNS and task.head.name == "multi_label"
    assert task.notes == expected.notes and task.tuned == expected.tuned
    outputs = list(np.random.default_rng(0).normal(0, 1, (4, 3)).astype(np.float32))
    for split, other in zip(task.splits, expected.splits, strict=True):
        for feature, of_list in zip(split.features, other.features, strict=True):
            np.testing.assert_equal(dataclasses.asdict(feature), dataclasses.asdict(of_list))
        assert split.score(outputs) == other.score(outputs)
    task.splits[0].write(outputs, tmp_path)
    assert [line["label"] for line in read_lines(tmp_path / "dev.jsonl")] == LABELS


def test_labels_of_empty_or_missing_columns_are_unknown(tokenizer, tmp_path):
    train = write_bits(tmp_path / "train.csv")
    empty = write_bits(tmp_path / "empty.csv", [["", "", ""]] * 4)
    hidden = write_bits(tmp_path / "hidden.csv", [["-1", "-1.0", "-1"]] * 4)
    for dev, test in (
        (empty, "text\nriver\n"),
        (hidden, "text,red\nriver,\n"),
        (empty, "text,red,old road,blue\nriver,,,\n"),
        (hidden, "text,red,old road,blue\n,-1,-1,-1\n"),
    ):
        (tmp_path / "new.csv").write_text(test)
        files = {"train": train, "dev": dev, "test": str(tmp_path / "new.csv")}
        task = read_files(tokenizer, label_columns=COLUMNS, **files)
        assert [split.score for split in task.splits] == [None, None]
    with pytest.raises(ValueError, match=r"empty\.csv, line 2: no 'red'"):
        read_files(tokenizer, label_columns=COLUMNS, train=empty)


@pytest.mark.parametrize("bit", ["2", "-1", "0.5", "yes", "", " ", "NaN", "[1]"])
def test_columns_of_labels_with_other_values_name_line_and_column(read, bit):
    table = f"text,red,blue\nriver,1,0\nwar,1,{bit}\n"
    with pytest.raises(ValueError, match=r"train\.csv, line 3: 'blue'"):
        read(table, None, label_columns=("red", "blue"))


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"regression": True}, "data.regression"),
        ({"label_separator": "|"}, "data.label_separator"),
        ({"label": "class"}, "data.label=class"),
        ({"label_columns": ("red",)}, "data.label_columns=red"),
        ({"label_columns": ("red", "red")}, "data.label_columns=red,red"),
        ({"label_columns": ("red", "text")}, "data.text"),
        ({"labels": ("red", "green")}, "data.labels=red,green"),
        ({"label_columns": ("red", "green")}, "train.csv, line 2: no column 'green'"),
        ({"test": "text,red\nriver,1\n"}, "test.csv, line 2: no column 'blue'"),
    ],
)
def test_columns_of_labels_that_contradict_other_fields_are_refused(read, options, place):
    options = {"dev": None, "label_columns": ("red,blue",)} | options
    with pytest.raises(ValueError, match=re.escape(place)):
        read("text,class,red,blue\nriver,a,1,0\nwar,b,0,1\n", **options)


def test_labels_of_columns_keep_the_order_of_a_head_in_the_weights(tokenizer, tmp_path):
    config = get_config()
    config.data.update({"train": write_bits(tmp_path / "train.csv"), "label_columns": COLUMNS})
    head = {"task": "multi_label", "labels": sorted(COLUMNS)}
    task = read_task(config, head, tokenizer)
    assert list(task.labels) == sorted(COLUMNS)
    assert [each.label.tolist() for each in task.train] == [
        [1, 0, 1],
        [0, 0, 0],
        [0, 0, 1],
        [0, 1, 0],
    ]


def test_positive_weights_are_given_by_name_or_balanced(read):
    def weights_of(given):
        head = read(LABEL_SETS, LABEL_SETS, label_separator="|", positive_weights=given).head
        logits = np.random.default_rng(0).normal(0, 3, (2, 3)).astype(np.float32)
        labels = np.array([[1, 0, 1], [0, 1, 1]], np.float32)
        return np.array(head.loss(logits, {"labels": labels})), np.float64(logits), labels

    # Of 4 texts a has 1, b 2 and c 1.
    for given, weights in (
        ((), (1, 1, 1)),
        (("balanced",), (3, 1, 3)),
        (("c=7,a=0.5",), (0.5, 1, 7)),
        (("a=0.5", "c=7"), (0.5, 1, 7)),
        ((0.5, 1, 7), (0.5, 1, 7)),
    ):
        loss, logits, labels = weights_of(given)
        # As torch.nn.BCEWithLogitsLoss(pos_weight) defines it.
        probabilities = 1 / (1 + np.exp(-logits))
        terms = np.array(weights) * labels * np.log(probabilities)
        terms += (1 - labels) * np.log(1 - probabilities)
        np.testing.assert_allclose(loss, -terms.mean(-1), rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "place"),
    [
        (("d=2",), "'d'"),
        (("a=2,a=3",), "'a'"),
        (("a=0",), "a, b, c"),
        (("a=x",), "a, b, c"),
        ((1, 2), "a, b, c"),
        (("even",), "a, b, c"),
    ],
)
def test_positive_weights_that_fit_no_labels_are_refused(read, given, place):
    with pytest.raises(ValueError, match=rf"config\.data\.positive_weights=.*{place}"):
        read(LABEL_SETS, LABEL_SETS, label_separator="|", positive_weights=given)
    with pytest.raises(ValueError, match=r"config\.data\.positive_weights"):
        read(positive_weights=("balanced",))


def test_thresholds_are_tuned_on_dev_and_used_in_all_splits(read, tmp_path):
    task = read(LABEL_SETS, LABEL_SETS, LABEL_SETS, label_separator="|", tune_thresholds=True)
    dev, test = task.splits
    assert task.tuned == ("logit_thresholds",) and test.tune is None
    outputs = list(np.float32([[-1, 1, -3], [-2, -1, -3], [-2, 3, -3], [-3, 2, -2]]))
    tuned = dev.tune(outputs)
    assert tuned == {"logit_thresholds": [-1.5, 0.0, -2.5]}
    assert dev.score(outputs)["micro_f1"] < 1
    for split in task.with_settings(tuned).splits:
        assert split.score(outputs)["micro_f1"] == pytest.approx(8 / 9)  # b is predicted for c.
        split.write(outputs, tmp_path)
        predicted = [line["prediction"] for line in read_lines(tmp_path / f"{split.name}.jsonl")]
        assert predicted == [["a", "b"], [], ["b"], ["b", "c"]]


@pytest.mark.parametrize("change", [{"label_separator": ""}, {"dev": None}])
def test_thresholds_without_several_labels_or_dev_are_refused(read, change):
    options = {"dev": LABEL_SETS, "label_separator": "|", "tune_thresholds": True} | change
    with pytest.raises(ValueError, match=r"config\.data\.tune_thresholds"):
        read(LABEL_SETS, **options)


def test_a_note_names_labels_whose_weight_drowns_precision(read, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    outputs = list(np.float32([[1, 1, -1], [1, -1, -1], [1, 1, -1], [1, -1, 1]]))
    for given, count in (((), 0), (("a=50",), 1)):
        task = read(LABEL_SETS, LABEL_SETS, label_separator="|", positive_weights=given)
        task.splits[0].write(outputs, tmp_path)
        notes = [each.getMessage() for each in caplog.records if "recall" in each.getMessage()]
        assert len(notes) == count
    assert "positive_weights" in notes[0] and "'a'" in notes[0]


@pytest.mark.parametrize("given", [("a=16,b=9.9",), ("balanced",)])
def test_large_positive_weights_are_reported_with_weights_that_are_not(read, caplog, given):
    caplog.set_level(logging.WARNING)
    # Of 17 texts a has 1, b 2 and c 16.
    table = "text,label\nriver,a|b\nwar,b|c\n" + "the north,c\n" * 15
    read(table, LABEL_SETS, label_separator="|", positive_weights=given)
    (note,) = [each.getMessage() for each in caplog.records if "weight" in each.getMessage()]
    assert "1 of 3 labels" in note and "'a' (1 of 17 " in note and "above 0.059" in note
    proposed = note.rpartition("config.data.positive_weights=")[2]
    caplog.clear()
    weights = tuple(map(float, proposed.split(",")))
    read(table, LABEL_SETS, label_separator="|", positive_weights=weights)
    assert not [each for each in caplog.records if "weight" in each.getMessage()]


def test_a_label_of_a_list_may_contain_the_separator(read):
    lines = '{"text": "river", "label": ["a|b", "c"]}\n{"text": "war", "label": ["a"]}\n'
    task = read(lines, lines, None, "jsonl", label_separator="|")
    assert task.labels == ("a", "a|b", "c")
    assert [each.label.tolist() for each in task.train] == [[0, 1, 1], [1, 0, 0]]


def test_texts_without_any_label_are_scored_and_texts_of_unknown_labels_are_not(read):
    train = '{"text": "river", "label": ["a"]}\n{"text": "war", "label": ["b"]}\n'
    empty = '{"text": "river", "label": []}\n{"text": "war", "label": []}\n'
    unknown = empty.replace("[]", "null")
    dev, test = read(train, empty, unknown, "jsonl", label_separator="|").splits
    assert test.score is None
    assert dev.score([np.float32([-1, -1])] * 2) == {"micro_f1": 0.0, "macro_f1": 0.0}
    assert [each.label.tolist() for each in dev.features] == [[0, 0]] * 2
    some = train + '{"text": "road", "label": null}\n'
    with pytest.raises(ValueError, match=r"train\.jsonl, line 3: no 'label'"):
        read(some, empty, None, "jsonl", label_separator="|")
    with pytest.raises(ValueError, match=r"dev\.jsonl, line 3: no 'label'"):
        read(train, some, None, "jsonl", label_separator="|")


@pytest.mark.parametrize(
    ("labels", "positive", "negative"),
    [
        ((), "10", "9"),
        (("9", "10"), "10", "9"),
        (("10", "9"), "10", "9"),  # Also as a head of an earlier version stores them.
        ((1, 0), "1", "0"),
        (("true", "false"), "true", "false"),
        ((), "yes", "no"),
        (("yes", "no"), "no", "yes"),  # The second of labels that are text.
    ],
)
def test_the_positive_class_of_two_is_the_larger_number_or_the_second(
    read, labels, positive, negative
):
    """As pos_label=positive in scikit-learn, whose average precision is 0.5 here."""
    table = "text,label\n" + f"river,{negative}\n" * 4 + f"war,{positive}\n"
    task = read(table, table, labels=labels)
    probabilities = np.array([0.1, 0.6, 0.3, 0.2, 0.5])
    logits = np.log(np.stack([1 - probabilities, probabilities], axis=1))
    order = [[negative, positive].index(label) for label in task.labels]
    scores = task.splits[0].score(list(logits[:, order]))
    assert scores["average_precision"] == pytest.approx(0.5)
    assert scores["roc_auc"] == pytest.approx(0.75)


def test_labels_are_checked_in_the_examples_that_are_left_out(read):
    with pytest.raises(ValueError, match=r"train\.csv, line 4: no 'label'"):
        read("text,label\na,x\nb,y\nc,\nd,x\n", None, limit=2)
    dev = "text,label\na,a\nb,b\nc,typo\nd,a\n"
    with pytest.raises(ValueError, match=r"dev\.csv, line 4: label 'typo'"):
        read(dev=dev, limit=2)


def test_a_test_file_may_have_lists_of_labels(read):
    lines = '{"text": "river", "label": ["b", "a"]}\n{"text": "town", "label": ["a"]}\n'
    task = read(lines, lines, lines, "jsonl", label_separator="|")
    dev, test = ([feature.label.tolist() for feature in split.features] for split in task.splits)
    assert dev == test == [[1, 1], [1, 0]]
    with pytest.raises(ValueError, match=r"test\.jsonl, line 1: 'label' is a list"):
        read('{"text": "river", "label": "b"}\n', None, lines, "jsonl", labels=("a", "b"))


def test_examples_over_the_limit_are_dropped_and_counted(tokenizer, tmp_path):
    """Evenly spaced ones stay, with all labels of the file, and their ids."""
    (tmp_path / "all.csv").write_text("text,label\n" + "river,a\n" * 6 + "town,b\n" * 4)
    config = get_config()
    config.data.train = config.data.dev = str(tmp_path / "all.csv")
    config.max_train_examples, config.max_eval_examples = 3, 20
    task = text_classification.get_task(config, tokenizer)
    assert [feature.label for feature in task.train] == [0, 0, 1]  # Lines 0, 3 and 6.
    assert task.notes["train examples dropped"] == 7 and len(task.splits[0].features) == 10
    assert task.notes["train examples of the rarest label, 'b'"] == 1  # Of those trained on.
    config.max_train_examples, config.train_fraction = 8, 0.25
    task = text_classification.get_task(config, tokenizer)
    assert len(task.train) == 2 and task.notes["train examples dropped"] == 2
    assert task.notes[OUTSIDE_FRACTION] == 6
    config.max_train_examples, config.max_eval_examples, config.train_fraction = 1, 2, 0.0
    task = text_classification.get_task(config, tokenizer)
    assert task.labels == ("a", "b") and task.notes["dev examples dropped"] == 8
    task.splits[0].write([np.zeros(2), np.ones(2)], tmp_path)
    lines = read_lines(tmp_path / "dev.jsonl")
    assert [line["id"] for line in lines] == ["0", "5"]


def test_ids_are_written_with_the_predictions(read, tmp_path):
    table = "name,text,label\nx,the king,1\ny,war,2.5\n"
    task = read(table, table, id="name", regression=True)
    task.splits[0].write([np.float32([0.5]), np.float32([2])], tmp_path)
    lines = read_lines(tmp_path / "dev.jsonl")
    shared = {"id": "x", "name": "x", "text": "the king", "label": 1.0, "prediction": 0.5}
    assert lines == [
        shared,
        {"id": "y", "name": "y", "text": "war", "label": 2.5, "prediction": 2.0},
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train": None}, r"config\.data\.labels: expected two or more .* found none"),
        ({"train": "text,class\nthe,a\n"}, r"train\.csv, line 2: no column 'label'; found text"),
        (
            {"dev": "words,label\nthe,a\n"},
            r"dev\.csv, line 2: no column 'text'; found.*name in text, text_pair",
        ),
        ({"dev": "text,lable\nthe,a\n"}, r"dev\.csv, line 2: no column 'label'; found text, la"),
        ({"train": "text;label\nthe;a\n"}, r"line 2: no .* \(commas separate a \.csv"),
        (
            {"train": 'text;label\n"the; king";a\n'},
            r"train\.csv, line 1: commas separate a \.csv, .* header has semicolons",
        ),
        (
            {"train": "text;label\nthe, king;a\n"},
            r"train\.csv, line 1: commas separate a \.csv, .* header has semicolons",
        ),
        ({"train": "text,label,text\na,b,c\n"}, r"train\.csv: the header names 'text' twice"),
        ({"dev": DEV + "war,c\n"}, r"dev\.csv, line 3: label 'c'"),
        ({"dev": DEV + "war,\n"}, r"dev\.csv, line 3: no 'label'"),
        ({"dev": DEV + " ,a\n"}, r"dev\.csv, line 3: 'text' is empty"),
        ({"train": TRAIN + "war,\n"}, r"train\.csv, line 5: no 'label'"),
        (
            {"id": "text", "dev": DEV + DEV[11:]},
            r"dev\.csv, line 3: id 'the king' is already used in .*2",
        ),
        ({"id": "text", "train": TRAIN + TRAIN[11:]}, r"train\.csv, line 5: id 'the river' is"),
        ({"suffix": "txt"}, r"train\.txt has an unknown suffix"),
        ({"train": TRAIN.encode() + b"w\xff,a\n"}, r"train\.csv, line 5, byte 44: not UTF-8"),
        (
            {"train": "text,label\nthe,a\nof,a\n"},
            r"train\.csv, column 'label': expected two or more different labels, found a$",
        ),
        ({"regression": True}, r"train\.csv, line 2: label is 'b'"),
        ({"regression": True, "train": "text,label\nthe,inf\n"}, "label is 'inf'"),
        ({"train": TRAIN + "war\n"}, r"line 5: expected 2 fields, as in the header, found 1$"),
        ({"train": TRAIN + '"war,a\n'}, "csv, line 5: unexpected end of data"),
        ({"train": "text,label\n"}, r"train\.csv holds no examples"),
        ({"train": ""}, r"train\.csv holds no examples"),
        ({"suffix": "jsonl"}, r"train\.jsonl, line 1: not JSON"),
        ({"suffix": "jsonl", "train": "[1]\n"}, "line 1: expected a JSON object, found list"),
        ({"suffix": "jsonl", "train": '{"text": null, "label": 1}\n'}, "line 1: 'text' is empty"),
        ({"metric": "f1"}, r"data\.metric=f1"),
        ({"metric": "accuracy", "regression": True}, "expected one of pearson, spearman"),
        ({"train": TRAIN + "war, b\n"}, r"train\.csv, line 5: .* ' b'"),
        (
            {"labels": ("a", "b", "a")},
            r"data\.labels: expected two .* different labels, found a, b, a",
        ),
        (
            {"suffix": "jsonl", "train": '{"text": ["the"], "label": 1}\n'},
            "line 1: 'text' is a list",
        ),
        ({"labels": ("a",)}, r"data\.labels: expected two .*, found a$"),
        ({"labels": ("a", "b"), "train": None, "dev": None}, r"config\.data\.train=FILE to"),
        ({"labels": ("a", "c")}, r"train\.csv, line 2: label 'b', .* a, c"),
    ],
)
def test_bad_input_raises_a_clear_error(given, message, read):
    with pytest.raises(ValueError, match=message) as caught:
        read(**given)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_run_learns_a_number_and_the_loaded_model_predicts_it(tokenizer, tmp_path):
    rng, texts, lines = np.random.default_rng(0), [], ["text,label"]
    for _ in range(64):
        texts.append(" ".join(rng.choice(WORDS, 4)))
        lines.append(f"{texts[-1]},{texts[-1].split().count('river') + rng.normal(0, 0.01)}")
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    config = get_config("runlocal")
    config.init_from = str(write_random_encoder(tmp_path / "init", tokenizer))
    config.data.update(
        {
            "train": str(tmp_path / "table.csv"),
            "dev": str(tmp_path / "table.csv"),
            "regression": True,
        }
    )
    # Reaches 0.999: at 1e-2, whether so small an encoder collapses depends on rounding.
    config.update({"learning_rate": 3e-3, "num_epochs": 20.0, "eval_every": 64})
    config.update({"max_seq_length": 16, "per_device_batch_size": 1})
    assert finetune.train_and_evaluate(config, tmp_path / "run")["dev"]["pearson"] > 0.9
    lines = (tmp_path / "run" / "predictions" / "dev.jsonl").read_text().splitlines()
    found = bert_jax.load(tmp_path / "run").classify(texts)
    assert found == pytest.approx([json.loads(line)["prediction"] for line in lines], abs=1e-4)


def test_columns_that_are_not_used_are_named(read):
    table = "id,text,label,weight,blank\n0,river,a,2,\n1,war,b,1,\n"
    notes = read(table, table).notes
    assert notes["train columns that are not used (weight)"] == 1


@pytest.mark.parametrize("examples", [[{"text": "river", "label": "a"}], np.zeros(3)])
def test_examples_in_memory_are_refused_with_what_to_do(examples):
    data = ConfigDict({"train": examples, "dev": "", "test": ""})
    with pytest.raises(TypeError, match=r"data\.train is a (list|ndarray)"):
        tables.files_from_config(data)


@pytest.mark.parametrize(("first", "warns"), [(2000.0, False), (1.7e9, True), (-1e6, False)])
def test_labels_that_float32_cannot_tell_apart_are_named(first, warns, caplog):
    """Such as seconds since 1970 over some minutes; years are not."""
    text_classification.target_scale([first + step for step in range(100)])
    assert ("subtract a constant near their mean" in caplog.text) == warns
