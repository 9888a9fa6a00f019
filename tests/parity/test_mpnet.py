"""MPNet against transformers in rows longer than its nearest buckets, and its attention maps."""

import numpy as np
import pytest

import bert_jax
from bert_jax.model.mpnet import bucket_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PIECES = ["<s>", "<pad>", "</s>", "[UNK]", "<mask>", *(f"w{index}" for index in range(56))]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A random model of transformers, and the same read here."""
    torch.manual_seed(0)
    config = transformers.MPNetConfig(
        vocab_size=61,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=40,
        max_position_embeddings=1002,
        attn_implementation="eager",
    )
    model = transformers.MPNetModel(config).eval()
    for name, parameter in model.named_parameters():
        std = 1.0 if "relative" in name else 0.3
        torch.nn.init.normal_(parameter, std=std)
    directory = tmp_path_factory.mktemp("mpnet")
    model.save_pretrained(directory)
    (directory / "vocab.txt").write_text("\n".join(PIECES))
    return model, bert_jax.load(directory)


def test_buckets_equal_transformers():
    distances = np.arange(-1100, 1101)
    encoder = transformers.models.mpnet.modeling_mpnet.MPNetEncoder
    expected = encoder.relative_position_bucket(torch.tensor(distances)).numpy()
    np.testing.assert_array_equal(bucket_of(distances), expected)


@pytest.mark.parametrize("num_words", [3, 300, 900])
def test_hidden_states_and_attention_of_long_texts_equal_transformers(num_words, models):
    """The longest text is read by blocks."""
    theirs, ours = models
    rng = np.random.default_rng(0)
    text = " ".join(f"w{index}" for index in rng.integers(0, 56, num_words))
    tokens = torch.tensor(ours.batch([text])["tokens"])
    assert tokens.shape == (1, num_words + 2)
    with torch.no_grad():
        expected = theirs(tokens, output_attentions=True)
    states = ours.hidden_states(text, layers=-1)[:, 0]
    np.testing.assert_allclose(states, expected.last_hidden_state[0].numpy(), atol=1e-5)
    if num_words < 512:
        maps = ours.attention(text).probabilities
        for found, exact in zip(maps, expected.attentions, strict=True):
            np.testing.assert_allclose(found, exact[0].numpy(), atol=1e-5)
