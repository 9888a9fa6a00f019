"""Formats the reports of `pod_report` as text and as rows of a table."""

import shlex
from collections.abc import Callable, Iterable, Mapping

from bert_jax.pods.chips import CHIPS, GIB, both_names, parse_topology
from bert_jax.pods.estimate.calibration import (
    Calibration,
    Range,
    TimedStep,
    calibrated_range,
    calibration_of,
    why_not_calibrated,
)

COLUMNS = (
    "configuration",
    "topology",
    "length",
    "batch",
    "rows per device",
    "mesh",
    "remat",
    "HBM, GiB",
    "compiled FLOPs",
    "cycles per row",
    "rows per second per chip",
    "MFU",
    "exposed collectives",
    "hours, exposed included",
    "compile time",
)
CAVEAT = (
    "Cycles are the compiler's own estimate, not a measurement, and do not include collectives.\n"
    "The time of collectives is a minimum, at the data-sheet bandwidth of all links; exposed is\n"
    "what the schedule does not overlap with computation."
)
CLOCK_CAVEAT = (
    "THE CLOCK IS AN ASSUMPTION: Google does not publish that of {chip}. {low} MHz is the slowest\n"
    "that agrees with its peak: there a product of 8192 x 8192 matrices takes {share:.0%} of it. "
    "{high} MHz is\nthe fastest: there the product takes all of it. Likely hours and prices are at "
    "{low} MHz,\nwhich published times fit."
)
FOOTNOTE = (
    "\n\\* Too low: custom kernels have no estimate, and a loop with an unknown trip count is "
    "counted once.\n"
)
CLOCK_FOOTNOTE = "\n† The clock of {names} is not published: {ranges}.\n"


def format_report(
    report: dict, calibration: Calibration, price_per_chip_hour: float | None = None
) -> str:
    """Returns the report as text: whether the run fits, its hours and its price, then the rest."""
    lines = [*format_verdict(report, calibration, price_per_chip_hour), ""]
    chips, devices = (
        f"{report[f'num_{name}s']} {name}{'s' * (report[f'num_{name}s'] > 1)}"
        for name in ("chip", "device")
    )
    lines.append(
        f"{report['topology']}: {chips}, {devices} of kind {report['device_kind']!r}, "
        f"{format_clock(report['topology'])}; "
        f"{report['num_params']:,} parameters; remat {report['remat']}"
    )
    for phase in report["phases"]:
        lines += ["", f"rows of {phase['max_seq_length']} tokens, batch {phase['batch_size']:,}"]
        figures = format_step(phase) if phase["hbm_parts"] else [format_failure(phase)]
        lines += [f"  {line}" for line in figures]
    if report["fits"]:
        total = at_each_clock(report, lambda each: format_hours(each, "total_"))
        lines += ["", f"{'total':<24}{total}"]
    return "\n".join([*lines, "", caveats(report["topology"])])


def format_verdict(
    report: dict, calibration: Calibration, price_per_chip_hour: float | None
) -> list[str]:
    """Returns the first lines of a report: whether the run fits, its hours, and its price.

    A fourth line gives the reasons why the hours may be outside of their range, if there are any. A
    run that does not fit has a line for each phase that does not, and no others.
    """
    if not report["fits"]:
        failed = [phase for phase in report["phases"] if not phase["fits"]]
        return [
            f"{both_names(report['topology'])}, rows of {phase['max_seq_length']} tokens: "
            f"{format_failure(phase)}"
            for phase in failed
        ]
    used, capacity = report["hbm_bytes_per_device"], report["phases"][0]["hbm_capacity_bytes"]
    hours = likely_hours(report, calibration)
    cost = hours.times(report["num_chips"])
    name, hint = "chip-hours", "; --price_per_chip_hour=PRICE gives the price"
    if price_per_chip_hour is not None:
        cost = cost.times(price_per_chip_hour)
        name, hint = "price", f", at {price_per_chip_hour:g} per chip-hour"
    lines = [
        f"FITS {both_names(report['topology'])}: {used / GIB:.1f} of {capacity / GIB:.0f} GiB per "
        "device",
        f"hours: {hours}, of training steps alone; compiler's estimate x {calibration}",
        f"{name}: {cost}{hint}",
    ]
    if reasons := not_calibrated(report, calibration):
        lines.append(f"NOT CALIBRATED: {'; '.join(reasons)}")
    return lines


