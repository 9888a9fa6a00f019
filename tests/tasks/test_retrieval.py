"""Queries and passages: reading, truncation, ranking and scores; and training of both roles."""

import json

import numpy as np
import pytest

import bert_jax
from bert_jax import finetune, predict
from bert_jax.checkpoints.export import save_huggingface
from bert_jax.checkpoints.read import read_model
from bert_jax.configs.finetune import retrieval as config_file
from bert_jax.finetuning.finetune_fields import check_numbers
from bert_jax.model import heads
from bert_jax.tasks import retrieval
from bert_jax.tasks.prompts import find_prompt
from bert_jax.tokenizers.tokenizer import load_tokenizer
from bert_jax.tools.squad_to_retrieval import convert
from tests.helpers.corpora import WORDS, write_vocabulary
from tests.helpers.json_lines import read_lines, write_lines
from tests.helpers.models import write_head, write_weights


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_vocabulary(tmp_path_factory.mktemp("v") / "vocab.txt"))


LINES = [
    {"query": "old river", "positive": "the river grew old", "negatives": ["a king", "the city"]},
    {"query": "king", "positive": "a king of the people", "negatives": ["the city", "a road"]},
    {"query": "north", "positive": "the river grew old", "negatives": ["the war", "a king"]},
]


def make_task(tmp_path, tokenizer, role="bi_encoder", train=LINES, dev=LINES, **fields):
    config = config_file.get_config(f"{role},runlocal")
    config.data.train = str(write_lines(tmp_path / "train.jsonl", train))
    config.data.dev = str(write_lines(tmp_path / "dev.jsonl", dev))
    config.data.num_negatives = 1
    for name, value in fields.items():
        config.update_from_flattened_dict({name.replace("__", "."): value})
    return retrieval.get_task(config, tokenizer)


def decode(tokenizer, tokens):
    return tokenizer.decode(tokens.tolist())


def test_bi_encoder_takes_query_positive_and_negatives_as_sequences(tmp_path, tokenizer):
    task = make_task(tmp_path, tokenizer)
    assert task.head.name == heads.EMBEDDING.name and task.labels == ()
    found = [decode(tokenizer, tokens) for tokens in task.train[0].sequences]
    assert found == [
        "[CLS] old river [SEP]",
        "[CLS] the river grew old [SEP]",
        "[CLS] a king [SEP]",
    ]
    # Equal texts have equal numbers, so that the loss can mask copies.
    labels = np.array([feature.label for feature in task.train])
    assert labels[0, 0] == labels[2, 0] and len(np.unique(labels)) == 5


def test_prompts_precede_the_texts_and_are_stored_with_the_head(tmp_path, tokenizer):
    fields = {"data__query_prompt": "the king ", "data__passage_prompt": "a "}
    task = make_task(tmp_path, tokenizer, **fields)
    found = [decode(tokenizer, tokens) for tokens in task.train[0].sequences]
    assert found == [
        "[CLS] the king old river [SEP]",
        "[CLS] a the river grew old [SEP]",
        "[CLS] a a king [SEP]",
    ]
    texts = [texts_of(tokenizer, each)[0] for each in task.splits[0].features]
    assert all(text.startswith("the king ") for text in texts[:3])
    assert all(text.startswith("a ") for text in texts[3:])
    assert find_prompt(task.head_settings, "query") == "the king "
    assert find_prompt(task.head_settings) == find_prompt(task.head_settings, "document") == "a "
    only = make_task(tmp_path, tokenizer, data__passage_prompt="a ").head_settings
    assert find_prompt(only, "query") == ""
    with pytest.raises(ValueError, match="'title'"):
        find_prompt(only, "title")
    with pytest.raises(ValueError, match="query_prompt='the king '"):
        make_task(tmp_path, tokenizer, "cross_encoder", data__query_prompt="the king ")
    with pytest.raises(ValueError, match=r"the prompt .* 16"):
        make_task(tmp_path, tokenizer, data__query_prompt="king " * 14)


def test_cross_encoder_takes_pairs_of_which_the_first_is_correct(tmp_path, tokenizer):
    task = make_task(tmp_path, tokenizer, "cross_encoder")
    assert task.head is heads.CROSS_ENCODER and task.train[0].label == 0
    feature = task.train[1]
    assert decode(tokenizer, feature.sequences[0]) == "[CLS] king [SEP] a king of the people [SEP]"
    assert feature.second_starts[0] == 3
    assert len(task.splits[0].features) == 9  # Three passages for each query.


