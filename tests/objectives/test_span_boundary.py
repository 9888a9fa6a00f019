"""SpanBERT's objective: the tokens around a span, the loss by the paper's formulas, a whole run."""

import dataclasses
import functools
import math

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import bert_jax
from bert_jax import finetune, pretrain
from bert_jax.checkpoints.export import save_huggingface
from bert_jax.checkpoints.read import read_model
from bert_jax.configs.finetune import text_classification
from bert_jax.configs.pretrain import spanbert
from bert_jax.data.features import unpack_rows
from bert_jax.data.masking import SPAN_LENGTHS, Masking, span_boundaries
from bert_jax.data.packing import row_dtype
from bert_jax.model.bert import RULES
from bert_jax.model.config import BertConfig
from bert_jax.model.encoder import EncoderModel
from bert_jax.model.execution import Execution
from bert_jax.objectives import mean_metrics
from bert_jax.objectives.span_boundary import NUM_PLACES, SpanBoundary
from bert_jax.sharding.mesh import batch_sharding, make_mesh
from bert_jax.sharding.rules import infer_shardings
from bert_jax.training.pretrain_step import make_pretrain_step
from bert_jax.training.state import TrainState
from tests.helpers import build_small_corpus

LENGTH, VOCAB, HIDDEN, EMBEDDING = 64, 60, 16, 8
LENGTHS = (30, 5, 20)  # Of the sequences in a packed row; the rest is padding.
CONFIG = BertConfig(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    num_layers=1,
    num_heads=4,
    intermediate_size=32,
    max_position_embeddings=LENGTH,
    embedding_size=EMBEDDING,
)
MASKING = Masking(
    special_ids=(0, 1, 2, 3, 4),
    mask_id=4,
    vocab_size=VOCAB,
    word_start=np.arange(VOCAB) % 3 != 0,
    max_predictions=26,
    rate=0.4,  # Many spans touch.
    unit="span",
)
OBJECTIVE = SpanBoundary(MASKING)
MODEL = OBJECTIVE.make_model(CONFIG, Execution())


def make_rows(num_rows: int) -> dict[str, np.ndarray]:
    """Returns packed rows as read from disk, of sequences `[CLS] ... [SEP]`."""
    rng = np.random.default_rng(0)
    rows = np.zeros(num_rows, row_dtype(LENGTH, len(LENGTHS)))
    for row in rows:
        end = 0
        for slot, length in enumerate(LENGTHS):
            start, end = end, end + length
            row["tokens"][start:end] = [2, *rng.integers(5, VOCAB, length - 2), 3]
            row["sequence_bounds"][slot] = start, end, end
    numbers = np.arange(num_rows, dtype=np.uint32)
    fields = {name: rows[name] for name in rows.dtype.names}
    return fields | {"row_ids": numbers, "epochs": np.zeros_like(numbers)}


@functools.cache
def prepared(num_rows: int) -> dict[str, np.ndarray]:
    return jax.device_get(jax.jit(OBJECTIVE.prepare)(make_rows(num_rows), jax.random.key(0)))


@functools.cache
def random_params() -> dict:
    """Returns random parameters, biases and scales included."""
    batch = jax.eval_shape(OBJECTIVE.prepare, make_rows(1), jax.random.key(0))
    shapes = jax.eval_shape(MODEL.init, jax.random.key(0), batch)["params"]
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: np.float32(rng.normal(0, 0.3, leaf.shape)), shapes)


@functools.cache
def loss_sums(packed: bool) -> dict[str, tuple[float, float]]:
    batch = prepared(4) if packed else unpacked(prepared(4))
    sums = jax.jit(lambda params, batch: OBJECTIVE.sums(MODEL, params, batch))
    return jax.device_get(sums(random_params(), batch))


def used_slots(batch: dict):
    """Yields (row, slot) of each target."""
    return zip(*np.nonzero(batch["target_weights"]), strict=True)


def test_boundaries_and_positions_belong_to_maximal_runs_of_targets():
    batch = prepared(500)
    masked = [set() for _ in range(500)]
    for row, slot in used_slots(batch):
        masked[row].add(int(batch["target_positions"][row, slot]))
    longest = 0
    for row, slot in used_slots(batch):
        position = int(batch["target_positions"][row, slot])
        left = right = position
        while left in masked[row]:
            left -= 1
        while right in masked[row]:
            right += 1
        assert batch["left_positions"][row, slot] == left
        assert batch["right_positions"][row, slot] == right
        assert batch["places"][row, slot] == position - left - 1
        ids = batch["sequence_ids"][row]
        assert ids[left] == ids[position] == ids[right] > 0
        longest = max(longest, right - left - 1)
    # Spans touch: some runs have more pieces than the words of a single span.
    assert longest > len(SPAN_LENGTHS)


