"""What a configuration would do on a described TPU pod, as plain figures.

Seconds come from the compiler's estimated cycles. They leave out the time that collectives take
over the links; `link_seconds` is the least that these take, each device sending all the while at
the data-sheet rate of all its links, and nothing else running meanwhile.
"""

import dataclasses
import itertools
import math
import pathlib
import re
from collections.abc import Iterator

from ml_collections import ConfigDict

from bert_jax import partitioning
from bert_jax.model.bert import num_params
from bert_jax.tpu import compile as tpu
from bert_jax.training import metrics
from bert_jax.training.assembly import Assembly, assemble
from bert_jax.training.settings import Phase


def report(
    config: ConfigDict,
    topology: str,
    phases: list[Phase],
    tokenizer,
    *,
    num_costliest: int = 0,
    hlo_path: pathlib.Path | None = None,
) -> dict:
    """Compiles the step of each phase for the topology and gathers what is known of it.

    The figures of each phase stand under `phases`. At the top are those of the first, but
    `hbm_parts`, `hbm_bytes_per_device` and `hbm_bytes_over` of the phase that needs most memory,
    `compile_seconds` of all together, and hours in all if all fit. `hbm_bytes_over` is by how much
    a step does not fit: what it needs beyond what the compiler grants (`tpu.Chip`), not beyond
    `hbm_capacity_bytes`. It is 0 where the step fits, and None where the compiler does not say:
    this counts as the most. `hlo_path` is where the text of the first goes. ValueError for a
    topology, mesh or batch that cannot be.
    """
    chip, devices = tpu.describe(topology)
    assembly = assemble(config, phases, tokenizer, devices)
    figures = []
    for phase in phases:
        figures.append(_of_phase(assembly, phase, chip))
        try:
            step = tpu.compile_step(assembly, phase)
        except tpu.DoesNotFit as error:
            figures[-1] |= _of_failure(error)
            continue
        figures[-1] |= _of_step(step, figures[-1], chip, devices)
        figures[-1]["costliest"] = [
            {
                "cycles": cycles,
                "runs": runs,
                "name": instruction.name,
                "shape": instruction.shape,
                "op_name": instruction.op_name,
            }
            for cycles, runs, instruction in step.cost.costliest[:num_costliest]
        ]
        if hlo_path is not None and len(figures) == 1:
            hlo_path.write_text(step.text)
    most = max(figures, key=_need)
    result = figures[0] | {
        **{name: most[name] for name in ("hbm_parts", "hbm_bytes_per_device", "hbm_bytes_over")},
        "compile_seconds": sum(phase["compile_seconds"] for phase in figures),
        "topology": topology,
        "device_kind": devices[0].device_kind,
        "num_devices": len(devices),
        "num_chips": len(devices) // chip.devices,
        "num_slices": tpu.parse_topology(topology)[-1],
        "num_params": num_params(assembly.bert),
        "clock_hz": chip.clock_hz,
        "remat": config.model.remat,
        "phases": figures,
        "fits": all(phase["fits"] for phase in figures),
    }
    if result["fits"]:
        for name in ("hours", "hours_with_links"):
            result[f"total_{name}"] = sum(phase[name] for phase in figures)
    return result


def _need(phase: dict) -> tuple[bool, float]:
    """Orders phases by the memory that they need: what does not fit, and is not told, is most."""
    needed = phase["hbm_bytes_per_device"]
    return not phase["fits"], math.inf if needed is None else needed


def _of_phase(assembly: Assembly, phase: Phase, chip: tpu.Chip) -> dict:
    """What is known before compiling."""
    shards = assembly.mesh.shape["data"] * assembly.mesh.shape["fsdp"]
    return {
        "max_seq_length": phase.rows.max_seq_length,
        "batch_size": phase.batch_size,
        "num_steps": phase.num_steps,
        "hbm_capacity_bytes": chip.hbm_bytes,
        "mesh": dict(assembly.mesh.shape),
        "per_device_batch_size": phase.batch_size // assembly.slices(phase) // shards,
        "model_flops_per_sequence": metrics.flops_per_row(
            assembly.bert, phase.rows.max_seq_length, phase.max_predictions, phase.rows.max_pairs
        ),
    }


def _of_failure(error: tpu.DoesNotFit) -> dict:
    told = error.num_bytes is not None
    unknown = (
        *("hbm_parts", "compiled_flops_per_sequence", "cycles_per_step", "cycles_per_sequence"),
        *("collective_bytes_per_step", "sequences_per_second_per_chip", "mfu"),
    )
    return dict.fromkeys(unknown) | {
        "fits": False,
        "hbm_bytes_per_device": error.num_bytes,
        "hbm_bytes_over": error.num_bytes - error.limit if told else None,
        "hbm_argument_bytes": error.argument_bytes,
        "compile_seconds": error.seconds,
    }


