"""Classes of Unicode characters, against the tables of Python."""

import re
import sys
import unicodedata

import pytest

from bert_jax.tokenizers.characters import BLANK, FORMAT, MARKS, character_class


@pytest.mark.parametrize(
    ("characters", "categories"),
    [(MARKS, ("Mn", "Mc", "Me")), (FORMAT, ("Cf",)), (BLANK, ("Cc", "Cf", "Co"))],
    ids=["marks", "format", "blank"],
)
def test_class_has_all_characters_of_its_categories(characters, categories):
    pattern = re.compile(f"[{characters}]")
    for character in map(chr, range(sys.maxunicode + 1)):
        if unicodedata.category(character) in categories:
            assert pattern.match(character), f"{ord(character):x}"


def test_letters_digits_spaces_and_accents_are_not_blank():
    fillers = "\u115f\u1160\u3164\uffa0"  # Letters of Hangul for which nothing is shown.
    pattern = re.compile(f"[{BLANK}]")
    for character in map(chr, range(sys.maxunicode + 1)):
        if character.isalnum() or unicodedata.category(character) == "Zs":
            assert bool(pattern.match(character)) == (character in fillers), f"{ord(character):x}"
    assert not pattern.search("\u0301\u0308\u093f\u0bbe")


def test_consecutive_characters_are_one_range():
    assert character_class("dabz") == "a-bd-dz-z"
