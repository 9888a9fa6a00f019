"""What a run takes on slices: hours, prices, ranking, and the table."""

import dataclasses
import datetime

import pytest

from bert_jax.configs.pretrain import bert_base
from bert_jax.pods.estimate import pod_report, rent_offers
from bert_jax.pods.estimate.calibration import Calibration, Range
from bert_jax.pods.estimate.hlo_cost import MissingKernelCycles
from bert_jax.pods.estimate.rent_offers import Offer, Run, make_offer, price_of, ranked
from bert_jax.pods.estimate.roofline import ERROR, Layout, Plan, Step, Work, device_peak
from bert_jax.pods.estimate.run_hours import Assumptions

NOW = datetime.datetime(2026, 11, 30, 12, tzinfo=datetime.UTC)
WORK = Work("", 256, 36_000, 512, 1e11, 10**6, 10**6, 10**8, 12 * 10**8)
STEP = Step(0.2, 0.1, 0.1, 0.05, 2**30)
PLAN = Plan(Layout(1, "none", True), (32,), (STEP,), True)
RUN = Run(10_000, 5_000, 0, Assumptions(startup_minutes=60, compile_minutes=0))
TWICE = Calibration("v5e", 2.0, 1.5, 3.0, 4, "four measurements")


def offer(topology="v5e:2x4", hours=(1.0, 2.0, 4.0), fits=True, **fields) -> Offer:
    return Offer(topology, PLAN._replace(fits=fits), hours=Range(*hours), **fields)


def test_hours_are_a_range_of_calibrated_computation_and_communication():
    compiled = make_offer("v5e:2x4", [WORK], PLAN, RUN, TWICE, is_compiled=True)
    copies = 8 * 1.2 / 3600  # 1.2 GB at 1 GB per second by the one host, eight times.
    for hours, factor in zip(compiled.hours, (1.5, 2.0, 3.0), strict=True):
        assert hours == pytest.approx(10 * (0.4 * factor + 0.05) + 1 + copies)
    assert compiled.limit == "products 44%"
    flops = 256 * 1e11 / (0.85 * device_peak("v5e") * 8)
    assert compiled.mfu == pytest.approx(flops)
    roofline = make_offer("v5e:2x4", [WORK], PLAN, RUN, TWICE)
    steps = [each - 1 - copies for each in roofline.hours]
    assert steps[0] == pytest.approx(10 * (0.4 * 1.5 + 0.05) / (1 + ERROR))
    assert steps[2] == pytest.approx(10 * (0.4 * 3 + 0.05) * (1 + ERROR))


def test_evaluations_take_a_third_of_the_computation_of_their_rows():
    run = RUN._replace(heldout_rows=2560)
    # After 10,000, 20,000 and 30,000 steps, and at the end.
    without, with_them = (
        make_offer("v5e:2x4", [WORK], PLAN, each, TWICE, True).hours.typical for each in (RUN, run)
    )
    assert with_them - without == pytest.approx(4 * 10 * (2 * 0.4) / 3 / 3600)
    full = PLAN._replace(layout=Layout(1, "full", True))  # Its update has two forward passes.
    without, with_them = (
        make_offer("v5e:2x4", [WORK], full, each, TWICE, True).hours.typical for each in (RUN, run)
    )
    assert with_them - without == pytest.approx(4 * 10 * (2 * 0.4) / 4 / 3600)


def test_phases_add_up_and_reasons_for_no_calibration_are_said_once():
    long = dataclasses.replace(WORK, name="long_phase", length=4)
    plan = PLAN._replace(rows=(32, 32), steps=(STEP, STEP._replace(exposed=0.0)))
    found = make_offer("v5e:2x4", [WORK, long], plan, RUN, TWICE, True)
    assert found.parts.steps == pytest.approx(10 * (0.85 + 0.8))
    assert len(found.not_calibrated) == 2 and "128 tokens" in found.not_calibrated[1]


def test_compiled_steps_replace_those_of_the_roofline_in_proportion():
    phase = {"computation_seconds": 0.8, "exposed_seconds": 0.3, "hbm_bytes_per_device": 5}
    (step,) = rent_offers.with_compiled_steps(PLAN, [phase]).steps
    assert step == pytest.approx((0.4, 0.2, 0.2, 0.3, 5))


