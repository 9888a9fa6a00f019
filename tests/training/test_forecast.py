"""Estimates of size and time, before and during a run's first steps."""

import dataclasses
import json
import types

import jax
import numpy as np
import pytest

from bert_jax.data.row_stream import RowStream
from bert_jax.objectives.masked_lm import MaskedLm
from bert_jax.training import forecast
from bert_jax.training.phases import Phase
from bert_jax.training.pretrain_setup import PhaseSetup


def rows(length: int, num_rows: int = 400, tokens: int = 20_000):
    train = {"tokens": tokens, "warnings": []}
    manifest = {"splits": {"train": train}, "config": {"dupe_factor": 2}, "warnings": []}
    return types.SimpleNamespace(
        max_seq_length=length, num_rows=num_rows, manifest=manifest, directory=f"corpus/{length}"
    )


def phase_of(rows, start: int, stop: int, batch_size: int) -> Phase:
    return Phase(rows, None, start, stop, batch_size, 9, MaskedLm, stream=RowStream([rows]))


PHASES = [phase_of(rows(64), 0, 1000, 8), phase_of(rows(256), 1000, 1500, 4)]


def setup(flops_per_token: float = 10.0, phases=PHASES):
    """A setup of 1,234,567 parameters whose rows take `flops_per_token` for each token."""
    params = {"a": np.zeros(1_234_560), "b": np.zeros(7)}
    return types.SimpleNamespace(
        config=types.SimpleNamespace(max_eval_batches=0, eval_batch_size=64),
        abstract_state=types.SimpleNamespace(params=params),
        phases=[
            PhaseSetup(phase, None, 1, flops_per_token * phase.train.max_seq_length, None)
            for phase in phases
        ],
    )


@pytest.mark.parametrize(
    ("log_every", "expected"),
    [(100, [1, 2, 5, 10, 20, 50]), (7, [1, 2, 5]), (1, []), (3, [1, 2])],
)
def test_losses_appear_before_the_regular_interval(log_every, expected):
    for phase in PHASES:
        steps = range(phase.start + 1, phase.stop + 1)
        early = [step for step in steps if forecast.is_early(step, phase, log_every)]
        assert early == [phase.start + step for step in expected]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 1000 * 8 * 640 + 500 * 4 * 2560),
        (999, 8 * 640 + 500 * 4 * 2560),
        (1200, 300 * 4 * 2560),
        (1500, 0),
    ],
)
def test_remaining_work_counts_the_longer_rows_of_the_second_phase(step, expected):
    assert forecast.flops_left(setup().phases, step) == expected


def test_run_logs_parameters_epochs_and_tokens(caplog):
    caplog.set_level("INFO", "absl")
    forecast.log_run(setup(), 0)
    assert [record.getMessage() for record in caplog.records] == [
        "The model has 1.23 million parameters",
        "1,000 steps of 8 rows of 64 tokens: "
        "20 epochs of 400 rows (each text 40 times), 400,000 tokens",
        "500 steps of 4 rows of 256 tokens: "
        "5 epochs of 400 rows (each text 10 times), 100,000 tokens",
    ]


def test_a_phase_names_the_epochs_of_each_corpus():
    mixed = RowStream([rows(64), rows(64, num_rows=100, tokens=1_000)], (3.0, 1.0), (0, 0))
    assert forecast.describe_phase(dataclasses.replace(PHASES[0], stream=mixed)) == (
        "1,000 steps of 8 rows of 64 tokens: 15 epochs of 400 rows of corpus/64 (each text 30 "
        "times) and 20 epochs of 100 rows of corpus/64 (each text 40 times), 320,000 tokens"
    )


def test_run_repeats_the_warnings_about_its_corpora(caplog):
    long = rows(256)
    long.manifest["splits"]["train"]["warnings"] = ["6 % of the train tokens are [UNK]"]
    long.manifest["warnings"] = ["only 3 documents are held out"]
    phases = [PHASES[0], *[phase_of(long, 1000, 1500, 4)] * 2]
    forecast.log_run(setup(phases=phases), 0)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "corpus/256: 6 % of the train tokens are [UNK]",
        "corpus/256: only 3 documents are held out",
    ]


