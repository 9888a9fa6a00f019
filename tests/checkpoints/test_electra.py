"""Checkpoints of ELECTRA: the discriminator, its head in Python, and the generator."""

import flax
import jax
import numpy as np
import pytest

import bert_jax
from bert_jax.checkpoints.export import params_to_huggingface
from bert_jax.checkpoints.native import write_checkpoint
from bert_jax.checkpoints.parameters import model_settings
from bert_jax.checkpoints.read import generator_of, read_model
from bert_jax.model.execution import ExecutionPlan
from bert_jax.objectives.replaced_tokens import GeneratorSettings, ReplacedTokenModel
from bert_jax.tokenizers.tokenizer import load_tokenizer
from bert_jax.tools.convert_checkpoint import convert
from tests.helpers.corpora import write_vocabulary
from tests.helpers.models import example_batch, small_model_config

GENERATOR = {
    "hidden_fraction": 0.5,
    "num_layers": None,
    "ties_embeddings": True,
    "discriminator_weight": 50.0,
}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A checkpoint as a run writes it, with random parameters."""
    directory = tmp_path_factory.mktemp("electra")
    tokenizer = load_tokenizer(write_vocabulary(directory / "vocab.txt"))
    config = small_model_config(tokenizer.vocab_size, family="electra", embedding_size=24)
    model = ReplacedTokenModel(config, ExecutionPlan(), GeneratorSettings(**GENERATOR))
    shapes = jax.eval_shape(model.init, jax.random.key(0), example_batch())["params"]
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.5, leaf.shape).astype(np.float32), shapes)
    settings = model_settings(config, params) | {"generator": GENERATOR}
    write_checkpoint(directory / "1", params, settings, tokenizer)
    return directory / "1"


@pytest.mark.slow
def test_a_discriminator_predicts_which_tokens_were_replaced(workdir):
    model = bert_jax.load(workdir)
    assert "head for replaced tokens" in repr(model)
    one, longer = model.replaced_tokens(["the river", "king of the war road"])
    assert one.tokens == ["[CLS]", "the", "river", "[SEP]"]
    assert one.probabilities.shape == (4,) and longer.probabilities.shape == (7,)
    logits = model.module.apply({"params": model.params}, model.batch("the river"))[0]
    np.testing.assert_allclose(one.probabilities, 1 / (1 + np.exp(-logits)), rtol=1e-4)
    np.testing.assert_allclose(model.replaced_tokens("the river")[1], one[1], rtol=1e-4)


@pytest.mark.slow
def test_a_discriminator_that_is_asked_to_fill_masks_names_the_generator(workdir, tmp_path):
    with pytest.raises(ValueError, match=r"convert_checkpoint.py --to=native --generator .* DST"):
        bert_jax.load(workdir).fill_mask("the [MASK]")
    convert(workdir, tmp_path / "discriminator", "huggingface")
    with pytest.raises(ValueError, match="load the checkpoint of the generator"):
        bert_jax.load(tmp_path / "discriminator").fill_mask("the [MASK]")


def test_its_head_is_written_and_read(workdir, tmp_path, capsys):
    convert(workdir, tmp_path / "discriminator", "huggingface")
    assert "Writing the discriminator; --generator writes the gen" in capsys.readouterr().out
    model = read_model(tmp_path / "discriminator")
    assert set(model.params) == {"encoder", "discriminator"} and not model.report.unused
    expected = read_model(workdir).params
    assert (
        set(model.report.missing)
        & set(
            params_to_huggingface(
                {name: expected[name] for name in model.params}, bert_jax.load(workdir).config
            )
        )
        == set()
    )
    for name in model.params:
        assert_equal_trees(model.params[name], expected[name])


@pytest.mark.parametrize("target_format", ["native", "huggingface"])
def test_the_generator_is_written_with_the_embeddings_that_it_shares(
    workdir, tmp_path, target_format
):
    convert(workdir, tmp_path / "generator", target_format, generator=True)
    model, trained = bert_jax.load(tmp_path / "generator"), read_model(workdir).params
    assert set(model.params) == {"encoder", "mlm"} and model.config.hidden_size == 16
    assert_equal_trees(model.params["mlm"], trained["generator"]["mlm"])
    embeddings = dict(model.params["encoder"]["embeddings"])
    shared = {
        name: x for name, x in trained["encoder"]["embeddings"].items() if name != "projection"
    }
    own = trained["generator"]["encoder"]["embeddings"]
    assert_equal_trees(embeddings, shared | own)
    assert len(model.fill_mask("the [MASK] river", top_k=3)) == 3
    with pytest.raises(ValueError, match="no head for replaced tokens"):
        model.replaced_tokens("the river")
    with pytest.raises(ValueError, match="the weights have no generator"):
        generator_of(read_model(tmp_path / "generator"))


def assert_equal_trees(tree, expected):
    tree, expected = (flax.traverse_util.flatten_dict(each, sep="/") for each in (tree, expected))
    assert tree.keys() == expected.keys()
    for path, leaf in tree.items():
        if leaf.shape[:1] == (128,):  # Vocabulary padding is not written.
            leaf, expected[path] = leaf[:34], expected[path][:34]
        np.testing.assert_array_equal(leaf, expected[path], err_msg=path)
