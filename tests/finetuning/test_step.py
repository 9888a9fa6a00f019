"""One update of every head: packing, microbatches and devices change neither loss nor gradients."""

import dataclasses
import functools

import flax
import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax.data.features import NO_LABEL, LabelLayout, ModelInput, RowShape, finetune_batches
from bert_jax.finetuning.step import (
    fit_rows_per_microbatch,
    make_finetune_step,
    make_predict_step,
    predict,
)
from bert_jax.model.bert import RULES
from bert_jax.model.config import BertConfig
from bert_jax.model.heads import HEADS, TaskModel, in_batch_loss
from bert_jax.sharding.mesh import BATCH_SPEC, batch_sharding, make_mesh
from bert_jax.sharding.rules import TASK_RULES, infer_shardings, stack_shardings
from bert_jax.training.optimizer import Hyperparameters
from bert_jax.training.state import TrainState
from tests.helpers import batch_of_row

KINDS = sorted(HEADS.keys() - {"feature_based"})

BATCH, LENGTH, SEQUENCES = 13, 64, {"multiple_choice": 3, "embedding": 3}
OUTPUTS = {"classification": 3, "multi_label": 3, "tagging": 4, "span": 2, "embedding": 0}
WEIGHTS = {"classification": (1.0, 2.5, 0.1), "tagging": (0.1, 1.0, 3.0, 2.0)}  # Of the classes.


def others_of(passage: int) -> list[int]:
    """Returns the other passages that answer the query whose own is `passage`."""
    return [other for other in range(2, 5) if other != passage] if 2 <= passage < 5 else []


