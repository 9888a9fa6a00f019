"""What a configuration would do on a TPU pod: memory, FLOPs, cycles, hours. Needs no TPU.

Compiles the real training step for a described topology with the TPU compiler (`libtpu`, which
comes with `pip install 'jax[tpu]'`), and reads what the compiler says of it.

python tools/tpu_report.py --config=configs/pretrain/pod_large.py:v4 --json=report.json
python tools/tpu_report.py --config=configs/pretrain/bert_large.py --topology=v4:4x4x4 --sweep
python tools/tpu_report.py --all --markdown=README.md
"""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"  # Nothing may look for a TPU.
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # No lock: two reports may run at once.
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v4-8")  # Asked for, not used, by the compiler.
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
# Configurations import each other as configs.pretrain.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import importlib
import json
import operator
import pathlib

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from bert_jax.model.config import REMAT_POLICIES
from bert_jax.runtime.flag_errors import parse_flags
from bert_jax.tpu import compile as tpu
from bert_jax.tpu import report as pod_report
from bert_jax.training import settings

CONFIG = config_flags.DEFINE_config_file("config", None, "As for pre-training.", lock_config=True)
TOPOLOGY = flags.DEFINE_string("topology", None, "v4:4x4x4, say; if not given, config.topology.")
PHASES = flags.DEFINE_enum("phases", "all", ["all", "first", "last"], "Which to compile.")
LENGTH = flags.DEFINE_integer("max_seq_length", 128, "Of the first phase, without a corpus.")
LONG_LENGTH = flags.DEFINE_integer("long_max_seq_length", 512, "Of the long phase, likewise.")
PRICE = flags.DEFINE_float("price_per_chip_hour", None, "In whatever currency.", 0)
JSON = flags.DEFINE_string("json", None, "File to write all figures to.")
DUMP_HLO = flags.DEFINE_string("dump_hlo", None, "File for the compiled text of the first phase.")
COSTLIEST = flags.DEFINE_integer("costliest", 0, "Show so many of the costliest instructions.", 0)
ADVISE = flags.DEFINE_bool("advise", True, "If it does not fit, compile what may, until it does.")
SWEEP = flags.DEFINE_bool("sweep", False, "Compare meshes and remat; find the largest batches.")
MESHES = flags.DEFINE_list("sweep_meshes", ["-1x1x1", "-1x4x1"], "Each data x fsdp x tensor.")
REMAT = flags.DEFINE_list("sweep_remat", list(REMAT_POLICIES), "Of config.model.remat.")
ALL = flags.DEFINE_bool("all", False, "Every pod configuration, as one table.")
MARKDOWN = flags.DEFINE_string("markdown", None, "Page to put the table of --all into.")

PODS = [
    *(f"pod_{size}.py:{chip}" for size in ("base", "large") for chip in tpu.CHIPS),
    "adamw_2k.py:v4",
    "lamb_64k.py:v4",
]
COLUMNS = (
    *("configuration", "topology", "length", "batch", "rows a device", "mesh", "remat"),
    *("HBM, GiB", "compiled FLOPs", "cycles a sequence", "sequences/s a chip", "MFU", "links"),
    *("hours", "compiled"),
)
BEFORE, AFTER = "<!-- made by tools/tpu_report.py --all -->\n", "<!-- end of the table -->\n"
CAVEAT = (
    "Cycles are the compiler's own estimate, not a measurement, and leave out the time that\n"
    "collectives take over the links. 'Links' is the least that these take, with every link full\n"
    "at its data-sheet rate, if nothing else runs meanwhile."
)
MOST_OFF = 0.03  # Compiled FLOPs from those by hand.
CUSTOM_KERNEL = "tpu_custom_call"
FOOTNOTE = "\n\\* Too few: custom kernels have no estimate, loops of unknown trips count once.\n"


