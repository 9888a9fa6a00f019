"""ModernBERT's encoder layers on a TPU: a function of the parameters of `modernbert.EncoderLayer`.

They compute the same, with one product for queries, keys and values, and one for both inputs of the
gated feed-forward network, with the kernel for attention in long rows, and with control of what is
saved for the gradient. The loop runs over periods of layers: see `layer_stack.group_layers`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from bert_jax.model.dropout import (
    AttentionDropout,
    HiddenDropout,
    LayerDropout,
    add_with_dropout,
    apply_dropout,
    finishing_dropout,
)
from bert_jax.model.layer_stack import group_layers, split_by_place
from bert_jax.model.layers import (
    activate,
    dense_product,
    gather_positions,
    layer_norm_backward,
    layer_norm_forward,
)
from bert_jax.model.modernbert import (
    EncoderLayer,
    ModernBertConfig,
    SharedInputs,
    encoder_layers,
)
from bert_jax.model.tpu_kernels import gated_kernel, long_attention_kernel, sublayer_kernel
from bert_jax.model.tpu_kernels.blocks import LANES
from bert_jax.model.tpu_kernels.layer import (
    FUSED,
    PROJECTIONS,
    fuse_dense,
    interleave,
    log_refusal,
    segments_here,
)
from bert_jax.model.tpu_kernels.layer_loop import INPUTS, SavedActivations, loop_over_layers
from bert_jax.sharding.collectives import gather_data
from bert_jax.sharding.mesh import mesh_and_device

GATED = "intermediate_gate"


def fuse_projections(
    layers: dict,
    leaves: tuple[str, ...] = ("kernel", "bias"),
    join: Callable | None = None,
) -> dict:
    """Returns the parameters of layers with fused dense layers.

    Joins the `leaves` of queries, keys and values, as the attention kernel expects, and those of
    both inputs of the gated product, unless they are joined already.
    """
    layers = fuse_dense(layers, PROJECTIONS, FUSED, leaves, join or interleave)
    return fuse_dense(layers, ("intermediate", "gate"), GATED, leaves, join or _concatenate)


def _concatenate(intermediate: jax.Array, gate: jax.Array) -> jax.Array:
    return jnp.concatenate([intermediate, gate], axis=-1)


def why_unsupported(
    config: ModernBertConfig, length: int, tensor_shards: int, device_kind: str, dtype: str
) -> str:
    """Returns why these layers cannot run here in rows of `length`; "" if they can.

    `tensor_shards`, `device_kind` and `dtype` are those of `ExecutionPlan`.
    """
    del dtype  # In both, the kernels fit on the chip.
    if tensor_shards > 1:
        return "it fuses matrices whose columns the mesh shards over tensor"
    head_dim = config.hidden_size // config.num_heads
    return long_attention_kernel.why_unsupported(length, config.hidden_size, head_dim, device_kind)


def run_encoder_layers(
    config: ModernBertConfig,
    checkpoint: Callable[[Callable], Callable] | None,
    params: dict,
    x: jax.Array,
    inputs: SharedInputs,
    dropout: LayerDropout,
    positions: jax.Array | None,
) -> jax.Array:
    """Runs all layers on hidden states `[B, L, H]`; with int32 `[B, K]` positions: `[B, K, H]`.

    `params` and `dropout` are stacked over layers. `checkpoint` wraps a period of layers in
    `jax.checkpoint`; with None, a layer chooses what it saves.
    """
    local_mask = inputs.mask.with_window(config.attention_window // 2)
    segments = segments_here(x.shape[1], x.dtype, "attention" in dropout)
    prepared = (
        long_attention_kernel.prepare(inputs.mask, inputs.global_rotation, segments),
        long_attention_kernel.prepare(local_mask, inputs.local_rotation, segments),
    )
    groups = group_layers(encoder_layers(config), loops=True)
    stacks = split_by_place(config, fuse_projections(params), dropout, groups)
    for number, (group, places) in enumerate(zip(groups, stacks, strict=True)):
        run = functools.partial(_run_period, config, group.period)
        run_last = None
        if positions is not None and number == len(groups) - 1:
            run_last = functools.partial(run, at_positions=True)
        saves = checkpoint is None
        if not saves:
            run, run_last = checkpoint(run), run_last and checkpoint(run_last)
        stacked_params, stacked_dropout = ([place[n] for place in places] for n in (0, 1))
        shared = Shared(inputs, *prepared, positions)
        if group.repeats > 1:
            x = loop_over_layers(run, saves, stacked_params, x, shared, stacked_dropout, run_last)
        else:
            own, own_dropout = jax.tree.map(
                lambda leaf: jnp.squeeze(leaf, 0), (stacked_params, stacked_dropout)
            )
            x = (run_last or run)(gather_data(own, x.dtype), x, shared, own_dropout, None)
    return x


class Shared(NamedTuple):
    """What all layers read beside the hidden states, and int32 `[B, K]` positions or None."""

    inputs: SharedInputs
    prepared_global: long_attention_kernel.Prepared
    prepared_local: long_attention_kernel.Prepared
    positions: jax.Array | None


class _Saved(NamedTuple):
    """What one layer of a period saves."""

    period: SavedActivations
    place: int  # Of the layer in its period.
    is_last: bool  # In its period, whose output the loop saves.

    def name(self, name: str) -> str:
        return f"{name} {self.place}"

    def save(self, name: str, x: jax.Array, reread: bool = False) -> jax.Array:
        return self.period.save(self.name(name), x, reread)

    @property
    def output(self) -> str:
        """The name of the layer's output."""
        return INPUTS if self.is_last else self.name("output")


