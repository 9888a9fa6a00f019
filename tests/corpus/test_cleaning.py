"""Dropped documents and tokens are counted, and nothing else is missing."""

import collections
import json
import random

import numpy as np
import pytest

from bert_corpus import cleaning, readers
from bert_corpus.build import build_corpus
from bert_corpus.cleaning import drop_reason, near_duplicate_keys, near_duplicates
from bert_corpus.config import ROWS, CorpusConfig
from bert_corpus.plan import Plan
from bert_corpus.steps import Report
from bert_jax.data.rows import Rows
from bert_jax.tokenizers.tokenizer import load_tokenizer
from tests.helpers.corpora import WORDS, random_text, write_vocabulary


def build(directory, text, name="corpus", **settings):
    """Builds a corpus of a text; returns its manifest, and the samples of what it dropped."""
    (directory / "text.txt").write_text(text)
    tokenizer = load_tokenizer(write_vocabulary(directory / "vocab.txt"))
    defaults = {"sentences": "lines", "heldout_fraction": 0, "max_seq_length": 64}
    arguments = directory / name, CorpusConfig(**(defaults | settings))
    manifest = build_corpus(str(directory / "text.txt"), tokenizer, *arguments, num_processes=1)
    samples = json.loads((directory / name / "samples.json").read_text())
    return manifest, samples["dropped"]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("dupe_factor", "repeat"), [(1, 1), (3, 1), (2, 3)])
def test_every_token_is_in_the_rows_or_counted_as_dropped(tmp_path, rows, dupe_factor, repeat):
    text = random_text(40) + "\nthe river .\n\n" + random_text(12) + "\n" + "old stone " * 400
    settings = {"rows": rows, "dupe_factor": dupe_factor, "max_seq_length": 32}
    settings |= {"repeat": f"{tmp_path}/text.txt:{repeat}"} if repeat > 1 else {}
    manifest, _ = build(tmp_path, text, heldout_fraction=0.2, **settings)
    assert (repeat > 1) == (manifest["splits"]["train"]["repeated_tokens"] > 0)
    for name, split in manifest["splits"].items():
        dropped, passes = (
            collections.Counter(split["dropped"]),
            dupe_factor if name == "train" else 1,
        )
        tokens_in = split["text_tokens"] - dropped["duplicate_tokens"] + split["repeated_tokens"]
        tokens_in = tokens_in * passes + split["copied_tokens"]
        tokens_out = split["tokens"] - split["special_tokens"]
        assert tokens_in == (
            tokens_out + dropped["truncated_tokens"] + dropped["tokens_without_pairs"]
        )
        stored = Rows(tmp_path / "corpus", name)
        batch = stored.read(0, stored.num_rows)
        assert np.count_nonzero(batch["tokens"]) == split["tokens"]
        lengths = split["histograms"]
        assert sum(lengths["pair_lengths"]) == split["pairs"]
        assert sum(lengths["row_tokens"]) == split["rows"]
    splits = manifest["splits"].values()
    assert sum(split["dropped"].get("duplicates", 0) for split in splits) == 12


def test_copies_of_a_document_are_dropped_and_the_others_are_built_as_without_them(tmp_path):
    documents = random_text(30).split("\n\n")
    copies = [documents[n % 5] for n in range(20)]
    manifest, samples = build(tmp_path, "\n\n".join([*documents, *copies]), "with")
    alone, _ = build(tmp_path, "\n\n".join(documents), "without")
    split, expected = manifest["splits"]["train"], alone["splits"]["train"]
    assert split["documents"] == 50 and split["dropped"]["duplicates"] == 20
    assert len(samples["duplicates"]) == 20
    assert documents[0].split("\n")[0][:40] in samples["duplicates"][0]
    for name in ("pairs", "rows", "tokens", "copied_tokens"):
        assert split[name] == expected[name]
    kept, _ = build(tmp_path, "\n\n".join([*documents, *copies]), "kept", drop_duplicates=False)
    assert "duplicates" not in kept["splits"]["train"]["dropped"]
    assert kept["splits"]["train"]["text_tokens"] == split["text_tokens"]


@pytest.mark.parametrize(
    ("settings", "text", "reason"),
    [
        ({"min_words": 3}, "one two", "short_documents"),
        ({"min_words": 2}, "one two", ""),
        ({"max_words": 1}, "one two", "long_documents"),
        ({"max_words": 2}, "one two", ""),
        ({"only_language": "en"}, "The river runs past the old town and under its bridge.", ""),
        (
            {"only_language": "en"},
            "Der Fluss fließt an der alten Stadt vorbei und unter der Brücke durch.",
            "documents_in_other_languages",
        ),
        (
            {"only_language": "de"},
            "The river runs past the old town and under its bridge.",
            "documents_in_other_languages",
        ),
    ],
)
def test_filters_by_length_and_language(settings, text, reason):
    assert drop_reason([text], CorpusConfig(**settings)) == reason


def test_dropped_documents_are_counted_with_samples(tmp_path):
    text = random_text(20) + "\n\n" + "\n\n".join(f"the river {word} ." for word in WORDS)
    manifest, samples = build(tmp_path, text, min_words=10)
    assert manifest["splits"]["train"]["dropped"]["short_documents"] == len(WORDS)
    assert samples["short_documents"] == [f"the river {word} ." for word in WORDS][:20]


