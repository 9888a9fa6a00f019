"""Each descendant of BERT, and each architecture, learns each task, and predicts alike anywhere."""

import dataclasses
import random

import flax
import numpy as np
import pytest

import bert_jax
from bert_jax import finetune
from bert_jax.checkpoints.native import write_checkpoint
from bert_jax.checkpoints.parameters import model_settings, parameter_shapes
from bert_jax.configs.finetune import retrieval, squad, swag, tagging, text_classification
from bert_jax.model.heads import find_head
from bert_jax.tokenizers.stored import Layout
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import (
    WORDS,
    random_text,
    texts,
    train_bpe,
    with_layout,
    write_albert_vocabulary,
    write_vocabulary,
)
from tests.helpers.json_lines import write_lines
from tests.helpers.models import (
    small_deberta_config,
    small_esm_config,
    small_longformer_config,
    small_model_config,
    small_modernbert_config,
    small_mpnet_config,
    small_xlnet_config,
)
from tests.helpers.predict_equals_load import (
    check_answers,
    check_choices,
    check_classes,
    check_rankings,
    check_retrieval,
    check_tags,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("two_devices"),
    pytest.mark.filterwarnings("ignore:.*are truncated to"),
]

FIELDS = {
    "num_layers": 1,
    "max_position_embeddings": 40,
    "initializer_range": 0.5,  # With less, the answers of a new head would be the same for all.
}
FAMILIES = {  # Fields of the configuration that differ from BERT's.
    "roberta": {"type_vocab_size": 1, "position_offset": 2},
    "distilbert": {"type_vocab_size": 0},
    "albert": {
        "num_layers": 2,
        "embedding_size": 8,
        "shares_layers": True,
        "activation": "gelu_tanh",
    },
    "electra": {"embedding_size": 8},
    "modernbert": {},
    "mpnet": {},
    "esm": {},
    "deberta": {},
    "longformer": {},
    "xlnet": {},
}
LENGTH = 24


def family_tokenizer(family, directory):
    directory.mkdir(exist_ok=True)
    if family in ("roberta", "modernbert", "longformer"):
        return train_bpe(directory, random_text(20))
    if family == "albert":
        write_albert_vocabulary(directory / "spiece.model")
        return load_tokenizer(directory / "spiece.model")
    vocabulary = write_vocabulary(directory / "vocab.txt", pad_id=int(family in ("mpnet", "esm")))
    tokenizer = load_tokenizer(vocabulary)
    return with_layout(tokenizer, Layout(cls_last=True)) if family == "xlnet" else tokenizer


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(family, marks=() if family == "modernbert" else pytest.mark.exhaustive)
        for family in FAMILIES
    ],
)
def weights(request, tmp_path_factory):
    """Writes a small encoder of each family, with large random weights."""
    directory = tmp_path_factory.mktemp(request.param)
    tokenizer = family_tokenizer(request.param, directory / "tokenizer")
    fields = FIELDS | FAMILIES[request.param]
    if request.param == "modernbert":
        fields |= {"num_layers": 2, "attention_window": 8}  # A global layer, and a local one.
        fields["attention_output_dropout_rate"] = 0.1
        config = small_modernbert_config(tokenizer.vocab_size, **fields)
    elif request.param == "mpnet":
        config = small_mpnet_config(tokenizer.vocab_size, **fields)
    elif request.param == "esm":
        config = small_esm_config(tokenizer.vocab_size, mask_id=tokenizer.mask_id, **fields)
    elif request.param == "longformer":
        fields |= {"num_layers": 2, "attention_window": 8}  # [CLS] reads what the first computes.
        config = small_longformer_config(tokenizer.vocab_size, sep_id=tokenizer.sep_id, **fields)
    elif request.param == "xlnet":
        config = small_xlnet_config(tokenizer.vocab_size, **fields)
    elif request.param == "deberta":
        config = small_deberta_config(tokenizer.vocab_size, **fields)
    else:
        config = small_model_config(tokenizer.vocab_size, family=request.param, **fields)
    rng = np.random.default_rng(0)
    params = {
        path: np.float32(rng.normal(0, 0.5, leaf.shape) + path.endswith("scale"))
        for path, leaf in parameter_shapes(config).items()
        if path.startswith("encoder/") and "pooler" not in path
    }
    params = flax.traverse_util.unflatten_dict(params, sep="/")
    write_checkpoint(directory / "model", params, model_settings(config, params), tokenizer)
    return directory / "model"


