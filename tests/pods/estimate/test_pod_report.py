"""Reports of compiled steps, with a fake compiler."""

import collections
import dataclasses
import threading
import types

import jax
import pytest

from bert_jax.configs.pretrain import bert_tiny
from bert_jax.objectives.masked_lm import MaskedLm
from bert_jax.pods.chips import CHIPS
from bert_jax.pods.estimate import compilation, planned, pod_report, pod_table, report_text
from bert_jax.pods.estimate.calibration import Calibration, Range
from bert_jax.pods.estimate.hlo_cost import Cost, MissingKernelCycles
from bert_jax.training import metrics
from bert_jax.training.phases import Phase
from bert_jax.training.pretrain_setup import setup_pretraining

TOPOLOGY = "v4:2x2x2"
MEASURED = Calibration("v4", 1.2, 1.0, 1.5, 3, "three measurements")


@pytest.fixture(autouse=True)
def simulated_devices(monkeypatch):
    """Describes every topology as eight v4 chips."""
    devices = CHIPS["v4"], jax.devices()
    monkeypatch.setattr(compilation, "describe_topology", lambda topology: devices)


def make_phase(batch_size: int) -> Phase:
    rows = types.SimpleNamespace(max_seq_length=128, max_sequences=8)
    return Phase(rows, None, 0, 1, batch_size, max_predictions=20, objective_class=MaskedLm)


def failed_report(rows_per_device: int) -> dict:
    mesh = {"data": 8, "fsdp": 1, "tensor": 1}
    phase = {"per_device_batch_size": rows_per_device}
    return {"phases": [phase], "mesh": mesh, "num_devices": 8}


def test_memory_savings_are_tried_in_order_of_cost(monkeypatch):
    tried = []

    def fake_report(config, topology, phases, tokenizer):
        sharded = config.mesh.fsdp, config.mesh.tensor, config.shard_weight_update
        tried.append((config.per_device_batch_size, config.model.remat, *sharded))
        if config.mesh.fsdp == 4 and config.mesh.tensor == 1:
            raise ValueError("invalid mesh")
        return {"fits": len(tried) == 8}

    monkeypatch.setattr(pod_report, "report", fake_report)
    config = bert_tiny.get_config()
    config.per_device_batch_size = 8
    run = config, TOPOLOGY, [make_phase(256)], None
    *others, (changes, last) = pod_report.try_smaller_steps(*run, failed_report(8))
    assert last["fits"] and len(others) == 6  # All tries but the invalid mesh.
    smallest = 1, "full"
    assert tried[:3] == [(rows, "none", 1, 1, False) for rows in (4, 2, 1)]
    assert tried[3:5] == [(8, "full", 1, 1, False), (*smallest, 1, 1, False)]
    assert tried[5:] == [(*smallest, 1, 1, True), (*smallest, 4, 1, True), (*smallest, 4, 2, True)]
    fields = {"per_device_batch_size": 1, "model.remat": "full", "shard_weight_update": True}
    assert changes == fields | {"mesh.data": -1, "mesh.fsdp": 4, "mesh.tensor": 2}
    assert config.per_device_batch_size == 8  # The given configuration is not modified.


def test_smaller_microbatches_are_advised_for_every_phase(monkeypatch):
    def fake_report(config, topology, phases, tokenizer):
        return {"fits": config.per_device_batch_size == config.long_phase.per_device_batch_size}

    monkeypatch.setattr(pod_report, "report", fake_report)
    config = bert_tiny.get_config()
    config.long_phase.per_device_batch_size = 8
    run = config, TOPOLOGY, [make_phase(256)], None
    ((changes, _),) = pod_report.try_smaller_steps(*run, failed_report(8))
    assert changes == {"per_device_batch_size": 4, "long_phase.per_device_batch_size": 4}


def test_no_configuration_is_compiled_twice(monkeypatch):
    tried = []

    def fake_report(config, *_):
        tried.append((config.model.remat, config.shard_weight_update, config.mesh.fsdp))
        return {"fits": False}

    monkeypatch.setattr(pod_report, "report", fake_report)
    config = bert_tiny.get_config()
    config.model.remat = "full"
    run = config, TOPOLOGY, [make_phase(8)], None
    assert not any(
        report["fits"] for _, report in pod_report.try_smaller_steps(*run, failed_report(1))
    )
    assert tried == [("full", True, 1), ("full", True, 4), ("full", True, 4)]


