"""Packed features: none is lost or repeated, and batches are a function of (seed, step)."""

import types

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax.data.features import (
    NO_LABEL,
    ModelInput,
    RowShape,
    batch_indices,
    check_segments,
    finetune_batches,
    make_sequence,
    max_features,
    steps_per_epoch,
    unpack_rows,
)
from bert_jax.model.heads import HEADS
from bert_jax.sharding.mesh import batch_sharding, make_mesh
from bert_jax.tokenizers.stored import Layout

HEAD_NAMES = ("classification", "regression", "tagging", "span", "multiple_choice")


def make_features(head: str, count: int, seed: int = 0, longest: int = 20) -> list[ModelInput]:
    """Returns features whose tokens are numbered consecutively, so that all of them differ."""
    rng, features, first = np.random.default_rng(seed), [], 1
    for index in range(count):
        sequences = []
        for _ in range(3 if head == "multiple_choice" else 1):
            length = int(rng.integers(3, longest))
            sequences.append(np.arange(first, first + length, dtype=np.int32))
            first += length
        label = {
            "classification": index % 3,
            "regression": index / 2,
            "tagging": np.where(np.arange(length) % 2, NO_LABEL, index),
            "span": (1, length - 1),
            "multiple_choice": index % 3,
        }[head]
        starts = tuple(int(rng.integers(2, len(tokens) + 1)) for tokens in sequences)
        features.append(ModelInput(tuple(sequences), starts, label))
    return features


def make_shape(head: str, length: int = 64, slots: int = 9) -> RowShape:
    return RowShape(
        length, slots, HEADS[head].label_layout, 0, 3 if head == "multiple_choice" else 1
    )


def read_back(rows: dict[str, np.ndarray], shape: RowShape) -> list[ModelInput]:
    """Recovers the labeled features of `rows` from their pairs."""
    features = []
    for row in range(len(rows["tokens"])):
        pairs = rows["sequence_bounds"][row]
        for slot in np.flatnonzero(rows["weights"][row]):
            bounds = pairs[slot * shape.sequences_per_feature :][: shape.sequences_per_feature]
            sequences = tuple(rows["tokens"][row, start:end] for start, _, end in bounds)
            label = rows["labels"][row]
            if shape.label_layout.per_position:
                label = label[bounds[0, 0] : bounds[0, 2]]
            elif shape.label_layout.holds_positions:
                label = tuple(label[slot] - bounds[0, 0])
            else:
                label = label[slot]
            features.append(ModelInput(sequences, tuple(bounds[:, 1] - bounds[:, 0]), label))
        # Positions outside all pairs are padding without a label.
        covered = np.zeros(shape.length, bool)
        for start, _, end in pairs:
            assert not covered[start:end].any()
            covered[start:end] = True
        assert not rows["tokens"][row, ~covered].any()
        if shape.label_layout.per_position:
            assert (rows["labels"][row, ~covered] == NO_LABEL).all()
    return features


def assert_same_features(actual: list[ModelInput], expected: list[ModelInput]) -> None:
    actual, expected = (
        sorted(map(vars, features), key=lambda feature: feature["sequences"][0][0])
        for features in (actual, expected)
    )
    np.testing.assert_equal(actual, expected)


@pytest.fixture(scope="module")
def sharding():
    return batch_sharding(make_mesh())


@pytest.fixture(scope="module")
def trial_sharding(sharding):
    return NamedSharding(sharding.mesh, P("trial", *sharding.spec))