@pytest.mark.parametrize(
    ("settings", "is_kept"),
    [
        ({"max_words": 399}, False),
        ({"max_words": 400}, True),
        ({"min_words": 400}, True),
        ({"min_words": 401}, False),
        ({"min_words": 150, "max_words": 399}, False),
        ({"min_words": 150, "max_words": 400}, True),
        ({"max_words": 10}, False),
        ({"min_words": 2}, True),
    ],
)
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
@pytest.mark.parametrize("spooled", [1, 1 << 20], ids=["on_disk", "in_memory"])
def test_words_of_a_long_document_count_to_its_end(
    tmp_path, monkeypatch, settings, is_kept, kind, spooled
):
    monkeypatch.setattr(readers, "MAX_DOCUMENT_BYTES", 100)
    monkeypatch.setattr(cleaning, "MAX_SPOOLED_BYTES", spooled)
    documents = ["the river .\n" * 100 + "old stone\n" * 50, "a small town .\n" * 2] * 2
    text = "\n\n".join(documents)
    if kind == "jsonl":
        text = "\n".join(json.dumps({"text": document}) for document in documents)
    (tmp_path / f"text.{kind}").write_text(text)
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    plan, report = Plan(f"{tmp_path}/text.{kind}", tokenizer, CorpusConfig(**settings)), Report()
    parts = [part for _, part in plan.tokenize(0, report)]
    short_is_kept = settings.get("min_words", 0) <= 8 <= settings.get("max_words", 8)
    assert sum(part.num_tokens() for part in parts) == 2 * (400 * is_kept + 8 * short_is_kept)
    count = report.count("train") + report.count("heldout")
    num_dropped = count["dropped_long_documents"] + count["dropped_short_documents"]
    assert num_dropped == 4 - 2 * is_kept - 2 * short_is_kept and count["documents"] == 4


def share_of_common_keys(similarity, threshold):
    """Returns how many of 40 pairs of texts with this Jaccard similarity have a key in common."""
    rng, found = random.Random(0), 0
    num_words = 404  # 400 sets of five consecutive words
    # A changed word changes five sets; J = (n - 5 c) / (n + 5 c).
    num_changed = round(400 * (1 - similarity) / (1 + similarity) / 5)
    for _ in range(40):
        words = [str(rng.random()) for _ in range(num_words)]
        changed = list(words)
        for n in range(num_changed):
            changed[(n + 1) * num_words // (num_changed + 1)] = "changed" + str(rng.random())
        keys = [set(near_duplicate_keys([" ".join(text)], threshold)) for text in (words, changed)]
        found += bool(keys[0] & keys[1])
    return found / 40


def test_near_duplicates_share_a_key_above_the_threshold():
    assert share_of_common_keys(0.95, 0.8) > 0.9
    assert share_of_common_keys(0.5, 0.8) < 0.1
    assert share_of_common_keys(0.7, 0.5) > 0.9


def test_all_but_the_first_document_with_a_key_are_dropped():
    documents = np.array([2, 3, 5, 8, 9], np.uint64)
    columns = np.array([[1, 2, 1, 3, 4], [9, 8, 7, 6, 8]], np.uint64)
    assert near_duplicates(documents, columns).tolist() == [5, 9]


def test_near_duplicates_are_dropped_and_counted(tmp_path, monkeypatch):
    rng = random.Random(0)
    words = [f"w{n}" for n in range(400)]
    documents = [" ".join(rng.choice(words) for _ in range(300)) for _ in range(30)]
    copies = [document + " and more" for document in documents[:10]]
    vocabulary = write_vocabulary(tmp_path / "words.txt", [*words, *WORDS])
    (tmp_path / "text.txt").write_text("\n\n".join([*documents, *copies]))
    config = CorpusConfig(near_duplicates=0.8, heldout_fraction=0.2, max_seq_length=64)
    arguments = str(tmp_path / "text.txt"), load_tokenizer(vocabulary), tmp_path / "corpus", config
    manifest = build_corpus(*arguments, num_processes=1)
    dropped = [split["dropped"].get("near_duplicates", 0) for split in manifest["splits"].values()]
    assert sum(dropped) == 10
    assert sum(split["documents"] for split in manifest["splits"].values()) == 40


def test_copies_in_other_formats_are_dropped_from_the_same_split(tmp_path):
    documents = random_text(60).split("\n\n")
    (tmp_path / "a.txt").write_text("\n\n".join(documents))
    lines = (json.dumps({"text": document.strip()}) for document in documents)
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    config = CorpusConfig(sentences="lines", heldout_fraction=0.3, max_seq_length=64)
    inputs = f"{tmp_path}/a.txt,{tmp_path}/b.jsonl"
    manifest = build_corpus(inputs, tokenizer, tmp_path / "corpus", config, num_processes=1)
    for split in manifest["splits"].values():
        assert split["dropped"]["duplicates"] == split["documents"] / 2 > 0


TEXTS = {
    "zh": "这条河流经过古老的小镇桥比镇子还要古老傍晚时人们可以听见水声看见船上的灯光",
    "ja": "この川は古い町を通って流れており橋は町よりも古く夕方になると水の音が聞こえる",
    "th": "แม่น้ำสายนี้ไหลผ่านเมืองเก่าและสะพานก็เก่าแก่กว่าตัวเมืองในตอนเย็น",
}


@pytest.mark.parametrize("language", TEXTS)
def test_near_duplicates_and_words_are_found_without_spaces(language):
    text, rng = TEXTS[language], random.Random(0)
    first, other = (["".join(rng.sample(text, len(text))) for _ in range(12)] for _ in range(2))
    changed = [*first[:-1], first[-1][:-3] + first[0][:3]]
    keys = [set(near_duplicate_keys(sentences, 0.8)) for sentences in (first, changed, other)]
    assert keys[0] & keys[1] and not keys[0] & keys[2]
    config = CorpusConfig(min_words=60, max_words=1000)
    assert drop_reason(first, config) == "" and drop_reason([text], config) == "short_documents"
    assert drop_reason(first * 10, config) == "long_documents"
