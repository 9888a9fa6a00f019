"""The report as a user runs it: the TPU compiler at work, with no TPU."""

import importlib.util
import json
import os
import subprocess
import sys
import types

import jax
import pytest

from bert_jax import partitioning
from bert_jax.data.batches import train_batches
from bert_jax.data.rows import Rows
from bert_jax.tpu import compile as tpu
from bert_jax.tpu import hlo_cost as compiled_cost
from bert_jax.tpu import report as pod_report
from bert_jax.tpu.hlo_cost import Cost, step_cost
from bert_jax.training import metrics
from bert_jax.training.settings import Phase
from configs.pretrain import adamw_2k, bert_tiny, lamb_64k, pod_base, pod_large
from tests import helpers

ROOT = helpers.ROOT
TINY = f"--config={ROOT}/configs/pretrain/bert_tiny.py"
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, of the tpu extra, is not installed"
)


def phase_of(batch_size: int, rows=None) -> Phase:
    return Phase(rows or tpu.RowSizes(128, 8), None, 0, 1, batch_size, max_predictions=20)


def run_tool(*arguments, **environment):
    settings = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, ROOT / "tools" / "tpu_report.py", *map(str, arguments)],
        env=settings | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(what the tool printed, its JSON, the compiled text) for a BERT_TINY on four v4 chips."""
    directory = tmp_path_factory.mktemp("report")
    files = directory / "report.json", directory / "step.hlo"
    flags = [f"--json={files[0]}", f"--dump_hlo={files[1]}", "--costliest=3"]
    phase = ["--topology=v4:2x2x1", "--phases=first", "--config.batch_size=64"]
    result = run_tool(TINY, *phase, *flags, "--price_per_chip_hour=2")
    assert result.returncode == 0, result.stderr
    return result.stdout, json.loads(files[0].read_text()), files[1].read_text()


@needs_compiler
def test_the_report_holds_every_promised_figure(tiny):
    _, report, _ = tiny
    assert report["topology"] == "v4:2x2x1" and report["device_kind"] == "TPU v4"
    assert report["num_devices"] == 4 and report["fits"] is True
    assert report["per_device_batch_size"] == 16 and report["compile_seconds"] > 0
    assert report["num_params"] == 4_433_468
    assert report["hbm_capacity_bytes"] == 32 * 2**30
    assert report["hbm_bytes_per_device"] == sum(report["hbm_parts"].values())
    assert report["clock_hz"] == 1050e6
    rate = report["clock_hz"] / report["cycles_per_sequence"]
    assert report["sequences_per_second_per_chip"] == pytest.approx(rate)
    assert report["mfu"] == pytest.approx(rate * report["model_flops_per_sequence"] / 275e12)
    assert report["price"] == pytest.approx(2 * 4 * report["total_hours_with_links"])
    # Gradients, in float32 or bfloat16, once over the links; and a few scalars.
    assert 1.5 < report["collective_bytes_per_step"] / report["num_params"] < 4.5
    assert len(report["phases"]) == 1 and report["loops_counted_once"] == []


@needs_compiler
def test_cycles_by_part_add_up_and_the_text_is_where_they_come_from(tiny):
    _, report, text = tiny
    parts = sum(sum(each.values()) for each in report["cycles_by_part"].values())
    assert parts == report["cycles_per_step"] == step_cost(text).total_cycles
    layers = {"attention", "feed-forward", "LayerNorm"}
    assert layers | {"embeddings", "heads", "optimizer"} <= report["cycles_by_part"].keys()
    for part in layers:
        assert report["cycles_by_part"][part]["backward"] > 0


@needs_compiler
def test_compiled_flops_agree_with_the_count_by_hand(tiny):
    _, report, _ = tiny
    by_hand = report["model_flops_per_sequence"]
    assert report["compiled_flops_per_sequence"] == pytest.approx(by_hand, rel=0.03)


@needs_compiler
def test_gradients_are_summed_over_devices_once_and_not_in_each_layer(tiny):
    _, _, text = tiny
    computations, entry = compiled_cost.parse(text)
    by_name = {name: {each.name: each for each in body} for name, body in computations.items()}

    def exchanged(start):
        return [
            record.num_bytes
            for _, home, each in compiled_cost.executed(computations, start, [])
            for _, _, record in compiled_cost.collectives_in(each, computations, by_name, home)
        ]

    bodies = [
        each.called("body")
        for _, _, each in compiled_cost.executed(computations, entry, [])
        if each.opcode == "while"
    ]
    assert bodies and max(exchanged(entry)) > 1e6  # The search does find them.
    assert max([size for body in bodies for size in exchanged(body)], default=0) < 512


@needs_compiler
def test_parameters_and_optimizer_bytes_are_what_the_compiled_step_takes(tiny):
    _, report, text = tiny
    parts = report["hbm_parts"]
    padded_params = report["num_params"] + (30_592 - 30_522) * 129  # Rows that fill the last tile.
    assert parts["params"] == 4 * padded_params
    assert parts["optimizer"] == 2 * parts["params"] + 3 * 4  # Moments, and three counters.
    entry = text[text.index("\nENTRY") :]
    header = entry[: entry.index("->")]
    floats = [part for part in header.split("f32[")[1:]]
    sizes = [part.split("]")[0].split(",") for part in floats]
    count = sum(jax.numpy.prod(jax.numpy.array([int(n) for n in size if n])) for size in sizes)
    assert 4 * int(count) == parts["params"] * 3
    assert parts["padding"] < 0.01 * parts["params"]


@needs_compiler
def test_the_table_says_that_cycles_are_an_estimate(tiny):
    printed, _, _ = tiny
    assert "the compiler's own estimate, not a measurement" in printed
    assert "4 chips, 4 devices of kind 'TPU v4', 1050 MHz" in printed
    for line in ("HBM a device", "FLOPs a sequence", "cycles a sequence", "MFU", "price"):
        assert line in printed


@needs_compiler
def test_a_step_too_big_is_refused_by_how_much_with_settings_that_fit(tmp_path):
    flags = "--config.batch_size=16384", f"--json={tmp_path / 'report.json'}"
    result = run_tool(TINY, "--topology=v5e:2x2", "--phases=first", *flags)
    report = json.loads((tmp_path / "report.json").read_text())
    granted = report["hbm_bytes_per_device"] - report["hbm_bytes_over"]
    assert granted == tpu.CHIPS["v5e"].granted_bytes < report["hbm_capacity_bytes"]
    assert result.returncode == 1, result.stdout + result.stderr
    assert "DOES NOT FIT by" in result.stdout and "GiB" in result.stdout
    fits = result.stdout.rsplit("This fits: ", 1)[1].split()
    assert fits == ["--config.per_device_batch_size=2048"] and result.stderr == ""


@needs_compiler
def test_the_settings_that_fit_parameters_too_large_do_fit():
    # A table of 12 M positions is large, and little to compile.
    large = "--config.model.max_position_embeddings=12_000_000", "--config.model.remat=full"
    flags = TINY, "--topology=v4:2x2x1", "--phases=first", "--config.batch_size=4", *large
    result = run_tool(*flags)
    assert result.returncode == 1 and "DOES NOT FIT by" in result.stdout, result.stderr
    fits = result.stdout.rsplit("This fits: ", 1)[1].split()
    assert "--config.shard_weight_update=True" in fits
    again = run_tool(*flags, *fits)
    assert again.returncode == 0 and "GiB: fits" in again.stdout


@needs_compiler
def test_several_slices_are_one_mesh_with_data_between_them():
    phase = ["--phases=first", "--config.batch_size=64", "--config.mesh.fsdp=4"]
    result = run_tool(TINY, "--topology=v4:2x2x1:2", *phase)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "v4:2x2x1:2: 8 chips, 8 devices" in result.stdout
    assert "data=2 fsdp=4 tensor=1" in result.stdout and "between slices x" in result.stdout
    result = run_tool(TINY, "--topology=v4:2x2x1:2", "--config.mesh.fsdp=8")
    assert "data=1 must be a multiple of the 2 slices" in result.stderr


@needs_compiler
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--topology=v9:2x2"], "unknown topology 'v9:2x2': expected a shape in chips after"),
        (["--topology=v4"], "unknown topology 'v4'"),
        (["--topology=v4:4x4"], "has 2 dimensions, but v4 is built in 3"),
        (["--topology=v4:3x3x3"], "the compiler refuses topology 'v4:3x3x3'"),
        (["--topology=v4:2x2x1", "--config.mesh.fsdp=3"], "does not divide the 4 devices"),
        (["--topology=v4:2x2x1", "--config.batch_size=6"], "batch_size 6 is not divisible by 4"),
        (["--topology=v4:2x2x1", "--max_seq_length=1024"], "position table ends at 512"),
        (["--topology=v4:2x2x1:0"], "unknown topology 'v4:2x2x1:0'"),
        (["--config.lerning_rate=1"], "'lerning_rate': Did you mean"),
        (
            [f"--config={ROOT}/configs/pretrain/pod_base.py:v7"],
            "pod_base.py:v7: unknown argument 'v7' after the colon: expected one of v3, v4",
        ),
        ([], "names no topology: give one, as --topology=v4:4x4x4"),
        (["--topology=v4:2x2x1", "--sweep", "--sweep_meshes=2x2"], "expected data x fsdp x tensor"),
        (["--topology=v4:2x2x1", "--sweep", "--sweep_meshes=3x1x1"], "does not divide the 4"),
        (["--topology=v4:2x2x1", "--json=/nowhere/a.json"], "--json=/nowhere/a.json cannot be"),
        (["--topology=v4:2x2x1", "--dump_hlo=/"], "--dump_hlo=/ cannot be written to"),
        (["--topology=v4:2x2x1", "--sweep", "--json=a"], "--json does nothing with --sweep"),
        (["--sweep_remat=full"], "--sweep_remat does nothing with a single report"),
        (["--all"], "--config does nothing with --all"),
        (["--price_per_chip_hour=-1"], "flag --price_per_chip_hour=-1"),
        (["--config.corpus=a", "--max_seq_length=64"], "--max_seq_length does nothing with a corp"),
    ],
)
def test_bad_settings_end_in_one_line_not_a_traceback(flags, message):
    result = run_tool(TINY, "--phases=first", *flags)
    assert result.returncode == 1
    assert result.stderr.startswith("tpu_report: ") and message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_without_the_compiler_the_report_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"not installed: pip install 'jax\[tpu\]'"):
        tpu.describe("v4:2x2x1")


def test_what_the_compiler_says_of_memory_is_understood():
    used = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.25G of 15.75G hbm."
    assert tpu.memory_told(used, 2**30) == (17.25 * 2**30, 15.75 * 2**30)
    temporary = "the total memory required for HLO temporaries (512.0M) exceeds available HBM (1G)."
    assert tpu.memory_told(temporary, 2**30) == (1.5 * 2**30, 2**30)
    assert tpu.memory_told("RESOURCE_EXHAUSTED", 2**30) == (None, None)


def test_peak_is_flops_a_cycle_times_the_clock():
    # Cells of a device's matrix units; each multiplies and adds in a cycle.
    cells = {"TPU v3": 2, "TPU v4": 8, "TPU v5 lite": 4, "TPU v5p": 8, "TPU v6 lite": 16}
    chips = dict(zip(cells, tpu.CHIPS, strict=True))
    for kind, units in cells.items():
        peak = units * 128**2 * 2 * tpu.CHIPS[chips[kind]].clock_hz
        assert peak == pytest.approx(metrics.PEAK_FLOPS[kind], rel=0.005)


def test_bytes_of_a_device_are_those_of_its_shards():
    mesh = partitioning.make_mesh(data=2, fsdp=4)
    sharding = jax.NamedSharding(mesh, jax.P(None, "fsdp"))
    leaf = jax.ShapeDtypeStruct((3, 8), "float32", sharding=sharding)
    rows = tpu.abstract_rows(phase_of(16), partitioning.batch_sharding(mesh))
    assert tpu.device_bytes({"weight": leaf}) == 3 * 2 * 4
    assert tpu.device_bytes(rows) == 2 * (2 * 128 + 2 * 8 * 3 + 8 + 4 + 4)


def test_rows_that_are_compiled_for_are_those_of_the_loader(corpus):
    rows, sharding = Rows(corpus, "train", 0), partitioning.batch_sharding(partitioning.make_mesh())
    (batch,) = train_batches(rows, sharding, 16, 0, 1)
    found = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), batch)
    assert tpu.abstract_rows(phase_of(16, rows), sharding) == found


def test_remedies_begin_with_what_costs_least(monkeypatch):
    monkeypatch.setattr(tpu, "describe", lambda topology: (tpu.CHIPS["v4"], jax.devices()))
    tried = []

    def fake_report(config, topology, phases, tokenizer):
        sharded = config.mesh.fsdp, config.mesh.tensor, config.shard_weight_update
        tried.append((config.per_device_batch_size, config.model.remat, *sharded))
        if config.mesh.fsdp == 4 and config.mesh.tensor == 1:
            raise ValueError("a mesh that cannot be")
        return {"fits": len(tried) == 8}

    monkeypatch.setattr(pod_report, "report", fake_report)
    config = bert_tiny.get_config()
    config.per_device_batch_size = 8
    found = pod_report.advice(config, "v4:2x2x2", [phase_of(256)], None)
    least = 1, "full"
    assert tried[:3] == [(rows, "none", 1, 1, False) for rows in (4, 2, 1)]
    assert tried[3:5] == [(8, "full", 1, 1, False), (*least, 1, 1, False)]
    assert tried[5:] == [(*least, 1, 1, True), (*least, 4, 1, True), (*least, 4, 2, True)]
    fields = {"per_device_batch_size": 1, "model.remat": "full", "shard_weight_update": True}
    assert found == fields | {"mesh.data": -1, "mesh.fsdp": 4, "mesh.tensor": 2}
    assert config.per_device_batch_size == 8  # What was given stays as it is.


def test_what_was_tried_is_not_compiled_again(monkeypatch):
    monkeypatch.setattr(tpu, "describe", lambda topology: (tpu.CHIPS["v4"], jax.devices()))
    tried = []

    def fake_report(config, *_):
        tried.append((config.model.remat, config.shard_weight_update, config.mesh.fsdp))
        return {"fits": False}

    monkeypatch.setattr(pod_report, "report", fake_report)
    config = bert_tiny.get_config()
    config.model.remat = "full"
    assert pod_report.advice(config, "v4:2x2x2", [phase_of(8)], None) is None
    assert tried == [("full", True, 1), ("full", True, 4), ("full", True, 4)]


def test_a_sweep_names_the_mesh_that_cannot_be_and_goes_on(monkeypatch):
    monkeypatch.setattr(tpu, "describe", lambda topology: (tpu.CHIPS["v4"], jax.devices()))
    monkeypatch.setattr(pod_report, "report", lambda *_: {"fits": False, "phases": []})
    pods = bert_tiny.get_config(), "v4:2x2x2", [phase_of(64)], tpu.UNCASED_ENGLISH
    refused, other = pod_report.sweep(*pods, ["3x1x1", "-1x4x1"], ["none"])
    assert "does not divide the 8 devices" in refused["refused"] and not refused["fits"]
    assert other["sizes"] == "-1x4x1" and "refused" not in other
    with pytest.raises(ValueError, match="does not divide the 8 devices"):
        list(pod_report.sweep(*pods, ["3x1x1", "5x1x1"], ["none"]))


@pytest.fixture
def report_of(monkeypatch):
    """For each phase the bytes its step takes, or what `DoesNotFit` is raised with -> a report."""
    monkeypatch.setattr(tpu, "describe", lambda topology: (tpu.CHIPS["v4"], jax.devices()))
    monkeypatch.setitem(metrics.PEAK_FLOPS, jax.devices()[0].device_kind, 1e12)

    def run(*outcomes):
        left = iter(outcomes)

        def fake_step(assembly, phase):
            outcome = next(left)
            if isinstance(outcome, tuple):
                raise tpu.DoesNotFit(*outcome, 5, 2.0)
            cost = Cost({("other", "update"): 1}, 1.0, {}, [], {}, [])
            return tpu.CompiledStep({"activations": outcome}, "", cost, 1.5)

        monkeypatch.setattr(tpu, "compile_step", fake_step)
        phases = [phase_of(8 * 2**index) for index in range(len(outcomes))]
        config, tokenizer = bert_tiny.get_config(), tpu.UNCASED_ENGLISH
        return pod_report.report(config, "v4:2x2x2", phases, tokenizer)

    return run


@pytest.mark.parametrize(
    ("outcomes", "needed", "over", "seconds"),
    [
        ((100, 300, 200), 300, 0, 4.5),
        ((300, (50, 40)), 50, 10, 3.5),  # What does not fit is more than what does.
        (((70, 40), (50, 40)), 70, 30, 4.0),
        (((70, 40), (None, None), 300), None, None, 5.5),
        ((31 * 2**30, 300), 31 * 2**30, 2**28, 3.0),  # The compiler grants 30.75 of 32 GiB.
    ],
)
def test_memory_at_the_top_is_of_the_phase_that_needs_most(
    report_of, outcomes, needed, over, seconds
):
    report = report_of(*outcomes)
    assert (report["hbm_bytes_per_device"], report["hbm_bytes_over"]) == (needed, over)
    assert report["hbm_parts"] == ({"activations": needed} if needed in outcomes else None)
    assert report["fits"] == (over == 0) and report["compile_seconds"] == seconds
    assert report["batch_size"] == 8  # The first phase's.


def test_the_largest_batch_is_found_by_compiling(monkeypatch):
    config, phase = bert_tiny.get_config(), phase_of(64)
    step = {
        "fits": True,
        "per_device_batch_size": 8,
        "mesh": {"data": 8, "fsdp": 1, "tensor": 1},
        "hbm_parts": {"activations": 100},
        "hbm_bytes_per_device": 300,
        "hbm_capacity_bytes": 1000,  # Eight times the activations would fit, and perhaps more.
    }
    tried = []

    def fake_report(config, topology, phases, tokenizer):
        rows = phases[0].batch_size // 8
        tried.append(rows)
        return step | {"fits": rows <= 64, "phases": [step], "remat": config.model.remat}

    monkeypatch.setattr(pod_report, "report", fake_report)
    monkeypatch.setattr(tpu, "describe", lambda topology: (tpu.CHIPS["v4"], jax.devices()))
    pods = config, "v4:2x2x2", [phase], tpu.UNCASED_ENGLISH
    (row,) = pod_report.sweep(*pods, ["-1x1x1"], ["none"])
    assert (row["sizes"], row["remat"]) == ("-1x1x1", "none")
    assert row["largest_batch"] == 64 and tried == [8, 128, 64]


@pytest.mark.parametrize("module", [pod_base, pod_large, adamw_2k, lamb_64k])
def test_a_pod_configuration_names_a_topology_that_divides_its_batches(module):
    for name, topology in module.TOPOLOGIES.items():
        config = module.get_config(name)
        sizes = [int(size) for size in topology.partition(":")[2].split("x")]
        devices = jax.numpy.prod(jax.numpy.array(sizes)) * tpu.CHIPS[name].devices
        assert config.topology == topology and len(sizes) == tpu.CHIPS[name].dimensions
        for batch_size in (config.batch_size, config.long_phase.batch_size):
            assert batch_size % (devices * max(config.per_device_batch_size, 1)) == 0
        small = module.get_config(f"{name},runlocal")
        assert small.long_phase.batch_size == 8 and small.topology == topology
        assert small.per_device_batch_size == 0 and small.long_phase.num_steps == 4
    with pytest.raises(ValueError, match="after the colon"):
        module.get_config("v4,runlocl")


def test_the_tokenizer_that_is_not_there_suits_the_masking():
    words = types.SimpleNamespace(**vars(tpu.UNCASED_ENGLISH))
    assert len(words.word_start) == words.vocab_size > max(words.special_ids)
    assert words.mask_id in words.special_ids


ALL = """
import sys
from bert_jax.tpu import report as pod_report
from tools import tpu_report