def test_sweep_reports_an_invalid_mesh_and_continues(monkeypatch):
    def fake_report(config, topology, phases, tokenizer):
        setup_pretraining(config, phases, tokenizer)
        return {"fits": False, "phases": []}

    monkeypatch.setattr(pod_report, "report", fake_report)
    run = bert_tiny.get_config(), TOPOLOGY, [make_phase(64)], planned.UNCASED_ENGLISH
    invalid, valid = pod_report.sweep(*run, ["3x1x1", "-1x4x1"], ["none"])
    assert "does not divide the 8 devices" in invalid["error"] and not invalid["fits"]
    assert valid["sizes"] == "-1x4x1" and "error" not in valid
    with pytest.raises(ValueError, match="does not divide the 8 devices"):
        list(pod_report.sweep(*run, ["3x1x1", "5x1x1"], ["none"]))


@pytest.mark.parametrize("caller", ["sweep", "try_smaller_steps"])
def test_a_kernel_without_cycles_is_not_taken_for_a_step_that_does_not_fit(monkeypatch, caller):
    def fake_report(*_):
        raise MissingKernelCycles("cycles.json has no entry '256 64 bfloat16 dropout' for v4")

    monkeypatch.setattr(pod_report, "report", fake_report)
    run = bert_tiny.get_config(), TOPOLOGY, [make_phase(64)], planned.UNCASED_ENGLISH
    with pytest.raises(MissingKernelCycles, match="no entry '256 64"):
        if caller == "sweep":
            list(pod_report.sweep(*run, ["-1x1x1"], ["none"]))
        else:
            list(pod_report.try_smaller_steps(*run, failed_report(8)))


def test_sweep_rejects_a_malformed_mesh_before_compiling(monkeypatch):
    monkeypatch.setattr(pod_report, "report", lambda *_: pytest.fail("compiled"))
    run = bert_tiny.get_config(), TOPOLOGY, [make_phase(64)], planned.UNCASED_ENGLISH
    with pytest.raises(ValueError, match="mesh '2x2'"):
        list(pod_report.sweep(*run, ["-1x1x1", "2x2"], ["none"]))


def test_sweep_finds_the_largest_batch_by_compiling(monkeypatch):
    step = {
        "fits": True,
        "per_device_batch_size": 8,
        "mesh": {"data": 8, "fsdp": 1, "tensor": 1},
        "hbm_parts": {"activations": 100},
        "hbm_bytes_per_device": 300,
        "hbm_capacity_bytes": 1000,  # Eight times the activations fit, perhaps more.
    }
    tried = []

    def fake_report(config, topology, phases, tokenizer):
        rows = phases[0].batch_size // 8
        tried.append(rows)
        return step | {"fits": rows <= 64, "phases": [step], "remat": config.model.remat}

    monkeypatch.setattr(pod_report, "report", fake_report)
    run = bert_tiny.get_config(), TOPOLOGY, [make_phase(64)], planned.UNCASED_ENGLISH
    (row,) = pod_report.sweep(*run, ["-1x1x1"], ["none"])
    assert (row["sizes"], row["remat"]) == ("-1x1x1", "none")
    assert row["largest_batch"] == 64 and tried == [8, 128, 64]