def test_rankings_are_scored_and_written_in_the_input_format(tmp_path, tokenizer):
    for role in retrieval.ROLES:
        (split,) = make_task(tmp_path, tokenizer, role).splits
        outputs = []
        if role == "bi_encoder":
            passages = len(split.features) - 3
            vectors = np.eye(passages, dtype=np.float32)
            order = list(dict.fromkeys(p for q in LINES for p in (q["positive"], *q["negatives"])))
            # The first two queries find their passage; the third prefers another.
            for line, wanted in zip(LINES, (0, 3, order.index("the war")), strict=True):
                vector = vectors[wanted] + 0.5 * vectors[order.index(line["positive"])]
                outputs.append(vector[None])
            outputs += [vector[None] for vector in vectors]
        else:
            outputs = [np.array([score]) for score in (3.0, 1, 2, 3, 2, 1, 1, 2, 0)]
        found = split.score(outputs)
        expected = {"mrr_at_10": (1 + 1 + 1 / 2) / 3, "accuracy_at_1": 2 / 3, "accuracy_at_10": 1}
        expected |= {"recall_at_1": 2 / 3, "recall_at_10": 1}
        if role == "cross_encoder":  # No first stage is known to have missed any.
            expected["mrr_at_10_if_all_found"] = expected["mrr_at_10"]
        assert {name: found[name] for name in expected} == pytest.approx(expected), role
        # Only "the war" beats the positive of its line.
        assert found["triplet_accuracy"] == pytest.approx((1 + 1 + 1 / 2) / 3)
        split.write(outputs, tmp_path)
        lines = read_lines(tmp_path / "dev.jsonl")
        assert [line["rank"] for line in lines] == [1, 1, 2]
        assert lines[2]["negatives"][0] == "the war" and lines[2]["scores"][0] >= 0
        assert len(retrieval.read_queries(tmp_path / "dev.jsonl")) == 3
        (tmp_path / "dev.jsonl").unlink()


BOATS = [
    {"query": "where is the boat", "positive": "the boat is on the river"},
    {"query": "Where is  the boat", "positive": "a boat in the water"},
    {"query": "who is ann", "positive": "ann is a good mother"},
]


def test_lines_of_an_equal_query_are_one_query_with_several_positives(tmp_path):
    words = {word for line in BOATS for text in line.values() for word in text.lower().split()}
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt", sorted(words)))
    collection = str(
        write_lines(tmp_path / "p.jsonl", [{"text": "small house"}, {"text": "a letter"}])
    )
    task = make_task(
        tmp_path,
        tokenizer,
        train=BOATS,
        dev=BOATS,
        data__num_negatives=0,
        data__passages=collection,
    )
    (split,) = task.splits
    assert split.counts == {"queries": 2, "passages": 5}
    assert split.describe_size() == "2 queries, 5 passages"
    vectors = np.float32(
        [
            [1, 0, 0],
            [1, 0, 0],
            [0, 1, 0],
            [0, 0, 1],
            [0, 0, 1],
            [0.9, 0.1, 0],
            [0.8, 0.1, 0],
            [0, 1, 0],
        ]
    )
    outputs = [vector[None] for vector in vectors]
    expected = {"mrr_at_10": 1, "accuracy_at_1": 1, "accuracy_at_10": 1, "recall_at_10": 1}
    found = split.score(outputs)
    expected |= {"recall_at_1": 0.75}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    split.write(outputs, tmp_path)
    lines = read_lines(tmp_path / "dev.jsonl")
    assert [line["rank"] for line in lines] == [1, 2, 1]
    assert [line["positive"] for line in lines] == [line["positive"] for line in BOATS]
    for line in lines[:2]:
        assert set(line["negatives"]) == {"ann is a good mother", "small house", "a letter"}
    # In the loss, each boat query has the same two positives.
    labels = [feature.label.tolist() for feature in task.train]
    assert labels == [[0, 1], [1, 0], [2]] and task.head.label_layout.shape == (2,)


def texts_of(tokenizer, feature):
    """Returns the words of each text in the only sequence of a feature."""
    (tokens,) = feature.sequences
    parts = decode(tokenizer, tokens).removeprefix("[CLS]").split("[SEP]")[:-1]
    return [part.strip() for part in parts]


