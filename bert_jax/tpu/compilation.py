"""Compiles a training step ahead of time for a TPU topology, and holds the chips' data sheets.

Sets environment variables that keep JAX and libtpu from looking for a TPU, so import this module
before running any JAX computation. The compiler is in `libtpu`, which the `tpu` extra installs.
"""

import dataclasses
import importlib.util
import math
import os
import re
import types

import jax
import numpy as np
from jax.experimental import topologies
from ml_collections import ConfigDict

from bert_corpus.config import CorpusConfig
from bert_jax.data.packing import row_dtype
from bert_jax.model.architecture import config_to_settings
from bert_jax.model.config import BertConfig
from bert_jax.sharding.mesh import batch_sharding
from bert_jax.training.pretrain_setup import (
    Phase,
    PretrainSetup,
    find_objective,
    plan_phase,
)
from bert_jax.training.pretrain_step import make_pretrain_step
from bert_jax.training.state import TrainState
from bert_jax.training.teacher import abstract_frozen

jax.config.update("jax_platforms", "cpu")
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # Two reports may run at the same time.
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v4-8")  # Required by libtpu, but not used.
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

GIB = 2**30
# Sizes of the released English vocabularies that differ from BERT's.
VOCAB_SIZES = {"roberta": 50265, "albert": 30000}


def released_tokenizer(family: str | None) -> types.SimpleNamespace:
    """Returns what a step reads from a tokenizer with the released English vocabulary of a family.

    None stands for BERT; all but the size is BERT's, as it changes no shape.
    """
    vocab_size = VOCAB_SIZES.get(family, BertConfig().vocab_size)
    return types.SimpleNamespace(
        vocab_size=vocab_size,
        special_ids=(0, 100, 101, 102, 103),
        mask_id=103,
        word_start=(True,) * vocab_size,
    )


UNCASED_ENGLISH = released_tokenizer("bert")


@dataclasses.dataclass(frozen=True)
class Chip:
    """Data-sheet figures of one JAX device: half a chip on v3 and tpu7x, a chip otherwise."""

    clock_hz: float  # Peak bf16 FLOP/s over FLOPs per cycle, two per cell of the matrix units.
    hbm_bytes: int
    usable_hbm_bytes: float  # What the compiler allows a program: more than hbm_bytes on v5p.
    link_bytes_per_second: float  # To the neighbors, over all links, in one direction.
    dimensions: int  # Of the torus.
    devices_per_chip: int = 1
    megacore: bool = False  # Whether the compiler joins the two cores of a chip into one device.


# Sources: Cloud TPU's system architecture pages (HBM; interconnect, half of it in each direction),
# Jouppi et al. (2020) for the links of v3 and (2023) for the links of v4. Google does not publish
# the clock of v6e and tpu7x: 1750 MHz follows from 918 TFLOP/s, and 2200 MHz from 2307 TFLOP/s per
# chip, if a device has four matrix units of 256 x 256. The two devices of a chip share its links.
CHIPS = {
    "v3": Chip(940e6, 16 * GIB, 15.48 * GIB, 4 * 656e9 / 8 / 2, dimensions=2, devices_per_chip=2),
    "v4": Chip(1050e6, 32 * GIB, 30.75 * GIB, 6 * 50e9, dimensions=3, megacore=True),
    "v5e": Chip(1500e6, 16 * GIB, 15.75 * GIB, 400e9 / 2, dimensions=2),
    "v5p": Chip(1750e6, 95 * GIB, 95.74 * GIB, 1200e9 / 2, dimensions=3, megacore=True),
    "v6e": Chip(1750e6, 32 * GIB, 31.25 * GIB, 800e9 / 2, dimensions=2),
    "tpu7x": Chip(2200e6, 96 * GIB, 94.75 * GIB, 1200e9 / 2 / 2, dimensions=3, devices_per_chip=2),
}


@dataclasses.dataclass
class DoesNotFit(Exception):
    """The program needs more memory than the device has."""

    num_bytes: int | None  # Needed; None if the compiler does not report it.
    limit: int | None
    argument_bytes: int  # Parameters, optimizer state and rows.


