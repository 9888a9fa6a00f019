"""ELECTRA's objective: float64 formulas, shared parameters, samples, packing, meshes."""

import dataclasses
import importlib

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import bert_jax
from bert_jax import finetune, pretrain
from bert_jax.configs.finetune import text_classification
from bert_jax.model.dropout import Dropout
from bert_jax.model.execution import ExecutionPlan
from bert_jax.objectives import replaced_tokens
from bert_jax.objectives.masked_lm import MaskedLm, PretrainingModel
from bert_jax.objectives.replaced_tokens import (
    GeneratorSettings,
    ReplacedTokenModel,
    ReplacedTokens,
    generator_params,
    trainable_params,
)
from bert_jax.training.metrics import perplexity
from tests.helpers.corpora import build_small_corpus, write_vocabulary
from tests.helpers.json_lines import read_lines
from tests.helpers.models import random_params
from tests.helpers.runs import saved_params, stopped_after_save
from tests.suites import objectives as suites

MASKING = suites.make_masking(mask_fraction=0.85, keep_fraction=0.15, random_fraction=0.0)
OBJECTIVE = ReplacedTokens(MASKING, GeneratorSettings(hidden_fraction=0.5, num_layers=1))
CONFIG = suites.make_config(family="electra", embedding_size=24)


prepare = jax.jit(OBJECTIVE.prepare)


def make_params(config=CONFIG, objective=OBJECTIVE) -> dict:
    model = objective.make_model(config, ExecutionPlan())
    return random_params(model, suites.prepared(CASE))


def paths(tree) -> set[str]:
    return set(flax.traverse_util.flatten_dict(tree, sep="/"))


def reference(model, params, batch):
    """Sections 2 and 3.1, with the samples that the objective draws of the logits."""

    @jax.jit
    def generate(params):
        token_logits, _ = model.generator.apply({"params": generator_params(params)}, batch)
        return token_logits, replaced_tokens.sample_tokens(batch["sampling_keys"], token_logits)

    token_logits, samples = jax.device_get(generate(params))
    tokens, labels = batch["original_tokens"].copy(), np.zeros(batch["tokens"].shape, int)
    for row, slot in np.argwhere(batch["target_weights"]):
        position, target = batch["target_positions"][row, slot], batch["targets"][row, slot]
        assert tokens[row, position] == target
        labels[row, position] = samples[row, slot] != target
        tokens[row, position] = samples[row, slot]
    read = replaced_tokens.discriminator_params(params)
    logits = jax.jit(model.apply)({"params": read}, batch | {"tokens": tokens})
    probabilities = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    is_real = batch["sequence_ids"] > 0
    found = (probabilities > 0.5) & is_real
    assert found.any() and not found[is_real].all()
    losses = -np.log(np.where(labels == 1, probabilities, 1 - probabilities))[is_real]
    hits = np.sum(found & (labels == 1))
    return suites.cross_entropy("mlm", token_logits, batch["targets"], batch["target_weights"]) | {
        "replaced_loss": (losses.sum(), is_real.sum()),
        "replaced_accuracy": (np.sum((found == labels)[is_real]), is_real.sum()),
        "replaced_fraction": (labels.sum(), is_real.sum()),
        "replaced_recall": (hits, labels.sum()),
        "replaced_precision": (hits, found.sum()),
    }


CASE = suites.ObjectiveCase(OBJECTIVE, CONFIG, {"mlm_loss": 1.0, "replaced_loss": 50.0}, reference)
MODERNBERT = dataclasses.replace(
    CASE,
    objective=ReplacedTokens(MASKING, GeneratorSettings(hidden_fraction=1.0, num_layers=1)),
    config=suites.make_modernbert_config(),
)


DISENTANGLED = dataclasses.replace(
    CASE,
    objective=ReplacedTokens(
        MASKING,
        GeneratorSettings(hidden_fraction=1.0, num_layers=1, disentangles_embeddings=True),
    ),
    config=suites.make_deberta_config(has_positions=True),
)


