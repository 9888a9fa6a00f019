"""Each of GLUE's ten sets from a small download in the benchmark's layout, and from TFDS."""

import json
import pathlib

import numpy as np
import pytest
import tensorflow_datasets as tfds

import bert_jax
from bert_jax import finetune
from bert_jax.configs.finetune.glue import get_config
from bert_jax.tasks import glue
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import write_tfds, write_vocabulary
from tests.helpers.models import write_random_encoder
from tests.helpers.predict_equals_load import predict

PAIRS = [("the river", "a town"), ('a "stone', "the king"), ("old road", "new city"), ("war", "")]
# Format of each set in the download: header of train and dev, header of test, and a line of each.
LAYOUT = {
    "cola": (None, "index\tsentence", "gj04\t{label}\t*\t{0}", "{index}\t{0}"),
    "sst2": ("sentence\tlabel", "index\tsentence", "{0}\t{label}", "{index}\t{0}"),
    "mrpc": (
        "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        "index\t#1 ID\t#2 ID\t#1 String\t#2 String",
        "{label}\t1\t2\t{0}\t{1}",
        "{index}\t1\t2\t{0}\t{1}",
    ),
    "stsb": (
        "index\tgenre\tsentence1\tsentence2\tscore",
        "index\tgenre\tsentence1\tsentence2",
        "{index}\tnews\t{0}\t{1}\t{label}",
        "{index}\tnews\t{0}\t{1}",
    ),
    "qqp": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        "id\tquestion1\tquestion2",
        "{index}\t7\t8\t{0}\t{1}\t{label}",
        "{index}\t{0}\t{1}",
    ),
    "mnli": (
        "index\tgenre\tsentence1\tsentence2\tlabel1\tgold_label",
        "index\tgenre\tsentence1\tsentence2",
        "{index}\tfiction\t{0}\t{1}\tneutral\t{label}",
        "{index}\tfiction\t{0}\t{1}",
    ),
    "qnli": (
        "index\tquestion\tsentence\tlabel",
        "index\tquestion\tsentence",
        "{index}\t{0}\t{1}\t{label}",
        "{index}\t{0}\t{1}",
    ),
    "rte": (
        "index\tsentence1\tsentence2\tlabel",
        "index\tsentence1\tsentence2",
        "{index}\t{0}\t{1}\t{label}",
        "{index}\t{0}\t{1}",
    ),
    "ax": (None, "index\tsentence1\tsentence2", "", "{index}\t{0}\t{1}"),
}
LAYOUT["wnli"] = LAYOUT["rte"]


def label_text(name: str, number: int) -> str:
    """Returns the label of the example `number` as the download writes it."""
    labels = glue.DATASETS[name].labels
    if not labels:
        return f"{number + 0.5}"
    index = number % len(labels)
    return labels[index] if glue.DATASETS[name].submits_label_names else str(index)


def write_download(root: pathlib.Path, name: str) -> None:
    header, test_header, line, test_line = LAYOUT[name]
    chosen = glue.DATASETS[name]
    folder = root / ("diagnostic" if name == "ax" else chosen.folder)
    folder.mkdir(parents=True)
    for split in (*(("train", *chosen.dev) if chosen.dev else ()), *chosen.submissions):
        is_test = split in chosen.submissions
        lines = [test_header if is_test else header] if is_test or header else []
        for index, texts in enumerate(PAIRS):
            label = label_text(name, index)
            lines.append((test_line if is_test else line).format(*texts, index=index, label=label))
        file = "diagnostic" if name == "ax" else split
        (folder / f"{file}.tsv").write_text("\n".join(lines) + "\n")