OF_REPORT = ("json", "dump_hlo", "costliest", "advise", "price_per_chip_hour")
OF_SWEEP = ("sweep_meshes", "sweep_remat")
USELESS = {
    "a single report": (*OF_SWEEP, "markdown"),
    "--sweep": (*OF_REPORT, "markdown"),
    "--all": (*OF_REPORT, *OF_SWEEP, "sweep", "config", "topology"),
}


def check_flags() -> None:
    """ValueError for a flag that would do nothing, or a file that could not be written to."""
    use = "--all" if ALL.value else "--sweep" if SWEEP.value else "a single report"
    useless = {name: use for name in USELESS[use]}
    if has_corpus(CONFIG.value):
        useless |= dict.fromkeys(("max_seq_length", "long_max_seq_length"), "a corpus")
    for name, why in useless.items():
        if flags.FLAGS[name].present:
            raise ValueError(f"--{name} does nothing with {why}: leave it away")
    for flag in (JSON, DUMP_HLO, MARKDOWN):
        if flag.value is None:
            continue
        path = pathlib.Path(flag.value)
        existing = path if path.exists() else path.parent
        if path.is_dir() or not os.access(existing, os.W_OK):
            raise ValueError(f"--{flag.name}={path} cannot be written to: expected a file")
    if MARKDOWN.value:
        page = pathlib.Path(MARKDOWN.value)
        if not page.exists() or not {BEFORE, AFTER} < set(page.read_text().splitlines(True)):
            raise ValueError(
                f"--markdown={page}: expected a page with the lines {BEFORE.strip()!r} and "
                f"{AFTER.strip()!r}, between which the table goes"
            )


def has_corpus(config: ConfigDict | None) -> bool:
    return config is not None and bool(config.corpus or config.long_phase.corpus)


def phases_of(config: ConfigDict) -> tuple[list[settings.Phase], object]:
    """The phases of the run and its tokenizer, from the corpora if these are given."""
    settings.check_numbers(config)
    if has_corpus(config):
        phases = settings.open_phases(config)
        tokenizer = phases[0].rows.load_tokenizer()
    else:
        phases = tpu.planned_phases(config, (LENGTH.value, LONG_LENGTH.value))
        tokenizer = tpu.UNCASED_ENGLISH
    return {"all": phases, "first": phases[:1], "last": phases[-1:]}[PHASES.value], tokenizer


def format_report(report: dict) -> str:
    lines = [
        f"{report['topology']}: {report['num_chips']} chips, {report['num_devices']} devices of "
        f"kind {report['device_kind']!r}, {report['clock_hz'] / 1e6:.0f} MHz; "
        f"{report['num_params']:,} parameters; remat {report['remat']}"
    ]
    for phase in report["phases"]:
        lines += ["", f"rows of {phase['max_seq_length']}, batch {phase['batch_size']:,}"]
        lines += [f"  {line}" for line in (_of_step if phase["hbm_parts"] else _of_failure)(phase)]
    if report["fits"]:
        hours, with_links = report["total_hours"], report["total_hours_with_links"]
        lines += ["", f"{'in all':<18}{hours:.1f} hours, with links {with_links:.1f}"]
        if "price" in report:
            lines.append(f"{'price':<18}{report['price']:,.2f}, with links")
    return "\n".join([*lines, "", CAVEAT])


def _of_failure(phase: dict) -> list[str]:
    if phase["hbm_bytes_over"] is None:
        least = phase["hbm_argument_bytes"] / tpu.GIB
        return [
            "DOES NOT FIT: the compiler ran out of device memory, and does not say by how much: "
            f"needs more than the {least:.2f} GiB of parameters, optimizer and rows"
        ]
    used, over = (phase[f"hbm_bytes_{name}"] / tpu.GIB for name in ("per_device", "over"))
    return [
        f"DOES NOT FIT by {over:.2f} GiB: needs {used:.2f}, and the compiler has {used - over:.2f}"
    ]


