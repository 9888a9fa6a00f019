"""Every form of queries and passages, in every format, is the same queries."""

import csv
import json

import pyarrow
import pytest
from pyarrow import parquet

from bert_jax.tasks import tables
from bert_jax.tasks.queries import iterate_queries, read_queries
from tests.helpers.json_lines import write_lines


def write_rows(path, rows):
    """Writes rows in the format of the suffix."""
    if path.suffix == ".jsonl":
        write_lines(path, rows)
    elif path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        with open(path, "w", newline="") as stream:
            delimiter = "," if path.suffix == ".csv" else "\t"
            writer = csv.DictWriter(stream, list(rows[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    return path


def described(queries):
    return [
        (each.id, each.text, each.positive, each.negatives, each.grade, each.scores)
        for each in queries
    ]


FORMS = {
    "pairs": (
        [{"anchor": "a", "positive": "b"}, {"anchor": "c", "positive": "d"}],
        [("0", "a", "b", (), 1, None), ("1", "c", "d", (), 1, None)],
    ),
    "question and answer": (
        [{"id": 5, "question": "a, or b?", "answer": 'the "first"'}],
        [("5", "a, or b?", 'the "first"', (), 1, None)],
    ),
    "triplets": (
        [{"query": "a", "positive": "b", "negative": "c"}],
        [("0", "a", "b", ("c",), 1, None)],
    ),
    "columns of negatives": (
        [
            {"query": "a", "positive": "b", "negative_1": "c", "negative_2": "d"},
            {"query": "e", "positive": "f", "negative_1": "g", "negative_2": None},
        ],
        [("0", "a", "b", ("c", "d"), 1, None), ("1", "e", "f", ("g",), 1, None)],
    ),
    "labels": (
        [
            {"query": "a", "passage": "b", "label": 2},
            {"query": "a", "passage": "c", "label": 0},
            {"query": "a", "passage": "d", "label": 1},
            {"query": "e", "passage": "c", "label": 1},
        ],
        [
            ("0", "a", "b", ("c",), 2, None),
            ("0", "a", "d", ("c",), 1, None),
            ("3", "e", "c", (), 1, None),
        ],
    ),
}


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("form", FORMS)
def test_forms_are_the_same_in_every_format(form, suffix, tmp_path):
    rows, expected = FORMS[form]
    path = write_rows(tmp_path / f"rows{suffix}", rows)
    unused = {}
    assert described(read_queries(path, is_training=True, unused=unused)) == expected
    assert described(iterate_queries(path, unused)) == expected and not unused


@pytest.mark.parametrize(("form", "num_read"), [("pairs", 1), ("labels", 4)])
def test_queries_are_yielded_while_the_file_is_read(form, num_read, monkeypatch):
    """The first one once its last line is known, of labels by the line of the next query."""
    read = []
    rows = ((row, str(read.append(row))) for row in FORMS[form][0])
    monkeypatch.setattr(tables, "iterate_rows", lambda path: rows)
    next(iterate_queries("queries.jsonl", {}))
    assert len(read) == num_read


def test_lists_of_positives_and_a_teachers_scores(tmp_path):
    row = {"query": "a", "pos": ["b", "c"], "neg": ["d"], "pos_scores": [3, 2.5], "neg_scores": [1]}
    own = {
        "query": "a",
        "positives": ["b", "c"],
        "negatives": ["d"],
        "positive_scores": [3, 2.5],
        "negative_scores": [1],
    }
    expected = [("0", "a", "b", ("d",), 1, (3, 1)), ("0", "a", "c", ("d",), 1, (2.5, 1))]
    for suffix in (".jsonl", ".parquet"):
        for rows in ([row], [own]):
            assert described(read_queries(write_rows(tmp_path / f"r{suffix}", rows))) == expected
    # Of predictions, the scores of the negatives alone are not a teacher's.
    line = {"query": "a", "positive": "b", "negatives": ["d"], "scores": [1.5]}
    unused = {}
    (query,) = read_queries(write_lines(tmp_path / "p.jsonl", [line]), unused=unused)
    assert query.scores is None and unused == {"scores": 1}
    line["positive_score"] = 2
    (query,) = read_queries(write_lines(tmp_path / "p.jsonl", [line]))
    assert query.scores == (2, 1.5)


def test_labels_of_a_query_are_joined_wherever_they_are(tmp_path):
    rows = [{"query": q, "passage": p, "label": n} for q, p, n in ("ab1", "cd1", "ae0", "cf0")]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    assert [(each.text, each.negatives) for each in read_queries(path)] == [
        ("a", ("e",)),
        ("c", ("f",)),
    ]


def test_damaged_parquet_is_refused(tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_text(json.dumps({"query": "a"}))
    with pytest.raises(ValueError, match=r"rows\.parquet is not Parquet"):
        read_queries(path)
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, ["query", "query"])
    parquet.write_table(twice, path)
    with pytest.raises(ValueError, match="'query'"):
        read_queries(path)
    parquet.write_table(pyarrow.table({"query": [b"a"]}), path)
    with pytest.raises(ValueError, match=r"rows\.parquet, row 1: .*bytes"):
        read_queries(path)
    with pytest.raises(FileNotFoundError):
        read_queries(tmp_path / "none.parquet")
