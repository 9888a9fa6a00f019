"""One update: class weights, dropout, meshes, in-batch losses, and the size of microbatches."""

import jax
import numpy as np
import pytest

from bert_jax.data.features import unpack_rows
from bert_jax.finetuning.step import fit_rows_per_microbatch
from bert_jax.model.heads import make_model
from tests.helpers.models import batch_of_row
from tests.suites.heads import (
    APART,
    CASES,
    KEY,
    assert_same,
    build_update,
    nats,
    numbers,
    predictor,
    update,
)

CLASSIFICATION, EMBEDDING = CASES["classification"], CASES["embedding"]
WEIGHTS = {"classification": (1.0, 2.5, 0.1), "tagging": (0.1, 1.0, 3.0, 2.0)}  # Of the classes.
KEYS = jax.random.split(KEY, 1)


@pytest.mark.slow
def test_attention_has_its_own_dropout_rate():
    step, new_state, (rows, num_microbatches) = build_update(CLASSIFICATION)

    def loss(rate, attention_rate):
        values = numbers(1.0, dropout_rate=rate)
        if attention_rate is not None:
            values = values._replace(attention_dropout_rate=np.float32([attention_rate]))
        _, metrics = step(new_state(), rows, num_microbatches, KEYS, values)
        return float(metrics["loss"][0])

    assert loss(0.4, 0.4) == loss(0.4, None)  # By default, the rate of hidden states.
    assert len({loss(0.0, 0.0), loss(0.0, 0.4), loss(0.4, 0.4), loss(0.4, 0.0)}) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["classification", pytest.param("tagging", marks=pytest.mark.exhaustive)]
)
def test_weighted_update_does_not_depend_on_packing_microbatches_and_devices(kind):
    packed, num_microbatches = update(CASES[kind], class_weights=WEIGHTS[kind])
    apart, num_apart = update(CASES[kind], class_weights=WEIGHTS[kind], **APART)
    assert (num_microbatches, num_apart) == (1, 2)
    assert_same(packed, apart)


@pytest.mark.exhaustive
def test_two_updates_are_the_same_on_every_mesh():
    results = {}
    for name, devices, sizes in (
        ("one device", 1, {}),
        ("data", 8, {}),
        ("fsdp", 8, {"fsdp": 4}),
        ("tensor", 8, {"tensor": 2}),
    ):
        step, new_state, (rows, num_microbatches) = build_update(
            CLASSIFICATION, packed=False, devices=devices, **sizes
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


@pytest.mark.slow
def test_another_learning_rate_compiles_nothing():
    step, new_state, (rows, num_microbatches) = build_update(
        CLASSIFICATION, class_weights=WEIGHTS["classification"]
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
            CASES[kind],
            packed=False,
            rows_per_microbatch=rows_per_microbatch,
            devices=devices,
            dropout_rate=0.1,
        )
        for rows_per_microbatch, devices in ((5, 1), (8, 4))
    )
    assert (one[1], four[1]) == (3, 2)
    assert_same(one[0], four[0])


@pytest.mark.parametrize(
    ("pooling", "normalize"), [pytest.param("mean", True, marks=pytest.mark.slow), ("cls", False)]
)
def test_embedding_is_the_pooled_last_layer(pooling, normalize):
    settings = EMBEDDING.settings | {"pooling": pooling, "normalize": normalize}
    model = make_model(EMBEDDING.config, settings)
    features = EMBEDDING.features[:2]
    rows = EMBEDDING.row_shape().build([features], 1)
    packed = rows | unpack_rows(rows)
    sequences = [*features[0].sequences, *features[1].sequences]
    tokens = np.zeros((len(sequences), max(map(len, sequences))), np.int32)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = sequence
    alone = batch_of_row(tokens) | {"sequence_ids": (tokens > 0).astype(np.int32)}

    @jax.jit
    def run(params):
        hidden = model.apply({"params": params}, alone, method=lambda m, batch: m.encoder(batch))
        return model.apply({"params": params}, packed)[0], hidden

    found, hidden = jax.device_get(run(EMBEDDING.params))
    for slot, sequence in enumerate(sequences):
        states = hidden[slot, : len(sequence)]
        vector = states.mean(0) if pooling == "mean" else states[0]
        if normalize:
            vector = vector / np.linalg.norm(vector)
        np.testing.assert_allclose(found[slot], vector, atol=1e-5)
    assert not np.any(found[6:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "rows_per_microbatch", "packed"),
    [(1, 3, False), pytest.param(8, 8, False, marks=pytest.mark.exhaustive), (8, 8, True)],
    ids=["microbatches, the last padded", "devices", "a device with most of the examples"],
)
def test_loss_of_several_positives_equals_the_definition(devices, rows_per_microbatch, packed):
    vectors, _ = predictor(EMBEDDING)(EMBEDDING.features)
    expected = EMBEDDING.reference(vectors, EMBEDDING.labels)
    without_others = [label[:2] for label in EMBEDDING.labels]
    assert EMBEDDING.reference(vectors, without_others) > expected + 1e-3
    settings = {"packed": packed, "devices": devices, "rows_per_microbatch": rows_per_microbatch}
    ((loss, _),), _ = update(EMBEDDING, **settings)
    assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["classification", pytest.param("tagging", marks=pytest.mark.slow)]
)
def test_weighted_loss_equals_torch(kind):
    """CrossEntropyLoss(weight): the sum of the weighted losses over the sum of their weights."""
    case, weights = CASES[kind], WEIGHTS[kind]
    outputs, loss = predictor(case, devices=2, class_weights=weights)(case.features)
    logits = np.concatenate([np.reshape(each, (-1, len(weights))) for each in outputs])
    labels = np.concatenate([np.ravel(label) for label in case.labels])
    logits, labels = logits[labels >= 0], labels[labels >= 0]
    each = np.array(weights)[labels]
    expected = np.sum(nats(logits, labels) * each) / np.sum(each)
    assert loss == pytest.approx(expected, rel=1e-5)
    ((in_training, _),), _ = update(case, class_weights=weights, **APART)
    assert in_training == pytest.approx(loss, rel=1e-5)


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


@pytest.mark.parametrize(
    ("rows", "size"),
    [
        ([12, 13, 11], 13),  # More than of other microbatches: the gradient keeps the activations.
        ([12] * 40 + [31], 12),  # The rare large one goes through the model once more.
        ([40, 40], 20),  # Does not fit.
    ],
)
def test_a_compared_batch_is_one_microbatch_where_it_fits(rows, size):
    assert fit_rows_per_microbatch(4, rows, 1, max_whole=32) == size