def make_features(kind: str) -> list[ModelInput]:
    rng = np.random.default_rng(0)
    features = []
    for number in range(BATCH):
        sequences = tuple(
            rng.integers(5, 90, rng.integers(3, 12), dtype=np.int32)
            for _ in range(SEQUENCES.get(kind, 1))
        )
        length = len(sequences[0])
        label = {
            "classification": number % 3,
            "multi_label": np.array([number % 2, number % 3 == 0, 1], np.float32),
            "regression": number / 7,
            "multiple_choice": number % 3,
            "tagging": rng.integers(NO_LABEL, 4, length, dtype=np.int32),
            "span": (1, length - 1),
            # Each two queries have the same passage; some passages answer other queries, too.
            "embedding": np.array([number // 2, 100 + number, *others_of(number // 2)], np.int32),
        }[kind]
        features.append(ModelInput(sequences, tuple(map(len, sequences)), label))
    return features


def head_of(kind: str, **fields):
    if kind == "multi_label":
        fields["label_layout"] = LabelLayout(np.float32, shape=(OUTPUTS[kind],))
    if kind == "embedding":
        fields["label_layout"] = LabelLayout(is_ragged=True, shape=(4,))
    return dataclasses.replace(HEADS[kind], **fields)


def make_model(kind: str, dropout_rate: float = 0.0, **options):
    config = BertConfig(
        vocab_size=90,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        dropout_rate=dropout_rate,
    )
    return TaskModel(config, HEADS[kind], OUTPUTS.get(kind, 1), **options)


def row_shape(kind: str, packed: bool = True) -> RowShape:
    each = SEQUENCES.get(kind, 1)
    return RowShape(LENGTH, (8 if packed else 1) * each, head_of(kind).label_layout, 0, each)


def initial(model: TaskModel) -> dict:
    """Returns random parameters, from NumPy: to compile the initializers takes longer."""
    row = row_shape(model.task_head.name).build([], 1)
    shapes = jax.eval_shape(model.init, jax.random.key(1), row)["params"]
    rng = np.random.default_rng(1)
    return flax.traverse_util.path_aware_map(
        lambda path, leaf: np.float32(rng.normal(path[-1] == "scale", 0.02, leaf.shape)), shapes
    )


KEYS = jax.random.split(jax.random.key(2), 1)


@functools.cache  # Of each step, compiled once.
def build_update(
    kind,
    *,
    packed=True,
    rows_per_microbatch=16,
    devices=1,
    fsdp=1,
    tensor=1,
    class_weights=(),
    **model,
):
    """Returns an SGD step, a function for its initial state, and its batch (rows, microbatches)."""
    model, shape = make_model(kind, **model), row_shape(kind, packed)
    mesh = make_mesh(fsdp=fsdp, tensor=tensor, devices=jax.devices()[:devices])
    params, head = initial(model), head_of(kind, class_weights=class_weights)
    state = TrainState(np.zeros([], np.int32), params, optax.sgd(1.0).init(params))
    shardings = infer_shardings(state, mesh, (*TASK_RULES, *RULES))
    step = make_finetune_step(
        model, head, lambda values: optax.sgd(values.learning_rate), shardings, rows_per_microbatch
    )
    (batch,) = finetune_batches(
        make_features(kind),
        shape,
        NamedSharding(mesh, P("trial", *BATCH_SPEC)),
        batch_size=BATCH,
        rows_per_microbatch=rows_per_microbatch,
        seeds=[0],
        start=0,
        stop=1,
    )
    state, shardings = state.map_trials(stack), shardings.map_trials(stack_shardings)
    return step, functools.partial(jax.device_put, state, shardings), batch


def stack(tree):
    """Returns a stack of one trial."""
    return jax.tree.map(lambda leaf: leaf[None], tree)


def numbers(*learning_rates: float, dropout_rate: float = 0.0) -> Hyperparameters:
    rates = [[rate, 0, 0, 1, dropout_rate] for rate in learning_rates]
    return Hyperparameters(*np.float32(rates).T)


def update(kind, dropout_rate=0.0, **settings):
    """Returns the loss of one batch, its gradients (from a step of SGD), and its microbatches."""
    step, new_state, (rows, num_microbatches) = build_update(kind, **settings)
    before = new_state()
    params = jax.device_get(before.params)
    hyperparameters = numbers(1.0, dropout_rate=dropout_rate)
    after, metrics = step(before, rows, num_microbatches, KEYS, hyperparameters)
    gradients = jax.tree.map(lambda a, b: (a - b)[0], params, jax.device_get(after.params))
    return float(metrics["loss"][0]), gradients, num_microbatches


@pytest.mark.slow
def test_attention_has_its_own_dropout_rate():
    step, new_state, (rows, num_microbatches) = build_update("classification")

    def loss(rate, attention_rate):
        values = numbers(1.0, dropout_rate=rate)
        if attention_rate is not None:
            values = values._replace(attention_dropout_rate=np.float32([attention_rate]))
        _, metrics = step(new_state(), rows, num_microbatches, KEYS, values)
        return float(metrics["loss"][0])

    assert loss(0.4, 0.4) == loss(0.4, None)  # By default, the rate of hidden states.
    assert len({loss(0.0, 0.0), loss(0.0, 0.4), loss(0.4, 0.4), loss(0.4, 0.0)}) == 4


def assert_same(one, two):
    assert one[0] == pytest.approx(two[0], abs=1e-5)
    for a, b in zip(jax.tree.leaves(one[1]), jax.tree.leaves(two[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


APART = {"packed": False, "rows_per_microbatch": 8, "devices": 4}


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind == "classification" else pytest.param(kind, marks=pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_update_does_not_depend_on_packing_microbatches_and_devices(kind):
    weights = WEIGHTS.get(kind, ())
    packed = update(kind, class_weights=weights)
    apart = update(kind, class_weights=weights, **APART)
    assert (packed[2], apart[2]) == (1, 2)
    assert_same(packed, apart)


@pytest.mark.slow
def test_two_updates_are_the_same_on_every_mesh():
    results = {}
    for name, devices, sizes in (
        ("one device", 1, {}),
        ("data", 8, {}),
        ("fsdp", 8, {"fsdp": 4}),
        ("tensor", 8, {"tensor": 2}),
    ):
        step, new_state, (rows, num_microbatches) = build_update(
            "classification", packed=False, devices=devices, **sizes
        )
        state = new_state()
        kernel = state.params["encoder"]["layers"]["query"]["kernel"]
        assert kernel.sharding.is_fully_replicated == (name in ("one device", "data"))
        losses = []
        for _ in range(2):
            state, metrics = step(state, rows, num_microbatches, KEYS, numbers(0.5))
            losses.append(float(metrics["loss"][0]))
        results[name] = losses, jax.device_get(state.params)
    expected_losses, expected_params = results.pop("one device")
    assert expected_losses[1] < expected_losses[0]
    for name, (losses, params) in results.items():
        assert losses == pytest.approx(expected_losses, abs=1e-5), name
        for array, expected in zip(*map(jax.tree.leaves, (params, expected_params)), strict=True):
            np.testing.assert_allclose(array, expected, atol=1e-5, err_msg=name)


def test_another_learning_rate_compiles_nothing():
    step, new_state, (rows, num_microbatches) = build_update(
        "classification", class_weights=WEIGHTS["classification"]
    )
    initial, moved = jax.device_get(new_state().params), []
    for rate in (1.0, 0.5):
        after, _ = step(new_state(), rows, num_microbatches, KEYS, numbers(rate))
        moved.append(jax.tree.map(np.subtract, initial, jax.device_get(after.params)))
    for whole, half in zip(*map(jax.tree.leaves, moved), strict=True):
        np.testing.assert_allclose(half, whole / 2, atol=1e-6)
    assert step._cache_size() == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["tagging", pytest.param("embedding", marks=pytest.mark.exhaustive)]
)
def test_update_with_dropout_does_not_depend_on_microbatches_and_devices(kind):
    one, four = (
        update(
            kind,
            packed=False,
            rows_per_microbatch=rows_per_microbatch,
            devices=devices,
            dropout_rate=0.1,
        )
        for rows_per_microbatch, devices in ((5, 1), (8, 4))
    )
    assert (one[2], four[2]) == (3, 2)
    assert_same(one, four)


@functools.cache
def predictor(kind: str, devices: int = 1, **head):
    """Returns a function from features to their outputs and mean loss."""
    model, head = make_model(kind), head_of(kind, **head)
    mesh = make_mesh(devices=jax.devices()[:devices])
    step, params = make_predict_step(model, mesh, head), stack(initial(model))
    settings = {"shape": row_shape(kind), "num_rows": 4, "sharding": batch_sharding(mesh)}
    return lambda features: predict(step, params, head, features, **settings)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_predictions_and_their_loss_equal_unpacked(kind):
    features, predict_features = make_features(kind), predictor(kind)
    packed, loss = predict_features(features)
    each_alone = [predict_features([feature]) for feature in features]
    if kind == "embedding":
        assert loss is None
    else:
        num_labels = [np.sum(each.label >= 0) if kind == "tagging" else 1 for each in features]
        losses = [alone.loss for alone in each_alone]
        assert loss == pytest.approx(np.average(losses, weights=num_labels), rel=1e-5)
    for feature, one, alone in zip(features, packed, each_alone, strict=True):
        np.testing.assert_allclose(one, alone.outputs[0], atol=1e-5)
        if kind in ("tagging", "span"):
            assert one.shape == (len(feature), OUTPUTS[kind])


@pytest.mark.parametrize(
    ("pooling", "normalize"), [pytest.param("mean", True, marks=pytest.mark.slow), ("cls", False)]
)
def test_embedding_is_the_pooled_last_layer(pooling, normalize):
    model = make_model("embedding", pooling=pooling, normalize=normalize)
    features = make_features("embedding")[:2]
    rows = row_shape("embedding").build([features], 1)
    sequences = [*features[0].sequences, *features[1].sequences]
    tokens = np.zeros((len(sequences), max(map(len, sequences))), np.int32)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = sequence
    alone = batch_of_row(tokens) | {"sequence_ids": (tokens > 0).astype(np.int32)}

    @jax.jit
    def run(params):
        hidden = model.apply({"params": params}, alone, method=lambda m, batch: m.encoder(batch))
        return model.apply({"params": params}, rows)[0], hidden

    found, hidden = jax.device_get(run(initial(model)))
    for slot, sequence in enumerate(sequences):
        states = hidden[slot, : len(sequence)]
        vector = states.mean(0) if pooling == "mean" else states[0]
        if normalize:
            vector = vector / np.linalg.norm(vector)
        np.testing.assert_allclose(found[slot], vector, atol=1e-5)
    assert not np.any(found[6:])


def in_batch_loss_by_hand(vectors, labels, temperature) -> float:
    """The sum over queries in float64, from the `ModelInput.label` of each example."""
    vectors, total = np.float64(vectors), 0.0
    count = vectors.shape[1] - 1
    for query, label in enumerate(labels):
        right = {label[0], *label[count:]} - {NO_LABEL}
        logits = [vectors[query, 0] @ vectors[query, 1] / temperature]
        for other, numbers in enumerate(labels):
            for place, number in enumerate(numbers[:count], start=1):
                if number not in right:
                    logits.append(vectors[query, 0] @ vectors[other, place] / temperature)
        total += np.logaddexp.reduce(logits) - logits[0]
    return total


def test_in_batch_loss_excludes_the_other_positives_of_a_query():
    queries, passages = [[1, 0], [1, 0], [0, 1]], [[1, 0.1], [0.9, 0.2], [0, 1]]
    vectors = np.swapaxes(np.float32([queries, passages]), 0, 1)
    weights = np.ones(3, np.float32)
    labels = np.array([[0, 1], [1, 0], [2, NO_LABEL]], np.int32)
    assert in_batch_loss(vectors, labels, weights, 0.05) == pytest.approx(1.449e-7, rel=0.01)
    assert in_batch_loss(vectors, labels[:, :1], weights, 0.05) == pytest.approx(2.25, abs=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_in_batch_loss_and_gradient_equal_the_definition(seed):
    """Random copies, positives of other examples, hard negatives and unused examples."""
    rng = np.random.default_rng(seed)
    examples, count, others, unused = 9, int(rng.integers(1, 4)), int(rng.integers(0, 4)), 3
    vectors = rng.normal(size=(examples + unused, 1 + count, 8)).astype(np.float32)
    labels = rng.integers(0, 12, (examples + unused, count + others), dtype=np.int32)
    labels[:, count:][rng.random((examples + unused, others)) < 0.4] = NO_LABEL
    order = rng.permutation(examples + unused)
    used = np.sort(order[:examples])
    weights = np.zeros(examples + unused, np.float32)
    weights[used] = 1
    loss, gradient = jax.value_and_grad(in_batch_loss)(vectors, labels, weights, 0.5)
    expected = in_batch_loss_by_hand(vectors[used], labels[used], 0.5)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert not np.any(gradient[order[examples:]])
    direction, step = rng.normal(size=vectors.shape), 1e-4
    moved = [vectors + sign * step * direction for sign in (1, -1)]
    ends = [in_batch_loss_by_hand(each[used], labels[used], 0.5) for each in moved]
    slope = (ends[0] - ends[1]) / (2 * step)
    assert np.sum(gradient * direction) == pytest.approx(slope, rel=1e-3, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "rows_per_microbatch"),
    [(1, 16), (1, 3), (8, 8)],
    ids=["whole batch", "microbatches, the last padded", "devices"],
)
def test_loss_of_several_positives_equals_the_definition(devices, rows_per_microbatch):
    features = make_features("embedding")
    vectors, _ = predictor("embedding")(features)
    labels = [feature.label for feature in features]
    expected = in_batch_loss_by_hand(vectors, labels, 0.05) / len(features)
    without_others = [label[:2] for label in labels]
    assert in_batch_loss_by_hand(vectors, without_others, 0.05) / len(features) > expected + 1e-3
    settings = {"packed": False, "devices": devices, "rows_per_microbatch": rows_per_microbatch}
    assert update("embedding", **settings)[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "kind", ["classification", pytest.param("tagging", marks=pytest.mark.slow)]
)
def test_weighted_loss_equals_torch(kind):
    """CrossEntropyLoss(weight): the sum of the weighted losses over the sum of their weights."""
    weights, features = WEIGHTS[kind], make_features(kind)
    outputs, loss = predictor(kind, devices=2, class_weights=weights)(features)
    logits = np.concatenate([np.reshape(each, (-1, len(weights))) for each in outputs])
    labels = np.concatenate([np.ravel(each.label) for each in features])
    logits, labels = logits[labels >= 0].astype(np.float64), labels[labels >= 0]
    nats = np.logaddexp.reduce(logits, axis=1) - logits[np.arange(len(labels)), labels]
    each = np.array(weights)[labels]
    assert loss == pytest.approx(np.sum(nats * each) / np.sum(each), rel=1e-5)
    in_training = update(kind, class_weights=weights, **APART)
    assert in_training[0] == pytest.approx(loss, rel=1e-5)


def test_multi_label_loss_equals_torch():
    """BCEWithLogitsLoss: the mean over labels and examples."""
    features = make_features("multi_label")
    outputs, loss = predictor("multi_label")(features)
    logits = np.stack(outputs).astype(np.float64)
    labels = np.stack([each.label for each in features])
    probabilities = 1 / (1 + np.exp(-logits))
    likelihood = np.where(labels == 1, probabilities, 1 - probabilities)
    assert loss == pytest.approx(-np.log(likelihood).mean(), rel=1e-5)


@pytest.mark.slow
def test_multi_label_loss_in_training_equals_the_loss_of_predictions():
    _, loss = predictor("multi_label")(make_features("multi_label"))
    assert update("multi_label")[0] == pytest.approx(loss, rel=1e-5)


def padding(size: int, rows: list[int]) -> int:
    return sum(-count % size for count in rows)


@pytest.mark.parametrize("num_shards", [1, 2, 8])
def test_microbatch_is_divisible_by_the_devices_and_no_larger_than_the_maximum(num_shards):
    for maximum in range(num_shards, 8 * num_shards, num_shards):
        for rows in range(1, 100):
            size = fit_rows_per_microbatch(maximum, [rows], num_shards)
            assert 0 < size <= maximum and size % num_shards == 0
            assert padding(size, [rows]) <= padding(maximum, [rows])


@pytest.mark.parametrize(
    ("rows", "size"),
    [
        ([3, 3, 3], 3),  # No padding for short texts.
        ([14, 15, 14, 14], 15),
        ([14, 14, 15, 14, 13, 14, 14, 14, 14, 17], 15),  # Two microbatches for the rare large one.
        ([20, 20], 10),  # Equal ones, not 16 and 4.
        ([64, 64], 16),  # As few as fit.
    ],
)
def test_microbatches_hold_batches_with_little_padding(rows, size):
    assert fit_rows_per_microbatch(16, rows, 1) == size
