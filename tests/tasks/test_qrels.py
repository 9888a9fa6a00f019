"""Corpora, queries, qrels and runs with ids: reading, training, ranking and scores."""

import math

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

import bert_jax
from bert_jax import finetune
from bert_jax.configs.finetune import retrieval as config_file
from bert_jax.tasks import retrieval
from bert_jax.tasks.qrels import read_corpus, read_qrels, read_query_texts, read_run, score_run
from bert_jax.tasks.queries import iterate_queries, read_queries
from bert_jax.tasks.task import TrainedHead
from bert_jax.tasks.vectors import VectorPredictor
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import write_vocabulary
from tests.helpers.json_lines import read_lines, write_lines
from tests.helpers.models import write_weights

CORPUS = [
    {"_id": "d1", "title": "the king", "text": "a king of the people"},
    {"_id": "d2", "title": "", "text": "the river grew old"},
    {"_id": "d3", "text": "a road"},
    {"_id": "d4", "title": "war", "text": "the war"},
    {"_id": "d5", "text": "A  ROAD"},  # A copy of d3, to an uncased model.
]
QUERIES = [
    {"_id": "q1", "text": "king"},
    {"_id": "q2", "text": "old river"},
    {"_id": "q3", "text": "north"},
]
QRELS = {
    "q1": {"d1": 2, "d4": 1, "d3": 0},
    "q2": {"d2": 1, "d9": 3},
    "q3": {"d3": 0},
    "q8": {"d1": 1},
}
RUN = {"q1": ["d3", "d1", "d2"], "q2": ["d1", "d5", "d8"]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_vocabulary(tmp_path_factory.mktemp("v") / "vocab.txt"))


@pytest.fixture
def files(tmp_path):
    """The files of a small BEIR data set, and a run, by the field that names them."""
    paths = {
        "passages": write_lines(tmp_path / "corpus.jsonl", CORPUS),
        "queries": write_lines(tmp_path / "queries.jsonl", QUERIES),
        "dev": tmp_path / "dev.tsv",
        "run": tmp_path / "first.run",
    }
    judged = [f"{q}\t{d}\t{grade}\n" for q, own in QRELS.items() for d, grade in own.items()]
    paths["dev"].write_text("query-id\tcorpus-id\tscore\n" + "".join(judged))
    found = (
        f"{query} Q0 {id_} {rank} {-rank}.5 first\n"
        for query, ids in RUN.items()
        for rank, id_ in enumerate(ids, start=1)
    )
    paths["run"].write_text("".join(found))
    return paths


def make_task(files, tokenizer, role="bi_encoder", **fields):
    config = config_file.get_config(f"{role},runlocal")
    for name, value in ({"num_negatives": 1} | files | fields).items():
        config.data[name] = str(value) if name in files else value
    return retrieval.get_task(config, tokenizer)


def texts_of(tokenizer, feature):
    (tokens,) = feature.sequences
    parts = tokenizer.decode(tokens.tolist()).removeprefix("[CLS]").split("[SEP]")[:-1]
    return [part.strip() for part in parts]


