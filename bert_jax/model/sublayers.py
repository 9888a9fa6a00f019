"""The end of a sublayer in the TPU kernel: where it runs, and what it takes and saves."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from bert_jax.model.attention import mesh_and_device
from bert_jax.model.config import BertConfig
from bert_jax.model.dropout import HiddenDropout
from bert_jax.model.kernels import attention_tpu, sublayer_tpu
from bert_jax.model.layer_loop import LayerStacks


def can_end_sublayers(config: BertConfig, num_tokens: int) -> bool:
    """Returns whether `end_sublayer` can compute hidden states of so many tokens.

    Its kernel multiplies whole matrices, and bfloat16 ones, which those of v2 and v3 do not. In
    stacked trials of fine-tuning, the compiler would copy its stacks.
    """
    mesh, device = mesh_and_device()
    if attention_tpu.needs_float32(device.device_kind) or "trial" in mesh.manual_axes:
        return False
    blocks = (
        sublayer_tpu.block_sizes(num_tokens, inner, config.hidden_size, config.dtype)
        for inner in (config.hidden_size, config.intermediate_size)
    )
    return mesh.shape.get("fsdp", 1) == mesh.shape.get("tensor", 1) == 1 and all(blocks)


@jax.named_scope("sublayer")
def end_sublayer(
    config: BertConfig,
    params: tuple[dict, dict],
    stacks: LayerStacks | None,
    names: tuple[str, str],
    inputs: jax.Array,
    x: jax.Array,
    dropout: HiddenDropout | None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Returns LayerNorm(x + dropout(product)) for `[batch, length, hidden]` in the kernel.

    The product is that of `inputs`, `[batch, length, inner]`, or with their `bias` of GELU(inputs +
    bias). `params` are those of its dense layer and of LayerNorm; `names`, in the `stacks` of a
    layer loop, those of `inputs` and of the sum before LayerNorm.
    """
    dense, norm = params
    arrays = dense["kernel"], dense["bias"], norm["scale"], norm["bias"]
    arrays += () if bias is None else (bias,)
    mesh, device = mesh_and_device()
    interpret = device.platform != "tpu"
    settings = sublayer_tpu.Settings(bias is not None, config.layer_norm_epsilon, interpret)
    kernel = functools.partial(sublayer_tpu.sublayer, settings)
    if axes := set(mesh.auto_axes):  # The compiler does not partition kernels.
        specs = {"in_specs": P(), "out_specs": P(), "axis_names": axes}
        kernel = jax.shard_map(kernel, **specs, check_vma=False)
    shape, inputs, x = x.shape, *(each.reshape(-1, each.shape[-1]) for each in (inputs, x))
    if not stacks:
        both, layer = (inputs[None], lax.empty((1, *x.shape), x.dtype)), jnp.int32(0)
        return kernel(both, layer, dropout, inputs, x, arrays)[0].reshape(shape)
    both = stacks.arrays[names[0]], stacks.array(names[1], x)
    y, stacks.arrays[names[1]] = kernel(both, stacks.index, dropout, inputs, x, arrays)
    return y.reshape(shape)
