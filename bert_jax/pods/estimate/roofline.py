"""Estimates the time and memory of an update step on any slice in milliseconds, without compiling.

A step takes the sum of four times on a device: the products of matrices, at the share of the peak
that a large product has; all else that layers compute, which the hidden states of a layer stand
for; the bytes of parameters, gradients and optimizer state through HBM; and what no arithmetic
hides of the bytes of gradients and parameters over the links.

One number per chip, `seconds_per_element`, is fitted to the compiled steps of
docs/log/2026-11-tpu-configurations.md, and `exposed_share` is read from them. The rest is counted,
or from data sheets. docs/tpu.md says how far it is from the compiler's estimates.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from bert_jax.configs.pretrain.fields import phases_of
from bert_jax.model.encoder import encoders_of
from bert_jax.objectives import find_objective
from bert_jax.pods.chips import CHIPS, parse_topology
from bert_jax.pods.estimate import compilation
from bert_jax.runtime.config_fields import flatten
from bert_jax.training import metrics
from bert_jax.training.phases import Phase
from bert_jax.training.pretrain_setup import setup_pretraining


class Speed(NamedTuple):
    """How fast one device is, at the clock of `CHIPS`."""

    product_share: float  # Of the peak, that a product of 8192 x 8192 matrices has when compiled.
    hbm_bytes_per_second: float  # From the data sheet.
    # For an element of the hidden states of a layer, forward and backward: all but products.
    seconds_per_element: float
    # Of communication in each layer, that arithmetic never hides; where communication takes longer
    # than arithmetic, of arithmetic, that hides none.
    exposed_share: float


# On v3 and tpu7x, a device is half a chip.
SPEEDS = {
    "v3": Speed(0.97, 900e9 / 2, 4.36e-10, 1.0),
    "v4": Speed(0.93, 1228e9, 1.41e-10, 0.2),
    "v5e": Speed(0.88, 819e9, 1.06e-10, 0.7),
    "v5p": Speed(0.90, 2765e9, 7.4e-11, 0.18),
    "v6e": Speed(0.70, 1638e9, 1.19e-10, 0.25),
    "tpu7x": Speed(0.81, 7380e9 / 2, 1.24e-10, 0.05),
}
MAX_OVERLAPPING_V5E = 16  # Chips: between more, the compiler refuses the exchange.
SPARSE_CORES = ("v5p", "v6e", "tpu7x")  # They exchange gradients beside the matrix units.
# Bytes that a layer saves for the backward pass, for each element of its hidden states.
SAVED_BYTES = {"none": 25, "dots": 18, "full": 2}
RECOMPUTED = {"none": 0.0, "dots": 0.0, "full": 1 / 3}  # Share of the FLOPs.
RECOMPUTED_ELEMENTS = {"none": 0.0, "dots": 1 / 3, "full": 1 / 3}
LOGIT_BYTES = 8  # A logit in float32, and its gradient.
MAX_MEMORY = 0.9  # Of what the compiler allows: the bytes are estimated.
FSDP_SIZES = (1, 4, 16, 64)
# A compiled step takes between estimate / 1.4 and estimate * 1.4; ModernBERT's took 1.37 times it.
ERROR = 0.4


@dataclasses.dataclass(frozen=True)
class Work:
    """What a phase of a run computes, on whatever devices.

    Attributes:
      name: that of the phase.
      batch_size, num_steps, length: of its rows.
      flops: of an update, per row.
      elements: of the hidden states of all layers, per row.
      logits: that are predicted, per row.
      num_params: of the model, with padding.
      state_bytes: of parameters and optimizer state.
    """

    name: str
    batch_size: int
    num_steps: int
    length: int
    flops: float
    elements: int
    logits: int
    num_params: int
    state_bytes: int


class Layout(NamedTuple):
    """How a run uses the devices of a slice: what changes its speed, but not its result."""

    fsdp: int
    remat: str
    sharded: bool  # `shard_weight_update`, with overlapped collectives where that helps.


class Step(NamedTuple):
    """The estimate of a step: seconds by what takes them, and the bytes on a device."""

    products: float
    elements: float
    parameters: float
    exposed: float
    hbm_bytes: float

    @property
    def computation(self) -> float:
        return self.products + self.elements + self.parameters

    @property
    def seconds(self) -> float:
        return self.computation + self.exposed


class Plan(NamedTuple):
    """A layout with its rows per device and microbatch, and the estimate of each phase's step."""

    layout: Layout
    rows: tuple[int, ...]
    steps: tuple[Step, ...]
    fits: bool


