"""Setup of pre-training from a configuration: phases, schedule, model config, microbatches."""

import dataclasses
import functools
import types

import jax
import numpy as np
import pytest
from absl import flags

from bert_jax.configs.pretrain import bert_tiny, modernbert_base, own_language
from bert_jax.configs.pretrain.fields import known_fields, make_later_phases, phases_of
from bert_jax.data.masking import Masking, mask_tokens
from bert_jax.data.rows import Rows
from bert_jax.model.config import BertConfig
from bert_jax.objectives import find_objective
from bert_jax.pods.estimate.planned import UNCASED_ENGLISH, planned_phases
from bert_jax.runtime.command_line import define_config, parse_flags
from bert_jax.runtime.config_fields import flatten, format_fields
from bert_jax.training.phases import (
    check_numbers,
    open_phases,
    phase_configs,
    plan_phase,
    pretraining_schedule,
    stable_step,
)
from bert_jax.training.pretrain_setup import make_model_config, setup_pretraining
from tests.helpers.corpora import build_small_corpus


def tiny_config(**changes):
    config = bert_tiny.get_config()
    config.update_from_flattened_dict(
        {name.replace("__", "."): value for name, value in changes.items()}
    )
    return config


def planned(config, name="", length=128):
    manifest = {"splits": {"train": {"nsp_labels": {}}}}
    rows = types.SimpleNamespace(max_seq_length=length, max_sequences=8, manifest=manifest)
    objective_class = find_objective(config.objective)
    return plan_phase(phase_configs(config)[name], objective_class, name, rows, None, 0)


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
    assert planned(config, "long_phase", length=512).max_predictions == 80


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


def with_later_phases(config, *phases):
    config.later_phases = make_later_phases(*phases)
    return config


def test_each_later_phase_is_as_the_one_before_but_for_what_it_sets():
    config = tiny_config(num_steps=10, warmup_steps=0, corpus="a", batch_size=16)
    config.long_phase.num_steps = 0
    config = with_later_phases(
        config,
        {"num_steps": 5, "batch_size": 32},
        {"batch_size": 1},  # Skipped: it has no steps.
        {"num_steps": 4, "corpus": "b", "masking.rate": 0.05, "per_device_batch_size": 2},
        {"num_steps": 3, "max_predictions": 9},
    )
    expected = {
        "": ("a", 10, 16, None, 0.15, 0),
        "later_phases.phase_3": ("a", 5, 32, None, 0.15, 0),
        "later_phases.phase_5": ("b", 4, 32, None, 0.05, 2),
        "later_phases.phase_6": ("b", 3, 32, 9, 0.05, 2),
    }
    names = "corpus num_steps batch_size max_predictions masking.rate per_device_batch_size"
    found = {
        name: tuple(flatten(each)[field] for field in names.split())
        for name, each in phase_configs(config).items()
    }
    assert found == expected
    check_numbers(config)
    predictions = [planned(config, name, 100).max_predictions for name in expected]
    assert predictions == [15, 15, 5, 9]


def test_schedule_of_later_phases_goes_on_unless_they_set_a_rate_or_a_warm_up():
    config = with_later_phases(
        tiny_config(**SHORT),
        {"num_steps": 6},
        {"num_steps": 8, "warmup_steps": 4},
        {"num_steps": 2},
    )
    np.testing.assert_allclose(
        [float(pretraining_schedule(config)(step)) for step in range(56)],
        decay(1e-3, 46, 5) + decay(1e-3, 10, 4),
        rtol=1e-6,
    )
    check_numbers(config)


def test_later_phases_read_on_where_the_one_before_has_stopped(corpus, long_corpus):
    config = tiny_config(num_steps=3, batch_size=8, corpus=str(corpus))
    config.long_phase.update({"num_steps": 2, "batch_size": 4, "corpus": str(long_corpus)})
    config = with_later_phases(
        config, {"num_steps": 2}, {"num_steps": 1, "corpus": str(corpus)}, {"num_steps": 1}
    )
    phases = open_phases(config)
    assert [phase.train.max_seq_length for phase in phases] == [64, 128, 128, 64, 64]
    assert [phase.stream.first_rows for phase in phases] == [[0], [0], [8], [24], [28]]
    np.testing.assert_array_equal(
        phases[-1].stream.read(0, 4)["row_ids"], phases[0].train.read(28, 32)["row_ids"]
    )


