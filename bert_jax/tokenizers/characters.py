"""Classes of Unicode characters that `re` has no name for, for use within its brackets."""

import collections
import functools
import itertools
import unicodedata
from collections.abc import Iterable


def character_class(characters: Iterable[str]) -> str:
    """Returns characters as ranges."""
    ranges: list[list[str]] = []
    for character in sorted(characters):
        if ranges and ord(character) == ord(ranges[-1][1]) + 1:
            ranges[-1][1] = character
        else:
            ranges.append([character, character])
    return "".join(f"{first}-{last}" for first, last in ranges)


@functools.cache
def _characters_of_categories() -> dict[str, list[str]]:
    found = collections.defaultdict(list)
    # Between are ideographs and unassigned characters, above are those for private use.
    for number in itertools.chain(range(0x20000), range(0xE0000, 0xE1000)):
        found[unicodedata.category(chr(number))].append(chr(number))
    return found


def category_class(*categories: str) -> str:
    """Returns the characters of categories such as "Mn", other than ideographs, as ranges."""
    found = _characters_of_categories()
    return character_class(itertools.chain(*(found[name] for name in categories)))


# Default_Ignorable_Code_Point of Unicode 17: nothing is shown for them. Most are format characters
# (category Cf), but variation selectors are marks, and fillers are letters.
DEFAULT_IGNORABLE = (
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
# Combining marks, such as accents and the vowel signs of Indic scripts. They are parts of words,
# but not in \w.
MARKS = category_class("Mn", "Mc", "Me")
# Format characters, such as zero-width spaces, joiners and soft hyphens.
FORMAT = DEFAULT_IGNORABLE + category_class("Cf")
# Those, control and private-use characters, and U+FFFD: BERT's tokenization drops most of them.
BLANK = FORMAT + "\0-\x1f\x7f-\x9f\ue000-\uf8ff\ufffd\U000f0000-\U0010ffff"
# Patterns of an ideograph or a Mongolian letter, and of a symbol, with the variation selector that
# says how it is shown, as in emoji. Nothing is shown for a selector after any other character.
LETTER_VARIANT = (
    r"(?:[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af]"
    r"[\ufe00-\ufe0f\U000e0100-\U000e01ef]|[\u1807-\u18aa][\u180b-\u180d\u180f])"
)
SYMBOLS = "‼⁉〰" + category_class("So", "Sm")
SYMBOL_VARIANT = rf"(?:[{SYMBOLS}][\ufe00-\ufe0f])"