@pytest.mark.parametrize("role", retrieval.ROLES)
@pytest.mark.parametrize("seed", range(3))
def test_scores_of_random_files_equal_the_definitions(role, seed, tmp_path, tokenizer):
    """Equal queries and passages are on several lines, spelled in several ways; scores are tied."""
    rng = np.random.default_rng(seed)

    def spelled(text):
        return str(rng.choice([text, text.upper(), text.replace(" ", "\r\n"), f" {text} "]))

    corpus = [f"{first} {second}" for first in WORDS[:5] for second in WORDS[5:9]]
    relevant = {query: set(rng.choice(corpus, 3)) for query in WORDS[:6]}
    lines = []
    for query in relevant:
        others = [text for text in corpus[:: seed + 1] if text not in relevant[query]]
        for text in [*relevant[query], *relevant[query]]:
            negatives = list(map(spelled, others))
            line = {"query": spelled(query), "positive": spelled(text), "negatives": negatives}
            lines.append(line)
    rng.shuffle(lines)
    collection = str(
        write_lines(tmp_path / "p.jsonl", [{"text": spelled(text)} for text in corpus])
    )
    (split,) = make_task(tmp_path, tokenizer, role, dev=lines, data__passages=collection).splits
    vectors = {text: rng.integers(-1, 2, 4).astype(np.float32) for text in [*relevant, *corpus]}
    if role == "bi_encoder":
        outputs = [vectors[texts_of(tokenizer, each)[0]][None] for each in split.features]
    else:
        pairs = [texts_of(tokenizer, each) for each in split.features]
        outputs = [np.array([vectors[query] @ vectors[passage]]) for query, passage in pairs]
    firsts, shares = [], []
    for query, right in relevant.items():
        others = [text for text in corpus[:: seed + 1] if text not in right]
        ranked = corpus if role == "bi_encoder" else [*right, *others]
        order = sorted(ranked, key=lambda text: (-vectors[query] @ vectors[text], text in right))
        ranks = [order.index(text) + 1 for text in right]
        firsts.append(min(ranks))
        shares.append([sum(rank <= k for rank in ranks) / len(ranks) for k in (1, 10)])
    found = split.score(outputs)
    assert found["mrr_at_10"] == pytest.approx(np.mean([1 / x if x <= 10 else 0 for x in firsts]))
    assert found["accuracy_at_1"] == pytest.approx(np.mean([x == 1 for x in firsts]))
    recall = [found["recall_at_1"], found["recall_at_10"]]
    np.testing.assert_allclose(recall, np.mean(shares, axis=0))
    assert split.counts["queries"] == len(relevant)
    # No passage that answers a query is written as its negative.
    split.write(outputs, tmp_path)
    written = read_lines(tmp_path / "dev.jsonl")
    assert [line["query"] for line in written] == [line["query"] for line in lines]
    for line in written:
        negatives = {" ".join(text.lower().split()) for text in line["negatives"]}
        assert not negatives & relevant[line["query"].strip().lower()]


@pytest.mark.parametrize("role", retrieval.ROLES)
def test_labels_are_grades_of_the_ranking(role, tmp_path, tokenizer):
    labels = {"a king": 1, "the war": 3, "old road": 0}
    dev = [{"query": "king", "passage": text, "label": label} for text, label in labels.items()]
    (split,) = make_task(tmp_path, tokenizer, role, dev=dev).splits
    score_of = {"a king": 2.0, "the war": 1.0, "old road": 2.0}
    if role == "bi_encoder":
        texts = [texts_of(tokenizer, each)[0] for each in split.features]
        outputs = [np.array([[score_of.get(text, 1)]]) for text in texts]
    else:
        outputs = [np.array([score_of[texts_of(tokenizer, each)[1]]]) for each in split.features]
    found = split.score(outputs)
    # In the tie, the passage that is not relevant comes first.
    ideal = 3 + 1 / np.log2(3)
    assert found["ndcg_at_10"] == pytest.approx((1 / np.log2(3) + 3 / np.log2(4)) / ideal)
    assert found["map_at_10"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert found["triplet_accuracy"] == 0  # A tie is not correct.
    split.write(outputs, tmp_path)
    written = read_lines(tmp_path / "dev.jsonl")
    assert [(each["positive"], each["positive_score"]) for each in written] == [
        ("a king", 2),
        ("the war", 1),
    ]


def test_triplet_accuracy_is_that_of_the_queries_with_negatives(tmp_path, tokenizer):
    dev = [LINES[0], {"query": "king", "positive": "a king"}]
    (split,) = make_task(tmp_path, tokenizer, "cross_encoder", dev=dev).splits
    outputs = [np.array([score]) for score in (1.0, 0.0, 2.0, 1.0)]
    assert split.score(outputs)["triplet_accuracy"] == 0.5
    split.write(outputs, tmp_path)
    assert "triplet_accuracy" not in (tmp_path / "dev_scores.tsv").read_text()


def test_reranker_does_not_rank_what_the_first_stage_missed(tmp_path, tokenizer):
    corpus = [f"{first} {second}" for first in WORDS[:5] for second in WORDS[5:10]]
    lines = [{"query": query, "positive": corpus[n]} for n, query in enumerate(WORDS[:7])]
    lines.append({"query": WORDS[0], "positive": corpus[20]})
    passages = str(write_lines(tmp_path / "p.jsonl", [{"text": text} for text in corpus]))
    fields = {"dev": lines, "data__passages": passages}
    (first_stage,) = make_task(tmp_path, tokenizer, **fields).splits
    rng = np.random.default_rng(0)
    outputs = [rng.normal(size=(1, 3)) for _ in first_stage.features]
    (tmp_path / "first").mkdir()
    found = [json.loads(line) for line in first_stage.write(outputs, tmp_path / "first").open()]
    first_scores = first_stage.score(outputs)
    num_missed = sum(line["rank"] > 10 for line in found)
    assert 0 < num_missed < 7 and 0 < first_scores["recall_at_10"] < 1
    task = make_task(tmp_path, tokenizer, "cross_encoder", dev=found)
    assert task.notes["dev positives that the first stage missed"] == num_missed
    (split,) = task.splits
    right = {(line["query"], line["positive"]) for line in lines}
    perfect = [
        np.array([float(tuple(texts_of(tokenizer, each)) in right)]) for each in split.features
    ]
    scores = split.score(perfect)
    # It reorders the ten passages that were found.
    for name in ("accuracy_at_10", "recall_at_10"):
        assert scores[name] == pytest.approx(first_scores[name])
    assert scores["mrr_at_10"] == scores["accuracy_at_10"]
    assert scores["mrr_at_10_if_all_found"] == 1
    (tmp_path / "second").mkdir()
    reranked = [json.loads(line) for line in split.write(perfect, tmp_path / "second").open()]
    assert [line["rank"] is None for line in reranked] == [line["rank"] > 10 for line in found]
    # A third stage knows it, too.
    task = make_task(tmp_path, tokenizer, "cross_encoder", dev=reranked)
    assert task.notes["dev positives that the first stage missed"] == num_missed


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ({}, True),  # No first stage is known.
        ({"rank": None}, False),
        ({"rank": 3}, True),  # The last of the three passages of the line.
        ({"rank": 4}, False),
        ({"rank": 3, "depth": 2}, False),
        ({"rank": 2, "depth": 2}, True),
    ],
)
def test_first_stage_has_found_a_positive_up_to_its_depth(line, is_found, tmp_path, tokenizer):
    line = {"query": "king", "positive": "a king", "negatives": ["the war", "old"]} | line
    (split,) = make_task(tmp_path, tokenizer, "cross_encoder", dev=[line]).splits
    scores = split.score([np.array([each]) for each in (1.0, 0.0, 0.0)])
    assert (scores["mrr_at_10"], scores["mrr_at_10_if_all_found"]) == (float(is_found), 1)


