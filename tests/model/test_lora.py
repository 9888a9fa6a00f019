"""LoRA: an adapted model computes what the merged one does, in every architecture."""

import jax
import numpy as np
import pytest

from bert_jax.checkpoints.transformers_config import format_of
from bert_jax.data.features import unpack_rows
from bert_jax.model.config import pools_last
from bert_jax.model.heads import make_model
from bert_jax.model.lora import (
    Lora,
    choose_layers,
    dense_layers,
    init_adapters,
    merge,
    run_adapted,
    split_params,
)
from tests.helpers.models import flat, random_params, small_model_config
from tests.suites.heads import ARCHITECTURES, VOCAB

ALBERT = {"family": "albert", "shares_layers": True, "embedding_size": 8}
CONFIGS = ARCHITECTURES | {
    "bert": small_model_config(VOCAB, dropout_rate=0.0),
    "albert": small_model_config(VOCAB, dropout_rate=0.0, **ALBERT),
}
NAMES = [
    pytest.param(name, marks=[] if name == "bert" else pytest.mark.slow, id=name)
    for name in CONFIGS
]


def adapted(config, targets: str = "") -> tuple:
    """Returns a classifier, its batch, random adapters, and trained and frozen parameters."""
    model = make_model(config, {"task": "classification", "labels": ["a", "b", "c"]})
    rng = np.random.default_rng(0)
    rows = {
        "tokens": rng.integers(8, VOCAB, (2, 8), dtype=np.int32),
        "sequence_bounds": np.array([[[0, 4, 8]], [[0, 3, 6]]], np.int32),
    }
    batch = rows | unpack_rows(rows, pools_last(config))
    params = random_params(model, batch)
    trained, frozen = split_params(params, params)
    stored = format_of(config).fused_layers()
    groups = choose_layers(frozen["encoder"], dense_layers(model, batch), targets, stored)
    lora = Lora(rank=2, alpha=3.0, groups=groups)
    adapters = init_adapters(jax.random.key(0), lora, frozen["encoder"])
    trained["lora"] = jax.tree.map(
        lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), adapters
    )
    return model, batch, lora, trained, frozen


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_adapted_model_computes_what_the_merged_one_does(name):
    model, batch, lora, trained, frozen = adapted(CONFIGS[name], targets="encoder/")
    plain = {name: leaf for name, leaf in {**trained, **frozen}.items() if name != "lora"}

    @jax.jit
    def run(trained, frozen):
        merged = merge(lora, trained, frozen)
        unmerged = run_adapted(model, lora, trained, frozen, batch)
        return merged, unmerged, model.apply({"params": merged}, batch)

    merged, unmerged, expected = run(trained, frozen)
    np.testing.assert_allclose(unmerged, expected, atol=1e-5)
    adapted_kernels = {f"{path}/kernel" for group in lora.groups for path in group}
    for path, value in flat(merged).items():
        assert np.array_equal(value, flat(plain)[path]) == (path not in adapted_kernels)


@pytest.mark.slow
def test_a_merged_matrix_is_the_sum_of_the_definition():
    _, _, lora, trained, frozen = adapted(CONFIGS["modernbert"], targets="query|key|value")
    assert lora.groups == (tuple(f"encoder/layers/{name}" for name in ("query", "key", "value")),)
    own = {name: np.float64(leaf) for name, leaf in flat(trained["lora"]).items()}
    a, b = (own[f"encoder/layers/query/{name}"] for name in "ab")
    products = np.split(3.0 / 2 * np.einsum("lir,lro->lio", a, b), 3, axis=-1)
    merged, before = (flat(tree) for tree in (merge(lora, trained, frozen), frozen))
    for name, product in zip(("query", "key", "value"), products, strict=True):
        path = f"encoder/layers/{name}/kernel"
        np.testing.assert_allclose(merged[path] - before[path], product, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_by_default_all_matrices_of_layers_have_adapters_that_change_nothing_at_first(name):
    _, _, lora, _, frozen = adapted(CONFIGS[name])
    kernels = {
        path
        for path, leaf in flat(frozen).items()
        if path.startswith("encoder/layers/") and path.endswith("/kernel") and leaf.ndim == 3
    }
    assert {f"{path}/kernel" for group in lora.groups for path in group} == kernels
    adapters = flat(init_adapters(jax.random.key(0), lora, frozen["encoder"]))
    for path, leaf in adapters.items():
        assert np.any(leaf) != path.endswith("/b")


MINILM = {"num_layers": 6, "hidden_size": 384, "num_heads": 12, "intermediate_size": 1536}


def test_16_adapters_with_the_encoder_of_minilm_take_at_most_half_more_than_one():
    config = small_model_config(30522, max_position_embeddings=512, **MINILM)
    _, _, lora, trained, frozen = adapted(config)
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(each)) for each in (frozen, trained["lora"])]
    encoder, adapter = sizes[0], sizes[1] * 8 / lora.rank  # Of rank 8.
    assert (encoder + 16 * adapter) / (encoder + adapter) == pytest.approx(1.22, abs=0.005)


@pytest.mark.parametrize(
    ("name", "targets", "expected"),
    [
        ("bert", "(", r"config\.lora\.targets='\('"),
        ("bert", "embedding", r"config\.lora\.targets='embedding'.* encoder/layers/query/kernel"),
        ("bert", "head", r"config\.lora\.targets='head'"),
        pytest.param(
            "modernbert",
            "query",
            r"config\.lora\.targets='query': .* not in encoder/layers/key",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_wrong_targets_are_refused(name, targets, expected):
    with pytest.raises(ValueError, match=expected):
        adapted(CONFIGS[name], targets)
