"""Compares TPU slices for a pre-training run: whether it fits, its hours, and its price.

A roofline ranks the slices in seconds, without a TPU and without its compiler; the TPU compiler
(`libtpu`, installed by `pip install 'jax[tpu]'`) then compiles the steps for the best few.

python tools/rent.py --config=configs/pretrain/bert_base.py --chips=v4-32,v5e-8,v6e-8 \
    --prices=configs/tpu_prices.toml --deadline=3d
python tools/rent.py --config=configs/pretrain/bert_large.py --chips=v5e-64,v6e-32 --compile=0 \
    --prices=my_prices.toml --spot --preemptions_per_day=2

docs/tpu.md says what the columns mean, and what is assumed.
"""

import datetime
import importlib.util
import sys
import time

import jax
from absl import app, flags
from ml_collections import ConfigDict, config_flags

from bert_jax.pods.chips import CHIPS, both_names, parse_topology, shape_name
from bert_jax.pods.estimate import planned, rent_offers, report_text, roofline, run_hours
from bert_jax.pods.estimate.calibration import Calibration, calibration_of
from bert_jax.pods.estimate.prices import KINDS, Prices, describe_prices, read_prices
from bert_jax.pods.estimate.rent_offers import Offer, Run
from bert_jax.pods.estimate.roofline import Plan
from bert_jax.runtime.command_line import (
    define_config,
    describe_error,
    log_warnings_only,
    parse_flags,
)
from bert_jax.sweeps.settings import known_fields
from bert_jax.training.phases import Phase

CONFIG = define_config("Configuration of a pre-training run.", known_fields)
SLICES = flags.DEFINE_list(
    "chips", None, "Slices to compare, by either name: v4-32, v5e-8 or v4:2x2x4.", required=True
)
PRICES = flags.DEFINE_string(
    "prices", None, "File with the prices of chips, like configs/tpu_prices.toml, which you edit."
)
SPOT = flags.DEFINE_bool("spot", False, "Rent spot capacity, at its prices; it is preempted.")
PREEMPTIONS = flags.DEFINE_float(
    "preemptions_per_day",
    1.0,
    "Assumed with --spot: preemptions of the slice per day, on average.",
    0.001,
)
DEADLINE = flags.DEFINE_string(
    "deadline", None, "When the run must end: 36h or 3d from now, or 2026-12-24T18:00."
)
COMPILE = flags.DEFINE_integer("compile", 3, "Number of best slices to compile for.", 0)
STARTUP = flags.DEFINE_float(
    "startup_minutes",
    8.0,
    "Assumed: minutes from the slice's creation to the start of the program.",
    0,
)
COMPILE_MINUTES = flags.DEFINE_float(
    "compile_minutes", 2.0, "Assumed: minutes from the start of the program to the first step.", 0
)
HELDOUT_ROWS = flags.DEFINE_integer(
    "heldout_rows",
    None,
    "Rows of an evaluation. Default: as the configuration and its corpus say, or 10,000.",
    0,
)
CALIBRATION = flags.DEFINE_list(
    "calibration",
    [],
    "Files of tools/calibrate.py, as CHIP=FILE. Default: what others published of each chip.",
)
LENGTH = flags.DEFINE_integer(
    "max_seq_length", None, "Row length of the first phase, if no corpus is given.", 1
)
LONG_LENGTH = flags.DEFINE_integer(
    "long_max_seq_length", None, "Row length of later phases, if no corpus is given.", 1
)


def check_flags() -> None:
    """Raises ValueError for flags that contradict each other."""
    config = CONFIG.value
    if config is None:
        raise ValueError("expected --config=FILE")
    if config.get("program") != "pretrain":
        raise ValueError(
            "expected the configuration of a pre-training run: see tools/tpu_report.py"
        )
    if flags.FLAGS["preemptions_per_day"].present and not SPOT.value:
        raise ValueError("--preemptions_per_day has no effect without --spot: add it")
    for slice_name in SLICES.value:
        if parse_topology(slice_name)[2] > 1:
            raise ValueError(
                f"--chips={slice_name}: the network between slices has no estimate: "
                "compare single slices"
            )


