"""What every objective must hold; its test gives the sizes and a reference.

CASE = suites.ObjectiveCase(objective, config, weights, reference)

@pytest.mark.parametrize("holds", suites.OBJECTIVE)
def test_objective(holds, tmp_path):
    holds(CASE, tmp_path)
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
import optax
import pytest

import bert_jax
from bert_jax.checkpoints.native import Checkpointer
from bert_jax.checkpoints.parameters import model_settings
from bert_jax.data.masking import Masking
from bert_jax.data.packing import row_dtype
from bert_jax.model.architecture import architecture_of
from bert_jax.model.config import BertConfig
from bert_jax.model.deberta import DebertaConfig
from bert_jax.model.esm import EsmConfig
from bert_jax.model.execution import ExecutionPlan
from bert_jax.model.longformer import LongformerConfig
from bert_jax.model.modernbert import ModernBertConfig
from bert_jax.model.mpnet import MpnetConfig
from bert_jax.model.xlnet import XlnetConfig
from bert_jax.objectives import Objective
from bert_jax.objectives.replaced_tokens import usable_params
from bert_jax.sharding.mesh import batch_sharding, make_mesh
from bert_jax.sharding.rules import infer_shardings
from bert_jax.tokenizers.tokenizer import load_tokenizer
from bert_jax.training.pretrain_step import make_pretrain_step
from bert_jax.training.state import TrainState
from tests.helpers.corpora import write_vocabulary
from tests.helpers.models import (
    assert_trees_equal,
    random_params,
    small_deberta_config,
    small_esm_config,
    small_longformer_config,
    small_model_config,
    small_modernbert_config,
    small_mpnet_config,
    small_xlnet_config,
)

# Different, so that an array's shape says what it holds.
NUM_ROWS, LENGTH, SEQUENCES, VOCAB = 16, 32, 3, 100
WORDS = [f"w{number}" for number in range(VOCAB - 8)]  # Beside the 8 other pieces.


def make_masking(max_predictions: int = 6, **fields) -> Masking:
    return Masking(
        special_ids=(0, 1, 2, 3, 4),
        mask_id=4,
        vocab_size=VOCAB,
        word_start=np.arange(VOCAB) % 3 != 0,
        max_predictions=max_predictions,
        **fields,
    )


def make_config(**fields) -> BertConfig:
    defaults = {"max_position_embeddings": LENGTH, "dropout_rate": 0.0}
    defaults |= {"initializer_range": 0.2}  # Of all parameters: `params_of`.
    return small_model_config(VOCAB, **defaults | fields)


def make_modernbert_config(**fields) -> ModernBertConfig:
    defaults = {"max_position_embeddings": LENGTH, "initializer_range": 0.2}
    return small_modernbert_config(VOCAB, **defaults | fields)


def make_mpnet_config(**fields) -> MpnetConfig:
    defaults = {"max_position_embeddings": LENGTH, "dropout_rate": 0.0, "initializer_range": 0.2}
    return small_mpnet_config(VOCAB, **defaults | fields)


def make_esm_config(**fields) -> EsmConfig:
    defaults = {"max_position_embeddings": LENGTH, "initializer_range": 0.2, "mask_id": 4}
    return small_esm_config(VOCAB, **defaults | fields)


def make_deberta_config(**fields) -> DebertaConfig:
    defaults = {"max_position_embeddings": LENGTH, "initializer_range": 0.2, "dropout_rate": 0.0}
    return small_deberta_config(VOCAB, **defaults | fields)


def make_longformer_config(**fields) -> LongformerConfig:
    defaults = {"max_position_embeddings": LENGTH, "initializer_range": 0.2, "dropout_rate": 0.0}
    defaults |= {"attention_window": 4, "global_tokens": "first", "type_vocab_size": 2}
    return small_longformer_config(VOCAB, **defaults | fields)


def make_xlnet_config(**fields) -> XlnetConfig:
    """Not in `ARCHITECTURES`: its tokens are predicted by one objective, or from left to right."""
    defaults = {"max_position_embeddings": LENGTH, "initializer_range": 0.2, "dropout_rate": 0.0}
    return small_xlnet_config(VOCAB, **defaults | fields)


@dataclasses.dataclass(frozen=True, eq=False)
class ObjectiveCase:
    """An objective, and what is expected of it.

    Attributes:
      objective: with its teacher, if it has one.
      config: the model config.
      weights: of each loss in the total.
      reference: (model, params, batch) -> its `sums`, computed in float64 from what the model
        returns.
      frozen: parameters of a teacher.
    """

    objective: Objective
    config: object
    weights: Mapping[str, float]
    reference: Callable[..., dict[str, tuple[float, float]]]
    frozen: dict = dataclasses.field(default_factory=dict)

    @property
    def rules(self) -> tuple:
        return *self.objective.rules, *architecture_of(self.config).RULES


ARCHITECTURES = {
    "modernbert": make_modernbert_config,
    "mpnet": make_mpnet_config,
    "esm": make_esm_config,
    "deberta": make_deberta_config,
    "longformer": make_longformer_config,
}
"""Functions that return a model config of each architecture other than BERT's."""