def compile_with(monkeypatch, answers: list) -> tuple[list[dict], Offer]:
    """Compiles an offer with a compiler that gives `answers`; returns what it tried, and the offer.

    An answer is whether a step fits, or an exception.
    """
    remaining, tried = iter(answers), []

    def fake_report(config, *_):
        tried.append((config.per_device_batch_size, config.model.remat, config.mesh.fsdp))
        answer = next(remaining)
        if isinstance(answer, Exception):
            raise answer
        phase = {"computation_seconds": 2.0, "exposed_seconds": 0.5, "hbm_bytes_per_device": 7}
        phase |= {"clock_hz": 10, "num_steps": 3}
        phase["cycles_by_part"] = {"attention": {"forward": 1, "backward": 14}, "heads": {"f": 5}}
        return {"fits": answer, "compile_seconds": 1.0, "phases": [phase]}

    monkeypatch.setattr(pod_report, "report", fake_report)

    def offer_of(topology, plan, is_compiled):
        return make_offer(topology, [WORK], plan, RUN, TWICE, is_compiled)

    config = bert_base.get_config()
    (first, *_) = rent_offers.best_plans([WORK], "v5e:2x4")
    given = offer_of("v5e:2x4", first, False)
    found = rent_offers.compile_offer(config, [], None, [WORK], given, offer_of)
    return tried, found


def test_plan_that_fits_gets_the_time_of_the_compiler(monkeypatch, capsys):
    tried, found = compile_with(monkeypatch, [True])
    assert found.is_compiled and found.plan.fits and len(tried) == 1
    assert found.plan.steps[0].seconds == pytest.approx(2.5)
    assert found.limit == "attention 60%"  # 1.5 s of the step's 2.5.
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].startswith("compiling v5e:2x4 (v5litepod-8) --config.")
    assert lines[1].startswith("  fits: ")


def test_plans_that_need_less_memory_follow_one_that_does_not_fit(monkeypatch):
    plans = rent_offers.best_plans([WORK], "v5e:2x4")
    assert [plan.fits for plan in plans] == sorted((plan.fits for plan in plans), reverse=True)
    tried, found = compile_with(monkeypatch, [False, False, True])
    assert found.is_compiled and len(set(tried)) == 3
    tried, found = compile_with(monkeypatch, [False] * rent_offers.MAX_TRIES)
    assert len(tried) == rent_offers.MAX_TRIES and found.plan is None and found.problem


def test_slice_whose_kernels_have_no_cycles_keeps_its_rank_and_says_so(monkeypatch):
    _, found = compile_with(monkeypatch, [MissingKernelCycles("no cycles of 64 tokens")])
    assert not found.is_compiled and not found.problem
    assert "not compiled: no cycles of 64 tokens" in found.not_calibrated[-1]


def test_slice_that_the_compiler_rejects_keeps_its_roofline(monkeypatch, capsys):
    tried, found = compile_with(monkeypatch, [ValueError("no entry for v5e")])
    assert len(tried) == 1 and not found.is_compiled and found.plan.fits and found.problem
    assert "no entry for v5e" in capsys.readouterr().out


def test_slice_that_the_compiler_rejects_is_never_the_best():
    offers = [
        Offer("v4:2x2x1", problem="does not fit"),
        offer("v5e:2x4", (1, 1, 1))._replace(problem="is not compiled"),
        offer("v6e:2x4", (2, 2, 2)),
    ]
    order = ranked(offers, {}, None)
    assert [each.topology for each in order] == ["v6e:2x4", "v5e:2x4", "v4:2x2x1"]
    assert rent_offers.table_row(order[1], None, None)[-1] == "roofline, rejected"


@pytest.mark.parametrize(
    ("hours", "compiled"),
    [
        ({"v4:2x2x1": 1, "v5e:2x4": 2}, ["v4:2x2x1"]),
        ({"v4:2x2x1": 9, "v5e:2x4": 2}, ["v4:2x2x1", "v5e:2x4"]),
        ({"v4:2x2x1": 9, "v5e:2x4": 8, "v6e:2x4": 7}, ["v4:2x2x1", "v5e:2x4", "v6e:2x4"]),
        ({"v4:2x2x1": None, "v5e:2x4": 2}, ["v4:2x2x1", "v5e:2x4"]),
    ],
)
def test_offers_are_compiled_until_the_best_one_is(hours, compiled):
    """By roofline the three take 1, 2 and 3 hours; None: they do not fit."""
    tried = []

    def compile_one(given):
        tried.append(given.topology)
        found = hours[given.topology]
        if found is None:
            return Offer(given.topology, problem="does not fit")
        return given._replace(hours=Range(found, found, found), is_compiled=True)

    offers = [
        offer(name, (n, n, n)) for n, name in enumerate(("v4:2x2x1", "v5e:2x4", "v6e:2x4"), 1)
    ]
    found = rent_offers.compile_best(offers, 1, compile_one, lambda each: ranked(each, {}, None))
    assert tried == compiled and found[0].is_compiled


def test_fastest_clock_shortens_all_but_memory_and_links():
    def offer_of(topology, plan, is_compiled):
        return Offer(topology, plan, is_compiled)

    (step,) = rent_offers.at_max_clock(offer("v6e:2x4"), offer_of).plan.steps
    ratio = 1750 / 2486
    assert step == pytest.approx((0.2 * ratio, 0.1 * ratio, 0.1, 0.05, 2**30), rel=1e-3)
    for unchanged in (offer("v5e:2x4"), offer("v6e:2x4", problem="rejected"), Offer("v6e:2x4")):
        assert rent_offers.at_max_clock(unchanged, offer_of) is unchanged


