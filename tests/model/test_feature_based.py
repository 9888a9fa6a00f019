"""The BiLSTM on a frozen encoder, and taggers of both kinds from training to `tag`."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bert_jax
from bert_jax import finetune
from bert_jax.checkpoints.native import write_checkpoint
from bert_jax.checkpoints.parameters import model_settings
from bert_jax.configs.finetune import conll2003, feature_based
from bert_jax.data.features import ModelInput, RowShape, unpack_rows
from bert_jax.finetuning.pretrained_head import initial_params
from bert_jax.model.encoder import Encoder
from bert_jax.model.feature_based import FEATURES, BiLstmHead, FeatureBasedTagger, choose_features
from bert_jax.model.heads import TAGGING
from bert_jax.tasks import tagging as task
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.commands import ROOT
from tests.helpers.corpora import write_vocabulary
from tests.helpers.models import example_batch, small_model_config

TAGGED = "the B-LOC\nriver I-LOC\nbuilt O\nking B-PER\nfound O\n"
TEXT = "".join(TAGGED * (number % 4 + 1) + "\n" for number in range(40))


@pytest.mark.slow
def test_packed_sequences_do_not_touch_each_other():
    config = small_model_config(50, num_layers=3)
    model = FeatureBasedTagger(config, 3, "weighted_sum", lstm_size=8)
    rng = np.random.default_rng(0)
    sequences = [
        ModelInput((rng.integers(5, 50, length).astype(np.int32),), (length,))
        for length in (5, 3, 6)
    ]
    shape = RowShape(16, 3, TAGGING.label_layout, 0)
    packed, single = (
        unpack_rows(shape.build(rows, len(rows)))
        for rows in ([sequences], [[feature] for feature in sequences])
    )
    params = jax.jit(model.init)(jax.random.key(0), packed)
    together, alone = (jax.jit(model.apply)(params, batch) for batch in (packed, single))
    alone = np.concatenate([alone[row, : len(each)] for row, each in enumerate(sequences)])
    np.testing.assert_allclose(together[0, : len(alone)], alone, atol=1e-5)


def test_each_choice_of_features_reads_its_layers():
    states = np.random.default_rng(0).normal(size=(7, 1, 2, 3))
    expected = {
        "embeddings": states[0],
        "last": states[6],
        "second_to_last": states[5],
        "sum_last_four": states[3:].sum(axis=0),
        "concat_last_four": np.concatenate(states[3:], axis=-1),
    }
    assert {*expected, "weighted_sum"} == set(FEATURES)
    for features, value in expected.items():
        np.testing.assert_allclose(choose_features(jnp.array(states), features), value, rtol=1e-6)


def test_weighted_sum_is_over_the_layers_and_not_the_embeddings():
    states = np.random.default_rng(0).normal(size=(4, 1, 5, 16)).astype(np.float32)
    ids = np.ones((1, 5), np.int32)
    head = BiLstmHead(3, "weighted_sum", lstm_size=4)
    rng = np.random.default_rng(1)
    params = jax.tree.map(
        lambda leaf: np.float32(0.3 * rng.normal(size=leaf.shape)),
        jax.eval_shape(head.init, jax.random.key(0), states, ids)["params"],
    )
    params["scale"] = np.array([0.0, np.log(2), 0.0], np.float32)
    logits = jax.jit(head.apply)({"params": params}, states, ids)
    del params["scale"]
    expected = np.tensordot([0.25, 0.5, 0.25], states[1:], axes=1)[None].astype(np.float32)
    last = BiLstmHead(3, "last", lstm_size=4)
    found = jax.jit(last.apply)({"params": params}, expected, ids)
    np.testing.assert_allclose(found, logits, atol=1e-6)


STACKED_INIT = """
import os
import jax, numpy as np
from bert_jax.model.feature_based import BiLstmHead
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
states, ids = np.zeros((2, 1, 5, 16), np.float32), np.ones((1, 5), np.int32)
init = jax.jit(lambda key: BiLstmHead(3, "last", lstm_size=64).init(key, states, ids))
keys = jax.random.split(jax.random.key(0), 3)
jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x: x[1], jax.vmap(init)(keys)),
             init(keys[1]))