def test_texts_are_equal_in_training_as_the_model_sees_them(tmp_path, tokenizer):
    """After truncation, with unknown words; the others of an equal query are not left out."""
    long = " ".join(WORDS * 2)
    train = [
        {"query": "king", "positive": long, "negatives": [f"{long} old", "the war", "a city"]},
        {"query": f"{long} king", "positive": "Zürich", "negatives": ["Genève", "old", "river"]},
        {"query": f"{long} old", "positive": "the\nriver", "negatives": ["a road", "road", "war"]},
        {"query": "KING ", "positive": "A  City", "negatives": ["small", "king", "war"]},
    ]
    for role in retrieval.ROLES:
        task = make_task(tmp_path, tokenizer, role, train=train, data__num_negatives=1)
        left_out = "train negatives left out because they answer the query"
        assert task.notes[left_out] == 2
        unused = "train negatives not used, after the first 1 of a line"
        assert task.notes[unused] == 4 * 3 - 4 - 2
        negatives = [decode(tokenizer, feature.sequences[-1]) for feature in task.train]
        expected = ["the war", "old", "a road", "small"]
        assert [
            text.split("[SEP]")[-2].split("[CLS]")[-1].strip() for text in negatives
        ] == expected
        # Negatives on which the lines disagree are left out as far as others replace them.
        with pytest.raises(ValueError, match=r"line 1: fewer negatives \(1, without 2 that answer"):
            make_task(tmp_path, tokenizer, role, train=train, data__num_negatives=2)
    labels = [
        feature.label.tolist()
        for feature in make_task(tmp_path, tokenizer, train=train, data__num_negatives=1).train
    ]
    # Lines 1 and 4, and lines 2 and 3, are one query each.
    own = [label[0] for label in labels]
    assert [label[2:] for label in labels] == [[own[3]], [own[2]], [own[1]], [own[0]]]


def test_scores_tell_texts_apart_that_only_truncation_makes_equal(tmp_path, tokenizer):
    long = " ".join(WORDS * 2)
    dev = [
        {"query": f"{long} king", "positive": f"{long} a", "negatives": [f"{long} b", "Zürich"]},
        {"query": f"{long} old", "positive": "Genève"},
    ]
    for role in retrieval.ROLES:
        (split,) = make_task(tmp_path, tokenizer, role, dev=dev).splits
        assert split.counts["queries"] == 2
        is_bi_encoder = role == "bi_encoder"
        outputs = [np.ones((1, 1) if is_bi_encoder else 1)] * len(split.features)
        ranks = (4, 4) if is_bi_encoder else (3, 1)  # All are equal to the model.
        assert split.score(outputs)["mrr_at_10"] == pytest.approx(np.mean([1 / r for r in ranks]))


def test_positives_on_lines_that_are_left_out_are_known(tmp_path, tokenizer):
    lines = [
        {"query": "king", "positive": "a king"},
        {"query": "old", "positive": "the war"},
        {"query": "king", "positive": "the war"},
    ]
    fields = {"data__num_negatives": 0, "max_train_examples": 2, "max_eval_examples": 1}
    task = make_task(tmp_path, tokenizer, train=lines, dev=lines, **fields)
    texts = [decode(tokenizer, feature.sequences[1]) for feature in task.train]
    assert texts == ["[CLS] a king [SEP]", "[CLS] the war [SEP]"]
    assert [feature.label.tolist() for feature in task.train] == [[0, 1], [1]]
    # Evaluation keeps all lines of a query.
    assert task.splits[0].counts == {"queries": 1, "passages": 2}