def describe_work(config: ConfigDict, phases: Sequence[Phase], tokenizer) -> list[Work]:
    """Returns the work of each phase. Raises ValueError as `setup_pretraining` does."""
    one_device = ConfigDict(config.to_dict())
    one_device.mesh.update(data=1, fsdp=1, tensor=1)
    one_device.model.scan_layers = True  # Faster to trace; the shapes are the same.
    for group in phases_of(one_device).values():
        group.per_device_batch_size = 0
    teacher = compilation.assumed_teacher(config, find_objective(config.objective))
    setup = setup_pretraining(
        one_device, list(phases), tokenizer, jax.devices("cpu")[:1], teacher_settings=teacher
    )
    params = jax.tree.leaves(setup.abstract_state.params)
    works = []
    for each in setup.phases:
        phase, encoders = each.phase, encoders_of(each.model).values()
        length = phase.train.max_seq_length
        works.append(
            Work(
                name=phase.name,
                batch_size=phase.batch_size,
                num_steps=phase.num_steps,
                length=length,
                flops=each.flops_per_row,
                elements=length * sum(part.num_layers * part.hidden_size for part in encoders),
                logits=phase.max_predictions * tokenizer.vocab_size,
                num_params=sum(leaf.size for leaf in params),
                state_bytes=compilation.bytes_per_device(setup.abstract_state),
            )
        )
    return works


def num_devices(topology: str) -> int:
    """Returns the number of JAX devices of a topology."""
    chip, shape, num_slices = parse_topology(topology)
    return math.prod(shape) * num_slices * CHIPS[chip].devices_per_chip


def device_peak(chip: str) -> float:
    """Returns the peak of one device of a chip, in FLOP/s."""
    return metrics.PEAK_FLOPS["TPU7x" if chip == "tpu7x" else f"TPU {chip}"]


def overlaps(chip: str, devices: int) -> bool:
    """Returns whether a step hides communication in each layer (`overlap_collectives`)."""
    return SPEEDS[chip].exposed_share < 1 and (chip != "v5e" or devices <= MAX_OVERLAPPING_V5E)


def bytes_sent(
    chip: str, devices: int, layout: Layout, num_microbatches: int, is_overlapped: bool
) -> float:
    """Returns what a device sends over its links in an update, per parameter of the model."""
    share = (devices - 1) / devices
    if is_overlapped:
        # Each layer gathers its matrices in bfloat16, forward and backward. Gradients are scattered
        # in float32, or in bfloat16 from all to all, which takes the links of devices between.
        dimensions = CHIPS[chip].dimensions
        detour = max(1.0, dimensions / 4 * devices ** (1 / dimensions))
        return share * (2 * 2 + (4 if chip in SPARSE_CORES else 2 * detour))
    # A reduce-scatter runs as an all-reduce, which sends everything twice; the sharded matrices are
    # gathered once. With `fsdp`, each microbatch scatters gradients, and gathers matrices twice.
    data = devices // layout.fsdp
    sent = 4 * 2 / layout.fsdp * (data - 1) / data + 2 * layout.sharded * share
    return sent + num_microbatches * (2 * 2 + 4 * 2) * (layout.fsdp - 1) / layout.fsdp


