"""The optimizers agree with float64 transcriptions of their formulas."""

import functools
import re

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bert_jax.checkpoints.huggingface import huggingface_name, params_from_huggingface
from bert_jax.checkpoints.parameters import parameter_shapes
from bert_jax.model.config import BertConfig
from bert_jax.training.optimizer import (
    OPTIMIZERS,
    Hyperparameters,
    is_decayed,
    make_optimizer,
    make_schedule,
    scale_updates_by_layer,
    with_moments,
)

CONFIG = BertConfig(
    vocab_size=128,
    hidden_size=12,
    num_layers=3,
    num_heads=2,
    intermediate_size=20,
    max_position_embeddings=10,
)
SHAPES = {path: leaf.shape for path, leaf in parameter_shapes(CONFIG).items()}
PEAK, NUM_STEPS, WARMUP_STEPS = 1e-3, 100, 10  # ten times the paper's rate
UNDECAYED = re.compile("LayerNorm|layer_norm|bias")


def random_tensors(seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    """Returns float64 arrays named and shaped as in transformers' state dict, layers unstacked."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for path, shape in SHAPES.items():
        name = huggingface_name(path)
        shape = shape[1:] if "{layer}" in name else shape
        for layer in range(CONFIG.num_layers if "{layer}" in name else 1):
            # Scaled per layer, so that the norms of the layers differ.
            value = rng.standard_normal(shape) * scale * (1 + layer)
            tensors[name.format(layer=layer)] = value.T if path.endswith("kernel") else value
    return tensors


@functools.cache  # The same for each optimizer.
def random_gradients(step: int) -> dict[str, np.ndarray]:
    """Returns gradients from far below to far above the clipping norm; some are 0 at first."""
    gradients = random_tensors(1000 + step, scale=10.0 ** (step % 7 - 4))
    gradients["bert.pooler.dense.weight"] *= step >= 5
    return {name: value.astype(np.float32).astype(np.float64) for name, value in gradients.items()}


def released_rate(step: int) -> float:
    """Returns the rate of `polynomial_decay` to 0 with power 1, or of the ramp in the warm-up."""
    if step < WARMUP_STEPS:
        return PEAK * step / WARMUP_STEPS
    return PEAK * (1 - min(step, NUM_STEPS) / NUM_STEPS)


def reference_step(
    name: str, tensors: dict, slots: dict, gradients: dict, step: int, beta1: float
) -> None:
    """Updates in place, in float64: clips, then applies the named optimizer to each tensor.

    bert_adam: google-research/bert, optimization.py. adamw: Loshchilov & Hutter (2019),
    algorithm 2. lamb: You et al. (2020), algorithm 2, on tensors that are decayed. stable_adamw:
    Wortsman et al. (2023), algorithm 2, whose moments are of corrected betas.
    """
    if name == "stable_adamw":
        return reference_step_of_stable_adamw(tensors, slots, gradients, step, beta1)
    norm = np.sqrt(sum(np.sum(np.square(gradient)) for gradient in gradients.values()))
    for key, gradient in gradients.items():
        gradient = gradient / max(norm, 1.0)
        slot = slots.setdefault(key, {"m": 0.0, "v": 0.0})
        slot["m"] = beta1 * slot["m"] + (1 - beta1) * gradient
        slot["v"] = 0.999 * slot["v"] + 0.001 * gradient**2
        if name == "bert_adam":
            update = slot["m"] / (np.sqrt(slot["v"]) + 1e-6)
        else:
            corrected_m = slot["m"] / (1 - beta1 ** (step + 1))
            corrected_v = slot["v"] / (1 - 0.999 ** (step + 1))
            update = corrected_m / (np.sqrt(corrected_v) + 1e-6)
        if not UNDECAYED.search(key):
            update = update + 0.01 * tensors[key]
            if name == "lamb":
                update = update * np.linalg.norm(tensors[key]) / np.linalg.norm(update)
        tensors[key] = tensors[key] - released_rate(step) * update


def reference_step_of_stable_adamw(
    tensors: dict, slots: dict, gradients: dict, step: int, beta1: float
) -> None:
    def corrected(beta):
        return beta * (1 - beta**step) / (1 - beta ** (step + 1))

    for key, g in gradients.items():
        v, u = slots.get(key, (0.0, 0.0))
        v = corrected(beta1) * v + (1 - corrected(beta1)) * g
        u = corrected(0.999) * u + (1 - corrected(0.999)) * g**2
        slots[key] = v, u
        rms = np.sqrt(np.mean(g**2 / np.maximum(u, 1e-6**2)))
        rate = released_rate(step) / max(1.0, rms)
        decay = 0.0 if UNDECAYED.search(key) else 0.01
        tensors[key] = (1 - rate * decay) * tensors[key] - rate * v / (np.sqrt(u) + 1e-6)


@functools.cache
def indices_tree() -> dict:
    """Returns our tree with the index of each value in transformers' flattened tensors."""
    tensors, start = random_tensors(0), 0
    for name, value in tensors.items():
        tensors[name] = np.arange(start, start + value.size, dtype=np.float64).reshape(value.shape)
        start += value.size
    return jax.tree.map(
        lambda leaf: np.asarray(leaf, int), params_from_huggingface(tensors, CONFIG)[0]
    )


def as_tree(tensors: dict) -> dict:
    flat = np.concatenate([np.ravel(value) for value in tensors.values()]).astype(np.float32)
    return jax.tree.map(lambda indices: flat[indices], indices_tree())


def largest_difference(one: dict, two: dict) -> float:
    one, two = jax.device_get((one, two))  # Compared in NumPy, which compiles nothing.
    differences = jax.tree.map(lambda a, b: np.max(np.abs(a - b)), one, two)
    return float(max(jax.tree.leaves(differences)))


def train(optimizer, params: dict, gradients: list[dict]) -> list[tuple[dict, dict]]:
    """Returns the updates and the new parameters of each step."""

    def step(carry, gradients):
        params, state = carry
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), (updates, params)

    @jax.jit
    def run(params, gradients):
        return jax.lax.scan(step, (params, optimizer.init(params)), gradients)[1]

    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *gradients)
    results = jax.device_get(run(params, stacked))
    return [jax.tree.map(lambda leaf, n=n: leaf[n], results) for n in range(len(gradients))]


