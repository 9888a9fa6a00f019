"""Renting as a user asks for it, with the TPU compiler where it is installed."""

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.helpers.commands import ROOT, run_each

TINY = f"--config={ROOT}/configs/pretrain/bert_tiny.py"


def rent(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, ROOT / "tools" / "rent.py", TINY, *arguments],
        env={name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def cells(table: list[str]) -> list[dict[str, str]]:
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    return [dict(zip(head, row, strict=True)) for row in rows]


@pytest.mark.slow
def test_roofline_ranks_slices_under_both_names_and_says_what_to_set(tmp_path):
    prices = tmp_path / "prices.toml"
    text = 'date = 2026-01-01\ncurrency = "EUR"\n[spot]\nv4 = 2\nv5e = 1\n'
    prices.write_text(text, encoding="utf-8")
    slices = "--chips=v4-8,v5e-8,v5e:2x4,v4-2048,v6e:1x1"
    spot = "--spot", "--preemptions_per_day=6", f"--prices={prices}", "--deadline=30d"
    result = rent(slices, *spot, "--compile=0", "--config.eval_every=50")
    assert result.returncode == 0 and result.stderr == "", result.stderr
    rows = cells([line for line in result.stdout.splitlines() if line.startswith("|")])
    assert {row["slice"] for row in rows} == {
        *("v4:2x2x1 (v4-8)", "v5e:2x4 (v5litepod-8)", "v4:8x8x16 (v4-2048)", "v6e:1x1 (v6e-1)")
    }
    assert rows[-1]["fits, GiB"].startswith("no: batches of 256 rows cannot be divided over 1024")
    assert rows[-2]["slice"] == "v6e:1x1 (v6e-1)" and rows[-2]["price"] == ""
    assert all(row["estimate"] == "roofline" for row in rows[:-1])
    assert f"{prices}, of 2026-01-01" in result.stdout and "check them at https://" in result.stdout
    assert "6 preemptions per day are assumed" in result.stdout
    (best,) = [line for line in result.stdout.splitlines() if line.startswith("Best")]
    assert best.startswith(f"Best, by roofline alone: {rows[0]['slice']}, with {TINY} ")
    assert "At the fastest clock that the peak of v6e allows, best: " in result.stdout
    assert "--config.checkpoint_every=" in best and " --config.eval_every=50 " in best


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_best_slices_are_compiled_with_a_line_each():
    small = "--config.long_phase.num_steps=0", "--chips=v4-8,v5e-4,v6e-1", "--compile=2"
    result = rent(*small)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert sum(line.startswith("compiling ") for line in lines) == 2
    tables = [line for line in lines if line.startswith("|")]
    before, after = cells(tables[: len(tables) // 2]), cells(tables[len(tables) // 2 :])
    assert sorted(row["slice"] for row in after) == sorted(row["slice"] for row in before)
    best = sorted(row["slice"] for row in before[:2])
    assert sorted(row["slice"] for row in after if row["estimate"] == "compiled") == best


@pytest.mark.slow
def test_wrong_flags_end_in_one_line_not_a_traceback(tmp_path):
    prices = tmp_path / "prices.toml"
    prices.write_text("date = 2026-11-30\n", encoding="utf-8")
    cases = {
        "--chips=v4-12": "accelerator type 'v4-12' does not exist: try v4:2x2x1 (v4-8) or",
        "--chips=v4-8:2": "--chips=v4-8:2: the network between slices has no estimate",
        "--chips=v4-8 --preemptions_per_day=1": "--preemptions_per_day has no effect without",
        "--chips=v4-8 --deadline=soon": "--deadline=soon: expected hours or days",
        f"--chips=v4-8 --prices={prices}": f"{prices}: currency=None: expected",
        "--chips=v4-8 --prices=/nowhere": "/nowhere",
        "--chips=v4-8 --calibration=v5e=a.json": "--calibration=v5e=a.json: expected CHIP=FILE",
        "--chips=v5e-8 --calibration=v5e=a,v5e=b": "--calibration=v5e=a,v5e=b has a chip twice",
        "--chips=v4-8 --max_seq_length=0": "--max_seq_length=0",
        "--chips=v4-8 --config.corpus=a --max_seq_length=64": "no effect with a corpus",
        "--chips=v4-8 --config.batch_size=0": "batch_size",
        f"--chips=v4-8 --config={ROOT}/configs/finetune/squad.py": "of a pre-training run",
    }
    results = run_each("tools.rent", [[TINY, *flags.split()] for flags in cases])
    for (code, errors), (flags, message) in zip(results, cases.items(), strict=True):
        (line,) = errors.strip().splitlines()
        assert code == 1 and line.startswith("rent: ") and message in line, flags