def estimate_step(work: Work, rows: int, layout: Layout, topology: str) -> Step:
    """Estimates an update step on one slice, with microbatches of `rows` per device."""
    name = parse_topology(topology)[0]
    chip, speed, devices = CHIPS[name], SPEEDS[name], num_devices(topology)
    all_rows = work.batch_size // devices
    num_microbatches = all_rows // rows
    flops = all_rows * work.flops * (1 + RECOMPUTED[layout.remat])
    products = flops / (device_peak(name) * speed.product_share)
    elements = all_rows * work.elements * (1 + RECOMPUTED_ELEMENTS[layout.remat])
    elements *= speed.seconds_per_element

    # Parameters are float32. The update reads them, two moments and the gradient, and writes three
    # of these; a microbatch reads the matrices in bfloat16 twice and writes the gradient, which it
    # adds to that of those before.
    is_sharded, accumulates = layout.sharded, num_microbatches > 1
    shards = devices if is_sharded else layout.fsdp
    moved = 7 * 4 / shards + num_microbatches * (2 * 2 + 4 + 8 * accumulates)

    is_overlapped = is_sharded and not accumulates and layout.fsdp == 1 and overlaps(name, devices)
    sent = bytes_sent(name, devices, layout, num_microbatches, is_overlapped)
    exposed = links = work.num_params * sent / chip.link_bytes_per_second
    if is_overlapped:
        hidden = (1 - speed.exposed_share) * (products + elements)
        exposed = max(speed.exposed_share * links, links - hidden)

    gradients = 0 if is_overlapped else 4 + 4 * accumulates
    saved = SAVED_BYTES[layout.remat] * work.elements + LOGIT_BYTES * work.logits
    hbm_bytes = work.state_bytes / shards + rows * saved
    hbm_bytes += work.num_params * (2 + gradients) / layout.fsdp
    parameters = work.num_params * moved / speed.hbm_bytes_per_second
    return Step(products, elements, parameters, exposed, hbm_bytes)


def possible_plans(works: Sequence[Work], topology: str) -> Iterator[Plan]:
    """Yields the ways to run on one slice, with the estimate of each.

    Rows per microbatch are the fastest of each phase that fit, or the fewest if none do. Yields
    nothing if a batch does not divide over the devices.
    """
    name, devices = parse_topology(topology)[0], num_devices(topology)
    allowed = MAX_MEMORY * CHIPS[name].usable_hbm_bytes
    if any(work.batch_size % devices for work in works):
        return
    for fsdp, remat, sharded in itertools.product(FSDP_SIZES, SAVED_BYTES, (False, True)):
        if devices % fsdp or (sharded and devices == 1):
            continue
        layout, chosen, steps = Layout(fsdp, remat, sharded), [], []
        for work in works:
            found = {
                rows: estimate_step(work, rows, layout, topology)
                for rows in halves(work.batch_size // devices)
            }
            fitting = [rows for rows in found if found[rows].hbm_bytes <= allowed]
            rows = min(fitting or [min(found)], key=lambda each: found[each].seconds)
            chosen.append(rows)
            steps.append(found[rows])
        fits = max(step.hbm_bytes for step in steps) <= allowed
        yield Plan(layout, tuple(chosen), tuple(steps), fits)


def halves(rows: int) -> list[int]:
    """Returns `rows` and its halves, down to the last that is whole."""
    return [rows >> n for n in range(rows.bit_length()) if rows % (1 << n) == 0]


def plan_changes(config: ConfigDict, works: Sequence[Work], plan: Plan, topology: str) -> dict:
    """Returns the fields of `config` that a plan sets to other values, by their dotted names."""
    layout, devices = plan.layout, num_devices(topology)
    overlapped = layout.sharded and overlaps(parse_topology(topology)[0], devices)
    fields = {
        "mesh.data": -1,
        "mesh.fsdp": layout.fsdp,
        "mesh.tensor": 1,
        "model.remat": layout.remat,
        "shard_weight_update": layout.sharded,
        "overlap_collectives": overlapped,
        "eval_batch_size": -(-config.eval_batch_size // devices) * devices,
        "per_device_batch_size": plan.rows[0],
    }
    current, previous = flatten(config), plan.rows[0]
    for work, rows in zip(works, plan.rows, strict=True):
        own = f"{work.name}.per_device_batch_size"
        if work.name and (rows != previous or current[own] is not None):
            fields[own] = rows
        previous = rows
    return {name: value for name, value in fields.items() if current[name] != value}
