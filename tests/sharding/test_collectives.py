"""Gathered parameters have the dtype of the computation, their gradients float32."""

import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax.data.batches import abstract_rows
from bert_jax.data.masking import Masking
from bert_jax.model.bert import RULES
from bert_jax.model.config import BertConfig
from bert_jax.model.execution import ExecutionPlan
from bert_jax.objectives.masked_lm import MaskedLm
from bert_jax.pods.estimate import hlo_cost
from bert_jax.sharding import collectives
from bert_jax.sharding.collectives import gather_data, sum_over_data
from bert_jax.sharding.mesh import batch_sharding, make_mesh
from bert_jax.sharding.rules import infer_shardings, with_shardings
from bert_jax.training import pretrain_step
from bert_jax.training.state import init_state


@pytest.mark.parametrize("collective", ["all_to_all", "reduce_scatter"])
@pytest.mark.parametrize("axis", [1, 2])
def test_shards_are_gathered_in_bfloat16_and_their_gradients_summed_in_float32(
    axis, collective, monkeypatch
):
    if collective == "reduce_scatter":
        monkeypatch.setattr(collectives, "SPARSE_CORE_KINDS", ("cpu",))
    mesh = make_mesh(data=8)
    rng = np.random.default_rng(0)
    params = {"kernel": rng.normal(size=(2, 8, 16)).astype(np.float32), "bias": np.ones(3)}
    specs = {"kernel": P(*[None] * axis, "data"), "bias": P()}
    factors = jnp.asarray(rng.normal(size=(8, 8, 16)), jnp.bfloat16)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}

    def gradients(params, factors):
        def loss(params):
            layer = jax.tree.map(lambda x: x[1], params)
            whole = gather_data(layer, jnp.bfloat16)["kernel"]
            assert (whole.shape, whole.dtype) == ((8, 16), jnp.bfloat16)
            return jnp.sum((whole * factors[0]).astype(jnp.float32)) + jnp.sum(params["bias"])

        return jax.grad(loss)(params)

    run = sum_over_data(gradients, mesh, shardings, specs)
    arguments = jax.device_put(params, shardings), factors
    names, run = {"all_to_all", "reduce_scatter"}, jax.jit(run)
    text = run.lower(*arguments).as_text()
    assert {name for name in names if f"stablehlo.{name}" in text} == {collective}
    actual = run(*arguments)
    assert actual["kernel"].sharding.spec[axis] == "data" and actual["kernel"].dtype == jnp.float32
    expected = np.asarray(factors, np.float32).sum(0)
    np.testing.assert_allclose(actual["kernel"], np.stack([0 * expected, expected]), rtol=1e-6)
    np.testing.assert_array_equal(actual["bias"], 8 * np.ones(3))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 2, "fsdp": 4}, {"data": 1, "fsdp": 8}], ids=str)
def test_fsdp_gathers_no_activations_and_sums_gradients_in_float32(mesh):
    vocab, hidden, length, rows = 384, 64, 32, 16 * mesh["data"]
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 2 * hidden}
    sizes |= {"num_layers": 1, "num_heads": 2, "max_position_embeddings": length}
    masking = Masking((0, 1, 2, 3, 4), 4, vocab, (True,) * vocab, max_predictions=5)
    objective = MaskedLm(masking)
    model = objective.make_model(BertConfig(**sizes), ExecutionPlan(dtype="bfloat16"))
    optimizer = optax.sgd(1e-3)
    key = jax.random.key(0)
    train = types.SimpleNamespace(max_seq_length=length, max_sequences=2)
    batch = jax.eval_shape(objective.prepare, abstract_rows(train, 1), key)
    shapes = jax.eval_shape(lambda: init_state(key, model, optimizer, batch))
    shardings = infer_shardings(shapes, make_mesh(**mesh), RULES)
    step = pretrain_step.make_pretrain_step(model, optimizer, shardings, objective, seed=0)
    batch = abstract_rows(train, rows, batch_sharding(shardings.step.mesh))
    lowered = step.lower(with_shardings(shapes, shardings), batch)

    # The CPU computes bfloat16 in float32; before compilation, the dtypes are the same as on a TPU.
    text = lowered.as_text()
    gathered = set(re.findall(r"stablehlo.all_gather.*-> tensor<(.*)>", text))
    summed = re.findall(
        r"stablehlo\.(?:reduce_scatter|all_reduce).*?\}\) : \(tensor<(.*?)>", text, re.DOTALL
    )
    assert f"{vocab}x{hidden}xbf16" in gathered and all(each.endswith("xbf16") for each in gathered)
    assert f"{vocab}x{hidden}xf32" in summed and all(each.endswith("f32") for each in summed)

    # What the compiler adds are sums of small vectors: it neither gathers the rows, nor sums the
    # gradient of the embedding twice.
    largest_collectives = hlo_cost.step_cost(lowered.compile().as_text()).largest_collectives
    largest = {
        name: max(math.prod(map(int, size.split(","))) for size in re.findall(r"\[(\d.*?)\]", name))
        for name in largest_collectives
        if re.search(r"\[\d", name)
    }
    assert max(largest.values()) == vocab * hidden < rows // mesh["data"] * length * hidden
    assert largest_collectives[f"reduce-scatter f32[{vocab},{hidden}]"]["count"] == 1
