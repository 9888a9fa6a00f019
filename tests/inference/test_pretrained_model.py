"""Loading a model, and each method of `PretrainedModel` against `Bert` applied to one text."""

import functools
import shutil
import subprocess
import sys
import tomllib
import warnings

import flax
import jax
import numpy as np
import pytest
from scipy.special import erf, expit, softmax

import bert_jax
from bert_jax.checkpoints.native import Checkpointer, find_checkpoint
from bert_jax.checkpoints.parameters import model_settings
from bert_jax.inference import forward
from bert_jax.inference.pretrained_model import PretrainedModel
from bert_jax.model.encoder import Encoder
from bert_jax.model.execution import ExecutionPlan
from bert_jax.objectives.masked_lm import PretrainingModel
from bert_jax.runtime.errors import CheckpointError
from bert_jax.tokenizers.tokenizer import load_tokenizer
from bert_jax.training.optimizer import make_optimizer, make_schedule
from bert_jax.training.state import init_state
from tests.helpers.commands import ROOT
from tests.helpers.models import (
    assert_trees_equal,
    batch_of_row,
    example_batch,
    small_model_config,
    write_head,
)

NAN = float("nan")  # An empty cell of a table.


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return load_tokenizer(corpus)


@pytest.fixture(scope="module")
def workdir(tokenizer, tmp_path_factory):
    """Returns a workdir with two checkpoints of an untrained model."""
    directory = tmp_path_factory.mktemp("run")
    config = small_model_config(tokenizer.vocab_size, max_position_embeddings=40)
    optimizer = make_optimizer("bert_adam", make_schedule(1e-3, 10, 0))
    model = PretrainingModel(config)
    init = jax.jit(lambda key: init_state(key, model, optimizer, example_batch()))
    state = init(jax.random.key(0))
    settings = model_settings(config, state.params)
    checkpointer = Checkpointer(directory, settings, tokenizer, keep_last=2)
    for step in (9, 10):
        checkpointer.save(state.replace(step=np.int32(step)))
    checkpointer.wait()
    checkpointer.close()
    return directory


@pytest.fixture(scope="module")
def model(workdir):
    with warnings.catch_warnings(action="error"):  # Not even of its training state.
        return bert_jax.load(workdir)


def test_latest_checkpoint_of_a_workdir_is_found(workdir):
    assert find_checkpoint(workdir).name == "10"
    assert find_checkpoint(workdir / "checkpoints").name == "10"
    assert find_checkpoint(workdir / "checkpoints" / "9").name == "9"


def test_loaded_parameters_are_on_one_device(model):
    assert {len(leaf.devices()) for leaf in jax.tree.leaves(model.params)} == {1}


def test_fill_mask_equals_the_model_applied_by_hand(model):
    tokenizer = model.tokenizer
    words = ["the", "[MASK]", "river", "made", "[MASK]"]
    tokens = [tokenizer.cls_id, *(tokenizer.token_to_id(w) for w in words), tokenizer.sep_id]
    row = np.array([tokens])
    positions = {
        "target_positions": np.array([[2, 5]]),
        "pooled_positions": np.array([[0]]),
    }
    logits, _ = jax.jit(PretrainingModel(model.config).apply)(
        {"params": model.params}, batch_of_row(row) | positions
    )
    probabilities = softmax(logits[0], axis=-1)
    fills = model.fill_mask("the [MASK] river made [MASK]", top_k=4)
    assert len(fills) == 2
    for predictions, expected in zip(fills, probabilities, strict=True):
        order = np.argsort(-expected)[:4]
        assert [fill.token for fill in predictions] == [tokenizer.id_to_token(i) for i in order]
        np.testing.assert_allclose([f.probability for f in predictions], expected[order], rtol=1e-4)
    assert model.fill_mask(["the [MASK] river made [MASK]"], top_k=4) == [fills]
    # The other mask stays.
    for fill in fills[0]:
        start = f"the{fill.token[2:]}" if fill.token[:2] == "##" else f"the {fill.token}"
        assert fill.text == f"{start} river made [MASK]"


@pytest.mark.slow
def test_a_list_of_masked_texts_has_the_result_of_each_in_the_given_order(model):
    texts = ["the [MASK]", "[MASK] people " * 9, "a [MASK] of [MASK]", "stone " * 20 + "[MASK]"]
    results = model.fill_mask(texts, top_k=2)
    assert [len(fills) for fills in results] == [2, 9, 2, 2]
    for text, fills in zip(texts, results, strict=True):
        alone = model.fill_mask(text, top_k=2)
        for fill, expected in zip(np.ravel(fills), np.ravel(alone), strict=True):
            assert fill == expected or float(fill) == pytest.approx(float(expected), abs=1e-5)


def test_texts_of_all_lengths_compile_few_programs(model):
    texts = ["the " * length for length in range(38)] * 3
    forward.head_outputs.clear_cache()
    model.encode(texts, batch_size=4)
    model.encode(texts[::-1], batch_size=4)
    assert forward.head_outputs._cache_size() == 1  # Rows of 40 tokens.


@pytest.mark.slow
def test_any_number_of_masks_compiles_few_programs(model):
    texts = ["the " * (number % 9) + "[MASK] " * number for number in range(1, 30)] * 3
    forward.token_logits.clear_cache()
    model.fill_mask(texts)
    model.fill_mask(texts[::-1])
    assert forward.token_logits._cache_size() == 1  # Rows of 40 tokens.
    model.fill_mask(["[MASK]"] * 8)
    model.fill_mask(["the [MASK] " * 8] * 8)
    assert forward.token_logits._cache_size() == 2  # And 8 positions in each.


