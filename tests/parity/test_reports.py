"""Files that users reported, each with the right value of its README: one row per report.

`BERT_JAX_REPORTS=DIR` names the folder of the reports; other tests make inputs of the same kinds.
"""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from sklearn import metrics as sklearn_metrics
from sklearn.preprocessing import MultiLabelBinarizer

import bert_jax
from bert_jax.configs.finetune import retrieval as retrieval_config
from bert_jax.configs.finetune import tagging as tagging_config
from bert_jax.configs.finetune import text_classification as text_config
from bert_jax.finetuning.class_weights import find_class_weights
from bert_jax.losses.in_batch import in_batch_loss
from bert_jax.runtime.errors import CheckpointError
from bert_jax.tasks import retrieval, tagging, text_classification
from bert_jax.tasks.scores import class_table
from bert_jax.tasks.tables import read_table
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.commands import ROOT

if "BERT_JAX_REPORTS" not in os.environ:
    pytest.skip("needs BERT_JAX_REPORTS=DIR", allow_module_level=True)
REPORTS = pathlib.Path(os.environ["BERT_JAX_REPORTS"]).absolute()
TINY = REPORTS / "tiny_model"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY)


def run(*command: str | pathlib.Path, **options) -> subprocess.CompletedProcess:
    """Runs a script or a module of the project, on a CPU."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | options.pop("env", {})
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        **options,
    )


def build_corpus(output: pathlib.Path, *flags: str) -> subprocess.CompletedProcess:
    """Runs `prepare_corpus` with the tiny model's vocabulary."""
    sizes = ("--max_seq_length=32", "--heldout_fraction=0")
    return run("tools/prepare_corpus.py", f"--vocab={TINY}", f"--output={output}", *sizes, *flags)


def splits_of(corpus: pathlib.Path) -> dict:
    return json.loads((corpus / "manifest.json").read_text(encoding="utf-8"))["splits"]


def classification_task(tokenizer, **data):
    config = text_config.get_config()
    config.data.update(data)
    return text_classification.get_task(config, tokenizer)


def finetune(workdir: pathlib.Path, *flags: str, config: str = "text_classification", **options):
    return run(
        "-m",
        "bert_jax.finetune",
        f"--config=configs/finetune/{config}.py",
        f"--workdir={workdir}",
        f"--config.init_from={TINY}",
        "--config.batch_size=4",
        "--config.max_seq_length=32",
        *flags,
        **options,
    )


@pytest.mark.parametrize("name", ["run[1]", "run\\1", "run*", "a b", "{x}"])
def test_brackets_in_path(name, tmp_path):
    model = bert_jax.load(TINY)
    model.save(tmp_path / name / "model")
    loaded = bert_jax.load(tmp_path / name / "model")
    jax.tree.map(np.testing.assert_array_equal, loaded.params, model.params)
    shutil.copytree(tmp_path / name / "model", tmp_path / "plain")
    jax.tree.map(
        np.testing.assert_array_equal, bert_jax.load(tmp_path / "plain").params, model.params
    )