@pytest.mark.parametrize("holds", suites.OBJECTIVE)
def test_objective(holds, tmp_path):
    holds(CASE, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("holds", suites.OBJECTIVE)
def test_disentangled_objective_on_deberta(holds, tmp_path):
    holds(DISENTANGLED, tmp_path)


@pytest.mark.slow
def test_disentangled_difference_begins_at_0_and_has_the_gradient_of_the_discriminator():
    """Parity tests compare both gradients with a reference in float64."""
    objective, config = DISENTANGLED.objective, DISENTANGLED.config
    model = objective.make_model(config, ExecutionPlan())
    batch = suites.prepared(DISENTANGLED)
    names = ("token_embedding", "position_embedding")
    params = jax.jit(model.init)(jax.random.key(0), batch)["params"]
    assert set(params["difference"]) == set(names)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(params["difference"]))
    own = params["generator"]["encoder"]["embeddings"]
    assert set(own) == {"layer_norm"}
    read = replaced_tokens.discriminator_params(params)["encoder"]["embeddings"]

    def discriminator(params):
        read = replaced_tokens.discriminator_params(params)
        return jnp.sum(model.apply({"params": read}, batch)[:, ::2])

    gradients = jax.jit(jax.grad(discriminator))(params)
    for name in names:
        table = params["encoder"]["embeddings"][name]["embedding"]
        np.testing.assert_array_equal(read[name]["embedding"], table)
        assert not np.any(gradients["encoder"]["embeddings"][name]["embedding"])
        assert np.any(gradients["difference"][name]["embedding"])


@pytest.mark.slow
def test_a_narrower_generator_of_deberta_has_a_layer_norm_of_its_own():
    objective = ReplacedTokens(MASKING, GeneratorSettings(hidden_fraction=0.5, num_layers=1))
    case = dataclasses.replace(CASE, objective=objective, config=suites.make_deberta_config())
    own = suites.params_of(case)["generator"]["encoder"]["embeddings"]
    assert paths(own) == {"layer_norm/bias", "layer_norm/scale", "projection/kernel"}
    logits, _ = jax.eval_shape(
        suites.model_of(case).generator.apply,
        {"params": generator_params(suites.params_of(case))},
        suites.prepared(case),
    )
    assert logits.shape == (suites.NUM_ROWS, 6, 128)


@pytest.mark.slow
def test_both_networks_of_a_disentangled_run_have_the_tables_that_they_read():
    params = suites.params_of(DISENTANGLED)
    usable = replaced_tokens.usable_params(params)
    table, difference = (
        each["token_embedding"]["embedding"]
        for each in (params["encoder"]["embeddings"], params["difference"])
    )
    read = usable["encoder"]["embeddings"]["token_embedding"]["embedding"]
    np.testing.assert_array_equal(read, table + difference)
    read = generator_params(usable)["encoder"]["embeddings"]["token_embedding"]["embedding"]
    np.testing.assert_array_equal(read, table)
    assert "difference" not in usable
    again = replaced_tokens.trainable_params(usable)
    assert paths(again) == paths(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), again, params)
    assert replaced_tokens.usable_params(usable) is usable


@pytest.mark.exhaustive
@pytest.mark.parametrize("holds", suites.OBJECTIVE)
@pytest.mark.parametrize("architecture", ["modernbert", "mpnet", "esm", "longformer"])
def test_objective_on_others(architecture, holds, tmp_path):
    config = suites.on_architecture(CASE, architecture).config
    if architecture == "longformer":  # Other random weights find no token replaced.
        config = dataclasses.replace(config, type_vocab_size=1, initializer_range=0.1)
    holds(dataclasses.replace(MODERNBERT, config=config), tmp_path)


def test_disentangling_tables_of_different_widths_is_an_error():
    def tables(width):
        return {"embeddings": {"token_embedding": {"embedding": np.zeros((8, width))}}}

    params = {"encoder": tables(4), "generator": {"encoder": tables(2)}}
    with pytest.raises(ValueError, match=r"token_embedding is \(8, 4\) in the discriminator and"):
        trainable_params(params)


