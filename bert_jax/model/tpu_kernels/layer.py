"""BERT's encoder layer on a TPU: a function of the parameters of `bert.EncoderLayer`.

It computes the same, with one product for queries, keys and values, with kernels for attention and
for the output of each sublayer, and with control of what is saved for the gradient.
"""

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from absl import logging
from jax import lax
from jax.sharding import PartitionSpec as P

from bert_jax.model.attention_mask import AttentionMask
from bert_jax.model.config import BertConfig
from bert_jax.model.dropout import (
    AttentionDropout,
    HiddenDropout,
    LayerDropout,
    add_with_dropout,
    finishing_dropout,
)
from bert_jax.model.layers import activate, dense_product, gather_positions, layer_norm
from bert_jax.model.tpu_kernels import (
    attention_kernel,
    long_attention_kernel,
    sublayer_kernel,
)
from bert_jax.model.tpu_kernels.blocks import LANES, needs_float32
from bert_jax.model.tpu_kernels.layer_loop import INPUTS, SavedActivations, loop_over_layers
from bert_jax.sharding.mesh import mesh_and_device

PROJECTIONS = ("query", "key", "value")
FUSED = "query_key_value"


def interleave(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Joins arrays `[..., hidden]`: 128 lanes of each, then the next, `[..., 3 * hidden]`.

    So one product computes queries, keys and values, and each head has them in one block.
    """
    starts = range(0, query.shape[-1], LANES)  # Slices take half of the cycles of a transposition.
    blocks = [x[..., start : start + LANES] for start in starts for x in (query, key, value)]
    return jnp.concatenate(blocks, axis=-1)


def fuse_projections(
    layers: dict,
    leaves: tuple[str, ...] = ("kernel", "bias"),
    join: Callable = interleave,
) -> dict:
    """Returns the parameters of layers with one fused projection, as the attention kernel expects.

    Joins the `leaves` of queries, keys and values, unless they are joined already. One product of
    three times the size is faster than three, most of all for the gradient of their common input.
    """
    return fuse_dense(layers, PROJECTIONS, FUSED, leaves, join)


def fuse_dense(
    layers: dict, names: tuple[str, ...], name: str, leaves: tuple[str, ...], join: Callable
) -> dict:
    """Returns the parameters of layers with the `leaves` of dense layers `names` in one, `name`."""
    fused, result = dict(layers.get(name, {})), dict(layers)
    for leaf in leaves:
        parts = [layers[part][leaf] for part in names if leaf in layers.get(part, {})]
        if parts:
            fused[leaf] = join(*parts)
    for part in names:
        kept = {leaf: x for leaf, x in result.pop(part, {}).items() if leaf not in leaves}
        if kept:
            result[part] = kept
    return result | {name: fused}


def why_unsupported(
    config: BertConfig, length: int, tensor_shards: int, device_kind: str, dtype: str
) -> str:
    """Returns why these layers cannot run here in rows of `length`; "" if they can.

    `tensor_shards`, `device_kind` and `dtype` are those of `ExecutionPlan`.
    """
    del dtype  # In both, the kernels fit on the chip.
    if config.num_layers == 1:
        return "a single layer needs no loop"
    head_dim = config.hidden_size // config.num_heads
    sizes = length, config.hidden_size // tensor_shards, head_dim
    if _kernels(length) is attention_kernel:
        return attention_kernel.why_unsupported(*sizes)
    return long_attention_kernel.why_unsupported(*sizes, device_kind)


def _kernels(length: int) -> ModuleType:
    """Returns the module with the attention kernels for rows of a length."""
    is_short = length <= attention_kernel.MAX_LENGTH
    return attention_kernel if is_short else long_attention_kernel


def run_encoder_layers(
    config: BertConfig,
    checkpoint: Callable[[Callable], Callable] | None,
    params: dict,
    x: jax.Array,
    mask: AttentionMask,
    dropout: LayerDropout,
    positions: jax.Array | None,
) -> jax.Array:
    """Runs all layers on hidden states `[B, L, H]`; with int32 `[B, K]` positions: `[B, K, H]`.

    `params` are stacked over the layers that have their own (`config.num_stacked_layers`), and
    `dropout` over all. `checkpoint` wraps a layer in `jax.checkpoint`;
    with None, a layer chooses what it saves.
    """

    def layer(params, x, shared, dropout, saved):
        visible, _ = shared
        return encoder_layer(config, params, x, visible, dropout, saved)

    def last_layer(params, x, shared, dropout, saved):
        visible, positions = shared
        return encoder_layer(config, params, x, visible, dropout, saved, positions)

    saves = checkpoint is None
    if not saves:
        layer, last_layer = checkpoint(layer), checkpoint(last_layer)
    return loop_over_layers(
        layer,
        saves,
        fuse_projections(params),
        x,
        (_visible(mask, x.dtype, "attention" in dropout), positions),
        dropout,
        last_layer if positions is not None else None,
        config.num_layers // config.num_stacked_layers,
    )


class Visible(NamedTuple):
    """Which positions attend to which others: their sequences, and what long rows need of them."""

    sequence_ids: jax.Array  # int32 [B, L]
    prepared: long_attention_kernel.Prepared | None


def _visible(mask: AttentionMask, dtype, has_dropout: bool) -> Visible:
    length = mask.sequence_ids.shape[1]
    if _kernels(length) is attention_kernel:
        if mask.is_hidden is not None:
            raise ValueError("the kernels for short rows do not support is_hidden of a mask")
        return Visible(mask.sequence_ids, None)
    segments = segments_here(length, dtype, has_dropout)
    return Visible(mask.sequence_ids, long_attention_kernel.prepare(mask, segments=segments))


def segments_here(length: int, dtype, has_dropout: bool) -> long_attention_kernel.Segments | None:
    """Returns the segments of long rows on the devices of the current computation."""
    _, device = mesh_and_device()
    return long_attention_kernel.choose_segments(
        length, device.device_kind, jnp.dtype(dtype).name, has_dropout
    )


@jax.named_scope("layer")  # So that the names of its parts are whole in profiles.
def encoder_layer(
    config: BertConfig,
    params: dict,
    x: jax.Array,
    visible: Visible,
    dropout: LayerDropout,
    saved: SavedActivations | None = None,
    positions: jax.Array | None = None,
) -> jax.Array:
    """Computes `bert.EncoderLayer` with the parameters of `fuse_projections`.

    Returns `[B, L, H]`; at int32 `[B, K]` positions, `[B, K, H]`.
    """
    fused = params[FUSED]
    with jax.named_scope(FUSED):
        projections = dense_product(x, fused["kernel"], fsdp_axis=0)
    context = kernel_attention(
        projections,
        fused["bias"],
        visible.sequence_ids,
        config,
        dropout.get("attention"),
        saved,
        visible.prepared,
    )
    return finish_layer(config, params, x, context, dropout, saved, positions)


def finish_layer(
    config,
    params: dict,
    x: jax.Array,
    context: jax.Array,
    dropout: LayerDropout,
    saved: SavedActivations | None,
    positions: jax.Array | None,
) -> jax.Array:
    """Computes what follows attention in a layer with the names of BERT's parameters.

    `x` is the layer's input, and `context` the result of attention; returns what `encoder_layer`
    returns.
    """
    if positions is None and uses_sublayer_kernel(config, x.dtype, x.size // x.shape[-1]):
        return _finish_in_kernels(config, params, x, context, dropout, saved)
    if positions is not None:
        x, context, dropout = (
            gather_positions(x, positions),
            gather_positions(context, positions),
            finishing_dropout(dropout, positions),
        )
    return _finish(config, params, x, context, dropout, saved)


def _finish_in_kernels(config, params, x, context, dropout, saved):
    output = functools.partial(sublayer_output, config, params, saved)
    x = output(
        dense="attention_output",
        norm="attention_layer_norm",
        names=StackNames("context", INPUTS, "attention_sum", "attention_hidden"),
        inputs=context,
        x=x,
        dropout=dropout.get("attention_output"),
    )
    with jax.named_scope("intermediate"):
        y = dense_product(x, params["intermediate"]["kernel"], fsdp_axis=0)
    y = saved.save("intermediate", y, reread=True) if saved else y
    return output(
        dense="output",
        norm="output_layer_norm",
        names=StackNames("intermediate", "attention_hidden", "sum", INPUTS),
        inputs=y,
        x=x,
        dropout=dropout.get("output"),
        bias=params["intermediate"]["bias"],
    )


def _finish(config, params, x, context, dropout, saved):
    y = _dense(params, "attention_output", context, fsdp_axis=1)
    x = add_with_dropout(x, y, dropout.get("attention_output"))
    x = _layer_norm(config, params, "attention_layer_norm", x)
    x = saved.save("attention_hidden", x) if saved else x
    y = _dense(params, "intermediate", x, fsdp_axis=0)
    y = saved.save("intermediate", y, reread=True) if saved else y
    y = _dense_after_activation(config.activation, params, y)
    x = add_with_dropout(x, y, dropout.get("output"))
    return _layer_norm(config, params, "output_layer_norm", x)


def _dense(params, name: str, x: jax.Array, fsdp_axis: int) -> jax.Array:
    with jax.named_scope(name):
        bias = params[name]["bias"].astype(x.dtype)
        return dense_product(x, params[name]["kernel"], fsdp_axis) + bias


@jax.named_scope("feed_forward")
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=0)
def _dense_after_activation(activation, params, x):
    """Recomputes the activation in the backward pass, so that only `x` is saved: half as much."""
    return _dense(params, "output", activate(activation, x), fsdp_axis=1)


def _layer_norm(config, params, name: str, x: jax.Array) -> jax.Array:
    with jax.named_scope(name):
        norm = params[name]
        return layer_norm(x, norm["scale"], norm["bias"], config.layer_norm_epsilon, x.dtype)


@jax.named_scope("attention")
def kernel_attention(
    projections: jax.Array,
    bias: jax.Array,
    sequence_ids: jax.Array,
    config: BertConfig,
    dropout: AttentionDropout | None = None,
    saved: SavedActivations | None = None,
    prepared: long_attention_kernel.Prepared | None = None,
) -> jax.Array:
    """Computes `attention` in the TPU kernel, of interleaved `projections` and their `bias`.

    With `saved`, and rows that fill whole registers, the kernel saves there what its gradient
    needs; else that is left to JAX.
    """
    _, device = mesh_and_device()
    length, head_dim = projections.shape[1], config.hidden_size // config.num_heads
    kernels = _kernels(length)
    options = {"head_dim": head_dim, "causal": config.causal}
    options["interpret"] = device.platform != "tpu"
    more_inputs = (prepared,)
    if kernels is long_attention_kernel:
        options["segments"] = segments_here(length, projections.dtype, dropout is not None)
    else:
        options["float32_blocks"] = needs_float32(device.device_kind)
        more_inputs = ()
    kernel = functools.partial(kernels.attention, **options)
    context = jax.ShapeDtypeStruct((*projections.shape[:2], config.hidden_size), projections.dtype)
    return run_attention(
        kernel,
        projections,
        bias,
        sequence_ids,
        dropout,
        saved,
        {"projections": projections, "context": context},
        more_inputs,
        tuple(P("fsdp") for _ in more_inputs),
    )


def run_attention(
    kernel: Callable,
    projections: jax.Array,
    bias: jax.Array,
    sequence_ids: jax.Array,
    dropout: AttentionDropout | None,
    saved: SavedActivations | None,
    stacks: Mapping[str, jax.ShapeDtypeStruct],
    more_inputs: tuple = (),
    more_specs: tuple = (),
) -> jax.Array:
    """Runs an attention kernel on the mesh; `more_specs` shard the last ones of its inputs.

    `stacks` are the arrays `[batch, length, ...]` of a layer that the kernel saves: one is
    "context", its result; the last axis of all belongs to the heads.
    """
    mesh, _ = mesh_and_device()
    if axes := set(mesh.auto_axes):  # The compiler does not partition kernels.
        rows, heads = P("fsdp", None, "tensor"), P("fsdp", "tensor")
        dropout_specs = AttentionDropout(heads, P(), P(), P()) if dropout else P()
        layers = P(None, *rows)
        specs = (
            rows,
            P("tensor"),
            P("fsdp"),
            dropout_specs,
            layers,
            P(),
            *more_specs,
        )
        # Unchecked: kernels do not declare over which axes their outputs vary.
        kernel = jax.shard_map(
            kernel, in_specs=specs, out_specs=(rows, layers), axis_names=axes, check_vma=False
        )
    if not saved or projections.shape[1] % LANES:  # Then the kernel pads.
        context, _ = kernel(projections, bias, sequence_ids, dropout, None, 0, *more_inputs)
        return saved.save("context", context) if saved else context
    arrays = [saved.array(name, x) for name, x in stacks.items()]
    context, arrays = kernel(
        projections, bias, sequence_ids, dropout, arrays, saved.index, *more_inputs
    )
    saved.arrays |= zip(stacks, arrays, strict=True)
    saved.values["context"] = context
    return context


def uses_sublayer_kernel(config: BertConfig, dtype, num_tokens: int) -> bool:
    """Returns whether `sublayer_output` computes the states of `num_tokens`; logs why not, once."""
    reason = why_no_sublayer_kernel(config, dtype, num_tokens)
    if reason:
        log_refusal(reason)
    return not reason


def why_no_sublayer_kernel(config: BertConfig, dtype, num_tokens: int) -> str:
    """Returns why the kernel cannot compute the outputs of sublayers; "" if it can."""
    mesh, device = mesh_and_device()
    if config.activation not in sublayer_kernel.ACTIVATIONS:
        computed = " and ".join(sublayer_kernel.ACTIVATIONS)
        return f"the kernel computes {computed}, not {config.activation}"
    if needs_float32(device.device_kind):
        return f"kernels on {device.device_kind} cannot multiply bfloat16"
    if "trial" in mesh.manual_axes:
        return "in fine-tuning, the compiler would copy what the layers save for their gradients"
    if mesh.shape.get("fsdp", 1) * mesh.shape.get("tensor", 1) > 1:
        return "it reads whole matrices, and the mesh shards them over fsdp or tensor"
    for inner in (config.hidden_size, config.intermediate_size):
        if not sublayer_kernel.block_sizes(num_tokens, inner, config.hidden_size, dtype):
            matrix = f"{inner} x {config.hidden_size} in {jnp.dtype(dtype).name}"
            blocks = "two or more blocks of 256 or 512 tokens that fit on the chip"
            return f"{num_tokens} tokens, {matrix}, do not divide into {blocks}"
    return ""


@functools.cache  # Once for each reason.
def log_refusal(reason: str) -> None:
    logging.info("Layers run without the kernel for the outputs of sublayers: %s", reason)


class StackNames(NamedTuple):
    """The names in `SavedActivations` of the arrays that `sublayer_output` reads and writes."""

    inputs: str  # Of the product.
    residual: str  # To which the product is added.
    sum: str  # Of the two, before LayerNorm.
    output: str


@jax.named_scope("sublayer")
def sublayer_output(
    config: BertConfig,
    params: dict,
    saved: SavedActivations | None,
    *,
    dense: str,
    norm: str,
    names: StackNames,
    inputs: jax.Array,
    x: jax.Array,
    dropout: HiddenDropout | None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Returns LayerNorm(x + dropout(dense layer)) for `[batch, length, hidden]` in the kernel.

    The dense layer reads `inputs`, `[batch, length, inner]`, or with a `bias` the activation of
    inputs + bias.
    `dense` and `norm` are names in `params`, `names` those in `saved`.
    """
    arrays = sublayer_kernel.SublayerParams(
        matrix=params[dense]["kernel"],
        bias=params[dense]["bias"],
        scale=params[norm]["scale"],
        shift=params[norm]["bias"],
        inner_bias=bias,
    )
    mesh, device = mesh_and_device()
    interpret = device.platform != "tpu"
    activation = None if bias is None else config.activation
    # The output of a layer is the input of the next one.
    offset = int(saved is not None and names.output == INPUTS)
    options = sublayer_kernel.Options(activation, config.layer_norm_epsilon, offset, interpret)
    kernel = functools.partial(sublayer_kernel.sublayer, options)
    if axes := set(mesh.auto_axes):  # The compiler does not partition kernels.
        specs = {"in_specs": P(), "out_specs": P(), "axis_names": axes}
        # Unchecked: kernels do not declare over which axes their outputs vary.
        kernel = jax.shard_map(kernel, **specs, check_vma=False)
    by_tokens = jax.ShapeDtypeStruct((x.size // x.shape[-1], x.shape[-1]), x.dtype)
    if not saved:
        alone = sublayer_kernel.Stacks(
            inputs=inputs[None],
            residuals=x[None],
            sums=lax.empty((1, *by_tokens.shape), x.dtype),
            outputs=lax.empty((1, *x.shape), x.dtype),
        )
        y, _, _ = kernel(alone, jnp.int32(0), dropout, inputs, x, arrays)
        return y
    stacks = sublayer_kernel.Stacks(
        inputs=saved.arrays[names.inputs],
        residuals=saved.arrays[names.residual],
        sums=saved.array(names.sum, by_tokens),
        outputs=saved.array(names.output, x),
        matrices=saved.params and saved.params[dense]["kernel"],
    )
    y, sums, outputs = kernel(stacks, saved.index, dropout, inputs, x, arrays)
    saved.arrays[names.sum] = sums
    saved.set_written(names.output, outputs, y)
    return y
