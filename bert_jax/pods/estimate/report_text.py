"""Formats the reports of `pod_report` as text and as rows of a table."""

from collections.abc import Callable

from bert_jax.pods.chips import CHIPS, GIB, parse_topology

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
    "{high} MHz is\nthe fastest: there the product takes all of it. Times, rates, hours and prices "
    "are given at both:\ncompare chips at both."
)
FOOTNOTE = (
    "\n\\* Too low: custom kernels have no estimate, and a loop with an unknown trip count is "
    "counted once.\n"
)
CLOCK_FOOTNOTE = "\n† The clock of {names} is not published: {ranges}.\n"


def format_report(report: dict) -> str:
    lines = [
        f"{report['topology']}: {report['num_chips']} chips, {report['num_devices']} devices of "
        f"kind {report['device_kind']!r}, {format_clock(report['topology'])}; "
        f"{report['num_params']:,} parameters; remat {report['remat']}"
    ]
    for phase in report["phases"]:
        lines += ["", f"rows of {phase['max_seq_length']} tokens, batch {phase['batch_size']:,}"]
        figures = format_step(phase) if phase["hbm_parts"] else [format_failure(phase)]
        lines += [f"  {line}" for line in figures]
    if report["fits"]:
        total = at_each_clock(report, lambda each: format_hours(each, "total_"))
        lines += ["", f"{'total':<24}{total}"]
        if "price" in report:
            price = at_each_clock(report, lambda each: f"{each['price']:,.2f}")
            lines.append(f"{'price':<24}{price}, with exposed collectives")
    return "\n".join([*lines, "", caveats(report["topology"])])


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
        "time per step": at_each_clock(
            phase,
            lambda each: (
                f"{1e3 * each['step_seconds']:.2f} ms, collectives at least "
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
        start = f"{row['cycles']:>12,} x{row['runs']:<4}{row['name']}  {row['shape'][:60]}"
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
            f"+{phase['exposed_seconds'] / phase['step_seconds']:.0%}{mark}",
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


def exposed_hours(report: dict) -> float:
    return report["total_hours_with_exposed_collectives"]