@pytest.mark.parametrize(
    ("outcomes", "needed", "over", "seconds"),
    [
        ((100, 300, 200), 300, 0, 4.5),
        ((300, (50, 40)), 50, 10, 3.5),  # A phase that does not fit comes before one that does.
        (((70, 40), (50, 40)), 70, 30, 4.0),
        (((70, 40), (None, None), 300), None, None, 5.5),
        ((31 * 2**30, 300), 31 * 2**30, 2**28, 3.0),  # The compiler allows 30.75 of 32 GiB.
    ],
)
def test_memory_at_the_top_level_is_the_maximum_over_phases(
    monkeypatch, outcomes, needed, over, seconds
):
    """An outcome is the bytes that a phase uses, or the (bytes, limit) of `DoesNotFit`."""
    remaining, clock = iter(outcomes), [0.0]

    def fake_compile_step(setup, phase):
        outcome = next(remaining)
        clock[0] += 2.0 if isinstance(outcome, tuple) else 1.5
        if isinstance(outcome, tuple):
            raise compilation.DoesNotFit(*outcome, 5)
        return {"activations": outcome}, ""

    cost = Cost(collections.Counter({("other", "update"): 1}), 1.0, {}, {}, 0.0, [], {}, [])
    monkeypatch.setattr(pod_report, "step_cost", lambda *_, **__: cost)
    monkeypatch.setattr(pod_report, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setitem(metrics.PEAK_FLOPS, jax.devices()[0].device_kind, 1e12)
    monkeypatch.setattr(compilation, "compile_step", fake_compile_step)
    phases = [make_phase(8 * 2**index) for index in range(len(outcomes))]
    report = pod_report.report(bert_tiny.get_config(), TOPOLOGY, phases, planned.UNCASED_ENGLISH)
    assert (report["hbm_bytes_per_device"], report["hbm_bytes_over"]) == (needed, over)
    assert report["hbm_parts"] == ({"activations": needed} if needed in outcomes else None)
    assert report["fits"] == (over == 0) and report["compile_seconds"] == seconds
    assert report["batch_size"] == 8  # The first phase's.


@pytest.mark.parametrize(("num_steps", "interval"), [(10_000, 5_000), (1_000, 1_000)])
def test_preemption_costs_up_to_the_interval_between_checkpoints(monkeypatch, num_steps, interval):
    # A step takes 3.6 seconds, and 5,000 of them five hours on eight chips.
    cycles = collections.Counter({("other", "update"): 3.6 * 1050e6})
    cost = Cost(cycles, 1.0, {}, {}, 0.0, [], {}, [])
    monkeypatch.setattr(pod_report, "step_cost", lambda *_, **__: cost)
    monkeypatch.setitem(metrics.PEAK_FLOPS, jax.devices()[0].device_kind, 1e12)
    monkeypatch.setattr(compilation, "compile_step", lambda setup, phase: ({"activations": 1}, ""))
    phases = [dataclasses.replace(make_phase(8), stop=num_steps)]
    config = bert_tiny.get_config()
    config.checkpoint_every = 5_000
    report = pod_report.report(config, TOPOLOGY, phases, planned.UNCASED_ENGLISH)
    assert report["checkpoint_every"] == interval
    most = 8 * 3.6 * interval / 3600
    assert report["chip_hours_per_checkpoint"] == pytest.approx(most)
    line = f"costs {most / 2:.2g} chip-hours on average, {most:.2g} at most"
    assert f"{line}, with checkpoint_every={interval:,}" in report_text.format_report(
        report, MEASURED
    )


def test_figures_of_chips_with_two_devices_are_per_chip(monkeypatch):
    # A step of eight rows on eight devices takes a second.
    cycles = collections.Counter({("other", "update"): 2200e6})
    cost = Cost(cycles, 1.0, {}, {}, 0.0, [], {}, [])
    sheet = CHIPS["tpu7x"], jax.devices()
    monkeypatch.setattr(compilation, "describe_topology", lambda topology: sheet)
    monkeypatch.setattr(pod_report, "step_cost", lambda *_, **__: cost)
    monkeypatch.setitem(metrics.PEAK_FLOPS, jax.devices()[0].device_kind, 1e12)
    monkeypatch.setattr(compilation, "compile_step", lambda setup, phase: ({"activations": 1}, ""))
    phases = [make_phase(8)]
    report = pod_report.report(
        bert_tiny.get_config(), "tpu7x:2x2x1", phases, planned.UNCASED_ENGLISH
    )
    assert (report["num_chips"], report["num_devices"]) == (4, 8)
    assert report["cycles_per_row"] == 2200e6 / 2 and report["rows_per_second_per_chip"] == 2
    assert report["mfu"] == pytest.approx(2 * report["model_flops_per_row"] / 2e12)


@pytest.mark.parametrize(("document_cycles", "has_effect"), [(5e8, True), (1e9, False)])
def test_mfu_is_left_out_where_attention_skips_what_documents_do_not_need(
    monkeypatch, caplog, document_cycles, has_effect
):
    def cost(hlo, chip, clock_hz=None, document_tokens=None):
        cycles = document_cycles if document_tokens == 300 else 1e9
        counter = collections.Counter({("attention kernel", "forward"): cycles})
        return Cost(counter, 1.0, {}, {}, 0.0, [], {}, [])

    monkeypatch.setattr(pod_report, "step_cost", cost)
    monkeypatch.setitem(metrics.PEAK_FLOPS, jax.devices()[0].device_kind, 1e12)
    monkeypatch.setattr(compilation, "compile_step", lambda setup, phase: ({"activations": 1}, ""))
    report = pod_report.report(
        bert_tiny.get_config(),
        TOPOLOGY,
        [make_phase(8)],
        planned.UNCASED_ENGLISH,
        document_tokens=300,
    )
    text = report_text.format_report(report, MEASURED)
    assert report["cycles_per_step"] == document_cycles
    assert (report["mfu"] is None) == has_effect == ("MFU " not in text)
    assert ("of 300 tokens on average" in text) == has_effect
    assert ("--document_tokens has no effect in rows of 128 tokens" in caplog.text) != has_effect


def report_at_assumed_clock(monkeypatch, chip: str) -> dict:
    """Returns the report of a step of a billion cycles; faster arithmetic hides less of it."""
    cycles = collections.Counter({("other", "update"): 1e9})

    def cost(hlo, chip, clock_hz=None, document_tokens=None):
        exposed = 1e9 * ((clock_hz or CHIPS[chip].clock_hz) / CHIPS[chip].clock_hz) ** 2
        return Cost(cycles, 1.0, {}, {}, exposed, [], {}, [])

    monkeypatch.setattr(
        compilation, "describe_topology", lambda topology: (CHIPS[chip], jax.devices())
    )
    monkeypatch.setattr(pod_report, "step_cost", cost)
    monkeypatch.setitem(metrics.PEAK_FLOPS, jax.devices()[0].device_kind, 1e12)
    monkeypatch.setattr(compilation, "compile_step", lambda setup, phase: ({"activations": 1}, ""))
    phases = [dataclasses.replace(make_phase(8), stop=3_600_000)]
    shape = "2x2x2" if CHIPS[chip].dimensions == 3 else "4x4"
    return pod_report.report(
        bert_tiny.get_config(), f"{chip}:{shape}", phases, planned.UNCASED_ENGLISH
    )


@pytest.mark.parametrize("chip", [name for name, chip in CHIPS.items() if chip.max_clock_hz])
def test_times_at_an_assumed_clock_are_given_at_the_fastest_one_too(monkeypatch, chip):
    report = report_at_assumed_clock(monkeypatch, chip)
    sheet, fastest = CHIPS[chip], report["at_max_clock"]
    ratio = sheet.max_clock_hz / sheet.clock_hz
    assert fastest["computation_seconds"] == pytest.approx(1e9 / sheet.max_clock_hz)
    assert fastest["mfu"] == pytest.approx(report["mfu"] * ratio)
    assert fastest["exposed_seconds"] == pytest.approx(report["exposed_seconds"] * ratio**2)
    exposed = 1e9 * ratio**2 / sheet.link_bytes_per_second
    hours = 1000 * (1e9 / sheet.max_clock_hz + exposed)
    assert fastest["total_hours_with_exposed_collectives"] == pytest.approx(hours)
    text = report_text.format_report(report, MEASURED)
    high = f"at {sheet.max_clock_hz / 1e6:.0f} MHz"
    assert f"{sheet.clock_hz / 1e6:.0f} to {sheet.max_clock_hz / 1e6:.0f} MHz (assumed)" in text
    for start in ("total", "  time per step", "  per chip", "  3,600,000 steps"):
        (line,) = [line for line in text.splitlines() if line.startswith(start)]
        assert high in line, line
    assert f"{1000 * report['computation_seconds']:.1f} hours, with exposed collectives" in text
    assert "THE CLOCK IS AN ASSUMPTION" in text and f"that of {chip}." in text
    row = report_text.format_table_row("a", report, report["phases"][0])
    assert row.count(" †") == 4


@pytest.mark.parametrize("chip", [name for name, chip in CHIPS.items() if not chip.max_clock_hz])
def test_published_clock_has_one_reading(monkeypatch, chip):
    report = report_at_assumed_clock(monkeypatch, chip)
    text = report_text.format_report(report, MEASURED)
    assert report["at_max_clock"] is None and "at_max" not in text and "assum" not in text.lower()
    assert text.count(" MHz") == 1 and "†" not in report_text.format_table_row(
        "a", report, report["phases"][0]
    )


def test_report_begins_with_verdict_hours_and_price(monkeypatch):
    report = report_at_assumed_clock(monkeypatch, "v4")
    computation, exposed = 1000 * 1e9 / 1050e6, 1000 * 1e9 / CHIPS["v4"].link_bytes_per_second
    hours = report_text.likely_hours(report, MEASURED)
    factors = 1.0, 1.2, 1.5
    assert hours == pytest.approx([factor * computation + exposed for factor in factors])
    verdict, likely, price, reasons, blank, *rest = report_text.format_report(
        report, MEASURED, 2.0
    ).splitlines()
    assert verdict == "FITS v4:2x2x2 (v4-16): 0.0 of 32 GiB per device"
    assert likely.startswith(f"hours: {hours}, of training steps alone")
    assert "three measurements" in likely
    prices = Range(*(2.0 * report["num_chips"] * each for each in hours))
    figures = report_text.likely_figures(report, MEASURED, 2.0)
    assert figures["likely_price"] == pytest.approx(prices._asdict())
    (seconds,) = figures["likely_step_seconds"]
    assert {name: 1000 * each for name, each in seconds.items()} == pytest.approx(hours._asdict())
    assert price == f"price: {prices}, at 2 per chip-hour"
    assert reasons.startswith("NOT CALIBRATED: 128 tokens per device") and not blank and rest
    (_, _, chip_hours, *_) = report_text.format_report(report, MEASURED).splitlines()
    assert chip_hours.startswith("chip-hours: ") and "--price_per_chip_hour" in chip_hours


def test_times_of_parts_stand_beside_their_cycles(monkeypatch):
    text = report_text.format_report(report_at_assumed_clock(monkeypatch, "v4"), MEASURED)
    lines = [line.strip() for line in text.splitlines()]
    ms = f"{1e3 * 1e9 / 1050e6:,.2f} ms"
    assert any(line.endswith(f"{ms} per step, 1,000,000,000 cycles") for line in lines)
    (other,) = [line for line in lines if line.startswith("other")]
    assert f"{ms}, 100.0% (update {ms}; 1,000,000,000 cycles)" in other
    (row,) = [line for line in lines if line.startswith("cycles per row")]
    assert row.endswith("of one chip, 1.1 rows per second")


def test_report_that_does_not_fit_begins_with_that_alone(monkeypatch):
    def fake_compile_step(setup, phase):
        raise compilation.DoesNotFit(40 * 2**30, 31 * 2**30, 5)

    monkeypatch.setattr(compilation, "compile_step", fake_compile_step)
    config = bert_tiny.get_config()
    report = pod_report.report(config, TOPOLOGY, [make_phase(8)], planned.UNCASED_ENGLISH)
    verdict, blank, *_ = report_text.format_report(report, MEASURED, 2.0).splitlines()
    assert verdict.startswith("v4:2x2x2 (v4-16), rows of 128 tokens: DOES NOT FIT by 9.00 GiB")
    assert blank == ""


def test_progress_is_said_while_a_block_runs_and_not_after_it(capsys):
    num_threads = threading.active_count()
    with pod_report.progress("compiling", interval=0.001):
        while not (first := capsys.readouterr().err):
            pass
    assert first.startswith("compiling: 0 s\n")
    assert threading.active_count() == num_threads


def test_sweep_names_the_best_mesh_at_both_clocks_where_they_differ(monkeypatch, capsys):
    def row(sizes, slow, fast):
        figures = {"total_hours": 1.0, "total_hours_with_exposed_collectives": slow}
        at_max = {"total_hours": 1.0, "total_hours_with_exposed_collectives": fast}
        figures |= {"at_max_clock": at_max | {"clock_hz": 2486e6}, "sizes": sizes, "fits": True}
        return figures | {"remat": "none", "hbm_bytes_per_device": 1, "largest_batch": 8}

    rows = [row("16x1x1", 2.0, 1.9), row("4x4x1", 2.1, 1.5)]
    monkeypatch.setattr(pod_report, "sweep", lambda *_: rows)
    assert pod_table.print_sweep(None, "v6e:4x4", [], None, [], [])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("best: mesh 16x1x1")
    assert lines[3].startswith("best at the fastest clock that the peak allows: mesh 4x4x1")
    assert lines[-1].startswith("Hours are the compiler's estimates. ") and ": v6e " in lines[-1]


def test_flags_can_be_pasted_into_a_shell():
    flags = report_text.format_flags({"corpus": "my dir", "batch_size": 8})
    assert flags == "'--config.corpus=my dir' --config.batch_size=8"


def test_footnote_of_a_table_says_what_another_clock_changes():
    assert report_text.clock_footnote([]) == ""
    note = report_text.clock_footnote(["v6e"])
    assert "at 1750 MHz" in note and "rows per second and MFU are 42% higher" in note
    assert "the hours of computation 30% lower" in note
