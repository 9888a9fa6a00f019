"""Compares pods: all configurations in one table, or meshes and remat policies of one."""

import datetime
import functools
import hashlib
import importlib
import json
import pathlib
from collections.abc import Callable

from ml_collections import ConfigDict

import bert_jax
from bert_jax import configs
from bert_jax.pods.chips import CHIPS, default_shape, format_shape, parse_topology
from bert_jax.pods.estimate import compilation, pod_report, report_text
from bert_jax.training.phases import Phase

# The number of chips for which a configuration in configs/pretrain is reported if no --topology is
# given; for pod_base and pod_large it is the paper's.
NUM_CHIPS = {
    "pod_base": 16,
    "pod_large": 64,
    "adamw_2k": 64,
    "lamb_64k": 64,
    "roberta_base": 64,
    "roberta_large": 64,
    "albert_base": 64,
    "albert_large": 64,
    "albert_xlarge": 64,
    "albert_xxlarge": 64,
    "electra_small": 4,
    "electra_base": 16,
    "electra_large": 64,
    "spanbert": 16,
    "distilbert": 64,
    "tinybert": 4,
}
# The configurations of --all.
PODS = [
    f"{name}.py:{chip}"
    for name in NUM_CHIPS
    for chip in (CHIPS if name.startswith("pod_") else ["v4"])
]
BEFORE, AFTER = "<!-- made by tools/tpu_report.py --all -->\n", "<!-- end of the table -->\n"
MAX_FLOPS_ERROR = 0.03  # Relative difference of compiled and analytic FLOPs.


def default_topology(config_file: str) -> str | None:
    """Returns the topology of a configuration that names a chip, such as "pod_base.py:v5e".

    The chip is v4 if none is named. None for a configuration that is not in `NUM_CHIPS`.
    """
    path, _, argument = config_file.partition(":")
    num_chips = NUM_CHIPS.get(pathlib.Path(path).stem)
    if num_chips is None:
        return None
    named = argument.partition(",")[0]
    chip = named if named in CHIPS else "v4"
    return f"{chip}:{format_shape(default_shape(chip, num_chips))}"


def check_page(page: pathlib.Path) -> None:
    """Raises ValueError if the table of `report_all` has no place in a Markdown file."""
    if not page.exists() or not {BEFORE, AFTER} < set(
        page.read_text(encoding="utf-8").splitlines(True)
    ):
        raise ValueError(
            f"--markdown={page}: expected a file with the lines {BEFORE.strip()!r} and "
            f"{AFTER.strip()!r}, to replace the table between them"
        )


@functools.cache
def hash_source() -> str:
    """Returns a hash of the files of bert_jax and its configurations, which decide a report."""
    found = hashlib.sha256()
    for folder in (bert_jax.__path__[0], configs.__path__[0]):
        for path in sorted(pathlib.Path(folder).rglob("*")):
            if path.suffix in (".py", ".json"):
                found.update(path.read_bytes())
    return found.hexdigest()


def kept_report(path: pathlib.Path | None, make_report: Callable[[], dict]) -> dict:
    """Returns the report in a file if the same code and compiler made it; otherwise makes it.

    Its "compiler" has the versions of libtpu and jax, its "date" the day on which it was made.
    """
    made_by = {"compiler": compilation.compiler_versions(), "source": hash_source()}
    if path and path.exists():
        report = json.loads(path.read_text(encoding="utf-8"))
        if made_by.items() <= report.items():
            return report
    report = make_report() | made_by | {"date": datetime.date.today().isoformat()}
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    return report


def report_all(
    plan_phases: Callable[[ConfigDict], tuple], markdown: str | None, reports: str | None = None
) -> bool:
    """Prints the table of all pod configurations, and writes it to the file `markdown`.

    `plan_phases` returns the phases of a configuration and a tokenizer. The report of each
    configuration is kept in the directory `reports`: the next call takes those that this compiler
    made. Returns whether all steps fit and, without remat, have the analytic number of FLOPs.
    """
    table = f"| {' | '.join(report_text.COLUMNS)} |\n|{' --- |' * len(report_text.COLUMNS)}\n"
    print(table, end="")
    all_fit, wrong_flops, footnote, chips, made = True, [], "", {}, []
    for name in PODS:
        module, _, argument = name.partition(".py:")
        config = importlib.import_module(f"bert_jax.configs.pretrain.{module}").get_config(argument)
        topology = default_topology(name)
        path = pathlib.Path(reports, f"{name.replace(':', '-')}.json") if reports else None
        report = kept_report(
            path,
            lambda config=config, topology=topology: pod_report.report(
                config, topology, *plan_phases(config)
            ),
        )
        made.append(report)
        all_fit &= report["fits"]
        chips[parse_topology(topology)[0]] = None
        for phase in report["phases"]:
            row = report_text.format_table_row(name, report, phase)
            print(row, end="", flush=True)
            table += row
            if not phase["fits"]:
                continue
            if (
                report["remat"] == "none"
                and abs(report_text.flops_ratio(phase) - 1) > MAX_FLOPS_ERROR
            ):
                wrong_flops.append(f"{name}, rows of {phase['max_seq_length']}")
            if report_text.has_missing_cycles(phase):
                footnote = report_text.FOOTNOTE
    footnote += report_text.clock_footnote([chip for chip in chips if CHIPS[chip].max_clock_hz])
    footnote += f"\n{report_text.factor_note(chips)}\n"
    dates = sorted({report["date"] for report in made})
    versions = ", ".join(f"{name} {version}" for name, version in made[0]["compiler"].items())
    footnote += f"\nCompiled {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}, {versions}.\n"
    print(footnote, end="")
    if wrong_flops:
        print(
            f"compiled FLOPs differ from the analytic ones by more than {MAX_FLOPS_ERROR:.0%}: "
            + "; ".join(wrong_flops)
        )
    if markdown:
        page = pathlib.Path(markdown)
        start, _, rest = page.read_text(encoding="utf-8").partition(BEFORE)
        page.write_text(
            start + BEFORE + table + footnote + AFTER + rest.partition(AFTER)[2], encoding="utf-8"
        )
    return all_fit and not wrong_flops


def print_sweep(
    config: ConfigDict,
    topology: str,
    phases: list[Phase],
    tokenizer,
    meshes: list[str],
    remat: list[str],
) -> bool:
    """Prints a line for each mesh and remat policy, and the best; returns whether any fits."""
    fitting = []
    for row in pod_report.sweep(config, topology, phases, tokenizer, meshes, remat):
        print(report_text.format_sweep_row(row), flush=True)
        if row["fits"]:
            fitting.append(row)
    if not fitting:
        print("nothing fits")
        return False
    best = min(fitting, key=report_text.exposed_hours)
    print(f"best: {report_text.format_sweep_row(best)}")
    if best["at_max_clock"]:
        at_max = min(fitting, key=lambda row: report_text.exposed_hours(row["at_max_clock"]))
        if at_max is not best:
            row = report_text.format_sweep_row(at_max)
            print(f"best at the fastest clock that the peak allows: {row}")
        print(f"\n{report_text.caveats(topology)}")
    print(f"\n{report_text.factor_note([parse_topology(topology)[0]])}")
    return True
