"""Topologies, data sheets and the abstract arguments of a compiled step. Needs no TPU compiler."""

import importlib
import importlib.util
import math
import types

import jax
import pytest

from bert_jax.configs.pretrain import bert_base, distilbert, pod_base, tinybert
from bert_jax.configs.pretrain.fields import make_later_phases
from bert_jax.data.batches import abstract_rows, pretrain_batches
from bert_jax.data.rows import Rows
from bert_jax.pods.chips import CHIPS, parse_topology
from bert_jax.pods.estimate import compilation, planned, pod_table
from bert_jax.sharding.mesh import batch_sharding, make_mesh
from bert_jax.training.pretrain_setup import setup_pretraining
from bert_jax.training.pretrain_teacher import abstract_frozen

ROWS = types.SimpleNamespace(max_seq_length=128, max_sequences=8)


def test_without_the_compiler_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"not installed: pip install 'jax\[tpu\]'"):
        compilation.describe_topology("v4:2x2x1")


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1"])
def test_a_single_chip_of_a_host_is_a_topology(topology):
    chip, devices = compilation.describe_topology(topology)
    assert len(devices) == 1 and chip is CHIPS[topology[:3]]


def test_memory_error_of_the_compiler_is_parsed():
    used = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.25G of 15.75G hbm."
    assert compilation.parse_memory_error(used, 2**30) == (17.25 * 2**30, 15.75 * 2**30)
    temporary = "the total memory required for HLO temporaries (512.0M) exceeds available HBM (1G)."
    assert compilation.parse_memory_error(temporary, 2**30) == (1.5 * 2**30, 2**30)
    assert compilation.parse_memory_error("RESOURCE_EXHAUSTED", 2**30) == (None, None)


def test_bytes_per_device_are_the_bytes_of_its_shards():
    mesh = make_mesh(data=2, fsdp=4)
    sharding = jax.NamedSharding(mesh, jax.P(None, "fsdp"))
    leaf = jax.ShapeDtypeStruct((3, 8), "float32", sharding=sharding)
    batch = abstract_rows(ROWS, 16, batch_sharding(mesh))
    assert compilation.bytes_per_device({"weight": leaf}) == 3 * 2 * 4
    assert compilation.bytes_per_device(batch) == 2 * (2 * 128 + 2 * 8 * 3 + 8 + 3 * 4)


def test_abstract_rows_match_the_batches_of_the_loader(corpus):
    rows, sharding = Rows(corpus, "train", 0), batch_sharding(make_mesh())
    (batch,) = pretrain_batches(rows, sharding, 16, 0, 1)
    expected = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), batch
    )
    assert abstract_rows(rows, 16, sharding) == expected


def test_stand_in_tokenizer_suits_masking():
    tokenizer = planned.UNCASED_ENGLISH
    assert len(tokenizer.word_start) == tokenizer.vocab_size > max(tokenizer.special_ids)
    assert tokenizer.mask_id in tokenizer.special_ids


@pytest.mark.parametrize("name", pod_table.PODS)
def test_pod_configuration_has_a_topology_that_divides_its_batches(name):
    module, _, argument = name.partition(".py:")
    get_config = importlib.import_module(f"bert_jax.configs.pretrain.{module}").get_config
    config = get_config(argument)
    chip, sizes, _ = parse_topology(pod_table.default_topology(f"configs/pretrain/{name}"))
    assert chip == argument
    num_devices = math.prod(sizes) * CHIPS[chip].devices_per_chip
    for phase in (config, config.long_phase):
        rows_at_once = num_devices * max(config.per_device_batch_size, 1)
        assert not phase.num_steps or phase.batch_size % rows_at_once == 0
    small = get_config(f"{argument},runlocal")
    assert small.batch_size == small.long_phase.batch_size == 8
    assert small.per_device_batch_size == 0 and small.num_steps + small.long_phase.num_steps <= 14
    with pytest.raises(ValueError, match="after the colon"):
        get_config(f"{argument},runlocl")


def test_default_topology_is_of_the_chip_after_the_colon():
    for chip in pod_base.CHIPS:
        for argument in (chip, f"{chip},runlocal"):
            topology = pod_table.default_topology(f"/configs/pretrain/pod_large.py:{argument}")
            assert topology == pod_table.default_topology(f"pod_large.py:{chip}")
            assert topology.startswith(f"{chip}:")
    assert tuple(CHIPS) == pod_base.CHIPS
    for argument in ("", ":v4", ":runlocal"):
        assert pod_table.default_topology(f"pod_base.py{argument}") == "v4:2x2x4"
    assert pod_table.default_topology("configs/pretrain/bert_base.py") is None


def test_rows_of_a_phase_without_a_corpus_are_as_long_as_those_before():
    config = bert_base.get_config()
    config.long_phase.num_steps = 0
    config.later_phases = make_later_phases({"num_steps": 1}, {"num_steps": 1, "corpus": "a"})
    rows = [phase.train for phase in planned.planned_phases(config)]
    assert [each.max_seq_length for each in rows] == [128, 128, 512]
    config.later_phases.phase_4.max_seq_length = 8192
    assert [phase.train.max_sequences for phase in planned.planned_phases(config)] == [
        8,
        8,
        128,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [distilbert, tinybert])
def test_reports_of_distillation_assume_a_teacher_of_the_base_size(recipe):
    config = recipe.get_config()
    (phase,) = planned.planned_phases(config, (128, 512))
    teacher = compilation.assumed_teacher(config, phase.objective_class)
    setup = setup_pretraining(config, [phase], planned.UNCASED_ENGLISH, teacher_settings=teacher)
    frozen = abstract_frozen(setup)
    assert {
        len(leaf.shape) and leaf.shape[0]
        for leaf in jax.tree.leaves(frozen["teacher"]["encoder"]["layers"])
    } == {12}
    assert ("mlm" in frozen["teacher"]) == (recipe is distilbert)
    student, size = setup.phases[0].flops_per_row, setup.model.config.hidden_size
    assert size == (768 if recipe is distilbert else 312)
    base = pod_base.get_config()
    base.num_steps, base.long_phase.num_steps = config.num_steps, config.long_phase.num_steps
    (phase,) = planned.planned_phases(base, (128, 512))
    teacher_step = setup_pretraining(base, [phase], planned.UNCASED_ENGLISH)
    assert student < teacher_step.phases[0].flops_per_row
    assert compilation.assumed_teacher(base, phase.objective_class) is None
