"""Tests of counting words in scripts with and without spaces."""

import unicodedata

import pytest

from bert_corpus.words import UNSPACED, count_words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        (" \n", 0),
        ("The cat - of 1848 - sat.", 7),
        ("Ünïcödé wörds, 3.5 km", 4),
        ("서울은 대한민국의 수도이다.", 3),  # Korean has spaces.
        ("東", 1),
        ("東京は日本の首都である。", 6),
        ("北京,上海。", 2),
        ("iPhoneは2007年に発売", 5),  # iPhone は 2007 年に 発売
        ("กรุงเทพเป็นเมืองหลวง", 10),
        ("ភ្នំពេញ", 4),
        ("Beijing (北京) is a city", 5),
        ("བོད་ཡིག", 4),
        ("ໃນລາວ", 3),
        ("မြန်မာ", 3),
    ],
)
def test_words_are_counted_in_every_script(text, expected):
    assert count_words(text) == expected


def test_unspaced_characters_are_letters_of_scripts_without_spaces():
    scripts = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "YI")
    others = ("HANGUL", "LATIN", "DEVANAGARI", "ARABIC", "CYRILLIC", "DIGIT", "FULLWIDTH")
    for number in range(0x110000):
        character = chr(number)
        name = unicodedata.name(character, "")
        if unicodedata.category(character)[0] == "L" and name.split(" ")[0] in scripts:
            assert UNSPACED.match(character), name
        if unicodedata.category(character) == "Nd" or name.startswith(others):
            assert not UNSPACED.match(character), name
