import pytest

from bert_corpus.config import CorpusConfig
from bert_corpus.languages import CODES, NAMES, check_language


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("german", "de"),
        ("German", "de"),
        ("deutsch", "de"),
        ("deu", "de"),
        ("ger", "de"),
        ("DE", "de"),
        ("de-AT", "de"),
        ("de_DE", "de"),
        ("frensh", "fr"),
        ("chinese", "zh"),
        ("zh-hans", "zh"),
        ("xx", "en"),
        ("", "en"),
    ],
)
def test_unknown_language_code_names_the_nearest(value, code):
    with pytest.raises(ValueError, match=f"^language={value!r}; expected .* such as {code!r} "):
        CorpusConfig(language=value)


@pytest.mark.parametrize("value", ["de", "en", "zh", "ja", "ceb", "yue"])
def test_codes_are_taken(value):
    check_language("language", value)


def test_every_language_is_found_by_its_names():
    assert len(NAMES) == 184 and NAMES["de"] == "German" and NAMES["zh"] == "Chinese"
    assert CODES["fra"] == CODES["fre"] == CODES["french"] == "fr"
    assert all(len(code) == 2 and code in NAMES for code in CODES.values())
