"""Texts are the same, for the split and as copies, if a model sees the same."""

import json
import random

import pytest

from bert_corpus.build import build_corpus
from bert_corpus.config import CorpusConfig
from bert_corpus.identity import MAX_HASHED_BYTES, plain_text, text_hash
from bert_corpus.readers import Document
from bert_corpus.steps import split_hash
from bert_corpus.vocabulary import train_sentencepiece
from bert_jax.data.rows import Rows
from bert_jax.tokenizers.tokenizer import load_tokenizer, tokenizer_from_bytes
from tests.helpers.corpora import random_text, train_bpe, write_vocabulary

SAME_TO_A_MODEL = [
    ("old town", "old\r\ntown"),
    ("old town", " old  \t\n\n town\u2028"),
    ("old town", "OLD Town"),
    ("old town", "o\u200bld\u00a0to\u00adwn\ufeff"),
    ("old town", "o\x00ld to\x7fwn\ufffd"),
    ("sch\u00f6n", "scho\u0308n"),
    ("sch\u00f6n", "SCHON"),
    ("\ufb01nd", "find"),
    ("\u6771\u4eac\u3002", "\u6771 \u4eac \u3002"),
    ("\uff21\uff11", "a1"),
    ("\u00c5", "\u212b"),
    ("old dog.", "old dog ."),
]


@pytest.mark.parametrize(("text", "other"), SAME_TO_A_MODEL)
def test_texts_that_differ_in_spelling_alone_are_in_the_same_split(text, other):
    assert text_hash(text, 3) == text_hash(other, 3)
    assert split_hash(Document(text), CorpusConfig()) == split_hash(Document(other), CorpusConfig())


@pytest.mark.parametrize("other", ["old towns", "old tow", "older", "old town.", "", "\u6771"])
def test_other_words_have_another_hash(other):
    assert text_hash("old town", 0) != text_hash(other, 0)
    assert text_hash("old town", 0) != text_hash("old town", 1)


def test_plain_text_keeps_the_words_apart():
    assert plain_text("\u00c4rger\u00a0im\u3000Stra\u00dfencaf\u00e9\u2028!") == (
        "arger im strassencafe !"
    )


def test_markup_is_not_part_of_a_text():
    plain = Document("The river is old. It runs south.")
    marked = Document("The '''river''' is [[age|old]].\n\nIt runs south.", "wikitext")
    assert split_hash(plain, CorpusConfig()) == split_hash(marked, CorpusConfig())