def _run_period(
    config: ModernBertConfig,
    layers: Sequence[EncoderLayer],
    params: Sequence[dict],
    x: jax.Array,
    shared: Shared,
    dropout: Sequence[LayerDropout],
    saved: SavedActivations | None,
    at_positions: bool = False,
) -> jax.Array:
    """Runs the layers of a period; with `at_positions`, the last one finishes only these."""
    for place, (layer, own, own_dropout) in enumerate(zip(layers, params, dropout, strict=True)):
        own_saved = saved and _Saved(saved, place, is_last=place == len(layers) - 1)
        own_positions = shared.positions if at_positions and place == len(layers) - 1 else None
        x = encoder_layer(config, layer, own, x, shared, own_dropout, own_saved, own_positions)
    return x


@jax.named_scope("layer")  # So that the names of its parts are whole in profiles.
def encoder_layer(
    config: ModernBertConfig,
    layer: EncoderLayer,
    params: dict,
    x: jax.Array,
    shared: Shared,
    dropout: LayerDropout,
    saved: _Saved | None = None,
    positions: jax.Array | None = None,
) -> jax.Array:
    """Computes `layer` with the parameters of `fuse_projections`.

    Returns `[B, L, H]`; at int32 `[B, K]` positions, `[B, K, H]`.
    """
    with jax.named_scope(FUSED):
        attention_norm = params["attention_norm"] if layer.has_attention_norm else None
        matrix = params[FUSED]["kernel"]
        projections = _normalized_product(config.layer_norm_epsilon, x, attention_norm, matrix)
    context = _attention(config, layer, params, projections, shared, dropout, saved)
    if positions is not None:
        x, context, dropout = (
            gather_positions(x, positions),
            gather_positions(context, positions),
            finishing_dropout(dropout, positions),
        )
    with jax.named_scope("attention_output"):
        y = dense_product(context, params["attention_output"]["kernel"], fsdp_axis=1)
        y = _add_bias(y, params["attention_output"])
        x = add_with_dropout(x, y, dropout.get("attention_output"))
    in_kernel = positions is None and uses_gated_kernel(
        config, x.dtype, x.size // x.shape[-1], "feed_forward" in dropout
    )
    x = saved.save("hidden", x, reread=in_kernel) if saved else x
    with jax.named_scope("intermediate"):
        matrix = params[GATED]["kernel"]
        norm = params["feed_forward_norm"]
        y = _normalized_product(config.layer_norm_epsilon, x, norm, matrix)
    y = saved.save("intermediate", y, reread=True) if saved else y
    if in_kernel:
        return _output_in_kernel(config, params["output"]["kernel"], y, x, saved)
    x = x + _gated_output(config.activation, params, y, dropout.get("feed_forward"))
    # The loop saves the output of a period.
    return saved.save("output", x) if saved and not saved.is_last else x


