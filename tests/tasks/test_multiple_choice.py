"""SWAG from its CSV files and from TFDS, and choices of your own in JSONL."""

import json

import numpy as np
import pytest
import tensorflow_datasets as tfds

from bert_jax import finetune
from bert_jax.configs.finetune.swag import get_config
from bert_jax.tasks import multiple_choice
from bert_jax.tasks.task import TrainedHead
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import WORDS, write_tfds, write_vocabulary
from tests.helpers.json_lines import write_lines
from tests.helpers.models import write_random_encoder

HEADER = ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3"
ROWS = [
    {"sent1": "the king, old", "sent2": "people", "endings": ["made war", "of", "built a", "the"]},
    {"sent1": "a river", "sent2": "", "endings": ["grew", "grew north", "grew south", "stone"]},
]


def line(number: int, row: dict, label: str | None) -> str:
    fields = [str(number), "v", "7", "x", f'"{row["sent1"]}"', row["sent2"], "gold"]
    return ",".join([*fields, *row["endings"], *([] if label is None else [label])])


@pytest.fixture
def tokenizer(tmp_path):
    return load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))


@pytest.fixture
def directory(tmp_path):
    for name, labels in {"train": "30", "val": "12", "test": (None, None)}.items():
        header = HEADER + (",label" if name != "test" else "")
        lines = [line(*each) for each in zip(range(2), ROWS, labels, strict=True)]
        (tmp_path / f"{name}.csv").write_text("\n".join([header, *lines]) + "\n")
    return tmp_path


def read(tokenizer, directory, data_dir="", **changes):
    config = get_config()
    config.update(changes)
    config.data.directory, config.data.data_dir = str(directory), data_dir
    return multiple_choice.get_task(config, tokenizer)


def test_an_example_gives_a_feature_of_four_sequences(tokenizer, directory):
    task = read(tokenizer, directory)
    assert [feature.label for feature in task.train] == [3, 0]
    for feature, row in zip(task.train, ROWS, strict=True):
        for ending, tokens, second in zip(
            row["endings"], feature.sequences, feature.second_starts, strict=True
        ):
            first = [tokenizer.cls_id, *tokenizer.encode(row["sent1"]), tokenizer.sep_id]
            rest = [*tokenizer.encode(f"{row['sent2']} {ending}"), tokenizer.sep_id]
            assert tokens.tolist() == first + rest and second == len(first)


def test_each_long_choice_is_truncated_separately_and_examples_are_counted(tokenizer, directory):
    task = read(tokenizer, directory, max_seq_length=8)
    assert task.notes["train examples truncated"] == 1
    assert [len(tokens) for tokens in task.train[0].sequences] == [8, 8, 8, 8]
    assert [len(tokens) for tokens in task.train[1].sequences] == [6, 7, 7, 6]


def test_empty_texts_are_counted(tokenizer, directory):
    assert read(tokenizer, directory).notes["dev examples with an empty text"] == 0
    path = directory / "val.csv"
    path.write_text(path.read_text().replace("a river", " ").replace("built a", ""))
    notes = read(tokenizer, directory).notes
    assert notes["dev examples with an empty text"] == 2
    assert notes["train examples with an empty text"] == 0


def test_labels_may_be_written_as_floats(tokenizer, directory):
    """As pandas writes them if some are missing."""
    for name, labels in {"train": ("3.0", "0.0"), "test": ("-1.0", "-1")}.items():
        lines = [line(*each) for each in zip(range(2), ROWS, labels, strict=True)]
        (directory / f"{name}.csv").write_text("\n".join([f"{HEADER},label", *lines]) + "\n")
    task = read(tokenizer, directory)
    assert [feature.label for feature in task.train] == [3, 0]
    assert task.splits[1].score is None


def test_dev_is_scored_and_test_is_only_predicted(tokenizer, directory):
    dev, test = read(tokenizer, directory).splits
    outputs = [np.array([0.0, 2, 1, 0]), np.array([0.0, 0, 0, 3])]
    assert dev.score(outputs) == {"accuracy": 0.5} and test.score is None
    test.write(outputs, directory)
    line = json.loads((directory / "test.jsonl").read_text().splitlines()[0])
    assert (line["id"], line["video-id"], line["fold-ind"]) == ("0", "v", "7")
    assert {"sent1", "sent2", "ending0", "ending3"} < line.keys() and "label" not in line
    assert line["prediction"] == "1" and line["probabilities"]["1"] == pytest.approx(0.61, abs=0.01)


