"""The tables of the documentation, from reports that are given, not compiled."""

import pytest

from bert_jax.pods.estimate import (
    compilation,
    contrastive_report,
    doc_tables,
    pod_report,
    stack_report,
)
from bert_jax.pods.estimate.doc_tables import Reports, write_table
from tests.helpers.commands import ROOT

PHASE = {
    "max_seq_length": 128,
    "batch_size": 256,
    "num_steps": 20_000,
    "per_device_batch_size": 8,
    "mesh": {"data": 32},
    "fits": True,
    "hbm_bytes_per_device": 2**30,
    "hbm_capacity_bytes": 2**34,
    "computation_seconds": 1.0,
    "exposed_seconds": 0.28,
    "rows_per_second_per_chip": 1.0,
    "mfu": 0.5,
    "at_max_clock": None,
    "cycles_per_row": 5,
    "cycles_per_step": 10,
    "cycles_by_part": {"attention": {"forward": 2, "backward": 3}},
    "compiled_flops_per_row": 100,
    "model_flops_per_row": 100,
    "without_estimate": {},
    "loops_counted_once": [],
    "hours_with_exposed_collectives": 1.0,
    "compile_seconds": 1.0,
}


def report_of(topology: str, remat: str = "none", fits: bool = True, **changes) -> dict:
    figures = {"topology": topology, "remat": remat, "fits": fits, "num_devices": 8}
    figures |= {"total_hours_with_exposed_collectives": 10.0}
    return figures | {"phases": [PHASE | {"fits": fits} | changes]}


@pytest.fixture
def page(tmp_path, monkeypatch):
    """An empty page for each table: the four are then in one."""
    monkeypatch.setattr(compilation, "compiler_versions", lambda: {"libtpu": "1.0", "jax": "2.0"})
    tables = {name: each._replace(page="page.md") for name, each in doc_tables.TABLES.items()}
    monkeypatch.setattr(doc_tables, "TABLES", tables)
    places = "".join(f"{doc_tables.BEFORE.format(name)}old\n{doc_tables.AFTER}" for name in tables)
    path = tmp_path / "page.md"
    path.write_text(f"before\n{places}after\n")
    return path


def table_rows(page, name: str) -> list[dict[str, str]]:
    text = page.read_text().partition(doc_tables.BEFORE.format(name))[2]
    lines = [line for line in text.partition(doc_tables.AFTER)[0].splitlines() if line[:1] == "|"]
    columns, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return [dict(zip(columns, row, strict=True)) for row in rows]


def test_every_committed_page_has_a_place_for_its_table():
    for name in doc_tables.TABLES:
        doc_tables.check_page(ROOT / "docs", name)


def test_page_without_a_place_is_refused(page):
    with pytest.raises(ValueError, match=r"nowhere/page\.md has no place for the table 'pods'"):
        doc_tables.check_page(page.parent / "nowhere", "pods")
    page.write_text(doc_tables.AFTER)
    with pytest.raises(ValueError, match=r"page\.md has no place for the table 'stacks'"):
        doc_tables.check_page(page.parent, "stacks")