@pytest.mark.parametrize(
    ("backend", "flops_per_token", "first_step", "days"),
    # The run takes 1.024e6 tokens.
    [
        ("cpu", 1e12, 0, "about 59 days (4 cores at 50 GFLOP/s each)"),
        ("cpu", 1e12, 1499, None),
        ("cpu", 1e10, 0, None),
        ("gpu", 1e12, 0, None),
    ],
)
def test_days_on_a_cpu_are_a_warning(
    caplog, monkeypatch, backend, flops_per_token, first_step, days
):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(forecast.os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    forecast.log_run(setup(flops_per_token), first_step)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (days is not None)
    assert not days or (days in warnings[0] and "small_corpus.py" in warnings[0])


@pytest.mark.parametrize(
    ("values", "rows_left", "expected"),
    [
        ({}, 800, "Step 5: loss 9.125"),
        (
            {"rows_per_second": 16.0},
            16 * 9000,
            "Step 5: loss 9.125, 0.5 s per step, 16 rows per second; the rest ",
        ),
        (
            {"rows_per_second": 16.0, "mfu": 0.25, "estimated_mfu": 0.5},
            0,
            "Step 5: loss 9.125, 0.5 s per step, 16 rows per second, MFU 25.0% (estimated: MFU "
            "50.0%)",
        ),
    ],
)
def test_first_steps_are_logged_with_the_remaining_time(caplog, values, rows_left, expected):
    caplog.set_level("INFO", "absl")
    forecast.log_step(5, {"train/loss": 9.125} | values, 8, rows_left)
    if expected.endswith("the rest "):
        expected += "takes about 2.5 hours"
    assert [record.getMessage() for record in caplog.records] == [expected]


def phase_report(length: int, batch_size: int) -> dict:
    sizes = {"max_seq_length": length, "batch_size": batch_size}
    return sizes | {"model_flops_per_row": 10 * length}


def write_estimate(path, *phases, **changes) -> str:
    report = {"device_kind": "TPU v4", "num_devices": 2, "fits": True, "phases": phases}
    report["likely_step_seconds"] = [{"low": 0.5, "typical": 1.0, "high": 1.25}] * len(phases)
    path.write_text(json.dumps(report | changes))
    return str(path)


def same_rows() -> list[dict]:
    """Phases with the same sizes, of which one has other targets in a row."""
    return [phase_report(64, 8), phase_report(64, 8) | {"model_flops_per_row": 650}]


def setup_on_tpus():
    devices = np.array([types.SimpleNamespace(device_kind="TPU v4")] * 2)
    mesh = types.SimpleNamespace(devices=devices.reshape(1, 2, 1, 1))
    return types.SimpleNamespace(phases=setup().phases, mesh=mesh)


def test_estimated_speed_is_of_the_phase_with_the_same_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: setup_on_tpus().mesh.devices.flat)
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert forecast.read_estimates("", setup_on_tpus()) == {"": {}}
    path = write_estimate(tmp_path / "report.json", phase_report(512, 8), *same_rows())
    (found,) = forecast.read_estimates(path, setup_on_tpus()).values()
    # 640 FLOPs for a row, at the peak of two chips.
    assert found == {
        "estimated_rows_per_second": 8.0,
        "estimated_mfu": 8 * 640 / (2 * 275e12),
        "lowest_estimated_rows_per_second": 8 / 1.25,
    }


@pytest.mark.parametrize(
    ("phase", "changes", "message"),
    [
        (phase_report(64, 8), {"num_devices": 4}, "4 devices TPU v4, but this run has 2"),
        (phase_report(64, 8), {"device_kind": "TPU v5e"}, "2 devices TPU v5e, but"),
        (phase_report(64, 16), {}, "16 rows of 64 tokens, but this run has none"),
        (
            phase_report(64, 8) | {"model_flops_per_row": 64_000},
            {},
            r"6\.4e\+04 FLOPs per row of 64 tokens, but the model of this run has 640: ",
        ),
        (phase_report(64, 8), {"fits": False, "likely_step_seconds": None}, "does not fit"),
        ({"max_seq_length": 64}, {}, "is not a report of a pre-training run"),
        ("text", {}, "is not a report of a pre-training run"),
    ],
)
def test_estimate_of_another_run_is_refused_by_name(phase, changes, message, tmp_path):
    path = write_estimate(tmp_path / "report.json", phase, **changes)
    with pytest.raises(ValueError, match=rf"^config\.estimate=.*report\.json .*{message}"):
        forecast.read_estimates(path, setup_on_tpus())


def test_numbers_are_written_in_a_suitable_unit():
    counts = (7, 61_439, 4.386e6, 109_482_240, 2.8e10)
    words = ["7", "61,439", "4.39 million", "109 million", "28 billion"]
    assert [forecast.format_count(count) for count in counts] == words
    times = (0.25, 119, 200, 9000, 86400, 1_781 * 86400)
    words = ["0.25 s", "119 s", "3.33 minutes", "2.5 hours", "24 hours", "1,781 days"]
    assert [forecast.duration(seconds) for seconds in times] == words
