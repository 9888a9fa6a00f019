"""Compares what a pre-training run would take and cost on several slices, for tools/rent.py."""

import collections
import datetime
import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from bert_jax.pods.chips import CHIPS, GIB, both_names, num_hosts, parse_topology
from bert_jax.pods.estimate import pod_report
from bert_jax.pods.estimate.calibration import (
    Calibration,
    Range,
    TimedStep,
    calibrated_range,
    why_not_calibrated,
)
from bert_jax.pods.estimate.hlo_cost import MissingKernelCycles
from bert_jax.pods.estimate.report_text import format_flags
from bert_jax.pods.estimate.roofline import (
    ERROR,
    RECOMPUTED,
    Plan,
    Step,
    Work,
    device_peak,
    num_devices,
    plan_changes,
    possible_plans,
)
from bert_jax.pods.estimate.run_hours import Assumptions, RunHours, hours_of_run
from bert_jax.runtime.command_line import describe_error
from bert_jax.training.phases import Phase

COLUMNS = (
    "slice",
    "fits, GiB",
    "rows per device",
    "remat",
    "mesh",
    "hours",
    "price",
    "in time",
    "MFU",
    "limited by",
    "estimate",
)
MAX_TRIES = 3  # Plans of a slice to compile until one fits.
EVALUATION_SHARE = 1 / 3  # Of an update that computes nothing twice: the forward pass.


class Run(NamedTuple):
    """What a configuration says of a run beside its steps, and what is assumed."""

    eval_every: int
    checkpoint_every: int
    heldout_rows: int
    assumptions: Assumptions


class Offer(NamedTuple):
    """A slice, and what the run takes there.

    Attributes:
      topology: the slice.
      plan: how it runs; None if it cannot.
      is_compiled: whether the compiler estimated the plan's steps, or the roofline.
      hours: of the run, of which the typical one has parts.
      parts: of the typical hours.
      mfu: of a step, exposed communication included, typical.
      limit: what takes the most time.
      not_calibrated: why the hours may be outside of their range.
      problem: why it cannot run, or why its steps were not compiled; "" if neither.
    """

    topology: str
    plan: Plan | None = None
    is_compiled: bool = False
    hours: Range = Range(math.inf, math.inf, math.inf)
    parts: RunHours | None = None
    mfu: float = 0.0
    limit: str = ""
    not_calibrated: tuple[str, ...] = ()
    problem: str = ""


def make_offer(
    topology: str,
    works: Sequence[Work],
    plan: Plan,
    run: Run,
    calibration: Calibration,
    is_compiled: bool = False,
) -> Offer:
    """Returns what a run takes with a plan, whose steps are at the clock of `CHIPS`.

    The range of hours is the calibration's and, without the compiler, also that of the roofline.
    """
    chip, devices = parse_topology(topology)[0], num_devices(topology)
    num_chips = devices // CHIPS[chip].devices_per_chip
    slack = 1 if is_compiled else 1 + ERROR
    num_steps = sum(work.num_steps for work in works)
    seconds, timed_steps, flops = [0.0, 0.0, 0.0], [], 0.0
    for work, rows, step in zip(works, plan.rows, plan.steps, strict=True):
        low, typical, high = calibrated_range(calibration, step.computation, step.exposed)
        for index, each in enumerate((low / slack, typical, high * slack)):
            seconds[index] += work.num_steps * each
        flops += work.num_steps * work.batch_size * work.flops
        times = step.computation, step.exposed
        timed_steps.append(TimedStep(rows, work.length, work.num_params, *times))
    last = works[-1]
    share = EVALUATION_SHARE / (1 + RECOMPUTED[plan.layout.remat])
    share *= run.heldout_rows / last.batch_size
    low, typical, high = calibrated_range(calibration, share * plan.steps[-1].computation)
    evaluations = low / slack, typical, high * slack
    parts = [
        hours_of_run(
            step=total / num_steps,
            num_steps=num_steps,
            evaluation=evaluation,
            num_evaluations=1 + (num_steps - 1) // run.eval_every if run.eval_every else 1,
            checkpoint_every=run.checkpoint_every,
            checkpoint_bytes=last.state_bytes,
            num_hosts=num_hosts(chip, num_chips),
            assumptions=run.assumptions,
        )
        for total, evaluation in zip(seconds, evaluations, strict=True)
    ]
    return Offer(
        topology=topology,
        plan=plan,
        is_compiled=is_compiled,
        hours=Range(*(each.total for each in parts)),
        parts=parts[1],
        mfu=flops / (seconds[1] * device_peak(chip) * devices),
        limit=what_limits(works, plan),
        not_calibrated=tuple(why_not_calibrated(calibration, timed_steps)),
    )