@pytest.mark.slow
def test_a_million_samples_follow_the_generator():
    rows, slots, vocab = 50, 20_000, 20
    logits = np.random.default_rng(0).normal(size=vocab).astype(np.float32) * 2
    padded = np.append(logits, [np.finfo(np.float32).min] * 4).astype(np.float32)
    keys = jax.random.key_data(jax.random.split(jax.random.key(0), rows))
    sample = jax.jit(replaced_tokens.sample_tokens)
    samples = sample(keys, jnp.broadcast_to(padded, (rows, slots, vocab + 4)))
    counts = np.bincount(np.ravel(samples), minlength=vocab + 4)
    assert counts.sum() == 10**6 and not counts[vocab:].any()
    probabilities = np.exp(logits.astype(np.float64))
    expected = 10**6 * probabilities / probabilities.sum()
    assert stats.chisquare(counts[:vocab], expected).pvalue > 0.01


@pytest.mark.slow
def test_exactly_the_embeddings_are_shared():
    shared = {
        "encoder/embeddings/token_embedding/embedding",
        "encoder/embeddings/position_embedding/embedding",
        "encoder/embeddings/segment_embedding/embedding",
        "encoder/embeddings/layer_norm/scale",
        "encoder/embeddings/layer_norm/bias",
    }
    of_the_generator = ("mlm/", "encoder/")
    for embedding_size, fraction, projections in (
        (24, 0.5, {"discriminator", "generator"}),
        (None, 0.5, {"generator"}),
        (None, 1.0, set()),
        (16, 0.5, {"discriminator"}),
    ):
        generator = dataclasses.replace(OBJECTIVE.generator, hidden_fraction=fraction)
        objective = dataclasses.replace(OBJECTIVE, generator=generator)
        config = dataclasses.replace(CONFIG, embedding_size=embedding_size)
        params = make_params(config, objective)
        whole = generator_params(params)
        assert paths(whole) - paths(params["generator"]) == shared
        assert all(path.startswith(of_the_generator) for path in paths(whole))
        flat = flax.traverse_util.flatten_dict(params, sep="/")
        for path in shared:
            assert flax.traverse_util.flatten_dict(whole, sep="/")[path] is flat[path]
        roots = {"discriminator": "encoder", "generator": "generator/encoder"}
        found = {
            name for name, root in roots.items() if f"{root}/embeddings/projection/kernel" in flat
        }
        assert found == projections
    untied = dataclasses.replace(OBJECTIVE.generator, ties_embeddings=False)
    objective = dataclasses.replace(OBJECTIVE, generator=untied)
    params = make_params(objective=objective)
    assert paths(generator_params(params)) == paths(params["generator"])
    table = params["generator"]["encoder"]["embeddings"]["token_embedding"]["embedding"]
    generator = objective.make_model(CONFIG, ExecutionPlan()).generator
    assert table.shape[1] == 16 and generator.config.embedding_size is None


@pytest.mark.slow
def test_gradients_of_both_losses_reach_the_shared_embeddings_and_no_other():
    model, params, batch = suites.model_of(CASE), suites.params_of(CASE), suites.prepared(CASE)

    def gradients(name):
        loss = jax.grad(lambda params: OBJECTIVE.sums(model, params, batch)[name][0])
        flat = flax.traverse_util.flatten_dict(jax.jit(loss)(params), sep="/")
        # The biases of keys have no effect.
        return {path for path, leaf in flat.items() if np.any(leaf) and "key/bias" not in path}

    everything = {path for path in paths(params) if "key/bias" not in path}
    shared = {path for path in everything if path.startswith("encoder/embeddings/")}
    shared = {path for path in shared if "projection" not in path}
    assert len(shared) == 5
    of_generator = {path for path in everything if path.startswith("generator/")}
    assert gradients("mlm_loss") == shared | of_generator
    # Nothing passes through the samples.
    assert gradients("replaced_loss") == everything - of_generator


