"""One update of every head: packing, chunks and devices change neither its loss nor gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bert_jax import partitioning
from bert_jax.data.features import NO_LABEL, Feature, RowShape, train_batches
from bert_jax.model.config import BertConfig
from bert_jax.model.heads import KINDS, BertForTask, Similarity, in_batch_loss
from bert_jax.training import finetune_step as task_step
from bert_jax.training.finetune_step import fit_chunks
from bert_jax.training.pretrain_step import TrainState

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


def make_model(kind: str, dropout_rate: float = 0.0, **similarity):
    config = BertConfig(
        vocab_size=90,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        dropout_rate=dropout_rate,
    )
    return BertForTask(config, kind, OUTPUTS.get(kind, 1), Similarity(**similarity))


def row_shape(kind: str, packed: bool = True) -> RowShape:
    each = SEQUENCES.get(kind, 1)
    return RowShape(LENGTH, (8 if packed else 1) * each, kind, 0, each)


def initial(model: BertForTask) -> dict:
    row = jax.tree.map(jnp.asarray, row_shape(model.kind).empty(1))
    return jax.jit(model.init)(jax.random.key(1), row)["params"]


def update(kind, *, packed=True, chunk_rows=16, devices=1, **model):
    """The loss of the one batch, and its gradients: what one step of plain descent takes off."""
    model, shape = make_model(kind, **model), row_shape(kind, packed)
    mesh = partitioning.make_mesh(devices=jax.devices()[:devices])
    optimizer, params = optax.sgd(1.0), initial(model)
    state = TrainState(jnp.zeros([], jnp.int32), params, optimizer.init(params))
    layout = partitioning.shardings(state, mesh, partitioning.TASK_RULES)
    step = task_step.make_update_step(model, optimizer, layout, chunk_rows)
    ((rows, num_chunks),) = train_batches(
        make_features(kind),
        shape,
        partitioning.batch_sharding(mesh),
        batch_size=BATCH,
        chunk_rows=chunk_rows,
        seed=0,
        start=0,
        stop=1,
    )
    before = jax.device_get(params)
    state, metrics = step(jax.device_put(state, layout), rows, num_chunks, jax.random.key(2))
    after = jax.device_get(state.params)
    return float(metrics["loss"]), jax.tree.map(np.subtract, before, after), num_chunks


def assert_same(one, two):
    assert one[0] == pytest.approx(two[0], abs=1e-5)
    for a, b in zip(jax.tree.leaves(one[1]), jax.tree.leaves(two[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_packing_chunks_and_devices_change_no_update(kind):
    packed, apart = update(kind), update(kind, packed=False, chunk_rows=8, devices=4)
    assert (packed[2], apart[2]) == (1, 2)
    assert_same(packed, apart)


@pytest.mark.parametrize("kind", ["tagging", "embedding"])
def test_chunks_and_devices_change_no_update_with_dropout(kind):
    one, four = (
        update(kind, packed=False, chunk_rows=chunk_rows, devices=devices, dropout_rate=0.1)
        for chunk_rows, devices in ((5, 1), (8, 4))
    )
    assert (one[2], four[2]) == (3, 2)
    assert_same(one, four)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_predictions_equal_predictions_of_each_alone(kind):
    model, features = make_model(kind), make_features(kind)
    mesh = partitioning.make_mesh(devices=jax.devices()[:1])
    step = task_step.make_predict_step(model, mesh)
    packed, alone = (
        task_step.predict(
            step,
            initial(model),
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


def test_in_batch_loss_equals_its_definition_and_leaves_copies_out():
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


@pytest.mark.parametrize("wrong", [{"pooling": "max"}, {"temperature": 0.0}])
def test_impossible_similarity_is_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*: expected"):
        Similarity(**wrong)


def padding(chunk: int, rows: list[int]) -> int:
    return sum(-count % chunk for count in rows)


@pytest.mark.parametrize("num_shards", [1, 2, 8])
def test_a_chunk_is_divided_among_the_devices_and_no_larger_than_fits(num_shards):
    for most in range(num_shards, 8 * num_shards, num_shards):
        for rows in range(1, 100):
            chunk = fit_chunks(most, [rows], num_shards)
            assert 0 < chunk <= most and chunk % num_shards == 0
            assert padding(chunk, [rows]) <= padding(most, [rows])


@pytest.mark.parametrize(
    ("rows", "chunk"),
    [
        ([3, 3, 3], 3),  # No padding for short texts.
        ([14, 15, 14, 14], 15),
        ([14, 14, 15, 14, 13, 14, 14, 14, 14, 17], 15),  # Two chunks for the rare one.
        ([20, 20], 10),  # Even ones, not 16 and 4.
        ([64, 64], 16),  # And as few as fit.
    ],
)
def test_chunks_hold_batches_with_little_padding(rows, chunk):
    assert fit_chunks(16, rows, 1) == chunk
