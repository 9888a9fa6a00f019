"""Distillation in pre-training: losses, trained and stored parameters, and invalid teachers."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import bert_jax
from bert_jax import pretrain
from bert_jax.checkpoints.native import find_checkpoint, write_checkpoint
from bert_jax.checkpoints.parameters import model_settings
from bert_jax.checkpoints.verify import load_training_state
from bert_jax.configs.pretrain import bert_base
from bert_jax.model.architecture import config_to_settings
from bert_jax.model.attention_mask import AttentionMask
from bert_jax.model.encoder import Encoder
from bert_jax.model.execution import ExecutionPlan
from bert_jax.objectives.distillation import Distillation, DistillationModel
from bert_jax.objectives.masked_lm import MaskedLm, PretrainingModel
from bert_jax.tokenizers.tokenizer import load_tokenizer
from bert_jax.training import pretrain_step
from bert_jax.training.phases import open_phases
from bert_jax.training.pretrain_setup import setup_pretraining
from bert_jax.training.pretrain_teacher import read_teacher
from tests.helpers.corpora import write_vocabulary
from tests.helpers.models import (
    assert_trees_equal,
    example_batch,
    random_params,
    small_model_config,
)
from tests.helpers.runs import saved_params, small_config, stopped_after_save
from tests.suites import objectives as suites

LOSSES = ("soft", "mlm", "cosine", "attention", "hidden", "embeddings")
WEIGHTS = dict(zip(LOSSES, (5.0, 2.0, 1.0, 0.5, 0.25, 0.125), strict=True))
TEACHER = suites.make_config(num_layers=4)
STUDENT = suites.make_config(intermediate_size=48, type_vocab_size=0)


def make_objective(weights=WEIGHTS, teacher=TEACHER, **fields) -> Distillation:
    masked_lm = MaskedLm(suites.make_masking(), next_sentence=False)
    objective = Distillation(masked_lm, dict.fromkeys(LOSSES, 0.0) | weights, **fields)
    settings = {"architecture": config_to_settings(teacher), "modules": ["encoder", "mlm"]}
    return objective.with_teacher(settings)


@functools.cache
def teacher_params(config=TEACHER) -> dict:
    model = PretrainingModel(config, next_sentence=False)
    return random_params(model, example_batch())


def make_case(objective, student=STUDENT) -> suites.ObjectiveCase:
    weights = {f"{name}_loss": objective.weights[name] for name in objective.losses}
    frozen = objective.frozen_params(teacher_params(objective.teacher))
    reference_of = functools.partial(reference, objective)
    return suites.ObjectiveCase(objective, student, weights, reference_of, frozen)


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def reference(objective, model, params, batch):
    """The losses of what student and teacher return, for one token after the other."""
    x = jax.jit(model.apply)({"params": params}, batch)
    y = jax.jit(objective._teacher_outputs, static_argnums=0)(model, params["teacher"], batch)
    x, y = ({name: np.asarray(values, float) for name, values in each.items()} for each in (x, y))
    sums = dict.fromkeys(LOSSES, 0.0)
    num_targets, num_tokens, num_pairs = int(batch["target_weights"].sum()), 0, 0
    window = getattr(model.config, "attention_window", 2 * suites.LENGTH) // 2
    for row, ids in enumerate(batch["sequence_ids"]):
        for slot in np.flatnonzero(batch["target_weights"][row]):
            # Ids that pad the vocabulary have the minimum float32.
            p, q = (log_softmax(each["soft"][row, slot, : suites.VOCAB] / 3) for each in (y, x))
            sums["soft"] += 9 * (np.exp(p) * (p - q)).sum()
        for token in np.flatnonzero(ids):
            num_tokens += 1
            one, other = x["cosine"][row, token], y["cosine"][row, token]
            norms = np.linalg.norm(one) * np.linalg.norm(other)
            sums["cosine"] += 1 - one @ other / norms
            for layer in range(2):
                one, other = (each["hidden"][layer, row, token] for each in (x, y))
                sums["hidden"] += ((one - other) ** 2).mean()
            one, other = (each["embeddings"][row, token] for each in (x, y))
            sums["embeddings"] += ((one - other) ** 2).mean()
            pairs = np.flatnonzero(ids == ids[token])
            num_pairs += len(pairs)
            seen = pairs[abs(pairs - token) <= window]  # Of the two layers, the teacher's is local.
            one, other = (each["attention"][:, row, :, token, seen] for each in (x, y))
            sums["attention"] += len(pairs) * 2 * ((one - other) ** 2).mean()
    counts = dict.fromkeys(LOSSES, num_tokens) | {"soft": num_targets, "attention": num_pairs}
    return {f"{name}_loss": (sums[name], counts[name]) for name in LOSSES} | suites.cross_entropy(
        "mlm", x["mlm"], batch["targets"], batch["target_weights"]
    )


OBJECTIVE = make_objective(temperature=3.0)
CASE = make_case(OBJECTIVE)


@functools.cache
def case_on(architecture: str) -> suites.ObjectiveCase:
    """Returns the case of a student and a teacher of another architecture."""
    make_config = suites.ARCHITECTURES[architecture]
    # The reference knows windows, but no global tokens.
    fields = {"global_tokens": "none"} if architecture == "longformer" else {}
    objective = make_objective(teacher=make_config(num_layers=4, **fields), temperature=3.0)
    return make_case(objective, make_config(intermediate_size=64, **fields))


@pytest.mark.parametrize("holds", suites.OBJECTIVE)
def test_objective(holds, tmp_path):
    holds(CASE, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("holds", suites.OBJECTIVE)
@pytest.mark.parametrize("architecture", suites.ARCHITECTURES)
def test_objective_on_other_architectures(architecture, holds, tmp_path):
    holds(case_on(architecture), tmp_path)


def test_a_teacher_whose_head_reads_another_stream_is_refused():
    with pytest.raises(ValueError, match=r"distillation\.teacher is an xlnet"):
        make_objective(teacher=suites.make_xlnet_config())


@pytest.mark.parametrize("weights", [{"soft": 1.0}, {"cosine": 1.0}], ids=list)
@pytest.mark.slow
def test_each_loss_alone_is_what_it_is_beside_the_others(weights):
    objective = make_objective(weights, temperature=3.0)
    model = objective.make_model(STUDENT, ExecutionPlan())
    params, batch = suites.params_of(CASE) | CASE.frozen, suites.prepared(CASE)
    sums = jax.jit(lambda params, batch: objective.sums(model, params, batch))(params, batch)
    assert set(objective.counts(batch)) == {f"{name}_loss" for name in objective.losses}
    (_, together), _ = suites.plain_update(CASE)
    for name, values in sums.items():
        np.testing.assert_allclose(values, together[name], rtol=1e-5, err_msg=name)


def test_attention_of_a_local_layer_weighs_as_much_as_that_of_a_global_one():
    batch = {
        "sequence_ids": jnp.array([[1, 1, 1, 1, 1, 2, 2, 0]]),
        "target_weights": jnp.zeros((1, 1)),
    }
    masks = [AttentionMask(batch["sequence_ids"]), AttentionMask(batch["sequence_ids"], window=1)]
    visible = jnp.stack([mask.pairs() for mask in masks])
    # The differences are 1 and 2; those that a window hides are large, as those of padding.
    teacher = {"attention": jnp.zeros((2, 1, 4, 8, 8)), "visible": jnp.ones_like(visible)}
    scores = jnp.where(visible, jnp.array([1.0, 2.0])[:, None, None, None, None], 100.0)
    scores = jnp.where(batch["sequence_ids"][:, None, :, None] > 0, scores, 100.0)
    student = {"attention": jnp.broadcast_to(scores, (2, 1, 4, 8, 8)), "visible": visible}
    found = make_objective({"attention": 1.0}).compare(student, teacher, batch)
    assert {name: (float(x), float(n)) for name, (x, n) in found.items()} == {
        "attention_loss": (pytest.approx(29 * (1 + 4)), 29)
    }


def float64_scores(params: dict, x: np.ndarray, layer: int, num_heads: int) -> np.ndarray:
    """Returns attention scores of a layer for its input `[B, L, H]`: `[B, heads, L, L]`."""
    size, projected = x.shape[-1] // num_heads, {}
    for name in ("query", "key"):
        kernel, bias = (params[name][leaf][layer].astype(float) for leaf in ("kernel", "bias"))
        projected[name] = x @ kernel + bias
    heads = [slice(head * size, (head + 1) * size) for head in range(num_heads)]
    scores = [
        projected["query"][..., head] @ np.swapaxes(projected["key"][..., head], 1, 2)
        for head in heads
    ]
    return np.stack(scores, axis=1) / math.sqrt(size)


@pytest.mark.slow
def test_compared_outputs_equal_the_encoder_and_its_layers():
    objective, batch = make_objective(layers=(1, 4)), suites.prepared(CASE)
    model, params = suites.model_of(CASE), suites.params_of(CASE)
    outputs = jax.jit(model.apply)({"params": params}, batch)
    all_states = functools.partial(Encoder(STUDENT).apply, method="all_hidden_states")
    states = np.asarray(jax.jit(all_states)({"params": params["encoder"]}, batch))
    head = PretrainingModel(STUDENT, next_sentence=False)
    logits, _ = jax.jit(head.apply)({"params": params}, batch)
    projection = {name: leaf.astype(float) for name, leaf in params["projection"].items()}
    projected = states.astype(float) @ projection["kernel"] + projection["bias"]
    layers = params["encoder"]["layers"]
    expected = {
        "mlm": logits,
        "cosine": states[-1],
        "hidden": projected[1:],
        "embeddings": projected[0],
        "attention": [float64_scores(layers, states[n].astype(float), n, 4) for n in range(2)],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(outputs[name], values, rtol=1e-5, atol=1e-5, err_msg=name)
    # Of the teacher, the layers of `layers`.
    teacher_outputs = jax.jit(objective._teacher_outputs, static_argnums=0)(
        model, teacher_params(), batch
    )
    teacher_states = jax.jit(functools.partial(Encoder(TEACHER).apply, method="all_hidden_states"))
    states = np.asarray(teacher_states({"params": teacher_params()["encoder"]}, batch))
    np.testing.assert_allclose(teacher_outputs["hidden"], states[[1, 4]], rtol=1e-5, atol=1e-5)
    layers = teacher_params()["encoder"]["layers"]
    scores = [float64_scores(layers, states[n].astype(float), n, 4) for n in (0, 3)]
    np.testing.assert_allclose(teacher_outputs["attention"], scores, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_student_with_all_layers_of_its_teacher_has_no_loss():
    objective = make_objective({"soft": 5.0, "cosine": 1.0}, init_layers=(1, 2, 3, 4))
    model = objective.make_model(TEACHER, ExecutionPlan())
    batch = suites.prepared(CASE)
    modules = random_params(model, batch)
    params = objective.initial_params(teacher_params(), modules)
    assert flatten_dict(params).keys() == flatten_dict(modules).keys()
    gradients_of = jax.jit(jax.grad(lambda params, frozen: total(params | frozen)))

    def total(params):
        sums = objective.sums(model, params, batch)
        return sums["soft_loss"][0] + sums["cosine_loss"][0]

    frozen = objective.frozen_params(teacher_params())
    assert abs(total(params | frozen)) < 1e-5
    gradients = gradients_of(params, frozen)
    assert max(float(abs(leaf).max()) for leaf in jax.tree.leaves(gradients)) < 1e-4


def test_student_starts_from_the_chosen_layers():
    objective = make_objective(init_layers=(1, 4))
    student = suites.make_config(type_vocab_size=0)
    params = objective.initial_params(
        teacher_params(), suites.params_of(make_case(objective, student))
    )
    teacher = teacher_params()
    np.testing.assert_array_equal(
        params["encoder"]["layers"]["output"]["kernel"],
        teacher["encoder"]["layers"]["output"]["kernel"][[0, 3]],
    )
    assert "segment_embedding" not in params["encoder"]["embeddings"]
    assert_trees_equal(params["mlm"], teacher["mlm"])
    assert "projection" not in params  # It begins at random.


def test_layers_of_modernbert_start_from_layers_of_their_kind():
    """Of global and local ones in turn, of which the first has no first LayerNorm."""
    teacher, student = (suites.make_modernbert_config(num_layers=count) for count in (4, 2))
    objective = make_objective({"soft": 1.0}, teacher, init_layers=(1, 4))
    modules = random_params(objective.make_model(student, ExecutionPlan()), suites.prepared(CASE))
    params = objective.initial_params(teacher_params(teacher), modules)
    shapes, expected = (jax.tree.map(np.shape, each) for each in (params, modules))
    assert shapes == expected
    encoder, of_teacher = params["encoder"], teacher_params(teacher)["encoder"]
    assert_trees_equal(encoder["last"], of_teacher["last"])
    for path, layers in {"attention_norm/scale": [2], "feed_forward_norm/scale": [0, 3]}.items():
        ours, theirs = (flatten_dict(each["layers"], sep="/") for each in (encoder, of_teacher))
        np.testing.assert_array_equal(ours[path], theirs[path][layers])
    objective = dataclasses.replace(objective, init_layers=(1, 3))
    with pytest.raises(ValueError, match=r"layer 2 of the student .* layer 3, .* one of 2, 4"):
        objective.make_model(student, ExecutionPlan())


@pytest.mark.slow
def test_fast_path_agrees_with_the_plain_layers():
    teacher = suites.make_config(num_layers=4, hidden_size=128, num_heads=2, initializer_range=0.05)
    student = dataclasses.replace(teacher, num_layers=2)
    objective = make_objective({"soft": 5.0, "mlm": 2.0, "cosine": 1.0}, teacher)
    suites.assert_fast_path_changes_nothing(make_case(objective, student), tolerance=1e-3)


def test_losses_that_compare_layers_run_them_one_by_one_and_say_so(caplog):
    plan = ExecutionPlan(uses_kernels=True, dtype="bfloat16")
    assert OBJECTIVE.make_model(STUDENT, plan).plan == ExecutionPlan(dtype="bfloat16")
    assert "run without the fast path for TPUs: the losses compare" in caplog.text


@pytest.fixture(scope="module")
def given(corpus, tmp_path_factory):
    """Returns a function that writes a teacher, and a configuration to distill it."""
    directory = tmp_path_factory.mktemp("teachers")

    def write(name: str, seed: int = 0, has_head: bool = True, tokenizer=None, **fields):
        tokenizer = tokenizer or load_tokenizer(corpus)
        sizes = {"hidden_size": 64, "num_layers": 4, "num_heads": 1, "intermediate_size": 256}
        config = small_model_config(tokenizer.vocab_size, **sizes | fields)
        model = PretrainingModel(config, next_sentence=False)
        params = dict(random_params(model, example_batch()))
        params["mlm"] = params["mlm"] | {"bias": params["mlm"]["bias"] + seed}
        if not has_head:
            del params["mlm"]
        write_checkpoint(directory / name, params, model_settings(config, params), tokenizer)
        return directory / name

    def configure(teacher, **changes):
        config = small_config(corpus, objective="distillation", next_sentence=False)
        with config.unlocked():
            config.model.update({"hidden_size": 64, "num_layers": 2, "type_vocab_size": 0})
            config.model.max_position_embeddings = 64
            config.distillation.teacher = str(teacher)
            for name, value in changes.items():
                *folders, field = name.split("__")
                functools.reduce(lambda fields, name: fields[name], folders, config)[field] = value
        return config

    return write, configure


@pytest.mark.slow
@pytest.mark.usefixtures("two_devices")
def test_teacher_is_neither_in_the_state_nor_in_the_program(given):
    write, configure = given
    config = configure(write("plain"), distillation__init_layers=(1, 3))
    phases = open_phases(config)
    tokenizer = phases[0].train.tokenizer
    teacher = read_teacher(config, Distillation, tokenizer)
    setup = setup_pretraining(config, phases, tokenizer, teacher_settings=teacher.settings)
    names = "/".join(
        jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(setup.abstract_state)
    )
    assert "teacher" not in names
    leaves = jax.tree.leaves(setup.abstract_state.params["encoder"]["layers"])
    assert {len(leaf) for leaf in leaves} == {2}
    assert isinstance(setup.model, DistillationModel)
    # It is lowered for any teacher of these shapes.
    objective = setup.phases[0].objective
    frozen = jax.eval_shape(lambda: objective.frozen_params(teacher.params))
    rows = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype)
        for name, x in suites.make_rows([()] * 8).items()
    }
    step = pretrain_step.make_pretrain_step(
        setup.model, setup.optimizer, setup.shardings, objective, seed=0
    )
    step.lower(setup.abstract_state, rows, frozen)


@pytest.mark.slow
@pytest.mark.usefixtures("two_devices")
def test_run_resumes_bit_for_bit_and_only_with_its_teacher(given, tmp_path):
    write, configure = given
    config = configure(write("first"), distillation__init_layers=(1, 3))
    result = pretrain.train_and_evaluate(config, tmp_path / "whole")
    assert {"soft_loss", "cosine_loss", "mlm_accuracy", "perplexity"} <= result.keys()

    with stopped_after_save(pretrain):
        pretrain.train_and_evaluate(config, tmp_path / "stopped")
    config.distillation.teacher = str(write("other", seed=1))
    with pytest.raises(ValueError, match=r"other settings:\n  contents\.(init_from|teacher): "):
        pretrain.train_and_evaluate(config, tmp_path / "stopped")
    config.distillation.teacher = str(write("copy"))  # The same, elsewhere.
    resumed = pretrain.train_and_evaluate(config, tmp_path / "stopped")
    assert resumed["soft_loss"] == result["soft_loss"]
    assert_trees_equal(saved_params(tmp_path / "stopped"), saved_params(tmp_path / "whole"))
    params = bert_jax.load(tmp_path / "whole").params
    assert set(params) == {"encoder", "mlm"}
    training = load_training_state(find_checkpoint(tmp_path / "whole"))
    sizes = {leaf.size for leaf in jax.tree.leaves(params)} | {1}
    assert {jnp.size(leaf) for leaf in jax.tree.leaves(training)} <= sizes


BAD = [
    ({"init_from": "x", "distillation__init_layers": (1, 2)}, {}, "both say what the student"),
    (
        {f"distillation__weights__{name}": 0.0 for name in LOSSES},
        {},
        r"all of config.distillation.weights are 0: set one \(attention",
    ),
    ({}, {"has_head": False}, "no head for masked tokens, which the loss 'soft' needs: set"),
    ({}, {"causal": True}, "teacher is left to right"),
    ({}, {"max_position_embeddings": 32}, "rows of 64 tokens, and the teacher only 32 positions"),
    (
        {"model__hidden_size": 128},
        {},
        "model.hidden_size is 128, and the teacher's is 64: the loss",
    ),
    (
        {
            "model__hidden_size": 128,
            "distillation__weights__attention": 1.0,
            "distillation__weights__cosine": 0.0,
        },
        {},
        "model.num_heads is 2, and the teacher's is 1: the loss 'attention' needs the same",
    ),
    (
        {"model__num_layers": 3, "distillation__weights__hidden": 1.0},
        {},
        "the teacher's 4 layers are no multiple of the student's 3: set config.distillation.lay",
    ),
    (
        {"distillation__layers": (1, 5), "distillation__weights__hidden": 1.0},
        {},
        "distillation.layers=1,5: expected a layer of the teacher, 1 to 4, for each of the",
    ),
    (
        {"distillation__init_layers": (1, 2), "model__type_vocab_size": 2},
        {"type_vocab_size": 1},
        "model.type_vocab_size is 2, and the teacher's is 1: with config.distillation.init_layers",
    ),
    ({"distillation__init_layers": (1,)}, {}, "init_layers=1: expected a layer of the teacher, 1 "),
    ({"distillation__init_layers": (0, 1)}, {}, "init_layers=0,1: expected a layer of the teacher"),
    (
        {
            "distillation__init_layers": (1, 2),
            "model__hidden_size": 128,
            "distillation__weights__cosine": 0.0,
        },
        {},
        "model.hidden_size is 128, and the teacher's is 64: with config.distillation.init_layers",
    ),
]


@pytest.mark.parametrize(("changes", "teacher", "message"), BAD, ids=lambda value: str(value)[:60])
def test_bad_teacher_is_a_clear_error(changes, teacher, message, given, tmp_path):
    write, configure = given
    directory = write(tmp_path.name, **teacher)
    with pytest.raises(ValueError, match=message):
        pretrain.train_and_evaluate(configure(directory, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_teacher_with_another_vocabulary_is_a_clear_error(given, tmp_path):
    write, configure = given
    other = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt", ["other", "words"]))
    directory = write("other_words", tokenizer=other)
    with pytest.raises(ValueError, match=r"not built with the tokenizer of the teacher in"):
        pretrain.train_and_evaluate(configure(directory), tmp_path / "run")


def test_defaults_match_distilbert():
    weights = bert_base.get_config().distillation.weights
    assert {name: weight for name, weight in weights.items() if weight} == {
        "soft": 5.0,
        "mlm": 2.0,
        "cosine": 1.0,
    }
    assert set(weights) == set(LOSSES)