def _of_step(phase: dict) -> list[str]:
    gib = {part: size / tpu.GIB for part, size in phase["hbm_parts"].items()}
    over = phase["hbm_bytes_over"] / tpu.GIB
    used, capacity = (
        phase[f"hbm_{name}"] / tpu.GIB for name in ("bytes_per_device", "capacity_bytes")
    )
    facts = {
        "mesh": " ".join(f"{axis}={size}" for axis, size in phase["mesh"].items()),
        "rows a device": f"{phase['per_device_batch_size']} at once",
        "HBM a device": f"{used:.2f} of {capacity:.0f} GiB: "
        + (
            f"DOES NOT FIT by {over:.2f} GiB, the compiler has {used - over:.2f}"
            if over > 0
            else "fits"
        ),
        " of which": ", ".join(f"{part} {size:.3f}" for part, size in gib.items()),
        "FLOPs a sequence": f"{phase['model_flops_per_sequence'] / 1e9:.2f} G by hand, "
        f"{phase['compiled_flops_per_sequence'] / 1e9:.2f} G compiled",
        "cycles a step": f"{phase['cycles_per_step']:,}",
    }
    for part, directions in phase["cycles_by_part"].items():
        share = sum(directions.values()) / phase["cycles_per_step"]
        each = ", ".join(f"{name} {cycles:,}" for name, cycles in directions.items())
        facts[f" {part}"] = f"{share:.1%} ({each})"
    facts |= {
        "cycles a sequence": f"{phase['cycles_per_sequence']:,.0f} of one chip",
        "collectives": "; ".join(
            f"{kind} x{each['count']:,}, {each['bytes'] / 2**20:,.1f} MiB"
            for kind, each in phase["collectives"].items()
        ),
        "a step": f"{1e3 * phase['step_seconds']:.2f} ms, and links at least "
        f"{1e3 * phase['link_seconds']:.2f} ms",
        "a chip": f"{phase['sequences_per_second_per_chip']:,.1f} sequences/s, "
        f"MFU {phase['mfu']:.1%}",
        f"{phase['num_steps']:,} steps": f"{phase['hours']:.1f} hours, with links "
        f"{phase['hours_with_links']:.1f}",
        "compiled in": f"{phase['compile_seconds']:.0f} s",
        "no estimate for": ", ".join(f"{name} x{n}" for name, n in phase["not_estimated"].items()),
        "loops run once?": ", ".join(phase["loops_counted_once"]),
    }
    lines = [f"{name:<18}  {fact}" for name, fact in facts.items() if fact]
    for row in phase["costliest"]:
        start = f"{row['cycles']:>12,} x{row['runs']:<4}{row['name']}  {row['shape'][:60]}"
        lines.append(f"{start}  {row['op_name'][-90:]}")
    return lines


def format_setting(row: dict) -> str:
    """One line of a sweep."""
    start = f"mesh {row['sizes']:<8} remat {row['remat']:<5}"
    if not row["fits"]:
        reason = f"cannot be: {row['refused']}" if "refused" in row else "does not fit"
        return f"{start} {reason}"
    used = max(phase["hbm_bytes_per_device"] for phase in row["phases"]) / tpu.GIB
    return (
        f"{start} {used:6.2f} GiB {row['total_hours']:8.1f} hours, with links "
        f"{row['total_hours_with_links']:8.1f}; fits up to {row['largest_batch']} rows a device"
    )


def table_rows(name: str, report: dict) -> str:
    """A line of the table of --all for each phase."""
    lines, layers_run_once = [], report["remat"] == "none"
    for phase in report["phases"]:
        capacity = phase["hbm_capacity_bytes"] / tpu.GIB
        fixed = (f"`{name}`", report["topology"], phase["max_seq_length"], phase["batch_size"])
        if not phase["fits"]:
            lines.append((*fixed, f"does not fit {capacity:.0f} GiB"))
            continue
        lines.append(
            (
                *fixed,
                phase["per_device_batch_size"],
                "x".join(str(size) for size in phase["mesh"].values()),
                report["remat"],
                f"{phase['hbm_bytes_per_device'] / tpu.GIB:.1f} of {capacity:.0f}",
                f"{share_of_flops(phase):.1%}" if layers_run_once else "",
                f"{phase['cycles_per_sequence']:,.0f}{' *' * too_few_cycles(phase)}",
                f"{phase['sequences_per_second_per_chip']:,.0f}",
                f"{phase['mfu']:.0%}",
                f"+{phase['link_seconds'] / phase['step_seconds']:.0%}",
                f"{phase['hours']:.1f}",
                f"{phase['compile_seconds']:.0f} s",
            )
        )
    return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in lines)