@pytest.mark.slow
def test_module_applies_the_parameters(model):
    row = np.array([model.tokenizer.encode("the river")])
    batch = batch_of_row(row)
    # `load` loops over the layers: unrolled ones, the default of Encoder, may round differently.
    encoder = Encoder(model.config, ExecutionPlan(scans_layers=True))
    expected = encoder.apply({"params": model.params["encoder"]}, batch)
    alone = {"encoder": model.params["encoder"]}
    bare = PretrainedModel(model.config, model.tokenizer, alone)
    np.testing.assert_array_equal(bare.module.apply({"params": alone}, batch), expected)
    for loaded in (model, with_head(model, "classification", ["no", "yes"])):
        hidden = loaded.module.bind({"params": loaded.params}).encoder(batch)
        np.testing.assert_array_equal(hidden, expected)


def test_padded_vocabulary_is_never_predicted(model):
    assert model.config.padded_vocab_size > model.config.vocab_size
    fills = model.fill_mask("the [MASK]", top_k=model.config.vocab_size)
    assert len({fill.token for fill in fills}) == model.config.vocab_size
    assert sum(fill.probability for fill in fills) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("text", "top_k", "error", "message"),
    [
        ("the river", 5, ValueError, r"no \[MASK\] to fill in: 'the river'"),
        ("[MASK] " + "the " * 60, 5, ValueError, r"has 63 tokens"),
        ("the [MASK]", 0, ValueError, r"top_k must be a whole number in \[1, 34\], got 0"),
        ("the [MASK]", 35, ValueError, "got 35"),
        ("the [MASK]", 2.5, ValueError, "top_k must be a whole number .* got 2.5"),
        (None, 5, TypeError, "texts must be a string or a list of strings, got None$"),
        (
            ["[MASK]", NAN],
            5,
            TypeError,
            "must be a string or a list of strings, got nan at index 1",
        ),
        (["the [MASK]", "the"], 5, ValueError, r"no \[MASK\] to fill in: 'the'"),
    ],
)
def test_invalid_masked_text_is_a_clear_error(model, text, top_k, error, message):
    with pytest.raises(error, match=message):
        model.fill_mask(text, top_k=top_k)


def test_path_that_does_not_exist_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for path in (tmp_path / "nowhere", "runs/nowhere", "./nowhere", "runs/one/nowhere"):
        expected = "nowhere does not exist; expected a workdir, a checkpoint, or a directory of"
        with pytest.raises(FileNotFoundError, match=expected):
            bert_jax.load(path)
    for name in ("bert-base-uncased", "google-bert/bert-base-uncased"):
        expected = f"{name} does not exist; for a model on a hub, .*: hf download {name} --local"
        with pytest.raises(FileNotFoundError, match=expected):
            bert_jax.load(name)


def test_directory_without_a_checkpoint_is_a_clear_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no complete checkpoint"):
        bert_jax.load(tmp_path)
    (tmp_path / "tf_model.h5").write_text("")
    with pytest.raises(FileNotFoundError, match=r"holds tf_model.h5, which is not read"):
        bert_jax.load(tmp_path)
    (tmp_path / "tf_model.h5").unlink()
    (tmp_path / "seed_3").mkdir()
    with pytest.raises(FileNotFoundError, match=r"several seeds: .*seed_3"):
        bert_jax.load(tmp_path)


def test_damaged_checkpoint_is_a_clear_error(workdir, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(find_checkpoint(workdir), damaged)
    for path in (damaged / "params").rglob("*"):
        if path.is_file() and path.stat().st_size > 4096:
            path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="damaged could not be read as a checkpoint"):
        bert_jax.load(damaged)


def test_version_equals_the_project_file():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert bert_jax.__version__ == project["version"]


def test_public_names_are_found_before_their_first_use():
    code = "import bert_jax; assert {*bert_jax.__all__} <= {*dir(bert_jax)}, dir(bert_jax)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    assert all(getattr(bert_jax, name) for name in bert_jax.__all__)


def test_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        bert_jax.lod  # noqa: B018


def test_tokenizer_survives_the_checkpoint(model, tokenizer):
    assert isinstance(model, PretrainedModel)
    assert model.tokenizer.sha256 == tokenizer.sha256
    assert model.tokenizer.encode("the rivers") == tokenizer.encode("the rivers")


TEXTS = [
    "the river",
    "",
    "people made the old town and the new road . " * 2,
    "water",
    "the mountain village",
    "stone",
]


@pytest.fixture(scope="module")
def alone(model) -> list[np.ndarray]:
    """Returns `[1 + layers, tokens, hidden]` for each of TEXTS, computed alone, without padding."""
    tokenizer, states = model.tokenizer, []
    variables = {"params": model.params["encoder"]}
    apply = jax.jit(functools.partial(Encoder(model.config).apply, method="all_hidden_states"))
    for text in TEXTS:
        row = np.array([[tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id]])
        states.append(apply(variables, batch_of_row(row))[:, 0])
    return jax.device_get(states)


@pytest.mark.slow
def test_sparse_vectors_are_the_largest_weights_of_the_masked_lm(model, alone):
    def logits(module, states):
        return module.mlm(states, module.encoder.embeddings.token_embedding)

    found = model.encode_sparse(TEXTS, top_k=5)
    assert found.shape == (6, model.config.vocab_size) and found.dtype == np.float32
    for vector, states in zip(found.toarray(), alone, strict=True):
        tokens = model.module.apply({"params": model.params}, states[-1][None], method=logits)[0]
        weights = np.log1p(np.maximum(tokens, 0)).max(0)[: model.config.vocab_size]
        best = np.argsort(-weights)[:5]
        assert set(np.flatnonzero(vector)) == set(best)
        np.testing.assert_allclose(vector[best], weights[best], atol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 4, 32])