def test_a_long_text_has_the_hash_of_its_beginning_whatever_its_white_space():
    words = " ".join(f"word{n}" for n in range(20_000))
    assert len(words) > 4 * MAX_HASHED_BYTES
    spaced = words.replace(" ", " \r\n" * 40)
    assert text_hash(words, 0) == text_hash(spaced, 0) == text_hash(words + " more", 0)
    assert text_hash(words, 0) != text_hash(words.replace("word90 ", "word91 "), 0)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Of every kind; without unknown characters, which are equal to a model, whatever they are."""
    directory = tmp_path_factory.mktemp("vocabularies")
    characters = [
        *"abouk.,'-",
        *"ABOUK",
        "\u00e4",
        "\u00f6",
        "\u0308",
        "\u6771",
        "\u0e01",
        "\u0e31",
    ]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *characters, *(f"##{c}" for c in characters)]
    content = "".join(f"{piece}\n" for piece in pieces).encode()
    (directory / "text.txt").write_text("a\u00e4 Bu k\u6771 o\u00f6 \u0e01 .,'- auk bok\n" * 99)
    lower, cased = (
        train_sentencepiece(f"{directory}/text.txt", 40, lower_case) for lower_case in (True, False)
    )
    return [
        tokenizer_from_bytes("vocab.txt", content, True),
        tokenizer_from_bytes("vocab.txt", content, False),
        tokenizer_from_bytes("spiece.model", lower),
        tokenizer_from_bytes("spiece.model", cased),
        train_bpe(directory, "abc"),
    ]


@pytest.mark.slow
def test_texts_with_equal_token_ids_have_equal_hashes(tokenizers):
    rng, num_equal = random.Random(0), 0
    parts = [*"abouk.,'-ABOUK", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u200b", "\u00ad", "\x00"]
    parts += [
        "\u00e4",
        "a\u0308",
        "\u00d6",
        "O\u0308",
        "\u6771",
        "\uff42",
        "\u3000",
        "\ufeff",
        "\u212a",
    ]
    for _ in range(4000):
        text = [rng.choice(parts) for _ in range(rng.randint(1, 4))]
        other = list(text)
        for _ in range(rng.randint(1, 2)):
            other[rng.randrange(len(other))] = rng.choice(parts)
        text, other = "".join(text), "".join(other)
        for tokenizer in tokenizers:
            ids, other_ids = tokenizer.encode_batch([text, other])
            if ids == other_ids and tokenizer.unk_id not in ids:
                num_equal += 1
                assert text_hash(text, 0) == text_hash(other, 0), (text, other, tokenizer.casing)
    assert num_equal > 1000


def spellings(text):
    return [
        text,
        text.replace("\n", "\r\n"),
        text.replace("\n", "\r"),
        text.title(),
        text.replace(" ", "  ") + " ",
        text.replace("o", "o\u0308"),
        text.replace("o", "\u00f6"),
        text.replace(" .", "."),
        text.replace("e", "e\u00ad"),
    ]


@pytest.mark.parametrize("mode", ["split", "lines"])
def test_every_document_counts_once_whatever_its_spelling(tmp_path, mode):
    documents = [document.strip() for document in random_text(40).split("\n\n")]
    copies = [copy for document in documents for copy in spellings(document)]
    random.Random(1).shuffle(copies)
    lines = [json.dumps({"text": text}) for text in copies]
    (tmp_path / "docs.jsonl").write_text("\n".join(lines))
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    config = CorpusConfig(
        max_seq_length=256, heldout_fraction=0.3, rows="document_sentences", sentences=mode
    )
    arguments = str(tmp_path / "docs.jsonl"), tokenizer, tmp_path / "corpus", config
    splits = build_corpus(*arguments, num_processes=1)["splits"]
    kept, found = {}, {}
    for name, split in splits.items():
        kept[name] = split["documents"] - split["dropped"]["duplicates"]
        rows = Rows(tmp_path / "corpus", name)
        batch = rows.read(0, rows.num_rows)
        found[name] = [
            tokens[start:end].tobytes()
            for tokens, bounds in zip(batch["tokens"], batch["sequence_bounds"], strict=True)
            for start, _, end in bounds.tolist()
            if end
        ]
    assert sum(kept.values()) == 40 and kept["heldout"] > 3
    assert not {*found["train"]} & {*found["heldout"]}
    assert len(found["train"]) == len({*found["train"]}) == kept["train"]


def test_near_duplicates_are_found_in_another_spelling(tmp_path):
    rng = random.Random(0)
    words = [f"w\u00f6rd{n}" for n in range(500)]
    documents = [" ".join(rng.choices(words, k=300)) for _ in range(20)]
    near = [document.upper().replace("\u00d6", "O\u0308") + " and more" for document in documents]
    (tmp_path / "text.txt").write_text("\n\n".join([*documents, *near]))
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt", ["word", "##1", "##2"]))
    config = CorpusConfig(near_duplicates=0.8, heldout_fraction=0, rows="full_sentences")
    arguments = str(tmp_path / "text.txt"), tokenizer, tmp_path / "corpus", config
    train = build_corpus(*arguments, num_processes=1)["splits"]["train"]
    assert train["documents"] == 40 and train["dropped"]["near_duplicates"] == 20


def test_documents_with_other_unknown_words_are_not_copies(tmp_path):
    texts = ["the xylem .", "the yeast .", "the Xylem  .", "the zebra ."]
    (tmp_path / "text.txt").write_text("\n\n".join(texts))
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    config = CorpusConfig(heldout_fraction=0, rows="full_sentences")
    arguments = str(tmp_path / "text.txt"), tokenizer, tmp_path / "corpus", config
    train = build_corpus(*arguments, num_processes=1)["splits"]["train"]
    assert train["documents"] == 4 and train["dropped"]["duplicates"] == 1
