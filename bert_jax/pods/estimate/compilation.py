"""Compiles a training step ahead of time for a TPU topology.

Sets environment variables that keep JAX and libtpu from looking for a TPU, so import this module
before running any JAX computation. The compiler is in `libtpu`, which the `tpu` extra installs.
"""

import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import re

import jax
from jax.experimental import topologies
from ml_collections import ConfigDict

from bert_jax.data.batches import abstract_rows
from bert_jax.model.architecture import config_to_settings
from bert_jax.model.config import BertConfig
from bert_jax.objectives import Objective, learns_from_teacher
from bert_jax.pods.chips import CHIPS, Chip, format_shape, parse_topology
from bert_jax.sharding.mesh import batch_sharding
from bert_jax.training.pretrain_setup import PhaseSetup, PretrainSetup
from bert_jax.training.pretrain_step import make_pretrain_step
from bert_jax.training.pretrain_teacher import abstract_frozen
from bert_jax.training.state import TrainState

jax.config.update("jax_platforms", "cpu")
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # Two reports may run at the same time.
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v4-8")  # Required by libtpu, but not used.
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


@dataclasses.dataclass
class DoesNotFit(Exception):
    """The program needs more memory than the device has."""

    num_bytes: int | None  # Needed; None if the compiler does not report it.
    limit: int | None
    argument_bytes: int  # Parameters, optimizer state and rows.


def compiler_versions() -> dict[str, str]:
    """Returns the versions of libtpu, which has the compiler, and of jax."""
    return {name: importlib.metadata.version(name) for name in ("libtpu", "jax")}


def describe_topology(topology: str) -> tuple[Chip, list[jax.Device]]:
    """Returns the chip and the devices of a topology such as "v4:4x4x4". Raises ValueError.

    One chip, as notebooks offer it, is one of the smallest slice: not all versions of the compiler
    know a slice of one.
    """
    name, shape, num_slices = parse_topology(topology)
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("the TPU compiler is not installed: pip install 'jax[tpu]'")
    options = {"chip_config_name": "megacore"} if CHIPS[name].megacore else {}
    is_one = set(shape) == {1} and num_slices == 1
    compiled_shape = smallest_slice(CHIPS[name]) if is_one else format_shape(shape)
    try:
        description = topologies.get_topology_desc(
            f"{name}:{compiled_shape}", "tpu", num_slices=num_slices, **options
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        smallest = smallest_slice(CHIPS[name])
        message = f"the compiler rejects topology {topology!r}, the smallest is {name}:{smallest}"
        raise ValueError(f"{message}: {reason}") from error
    return CHIPS[name], list(description.devices)[: 1 if is_one else None]


def describe_device(chip: str) -> jax.Device:
    """Returns one device of a chip, to compile for it alone."""
    return describe_topology(f"{chip}:{smallest_slice(CHIPS[chip])}")[1][0]


def smallest_slice(chip: Chip) -> str:
    """Returns the shape of the smallest slice that all versions of the compiler accept: a host."""
    return "2x2" if chip.dimensions == 2 else "2x2x1"


def compile_step(setup: PretrainSetup, phase_setup: PhaseSetup) -> tuple[dict[str, int], str]:
    """Compiles the update step of a phase, as `compile_program` does."""
    phase = phase_setup.phase
    state = setup.abstract_state
    batch = abstract_rows(phase.train, phase.batch_size, batch_sharding(setup.mesh))
    update_step = make_pretrain_step(
        phase_setup.model,
        setup.optimizer,
        setup.shardings,
        phase_setup.objective,
        seed=setup.config.seed,
        num_microbatches=phase_setup.num_microbatches,
        overlap_collectives=setup.config.overlap_collectives,
    )
    frozen = abstract_frozen(setup)
    hbm, hlo = compile_program(update_step, state, batch, frozen)
    if frozen:  # So far it is counted with what the compiler adds.
        hbm["teacher"] = bytes_per_device(frozen)
        hbm["padding"] -= hbm["teacher"]
    return hbm, hlo


def assumed_teacher(config: ConfigDict, objective_class: type[Objective]) -> dict | None:
    """Returns the settings of the teacher that a report assumes, as it reads no weights.

    It is BERT of `config.model.size`, whose fields the student overrides; None without a teacher.
    """
    if not learns_from_teacher(objective_class):
        return None
    modules = ["encoder/embeddings", "encoder/layers", "mlm"]
    teacher = BertConfig.named(config.model.size or "base")
    return {"architecture": config_to_settings(teacher), "modules": modules}


def compile_program(update_step, state: TrainState, batch, *rest) -> tuple[dict[str, int], str]:
    """Compiles an update step; returns its memory in bytes by use, and scheduled HLO.

    All arguments are trees of ShapeDtypeStructs with shardings. "padding" is what the compiler adds
    to the arguments to fill tiles. Raises DoesNotFit.
    """
    arguments = {
        "params": bytes_per_device(state.params),
        "optimizer": bytes_per_device((state.opt_state, state.step)),
        "rows": bytes_per_device(batch),
    }
    num_bytes = sum(arguments.values())
    try:
        compiled = update_step.lower(state, batch, *rest).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        needed, limit = parse_memory_error(str(error), num_bytes)
        raise DoesNotFit(needed, limit, num_bytes) from error
    memory = compiled.memory_analysis()
    hbm = arguments | {
        "padding": memory.argument_size_in_bytes - num_bytes,
        "activations": memory.temp_size_in_bytes,
        "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
    }
    return hbm, compiled.as_text()


def bytes_per_device(tree) -> int:
    """Returns the bytes of a tree of sharded ShapeDtypeStructs on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def parse_memory_error(message: str, argument_bytes: int) -> tuple[int | None, int | None]:
    """Returns (bytes needed, bytes allowed) from the compiler's message; None if not reported.

    The compiler reports either everything that a step uses or what it uses besides its arguments.
    """
    number = r"([\d.]+)([KMGT])"
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    total = re.search(rf"Used {number} of {number} hbm", message)
    temporary = re.search(rf"temporaries \({number}\) exceeds available HBM \({number}\)", message)
    if not (match := total or temporary):
        return None, None
    needed, limit = (round(float(match[n]) * units[match[n + 1]]) for n in (1, 3))
    return needed + (0 if total else argument_bytes), limit
