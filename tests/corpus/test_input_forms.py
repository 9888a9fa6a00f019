"""Every form of input beside text, JSON lines, dumps and TFDS: read, split, and refused."""

import bz2
import collections
import csv
import gzip
import importlib.util
import json
import os
import re
import sys

import pyarrow
import pytest
from pyarrow import parquet

from bert_corpus import fasta, files, inputs
from bert_corpus.build import build_corpus
from bert_corpus.config import CorpusConfig
from bert_corpus.inputs import find_inputs, split_into_units
from bert_corpus.readers import read_documents
from bert_corpus.sentences import split_sentences
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import random_text, write_vocabulary

DECLARED = '<html><head><meta charset="windows-1252"></head><body><p>{}</p></body></html>'
PARAGRAPH = "The café has a paragraph with enough words that it is no menu, and a second clause."
PARAGRAPHS = [PARAGRAPH.replace("café", name) for name in ("café", "mill", "old bridge", "lake")]
PAGE = f"""<!DOCTYPE html><html><head><title>Title</title><style>p {{}}</style></head><body>
<nav><a href="/">Home</a> <a href="/b">Blog</a></nav>
<article><h1>Heading</h1><p>{"</p><p>".join(PARAGRAPHS)}</p>
<table><tr><td>cell</td></tr></table></article>
<script>var x = 1;</script><footer>Copyright 2020</footer></body></html>"""
CHINESE = (
    "她在北京的大学里学习了很多年。后来回到了她的家乡。朱鎔基" * 3
)  # The last is not in GB 2312.
PAGE_TEXT = "\n\n".join(["Heading", *PARAGRAPHS])
MARKDOWN = """---
title: Metadata
---
# A *heading*

One [link](http://a.b "t"),
`code` &amp; more.<br>Next ![a badge](b.png).

- item one
- item two

| a | b |
|---|---|
| c | d |

```
code = 1
```
"""


def arrow_stream(values):
    table = pyarrow.table(values)
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return sink.getvalue().to_pybytes()


def arrow_file(values):
    table = pyarrow.table(values)
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return sink.getvalue().to_pybytes()