def train(config, weights, workdir, **data):
    """Trains a few steps, which change all layers, and returns the workdir."""
    config.init_from = str(weights)
    for name, value in data.items():
        config.data[name] = str(value)
    config.update({"batch_size": 8, "num_epochs": 1.0, "max_seq_length": LENGTH})
    config.learning_rate = 1e-3
    result = finetune.train_and_evaluate(config, workdir)
    split, metric = result["metric"].split("/")
    assert result["steps"] >= 3 and np.isfinite(result[split][metric])
    before, after = bert_jax.load(weights), bert_jax.load(workdir)
    reset = dict.fromkeys(getattr(before.config, "pretraining_rates", ()))
    # A bias of the keys adds the same number to all scores of a query: no softmax depends on it.
    without_effect = {"key/bias", "key_global/bias"}
    if hasattr(before.config, "global_tokens"):
        reset["global_tokens"] = kind = find_head(after.head).global_tokens
        if kind == "none":
            parts = ("query", "key", "value")
            without_effect |= {
                f"{part}_global/{leaf}" for part in parts for leaf in ("kernel", "bias")
            }
    assert after.config == dataclasses.replace(before.config, **reset)
    before, after = (
        flax.traverse_util.flatten_dict(each.params["encoder"]["layers"], sep="/")
        for each in (before, after)
    )
    unchanged = {path for path in before if np.array_equal(before[path], after[path])}
    assert unchanged <= without_effect
    return workdir


def random_labels(names, seed=2, count=24):
    rng = random.Random(seed)
    return [rng.choice(names) for _ in range(count)]


@pytest.mark.parametrize(
    "is_pair",
    [pytest.param(False, marks=pytest.mark.exhaustive), True],
    ids=["texts", "pairs"],
)
def test_classification(weights, is_pair, tmp_path):
    labels = random_labels(["no", "yes", "maybe"])
    rows = [{"text": text, "label": label} for text, label in zip(texts(24), labels, strict=True)]
    if is_pair:
        for row, second in zip(rows, texts(24, seed=3), strict=True):
            row["text_pair"] = second
    path = write_lines(tmp_path / "train.jsonl", rows)
    config = text_classification.get_config()
    config.data.text_pair = "text_pair" if is_pair else ""
    model = train(config, weights, tmp_path / "trained", train=path, dev=path)
    check_classes("classification", is_pair, model, tmp_path)


def test_tagging(weights, tmp_path):
    sentences = [text.split()[:20] for text in texts(24, seed=2)]
    rows = [
        {"tokens": words, "tags": random_labels(["O", "B-X", "B-Y"], seed, len(words))}
        for seed, words in enumerate(sentences)
    ]
    path = write_lines(tmp_path / "train.jsonl", rows)
    model = train(tagging.get_config(), weights, tmp_path / "trained", train=path, dev=path)
    check_tags(model, tmp_path)


@pytest.mark.exhaustive
def test_spans(weights, tmp_path):
    rng, rows = random.Random(0), []
    for number in range(24):
        words = rng.choices(WORDS, k=9)
        start = rng.randrange(8)
        answer = {
            "text": " ".join(words[start : start + 2]),
            "answer_start": len("".join(f"{word} " for word in words[:start])),
        }
        question = {"id": str(number), "question": "the old river", "context": " ".join(words)}
        rows.append(question | {"answers": [answer]})
    path = write_lines(tmp_path / "train.jsonl", rows)
    config = squad.get_config("v1")
    config.data.doc_stride, config.data.max_query_length = 5, 7
    model = train(config, weights, tmp_path / "trained", train=path, dev=path)
    check_answers(model, tmp_path)


@pytest.mark.exhaustive
def test_multiple_choice(weights, tmp_path):
    stories, endings, directory = texts(24, seed=2), texts(96, seed=3), tmp_path / "given"
    directory.mkdir()
    lines = ["sent1,sent2,ending0,ending1,ending2,ending3,label"]
    for number, story in enumerate(stories):
        own = ",".join(endings[4 * number : 4 * number + 4])
        lines.append(f"{story},,{own},{number % 4}")
    for name in ("train.csv", "val.csv"):
        (directory / name).write_text("\n".join(lines) + "\n")
    model = train(swag.get_config(), weights, tmp_path / "trained", directory=directory)
    check_choices(model, tmp_path)


@pytest.mark.parametrize(
    "role", ["bi_encoder", pytest.param("cross_encoder", marks=pytest.mark.exhaustive)]
)
def test_retrieval(weights, role, tmp_path):
    queries, passages = texts(24, seed=2), texts(96, seed=3)
    rows = [
        {"query": query, "positive": passages[n], "negatives": passages[24 + n :: 24]}
        for n, query in enumerate(queries)
    ]
    path = write_lines(tmp_path / "train.jsonl", rows)
    config = retrieval.get_config(role)
    config.data.max_query_length, config.data.num_negatives = 6, 3
    model = train(config, weights, tmp_path / "trained", train=path, dev=path)
    if role == "bi_encoder":
        check_retrieval(model, tmp_path, max_length=6)
    else:
        check_rankings(model, tmp_path)