def heldout_rows(config: ConfigDict, phase: Phase) -> int:
    """Returns the rows of an evaluation: given, of the corpus, at most as configured, or 10,000."""
    if HELDOUT_ROWS.value is not None:
        return HELDOUT_ROWS.value
    most = config.max_eval_batches * config.eval_batch_size
    if phase.heldout is None:
        return most or 10_000
    return sum(min(rows.num_rows, most or rows.num_rows) for rows in phase.heldout.values())


def read_calibrations(topologies: list[str]) -> dict[str, Calibration]:
    """Returns the calibration of each chip."""
    chips = dict.fromkeys(parse_topology(each)[0] for each in topologies)
    files = dict(each.partition("=")[::2] for each in CALIBRATION.value)
    for chip, file in files.items():
        if chip not in chips or not file:
            expected = f"expected CHIP=FILE, CHIP one of {', '.join(chips)}"
            raise ValueError(f"--calibration={chip}={file}: {expected}")
    if len(files) < len(CALIBRATION.value):
        raise ValueError(f"--calibration={','.join(CALIBRATION.value)} has a chip twice")
    return {chip: calibration_of(chip, files.get(chip)) for chip in chips}


def run() -> bool:
    """Prints the tables. Returns whether the run fits a slice and, if given, the deadline."""
    started = time.monotonic()
    check_flags()
    config = CONFIG.value
    topologies = list(dict.fromkeys(shape_name(each) for each in SLICES.value))
    now = datetime.datetime.now().astimezone()
    deadline = rent_offers.parse_deadline(DEADLINE.value, now) if DEADLINE.value else None
    prices = read_prices(PRICES.value) if PRICES.value else Prices(now.date(), "", {})
    per_chip_hour = prices.per_chip_hour.get(KINDS[SPOT.value], {})
    calibrations = read_calibrations(topologies)

    phases, tokenizer = planned.plan_run(config, (LENGTH.value, LONG_LENGTH.value))
    works = roofline.describe_work(config, phases, tokenizer)
    assumptions = run_hours.Assumptions(
        startup_minutes=STARTUP.value,
        compile_minutes=COMPILE_MINUTES.value,
        preemptions_per_day=PREEMPTIONS.value if SPOT.value else 0.0,
    )
    settings = Run(
        eval_every=config.eval_every,
        checkpoint_every=config.checkpoint_every,
        heldout_rows=heldout_rows(config, phases[-1]),
        assumptions=assumptions,
    )

    def offer_of(topology: str, plan: Plan, is_compiled: bool = False) -> Offer:
        calibration = calibrations[parse_topology(topology)[0]]
        return rent_offers.make_offer(topology, works, plan, settings, calibration, is_compiled)

    def show(offers: list[Offer]) -> None:
        rows = [
            rent_offers.table_row(
                each, per_chip_hour.get(parse_topology(each.topology)[0]), deadline
            )
            for each in offers
        ]
        print(rent_offers.format_table(rows), flush=True)

    offers = []
    for topology in topologies:
        if plans := rent_offers.best_plans(works, topology):
            offers.append(offer_of(topology, plans[0]))
        else:
            sizes = " and ".join(dict.fromkeys(str(work.batch_size) for work in works))
            devices = roofline.num_devices(topology)
            problem = f"batches of {sizes} rows cannot be divided over {devices} devices"
            offers.append(Offer(topology, problem=problem))

    def rank(offers: list[Offer]) -> list[Offer]:
        return rent_offers.ranked(offers, per_chip_hour, deadline)

    offers = rank(offers)
    show(offers)
    print(f"By roofline, in {time.monotonic() - started:.0f} s.", flush=True)

    num_to_compile = COMPILE.value
    if num_to_compile and importlib.util.find_spec("libtpu") is None:
        print("Nothing is compiled: the TPU compiler is missing. pip install 'jax[tpu]'")
        num_to_compile = 0
    if num_to_compile:
        print()
        offers = rent_offers.compile_best(
            offers,
            num_to_compile,
            lambda offer: rent_offers.compile_offer(
                config, phases, tokenizer, works, offer, offer_of
            ),
            rank,
        )
        print()
        show(offers)

    print(f"\n{describe_assumptions(settings, calibrations, offers)}")
    if PRICES.value:
        print(describe_prices(prices, PRICES.value, now.date()))
        if missing := calibrations.keys() - per_chip_hour.keys():
            names = ", ".join(name for name in CHIPS if name in missing)
            print(
                f"No price: {PRICES.value} has no entry for {names} in [{KINDS[SPOT.value]}]. "
                "Slices without a price come after the others, the fastest first."
            )
    first = offers[0]
    if first.plan is None or not first.plan.fits:
        print("\nThe run fits none of these slices.")
        return False
    if first.problem:
        print("\nThe compiler rejected every slice that fits by roofline: none is recommended.")
        return False
    changes = config_flags.get_override_values(flags.FLAGS["config"])
    changes = changes | roofline.plan_changes(config, works, first.plan, first.topology)
    if first.parts.checkpoint_every != config.checkpoint_every:
        changes["checkpoint_every"] = first.parts.checkpoint_every
    file = config_flags.get_config_filename(flags.FLAGS["config"])
    new_flags = f"--config={file} {report_text.format_flags(changes)}".strip()
    how = "" if first.is_compiled else ", by roofline alone"
    print(f"\nBest{how}: {both_names(first.topology)}, with {new_flags}")
    print(describe_parts(first.parts))

    def describe(offer: Offer) -> str:
        price = rent_offers.price_of(offer, per_chip_hour.get(parse_topology(offer.topology)[0]))
        cost = f", {price} {prices.currency}" if price else ""
        return f"{both_names(offer.topology)}, {offer.hours} hours{cost}"

    if deadline is not None and rent_offers.in_time(first, deadline) != "yes":
        surely = rent_offers.surely_in_time(offers, deadline)
        print(f"It may be late; surely in time: {describe(surely) if surely else 'none'}")
    if assumed := [chip for chip in calibrations if CHIPS[chip].max_clock_hz]:
        fastest = rank([rent_offers.at_max_clock(each, offer_of) for each in offers])[0]
        names = " and ".join(assumed)
        print(f"At the fastest clock that the peak of {names} allows, best: {describe(fastest)}")
    return deadline is None or first.hours.typical <= deadline