def write_tfds_set(directory: pathlib.Path, name: str) -> None:
    """Prepares a set with the features that TFDS has; test labels are -1, and hidden."""
    chosen = glue.DATASETS[name]
    columns = chosen.tfds_texts or chosen.texts
    label = tfds.features.ClassLabel(names=chosen.labels) if chosen.labels else np.float32
    features = dict.fromkeys(columns, tfds.features.Text()) | {"idx": np.int32, "label": label}
    splits = {}
    for split in (*(("train", *chosen.dev) if chosen.dev else ()), *chosen.submissions):
        examples = splits[split.replace("dev", "validation")] = []
        for index, texts in enumerate(PAIRS):
            number = index % len(chosen.labels) if chosen.labels else index + 0.5
            number = -1 if "test" in split else number
            texts = dict(zip(columns, texts, strict=False))
            examples.append(texts | {"idx": index, "label": number})
    write_tfds(directory, f"glue/{name}", splits, features)


@pytest.fixture
def tokenizer(tmp_path):
    return load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))


def read(tokenizer, name: str, directory, **data):
    config = get_config(name)
    config.data.update({"directory": str(directory), **data})
    return glue.get_task(config, tokenizer)


@pytest.mark.parametrize("name", glue.DATASETS)
def test_every_set_is_read_from_the_download(name, tokenizer, tmp_path):
    write_download(tmp_path, name)
    task, chosen = read(tokenizer, name, tmp_path), glue.DATASETS[name]
    expected = [float(label_text(name, i)) if name == "stsb" else i for i in range(4)]
    if chosen.labels:
        expected = [index % len(chosen.labels) for index in expected]
    assert [split.name for split in task.splits] == [*chosen.dev, *chosen.submissions]
    for features in [task.train, *(split.features for split in task.splits)]:
        assert len(features) == (0 if features is task.train and name == "ax" else 4)
    for features in [task.train, *(split.features for split in task.splits if split.score)]:
        assert [feature.label for feature in features] == expected[: len(features)]
    assert sum(split.score is None for split in task.splits) == len(chosen.submissions)
    feature = task.splits[0].features[1]
    texts = ['a "stone', "the king"][: len(chosen.texts)]
    ids = [[*tokenizer.encode(text), tokenizer.sep_id] for text in texts]
    expected = np.concatenate([[tokenizer.cls_id], *ids])
    np.testing.assert_array_equal(feature.sequences[0], expected)
    assert feature.second_starts == (1 + len(ids[0]),)
    empty = task.notes.get(f"{task.splits[0].name} examples with an empty text", 0)
    assert empty == (len(chosen.texts) == 2)


@pytest.mark.parametrize("name", glue.DATASETS)
def test_tfds_gives_the_same_features_as_the_download(name, tokenizer, tmp_path):
    write_download(tmp_path, name)
    write_tfds_set(tmp_path / "tfds", name)
    expected = read(tokenizer, name, tmp_path)
    found = read(tokenizer, name, f"tfds:glue/{name}:1.0.0", data_dir=str(tmp_path / "tfds"))
    np.testing.assert_equal([*map(vars, found.train)], [*map(vars, expected.train)])
    for ours, reference in zip(found.splits, expected.splits, strict=True):
        assert (ours.name, ours.score is None) == (reference.name, reference.score is None)
        np.testing.assert_equal([*map(vars, ours.features)], [*map(vars, reference.features)])


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("cola", {"matthews": 3**-0.5}),
        ("mrpc", {"f1": 2 / 3, "accuracy": 0.75}),
        ("mnli", {"accuracy": 0.5}),
        ("stsb", {"spearman": 0.8, "pearson": 0.8}),
    ],
)
def test_metrics_are_the_official_ones(name, metrics, tokenizer, tmp_path):
    write_download(tmp_path, name)
    dev = read(tokenizer, name, tmp_path).splits[0]
    outputs = {
        # Expected: 0 1 0 1, or 0 1 2 0 for three classes. Predicted: 0 1 0 0.
        2: np.eye(2)[[0, 1, 0, 0]],
        3: np.eye(3)[[0, 1, 0, 1]],
        0: np.array([[1.0], [2.0], [4.0], [3.0]]),
    }[len(glue.DATASETS[name].labels)]
    assert dev.score(list(outputs)) == pytest.approx(metrics)


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("cola", {"CoLA": "1010"}),
        (
            "mnli",
            {"MNLI-m": ["neutral", "entailment"] * 2, "MNLI-mm": ["neutral", "entailment"] * 2},
        ),
        ("rte", {"RTE": ["not_entailment", "entailment"] * 2}),
        ("stsb", {"STS-B": ["0.000", "5.000", "3.142", "0.500"]}),
        ("ax", {"AX": ["neutral", "entailment"] * 2}),
    ],
)
def test_submissions_are_in_the_benchmarks_format(name, files, tokenizer, tmp_path):
    write_download(tmp_path, name)
    count = len(glue.DATASETS[name].labels)
    outputs = list(np.eye(count)[[1, 0, 1, 0]]) if count else np.array([[-1], [9], [3.1416], [0.5]])
    for split in read(tokenizer, name, tmp_path).splits:
        split.write(outputs, tmp_path)
    written = {path.stem for path in tmp_path.glob("*.tsv")}
    assert {stem for stem in written if not stem.endswith("_classes")} == set(files)
    for file, predictions in files.items():
        lines = [f"{index}\t{value}" for index, value in enumerate(predictions)]
        expected = "\n".join(["index\tprediction", *lines]) + "\n"
        assert (tmp_path / f"{file}.tsv").read_text() == expected