def likely_figures(
    report: dict, calibration: Calibration, price_per_chip_hour: float | None
) -> dict:
    """Returns what a calibration adds to the report of a run that fits, for its JSON file.

    "likely_step_seconds" has an entry for each phase, with exposed communication.
    """
    hours = likely_hours(report, calibration)
    figures = {
        "likely_hours": hours._asdict(),
        "likely_step_seconds": [each._asdict() for each in likely_seconds(report, calibration)],
        "calibration": vars(calibration),
        "not_calibrated": not_calibrated(report, calibration),
    }
    if price_per_chip_hour is not None:
        price = hours.times(report["num_chips"]).times(price_per_chip_hour)
        figures["likely_price"] = price._asdict()
    return figures


def not_calibrated(report: dict, calibration: Calibration) -> list[str]:
    """Returns the reasons why the hours of a run that fits may be outside of their range."""
    reasons = why_not_calibrated(calibration, timed_steps(report))
    if report["num_slices"] > 1:
        reasons.append("no time includes the network between slices")
    return reasons


def timed_steps(report: dict) -> list[TimedStep]:
    """Returns the steps of the phases of a run that fits."""
    return [
        TimedStep(
            phase["per_device_batch_size"],
            phase["max_seq_length"],
            report["num_params"],
            phase["computation_seconds"],
            phase["exposed_seconds"],
        )
        for phase in report["phases"]
    ]


def likely_seconds(report: dict, calibration: Calibration) -> list[Range]:
    """Returns the seconds that a step of each phase of a run that fits is likely to take."""
    return [
        calibrated_range(calibration, step.computation, step.exposed)
        for step in timed_steps(report)
    ]


def likely_hours(report: dict, calibration: Calibration) -> Range:
    """Returns the hours that all steps of a run that fits are likely to take."""
    hours = [
        seconds.times(phase["num_steps"] / 3600)
        for phase, seconds in zip(
            report["phases"], likely_seconds(report, calibration), strict=True
        )
    ]
    return Range(*map(sum, zip(*hours, strict=True)))


def at_each_clock(figures: dict, describe: Callable[[dict], str]) -> str:
    """Describes figures at the clock and, if that is an assumption, also at the fastest clock."""
    text = describe(figures)
    if fastest := figures["at_max_clock"]:
        text += f"; at {fastest['clock_hz'] / 1e6:.0f} MHz {describe(fastest)}"
    return text


def format_clock(topology: str) -> str:
    """Returns the clock as text: "1050 MHz", or "1750 to 2486 MHz (assumed)"."""
    clocks = CHIPS[parse_topology(topology)[0]].clocks_hz
    text = " to ".join(f"{clock / 1e6:.0f}" for clock in clocks)
    return f"{text} MHz" + " (assumed)" * (len(clocks) > 1)


def caveats(topology: str) -> str:
    """Returns the assumptions behind the estimates for a topology, as text."""
    name = parse_topology(topology)[0]
    low, *high = (round(clock / 1e6) for clock in CHIPS[name].clocks_hz)
    if not high:
        return CAVEAT
    clock = CLOCK_CAVEAT.format(chip=name, low=low, high=high[0], share=low / high[0])
    return f"{CAVEAT}\n\n{clock}"


def factor_note(chips: Iterable[str]) -> str:
    """Returns how long computation took on each real chip, relative to the compiler's hours."""
    factors = "; ".join(f"{chip} {calibration_of(chip)}" for chip in chips)
    return (
        "Hours are the compiler's estimates. Measured over estimated time of computation, without "
        f"exposed collectives: {factors}."
    )


