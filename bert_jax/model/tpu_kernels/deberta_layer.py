"""DeBERTa's encoder layer on a TPU: a function of the parameters of `deberta.EncoderLayer`.

It computes the same, as `layer.py` does for BERT, with a kernel for disentangled attention.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from bert_jax.model.deberta import DebertaConfig, SharedInputs, distance_rows
from bert_jax.model.dropout import LayerDropout, apply_dropout
from bert_jax.model.layers import dense_product
from bert_jax.model.tpu_kernels import distance_attention_kernel
from bert_jax.model.tpu_kernels.blocks import LANES, needs_float32
from bert_jax.model.tpu_kernels.layer import FUSED, finish_layer, fuse_projections, run_attention
from bert_jax.model.tpu_kernels.layer_loop import SavedActivations, loop_over_layers
from bert_jax.sharding.mesh import mesh_and_device

__all__ = ["fuse_projections", "run_encoder_layers", "why_unsupported"]
DISTANCES = "distances"  # The relative embeddings of a layer, among its parameters.


def why_unsupported(
    config: DebertaConfig, length: int, tensor_shards: int, device_kind: str, dtype: str
) -> str:
    """Returns why these layers cannot run here in rows of `length`; "" if they can.

    `tensor_shards`, `device_kind` and `dtype` are those of `ExecutionPlan`.
    """
    if config.num_layers == 1:
        return "a single layer needs no loop"
    if config.convolution_width:
        return "the first layer has a convolution"
    if len(config.score_terms) < 2:
        return "scores do not have both terms of distances"
    if needs_float32(device_kind):
        return f"kernels on {device_kind} cannot multiply bfloat16"
    hidden_size, head_dim = (
        config.hidden_size // tensor_shards,
        config.hidden_size // config.num_heads,
    )
    return distance_attention_kernel.why_unsupported(length, hidden_size, head_dim, dtype)


def run_encoder_layers(
    config: DebertaConfig,
    checkpoint: Callable[[Callable], Callable] | None,
    params: dict,
    x: jax.Array,
    inputs: SharedInputs,
    dropout: LayerDropout,
    positions: jax.Array | None,
) -> jax.Array:
    """Runs all layers, as `run_encoder_layers` of `layer.py` does."""

    def layer(params, x, shared, dropout, saved):
        sequence_ids, _ = shared
        return encoder_layer(config, params, x, sequence_ids, dropout, saved)

    def last_layer(params, x, shared, dropout, saved):
        sequence_ids, positions = shared
        return encoder_layer(config, params, x, sequence_ids, dropout, saved, positions)

    saves = checkpoint is None
    if not saves:
        layer, last_layer = checkpoint(layer), checkpoint(last_layer)
    # The loop has gradients of what each layer has, but not of what all layers read.
    distances = jnp.broadcast_to(inputs.distances, (config.num_layers, *inputs.distances.shape))
    if DISTANCES in dropout:
        drop = jax.vmap(lambda table, own: apply_dropout(table[None], own)[0])
        distances = drop(distances, dropout[DISTANCES])
    return loop_over_layers(
        layer,
        saves,
        fuse_projections(params) | {DISTANCES: distances.astype(x.dtype)},
        x,
        (inputs.mask.sequence_ids, positions),
        {place: own for place, own in dropout.items() if place != DISTANCES},
        last_layer if positions is not None else None,
    )


@jax.named_scope("layer")  # So that the names of its parts are whole in profiles.
def encoder_layer(
    config: DebertaConfig,
    params: dict,
    x: jax.Array,
    sequence_ids: jax.Array,
    dropout: LayerDropout,
    saved: SavedActivations | None = None,
    positions: jax.Array | None = None,
) -> jax.Array:
    """Computes `deberta.EncoderLayer` with the parameters of `fuse_projections`.

    They have the relative embeddings, too, after dropout. Returns `[B, L, H]`; at int32 `[B, K]`
    positions, `[B, K, H]`.
    """
    with jax.named_scope(FUSED):
        projections = dense_product(x, params[FUSED]["kernel"], fsdp_axis=0)
    _, device = mesh_and_device()
    options = distance_attention_kernel.Options(config.causal, device.platform != "tpu")
    with jax.named_scope("attention"):
        tables = _project_distances(config, params, x.shape[1])
        context = run_attention(
            functools.partial(distance_attention_kernel.attention, options=options),
            projections,
            params[FUSED]["bias"],
            sequence_ids,
            dropout.get("attention"),
            saved,
            distance_attention_kernel.saved_shapes(projections),
            more_inputs=(tables,),
            more_specs=((P(None, "tensor"),) * 2,),
        )
    return finish_layer(config, params, x, context, dropout, saved, positions)


def _project_distances(
    config: DebertaConfig, params: dict, length: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the tables that the kernel reads, `[2N, H]`: as keys, and as queries."""
    table, fused = params[DISTANCES], params[FUSED]
    if config.shares_projections:
        projected = table @ fused["kernel"].astype(table.dtype) + fused["bias"].astype(table.dtype)
        blocks = projected.reshape(len(table), -1, 3, LANES)  # As `interleave` joined them.
        query, key, _ = (blocks[:, :, part].reshape(table.shape) for part in range(3))
    else:
        query, key = (
            table @ params[name]["kernel"].astype(table.dtype)
            + params[name]["bias"].astype(table.dtype)
            for name in ("distance_query", "distance_key")
        )
    length += -length % LANES
    to_key = length - np.arange(2 * length)

    def take(table, distances):  # As a product, whose gradient scatters nothing.
        rows = np.eye(len(table), dtype=np.int8)[distance_rows(config, distances)]
        return jnp.asarray(rows, table.dtype) @ table

    return take(key, to_key), take(query, -to_key)
