"""Estimates memory, FLOPs and training time of a configuration on a TPU pod, without a TPU.

Compiles the real training step for a TPU topology with the TPU compiler (`libtpu`, installed by
`pip install 'jax[tpu]'`) and reports the compiler's figures.

python tools/tpu_report.py --config=configs/pretrain/pod_large.py:v4 --json=report.json
python tools/tpu_report.py --config=configs/pretrain/bert_large.py --topology=v4:4x4x4 --sweep
python tools/tpu_report.py --config=configs/sweeps/paper.py:glue:mrpc --topology=v4:2x2x4
python tools/tpu_report.py --all --markdown=docs/tpu.md

For a fine-tuning run or a sweep it compares stacks of trials on one chip and on all.
"""

import importlib
import json
import os
import pathlib
import sys

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict

from bert_jax.model.execution import CHOICES
from bert_jax.runtime.command_line import define_config, parse_flags
from bert_jax.tpu import compilation, pod_report, stack_report
from bert_jax.training import setup

CONFIG = define_config("Configuration of a pre-training run, a fine-tuning run or a sweep.")
TOPOLOGY = flags.DEFINE_string(
    "topology", None, "TPU topology to compile for, such as v4:4x4x4. Default: config.topology."
)
PHASES = flags.DEFINE_enum("phases", "all", ["all", "first", "last"], "Phases to compile.")
LENGTH = flags.DEFINE_integer(
    "max_seq_length", 128, "Row length of the first phase, if no corpus is given."
)
LONG_LENGTH = flags.DEFINE_integer(
    "long_max_seq_length", 512, "Row length of the long phase, if no corpus is given."
)
PRICE = flags.DEFINE_float(
    "price_per_chip_hour", None, "Price of one chip for an hour, in any currency.", 0
)
JSON = flags.DEFINE_string("json", None, "JSON file for the full report.")
DUMP_HLO = flags.DEFINE_string("dump_hlo", None, "File for the scheduled HLO of the first phase.")
COSTLIEST = flags.DEFINE_integer(
    "costliest", 0, "Number of costliest instructions and largest collectives to list.", 0
)
ADVISE = flags.DEFINE_bool("advise", True, "If a step does not fit, find a variant that does.")
SWEEP = flags.DEFINE_bool(
    "sweep", False, "Compare meshes and remat policies, and find their maximum batch sizes."
)
MESHES = flags.DEFINE_list(
    "sweep_meshes", ["-1x1x1", "-1x4x1"], "Meshes to compare, each as data x fsdp x tensor."
)
REMAT = flags.DEFINE_list("sweep_remat", list(CHOICES["remat"]), "Remat policies to compare.")
ALL = flags.DEFINE_bool("all", False, "Report every pod configuration, in one table.")
MARKDOWN = flags.DEFINE_string("markdown", None, "Markdown file to write the table of --all to.")

PODS = [f"pod_{size}.py:{chip}" for size in ("base", "large") for chip in compilation.CHIPS]
PODS += ["adamw_2k.py:v4", "lamb_64k.py:v4"]
COLUMNS = (
    *("configuration", "topology", "length", "batch", "rows per device", "mesh", "remat"),
    *("HBM, GiB", "compiled FLOPs", "cycles per row", "rows per second per chip"),
    *("MFU", "exposed collectives", "hours, exposed included", "compile time"),
)
BEFORE, AFTER = "<!-- made by tools/tpu_report.py --all -->\n", "<!-- end of the table -->\n"
CAVEAT = (
    "Cycles are the compiler's own estimate, not a measurement, and do not include collectives.\n"
    "The time of collectives is a minimum, at the data-sheet bandwidth of all links; exposed is\n"
    "what the schedule does not overlap with computation."
)
MAX_FLOPS_ERROR = 0.03  # Relative difference of compiled and analytic FLOPs.
FOOTNOTE = (
    "\n\\* Too low: custom kernels have no estimate, and a loop with an unknown trip count is "
    "counted once.\n"
)

# Flags that have no effect, by mode.
REPORT_FLAGS = ("json", "dump_hlo", "costliest", "advise", "price_per_chip_hour")
SWEEP_FLAGS = ("sweep_meshes", "sweep_remat")
UNUSED_FLAGS = {
    "a single report": (*SWEEP_FLAGS, "markdown"),
    "--sweep": (*REPORT_FLAGS, "markdown"),
    "a configuration of trials": (
        *(*REPORT_FLAGS[1:], *SWEEP_FLAGS, "sweep", "markdown"),
        *("phases", "max_seq_length", "long_max_seq_length"),
    ),
    "--all": (*REPORT_FLAGS, *SWEEP_FLAGS, "sweep", "config", "topology"),
}


