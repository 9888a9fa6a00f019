"""Distillation in pre-training: losses, trained and stored parameters, and invalid teachers."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

import bert_jax
from bert_jax import pretrain
from bert_jax.checkpoints.native import find_checkpoint, write_checkpoint
from bert_jax.checkpoints.parameters import model_settings
from bert_jax.checkpoints.verify import load_training_state
from bert_jax.configs.pretrain import bert_base
from bert_jax.data.masking import Masking
from bert_jax.data.packing import row_dtype
from bert_jax.model.bert import RULES
from bert_jax.model.config import BertConfig
from bert_jax.model.encoder import Encoder
from bert_jax.model.execution import Execution
from bert_jax.objectives.distillation import Distillation, DistillationModel
from bert_jax.objectives.masked_lm import MaskedLm, PretrainingModel, example_batch
from bert_jax.sharding.mesh import batch_sharding, make_mesh
from bert_jax.sharding.rules import infer_shardings
from bert_jax.tokenization import load_tokenizer
from bert_jax.training import pretrain_step
from bert_jax.training.pretrain_setup import open_phases, setup_pretraining
from bert_jax.training.state import TrainState
from bert_jax.training.teacher import read_teacher
from tests.helpers import assert_trees_equal, saved_params, small_config, write_vocabulary

VOCAB, LENGTH = 150, 64
LOSSES = ("soft", "mlm", "cosine", "attention", "hidden", "embeddings")
WEIGHTS = dict(zip(LOSSES, (5.0, 2.0, 1.0, 0.5, 0.25, 0.125), strict=True))
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_heads": 4,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.3,
    "dropout_rate": 0.0,
}
TEACHER = BertConfig(num_layers=4, intermediate_size=32, **SIZES)
STUDENT = BertConfig(num_layers=2, intermediate_size=24, type_vocab_size=0, **SIZES)


def make_objective(weights=WEIGHTS, teacher=TEACHER, **fields) -> Distillation:
    masking = Masking(
        special_ids=(0, 1, 2, 3, 4),
        mask_id=4,
        vocab_size=VOCAB,
        word_start=np.ones(VOCAB, bool),
        max_predictions=4,
    )
    weights = dict.fromkeys(LOSSES, 0.0) | weights
    objective = Distillation(MaskedLm(masking, next_sentence=False), weights, **fields)
    settings = {"architecture": {"name": "bert"} | vars(teacher), "modules": ["encoder", "mlm"]}
    return objective.with_teacher(settings)


@functools.cache
def random_params(model) -> dict:
    """Returns random parameters, biases included."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), example_batch())["params"]
    rng = np.random.default_rng(len(jax.tree.leaves(shapes)))
    return jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), shapes)


@functools.cache
def teacher_params() -> dict:
    return random_params(PretrainingModel(TEACHER, next_sentence=False))


def frozen_params(objective) -> dict:
    return objective.frozen_params(teacher_params())


def make_batch(rows: list[list[int]]) -> dict:
    """Returns a masked batch whose rows hold sequences, given by their seeds."""
    names = "tokens", "segment_ids", "position_ids", "sequence_ids"
    batch = {name: np.zeros((len(rows), LENGTH), np.int32) for name in names}
    batch |= {name: np.zeros((len(rows), 4), np.int32) for name in ("targets", "target_positions")}
    batch["target_weights"] = np.zeros((len(rows), 4), np.float32)
    for row, seeds in enumerate(rows):
        start = 0
        for number, seed in enumerate(seeds):
            rng, length = np.random.default_rng(seed), 6 + seed
            places, targets = slice(start, start + length), slice(2 * number, 2 * number + 2)
            batch["tokens"][row, places] = rng.integers(4, VOCAB, length)
            batch["segment_ids"][row, places] = np.arange(length) > 3
            batch["position_ids"][row, places] = np.arange(length)
            batch["sequence_ids"][row, places] = number + 1
            batch["target_positions"][row, targets] = start + np.array([2, 5])
            batch["targets"][row, targets] = rng.integers(4, VOCAB, 2)
            batch["target_weights"][row, targets] = 1
            start += length
    return batch


