"""Imported and exported weights against transformers (`make parity`)."""

import copy
import os
import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file

import bert_jax
from bert_jax.checkpoints.export import save_huggingface
from bert_jax.checkpoints.native import write_checkpoint
from bert_jax.checkpoints.parameters import model_settings
from bert_jax.checkpoints.read import read_model
from bert_jax.data.features import unpack_rows
from bert_jax.model.architecture import config_from_settings
from bert_jax.model.encoder import EncoderModel
from bert_jax.model.heads import HEADS, make_model
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import write_vocabulary
from tests.helpers.models import (
    assert_trees_equal,
    example_batch,
    random_params,
    small_modernbert_config,
    small_mpnet_config,
    write_torch_model,
)

SENTENCES = [
    "The river rises in the mountains and flows north to the sea.",
    "",
    "Café, naïve, 北京, and an unbelievably-long-compound-word",
    "No.",
    "It is long. " * 40,
]


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("BertModel", {}),
        ("BertForPreTraining", {}),
        ("BertForMaskedLM", {}),
        ("BertForNextSentencePrediction", {}),
        ("BertForSequenceClassification", {"id2label": {0: "no", 1: "maybe", 2: "yes"}}),
        ("BertForSequenceClassification", {"num_labels": 1}),
        ("BertForTokenClassification", {"num_labels": 5}),
        ("BertForQuestionAnswering", {}),
        ("BertForMultipleChoice", {}),
    ],
)
def test_round_trip_keeps_all_tensors_and_logits(architecture, settings, tmp_path):
    import torch
    import transformers

    model = write_torch_model(tmp_path, architecture, **settings)
    native = read_model(tmp_path)
    assert not native.report.unused
    write_checkpoint(tmp_path / "native", *native[:3])
    back = tmp_path / "back"
    save_huggingface(back, *read_model(tmp_path / "native")[:3])
    ours, reference = (load_file(path / "model.safetensors") for path in (back, tmp_path))
    assert ours.keys() == reference.keys()
    for name, tensor in reference.items():
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)
    loaded, info = getattr(transformers, architecture).from_pretrained(
        back, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert loaded.config.id2label == model.config.id2label or "Multiple" in architecture
    ids = torch.randint(5, 40, (2, 3, 16) if "Multiple" in architecture else (2, 16))
    with torch.no_grad():
        # Copied because some of torch's rounding depends on memory alignment.
        outputs = [copy.deepcopy(each).eval()(ids).to_tuple() for each in (model, loaded)]
        assert all(torch.equal(one, two) for one, two in zip(*outputs, strict=True))
    tokenizer = transformers.BertTokenizer.from_pretrained(back)
    assert tokenizer("W3 [MASK] x")["input_ids"] == [2, 8, 4, 1, 3]


@pytest.mark.parametrize(
    "architecture",
    [
        "BertForSequenceClassification",
        "BertForTokenClassification",
        "BertForQuestionAnswering",
        "BertForMultipleChoice",
    ],
)
def test_logits_of_heads_equal_transformers_with_segments_and_padding(architecture, tmp_path):
    import torch

    labels = {"num_labels": 3} if architecture.endswith("Classification") else {}
    reference = write_torch_model(tmp_path, architecture, **labels)
    ours = read_model(tmp_path)
    head = ours.settings["head"]
    rng = np.random.default_rng(0)
    lengths, starts = np.array([16, 2, 9, 5, 12, 3]), np.array([7, 1, 9, 2, 11, 1])
    positions = np.arange(16)
    real = positions < lengths[:, None]
    tokens = np.where(real, rng.integers(5, 40, (6, 16)), 0).astype(np.int32)
    segments = (positions >= starts[:, None]) & real
    inputs = {"input_ids": tokens, "token_type_ids": segments, "attention_mask": real}
    if head["task"] == "multiple_choice":
        inputs = {name: value.reshape(2, 3, 16) for name, value in inputs.items()}
    with torch.no_grad():
        outputs = reference(**{name: torch.tensor(value).long() for name, value in inputs.items()})
    if head["task"] == "span":
        expected = np.stack([outputs.start_logits.numpy(), outputs.end_logits.numpy()], axis=-1)
    else:
        expected = outputs.logits.numpy()
    pairs = np.stack([np.zeros(6, int), starts, lengths], axis=-1)[:, None].astype(np.int32)
    model = make_model(config_from_settings(ours.settings), head)
    batch = unpack_rows({"tokens": tokens, "sequence_bounds": pairs})
    actual = model.apply({"params": ours.params}, batch)
    if HEADS[head["task"]].input_kind == "pooled":
        actual, expected = actual[:, 0], expected.reshape(6, -1)
    else:
        actual, expected = actual[real], expected[real]
    error = np.abs(actual - expected).max()
    print(f"{head['task']}: {error:.1e} of up to {np.abs(expected).max():.1f}")
    assert actual.shape == expected.shape and error < 1e-5


def test_pickled_weights_equal_safetensors(tmp_path):
    import torch

    model = write_torch_model(tmp_path, "BertForPreTraining")
    expected = read_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    actual = read_model(tmp_path)
    assert set(actual.report.loaded) > set(expected.report.loaded)  # Tied tensors are stored twice.
    assert_trees_equal(actual.params, expected.params)


@pytest.fixture(scope="module")
def minilm():
    if not (directory := os.environ.get("BERT_JAX_MINILM")):
        pytest.skip("BERT_JAX_MINILM is not set: `make parity` fetches the weights")
    return pathlib.Path(directory)


def test_encode_and_features_of_released_weights_equal_transformers(minilm):
    import torch
    import transformers

    tokenizer = transformers.BertTokenizer.from_pretrained(minilm)
    reference = transformers.BertModel.from_pretrained(minilm).eval()
    ours = bert_jax.load(minilm)
    actual = {
        pooling: ours.encode(SENTENCES, pooling, batch_size=2)
        for pooling in ("mean", "cls", "pooler")
    }
    features = ours.features(SENTENCES)
    for row, text in enumerate(SENTENCES):
        with torch.no_grad():
            inputs = tokenizer(text, return_tensors="pt")
            outputs = reference(**inputs, output_hidden_states=True)
        last = outputs.last_hidden_state[0]
        expected = {"mean": last.mean(0), "cls": last[0], "pooler": outputs.pooler_output[0]}
        for pooling, vector in expected.items():
            error = np.abs(actual[pooling][row] - vector.numpy()).max()
            print(f"{pooling} of {len(last)} tokens: {error:.1e}")
            assert error < 1e-5
        states = torch.stack(outputs.hidden_states[-4:], dim=2)[0].numpy()
        assert features[row].shape == states.shape
        assert np.abs(features[row] - states).max() < 1e-5


def test_attention_of_released_weights_equals_transformers(minilm):
    import torch
    import transformers

    tokenizer = transformers.BertTokenizer.from_pretrained(minilm)
    reference = transformers.BertModel.from_pretrained(minilm, attn_implementation="eager").eval()
    texts = ["A boat crossed the river.", "", "Rain fell on the old town. " * 30]
    for text, (tokens, probabilities) in zip(
        texts, bert_jax.load(minilm).attention(texts), strict=True
    ):
        inputs = tokenizer(text, return_tensors="pt")
        assert tokens == tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
        with torch.no_grad():
            expected = reference(**inputs, output_attentions=True).attentions
        np.testing.assert_allclose(probabilities, torch.cat(expected), atol=1e-5)


TORCH_TEXTS = ["w3 w1 w30", "", "w7 " * 8, "w2 w9 w11 w4"]


@pytest.mark.parametrize(
    ("task", "problem", "count"),
    [
        ("classification", "single_label_classification", 3),
        ("multi_label", "multi_label_classification", 3),
        ("regression", "regression", 1),
    ],
)
def test_pipeline_and_loss_of_an_exported_classifier_equal_ours(task, problem, count, tmp_path):
    import torch
    import transformers

    settings = {"num_labels": count, "problem_type": problem}
    write_torch_model(tmp_path, "BertForSequenceClassification", **settings)
    model = read_model(tmp_path)
    save_huggingface(tmp_path / "exported", *model[:3])
    ours = bert_jax.load(tmp_path / "exported")
    assert ours.head["task"] == task
    pipeline = transformers.pipeline(
        "text-classification", str(tmp_path / "exported"), top_k=None, device="cpu"
    )
    for text, actual in zip(TORCH_TEXTS, pipeline(TORCH_TEXTS), strict=True):
        expected = {"LABEL_0": ours.classify(text)}
        if task != "regression":
            expected = dict(ours.classify(text, top_k=count))
        scores = {each["label"]: each["score"] for each in actual}
        assert scores == pytest.approx(expected, abs=1e-6)

    rng = np.random.default_rng(0)
    labels = {
        "classification": rng.integers(0, count, 4),
        "multi_label": rng.integers(0, 2, (4, count)).astype(np.float32),
        "regression": rng.normal(size=4).astype(np.float32),
    }[task]
    with torch.no_grad():
        reference = pipeline.model(torch.randint(5, 40, (4, 16)), labels=torch.tensor(labels))
    loss = HEADS[task].loss(reference.logits.numpy()[:, None], {"labels": labels[:, None]})
    assert loss.mean() == pytest.approx(float(reference.loss), 1e-5)


@pytest.mark.parametrize(("pooling", "normalize"), [("mean", True), ("cls", False)])
def test_sentence_transformers_computes_the_vectors_of_a_bi_encoder(
    minilm, pooling, normalize, tmp_path
):
    from sentence_transformers import SentenceTransformer

    params, settings, tokenizer, _ = read_model(minilm)
    settings["head"] = {"task": "embedding", "labels": [], "max_seq_length": 64}
    settings["head"] |= {"pooling": pooling, "normalize": normalize}
    del params["encoder"]["pooler"]  # As in a fine-tuned one.
    save_huggingface(tmp_path / "out", params, settings, tokenizer)
    reference = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    with pytest.warns(UserWarning, match="1 of 5 texts are truncated to 64 tokens"):
        expected, actual = (
            reference.encode(SENTENCES),
            bert_jax.load(tmp_path / "out").encode(SENTENCES),
        )
    print(f"{pooling}: {np.abs(actual - expected).max():.1e} of up to {np.abs(expected).max():.1f}")
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    product = expected @ expected.T
    np.testing.assert_allclose(reference.similarity(expected, expected), product, atol=1e-4)


@pytest.mark.parametrize(("pooling", "normalize"), [("mean", True), ("cls", False)])
@pytest.mark.parametrize("make_config", [small_modernbert_config, small_mpnet_config])
def test_sentence_transformers_computes_the_vectors_of_other_architectures(
    make_config, pooling, normalize, tmp_path
):
    from sentence_transformers import SentenceTransformer

    pad_id = int(make_config is small_mpnet_config)
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt", pad_id=pad_id))
    config = make_config(tokenizer.vocab_size)
    head = {"task": "embedding", "labels": [], "max_seq_length": 32}
    head |= {"pooling": pooling, "normalize": normalize}
    params = random_params(EncoderModel(config), example_batch())
    settings = model_settings(config, params) | {"head": head}
    save_huggingface(tmp_path / "out", params, settings, tokenizer)
    texts = ["the old river", "a", "the road of the king and the city by the old river of a town"]
    expected = SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(texts)
    actual = bert_jax.load(tmp_path / "out").encode(texts)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(actual, expected, atol=1e-5, rtol=1e-5)


def test_sentence_transformers_computes_the_scores_of_a_cross_encoder(minilm, tmp_path):
    from sentence_transformers import CrossEncoder

    params, settings, tokenizer, _ = read_model(minilm)
    kernel = np.random.default_rng(0).normal(size=(384, 1)).astype(np.float32)
    params["head"] = {"kernel": kernel, "bias": np.float32([0.5])}
    settings["head"] = {"task": "multiple_choice", "labels": ["score"], "max_seq_length": 64}
    settings["head"]["max_query_length"] = 32
    save_huggingface(tmp_path / "out", params, settings, tokenizer)
    ranked = bert_jax.load(tmp_path / "out").rank(SENTENCES[0], SENTENCES[:4])
    reference = CrossEncoder(str(tmp_path / "out"), device="cpu")
    expected = reference.predict([(SENTENCES[0], each.text) for each in ranked])
    error = np.abs([each.score for each in ranked] - expected).max()
    print(f"cross-encoder: {error:.1e} of up to {np.abs(expected).max():.1f}")
    assert error < 1e-4


@pytest.mark.parametrize(
    "tags",
    [("O", "B-LOC", "I-LOC", "B-PER", "I-PER"), ("O", "LOC", "PER", "ORG", "MISC")],
    ids=["iob2", "plain"],
)
def test_pipeline_of_an_exported_tagger_finds_the_same_entities(tags, tmp_path):
    import transformers

    settings = {"id2label": dict(enumerate(tags)), "num_labels": len(tags)}
    write_torch_model(tmp_path, "BertForTokenClassification", std=0.2, **settings)
    save_huggingface(tmp_path / "exported", *read_model(tmp_path)[:3])
    ours = bert_jax.load(tmp_path / "exported")
    pipeline = transformers.pipeline(
        "token-classification",
        str(tmp_path / "exported"),
        aggregation_strategy="first",
        device="cpu",
    )
    rng, count = np.random.default_rng(0), 0
    texts = [" ".join(f"w{i}" for i in rng.integers(0, 35, 12)) for _ in range(20)]
    for actual, tagging in zip(pipeline(texts), ours.tag(texts), strict=True):
        expected = [(each.type, each.start, each.end) for each in tagging.entities]
        # transformers returns the words outside of entities as a group, too.
        actual = [each for each in actual if each["entity_group"] != "O"]
        assert [(each["entity_group"], each["start"], each["end"]) for each in actual] == expected
        scores = [each.probability for each in tagging.entities]
        assert [each["score"] for each in actual] == pytest.approx(scores, abs=1e-5)
        count += len(expected)
    assert count > 20