def test_order_of_labels_does_not_change_scores_and_submissions(tokenizer, tmp_path):
    write_download(tmp_path, "mrpc")
    plain = read(tokenizer, "mrpc", tmp_path)
    reordered = read(tokenizer, "mrpc", tmp_path, labels=("equivalent,not_equivalent",))
    assert [feature.label for feature in reordered.train] == [1, 0, 1, 0]
    outputs = np.eye(2)[[0, 1, 0, 0]]
    assert reordered.splits[0].score(outputs[:, ::-1]) == plain.splits[0].score(outputs)
    reordered.splits[1].write(outputs[:, ::-1], tmp_path)
    assert (tmp_path / "MRPC.tsv").read_text().split()[2:] == [
        "0",
        "0",
        "1",
        "1",
        "2",
        "0",
        "3",
        "0",
    ]


def test_malformed_lines_of_qqp_are_skipped_and_counted_except_in_test(tokenizer, tmp_path):
    write_download(tmp_path, "qqp")
    for split in ("train", "test"):
        path = tmp_path / "QQP" / f"{split}.tsv"
        path.write_text(path.read_text() + "9\tthe\n")
        if split == "train":
            task = read(tokenizer, "qqp", tmp_path)
            assert task.notes["train lines malformed and skipped"] == 1 and len(task.train) == 4
    with pytest.raises(ValueError, match=r"line 6: expected 3 tab-sep.*, found 2"):
        read(tokenizer, "qqp", tmp_path)


def test_original_release_of_mrpc_is_split_by_the_ids_of_the_benchmark(tokenizer, tmp_path):
    header = "\ufeff" + LAYOUT["mrpc"][0]
    lines = [f"{i % 2}\t{i}\t{i + 1}\tthe river\ta town" for i in range(6)]
    for name in ("train", "test"):
        (tmp_path / f"msr_paraphrase_{name}.txt").write_text("\r\n".join([header, *lines]) + "\r\n")
    with pytest.raises(FileNotFoundError, match=r"mrpc_dev_ids\.tsv.* beside msr_"):
        read(tokenizer, "mrpc", tmp_path)
    (tmp_path / "mrpc_dev_ids.tsv").write_text("1\t2\n4\t5\n")
    task = read(tokenizer, "mrpc", tmp_path)
    assert [feature.label for feature in task.train] == [0, 0, 1, 1]
    assert [len(split.features) for split in task.splits] == [2, 6]
    assert task.splits[1].score is not None  # Its test set has labels.