def test_slice_that_is_surely_in_time_runs_and_ends_before_the_deadline_in_all_cases():
    offers = [offer("v4:2x2x1", (1, 2, 9)), offer("v5e:2x4", (1, 1, 1), problem="rejected")]
    assert rent_offers.surely_in_time(offers, 4) is None
    sure = offer("v6e:2x4", (3, 3, 4))
    assert rent_offers.surely_in_time([*offers, sure], 4) is sure


def test_price_is_that_of_all_chips_not_devices():
    assert price_of(offer("v5e:2x4"), 1.5) == (12.0, 24.0, 48.0)
    assert price_of(offer("tpu7x:2x2x1"), 1.5) == (6.0, 12.0, 24.0)
    assert price_of(offer(), None) is None and price_of(Offer("v5e:2x4"), 1.5) is None


def test_cheapest_in_time_is_first_and_what_does_not_run_last():
    offers = [
        Offer("v4:8x8x8", problem="batch"),
        offer("v6e:2x4", (1, 2, 4)),
        offer("v5e:2x2", (9, 10, 20), fits=False),
        offer("v5e:2x4", (3, 4, 8)),
        offer("v5e:1x1", (20, 30, 60)),
        offer("v5p:2x2x1", (1, 1, 1)),
    ]
    prices = {"v5e": 1.0, "v6e": 3.0}

    def order(prices, deadline):
        return [each.topology for each in ranked(offers, prices, deadline)]

    last = ["v4:8x8x8", "v5e:2x2"]
    assert sorted(order(prices, None)[4:]) == last
    assert order(prices, None)[:4] == ["v5e:1x1", "v5e:2x4", "v6e:2x4", "v5p:2x2x1"]
    assert order(prices, 10)[:4] == ["v5e:2x4", "v6e:2x4", "v5p:2x2x1", "v5e:1x1"]
    assert order({}, None)[:4] == ["v5p:2x2x1", "v6e:2x4", "v5e:2x4", "v5e:1x1"]


@pytest.mark.parametrize(("deadline", "answer"), [(0.5, "no"), (1, "perhaps"), (4, "yes")])
def test_in_time_says_whether_all_some_or_no_hours_are_within(deadline, answer):
    assert rent_offers.in_time(offer(), deadline) == answer


@pytest.mark.parametrize(
    ("text", "hours"),
    [
        ("36h", 36),
        ("1.5h", 1.5),
        ("3d", 72),
        ("2026-11-30", 12),
        ("2026-12-01T00:30", 12.5),
        ("2026-12-01T00:30+02:00", 10.5),
    ],
)
def test_deadline_is_hours_from_now(text, hours):
    assert rent_offers.parse_deadline(text, NOW) == pytest.approx(hours)


@pytest.mark.parametrize("text", ["", "36", "h", "-3h", "0h", "soon", "2026-11-29", "2026-13-01"])
def test_wrong_or_past_deadline_is_refused(text):
    with pytest.raises(ValueError, match=f"--deadline={text}"):
        rent_offers.parse_deadline(text, NOW)


def test_table_has_both_names_ranges_and_why_a_slice_is_out():
    rows = [
        rent_offers.table_row(offer(limit="links 60%", not_calibrated=("few rows",)), 1.5, 48),
        rent_offers.table_row(offer(fits=False), 1.5, 48),
        rent_offers.table_row(Offer("v4:8x8x8", problem="too many devices"), None, 48),
    ]
    lines = rent_offers.format_table(rows).splitlines()
    assert len(lines) == 5 and len({len(line) for line in lines}) == 1
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    fits, does_not, batch = (dict(zip(cells[0], row, strict=True)) for row in cells[2:])
    assert fits["slice"] == "v5e:2x4 (v5litepod-8)" and fits["fits, GiB"] == "1.0 of 16"
    assert fits["hours"] == "2.0 (1.0 to 4.0) ?" and fits["price"] == "24.0 (12.0 to 48.0)"
    assert fits["mesh"] == "8x1x1, sharded" and fits["in time"] == "yes"
    assert fits["limited by"] == "links 60%" and fits["estimate"] == "roofline"
    assert does_not["fits, GiB"].startswith("no: ") and does_not["in time"] == ""
    assert does_not["hours"] == does_not["price"] == does_not["MFU"] == ""
    assert batch["fits, GiB"] == "no: too many devices" and batch["hours"] == ""


def test_columns_without_content_are_left_out():
    (head, *_) = rent_offers.format_table([rent_offers.table_row(offer(), None, None)]).splitlines()
    assert "price" not in head and "in time" not in head