@pytest.mark.parametrize(
    ("head", "is_compared"), [*((name, False) for name in HEAD_NAMES), ("classification", True)]
)
def test_batch_holds_its_features_whole_in_the_microbatches_in_use(
    head, is_compared, trial_sharding
):
    features, shape = make_features(head, 40), make_shape(head)
    batches = finetune_batches(
        features,
        shape,
        trial_sharding,
        batch_size=16,
        rows_per_microbatch=8,
        seeds=[3],
        start=0,
        stop=3,
        is_compared=is_compared,
    )
    for step, (rows, used) in enumerate(batches):
        chosen = batch_indices(40, 16, seed=3, step=step)
        rows = jax.tree.map(lambda array: np.asarray(array)[0], rows)
        assert len(rows["tokens"]) == (8 if is_compared and used == 1 else 16)
        assert_same_features(read_back(rows, shape), [features[index] for index in chosen])
        # Row r of microbatch m is at index r * max_microbatches + m.
        is_used = rows["weights"].reshape(8, len(rows["tokens"]) // 8, -1).any(axis=(0, 2))
        assert is_used.tolist() == [True, used == 2][: len(is_used)]


def test_each_epoch_reshuffles_all_features_and_keeps_the_last_batch():
    assert steps_per_epoch(50, 16) == 4 and steps_per_epoch(48, 16) == 3
    epochs = [
        [batch_indices(50, 16, seed=1, step=epoch * 4 + step) for step in range(4)]
        for epoch in range(2)
    ]
    for batches in epochs:
        assert [len(batch) for batch in batches] == [16, 16, 16, 2]
        assert sorted(np.concatenate(batches)) == list(range(50))
    first, second = map(np.concatenate, epochs)
    other_seed = np.concatenate([batch_indices(50, 16, seed=2, step=step) for step in range(4)])
    assert (first != second).any() and (first != other_seed).any()


def test_batches_of_a_trial_do_not_depend_on_the_first_step_and_other_trials(trial_sharding):
    features, shape = make_features("classification", 20), make_shape("classification")

    def batches(start, *seeds):
        numbers = {"batch_size": 8, "rows_per_microbatch": 8, "start": start, "stop": 7}
        batches = finetune_batches(features, shape, trial_sharding, seeds=seeds, **numbers)
        return [jax.device_get(rows) for rows, _ in batches]

    np.testing.assert_equal(batches(4, 0), batches(0, 0)[4:])
    for both, first, second in zip(
        *[batches(0, *seeds) for seeds in ([0, 1], [0], [1])], strict=True
    ):
        np.testing.assert_equal(both, jax.tree.map(lambda *x: np.concatenate(x), first, second))


@pytest.mark.parametrize("head", HEAD_NAMES)
def test_batches_take_every_feature_once_and_return_its_row(head):
    features, shape = make_features(head, 45), make_shape(head)
    predicted, indices = [], []
    for members, rows in shape.batches(features, num_rows=8):
        predicted += read_back(rows, shape)
        indices += [index for row in members for index in row]
        for row, row_members in enumerate(members):
            assert rows["weights"][row].sum() == len(row_members)
    assert_same_features(predicted, features)
    assert sorted(indices) == list(range(45))


@pytest.mark.parametrize("head", ["classification", "multiple_choice"])
def test_rows_never_exceed_their_capacity(head):
    for seed in range(20):
        features = make_features(head, 60, seed)
        shape = make_shape(head, length=60, slots=6)
        rows = shape.pack(features)
        assert sorted(index for row in rows for index in row) == list(range(60))
        for row in rows:
            assert sum(len(features[index]) for index in row) <= 60
            assert sum(len(features[index].sequences) for index in row) <= 6


def test_feature_longer_than_a_row_is_an_error():
    with pytest.raises(ValueError, match="a feature of 9 tokens in rows of 8"):
        make_shape("tagging", length=8).pack([ModelInput((np.arange(9),), (9,))])


def test_rows_hold_a_bounded_number_of_features():
    lengths = 4, 128, 512, 1024, 8192
    assert [max_features(length) for length in lengths] == [1, 16, 64, 128, 128]


def test_features_without_labels_have_no_weight():
    shape = make_shape("multiple_choice")
    features = make_features("multiple_choice", 2, longest=9)
    unlabeled = ModelInput(features[0].sequences, features[0].second_starts)
    rows = shape.build([[unlabeled, features[1]]], 1)
    assert rows["weights"][0].tolist() == [0, 1, 0]
    assert rows["labels"][0].tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("layout", "pair", "start"),
    [
        (Layout(), [8, 1, 9, 2, 3, 9], 3),
        (Layout(1, False), [8, 1, 9, 2, 3, 9], 6),
        (Layout(2, False), [8, 1, 9, 9, 2, 3, 9], 7),  # RoBERTa
        (Layout(0, True, is_bare=True), [1, 2, 3], 1),
        (Layout(0, False, is_bare=True), [1, 2, 3], 3),
        (Layout(cls_last=True), [1, 9, 2, 3, 9, 8], 2),  # XLNet
        (Layout(1, False, cls_last=True), [1, 9, 2, 3, 9, 8], 6),
    ],
)
def test_sequence_has_the_separators_and_segments_of_its_layout(layout, pair, start):
    tokenizer = types.SimpleNamespace(cls_id=8, sep_id=9, layout=layout)
    tokens, second = make_sequence(tokenizer, [1, 2])
    around = [1, 2, 9, 8] if layout.cls_last else [8, 1, 2, 9]
    assert tokens.tolist() == ([1, 2] if layout.is_bare else around)
    # [CLS] at the end is a segment of its own.
    assert second == len(tokens) - (layout.cls_last and layout.has_segments)
    assert len(tokens) - 2 == layout.num_special_tokens(1)
    tokens, second = make_sequence(tokenizer, [1], [2, 3])
    assert tokens.tolist() == pair and second == start
    assert len(tokens) - 3 == layout.num_special_tokens(2)
    tokens, second = make_sequence(tokenizer, [1], [])
    first = 1 if layout.is_bare else 3 - layout.cls_last
    assert len(tokens) == len(pair) - 2
    assert second == (first if layout.has_segments else len(tokens))


