"""The roofline, against what the compiler estimated for every pod configuration."""

import collections
import dataclasses
import itertools
import math
import re

import pytest

from bert_jax.configs.pretrain import bert_base, bert_tiny, own_language
from bert_jax.model import bert
from bert_jax.model.bert import BertConfig
from bert_jax.pods.chips import CHIPS, parse_topology, shape_name
from bert_jax.pods.estimate import planned, roofline
from bert_jax.pods.estimate.calibration import calibration_of
from bert_jax.pods.estimate.prices import read_prices
from bert_jax.pods.estimate.rent_offers import Run, best_plans, make_offer, price_of
from bert_jax.pods.estimate.roofline import Layout, Work
from bert_jax.pods.estimate.run_hours import Assumptions
from bert_jax.training.phases import phase_configs
from bert_jax.training.pretrain_setup import count_microbatches
from tests.helpers.commands import ROOT

TABLE = ROOT / "docs" / "log" / "2026-11-tpu-configurations.md"
NUM_PARAMS = {"base": 110_160_258, "large": 336_297_858}


def work_of(size: str, length: int, batch_size: int, num_steps: int = 1) -> Work:
    """Returns the work of BERT's pre-training on rows of 128 or 512 tokens."""
    config, targets = BertConfig.named(size), {128: 20, 512: 77}[length]
    forward = bert.flops_per_row(config, length, targets + 8, targets, 8)
    num_params = NUM_PARAMS[size]
    return Work(
        name="",
        batch_size=batch_size,
        num_steps=num_steps,
        length=length,
        flops=3 * forward,
        elements=length * config.num_layers * config.hidden_size,
        logits=targets * config.vocab_size,
        num_params=num_params,
        state_bytes=12 * num_params,
    )


def compiled_steps() -> list[tuple]:
    """Returns (topology, size, length, batch, rows, GiB, seconds) of the pods of BERT."""
    found = []
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip(" `") for cell in line.split("|")[1:-1]]
        if not re.match(r"pod_(base|large)|adamw_2k", cells[0] if cells else ""):
            continue
        size = "large" if "large" in cells[0] else "base"
        topology, length, batch_size, rows = cells[1], *map(int, cells[2:5])
        chip, shape, _ = parse_topology(topology)
        cycles, exposed = (re.search(r"[\d,]+", cells[n])[0].replace(",", "") for n in (9, 12))
        seconds = float(cycles) * batch_size / math.prod(shape) / CHIPS[chip].clock_hz
        seconds *= 1 + int(exposed) / 100
        found.append(
            (topology, size, length, batch_size, rows, float(cells[7].split()[0]), seconds)
        )
    return found


COMPILED = compiled_steps()


def estimate(topology, size, length, batch_size, rows):
    work = work_of(size, length, batch_size)
    return roofline.estimate_step(work, rows, Layout(1, "none", True), topology)


def test_roofline_is_near_every_compiled_step_of_bert():
    ratios = {}
    for *shapes, _, seconds in COMPILED:
        ratios[tuple(shapes)] = estimate(*shapes).seconds / seconds
    assert len(ratios) == 25
    for shapes, ratio in ratios.items():
        assert 1 / (1 + roofline.ERROR) < ratio < 1 + roofline.ERROR, shapes
    for shapes, ratio in ratios.items():
        assert 1 / 1.2 < ratio < 1.2, shapes


@pytest.mark.parametrize("size", list(NUM_PARAMS))
def test_roofline_ranks_six_slices_as_the_compiler_does(size):
    """The order of hours is the same, but for slices within 5 % of each other."""
    estimated, compiled = collections.Counter(), collections.Counter()
    for *shapes, _, seconds in COMPILED:
        if shapes[1] == size and shapes[3] == 256:
            num_steps = 900_000 if shapes[2] == 128 else 100_000
            estimated[shapes[0]] += num_steps * estimate(*shapes).seconds
            compiled[shapes[0]] += num_steps * seconds
    assert len(compiled) == len(CHIPS)
    for one, other in itertools.permutations(compiled, 2):
        if compiled[one] < compiled[other] / 1.05:
            assert estimated[one] < estimated[other], (one, other)


@pytest.mark.parametrize(
    ("topology", "is_overlapped", "milliseconds"),
    [
        ("v4:4x4x4", True, 11.2),
        ("v4:4x4x4", False, 11.3),
        ("v5e:8x8", False, 17.0),
        ("v6e:8x8", True, 6.5),
        ("tpu7x:4x4x4", True, 8.8),
    ],
)
def test_links_take_as_long_as_in_the_compiled_steps(topology, is_overlapped, milliseconds):
    """Those of docs/log/2026-11-tpu-communication.md, of BERT_LARGE."""
    chip, devices = parse_topology(topology)[0], roofline.num_devices(topology)
    layout = Layout(1, "none", True)
    sent = roofline.bytes_sent(chip, devices, layout, 1, is_overlapped)
    seconds = NUM_PARAMS["large"] * sent / CHIPS[chip].link_bytes_per_second
    assert 1e3 * seconds == pytest.approx(milliseconds, rel=0.03)