def test_collection_is_searched_in_addition_to_the_passages_of_the_file(tmp_path, tokenizer):
    passages = str(write_lines(tmp_path / "passages.jsonl", [{"text": "the war"}, {"text": "new"}]))
    (split,) = make_task(tmp_path, tokenizer, data__passages=passages).splits
    assert len(split.features) == 3 + 7  # "the war" is one passage, though in both.
    task = make_task(tmp_path, tokenizer, "cross_encoder", data__passages=passages)
    assert task.notes["passages that a cross_encoder does not rank"] == 2
    assert len(task.splits[0].features) == 9


def test_empty_passages_of_the_collection_are_ranked_but_not_trained_with(tmp_path, tokenizer):
    config = config_file.get_config("bi_encoder,runlocal")
    config.data.test = str(write_lines(tmp_path / "test.jsonl", [{"query": "king"}]))
    lines = [{"text": "the war"}, {"text": ""}, {"text": None}, {"text": " "}]
    config.data.passages = str(write_lines(tmp_path / "passages.jsonl", lines))
    task = retrieval.get_task(config, tokenizer)
    assert task.notes["passages that are empty"] == 3
    with pytest.raises(ValueError, match=r"passages\.jsonl, line 2: the text is empty"):
        make_task(tmp_path, tokenizer, data__passages=config.data.passages)


def test_limit_on_examples_limits_the_collection(tmp_path, tokenizer):
    lines = [{"text": f"{first} {second}"} for first in WORDS[:9] for second in WORDS[:9]]
    passages = str(write_lines(tmp_path / "passages.jsonl", lines))
    fields = {"data__passages": passages, "max_eval_examples": 2}
    task = make_task(tmp_path, tokenizer, **fields)
    assert task.notes["dev examples dropped"] == 1
    assert task.notes["collection examples dropped"] == len(lines) - 2
    # Two queries, two passages of the collection, and five passages of the queries.
    assert len(task.splits[0].features) == 2 + 2 + 5
    outputs = [np.ones((1, 1))] * 9
    assert task.splits[0].score(outputs)["recall_at_10"] == 1


def test_queries_without_positives_are_ranked_but_not_scored(tmp_path, tokenizer):
    dev = [{"query": "king", "negatives": ["a king", "the city"]}]
    for role in retrieval.ROLES:
        (split,) = make_task(tmp_path, tokenizer, role, dev=dev).splits
        assert split.score is None
        rows = 3 if role == "bi_encoder" else 2
        outputs = [np.full((1, 1), float(row)) for row in range(1, rows + 1)]
        split.write(outputs if role == "bi_encoder" else [o[0] for o in outputs], tmp_path)
        (line,) = map(json.loads, (tmp_path / "dev.jsonl").read_text().splitlines())
        assert line["negatives"] == ["the city", "a king"] and "rank" not in line


@pytest.mark.parametrize("role", retrieval.ROLES)
def test_empty_queries_and_candidates_are_ranked_and_counted(tmp_path, tokenizer, role):
    lines = [{"id": 7, "query": "", "negatives": ["a king"]}, {"query": "king", "negatives": [" "]}]
    config = config_file.get_config(f"{role},runlocal")
    config.data.test = str(write_lines(tmp_path / "test.jsonl", lines))
    task = retrieval.get_task(config, tokenizer)
    assert task.notes["test examples with an empty text"] == 2
    (split,) = task.splits
    outputs = [np.ones((1, 1) if role == "bi_encoder" else 1)] * len(split.features)
    (tmp_path / "out").mkdir()
    split.write(outputs, tmp_path / "out")
    written = read_lines(tmp_path / "out" / "test.jsonl")
    assert [(line["id"], line["query"]) for line in written] == [("7", ""), ("1", "king")]


def test_long_texts_are_truncated_and_counted(tmp_path, tokenizer):
    rng = np.random.default_rng(0)
    long = [
        {
            "query": " ".join(rng.choice(WORDS, 40)),
            "positive": " ".join(rng.choice(WORDS, 50)),
            "negatives": ["a king"],
        }
    ]
    for role, lengths in (("bi_encoder", (16, 32, 4)), ("cross_encoder", (32, 19))):
        task = make_task(tmp_path, tokenizer, role, train=long)
        assert tuple(map(len, task.train[0].sequences)) == lengths
        notes = {name: count for name, count in task.notes.items() if count}
        assert notes == {"queries truncated": 1, "passages truncated": 1}


