"""Tables: the content of each file type, and quoting in TSV."""

import csv
import hashlib
import json
import random
import tracemalloc

import numpy as np
import pytest
import tensorflow_datasets as tfds

from bert_jax.tasks.tables import content_hash, drop_blank_rows, read_table
from tests.helpers.corpora import write_tfds
from tests.helpers.json_lines import write_lines


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        ("csv", 'id,text,label\n1,"a ""big"", old\nroad",yes\n2,river\u2028town,no\n'),
        ("csv", '\ufeffid,text,label\r\n1,"a ""big"", old\r\nroad",yes\r\n2,river\u2028town,no'),
        ("jsonl", '{"id": 1, "text": "a \\"big\\", old\\nroad", "label": "yes"}\n\n'
                  '{"label": "no", "id": 2, "text": "river\u2028town"}\n'),
    ],
    ids=["csv", "csv_of_windows", "jsonl"],
)  # fmt: skip
def test_texts_may_contain_quotes_commas_and_line_ends(suffix, text, tmp_path):
    path = tmp_path / f"table.{suffix}"
    path.write_bytes(text.encode())
    records = read_table(path, ("id", "text", "label"))
    assert [record.columns["text"] for record in records] == [
        'a "big", old\nroad',
        "river\u2028town",
    ]
    assert [record.columns["id"] for record in records] == ["1", "2"]
    assert records[1].location.endswith(f"line {4 if suffix == 'csv' else 3}")


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_what_a_csv_writer_writes_is_read_back(suffix, quoting, tmp_path):
    """As pandas writes too, whose `to_csv` is Python's csv.writer."""
    rng = random.Random(0)
    for _ in range(200):
        texts = ["".join(rng.choices('ab" \t\n,', k=9)) + "." for _ in range(5)]
        with open(tmp_path / f"table.{suffix}", "w", newline="") as stream:
            delimiter = "," if suffix == "csv" else "\t"
            writer = csv.writer(stream, delimiter=delimiter, quoting=quoting)
            writer.writerows([("text", "label"), *((text, "x") for text in texts)])
        records = read_table(tmp_path / f"table.{suffix}", ("text", "label"))
        assert [record.columns["text"] for record in records] == texts
        starts = np.cumsum([2] + [text.count("\n") + 1 for text in texts])[:-1]
        assert [int(record.location.rpartition(" ")[2]) for record in records] == starts.tolist()


STRAY = ['"open', 'closed"', '5" disk', '"Hi," he said', '"a" and "b"', '"""', '"never ends']


@pytest.mark.parametrize("stray", STRAY)
def test_a_tsv_with_a_stray_quotation_mark_is_read_without_quoting(stray, tmp_path):
    path = tmp_path / "table.tab"
    texts = ['"quoted"', "x" * 200_000, stray]
    for end in ("", "\n"):
        lines = ["text\tlabel", "d\tc", "class\t", *(f"{text}\ta" for text in texts)]
        path.write_text("\n".join(lines) + end)
        records = read_table(path, ("text", "label"), header_lines=3)
        assert [record.columns["text"] for record in records] == texts


def test_a_field_of_an_unquoted_tsv_is_not_joined_with_the_next(tmp_path):
    path = tmp_path / "table.tsv"
    path.write_text('text\tlabel\n"open\tclosed"\n')
    (record,) = read_table(path, ("text", "label"))
    assert record.columns == {"text": '"open', "label": 'closed"'}
    path.write_text('text\tlabel\n"one\tfield"\tx\n')
    (record,) = read_table(path, ("text", "label"))
    assert record.columns == {"text": "one\tfield", "label": "x"}


def test_lines_of_an_unquoted_tsv_are_never_joined(tmp_path):
    """A file in which one text begins and a later one ends with a mark is ambiguous: an error."""
    rng, path, num_ambiguous = random.Random(0), tmp_path / "table.tsv", 0
    for _ in range(300):
        texts = rng.choices(
            ['"open', 'closed"', "plain", '"', 'a "b" c', '""'], [2, 2, 9, 1, 1, 1], k=5
        )
        path.write_text("text\tlabel\n" + "".join(f"{text}\tx\n" for text in texts))
        try:
            records = read_table(path, ("text", "label"))
        except ValueError as error:
            num_ambiguous += 1
            line = 2 + next(
                i for i, text in enumerate(texts) if text.startswith('"') and text != '""'
            )
            assert f"table.tsv, line {line}: the quotation mark may quote a field" in str(error)
            continue
        expected = [text.replace('""', "") for text in texts]  # Read as the field "".
        assert [record.columns["text"] for record in records] in (texts, expected)
    assert 10 < num_ambiguous < 100


