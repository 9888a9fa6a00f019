"""Makes the compiled tables of docs/tpu.md and docs/log, for tools/tpu_tables.py."""

import datetime
import functools
import hashlib
import importlib
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ml_collections import ConfigDict

import bert_jax
from bert_jax import configs
from bert_jax.configs.finetune import contrastive
from bert_jax.configs.pretrain import own_language
from bert_jax.configs.sweeps import paper
from bert_jax.data.features import steps_per_epoch
from bert_jax.pods.chips import CHIPS, GIB, both_names, parse_topology
from bert_jax.pods.estimate import (
    compilation,
    contrastive_report,
    planned,
    pod_report,
    report_text,
    stack_report,
)
from bert_jax.pods.estimate.pod_table import PODS, default_topology

BEFORE, AFTER = "<!-- made by tools/tpu_tables.py: {} -->\n", "<!-- end of the table -->\n"
MAX_FLOPS_ERROR = 0.03  # Relative difference of compiled and analytic FLOPs.

# Those that notebooks offer for nothing: Colab's single chips, and Kaggle's eight.
NOTEBOOK_SLICES = ("v5e:1x1", "v5e:2x4", "v6e:1x1")
SESSION_HOURS = 8.5  # Of a notebook, in experiments/notebooks/own_language.ipynb.
NOTEBOOK_COLUMNS = (
    "slice",
    "model",
    "tokens per row",
    "rows per chip and microbatch",
    "HBM per chip, GiB",
    "tokens per second",
    f"billion tokens in {SESSION_HOURS} hours",
    f"hours for {own_language.TOKENS // 10**9} billion tokens",
    "MFU",
)
STACKS_SLICE = "v4:2x2x4"
BI_ENCODER_SLICE = "v5e:2x4"


class Table(NamedTuple):
    """A table, the page below docs/ that has it, and what makes its text, and what is wrong."""

    page: str
    make: Callable[["Reports"], tuple[str, list[str]]]


class Reports:
    """Compiles reports and keeps them in a directory, for one compiler and state of the code."""

    def __init__(self, directory: pathlib.Path):
        self._directory = directory
        self.used: list[dict] = []  # By the current table.

    def load_or_make(self, name: str, make_report: Callable[[], dict]) -> dict:
        """Returns the report that is kept under a name, or makes it.

        Its "compiler" has the versions of libtpu and jax, its "date" the day on which it was made.
        """
        path = self._directory / f"{name.replace(':', '-')}.json"
        made_by = {"compiler": compilation.compiler_versions(), "source": hash_source()}
        report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if not made_by.items() <= report.items():
            report = make_report() | made_by | {"date": datetime.date.today().isoformat()}
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            partial.replace(path)
        self.used.append(report)
        return report

    def footnote(self) -> str:
        """Returns when and with what the reports of a table were compiled."""
        dates = sorted({report["date"] for report in self.used})
        versions = ", ".join(f"{name} {each}" for name, each in self.used[0]["compiler"].items())
        return f"\nCompiled {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}, {versions}.\n"


@functools.cache
def hash_source() -> str:
    """Returns a hash of the files of bert_jax and its configurations, which decide a report."""
    found = hashlib.sha256()
    for folder in (bert_jax.__path__[0], configs.__path__[0]):
        for path in sorted(pathlib.Path(folder).rglob("*")):
            if path.suffix in (".py", ".json"):
                found.update(path.read_bytes())
    return found.hexdigest()