def check_flags() -> None:
    """Raises ValueError for a flag without effect, or a file that cannot be written."""
    mode = "--all" if ALL.value else "--sweep" if SWEEP.value else "a single report"
    if not ALL.value and has_trials(CONFIG.value):
        mode = "a configuration of trials"
    unused = dict.fromkeys(UNUSED_FLAGS[mode], mode)
    if has_corpus(CONFIG.value):
        unused |= dict.fromkeys(("max_seq_length", "long_max_seq_length"), "a corpus")
    for name, reason in unused.items():
        if flags.FLAGS[name].present:
            raise ValueError(f"--{name} has no effect with {reason}: remove it")
    for flag in (JSON, DUMP_HLO, MARKDOWN):
        if flag.value is None:
            continue
        path = pathlib.Path(flag.value)
        existing = path if path.exists() else path.parent
        if path.is_dir() or not os.access(existing, os.W_OK):
            raise ValueError(f"--{flag.name}={path} cannot be written: expected a writable file")
    if MARKDOWN.value:
        page = pathlib.Path(MARKDOWN.value)
        if not page.exists() or not {BEFORE, AFTER} < set(page.read_text().splitlines(True)):
            raise ValueError(
                f"--markdown={page}: expected a file with the lines {BEFORE.strip()!r} and "
                f"{AFTER.strip()!r}, to replace the table between them"
            )


def has_trials(config: ConfigDict | None) -> bool:
    """Returns whether `config` is of a fine-tuning run, or of a sweep."""
    return config is not None and ("task" in config or "base" in config)


def has_corpus(config: ConfigDict | None) -> bool:
    if config is None or has_trials(config):
        return False
    return bool(config.corpus or config.long_phase.corpus)


def load_phases(config: ConfigDict) -> tuple[list[setup.Phase], object]:
    """Returns the phases to compile and the tokenizer, from the corpora if there are any."""
    setup.check_numbers(config)
    if has_corpus(config):
        phases = setup.open_phases(config)
        tokenizer = phases[0].train.tokenizer
    else:
        phases = compilation.planned_phases(config, (LENGTH.value, LONG_LENGTH.value))
        tokenizer = compilation.UNCASED_ENGLISH
    return {"all": phases, "first": phases[:1], "last": phases[-1:]}[PHASES.value], tokenizer


def format_report(report: dict) -> str:
    lines = [
        f"{report['topology']}: {report['num_chips']} chips, {report['num_devices']} devices of "
        f"kind {report['device_kind']!r}, {report['clock_hz'] / 1e6:.0f} MHz; "
        f"{report['num_params']:,} parameters; remat {report['remat']}"
    ]
    for phase in report["phases"]:
        lines += ["", f"rows of {phase['max_seq_length']} tokens, batch {phase['batch_size']:,}"]
        figures = format_step(phase) if phase["hbm_parts"] else [format_failure(phase)]
        lines += [f"  {line}" for line in figures]
    if report["fits"]:
        lines += ["", f"{'total':<24}{format_hours(report, 'total_')}"]
        if "price" in report:
            lines.append(f"{'price':<24}{report['price']:,.2f} with exposed collectives")
    return "\n".join([*lines, "", CAVEAT])


def format_hours(figures: dict, prefix: str = "") -> str:
    return (
        f"{figures[prefix + 'hours']:.1f} hours, with exposed collectives "
        f"{figures[prefix + 'hours_with_exposed_collectives']:.1f}"
    )


def format_failure(phase: dict) -> str:
    over = phase["hbm_bytes_over"]
    if over is None:
        minimum = phase["hbm_argument_bytes"] / compilation.GIB
        return (
            "DOES NOT FIT: the compiler ran out of device memory and does not report by how much; "
            f"parameters, optimizer state and rows alone need {minimum:.2f} GiB"
        )
    used = phase["hbm_bytes_per_device"]
    return (
        f"DOES NOT FIT by {over / compilation.GIB:.2f} GiB: "
        f"needs {used / compilation.GIB:.2f}, the compiler "
        f"allows {(used - over) / compilation.GIB:.2f}"
    )


