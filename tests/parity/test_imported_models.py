"""Imported tokenizers and models of sentence-transformers against their libraries."""

import json
import random

import numpy as np
import pytest

import bert_jax
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.golden import make_tokenization as golden
from tests.helpers.corpora import store_tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

NUM_TEXTS = 10_000
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ADDED = ("[E1]", "[/E1]", "<URL>", "covid", "New York")
TEXTS = ("the boat crossed the river.", "A short one", "the old king of the village " * 8)


@pytest.fixture(scope="module")
def texts():
    rng = random.Random(2)
    texts = [golden.random_text(rng) for _ in range(NUM_TEXTS - len(golden.CASES))] + golden.CASES
    # transformers recognizes the special tokens in a text; we do not, as the released code.
    for index, text in enumerate(texts):
        for token in SPECIAL:
            text = text.replace(token, token.strip("[]"))
        if rng.random() < 0.2:
            text = f"{text}{rng.choice([*ADDED, 'covid-19', 'NEW YORK', '<url>'])} {text[:4]}"
        texts[index] = text
    return texts


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize(
    ("options", "added"),
    [
        ({"do_lower_case": True}, False),
        ({"do_lower_case": False}, False),
        ({"do_lower_case": True, "strip_accents": False}, False),
        ({"do_lower_case": True}, True),
        ({"do_lower_case": False, "tokenize_chinese_chars": False}, True),
    ],
)
def test_ids_of_imported_tokenizers_equal_transformers(options, added, saved, texts, tmp_path):
    """`saved`: as transformers saves it (tokenizer.json), or in the older files."""
    vocabulary = golden.train_vocabulary(texts[:4000], options["do_lower_case"], size=12_000)
    vocabulary = [piece for piece in vocabulary if piece not in ADDED]
    source = tmp_path / "source"
    source.mkdir()
    (source / "vocab.txt").write_text("".join(f"{piece}\n" for piece in vocabulary))
    (source / "tokenizer_config.json").write_text(json.dumps(options))
    (source / "config.json").write_text('{"model_type": "bert"}')
    if added and not saved:
        ids = {token: len(vocabulary) + index for index, token in enumerate(ADDED)}
        (source / "added_tokens.json").write_text(json.dumps(ids))
    reference = transformers.AutoTokenizer.from_pretrained(source)
    if saved:
        if added:
            reference.add_tokens(list(ADDED[:3]))
            reference.add_special_tokens({"additional_special_tokens": list(ADDED[3:])})
        reference.save_pretrained(tmp_path / "saved")
        (tmp_path / "saved" / "config.json").write_text('{"model_type": "bert"}')
    ours = load_tokenizer(tmp_path / "saved" if saved else source)
    expected = reference(texts, add_special_tokens=False, verbose=False)["input_ids"]
    for tokenizer in (ours, store_tokenizer(ours, tmp_path / "stored")):
        actual = tokenizer.encode_batch(texts)
        different = [t for t, a, b in zip(texts, actual, expected, strict=True) if a != list(b)]
        assert not different, f"{len(different)} of {NUM_TEXTS} differ, first: {different[0]!r}"
    assert ours.lower_case == options["do_lower_case"]
    counts = np.bincount(np.concatenate(actual).astype(int), minlength=ours.vocab_size)
    assert not added or counts[len(vocabulary) :].all()


@pytest.mark.parametrize(
    ("named", "has_mask"),
    [
        ({"eos_token": "<b>", "bos_token": "<a>"}, True),
        ({"own_token": "<a>", "additional_special_tokens": ["<b>"], "eos_token": "<c>"}, True),
        ({"extra_special_tokens": {"own_token": "<a>"}, "bos_token": "[CLS]"}, True),
        ({"bos_token": "boat"}, True),
        ({"additional_special_tokens": ["<a>", "<b>"]}, False),
    ],
)
def test_ids_of_tokens_that_are_only_named_equal_transformers(named, has_mask, tmp_path):
    pieces = [*SPECIAL, "the", "boat", "##s", "a", "b", "c", "<", ">"]
    pieces = [piece for piece in pieces if has_mask or piece != "[MASK]"]
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True} | named))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    for text in ("the <a> boats <b>", "<c><b> boat<a>", "The Boats, boat boats"):
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]


def random_bert(directory, **config):
    """Writes a random encoder of transformers with its tokenizer."""
    words = sorted({word for text in TEXTS for word in text.lower().replace(".", "").split()})
    directory.mkdir()
    pieces = [*SPECIAL, ".", *words]
    (directory / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": 64, "vocab_size": len(pieces)}
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**sizes | config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    transformers.BertTokenizer(str(directory / "vocab.txt")).save_pretrained(directory)
    return model


POOLINGS = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]


@pytest.mark.parametrize("poolings", [*[[name] for name in POOLINGS], ["mean", "cls"], POOLINGS])
@pytest.mark.parametrize("kind", ["plain", "normalized", "dense"])
def test_vectors_equal_sentence_transformers(poolings, kind, tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Dense, Normalize, Pooling, Transformer

    random_bert(tmp_path / "encoder")
    encoder = Transformer(str(tmp_path / "encoder"))
    encoder.max_seq_length = 16
    modules = [encoder, Pooling(32, pooling_mode=poolings)]
    if kind == "dense":
        activations = (torch.nn.Tanh(), torch.nn.GELU())
        sizes = (32 * len(poolings), 24, 8)
        for inputs, outputs, activation in zip(sizes[:-1], sizes[1:], activations, strict=True):
            modules.append(Dense(inputs, outputs, activation_function=activation))
    if kind != "plain":
        modules.append(Normalize())
    reference = SentenceTransformer(modules=modules, device="cpu")
    reference.save(str(tmp_path / "saved"))
    ours = bert_jax.load(tmp_path / "saved")
    with pytest.warns(UserWarning, match="1 of 3 texts are truncated to 16 tokens"):
        vectors = ours.encode(list(TEXTS))
    np.testing.assert_allclose(vectors, reference.encode(list(TEXTS)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("wrapper", ["state_dict", "model", None])
def test_weights_that_a_training_loop_saved_equal_transformers(wrapper, tmp_path):
    rates = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.1}
    model = random_bert(tmp_path / "m", vocab_size=100, **rates)
    (tmp_path / "m" / "model.safetensors").unlink()
    weights = {f"module.{name}": value for name, value in model.state_dict().items()}
    optimizer = {"state": {}, "param_groups": [{"lr": 0.1}]}
    content = {wrapper: weights, "optimizer": optimizer, "epoch": 3} if wrapper else weights
    torch.save(content, tmp_path / "m" / "pytorch_model.bin")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    ours = bert_jax.load(tmp_path / "m")
    with torch.no_grad():
        inputs = tokenizer([TEXTS[0]], return_tensors="pt")
        expected = model(**inputs).last_hidden_state[0].numpy()
    np.testing.assert_allclose(ours.features(TEXTS[0], layers=-1)[:, 0], expected, atol=1e-5)
    assert ours.config.attention_dropout_rate == 0.0 and ours.config.vocab_size == 100


def test_a_file_that_holds_no_weights_is_named(tmp_path):
    random_bert(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    torch.save({"epoch": 3, "optimizer": {}}, tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"holds the keys epoch, optimizer; expected a state dict"):
        bert_jax.load(tmp_path / "m")
