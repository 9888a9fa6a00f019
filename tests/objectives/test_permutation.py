"""Permutation language modeling: the suite of objectives, and a reference from the paper."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.model.encoder import Encoder
from bert_jax.model.execution import ExecutionPlan
from bert_jax.model.layers import gather_positions
from bert_jax.objectives.permutation import NGRAM_LENGTHS, Permutation
from tests.suites import objectives as suites


def normalize(x, norm):
    centered = x - x.mean(-1, keepdims=True)
    variance = np.mean(centered**2, -1, keepdims=True)
    return centered / np.sqrt(variance + 1e-12) * norm["scale"] + norm["bias"]


def attend(layer, config, queries, content, sees, segments):
    """Returns the result of attention for a sequence: formulas of section 3.3 of Transformer-XL,
    and of section 2.5 of XLNet for segments. `queries` and `content` are float64 `[length, H]`."""
    length, size = content.shape
    heads, head_dim = config.num_heads, size // config.num_heads

    def project(x, name):
        return (x @ layer[name]["kernel"]).reshape(len(x), heads, head_dim)

    q, k, v = project(queries, "query"), project(content, "key"), project(content, "value")
    output = np.zeros((length, heads, head_dim))
    for i in range(length):
        if not sees[i].any():
            continue
        distances = i - np.arange(length)
        frequencies = 10000.0 ** (-np.arange(0, size, 2) / size)
        angles = distances[:, None] * frequencies
        r = project(np.concatenate([np.sin(angles), np.cos(angles)], -1), "distance_key")
        scores = np.einsum("hd,jhd->jh", q[i] + layer["content_bias"]["bias"], k)
        scores += np.einsum("hd,jhd->jh", q[i] + layer["distance_bias"]["bias"], r)
        of_segment = layer["segment_key"][(segments != segments[i]).astype(int)]
        scores += np.einsum("hd,jhd->jh", q[i] + layer["segment_bias"]["bias"], of_segment)
        scores = np.where(sees[i][:, None], scores / math.sqrt(head_dim), -np.inf)
        weights = np.exp(scores - scores.max(0))
        output[i] = np.einsum("jh,jhd->hd", weights / weights.sum(0), v)
    return output.reshape(length, size)


def finish(layer, x, context):
    x = normalize(x + context @ layer["attention_output"]["kernel"], layer["attention_layer_norm"])
    inner = x @ layer["intermediate"]["kernel"] + layer["intermediate"]["bias"]
    inner *= 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
    y = inner @ layer["output"]["kernel"] + layer["output"]["bias"]
    return normalize(x + y, layer["output_layer_norm"])


def reference(model, params, batch):
    """Returns the loss and accuracy in float64, of each sequence alone."""
    config = model.config
    params = jax.tree.map(np.float64, params)
    encoder, losses, correct = params["encoder"], [], []
    for row, ids in enumerate(np.asarray(batch["sequence_ids"])):
        for number in range(1, ids.max() + 1):
            (places,) = np.nonzero(ids == number)
            tokens, ranks = (np.asarray(batch[name])[row][places] for name in ("tokens", "ranks"))
            segments = np.asarray(batch["segment_ids"])[row][places].copy()
            segments[-1] = 2
            embedding = encoder["embeddings"]["token_embedding"]["embedding"]
            h = embedding[tokens]
            g = np.broadcast_to(encoder["embeddings"]["query"][0], h.shape)
            sees_h, sees_g = ranks[:, None] >= ranks, ranks[:, None] > ranks
            for index in range(config.num_layers):
                layer = jax.tree.map(lambda x, index=index: x[index], encoder["layers"])
                contexts = (
                    attend(layer, config, states, h, sees, segments)
                    for states, sees in ((h, sees_h), (g, sees_g))
                )
                h, g = (
                    finish(layer, x, context) for x, context in zip((h, g), contexts, strict=True)
                )
            logits = g @ embedding.T + params["mlm"]["bias"]
            logits = logits[:, : config.vocab_size]
            for place in np.nonzero(ranks)[0]:
                own = logits[place]
                losses.append(np.logaddexp.reduce(own) - own[tokens[place]])
                correct.append(own.argmax() == tokens[place])
    count = len(losses)
    assert count == np.sum(batch["target_weights"])
    return {
        "permutation_loss": (sum(losses), count),
        "permutation_accuracy": (sum(correct), count),
    }


MASKING = suites.make_masking(
    rate=1 / 6,
    unit="ngram",
    ngram_lengths=NGRAM_LENGTHS,
    mask_fraction=0.0,
    keep_fraction=1.0,
    random_fraction=0.0,
)
CASE = suites.ObjectiveCase(
    Permutation(MASKING), suites.make_xlnet_config(), {"permutation_loss": 1.0}, reference
)


IN_SLOW_TIER = (
    "eight_devices_and_microbatches_agree_with_one",
    "resumed_step_equals_uninterrupted",
)


@pytest.mark.parametrize(
    "holds",
    [
        pytest.param(
            *each.values,
            id=each.id,
            marks=pytest.mark.slow if each.id in IN_SLOW_TIER else pytest.mark.exhaustive,
        )
        for each in suites.OBJECTIVE
    ],
)
def test_objective(holds, tmp_path):
    holds(CASE, tmp_path)


@pytest.mark.slow
def test_loss_equals_the_formulas_of_the_paper_in_float64():
    suites.loss_equals_float64(CASE, None)


@pytest.mark.slow
def test_loss_of_a_packed_batch_equals_that_of_its_sequences():
    suites.packed_equals_unpacked(CASE, None)


@pytest.mark.slow
def test_no_position_sees_itself_or_a_later_one_of_its_permutation():
    """By gradients: those of the query stream at each position, for the token vectors of all."""
    encoder, params = Encoder(CASE.config), suites.params_of(CASE)["encoder"]
    rng, length = np.random.default_rng(0), 12
    ranks = np.array([[0, 3, 0, 1, 2, 0, 4, 0, 5, 6, 0, 0]], np.int32)
    ids = np.array([[1] * 7 + [2] * 5], np.int32)
    batch = {
        "tokens": np.arange(length, dtype=np.int32)[None],
        "segment_ids": np.zeros((1, length), np.int32),
        "position_ids": np.zeros((1, length), np.int32),
        "sequence_ids": ids,
        "ranks": ranks,
    }

    def sums(vectors):
        """Sums the hidden states at each position, from the vector of its token."""
        table = {"embedding": jnp.pad(vectors, ((0, 128 - length), (0, 0)))}
        own = params["embeddings"] | {"token_embedding": table}
        streams = encoder.apply({"params": params | {"embeddings": own}}, batch)
        # Squared, as a LayerNorm comes last: the plain sum is constant.
        return [jnp.sum(x[0] ** 2, axis=-1) for x in streams]

    vectors = rng.normal(size=(length, CASE.config.hidden_size)).astype(np.float32)
    of_content, of_query = jax.jit(jax.jacrev(sums))(vectors)
    same = ids[0][:, None] == ids[0]
    earlier, own = ranks[0][:, None] > ranks[0], np.eye(length, dtype=bool)
    sees = np.abs(np.array(of_query)).sum(-1) > 0
    # Of the tokens that are predicted; the others see all that are not.
    np.testing.assert_array_equal(sees[ranks[0] > 0], (same & earlier)[ranks[0] > 0])
    assert not sees[own].any()
    sees = np.abs(np.array(of_content)).sum(-1) > 0
    np.testing.assert_array_equal(sees, same & (earlier | (ranks[0][:, None] == ranks[0])))


@pytest.mark.slow
def test_query_stream_at_the_targets_is_that_at_all_positions():
    """Hidden states, and gradients of all parameters."""
    params, batch = suites.params_of(CASE)["encoder"], suites.prepared(CASE)
    encoder, positions = Encoder(CASE.config), batch["target_positions"]
    assert positions.shape[1] <= suites.LENGTH // 2
    factors = np.random.default_rng(0).normal(size=CASE.config.hidden_size)
    factors = factors * batch["target_weights"][..., None]

    def at_targets(params):
        return encoder.apply({"params": params}, batch, None, positions).query

    def at_all(params):
        return gather_positions(encoder.apply({"params": params}, batch).query, positions)

    def with_gradients(states):
        def loss(params):
            return jnp.sum(states(params) * factors), states(params)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    found, expected = with_gradients(at_targets), with_gradients(at_all)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), found, expected
    )


def test_targets_are_a_sixth_and_their_order_is_drawn_anew_in_each_epoch():
    rows = suites.make_rows([(32,)] * 40)
    prepare = jax.jit(Permutation(MASKING).prepare)
    first = prepare(rows, jax.random.key(0))
    np.testing.assert_array_equal(first["tokens"], rows["tokens"])
    ranks = np.asarray(first["ranks"])
    assert (ranks > 0).sum(1).tolist() == [5] * 40
    assert (np.sort(ranks, 1)[:, -5:] == np.arange(1, 6)).all()
    targets = np.zeros_like(ranks)
    np.put_along_axis(targets, np.asarray(first["target_positions"])[:, :5], 1, axis=1)
    np.testing.assert_array_equal(targets > 0, ranks > 0)
    assert not (ranks > 0)[np.isin(rows["tokens"], (2, 3))].any()
    again = prepare(rows, jax.random.key(0))
    np.testing.assert_array_equal(again["ranks"], ranks)
    later = prepare(rows | {"epochs": rows["epochs"] + 1}, jax.random.key(0))
    assert (np.asarray(later["ranks"]) != ranks).any(1).sum() > 30


def test_a_model_that_it_does_not_fit_is_a_clear_error():
    with pytest.raises(ValueError, match=r"needs model\.architecture=xlnet, and it is deberta"):
        CASE.objective.make_model(suites.make_deberta_config(), ExecutionPlan())


@pytest.mark.slow
def test_content_stream_of_one_rank_is_that_of_the_encoder_alone():
    """Where nothing is predicted, both streams see all; the query stream also, if it is last."""
    params, batch = suites.params_of(CASE), suites.prepared(CASE)
    apply, variables = jax.jit(Encoder(CASE.config).apply), {"params": params["encoder"]}
    alone = apply(variables, {name: x for name, x in batch.items() if name != "ranks"})
    two = apply(variables, batch | {"ranks": np.zeros_like(batch["ranks"])})
    real = batch["sequence_ids"] > 0
    np.testing.assert_allclose(two.content[real], alone[real], atol=1e-5)
