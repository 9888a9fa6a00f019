"""Checks that `bert_jax.predict` predicts what `bert_jax.load` predicts, for each task."""

import functools
import json

import numpy as np
import pytest
from scipy.special import softmax

import bert_jax
from bert_jax import predict as program
from tests.helpers.corpora import texts
from tests.helpers.json_lines import read_lines, write_lines

predict = functools.partial(program.predict, num_devices=1)  # As `load`, on one of the eight.


def check_classes(task, is_pair, model, tmp_path):
    """Compares the labels of the command line with the labels of load, and returns them."""
    first, second = texts(20), texts(20, seed=1)
    pairs = list(zip(first, second, strict=True))
    rows = [{"text": a, "text_pair": b} if is_pair else {"text": a} for a, b in pairs]
    path = write_lines(tmp_path / "new.jsonl", rows)
    options = {"text_pair": "text_pair"} if is_pair else {}
    predict(model, path, tmp_path / "found.jsonl", options)
    lines = read_lines(tmp_path / "found.jsonl")
    inputs, loaded = pairs if is_pair else first, bert_jax.load(model)
    found, expected = [line["prediction"] for line in lines], loaded.classify(inputs)
    if task == "regression":
        assert found == expected
        return found
    ranking = loaded.classify(inputs, top_k=len(loaded.head["labels"]))
    assert [line["probabilities"] for line in lines] == list(map(dict, ranking))
    if task == "classification":
        assert found == [best.label for best in expected]
    else:
        assert list(map(set, found)) == [{label for label, _ in each} for each in expected]
    return found


def check_tags(model, tmp_path, documents=None):
    """Compares the tags of the command line with the tags of load, and returns them."""
    sentences = [text.split() for text in texts(15)]
    names = documents or [str(number) for number in range(15)]  # A text alone is a document.
    rows = [
        {"tokens": words, "document": name} for words, name in zip(sentences, names, strict=True)
    ]
    path = write_lines(tmp_path / "new.jsonl", rows)
    predict(model, path, tmp_path / "found.jsonl")
    predict(model, path, tmp_path / "found.txt")
    lines = read_lines(tmp_path / "found.jsonl")
    blocks = (tmp_path / "found.txt").read_text().strip().split("\n\n")
    columns = [[line.split("\t") for line in block.splitlines()] for block in blocks]
    assert [[word for word, _ in each] for each in columns] == sentences
    found = [[tag for _, tag in each] for each in columns]
    assert found == [line["prediction"] for line in lines]
    tagged = bert_jax.load(model).tag([tuple(words) for words in sentences], documents)
    for line, each in zip(lines, tagged, strict=True):
        assert line["prediction"] == [word.tag for word in each.words]
        assert line["probabilities"] == [word.probability for word in each.words]
        assert line.get("entities", []) == [entity._asdict() for entity in each.entities]
    return found


def check_answers(model, tmp_path, copies=1):
    """Compares answers of contexts that are repeated `copies` times."""
    contexts = [" ".join([text] * copies) for text in texts(12, seed=1)]
    pairs = list(zip(texts(12), contexts, strict=True))
    rows = [{"id": str(n), "question": q, "context": c} for n, (q, c) in enumerate(pairs)]
    path = write_lines(tmp_path / "new.jsonl", rows)
    predict(model, path, tmp_path / "found.jsonl")
    predict(model, path, tmp_path / "found.json")
    lines = read_lines(tmp_path / "found.jsonl")
    official = json.loads((tmp_path / "found.json").read_text())
    assert official == {line["id"]: line["prediction"] for line in lines}
    questions, contexts = map(list, zip(*pairs, strict=True))
    answers = bert_jax.load(model).answer(questions, contexts, top_k=20)
    for line, ranked in zip(lines, answers, strict=True):
        assert line["prediction"] == ranked[0].text
        assert line["answers"] == [answer._asdict() for answer in ranked]


def check_retrieval(model, tmp_path, **query_options):
    queries, passages = texts(6), texts(8, seed=1)
    path = write_lines(
        tmp_path / "passages.jsonl",
        [{"id": f"p{n}", "text": text} for n, text in enumerate(passages)],
    )
    predict(model, path, tmp_path / "vectors.npy")
    loaded, vectors = bert_jax.load(model), np.load(tmp_path / "vectors.npy")
    np.testing.assert_array_equal(vectors, loaded.encode(passages))
    ids = read_lines(tmp_path / "vectors.ids.jsonl")
    assert ids == read_lines(path)
    path = write_lines(tmp_path / "queries.jsonl", [{"query": each} for each in queries])
    options = {"passages": str(tmp_path / "vectors.npy")}
    predict(model, path, tmp_path / "found.jsonl", options)
    predict(model, path, tmp_path / "found.txt", options)
    found = bert_jax.search(loaded.encode(queries, **query_options), vectors, top_k=100)
    run = iter((tmp_path / "found.txt").read_text().splitlines())
    lines = read_lines(tmp_path / "found.jsonl")
    for number, (line, scores, indices) in enumerate(zip(lines, *found, strict=True)):
        assert [each["id"] for each in line["passages"]] == [f"p{index}" for index in indices]
        assert [each["score"] for each in line["passages"]] == scores.tolist()
        for rank, (index, score) in enumerate(zip(indices, scores, strict=True), start=1):
            fields = next(run).split()
            assert fields[:4] == [str(number), "Q0", f"p{index}", str(rank)]
            assert np.float32(fields[4]) == score


def check_rankings(model, tmp_path):
    queries, passages = texts(5), texts(4, seed=1)
    lines = [{"query": query, "negatives": passages} for query in queries]
    path = write_lines(tmp_path / "new.jsonl", lines)
    predict(model, path, tmp_path / "found.jsonl")
    rankings = bert_jax.load(model).rank(queries, passages)
    for line, ranked in zip(read_lines(tmp_path / "found.jsonl"), rankings, strict=True):
        assert line["negatives"] == [each.text for each in ranked]
        assert line["scores"] == [each.score for each in ranked]


def check_choices(model, tmp_path):
    stories, endings = texts(9), texts(36, seed=1)
    own = [endings[4 * number : 4 * number + 4] for number in range(9)]
    header = ["sent1", "sent2", *(f"ending{n}" for n in range(4)), "label"]
    rows = [[story, "", *each, "0"] for story, each in zip(stories, own, strict=True)]
    (tmp_path / "swag").mkdir()
    text = "".join(f"{','.join(row)}\n" for row in (header, *rows))
    (tmp_path / "swag/val.csv").write_text(text)
    scores = predict(model, tmp_path / "swag", tmp_path / "found")["val.jsonl"]
    loaded, lines = bert_jax.load(model), read_lines(tmp_path / "found/val.jsonl")
    for line, story, each in zip(lines, stories, own, strict=True):
        ranked = [x.score for x in sorted(loaded.rank(story, each), key=lambda x: x.index)]
        assert int(line["prediction"]) == int(np.argmax(ranked))
        expected = dict(zip("0123", softmax(ranked).tolist(), strict=True))
        assert line["probabilities"] == pytest.approx(expected, abs=1e-5)
    right = sum(line["prediction"] == "0" for line in lines)
    assert scores == {"accuracy": pytest.approx(right / 9), "examples": 9}