def test_every_passage_is_ranked_by_id_with_its_title(files, tokenizer, tmp_path):
    del files["run"]
    task = make_task(files, tokenizer, cutoffs=(1, 3), metric="ndcg_at_3")
    assert task.metric == "dev/ndcg_at_3"
    (split,) = task.splits
    assert split.counts == {"queries": 2, "passages": 5}
    texts = [texts_of(tokenizer, each)[0] for each in split.features]
    assert texts[:4] == ["king", "old river", "the king a king of the people", "the river grew old"]
    assert texts[4] == texts[6] == "a road"  # Two ids are two passages, though they are copies.
    notes = {name: count for name, count in task.notes.items() if count}
    assert notes == {
        f"dev queries of the qrels that {files['queries']} does not have": 1,
        f"dev passages of the qrels that {files['passages']} does not have": 1,
        "dev queries without a passage that answers them, left out": 1,
    }
    # The scores of the passages for each query; d3 and d4 are tied, and d5 is ahead of d2.
    vectors = [[1, 0], [0, 1], [2, 0], [0, 1], [1, 3], [1, 0], [0, 2]]
    outputs = [np.float32([vector]) for vector in vectors]
    found = split.score(outputs)
    ranks = {"d1": 1, "d4": 3}, {"d2": 3, "d9": math.inf}
    ideal = 2 + 1 / math.log2(3), 3 + 1 / math.log2(3)
    gains = 2 + 1 / math.log2(4), 1 / math.log2(4)
    assert found["ndcg_at_3"] == pytest.approx(np.mean(np.divide(gains, ideal)))
    assert found["mrr_at_3"] == pytest.approx((1 + 1 / 3) / 2)
    assert found["recall_at_3"] == pytest.approx((1 + 1 / 2) / 2)
    split.write(outputs, tmp_path)
    lines = read_lines(tmp_path / "dev.jsonl")
    assert [line["id"] for line in lines] == ["q1", "q2"]
    assert [line["positive_ids"] for line in lines] == [["d1", "d4"], ["d2"]]
    assert [line["ranks"] for line in lines] == [list(ranks[0].values()), [3]]
    assert lines[1]["negative_ids"] == ["d3", "d5", "d1", "d4"]
    # A cross-encoder can train on them, or rerank them.
    read = read_queries(tmp_path / "dev.jsonl", is_training=True)
    assert [(each.id, each.rank) for each in read] == [("q1", 1), ("q1", 3), ("q2", 3)]
    assert read[0].scores[0] == 2 and read[1].positive == "war the war"
    run = read_run(tmp_path / "dev.run")
    assert {query: list(results) for query, results in run.items()} == {
        "q1": ["d1", "d3", "d4", "d2", "d5"],
        "q2": ["d3", "d5", "d2", "d1", "d4"],
    }
    qrels = read_qrels(files["dev"])
    assert score_run(qrels, run)[0] == ["q1", "q2", "q8"]  # Without results, q8 scores 0.
    del qrels["q8"]
    ids, scores = score_run(qrels, run, (1, 3))
    assert ids == ["q1", "q2"]
    assert {name: each.mean() for name, each in scores.items()} == pytest.approx(found)
    table = (tmp_path / "dev_scores.tsv").read_text().splitlines()
    assert table[0].split("\t") == ["score", "mean", "low", "high"]
    row = dict(line.split("\t", 1) for line in table)["mrr_at_3"]
    assert [float(each) for each in row.split("\t")] == pytest.approx([2 / 3, 1 / 3, 1], abs=1e-4)
    rows = [line.split("\t") for line in (tmp_path / "dev_queries.tsv").read_text().splitlines()]
    assert rows[0][:2] == ["id", "mrr_at_1"] and rows[2][0] == "q2"
    assert float(rows[1][rows[0].index("ndcg_at_3")]) == pytest.approx(
        gains[0] / ideal[0], abs=1e-6
    )


def test_predictions_on_qrels_are_read_back_without_copies(files, tokenizer, tmp_path):
    del files["run"]
    files["dev"].write_text("q1 0 d3 1\nq2 0 d9 1\n")  # d5 is a copy of d3, d9 is unknown.
    task = make_task(files, tokenizer)
    (split,) = task.splits
    split.write([np.float32([[1]])] * len(split.features), tmp_path)
    (query,) = read_queries(tmp_path / "dev.jsonl", is_training=True)
    assert (query.id, query.positive) == ("q1", "a road")
    assert len(query.negatives) == 3 and "A  ROAD" not in query.negatives
    assert task.notes["dev queries without a known relevant passage, not in dev.jsonl"] == 1
    assert read_run(tmp_path / "dev.run").keys() == {"q1", "q2"}


def test_cross_encoder_ranks_what_the_first_stage_found(files, tokenizer):
    task = make_task(files, tokenizer, "cross_encoder")
    (split,) = task.splits
    assert split.counts == {"queries": 2, "pairs": 5}
    assert task.notes[f"passages of the run that {files['passages']} does not have"] == 1
    assert texts_of(tokenizer, split.features[1]) == ["king", "the king a king of the people"]
    found = split.score([np.array([score]) for score in (0.0, 2.0, 1.0, 1.0, 1.0)])
    # The first stage has missed d4, d2 and d9.
    assert found["mrr_at_10"] == 0.5 and found["recall_at_10"] == 0.25
    with pytest.raises(ValueError, match=r"q1.*config\.data\.run"):
        make_task(
            {name: files[name] for name in ("passages", "queries", "dev")},
            tokenizer,
            "cross_encoder",
        )