PACKED = [[1, 4], [2]]
UNPACKED = [[1], [4], [2]]


@functools.cache
def jitted_sums(objective, model):
    return jax.jit(lambda params, batch: objective.sums(model, params, batch))


def make_student(objective) -> DistillationModel:
    return objective.make_model(STUDENT, Execution(kernels="plain"))


def mean_losses(objective, batch) -> dict[str, float]:
    """Returns the mean losses of the student with the parameters for all of them."""
    model, params = make_student(objective), random_params(make_student(make_objective()))
    params |= frozen_params(make_objective())
    sums = jitted_sums(objective, model)(params, batch)
    counts = objective.counts(batch)
    assert set(counts) == {f"{name}_loss" for name in objective.losses}
    for name, count in counts.items():
        assert float(sums[name][1]) == float(count)
    return {
        name: float(sums[f"{name}_loss"][0] / counts[f"{name}_loss"])
        for name in sorted(objective.losses)
    }


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_losses_equal_float64():
    objective, batch = make_objective(temperature=3.0), make_batch(PACKED)
    rng, rows = np.random.default_rng(0), len(PACKED)
    shapes = {
        "mlm": (rows, 4, VOCAB),
        "cosine": (rows, LENGTH, 5),
        "embeddings": (rows, LENGTH, 5),
        "hidden": (2, rows, LENGTH, 5),
        "attention": (2, rows, 3, LENGTH, LENGTH),
    }
    student, teacher = (
        {name: rng.normal(0, 2, shape).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(2)
    )
    student["soft"], teacher["soft"] = student["mlm"], teacher["mlm"]
    found = objective.compare(student, teacher, batch)
    x, y = ({name: each.astype(float) for name, each in x.items()} for x in (student, teacher))
    sums = dict.fromkeys(LOSSES, 0.0)
    counts = {"mlm": 6, "soft": 6, "attention": 0} | dict.fromkeys(
        ("cosine", "hidden", "embeddings"), 7 + 10 + 8
    )
    for row in range(rows):
        for slot in np.flatnonzero(batch["target_weights"][row]):
            p, q = (log_softmax(each["soft"][row, slot] / 3) for each in (y, x))
            sums["soft"] += 9 * (np.exp(p) * (p - q)).sum()
            sums["mlm"] -= log_softmax(x["mlm"][row, slot])[batch["targets"][row, slot]]
        ids = batch["sequence_ids"][row]
        for token in np.flatnonzero(ids):
            one, other = x["cosine"][row, token], y["cosine"][row, token]
            norms = np.linalg.norm(one) * np.linalg.norm(other)
            sums["cosine"] += 1 - one @ other / norms
            for layer in range(2):
                one, other = (each["hidden"][layer, row, token] for each in (x, y))
                sums["hidden"] += ((one - other) ** 2).mean()
            one, other = (each["embeddings"][row, token] for each in (x, y))
            sums["embeddings"] += ((one - other) ** 2).mean()
            for seen in np.flatnonzero(ids == ids[token]):
                counts["attention"] += 1
                for layer in range(2):
                    one, other = (each["attention"][layer, row, :, token, seen] for each in (x, y))
                    sums["attention"] += ((one - other) ** 2).mean()
    for name in LOSSES:
        total, count = found[f"{name}_loss"]
        assert float(total) == pytest.approx(sums[name], rel=1e-6), name
        assert count == counts[name] == objective.counts(batch)[f"{name}_loss"]
    losses = {f"{name}_loss": sums[name] / counts[name] for name in LOSSES}
    expected = sum(WEIGHTS[name] * losses[f"{name}_loss"] for name in LOSSES)
    assert objective.total_loss(losses) == pytest.approx(expected, rel=1e-12)


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


def test_compared_outputs_equal_the_encoder_and_its_layers():
    objective, batch = make_objective(layers=(1, 4)), make_batch(PACKED)
    model = make_student(objective)
    params = random_params(model)
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


@pytest.mark.parametrize("weights", [WEIGHTS, {"soft": 1.0}, {"cosine": 1.0}], ids=list)
def test_packed_losses_equal_unpacked(weights):
    objective = make_objective(weights)
    packed, unpacked = (mean_losses(objective, make_batch(rows)) for rows in (PACKED, UNPACKED))
    assert packed == pytest.approx(unpacked, abs=1e-5)
    # Each loss alone is what it is beside the others.
    together = mean_losses(make_objective(), make_batch(PACKED))
    assert packed == pytest.approx({name: together[name] for name in packed}, abs=1e-5)


def test_student_with_all_layers_of_its_teacher_has_no_loss():
    objective = make_objective({"soft": 5.0, "cosine": 1.0}, init_layers=(1, 2, 3, 4))
    model = objective.make_model(TEACHER, Execution())
    modules = random_params(model)
    params = objective.initial_params(teacher_params(), modules)
    assert flatten_dict(params).keys() == flatten_dict(modules).keys()
    batch = make_batch(PACKED)
    gradients_of = jax.jit(jax.grad(lambda params, frozen: total(params | frozen)))

    def total(params):
        sums = objective.sums(model, params, batch)
        return sums["soft_loss"][0] + sums["cosine_loss"][0]

    frozen = frozen_params(objective)
    assert abs(total(params | frozen)) < 1e-5
    gradients = gradients_of(params, frozen)
    assert max(float(abs(leaf).max()) for leaf in jax.tree.leaves(gradients)) < 1e-4


def test_student_starts_from_the_chosen_layers():
    objective = make_objective(init_layers=(1, 4))
    student = BertConfig(num_layers=2, intermediate_size=32, type_vocab_size=0, **SIZES)
    model = objective.make_model(student, Execution(kernels="plain"))
    params = objective.initial_params(teacher_params(), random_params(model))
    teacher = teacher_params()
    np.testing.assert_array_equal(
        params["encoder"]["layers"]["output"]["kernel"],
        teacher["encoder"]["layers"]["output"]["kernel"][[0, 3]],
    )
    assert "segment_embedding" not in params["encoder"]["embeddings"]
    assert_trees_equal(params["mlm"], teacher["mlm"])
    assert "projection" not in params  # It begins at random.


def random_rows(num_rows: int) -> dict[str, np.ndarray]:
    rng, rows = np.random.default_rng(0), np.zeros(num_rows, row_dtype(LENGTH, 2))
    for row in rows:
        length = rng.integers(12, LENGTH)
        row["tokens"][:length] = rng.integers(5, VOCAB, length)
        row["tokens"][[0, 8, length - 1]] = 2, 3, 3
        row["sequence_bounds"][0] = (0, 9, length)
    rows = {name: rows[name] for name in rows.dtype.names}
    numbers = np.arange(num_rows, dtype=np.uint32)
    return rows | {"row_ids": numbers, "epochs": numbers * 0}


def one_step(num_microbatches: int = 1, **axes) -> tuple[dict, dict]:
    """Returns the parameters and metrics after a step of the student on a mesh."""
    objective = make_objective()
    return step_of(objective, make_student(objective), num_microbatches, **axes)


def step_of(objective, model, num_microbatches: int = 1, **axes) -> tuple[dict, dict]:
    """Returns the parameters and metrics after a step of gradient descent."""
    optimizer = optax.sgd(1.0)
    mesh = make_mesh(**axes, devices=jax.devices()[: math.prod(axes.values())])
    params = random_params(model)
    state = TrainState(np.zeros([], np.int32), params, optimizer.init(params))
    shardings = infer_shardings(state, mesh, (*objective.rules, *RULES))
    teacher = PretrainingModel(objective.teacher, next_sentence=False)
    frozen = objective.frozen_params(random_params(teacher))
    frozen = jax.device_put(frozen, infer_shardings(frozen, mesh, RULES))
    update = pretrain_step.make_pretrain_step(
        model, optimizer, shardings, objective, seed=0, num_microbatches=num_microbatches
    )
    rows = jax.device_put(random_rows(16), batch_sharding(mesh))
    state, metrics = update(jax.device_put(state, shardings), rows, frozen)
    return jax.device_get((state.params, metrics))


on_one_device = functools.cache(one_step)


@pytest.mark.parametrize(
    ("axes", "num_microbatches"),
    [
        ({"data": 8}, 1),
        pytest.param({"data": 2}, 2, marks=pytest.mark.slow),
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_devices_and_microbatches_agree_with_one(axes, num_microbatches):
    params, metrics = one_step(num_microbatches, **axes)
    expected, expected_metrics = on_one_device(data=1)
    for path, leaf in flatten_dict(params, sep="/").items():
        other = flatten_dict(expected, sep="/")[path]
        np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-4, err_msg=path)
    assert metrics["loss"] == pytest.approx(expected_metrics["loss"], rel=1e-5)


@pytest.mark.slow
def test_fast_path_agrees_with_the_plain_layers():
    sizes = SIZES | {"hidden_size": 128, "num_heads": 2, "initializer_range": 0.05}
    teacher = BertConfig(num_layers=4, intermediate_size=64, **sizes)
    student = dataclasses.replace(teacher, num_layers=2)
    objective = make_objective({"soft": 5.0, "mlm": 2.0, "cosine": 1.0}, teacher)
    models = (objective.make_model(student, Execution(kernels=name)) for name in ("tpu", "plain"))
    (params, metrics), (expected, expected_metrics) = (
        step_of(objective, model, data=1) for model in models
    )
    assert metrics["loss"] == pytest.approx(expected_metrics["loss"], rel=1e-5)
    for path, leaf in flatten_dict(params, sep="/").items():
        other = flatten_dict(expected, sep="/")[path]
        np.testing.assert_allclose(leaf, other, rtol=1e-3, atol=1e-3, err_msg=path)
    # Losses that compare layers run the layers one by one.
    for kernels in ("tpu", "auto"):
        model = make_objective().make_model(STUDENT, Execution(kernels))
        assert model.execution.kernels == "plain"


@pytest.fixture(scope="module")
def given(corpus, tmp_path_factory):
    """Returns a function that writes a teacher, and a configuration to distill it."""
    directory = tmp_path_factory.mktemp("teachers")

    def write(name: str, seed: int = 0, has_head: bool = True, tokenizer=None, **fields):
        tokenizer = tokenizer or load_tokenizer(corpus / "vocab.txt")
        sizes = {"hidden_size": 64, "num_layers": 4, "num_heads": 1, "intermediate_size": 256}
        sizes |= {"max_position_embeddings": 64}
        config = BertConfig(vocab_size=tokenizer.vocab_size, **(sizes | fields))
        model = PretrainingModel(config, next_sentence=False)
        params = dict(random_params(model))
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
    objective = setup.objective(phases[0])
    frozen = jax.eval_shape(lambda: objective.frozen_params(teacher.params))
    rows = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in random_rows(8).items()}
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

    class Stop(Exception):
        pass

    class StoppingCheckpointer(pretrain.Checkpointer):
        def save(self, state):
            super().save(state)
            self.wait()
            raise Stop

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        patch.setattr(pretrain, "Checkpointer", StoppingCheckpointer)
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
        "the teacher's 4 layers are no multiple of the student's 3: set --config.distillation.lay",
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
    with pytest.raises(
        ValueError, match=r"not built with the tokenizer of the teacher in .*: build"
    ):
        pretrain.train_and_evaluate(configure(directory), tmp_path / "run")


def test_defaults_match_distilbert():
    weights = bert_base.get_config().distillation.weights
    assert {name: weight for name, weight in weights.items() if weight} == {
        "soft": 5.0,
        "mlm": 2.0,
        "cosine": 1.0,
    }
    assert set(weights) == set(LOSSES)
