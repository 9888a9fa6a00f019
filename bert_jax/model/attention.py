"""Scaled dot-product attention within each sequence of a row: in plain JAX, or in a kernel."""

import functools
import math

import jax
import jax.numpy as jnp
from absl import logging
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from bert_jax.model.config import BertConfig
from bert_jax.model.dropout import AttentionDropout
from bert_jax.model.kernels import attention_tpu
from bert_jax.model.layer_loop import LayerStacks


def uses_kernel(config: BertConfig, length: int, mesh: AbstractMesh | None = None) -> bool:
    """Returns whether attention in rows of `length` runs in the TPU kernel; warns if it cannot.

    `mesh` is the one it runs on; None: that of the current computation.
    """
    mesh, device = mesh_and_device(mesh)
    if config.attention == "plain" or (config.attention == "auto" and device.platform != "tpu"):
        return False
    head_dim = config.hidden_size // config.num_heads
    shard_size = config.hidden_size // mesh.shape.get("tensor", 1)
    if reason := attention_tpu.why_unsupported(length, shard_size, head_dim):
        message = "Attention runs without the TPU kernel, which is slower: %s"
        logging.log_first_n(logging.WARNING, message, 1, reason)
    return not reason


def mesh_and_device(mesh: AbstractMesh | None = None):
    """Returns `mesh`, or that of the current computation, and one of its devices."""
    mesh = mesh or jax.sharding.get_abstract_mesh()
    return mesh, mesh.abstract_device or jax.devices()[0]


@jax.named_scope("attention")
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    biases: tuple[jax.Array, jax.Array],
    sequence_ids: jax.Array,
    config: BertConfig,
    dropout: AttentionDropout | None = None,
) -> jax.Array:
    """Computes attention (Vaswani et al., 2017, section 3.2.1) within each sequence of a row.

    Args:
      query, key, value: `[batch, length, hidden]`, any float dtype, without their biases.
      biases: of queries and values, `[hidden]`. A bias of keys would add the same to all scores of
        a query, which softmax ignores.
      sequence_ids: int32 `[batch, length]`; positions attend to each other if their ids are equal.
        Padding has the id 0 and attends only to padding, so that no softmax is empty.
      config: of the model: the number of heads, whether it is causal, and the implementation.
      dropout: of the probabilities, or None.

    Returns:
      `[batch, length, hidden]` in the dtype of `value`. The softmax is in float32.
    """
    if not uses_kernel(config, query.shape[1]):
        return _plain_attention(config, query, key, value, biases, sequence_ids, dropout)
    bias = attention_tpu.interleave(biases[0], jnp.zeros_like(biases[0]), biases[1])
    projections = attention_tpu.interleave(query, key, value)
    return kernel_attention(projections, bias, sequence_ids, config, dropout)


@jax.named_scope("attention")
def kernel_attention(
    projections: jax.Array,
    bias: jax.Array,
    sequence_ids: jax.Array,
    config: BertConfig,
    dropout: AttentionDropout | None = None,
    stacks: LayerStacks | None = None,
) -> jax.Array:
    """Computes `attention` in the TPU kernel, of interleaved `projections` and their `bias`.

    With `stacks`, the kernel saves there what its gradient needs; else that is left to JAX.
    """
    mesh, device = mesh_and_device()
    length, head_dim = projections.shape[1], config.hidden_size // config.num_heads
    settings = {"head_dim": head_dim, "causal": config.causal}
    settings["interpret"] = device.platform != "tpu"
    settings["float32_blocks"] = attention_tpu.needs_float32(device.device_kind)
    kernel = functools.partial(attention_tpu.attention, **settings)
    if axes := set(mesh.auto_axes):  # The compiler does not partition kernels.
        rows, heads = P("fsdp", None, "tensor"), P("fsdp", "tensor")
        dropout_specs = AttentionDropout(heads, P(), P(), P()) if dropout else P()
        layers = P(None, *rows)
        specs = rows, P("tensor"), P("fsdp"), dropout_specs, layers, P()
        kernel = jax.shard_map(
            kernel, in_specs=specs, out_specs=(rows, layers), axis_names=axes, check_vma=False
        )
    arguments = projections, bias, sequence_ids, dropout
    if not stacks or length % attention_tpu.LANES:  # Then the kernel pads.
        context = kernel(*arguments, None, 0)[0]
        return stacks.save("context", context) if stacks else context
    context = jax.ShapeDtypeStruct((*projections.shape[:2], config.hidden_size), projections.dtype)
    arrays = [stacks.array("projections", projections), stacks.array("context", context)]
    context, arrays = kernel(*arguments, arrays, stacks.index)
    stacks.arrays |= zip(("projections", "context"), arrays, strict=True)
    stacks.values["context"] = context
    return context


def _plain_attention(config, query, key, value, biases, sequence_ids, dropout):
    query, value = query + biases[0].astype(query.dtype), value + biases[1].astype(value.dtype)
    query, key, value = (x.reshape(*x.shape[:2], config.num_heads, -1) for x in (query, key, value))
    probabilities = attention_probabilities(query, key, sequence_ids, config.causal)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def weighted_sum(probabilities, value):
        """Recomputes dropout in the backward pass, so that the layer loop saves `probabilities`."""
        if dropout:
            probabilities = dropout.apply(probabilities)
        return jnp.einsum("bhqk,bhkd->bhqd", probabilities, value)

    context = jnp.swapaxes(weighted_sum(probabilities, jnp.swapaxes(value, 1, 2)), 1, 2)
    return context.reshape(*context.shape[:2], -1)


def attention_probabilities(query, key, sequence_ids, causal: bool) -> jax.Array:
    """Returns attention probabilities, `[batch, heads, from, to]` in the dtype of `key`.

    `query` and `key` are `[batch, length, heads, head_dim]`.
    """
    # With heads before length, both products are plain batched matrix products.
    query, key = (jnp.swapaxes(x, 1, 2) for x in (query, key))
    query = query * jnp.asarray(1 / math.sqrt(query.shape[-1]), query.dtype)
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, key, preferred_element_type=jnp.float32)
    is_visible = sequence_ids[:, None, :, None] == sequence_ids[:, None, None, :]
    if causal:
        position = jnp.arange(scores.shape[-1])
        is_visible &= position[:, None] >= position
    return _softmax(scores, is_visible, key.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _softmax(scores: jax.Array, is_visible: jax.Array, dtype) -> jax.Array:
    """Computes softmax in float32, returned and saved for the backward pass in `dtype`.

    The gradient does not need `is_visible`: where it is False, the probability is 0.
    """
    scores = jnp.where(is_visible, scores, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(scores, axis=-1).astype(dtype)


def _softmax_backward(dtype, probabilities, dy):
    probabilities, dy = probabilities.astype(jnp.float32), dy.astype(jnp.float32)
    weighted = probabilities * dy
    return weighted - probabilities * jnp.sum(weighted, axis=-1, keepdims=True), None


_softmax.defvjp(lambda *args: (_softmax(*args),) * 2, _softmax_backward)