def pods(reports: Reports) -> tuple[str, list[str]]:
    """Returns the table of all pod configurations, and what is wrong with their steps.

    All are to fit and, without remat, to have the analytic number of FLOPs.
    """
    table, footnote, chips, problems = _header(report_text.COLUMNS), "", {}, []
    for name in PODS:
        module, _, argument = name.partition(".py:")
        config = importlib.import_module(f"bert_jax.configs.pretrain.{module}").get_config(argument)
        report = reports.load_or_make(
            name, functools.partial(_pod_report, config, topology=default_topology(name))
        )
        chips[parse_topology(report["topology"])[0]] = None
        for phase in report["phases"]:
            row = report_text.format_table_row(name, report, phase)
            print(row, end="", flush=True)
            table += row
            where = f"{name}, rows of {phase['max_seq_length']} tokens"
            if not phase["fits"]:
                problems.append(f"{where}: does not fit")
                continue
            error = report_text.flops_ratio(phase) - 1
            if report["remat"] == "none" and abs(error) > MAX_FLOPS_ERROR:
                problems.append(
                    f"{where}: compiled FLOPs differ from the analytic ones by {error:+.1%}, more "
                    f"than {MAX_FLOPS_ERROR:.0%}"
                )
            if report_text.has_missing_cycles(phase):
                footnote = report_text.FOOTNOTE
    footnote += report_text.clock_footnote([chip for chip in chips if CHIPS[chip].max_clock_hz])
    return f"{table}{footnote}\n{report_text.factor_note(chips)}\n", problems


def notebooks(reports: Reports) -> tuple[str, list[str]]:
    """Returns the table of own_language.py on the slices of notebooks, and what does not fit."""
    table, problems = _header(NOTEBOOK_COLUMNS), []
    for topology in NOTEBOOK_SLICES:
        for model in own_language.MODELS:
            config = own_language.get_config(model)
            report = reports.load_or_make(
                f"own_language.py:{model}-{topology}",
                functools.partial(_pod_report, config, topology),
            )
            row = _format_notebook_row(model, report)
            print(row, end="", flush=True)
            table += row
            problems += _misfit(report, f"own_language.py:{model}")
    chips = {parse_topology(topology)[0]: topology for topology in NOTEBOOK_SLICES}
    clocks = ", ".join(
        f"{chip} at {report_text.format_clock(topology)}"
        for chip, topology in chips.items()
        if CHIPS[chip].max_clock_hz
    )
    note = f"† At both ends of the clock: {clocks}."
    return f"{table}\n{note}\n\n{report_text.factor_note(chips)}\n", problems


def _format_notebook_row(model: str, report: dict) -> str:
    (phase,) = report["phases"]
    if not phase["fits"]:
        return _row(both_names(report["topology"]), f"`{model}`", "does not fit", *[""] * 6)
    length = phase["max_seq_length"]

    def at_clocks(form: str, value: Callable[[dict], float]) -> str:
        """Returns a value at the clock and, if that is assumed, also at the fastest one."""
        clocks = [phase, *filter(None, [phase["at_max_clock"]])]
        return " to ".join(form.format(value(each)) for each in clocks)

    def seconds(figures: dict) -> float:
        return figures["computation_seconds"] + figures["exposed_seconds"]

    def tokens_per_second(figures: dict) -> float:
        return phase["batch_size"] * length / seconds(figures)

    return _row(
        both_names(report["topology"]) + " †" * bool(phase["at_max_clock"]),
        f"`{model}`",
        f"{length:,}",
        phase["per_device_batch_size"],
        f"{phase['hbm_bytes_per_device'] / GIB:.1f}",
        at_clocks("{:,.0f}", tokens_per_second),
        at_clocks("{:.1f}", lambda each: tokens_per_second(each) * SESSION_HOURS * 3600 / 1e9),
        at_clocks("{:.1f}", lambda each: own_language.TOKENS / tokens_per_second(each) / 3600),
        at_clocks("{:.0%}", lambda each: each["mfu"] * each["computation_seconds"] / seconds(each)),
    )


def stacks(reports: Reports) -> tuple[str, list[str]]:
    """Returns the table of stacked fine-tuning trials of MRPC, and whether one does not fit."""
    report = reports.load_or_make(
        f"paper.py:glue:mrpc-{STACKS_SLICE}",
        functools.partial(stack_report.report, paper.get_config("glue:mrpc").base, STACKS_SLICE),
    )
    return f"{stack_report.format_report(report)}\n", _misfit(report, "stacks of trials")


