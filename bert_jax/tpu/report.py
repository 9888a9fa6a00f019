"""Estimates memory, FLOPs and time of a configuration on a TPU topology.

Times come from the compiler's estimated cycles, which leave out collectives. `collective_seconds`
is the minimum time of these: their bytes over the data-sheet bandwidth of all links of a device.
Hours "with exposed collectives" add it in full, as if no collective overlapped with computation.
"""

import dataclasses
import itertools
import math
import pathlib
import re
from collections.abc import Iterator

from ml_collections import ConfigDict

from bert_jax.model.bert import num_params
from bert_jax.tpu import compile as tpu
from bert_jax.training import throughput
from bert_jax.training.setup import Phase, PretrainSetup, setup_pretraining


def report(
    config: ConfigDict,
    topology: str,
    phases: list[Phase],
    tokenizer,
    *,
    num_costliest: int = 0,
    hlo_path: pathlib.Path | None = None,
) -> dict:
    """Compiles the step of each phase for a topology and returns its figures.

    `phases` holds the figures of each phase. The top level repeats those of the first phase, except
    that `compile_seconds` and the hours (if all phases fit) are totals, and that `hbm_parts`,
    `hbm_bytes_per_device` and `hbm_bytes_over` are those of the phase with the largest need.
    `hbm_bytes_over` is the need beyond what the compiler allows (`tpu.Chip.usable_hbm_bytes`): 0 if
    the step fits, None if the compiler does not report it, which counts as the largest need.

    Args:
      num_costliest: how many of the costliest instructions to list.
      hlo_path: file for the scheduled HLO of the first phase.

    Raises ValueError if the topology, mesh or batch is invalid.
    """
    chip, devices = tpu.describe_topology(topology)
    setup = setup_pretraining(config, phases, tokenizer, devices)
    figures = []
    for phase in phases:
        known = _phase_figures(setup, phase, chip)
        try:
            step = tpu.compile_step(setup, phase)
        except tpu.DoesNotFit as error:
            figures.append(known | _failure_figures(error))
            continue
        figures.append(known | _step_figures(step, known, chip, devices, num_costliest))
        if hlo_path is not None and phase is phases[0]:
            hlo_path.write_text(step.text)
    largest = max(figures, key=_memory_need)
    result = figures[0] | {
        **{name: largest[name] for name in ("hbm_parts", "hbm_bytes_per_device", "hbm_bytes_over")},
        "compile_seconds": sum(phase["compile_seconds"] for phase in figures),
        "topology": topology,
        "device_kind": devices[0].device_kind,
        "num_devices": len(devices),
        "num_chips": len(devices) // chip.devices_per_chip,
        "num_slices": tpu.parse_topology(topology)[-1],
        "num_params": num_params(setup.model.config),
        "clock_hz": chip.clock_hz,
        "remat": config.model.remat,
        "phases": figures,
        "fits": all(phase["fits"] for phase in figures),
    }
    if result["fits"]:
        for name in ("hours", "hours_with_exposed_collectives"):
            result[f"total_{name}"] = sum(phase[name] for phase in figures)
    return result


def _memory_need(phase: dict) -> tuple[bool, float]:
    """Sort key for phases: steps that do not fit need most, and more if by an unknown amount."""
    needed = phase["hbm_bytes_per_device"]
    return not phase["fits"], math.inf if needed is None else needed


def _phase_figures(setup: PretrainSetup, phase: Phase, chip: tpu.Chip) -> dict:
    """Returns the figures that are known before compilation."""
    shards = setup.mesh.shape["data"] * setup.mesh.shape["fsdp"]
    return {
        "max_seq_length": phase.rows.max_seq_length,
        "batch_size": phase.batch_size,
        "num_steps": phase.num_steps,
        "hbm_capacity_bytes": chip.hbm_bytes,
        "mesh": dict(setup.mesh.shape),
        "per_device_batch_size": phase.batch_size // setup.num_microbatches(phase) // shards,
        "model_flops_per_sequence": throughput.flops_per_row(
            setup.model.config,
            phase.rows.max_seq_length,
            phase.max_predictions,
            phase.rows.max_pairs,
        ),
    }


def _failure_figures(error: tpu.DoesNotFit) -> dict:
    unknown = (
        *("hbm_parts", "compiled_flops_per_sequence", "cycles_per_step", "cycles_per_sequence"),
        *("collective_bytes_per_step", "sequences_per_second_per_chip", "mfu"),
    )
    return dict.fromkeys(unknown) | {
        "fits": False,
        "hbm_bytes_per_device": error.num_bytes,
        "hbm_bytes_over": None if error.num_bytes is None else error.num_bytes - error.limit,
        "hbm_argument_bytes": error.argument_bytes,
        "compile_seconds": error.seconds,
    }