@pytest.mark.slow
def test_recipe_of_modernbert_has_its_tokens_and_rates():
    config = modernbert_base.get_config()
    check_numbers(config)
    phases = phase_configs(config)
    tokens = [each.num_steps * each.batch_size * each.max_seq_length for each in phases.values()]
    np.testing.assert_allclose(tokens, [*[10e9] * 5, 1669e9, 250e9, 50e9], rtol=2e-3)
    assert {each.masking.rate for each in phases.values()} == {0.3}
    schedule, starts = (
        pretraining_schedule(config),
        np.cumsum([p.num_steps for p in phases.values()]),
    )
    found = [float(schedule(step)) for step in (0, 3_815, *(starts - 1)[[0, 5]], starts[5])]
    np.testing.assert_allclose(found, [0, 8e-4, 8e-4, 8e-4, 3e-4], rtol=1e-6)
    assert stable_step(config) == starts[6]
    setup = setup_pretraining(config, planned_phases(config), UNCASED_ENGLISH)
    assert [each.phase.train.max_seq_length for each in setup.phases] == [1024] * 6 + [8192] * 2
    bases = [each.model.config.global_rope_base for each in setup.phases]
    assert bases == [10_000.0] * 6 + [160_000.0] * 2
    config.model.size = "ettin-17m"  # Whose published models differ in both.
    setup = setup_pretraining(config, planned_phases(config), UNCASED_ENGLISH)
    models = [each.model.config for each in setup.phases]
    assert {(each.local_rope_base, each.max_position_embeddings) for each in models} == {
        (10_000.0, 8192)
    }
    local = phase_configs(modernbert_base.get_config("runlocal"))
    assert [(each.num_steps, each.batch_size) for each in local.values()] == [(10, 8)] + [
        (4, 8)
    ] * 7
    # Without rows of 8,192 tokens.
    for number in (8, 9):
        config.later_phases[f"phase_{number}"].num_steps = 0
    assert stable_step(config) == starts[5] - 10_600
    check_numbers(config)


def test_phases_mix_corpora_and_each_is_read_on(corpus, tmp_path):
    other = build_small_corpus(tmp_path, num_documents=30)
    config = tiny_config(num_steps=4, batch_size=8)
    config.long_phase.num_steps = 0
    config.corpus = f"{corpus}:1,{other}:3"
    config = with_later_phases(
        config,
        {"num_steps": 1},
        {"num_steps": 1, "corpus": f"{corpus}:1,{other}:1"},
        {"num_steps": 1, "corpus": str(other)},
    )
    phases = open_phases(config)
    assert [phase.stream.first_rows for phase in phases] == [[0, 0], [8, 24], [10, 30], [34]]
    assert [phase.stream.weights for phase in phases[:3]] == [[1, 3], [1, 3], [1, 1]]
    rows = phases[2].stream.read(0, 8)["tokens"]
    expected = (
        phases[0].train.read(10, 14)["tokens"],
        Rows(other, "train", config.seed).read(30, 34)["tokens"],
    )
    np.testing.assert_array_equal(rows[1::2], expected[0])
    np.testing.assert_array_equal(rows[::2], expected[1])


@pytest.mark.parametrize("name", ["", "bert_base", "modernbert_small", "modernbert_base"])
def test_models_of_own_language_have_ten_billion_tokens_and_split_over_eight_chips(name):
    config = own_language.get_config(name)
    check_numbers(config)
    tokens = config.num_steps * config.batch_size * config.max_seq_length
    assert tokens == pytest.approx(1e10, rel=1e-4)
    for num_chips in (1, 8):
        assert config.batch_size % (num_chips * config.per_device_batch_size) == 0
    assert stable_step(config) == config.num_steps - config.decay_steps
    assert list(phase_configs(config)) == [""]