def best_plans(works: Sequence[Work], topology: str) -> list[Plan]:
    """Returns the plans for a slice, the best first: those that fit by time, others by memory."""

    def key(plan: Plan):
        seconds = sum(
            work.num_steps * step.seconds for work, step in zip(works, plan.steps, strict=True)
        )
        memory = max(step.hbm_bytes for step in plan.steps)
        return (not plan.fits, seconds if plan.fits else memory)

    return sorted(possible_plans(works, topology), key=key)


def compile_offer(
    config: ConfigDict,
    phases: list[Phase],
    tokenizer,
    works: Sequence[Work],
    offer: Offer,
    offer_of: Callable[[str, Plan, bool], Offer],
) -> Offer:
    """Compiles the steps of the best plan that fits the slice of an offer, and prints each try.

    `offer_of` returns the offer of a slice with a plan, whose steps may be compiled ones. Returns
    `offer`, that of the roofline, if the table of kernels has no cycles for a step, and with a
    problem if the compiler rejects it.
    """
    topology, tried = offer.topology, []
    for plan in best_plans(works, topology):
        # After a step that does not fit, only those that need less memory.
        memory = max(step.hbm_bytes for step in plan.steps)
        if len(tried) == MAX_TRIES or any(memory >= other for other in tried):
            continue
        changes = plan_changes(config, works, plan, topology)
        print(f"compiling {both_names(topology)} {format_flags(changes)}", flush=True)
        changed = pod_report.with_changes(config, changes)
        try:
            report = pod_report.report(changed, topology, phases, tokenizer)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            problem = f"not compiled: {' '.join(describe_error(error).split())}"
            print(f"  {problem}", flush=True)
            if isinstance(error, MissingKernelCycles):  # That says nothing of the slice.
                return offer._replace(not_calibrated=(*offer.not_calibrated, problem))
            return offer._replace(problem=problem)
        seconds = f"({report['compile_seconds']:.0f} s)"
        if report["fits"]:
            plan = with_compiled_steps(plan._replace(fits=True), report["phases"])
            compiled = offer_of(topology, plan, True)._replace(limit=compiled_limit(report))
            print(f"  fits: {compiled.hours} hours {seconds}", flush=True)
            return compiled
        print(f"  does not fit {seconds}", flush=True)
        tried.append(memory)
    return Offer(topology, problem="no step that was compiled fits")


def compile_best(
    offers: Sequence[Offer],
    count: int,
    compile_one: Callable[[Offer], Offer],
    rank: Callable[[list[Offer]], list[Offer]],
) -> list[Offer]:
    """Compiles the best `count` offers, and further ones until the best is a compiled one.

    Returns all, ranked again. An offer that cannot be compiled is tried once.
    """
    offers, tried = list(offers), set()
    for turn in itertools.count():
        if turn >= count:
            offers = rank(offers)
        untried = [
            each for each in offers if each.plan and each.plan.fits and each.topology not in tried
        ]
        if not untried or (turn >= count and offers[0] is not untried[0]):
            return rank(offers)
        tried.add(untried[0].topology)
        offers[offers.index(untried[0])] = compile_one(untried[0])


def what_limits(works: Sequence[Work], plan: Plan) -> str:
    """Returns what takes the most time of all steps, with its share."""
    totals = [
        sum(work.num_steps * step[part] for work, step in zip(works, plan.steps, strict=True))
        for part in range(4)
    ]
    names = ("products", "rest of the layers", "parameters in HBM", "links")
    most = max(range(4), key=totals.__getitem__)
    return f"{names[most]} {totals[most] / sum(totals):.0%}"


def compiled_limit(report: dict) -> str:
    """Returns the part of the model, or the exposed links, that takes the most time of all steps.

    `report` is that of the compiled steps; the share is of their time.
    """
    totals = collections.Counter()
    for phase in report["phases"]:
        for part, directions in phase["cycles_by_part"].items():
            totals[part] += phase["num_steps"] * sum(directions.values()) / phase["clock_hz"]
        totals["links"] += phase["num_steps"] * phase["exposed_seconds"]
    ((part, most),) = totals.most_common(1)
    return f"{part} {most / totals.total():.0%}"


def at_max_clock(offer: Offer, offer_of: Callable[[str, Plan, bool], Offer]) -> Offer:
    """Returns an offer at the fastest clock of its chip, at which all but HBM and links is faster.

    `offer_of` is that of `compile_offer`.
    """
    chip = CHIPS[parse_topology(offer.topology)[0]]
    if offer.plan is None or offer.problem or not chip.max_clock_hz:
        return offer
    ratio = chip.clock_hz / chip.max_clock_hz
    steps = (
        step._replace(products=ratio * step.products, elements=ratio * step.elements)
        for step in offer.plan.steps
    )
    return offer_of(offer.topology, offer.plan._replace(steps=tuple(steps)), offer.is_compiled)


