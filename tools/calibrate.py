"""Measures the training steps of this machine, relative to what the estimate says of them.

python tools/calibrate.py --config=configs/pretrain/bert_base.py --config.batch_size=128 \
    --output=v5e.json
python tools/tpu_report.py --config=configs/pretrain/bert_base.py --topology=v5e:4x4 \
    --calibration=v5e.json

Runs some updates of each phase on all devices of one host, with the rows per device of the run that
is to be estimated: set `config.batch_size` to them times the number of devices. Rows are random
tokens. Later reports take the factor from the file (docs/tpu.md).

On a TPU the estimate is the one of tools/tpu_report.py, of the program that runs. Elsewhere it is
the step's FLOPs at the peak of the devices, which is `--peak_flops` where `metrics.PEAK_FLOPS` has
none.
"""

import datetime
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
from bert_jax.pods.estimate.planned import plan_run
from bert_jax.runtime.command_line import define_config, describe_error, parse_flags
from bert_jax.sharding.mesh import batch_sharding
from bert_jax.training.metrics import PEAK_FLOPS
from bert_jax.training.phases import Phase
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


def random_rows(setup: PretrainSetup, phase: Phase, vocab_size: int) -> dict[str, jax.Array]:
    """Returns a global batch of a phase: rows filled by one pair of sentences of random tokens."""
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
    """Returns the seconds of an update in each of at most GROUPS groups, after two warm-up ones."""
    seconds = []
    for number in [2, *(len(part) for part in np.array_split(range(steps), GROUPS) if len(part))]:
        started = clock()
        for _ in range(number):
            state, results = update(state, rows)
        jax.block_until_ready(results)
        seconds.append((clock() - started) / number)
    return seconds[1:]


def estimated_seconds(
    device_kind: str, num_devices: int, flops: float, program: Callable[[], str], peak: float | None
) -> tuple[float, float]:
    """Returns the estimated seconds of computation and of exposed communication of a step.

    `flops` are those of the model, `program` returns the scheduled HLO, and `peak` is that of a
    device, in FLOP/s. Raises ValueError if the estimate is not complete.
    """
    if chip := DEVICE_KINDS.get(device_kind):
        if peak is not None:
            raise ValueError(f"--peak_flops has no effect on a {chip}, whose cycles are estimated")
        cost = step_cost(program(), chip)
        if cost.loops_counted_once or "tpu_custom_call" in cost.without_estimate:
            raise ValueError(
                "the program has kernels or loops without an estimate: "
                f"{cost.loops_counted_once or 'custom calls'}; nothing can be calibrated with it"
            )
        seconds = cost.cycles.total() / CHIPS[chip].clock_hz
        return seconds, cost.exposed_link_bytes / CHIPS[chip].link_bytes_per_second
    peak = peak or PEAK_FLOPS.get(device_kind)
    if peak is None:
        raise ValueError(
            f"no data sheet of a device of kind {device_kind!r} is known: give --peak_flops, the "
            "FLOP/s of one device"
        )
    return flops / (peak * num_devices), 0.0


def ratios_of(seconds: list[float], computation: float, exposed: float) -> list[float]:
    """Returns measured over estimated `computation` for each of `seconds`. Raises ValueError.

    `exposed` communication is subtracted first, because a report adds it again.
    """
    if not computation or min(seconds) <= exposed:
        raise ValueError(
            f"steps take {min(seconds):.3g} s, but the estimate has {computation:.3g} s of "
            f"computation and {exposed:.3g} s of communication: nothing can be calibrated with it"
        )
    return [(each - exposed) / computation for each in seconds]


def spread(ratios: list[float]) -> dict[str, float]:
    """Returns the median, the smallest and the largest ratio."""
    return {"factor": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}


