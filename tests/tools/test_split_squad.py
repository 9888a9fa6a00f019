"""Splitting a SQuAD file by article."""

import json

import pytest

from bert_jax.tools import split_squad
from bert_jax.tools.split_squad import add_unanswerable, split

CONTENT = {"version": "1.1", "data": [{"title": str(number)} for number in range(10)]}


@pytest.mark.parametrize("seed", range(3))
def test_every_article_is_in_one_part_in_file_order(seed):
    train, dev = split(CONTENT, dev_articles=3, seed=seed)
    titles = [[int(article["title"]) for article in part["data"]] for part in (train, dev)]
    assert [len(part) for part in titles] == [7, 3]
    assert titles == [sorted(part) for part in titles]
    assert sorted(titles[0] + titles[1]) == list(range(10))
    assert train["version"] == dev["version"] == "1.1"


def test_seed_selects_the_articles():
    assert len({str(split(CONTENT, 3, seed)) for seed in range(5)}) > 1


def test_unanswerable_questions_are_asked_of_paragraphs_without_their_answer():
    contexts = ["It is red.", "It is Red, too.", "It is blue."]
    qas = [{"id": "a", "question": "Color?", "answers": [{"text": "red", "answer_start": 6}]}]
    paragraphs = [{"context": context, "qas": []} for context in contexts]
    paragraphs[0]["qas"] = qas
    other = {"context": "Red.", "qas": [dict(qas[0], id="b")]}
    other["qas"] += [dict(qas[0], id="c", answers=[]), dict(qas[0], id="d", answers=None)]
    content = {"data": [{"paragraphs": paragraphs}, {"paragraphs": [other]}]}
    assert add_unanswerable(content, seed=0) == 1  # The second article has one paragraph.
    (added,) = paragraphs[2]["qas"]
    unanswerable = {"id": "a-unanswerable", "answers": [], "is_impossible": True}
    assert added == {"question": "Color?"} | unanswerable
    assert len(paragraphs[0]["qas"]) == 1 and not paragraphs[1]["qas"] and len(other["qas"]) == 3


@pytest.mark.parametrize("count", [0, 10])
def test_empty_part_raises_a_clear_error(count):
    with pytest.raises(ValueError, match=f"--dev_articles={count}"):
        split(CONTENT, count, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "squad.json: 'data' must be of type list, found none"),
        (
            {"data": [{"paragraphs": [{"context": "x"}]}]},
            "article 1, paragraph 1: 'qas' is missing; found context",
        ),
    ],
)
def test_other_formats_are_reported_in_one_line(content, message, tmp_path):
    (tmp_path / "squad.json").write_text(json.dumps(content))
    with pytest.raises(SystemExit) as exited:
        split_squad.main(["split_squad", str(tmp_path / "squad.json"), str(tmp_path / "out")])
    assert message in exited.value.code and "\n" not in exited.value.code
    assert not (tmp_path / "out").exists()
