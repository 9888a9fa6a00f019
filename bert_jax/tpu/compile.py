"""TPUs that are not there: their data sheets, and the training step compiled for a described pod.

Import it with JAX_PLATFORMS=cpu and TPU_SKIP_MDS_QUERY=1 in the environment, so that nothing looks
for a TPU. The compiler comes with `libtpu`, which the `tpu` extra installs.
"""

import dataclasses
import importlib.util
import math
import re
import time
import types

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from ml_collections import ConfigDict

from bert_jax import partitioning
from bert_jax.corpus.build import CorpusSettings
from bert_jax.model.config import BertConfig
from bert_jax.tpu.hlo_cost import Cost, step_cost
from bert_jax.training.assembly import Assembly
from bert_jax.training.settings import Phase

GIB = 2**30
# What a tokenizer of the released English vocabulary would say of itself.
UNCASED_ENGLISH = types.SimpleNamespace(
    vocab_size=BertConfig().vocab_size,
    special_ids=(0, 100, 101, 102, 103),
    mask_id=103,
    word_start=(True,) * BertConfig().vocab_size,
)


@dataclasses.dataclass(frozen=True)
class Chip:
    """Data-sheet figures of one JAX device: on v3 a core, half a chip; elsewhere a chip.

    Fields:
      clock_hz: peak bf16 FLOP/s over FLOPs a cycle, two for each cell of the matrix units.
      hbm_bytes: memory.
      granted_bytes: what the compiler says there is when a program does not fit (on v5p, more).
      link_bytes_per_second: that one device can send to its neighbours, over all links together.
      dimensions: of the torus that a topology name describes.
      devices: JAX devices on a chip.
      options: what the topology is described with; "megacore" joins the two cores of a chip.
    """

    clock_hz: float
    hbm_bytes: int
    granted_bytes: float
    link_bytes_per_second: float
    dimensions: int
    devices: int = 1
    options: tuple[tuple[str, str], ...] = ()


# Sources: Cloud TPU's system architecture pages (HBM; ICI, of which half flows in each direction),
# Jouppi et al. (2020) for the links of v3 and (2023) for those of v4. No source gives v6e's clock:
# it follows from 918 TFLOP/s and the cells of four units of 256 x 256. The compiler takes a
# product of 8192^3 to use 70 % of these (90 % of v5p's), so it is at most 2490 MHz.
MEGACORE = (("chip_config_name", "megacore"),)
CHIPS = {
    "v3": Chip(940e6, 16 * GIB, 15.48 * GIB, 4 * 656e9 / 8 / 2, dimensions=2, devices=2),
    "v4": Chip(1050e6, 32 * GIB, 30.75 * GIB, 6 * 50e9, dimensions=3, options=MEGACORE),
    "v5e": Chip(1500e6, 16 * GIB, 15.75 * GIB, 400e9 / 2, dimensions=2),
    "v5p": Chip(1750e6, 95 * GIB, 95.74 * GIB, 1200e9 / 2, dimensions=3, options=MEGACORE),
    "v6e": Chip(1750e6, 32 * GIB, 31.25 * GIB, 800e9 / 2, dimensions=2),
}


class DoesNotFit(RuntimeError):
    """The compiler found no way to stay within `limit` bytes; the step needs `num_bytes`.

    Both are None where the compiler does not tell; `argument_bytes` are known anyhow: parameters,
    optimizer and rows. It took `seconds` to find out.
    """

    def __init__(
        self, num_bytes: int | None, limit: int | None, argument_bytes: int, seconds: float
    ):
        super().__init__("the compiler ran out of device memory")
        self.num_bytes, self.limit = num_bytes, limit
        self.argument_bytes, self.seconds = argument_bytes, seconds


@dataclasses.dataclass(frozen=True)
class RowSizes:
    """What a step depends on of a corpus (`Rows`)."""

    max_seq_length: int
    max_pairs: int


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """The training step of one phase, compiled for one device of the mesh.

    Fields:
      hbm: bytes by part; what the compiler adds to the arguments to fill tiles is "padding".
      text: scheduled HLO.
      seconds: that tracing and compiling took.
    """

    hbm: dict[str, int]
    text: str
    cost: Cost
    seconds: float