def _of_step(step: tpu.CompiledStep, known: dict, chip: tpu.Chip, devices) -> dict:
    cost, batch_size = step.cost, known["batch_size"]
    num_chips = len(devices) // chip.devices
    seconds = cost.total_cycles / chip.clock_hz
    link_bytes = sum(each.link_bytes for each in cost.collectives.values())
    link_seconds = link_bytes / chip.link_bytes_per_second
    rate = batch_size / seconds / num_chips
    peak = metrics.PEAK_FLOPS[devices[0].device_kind] * chip.devices
    used = sum(step.hbm.values())
    parts = {}
    for (part, direction), cycles in sorted(cost.cycles.items(), key=lambda item: -item[1]):
        parts.setdefault(part, {})[direction] = cycles
    return {
        "hbm_bytes_per_device": used,
        "hbm_parts": step.hbm,
        "hbm_bytes_over": max(used - round(chip.granted_bytes), 0),
        "fits": used <= chip.granted_bytes,
        "compiled_flops_per_sequence": cost.flops * len(devices) / batch_size,
        "cycles_per_step": cost.total_cycles,
        "cycles_per_sequence": cost.total_cycles * num_chips / batch_size,
        "cycles_by_part": parts,
        "collectives": {
            kind: {"count": each.count, "bytes": each.num_bytes}
            for kind, each in cost.collectives.items()
        },
        "collective_bytes_per_step": sum(each.num_bytes for each in cost.collectives.values()),
        "step_seconds": seconds,
        "link_seconds": link_seconds,
        "sequences_per_second_per_chip": rate,
        "mfu": known["model_flops_per_sequence"] * rate / peak,
        "hours": known["num_steps"] * seconds / 3600,
        "hours_with_links": known["num_steps"] * (seconds + link_seconds) / 3600,
        "compile_seconds": step.seconds,
        "not_estimated": cost.not_estimated,
        "loops_counted_once": cost.loops_counted_once,
    }


def changed(config: ConfigDict, changes: dict[str, int | str]) -> ConfigDict:
    """A copy of `config` with the fields `{"mesh.fsdp": 4}` set."""
    copy = ConfigDict(config.to_dict())
    copy.update_from_flattened_dict(changes)
    return copy


def advice(config: ConfigDict, topology: str, phases: list[Phase], tokenizer) -> dict | None:
    """Fields with which the step was compiled and does fit; None if nothing that was tried does."""
    tried = [config.to_dict()]
    for changes in _remedies(config, topology, phases):
        setting = changed(config, changes)
        if setting.to_dict() in tried:
            continue
        tried.append(setting.to_dict())
        try:
            if report(setting, topology, phases, tokenizer)["fits"]:
                return changes
        except ValueError:  # A mesh that cannot be, or a batch that does not divide, is no remedy.
            continue
    return None


def _remedies(config, topology, phases) -> Iterator[dict[str, int | str]]:
    """What may make a step fit: first what costs least, in the end all of it together.

    Fewer rows at once and computing layers twice leave fewer activations; dividing the optimizer's
    state, and then parameters too (`fsdp`), is for models that are too large by themselves;
    `tensor` divides what is left, the activations of one row among it.
    """
    _, devices = tpu.describe(topology)
    mesh = partitioning.make_mesh(**config.mesh, devices=devices)
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    rows = config.per_device_batch_size or max(phase.batch_size for phase in phases) // shards
    halves = [{"per_device_batch_size": rows >> power} for power in range(1, rows.bit_length())]
    full = {"model.remat": "full"}
    yield from halves
    yield full
    least = (halves[-1] if halves else {}) | full
    yield least
    yield least | {"shard_weight_update": True}
    divided = {"mesh.data": -1, "shard_weight_update": True} | least
    for fsdp, tensor in ((4, 1), (16, 1), (64, 1), (4, 2), (4, 4), (4, 8)):
        tensor *= mesh.shape["tensor"]
        if len(devices) % (fsdp * tensor) == 0:
            yield {"mesh.fsdp": fsdp, "mesh.tensor": tensor} | divided


def sweep(
    config: ConfigDict,
    topology: str,
    phases: list[Phase],
    tokenizer,
    meshes: list[str],
    remat: list[str],
) -> Iterator[dict]:
    """For each mesh ("data x fsdp x tensor") and remat policy the report, and the largest batch.

    `largest_batch` is the most rows of every phase's length that one device can take at once: a
    power of two times what the recipe gives it. None where not even that fits. A setting that
    cannot be, whose mesh does not divide the devices, a batch or an array, has no report but
    `refused`, the reason. ValueError, before anything is compiled, where none can be.
    """
    _, devices = tpu.describe(topology)
    settings = []
    for sizes, policy in itertools.product(meshes, remat):
        if not re.fullmatch(r"(-1|\d+)(x(-1|\d+)){2}", sizes):
            raise ValueError(f"mesh {sizes!r}: expected data x fsdp x tensor, as in -1x4x1")
        names = ("mesh.data", "mesh.fsdp", "mesh.tensor")
        changes = dict(zip(names, map(int, sizes.split("x")), strict=True))
        setting, reason = changed(config, changes | {"model.remat": policy}), None
        try:
            assemble(setting, phases, tokenizer, devices)
        except ValueError as error:
            reason = error
        settings.append((sizes, setting, reason))
    if settings and all(reason for _, _, reason in settings):
        raise settings[0][-1]
    for sizes, setting, reason in settings:
        row = {"sizes": sizes, "remat": setting.model.remat, "fits": False, "largest_batch": None}
        if reason:
            yield row | {"refused": str(reason)}
            continue
        row |= report(setting, topology, phases, tokenizer)
        if row["fits"]:
            row["largest_batch"] = _largest_batch(setting, topology, phases, tokenizer, row)
        yield row


def _largest_batch(config, topology, phases, tokenizer, figures) -> int:
    config = changed(config, {"per_device_batch_size": 0})
    worst = max(figures["phases"], key=lambda each: each["hbm_parts"]["activations"])
    phase = phases[figures["phases"].index(worst)]
    shards = worst["mesh"]["data"] * worst["mesh"]["fsdp"]
    free = worst["hbm_capacity_bytes"] - worst["hbm_bytes_per_device"]
    growth = 1 + free / worst["hbm_parts"]["activations"]
    # Twice that, since a part of what counts as activations does not grow with the rows.
    factor = 2 ** (int(2 * growth).bit_length() - 1)
    while factor > 1:
        rows = worst["per_device_batch_size"] * factor
        larger = dataclasses.replace(phase, batch_size=rows * shards)
        if report(config, topology, [larger], tokenizer)["fits"]:
            break
        factor //= 2
    return worst["per_device_batch_size"] * factor