def _normalized_product(epsilon: float, x: jax.Array, norm: dict | None, matrix: jax.Array):
    """Multiplies LayerNorm of `x`, or without `norm` `x` itself, with a matrix."""
    if norm is None:
        return dense_product(x, matrix, fsdp_axis=0)
    bias = norm.get("bias", jnp.zeros(x.shape[-1:]))
    return _product_of_norm(epsilon, x, norm["scale"], bias, matrix)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product_of_norm(epsilon, x, scale, bias, matrix):
    return _product_of_norm_forward(epsilon, x, scale, bias, matrix)[0]


def _product_of_norm_forward(epsilon, x, scale, bias, matrix):
    """Saves no result of LayerNorm, but its mean and 1 / std, which are small."""
    with jax.named_scope("layer_norm"):
        normalized, statistics = layer_norm_forward(x, scale, bias, epsilon, x.dtype)
    return dense_product(normalized, matrix, fsdp_axis=0), (statistics, bias, matrix)


def _product_of_norm_backward(epsilon, residuals, dy):
    statistics, bias, matrix = residuals
    x, scale, mean, inverse_std = statistics
    with jax.named_scope("layer_norm"):
        normalized = (x.astype(jnp.float32) - mean) * (inverse_std * scale) + bias
    product = functools.partial(dense_product, fsdp_axis=0)
    _, backward = jax.vjp(product, normalized.astype(x.dtype), matrix)
    dnormalized, dmatrix = backward(dy)
    with jax.named_scope("layer_norm"):
        dx, dscale, dbias = layer_norm_backward(epsilon, x.dtype, statistics, dnormalized)
    return dx, dscale, dbias, dmatrix


_product_of_norm.defvjp(_product_of_norm_forward, _product_of_norm_backward)


@jax.named_scope("feed_forward")
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=0)
def _gated_output(
    activation: str, params: dict, y: jax.Array, dropout: HiddenDropout | None
) -> jax.Array:
    """Computes what follows the product of both inputs, `[..., 2 * inner]`; saves only that."""
    y = _add_bias(y, params[GATED])
    intermediate, gate = jnp.split(y, 2, axis=-1)
    y = apply_dropout(activate(activation, intermediate) * gate, dropout)
    return _add_bias(dense_product(y, params["output"]["kernel"], fsdp_axis=1), params["output"])


def uses_gated_kernel(config: ModernBertConfig, dtype, num_tokens: int, has_dropout: bool) -> bool:
    """Returns whether the kernel computes the outputs of layers; logs why not, once."""
    reason = why_no_gated_kernel(config, dtype, num_tokens, has_dropout)
    if reason:
        log_refusal(reason)
    return not reason


def why_no_gated_kernel(config: ModernBertConfig, dtype, num_tokens: int, has_dropout: bool) -> str:
    """Returns why the kernel cannot compute the outputs of layers; "" if it can."""
    mesh, _ = mesh_and_device()
    if config.activation not in sublayer_kernel.ACTIVATIONS:
        computed = " and ".join(sublayer_kernel.ACTIVATIONS)
        return f"the kernel computes {computed}, not {config.activation}"
    if config.feed_forward_bias or has_dropout:
        return "it adds no bias, and drops nothing, in feed-forward layers"
    if "trial" in mesh.manual_axes:
        return "in fine-tuning, the compiler would copy what the layers save for their gradients"
    if mesh.shape.get("fsdp", 1) > 1:
        return "it reads whole matrices, and the mesh shards them over fsdp"
    inner, hidden = config.intermediate_size, config.hidden_size
    if not gated_kernel.block_size(num_tokens, inner, hidden, dtype):
        matrix = f"{inner} x {hidden} in {jnp.dtype(dtype).name}"
        return f"{num_tokens} tokens, {matrix}, do not divide into blocks that fit on the chip"
    return ""