def test_generator_and_discriminator_drop_other_elements(monkeypatch):
    model, keys = OBJECTIVE.make_model(CONFIG, ExecutionPlan()), []

    def record(self, batch, dropout):
        keys.append(tuple(jax.random.key_data(dropout.key).tolist()))
        if isinstance(self, ReplacedTokenModel):
            return jnp.zeros(batch["tokens"].shape)
        return jnp.zeros((*batch["targets"].shape, suites.VOCAB)), None

    monkeypatch.setattr(ReplacedTokenModel, "__call__", record)
    monkeypatch.setattr(PretrainingModel, "__call__", record)
    batch = suites.prepared(CASE)
    params = {"encoder": {"embeddings": {}}, "generator": {"encoder": {}}}
    OBJECTIVE.sums(
        model, params, batch, Dropout(jax.random.key(3), jnp.arange(suites.NUM_ROWS), 0.5)
    )
    assert len(keys) == len(set(keys)) == 2


def test_samples_are_a_function_of_row_and_epoch():
    rows, key = suites.make_rows([(14, 11)] * 5), jax.random.key(0)
    keys = jax.device_get(prepare(rows, key)["sampling_keys"])
    assert len({tuple(each) for each in keys.tolist()}) == 5
    reordered = prepare({name: values[::-1] for name, values in rows.items()}, key)
    np.testing.assert_array_equal(reordered["sampling_keys"][::-1], keys)
    later = prepare(rows | {"epochs": rows["epochs"] + 1}, key)["sampling_keys"]
    assert (np.asarray(later) != keys).any(axis=1).all()
    masked = jax.jit(MaskedLm(MASKING, next_sentence=False).prepare)(rows, key)
    batch = prepare(rows, key)
    for name, values in masked.items():
        np.testing.assert_array_equal(batch[name], values)


@pytest.mark.slow
def test_both_encoders_take_the_fast_path_and_it_changes_nothing(caplog):
    generator = GeneratorSettings(hidden_fraction=0.5)
    objective = dataclasses.replace(OBJECTIVE, generator=generator)
    config = dataclasses.replace(
        CONFIG, hidden_size=256, intermediate_size=256, initializer_range=0.05
    )
    case = dataclasses.replace(CASE, objective=objective, config=config)
    suites.assert_fast_path_changes_nothing(case, tolerance=1e-4)
    assert "run without the fast path" not in caplog.text


def test_flops_are_the_sum_for_generator_and_discriminator():
    generator = MaskedLm(MASKING, next_sentence=False).flops_per_row(
        OBJECTIVE.generator.config(CONFIG), suites.LENGTH, 2
    )
    size, inner, length = 32, 64, suites.LENGTH
    layer = 4 * size**2 + 2 * size * inner + 2 * length * size  # Per position.
    per_position = 2 * layer + 24 * size + size**2 + size  # Projection, head.
    expected = generator + 6 * length * per_position
    assert OBJECTIVE.flops_per_row(CONFIG, suites.LENGTH, 2) == expected


@pytest.mark.parametrize("architecture", suites.ARCHITECTURES)
def test_every_architecture_has_a_generator_as_wide_and_with_fewer_layers(architecture):
    config = suites.ARCHITECTURES[architecture]()
    generator = GeneratorSettings(hidden_fraction=1.0, num_layers=1).config(config)
    assert generator == dataclasses.replace(config, num_layers=1)


@pytest.mark.slow
def test_a_narrower_generator_of_modernbert_has_embeddings_of_its_own():
    """They are as wide as its layers: there is none to widen or narrow those of another model."""
    fields = {"hidden_fraction": 0.5, "num_layers": 1}
    with pytest.raises(ValueError, match=r"architecture=modernbert .*generator\.ties_embeddings=F"):
        GeneratorSettings(**fields).config(MODERNBERT.config)
    objective = ReplacedTokens(MASKING, GeneratorSettings(**fields, ties_embeddings=False))
    case = dataclasses.replace(MODERNBERT, objective=objective)
    table = suites.params_of(case)["generator"]["encoder"]["embeddings"]["token_embedding"]
    assert table["embedding"].shape == (128, 16)
    suites.loss_equals_float64(case, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_fraction": 1.5}, r"hidden_fraction=1.5"),
        ({"hidden_fraction": 0.0}, r"hidden_fraction=0.0"),
        ({"hidden_fraction": 0.7}, r"hidden size 32 with 4 heads: .*\(22\) must be a multiple of"),
        ({"num_layers": 0}, r"num_layers=0 give no generator .*num_layers must be at least 1"),
        ({"disentangles_embeddings": True, "ties_embeddings": False}, r"ties_embeddings=True"),
    ],
)
def test_an_invalid_generator_is_a_clear_error(settings, message):
    objective = ReplacedTokens(MASKING, GeneratorSettings(**settings))
    with pytest.raises(ValueError, match=message):
        objective.make_model(CONFIG, ExecutionPlan())