def bi_encoder(reports: Reports) -> tuple[str, list[str]]:
    """Returns the table of E5's contrastive pre-training, and whether it does not fit."""
    config = contrastive.get_config()
    report = reports.load_or_make(
        f"contrastive.py-{BI_ENCODER_SLICE}",
        functools.partial(
            contrastive_report.report,
            config,
            BI_ENCODER_SLICE,
            train_examples=contrastive.NUM_PAIRS,
        ),
    )
    (phase,) = report["phases"]
    table = _header((f"E5's pre-training on {both_names(BI_ENCODER_SLICE)}", "BERT_BASE, bfloat16"))
    if not report["fits"]:
        return f"{table}{_row('HBM', 'does not fit')}", _misfit(report, "contrastive.py")
    rows, num_steps = phase["per_device_batch_size"], phase["num_steps"]
    num_microbatches = math.ceil(config.batch_size / (rows * report["num_devices"]))
    used, capacity = phase["hbm_bytes_per_device"] / GIB, phase["hbm_capacity_bytes"] / GIB
    shares = ", ".join(
        f"{name} {sum(directions.values()) / phase['cycles_per_step']:.1%}"
        for name, directions in phase["cycles_by_part"].items()
    )
    exposed_ms = 1e3 * phase["exposed_seconds"]
    hours = report["total_hours_with_exposed_collectives"]
    once = hours * steps_per_epoch(contrastive.NUM_PAIRS, config.batch_size) / num_steps
    cells = {
        "batch": f"{config.batch_size:,} pairs of texts of {config.max_seq_length} tokens",
        "microbatches": f"{num_microbatches} of {rows} rows per chip",
        "HBM per chip": f"{used:.1f} of {capacity:.0f} GiB",
        "cycles per pair": f"{phase['cycles_per_row']:,.0f} of one chip",
        "of these": shares,
        "computation of a step": f"{phase['computation_seconds']:.1f} s",
        "exposed collectives of a step": f"{exposed_ms:.0f} ms",
        "pairs per second": f"{phase['rows_per_second_per_chip']:,.0f} per chip",
        "MFU, without collectives": f"{phase['mfu']:.0%}",
        f"hours of {num_steps:,} steps": f"{hours:.1f}",
        f"hours of {contrastive.NUM_PAIRS / 1e6:.0f} million pairs, once each": f"{once:.1f}",
    }
    table += "".join(_row(*each) for each in cells.items())
    factors = report_text.factor_note([parse_topology(BI_ENCODER_SLICE)[0]])
    return f"{table}\n{factors}\n", []


TABLES = {
    "pods": Table("log/2026-11-tpu-configurations.md", pods),
    "stacks": Table("log/2026-11-tpu-configurations.md", stacks),
    "notebooks": Table("tpu.md", notebooks),
    "bi_encoder": Table("tpu.md", bi_encoder),
}


def check_page(docs: pathlib.Path, name: str) -> None:
    """Raises ValueError if a table has no place in its page."""
    page = docs / TABLES[name].page
    lines = page.read_text(encoding="utf-8").splitlines(True) if page.exists() else []
    if BEFORE.format(name) not in lines or AFTER not in lines:
        raise ValueError(
            f"{page} has no place for the table {name!r}: expected the lines "
            f"{BEFORE.format(name).strip()!r} and {AFTER.strip()!r}, and the table between them"
        )


def write_table(docs: pathlib.Path, name: str, reports: Reports) -> list[str]:
    """Compiles what a table needs, and writes it into its page. Returns what is wrong with it."""
    reports.used.clear()
    table, problems = TABLES[name].make(reports)
    page, before = docs / TABLES[name].page, BEFORE.format(name)
    start, _, rest = page.read_text(encoding="utf-8").partition(before)
    text = table + reports.footnote() + AFTER + rest.partition(AFTER)[2]
    page.write_text(start + before + text, encoding="utf-8")
    return problems


def _pod_report(config: ConfigDict, topology: str) -> dict:
    return pod_report.report(config, topology, *planned.plan_run(config))


def _misfit(report: dict, name: str) -> list[str]:
    return [] if report["fits"] else [f"{name}: does not fit {report['topology']}"]


def _header(columns: Sequence[str]) -> str:
    return _row(*columns) + f"|{' --- |' * len(columns)}\n"


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |\n"