def test_a_quoted_header_shows_that_a_tsv_is_quoted(tmp_path):
    """Also a file of one column, whose lines have one field whether or not they are quoted."""
    path = tmp_path / "table.tsv"
    path.write_text('"text"\n"the\nriver"\n"war"\n')
    assert [each.columns["text"] for each in read_table(path, ("text",))] == ["the\nriver", "war"]
    path.write_text('text\n"the\nriver"\nwar\n')
    with pytest.raises(
        ValueError, match=r"line 2: .* quote all fields and the header \(csv\.QUOTE_ALL"
    ):
        read_table(path, ("text",))


def test_only_the_label_may_be_a_list(tmp_path):
    path, columns = tmp_path / "table.jsonl", ("text", "label")
    path.write_text('{"text": "river", "label": ["a", "b"], "source": ["c",  "d"]}\n')
    (record,) = read_table(path, ("text",), label="label", label_separator="|")
    assert record.labels == ("a", "b")
    assert record.columns == {"text": "river", "label": '["a", "b"]', "source": '["c",  "d"]'}
    hint = "expected text or a number; to train on several labels, set config.data.label_separator$"
    with pytest.raises(ValueError, match=rf"line 1: 'label' is a list, {hint}"):
        read_table(path, ("text",), label="label")
    path.write_text('{"text": ["river"], "label": ["a"]}\n')
    with pytest.raises(ValueError, match=r"line 1: 'text' is a list, expected text or a number$"):
        read_table(path, columns, label="label", label_separator="|")


ANY_TEXT = 'ab|,;\t" \\é😀'


def random_value(rng, depth=0):
    """Returns the JSON text of a random value, as someone may write it, and its text."""
    kind = rng.randrange(6 if depth < 2 else 4)
    if kind < 2:
        text = "".join(rng.choices(ANY_TEXT, k=4))
        return json.dumps(text, ensure_ascii=rng.random() < 0.5), text
    if kind == 2:
        number = rng.choice(
            ["3.0", "-0", "1e5", "2E-3", "0.10", str(10**30), "1.10000000000000001"]
        )
        return number, number
    if kind == 3:
        return rng.choice([("true", "true"), ("false", "false"), ("null", "")])
    values = [random_value(rng, depth + 1)[0] for _ in range(rng.randrange(3))]
    space = rng.choice(["", " ", "  "])
    nested = f"[{space}{f',{space}'.join(values)}]"
    if kind == 5:
        members = (f'"{index}":{space}{value}' for index, value in enumerate(values))
        nested = f"{{{space}{', '.join(members)}}}"
    return nested, nested


def test_json_values_are_read_as_they_are_written(tmp_path):
    rng, path = random.Random(0), tmp_path / "table.jsonl"
    lines, expected = [], []
    for _ in range(500):
        values = {f"{mark} {{:,": random_value(rng) for mark in rng.sample(ANY_TEXT, 3)}
        space = rng.choice(["", " ", "\t"])
        members = (f"{json.dumps(key)}{space}:{space}{text}" for key, (text, _) in values.items())
        lines.append(f"{space}{{{space}{f'{space},{space}'.join(members)}{space}}}{space}\n")
        assert json.loads(lines[-1]).keys() == values.keys()
        expected.append({key: text for key, (_, text) in values.items()})
    path.write_text("".join(lines))
    assert [record.columns for record in read_table(path, ())] == expected


def test_values_of_dicts_are_those_of_the_same_json():
    values = {"text": "a", "answer": True, "size": 3.0, "count": 10**20, "none": None}
    (record,) = read_table([values], ("text", "answer"))
    assert record.columns == {
        "text": "a",
        "answer": "true",
        "size": "3.0",
        "count": str(10**20),
        "none": "",
    }


def test_a_key_that_occurs_twice_is_refused(tmp_path):
    path = tmp_path / "table.jsonl"
    path.write_text('{"text": "a", "text": "b"}\n')
    with pytest.raises(ValueError, match=r"table\.jsonl, line 1: 'text' occurs twice: remove"):
        read_table(path, ("text",))


def test_labels_in_lists_are_never_split_again(tmp_path):
    rng, path = random.Random(0), tmp_path / "table.jsonl"
    for separator in ",|; ":
        rows = [
            ["".join(rng.choices("ab1,|; ", k=3)) + "." for _ in range(rng.randrange(4))]
            for _ in range(50)
        ]
        objects = [{"text": "x", "label": row} for row in rows]
        write_lines(path, objects)
        for source in (path, objects):
            records = read_table(source, ("text",), label="label", label_separator=separator)
            assert [list(record.labels) for record in records] == rows