@pytest.mark.parametrize("pooling", ["mean", "cls", "pooler"])
def test_encode_equals_each_text_alone_in_the_given_order(model, alone, pooling, batch_size):
    vectors = model.encode(TEXTS, pooling=pooling, batch_size=batch_size)
    assert vectors.shape == (6, 32) and vectors.dtype == np.float32
    pooler = model.params["encoder"]["pooler"]["dense"]
    for vector, states in zip(vectors, alone, strict=True):
        last = states[-1]
        expected = {
            "mean": last.mean(0),
            "cls": last[0],
            "pooler": np.tanh(last[0] @ pooler["kernel"] + pooler["bias"]),
        }[pooling]
        np.testing.assert_allclose(vector, expected, atol=1e-5)


def test_features_are_the_hidden_states_of_the_given_layers(model, alone):
    features = model.features(TEXTS, layers=(0, -1, 1), batch_size=4)
    assert {feature.dtype.name for feature in features} == {"float32"}
    for feature, states in zip(features, alone, strict=True):
        expected = states[[0, -1, 1]].transpose(1, 0, 2)
        assert feature.shape == expected.shape
        np.testing.assert_allclose(feature, expected, atol=1e-5)


@pytest.mark.slow
def test_attention_equals_each_text_alone(model):
    maps = model.attention(TEXTS)
    for text, (tokens, probabilities) in zip(TEXTS, maps, strict=True):
        ids = [model.tokenizer.token_to_id(token) for token in tokens]
        assert ids == [
            model.tokenizer.cls_id,
            *model.tokenizer.encode(text),
            model.tokenizer.sep_id,
        ]
        assert probabilities.shape == (2, 4, len(tokens), len(tokens))
        assert probabilities.dtype == np.float32
        np.testing.assert_allclose(probabilities.sum(-1), 1, atol=1e-5)
        alone = model.attention(text)
        assert alone.tokens == tokens
        np.testing.assert_allclose(probabilities, alone.probabilities, atol=1e-6)


def test_attention_times_values_is_what_the_encoder_layer_computes(model, alone):
    """The last layer, from its input and the maps, gives its output."""
    layers = jax.device_get(model.params["encoder"]["layers"])
    layer = jax.tree.map(lambda leaf: leaf[-1], layers)

    def dense(name, x):
        return x @ layer[name]["kernel"] + layer[name]["bias"]

    def norm(name, x):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return x * layer[name]["scale"] + layer[name]["bias"]

    for text, states in zip(TEXTS, alone, strict=True):
        value = dense("value", states[-2]).reshape(len(states[-2]), 4, 8)
        context = np.einsum("hft,thd->fhd", model.attention(text).probabilities[-1], value)
        y = dense("attention_output", context.reshape(states[-2].shape))
        x = norm("attention_layer_norm", states[-2] + y)
        y = dense("intermediate", x)
        y = dense("output", y * (1 + erf(y / np.sqrt(2))) / 2)
        np.testing.assert_allclose(norm("output_layer_norm", x + y), states[-1], atol=1e-4)


def test_features_come_from_the_last_layers_by_default(model):
    (states,) = model.hidden_states(["the river"])
    (expected,) = model.features(["the river"], layers=(1, 2))  # It has no more.
    np.testing.assert_array_equal(states, expected)


def test_one_layer_may_be_given_as_a_number(model):
    (expected,) = model.features(["the river"], layers=(2,))
    np.testing.assert_array_equal(model.features("the river", layers=2), expected)


def test_empty_list_of_texts_gives_no_results(model):
    vectors = model.encode([])
    assert vectors.shape == (0, 32) and vectors.dtype == np.float32
    assert model.features([], layers=[-1]) == model.fill_mask([]) == model.attention([]) == []
    assert with_head(model, "classification", ["no", "yes"]).classify([]) == []
    assert with_head(model, "tagging", ["O", "B-A"]).tag([]) == []
    assert with_head(model, "span", ["start", "end"]).answer([], "the river") == []


