"""Estimates memory, FLOPs and time of a configuration on a TPU topology, for tools/tpu_report.py.

Times come from the compiler's estimated cycles, which exclude collectives. `collective_seconds`
is the minimum time of those: their bytes over the data-sheet bandwidth of all links of a device.
Hours "with exposed collectives" add `exposed_seconds`, the part of it that the schedule does not
overlap with computation.

Where the clock of a chip is not published, the times are at the slowest clock that agrees with its
peak, and `at_max_clock` has them at the fastest one.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import pathlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from absl import logging
from ml_collections import ConfigDict

from bert_jax.configs.pretrain.fields import phases_of
from bert_jax.model.config import pad_to_tiles
from bert_jax.pods.chips import CHIPS, Chip, parse_topology
from bert_jax.pods.estimate import compilation
from bert_jax.pods.estimate.hlo_cost import Cost, MissingKernelCycles, step_cost
from bert_jax.sharding.rules import path_name
from bert_jax.training import metrics
from bert_jax.training.phases import Phase
from bert_jax.training.pretrain_setup import PhaseSetup, PretrainSetup, setup_pretraining


def report(
    config: ConfigDict,
    topology: str,
    phases: list[Phase],
    tokenizer,
    *,
    num_costliest: int = 0,
    hlo_path: str | None = None,
    document_tokens: int | None = None,
) -> dict:
    """Compiles the step of each phase for a topology; returns the figures listed in docs/tpu.md.

    Lists the `num_costliest` instructions and largest collectives, and writes the scheduled HLO of
    the first phase to `hlo_path`. `document_tokens` is that of `step_cost`; where it has an
    effect, "mfu" is None. Raises ValueError if the topology, mesh or batch is invalid.
    """
    _, devices = compilation.describe_topology(topology)
    teacher = compilation.assumed_teacher(config, phases[0].objective_class)
    setup = setup_pretraining(config, phases, tokenizer, devices, teacher_settings=teacher)
    figures = []
    for phase_setup in setup.phases:
        path = hlo_path if phase_setup is setup.phases[0] else None
        figures.append(
            _phase_figures(setup, phase_setup, topology, num_costliest, path, document_tokens)
        )
    parameters = num_params(setup.model.config, setup.abstract_state.params)
    return summary(figures, topology, devices, parameters, setup.model.plan.remat)


def summary(
    figures: list[dict], topology: str, devices: Sequence[jax.Device], parameters: int, remat: str
) -> dict:
    """Returns the report of some phases, whose `figures` are those of `step_figures`."""
    chip = CHIPS[parse_topology(topology)[0]]
    # Without a figure, a step that does not fit counts as the largest.
    largest = max(
        figures, key=lambda phase: (not phase["fits"], phase["hbm_bytes_per_device"] or math.inf)
    )
    result = figures[0] | {
        **{name: largest[name] for name in ("hbm_parts", "hbm_bytes_per_device", "hbm_bytes_over")},
        "compile_seconds": sum(phase["compile_seconds"] for phase in figures),
        "topology": topology,
        "device_kind": devices[0].device_kind,
        "num_devices": len(devices),
        "num_chips": len(devices) // chip.devices_per_chip,
        "num_slices": parse_topology(topology)[-1],
        "num_params": parameters,
        "clock_hz": chip.clock_hz,
        "remat": remat,
        "phases": figures,
        "fits": all(phase["fits"] for phase in figures),
    }
    if result["fits"]:
        result |= _total_hours(figures)
        if chip.max_clock_hz:
            fastest = [phase["at_max_clock"] for phase in figures]
            result["at_max_clock"] = fastest[0] | _total_hours(fastest)
    return result


def _total_hours(figures: list[dict]) -> dict[str, float]:
    names = ("hours", "hours_with_exposed_collectives")
    return {f"total_{name}": sum(phase[name] for phase in figures) for name in names}


def _phase_figures(
    setup: PretrainSetup,
    phase_setup: PhaseSetup,
    topology,
    num_costliest,
    hlo_path,
    document_tokens,
) -> dict:
    phase = phase_setup.phase
    mesh, length = dict(list(setup.mesh.shape.items())[1:]), phase.train.max_seq_length
    rows_per_device = phase.batch_size // (mesh["data"] * mesh["fsdp"])
    figures = {
        "max_seq_length": length,
        "batch_size": phase.batch_size,
        "num_steps": phase.num_steps,
        "mesh": mesh,
        "per_device_batch_size": rows_per_device // phase_setup.num_microbatches,
        "model_flops_per_row": phase_setup.flops_per_row,
    }
    return step_figures(
        figures,
        functools.partial(compilation.compile_step, setup, phase_setup),
        topology,
        setup.mesh.devices,
        checkpoint_every=min(setup.config.checkpoint_every, phase.num_steps),
        num_costliest=num_costliest,
        hlo_path=hlo_path,
        document_tokens=document_tokens,
    )


@contextlib.contextmanager
def progress(text: str, interval: float = 5.0) -> Iterator[None]:
    """Prints `text` and the seconds so far to stderr, every `interval` seconds of the block."""
    started, is_done = time.monotonic(), threading.Event()

    def report() -> None:
        while not is_done.wait(interval):
            seconds = time.monotonic() - started
            print(f"{text}: {seconds:.0f} s", file=sys.stderr, flush=True)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


def step_figures(
    figures: dict,
    compile_step: Callable[[], tuple[dict[str, int], str]],
    topology: str,
    devices: np.ndarray,
    *,
    checkpoint_every: int,
    num_costliest: int = 0,
    hlo_path: str | None = None,
    document_tokens: int | None = None,
    **cost_options,
) -> dict:
    """Compiles a step, and returns its `figures` with those that docs/tpu.md lists.

    Args:
      figures: what is known of it: "max_seq_length", "batch_size", "num_steps", "mesh",
        "per_device_batch_size" and "model_flops_per_row".
      compile_step: returns what `compile_program` does.
      topology, devices: those of its mesh.
      checkpoint_every: steps between checkpoints.
      num_costliest, hlo_path: as in `report`.
      document_tokens, cost_options: as in `step_cost`.
    """
    chip_name, *_ = parse_topology(topology)
    chip = CHIPS[chip_name]
    figures = figures | {"hbm_capacity_bytes": chip.hbm_bytes}
    length, batch_size = figures["max_seq_length"], figures["batch_size"]
    row_flops, started = figures["model_flops_per_row"], time.monotonic()
    try:
        with progress(f"compiling rows of {length} tokens for {topology}"):
            hbm, hlo = compile_step()
    except compilation.DoesNotFit as error:
        return figures | {
            "compile_seconds": time.monotonic() - started,
            "fits": False,
            "hbm_parts": None,
            "hbm_bytes_per_device": error.num_bytes,
            "hbm_bytes_over": error.num_bytes and error.num_bytes - error.limit,
            "hbm_argument_bytes": error.argument_bytes,
        }
    compile_seconds = time.monotonic() - started
    if hlo_path:
        pathlib.Path(hlo_path).write_text(hlo, encoding="utf-8")
    cost = step_cost(hlo, chip_name, document_tokens=document_tokens, **cost_options)
    if document_tokens is not None and cost.cycles == step_cost(hlo, chip_name).cycles:
        logging.warning(
            "--document_tokens has no effect in rows of %d tokens: only the attention kernel for "
            "long rows skips what no document needs",
            length,
        )
        document_tokens = None
    num_chips = devices.size // chip.devices_per_chip
    collectives = cost.collectives.values()
    step_cycles = cost.cycles.total()
    peak = metrics.PEAK_FLOPS[devices.flat[0].device_kind] * chip.devices_per_chip
    # Documents need fewer FLOPs than `row_flops`, which are of whole rows.
    row_seconds_at_peak = row_flops / peak if document_tokens is None else None
    sizes = batch_size, figures["num_steps"], checkpoint_every
    measures = sizes, chip, num_chips, row_seconds_at_peak
    fastest = None
    if chip.max_clock_hz:
        cost_at_max = step_cost(hlo, chip_name, chip.max_clock_hz, document_tokens, **cost_options)
        fastest = _times(cost_at_max, chip.max_clock_hz, *measures)
    used = sum(hbm.values())
    cycles_by_part = {}
    for (part, direction), cycles in cost.cycles.most_common():
        cycles_by_part.setdefault(part, {})[direction] = cycles
    return (
        figures
        | {
            "compile_seconds": compile_seconds,
            "fits": used <= chip.usable_hbm_bytes,
            "hbm_parts": hbm,
            "hbm_bytes_per_device": used,
            "hbm_bytes_over": max(used - round(chip.usable_hbm_bytes), 0),
            "compiled_flops_per_row": cost.flops * devices.size / batch_size,
            "cycles_per_step": step_cycles,
            "cycles_per_row": step_cycles * num_chips / batch_size,
            "cycles_by_part": cycles_by_part,
            "collectives": cost.collectives,
            "largest_collectives": dict(
                itertools.islice(cost.largest_collectives.items(), num_costliest)
            ),
            "collective_bytes_per_step": sum(totals["bytes"] for totals in collectives),
            "checkpoint_every": checkpoint_every,
            "at_max_clock": fastest,
            "document_tokens": document_tokens,
            "without_estimate": cost.without_estimate,
            "loops_counted_once": cost.loops_counted_once,
            "costliest": [
                {"cycles": cycles, "runs": runs}
                | {name: getattr(instruction, name) for name in ("name", "shape", "op_name")}
                for cycles, runs, instruction in cost.costliest[:num_costliest]
            ],
        }
        | _times(cost, chip.clock_hz, *measures)
    )


def _times(
    cost: Cost,
    clock_hz: float,
    sizes: tuple[int, int, int],
    chip: Chip,
    num_chips: int,
    row_seconds_at_peak: float | None,
) -> dict[str, float | None]:
    """Returns the figures of a phase that depend on the clock.

    `sizes` are its batch size, number of steps, and steps between checkpoints.
    """
    batch_size, num_steps, checkpoint_every = sizes
    link_bytes = sum(totals["link_bytes"] for totals in cost.collectives.values())
    seconds = cost.cycles.total() / clock_hz
    collective_seconds, exposed_seconds = (
        num_bytes / chip.link_bytes_per_second
        for num_bytes in (link_bytes, cost.exposed_link_bytes)
    )
    rate = batch_size / seconds / num_chips
    hours = (seconds + exposed_seconds) / 3600
    return {
        "clock_hz": clock_hz,
        "computation_seconds": seconds,
        "collective_seconds": collective_seconds,
        "exposed_seconds": exposed_seconds,
        "rows_per_second_per_chip": rate,
        "mfu": None if row_seconds_at_peak is None else rate * row_seconds_at_peak,
        "chip_hours_per_checkpoint": num_chips * checkpoint_every * hours,
        "hours": num_steps * seconds / 3600,
        "hours_with_exposed_collectives": num_steps * hours,
    }


def with_changes(config: ConfigDict, changes: dict[str, int | str]) -> ConfigDict:
    """Returns a copy of `config` with changed fields, such as `{"mesh.fsdp": 4}`."""
    copy = ConfigDict(config.to_dict())
    copy.update_from_flattened_dict(changes)
    return copy


def try_smaller_steps(
    config: ConfigDict, topology: str, phases: list[Phase], tokenizer, failed: dict
) -> Iterator[tuple[dict, dict]]:
    """Yields changes of `config`, whose report is `failed`, and their reports, until one fits.

    Tries changes in order of cost; the last ones combine them all. Smaller microbatches and
    rematerialization reduce activations. Sharding over `data` splits the optimizer state, over
    `fsdp` also the parameters, and over `tensor` the activations of a row. Those that are invalid,
    such as a mesh that does not divide the devices, are left out.
    """
    rows = max(phase["per_device_batch_size"] for phase in failed["phases"])
    halves = [_set_rows_per_device(config, rows >> n) for n in range(1, rows.bit_length())]
    remat = {"model.remat": "full"}
    min_activations = (halves[-1] if halves else {}) | remat
    sharded = min_activations | {"shard_weight_update": True}
    savings = [*halves, remat, min_activations, sharded]
    for fsdp, tensor in ((4, 1), (16, 1), (64, 1), (4, 2), (4, 4), (4, 8)):
        tensor *= failed["mesh"]["tensor"]
        if failed["num_devices"] % (fsdp * tensor) == 0:
            savings.append({"mesh.fsdp": fsdp, "mesh.tensor": tensor, "mesh.data": -1} | sharded)
    tried = [config.to_dict()]
    for changes in savings:
        changed = with_changes(config, changes)
        if changed.to_dict() in tried:
            continue
        tried.append(changed.to_dict())
        try:
            found = report(changed, topology, phases, tokenizer)
        except MissingKernelCycles:
            raise
        except ValueError:  # An invalid mesh, or a batch that is not divisible.
            continue
        yield changes, found
        if found["fits"]:
            return


def _set_rows_per_device(config: ConfigDict, rows: int) -> dict[str, int]:
    """Returns the changes that set `per_device_batch_size` in all phases."""
    changes = {"per_device_batch_size": rows}
    for name, own in phases_of(config).items():
        if name and own.per_device_batch_size is not None:
            changes[f"{name}.per_device_batch_size"] = rows
    return changes


def sweep(
    config: ConfigDict, topology: str, phases: list[Phase], tokenizer, meshes: list, remat: list
) -> Iterator[dict]:
    """Yields the report of each mesh ("data x fsdp x tensor") and remat policy.

    `largest_batch` is the maximum number of rows per device that fits at every phase's length, a
    power of two times the configured one, or None. A mesh that does not divide the devices, a batch
    or an array has `error`. Raises ValueError for a malformed topology or mesh, or no valid mesh.
    """
    compilation.describe_topology(topology)  # Raises once, not for each mesh.
    for sizes in meshes:
        if not re.fullmatch(r"(-1|\d+)(x(-1|\d+)){2}", sizes):
            raise ValueError(f"mesh {sizes!r}: expected data x fsdp x tensor, as in -1x4x1")
    errors = []
    for sizes, policy in itertools.product(meshes, remat):
        data, fsdp, tensor = map(int, sizes.split("x"))
        mesh = {"mesh.data": data, "mesh.fsdp": fsdp, "mesh.tensor": tensor}
        changed = with_changes(config, mesh | {"model.remat": policy})
        row = {"sizes": sizes, "remat": policy, "fits": False, "largest_batch": None}
        try:
            row |= report(changed, topology, phases, tokenizer)
        except MissingKernelCycles:
            raise
        except ValueError as error:
            errors.append(error)
            row["error"] = str(error)
        if row["fits"]:
            row["largest_batch"] = _largest_batch(changed, topology, phases, tokenizer, row)
        yield row
    if len(errors) == len(meshes) * len(remat):
        raise errors[0]


def _largest_batch(config, topology, phases, tokenizer, figures) -> int:
    config = with_changes(config, _set_rows_per_device(config, 0))
    worst = max(figures["phases"], key=lambda phase: phase["hbm_parts"]["activations"])
    phase = phases[figures["phases"].index(worst)]
    rows, shards = worst["per_device_batch_size"], worst["mesh"]["data"] * worst["mesh"]["fsdp"]
    free = worst["hbm_capacity_bytes"] - worst["hbm_bytes_per_device"]
    growth = 1 + free / worst["hbm_parts"]["activations"]
    # Start at twice that growth: some of the activations do not grow with the rows.
    for power in range(int(2 * growth).bit_length() - 1, 0, -1):
        larger = dataclasses.replace(phase, batch_size=(rows << power) * shards)
        if report(config, topology, [larger], tokenizer)["fits"]:
            return rows << power
    return rows


def num_params(config, params: Mapping) -> int:
    """Counts the parameters of a model with this config, without vocabulary padding."""
    padding_rows = pad_to_tiles(config.vocab_size) - config.vocab_size

    def count(path, leaf) -> int:
        is_padded = re.search(r"(token_embedding/embedding|(mlm|sbo)/bias)$", path_name(path))
        return leaf.size - bool(is_padded) * padding_rows * math.prod(leaf.shape[1:])

    counts = jax.tree_util.tree_map_with_path(count, params)
    return sum(jax.tree.leaves(counts))
