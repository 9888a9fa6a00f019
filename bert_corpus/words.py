"""Counts words and finds ends of sentences, also in scripts that are written without spaces."""

# ruff: noqa: RUF001 (full-width punctuation looks like ASCII)

import re
from collections.abc import Iterator

# Letters and vowel signs, without digits and punctuation. Hangul is not among them: Korean has
# spaces.
UNSPACED_RANGES = (
    ("\u0e01", "\u0e3a"),  # Thai
    ("\u0e40", "\u0e4e"),
    ("\u0e80", "\u0ece"),  # Lao
    ("\u0edc", "\u0edf"),
    ("\u0f00", "\u0f00"),  # Tibetan
    ("\u0f40", "\u0fbc"),
    ("\u1000", "\u103f"),  # Myanmar
    ("\u1050", "\u108f"),
    ("\u109a", "\u109f"),
    ("\ua9e0", "\ua9ef"),
    ("\ua9fa", "\ua9fe"),
    ("\uaa60", "\uaa7f"),
    ("\u1780", "\u17d3"),  # Khmer
    ("\u17d7", "\u17d7"),
    ("\u17dc", "\u17dd"),
    ("\u1950", "\u19c9"),  # Tai Le, New Tai Lue
    ("\u1a20", "\u1a7c"),  # Tai Tham
    ("\uaa80", "\uaadf"),  # Tai Viet
    ("\u1b00", "\u1b4c"),  # Balinese
    ("\ua980", "\ua9c0"),  # Javanese
    ("\u2e80", "\u2fd5"),  # radicals of Han
    ("\u3005", "\u3007"),  # of Han, such as the repetition mark
    ("\u3021", "\u3029"),
    ("\u3031", "\u3035"),
    ("\u3038", "\u303c"),
    ("\u3041", "\u309f"),  # Hiragana
    ("\u30a1", "\u30fa"),  # Katakana
    ("\u30fc", "\u30ff"),
    ("\u3105", "\u312f"),  # Bopomofo
    ("\u31a0", "\u31bf"),
    ("\u31f0", "\u31ff"),  # Katakana of Ainu
    ("\u3400", "\u4dbf"),  # Han
    ("\u4e00", "\u9fff"),
    ("\ua000", "\ua48c"),  # Yi
    ("\uf900", "\ufaff"),  # Han, for compatibility
    ("\uff66", "\uff9f"),  # halfwidth Katakana
    ("\U00016fe0", "\U00018cff"),  # Tangut, Khitan
    ("\U0001aff0", "\U0001b16f"),  # further kana
    ("\U00020000", "\U000323af"),  # further Han
)
# For use within the brackets of a regular expression.
UNSPACED_CHARACTERS = "".join(f"{first}-{last}" for first, last in UNSPACED_RANGES)
UNSPACED = re.compile(f"[{UNSPACED_CHARACTERS}]")  # one character of such a script
# Characters outside ASCII that end a sentence, and quotes and brackets that may follow. For use
# within the brackets of a regular expression.
SENTENCE_ENDS = "…。．｡！？‼⁇⁈⁉︒﹒﹖﹗؟۔।॥။។៕།༎։።᙮᠃꓿"
CLOSING_MARKS = "\"'”’»)\\]」』）】》〉］〕｣"
SENTENCE_END = re.compile(rf"[{SENTENCE_ENDS}][{CLOSING_MARKS}]*")
LAST_SPACE = re.compile(r"(?s).*\s")
# About the length of a word of Chinese or Japanese.
UNSPACED_CHARACTERS_PER_WORD = 2
WORDS = re.compile(
    rf"[{UNSPACED_CHARACTERS}]{{1,{UNSPACED_CHARACTERS_PER_WORD}}}|[^\W{UNSPACED_CHARACTERS}]+"
)


def count_words(text: str) -> int:
    """Returns the number of words of a text.

    Words are what white space separates; in scripts that are written without spaces (Chinese,
    Japanese, Thai, Lao, Khmer, Burmese, Tibetan and others), every two consecutive characters count
    as a word, and one that is left over.
    """
    if text.isascii() or not UNSPACED.search(text):
        return len(text.split())
    words = text.split()
    return sum(len(WORDS.findall(word)) if UNSPACED.search(word) else 1 for word in words)


def cut_text(text: str, max_bytes: int) -> Iterator[str]:
    """Yields pieces of up to `max_bytes` of UTF-8, in linear time.

    Cuts at the last white space of a piece, in text without spaces after its last sentence, or else
    at any character.
    """
    content, start = text.encode(), 0
    while len(content) - start >= max_bytes:
        # Half a character at the end is left to the next piece.
        piece = content[start : start + max_bytes].decode(errors="ignore")
        half = len(piece) // 2
        if match := LAST_SPACE.match(piece, half):
            piece = piece[: match.end()]
        elif ends := [match.end() for match in SENTENCE_END.finditer(piece, half)]:
            piece = piece[: ends[-1]]
        yield piece
        start += len(piece.encode())
    yield content[start:].decode()