def describe_parts(parts: run_hours.RunHours) -> str:
    """Returns what the typical hours consist of."""
    names = ("steps", "evaluation", "checkpoints", "start-up and compilation", "preemptions")
    hours = zip(names, parts, strict=False)
    return "Hours: " + ", ".join(f"{name} {each:.2f}" for name, each in hours if each)


def describe_assumptions(
    settings: Run, calibrations: dict[str, Calibration], offers: list[Offer]
) -> str:
    """Returns what the hours rest on."""
    assumed = settings.assumptions
    lines = [
        f"Hours include {assumed.startup_minutes:g} minutes of start-up and "
        f"{assumed.compile_minutes:g} of compilation, evaluations of {settings.heldout_rows:,} "
        f"rows, and checkpoints; waiting for capacity is not in them."
    ]
    if assumed.preemptions_per_day:
        lines.append(
            f"Spot: {assumed.preemptions_per_day:g} preemptions per day are assumed, and the best "
            "checkpoint_every for them."
        )
    for chip, each in calibrations.items():
        lines.append(f"{chip}: compiler's estimate x {each}.")
        if CHIPS[chip].max_clock_hz:
            clocks = " to ".join(f"{clock / 1e6:.0f}" for clock in CHIPS[chip].clocks_hz)
            lines.append(
                f"{chip}: its clock is not published, its peak allows {clocks} MHz; hours and "
                "prices are at the slowest, which published times fit."
            )
    for each in offers:
        if each.not_calibrated:
            lines.append(f"? {each.topology} is not calibrated: {'; '.join(each.not_calibrated)}.")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    log_warnings_only()
    try:
        fits = run()
    except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
        sys.exit(f"rent: {' '.join(describe_error(error).split())}")
    sys.exit(0 if fits else 1)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