@pytest.mark.parametrize(
    ("name", "beta1"),
    [
        ("bert_adam", 0.9),
        ("lamb", 0.9),
        *(pytest.param(name, 0.9, marks=pytest.mark.slow) for name in ("adamw", "stable_adamw")),
        *(
            pytest.param(name, 0.0, marks=pytest.mark.slow)
            for name in ("bert_adam", "adamw", "lamb", "stable_adamw")
        ),
    ],
)
def test_100_steps_agree_with_the_formula_in_float64(name, beta1):
    optimizer = make_optimizer(name, make_schedule(PEAK, NUM_STEPS, WARMUP_STEPS), beta1=beta1)
    tensors, slots = random_tensors(0, scale=0.1), {}
    initial = as_tree(tensors)
    steps = train(optimizer, initial, [as_tree(random_gradients(n)) for n in range(NUM_STEPS)])
    worst_update, worst_params = 0.0, 0.0
    for step, (updates, params) in enumerate(steps):
        before = tensors.copy()
        reference_step(name, tensors, slots, random_gradients(step), step, beta1)
        if step:  # The ramp starts at 0.
            expected = as_tree({key: tensors[key] - before[key] for key in tensors})
            largest = max(np.max(np.abs(leaf)) for leaf in jax.tree.leaves(expected))
            worst_update = max(worst_update, largest_difference(updates, expected) / largest)
        worst_params = max(worst_params, largest_difference(params, as_tree(tensors)))
    print(f"{name}: updates differ by {worst_update:.1e} relative, parameters {worst_params:.1e}")
    assert largest_difference(params, initial) > 0.01  # They moved.
    assert worst_update < 1e-6
    assert worst_params < 1e-6


def test_schedule_has_the_released_values():
    schedule = jax.jit(make_schedule(PEAK, NUM_STEPS, WARMUP_STEPS))
    for step in (0, 1, 9, 10, 11, 50, 99, 100, 150):
        assert float(schedule(step)) == pytest.approx(released_rate(step), rel=1e-6, abs=1e-9)
    assert float(schedule(0)) == 0.0
    # The decay counts from step 0, so the rate never quite reaches its peak.
    assert float(schedule(WARMUP_STEPS)) == pytest.approx(0.9 * PEAK)
    assert float(make_schedule(PEAK, NUM_STEPS, 0)(0)) == pytest.approx(PEAK)