@pytest.mark.parametrize("splits", [("train", "validation", "test"), ("train", "validation")])
def test_tfds_gives_the_same_features_as_the_files(splits, tokenizer, directory):
    labels = {"train": (3, 0), "validation": (1, 2), "test": (-1, -1)}
    examples = {split: [] for split in splits}
    for split, records in examples.items():
        for row, label in zip(ROWS, labels[split], strict=True):
            endings = {f"ending{index}": ending for index, ending in enumerate(row["endings"])}
            texts = {"sent1": row["sent1"], "sent2": row["sent2"]}
            records.append(texts | endings | {"label": label})
    columns = dict.fromkeys(multiple_choice.COLUMNS, tfds.features.Text())
    features = columns | {"label": tfds.features.ClassLabel(num_classes=4)}
    write_tfds(directory / "tfds", "swag/regular", examples, features)
    expected = read(tokenizer, directory)
    task = read(tokenizer, "tfds:swag/regular", data_dir=str(directory / "tfds"))

    # TFDS shuffles what it prepares.
    def sorted_strings(features):
        return sorted((str(feature.label), str(feature.sequences)) for feature in features)

    assert sorted_strings(task.train) == sorted_strings(expected.train)
    assert len(task.splits) == len(splits) - 1
    for ours, reference in zip(task.splits, expected.splits, strict=False):
        assert (ours.name, ours.score is None) == (reference.name, reference.score is None)
        assert sorted_strings(ours.features) == sorted_strings(reference.features)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("train.csv", ("ending3", "ending4"), r"train\.csv, line 2: no column 'ending3'; found"),
        ("train.csv", ("the,3", "the,4"), r"train\.csv, line 2: label '4'"),
        ("val.csv", ("stone,2", "stone,"), r"val\.csv, line 3: no 'label'"),
    ],
)
def test_bad_input_raises_a_clear_error(name, change, message, tokenizer, directory):
    path = directory / name
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(ValueError, match=message):
        read(tokenizer, directory)


def test_a_directory_must_be_given_and_hold_the_files(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"config\.data\.directory=DIR or tfds:NAME"):
        read(tokenizer, "")
    with pytest.raises(FileNotFoundError, match=r"no file .*val\.csv"):
        read(tokenizer, tmp_path)


@pytest.mark.slow
def test_a_run_learns_the_correct_ending(tokenizer, tmp_path):
    rng, lines = np.random.default_rng(0), [HEADER + ",label"]
    others = [word for word in WORDS if word != "river"]
    for number in range(64):
        endings = [" ".join(rng.choice(others, 3)) for _ in range(4)]
        label = rng.integers(4)
        endings[label] = f"the river {rng.choice(others)}"
        row = {"sent1": " ".join(rng.choice(others, 4)), "sent2": "a", "endings": endings}
        lines.append(line(number, row, str(label)))
    for name in ("train", "val"):
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
    config = get_config("runlocal")
    config.init_from = str(write_random_encoder(tmp_path / "init", tokenizer))
    config.update({"learning_rate": 1e-2, "num_epochs": 8.0, "eval_every": 64})
    config.update({"max_seq_length": 16, "per_device_batch_size": 1})
    config.data.directory = str(tmp_path)
    assert finetune.train_and_evaluate(config, tmp_path / "run")["dev"]["accuracy"] > 0.9


def test_columns_that_are_not_used_are_named_and_a_fifth_ending_is_refused(tokenizer, directory):
    names = ["video-id", "fold-ind", "startphrase", "gold-source"]
    notes = read(tokenizer, directory).notes
    assert notes[f"train columns that are not used ({', '.join(sorted(names))})"] == 4
    path = directory / "train.csv"
    header, *rows = path.read_text().splitlines()
    path.write_text("\n".join([header + ",ending4", *(row + ",more" for row in rows)]))
    with pytest.raises(ValueError, match=r"train\.csv, line 2: ending4"):
        read(tokenizer, directory)


OWN = [
    {"context": "the king", "question": "old", "choices": ["of", "built a", "war"], "label": 2},
    {"question": "a river", "choices": ["grew", "stone", "the"], "label": "0", "source": "x"},
    {"context": "people", "choices": ["the", "of", "a"], "label": 1, "id": "seven"},
]