def parse_topology(topology: str) -> tuple[str, list[int], int]:
    """ "v4:4x4x4:2" -> kind of chip, shape of a slice in chips, number of slices (1 if not given).

    ValueError if it is none.
    """
    expected = "expected a shape in chips after one of " + ", ".join(
        f"{name} ({'x'.join(['4'] * chip.dimensions)})" for name, chip in CHIPS.items()
    )
    found = re.fullmatch(r"(\w+):(\d+(?:x\d+)+)(?::([1-9]\d*))?", topology)
    if not found or found[1] not in CHIPS:
        raise ValueError(
            f"unknown topology {topology!r}: {expected}, as in v4:4x4x4; v4:4x4x4:2 for two slices"
        )
    name, sizes = found[1], [int(size) for size in found[2].split("x")]
    if len(sizes) != CHIPS[name].dimensions:
        raise ValueError(
            f"topology {topology!r} has {len(sizes)} dimensions, but {name} is built in "
            f"{CHIPS[name].dimensions}: {expected}"
        )
    return name, sizes, int(found[3] or 1)


def describe(topology: str) -> tuple[Chip, list[jax.Device]]:
    """The chip and the devices of a topology such as "v4:4x4x4"; ValueError if there is none."""
    name, sizes, num_slices = parse_topology(topology)
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("the TPU compiler is not installed: pip install 'jax[tpu]'")
    options = dict(CHIPS[name].options)
    if num_slices > 1:
        options["num_slices"] = num_slices
    try:
        description = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{name}:{'x'.join(map(str, sizes))}", **options
        )
    except (jax.errors.JaxRuntimeError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"the compiler refuses topology {topology!r}: {reason}") from error
    return CHIPS[name], list(description.devices)


def planned_phases(config: ConfigDict, lengths: tuple[int, int]) -> list[Phase]:
    """The phases of a run whose corpora are not at hand; rows are of these `lengths`."""
    phases, start = [], 0
    for length, each in zip(lengths, (config, config.long_phase), strict=True):
        if each.num_steps:
            rows = RowSizes(length, CorpusSettings().max_pairs_per_row)
            stop = start + each.num_steps
            phases.append(Phase(rows, None, start, stop, each.batch_size, each.max_predictions))
            start = stop
    if not phases:
        raise ValueError("num_steps is 0, and so is long_phase.num_steps: there is nothing to do")
    return phases


def compile_step(assembly: Assembly, phase: Phase) -> CompiledStep:
    """Compiles the step of the run; DoesNotFit if the compiler runs out of memory."""
    started = time.monotonic()
    state = assembly.state
    rows = abstract_rows(phase, partitioning.batch_sharding(assembly.mesh))
    try:
        compiled = assembly.update_step(phase).lower(state, rows).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        arguments = device_bytes((state, rows))
        told = memory_told(str(error), arguments)
        raise DoesNotFit(*told, arguments, time.monotonic() - started) from error
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    hbm = {
        "params": device_bytes(state.params),
        "optimizer": device_bytes((state.opt_state, state.step)),
        "rows": device_bytes(rows),
    }
    hbm["padding"] = memory.argument_size_in_bytes - sum(hbm.values())
    hbm["activations"] = memory.temp_size_in_bytes
    hbm["results"] = memory.output_size_in_bytes - memory.alias_size_in_bytes
    hbm["code"] = memory.generated_code_size_in_bytes
    return CompiledStep(hbm, text, step_cost(text), time.monotonic() - started)


def abstract_rows(phase: Phase, sharding) -> dict[str, jax.ShapeDtypeStruct]:
    """The rows of one global batch, as `data.batches` delivers them, without their values."""
    batch, pairs = phase.batch_size, phase.rows.max_pairs
    shapes = {
        "tokens": ((batch, phase.rows.max_seq_length), jnp.uint16),
        "pairs": ((batch, pairs, 3), jnp.uint16),
        "nsp_labels": ((batch, pairs), jnp.uint8),
        "row_ids": ((batch,), jnp.uint32),
        "epochs": ((batch,), jnp.uint32),
    }
    return {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for name, (shape, dtype) in shapes.items()
    }


def device_bytes(tree) -> int:
    """Bytes that one device holds of a tree of sharded ShapeDtypeStructs."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def memory_told(message: str, argument_bytes: int) -> tuple[int | None, int | None]:
    """(bytes needed, bytes there are) according to the compiler; None where it does not tell.

    It says either how much a step uses in all, or how much without its arguments.
    """
    number = r"([\d.]+)([KMGT])"
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    for pattern, missing in (
        (rf"Used {number} of {number} hbm", 0),
        (rf"temporaries \({number}\) exceeds available HBM \({number}\)", argument_bytes),
    ):
        found = re.search(pattern, message)
        if found:
            needed, limit = (round(float(found[n]) * units[found[n + 1]]) for n in (1, 3))
            return needed + missing, limit
    return None, None
