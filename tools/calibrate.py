"""Measures the training steps of this machine, relative to what the estimate says of them.

python tools/calibrate.py --config=configs/pretrain/bert_base.py --config.batch_size=128 \
    --output=v5e.json
python tools/tpu_report.py --config=configs/pretrain/bert_base.py --topology=v5e:4x4 \
    --calibration=v5e.json

Runs some updates of the first phase on all devices of one host, with the rows per device of the
run that is to be estimated: set `config.batch_size` to them times the devices here. Rows are random
tokens, so that no corpus is read. Later reports take the factor from the file (docs/tpu.md).

On a TPU the estimate is the one of tools/tpu_report.py, of the program that runs. Elsewhere it is
the step's FLOPs at the peak of the devices; that of a device which `metrics.PEAK_FLOPS` lacks is
`--peak_flops`.
"""

import datetime
import functools
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import jax
import numpy as np
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from bert_jax.configs.pretrain.fields import known_fields
from bert_jax.data.batches import abstract_rows
from bert_jax.objectives import learns_from_teacher
from bert_jax.pods.chips import CHIPS
from bert_jax.pods.estimate.hlo_cost import step_cost
from bert_jax.pods.estimate.planned import planned_phases, released_tokenizer
from bert_jax.runtime.command_line import define_config, describe_error, parse_flags
from bert_jax.sharding.mesh import batch_sharding
from bert_jax.training.metrics import PEAK_FLOPS
from bert_jax.training.phases import check_numbers
from bert_jax.training.pretrain_setup import PretrainSetup, setup_pretraining
from bert_jax.training.pretrain_step import make_pretrain_step

GROUPS = 5  # Of steps, of which each is timed as a whole: waiting for each step would slow it down.
DEVICE_KINDS = {
    "TPU v3": "v3",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}