def format_step(phase: dict) -> list[str]:
    used = phase["hbm_bytes_per_device"] / compilation.GIB
    capacity = phase["hbm_capacity_bytes"] / compilation.GIB
    fit = format_failure(phase) if phase["hbm_bytes_over"] else "fits"
    figures = {
        "mesh": " ".join(f"{axis}={size}" for axis, size in phase["mesh"].items()),
        "rows per device": f"{phase['per_device_batch_size']} per microbatch",
        "HBM per device": f"{used:.2f} of {capacity:.0f} GiB: {fit}",
        " by use": ", ".join(
            f"{name} {size / compilation.GIB:.3f}" for name, size in phase["hbm_parts"].items()
        ),
        "FLOPs per sequence": f"{phase['model_flops_per_row'] / 1e9:.2f} G analytic, "
        f"{phase['compiled_flops_per_row'] / 1e9:.2f} G compiled",
        "cycles per step": f"{phase['cycles_per_step']:,}",
    }
    for part, directions in phase["cycles_by_part"].items():
        share = sum(directions.values()) / phase["cycles_per_step"]
        split = ", ".join(f"{name} {cycles:,}" for name, cycles in directions.items())
        figures[f" {part}"] = f"{share:.1%} ({split})"
    figures |= {
        "cycles per row": f"{phase['cycles_per_row']:,.0f} of one chip",
        "collectives": "; ".join(
            f"{kind} x{totals['count']:,}, {totals['bytes'] / 2**20:,.1f} MiB"
            for kind, totals in phase["collectives"].items()
        ),
        "time per step": f"{1e3 * phase['step_seconds']:.2f} ms, collectives at least "
        f"{1e3 * phase['collective_seconds']:.2f} ms, {1e3 * phase['exposed_seconds']:.2f} exposed",
        "per chip": f"{phase['rows_per_second_per_chip']:,.1f} rows per second, "
        f"MFU {phase['mfu']:.1%}",
        f"{phase['num_steps']:,} steps": format_hours(phase),
        "compile time": f"{phase['compile_seconds']:.0f} s",
        "no estimate for": ", ".join(
            f"{name} x{n}" for name, n in phase["without_estimate"].items()
        ),
        "loops counted once": ", ".join(phase["loops_counted_once"]),
    }
    lines = [f"{name:<20}  {figure}" for name, figure in figures.items() if figure]
    for row in phase["costliest"]:
        start = f"{row['cycles']:>12,} x{row['runs']:<4}{row['name']}  {row['shape'][:60]}"
        lines.append(f"{start}  {row['op_name'][-90:]}")
    for arrays, totals in phase["largest_collectives"].items():
        lines.append(f"{totals['bytes'] / 2**20:>8,.1f} MiB x{totals['count']:<4}{arrays[:90]}")
    return lines


def format_sweep_row(row: dict) -> str:
    start = f"mesh {row['sizes']:<8} remat {row['remat']:<5}"
    if not row["fits"]:
        return f"{start} " + (f"invalid: {row['error']}" if "error" in row else "does not fit")
    used, hours = row["hbm_bytes_per_device"] / compilation.GIB, format_hours(row, "total_")
    return f"{start} {used:6.2f} GiB {hours}; fits up to {row['largest_batch']} rows per device"


def format_table_row(name: str, report: dict, phase: dict) -> str:
    capacity = phase["hbm_capacity_bytes"] / compilation.GIB
    cells = [f"`{name}`", report["topology"], phase["max_seq_length"], phase["batch_size"]]
    if phase["fits"]:
        cells += [
            phase["per_device_batch_size"],
            "x".join(str(size) for size in phase["mesh"].values()),
            report["remat"],
            f"{phase['hbm_bytes_per_device'] / compilation.GIB:.1f} of {capacity:.0f}",
            # With remat, layers are computed twice.
            f"{flops_ratio(phase):.1%}" if report["remat"] == "none" else "",
            f"{phase['cycles_per_row']:,.0f}{' *' * has_missing_cycles(phase)}",
            f"{phase['rows_per_second_per_chip']:,.0f}",
            f"{phase['mfu']:.0%}",
            f"+{phase['exposed_seconds'] / phase['step_seconds']:.0%}",
            f"{phase['hours_with_exposed_collectives']:.1f}",
            f"{phase['compile_seconds']:.0f} s",
        ]
    else:
        cells.append(f"does not fit {capacity:.0f} GiB")
    return f"| {' | '.join(map(str, cells))} |\n"


