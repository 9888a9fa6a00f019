"""Tables: the content of each file type, and quoting in TSV."""

import csv
import hashlib
import random
import tracemalloc

import numpy as np
import pytest
import tensorflow_datasets as tfds

from bert_jax.tasks.tables import content_hash, drop_blank_rows, read_table
from tests.helpers import write_tfds


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


def test_only_a_list_of_labels_is_joined(tmp_path):
    path, columns = tmp_path / "table.jsonl", ("text", "label")
    path.write_text('{"text": "river", "label": ["a", "b"], "source": ["c", "d"]}\n')
    (record,) = read_table(path, ("text",), label="label", label_separator="|")
    assert record.columns == {"text": "river", "label": "a|b", "source": '["c", "d"]'}
    hint = "expected text or a number; if it holds labels, set --config.data.label_separator$"
    with pytest.raises(ValueError, match=rf"line 1: 'label' is a list, {hint}"):
        read_table(path, ("text",), label="label")
    path.write_text('{"text": ["river"], "label": ["a"]}\n')
    with pytest.raises(ValueError, match=r"line 1: 'text' is a list, expected text or a number$"):
        read_table(path, columns, label="label", label_separator="|")


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