def test_small_corpora_are_mixed_unless_they_hold_out_other_documents_of_one_input(tmp_path):
    """The fraction of documents that is held out is raised until there is one."""
    kinds = {"a": {"num_documents": 8}, "b": {"num_documents": 5}}
    kinds["of a"] = {"num_documents": 8, "min_words": 100}
    built = {
        name: build_small_corpus(tmp_path / name, heldout_fraction=0.001, **settings)
        for name, settings in kinds.items()
    }
    shares = [Rows(each).manifest["heldout_share"] for each in built.values()]
    assert shares[0] not in shares[1:]
    config = tiny_config(num_steps=4, batch_size=8, corpus=f"{built['a']},{built['b']}")
    config.long_phase.num_steps = 0
    assert len(open_phases(config)[0].heldout) == 2
    config.corpus = f"{built['b']},{built['a']},{built['of a']}"
    with pytest.raises(ValueError, match="hold out different documents, because the corpora are s"):
        open_phases(config)


def test_later_phases_are_flags_and_unknown_names_are_refused(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from bert_jax.configs.pretrain import bert_tiny, fields\n"
        "def get_config():\n"
        "    config = bert_tiny.get_config()\n"
        "    config.later_phases = fields.make_later_phases({'num_steps': 7}, {'num_steps': 8})\n"
        "    return config\n"
    )

    def parse(*arguments):
        arguments, values = [f"--config={path}", *arguments], flags.FlagValues()
        define_config("", known_fields, values, arguments)
        parse_flags(["pretrain", *arguments], values)
        return values.config

    prefix = "--config.later_phases.phase_4"
    config = parse(f"{prefix}.num_steps=5", f"{prefix}.masking.rate=0.05", f"{prefix}.corpus=a,b")
    phase = phases_of(config)["later_phases.phase_4"]
    assert (phase.num_steps, phase.masking.rate, phase.corpus) == (5, 0.05, "a,b")
    with pytest.raises(SystemExit, match=r"there is no field 'num_stepz'; did you mean"):
        parse(f"{prefix}.num_stepz=5")
    with pytest.raises(KeyError, match="num_stepz"):
        make_later_phases({"num_stepz": 5})
    listed = format_fields(config, known_fields(config))
    assert "--config.later_phases.phase_4.masking.rate: Fraction" in listed


@pytest.mark.parametrize(
    ("shape", "falling"),
    [
        (None, [1, 1 - 0.25**0.5, 1 - 0.5**0.5, 1 - 0.75**0.5]),
        ("1-sqrt", [1, 1 - 0.25**0.5, 1 - 0.5**0.5, 1 - 0.75**0.5]),
        ("linear", [1, 0.75, 0.5, 0.25]),
    ],
)
def test_learning_rate_is_constant_until_the_last_decay_steps(shape, falling):
    config = tiny_config(**SHORT, decay_steps=4, decay_shape=shape)
    ramp = [1e-3 * step / 5 for step in range(5)]
    expected = [*ramp, *[1e-3] * 31, *(1e-3 * fraction for fraction in falling), 0.0]
    np.testing.assert_allclose(rates(config), expected, rtol=1e-6, atol=1e-12)
    # Each phase may have a constant rate of its own.
    config = tiny_config(**SHORT, decay_steps=4, decay_shape=shape, long_phase__learning_rate=1e-4)
    expected[30:36] = [1e-4] * 6
    expected[36:] = [fraction / 10 for fraction in expected[36:]]
    np.testing.assert_allclose(rates(config), expected, rtol=1e-6, atol=1e-12)
    assert stable_step(config) == 36
    check_numbers(config)


def test_warm_up_of_a_first_phase_that_is_skipped_is_no_error():
    own = {"num_steps": 0, "warmup_steps": 5, "long_phase__learning_rate": 1e-4}
    check_numbers(tiny_config(**SHORT | own))


def test_each_phase_has_its_microbatches():
    for override, expected in ((None, (2, 2)), (4, (2, 8)), (0, (2, 1))):
        config = tiny_config(per_device_batch_size=16, long_phase__per_device_batch_size=override)
        phases = [planned(config), planned(config, "long_phase")]
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