def random_rows(setup: PretrainSetup, vocab_size: int) -> dict[str, jax.Array]:
    """Returns a global batch of rows, each of one pair of random tokens that fill it."""
    phase = setup.phases[0].phase
    shapes = abstract_rows(phase.train, phase.batch_size, batch_sharding(setup.mesh))
    length, rng = phase.train.max_seq_length, np.random.default_rng(0)
    values = {name: np.zeros(shape.shape, shape.dtype) for name, shape in shapes.items()}
    values["tokens"][:] = rng.integers(vocab_size // 2, vocab_size, values["tokens"].shape)
    values["sequence_bounds"][:, 0] = 0, length // 2, length
    for name in ("row_ids", "stream_positions"):
        values[name][:] = np.arange(phase.batch_size)
    return {name: jax.device_put(each, shapes[name].sharding) for name, each in values.items()}


def time_steps(
    update: Callable, state, rows, steps: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Returns the seconds of an update in each of at most GROUPS groups, after two others."""
    seconds = []
    for number in [2, *(len(part) for part in np.array_split(range(steps), GROUPS) if len(part))]:
        started = clock()
        for _ in range(number):
            state, results = update(state, rows)
        jax.block_until_ready(results)
        seconds.append((clock() - started) / number)
    return seconds[1:]


def estimated_seconds(
    setup: PretrainSetup, program: Callable[[], str], peak_flops: float | None
) -> tuple[float, float]:
    """Returns the estimated seconds of computation and of exposed communication of a step.

    `program` returns the scheduled HLO. Raises ValueError if nothing is known of the devices.
    """
    device = setup.mesh.devices.flat[0]
    if chip := DEVICE_KINDS.get(device.device_kind):
        cost = step_cost(program(), chip)
        seconds = cost.cycles.total() / CHIPS[chip].clock_hz
        return seconds, cost.exposed_link_bytes / CHIPS[chip].link_bytes_per_second
    peak = peak_flops or PEAK_FLOPS.get(device.device_kind)
    if peak is None:
        raise ValueError(
            f"no data sheet of a device of kind {device.device_kind!r} is known: give "
            "--peak_flops, the FLOP/s of one device"
        )
    first = setup.phases[0]
    return first.flops_per_row * first.phase.batch_size / (peak * setup.mesh.size), 0.0


def factors(seconds: list[float], computation: float, exposed: float) -> dict[str, float]:
    """Returns the median factor of `seconds` over `computation`, and the smallest and largest.

    `exposed` communication is subtracted first, because a report adds it again.
    """
    ratios = [(each - exposed) / computation for each in seconds]
    found = {"factor": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
    if found["low"] <= 0:
        raise ValueError(
            f"steps take {min(seconds):.3g} s, less than the {exposed:.3g} s of communication "
            "that the estimate has: nothing can be calibrated with it"
        )
    return found


def calibrate(
    config: ConfigDict,
    steps: int,
    length: int | None = None,
    peak_flops: float | None = None,
    devices: list[jax.Device] | None = None,
) -> dict:
    """Runs and times updates on `devices`, by default all; returns what --output holds.

    Raises ValueError as the run would.
    """
    check_numbers(config)
    phase = planned_phases(config, (length, None))[0]
    if learns_from_teacher(phase.objective_class):
        raise ValueError(
            f"config.objective={config.objective} has a teacher, whose weights are not read here: "
            "calibrate with another objective"
        )
    tokenizer = released_tokenizer(config.model)
    setup = setup_pretraining(config, [phase], tokenizer, devices)
    first, mesh = setup.phases[0], setup.mesh
    update_step = make_pretrain_step(
        first.model,
        setup.optimizer,
        setup.shardings,
        first.objective,
        seed=config.seed,
        num_microbatches=first.num_microbatches,
        overlap_collectives=config.overlap_collectives,
    )
    rows = random_rows(setup, tokenizer.vocab_size)

    @functools.cache
    def compiled():
        return update_step.lower(setup.abstract_state, rows).compile()

    computation, exposed = estimated_seconds(setup, lambda: compiled().as_text(), peak_flops)
    state = jax.jit(setup.init, out_shardings=setup.shardings)(jax.random.key(config.seed))
    seconds = time_steps(compiled(), state, rows, steps)
    kind = mesh.devices.flat[0].device_kind
    row_length = phase.train.max_seq_length
    rows_per_device = phase.batch_size // (mesh.shape["data"] * mesh.shape["fsdp"])
    return factors(seconds, computation, exposed) | {
        "chip": DEVICE_KINDS.get(kind, kind),
        "date": datetime.date.today().isoformat(),
        "estimate": "the compiler's" if kind in DEVICE_KINDS else "FLOPs at the peak",
        "estimated_seconds": computation,
        "exposed_seconds": exposed,
        "measured_seconds": statistics.median(seconds),
        "steps": steps,
        "num_devices": mesh.size,
        "tokens_per_device": rows_per_device // first.num_microbatches * row_length,
        "max_seq_length": row_length,
        "num_params": sum(leaf.size for leaf in jax.tree.leaves(setup.abstract_state.params)),
        "objective": config.objective,
        "batch_size": phase.batch_size,
    }


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    try:
        if CONFIG.value is None:
            raise ValueError("expected --config=FILE")
        if CONFIG.value.get("program") != "pretrain":
            raise ValueError("expected the configuration of a pre-training run")
        output = pathlib.Path(OUTPUT.value)
        existing = output if output.exists() else output.parent
        if output.is_dir() or not os.access(existing, os.W_OK):
            raise ValueError(f"--output={output} cannot be written: expected a writable file")
        found = calibrate(CONFIG.value, STEPS.value, LENGTH.value, PEAK.value)
        found["config"] = config_flags.get_config_filename(flags.FLAGS["config"])
    except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
        sys.exit(f"calibrate: {' '.join(describe_error(error).split())}")
    output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    logging.info("%s", found)
    print(
        f"{found['chip']}: a step takes {1e3 * found['measured_seconds']:.4g} ms, "
        f"{found['factor']:.2f} times the estimate ({found['low']:.2f} to {found['high']:.2f}); "
        f"written to {output}"
    )


if __name__ == "__main__":
    CONFIG = define_config("Configuration of a pre-training run.", known_fields)
    OUTPUT = flags.DEFINE_string("output", None, "JSON file for the factor.", required=True)
    STEPS = flags.DEFINE_integer("steps", 50, "Number of timed updates, after two others.", 1)
    LENGTH = flags.DEFINE_integer(
        "max_seq_length", None, "Row length. Default: the configuration's, or 128.", 1
    )
    PEAK = flags.DEFINE_float(
        "peak_flops", None, "FLOP/s of one device that no data sheet is known of.", 1
    )
    app.run(main, flags_parser=parse_flags)