def test_estimated_memory_is_near_that_of_compiled_steps():
    for *shapes, gib, _ in COMPILED:
        estimated = estimate(*shapes).hbm_bytes / 2**30
        assert abs(estimated - gib) < 0.15 * gib + 0.5, (shapes, estimated, gib)


@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:1x1", "v6e:2x4", "tpu7x:2x2x1", "v3:4x4"])
def test_plans_fit_and_set_valid_fields(topology):
    config, devices = bert_base.get_config(), roofline.num_devices(topology)
    works = [work_of("base", 128, 256, 900_000), work_of("base", 512, 256, 100_000)]
    works[1] = dataclasses.replace(works[1], name="long_phase")
    plans = list(roofline.possible_plans(works, topology))
    assert any(plan.fits for plan in plans)
    assert len({plan.layout for plan in plans}) == len(plans)
    for plan in plans:
        changed = config.copy_and_resolve_references()
        changed.update_from_flattened_dict(roofline.plan_changes(config, works, plan, topology))
        assert changed.eval_batch_size % devices == 0
        assert changed.shard_weight_update >= changed.overlap_collectives
        configs, phases = phase_configs(changed), planned.planned_phases(changed)
        for phase, rows in zip(phases, plan.rows, strict=True):
            num_microbatches = count_microbatches(configs[phase.name], phase, devices)
            assert num_microbatches * rows * devices == 256


def test_batch_that_does_not_divide_has_no_plan():
    assert not list(roofline.possible_plans([work_of("base", 128, 256)], "v4:8x8x12"))
    assert not list(roofline.possible_plans([work_of("base", 128, 100)], "v5e:2x4"))


def test_too_large_a_state_is_sharded():
    work = work_of("large", 128, 256)
    huge = dataclasses.replace(work, num_params=10**10, state_bytes=12 * 10**10)
    plans = list(roofline.possible_plans([huge], "v5e:8x8"))
    fitting = [plan.layout for plan in plans if plan.fits]
    assert fitting and all(layout.fsdp > 1 for layout in fitting)
    assert not any(plan.fits for plan in roofline.possible_plans([huge], "v5e:1x1"))


def test_remat_saves_memory_and_costs_time():
    work = work_of("large", 512, 256)
    none, dots, full = (
        roofline.estimate_step(work, 64, Layout(1, remat, False), "v4:2x2x1")
        for remat in ("none", "dots", "full")
    )
    assert none.seconds < dots.seconds < full.seconds
    assert none.hbm_bytes > dots.hbm_bytes > full.hbm_bytes
    assert full.products == pytest.approx(none.products * 4 / 3)


def test_work_of_a_configuration_is_that_of_its_model():
    config = bert_tiny.get_config()
    config.mesh.fsdp, config.per_device_batch_size = 16, 64
    phases, tokenizer = planned.plan_run(config)
    first, second = roofline.describe_work(config, phases, tokenizer)
    model = BertConfig.named("tiny")
    assert (first.name, second.name) == ("", "long_phase")
    assert (first.length, second.length) == (128, 512)
    assert first.elements == 128 * model.num_layers * model.hidden_size
    forward = bert.flops_per_row(model, 128, 28, 20, 8)
    assert first.flops == pytest.approx(3 * forward, rel=0.01)
    assert first.logits == 20 * 30_522
    assert first.state_bytes == pytest.approx(12 * first.num_params, abs=100)
    assert config.mesh.fsdp == 16  # The given configuration is not modified.


def test_roofline_ranks_slices_that_it_was_not_fitted_to_as_the_compiler_does():
    """The six slices of docs/tpu.md, by price: compiled figures are those of the page."""
    page = (ROOT / "docs" / "tpu.md").read_text(encoding="utf-8")
    table = page[page.index("| | v5e-1 |") :].partition("\n\n")[0].splitlines()
    _, *names = [cell.strip() for cell in table[0].strip("|").split("|")]
    compiled = [float(cell.split()[0]) for cell in table[-1].strip("|").split("|")[1:]]
    config = own_language.get_config("bert_base")
    works = roofline.describe_work(config, *planned.plan_run(config))
    run = Run(config.eval_every, config.checkpoint_every, 10_000, Assumptions())
    prices = read_prices(str(ROOT / "configs" / "tpu_prices.toml")).per_chip_hour["on_demand"]
    estimated = []
    for name in map(shape_name, names):
        chip, (plan, *_) = parse_topology(name)[0], best_plans(works, name)
        offer = make_offer(name, works, plan, run, calibration_of(chip))
        estimated.append(price_of(offer, prices[chip]).typical)
    assert len(names) == 6
    order = sorted(range(6), key=compiled.__getitem__)
    assert sorted(range(6), key=estimated.__getitem__) == order
    for one, other in zip(compiled, estimated, strict=True):
        assert 1 / (1 + roofline.ERROR) < other / one < 1 + roofline.ERROR