def write_files(directory, contents):
    for name, content in contents.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def write_saved_dataset(directory, texts, **state):
    """Writes what `datasets.save_to_disk` writes (version 5.2)."""
    names = [f"data-0000{number}-of-00002.arrow" for number in range(2)]
    state = {"_data_files": [{"filename": name} for name in names]} | state
    halves = texts[: len(texts) // 2], texts[len(texts) // 2 :]
    contents = dict(zip(names, (arrow_stream({"text": half}) for half in halves), strict=True))
    contents |= {"state.json": json.dumps(state), "dataset_info.json": "{}"}
    write_files(directory, contents)


def read(pattern, text_field="text", documents="blank_lines"):
    """Returns the documents of the inputs, read in units, and what was skipped."""
    skipped = collections.Counter()
    units = split_into_units(find_inputs(pattern, text_field, documents=documents))
    found = [each for group in units for unit in group for each in read_documents(unit, skipped)]
    return found, {name: count for name, count in skipped.items() if count}


# Name, content, --text_field, documents, skipped.
GOOD = {
    "csv": (
        "a.csv",
        '\ufeffid,text\r\n1,"One, ""two""\r\n\r\nthree."\r\n\r\n2,Four.\r\n3,\r\n',
        "text",
        ['One, "two"\r\n\r\nthree.', "Four."],
        {"lines": 3, "lines_without_text": 1},
    ),
    "csv_semicolons": ("a.csv", "id;body\n1;One, two.\n", "body", ["One, two."], {"lines": 1}),
    "csv_one_column": ("a.csv", 'text\n"One, two."\n', "text", ["One, two."], {"lines": 1}),
    "tsv": (
        "a.TAB",
        'text\tlabel\nOne, "two".\t1\n"""Three"" is quoted."\t0\n',
        "text",
        ['One, "two".', '"Three" is quoted.'],
        {"lines": 2},
    ),
    "fasta": (
        "a.fa",
        ">sp|P1 a > header\nMKVnac\nLA GA*\n\n>empty\n>2\r\nAC-R.YK\r\n",
        "text",
        ["MKVNACLAGA", "AC-R.YK"],
        {
            "sequence_headers": 3,
            "headers_without_sequence": 1,
            "letters_in_lower_case": 3,
            "stops_at_the_end": 1,
        },
    ),
    "fasta_with_gaps": (
        "a.fna",
        f">1\n{'N' * 60}\n{'N' * 60}\nACGT\n{'n' * 150}\nGGNNCC\n",
        "text",
        ["ACGT", "GGNNCC"],
        {"sequence_headers": 1, "letters_in_lower_case": 150, "letters_in_gaps": 270},
    ),
    "html": (
        "a.html",
        PAGE,
        "text",
        [PAGE_TEXT],
        {},
    ),
    "html_without_a_suffix": (
        "index",
        PAGE,
        "text",
        [PAGE_TEXT],
        {},
    ),
    "xhtml": (
        "a.htm",
        '<?xml version="1.0" encoding="UTF-8"?>\n' + PAGE,
        "text",
        [PAGE_TEXT],
        {},
    ),
    "html_in_its_encoding": (
        "a.html",
        DECLARED.format(PARAGRAPH).encode("cp1252"),
        "text",
        [PARAGRAPH],
        {},
    ),
    "html_that_cannot_be_utf_16": (
        "a.html",
        DECLARED.format(PARAGRAPH).replace("windows-1252", "utf-16"),
        "text",
        [PARAGRAPH],
        {},
    ),
    "html_in_chinese": (
        "a.html",
        DECLARED.format(CHINESE).replace("windows-1252", "gb2312").encode("gbk"),
        "text",
        [CHINESE],
        {},
    ),
    "html_without_text": ("a.html", "<html></html>", "text", [], {"pages_without_text": 1}),
    "markdown": (
        "a.md",
        MARKDOWN,
        "text",
        ["A heading\n\nOne link, code & more. Next .\n\nitem one\n\nitem two"],
        {"metadata_blocks": 1, "tables": 1, "code_blocks": 1, "images": 1},
    ),
    "markdown_after_a_line": ("a.md", "---\n\nOne: two.\n\n---\n", "text", ["One: two."], {}),
    "markdown_of_prose_after_a_line": (
        "a.md",
        "---\nNote: this is prose.\n\nMore of it.\n\n---\nAnd\nmore.\n",
        "text",
        ["Note: this is prose.\n\nMore of it.\n\nAnd more."],
        {},
    ),
    "markdown_of_prose_over_two_lines": (
        "a.md",
        "---\nNote: this is prose\nover two lines.\n\n---\n",
        "text",
        ["Note: this is prose over two lines."],
        {},
    ),
    "markdown_with_lists_in_yaml": (
        "a.md",
        "---\ntitle: A\n'key': |\n  more\n\ttext\ntags:\n- b\n- c\nlist: [\n  d\n]\n...\nOne.\n",
        "text",
        ["One."],
        {"metadata_blocks": 1},
    ),
    "markdown_with_toml": (
        "a.md",
        '+++\ntitle = "A"\ntags = [\n  "b",\n]\n\n[params]\nx.y = 1\n+++\n\nOne.\n',
        "text",
        ["One."],
        {"metadata_blocks": 1},
    ),
    "markdown_of_dos": ("a.md", MARKDOWN.replace("\n", "\r\n"), "text", None, None),
    "markdown_without_text": (
        "a.md",
        "    code\n\n<div>\n</div>\n",
        "text",
        [],
        {"code_blocks": 1, "html_blocks": 1, "pages_without_text": 1},
    ),
    "arrow_stream": (
        "a.arrow",
        arrow_stream({"id": [1, 2, 3], "body": ["One.", None, "Two."]}),
        "body",
        ["One.", "Two."],
        {"lines": 3, "lines_without_text": 1},
    ),
    "arrow_file": ("a.arrow", arrow_file({"text": ["1", "2", "3"]}), "text", ["1", "2", "3"], None),
}
NEEDS_TRAFILATURA = pytest.mark.skipif(
    not importlib.util.find_spec("trafilatura"), reason="needs the extra html"
)


def cases(table):
    marks = {name: [NEEDS_TRAFILATURA] if "html" in name else [] for name in table}
    return [pytest.param(*case, id=name, marks=marks[name]) for name, case in table.items()]


@pytest.mark.parametrize(("name", "content", "field", "expected", "skipped"), cases(GOOD))
def test_form_is_read(tmp_path, monkeypatch, name, content, field, expected, skipped):
    write_files(tmp_path, {name: content})
    found, counts = read(f"{tmp_path}/{name}", field)
    if expected is None:
        expected, skipped = GOOD["markdown"][3:]
    assert [document.text for document in found] == expected
    assert skipped is None or counts == skipped
    monkeypatch.setattr(inputs, "UNIT_BYTES", 40)  # Many units hold each document once.
    in_units, counts_of_units = read(f"{tmp_path}/{name}", field)
    assert (sorted(in_units), counts_of_units) == (sorted(found), counts)
    if not name.endswith(".arrow"):
        for suffix, compress in ((".gz", gzip.compress), (".bz2", bz2.compress)):
            content = content.encode() if isinstance(content, str) else content
            write_files(tmp_path, {name + suffix: compress(content)})
            in_units, counts_of_units = read(f"{tmp_path}/{name}{suffix}", field)
            assert (sorted(in_units), counts_of_units) == (sorted(found), counts)


# Name, content, --text_field, message.
BAD = {
    "csv_without_the_column": (
        "a.csv",
        "id,body\n1,One.\n",
        "text",
        "a.csv has the columns 'id', 'body'; expected 'text': its first line must name the "
        "columns, or name the column with --text_field",
    ),
    "csv_without_a_header": ("a.csv", "One two.,1\n", "text", "the columns 'One two.', '1'; expec"),
    "csv_with_two_of_them": ("a.csv", "text,text\n1,2\n", "text", "names 'text' twice"),
    "csv_with_an_open_quote": (
        "a.csv",
        'text,id\na,1\n"b,2\nc,3\n',
        "text",
        "a.csv, line 3: unexpected end of data; close every quoted field",
    ),
    "csv_with_text_after_a_quote": (
        "a.csv",
        'text,id\na,1\n"b" c,2\n',
        "text",
        "a.csv, line 3: ',' expected after '\"'",
    ),
    "csv_with_too_many_fields": (
        "a.csv",
        'text,id\n"a\nb",1\nc, d,2\n',
        "text",
        "a.csv, line 4: expected 2 fields, as in the header, found 3; quote a text that holds ','",
    ),
    "csv_in_latin_1": ("a.csv", b"text\na\nb\xe9\n", "text", "a.csv, line 3, byte 8: 0xe9 is not"),
    "csv_of_a_spreadsheet": ("a.csv", b"PK\x03\x04\0", "text", "is a ZIP archive"),
    "csv_that_is_a_page": ("a.csv", "<html><body>404</body></html>", "text", "is an HTML page"),
    "tsv_with_literal_quotes": (
        "a.tsv",
        'text\tid\n"One\t1\nTwo"\t2\n',
        "text",
        "a.tsv, line 2: a quoted field holds a tab or a line end, so perhaps its quotation mark is",
    ),
    "tsv_with_literal_quotes_in_another_column": (
        "a.tsv",
        'title\ttext\n"Quote at start\tfirst text is lost\nsecond"\tsecond text\n',
        "text",
        "a.tsv, line 2: a quoted field holds a tab or a line end",
    ),
    "tsv_with_literal_quotes_in_one_column": (
        "a.tsv",
        'text\n"First.\nSecond."\n',
        "text",
        "a.tsv, line 2: a quoted field holds a tab or a line end",
    ),
    "fasta_without_a_header": ("a.fa", "ACGT\n", "text", "a.fa begins with 'A'; expected FASTA"),
    "fasta_of_reads": (
        "a.fa",
        "@r1\nACGT\n+\n!!!!\n",
        "text",
        "a.fa begins with '@'; expected FAS",
    ),
    "fasta_with_digits": ("a.fa", ">1\nACGT\n1 ACGT\n", "text", "a.fa, line 3: '1' is not a val"),
    "fasta_indented": ("a.fa", "  >1\nACGT\n", "text", "a.fa, line 1: '>' is not a valid sequence"),
    "fasta_in_binary": ("a.fa", b">1\nAC\0\0", "text", "holds NUL bytes"),
    "html_in_another_encoding": (
        "a.html",
        f"<html><p>{PARAGRAPH}</p>".encode("cp1252"),
        "text",
        "a.html, line 1, byte 16: 0xe9 is not UTF-8",
    ),
    "html_in_an_unknown_encoding": (
        "a.html",
        DECLARED.replace("windows-1252", "utf-9"),
        "text",
        "a.html declares the encoding utf-9: unknown encoding: utf-9",
    ),
    "html_in_binary": ("a.html", b"%PDF-1.7", "text", "is a PDF document"),
    "markdown_in_latin_1": (
        "a.md",
        b"a\n\xe9\n",
        "text",
        "a.md, line 2, byte 2: 0xe9 is not UTF-8",
    ),
    "arrow_cut_off": (
        "a.arrow",
        arrow_stream({"text": ["One.", "Two."]})[:-60],
        "text",
        "a.arrow is damaged or cut off",
    ),
    "arrow_with_damaged_offsets": (
        "a.arrow",
        arrow_stream({"text": ["One.", "Two."]}).replace(
            b"\4\0\0\0\x08\0\0\0", b"\4\0\0\0\xff\xff\xff\x7f"
        ),
        "text",
        "a.arrow is damaged or cut off",
    ),
    "arrow_that_is_not_utf_8": (
        "a.arrow",
        arrow_stream({"text": ["One.", "Two."]}).replace(b"Two.", b"\xffwo."),
        "text",
        "a.arrow is damaged or cut off",
    ),
    "arrow_of_text": ("a.arrow", "One.\n", "text", "a.arrow is damaged or cut off"),
    "arrow_without_the_column": (
        "a.arrow",
        arrow_stream({"id": [1], "body": ["One."]}),
        "text",
        "a.arrow has the columns 'id', 'body'; expected 'text'",
    ),
    "arrow_of_numbers": (
        "a.arrow",
        arrow_stream({"text": [1]}),
        "text",
        "column 'text' of {tmp}/a.arrow is int64; expected string",
    ),
    "empty_file": ("a.csv", "", "text", "a.csv is empty; remove it from --input"),
    "unknown_suffix": ("a.docx", "x", "text", "a.docx has an unknown suffix"),
    "glob_of_no_input": (
        "a.csv",
        "text\na\n",
        "*.tsv:body,text",
        "--text_field: *.tsv matches none of the inputs that have fields",
    ),
    "two_fields_for_all": ("a.csv", "text\na\n", "title,text", "--text_field=title,text: expected"),
    "glob_without_a_field": (
        "a.csv",
        "text\na\n",
        "*.csv:",
        "--text_field=*.csv:: expected a name",
    ),
}


@pytest.mark.parametrize(("name", "content", "field", "message"), cases(BAD))
def test_bad_input_is_a_clear_error(tmp_path, name, content, field, message):
    write_files(tmp_path, {name: content})
    with pytest.raises(ValueError, match=re.escape(message.replace("{tmp}", str(tmp_path)))):
        read(f"{tmp_path}/{name}", field)


def test_each_input_has_the_field_that_its_glob_names(tmp_path):
    table = pyarrow.table({"content": ["Four."], "text": ["-"]})
    parquet.write_table(table, tmp_path / "d.parquet")
    write_files(
        tmp_path,
        {
            "a.csv": "body,text\nOne.,-\n",
            "b.csv": "title,text\nTwo.,-\n",
            "c.jsonl": '{"text": "Three."}\n',
            "e.txt": "Five.\n",
        },
    )
    field = f"b.csv:title,*.csv:body,{tmp_path}/*.parquet:content,text"
    found, _ = read(f"{tmp_path}/*", field)
    assert [document.text.strip() for document in found] == [
        "One.",
        "Two.",
        "Three.",
        "Four.",
        "Five.",
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["unix", "dos", "old_mac"])
def test_units_of_fasta_hold_each_sequence_once(tmp_path, monkeypatch, end):
    monkeypatch.setattr(fasta, "MAX_LETTERS", 50)
    sequences = ["ACGT" * (5 * number) + "AC" for number in range(12)]
    records = [
        f">{number}{end}" + end.join(re.findall(".{1,9}", each)) + end
        for number, each in enumerate(sequences)
    ]
    (tmp_path / "a.fa").write_text("".join(records), newline="")
    for unit_bytes in (1 << 20, 300, 7):
        monkeypatch.setattr(inputs, "UNIT_BYTES", unit_bytes)
        found, skipped = read(f"{tmp_path}/a.fa")
        assert "".join(document.text for document in found) == "".join(sequences)
        assert max(len(document.text) for document in found) == 50
        assert skipped == {"sequence_headers": 12}
        assert split_sentences(found[0]) == [found[0].text]


@pytest.mark.parametrize("line", [7, 80, 10**6])
def test_a_gap_across_a_cut_leaves_no_letter(tmp_path, monkeypatch, line):
    """Of parts of 90, 201 and 3 letters; 99 N are no gap, and "*" is the end."""
    monkeypatch.setattr(fasta, "MAX_LETTERS", 100)
    parts = "ACG" * 30, "T" * 90 + "N" * 99 + "ACGTACGTACGT", "TTT"
    sequence = ("N" * 150).join(parts) + "*"
    content = ">1\n" + "\n".join(re.findall(f".{{1,{line}}}", sequence)) + "\n>2\nAC\n"
    (tmp_path / "a.fa").write_text(content)
    found, skipped = read(f"{tmp_path}/a.fa")
    second = parts[1]
    expected = [parts[0], second[:100], second[100:200], second[200:], "TTT", "AC"]
    assert [document.text for document in found] == expected
    assert skipped == {"sequence_headers": 2, "letters_in_gaps": 300, "stops_at_the_end": 1}


def test_a_sequence_on_one_long_line_is_an_error_that_says_how_to_break_it(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 50)
    (tmp_path / "a.fa").write_text(f">1\n{'ACGT' * 20}\n")
    with pytest.raises(ValueError, match=r"line of over 50 bytes at byte 3; break it with `fold"):
        read(f"{tmp_path}/a.fa")


def test_star_of_a_glob_matches_no_slash_and_a_name_with_a_bracket_matches_itself(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    names = ["texts/1.csv", "texts/a.csv", "texts/a1.csv", "texts/a[1].csv", "texts/sub/a.csv"]
    write_files(tmp_path, dict.fromkeys(names, "text\nOne.\n"))
    sources = find_inputs("texts/**")
    assert [source.path for source in sources] == names
    for glob, expected in (
        ("texts/*.csv", names[:4]),
        ("./texts/a*.csv", names[1:4]),
        ("texts/**/a.csv", [names[1], names[4]]),
        ("**", names),
        ("texts/a[1].csv", [names[3]]),
        ("texts/[1].csv", [names[0]]),
    ):
        repeated = inputs.repeat_inputs(sources, f"{glob}:3")
        assert [source.path for source in repeated if source.repeats == 3] == expected
    found = find_inputs("texts/**", "texts/*:body,text")
    assert [source.text_field for source in found] == ["body"] * 4 + ["text"]
    found = find_inputs("texts/*[[]1].csv", "a[1].csv:body,text")
    assert [source.text_field for source in found] == ["body"]


def test_directory_of_a_saved_dataset_is_read(tmp_path, monkeypatch):
    texts = [f"Text {number}." for number in range(10)]
    write_saved_dataset(tmp_path / "train", texts)
    for unit_bytes in (1 << 20, 100):
        monkeypatch.setattr(inputs, "UNIT_BYTES", unit_bytes)
        found, skipped = read(f"{tmp_path}/train/")
        assert sorted(document.text for document in found) == texts
        assert skipped == {"lines": 10}
    write_files(tmp_path, {"dataset_dict.json": '{"splits": ["train", "test"]}'})
    message = f"choose among --input={tmp_path}/train, --input={tmp_path}/test"
    with pytest.raises(ValueError, match=re.escape(message)):
        read(str(tmp_path))
    with pytest.raises(ValueError, match=r"give only its directory, --input=.*/train$"):
        read(f"{tmp_path}/train/*")
    write_saved_dataset(tmp_path / "train", texts, _indices_data_files=[{"filename": "i.arrow"}])
    with pytest.raises(ValueError, match="holds rows and a selection of them, which is not read"):
        read(f"{tmp_path}/train")
    write_files(tmp_path, {"train/state.json": "{"})
    with pytest.raises(ValueError, match=r"train: state\.json, dataset_info\.json is damaged"):
        read(f"{tmp_path}/train")
    os.remove(tmp_path / "train" / "data-00001-of-00002.arrow")
    write_files(tmp_path, {"train/state.json": '{"_data_files": [{"filename": "data-1.arrow"}]}'})
    with pytest.raises(FileNotFoundError, match=r"train/data-1\.arrow matches no file"):
        read(f"{tmp_path}/train")


@pytest.mark.slow
def test_corpus_of_all_forms_is_the_same_with_any_number_of_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "UNIT_BYTES", 3000)
    texts = [text.replace("\n", " ") for text in random_text(60, seed=1).split("\n\n")]
    with open(tmp_path / "a.csv", "w", newline="") as stream:
        csv.writer(stream).writerows([["id", "text"], *enumerate(texts[:20])])
    write_saved_dataset(tmp_path / "saved", texts[20:40])
    pages = {f"{number}.md": f"# A page\n\n{text}\n" for number, text in enumerate(texts[40:])}
    records = [f">{number}\n{'ACGTTGCA' * (20 + number)}\n" for number in range(30)]
    if importlib.util.find_spec("trafilatura"):  # Instead of some of Markdown.
        for number in range(5):
            del pages[f"{number}.md"]
            pages[f"{number}.html"] = PAGE.replace("lake", f"lake of {number}")
    write_files(tmp_path, pages | {"b.fa": "".join(records)})
    patterns = [f"{tmp_path}/{name}" for name in ("*.csv", "saved", "[0-9]*.*", "*.fa")]
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    shards = []
    for num_processes in (1, 4):
        output = tmp_path / f"corpus-{num_processes}"
        manifest = build_corpus(
            patterns, tokenizer, output, CorpusConfig(heldout_fraction=0.1), False, num_processes
        )
        shards.append({path.name: path.read_bytes() for path in output.glob("*.array_record")})
        assert sum(split["documents"] for split in manifest["splits"].values()) == 90
        assert manifest["skipped"]["sequence_headers"] == 30
    assert shards[0] == shards[1]


def test_missing_library_is_named_with_its_extra(tmp_path, monkeypatch):
    write_files(tmp_path, {"a.html": PAGE})
    for library, pattern, extra in (
        ("trafilatura", f"{tmp_path}/a.html", "html"),
        ("datasets", f"hf:{tmp_path}", "datasets"),
    ):
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(ImportError, match=rf"pip install 'bert_jax\[{extra}\]'"):
            find_inputs(pattern)


def test_dataset_of_the_hub_is_streamed(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="needs the extra datasets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    texts = [f"Text {number}.\n\nMore." for number in range(10)]
    rows = [json.dumps({"id": 1, "body": text}) + "\n" for text in texts]
    contents = {f"news/train-{number}.jsonl": "".join(rows[number::3]) for number in range(3)}
    contents |= {"news/test.jsonl": '{"body": "Last."}\n{"body": null}\n'}
    write_files(tmp_path, contents)
    for unit_bytes, num_units in ((1 << 20, 1), (100, 3)):
        monkeypatch.setattr(inputs, "UNIT_BYTES", unit_bytes)
        found, skipped = read(f"hf:{tmp_path}/news", "hf:*:body")
        assert sorted(document.text for document in found) == texts
        assert skipped == {"lines": 10}
        assert len(split_into_units(find_inputs(f"hf:{tmp_path}/news"))) == num_units
    found, skipped = read(f"hf:{tmp_path}/news::test", "body")
    assert [document.text for document in found] == ["Last."]
    assert skipped == {"lines": 2, "lines_without_text": 1}
    for name, error, message in (
        ("news", ValueError, "has the columns 'id', 'body'; expected 'text'"),
        ("news:en", ValueError, "BuilderConfig 'en' not found. Available: ['default']"),
        ("news::dev", ValueError, "Bad split: dev. Available splits: ['train', 'test']"),
        ("news:::dev", ValueError, "expected hf:NAME[:CONFIG[:SPLIT]]"),
        ("absent", OSError, f"cannot read --input=hf:{tmp_path}/absent: "),
    ):
        with pytest.raises(error, match=re.escape(message)):
            read(f"hf:{tmp_path}/{name}")
    with pytest.raises(ValueError, match=r"column 'id' of hf:.* is Value\('int64'\); expected str"):
        read(f"hf:{tmp_path}/news", "id")
