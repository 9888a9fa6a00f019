"""The loss of fine-tuning with a teacher, per head, and the teacher's predictions."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import bert_jax
from bert_jax import finetune
from bert_jax.checkpoints.native import write_checkpoint
from bert_jax.checkpoints.read import read_model
from bert_jax.configs.finetune import text_classification
from bert_jax.data.features import LabelLayout, ModelInput, RowShape
from bert_jax.finetuning.finetune_teacher import check_same_tokens
from bert_jax.finetuning.soft_targets import with_soft_targets
from bert_jax.model.heads import HEADS, with_target_std
from tests.helpers.corpora import WORDS, write_vocabulary
from tests.helpers.models import assert_trees_equal, write_weights
from tests.helpers.runs import saved_params

pytestmark = pytest.mark.usefixtures("two_devices")
LENGTHS = (5, 3, 4)
ALPHA, TEMPERATURE = 0.3, 2.0


def log_softmax(x, temperature=1.0):
    x = x / temperature - (x / temperature).max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def float64_loss(hard, logits, teacher) -> float:
    p, q = log_softmax(teacher, TEMPERATURE), log_softmax(logits, TEMPERATURE)
    return ALPHA * hard + (1 - ALPHA) * TEMPERATURE**2 * (np.exp(p) * (p - q)).sum()


@pytest.mark.parametrize("name", [name for name, head in HEADS.items() if head.soft_loss])
def test_loss_equals_float64(name):
    """Of three sequences in one row, and with two choices each of six in two rows."""
    rng, head = np.random.default_rng(0), HEADS[name]
    size = {"regression": 1, "multiple_choice": 2, "span": 2}.get(name, 3)
    is_per_position, choices = head.input_kind == "positions", 1 + (name == "multiple_choice")
    labels = {"regression": 1.5, "span": (1, 2), "tagging": None}
    features = []
    for length in LENGTHS:
        shape = (length, size) if is_per_position else (size,)
        label = labels.get(name, 1)
        label = np.arange(length) % size if label is None else label
        teacher = rng.normal(0, 2, shape).astype(np.float32)
        tokens = (np.arange(length) + 5,) * choices
        features.append(ModelInput(tokens, (length,) * choices, label, teacher))
    layout = LabelLayout(np.float32, per_position=is_per_position, shape=(size,))
    shape = RowShape(32, 8, head.label_layout, 0, choices, layout)
    rows = shape.build([features], 2)
    slots = 32 if is_per_position else 8
    outputs = rng.normal(0, 2, (2, slots, 1 if choices > 1 else size)).astype(np.float32)
    found = np.asarray(with_soft_targets(head, ALPHA, TEMPERATURE).loss(outputs, rows))

    start, logits = 0, outputs[0].astype(float)
    for index, feature in enumerate(features):
        end, teacher, label = (
            start + len(feature),
            feature.teacher_outputs.astype(float),
            feature.label,
        )
        if name == "tagging":
            for place in range(start, end):
                tag, teacher_logits = label[place - start], teacher[place - start]
                hard = -log_softmax(logits[place])[tag]
                assert found[0, place] == pytest.approx(
                    float64_loss(hard, logits[place], teacher_logits), rel=1e-6
                )
        elif name == "span":
            ends = [(logits[start:end, n], teacher[:, n], label[n]) for n in range(2)]
            each = [float64_loss(-log_softmax(x)[n], x, y) for x, y, n in ends]
            assert found[0, index] == pytest.approx(np.mean(each), rel=1e-6)
        elif name == "regression":
            value = logits[index, 0]
            expected = ALPHA * (value - 1.5) ** 2 + (1 - ALPHA) * (value - teacher[0]) ** 2
            assert found[0, index] == pytest.approx(expected, rel=1e-6)
        else:
            x = logits[2 * index : 2 * index + 2, 0] if choices > 1 else logits[index]
            expected = float64_loss(-log_softmax(x)[1], x, teacher)
            assert found[0, index] == pytest.approx(expected, rel=1e-6)
        start = end


def test_loss_of_standardized_values_is_that_of_both_divided_by_the_deviation():
    rng = np.random.default_rng(0)
    outputs, labels, teacher = rng.normal(1000, 7, (3, 2, 4)).astype(np.float32)
    head = with_soft_targets(with_target_std(HEADS["regression"], 7.0), ALPHA, TEMPERATURE)
    rows = {"labels": labels, "teacher_outputs": teacher[..., None]}
    found = np.asarray(head.loss(outputs[..., None], rows))
    outputs, labels, teacher = (each.astype(float) for each in (outputs, labels, teacher))
    expected = ALPHA * (outputs - labels) ** 2 + (1 - ALPHA) * (outputs - teacher) ** 2
    np.testing.assert_allclose(found, expected / 49, rtol=1e-5)


LABELS = ("north", "south")
LINES = [f"{' '.join(WORDS[n : n + 3 + n % 4])},{LABELS[n % 2]}\n" for n in range(20)]


@pytest.fixture
def given(tmp_path):
    """Returns a configuration of a student and a teacher with random weights."""
    vocabulary = write_vocabulary(tmp_path / "vocab.txt")
    (tmp_path / "train.csv").write_text("text,label\n" + "".join(LINES))
    config = text_classification.get_config()
    config.init_from = str(write_weights(tmp_path / "student", vocabulary))
    config.teacher = str(write_weights(tmp_path / "teacher", vocabulary, head=LABELS, bias=0.5))
    config.data.train = config.data.dev = str(tmp_path / "train.csv")
    config.update({"max_seq_length": 16, "batch_size": 8, "num_epochs": 1.0})
    return config


def changed_head(directory, target, **head):
    """Writes a checkpoint whose head has other settings; returns its path."""
    model = read_model(directory)
    settings = model.settings | {"head": model.settings["head"] | head}
    write_checkpoint(target, model.params, settings, model.tokenizer)
    return str(target)


def test_teacher_outputs_are_what_it_predicts(given, tmp_path):
    setup = finetune.prepare(given)
    texts = [line.split(",")[0] for line in LINES]
    expected = bert_jax.load(given.teacher).classify(texts, top_k=2)
    for feature, labels in zip(setup.data.task.train, expected, strict=True):
        probabilities = np.exp(log_softmax(feature.teacher_outputs.astype(float)))
        found = dict(zip(LABELS, probabilities, strict=True))
        assert found == pytest.approx({each.label: each.probability for each in labels}, abs=1e-5)
    assert all(feature.teacher_outputs is None for feature in setup.data.task.splits[0].features)
    assert set(setup.settings(given)["contents"]) >= {"init_from", "teacher"}


def test_teacher_with_another_vocabulary_reads_the_text_itself(given, tmp_path):
    vocabulary = write_vocabulary(tmp_path / "other.txt", WORDS[::-1])
    given.teacher = str(write_weights(tmp_path / "reversed", vocabulary, head=LABELS))
    outputs = [feature.teacher_outputs for feature in finetune.prepare(given).data.task.train]
    texts = [line.split(",")[0] for line in LINES]
    expected = bert_jax.load(given.teacher).classify(texts, top_k=2)
    for output, labels in zip(outputs, expected, strict=True):
        assert LABELS[output.argmax()] == labels[0].label


@pytest.mark.exhaustive
def test_stacked_seeds_learn_from_the_teacher_alone(given, tmp_path):
    given.update({"num_seeds": 2, "num_epochs": 2.0, "learning_rate": 1e-3})
    given.data.dev = ""  # The last checkpoints are kept.
    given.distillation.alpha = 0.0
    result = finetune.train_and_evaluate(given, tmp_path / "run")
    assert set(bert_jax.load(result["model"]).params) == {"encoder", "head"}
    # The labels have no effect.
    texts = (line.split(",")[0] for line in LINES)
    other = "".join(f"{text},{LABELS[n // 3 % 2]}\n" for n, text in enumerate(texts))
    (tmp_path / "train.csv").write_text("text,label\n" + other)
    finetune.train_and_evaluate(given, tmp_path / "other")
    for seed in range(2):
        runs = (tmp_path / f"{name}/seed_{seed}" for name in ("run", "other"))
        assert_trees_equal(*(saved_params(run) for run in runs))
    # Another teacher is other contents.
    model = read_model(given.teacher)
    params = jax.tree.map(lambda leaf: 2 * leaf, model.params)
    write_checkpoint(tmp_path / "double", params, model.settings, model.tokenizer)
    given.teacher = str(tmp_path / "double")
    with pytest.raises(ValueError, match=r"other settings:\n  contents\.teacher: "):
        finetune.train_and_evaluate(given, tmp_path / "other")


BAD = [
    ({"labels": ["south", "north"]}, "has the labels south,north, and the task north,south: exp"),
    ({"labels": ["north", "west"]}, "has the labels north,west, and the task north,south"),
    ({"task": "multi_label"}, "has a head for multi_label, and this task needs one for classif"),
]


@pytest.mark.parametrize(("head", "message"), BAD, ids=lambda value: str(value)[:50])
def test_bad_teacher_is_a_clear_error(head, message, given, tmp_path):
    given.teacher = changed_head(given.teacher, tmp_path / "changed", **head)
    with pytest.raises(ValueError, match=message):
        finetune.prepare(given)


def test_teacher_without_a_head_is_a_clear_error(given):
    given.teacher = given.init_from
    with pytest.raises(
        ValueError, match=r"teacher=.* has no head, and this task needs one for clas"
    ):
        finetune.prepare(given)


def test_teacher_that_reads_other_tokens_cannot_teach_tags(given):
    feature = ModelInput((np.array([2, 5, 3], np.int32),), (3,))
    other = dataclasses.replace(feature, sequences=(np.array([2, 6, 3], np.int32),))
    check_same_tokens("DIR", [feature], [feature])
    check = functools.partial(check_same_tokens, "DIR", [feature])
    for student in ([other], [feature, feature]):
        with pytest.raises(ValueError, match="teacher=DIR tokenizes the training examples diff"):
            check(student)