def test_boundaries_of_given_targets_with_unused_slots():
    positions = np.array([[1, 2, 3, 5, 0], [6, 0, 0, 0, 0]])
    weights = np.array([[1, 1, 1, 1, 0], [1, 0, 0, 0, 0]], np.float32)
    found = jax.device_get(span_boundaries(positions, weights, 8))
    assert found["left_positions"][0, :4].tolist() == [0, 0, 0, 4]
    assert found["right_positions"][0, :4].tolist() == [4, 4, 4, 6]
    assert found["places"][0, :4].tolist() == [0, 1, 2, 0]
    names = ("left_positions", "right_positions", "places")
    assert [found[name][1, 0] for name in names] == [5, 7, 0]


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / 2**0.5))


def layer_norm(x, params):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
    return x * params["scale"] + params["bias"]


def test_loss_is_the_papers_on_given_hidden_states():
    """Section 3.2 in float64, for one target after the other."""
    batch, params = prepared(4), random_params()
    encoder = {"params": {"encoder": params["encoder"]}}
    hidden = np.float64(jax.jit(EncoderModel(CONFIG).apply)(encoder, batch))
    params = jax.tree.map(np.float64, params)
    table = params["encoder"]["embeddings"]["token_embedding"]["embedding"][:VOCAB]
    head, total, correct = params["sbo"], 0.0, 0
    for row, slot in used_slots(batch):
        left, right = (int(batch[f"{side}_positions"][row, slot]) for side in ("left", "right"))
        place = min(int(batch["target_positions"][row, slot]) - left - 1, NUM_PLACES - 1)
        position = head["position_embedding"]["embedding"][place]
        x = np.concatenate([hidden[row, left], hidden[row, right], position])
        for number in (1, 2):
            dense = head[f"dense_{number}"]
            x = layer_norm(gelu(x @ dense["kernel"] + dense["bias"]), head[f"layer_norm_{number}"])
        logits = table @ x + head["bias"][:VOCAB]
        target = int(batch["targets"][row, slot])
        total += np.log(np.exp(logits).sum()) - logits[target]
        correct += logits.argmax() == target
    sums, count = loss_sums(packed=True), batch["target_weights"].sum()
    assert sums["sbo_loss"][1] == sums["mlm_loss"][1] == count > 50
    assert sums["sbo_loss"][0] / count == pytest.approx(total / count, rel=1e-6)
    assert sums["sbo_accuracy"] == (correct, count)
    assert OBJECTIVE.counts(batch) == {"mlm_loss": count, "sbo_loss": count}
    assert OBJECTIVE.total_loss({"mlm_loss": 2.0, "sbo_loss": 3.0}) == 5


def unpacked(batch: dict) -> dict[str, np.ndarray]:
    """Returns the same corrupted sequences and targets, each sequence in a row of its own."""
    num_rows, slots = len(batch["tokens"]), batch["targets"].shape[1]
    rows = np.zeros(num_rows * len(LENGTHS), row_dtype(LENGTH, 1))
    names = ("target_positions", "targets", "target_weights")
    targets = {name: np.zeros((len(rows), slots), batch[name].dtype) for name in names}
    starts = np.cumsum((0, *LENGTHS))
    for row in range(num_rows):
        for sequence, length in enumerate(LENGTHS):
            number, start = row * len(LENGTHS) + sequence, starts[sequence]
            rows["tokens"][number, :length] = batch["tokens"][row, start : start + length]
            rows["sequence_bounds"][number] = 0, length, length
            position = batch["target_positions"][row]
            inside = (batch["target_weights"][row] > 0) & (position >= start)
            (chosen,) = np.nonzero(inside & (position < start + length))
            for name in names:
                targets[name][number, : len(chosen)] = batch[name][row, chosen]
            targets["target_positions"][number, : len(chosen)] -= start
    batch = unpack_rows({name: rows[name] for name in rows.dtype.names}) | targets
    return batch | span_boundaries(batch["target_positions"], batch["target_weights"], LENGTH)


def test_packed_loss_equals_unpacked_loss():
    packed, separate = loss_sums(packed=True), loss_sums(packed=False)
    assert packed.keys() == separate.keys()
    for name, values in packed.items():
        np.testing.assert_allclose(values, separate[name], rtol=1e-5, err_msg=name)