def share_of_flops(phase: dict) -> float:
    """Compiled over by hand."""
    return phase["compiled_flops_per_sequence"] / phase["model_flops_per_sequence"]


def too_few_cycles(phase: dict) -> bool:
    return bool(phase["loops_counted_once"]) or CUSTOM_KERNEL in phase["not_estimated"]


def report_all() -> bool:
    """Prints the table of all pod configurations, and puts it into the page.

    Returns whether all fit, and none that computes its layers once has other FLOPs than by hand.
    """
    table = f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}\n"
    print(table, end="")
    all_fit, off, footnote = True, [], ""
    for name in PODS:
        module, _, argument = name.partition(".py:")
        config = importlib.import_module(f"configs.pretrain.{module}").get_config(argument)
        report = pod_report.report(config, config.topology, *phases_of(config))
        all_fit &= report["fits"]
        rows = table_rows(name, report)
        print(rows, end="", flush=True)
        table += rows
        for phase in filter(operator.itemgetter("fits"), report["phases"]):
            if report["remat"] == "none" and abs(share_of_flops(phase) - 1) > MOST_OFF:
                off.append(f"{name}, rows of {phase['max_seq_length']}")
            if too_few_cycles(phase):
                footnote = FOOTNOTE
    print(footnote, end="")
    table += footnote
    if off:
        print(f"compiled FLOPs are over {MOST_OFF:.0%} off those by hand: {'; '.join(off)}")
    if MARKDOWN.value:
        page = pathlib.Path(MARKDOWN.value)
        start, _, rest = page.read_text().partition(BEFORE)
        page.write_text(start + BEFORE + table + AFTER + rest.partition(AFTER)[2])
    return all_fit and not off


def run() -> bool:
    """Does what the flags say; whether what was asked for fits."""
    check_flags()
    if ALL.value:
        return report_all()
    config = CONFIG.value
    if config is None:
        raise ValueError("give --config=FILE, or --all")
    topology = TOPOLOGY.value or config.get("topology")
    if not topology:
        raise ValueError("the configuration names no topology: give one, as --topology=v4:4x4x4")
    phases, tokenizer = phases_of(config)
    if SWEEP.value:
        best = None
        for row in pod_report.sweep(config, topology, phases, tokenizer, MESHES.value, REMAT.value):
            print(format_setting(row), flush=True)
            hours = row.get("total_hours_with_links", float("inf"))
            if row["fits"] and (best is None or hours < best["total_hours_with_links"]):
                best = row
        print(f"best: {format_setting(best)}" if best else "nothing fits")
        return best is not None

    report = pod_report.report(
        config,
        topology,
        phases,
        tokenizer,
        num_costliest=COSTLIEST.value,
        hlo_path=pathlib.Path(DUMP_HLO.value) if DUMP_HLO.value else None,
    )
    if PRICE.value is not None and report["fits"]:
        chip_hours = report["num_chips"] * report["total_hours_with_links"]
        report["price"] = chip_hours * PRICE.value
    print(format_report(report), flush=True)
    if not report["fits"] and ADVISE.value:
        print("\nLooking for what fits ...", flush=True)
        report["advice"] = pod_report.advice(config, topology, phases, tokenizer)
        advice = (report["advice"] or {}).items()
        flags_to_give = " ".join(f"--config.{field}={value}" for field, value in advice)
        print(f"This fits: {flags_to_give}" if advice else "Nothing that was tried fits.")
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