def parse_topology(topology: str) -> tuple[str, list[int], int]:
    """Parses "v4:4x4x4:2": chip, slice shape in chips, number of slices. Raises ValueError."""
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)+)(?::([1-9]\d*))?", topology)
    name, shape, num_slices = match.groups() if match else ("", "", None)
    sizes = [int(size) for size in shape.split("x") if size]
    if name not in CHIPS or len(sizes) != CHIPS[name].dimensions:
        examples = (f"{name}:{'x'.join('4' * chip.dimensions)}" for name, chip in CHIPS.items())
        expected = f"CHIP:SHAPE or CHIP:SHAPE:SLICES, such as {', '.join(examples)}"
        raise ValueError(f"unknown topology {topology!r}: expected {expected}")
    return name, sizes, int(num_slices or 1)


def describe_topology(topology: str) -> tuple[Chip, list[jax.Device]]:
    """Returns the chip and the devices of a topology such as "v4:4x4x4". Raises ValueError."""
    name, shape, num_slices = parse_topology(topology)
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("the TPU compiler is not installed: pip install 'jax[tpu]'")
    options = {"chip_config_name": "megacore"} if CHIPS[name].megacore else {}
    try:
        description = topologies.get_topology_desc(
            f"{name}:{'x'.join(map(str, shape))}", "tpu", num_slices=num_slices, **options
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"the compiler rejects topology {topology!r}: {reason}") from error
    return CHIPS[name], list(description.devices)


def describe_device(chip: str) -> jax.Device:
    """Returns one device of a chip, to compile for it alone."""
    shape = "2x2" if CHIPS[chip].dimensions == 2 else "2x2x1"
    return describe_topology(f"{chip}:{shape}")[1][0]


def planned_phases(config: ConfigDict, lengths: tuple[int, int]) -> list[Phase]:
    """Returns the phases of a run with rows of `lengths`, without reading corpora."""
    max_sequences = CorpusConfig().max_sequences
    short, long = (
        types.SimpleNamespace(max_seq_length=n, max_sequences=max_sequences) for n in lengths
    )
    first = plan_phase(config, False, short, None, 0)
    phases = first, plan_phase(config, True, long, None, first.stop)
    return [phase for phase in phases if phase.num_steps]


def compile_step(setup: PretrainSetup, phase: Phase) -> tuple[dict[str, int], str]:
    """Compiles the update step of a phase, as `compile_program` does."""
    state = setup.abstract_state
    batch = abstract_batch(phase, batch_sharding(setup.mesh))
    update_step = make_pretrain_step(
        setup.model,
        setup.optimizer,
        setup.shardings,
        setup.objective(phase),
        seed=setup.config.seed,
        num_microbatches=setup.num_microbatches(phase),
        overlap_collectives=setup.config.overlap_collectives,
    )
    frozen = abstract_frozen(setup, phase)
    hbm, hlo = compile_program(update_step, state, batch, frozen)
    if frozen:  # So far it is counted with what the compiler adds.
        hbm["teacher"] = bytes_per_device(frozen)
        hbm["padding"] -= hbm["teacher"]
    return hbm, hlo


def assumed_teacher(config: ConfigDict) -> dict | None:
    """Returns the settings of the teacher that a report assumes, as it reads no weights.

    It is BERT of `config.model.size`, whose fields the student overrides; None without a teacher.
    """
    if not hasattr(find_objective(config), "with_teacher"):
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


def abstract_batch(phase: Phase, sharding) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes, dtypes and shardings of a global batch from `data.batches`."""
    row = row_dtype(phase.train.max_seq_length, phase.train.max_sequences)
    fields = {name: row[name] for name in row.names}
    fields |= dict.fromkeys(("row_ids", "epochs"), np.dtype(np.uint32))
    return {
        name: jax.ShapeDtypeStruct((phase.batch_size, *field.shape), field.base, sharding=sharding)
        for name, field in fields.items()
    }


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