def calibrate(
    config: ConfigDict,
    steps: int,
    lengths: tuple[int | None, int | None] = (None, None),
    peak_flops: float | None = None,
    devices: list[jax.Device] | None = None,
) -> dict:
    """Runs and times updates of each phase on `devices`, by default all; returns the factor.

    `lengths` are those of `planned_phases`. The result is what --output holds: `phases` has what
    was measured of each. Raises ValueError as the run would.
    """
    phases, tokenizer = plan_run(config, lengths)
    for phase in phases:
        if learns_from_teacher(phase.objective_class):
            raise ValueError(
                f"config.objective={config.objective} has a teacher, whose weights are not read "
                "here: calibrate with another objective"
            )
    setup = setup_pretraining(config, phases, tokenizer, devices)
    init = jax.jit(setup.init, out_shardings=setup.shardings)
    mesh, kind = setup.mesh, setup.mesh.devices.flat[0].device_kind
    num_params = sum(leaf.size for leaf in jax.tree.leaves(setup.abstract_state.params))
    ratios, measured = [], []
    for each in setup.phases:
        phase = each.phase
        update_step = make_pretrain_step(
            each.model,
            setup.optimizer,
            setup.shardings,
            each.objective,
            seed=config.seed,
            num_microbatches=each.num_microbatches,
            overlap_collectives=config.overlap_collectives,
        )
        rows = random_rows(setup, phase, tokenizer.vocab_size)
        compiled = update_step.lower(setup.abstract_state, rows).compile()
        flops = each.flops_per_row * phase.batch_size
        computation, exposed = estimated_seconds(
            kind, mesh.size, flops, compiled.as_text, peak_flops
        )
        seconds = time_steps(compiled, init(jax.random.key(config.seed)), rows, steps)
        own = ratios_of(seconds, computation, exposed)
        ratios += own
        length = phase.train.max_seq_length
        rows_per_device = phase.batch_size // (mesh.shape["data"] * mesh.shape["fsdp"])
        measured.append(
            {
                "max_seq_length": length,
                "tokens_per_device": rows_per_device // each.num_microbatches * length,
                "num_params": num_params,
                "batch_size": phase.batch_size,
                "estimated_seconds": computation,
                "exposed_seconds": exposed,
                "measured_seconds": statistics.median(seconds),
            }
            | spread(own)
        )
    return spread(ratios) | {
        "chip": DEVICE_KINDS.get(kind, kind),
        "date": datetime.date.today().isoformat(),
        "estimate": "the compiler's" if kind in DEVICE_KINDS else "FLOPs at the peak",
        "steps": steps,
        "num_devices": mesh.size,
        "objective": config.objective,
        "jax": jax.__version__,
        "phases": measured,
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
        lengths = LENGTH.value, LONG_LENGTH.value
        found = calibrate(CONFIG.value, STEPS.value, lengths, PEAK.value)
        found["config"] = config_flags.get_config_filename(flags.FLAGS["config"])
    except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
        sys.exit(f"calibrate: {' '.join(describe_error(error).split())}")
    output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    logging.info("%s", found)
    for phase in found["phases"]:
        print(
            f"rows of {phase['max_seq_length']} tokens: a step takes "
            f"{1e3 * phase['measured_seconds']:.4g} ms, {phase['factor']:.2f} times the estimate"
        )
    print(
        f"{found['chip']}: {found['factor']:.2f} times the estimate ({found['low']:.2f} to "
        f"{found['high']:.2f}); written to {output}"
    )


if __name__ == "__main__":
    CONFIG = define_config("Configuration of a pre-training run.", known_fields)
    OUTPUT = flags.DEFINE_string("output", None, "JSON file for the factor.", required=True)
    STEPS = flags.DEFINE_integer(
        "steps", 50, "Number of timed updates of each phase, after two of warm-up.", 1
    )
    LENGTH = flags.DEFINE_integer(
        "max_seq_length",
        None,
        "Row length of the first phase, if no corpus is given. Default: the configuration's, or "
        "128.",
        1,
    )
    LONG_LENGTH = flags.DEFINE_integer(
        "long_max_seq_length",
        None,
        "Row length of later phases, if no corpus is given. Default: the configuration's, or 512.",
        1,
    )
    PEAK = flags.DEFINE_float(
        "peak_flops",
        None,
        "Peak FLOP/s of one device. Not for TPUs; needed where it is unknown.",
        1,
    )
    app.run(main, flags_parser=parse_flags)