def test_written_vectors_are_of_titles_and_texts_by_id(files, tokenizer):
    def read(data, **options):
        trained = TrainedHead({}, data, tokenizer, 32)
        predictor = VectorPredictor(trained, retrieval.PREDICT_OPTIONS | options)
        records = [(each.id, each.columns["text"]) for each in predictor.read(files["passages"])]
        return records[:2], {name: count for name, count in predictor.notes.items() if count}

    with_titles = [("d1", "the king a king of the people"), ("d2", "the river grew old")]
    notes = {"passages without a 'title'": 3}
    assert read({"queries": "queries.jsonl"}) == read({}, title="title") == (with_titles, notes)
    without = [("d1", "a king of the people"), with_titles[1]]
    assert read({}) == (without, {"passages with a 'title', not used: set title": 2})
    # Without a title, the unnamed column of a table, its index, is none.
    queries, files["passages"] = files["queries"], files["queries"].with_name("corpus.csv")
    files["passages"].write_text(",text\n7,a king\n")
    assert read({})[0] == [("0", "a king")]
    # The file of queries is one of queries to answer, too.
    (query, *_) = iterate_queries(queries, {})
    assert (query.id, query.text) == ("q1", "king")


@pytest.mark.slow
def test_run_on_qrels_with_prompts_is_encoded_as_it_was_trained(files, tmp_path):
    config = config_file.get_config("bi_encoder,runlocal")
    vocabulary = write_vocabulary(tmp_path / "vocab.txt")
    config.init_from = str(write_weights(tmp_path / "weights", vocabulary))
    files["train"] = files["dev"]
    config.data.update({name: str(path) for name, path in files.items()})
    config.data.update({"num_negatives": 1, "query_prompt": "the king ", "passage_prompt": "old "})
    config.data.metric = "ndcg_at_10"
    files["dev"].write_text("q1 0 d1 1\nq1 0 d3 0\nq2 0 d2 1\n")
    result = finetune.train_and_evaluate(config.lock(), tmp_path / "run")
    assert result["metric"] == "dev/ndcg_at_10" and 0 < result["dev"]["ndcg_at_10"] <= 1
    model = bert_jax.load(tmp_path / "run")
    queries = model.encode(["king", "old river"], prompt_name="query")
    texts = read_corpus(files["passages"], {})
    vectors = dict(zip(texts, model.encode([*texts.values()]), strict=True))
    for query, line in zip(
        queries, read_lines(tmp_path / "run/predictions/dev.jsonl"), strict=True
    ):
        for kind, key in (("positive_ids", "positive_scores"), ("negative_ids", "scores")):
            scores = [float(query @ vectors[id_]) for id_ in line[kind]]
            assert scores == pytest.approx(line[key], abs=1e-4)
    plain = model.encode(["the king old river"], pooling="mean", normalize=True)
    np.testing.assert_allclose(plain[0], queries[1], atol=1e-6)
    # Weights with prompts are trained further only with the same.
    config = config.unlock().copy_and_resolve_references()
    config.init_from, config.data.query_prompt = str(tmp_path / "run"), ""
    with pytest.raises(ValueError, match=r"config\.data\.query_prompt='the king '"):
        finetune.train_and_evaluate(config.lock(), tmp_path / "next")


def test_negatives_are_judged_or_of_the_run_but_no_copies_of_a_positive(files, tokenizer):
    files["train"] = files["dev"]
    QUERY = {"_id": "q3", "text": "north"}
    write_lines(files["queries"], [*QUERIES[:2], QUERY])
    files["dev"].write_text("q1 0 d1 1\nq1 0 d3 0\nq2 0 d3 1\n")
    task = make_task(files, tokenizer)
    first, second = task.train
    assert [tokenizer.decode(each.tolist()) for each in first.sequences] == [
        "[CLS] king [SEP]",
        "[CLS] the king a king of the people [SEP]",
        "[CLS] a road [SEP]",
    ]
    # d5, the second in its run, is a copy of its positive d3.
    assert tokenizer.decode(second.sequences[2].tolist()).startswith("[CLS] the king")
    assert task.notes["train negatives left out because they are copies of a positive"] == 1


