"""LoRA: low-rank adapters of dense layers whose own parameters do not change (Hu et al., 2021).

An adapted layer computes x W + b + (alpha / rank) (x A) B, as `peft` does. A and B are in a tree
beside the parameters, `Lora.groups` says of which layers, and the definitions of the models know
nothing of them: `run_adapted` adds the products where a dense layer is called. So W stays one array
for a whole stack of trials, where a matrix W + (alpha / rank) A B for each would not.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from bert_jax.model.layers import Dense

_LAYERS = "encoder/layers/"


@dataclasses.dataclass(frozen=True)
class Lora:
    """Which dense layers have an adapter, and its size.

    Attributes:
      rank: the rank of the update A B (r in peft).
      alpha: A B is scaled by alpha / rank.
      groups: paths of dense layers, such as "encoder/layers/query". Those of a group, which another
        library stores as one matrix, share A, and have equal parts of the outputs of B.
    """

    rank: int
    alpha: float
    groups: tuple[tuple[str, ...], ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def dense_layers(model: nn.Module, batch: Mapping) -> set[str]:
    """Returns the paths of the dense layers that `model` calls on a batch, without computing.

    Those of a layer of the encoder are relative to it, such as "query".
    """
    found = set()

    def record(call, args, kwargs, context):
        if isinstance(context.module, Dense | nn.Dense) and context.method_name == "__call__":
            found.add("/".join(context.module.path))
        return call(*args, **kwargs)

    with nn.intercept_methods(record):
        jax.eval_shape(model.init, jax.random.key(0), batch)
    return found


def choose_layers(
    encoder: Mapping, dense: Collection[str], targets: str, fused: Sequence[Sequence[str]]
) -> tuple[tuple[str, ...], ...]:
    """Returns the groups of dense layers whose kernels have a path in which `targets` is found.

    Args:
      encoder: the parameters of the encoder that do not change.
      dense: as `dense_layers` returns it.
      targets: a regular expression; "" means all in the layers of the encoder.
      fused: groups of layers that another library stores as one matrix.

    Raises ValueError if `targets` finds none, or only some of a group.
    """
    try:
        pattern = re.compile(targets or f"^{_LAYERS}")
    except re.error as error:
        raise ValueError(
            f"config.lora.targets={targets!r}: no regular expression: {error}"
        ) from None
    paths = ["/".join(path[:-1]) for path in flatten_dict({"encoder": encoder})]
    paths = [path for path in dict.fromkeys(paths) if path.removeprefix(_LAYERS) in dense]
    chosen = [path for path in paths if pattern.search(f"{path}/kernel")]
    if not chosen:
        kernels = ", ".join(f"{path}/kernel" for path in paths) or "none"
        raise ValueError(
            f"config.lora.targets={targets!r}: it is found in no path of a dense layer's kernel: "
            f"expected part of one of {kernels}"
        )
    group_of = {path: tuple(group) for group in fused for path in group}
    groups = tuple(dict.fromkeys(group_of.get(path, (path,)) for path in chosen))
    for group in groups:
        if missing := [path for path in group if path not in chosen]:
            raise ValueError(
                f"config.lora.targets={targets!r}: it is found in {group[0]}, but not in "
                f"{missing[0]}, and transformers stores {', '.join(group)} as one matrix: expected "
                "all of them, or none"
            )
    return groups


def init_adapters(key: jax.Array, lora: Lora, encoder: Mapping) -> dict:
    """Initializes A `[..., inputs, rank]` and B `[..., rank, outputs of the group]`, in float32.

    Layers of the encoder are stacked. As in `peft`, A is uniform within 1 / sqrt(inputs), and B is
    0, so that the model computes what it computed without adapters.
    """
    kernels, adapters = flatten_dict({"encoder": encoder}, sep="/"), {}
    for number, group in enumerate(lora.groups):
        *stack, inputs, outputs = kernels[f"{group[0]}/kernel"].shape
        shape, bound = (*stack, inputs, lora.rank), inputs**-0.5
        key_of_group = jax.random.fold_in(key, number)
        adapters[f"{group[0]}/a"] = jax.random.uniform(
            key_of_group, shape, minval=-bound, maxval=bound
        )
        adapters[f"{group[0]}/b"] = jnp.zeros((*stack, lora.rank, outputs * len(group)))
    return unflatten_dict(adapters, sep="/")


def split_params(params: Mapping, pretrained: Mapping) -> tuple[dict, dict]:
    """Splits the parameters of a model into those that are trained, and those that are frozen.

    Frozen are those of the encoder that are `pretrained`; a new pooler is trained, as a head is.
    """
    trained = {name: module for name, module in params.items() if name != "encoder"}
    frozen = {name: params["encoder"][name] for name in pretrained["encoder"]}
    if new := {name: each for name, each in params["encoder"].items() if name not in frozen}:
        trained["encoder"] = new
    return trained, {"encoder": frozen}


def _join(trained: Mapping, frozen: Mapping) -> dict:
    """Returns the parameters that `split_params` split, by path."""
    encoder = frozen["encoder"] | trained.get("encoder", {})
    modules = {name: module for name, module in trained.items() if name != "lora"}
    return flatten_dict(modules | {"encoder": encoder}, sep="/")


def _parts(lora: Lora, adapters: Mapping) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Returns path of each adapted layer -> its A, and its part of B, scaled."""
    flat, parts = flatten_dict(adapters, sep="/"), {}
    for group in lora.groups:
        a, b = (flat[f"{group[0]}/{name}"] for name in ("a", "b"))
        for path, part in zip(group, jnp.split(b * lora.scale, len(group), axis=-1), strict=True):
            parts[path] = a, part
    return parts


def merge(lora: Lora, trained: Mapping, frozen: Mapping) -> dict:
    """Returns the parameters of a plain model, whose matrices are W + (alpha / rank) A B.

    `trained` has the adapters as "lora", beside what `split_params` returns.
    """
    params = _join(trained, frozen)
    for path, (a, b) in _parts(lora, trained["lora"]).items():
        params[f"{path}/kernel"] += jnp.matmul(a, b, precision="highest")
    return unflatten_dict(params, sep="/")


def run_adapted(model: nn.Module, lora: Lora, trained: Mapping, frozen: Mapping, batch, **options):
    """Applies `model` with adapters; takes what `merge` takes, and options of the model's call."""
    params = _join(trained, frozen)
    for path, (a, b) in _parts(lora, trained["lora"]).items():
        params |= {f"{path}/lora_a": a, f"{path}/lora_b": b}

    def add_product(call, args, kwargs, context):
        y, module = call(*args, **kwargs), context.module
        if not isinstance(module, Dense | nn.Dense) or context.method_name != "__call__":
            return y
        if not module.has_variable("params", "lora_a"):
            return y
        (x,) = (each.astype(y.dtype) for each in args)
        a, b = (module.get_variable("params", f"lora_{name}").astype(y.dtype) for name in "ab")
        return y + (x @ a) @ b

    with nn.intercept_methods(add_product):
        return model.apply({"params": unflatten_dict(params, sep="/")}, batch, **options)