def electra_config(corpus, **fields):
    config = importlib.import_module("configs.pretrain.electra_small").get_config("runlocal")
    config.corpus, config.num_steps = str(corpus), 4
    sizes = {"size": "tiny", "hidden_size": 32, "num_heads": 2, "intermediate_size": 64}
    sizes |= {"num_layers": 1, "embedding_size": 24, "max_position_embeddings": 64}
    config.model.update(sizes)
    config.generator.hidden_fraction = 0.5
    config.eval_every = config.checkpoint_every = 2
    config.update_from_flattened_dict(fields)
    return config


@pytest.fixture(scope="module")
def small_corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("electra")
    return build_small_corpus(directory, write_vocabulary(directory / "vocab.txt"))


@pytest.fixture(scope="module")
def finished(small_corpus, two_devices, tmp_path_factory):
    """A run of the recipe, of a very small model."""
    workdir = tmp_path_factory.mktemp("run")
    return workdir, pretrain.train_and_evaluate(electra_config(small_corpus), workdir)


@pytest.mark.slow
def test_a_run_reports_both_parts(finished):
    workdir, result = finished
    assert result["perplexity"] == perplexity(result["mlm_loss"])
    names = {"replaced_loss", "replaced_accuracy", "replaced_recall", "replaced_precision"}
    assert names <= result.keys() and 0 < result["replaced_accuracy"] < 1
    records = read_lines(workdir / "metrics.jsonl")
    losses = [record for record in records if "train/loss" in record]
    assert len(losses) == 4
    for record in losses:
        total = record["train/mlm_loss"] + 50 * record["train/replaced_loss"]
        assert record["train/loss"] == pytest.approx(total)


@pytest.mark.slow
@pytest.mark.usefixtures("two_devices")
def test_a_resumed_run_equals_an_uninterrupted_one(finished, small_corpus, tmp_path):
    workdir, result = finished

    with stopped_after_save(pretrain):
        pretrain.train_and_evaluate(electra_config(small_corpus), tmp_path)
    resumed = pretrain.train_and_evaluate(electra_config(small_corpus), tmp_path)
    assert {k: v for k, v in resumed.items() if k != "seconds"} == {
        k: v for k, v in result.items() if k != "seconds"
    }
    for a, b in zip(
        jax.tree.leaves(saved_params(tmp_path)), jax.tree.leaves(saved_params(workdir)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.usefixtures("two_devices")
def test_its_discriminator_is_fine_tuned_and_its_pre_training_continued(
    finished, small_corpus, tmp_path, caplog
):
    workdir, _ = finished
    (tmp_path / "data.csv").write_text("text,label\n" + "the king,north\nthe war,south\n" * 8)
    config = text_classification.get_config()
    config.init_from, config.max_seq_length, config.num_epochs = str(workdir), 16, 1.0
    config.data.train = config.data.dev = str(tmp_path / "data.csv")
    finetune.train_and_evaluate(config, tmp_path / "tuned")
    tuned = bert_jax.load(tmp_path / "tuned")
    assert set(tuned.params) == {"encoder", "head"} and tuned.config.family == "electra"

    caplog.set_level("INFO", "absl")
    source = {"init_from": str(workdir)}
    pretrain.train_and_evaluate(electra_config(small_corpus, **source), tmp_path / "again")
    assert f"Starting from {workdir}; newly initialized: optimizer" in caplog.text
    source["generator.num_layers"] = 2
    with pytest.raises(ValueError, match=r"^generator/.* is \(.*\) in .*, but \(.*\) in this run"):
        pretrain.train_and_evaluate(electra_config(small_corpus, **source), tmp_path / "other")
