"""The report as a user runs it, with the TPU compiler where it is installed."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from bert_jax.model.bert import BertConfig, flops_per_row
from bert_jax.pods.chips import CHIPS
from bert_jax.pods.estimate import compilation, hlo_cost, hlo_text
from bert_jax.training import metrics
from tests.helpers.commands import ROOT, run_each

TINY = f"--config={ROOT}/configs/pretrain/bert_tiny.py"
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, of the tpu extra, is not installed"
)


def run_python(*arguments, unset: str = "XLA_FLAGS") -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={name: value for name, value in os.environ.items() if name != unset},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def run_tool(*arguments) -> subprocess.CompletedProcess:
    return run_python(ROOT / "tools" / "tpu_report.py", *arguments)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(printed report, JSON, scheduled HLO) on four v4 chips of a BERT_TINY with a third layer.

    The last layer runs after the loop, and a loop of one iteration would not stay a loop.
    """
    directory = tmp_path_factory.mktemp("report")
    files = directory / "report.json", directory / "step.hlo"
    flags = [f"--json={files[0]}", f"--dump_hlo={files[1]}", "--costliest=3"]
    phase = ["--topology=v4:2x2x1", "--phases=first", "--config.batch_size=64"]
    phase.append("--config.model.num_layers=3")
    result = run_tool(TINY, *phase, *flags, "--price_per_chip_hour=2")
    assert result.returncode == 0, result.stderr
    return result.stdout, json.loads(files[0].read_text()), files[1].read_text()


@needs_compiler
@pytest.mark.parametrize("chip", list(CHIPS))
def test_compiler_knows_every_chip_and_its_devices(chip):
    shape = {2: "2x2", 3: "2x2x1"}[CHIPS[chip].dimensions]
    sheet, devices = compilation.describe_topology(f"{chip}:{shape}")
    assert len(devices) == 4 * sheet.devices_per_chip
    assert devices[0].device_kind in metrics.PEAK_FLOPS


@needs_compiler
@pytest.mark.parametrize(
    ("chip", "share"), [("v4", 0.93), ("v5e", 0.88), ("v5p", 0.90), ("v6e", 0.70), ("tpu7x", 0.81)]
)
def test_product_has_the_peak_at_the_fastest_clock_that_is_assumed(chip, share):
    device = compilation.describe_device(chip)
    matrix = jax.ShapeDtypeStruct(
        (8192, 8192), "bfloat16", sharding=jax.sharding.SingleDeviceSharding(device)
    )
    compiled = jax.jit(jnp.matmul).lower(matrix, matrix).compile()
    cycles = hlo_cost.step_cost(compiled.as_text(), chip).cycles.total()
    rates = [2 * 8192**3 / cycles * clock for clock in CHIPS[chip].clocks_hz]
    peak = metrics.PEAK_FLOPS[device.device_kind]
    assert rates[0] / peak == pytest.approx(share, abs=0.01)
    if len(rates) > 1:
        assert rates[1] / peak == pytest.approx(1, abs=0.005)


@needs_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1", "v5e-8"])
@pytest.mark.parametrize("model", ["bert_base", "modernbert_small --config.model.size=ettin-17m"])
def test_models_fit_the_tpus_of_notebooks(topology, model):
    """Colab's single chips, and Kaggle's eight."""
    config = f"--config={ROOT}/configs/pretrain/own_language.py:{model}".split()
    result = run_tool(*config, f"--topology={topology}", "--noadvise")
    assert result.returncode == 0, result.stdout + result.stderr
    verdict, hours, price = result.stdout.splitlines()[:3]
    assert verdict.startswith("FITS v5e" if "v5e" in topology else "FITS v6e:1x1 (v6e-1): ")
    assert re.match(r"hours: [\d.,]+ \([\d.,]+ to [\d.,]+\), of training steps alone; ", hours)
    assert price.startswith("chip-hours: ")