def flops_ratio(phase: dict) -> float:
    return phase["compiled_flops_per_row"] / phase["model_flops_per_row"]


def has_missing_cycles(phase: dict) -> bool:
    return bool(phase["loops_counted_once"]) or "tpu_custom_call" in phase["without_estimate"]


def report_all() -> bool:
    """Prints the table of all pod configurations, and writes it to --markdown.

    Returns whether all steps fit and, without remat, have the analytic number of FLOPs.
    """
    table = f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}\n"
    print(table, end="")
    all_fit, wrong_flops, footnote = True, [], ""
    for name in PODS:
        module, _, argument = name.partition(".py:")
        config = importlib.import_module(f"bert_jax.configs.pretrain.{module}").get_config(argument)
        report = pod_report.report(config, config.topology, *load_phases(config))
        all_fit &= report["fits"]
        for phase in report["phases"]:
            row = format_table_row(name, report, phase)
            print(row, end="", flush=True)
            table += row
            if not phase["fits"]:
                continue
            if report["remat"] == "none" and abs(flops_ratio(phase) - 1) > MAX_FLOPS_ERROR:
                wrong_flops.append(f"{name}, rows of {phase['max_seq_length']}")
            if has_missing_cycles(phase):
                footnote = FOOTNOTE
    print(footnote, end="")
    if wrong_flops:
        print(
            f"compiled FLOPs differ from the analytic ones by more than {MAX_FLOPS_ERROR:.0%}: "
            + "; ".join(wrong_flops)
        )
    if MARKDOWN.value:
        page = pathlib.Path(MARKDOWN.value)
        start, _, rest = page.read_text().partition(BEFORE)
        page.write_text(start + BEFORE + table + footnote + AFTER + rest.partition(AFTER)[2])
    return all_fit and not wrong_flops


def run_sweep(config: ConfigDict, topology: str) -> bool:
    best = None
    phases = load_phases(config)
    for row in pod_report.sweep(config, topology, *phases, MESHES.value, REMAT.value):
        print(format_sweep_row(row), flush=True)
        if row["fits"] and (best is None or exposed_hours(row) < exposed_hours(best)):
            best = row
    print(f"best: {format_sweep_row(best)}" if best else "nothing fits")
    return best is not None


def exposed_hours(report: dict) -> float:
    return report["total_hours_with_exposed_collectives"]


def run() -> bool:
    """Runs what the flags select. Returns whether everything fits, or in a sweep anything."""
    check_flags()
    if ALL.value:
        return report_all()
    config = CONFIG.value
    if config is None:
        raise ValueError("expected --config=FILE or --all")
    topology = TOPOLOGY.value or config.get("topology")
    if not topology:
        raise ValueError("the configuration has no topology: set one, as in --topology=v4:4x4x4")
    if has_trials(config):
        report = stack_report.report(config.get("base", config), topology)
        print(f"{stack_report.format_report(report)}\n\n{CAVEAT}")
        return save(report)
    if SWEEP.value:
        return run_sweep(config, topology)

    step = config, topology, *load_phases(config)
    report = pod_report.report(*step, num_costliest=COSTLIEST.value, hlo_path=DUMP_HLO.value)
    if PRICE.value is not None and report["fits"]:
        report["price"] = PRICE.value * report["num_chips"] * exposed_hours(report)
    print(format_report(report), flush=True)
    if not report["fits"] and ADVISE.value:
        print("\nCompiling variants that need less memory ...", flush=True)
        report["advice"] = pod_report.find_fitting_changes(*step, report)
        changes = (report["advice"] or {}).items()
        new_flags = " ".join(f"--config.{field}={value}" for field, value in changes)
        print(f"This fits: {new_flags}" if changes else "None of the variants fits.")
    return save(report)


def save(report: dict) -> bool:
    """Writes --json; returns whether everything in the report fits."""
    if JSON.value:
        pathlib.Path(JSON.value).write_text(json.dumps(report, indent=2) + "\n")
    return report["fits"]


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    try:
        fits = run()
    except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
        sys.exit(f"tpu_report: {' '.join(str(error).split())}")
    sys.exit(0 if fits else 1)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