def read_own(tokenizer, tmp_path, train, dev=OWN):
    config = get_config()
    config.data.train = str(write_lines(tmp_path / "train.jsonl", train))
    config.data.dev = str(write_lines(tmp_path / "dev.jsonl", dev))
    return multiple_choice.get_task(config, tokenizer)


def test_choices_in_json_give_a_sequence_each(tokenizer, tmp_path):
    task = read_own(tokenizer, tmp_path, OWN)
    texts = [("the king", "old {}"), ("a river", "{}"), ("people", "{}")]
    assert [feature.label for feature in task.train] == [2, 0, 1]
    for feature, line, (first, second) in zip(task.train, OWN, texts, strict=True):
        for choice, tokens in zip(line["choices"], feature.sequences, strict=True):
            start = [tokenizer.cls_id, *tokenizer.encode(first), tokenizer.sep_id]
            end = [*tokenizer.encode(second.format(choice)), tokenizer.sep_id]
            assert tokens.tolist() == start + end
    assert task.notes["train lines with 'source', which is not used"] == 1
    (dev,) = task.splits
    outputs = [np.array([0.0, 0, 1]), np.array([0.0, 0, 1]), np.array([0.0, 1, 0])]
    assert dev.score(outputs) == {"accuracy": pytest.approx(2 / 3)}
    dev.write(outputs, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "dev.jsonl").read_text().splitlines()]
    assert [line["prediction"] for line in lines] == ["2", "2", "1"]
    assert lines[0]["choices"] == OWN[0]["choices"] and len(lines[0]["probabilities"]) == 3


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"choices": ["of", "a"]}, r"2 choices.* 3 in .*line 1"),
        ({"choices": ["of"]}, "'choices'"),
        ({"choices": "of"}, "'choices'"),
        ({"choices": ["of", 1, "a"]}, "'choices'"),
        ({"question": None, "context": 3}, "'context'"),
        ({"choices": ["of", " ", "a"]}, "empty"),
        ({"label": 3}, "label '3'"),
        ({"label": True}, "'label'"),
        ({"label": None}, "'label'"),
    ],
)
def test_malformed_choices_are_refused_with_their_place(tokenizer, tmp_path, change, place):
    lines = [OWN[0], OWN[1] | change, OWN[2]]
    with pytest.raises(ValueError, match=rf"train\.jsonl, line 2: .*{place}"):
        read_own(tokenizer, tmp_path, lines)
    without = {name: OWN[1][name] for name in ("choices", "label")}
    with pytest.raises(ValueError, match=r"dev\.jsonl, line 1: .*'context'.*'question'"):
        read_own(tokenizer, tmp_path, OWN, [without])


def test_a_directory_and_files_are_not_both_read(tokenizer, tmp_path):
    config = get_config()
    config.data.directory, config.data.train = str(tmp_path), str(tmp_path / "train.jsonl")
    with pytest.raises(ValueError, match=r"config\.data\.directory.*config\.data\.train"):
        multiple_choice.get_task(config, tokenizer)


def test_a_trained_head_predicts_any_number_of_choices(tokenizer, tmp_path):
    lines = [OWN[0], OWN[1] | {"choices": ["of", "a"]}, OWN[2], OWN[2] | {"label": 4}]
    path = write_lines(tmp_path / "in.jsonl", lines)
    trained = TrainedHead({"task": "multiple_choice", "labels": ["score"]}, {}, tokenizer, 32)
    options = multiple_choice.PREDICT_OPTIONS
    predictor = multiple_choice.get_predictor(trained, options, set())
    examples = list(predictor.read(path))
    assert len(predictor.features(examples)) == 3 + 2 + 3 + 3
    outputs = [np.array([score]) for score in (0.0, 0, 2, 1, 0, 0, 0, 1, 5, 0, 0)]
    found = predictor.describe(examples, outputs)
    assert [line["prediction"] for line in found] == ["2", "0", "2", "0"]
    assert [len(line["probabilities"]) for line in found] == [3, 2, 3, 3]
    assert found[1]["probabilities"]["0"] == pytest.approx(1 / (1 + np.exp(-1)))
    assert [line["id"] for line in found] == ["0", "1", "seven", "seven"]
    assert predictor.scores() == {"accuracy": pytest.approx(2 / 3), "examples": 3}
    assert predictor.notes["examples with labels that the head does not have, not scored"] == 1