def test_flops_count_three_positions_per_target_where_they_are_few():
    few = dataclasses.replace(MASKING, max_predictions=10)
    flops = [SpanBoundary(masking).flops_per_row(CONFIG, LENGTH, 4) for masking in (MASKING, few)]
    finish = HIDDEN**2 + 2 * HIDDEN * 32
    lm_head = HIDDEN * EMBEDDING + EMBEDDING * 128
    span_head = (2 * HIDDEN + 200) * HIDDEN + lm_head
    # 78 positions are not few of 64, so the last layer finishes all; 30 are.
    expected = 6 * ((26 - 10) * (lm_head + span_head) + (LENGTH - 30) * finish)
    assert flops[0] - flops[1] == expected


def test_every_parameter_of_the_head_has_a_sharding_rule():
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    shardings = infer_shardings(random_params(), mesh, (*OBJECTIVE.rules, *RULES))["sbo"]
    assert shardings["dense_1"]["kernel"].spec == P(None, "tensor")
    assert shardings["dense_2"]["kernel"].spec == P("fsdp", "tensor")
    assert shardings["bias"].spec == P("tensor")
    assert shardings["position_embedding"]["embedding"].spec == P()


def one_step(num_microbatches: int, **mesh) -> tuple[dict, dict]:
    """Returns parameters and metrics after an update, whose size is the gradient's, on the host."""
    mesh = make_mesh(**mesh) if mesh else make_mesh(devices=jax.devices()[:1])
    optimizer = optax.sgd(1.0)
    params = random_params()
    state = TrainState(np.int32(0), params, optimizer.init(params))
    shardings = infer_shardings(state, mesh, (*OBJECTIVE.rules, *RULES))
    update = make_pretrain_step(
        OBJECTIVE.make_model(dataclasses.replace(CONFIG, dropout_rate=0.0), Execution()),
        optimizer,
        shardings,
        OBJECTIVE,
        seed=0,
        num_microbatches=num_microbatches,
    )
    rows = jax.device_put(make_rows(16), batch_sharding(mesh))
    state, metrics = update(jax.device_put(state, shardings), rows)
    return jax.device_get((state.params, metrics))


@pytest.mark.slow
def test_a_mesh_and_microbatches_equal_one_device():
    params, metrics = one_step(1)
    means = mean_metrics(metrics["sums"])
    assert metrics["loss"] == pytest.approx(means["mlm_loss"] + means["sbo_loss"], rel=1e-6)
    sharded, sharded_metrics = one_step(2, data=2, fsdp=2, tensor=2)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5),
        (sharded, sharded_metrics),
        (params, metrics),
    )


class Stop(Exception):
    """Ends a run right after a save."""


@pytest.mark.slow
def test_a_run_trains_resumes_and_is_loaded_fine_tuned_and_exported(
    tmp_path, monkeypatch, caplog, two_devices
):
    corpus = build_small_corpus(tmp_path, rows="single_segments")
    config = spanbert.get_config("runlocal")
    config.model.size, config.long_phase.corpus = "tiny", str(corpus)
    config.checkpoint_every = 2
    save = pretrain.Checkpointer.save

    def save_and_stop(checkpointer, state):
        save(checkpointer, state)
        checkpointer.wait()
        raise Stop

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(pretrain.Checkpointer, "save", save_and_stop)
        pretrain.train_and_evaluate(config, tmp_path / "run")
    caplog.set_level("INFO", "absl")
    result = pretrain.train_and_evaluate(config, tmp_path / "run")
    assert "Resuming from step 2" in caplog.text
    assert {"mlm_loss", "mlm_accuracy", "sbo_loss", "sbo_accuracy"} <= result.keys()
    assert np.isfinite(result["sbo_loss"]) and "nsp_loss" not in result

    model = bert_jax.load(tmp_path / "run")
    assert set(model.params) == {"encoder", "mlm", "sbo"}
    assert len(model.fill_mask("the [MASK] of the river", top_k=2)) == 2
    read = read_model(tmp_path / "run")
    save_huggingface(tmp_path / "exported", read.params, read.settings, read.tokenizer)
    assert "not exported: sbo" in caplog.text
    exported = read_model(tmp_path / "exported")
    assert set(exported.params) == {"encoder", "mlm"} and not exported.report.unused

    (tmp_path / "data.csv").write_text("text,label\n" + "the king,north\nthe war,south\n" * 4)
    tuning = text_classification.get_config()
    tuning.init_from = str(tmp_path / "run")
    tuning.data.train = tuning.data.dev = str(tmp_path / "data.csv")
    tuning.max_seq_length, tuning.batch_size, tuning.num_epochs = 16, 8, 1.0
    assert "dev" in finetune.train_and_evaluate(tuning, tmp_path / "tuned")
    assert set(bert_jax.load(tmp_path / "tuned").params) == {"encoder", "head"}
