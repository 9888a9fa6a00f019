"""One update of every head: packing, microbatches and devices change neither loss nor gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bert_jax import partitioning
from bert_jax.data.features import NO_LABEL, Feature, RowShape, finetune_batches
from bert_jax.model.config import BertConfig
from bert_jax.model.heads import HEADS, BertForTask, in_batch_loss
from bert_jax.training import finetune_step
from bert_jax.training.finetune_step import fit_microbatch_rows
from bert_jax.training.state import TrainState

KINDS = sorted(HEADS.keys() - {"feature_based"})

BATCH, LENGTH, SEQUENCES = 13, 64, {"multiple_choice": 3, "embedding": 3}
OUTPUTS = {"classification": 3, "tagging": 4, "span": 2, "embedding": 0}


def make_features(kind: str) -> list[Feature]:
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
            "regression": number / 7,
            "multiple_choice": number % 3,
            "tagging": rng.integers(NO_LABEL, 4, length, dtype=np.int32),
            "span": (1, length - 1),
            "embedding": np.array([number // 2, 100 + number], np.int32),
        }[kind]
        features.append(Feature(sequences, tuple(map(len, sequences)), label))
    return features


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
    return BertForTask(config, HEADS[kind], OUTPUTS.get(kind, 1), **options)


def row_shape(kind: str, packed: bool = True) -> RowShape:
    each = SEQUENCES.get(kind, 1)
    return RowShape(LENGTH, (8 if packed else 1) * each, HEADS[kind].labels, 0, each)


def initial(model: BertForTask) -> dict:
    row = jax.tree.map(jnp.asarray, row_shape(model.kind.name).empty(1))
    return jax.jit(model.init)(jax.random.key(1), row)["params"]


def update(kind, *, packed=True, microbatch_rows=16, devices=1, **model):
    """Returns the loss of one batch, its gradients (from a step of SGD), and its microbatches."""
    model, shape = make_model(kind, **model), row_shape(kind, packed)
    mesh = partitioning.make_mesh(devices=jax.devices()[:devices])
    optimizer, params = optax.sgd(1.0), initial(model)
    state = TrainState(jnp.zeros([], jnp.int32), params, optimizer.init(params))
    shardings = partitioning.infer_shardings(state, mesh, partitioning.TASK_RULES)
    step = finetune_step.make_finetune_step(
        model, HEADS[kind], optimizer, shardings, microbatch_rows
    )
    ((rows, num_microbatches),) = finetune_batches(
        make_features(kind),
        shape,
        partitioning.batch_sharding(mesh),
        batch_size=BATCH,
        microbatch_rows=microbatch_rows,
        seed=0,
        start=0,
        stop=1,
    )
    before = jax.device_get(params)
    state, metrics = step(
        jax.device_put(state, shardings), rows, num_microbatches, jax.random.key(2)
    )
    after = jax.device_get(state.params)
    return float(metrics["loss"]), jax.tree.map(np.subtract, before, after), num_microbatches


def assert_same(one, two):
    assert one[0] == pytest.approx(two[0], abs=1e-5)
    for a, b in zip(jax.tree.leaves(one[1]), jax.tree.leaves(two[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_update_does_not_depend_on_packing_microbatches_and_devices(kind):
    packed, apart = update(kind), update(kind, packed=False, microbatch_rows=8, devices=4)
    assert (packed[2], apart[2]) == (1, 2)
    assert_same(packed, apart)


@pytest.mark.parametrize("kind", ["tagging", "embedding"])
def test_update_with_dropout_does_not_depend_on_microbatches_and_devices(kind):
    one, four = (
        update(
            kind, packed=False, microbatch_rows=microbatch_rows, devices=devices, dropout_rate=0.1
        )
        for microbatch_rows, devices in ((5, 1), (8, 4))
    )
    assert (one[2], four[2]) == (3, 2)
    assert_same(one, four)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_predictions_equal_unpacked(kind):
    model, features = make_model(kind), make_features(kind)
    mesh = partitioning.make_mesh(devices=jax.devices()[:1])
    step = finetune_step.make_predict_step(model, mesh)
    packed, alone = (
        finetune_step.predict(
            step,
            initial(model),
            HEADS[kind],
            features,
            row_shape(kind, packed),
            4,
            partitioning.batch_sharding(mesh),
        )
        for packed in (True, False)
    )
    for feature, one, two in zip(features, packed, alone, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)
        if kind in ("tagging", "span"):
            assert one.shape == (len(feature), OUTPUTS[kind])


@pytest.mark.parametrize(("pooling", "normalize"), [("mean", True), ("cls", False)])
def test_embedding_is_the_pooled_last_layer(pooling, normalize):
    model = make_model("embedding", pooling=pooling, normalize=normalize)
    params, features = initial(model), make_features("embedding")[:2]
    shape = row_shape("embedding")
    rows = shape.empty(1)
    shape.fill(rows, 0, features)
    found = model.apply({"params": params}, rows)[0]
    for slot, tokens in enumerate([*features[0].sequences, *features[1].sequences]):
        ids = jnp.asarray(tokens)[None]
        hidden = model.apply(
            {"params": params},
            method=lambda m, ids=ids: m.bert(ids, ids * 0, jnp.arange(ids.size)[None], ids * 0 + 1),
        )[0]
        vector = np.asarray(hidden.mean(0) if pooling == "mean" else hidden[0])
        if normalize:
            vector = vector / np.linalg.norm(vector)
        np.testing.assert_allclose(found[slot], vector, atol=1e-5)
    assert not np.any(found[6:])


def test_in_batch_loss_equals_its_definition_without_copies():
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(5, 3, 8)).astype(np.float32)
    passages = np.array([[0, 1], [2, 3], [0, 4], [5, 0], [6, 7]], np.int32)
    weights = np.array([1, 1, 1, 1, 0], np.float32)
    expected = 0.0
    for query in range(4):
        logits = [vectors[query, 0] @ vectors[query, 1] / 0.5]
        for other in range(4):
            for place in (1, 2):
                if passages[other, place - 1] != passages[query, 0]:
                    logits.append(vectors[query, 0] @ vectors[other, place] / 0.5)
        expected += np.logaddexp.reduce(logits) - logits[0]
    assert in_batch_loss(vectors, passages, weights, 0.5) == pytest.approx(expected, rel=1e-5)


def padding(size: int, rows: list[int]) -> int:
    return sum(-count % size for count in rows)


@pytest.mark.parametrize("num_shards", [1, 2, 8])
def test_microbatch_is_divisible_by_the_devices_and_no_larger_than_the_maximum(num_shards):
    for maximum in range(num_shards, 8 * num_shards, num_shards):
        for rows in range(1, 100):
            size = fit_microbatch_rows(maximum, [rows], num_shards)
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
    assert fit_microbatch_rows(16, rows, 1) == size
