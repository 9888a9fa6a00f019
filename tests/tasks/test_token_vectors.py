"""Multi-vector models: the tokens of queries and passages, MaxSim, and what configurations do."""

import string

import numpy as np
import pytest

from bert_jax.configs.finetune import retrieval as config_file
from bert_jax.data.features import HIDDEN, NO_VECTOR
from bert_jax.tasks import retrieval
from bert_jax.tasks.task import TrainedHead
from bert_jax.tasks.token_vectors import (
    TokenRules,
    as_token_vectors,
    max_similarity_rows,
    skipped_ids,
)
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import WORDS, write_vocabulary
from tests.helpers.json_lines import read_lines, write_lines

HIDDEN_MASKS = {"strategy": "fixed", "length": 6, "attend": False, "token": None}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    words = [*WORDS, ","]
    return load_tokenizer(write_vocabulary(tmp_path_factory.mktemp("v") / "vocab.txt", words))


@pytest.mark.parametrize("attend", [False, True])
def test_masks_fill_a_query(tokenizer, attend):
    settings = {"query_expansion": HIDDEN_MASKS | {"attend": attend}, "skip_words": ["."]}
    rules = TokenRules(settings, tokenizer)
    tokens, second_start, kinds = rules.query(tokenizer.encode("king ."))
    assert tokenizer.decode(tokens.tolist()) == "[CLS] king. [SEP] [MASK] [MASK]"
    # All of it is the first segment; punctuation of queries has vectors.
    assert second_start == 6
    assert kinds.tolist() == [0, 0, 0, 0, *([0 if attend else HIDDEN] * 2)]
    longer, second_start, kinds = rules.query(tokenizer.encode("the king of the river"))
    assert len(longer) == second_start == 7 and not kinds.any()


def test_another_token_fills_a_query(tokenizer):
    rules = TokenRules({"query_expansion": HIDDEN_MASKS | {"token": "king"}}, tokenizer)
    tokens, *_ = rules.query([])
    assert tokenizer.decode(tokens.tolist()) == "[CLS] [SEP] king king king king"
    with pytest.raises(ValueError, match="'absent'"):
        TokenRules({"query_expansion": HIDDEN_MASKS | {"token": "absent"}}, tokenizer)


def test_punctuation_of_passages_has_no_vectors_and_special_tokens_have(tokenizer):
    rules = TokenRules({"skip_words": list(string.punctuation)}, tokenizer)
    tokens, second_start, kinds = rules.passage(tokenizer.encode("a king , ."))
    assert second_start == len(tokens) == 6
    assert kinds.tolist() == [0, 0, 0, NO_VECTOR, NO_VECTOR, 0]


def test_unknown_words_are_not_skipped(tokenizer):
    ids = skipped_ids([".", "absent", "[UNK]"], tokenizer)
    assert ids.tolist() == [tokenizer.token_to_id("."), tokenizer.unk_id]
    assert not len(skipped_ids(["absent"], tokenizer))


def naive_max_similarity(query, passage):
    """Returns MaxSim in float64, of the tokens whose vectors are not 0."""
    query, passage = (np.float64(each[each.any(axis=1)]) for each in (query, passage))
    return (query @ passage.T).max(axis=1).sum() if len(passage) else 0.0


def test_max_similarities_in_blocks_equal_those_of_each_pair(monkeypatch):
    monkeypatch.setattr("bert_jax.tasks.token_vectors.PASSAGES_AT_ONCE", 4)
    monkeypatch.setattr("bert_jax.tasks.token_vectors.QUERIES_AT_ONCE", 2)
    rng = np.random.default_rng(0)

    def texts(count):
        made = [rng.normal(size=(length, 4)) for length in rng.integers(1, 9, count)]
        return as_token_vectors([text * (rng.random((len(text), 1)) > 0.2) for text in made])

    queries, passages = texts(5), [*texts(9), np.zeros((3, 4), np.float32)]
    expected = [
        [naive_max_similarity(*pair) for pair in ((q, p) for p in passages)] for q in queries
    ]
    rows = list(max_similarity_rows(queries, passages))
    np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-5)
    counts = [max(each.any(axis=1).sum(), 1) for each in queries]
    means = list(max_similarity_rows(queries, passages, mean=True))
    np.testing.assert_allclose(means, np.array(expected) / np.c_[counts], rtol=1e-5, atol=1e-5)