def with_compiled_steps(plan: Plan, phases: Sequence[dict]) -> Plan:
    """Returns a plan with the estimates of the compiler, from the report's figures of each phase.

    What takes the time of computation stays in proportion.
    """
    steps = []
    for step, phase in zip(plan.steps, phases, strict=True):
        ratio = phase["computation_seconds"] / step.computation
        parts = (ratio * each for each in step[:3])
        steps.append(Step(*parts, phase["exposed_seconds"], phase["hbm_bytes_per_device"]))
    return plan._replace(steps=tuple(steps))


def price_of(offer: Offer, per_chip_hour: float | None) -> Range | None:
    """Returns the price of the slice for the hours of an offer; None if it has no price."""
    if per_chip_hour is None or offer.plan is None:
        return None
    chip = CHIPS[parse_topology(offer.topology)[0]]
    num_chips = num_devices(offer.topology) // chip.devices_per_chip
    return offer.hours.times(num_chips).times(per_chip_hour)


def in_time(offer: Offer, deadline: float | None) -> str:
    """Returns "yes", "perhaps" or "no": whether all, some or none of the hours are within."""
    if offer.plan is None or not offer.plan.fits:
        return ""
    if deadline is None or offer.hours.high <= deadline:
        return "yes"
    return "perhaps" if offer.hours.low <= deadline else "no"


def surely_in_time(offers: Sequence[Offer], deadline: float) -> Offer | None:
    """Returns the first offer all of whose hours are within the deadline; None without one."""
    surely = (each for each in offers if in_time(each, deadline) == "yes" and not each.problem)
    return next(surely, None)


def ranked(
    offers: Sequence[Offer], per_chip_hour: dict[str, float], deadline: float | None
) -> list[Offer]:
    """Returns the offers, the best first.

    Those that fit come first, then those that fit by roofline but were rejected by the compiler,
    then those that do not fit. Among each, those whose typical hours are within the deadline come
    first, by price, or without prices by hours; one without a price is last.
    """

    def key(offer: Offer):
        runs = offer.plan is not None and offer.plan.fits
        is_late = deadline is not None and offer.hours.typical > deadline
        price = price_of(offer, per_chip_hour.get(parse_topology(offer.topology)[0]))
        cost = price.typical if price else math.inf
        return (not runs, bool(offer.problem), is_late, cost, offer.hours.typical)

    return sorted(offers, key=key)


def parse_deadline(text: str, now: datetime.datetime) -> float:
    """Returns the hours until a deadline: "36h", "3d", "2026-12-24" or "2026-12-24T18:00".

    A day is over at its end. Raises ValueError for other text, or a time that has passed.
    """
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([hd])", text):
        hours = float(match[1]) * (24 if match[2] == "d" else 1)
    else:
        try:
            end = datetime.datetime.fromisoformat(text)
        except ValueError:
            raise ValueError(
                f"--deadline={text}: expected hours or days from now, such as 36h or 3d, or a "
                "time, such as 2026-12-24 or 2026-12-24T18:00"
            ) from None
        if len(text) == len("2026-12-24"):
            end += datetime.timedelta(days=1)
        end = end if end.tzinfo else end.replace(tzinfo=now.tzinfo)
        hours = (end - now).total_seconds() / 3600
    if hours <= 0:
        raise ValueError(f"--deadline={text} is over: expected a time from now on")
    return hours


def table_row(offer: Offer, per_chip_hour: float | None, deadline: float | None) -> list[str]:
    """Returns the cells of `COLUMNS` of an offer."""
    if offer.plan is None:
        return [both_names(offer.topology), "no: " + offer.problem, *[""] * (len(COLUMNS) - 2)]
    layout, devices = offer.plan.layout, num_devices(offer.topology)
    used = max(step.hbm_bytes for step in offer.plan.steps) / GIB
    capacity = CHIPS[parse_topology(offer.topology)[0]].hbm_bytes / GIB
    mesh = f"{devices // layout.fsdp}x{layout.fsdp}x1"
    price = price_of(offer, per_chip_hour)
    fits = offer.plan.fits
    return [
        both_names(offer.topology),
        f"{'' if fits else 'no: '}{used:.1f} of {capacity:.0f}",
        ", ".join(map(str, dict.fromkeys(offer.plan.rows))),
        layout.remat,
        mesh + (", sharded" if layout.sharded else ""),
        str(offer.hours) + (" ?" if offer.not_calibrated else "") if fits else "",
        str(price) if price and fits else "",
        in_time(offer, deadline) if deadline is not None else "",
        f"{offer.mfu:.0%}" if fits else "",
        offer.limit if fits else "",
        "compiled" if offer.is_compiled else "roofline" + ", rejected" * bool(offer.problem),
    ]


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Returns aligned columns, which are also a table in Markdown; empty columns are left out."""
    kept = [n for n in range(len(COLUMNS)) if any(row[n] for row in rows)]
    table = [[row[n] for n in kept] for row in (COLUMNS, *rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |"
        for row in table
    ]
    lines.insert(1, f"|{'|'.join('-' * (width + 2) for width in widths)}|")
    return "\n".join(lines)
