"""A state dict in transformers' names becomes the parameter tree it stands for."""

import json
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bert_jax.inference import load
from bert_jax.interop.huggingface import (
    HEAD_KEY,
    config_from_huggingface,
    head_from_huggingface,
    huggingface_name,
    params_from_huggingface,
    save_huggingface,
)
from bert_jax.interop.parameters import LoadReport, parameter_shapes, surprising_tensors
from bert_jax.interop.read import read_model
from bert_jax.model.bert import BertForPreTraining
from bert_jax.model.config import BertConfig
from bert_jax.tokenization import tokenizer_from_bytes
from bert_jax.training.checkpoint import CheckpointError, write_checkpoint
from tests.helpers import CONFIG, PIECES, VALUES, assert_same, flat, linear, state_dict

CLASSIFIER = "BertForSequenceClassification"
QUERY = "bert.encoder.layer.1.attention.self.query.weight"


def test_each_parameter_holds_the_tensor_of_its_name_and_nothing_is_left_over():
    tensors = state_dict()
    params, report = params_from_huggingface(tensors, CONFIG)
    assert sorted(report.loaded) == sorted(tensors)
    assert report.missing == report.unused == ()
    assert {path: value.shape for path, value in flat(params).items()} == parameter_shapes(CONFIG)
    # Back again, by hand: unstack, drop the rows of padding, transpose.
    back = {}
    for path, value in flat(params).items():
        assert value.dtype == np.float32
        name = huggingface_name(path)
        for layer, piece in enumerate(value if "{layer}" in name else [value]):
            piece = piece.T if path.endswith("kernel") else piece
            back[name.format(layer=layer)] = piece[:131] if piece.shape[0] == 256 else piece
    assert back.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(back[name], value.astype(np.float32), err_msg=name)


def test_rows_that_pad_the_vocabulary_are_zero():
    params, _ = params_from_huggingface(state_dict(), CONFIG)
    assert params["bert"]["embeddings"]["token_embedding"].shape == (256, 12)
    assert not params["bert"]["embeddings"]["token_embedding"][131:].any()
    assert not params["mlm"]["bias"][131:].any()


def test_the_model_takes_the_parameters():
    params, _ = params_from_huggingface(state_dict(), CONFIG)
    ids = jnp.zeros((2, 9), jnp.int32)
    mlm_logits, nsp_logits = BertForPreTraining(CONFIG).apply({"params": params}, *[ids] * 6)
    assert mlm_logits.shape == (2, 9, 256)
    assert nsp_logits.shape == (2, 9, 2)


def test_a_bare_model_has_no_prefix_and_its_heads_are_reported_missing():
    whole = state_dict()
    bare = {
        name.removeprefix("bert."): value
        for name, value in whole.items()
        if name.startswith("bert.") and "pooler" not in name
    }
    bare["embeddings.position_ids"] = np.arange(9)[None]
    params, report = params_from_huggingface(bare, CONFIG)
    assert report.unused == ("embeddings.position_ids",)
    assert set(report.missing) == {n for n in whole if n.startswith(("cls.", "bert.pooler."))}
    expected, _ = params_from_huggingface(whole, CONFIG)
    assert params.keys() == {"bert"}
    del expected["bert"]["pooler"]
    assert_same(params["bert"], expected["bert"])