def test_table_of_pods_tells_misfits_wrong_flops_and_missing_cycles(page, monkeypatch):
    changes = {
        "v3": {"compiled_flops_per_row": 97.4, "without_estimate": {"sort": 3}},
        "v4": {"remat": "full", "without_estimate": {"tpu_custom_call": 1}},
        "v5e": {"compiled_flops_per_row": 96.5, "loops_counted_once": ["while"]},
        "v6e": {"fits": False},
    }
    made = []

    def fake_report(config, topology, phases, tokenizer):
        made.append(topology)
        return report_of(topology, **changes[topology.partition(":")[0]])

    monkeypatch.setattr(pod_report, "report", fake_report)
    monkeypatch.setattr(doc_tables, "PODS", [f"pod_base.py:{chip}" for chip in changes])
    reports = Reports(page.parent / "reports")
    assert write_table(page.parent, "pods", reports) == [
        "pod_base.py:v5e, rows of 128 tokens: compiled FLOPs differ from the analytic ones by "
        "-3.5%, more than 3%",
        "pod_base.py:v6e, rows of 128 tokens: does not fit",
    ]
    text = page.read_text()
    lines = [line for line in text.splitlines() if line.startswith("| `pod_base.py")]
    flops, cycles = zip(*(line.split(" | ")[8:10] for line in lines[:3]), strict=True)
    assert flops == ("97.4%", "", "96.5%") and cycles == ("5", "5 *", "5 *")
    assert lines[3].endswith("does not fit 16 GiB |")
    assert "\\* Too low: custom kernels" in text and "Measured over estimated" in text
    assert text.startswith("before\n") and text.endswith("table -->\nafter\n")
    assert text.count("old\n") == len(doc_tables.TABLES) - 1
    assert ", libtpu 1.0, jax 2.0.\n" in text
    assert made == ["v3:4x4", "v4:2x2x4", "v5e:4x4", "v6e:4x4"]

    # As if it had been stopped, and another compiler had made the first.
    (page.parent / "reports" / "pod_base.py-v5e.json").unlink()
    first = page.parent / "reports" / "pod_base.py-v3.json"
    first.write_text(first.read_text().replace("1.0", "0.9"))
    made.clear()
    write_table(page.parent, "pods", reports)
    assert made == ["v3:4x4", "v5e:4x4"] and page.read_text() == text


def test_notebooks_have_tokens_per_second_with_exposed_communication(page, monkeypatch):
    def fake_report(config, topology, phases, tokenizer):
        fastest = None
        if topology.startswith("v6e"):
            fastest = {"computation_seconds": 0.36, "exposed_seconds": 0.28, "mfu": 0.75}
        return report_of(topology, at_max_clock=fastest, fits=topology != "v5e:2x4")

    monkeypatch.setattr(pod_report, "report", fake_report)
    problems = write_table(page.parent, "notebooks", Reports(page.parent / "reports"))
    assert problems[0] == "own_language.py:bert_small: does not fit v5e:2x4" and len(problems) == 4
    one, *_, clocks = table_rows(page, "notebooks")
    assert (one["slice"], one["model"]) == ("v5e:1x1 (v5litepod-1)", "`bert_small`")
    assert one["tokens per second"] == "25,600"  # 256 rows of 128 tokens in 1.28 s.
    assert (
        one["billion tokens in 8.5 hours"] == "0.8"
        and one["hours for 10 billion tokens"] == "108.5"
    )
    assert clocks["slice"] == "v6e:1x1 (v6e-1) †"
    assert clocks["tokens per second"] == "25,600 to 51,200" and clocks["MFU"] == "39% to 42%"


def test_stacks_are_the_report_of_the_tool(page, monkeypatch):
    def fake_report(config, topology):
        stacks = [{"trials": 1, "devices": 1, "hbm_bytes_per_device": 0}]
        figures = {"topology": topology, "model_size": "base", "dtype": "float32", "fits": False}
        return figures | {"stacks": stacks, "batch_size": config.batch_size, "max_seq_length": 9}

    monkeypatch.setattr(stack_report, "report", fake_report)
    problems = write_table(page.parent, "stacks", Reports(page.parent / "reports"))
    assert problems == ["stacks of trials: does not fit v4:2x2x4"]
    (row,) = table_rows(page, "stacks")
    assert row["cycles per step"] == "does not fit"


def test_bi_encoder_has_hours_of_the_schedule_and_of_one_epoch(page, monkeypatch):
    monkeypatch.setattr(
        contrastive_report, "report", lambda config, topology, train_examples: report_of(topology)
    )
    assert write_table(page.parent, "bi_encoder", Reports(page.parent / "reports")) == []
    cells = dict(list(row.values()) for row in table_rows(page, "bi_encoder"))
    assert cells["microbatches"] == "512 of 8 rows per chip"  # 32,768 pairs on 8 chips.
    assert cells["of these"] == "attention 50.0%"
    assert cells["hours of 20,000 steps"] == "10.0"
    assert cells["hours of 270 million pairs, once each"] == "4.1"  # 8,240 steps.