@pytest.mark.slow
@pytest.mark.parametrize("role", ["bi_encoder", "cross_encoder"])
def test_both_roles_train_and_predict_like_the_loaded_model(role, tmp_path):
    vocabulary = write_vocabulary(tmp_path / "vocab.txt")
    config = config_file.get_config(f"{role},runlocal")
    config.init_from = str(write_weights(tmp_path / "weights", vocabulary))
    config.data.train = config.data.dev = str(write_lines(tmp_path / "train.jsonl", LINES * 3))
    config.data.num_negatives = 2
    result = finetune.train_and_evaluate(config.lock(), tmp_path / "run")
    assert 0 < result["dev"]["mrr_at_10"] <= 1 and result["steps"] == 2
    line = json.loads((tmp_path / "run/predictions/dev.jsonl").read_text().splitlines()[0])
    model = bert_jax.load(tmp_path / "run")
    if role == "cross_encoder":
        passages = [LINES[0]["positive"], *LINES[0]["negatives"]]
        scores = {each.text: each.score for each in model.rank(line["query"], passages)}
        expected = dict(zip(line["negatives"], line["scores"], strict=True))
        assert {text: scores[text] for text in expected} == pytest.approx(expected, abs=1e-4)
        return
    assert "head" not in model.params
    vectors = model.encode([line["query"], *line["negatives"]])
    np.testing.assert_allclose(vectors[1:] @ vectors[0], line["scores"], atol=1e-4)
    # Exported, it is a plain encoder for other libraries; imported again, it is unchanged.
    params, settings, own, _ = read_model(tmp_path / "run")
    save_huggingface(tmp_path / "exported", params, settings, own)
    exported = bert_jax.load(tmp_path / "exported")
    assert exported.head == model.head
    np.testing.assert_allclose(exported.encode([line["query"]])[0], vectors[0], atol=1e-6)


@pytest.mark.slow
@pytest.mark.slow
def test_a_dense_layer_is_trained_and_continued_from(tmp_path):
    config = config_file.get_config("bi_encoder,runlocal")
    vocabulary = write_vocabulary(tmp_path / "vocab.txt")
    config.init_from = str(write_weights(tmp_path / "encoder", vocabulary))
    config.data.train = str(write_lines(tmp_path / "train.jsonl", LINES * 3))
    config.data.num_negatives, config.similarity.vector_size = 1, 8
    finetune.train_and_evaluate(config.lock(), tmp_path / "first")
    first = bert_jax.load(tmp_path / "first")
    assert first.encode(["a king"]).shape == (1, 8)
    config = config.copy_and_resolve_references().unlock()
    config.init_from, config.learning_rate = str(tmp_path / "first"), 1e-9
    finetune.train_and_evaluate(config.lock(), tmp_path / "second")
    found = bert_jax.load(tmp_path / "second").encode(["a king"])
    np.testing.assert_allclose(found, first.encode(["a king"]), atol=1e-5)


@pytest.mark.slow
def test_sparse_vectors_train_and_rank_as_those_of_the_loaded_model(tmp_path):
    config = config_file.get_config("bi_encoder,splade,runlocal")
    model = write_head(tmp_path / "masked_lm", task="sparse_embedding", labels=[])
    config.init_from, config.new_head = str(model), True  # Its prompts are others.
    config.data.train = config.data.dev = str(write_lines(tmp_path / "train.jsonl", LINES * 3))
    config.data.num_negatives, config.data.query_prompt = 1, "the "
    result = finetune.train_and_evaluate(config.lock(), tmp_path / "run")
    assert 0 < result["dev"]["mrr_at_10"] <= 1 and result["steps"] == 2
    assert 0 < result["dev"]["query_active_dims"] <= read_model(model).tokenizer.vocab_size
    line = read_lines(tmp_path / "run/predictions/dev.jsonl")[0]
    loaded = bert_jax.load(tmp_path / "run")
    query = loaded.encode_sparse([line["query"]], prompt_name="query")
    passages = loaded.encode_sparse(line["negatives"])
    scores = loaded.similarity(query, passages)
    np.testing.assert_allclose(scores, [line["scores"]], rtol=1e-4)
    np.testing.assert_allclose((passages @ query.T).toarray()[:, 0], line["scores"], rtol=1e-4)
    with pytest.raises(ValueError, match="encode_sparse"):
        loaded.encode(["a king"])

    texts = [{"text": text} for text in line["negatives"]]
    write_lines(tmp_path / "passages.jsonl", texts * 2)
    passages = str(tmp_path / "shards")
    predict.predict(tmp_path / "run", tmp_path / "passages.jsonl", passages, {"shard_size": 3})
    options = {"passages": passages, "top_k": 10}
    queries = write_lines(tmp_path / "queries.jsonl", [{"query": line["query"]}])
    predict.predict(tmp_path / "run", queries, tmp_path / "found.jsonl", options)
    (found,) = read_lines(tmp_path / "found.jsonl")
    expected = np.repeat(line["scores"], 2)  # Each is there twice.
    np.testing.assert_allclose([each["score"] for each in found["passages"]], expected, rtol=1e-4)
    first, second = (int(each["id"]) for each in found["passages"][:2])
    assert abs(second - first) == len(texts)