@jax.named_scope("gated_output")
def _output_in_kernel(
    config: ModernBertConfig, matrix: jax.Array, y: jax.Array, x: jax.Array, saved: _Saved | None
) -> jax.Array:
    """Returns `x` and the output of the gated network for `y`, `[..., 2 * inner]`."""
    mesh, device = mesh_and_device()
    # The output of a period is the input of the next one.
    offset = int(saved is not None and saved.is_last)
    options = gated_kernel.Options(config.activation, offset, device.platform != "tpu")
    kernel = functools.partial(gated_kernel.gated_output, options)
    if axes := set(mesh.auto_axes):  # The compiler does not partition kernels.
        specs = {"in_specs": P(), "out_specs": P(), "axis_names": axes}
        # Unchecked: kernels do not declare over which axes their outputs vary.
        kernel = jax.shard_map(kernel, **specs, check_vma=False)
    if not saved:
        alone = gated_kernel.Stacks(y[None], x[None], lax.empty((1, *x.shape), x.dtype))
        return kernel(alone, jnp.int32(0), y, x, matrix)[0]
    stacks = gated_kernel.Stacks(
        inputs=saved.period.arrays[saved.name("intermediate")],
        residuals=saved.period.arrays[saved.name("hidden")],
        outputs=saved.period.array(saved.output, x),
    )
    output, outputs = kernel(stacks, saved.period.index, y, x, matrix)
    saved.period.set_written(saved.output, outputs, output)
    return output


def _add_bias(x: jax.Array, params: dict) -> jax.Array:
    return x + params["bias"].astype(x.dtype) if "bias" in params else x


@jax.named_scope("attention")
def _attention(
    config: ModernBertConfig,
    layer: EncoderLayer,
    params: dict,
    projections: jax.Array,
    shared: Shared,
    dropout: LayerDropout,
    saved: _Saved | None,
) -> jax.Array:
    """Computes attention in the TPU kernel, which saves there what its gradient needs."""
    mesh, device = mesh_and_device()
    kernel = functools.partial(
        long_attention_kernel.long_attention_in_stack,
        head_dim=config.hidden_size // config.num_heads,
        segments=segments_here(projections.shape[1], projections.dtype, "attention" in dropout),
        interpret=device.platform != "tpu",
    )
    if axes := set(mesh.auto_axes):  # The compiler does not partition kernels.
        rows, layers = P("fsdp"), P(None, "fsdp")
        dropout_specs = AttentionDropout(rows, P(), P(), P()) if "attention" in dropout else P()
        specs = layers, P(), rows, P(), rows, dropout_specs, rows, rows
        # Unchecked: kernels do not declare over which axes their outputs vary.
        kernel = jax.shard_map(
            kernel, in_specs=specs, out_specs=(rows, layers), axis_names=axes, check_vma=False
        )
    mask, rotation = shared.inputs.mask, shared.inputs.global_rotation
    prepared = shared.prepared_global
    if not layer.is_global:
        mask = mask.with_window(config.attention_window // 2)
        rotation, prepared = shared.inputs.local_rotation, shared.prepared_local
    arrays, index = None, 0
    is_saved = saved is not None and projections.shape[1] % LANES == 0  # Else the kernel pads.
    if is_saved:
        shape = *projections.shape[:2], config.hidden_size
        context = jax.ShapeDtypeStruct(shape, projections.dtype)
        names = saved.name("projections"), saved.name("context")
        arrays = [
            saved.period.array(name, x)
            for name, x in zip(names, (projections, context), strict=True)
        ]
        index = saved.period.index
    bias = params[FUSED].get("bias")
    context, arrays = kernel(
        arrays, index, projections, bias, mask, dropout.get("attention"), rotation, prepared
    )
    if is_saved:
        saved.period.arrays |= zip(names, arrays, strict=True)
        saved.period.values[names[1]] = context
    elif saved:
        context = saved.save("context", context)
    return context