def clock_footnote(names: list[str]) -> str:
    """Returns the footnote about chips whose clock is assumed; "" if `names` is empty."""
    ranges = []
    for name in names:
        low, high = CHIPS[name].clocks_hz
        ranges.append(
            f"the figures of {name} are at {low / 1e6:.0f} MHz, the slowest that agrees with the "
            f"peak; at {high / 1e6:.0f} MHz, the fastest, rows per second and MFU are "
            f"{high / low - 1:.0%} higher and the hours of computation {1 - low / high:.0%} lower"
        )
    text = CLOCK_FOOTNOTE.format(names=" and ".join(names), ranges="; ".join(ranges))
    return text if names else ""


def format_hours(figures: dict, prefix: str = "") -> str:
    return (
        f"{figures[prefix + 'hours']:.1f} hours, with exposed collectives "
        f"{figures[prefix + 'hours_with_exposed_collectives']:.1f}"
    )


def format_preemption(phase: dict) -> str:
    """Returns what a preemption costs that leaves no time to save: half an interval, on average."""
    most = phase["chip_hours_per_checkpoint"]
    interval = f"checkpoint_every={phase['checkpoint_every']:,}"
    return f"costs {most / 2:.2g} chip-hours on average, {most:.2g} at most, with {interval}"


def format_failure(phase: dict) -> str:
    over = phase["hbm_bytes_over"]
    if over is None:
        minimum = phase["hbm_argument_bytes"] / GIB
        return (
            "DOES NOT FIT: the compiler ran out of device memory and does not report by how much; "
            f"parameters, optimizer state and rows alone need {minimum:.2f} GiB"
        )
    used = phase["hbm_bytes_per_device"]
    return (
        f"DOES NOT FIT by {over / GIB:.2f} GiB: "
        f"needs {used / GIB:.2f}, the compiler "
        f"allows {(used - over) / GIB:.2f}"
    )


def format_step(phase: dict) -> list[str]:
    clock = phase["clock_hz"]

    def ms(cycles: float) -> str:
        return f"{1e3 * cycles / clock:,.2f} ms"

    used = phase["hbm_bytes_per_device"] / GIB
    capacity = phase["hbm_capacity_bytes"] / GIB
    fit = format_failure(phase) if phase["hbm_bytes_over"] else "fits"
    figures = {
        "mesh": " ".join(f"{axis}={size}" for axis, size in phase["mesh"].items()),
        "rows per device": f"{phase['per_device_batch_size']} per microbatch",
        "HBM per device": f"{used:.2f} of {capacity:.0f} GiB: {fit}",
        " by use": ", ".join(
            f"{name} {size / GIB:.3f}" for name, size in phase["hbm_parts"].items()
        ),
        "FLOPs per sequence": f"{phase['model_flops_per_row'] / 1e9:.2f} G analytic, "
        f"{phase['compiled_flops_per_row'] / 1e9:.2f} G compiled",
        "computation": f"{ms(phase['cycles_per_step'])} per step, "
        f"{phase['cycles_per_step']:,.0f} cycles"
        + (f", at {clock / 1e6:.0f} MHz as below" if phase["at_max_clock"] else ""),
    }
    for part, directions in phase["cycles_by_part"].items():
        cycles = sum(directions.values())
        split = ", ".join(f"{name} {ms(each)}" for name, each in directions.items())
        share = f"{cycles / phase['cycles_per_step']:.1%}"
        figures[f" {part}"] = f"{ms(cycles)}, {share} ({split}; {cycles:,.0f} cycles)"
    figures |= {
        "cycles per row": f"{phase['cycles_per_row']:,.0f} of one chip, "
        f"{clock / phase['cycles_per_row']:,.1f} rows per second",
        "collectives": "; ".join(
            f"{kind} x{totals['count']:,}, {totals['bytes'] / 2**20:,.1f} MiB"
            for kind, totals in phase["collectives"].items()
        ),
        "time per step": at_each_clock(
            phase,
            lambda each: (
                f"{1e3 * each['computation_seconds']:.2f} ms of computation, collectives at least "
                f"{1e3 * each['collective_seconds']:.2f} ms, "
                f"{1e3 * each['exposed_seconds']:.2f} exposed"
            ),
        ),
        "per chip": at_each_clock(
            phase,
            lambda each: (
                f"{each['rows_per_second_per_chip']:,.1f} rows per second"
                + ("" if each["mfu"] is None else f", MFU {each['mfu']:.1%}")
            ),
        ),
        "documents": phase["document_tokens"]
        and f"of {phase['document_tokens']:,} tokens on average, packed; without MFU, whose FLOPs "
        "would count whole rows",
        f"{phase['num_steps']:,} steps": at_each_clock(phase, format_hours),
        "a preemption": format_preemption(phase),
        "compile time": f"{phase['compile_seconds']:.0f} s",
        "no estimate for": ", ".join(
            f"{name} x{n}" for name, n in phase["without_estimate"].items()
        ),
        "loops counted once": ", ".join(phase["loops_counted_once"]),
    }
    lines = [f"{name:<20}  {figure}" for name, figure in figures.items() if figure]
    for row in phase["costliest"]:
        start = f"{row['cycles']:>12,} cycles, {ms(row['cycles'])}, x{row['runs']:<4}"
        start += f"{row['name']}  {row['shape'][:60]}"
        lines.append(f"{start}  {row['op_name'][-90:]}")
    for arrays, totals in phase["largest_collectives"].items():
        lines.append(f"{totals['bytes'] / 2**20:>8,.1f} MiB x{totals['count']:<4}{arrays[:90]}")
    return lines


