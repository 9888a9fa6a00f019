"""Setup of pre-training from a configuration: phases, schedule, model config, microbatches."""

import dataclasses
import functools
import types

import jax
import numpy as np
import pytest

from bert_jax.configs.pretrain import bert_tiny
from bert_jax.data.masking import Masking, mask_tokens
from bert_jax.model.config import BertConfig
from bert_jax.objectives import find_objective
from bert_jax.pods.estimate.compilation import UNCASED_ENGLISH
from bert_jax.training.pretrain_setup import (
    check_numbers,
    make_model_config,
    open_phases,
    plan_phase,
    pretraining_schedule,
    setup_pretraining,
)


def tiny_config(**changes):
    config = bert_tiny.get_config()
    config.update_from_flattened_dict(
        {name.replace("__", "."): value for name, value in changes.items()}
    )
    return config


def planned(config, is_long=False, length=128):
    manifest = {"splits": {"train": {"nsp_labels": {}}}}
    rows = types.SimpleNamespace(max_seq_length=length, max_sequences=8, manifest=manifest)
    return plan_phase(config, find_objective(config.objective), is_long, rows, None, 0)


@pytest.mark.parametrize(
    ("rate", "length", "expected"),
    # The first two are the paper's.
    [(0.15, 128, 20), (0.15, 512, 77), (0.15, 16, 3), (0.2, 128, 26), (0.3, 128, 39), (0.1, 30, 3)],
)
def test_max_predictions_follow_rate_and_length(rate, length, expected):
    config = tiny_config(masking__rate=rate)
    assert planned(config, length=length).max_predictions == expected


def test_rows_are_masked_at_a_high_rate():
    phase = planned(tiny_config(masking__rate=0.4))
    masking = Masking((), 4, 100, np.ones(100, bool), phase.max_predictions, 0.4)
    tokens, inside = np.full((1, 128), 7), np.ones((1, 128), int)
    mask = jax.jit(functools.partial(mask_tokens, masking=masking))
    masked = mask(jax.random.split(jax.random.key(0), 1), tokens, inside)
    assert masked["target_weights"].sum() == 51  # 39.8 %.


def test_given_max_predictions_are_kept():
    config = tiny_config(max_predictions=25, long_phase__max_predictions=80)
    assert planned(config).max_predictions == 25
    assert planned(config, is_long=True, length=512).max_predictions == 80


def rates(config) -> list[float]:
    num_steps = config.num_steps + config.long_phase.num_steps
    schedule = jax.jit(pretraining_schedule(config))
    return [float(schedule(step)) for step in range(num_steps + 1)]


def decay(peak: float, num_steps: int, warmup_steps: int) -> list[float]:
    """Returns the released schedule, in float64."""
    return [
        peak * (step / warmup_steps if step < warmup_steps else 1 - step / num_steps)
        for step in range(num_steps)
    ]


SHORT = {"num_steps": 30, "warmup_steps": 5, "learning_rate": 1e-3, "long_phase__num_steps": 10}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, decay(1e-3, 40, 5)),
        ({"num_steps": 0}, decay(1e-3, 10, 5)),  # The long phase alone.
        ({"long_phase__num_steps": 0}, decay(1e-3, 30, 5)),
        ({"long_phase__learning_rate": 1e-4}, decay(1e-3, 30, 5) + decay(1e-4, 10, 0)),
        ({"long_phase__warmup_steps": 4}, decay(1e-3, 30, 5) + decay(1e-3, 10, 4)),
        (
            {"num_steps": 0, "long_phase__learning_rate": 1e-4, "long_phase__warmup_steps": 4},
            decay(1e-4, 10, 4),
        ),
    ],
    ids=["one", "long-alone", "short-alone", "own-rate", "own-warm-up", "long-alone-own"],
)
def test_schedule_decays_over_both_phases_or_over_each(fields, expected):
    np.testing.assert_allclose(
        rates(tiny_config(**SHORT | fields)), [*expected, 0.0], rtol=1e-6, atol=1e-12
    )


def test_warm_up_of_a_first_phase_that_is_skipped_is_no_error():
    own = {"num_steps": 0, "warmup_steps": 5, "long_phase__learning_rate": 1e-4}
    check_numbers(tiny_config(**SHORT | own))


def test_each_phase_has_its_microbatches():
    for override, expected in ((None, (2, 2)), (4, (2, 8)), (0, (2, 1))):
        config = tiny_config(per_device_batch_size=16, long_phase__per_device_batch_size=override)
        phases = [planned(config), planned(config, is_long=True)]
        setup = setup_pretraining(config, phases, UNCASED_ENGLISH)
        assert tuple(each.num_microbatches for each in setup.phases) == expected


def test_devices_are_logged_in_words(caplog):
    caplog.set_level("INFO", "absl")
    for num_devices, mesh in ((8, {"fsdp": 2, "tensor": 2}), (1, {})):
        config = tiny_config(**{f"mesh__{axis}": size for axis, size in mesh.items()})
        devices = jax.devices()[:num_devices]
        setup_pretraining(config, [planned(config)], UNCASED_ENGLISH, devices)
    assert [record.getMessage() for record in caplog.records if "Devices" in record.msg] == [
        "Devices: 8 (cpu), as data 2 x fsdp 2 x tensor 2; --verbosity=1 lists how parameters are "
        "sharded",
        "Devices: 1 (cpu)",
    ]


def test_phase_without_a_corpus_is_an_error_with_both_ways_out(corpus):
    message = r"900,000 steps on short rows: set config\.corpus=DIR, or .*config\.num_steps=0"
    with pytest.raises(ValueError, match=message):
        open_phases(tiny_config())
    message = r"100,000 steps on long rows: set .*long_phase\.corpus=DIR, .*long_phase\.num_steps=0"
    with pytest.raises(ValueError, match=message):
        open_phases(tiny_config(corpus=str(corpus)))


WEIGHTS = BertConfig(hidden_size=384, num_layers=6, intermediate_size=1536)


def test_model_config_comes_from_the_weights_unless_given():
    fields = {"model__size": None, "model__layer_norm_epsilon": None, "model__dropout_rate": 0.3}
    weights = dataclasses.replace(WEIGHTS, layer_norm_epsilon=1e-5, num_heads=6)
    config = make_model_config(tiny_config(**fields), 100, weights)
    assert config == dataclasses.replace(weights, vocab_size=100, dropout_rate=0.3)
    agreeing = make_model_config(tiny_config(model__size="base"), 100, BertConfig())
    assert agreeing.hidden_size == 768


@pytest.mark.parametrize(
    ("fields", "weights", "message"),
    [
        ({"model__size": "tiny"}, WEIGHTS, r"num_layers is 2, but 6 in w.*\.num_layers=6, or"),
        ({"model__num_heads": 3}, WEIGHTS, "num_heads is 3, but 12 in w"),
        (
            {},
            dataclasses.replace(WEIGHTS, layer_norm_epsilon=1e-5),
            "layer_norm_epsilon is 1e-12, but 1e-05 in w",
        ),
        ({"model__num_heads": 7}, WEIGHTS, "num_heads is 7, but 12 in w"),
        ({}, None, r"unknown: this tool does not read the weights"),
    ],
)
def test_contradictory_or_unknown_model_config_is_an_error(fields, weights, message):
    config = tiny_config(**{"model__size": None, "init_from": "w"} | fields)
    with pytest.raises(ValueError, match=message):
        make_model_config(config, 100, weights)