def on_architecture(case: ObjectiveCase, name: str) -> ObjectiveCase:
    """Returns the case of an objective on another architecture."""
    fields = {"causal": case.config.causal}
    if name == "deberta" and case.config.causal:
        fields["convolution_width"] = 0  # It reads the next tokens, too.
    return dataclasses.replace(case, config=ARCHITECTURES[name](**fields))


def make_rows(lengths: Sequence[tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Returns rows as read from disk, of random pairs of these lengths."""
    rng, rows = np.random.default_rng(0), np.zeros(len(lengths), row_dtype(LENGTH, SEQUENCES))
    for row, of_row in zip(rows, lengths, strict=True):
        end = 0
        for slot, length in enumerate(of_row):
            start, end = end, end + length
            second = start + length // 2
            row["tokens"][start:end] = rng.integers(8, VOCAB, length)
            row["tokens"][[start, second - 1, end - 1]] = 2, 3, 3
            row["sequence_bounds"][slot] = start, second, end
            row["nsp_labels"][slot] = rng.integers(2)
    numbers = np.arange(len(rows), dtype=np.uint32)
    fields = {name: rows[name] for name in rows.dtype.names}
    of_stream = {"row_ids": numbers, "epochs": np.zeros_like(numbers), "stream_positions": numbers}
    return fields | of_stream


def rows_of_a_batch() -> dict[str, np.ndarray]:
    """Returns rows of different lengths, and empty ones, so that means of shards differ."""
    lengths = [(14, 11), (20,), (9, 7, 12), (14, 11), (20,)]
    return make_rows(lengths + [()] * (NUM_ROWS - len(lengths)))


def one_sequence_per_row(batch: Mapping) -> dict[str, np.ndarray]:
    """Returns the batch of `rows_of_a_batch` with each sequence in a row of its own."""
    unpacked = {name: np.zeros_like(x) for name, x in batch.items()}
    bounds = rows_of_a_batch()["sequence_bounds"].astype(int)
    for number, (row, slot) in enumerate(np.argwhere(bounds[..., 2] > 0)):
        start, _, end = bounds[row, slot]
        for name, values in batch.items():
            old, new = values[row], unpacked[name][number]
            if name.startswith("target") or name in OF_TARGETS:
                is_inside = (batch["target_positions"][row] >= start) & (
                    batch["target_positions"][row] < end
                )
                is_inside &= batch["target_weights"][row] > 0
                new[:] = np.where(is_inside, old - start * name.endswith("_positions"), 0)
            elif old.shape == (LENGTH,):
                new[: end - start] = old[start:end]
            elif old.shape == (SEQUENCES,):
                new[0] = old[slot] - start * name.endswith("_positions")
            else:
                new[:] = old
        unpacked["sequence_ids"][number, : end - start] = 1
    return unpacked


OF_TARGETS = ("left_positions", "right_positions", "places")
"""Arrays with an entry for each target, beside those whose names say so."""


def cross_entropy(name: str, logits, targets, weights) -> dict[str, tuple[float, float]]:
    """Returns the loss and accuracy of `name` in float64, as sums and counts."""
    used = np.asarray(weights) > 0
    logits, targets = np.asarray(logits, np.float64)[used], np.asarray(targets)[used]
    logits -= logits.max(axis=-1, keepdims=True)
    losses = np.log(np.exp(logits).sum(axis=-1)) - logits[np.arange(len(targets)), targets]
    correct = logits.argmax(axis=-1) == targets
    return {
        f"{name}_loss": (losses.sum(), len(targets)),
        f"{name}_accuracy": (correct.sum(), len(targets)),
    }


@functools.cache
def model_of(case: ObjectiveCase):
    return case.objective.make_model(case.config, ExecutionPlan())


@functools.cache
def prepared(case: ObjectiveCase) -> dict[str, np.ndarray]:
    """Returns the batch that a training step with seed 0 makes of `rows_of_a_batch`."""
    key, _ = jax.random.split(jax.random.key(0))
    return jax.device_get(jax.jit(case.objective.prepare)(rows_of_a_batch(), key))


@functools.cache
def params_of(case: ObjectiveCase) -> dict:
    return random_params(model_of(case), prepared(case), case.config.initializer_range)


@functools.cache
def loss_and_gradients(case: ObjectiveCase):
    """Returns the jitted (params, batch) -> ((loss, sums), gradients) of a whole batch."""

    def loss(params, batch):
        sums = case.objective.sums(model_of(case), params | case.frozen, batch)
        counts = case.objective.counts(batch)
        return case.objective.total_loss(
            {name: sums[name][0] / counts[name] for name in counts}
        ), sums

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@functools.cache
def plain_update(case: ObjectiveCase):
    return jax.device_get(loss_and_gradients(case)(params_of(case), prepared(case)))


def assert_trees_close(trees, expected):
    """Compares every leaf with 1e-5 of its largest value, or of 0.1 if that is larger."""
    trees, expected = (jax.tree.leaves_with_path(each) for each in (trees, expected))
    for (path, leaf), (other_path, other) in zip(trees, expected, strict=True):
        assert path == other_path
        size = max(float(np.max(np.abs(other))), 0.1)
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-5 * size, err_msg=name)


def packed_equals_unpacked(case: ObjectiveCase, directory):
    """Loss, metrics and gradients are the same with each sequence in a row of its own."""
    unpacked = one_sequence_per_row(prepared(case))
    # Of as many rows: the same program.
    assert (unpacked["sequence_ids"][:, 0] > 0).sum() == 9
    assert_trees_close(loss_and_gradients(case)(params_of(case), unpacked), plain_update(case))


def loss_equals_float64(case: ObjectiveCase, directory):
    """All metrics equal the reference, and the total is the weighted sum of the mean losses."""
    (loss, sums), _ = plain_update(case)
    batch = prepared(case)
    expected = case.reference(model_of(case), params_of(case) | case.frozen, batch)
    assert sums.keys() == expected.keys()
    for name, (total, count) in expected.items():
        assert count > 0, name  # It compares something.
        assert sums[name] == pytest.approx((total, count), rel=1e-5), name
    counts = jax.device_get(case.objective.counts(batch))
    assert counts == {name: expected[name][1] for name in case.weights}
    total = sum(weight * expected[name][0] / counts[name] for name, weight in case.weights.items())
    assert float(loss) == pytest.approx(total, rel=1e-5)
    assert {case.objective.main_loss, case.objective.main_accuracy} <= sums.keys()


def empty_rows_do_not_count(case: ObjectiveCase, directory):
    """A batch without any token has no loss, and its counts are 1, not 0."""
    empty = jax.tree.map(np.zeros_like, prepared(case))
    (loss, sums), _ = loss_and_gradients(case)(params_of(case), empty)
    assert float(loss) == 0 and all(float(count) == 0 for _, count in sums.values())
    assert all(count == 1 for count in case.objective.counts(empty).values())


def make_step(case: ObjectiveCase, num_microbatches: int = 1, uses_kernels: bool = False, **axes):
    """Returns the state at the start, its shardings, and the training step, on a mesh."""
    model = case.objective.make_model(case.config, ExecutionPlan(uses_kernels))
    optimizer = optax.sgd(1.0, momentum=0.9)  # The first update is the gradient.
    params = params_of(case)
    state = TrainState(np.zeros([], np.int32), params, optimizer.init(params))
    mesh = make_mesh(**axes, devices=jax.devices()[: math.prod(axes.values())])
    shardings = infer_shardings(state, mesh, case.rules)
    update = make_pretrain_step(
        model, optimizer, shardings, case.objective, seed=0, num_microbatches=num_microbatches
    )
    frozen = jax.device_put(case.frozen, infer_shardings(case.frozen, mesh, case.rules))
    rows = jax.device_put(rows_of_a_batch(), batch_sharding(mesh))
    state = jax.device_put(state, shardings)
    return state, shardings, lambda state: update(state, rows, frozen)


def one_step(case: ObjectiveCase, num_microbatches: int = 1, uses_kernels: bool = False, **axes):
    """Returns parameters and metrics after a step, on the host."""
    state, _, update = make_step(case, num_microbatches, uses_kernels, **axes)
    state, metrics = jax.device_get(update(state))
    return state.params, metrics


MESH = {"data": 2, "fsdp": 2, "tensor": 2}


@functools.cache
def two_steps_on_eight_devices(case: ObjectiveCase):
    """Returns (state, metrics) on the host after each of two steps, shardings, and the step."""
    state, shardings, update = make_step(case, num_microbatches=2, **MESH)
    first = jax.device_get(result := update(state))
    return first, jax.device_get(update(result[0])), shardings, update


def eight_devices_and_microbatches_agree_with_one(case: ObjectiveCase, directory):
    """A step on a mesh of data, fsdp and tensor gives the gradients of the plain loss."""
    (state, metrics), *_ = two_steps_on_eight_devices(case)
    (loss, sums), gradients = plain_update(case)
    assert_trees_close((metrics["loss"], metrics["sums"]), (loss, sums))
    assert_trees_close(jax.tree.map(np.subtract, params_of(case), state.params), gradients)


def resumed_step_equals_uninterrupted(case: ObjectiveCase, directory):
    """The second step from a checkpoint of the first is the same, bit for bit."""
    (first, _), (second, metrics), shardings, update = two_steps_on_eight_devices(case)
    checkpointer = make_checkpointer(case, directory)
    checkpointer.save(first)
    checkpointer.wait()
    abstract = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        first,
        shardings,
    )
    resumed, resumed_metrics = jax.device_get(update(checkpointer.restore(1, abstract)))
    checkpointer.close()
    jax.tree.map(np.testing.assert_array_equal, (resumed, resumed_metrics), (second, metrics))


def make_checkpointer(case: ObjectiveCase, directory) -> Checkpointer:
    tokenizer = load_tokenizer(write_vocabulary(directory / "vocab.txt", WORDS))
    settings = model_settings(case.config, params_of(case))
    return Checkpointer(directory, settings, tokenizer, keep_last=1)


def saved_parameters_load_again(case: ObjectiveCase, directory):
    """Its checkpoint is loaded for use, with every parameter that it trained."""
    checkpointer = make_checkpointer(case, directory)
    checkpointer.save(TrainState(np.int32(1), params_of(case), {}))
    checkpointer.close()
    model = bert_jax.load(directory)
    assert_trees_equal(model.params, usable_params(params_of(case)))
    assert model.encode("w1 w2").shape == (case.config.hidden_size,)


def every_parameter_has_a_sharding_rule(case: ObjectiveCase, directory):
    """A rule matches each, and its axes divide it."""
    for axes in (MESH, {"data": 8}, {"data": 1, "fsdp": 8}):
        shardings = infer_shardings(params_of(case), make_mesh(**axes), case.rules)
        assert jax.tree.structure(shardings) == jax.tree.structure(params_of(case))


def flops_are_positive_and_monotone(case: ObjectiveCase, directory):
    """Longer rows cost more, and so do more layers."""
    flops = [
        case.objective.flops_per_row(dataclasses.replace(case.config, num_layers=layers), length, 3)
        for layers, length in ((2, LENGTH), (2, 2 * LENGTH), (4, 2 * LENGTH))
    ]
    assert 0 < flops[0] < flops[1] < flops[2]


def every_mesh_agrees_with_one_device(case: ObjectiveCase, directory):
    """Also with dropout, and with other axes."""
    config = dataclasses.replace(case.config, dropout_rate=0.1)
    case = dataclasses.replace(case, config=config)
    expected = one_step(case, data=1)
    for axes, num_microbatches in (({"data": 8}, 1), ({"data": 2, "fsdp": 4}, 2)):
        assert_trees_close(one_step(case, num_microbatches, **axes), expected)


def assert_fast_path_changes_nothing(case: ObjectiveCase, tolerance: float):
    """Compares a step with and without it; for sizes that it takes, which are not the smallest."""
    (params, metrics), (expected, expected_metrics) = (
        one_step(case, uses_kernels=uses_kernels, data=1) for uses_kernels in (True, False)
    )
    assert metrics["loss"] == pytest.approx(expected_metrics["loss"], rel=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance),
        params,
        expected,
    )


OBJECTIVE = [
    pytest.param(each, id=each.__name__, marks=marks)
    for each, marks in (
        (packed_equals_unpacked, pytest.mark.slow),
        (loss_equals_float64, ()),
        (empty_rows_do_not_count, ()),
        (eight_devices_and_microbatches_agree_with_one, pytest.mark.slow),
        (resumed_step_equals_uninterrupted, pytest.mark.exhaustive),
        (saved_parameters_load_again, ()),
        (every_parameter_has_a_sharding_rule, ()),
        (flops_are_positive_and_monotone, ()),
        (every_mesh_agrees_with_one_device, pytest.mark.exhaustive),
    )
]
"""The properties of an objective: functions of its case and an empty directory."""
