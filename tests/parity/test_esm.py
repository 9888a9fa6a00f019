"""ESM against transformers: masks, long proteins, files of earlier versions, and its tokenizer."""

import json
import random

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bert_jax
from bert_jax.checkpoints.export import save_huggingface
from bert_jax.data.features import make_sequence
from bert_jax.inference.masked_text import tokenize_masked
from bert_jax.tokenizers.export import transformers_files
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.golden import make_tokenization as golden
from tests.helpers.corpora import store_tokenizer, write_esm_vocabulary

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

NUM_TEXTS = 10_000
LETTERS = "LAGVSERTIDPKQNFYMHWCXBUZO.-"
SIZES = {
    "vocab_size": 33,
    "pad_token_id": 1,
    "mask_token_id": 32,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 1002,
    "token_dropout": True,
    "attn_implementation": "eager",
}
KINDS = ("rotary", "absolute")


@pytest.fixture(scope="module", params=KINDS)
def models(request, tmp_path_factory):
    """A random model of transformers, the same read here, and its directory."""
    torch.manual_seed(0)
    config = transformers.EsmConfig(**SIZES, position_embedding_type=request.param)
    model = transformers.EsmForMaskedLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    write_esm_vocabulary(directory)
    return model, bert_jax.load(directory), directory


def protein(length: int, seed: int = 0) -> str:
    return "".join(random.Random(seed).choices(LETTERS[:20], k=length))


@pytest.mark.parametrize("length", [3, 300, 900])
def test_hidden_states_and_attention_of_proteins_equal_transformers(length, models):
    """The longest is read by blocks."""
    theirs, ours, _ = models
    text = protein(length)
    tokens = torch.tensor(ours.batch([text])["tokens"])
    assert tokens.shape == (1, length + 2)
    with torch.no_grad():
        expected = theirs.esm(tokens, output_attentions=True)
    states = ours.hidden_states(text, layers=-1)[:, 0]
    np.testing.assert_allclose(states, expected.last_hidden_state[0].numpy(), atol=1e-5)
    if length < 512:
        maps = ours.attention(text).probabilities
        for found, exact in zip(maps, expected.attentions, strict=True):
            np.testing.assert_allclose(found, exact[0].numpy(), atol=1e-5)


def test_masks_are_filled_as_transformers_fills_them(models):
    """Other tokens are scaled by how many are masks."""
    theirs, ours, _ = models
    text = "MK<mask>LLV<mask><mask>G"
    tokens = torch.tensor([tokenize_masked(text, ours.tokenizer)])
    assert tokens.tolist()[0].count(32) == 3
    with torch.no_grad():
        expected = torch.softmax(theirs(tokens).logits[0], -1).numpy()[tokens[0] == 32]
    for fills, exact in zip(ours.fill_mask(text, top_k=33), expected, strict=True):
        for fill in fills:
            index = ours.tokenizer.token_to_id(fill.token)
            assert abs(fill.probability - exact[index]) < 1e-5


@pytest.mark.parametrize("models", ["rotary"], indirect=True)
def test_frequencies_of_each_layer_in_older_files_are_read(models, tmp_path):
    """transformers 4 stored them so; released ones are rounded, which changes long proteins."""
    _, _, directory = models
    tensors = load_file(directory / "model.safetensors")
    (name,) = (name for name in tensors if name.endswith("inv_freq"))
    values = tensors.pop(name).astype(np.float16).astype(np.float32)
    for layer in range(2):
        name = f"esm.encoder.layer.{layer}.attention.self.rotary_embeddings.inv_freq"
        tensors[name] = values.copy()
    # Released files also have a table of positions that is not used.
    tensors["esm.embeddings.position_embeddings.weight"] = np.ones((1002, 24), np.float32)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for name in ("config.json", "vocab.txt", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    older = transformers.EsmForMaskedLM.from_pretrained(tmp_path).eval()
    ours, text = bert_jax.load(tmp_path), protein(300)
    with torch.no_grad():
        expected = older.esm(torch.tensor(ours.batch([text])["tokens"])).last_hidden_state[0]
    states = ours.hidden_states(text, layers=-1)[:, 0]
    np.testing.assert_allclose(states, expected.numpy(), atol=1e-5)
    save_huggingface(tmp_path / "out", ours.params, ours.settings, ours.tokenizer)
    written = load_file(tmp_path / "out/model.safetensors")["esm.rotary_embeddings.inv_freq"]
    np.testing.assert_array_equal(written, values)


def random_texts() -> list[str]:
    """Returns proteins, with any other characters here and there, and texts of other kinds."""
    rng = random.Random(1)
    texts = golden.CASES + [golden.random_text(rng) for _ in range(2000)]
    while len(texts) < NUM_TEXTS:
        text = "".join(rng.choices(LETTERS, k=rng.randint(0, 60)))
        for _ in range(rng.randint(0, 4)):
            place = rng.randint(0, len(text))
            other = rng.choice(["j", " ", "  ", "<", "\x1c", "\xa0", "é", "<null_1>", "ab", "\n"])
            text = text[:place] + other + text[place:]
        texts.append(text)
    # transformers recognizes the special tokens in a text; we do not.
    for name in ("cls", "pad", "eos", "unk", "mask"):
        texts = [text.replace(f"<{name}>", name) for text in texts]
    return texts


def test_token_ids_equal_transformers(tmp_path):
    write_esm_vocabulary(tmp_path / "esm")
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "esm")
    assert type(reference).__name__ == "EsmTokenizer"
    ours, texts = load_tokenizer(tmp_path / "esm"), random_texts()
    assert ours.vocab_size == len(reference) == 33
    ids = ours.encode_batch(texts)
    expected = [reference(text, add_special_tokens=False)["input_ids"] for text in texts]
    different = [t for t, a, b in zip(texts, ids, expected, strict=True) if a != b]
    assert not different, f"{len(different)} of {len(texts)} differ, first: {different[0]!r}"
    assert store_tokenizer(ours, tmp_path / "stored").encode_batch(texts) == ids
    for directory in (tmp_path / "esm", tmp_path / "exported"):
        if directory.name == "exported":
            directory.mkdir()
            for name, content in transformers_files(ours.stored, 1024).items():
                text = content if isinstance(content, str) else json.dumps(content)
                (directory / name).write_text(text)
            reference = transformers.AutoTokenizer.from_pretrained(directory)
            assert type(reference).__name__ == "EsmTokenizer"
        for first, second in zip(texts[:500], texts[500:1000], strict=True):
            one, other = ours.encode(first), ours.encode(second)
            assert make_sequence(ours, one)[0].tolist() == reference(first)["input_ids"]
            pair = reference(first, second)
            assert make_sequence(ours, one, other)[0].tolist() == pair["input_ids"]
    for index in range(33):
        assert ours.decode([index]) == reference.decode([index])
    for text in ("MK<mask>L", "M <mask> <mask>K", "<mask>"):
        assert tokenize_masked(text, ours) == reference(text)["input_ids"]
