"""The check of a corpus's text: language, fit of the vocabulary, accents, lengths."""

import re
import unicodedata

import pytest

from bert_corpus.build import build_corpus
from bert_corpus.config import CorpusConfig
from bert_corpus.steps import MAX_TEXTS, Report
from bert_corpus.summary import describe_text
from bert_corpus.text_check import advise, check_text
from bert_jax.tokenizers.tokenizer import tokenizer_from_bytes

GERMAN = (
    "Der Hund lief am Morgen über die alte Brücke und suchte den Weg zurück in das kleine Dorf, in "
    "dem seine Familie seit vielen Jahren lebte."
)
ENGLISH = (
    "The dog ran across the old bridge in the morning and looked for the way back to the small "
    "village where its family had lived for many years."
)
CZECH = (
    "Pes ráno běžel přes starý most a hledal cestu zpátky do malé vesnice, kde jeho rodina žila už "
    "mnoho let a kde ho každý dobře znal."
)


def strip_accents(word: str) -> str:
    decomposed = unicodedata.normalize("NFD", word)
    return "".join(c for c in decomposed if unicodedata.category(c) != "Mn")


def whole_words(*texts: str, special=("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")):
    """Returns a vocabulary that has each word of the texts, and marks, as one token."""
    words = set(" ".join(texts).lower().replace(",", " ,").replace(".", " .").split())
    plain = {strip_accents(word) for word in words}
    return tokenizer_from_bytes("vocab.txt", "\n".join([*special, *sorted(plain)]).encode())


CHINESE = (
    "她在北京的大学里学习了很多年、后来回到了她的家乡。那里的人都认识她的父亲和母亲、"
    "因为他们在村里住了一辈子。"
)
TOKENIZER = whole_words(GERMAN, ENGLISH, CZECH)
CHARACTERS = whole_words(" ".join(CHINESE))  # As BERT's vocabulary of Chinese.
LETTERS = [*"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz")]
SPLITTING = whole_words("\n".join(LETTERS))


@pytest.mark.parametrize(
    ("texts", "tokenizer", "settings", "messages"),
    [
        ([ENGLISH] * 20, TOKENIZER, {}, []),
        ([GERMAN] * 20, TOKENIZER, {"language": "de"}, ["5.* of the words lose accents"]),
        (
            [ENGLISH] * 20,
            TOKENIZER,
            {"language": "de"},
            ["100% .* identified as 'en', and --language=de: set --language=en"],
        ),
        (
            [ENGLISH] * 14 + [GERMAN] * 6,
            TOKENIZER,
            {},
            [
                r"30% .* other languages than 'en' \(de 30%\): .*, --only_language=en drops",
                "accents",
            ],
        ),
        ([ENGLISH] * 14 + [GERMAN] * 6, TOKENIZER, {"only_language": "en"}, ["lose accents"]),
        ([ENGLISH] * 20, SPLITTING, {}, [r"splits a word into [45]\.\d\d tokens; on English"]),
        ([CZECH] * 20, TOKENIZER, {"language": "cs"}, [r"\d\d\.\d% of the words lose accents"]),
        ([CHINESE] * 20, CHARACTERS, {"language": "zh"}, []),
        # Too few, or too short, to tell.
        ([GERMAN] * 5 + ["Der Hund lief."] * 50, TOKENIZER, {}, ["lose accents"]),
    ],
)
def test_what_is_odd_about_a_text_is_a_warning(texts, tokenizer, settings, messages):
    pytest.importorskip("py3langid")
    _, warnings = check_text(texts, tokenizer, CorpusConfig(**settings), is_symbols=False)
    assert len(warnings) == len(messages), warnings
    for message in messages:
        assert any(re.search(message, warning) for warning in warnings), (message, warnings)


@pytest.mark.parametrize(
    ("language", "shares", "message"),
    [
        (
            "sw",
            {"en": 0.4, "sw": 0.35, "fr": 0.25},
            r"65% .* than 'sw' \(en 40%, fr 25%\): .*=sw d",
        ),
        (
            "en",
            {"en": 0.4, "sw": 0.35, "fr": 0.25},
            r"60% .* than 'en' \(sw 35%, fr 25%\): .*=en d",
        ),
        (
            "de",
            {"en": 0.4, "sw": 0.35, "fr": 0.25},
            r"60% .* than 'en' \(sw 35%, fr 25%\): .*=en d",
        ),
        ("nb", {"da": 0.4, "no": 0.3, "nn": 0.3}, r"40% .* than 'no' \(da 40%\)"),
    ],
)
def test_other_languages_are_those_than_the_one_asked_for(language, shares, message):
    found = {"tokens_per_word": 1.0, "languages": shares}
    (warning,) = advise(found, CorpusConfig(language=language), is_unspaced=False)
    assert re.search(message, warning)


def test_tokens_for_a_character_where_words_are_not_separated():
    for fertility, num_warnings in ((2.4, 0), (6.0, 1)):
        warnings = advise({"tokens_per_word": fertility}, CorpusConfig(), is_unspaced=True)
        assert len(warnings) == num_warnings
    assert "takes 3.00 tokens for a character of this script" in warnings[0]


def test_symbols_have_no_language_and_no_warning():
    found, warnings = check_text(["acgt" * 50] * 20, SPLITTING, CorpusConfig(), is_symbols=True)
    assert found == {"documents": 20, "tokens_per_word": 200.0} and not warnings


def test_the_sample_is_the_same_however_documents_are_split_into_units():
    numbers = [(7919 * n) % 1009 for n in range(500)]
    whole, parts = Report(), [Report() for _ in range(7)]
    for n, number in enumerate(numbers):
        whole.sample(number, f"text {n}")
        parts[n % 7].sample(number, f"text {n}")
    joined = Report()
    for part in parts:
        joined.add(Report(texts=[list(each) for each in part.texts]))  # As JSON stores them.
    assert whole.texts == joined.texts == sorted(whole.texts)
    assert [n for n, _ in whole.texts] == sorted(numbers)[:MAX_TEXTS]


def test_copies_of_a_document_are_sampled_once():
    report = Report()
    for number in (5, 5, 3, 5):
        report.sample(number, f"text {number}")
    other = Report(texts=[[5, "text 5"], [9, "text 9"]])
    report.add(other)
    assert report.texts == [(3, "text 3"), (5, "text 5"), (9, "text 9")]


def test_share_of_the_text_beyond_each_length_of_an_input(tmp_path):
    """Documents of 100, 200 and 600 tokens, counted by hand."""
    documents = (" ".join(["dog"] * 9 + ["."]) + "\n") * 10, "\n".join(["dog bridge"] * 100)
    long = "\n".join(" ".join(["dog"] * 12) for _ in range(50))
    (tmp_path / "text.txt").write_text("\n\n".join([*documents, long]))
    config = CorpusConfig(rows="document_sentences", sentences="lines", heldout_fraction=0)
    build = build_corpus(str(tmp_path / "text.txt"), TOKENIZER, tmp_path / "out", config)
    beyond = build["text"]["beyond_length"]
    expected = {128: 72 + 472, 256: 344, 512: 88, 1024: 0}
    assert {n: beyond[str(n)] for n in expected} == {
        n: pytest.approx(tokens / 900, abs=1e-4) for n, tokens in expected.items()
    }
    line = describe_text(build["text"])[1]
    assert line.endswith("is truncated: 60.4% at 128, 38.2% at 256, 9.8% at 512")