def format_sweep_row(row: dict) -> str:
    start = f"mesh {row['sizes']:<8} remat {row['remat']:<5}"
    if not row["fits"]:
        return f"{start} " + (f"invalid: {row['error']}" if "error" in row else "does not fit")
    hours = at_each_clock(row, lambda each: format_hours(each, "total_"))
    used = row["hbm_bytes_per_device"] / GIB
    return f"{start} {used:6.2f} GiB {hours}; fits up to {row['largest_batch']} rows per device"


def format_table_row(name: str, report: dict, phase: dict) -> str:
    capacity = phase["hbm_capacity_bytes"] / GIB
    cells = [f"`{name}`", report["topology"], phase["max_seq_length"], phase["batch_size"]]
    mark = " †" * bool(CHIPS[parse_topology(report["topology"])[0]].max_clock_hz)
    if phase["fits"]:
        cells += [
            phase["per_device_batch_size"],
            "x".join(str(size) for size in phase["mesh"].values()),
            report["remat"],
            f"{phase['hbm_bytes_per_device'] / GIB:.1f} of {capacity:.0f}",
            # With remat, layers are computed twice.
            f"{flops_ratio(phase):.1%}" if report["remat"] == "none" else "",
            f"{phase['cycles_per_row']:,.0f}{' *' * has_missing_cycles(phase)}",
            f"{phase['rows_per_second_per_chip']:,.0f}{mark}",
            f"{phase['mfu']:.0%}{mark}",
            f"+{phase['exposed_seconds'] / phase['computation_seconds']:.0%}{mark}",
            f"{phase['hours_with_exposed_collectives']:.1f}{mark}",
            f"{phase['compile_seconds']:.0f} s",
        ]
    else:
        cells.append(f"does not fit {capacity:.0f} GiB")
    return f"| {' | '.join(map(str, cells))} |\n"


def flops_ratio(phase: dict) -> float:
    return phase["compiled_flops_per_row"] / phase["model_flops_per_row"]


def has_missing_cycles(phase: dict) -> bool:
    return bool(phase["loops_counted_once"]) or "tpu_custom_call" in phase["without_estimate"]


def format_flags(changes: Mapping) -> str:
    """Returns changes of a configuration as flags, quoted for a shell."""
    return shlex.join(f"--config.{field}={value}" for field, value in changes.items())


def total_hours(report: dict) -> float:
    """Returns the hours of all steps, with exposed collectives."""
    return report["total_hours_with_exposed_collectives"]