def _step_figures(step: tpu.CompiledStep, known, chip, devices, num_costliest) -> dict:
    cost, batch_size = step.cost, known["batch_size"]
    num_chips = len(devices) // chip.devices_per_chip
    seconds = cost.total_cycles / chip.clock_hz
    link_bytes = sum(each.link_bytes for each in cost.collectives.values())
    collective_seconds = link_bytes / chip.link_bytes_per_second
    exposed_seconds = seconds + collective_seconds
    rate = batch_size / seconds / num_chips
    peak = throughput.PEAK_FLOPS[devices[0].device_kind] * chip.devices_per_chip
    used = sum(step.hbm.values())
    cycles_by_part = {}
    for (part, direction), cycles in sorted(cost.cycles.items(), key=lambda item: -item[1]):
        cycles_by_part.setdefault(part, {})[direction] = cycles
    return {
        "hbm_bytes_per_device": used,
        "hbm_parts": step.hbm,
        "hbm_bytes_over": max(used - round(chip.usable_hbm_bytes), 0),
        "fits": used <= chip.usable_hbm_bytes,
        "compiled_flops_per_sequence": cost.flops * len(devices) / batch_size,
        "cycles_per_step": cost.total_cycles,
        "cycles_per_sequence": cost.total_cycles * num_chips / batch_size,
        "cycles_by_part": cycles_by_part,
        "collectives": {
            kind: {"count": each.count, "bytes": each.num_bytes}
            for kind, each in cost.collectives.items()
        },
        "collective_bytes_per_step": sum(each.num_bytes for each in cost.collectives.values()),
        "step_seconds": seconds,
        "collective_seconds": collective_seconds,
        "sequences_per_second_per_chip": rate,
        "mfu": known["model_flops_per_sequence"] * rate / peak,
        "hours": known["num_steps"] * seconds / 3600,
        "hours_with_exposed_collectives": known["num_steps"] * exposed_seconds / 3600,
        "compile_seconds": step.seconds,
        "not_estimated": cost.not_estimated,
        "loops_counted_once": cost.loops_counted_once,
        "costliest": [
            {"cycles": cycles, "runs": runs}
            | {name: getattr(instruction, name) for name in ("name", "shape", "op_name")}
            for cycles, runs, instruction in cost.costliest[:num_costliest]
        ],
    }


def with_changes(config: ConfigDict, changes: dict[str, int | str]) -> ConfigDict:
    """Returns a copy of `config` with changed fields, such as `{"mesh.fsdp": 4}`."""
    copy = ConfigDict(config.to_dict())
    copy.update_from_flattened_dict(changes)
    return copy


def find_fitting_changes(
    config: ConfigDict, topology: str, phases: list[Phase], tokenizer, failed: dict
) -> dict | None:
    """Returns changes to `config`, whose report is `failed`, with which all steps fit, or None."""
    tried = [config.to_dict()]
    for changes in _memory_savings(failed):
        changed = with_changes(config, changes)
        if changed.to_dict() in tried:
            continue
        tried.append(changed.to_dict())
        try:
            if report(changed, topology, phases, tokenizer)["fits"]:
                return changes
        except ValueError:  # An invalid mesh, or a batch that is not divisible.
            continue
    return None


def _memory_savings(failed: dict) -> Iterator[dict[str, int | str]]:
    """Yields changes that save memory, in order of cost; the last ones combine them all.

    Smaller microbatches and rematerialization reduce activations. Sharding the optimizer state
    over `data`, then the parameters over `fsdp`, is for models that are too large themselves.
    `tensor` shards what remains, including the activations of a single row.
    """
    rows = max(phase["per_device_batch_size"] for phase in failed["phases"])
    halves = [{"per_device_batch_size": rows >> power} for power in range(1, rows.bit_length())]
    remat = {"model.remat": "full"}
    yield from halves
    yield remat
    min_activations = (halves[-1] if halves else {}) | remat
    yield min_activations
    yield min_activations | {"shard_weight_update": True}
    sharded = {"mesh.data": -1, "shard_weight_update": True} | min_activations
    for fsdp, tensor in ((4, 1), (16, 1), (64, 1), (4, 2), (4, 4), (4, 8)):
        tensor *= failed["mesh"]["tensor"]
        if failed["num_devices"] % (fsdp * tensor) == 0:
            yield {"mesh.fsdp": fsdp, "mesh.tensor": tensor} | sharded


def sweep(
    config: ConfigDict,
    topology: str,
    phases: list[Phase],
    tokenizer,
    meshes: list[str],
    remat: list[str],
) -> Iterator[dict]:
    """Yields the report of each mesh ("data x fsdp x tensor") and remat policy.

    `largest_batch` is the maximum number of rows per device, for every phase's length, as a power
    of two times the configured one; None if not even that fits. An invalid mesh, which does not
    divide the devices, a batch or an array, has `error` instead of a report.

    Raises ValueError if the topology or the format of a mesh is invalid, or if all meshes are.
    """
    tpu.describe_topology(topology)  # Raises once, not for each mesh.
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
        except ValueError as error:
            errors.append(error)
            row["error"] = str(error)
        if row["fits"]:
            row["largest_batch"] = _largest_batch(changed, topology, phases, tokenizer, row)
        yield row
    if len(errors) == len(meshes) * len(remat):
        raise errors[0]


def _largest_batch(config, topology, phases, tokenizer, figures) -> int:
    config = with_changes(config, {"per_device_batch_size": 0})
    worst = max(figures["phases"], key=lambda each: each["hbm_parts"]["activations"])
    phase = phases[figures["phases"].index(worst)]
    shards = worst["mesh"]["data"] * worst["mesh"]["fsdp"]
    free = worst["hbm_capacity_bytes"] - worst["hbm_bytes_per_device"]
    growth = 1 + free / worst["hbm_parts"]["activations"]
    # Start at twice that: some of the activations do not grow with the rows.
    factor = 2 ** (int(2 * growth).bit_length() - 1)
    while factor > 1:
        rows = worst["per_device_batch_size"] * factor
        larger = dataclasses.replace(phase, batch_size=rows * shards)
        if report(config, topology, [larger], tokenizer)["fits"]:
            break
        factor //= 2
    return worst["per_device_batch_size"] * factor
