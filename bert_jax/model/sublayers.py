"""The output of a sublayer in the TPU kernel: where it runs, and what it takes and saves."""

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


def uses_sublayer_kernel(config: BertConfig, num_tokens: int) -> bool:
    """Returns whether `sublayer_output` can compute the hidden states of `num_tokens` tokens.

    Matrices must be unsharded; kernels on v2 and v3 cannot multiply bfloat16. With stacked trials
    of fine-tuning, the compiler would copy the stacks of layers.
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
def sublayer_output(
    config: BertConfig,
    params: dict,
    stacks: LayerStacks | None,
    names: tuple[str, str, str, str],
    inputs: jax.Array,
    x: jax.Array,
    dropout: HiddenDropout | None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Returns LayerNorm(x + dropout(product)) for `[batch, length, hidden]` in the kernel.

    The product is that of `inputs`, `[batch, length, inner]`, or with their `bias` of GELU(inputs +
    bias). `names` are four keys: of the dense layer and LayerNorm in `params`, of `inputs` and the
    sum before LayerNorm in `stacks`.
    """
    dense, norm, inputs_name, sum_name = names
    matrix, *vectors = (params[dense][name] for name in ("kernel", "bias"))
    vectors += [params[norm][name] for name in ("scale", "bias")]
    arrays = matrix, *vectors, *[bias] * (bias is not None)
    mesh, device = mesh_and_device()
    interpret = device.platform != "tpu"
    settings = sublayer_tpu.Settings(bias is not None, config.layer_norm_epsilon, interpret)
    kernel = functools.partial(sublayer_tpu.sublayer, settings)
    if axes := set(mesh.auto_axes):  # The compiler does not partition kernels.
        specs = {"in_specs": P(), "out_specs": P(), "axis_names": axes}
        kernel = jax.shard_map(kernel, **specs, check_vma=False)
    shape, inputs, x = x.shape, *(each.reshape(-1, each.shape[-1]) for each in (inputs, x))
    if not stacks:
        alone = inputs[None], lax.empty((1, *x.shape), x.dtype), None
        return kernel(alone, jnp.int32(0), dropout, inputs, x, arrays)[0].reshape(shape)
    matrices = stacks.params and stacks.params[dense]["kernel"]
    read = stacks.arrays[inputs_name], stacks.array(sum_name, x), matrices
    y, stacks.arrays[sum_name] = kernel(read, stacks.index, dropout, inputs, x, arrays)
    return y.reshape(shape)