phase = dict(max_seq_length=128, batch_size=256, hbm_capacity_bytes=2**34, fits=True)
phase |= dict(per_device_batch_size=8, mesh={"data": 32}, hbm_bytes_per_device=2**30)
phase |= dict(cycles_per_sequence=5, sequences_per_second_per_chip=1, mfu=1, link_seconds=0)
phase |= dict(step_seconds=1, hours=1, compile_seconds=1, model_flops_per_sequence=100)
reports = {
    "v3": ("none", 97.4, {"sort": 3}, []),
    "v4": ("full", 133, {"tpu_custom_call": 1}, []),
    "v5e": ("none", 96.5, {}, ["while"]),
}

def fake(config, topology, *_):
    remat, flops, estimates, loops = reports[topology.partition(":")[0]]
    found = dict(compiled_flops_per_sequence=flops, not_estimated=estimates)
    phases = [phase | found | dict(loops_counted_once=loops)]
    return dict(topology=topology, remat=remat, fits=True, phases=phases)

pod_report.report = fake
tpu_report.PODS = [f"pod_base.py:{chip}" for chip in reports]
sys.argv = ["tpu_report", "--all", "--markdown=PAGE"]
tpu_report.app.run(tpu_report.main, flags_parser=tpu_report.parse_flags)
"""


def test_the_table_of_all_pods_shows_flops_that_are_off_and_cycles_that_are_too_few(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- made by tools/tpu_report.py --all -->\n<!-- end of the table -->\nafter\n"
    )
    command = [sys.executable, "-c", ALL.replace("PAGE", str(page))]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    *table, said = result.stdout.splitlines()
    head, _, *rows, blank, footnote = table
    column = head.split(" | ").index("compiled FLOPs")
    cells = [row.split(" | ")[column : column + 2] for row in rows]
    assert cells == [["97.4%", "5"], ["", "5 *"], ["96.5%", "5 *"]]
    assert blank == "" and footnote.startswith("\\* Too few: custom kernels")
    assert "\n".join(table) in page.read_text()
    assert page.read_text().endswith("table -->\nafter\n")
    assert said == "compiled FLOPs are over 3% off those by hand: pod_base.py:v5e, rows of 128"
    assert result.returncode == 1


@needs_compiler
def test_the_compiler_does_not_disturb_plain_cpu_use():
    settings = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-c", "import bert_jax, jax; print(jax.devices()[0].platform)"]
    result = subprocess.run(command, env=settings, cwd=ROOT, capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("cpu\n", "")