"""


@pytest.mark.exhaustive
def test_stacked_trials_start_on_two_cores_with_the_parameters_of_each_alone():
    environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", STACKED_INIT], env=environment, timeout=120, check=True)


def test_unknown_features_are_an_error():
    config = feature_based.get_config()
    config.features = "first"
    with pytest.raises(ValueError, match="features is 'first'"):
        task.get_task(config, None)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    directory = tmp_path_factory.mktemp("weights")
    tokenizer = load_tokenizer(write_vocabulary(directory / "vocab.txt"))
    config = small_model_config(tokenizer.vocab_size, num_layers=3, hidden_size=16)
    params = jax.jit(Encoder(config).init)(jax.random.key(1), example_batch())["params"]
    settings = model_settings(config, {"encoder": params})
    write_checkpoint(directory / "random" / "0", {"encoder": params}, settings, tokenizer)
    # Frozen, the embeddings of positions that short sentences do not reach would stay noise.
    params["embeddings"]["position_embedding"]["embedding"] *= 0
    write_checkpoint(directory / "frozen" / "0", {"encoder": params}, settings, tokenizer)
    return directory


@functools.cache
def weights_for(module, weights):
    return weights / ("frozen" if module is feature_based else "random")


def trained(module, weights, workdir):
    """A tagger that has memorized `TEXT`."""
    for name in ("train", "dev"):
        (workdir / f"{name}.txt").write_text(TEXT)
    config = module.get_config()
    config.data.train, config.data.dev = str(workdir / "train.txt"), str(workdir / "dev.txt")
    config.data.test = ""
    config.init_from = str(weights_for(module, weights))
    config.max_seq_length, config.batch_size, config.learning_rate = 16, 16, 1e-2
    config.num_epochs = 8.0
    if module is feature_based:
        config.lstm_size = 32
    result = finetune.train_and_evaluate(config, workdir / "run")
    return result, bert_jax.load(workdir / "run")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each, marks=pytest.mark.exhaustive) for each in (conll2003, feature_based)
    ],
)
def tagger(request, weights, tmp_path_factory):
    return request.param, *trained(request.param, weights, tmp_path_factory.mktemp("tagger"))


def test_a_tagger_learns_and_tags_text_of_any_length(tagger):
    _, result, model = tagger
    assert result["dev"]["f1"] == result["dev"]["f1/LOC"] == 1
    text = "The river built\tking found " * 30
    tagged = model.tag(text)
    assert [word.word for word in tagged.words] == text.split()
    assert [word.tag for word in tagged.words] == ["B-LOC", "I-LOC", "O", "B-PER", "O"] * 30
    assert len(tagged.entities) == 60
    for entity in tagged.entities:
        assert entity.text == text[entity.start : entity.end]
        assert entity.text in {"The river": "LOC", "king": "PER"}
    assert model.tag(tuple(text.split())).words == tagged.words
    assert model.tag("") == ([], [])


def test_a_list_of_texts_is_tagged_as_each_alone_with_probabilities(tagger):
    *_, model = tagger
    texts = ["The river built king", "", ("king", "found"), "the river " * 20]
    together = model.tag(texts)
    assert model.tag([["king", "found"]])[0].words[0].word == "king" and model.tag([]) == []
    for tagged, text in zip(together, texts, strict=True):
        alone = model.tag(text)
        assert [word[:2] for word in tagged.words] == [word[:2] for word in alone.words]
        probabilities = [word.probability for word in tagged.words]
        assert [word.probability for word in alone.words] == pytest.approx(probabilities, abs=1e-5)
        assert all(1 / 5 < value <= 1 for value in probabilities)  # The largest of five.
    (river, king), words = together[0].entities, together[0].words
    assert king.probability == pytest.approx(words[3].probability)
    assert river.probability == pytest.approx((words[0].probability + words[1].probability) / 2)


def test_frozen_encoder_does_not_change(tagger, weights):
    module, _, model = tagger
    before = bert_jax.load(weights_for(module, weights)).params["encoder"]
    after = model.params["encoder"]
    same = jax.tree.map(lambda a, b: bool((a == b).all()), before, after)
    assert all(jax.tree.leaves(same)) == (module is feature_based)


@pytest.mark.slow
@pytest.mark.parametrize("tagger", [feature_based], indirect=True)
def test_head_with_other_features_or_size_is_an_error(tagger):
    _, _, model = tagger
    assert "head" in initial_params(
        model.params, model.config, model.head, model.head, new_head=False
    )
    for change in ({"features": "last"}, {"lstm_size": 16}):
        ((name, value),) = change.items()
        with pytest.raises(ValueError, match=f"a head with {name}={model.head[name]}.* {value}:"):
            initial_params(
                model.params, model.config, model.head, model.head | change, new_head=False
            )
        params = initial_params(
            model.params, model.config, model.head, model.head | change, new_head=True
        )
        assert set(params) == {"encoder"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("tagger", [conll2003], indirect=True)
def test_head_for_tags_of_another_scheme_is_an_error(tagger, caplog):
    _, _, model = tagger
    for name, value in (("scheme", "iob1"), ("document_context", True)):
        message = f"a head with {name}={model.head[name]}, .* {value}: .*config.data.{name}="
        with pytest.raises(ValueError, match=message):
            initial_params(
                model.params, model.config, model.head, model.head | {name: value}, new_head=False
            )
    # A head that does not record its scheme is assumed to have the configuration's scheme.
    without_scheme = {name: model.head[name] for name in ("task", "labels")}
    assert "head" in initial_params(
        model.params, model.config, without_scheme, model.head, new_head=False
    )
    assert "assuming config.data.scheme=iob2" in caplog.text


@pytest.mark.slow
def test_model_without_a_tagging_head_is_an_error(weights):
    with pytest.raises(ValueError, match="cannot tag words"):
        bert_jax.load(weights / "random").tag("the king")