def test_long_texts_are_truncated_with_a_warning(model):
    longest = "the " * 38
    with pytest.warns(UserWarning, match="2 of 3 texts are truncated to 40 tokens"):
        vectors = model.encode(["river", longest + "river", longest + "town road"])
    np.testing.assert_allclose(vectors[1:], model.encode([longest] * 2), atol=1e-6)
    with pytest.warns(UserWarning, match="1 of 1 texts are truncated to 40 "):
        assert model.features(["the " * 39], layers=[-1])[0].shape == (40, 1, 32)


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda m: m.encode(5), TypeError, "must be a string, a pair .* or a list .*, got 5$"),
        (lambda m: m.encode("a \ud800 b"), ValueError, "surrogates not allowed"),
        (lambda m: m.encode(b"the"), TypeError, "must be a string, .*, got b'the'$"),
        (lambda m: m.encode({"the": 1}), TypeError, "must be a string, a pair of strings"),
        (lambda m: m.encode(["the", None]), TypeError, "must be a string, a pair of strings"),
        (lambda m: m.attention([1]), TypeError, "must be a string, a pair of strings"),
        (lambda m: m.encode([*["the"] * 20, NAN, NAN]), TypeError, "got nan at index 20$"),
        (lambda m: m.encode(["the", "\ud800"]), ValueError, "surrogates not .* at index 1$"),
        (lambda m: m.encode(("the", "a", "of")), TypeError, r"got \('the', 'a', 'of'\)$"),
        (lambda m: m.encode(["a", ("a", "b")]), TypeError, "index 1: expected only texts or only"),
        (lambda m: m.features(b"the", layers=[0]), TypeError, "must be a string, a pair of"),
        (lambda m: m.tokens("the", max_length=1), ValueError, r"max_length .* in \[2, 40\], got 1"),
        (lambda m: m.batch("the", length=41), ValueError, r"^length .* in \[2, 40\], got 41"),
        (lambda m: m.encode(["the"], pooling="min"), ValueError, "got 'min'"),
        (lambda m: m.encode(["the"], batch_size=0), ValueError, "at least 1, got 0"),
        (lambda m: m.encode(["the"], batch_size="4"), ValueError, "a whole number, .* got '4'"),
        (lambda m: m.encode(["the"], max_length=41), ValueError, r"in \[2, 40\], got 41"),
        (lambda m: m.encode(["the"], max_length=8.0), ValueError, "a whole number .*, got 8.0"),
        (lambda m: m.features(["the"], layers=[-4]), ValueError, r"layers must be in \[-3, 2\],"),
        (lambda m: m.features(["the"], layers=[3]), ValueError, r"in \[-3, 2\], got \(3,\)"),
        (lambda m: m.features(["the"], layers=[]), ValueError, r"in \[-3, 2\], got \(\)"),
        (lambda m: m.features(["the"], layers=0.5), ValueError, r"in \[-3, 2\], got \(0.5,\)"),
        (lambda m: m.features(["the"], layers=[[1, 2], [0]]), ValueError, r"in \[-3, 2\], got"),
        (lambda m: m.features(["the"], layers=1.0), ValueError, r"in \[-3, 2\], got \(1.0,\)"),
    ],
)
def test_invalid_arguments_of_encode_and_features_are_clear_errors(model, ask, error, message):
    with pytest.raises(error, match=message):
        ask(model)


def test_missing_mlm_head_and_pooler_are_clear_errors(model):
    bert = {name: value for name, value in model.params["encoder"].items() if name != "pooler"}
    bare = PretrainedModel(model.config, model.tokenizer, {"encoder": bert})
    with pytest.raises(ValueError, match="has no masked-LM head"):
        bare.fill_mask("the [MASK]")
    with pytest.raises(ValueError, match="has no pooler"):
        bare.encode(["the"], pooling="pooler")
    np.testing.assert_array_equal(bare.encode(["the"]), model.encode(["the"]))


def test_fill_mask_needs_neither_pooler_nor_next_sentence_head(model):
    bert = {name: value for name, value in model.params["encoder"].items() if name != "pooler"}
    params = {"encoder": bert, "mlm": model.params["mlm"]}
    bare = PretrainedModel(model.config, model.tokenizer, params)
    assert bare.fill_mask("the [MASK]") == model.fill_mask("the [MASK]")


PAIRS = [
    ("the river", "a town"),
    ("people made the old town and the new road . ", ""),
    ("war", "war"),
]


def with_head(model, task, labels, scale=1.0, **settings) -> PretrainedModel:
    """Adds a random head to the model, with weights of the standard deviation `scale`."""
    rng = np.random.default_rng(0)
    head = {
        "kernel": np.float32(scale) * rng.standard_normal((32, len(labels)), np.float32),
        "bias": rng.standard_normal(len(labels), np.float32),
    }
    params = {"encoder": model.params["encoder"], "head": head}
    settings = {"head": {"task": task, "labels": list(labels), **settings}}
    return PretrainedModel(model.config, model.tokenizer, params, settings)


@functools.cache
def jitted_encoder(config):
    return jax.jit(Encoder(config).apply)


def logits_alone(model, *texts: str) -> np.ndarray:
    """Returns the logits of a text or a pair alone, neither packed nor padded."""
    tokenizer = model.tokenizer
    first, *second = [[*tokenizer.encode(text), tokenizer.sep_id] for text in texts]
    row = np.array([[tokenizer.cls_id, *first, *(second[0] if second else [])]])
    segments = (np.arange(row.shape[1])[None] > len(first)).astype(np.int32)
    encoder = jax.device_get(model.params["encoder"])
    hidden = jitted_encoder(model.config)({"params": encoder}, batch_of_row(row, segments))
    pooler, head = encoder["pooler"]["dense"], model.params["head"]
    pooled = np.tanh(np.asarray(hidden[0, 0]) @ pooler["kernel"] + pooler["bias"])
    return pooled @ head["kernel"] + head["bias"]


@pytest.mark.parametrize("texts", [TEXTS, PAIRS, TEXTS[:1]], ids=["texts", "pairs", "one"])
def test_classify_equals_each_text_alone_in_the_given_order(model, texts):
    classifier = with_head(model, "classification", ["no", "maybe", "yes"])
    regressor = with_head(model, "regression", ["value"])
    labels, values = classifier.classify(texts), regressor.classify(texts)
    for text, label, value in zip(texts, labels, values, strict=True):
        parts = [text] if isinstance(text, str) else text
        expected = softmax(logits_alone(classifier, *parts))
        assert label.label == ["no", "maybe", "yes"][expected.argmax()]
        assert label.probability == pytest.approx(expected.max(), abs=1e-5)
        assert value == pytest.approx(logits_alone(regressor, *parts)[0], abs=1e-4)