def test_vectors_of_one_text_or_of_several(tokenizer):
    assert len(as_token_vectors(np.zeros((3, 4)))) == 1
    assert len(as_token_vectors([np.zeros((3, 4)), np.zeros((5, 4))])) == 2
    with pytest.raises(ValueError, match=r"\[4\]"):
        as_token_vectors([np.zeros(4)])


LINES = [
    {"query": "old river", "positive": "the river , old", "negatives": ["a king ."]},
    {"query": "king", "positive": "a king of the people", "negatives": ["the city"]},
]


def make_task(tmp_path, tokenizer, **fields):
    config = config_file.get_config("bi_encoder,colbert,runlocal")
    config.data.train = config.data.dev = str(write_lines(tmp_path / "lines.jsonl", LINES))
    config.data.num_negatives, config.data.max_query_length = 1, 8
    config.update_from_flattened_dict({name.replace("__", "."): fields[name] for name in fields})
    return retrieval.get_task(config, tokenizer)


def test_a_task_has_expanded_queries_and_passages_without_punctuation(tmp_path, tokenizer):
    prompts = {"data__query_prompt": "a ", "data__passage_prompt": "the "}
    task = make_task(tmp_path, tokenizer, **prompts)
    feature = task.train[0]
    found = [tokenizer.decode(tokens.tolist()) for tokens in feature.sequences]
    assert found == [
        "[CLS] a old river [SEP] [MASK] [MASK] [MASK]",
        "[CLS] the the river, old [SEP]",
        "[CLS] the a king. [SEP]",
    ]
    assert [kinds.tolist() for kinds in feature.token_kinds] == [
        [0, 0, 0, 0, 0, HIDDEN, HIDDEN, HIDDEN],
        [0, 0, 0, 0, NO_VECTOR, 0, 0],
        [0, 0, 0, 0, NO_VECTOR, 0],
    ]
    settings = task.head_settings
    assert settings["prompts"] == {"query": "a ", "document": "the "}
    assert settings["query_expansion"] == HIDDEN_MASKS | {"length": 8}
    assert settings["projections"] == [{"size": 128, "has_bias": False, "activation": "identity"}]


def test_dev_is_ranked_by_max_similarity(tmp_path, tokenizer):
    task = make_task(tmp_path, tokenizer)
    (split,), rng = task.splits, np.random.default_rng(0)
    outputs = [np.float32(rng.normal(size=(len(each), 4))) for each in split.features]
    lines = read_lines(split.write(outputs, tmp_path))
    passages = ["the river , old", "a king .", "a king of the people", "the city"]
    for line, query in zip(lines, outputs, strict=False):
        for text, score in zip(line["negatives"], line["scores"], strict=True):
            expected = naive_max_similarity(query, outputs[2 + passages.index(text)])
            assert score == pytest.approx(expected, rel=1e-5)
    assert split.score(outputs)["mrr_at_10"] > 0


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"similarity__vectors": "several"}, "similarity.vectors=several"),
        ({"similarity__query_expansion": "all"}, "similarity.query_expansion=all"),
        ({"similarity__pooling": "cls"}, "similarity.pooling=cls"),
        ({"data__evaluation": "similarity"}, "data.evaluation=similarity"),
        ({"loss__name": "cosent"}, "loss.name=cosent"),
        ({"loss__symmetric": True}, "loss.symmetric=True"),
        ({"loss__matryoshka_sizes": (8,)}, r"loss.matryoshka_sizes=\(8,\)"),
    ],
)
def test_fields_that_do_not_fit_are_errors(tmp_path, tokenizer, fields, names):
    with pytest.raises(ValueError, match=names):
        make_task(tmp_path, tokenizer, **fields)


def test_predicting_files_is_refused_with_the_way_to_do_it(tmp_path, tokenizer):
    settings = {"task": "multi_vector", "labels": []} | make_task(tmp_path, tokenizer).head_settings
    trained = TrainedHead(settings, {}, tokenizer, 64)
    with pytest.raises(ValueError, match="encode_tokens"):
        retrieval.get_predictor(trained, retrieval.PREDICT_OPTIONS, set())