def test_pair_of_a_model_with_one_segment_is_refused():
    single, pair = (ModelInput((np.arange(5),), (second,)) for second in (5, 3))
    for size, features in ((1, [single]), (0, [pair]), (2, [single, pair])):
        check_segments(types.SimpleNamespace(type_vocab_size=size), features)
    with pytest.raises(ValueError, match="type_vocab_size is 1, so the model has no segment for"):
        check_segments(types.SimpleNamespace(type_vocab_size=1), [single, pair])


def test_empty_text_without_special_tokens_is_refused():
    tokenizer = types.SimpleNamespace(cls_id=8, sep_id=9, layout=Layout(0, True, is_bare=True))
    with pytest.raises(ValueError, match="a text has no tokens, and this tokenizer adds no spec"):
        make_sequence(tokenizer, [])


def test_rows_of_more_sequences_than_are_compared_at_a_time_unpack_as_ever():
    bounds = np.zeros((2, 18, 3), np.uint16)
    # Of one token, and of three with a second segment. In the other row the last slot alone is in
    # use, and its sequence begins after padding.
    starts = np.arange(18) * 2 - np.arange(18) % 2
    bounds[0] = np.stack([starts, starts + 1, starts + [1, 3] * 9], axis=1)
    bounds[1, 17] = 4, 10, 12
    batch = unpack_rows({"tokens": np.arange(76).reshape(2, 38), "sequence_bounds": bounds})
    assert {name: array.tolist() for name, array in batch.items()} == {
        "tokens": [[*range(38)], [*range(38, 76)]],
        "pooled_positions": [
            [0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29, 32, 33],
            [0] * 17 + [4],
        ],
        "segment_ids": [[0, 0, 1, 1] * 9 + [0, 0], [0] * 10 + [1, 1] + [0] * 26],
        "position_ids": [[0, 0, 1, 2] * 9 + [0, 0], [0] * 4 + [*range(8)] + [0] * 26],
        "sequence_ids": [
            [*np.repeat(np.arange(1, 19), [1, 3] * 9).tolist(), 0, 0],
            [0] * 4 + [18] * 8 + [0] * 26,
        ],
    }
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}


def test_unpacking_long_rows_takes_no_array_of_positions_by_sequences():
    rows = {
        "tokens": jax.ShapeDtypeStruct((2, 8192), np.uint16),
        "sequence_bounds": jax.ShapeDtypeStruct((2, 1000, 3), np.uint16),
    }
    memory = jax.jit(unpack_rows).lower(rows).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 10 * 2 * 8192 * 4