def test_classify_returns_the_best_labels_and_all_labels_of_a_text(model):
    classifier = with_head(model, "classification", ["no", "maybe", "yes"])
    best, ranked = classifier.classify(TEXTS), classifier.classify(TEXTS, top_k=3)
    assert [labels[0] for labels in ranked] == best
    assert [labels[:2] for labels in ranked] == classifier.classify(TEXTS, top_k=2)
    for labels in ranked:
        assert sum(label.probability for label in labels) == pytest.approx(1)
        assert labels == sorted(labels, key=lambda label: -label.probability)
    multi_label = with_head(model, "multi_label", ["no", "maybe", "yes"], scale=0.1)
    for text, labels, all_labels in zip(
        TEXTS, multi_label.classify(TEXTS), multi_label.classify(TEXTS, top_k=3), strict=True
    ):
        expected = expit(logits_alone(multi_label, text))
        assert len(labels) == (expected > 0.5).sum() and labels == all_labels[: len(labels)]
        assert dict(all_labels) == pytest.approx(
            dict(zip(("no", "maybe", "yes"), expected, strict=True))
        )


def test_a_single_input_equals_a_list_of_one(model):
    np.testing.assert_array_equal(model.encode("the river"), model.encode(["the river"])[0])
    (states,) = model.hidden_states(["the river"])
    np.testing.assert_array_equal(model.features("the river"), states)
    classifier = with_head(model, "classification", ["no", "yes"])
    for text in ("the river", ("the river", "a town")):
        assert [classifier.classify(text)] == classifier.classify([text])
        assert [classifier.classify(text, top_k=2)] == classifier.classify([text], top_k=2)
    assert isinstance(with_head(model, "regression", ["value"]).classify("the river"), float)
    assert classifier.classify(np.array(TEXTS)) == classifier.classify(TEXTS)


def test_tuples_and_generators_count_as_lists_unless_they_are_a_single_input(model):
    masked = ["the [MASK]", "a [MASK] of water"]
    expected = model.fill_mask(masked, top_k=1)
    assert model.fill_mask(tuple(masked), top_k=1) == expected
    assert model.fill_mask((text for text in masked), top_k=1) == expected
    classifier = with_head(model, "classification", ["no", "yes"])
    labels = classifier.classify(PAIRS)
    assert classifier.classify(tuple(PAIRS)) == labels
    assert classifier.classify(zip(*zip(*PAIRS, strict=True), strict=True)) == labels
    reader = with_head(model, "span", ["start", "end"])
    answers = reader.answer(["the", "of"], ["the river", "of water"])
    assert reader.answer(("the", "of"), ("the river", "of water")) == answers
    tagger = with_head(model, "tagging", ["O", "B-A"])
    assert tagger.tag((("the", "river"), ("a",))) == tagger.tag([("the", "river"), ("a",)])
    ranker = with_head(model, "multiple_choice", ["score"])
    ranked = ranker.rank(["the"], ["river", "town"])
    assert ranker.rank(("the",), iter(("river", "town"))) == ranked


def test_repr_names_the_source_the_sizes_and_the_labels(model, workdir):
    size = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    sizes = f"2 layers, hidden size 32, {size:,} parameters"
    pretrained = "head for masked LM and sentence pairs"
    assert repr(model) == f"PretrainedModel({workdir}: {sizes}; {pretrained})"
    bare = PretrainedModel(model.config, model.tokenizer, {"encoder": model.params["encoder"]})
    assert repr(bare).endswith(" parameters; no head)")
    for task, labels, expected in (
        ("classification", ["no", "yes"], "classification: no, yes"),
        ("tagging", ["O", "B-A"], "tagging: O, B-A"),
        ("span", ["start", "end"], "span: start, end"),
        ("regression", ["value"], "regression: value"),
        ("embedding", [], "embedding"),
    ):
        assert repr(with_head(model, task, labels)).endswith(f"; head for {expected})")


@pytest.mark.parametrize(
    ("task", "top_k", "message"),
    [
        ("classification", 3, r"top_k must be a whole number in \[1, 2\], got 3"),
        ("classification", 0, r"in \[1, 2\], got 0"),
        ("regression", 1, "a head for regression, so it cannot rank labels"),
    ],
)
def test_invalid_top_k_of_classify_is_a_clear_error(model, task, top_k, message):
    with pytest.raises(ValueError, match=message):
        with_head(model, task, ["no", "yes"]).classify(TEXTS, top_k=top_k)


def test_rank_equals_each_pair_alone_and_truncates_as_in_fine_tuning(model):
    ranker = with_head(model, "multiple_choice", ["score"])
    candidates = ["a town", "", "the " * 5]
    ranked = ranker.rank("the river", candidates)
    scores = np.array([logits_alone(ranker, "the river", candidate)[0] for candidate in candidates])
    assert [candidate.index for candidate in ranked] == np.argsort(-scores).tolist()
    assert [candidate.text for candidate in ranked] == [
        candidates[candidate.index] for candidate in ranked
    ]
    order = [candidate.index for candidate in ranked]
    np.testing.assert_allclose([candidate.score for candidate in ranked], scores[order], atol=1e-4)
    probabilities = softmax(scores)
    np.testing.assert_allclose(
        [candidate.probability for candidate in ranked], probabilities[order], atol=1e-5
    )
    assert ranker.rank("the river", []) == ranker.rank([], candidates) == []
    both = ranker.rank(["the river", "a town"], candidates)
    for one, other in zip(both, (ranked, ranker.rank("a town", candidates)), strict=True):
        assert [candidate.index for candidate in one] == [candidate.index for candidate in other]
        np.testing.assert_allclose([c.score for c in one], [c.score for c in other], atol=1e-4)
    assert ranker.rank(["the river", "a town"], []) == [[], []]
    short = with_head(model, "multiple_choice", ["score"], max_seq_length=10, max_query_length=4)
    with pytest.warns(UserWarning, match="2 of 2 texts are truncated to 10 tokens"):
        first, second = short.rank("the river " * 3, ["the " * 9, "the " * 5])
    assert [first.score, second.score] == pytest.approx([scores[2]] * 2, abs=1e-4)