@needs_compiler
def test_report_has_every_documented_figure(tiny):
    _, report, _ = tiny
    assert report["topology"] == "v4:2x2x1" and report["device_kind"] == "TPU v4"
    assert report["num_devices"] == 4 and report["fits"] is True
    assert report["per_device_batch_size"] == 16 and report["compile_seconds"] > 0
    assert report["num_params"] == 4_433_468 + 198_272
    assert report["hbm_capacity_bytes"] == 32 * 2**30
    assert report["hbm_bytes_per_device"] == sum(report["hbm_parts"].values())
    assert report["clock_hz"] == 1050e6
    rate = report["clock_hz"] / report["cycles_per_row"]
    assert report["rows_per_second_per_chip"] == pytest.approx(rate)
    assert report["mfu"] == pytest.approx(rate * report["model_flops_per_row"] / 275e12)
    hours = report["total_hours_with_exposed_collectives"]
    assert hours > 0
    likely = {name: 2 * 4 * each for name, each in report["likely_hours"].items()}
    assert report["likely_price"] == pytest.approx(likely)
    # Gradients, in float32 or bfloat16, exchanged once, and a few scalars.
    assert 1.5 < report["collective_bytes_per_step"] / report["num_params"] < 4.5
    assert len(report["phases"]) == 1 and report["loops_counted_once"] == []
    assert len(report["costliest"]) == 3


@needs_compiler
def test_cycles_by_part_add_up_to_the_dumped_hlo(tiny):
    _, report, text = tiny
    parts = sum(sum(directions.values()) for directions in report["cycles_by_part"].values())
    assert parts == report["cycles_per_step"] == hlo_cost.step_cost(text).cycles.total()
    layers = {"attention", "feed-forward", "LayerNorm"}
    assert (
        layers | {"masking", "embeddings", "heads", "optimizer"} <= report["cycles_by_part"].keys()
    )
    for part in layers:
        assert report["cycles_by_part"][part]["backward"] > 0


@needs_compiler
def test_compiled_flops_agree_with_the_analytic_count(tiny):
    _, report, _ = tiny
    analytic = report["model_flops_per_row"]
    assert report["compiled_flops_per_row"] == pytest.approx(analytic, rel=0.03)


@needs_compiler
def test_gradients_are_summed_over_devices_once_and_not_in_each_layer(tiny):
    _, _, text = tiny
    computations, entry = hlo_text.parse_hlo(text)

    def payloads(start):
        found = (
            hlo_cost.collective_traffic(*each, "v4")
            for _, *each in hlo_text.executed_instructions(computations, start)
        )
        return [payload for _, _, payload, _ in filter(None, found)]

    bodies = [
        body
        for _, each, _ in hlo_text.executed_instructions(computations, entry)
        if each.opcode == "while"
        for body in each.called
    ]
    assert bodies and max(payloads(entry)) > 1e6  # The search does find collectives.
    assert max([size for body in bodies for size in payloads(body)], default=0) < 512


@needs_compiler
def test_parameter_and_optimizer_bytes_equal_the_compiled_arguments(tiny):
    _, report, text = tiny
    parts = report["hbm_parts"]
    padded_params = report["num_params"] + (30_592 - 30_522) * 129  # Rows that fill the last tile.
    assert parts["params"] == 4 * padded_params
    assert parts["optimizer"] == 2 * parts["params"] + 3 * 4  # Moments, and three counters.
    entry = text[text.index("\nENTRY") :]
    shapes = re.findall(r"f32\[([\d,]*)\]", entry[: entry.index("->")])
    count = sum(math.prod(int(size) for size in shape.split(",") if size) for shape in shapes)
    assert 4 * count == parts["params"] * 3
    assert parts["padding"] < 0.01 * parts["params"]


@needs_compiler
def test_printed_report_says_that_cycles_are_an_estimate(tiny):
    printed, _, _ = tiny
    assert "the compiler's own estimate, not a measurement" in printed
    assert "4 chips, 4 devices of kind 'TPU v4', 1050 MHz" in printed
    assert printed.startswith("FITS v4:2x2x1 (v4-8): ") and printed.splitlines()[1][:6] == "hours:"
    for line in ("HBM per device", "FLOPs per sequence", "cycles per row", "MFU", "price"):
        assert line in printed