BAD_LINES = {
    "no query": ([{"positive": "a"}], "line 1: 'query'"),
    "empty positive": ([{"query": "a", "positive": " "}], "line 1: .*positive"),
    "negatives that are no list": (
        [LINES[0] | {"negatives": "a"}],
        "line 1: 'negatives' .*list",
    ),
    "empty negative": ([LINES[0] | {"negatives": [""]}], "line 1: .*negative"),
    "too few negatives": (
        [LINES[0] | {"negatives": []}],
        r"config\.data\.num_negatives=1",
    ),
    "positive among negatives": (
        [LINES[0] | {"negatives": ["the river grew old"]}],
        "line 1: .*'the river grew old'",
    ),
    "id twice": ([LINES[0] | {"id": 1}, LINES[1] | {"id": "1"}], "line 2: .*'1'"),
    "positive among negatives, to the tokenizer": (
        [LINES[0] | {"negatives": ["The  RIVER grew\r\nold"]}],
        "line 1: .*'The  RIVER",
    ),
    "negatives twice": ([LINES[0] | {"negative": "a king"}], "line 1: .*'negatives' .*'negative'"),
    "other negatives": (
        [*LINES, LINES[0] | {"negative_texts": "a king"}],
        "line 4: 'negative_texts'",
    ),
    "no positives": ([{"query": "a", "positives": []}], "line 1: .*'positives'"),
    "empty one of positives": ([{"query": "a", "pos": ["b", " "]}], "line 1: .*pos"),
    "one score for three": ([LINES[0] | {"pos_scores": [1]}], "line 1: 'scores' .*0 .*2"),
    "score that is no number": (
        [LINES[0] | {"positive_score": "high", "scores": [1, 2]}],
        "line 1: 'positive_score'",
    ),
    "score that is null": (
        [LINES[0] | {"positive_score": 1, "neg_scores": [1, None]}],
        "line 1: 'neg_scores'",
    ),
    "score": ([LINES[0] | {"score": 0.5}], "line 1: .*'negatives' .*'score'"),
    "relevance": ([LINES[0] | {"relevance": 2}], "line 1: 'relevance'"),
    "label that is no number": (
        [{"query": "a", "passage": "b", "label": "good"}],
        "line 1: 'label'",
    ),
    "label that is no whole number": (
        [{"sentence1": "a", "sentence2": "b", "score": 0.4}],
        "line 1: 'score' .*config.data.evaluation",
    ),
    "some labels": (
        [{"query": "a", "passage": "b", "label": 1}, {"query": "a", "passage": "c"}],
        "line 2: .*'label'",
    ),
    "query without a passage above 0": (
        [{"query": "a", "passage": "b", "label": 1}, {"query": "c", "passage": "b", "label": 0}],
        "line 2: .*'c'",
    ),
    "passage with two labels": (
        [{"query": "a", "passage": "b", "label": 1}, {"query": "a", "passage": "b", "label": 0}],
        "line 2: .*'b'",
    ),
    "passage with two grades": (
        [{"query": "a", "passage": "b", "label": label} for label in (1, 2)],
        "line 2: .*'b'",
    ),
    "id of two queries": (
        [{"id": 1, "query": query, "passage": "b", "label": 1} for query in "ac"],
        "line 2: .*'1'",
    ),
    "rank from 0": ([LINES[0] | {"rank": 0}], "line 1: 'rank'"),
    "no positive": ([{"query": "a", "negatives": ["b"]}], "line 1: .*'positive'"),
    "some positives": ([LINES[0], {"query": "a", "negatives": ["b"]}], "line 2: .*'positive'"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_line_is_named(case, tmp_path, tokenizer):
    lines, message = BAD_LINES[case]
    with pytest.raises(ValueError, match=message) as raised:
        make_task(tmp_path, tokenizer, train=lines)
    assert "train.jsonl, line" in str(raised.value)


@pytest.mark.parametrize("role", retrieval.ROLES)
def test_other_unused_keys_are_counted(role, tmp_path, tokenizer):
    lines = [line | {"title": "x", "doc_id": 4, "rank": 2, "score": None} for line in LINES]
    predictions = [line | {"depth": 10, "scores": [0.5, 0.25]} for line in lines]
    collection = str(write_lines(tmp_path / "p.jsonl", [{"text": "a", "title": "b", "_id": 3}]))
    fields = {"train": predictions, "dev": lines, "data__passages": collection}
    notes = make_task(tmp_path, tokenizer, role, **fields).notes
    unused = {name: count for name, count in notes.items() if name.endswith("which is not used")}
    assert unused == {
        "train lines with 'scores', which is not used": 3,
        "train lines with 'title', which is not used": 3,
        "dev lines with 'title', which is not used": 3,
        "passages with 'title', which is not used": 1,
    }


def test_negatives_are_trained_with_or_counted_only_if_asked(tmp_path, tokenizer):
    def read(num_negatives, train=LINES):
        fields = {} if num_negatives is None else {"data__num_negatives": num_negatives}
        config = config_file.get_config("bi_encoder,runlocal")
        config.data.train = str(write_lines(tmp_path / "train.jsonl", train))
        config.update_from_flattened_dict({"data.num_negatives": num_negatives} if fields else {})
        return retrieval.get_task(config, tokenizer)

    message = r"train.jsonl, line 1: it has 'negatives', but .*num_negatives is not set.*has "
    with pytest.raises(ValueError, match=message + "at least 2"):
        read(None)
    assert len(read(None, [{"query": "a", "positive": "b"}]).train[0].sequences) == 2
    for count in (0, 1, 2):
        task = read(count)
        assert {len(feature.sequences) for feature in task.train} == {2 + count}
        unused = f"train negatives not used, after the first {count} of a line"
        assert task.notes[unused] == 3 * (2 - count)


@pytest.mark.parametrize("argument", ["biencoder", "bi-encoder,runlocal", "bi_encoder,fast"])
def test_unknown_argument_of_the_configuration_names_those_that_exist(argument):
    expected = "'bi_encoder' or 'cross_encoder'.*splade"
    with pytest.raises(ValueError, match=f"unknown argument .* expected {expected}"):
        config_file.get_config(argument)


def test_bad_config_is_named(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"data.role=reader"):
        make_task(tmp_path, tokenizer, data__role="reader")
    with pytest.raises(
        ValueError,
        match=r"=20: expected at least 3 and at most 16, which is half of max_seq_length",
    ):
        make_task(tmp_path, tokenizer, "cross_encoder", data__max_query_length=20)
    make_task(tmp_path, tokenizer, data__max_query_length=20)  # Of a sequence of its own.
    with pytest.raises(ValueError, match=r"num_negatives=-1"):
        make_task(tmp_path, tokenizer, data__num_negatives=-1)
    with pytest.raises(ValueError, match=r"num_negatives=0"):
        make_task(tmp_path, tokenizer, "cross_encoder", data__num_negatives=0)
    with pytest.raises(ValueError, match=r"config\.similarity\.pooling=min"):
        make_task(tmp_path, tokenizer, similarity__pooling="min")
    of_splade = {"loss__query_flops_weight": 0.1, "loss__passage_flops_weight": 0.1}
    for role, fields in (("cross_encoder", {}), ("bi_encoder,splade", of_splade)):
        with pytest.raises(ValueError, match="vector_size=8"):
            make_task(tmp_path, tokenizer, role, similarity__vector_size=8, **fields)
    with pytest.raises(ValueError, match=r"config\.similarity\.temperature=0\.0"):
        config = config_file.get_config()
        config.similarity.temperature = 0.0
        check_numbers(config)
    with pytest.raises(ValueError, match="after the colon"):
        config_file.get_config("bi_encoder,runlocl")


def test_squad_questions_become_queries_split_by_article(tmp_path, capsys):
    def article(name, answerable=True):
        return {
            "title": name,
            "paragraphs": [
                {
                    "context": f"{name} {number}",
                    "qas": [
                        {
                            "id": f"{name}{number}",
                            "question": f"Who is {number}?",
                            "answers": [],
                            "is_impossible": not answerable,
                        }
                    ],
                }
                for number in range(2)
            ],
        }

    last = article("c")
    again = {"id": "again", "question": "who  is 1?", "answers": [], "is_impossible": False}
    last["paragraphs"].append({"context": "c 2", "qas": [again]})
    last["paragraphs"].append({"context": "C\r\n1", "qas": []})
    source = tmp_path / "squad.json"
    source.write_text(json.dumps({"data": [article("a"), article("b", False), last]}))
    convert(source, tmp_path / "out", heldout_articles=1)
    train, dev = (
        retrieval.read_queries(tmp_path / "out" / f"{name}.jsonl") for name in ("train", "dev")
    )
    assert [query.id for query in train] == ["a0", "a1"]
    assert dev[0].positive == "c 0" and dev[0].negatives == ("C\r\n1", "c 2")
    # The paragraphs that answer a question are no negatives of it, wherever it is asked.
    assert [(query.positive, query.negatives) for query in dev[1:]] == [
        ("c 1", ("c 0",)),
        ("c 2", ("c 0",)),
    ]
    assert len(retrieval.read_passages(tmp_path / "out" / "passages.jsonl")) == 7
    broken = article("b")
    del broken["paragraphs"][1]["qas"][0]["question"]
    for content, message in (
        ([article("a")], r"squad.json: 'data' must be of type list, found none"),
        (
            {"data": [article("a"), broken]},
            r"article 2, paragraph 2, question 1 \(id b1\): 'question' is missing; found id, ",
        ),
    ):
        source.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message):
            convert(source, tmp_path / "out", heldout_articles=1)


def test_null_in_a_query_file_is_a_missing_value(tmp_path):
    lines = [{"id": None, "query": text, "positive": None, "negatives": []} for text in ("a", "b")]
    queries = retrieval.read_queries(write_lines(tmp_path / "test.jsonl", lines))
    assert [(each.id, each.positive) for each in queries] == [("0", None), ("1", None)]