@pytest.mark.parametrize(
    ("query", "candidates", "message"),
    [
        (1, ["a"], "query must be a string or a list of strings, got 1"),
        ("a", "b", "candidates must be a list of strings, got 'b'"),
        ("a", ["b", None], "candidates must be .*, got None at index 1"),
        (["a", 1], ["b"], "query must be .*, got 1 at index 1"),
    ],
)
def test_invalid_arguments_of_rank_are_clear_errors(model, query, candidates, message):
    ranker = with_head(model, "multiple_choice", ["score"])
    with pytest.raises(TypeError, match=message):
        ranker.rank(query, candidates)
    with pytest.raises(ValueError, match=r"so it cannot rank texts"):
        model.rank("a", ["b"])


@pytest.mark.parametrize(("pooling", "normalize"), [("cls", True), ("mean", False)])
def test_bi_encoder_pools_as_in_fine_tuning(model, pooling, normalize):
    head = {"task": "embedding", "labels": [], "pooling": pooling, "normalize": normalize}
    encoder = PretrainedModel(model.config, model.tokenizer, model.params, {"head": head})
    plain = model.encode(TEXTS, pooling=pooling)
    length = np.linalg.norm(plain, axis=1, keepdims=True) if normalize else 1
    np.testing.assert_allclose(encoder.encode(TEXTS), plain / length, atol=1e-6)
    np.testing.assert_array_equal(encoder.encode(TEXTS, pooling=pooling), plain)


def test_bi_encoder_truncates_texts_as_in_fine_tuning(model):
    head = {"task": "embedding", "labels": [], "max_seq_length": 8, "max_query_length": 5}
    encoder = PretrainedModel(model.config, model.tokenizer, model.params, {"head": head})
    with pytest.warns(UserWarning, match=r"1 of 2 texts are truncated to 8 tokens"):
        vectors = encoder.encode(["the " * 6 + "river", "the " * 6])
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-6)
    with pytest.warns(UserWarning, match="1 of 1 texts are truncated to 5 tokens"):
        vectors = encoder.encode(["the " * 4], max_length=encoder.head["max_query_length"])
    np.testing.assert_allclose(vectors, model.encode(["the " * 3]), atol=1e-6)


def test_classify_truncates_texts_as_in_fine_tuning(model):
    classifier = with_head(model, "classification", ["no", "yes"], max_seq_length=8)
    with pytest.warns(UserWarning, match=r"1 of 2 texts are truncated to 8 tokens"):
        labels = classifier.classify(["the " * 6 + "river", "the " * 6])
    assert labels[0] == labels[1] and classifier.classify([]) == []


@pytest.mark.parametrize("texts", [None, [1], [("a", "b"), "c"], ("a", None), [("a",) * 3]])
def test_invalid_arguments_of_classify_are_clear_errors(model, texts):
    with pytest.raises(
        TypeError, match=r"must be a string, a pair of strings \(a tuple\) or a list"
    ):
        with_head(model, "classification", ["no", "yes"]).classify(texts)
    for unsuitable in (model, with_head(model, "tagging", ["O", "B"])):
        with pytest.raises(ValueError, match="so it cannot classify"):
            unsuitable.classify(["the river"])


def test_pairs_are_encoded_with_their_segments(model):
    """Hidden states, attention, tokens and vectors of pairs equal each pair alone."""
    pairs = [("the river", "a city"), ("people made the old", "")]
    tokens = model.tokens(pairs)
    assert tokens[0].tokens == ["[CLS]", "the", "river", "[SEP]", "a", "city", "[SEP]"]
    assert [each.segment_ids.tolist() for each in tokens] == [[0] * 4 + [1] * 3, [0] * 6 + [1]]
    assert tokens[0].words.tolist() == [-1, 0, 1, -1, 0, 1, -1]
    rows = (np.stack([each.ids for each in tokens]), np.stack([t.segment_ids for t in tokens]))
    variables = {"params": model.params["encoder"]}
    expected = jax.jit(Encoder(model.config).apply)(variables, batch_of_row(*rows))
    np.testing.assert_allclose(
        np.stack(model.hidden_states(pairs, -1))[:, :, 0], expected, atol=1e-5
    )
    np.testing.assert_allclose(model.encode(pairs), expected.mean(1), atol=1e-5)
    np.testing.assert_array_equal(model.encode(pairs[0]), model.encode(pairs)[0])
    assert [each.tokens for each in model.attention(pairs)] == [each.tokens for each in tokens]


def test_tokens_belong_to_words_and_characters(model):
    text = "The rivers  made.\u200b growing waters."
    tokens = model.tokens(text)
    assert tokens.tokens[0] == "[CLS]" and tokens.tokens[-1] == "[SEP]"
    assert [model.tokenizer.token_to_id(token) for token in tokens.tokens] == tokens.ids.tolist()
    pieces = [text[start:end] for start, end in tokens.offsets.tolist()]
    words = {}
    for piece, word in zip(pieces, tokens.words.tolist(), strict=True):
        words[word] = words.get(word, "") + piece
    assert words.pop(-1) == ""
    assert [*words.values()] == ["The", "rivers", "made", ".", "growing", "waters", "."]
    assert [*words] == [*range(7)]
    with pytest.warns(UserWarning, match="1 of 1 texts are truncated to 6 tokens"):
        short = model.tokens(("the old city of stone", "water"), max_length=6)
    assert short.tokens == ["[CLS]", "the", "old", "[SEP]", "water", "[SEP]"]
    assert short.offsets.tolist() == [[0, 0], [0, 3], [4, 7], [0, 0], [0, 5], [0, 0]]