@needs_compiler
def test_step_with_too_large_activations_is_rejected_with_a_batch_size_that_fits(tmp_path):
    # Many layers of long rows use much memory and, as they are one loop, compile fast.
    large = "--config.model.num_layers=48", "--max_seq_length=512", "--config.batch_size=1024"
    json_path = tmp_path / "report.json"
    result = run_tool(TINY, "--topology=v5e:2x2", "--phases=first", *large, f"--json={json_path}")
    assert result.returncode == 1, result.stdout + result.stderr
    report = json.loads(json_path.read_text())
    allowed = report["hbm_bytes_per_device"] - report["hbm_bytes_over"]
    assert allowed == CHIPS["v5e"].usable_hbm_bytes < report["hbm_capacity_bytes"]
    assert "DOES NOT FIT by" in result.stdout and "GiB" in result.stdout
    fits = result.stdout.rsplit("This fits: ", 1)[1].split()
    assert fits == ["--config.per_device_batch_size=128"]
    assert report["advice"] == {"per_device_batch_size": 128} and "likely_hours" not in report
    assert all(line.startswith("compiling rows of") for line in result.stderr.splitlines())


@needs_compiler
def test_advice_for_too_large_parameters_fits_when_followed():
    # A table of 16 M positions is large, and compiles fast.
    large = "--config.model.max_position_embeddings=16_000_000", "--config.model.remat=full"
    flags = TINY, "--topology=v4:2x2x1", "--phases=first", "--config.batch_size=4", *large
    result = run_tool(*flags)
    assert result.returncode == 1 and "DOES NOT FIT by" in result.stdout, result.stderr
    fits = result.stdout.rsplit("This fits: ", 1)[1].split()
    assert "--config.shard_weight_update=True" in fits
    again = run_tool(*flags, *fits)
    assert again.returncode == 0 and "GiB: fits" in again.stdout


@needs_compiler
def test_stacked_trials_do_not_communicate_and_one_per_chip_takes_the_cycles_of_one(tmp_path):
    path = tmp_path / "stacks.json"
    sizes = "--config.base.max_seq_length=64", "--config.base.batch_size=8"
    sweep = f"--config={ROOT}/configs/sweeps/paper.py:glue:mrpc", "--topology=v4:2x2x1"
    result = run_tool(*sweep, *sizes, f"--json={path}")
    assert result.returncode == 0, result.stderr
    report = json.loads(path.read_text())
    alone, one_per_chip, four_on_one = report["stacks"]
    assert [stack["trials"] for stack in report["stacks"]] == [1, 4, 4]
    assert [stack["devices"] for stack in report["stacks"]] == [1, 4, 1]
    assert all(stack["collectives"] == {} for stack in report["stacks"])
    assert one_per_chip["cycles_per_step"] == pytest.approx(alone["cycles_per_step"], rel=0.05)
    assert 1.5 < four_on_one["cycles_per_step"] / alone["cycles_per_step"] < 4.5
    assert "| trials | devices | cycles per step | ms per step |" in result.stdout


@needs_compiler
def test_bi_encoder_computes_each_text_twice_forward_and_its_part_of_the_loss(tmp_path):
    path = tmp_path / "pairs.json"
    sizes = "--config.batch_size=256", "--config.per_device_batch_size=16", "--model_size=tiny"
    pairs = f"--config={ROOT}/configs/finetune/contrastive.py", "--topology=v5e:2x2"
    result = run_tool(*pairs, *sizes, "--train_examples=1000000", f"--json={path}")
    assert result.returncode == 0, result.stderr
    report = json.loads(path.read_text())
    assert report["loops_counted_once"] == [] and report["fits"]
    # Two texts share a row, whose tokens the products of attention all compare.
    config = BertConfig.named("tiny")
    (forward, of_row) = (flops_per_row(config, length, length, 0, 0) for length in (128, 256))
    assert report["model_flops_per_row"] == 3 * 2 * forward
    assert report["compiled_flops_per_row"] == pytest.approx(4 * of_row, rel=0.05)
    assert report["cycles_by_part"]["batch loss"]["backward"] > 0
    assert "masking" not in report["cycles_by_part"]
    assert report["num_steps"] == round(20_000 / 8240 * 3907)


@needs_compiler
def test_several_slices_are_one_mesh_with_data_between_them():
    phase = ["--phases=first", "--config.batch_size=64", "--config.mesh.fsdp=4"]
    result = run_tool(TINY, "--topology=v4:2x2x1:2", *phase)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "v4:2x2x1:2: 8 chips, 8 devices" in result.stdout
    assert "data=2 fsdp=4 tensor=1" in result.stdout and "between slices x" in result.stdout