def test_default_schedule_is_bit_for_bit_the_linear_one():
    def linear(step):
        step = jnp.asarray(step, jnp.float32)
        decayed = 1e-4 * jnp.maximum(0.0, 1_000_000 - step) / 1_000_000
        return jnp.where(step < 10_000, 1e-4 * step / 10_000, decayed)

    steps = jnp.array([0, 9_999, 10_000, 123_457, 500_001, 899_999, 999_999])
    for transform in (jax.jit, lambda function: function):
        found = transform(make_schedule(1e-4, 1_000_000, 10_000))(steps)
        np.testing.assert_array_equal(found, transform(linear)(steps))


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("decay_from", ["step_0", "warmup_end"])
def test_polynomial_decay_equals_optax(decay_from, power):
    schedule = make_schedule(PEAK, 100, 10, decay_from, power)
    first_step = 10 if decay_from == "warmup_end" else 0
    decay = optax.polynomial_schedule(PEAK, 0.0, power, 100 - first_step, first_step)
    for step in (10, 11, 50, 98, 99):
        assert float(schedule(step)) == pytest.approx(float(decay(step)), rel=1e-5)
    assert float(schedule(5)) == pytest.approx(PEAK / 2)


def test_unknown_beginning_of_the_decay_is_an_error():
    with pytest.raises(ValueError, match="unknown decay_from 'end'"):
        make_schedule(PEAK, 100, 10, decay_from="end")


def test_weight_decay_excludes_the_same_parameters_as_the_released_optimizer():
    params = as_tree(random_tensors(0))
    decayed = flax.traverse_util.flatten_dict(is_decayed(params), sep="/")
    assert decayed.keys() == SHAPES.keys()
    for path, value in decayed.items():
        assert value == (not UNDECAYED.search(huggingface_name(path))), path


@pytest.mark.parametrize("name", ["bert_adam", "adamw", "lamb"])
def test_only_the_direction_of_clipped_gradients_matters(name):
    params = as_tree(random_tensors(0))
    optimizer = make_optimizer(name, lambda step: 0.1, clip_norm=1.0)
    update, gradients = jax.jit(optimizer.update), as_tree(random_tensors(1))
    updates = [
        update(jax.tree.map(lambda g, s=scale: g * s, gradients), state, params)[0]
        for scale, state in ((1.0, optimizer.init(params)), (64.0, optimizer.init(params)))
    ]
    assert max(np.linalg.norm(leaf) for leaf in jax.tree.leaves(gradients)) > 1.0
    assert largest_difference(*updates) < 1e-6


def test_lamb_of_stacked_layers_equals_lamb_of_separate_layers():
    rng = np.random.default_rng(0)
    sizes = np.array([0.1, 1.0, 0.0, 10.0])[:, None, None]  # A layer of zeros is not rescaled.
    kernel = (rng.standard_normal((4, 6, 5)) * sizes).astype(np.float32)
    gradient = rng.standard_normal((4, 6, 5)).astype(np.float32)
    optimizer = make_optimizer("lamb", lambda step: 0.1, clip_norm=1e9)

    @jax.jit
    def update(params, gradients):
        return optimizer.update(gradients, optimizer.init(params), params)[0]

    stacked = update(
        {"layers": {"query": {"kernel": kernel}}}, {"layers": {"query": {"kernel": gradient}}}
    )["layers"]["query"]["kernel"]
    separate = update(
        {f"layer_{n}": {"query": {"kernel": kernel[n]}} for n in range(4)},
        {f"layer_{n}": {"query": {"kernel": gradient[n]}} for n in range(4)},
    )
    for n in range(4):
        np.testing.assert_allclose(stacked[n], separate[f"layer_{n}"]["query"]["kernel"], rtol=1e-6)
    norms = np.linalg.norm(stacked.reshape(4, -1), axis=1)
    expected = 0.1 * np.linalg.norm(kernel.reshape(4, -1), axis=1)
    np.testing.assert_allclose(norms[[0, 1, 3]], expected[[0, 1, 3]], rtol=1e-5)
    assert norms[2] > 0