def test_names_of_old_checkpoints_and_copies_of_tied_tensors_are_known():
    tensors = state_dict()
    expected, _ = params_from_huggingface(tensors, CONFIG)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("Norm.bias", "Norm.beta"): value
        for name, value in tensors.items()
    }
    old["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
    old["cls.predictions.decoder.bias"] = old.pop("cls.predictions.bias")
    params, report = params_from_huggingface(old, CONFIG)
    assert report.missing == report.unused == ()
    assert_same(params, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({QUERY: None}, rf"{QUERY}: expected shape \(12, 12\), found no such tensor"),
        ({QUERY: np.zeros((12, 6))}, rf"{QUERY}: expected shape \(12, 12\), found \(12, 6\)"),
        (
            {"bert.encoder.layer.0.intermediate.dense.weight": np.zeros((12, 20))},
            r"intermediate.dense.weight: expected shape \(20, 12\), found \(12, 20\)",
        ),
        ({"bert.pooler.dense.bias": None}, "bert.pooler.dense.bias: .* found no such tensor"),
        (
            {"bert.embeddings.word_embeddings.weight": np.zeros((130, 12))},
            r"word_embeddings.weight: expected shape \(131, 12\), found \(130, 12\)",
        ),
        ({"embeddings.LayerNorm.bias": np.zeros(12)}, "bert.embeddings.LayerNorm.bias: .* twice"),
        ({"cls.predictions.decoder.weight": np.zeros((131, 12))}, "expected a copy of bert.emb"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_tensor_is_named_with_what_was_expected_and_found(change, message):
    tensors = {name: value for name, value in (state_dict() | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        params_from_huggingface(tensors, CONFIG)


def test_config_is_read_and_its_defaults_are_bert_base():
    assert config_from_huggingface(VALUES) == CONFIG
    assert config_from_huggingface({"model_type": "bert"}) == BertConfig()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "roberta"}, "model_type is 'roberta', and only 'bert'"),
        ({"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new', and only 'gelu'"),
        ({"position_embedding_type": "relative_key"}, "only 'absolute' is supported"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"hidden_size": "32"}, "a value of another type than BERT's"),
        ({"attention_probs_dropout_prob": 0.2}, r"differ \(\[0.1, 0.2\]\)"),
    ],
)
def test_another_architecture_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_huggingface(VALUES | change)


def write_directory(directory, tensors, pieces=PIECES, **values):
    """As `save_pretrained` writes it."""
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(VALUES | values))
    (directory / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    return directory


def of_task(module: str, outputs: int, pooler: bool) -> dict[str, np.ndarray]:
    encoder = {n: v for n, v in state_dict().items() if n.startswith("bert.")}
    kept = {n: v for n, v in encoder.items() if pooler or "pooler" not in n}
    return kept | linear(np.random.default_rng(1), module, 12, outputs)


@pytest.mark.parametrize(
    ("architecture", "tensors", "labels", "head"),
    [
        ("BertForPreTraining", state_dict(), {}, None),
        (
            "BertForSequenceClassification",
            of_task("classifier", 3, True),
            {"0": "no", "1": "maybe", "2": "yes"},
            {"task": "classification", "labels": ["no", "maybe", "yes"]},
        ),
        (
            "BertForSequenceClassification",
            of_task("classifier", 1, True),
            {"0": "similarity"},
            {"task": "regression", "labels": ["similarity"]},
        ),
        (
            "BertForTokenClassification",
            of_task("classifier", 2, False),
            {},
            {"task": "tagging", "labels": ["LABEL_0", "LABEL_1"]},
        ),
        (
            "BertForQuestionAnswering",
            of_task("qa_outputs", 2, False),
            {},
            {"task": "span", "labels": ["start", "end"]},
        ),
        (
            "BertForMultipleChoice",
            of_task("classifier", 1, True),
            {},
            {"task": "multiple_choice", "labels": ["score"]},
        ),
    ],
)
def test_a_directory_there_and_back_is_the_same(architecture, tensors, labels, head, tmp_path):
    tensors = {name: value.astype(np.float32) for name, value in tensors.items()}
    kind = {"architectures": [architecture]} | ({"id2label": labels} if labels else {})
    model = read_model(write_directory(tmp_path / "theirs", tensors, **kind))
    assert sorted(model.report.loaded) == sorted(tensors) and not model.report.unused
    assert model.settings.get("head") == head
    write_checkpoint(tmp_path / "native", *model[:3])
    native = read_model(tmp_path / "native")
    assert_same(native.params, model.params)
    save_huggingface(tmp_path / "back", *native[:3])
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(back[name], value, err_msg=name)
    values = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {**values, **VALUES, **kind} == values
    again = read_model(tmp_path / "back")
    assert again.settings == model.settings
    assert again.tokenizer.sha256 == model.tokenizer.sha256


def test_head_that_the_file_has_no_more_is_left_out_with_a_warning():
    plain, of_texts = ({"architectures": [name]} for name in ("BertModel", CLASSIFIER))
    classifier = {"task": "classification", "labels": ["LABEL_0", "LABEL_1"]}
    encoder = {"task": "embedding", "labels": [], "pooling": "cls"}
    ours = classifier | {"max_seq_length": 8}
    assert head_from_huggingface(of_texts | {HEAD_KEY: ours}) == ours
    assert head_from_huggingface(plain | {HEAD_KEY: encoder}) == encoder
    with pytest.warns(UserWarning, match=f"{HEAD_KEY} is left out, .* encoder without a head"):
        assert head_from_huggingface(plain | {HEAD_KEY: ours}) is None
    for other in (encoder, ours | {"labels": ["no", "yes"]}, "text"):
        with pytest.warns(UserWarning, match=f"{HEAD_KEY} is left out, .* for classification"):
            assert head_from_huggingface(of_texts | {HEAD_KEY: other}) == classifier


def test_bfloat16_is_read_and_a_dtype_that_cannot_be_is_named_with_its_tensor(tmp_path):
    rounded = {name: value.astype(jnp.bfloat16) for name, value in state_dict().items()}
    path = write_directory(tmp_path, rounded) / "model.safetensors"
    assert_same(read_model(tmp_path).params, params_from_huggingface(rounded, CONFIG)[0])
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header[QUERY] |= {"dtype": "F8_E4M3", "shape": [24, 12]}
    header = json.dumps(header).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    with pytest.raises(ValueError, match=rf"tensor {QUERY}: its dtype F8_E4M3 cannot be read"):
        read_model(tmp_path)


def test_a_bare_model_is_written_without_prefix_and_takes_no_masks(tmp_path):
    tensors = {n: v for n, v in state_dict().items() if n.startswith("bert.")}
    model = read_model(write_directory(tmp_path / "theirs", tensors))
    assert model.settings["absent"] == ["mlm", "nsp"]
    save_huggingface(tmp_path / "back", *model[:3])
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == {name.removeprefix("bert.") for name in tensors}
    with pytest.raises(ValueError, match="this model has no masked-LM head"):
        load(tmp_path / "back").fill_mask("w1 [MASK]")


def test_a_head_that_no_architecture_names_is_unused(tmp_path):
    model = read_model(write_directory(tmp_path, of_task("classifier", 3, True)))
    assert model.report.unused == ("classifier.bias", "classifier.weight")
    with pytest.warns(UserWarning, match="2 tensors are unused, such as classifier.bias"):
        load(tmp_path)


def test_load_tells_of_a_head_without_tensors_and_not_of_what_a_model_does_without(tmp_path):
    encoder = {n: v for n, v in state_dict().items() if n.startswith("bert.")}
    encoder["bert.embeddings.position_ids"] = np.arange(9)[None]
    write_directory(tmp_path, encoder)
    with warnings.catch_warnings(action="error"):
        load(tmp_path)
    write_directory(tmp_path, encoder, architectures=[CLASSIFIER])
    with pytest.warns(UserWarning, match="2 tensors are missing, such as classifier.bias"):
        assert load(tmp_path).head is None
    slots = ("global_step", "bert/pooler/dense/kernel/adam_m", "cls/predictions/output_bias/adam_v")
    assert surprising_tensors(LoadReport((), ("cls/predictions/output_bias",), slots)) == ""


def test_vocabulary_comes_from_tokenizer_json_too(tmp_path):
    write_directory(tmp_path, state_dict())
    (tmp_path / "vocab.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither vocab.txt nor tokenizer.json"):
        read_model(tmp_path)
    values = {
        "model": {"type": "WordPiece", "vocab": {p: i for i, p in enumerate(PIECES[:-1])}},
        "added_tokens": [{"content": PIECES[-1], "id": 130}, {"content": "[PAD]", "id": 0}],
        "normalizer": {"lowercase": True},
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(values))
    tokenizer = read_model(tmp_path).tokenizer
    assert [tokenizer.id_to_token(index) for index in range(131)] == PIECES
    path.write_text(json.dumps(values | {"normalizer": {"lowercase": False}}))
    with pytest.warns(UserWarning, match="do_lower_case=False, but text will be lower-cased"):
        read_model(tmp_path)
    path.write_text(json.dumps(values | {"normalizer": {"strip_accents": False}}))
    with pytest.warns(UserWarning, match="say strip_accents=False, but .* without accents"):
        read_model(tmp_path)
    values["added_tokens"][0]["id"] = 131
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="each id from 0 to 130 once"):
        read_model(tmp_path)
    path.write_text(json.dumps({"model": {"type": "BPE"}}))
    with pytest.raises(ValueError, match="is 'BPE', and only 'WordPiece'"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (
            lambda path: write_directory(path, state_dict(), PIECES[:-1]),
            ValueError,
            r"has 130 pieces, expected 131 \(vocab_size\)",
        ),
        (
            lambda path: write_directory(path, state_dict(num_layers=1)),
            ValueError,
            "layer.1.attention.output.LayerNorm.bias: expected .* found no such tensor",
        ),
        (
            lambda path: write_directory(
                path,
                of_task("classifier", 3, True),
                architectures=["BertForSequenceClassification"],
            ),
            ValueError,
            r"classifier.weight: expected shape \(2, 12\), found \(3, 12\)",
        ),
        (
            lambda path: write_directory(
                path,
                of_task("classifier", 2, True),
                architectures=["BertForSequenceClassification"],
                problem_type="multi_label_classification",
            ),
            ValueError,
            "problem_type is 'multi_label_classification' with 2 labels.*remove `architectures`",
        ),
        (
            lambda path: write_directory(
                path,
                of_task("classifier", 2, False),
                architectures=["BertForSequenceClassification"],
            ),
            ValueError,
            "a head for classification, but no pooler, which it reads",
        ),
        (
            lambda path: (path / "model.safetensors").write_bytes(b"no"),
            ValueError,
            "model.safetensors is not intact",
        ),
        (
            lambda path: (path / "config.json").write_text("{"),
            ValueError,
            "config.json is not JSON",
        ),
        (
            lambda path: (path / "config.json").write_text("[]"),
            ValueError,
            "expected a JSON object",
        ),
        (lambda path: (path / "config.json").unlink(), FileNotFoundError, "config.json"),
    ],
)
def test_a_spoiled_directory_is_a_clear_error(spoil, error, message, tmp_path):
    spoil(write_directory(tmp_path, state_dict()))
    with pytest.raises(error, match=message):
        read_model(tmp_path)


def test_pickled_weights_without_torch_name_what_to_install(tmp_path, monkeypatch):
    write_directory(tmp_path, state_dict())
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(ImportError, match=r"torch only: pip install torch, or put a model.safe"):
        read_model(tmp_path)


def test_sentencepiece_is_not_exported_and_what_exists_is_not_overwritten(tmp_path):
    model = read_model(write_directory(tmp_path, state_dict()))
    tokenizer = tokenizer_from_bytes("vocab.txt", model.tokenizer.content)
    tokenizer.filename = "spiece.model"
    with pytest.raises(ValueError, match="takes WordPiece only"):
        save_huggingface(tmp_path / "out", model.params, model.settings, tokenizer)
    assert not (tmp_path / "out").exists()
    for write in (save_huggingface, write_checkpoint):
        with pytest.raises((FileExistsError, CheckpointError), match="exist"):
            write(tmp_path, *model[:3])