@pytest.mark.slow
def test_padding_of_a_batch_changes_no_result(model, alone):
    texts, variables = TEXTS[:3], {"params": model.params["encoder"]}
    batch = model.batch(texts, length=32)
    hidden = jax.jit(Encoder(model.config).apply)(variables, batch)
    for row, states in enumerate(alone[:3]):
        count = states.shape[1]
        assert batch["sequence_ids"][row].tolist() == [1] * count + [0] * (32 - count)
        assert batch["position_ids"][row, :count].tolist() == [*range(count)]
        assert (batch["tokens"][row, count:] == model.tokenizer.pad_id).all()
        np.testing.assert_allclose(hidden[row, :count], states[-1], atol=1e-5)
    assert {array.dtype.name for array in batch.values()} == {"int32"}
    assert model.batch(("the river", "a city"))["segment_ids"].tolist() == [[0] * 4 + [1] * 3]
    assert model.batch(texts[:2])["tokens"].shape == (2, 4)  # The longest.
    if "mlm" in model.params:
        logits, _ = model.module.apply({"params": model.params}, model.batch(texts[:2]))
        assert logits.shape == (2, 4, model.config.padded_vocab_size)
    assert model.batch([])["tokens"].shape == (0, 2)
    with pytest.warns(UserWarning, match="1 of 2 texts are truncated to 3 tokens"):
        assert model.batch(texts[:2], length=3)["tokens"].shape == (2, 3)


@pytest.mark.slow
def test_fine_tuned_module_takes_the_batch_and_a_rate_of_dropout(model):
    classifier = with_head(model, "classification", ["no", "yes"])
    variables, batch = {"params": classifier.params}, classifier.batch(PAIRS)

    @jax.jit
    def logits(rate, key):
        return classifier.module.apply(variables, batch, dropout=rate, rngs={"dropout": key})[:, 0]

    keys = jax.random.split(jax.random.key(3))
    for row, labels in zip(
        softmax(logits(0.0, keys[0]), axis=-1), classifier.classify(PAIRS, top_k=2), strict=True
    ):
        expected = dict(zip(("no", "yes"), row.tolist(), strict=True))
        assert dict(labels) == pytest.approx(expected, abs=1e-5)
    dropped = logits(0.5, keys[0])
    np.testing.assert_array_equal(logits(0.5, keys[0]), dropped)
    assert np.abs(dropped - logits(0.5, keys[1])).max() > 0.1
    with pytest.raises(ValueError, match=r"dropout must be a rate in \[0, 1\), got 1.5"):
        classifier.module.apply(variables, batch, dropout=1.5)
    with pytest.raises(flax.errors.InvalidRngError, match="dropout"):
        classifier.module.apply(variables, batch, dropout=0.1)


def test_normalized_vectors_have_length_one(model):
    vectors = model.encode(TEXTS)
    expected = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(model.encode(TEXTS, normalize=True), expected, atol=1e-6)


@pytest.mark.slow
def test_model_of_another_dtype_and_device(model, workdir):
    device = jax.devices()[3]
    other = bert_jax.load(workdir, dtype=jax.numpy.bfloat16, device=device)
    assert other.dtype == "bfloat16" and "bfloat16" in repr(other.module)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(other.params)} == {"float32"}
    assert {*map(str, {leaf.device for leaf in jax.tree.leaves(other.params)})} == {str(device)}
    for found, expected in (
        (other.encode(TEXTS), model.encode(TEXTS)),
        (other.hidden_states(TEXTS[0]), model.hidden_states(TEXTS[0])),
        (other.attention(TEXTS[0]).probabilities, model.attention(TEXTS[0]).probabilities),
    ):
        assert found.dtype == np.float32
        difference = np.abs(found - expected).max()
        assert 0 < difference < 0.05 * np.abs(expected).max()
    assert other.fill_mask("the [MASK]", top_k=34)[0].probability < 1
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, got float16"):
        bert_jax.load(workdir, dtype="float16")
    with pytest.raises(ValueError, match="device='tpu': JAX finds only cpu devices; for GPUs pip"):
        bert_jax.load(workdir, device="tpu")


@pytest.mark.slow
def test_saved_model_is_the_loaded_one(model, tmp_path):
    """Also with parameters that were changed by hand, a head, and a module of one's own."""
    classifier = with_head(model, "classification", ["no", "yes"], max_seq_length=12)
    classifier.params["encoder"] = jax.tree.map(lambda leaf: leaf * 1.5, model.params["encoder"])
    classifier.params["head"]["bias"] += 1.0
    classifier.params["own"] = {"table": np.ones((3, 2), np.float64), "b": np.ones(2, np.float16)}
    for name, saved in (("model", model), ("classifier", classifier)):
        with warnings.catch_warnings(action="error"):
            saved.save(tmp_path / name)
            again = bert_jax.load(tmp_path / name)
        assert_trees_equal(again.params, saved.params)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(again.params)} == {"float32"}
        assert again.config == saved.config and again.head == saved.head
        assert again.tokenizer.sha256 == saved.tokenizer.sha256
        np.testing.assert_array_equal(again.encode(TEXTS[:2]), saved.encode(TEXTS[:2]))
    assert again.classify(TEXTS[0]) == classifier.classify(TEXTS[0])