def is_adam_state(state) -> bool:
    return isinstance(state, optax.ScaleByAdamState)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_are_taken_from_another_run_and_its_steps_are_not(name):
    params = {"pooler": {"bias": np.ones(2, "float32")}}
    optimizer = make_optimizer(name, make_schedule(PEAK, NUM_STEPS, WARMUP_STEPS))
    _, saved = optimizer.update(params, optimizer.init(params), params)
    (adam,) = (
        state for state in jax.tree.leaves(saved, is_leaf=is_adam_state) if is_adam_state(state)
    )
    state = with_moments(optimizer.init(params), adam)
    moments = [leaf for leaf in jax.tree.leaves(state) if np.ndim(leaf)]
    assert len(moments) == 2 and all(np.all(leaf > 0) for leaf in moments)
    assert [int(leaf) for leaf in jax.tree.leaves(state) if not np.ndim(leaf)] == [1, 0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zero_gradients_and_weights_give_zero_updates(name):
    params = {"pooler": {"kernel": np.zeros((3, 2), "float32"), "bias": np.zeros(2, "float32")}}
    optimizer = make_optimizer(name, lambda step: 0.1)
    updates, _ = jax.jit(optimizer.update)(params, optimizer.init(params), params)
    assert largest_difference(updates, params) == 0.0


@pytest.mark.parametrize(
    ("name", "decay", "num_frozen"),
    [
        ("lamb", 0.9, 1),
        *(
            pytest.param(*values, marks=pytest.mark.slow)
            for values in (
                ("adamw", 0.8, 0),
                ("adamw", 0.9, 1),
                ("adamw", 1.0, 2),
                ("lamb", 0.8, 0),
                ("lamb", 1.0, 2),
                ("stable_adamw", 0.8, 1),
            )
        ),
    ],
)
def test_layer_rates_agree_with_the_formula_in_float64(name, decay, num_frozen):
    """Frozen tensors keep their values, and their gradients do not count for clipping."""

    def rate(key: str) -> float:
        layer = re.search(r"encoder\.layer\.(\d)", key)
        level = int(layer[1]) + 1 if layer else 0 if "embeddings" in key else 4
        return 0.0 if num_frozen and level <= num_frozen else decay ** (4 - level)

    optimizer = make_optimizer(name, make_schedule(PEAK, NUM_STEPS, WARMUP_STEPS))
    optimizer = scale_updates_by_layer(optimizer, CONFIG, decay, num_frozen)
    tensors, slots = random_tensors(0, scale=0.1), {}
    initial = as_tree(tensors)
    gradients = [random_gradients(step) for step in range(5)]
    _, params = train(optimizer, initial, [as_tree(each) for each in gradients])[-1]
    for step, each in enumerate(gradients):
        before = tensors.copy()
        trained = {key: value for key, value in each.items() if rate(key)}
        reference_step(name, tensors, slots, trained, step, 0.9)
        for key in tensors:
            tensors[key] = before[key] + rate(key) * (tensors[key] - before[key])
    assert largest_difference(params, as_tree(tensors)) < 1e-6
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max() > 0, params, initial)
    assert moved["encoder"]["embeddings"]["token_embedding"]["embedding"] == (not num_frozen)


def test_hyperparameters_may_be_traced():
    """Other values compile nothing, and give the same updates as constants."""
    params, gradients = as_tree(random_tensors(0)), as_tree(random_tensors(1))

    def updates_of(values: Hyperparameters):
        rate = make_schedule(values.learning_rate, values.num_steps, values.warmup_steps)
        optimizer = make_optimizer("adamw", rate, weight_decay=values.weight_decay)
        state, updates = optimizer.init(params), None
        for _ in range(3):
            updates, state = optimizer.update(gradients, state, params)
        return updates

    traced = jax.jit(updates_of)
    for numbers in ((1e-3, 0.01, 2, 10), (0.5, 0.1, 0, 3)):
        constants = Hyperparameters(*numbers, dropout_rate=0.0)
        expected = jax.jit(functools.partial(updates_of, constants))()
        found = traced(Hyperparameters(*map(np.float32, numbers), dropout_rate=np.float32(0)))
        assert largest_difference(found, expected) < 1e-6 * numbers[0]
    assert traced._cache_size() == 1


def test_unknown_optimizer_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown optimizer 'adm'"):
        make_optimizer("adm", lambda step: 0.1)
