"""Left-to-right pre-training: attention, targets, packing and meshes."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bert_jax.data.features import unpack_rows
from bert_jax.data.packing import row_dtype
from bert_jax.model.bert import RULES
from bert_jax.model.config import BertConfig
from bert_jax.model.encoder import Encoder
from bert_jax.model.execution import Execution
from bert_jax.objectives import mean_metrics
from bert_jax.objectives.left_to_right import LeftToRight
from bert_jax.objectives.masked_lm import example_batch
from bert_jax.sharding.mesh import batch_sharding, make_mesh
from bert_jax.sharding.rules import infer_shardings
from bert_jax.training import pretrain_step

LENGTH, VOCAB = 32, 60
LENGTHS = (11, 2, 13)  # Of the sequences in a packed row; the rest is padding.
CONFIG = BertConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    intermediate_size=32,
    max_position_embeddings=LENGTH,
    dropout_rate=0.0,
    initializer_range=0.3,
    causal=True,
)
OBJECTIVE = LeftToRight(next_sentence=False)
MODEL = OBJECTIVE.make_model(CONFIG, Execution())


def sequences(num_rows: int) -> list[list[np.ndarray]]:
    """Returns the random sequences of each row."""
    rng = np.random.default_rng(0)
    return [[rng.integers(5, VOCAB, length) for length in LENGTHS] for _ in range(num_rows)]


def make_rows(row_sequences: list[list[np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns packed rows as read from disk, of sequences of one segment."""
    rows = np.zeros(len(row_sequences), row_dtype(LENGTH, len(LENGTHS)))
    for row, members in zip(rows, row_sequences, strict=True):
        end = 0
        for slot, tokens in enumerate(members):
            start, end = end, end + len(tokens)
            row["tokens"][start:end] = tokens
            row["sequence_bounds"][slot] = start, end, end
    numbers = np.arange(len(rows), dtype=np.uint32)
    fields = {name: rows[name] for name in rows.dtype.names}
    return fields | {"row_ids": numbers, "epochs": np.zeros_like(numbers)}


@functools.cache
def initial_state():
    init = functools.partial(
        pretrain_step.init_state,
        model=MODEL,
        optimizer=optax.sgd(1.0),
        batch=example_batch(),
    )
    return jax.device_get(jax.jit(init)(jax.random.key(0)))


def fresh(**mesh):
    mesh, state = mesh or {"devices": jax.devices()[:1]}, initial_state()
    shardings = infer_shardings(state, make_mesh(**mesh), RULES)
    return jax.device_put(state, shardings), shardings


def test_no_position_sees_a_later_one_or_another_sequence():
    batch = jax.jit(functools.partial(unpack_rows, causal=True))(make_rows(sequences(1)))
    params = copy.deepcopy(initial_state().params["encoder"])

    def hidden_states(tables):
        """Returns hidden states, with a token embedding per position for separate gradients."""
        embeddings = params["embeddings"] | {"token_embedding": {"embedding": tables}}
        inputs = batch | {"tokens": jnp.arange(LENGTH)[None]}
        variables = {"params": params | {"embeddings": embeddings}}
        return Encoder(CONFIG).apply(variables, inputs)[0].sum(-1)

    shape = params["embeddings"]["token_embedding"]["embedding"].shape
    tables = np.float32(np.random.default_rng(1).normal(size=shape))
    # The sum over the hidden units is constant after LayerNorm, unless its scale varies.
    scale = params["layers"]["output_layer_norm"]["scale"]
    params["layers"]["output_layer_norm"]["scale"] = scale * np.float32(range(1, 17))
    jacobian = np.asarray(jax.jit(jax.jacrev(hidden_states))(tables))  # [to, from, hidden]
    depends = np.abs(jacobian[:, :LENGTH]).max(axis=-1) > 0
    position, ids = np.arange(LENGTH), np.asarray(batch["sequence_ids"][0])
    expected = (ids[:, None] == ids) & (position[:, None] >= position)
    np.testing.assert_array_equal(depends, expected)


def test_every_token_but_the_first_of_its_sequence_is_predicted_and_none_is_corrupted():
    (members,) = sequences(1)
    batch = jax.device_get(jax.jit(OBJECTIVE.prepare)(make_rows([members]), jax.random.key(0)))
    tokens = np.concatenate(members)
    np.testing.assert_array_equal(batch["tokens"][0, : len(tokens)], tokens)
    used = batch["target_weights"][0] > 0
    # The positions before the next tokens of 11, 2 and 13 tokens.
    expected = [*range(10), 11, *range(13, 25)]
    assert batch["target_positions"][0, used].tolist() == expected
    targets = np.concatenate([tokens[1:] for tokens in members])
    np.testing.assert_array_equal(batch["targets"][0, used], targets)
    # Pooled is the last token, which has seen the whole sequence.
    assert batch["pooled_positions"].tolist() == [[10, 12, 25]]


def test_packed_loss_and_gradients_equal_unpacked():
    packed = sequences(4)
    unpacked = [[tokens] for members in packed for tokens in members]
    params = initial_state().params

    @functools.partial(jax.jit, static_argnums=1)
    def loss_and_gradients(params, num_rows):
        rows = make_rows(packed if num_rows == 4 else unpacked)
        batch = OBJECTIVE.prepare(rows, jax.random.key(0))

        def loss_fn(params):
            sums = OBJECTIVE.sums(MODEL, params, batch)
            loss, count = sums["next_token_loss"]
            return loss / count, count

        return jax.value_and_grad(loss_fn, has_aux=True)(params)

    (loss, count), gradients = loss_and_gradients(params, 4)
    (expected, expected_count), expected_gradients = loss_and_gradients(params, 12)
    assert count == expected_count == 4 * (sum(LENGTHS) - 3)
    assert float(loss) == pytest.approx(float(expected), abs=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradients, expected_gradients
    )


def one_step(num_microbatches=1, **mesh):
    """Returns parameters and metrics after an update, whose size is the gradient's, on the host."""
    state, shardings = fresh(**mesh)
    update = pretrain_step.make_pretrain_step(
        MODEL, optax.sgd(1.0), shardings, OBJECTIVE, seed=0, num_microbatches=num_microbatches
    )
    rows = sequences(16)
    rows[1::3] = [members[:1] for members in rows[1::3]]  # Different numbers of next tokens.
    sharding = batch_sharding(shardings.step.mesh)
    state, metrics = update(state, jax.device_put(make_rows(rows), sharding))
    metrics |= mean_metrics(metrics.pop("sums"))
    return jax.device_get((state.params, metrics))


@pytest.mark.slow
def test_a_mesh_and_microbatches_equal_one_device():
    params, metrics = one_step()
    assert metrics["loss"] == pytest.approx(metrics["next_token_loss"], rel=1e-6)
    assert "nsp_loss" not in metrics and "mlm_loss" not in metrics
    assert set(params) == {"encoder", "mlm"} and "pooler" not in params["encoder"]
    sharded = one_step(num_microbatches=2, data=2, fsdp=2, tensor=2)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), sharded, (params, metrics)
    )