def test_saving_replaces_only_checkpoints_and_only_if_asked(model, tmp_path):
    bare = PretrainedModel(model.config, model.tokenizer, {"encoder": model.params["encoder"]})
    bare.save(tmp_path / "saved")
    with pytest.raises(FileExistsError, match="saved exists already"):
        bare.save(tmp_path / "saved")
    bare.params = jax.tree.map(lambda leaf: leaf + 1, bare.params)
    bare.save(tmp_path / "saved", overwrite=True)
    assert_trees_equal(bert_jax.load(tmp_path / "saved").params, bare.params)
    (tmp_path / "empty").mkdir()
    bare.save(tmp_path / "empty")
    (tmp_path / "own").mkdir()
    (tmp_path / "own/notes.txt").touch()
    with pytest.raises(FileExistsError, match="own exists already"):
        bare.save(tmp_path / "own", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "own", "saved"]
    with pytest.raises(ValueError, match="mount the bucket, and save to a path below the mount"):
        bare.save("gs://bucket/model")


def test_head_threshold_that_was_changed_by_hand_is_saved(model, tmp_path):
    reader = with_head(model, "span", ["start", "end"], null_answers=True, null_threshold=0.0)
    reader.settings["tuned_head_settings"] = {"null_threshold": 0.0}
    reader.head["null_threshold"] = 2.5
    reader.save(tmp_path / "reader")
    assert bert_jax.load(tmp_path / "reader").head == reader.head


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.params.pop("encoder"), "params must have 'encoder', got only 'head'"),
        (lambda m: m.params.pop("head"), "head for classification, but params have no 'head'"),
        (lambda m: m.settings.pop("head"), "params have a 'head', but settings have none"),
        (lambda m: m.head.pop("task"), r"settings\['head'\] must have a 'task' \(classification,"),
        (lambda m: m.head.update(labels=["a"]), r"head/bias is \[2\]"),
        (lambda m: m.params["encoder"].pop("pooler"), "head for classification needs .*pooler"),
        (
            lambda m: m.params["encoder"]["layers"].pop("query"),
            r"params: encoder/layers/query/bias is absent",
        ),
        (lambda m: m.params["head"].update(bias=np.ones(2, int)), "params: head/bias is int64"),
    ],
)
def test_model_that_could_not_be_loaded_is_not_saved(model, tmp_path, change, message):
    classifier = with_head(model, "classification", ["no", "yes"])
    classifier.params = jax.tree.map(lambda leaf: leaf, classifier.params)  # A copy of the tree.
    change(classifier)
    with pytest.raises(ValueError, match=message):
        classifier.save(tmp_path / "saved")
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_truncated_vectors_are_compared_as_the_head_says(tmp_path):
    vectors = {}
    for name, head in {"unit": {"normalize": True}, "raw": {"normalize": False}}.items():
        head = {"task": "embedding", "labels": [], "pooling": "mean"} | head
        model = bert_jax.load(write_head(tmp_path / name, **head))
        vectors[name] = model.encode(["the old river", "a king"], truncate_dim=4)
        first, second = vectors[name]
        cosine = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
        expected = cosine if name == "unit" else first @ second
        assert model.similarity(first, second)[0, 0] == pytest.approx(expected, rel=1e-5)
        with pytest.raises(ValueError, match="truncate_dim"):
            model.encode("the", truncate_dim=17)
        with pytest.raises(ValueError, match=r"got \[1, 4\] and \[1, 3\]"):
            model.similarity(first, second[:3])
    np.testing.assert_allclose(np.linalg.norm(vectors["unit"], axis=1), 1, rtol=1e-5)
    directions = vectors["raw"] / np.linalg.norm(vectors["raw"], axis=1, keepdims=True)
    np.testing.assert_allclose(vectors["unit"], directions, atol=1e-5)


def test_a_multi_vector_model_has_a_vector_of_each_token_that_counts(tmp_path):
    head = {
        "task": "multi_vector",
        "labels": [],
        "projections": [{"size": 5, "has_bias": False, "activation": "identity"}],
        "normalize": True,
        "query_expansion": {"strategy": "fixed", "length": 8, "attend": False, "token": None},
        "skip_words": ["."],
        "prompts": {"query": "the ", "document": ""},
        "max_seq_length": 16,
        "max_query_length": 8,
    }
    model = bert_jax.load(write_head(tmp_path, **head))
    queries = model.encode_tokens(["king", "old river"], prompt_name="query")
    assert [each.shape for each in queries] == [(8, 5), (8, 5)]
    texts = ["a king .", "the river . of the people"]
    passages = model.encode_tokens(texts)
    # With [CLS] and [SEP], without punctuation.
    assert [each.shape for each in passages] == [(4, 5), (7, 5)]
    for vectors in (*queries, *passages):
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(model.encode_tokens(texts[0]), passages[0], atol=1e-5)
    expected = [[(q @ p.T).max(axis=1).sum() for p in passages] for q in queries]
    np.testing.assert_allclose(model.similarity(queries, passages), expected, rtol=1e-5)
    best = model.rank("king", texts)[0]
    assert best.index == np.argmax(expected[0])
    assert best.score == pytest.approx(max(expected[0]), rel=1e-5)
    with pytest.raises(ValueError, match="encode_tokens"):
        model.encode(texts)
    assert model.encode(texts, pooling="cls").shape == (2, model.config.hidden_size)