def test_texts_of_ms_marco_have_no_header_and_no_quotes(tmp_path):
    path, notes = tmp_path / "collection.tsv", {}
    path.write_text('0\tThe "king" said\n7\t"so\n8\t\n')
    texts = {"0": 'The "king" said', "7": '"so', "8": ""}
    assert read_corpus(path, notes) == read_query_texts(path, notes) == texts
    assert notes == {"passages that are empty": 1, "queries that are empty": 1}
    path.write_text("id\ttext\n0\tking\n")
    assert read_corpus(path, notes) == {"0": "king"}
    path.write_text("0\tking\n1\told\triver\n")
    with pytest.raises(ValueError, match=r"collection\.tsv, line 2: .*3"):
        read_corpus(path, notes)


def test_qrels_of_trec_jsonl_and_parquet_are_the_same(tmp_path):
    rows = [
        {"query-id": query, "corpus-id": id_, "score": grade}
        for query, own in QRELS.items()
        for id_, grade in own.items()
    ]
    write_lines(tmp_path / "q.jsonl", rows)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "q.parquet")
    trec = "".join(f"{q} 0 {d} {g}\n" for q, own in QRELS.items() for d, g in own.items())
    (tmp_path / "q.txt").write_text(trec)
    for suffix in ("jsonl", "parquet", "txt"):
        assert read_qrels(tmp_path / f"q.{suffix}") == QRELS
    numbers = write_lines(tmp_path / "n.jsonl", [{"query-id": 1.0, "corpus-id": 2, "score": 1}])
    assert read_qrels(numbers) == {"1": {"2": 1}}


BAD_FILES = {
    "id twice": (read_corpus, [{"_id": "a", "text": "b"}] * 2, "line 2: .*'a'"),
    "no id": (read_corpus, [{"text": "b"}], "line 1: .*'_id'"),
    "id with a space": (
        read_query_texts,
        [{"_id": "a b", "text": "c"}],
        "line 1: .*'a b'",
    ),
    "no text": (read_query_texts, [{"_id": "a"}], "line 1: 'query'"),
    "grade that is no number": (read_qrels, "q 0 d high\n", "line 1: 'score'"),
    "two grades": (
        read_qrels,
        "q 0 d 1\nq 0 d 2\n",
        "line 2: .*'d' .*'q'",
    ),
    "columns of qrels": (read_qrels, "q d\n", "line 1: .*query-id"),
    "no judgments": (read_qrels, "query-id\tcorpus-id\tscore\n", r"f\.txt"),
    "columns of a run": (read_run, "q Q0 d 1 0.5\n", "line 1: .*Q0"),
    "score of a run": (read_run, "q Q0 d 1 nan x\n", "line 1: 'score'"),
    "passage twice": (read_run, "q Q0 d 1 1 x\nq Q0 d 2 0 x\n", "line 2: .*'d' .*'q'"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file_is_named(case, tmp_path):
    read, content, message = BAD_FILES[case]
    path = tmp_path / ("f.txt" if isinstance(content, str) else "f.jsonl")
    if isinstance(content, str):
        path.write_text(content)
    else:
        write_lines(path, content)
    with pytest.raises(ValueError, match=message):
        read(path, {}) if read in (read_corpus, read_query_texts) else read(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"passages": ""}, "config.data.passages"),
        ({"queries": ""}, "config.data.run=.*config.data.queries"),
        ({"cutoffs": (10, 10)}, "config.data.cutoffs"),
        ({"cutoffs": (0,)}, "config.data.cutoffs"),
        ({"metric": "ndcg_at_7"}, "config.data.metric=ndcg_at_7"),
        ({"cutoffs": (1, 5)}, "config.data.metric=mrr_at_10"),
    ],
)
def test_bad_field_is_named(fields, message, files, tokenizer):
    with pytest.raises(ValueError, match=message):
        make_task(files, tokenizer, **fields)


def test_qrels_without_a_known_query_are_refused(files, tokenizer):
    files["dev"].write_text("q8 0 d1 1\nq3 0 d1 0\n")
    with pytest.raises(ValueError, match=r"dev\.tsv"):
        make_task(files, tokenizer)
