"""Plans how the layers of a model run, and prepares parameters for it: the door to the fast path.

What a model computes is in its architecture's file, such as `model/bert.py`; the settings here
change only how fast and, with `dtype`, how precisely. An architecture may have a fast path, a
module that computes its layers with TPU kernels and a gradient of its own: BERT's is
`model/tpu_kernels/layer.py`. The architecture's file names it, and only this file and the estimates
in `bert_jax/pods`, which count the cycles of the kernels, use it.
"""

import dataclasses
import functools
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

import jax
from absl import logging
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax.model.architecture import architecture_of
from bert_jax.model.blocked_attention import CONTEXT
from bert_jax.model.dropout import LayerDropout
from bert_jax.sharding.rules import data_axes, path_name

CHOICES = {
    "kernels": ("auto", "plain", "tpu"),
    "remat": ("none", "dots", "full"),
    "dtype": ("float32", "bfloat16"),
}


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a model is to run, as a configuration says. Raises ValueError if invalid."""

    kernels: str = "auto"
    """Run the layers on the fast path ("tpu"; off a TPU its kernels are interpreted, for tests),
    as they are defined ("plain"), or on the fast path where there is a TPU ("auto")."""
    scan_layers: bool | None = None
    """Compile one layer and loop over it (True), or unroll all layers, without the fast path
    (False). None: unroll them on a CPU, which takes longer to compile and runs faster there, and
    loop over them elsewhere. The parameters are the same."""
    remat: str = "none"
    """What the backward pass recomputes of a layer: nothing, all but matrix products (it recomputes
    those in attention kernels), or all."""
    dtype: str = "float32"
    """Dtype of hidden states and products. Parameters, LayerNorm, softmax and loss are float32."""

    def __post_init__(self):
        for name, allowed in CHOICES.items():
            if (value := getattr(self, name)) not in allowed:
                expected = ", ".join(allowed)
                raise ValueError(f"Execution.{name} is {value!r}: expected one of {expected}")


@dataclasses.dataclass(frozen=True)
class ExecutionPlan:
    """How the encoders of a model run, on devices that are known: `plan_execution` decides.

    It is decided once, in the setup of a run or where a model is loaded, and handed to the model
    and to the step, which both follow it: all else is a function of it, and of the model config and
    the length of rows. Models without a plan follow the defaults below, on any device: layers as
    they are defined, unrolled, in float32. Hashable, so it can be static under jit.
    """

    uses_kernels: bool = False
    """Whether the layers run on the fast path, if it can compute them."""
    scans_layers: bool = False
    """Whether layers that run as they are defined are compiled once, in a loop, or unrolled."""
    remat: str = "none"
    """As in `Execution`."""
    dtype: str = "float32"
    """As in `Execution`."""
    tensor_shards: int = 1
    """Number of devices that share the heads of a layer: the size of `tensor`."""
    device_kind: str = ""
    """JAX's name of the devices, such as "TPU v4", if layers run on the fast path; "": of any."""

    def path(self, config, length: int) -> str:
        """Returns how the layers run in rows of `length`: "fast", "scan" or "unrolled"."""
        is_fast = self.uses_kernels and not self.why_not_fast(config, length)
        return "fast" if is_fast else self.plain_path(config)

    def plain_path(self, config) -> str:
        """Returns how the layers run as they are defined: "scan" or "unrolled"."""
        return "scan" if self.scans_layers and config.num_layers > 1 else "unrolled"

    def why_not_fast(self, config, length: int) -> str:
        """Returns why the fast path cannot run these layers; "" if it can."""
        path = fast_path(config)
        if path is None:
            return f"there is none for {config.architecture}"
        return path.why_unsupported(
            config, length, self.tensor_shards, self.device_kind, self.dtype
        )

    def with_remat(self, layer: Callable, in_loop: bool) -> Callable:
        """Wraps a layer so that its gradient recomputes what `remat` says."""
        if self.remat == "none":
            return layer
        policies = jax.checkpoint_policies
        saves_products = policies.save_from_both_policies(
            policies.checkpoint_dots, policies.save_only_these_names(CONTEXT)
        )
        policy = saves_products if self.remat == "dots" else None
        # In a loop, the compiler cannot undo the recomputation.
        return jax.checkpoint(layer, policy=policy, prevent_cse=not in_loop)


def plan_execution(
    execution: Execution, device: jax.Device, tensor_shards: int = 1
) -> ExecutionPlan:
    """Plans the execution on devices like `device`, `tensor_shards` of which share each layer."""
    is_wanted = execution.kernels == "tpu" or (
        execution.kernels == "auto" and device.platform == "tpu"
    )
    loops = execution.scan_layers
    if is_wanted and loops is False:
        logging.warning("Layers run without the fast path for TPUs: scan_layers is False")
        is_wanted = False
    if is_wanted and device.platform != "tpu":
        logging.warning("Kernels for TPUs are interpreted on the %s, slowly", device.platform)
    return ExecutionPlan(
        uses_kernels=is_wanted,
        scans_layers=device.platform != "cpu" if loops is None else loops,
        remat=execution.remat,
        dtype=execution.dtype,
        tensor_shards=tensor_shards,
        device_kind=device.device_kind if is_wanted else "",
    )