def replace(old: str, new: str):
    return lambda path: path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("name", "data", "spoil", "message"),
    [
        ("mprc", {}, None, "no GLUE set 'mprc'"),
        ("mrpc", {"directory": ""}, None, r"config\.data\.directory="),
        ("mrpc", {"directory": "tfds:glue/qqp"}, None, "glue/qqp: expected tfds:glue/mrpc"),
        ("mnli", {"directory": "tfds:glue/mnli_matched"}, None, "expected tfds:glue/mnli"),
        ("mrpc", {"metric": "f2"}, None, "metric=f2"),
        ("mrpc", {"labels": ("a", "b")}, None, "are a, b: expected not_equivalent, equivalent"),
        ("rte", {}, lambda path: path.unlink(), r"no file .*RTE/train\.tsv"),
        ("rte", {}, lambda path: path.write_text("index\n"), "train of rte holds no examples"),
        (
            "rte",
            {},
            replace("sentence2", "other"),
            "train.tsv, line 2: no column 'sentence2'; found",
        ),
        ("rte", {}, replace("\tlabel", "\tgold"), "train.tsv, line 2: no 'label'"),
        ("rte", {}, replace("not_entail", "nothing"), "line 3: label 'nothingment'"),
        ("wnli", {}, replace("king\t1", "king\t-2"), "label '-2'"),
        ("stsb", {}, replace("1.5", "nan"), "line 3: score is 'nan'"),
        ("sst2", {}, replace("old road\t0", "old road"), r"line 4: expected 2 .*, found 1"),
    ],
)
def test_bad_input_raises_a_clear_error(name, data, spoil, message, tokenizer, tmp_path):
    if name in glue.DATASETS:
        write_download(tmp_path, name)
    if spoil:
        spoil(tmp_path / glue.DATASETS[name].folder / "train.tsv")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read(tokenizer, name, data.pop("directory", tmp_path), **data)


def test_a_duplicate_index_is_an_error_and_a_missing_test_set_is_not(tokenizer, tmp_path):
    write_download(tmp_path, "rte")
    path = tmp_path / "RTE" / "test.tsv"
    path.write_text(path.read_text().replace("3\twar", "1\twar"))
    with pytest.raises(ValueError, match=r"line 5: id '1' is already used in .*test\.tsv, line 3"):
        read(tokenizer, "rte", tmp_path)
    path.unlink()
    assert [split.name for split in read(tokenizer, "rte", tmp_path).splits] == ["dev"]


def test_configurations_take_a_set_and_runlocal():
    assert get_config("mnli").data.name == "mnli" and get_config("mnli").num_epochs == 3
    assert get_config("mnli,runlocal").max_seq_length == 32
    with pytest.raises(ValueError, match="unknown argument 'fast'"):
        get_config("mnli,fast")


@pytest.mark.slow
def test_an_mnli_run_predicts_the_diagnostic_set_like_the_loaded_model(tokenizer, tmp_path):
    init = write_random_encoder(tmp_path / "init", tokenizer)
    for name in ("mnli", "ax"):
        write_download(tmp_path / "glue", name)

    def run(name, init):
        run_config = get_config(f"{name},runlocal")
        run_config.init_from, run_config.data.directory = str(init), str(tmp_path / "glue")
        run_config.per_device_batch_size = 1
        return finetune.train_and_evaluate(run_config, tmp_path / name)

    with pytest.raises(ValueError, match=r"no examples to train on; .* -m bert_jax\.predict"):
        run("ax", init)
    result = run("mnli", init)
    assert result.keys() >= {"dev_matched", "dev_mismatched"}
    predict(tmp_path / "mnli", tmp_path / "glue", tmp_path / "found")
    for name in ("MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv"):
        written = tmp_path / "mnli" / "predictions" / name
        assert (tmp_path / "found" / name).read_text() == written.read_text()

    model = bert_jax.load(tmp_path / "mnli")
    lines = (tmp_path / "mnli" / "predictions" / "ax.jsonl").read_text().splitlines()
    for found, line in zip(model.classify(PAIRS), lines, strict=True):
        expected = json.loads(line)
        assert found.label == expected["prediction"]
        assert found.probability == pytest.approx(max(expected["probabilities"].values()), abs=1e-5)
