"""SpanBERT's objective: the tokens around a span, the loss by the paper's formulas, a whole run."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import bert_jax
from bert_jax import finetune, pretrain
from bert_jax.checkpoints.export import save_huggingface
from bert_jax.checkpoints.read import read_model
from bert_jax.configs.finetune import text_classification
from bert_jax.configs.pretrain import spanbert
from bert_jax.data.masking import SPAN_LENGTHS, span_boundaries
from bert_jax.model.encoder import EncoderModel
from bert_jax.objectives.span_boundary import NUM_PLACES, SpanBoundary
from bert_jax.sharding.mesh import make_mesh
from bert_jax.sharding.rules import infer_shardings
from tests.helpers.corpora import build_small_corpus
from tests.suites import objectives as suites

CONFIG = suites.make_config(embedding_size=24)
# Of many targets: many spans touch.
OBJECTIVE = SpanBoundary(suites.make_masking(max_predictions=13, rate=0.4, unit="span"))


def used_slots(batch: dict):
    """Yields (row, slot) of each target."""
    return zip(*np.nonzero(batch["target_weights"]), strict=True)


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / 2**0.5))


def layer_norm(x, params):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
    return x * params["scale"] + params["bias"]


def reference(model, params, batch):
    """Section 3.2 on given hidden states, for one target after the other."""
    encoder = {"params": {"encoder": params["encoder"]}}
    hidden = np.float64(jax.jit(EncoderModel(model.config).apply)(encoder, batch))
    token_logits, _ = jax.jit(model.apply)({"params": params}, batch)
    params = jax.tree.map(np.float64, params)
    table = params["encoder"]["embeddings"]["token_embedding"]["embedding"][: suites.VOCAB]
    head, logits = params["sbo"], np.zeros((*batch["targets"].shape, suites.VOCAB))
    for row, slot in used_slots(batch):
        left, right = (int(batch[f"{side}_positions"][row, slot]) for side in ("left", "right"))
        place = min(int(batch["target_positions"][row, slot]) - left - 1, NUM_PLACES - 1)
        position = head["position_embedding"]["embedding"][place]
        x = np.concatenate([hidden[row, left], hidden[row, right], position])
        for number in (1, 2):
            dense = head[f"dense_{number}"]
            x = layer_norm(gelu(x @ dense["kernel"] + dense["bias"]), head[f"layer_norm_{number}"])
        logits[row, slot] = table @ x + head["bias"][: suites.VOCAB]
    targets = batch["targets"], batch["target_weights"]
    return suites.cross_entropy("mlm", token_logits, *targets) | suites.cross_entropy(
        "sbo", logits, *targets
    )


CASE = suites.ObjectiveCase(OBJECTIVE, CONFIG, {"mlm_loss": 1.0, "sbo_loss": 1.0}, reference)


@pytest.mark.slow
@pytest.mark.parametrize("holds", suites.OBJECTIVE)
def test_objective(holds, tmp_path):
    holds(CASE, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("holds", suites.OBJECTIVE)
@pytest.mark.parametrize("architecture", suites.ARCHITECTURES)
def test_objective_on_other_architectures(architecture, holds, tmp_path):
    holds(suites.on_architecture(CASE, architecture), tmp_path)


def test_boundaries_and_positions_belong_to_maximal_runs_of_targets():
    rows = suites.make_rows([(20, 12), (32,)] * 250)
    batch = jax.device_get(jax.jit(OBJECTIVE.prepare)(rows, jax.random.key(0)))
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


def test_flops_count_three_positions_per_target_where_they_are_few():
    few = SpanBoundary(dataclasses.replace(OBJECTIVE.masking, max_predictions=5))
    flops = [each.flops_per_row(CONFIG, suites.LENGTH, 3) for each in (OBJECTIVE, few)]
    hidden, inner, embedding = 32, 64, 24
    finish = hidden**2 + 2 * hidden * inner
    lm_head = hidden * embedding + embedding * 128
    span_head = (2 * hidden + 200) * hidden + lm_head
    # 39 positions are not few of 32, so the last layer finishes all; 15 are.
    expected = 6 * ((13 - 5) * (lm_head + span_head) + (32 - 15) * finish)
    assert flops[0] - flops[1] == expected


def test_the_head_is_sharded_over_the_axes_of_its_products():
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    shardings = infer_shardings(suites.params_of(CASE), mesh, CASE.rules)["sbo"]
    assert shardings["dense_1"]["kernel"].spec == P(None, "tensor")
    assert shardings["dense_2"]["kernel"].spec == P("fsdp", "tensor")
    assert shardings["bias"].spec == P("tensor")
    assert shardings["position_embedding"]["embedding"].spec == P()


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