@pytest.mark.parametrize(
    ("suffix", "values", "expected"),
    [
        ("csv", "a|b, ,|,", [("a", "b"), (), (), ()]),
        ("csv", ",", [None, None]),
        ("csv", "|,", [(), ()]),
        ("jsonl", 'null,["a"]', [None, ("a",)]),
        ("jsonl", "[],[]", [(), ()]),
        ("jsonl", 'null,[],"",""', [None, (), (), ()]),
        ("jsonl", '"",null', [None, None]),
        ("jsonl", '"a| b",""', [("a", "b"), ()]),
        ("jsonl", "[1.0, true],2", [("1.0", "true"), ("2",)]),
    ],
)
def test_no_label_and_an_unknown_label_are_two_things(tmp_path, suffix, values, expected):
    path = tmp_path / f"table.{suffix}"
    if suffix == "csv":
        lines = ["text,label", *(f"river,{each}" for each in values.split(","))]
    else:
        found, index = [], 0
        while index < len(values):
            _, end = json.JSONDecoder().raw_decode(values, index)
            found.append(values[index:end])
            index = end + 1
        lines = [f'{{"text": "river", "label": {each}}}' for each in found]
    path.write_text("\n".join(lines) + "\n")
    records = read_table(path, ("text", "label"), label="label", label_separator="|")
    assert [record.labels for record in records] == expected


@pytest.mark.parametrize("label", ['["a", null]', '["a", ["b"]]', '[""]', '[" "]', '[{"a": 1}]'])
def test_a_list_holds_labels_only(tmp_path, label):
    path = tmp_path / "table.jsonl"
    path.write_text(f'{{"text": "river", "label": {label}}}\n')
    with pytest.raises(ValueError, match=r"line 1: 'label' is a list that holds .*: expected"):
        read_table(path, ("text",), label="label", label_separator="|")


def test_content_hash_covers_all_bytes_without_holding_them(tmp_path):
    path, content = tmp_path / "table.csv", bytes(range(256)) * 40_000
    path.write_bytes(content)
    tracemalloc.start()
    try:
        assert content_hash(str(path), "") == hashlib.sha256(content).hexdigest()[:16]
        assert tracemalloc.get_traced_memory()[1] < len(content) / 10
    finally:
        tracemalloc.stop()


def test_content_hash_of_tfds_covers_all_its_shards(tmp_path):
    features = {"text": tfds.features.Text()}
    splits = {"train": [{"text": "the river"}], "test": [{"text": "war"}]}
    write_tfds(tmp_path, "mine", splits, features)
    shards = sorted(tmp_path.rglob("*.array_record*"))
    content = b"".join(path.read_bytes() for path in shards)
    assert len(shards) == 2
    assert (
        content_hash("tfds:mine#train", str(tmp_path)) == hashlib.sha256(content).hexdigest()[:16]
    )


def test_a_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"no file nowhere\.csv: expected a \.csv"):
        read_table("nowhere.csv", ())


def test_blank_lines_are_reported_and_a_quoted_empty_field_is_a_row(tmp_path, caplog):
    path = tmp_path / "table.csv"
    path.write_text('text\nriver\n""\n\nwar\n\n')
    assert [each.columns["text"] for each in read_table(path, ("text",))] == ["river", "", "war"]
    (record,) = caplog.records
    assert record.getMessage() == f'{path}: 2 blank lines skipped; "" is an empty field'
    path.write_text("text,label\nriver,a\n\n,,,\nwar,b\n")
    assert len(read_table(path, ("text",))) == 2


def test_rows_without_any_field_are_examples_only_in_a_table_without_labels(tmp_path):
    path, notes = tmp_path / "table.csv", {}
    path.write_text("text,label\nriver,\n,\n")
    assert len(drop_blank_rows(read_table(path, ()), "label", "test", notes)) == 2 and not notes
    path.write_text("text,label\nriver,a\n,b\n,\n,\n")
    assert len(drop_blank_rows(read_table(path, ()), "label", "dev", notes)) == 2
    assert notes == {"dev rows without any field, skipped": 2}


@pytest.mark.parametrize("printed", [["Sport", "water"], [], [1, 2], ["it's"]])
@pytest.mark.parametrize("separator", [",", "|"])
def test_a_list_that_was_printed_into_a_csv_is_refused(printed, separator, tmp_path):
    """As pandas writes it: its brackets and quotation marks would become parts of labels."""
    path = tmp_path / "train.csv"
    for labels, refused in ((str(printed), True), ("[a]|[b]", False), ("[a] b", False)):
        with open(path, "w", newline="") as stream:
            csv.writer(stream).writerows([("text", "label"), ("river", labels)])
        options = {"label": "label", "label_separator": separator}
        if refused:
            with pytest.raises(
                ValueError, match=r"line 2: 'label' is \[.*, a list that was written"
            ):
                read_table(path, ["text"], **options)
        else:
            (record,) = read_table(path, ["text"], **options)
            assert record.labels == tuple(labels.split(separator))