def log_path(plan: ExecutionPlan, config, length: int) -> None:
    """Logs whether layers run on the fast path in rows of `length`, if the plan has it."""
    if not plan.uses_kernels:
        return
    layers = f"The {config.num_layers} layers of hidden size {config.hidden_size} run"
    if reason := plan.why_not_fast(config, length):
        logging.warning("%s without the fast path for TPUs: %s", layers, reason)
    else:
        logging.info("%s on the fast path for TPUs, in rows of %d tokens", layers, length)


def fast_path(config) -> ModuleType | None:
    """Returns the module that computes the layers of an architecture faster, if it has one.

    It offers `why_unsupported`, `run_encoder_layers` and `fuse_projections`, as
    `model/tpu_kernels/layer.py` documents them.
    """
    name = getattr(architecture_of(config), "FAST_PATH", None)
    return importlib.import_module(name) if name else None


def run_fast_path(
    plan: ExecutionPlan,
    config,
    params: dict,
    x: jax.Array,
    inputs,
    dropout: LayerDropout,
    positions: jax.Array | None,
) -> jax.Array:
    """Runs all layers as `encoder.run_layers` does, on the fast path."""
    checkpoint = None
    if plan.remat != "none":
        checkpoint = functools.partial(plan.with_remat, in_loop=True)
    run = fast_path(config).run_encoder_layers
    return run(config, checkpoint, params, x, inputs, dropout, positions)


class StepParameters:
    """The parameters as one update step uses them, prepared once and not in each microbatch.

    Attributes:
      shardings: NamedShardings of the prepared parameters.
      specs: PartitionSpecs of those that layers gather over `data` themselves; P() for others,
        which are gathered before the layers run.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        encoders: Mapping[str, object],
        shardings: dict,
        length: int,
        overlaps_collectives: bool = False,
    ):
        """Lays them out for rows of `length`; `shardings` has one for each parameter.

        `encoders` has the model config of each encoder by its path, such as "encoder".
        """
        self._dtype = plan.dtype
        self._original_shardings = self.shardings = shardings
        # The path of each encoder on the fast path -> what fuses its projections.
        self._fuse_layers = {
            path: fast_path(config).fuse_projections
            for path, config in encoders.items()
            if plan.path(config, length) == "fast"
        }
        # Matrices that are fused have the same sharding.
        self.shardings = self._fuse(shardings, join=lambda first, *others: first)

        def spec(path, sharding: NamedSharding) -> P:
            axes = data_axes(sharding)
            is_gathered = overlaps_collectives and is_layer_matrix(path) and "data" in axes[1:]
            return axes if is_gathered else P()

        self.specs = jax.tree_util.tree_map_with_path(spec, self.shardings)

    def prepare(self, params: dict) -> dict:
        """Casts the matrices of layers to the dtype of products; fuses them on the fast path.

        Casting before gathering leaves less to gather of parameters that are sharded over `data`.
        Those that layers gather stay float32: layers cast their shards.
        """

        def cast(path, leaf, spec):
            return leaf.astype(self._dtype) if is_layer_matrix(path) and spec == P() else leaf

        params = jax.tree_util.tree_map_with_path(cast, self._fuse(params), self.specs)
        return jax.lax.with_sharding_constraint(params, self.shardings)

    def transpose(self, gradients: dict, params: dict) -> dict:
        """Turns gradients of the prepared parameters into gradients of `params`."""
        (gradients,) = jax.linear_transpose(self._fuse, params)(gradients)
        return jax.lax.with_sharding_constraint(gradients, self._original_shardings)

    def _fuse(self, params, **options):
        # Matrices alone: they are fused before gathering, on shards of them.
        for path, fuse in self._fuse_layers.items():
            fuse = functools.partial(fuse, leaves=("kernel",), **options)
            params = _map_at([*path.split("/"), "layers"], fuse, params)
        return params


def _map_at(path: Sequence[str], function: Callable, tree: dict) -> dict:
    """Returns nested dicts with `function` applied to the entry at `path`."""
    if not path:
        return function(tree)
    name, *rest = path
    return tree | {name: _map_at(rest, function, tree[name])}


def is_layer_matrix(path) -> bool:
    """Returns whether a JAX key path leads to the matrices of all layers."""
    return bool(re.search(r"/layers/.*kernel$", path_name(path)))
