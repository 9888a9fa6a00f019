# ruff: noqa: RUF001 (look-alike characters are what is tested)

"""Generates tokenization.json.gz with transformers' BertTokenizer (needs transformers).

python tests/golden/make_tokenization.py

The two vocabularies are trained here, on the strings themselves, so that most of the pieces in them
are needed and most strings have several pieces per word.
"""

import gzip
import json
import pathlib
import random
import tempfile
import unicodedata

CASES = [
    "",
    " ",
    "\t\n\r",
    "Hello, world!",
    "unaffable UNAFFABLE Unaffable",
    "Ça été à la crème brûlée; naïve façade, Ångström, Zürich, Škoda, Łódź, İstanbul, ﬁnal",
    "e\u0301 a\u0308 n\u0303 o\u0302\u0301 \u0301 \u0308a",
    "こんにちは世界。東京タワー",
    "我爱自然语言处理",
    "漢字kanji混ぜ書き123",
    "\U00020000\U0002f800 rare ideographs 㐀",
    "한국어 텍스트 처리",
    "Привет, мир! Ёлка й",
    "Γειά σου Κόσμε, ΣΊΣΥΦΟΣ ς",
    "مرحبا بالعالم، كيف حالك؟",
    "שָׁלוֹם עולם",
    "नमस्ते दुनिया क्षत्रिय",
    "สวัสดีชาวโลก",
    "emoji 😀👍🏽 👨‍👩‍👧 🇫🇷 ❤️",
    "zero\u200bwidth\u200cnon\u200djoiner \ufeffbom soft\u00adhyphen",
    "control\x00chars\x01here\x1f\x7f\x80\x9f and \ufffd",
    "nbsp\u00a0and\u2003em\u3000ideographic\u2028line\u2029paragraph\u0085next",
    "x" * 199,
    "x" * 200,
    "x" * 201,
    "a" * 300 + " short",
    "don't can't we'll it's o'clock rock'n'roll",
    "[CLS] [SEP] [MASK] [PAD] [UNK] [unused1]",
    "the[MASK]word ##ing ## # ###",
    "$1,234.56 50% #tag @user user@example.com http://a.b/c?d=e&f=g",
    "¡Hola! ¿Qué? «guillemets» “quotes” ‘single’ – — … ‰ † ‡ • §",
    "a+b=c^2 ~ `code` |x| <tag> \\back/slash_under",
    "ⅣⅤ ① ½ ² ª º ™ © € £ ¥",
    "ǅ ǆ ß ẞ ſ ŉ ΐ ﬄ K Å Ω",
    "mixedケースMixed漢Case字",
    "tab\tnew\nline\r\nreturn",
    "ＦＵＬＬ　ｗｉｄｔｈ ｶﾀｶﾅ",
    "ᾳ ᾼ ῼ ǰ ṩ ạ̈ q̣̇",
    "𝓜𝓪𝓽𝓱 𝔸𝔹 𐐀𐐨",
    "\ue000private use\U000f0000",
]
ALPHABETS = [
    (0x20, 0x7E),
    (0x61, 0x7A),
    (0x00, 0x1F),
    (0x80, 0x24F),
    (0x2B0, 0x36F),
    (0x370, 0x52F),
    (0x590, 0x6FF),
    (0x900, 0x97F),
    (0x1E00, 0x1FFF),
    (0x2000, 0x206F),
    (0x20A0, 0x2BFF),
    (0x3000, 0x30FF),
    (0x4E00, 0x4FFF),
    (0xAC00, 0xACFF),
    (0xF900, 0xFAFF),
    (0xFE00, 0xFFEF),
    (0x1F300, 0x1F6FF),
    (0x20000, 0x200FF),
]


def random_text(rng: random.Random, max_words: int = 8) -> str:
    """Returns words of characters of one or several scripts, assigned or not, but no surrogates."""
    words = []
    for _ in range(rng.randint(1, max_words)):
        low, high = rng.choice(ALPHABETS)
        word = "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 9)))
        if rng.random() < 0.4:
            low, high = rng.choice(ALPHABETS)
            word += chr(rng.randint(low, high)) + rng.choice(["ing", "ED", "é", "s", "漢", "!", ""])
        if rng.random() < 0.2:
            word = unicodedata.normalize(rng.choice(["NFD", "NFC", "NFKC"]), word)
        words.append(word)
    return rng.choice([" ", " ", "\t", ", ", "\u00a0", ""]).join(words)


def train_vocabulary(texts: list[str], lower_case: bool, size: int) -> list[str]:
    """Returns a WordPiece vocabulary that knows most, not all, of the characters of `texts`."""
    import tokenizers

    tokenizer = tokenizers.BertWordPieceTokenizer(lowercase=lower_case, strip_accents=lower_case)
    tokenizer.train_from_iterator(texts, vocab_size=size, limit_alphabet=size, show_progress=False)
    return sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)


def reference_ids(vocabulary: list[str], lower_case: bool, texts: list[str]) -> list[list[int]]:
    """Returns the ids of transformers, without adding or recognizing special tokens.

    Its limit of 100 characters per word is raised to the 200 of the released tokenization.py.
    """
    from transformers import BertTokenizer

    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "vocab.txt"
        path.write_bytes("".join(f"{piece}\n" for piece in vocabulary).encode())
        tokenizer = BertTokenizer.from_pretrained(
            directory, do_lower_case=lower_case, split_special_tokens=True
        )
        tokenizer.backend_tokenizer.model.max_input_chars_per_word = 200
        return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def main() -> None:
    rng = random.Random(0)
    texts = CASES + [random_text(rng, max_words=3) for _ in range(310)]
    golden = {"texts": texts}
    for name, lower_case in (("uncased", True), ("cased", False)):
        vocabulary = train_vocabulary(texts, lower_case, size=2000)
        golden[name] = {
            "vocabulary": vocabulary,
            "ids": reference_ids(vocabulary, lower_case, texts),
        }
    path = pathlib.Path(__file__).with_name("tokenization.json.gz")
    content = json.dumps(golden, ensure_ascii=True, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(content, mtime=0))
    print(f"{path}: {len(texts)} texts, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