def test_checkpoint_bit_flip(tmp_path):
    """The damaged checkpoint has no checksums: it is older than they are."""
    with pytest.raises(CheckpointError):
        bert_jax.load(REPORTS / "checkpoint_bit_flip/ck")
    model = bert_jax.load(TINY)
    (best,) = model.fill_mask("the boat on the [MASK].", top_k=1)
    assert best.token == "again" and best.probability == pytest.approx(0.0479, abs=1e-4)
    model.save(tmp_path / "ck")
    largest = max((tmp_path / "ck").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[2000] ^= 0x40
    largest.write_bytes(content)
    with pytest.raises(CheckpointError):
        bert_jax.load(tmp_path / "ck")


def test_conll_comments(tokenizer):
    config = tagging_config.get_config()
    config.data.train = config.data.dev = str(REPORTS / "conll_comments/pos.txt")
    config.data.scheme, config.max_seq_length = "none", 16
    task = tagging.get_task(config, tokenizer)
    assert set(task.labels) == {"PROPN", "VERB"}
    assert sum(np.count_nonzero(feature.label >= 0) for feature in task.train) == 4


def test_hidden_files(tmp_path):
    texts = REPORTS / "hidden_files/texts/**/*.txt"
    result = build_corpus(tmp_path / "corpus", f"--input={texts}", "--documents=files")
    assert result.returncode == 0 and splits_of(tmp_path / "corpus")["train"]["documents"] == 1


def test_json_boolean_text():
    path = REPORTS / "json_boolean_text/rows.jsonl"
    records = read_table(str(path), ["text", "answer"], label="label")
    assert [record.columns["answer"] for record in records] == ["true", "false"]


def test_many_labels():
    num_labels, num_texts = 1000, 4000
    rng, eye = np.random.default_rng(0), np.eye(1000, dtype=bool)
    predicted, expected = (rng.integers(0, num_labels, num_texts) for _ in range(2))
    header, *rows = class_table(eye[predicted], eye[expected], list(map(str, range(num_labels))))
    scores = sklearn_metrics.precision_recall_fscore_support(
        expected, predicted, labels=range(num_labels), zero_division=0
    )
    by_label = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    for index, (_, _, f1, support) in enumerate(zip(*scores, strict=True)):
        row = by_label[str(index)]
        assert float(row["f1"]) == pytest.approx(f1, abs=5e-3) and row["examples"] == support


def test_max_words_long(tmp_path):
    sentence = "The boat on the river is a good house and we see it again."
    count = 3_300_000 // (len(sentence) + 1)
    assert count * len(sentence.split()) == 783_048
    (tmp_path / "book.txt").write_text((sentence + "\n") * count)
    flags = (f"--input={tmp_path}/book.txt", "--documents=files", "--max_words=400000")
    result = build_corpus(tmp_path / "corpus", *flags)
    message = result.stdout + result.stderr
    assert "long" in message, message  # The only document is dropped: no corpus.
    assert not (tmp_path / "corpus/manifest.json").exists()


def test_multilabel_all_empty(tokenizer):
    folder = REPORTS / "multilabel_all_empty"
    data = {"label_separator": "|", "train": str(folder / "train.jsonl")}
    task = classification_task(tokenizer, **data, dev=str(folder / "dev.jsonl"))
    (dev,) = task.splits
    assert [feature.label.tolist() for feature in dev.features] == [[0, 0], [0, 0]]
    none = [np.array([-1.0, -1.0], np.float32)] * 2
    assert dev.score is not None and np.isfinite(list(dev.score(none).values())).all()
    with pytest.raises(ValueError, match=r"null\.jsonl.*2"):
        classification_task(tokenizer, **(data | {"train": str(folder / "null.jsonl")}))


def test_multilabel_list_separator(tokenizer):
    folder = REPORTS / "multilabel_list_separator"
    path = str(folder / "train.jsonl")
    task = classification_task(tokenizer, label_separator=",", train=path)
    lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
    reference = MultiLabelBinarizer()
    expected = reference.fit_transform([json.loads(line)["label"] for line in lines])
    assert sorted(task.labels) == list(reference.classes_)
    order = [task.labels.index(label) for label in reference.classes_]
    found = np.array([feature.label for feature in task.train])[:, order]
    np.testing.assert_array_equal(found, expected)


def test_numeric_class_order(tokenizer):
    folder = REPORTS / "numeric_class_order"
    config = text_config.get_config()
    config.data.train = str(folder / "train.csv")
    config.class_weights = tuple(map(float, range(1, 13)))
    task = text_classification.get_task(config, tokenizer)
    assert task.labels == tuple(map(str, range(12)))
    assert find_class_weights(config.class_weights, task) == config.class_weights
    two = str(folder / "two.csv")
    (dev,) = classification_task(tokenizer, train=two, dev=two).splits
    probabilities = np.array([0.1, 0.6, 0.3, 0.2, 0.5])
    outputs = [np.log([1 - p, p]).astype(np.float32) for p in probabilities]
    assert dev.score(outputs)["average_precision"] == pytest.approx(0.5)


def test_raw_text_identity(tokenizer, tmp_path):
    path = REPORTS / "raw_text_identity/docs.jsonl"
    flags = (f"--input={path}", "--heldout_fraction=0.2")
    assert build_corpus(tmp_path / "corpus", *flags).returncode == 0
    # Each document is there twice: all copies are dropped, each in the split of its original.
    for split in splits_of(tmp_path / "corpus").values():
        assert split["documents"] == 2 * split["dropped"]["duplicates"] > 0
    config = retrieval_config.get_config("bi_encoder")
    config.data.train = str(REPORTS / "raw_text_identity/train.jsonl")
    config.data.num_negatives = 1
    with pytest.raises(ValueError, match=r"train\.jsonl.*1"):  # The positive as its own negative.
        retrieval.get_task(config, tokenizer)


def test_several_positives(tokenizer):
    folder = REPORTS / "several_positives"
    config = retrieval_config.get_config("bi_encoder")
    config.data.dev, config.data.passages = str(folder / "dev.jsonl"), str(folder / "p.jsonl")
    (dev,) = retrieval.get_task(config, tokenizer).splits
    vectors = {
        "where is the boat": (1, 0, 0),
        "who is ann": (0, 1, 0),
        "the boat is on the river": (0.9, 0.1, 0),
        "a boat in the water": (0.8, 0.1, 0),
        "ann is a good mother": (0, 1, 0),
    }
    ids = {tuple(tokenizer.encode(text)): vector for text, vector in vectors.items()}
    outputs = [
        np.array([ids.get(tuple(each[1:-1].tolist()), (0, 0, 1)) for each in feature.sequences])
        for feature in dev.features
    ]
    scores = dev.score(outputs)
    assert scores["mrr_at_10"] == 1.0
    queries = np.array([[1, 0], [1, 0], [0, 1]], np.float32)
    passages = np.array([[1, 0.1], [0.9, 0.2], [0, 1]], np.float32)
    stacked = np.stack([queries, passages], axis=1)
    labels = np.array([[0, 1], [1, 0], [2, -1]], np.int32)  # Its own, then its query's others.
    loss = in_batch_loss(stacked, labels, np.ones(3, np.float32), temperature=0.05)
    q, p = queries.astype(np.float64), passages.astype(np.float64)
    others = [[2], [2], [0, 1]]
    expected = sum(
        np.log1p(sum(np.exp((q[i] @ p[j] - q[i] @ p[i]) / 0.05) for j in each))
        for i, each in enumerate(others)
    )
    assert float(loss) == pytest.approx(expected, rel=1e-4) and expected < 1e-6


def test_xz_damaged_stream(tmp_path):
    path = REPORTS / "xz_damaged_stream/docs.txt.xz"
    result = build_corpus(tmp_path / "corpus", f"--input={path}", "--rows=full_sentences")
    assert result.returncode == 1 and "docs.txt.xz" in result.stderr
    assert not (tmp_path / "corpus/manifest.json").exists()


@pytest.mark.skipif(not shutil.which("localedef"), reason="needs localedef")
@pytest.mark.parametrize("name", ["train_han", "train_latin"])
def test_non_utf8_locale(name, tmp_path):
    (tmp_path / "locales").mkdir()
    locale = str(tmp_path / "locales/en_US")
    subprocess.run(["localedef", "-i", "en_US", "-f", "ISO-8859-1", locale], check=True)
    train = REPORTS / f"non_utf8_locale/{name}.csv"
    flags = [f"--config.data.train={train}", f"--config.data.dev={train}", "--config.num_epochs=2"]
    written = []
    for folder, env in (
        ("latin", {"LOCPATH": str(tmp_path / "locales"), "LC_ALL": "en_US"}),
        ("utf8", {"LC_ALL": "C.UTF-8"}),
    ):
        result = finetune(tmp_path / folder / "run", *flags, env=env)
        assert result.returncode == 0, result.stderr
        source, exported = tmp_path / folder / "run", tmp_path / folder / "exported"
        convert = ("tools/convert_checkpoint.py", "--to=huggingface", source, exported)
        assert run(*convert, env=env).returncode == 0
        written.append(
            [(source / "predictions/dev_classes.tsv").read_bytes()]
            + [path.read_bytes() for path in sorted(exported.iterdir()) if path.is_file()]
        )
        bert_jax.load(exported)
    assert written[0] == written[1]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a mount namespace")
def test_no_dev_shm(tmp_path):
    (tmp_path / "text.txt").write_text("the boat on the river is a good house.\n" * 500)
    command = (
        "mount --make-rprivate / && mount -t tmpfs -o ro,size=1k tmpfs /dev/shm && "
        f"{sys.executable} tools/train_vocab.py --input={tmp_path}/text.txt "
        f"--output={tmp_path}/v.txt --size=60"
    )
    result = subprocess.run(
        ["unshare", "-m", "bash", "-c", command], cwd=ROOT, capture_output=True, text=True
    )
    assert (tmp_path / "v.txt").exists() or "/dev/shm" in result.stderr, result.stderr


@pytest.mark.parametrize("kind", ["PIPE", "FULL", "HUP"])
def test_stderr_lost(kind, tmp_path):
    """The end of a log does not end a run; SIGHUP saves as SIGTERM does."""
    docs = tmp_path / "docs.txt"
    docs.write_text((REPORTS / "brackets_in_path/docs.txt").read_text(encoding="utf-8") * 20)
    corpus, workdir = tmp_path / "corpus", tmp_path / "run"
    assert build_corpus(corpus, f"--input={docs}", "--heldout_fraction=0.1").returncode == 0
    command = [
        sys.executable,
        "-m",
        "bert_jax.pretrain",
        "--config=configs/pretrain/bert_tiny.py",
        f"--workdir={workdir}",
        f"--config.corpus={corpus}",
        "--config.long_phase.num_steps=0",
        "--config.num_steps=400",
        "--config.batch_size=8",
        "--config.warmup_steps=10",
        "--config.model.num_layers=1",
        "--config.log_every=10",
        "--config.model.hidden_size=64",
        "--config.checkpoint_every=1000",
    ]
    options = {"cwd": ROOT, "start_new_session": True, "env": os.environ | {"JAX_PLATFORMS": "cpu"}}
    if kind == "FULL":
        with open("/dev/full", "w") as full:
            code = subprocess.run(command, stdout=full, stderr=full, **options).returncode
    else:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options
        )
        seen = b""
        while not re.search(rb"\b1\d\d/400", seen):
            block = os.read(process.stdout.fileno(), 4096)
            assert block, seen.decode()
            seen += block
        if kind == "PIPE":
            process.stdout.close()
        else:
            process.send_signal(signal.SIGHUP)
            seen += process.stdout.read()
        code = process.wait(timeout=300)
    steps = [int(path.name) for path in (workdir / "checkpoints").iterdir()]
    if kind == "HUP":
        assert code == 75 and 100 <= max(steps) < 400, seen.decode()
    else:
        assert code == 0 and steps == [400] and (workdir / "result.json").exists()