# Runs the tool once for each list of arguments, without importing everything each time.
def check_messages(cases: dict[str, str]) -> None:
    """Asserts that the tool exits with 1 and one line of text for each string of flags."""
    arguments = [[TINY, "--phases=first", *flags.split()] for flags in cases]
    results = run_each("tools.tpu_report", arguments)
    for (code, errors), (flags, message) in zip(results, cases.items(), strict=True):
        (line,) = errors.strip().splitlines()
        assert code == 1 and line.startswith("tpu_report: ") and message in line, flags


@pytest.mark.slow
def test_invalid_flags_end_in_one_line_not_a_traceback():
    check_messages(
        {
            "--topology=v9:2x2": "unknown topology 'v9:2x2': expected CHIP:SHAPE or CHIP:SHAPE:",
            "--config.lerning_rate=1": (
                "--config.lerning_rate: there is no field 'lerning_rate'; did you mean"
            ),
            f"--config={ROOT}/configs/pretrain/pod_base.py:v7": (
                "pod_base.py:v7: unknown argument 'v7' after the colon: expected one of v3, v4"
            ),
            f"--config={ROOT}/configs/finetune/squad.py": "--phases has no effect with a config",
            f"--config={ROOT}/configs/finetune/retrieval.py": "--phases has no effect with a bi-e",
            "": "bert_tiny.py needs a topology, as in --topology=v4:4x4x4",
            "--topology=v4:2x2x1 --json=/nowhere/a.json": "--json=/nowhere/a.json cannot be",
            "--topology=v4:2x2x1 --dump_hlo=/": "--dump_hlo=/ cannot be written",
            "--topology=v4:2x2x1 --sweep --json=a": "--json has no effect with --sweep",
            "--sweep_remat=full": "--sweep_remat has no effect with a single report",
            "--price_per_chip_hour=-1": "flag --price_per_chip_hour=-1",
            "--topology=v4:2x2x1 --config.corpus=a --max_seq_length=64": (
                "--max_seq_length has no effect with a corpus"
            ),
        }
    )


@needs_compiler
def test_invalid_topologies_and_meshes_end_in_one_line_not_a_traceback():
    check_messages(
        {
            "--topology=v4:3x3x3": "topology 'v4:3x3x3' does not exist: try v4:2x2x4 (v4-32) or",
            "--topology=v4-12": "accelerator type 'v4-12' does not exist: try v4:2x2x1 (v4-8) or",
            "--topology=v4:2x2x1 --config.mesh.fsdp=3": "does not divide the 4 devices",
            "--topology=v4:2x2x1 --config.batch_size=6": "batch_size 6 is not divisible by 4",
            "--topology=v4:2x2x1 --max_seq_length=1024": "max_position_embeddings is 512",
            "--topology=v4:2x2x1 --sweep --sweep_meshes=2x2": "expected data x fsdp x tensor",
            "--topology=v4:2x2x1:2 --config.mesh.fsdp=8": "data=1 must be a multiple of the 2 slic",
        }
    )


@needs_compiler
def test_sweep_of_invalid_meshes_exits_with_an_error():
    result = run_tool(TINY, "--topology=v4:2x2x1", "--sweep", "--sweep_meshes=3x1x1")
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("tpu_report: ") and "does not divide the 4" in result.stderr


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["pod_base.py:v4", "pod_large.py:v4"])
def test_row_of_the_committed_table_still_holds(name, tmp_path):
    page = (ROOT / "docs/log/2026-11-tpu-configurations.md").read_text(encoding="utf-8")
    columns, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith(("| configuration |", f"| `{name}` |"))
    )
    stored = dict(zip(columns, rows[0], strict=True))
    config = f"--config={ROOT}/configs/pretrain/{name}"
    result = run_tool(config, "--phases=first", f"--json={tmp_path}/report.json")
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["topology"] == stored["topology"]
    assert report["max_seq_length"] == int(stored["length"])
    cycles = float(stored["cycles per row"].replace(",", ""))
    assert report["cycles_per_row"] == pytest.approx(cycles, rel=0.02)
    memory = float(stored["HBM, GiB"].partition(" of ")[0])
    assert report["hbm_bytes_per_device"] / 2**30 == pytest.approx(memory, abs=0.1)


@needs_compiler
def test_installed_compiler_does_not_disturb_plain_cpu_use():
    code = "import bert_jax, jax; print(jax.devices()[0].platform)"
    result = run_python("-c", code, unset="JAX_PLATFORMS")
    assert (result.stdout, result.stderr) == ("cpu\n", "")
