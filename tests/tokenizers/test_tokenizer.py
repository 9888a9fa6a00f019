import base64
import gzip
import hashlib
import json
import pathlib
import pickle
import random

import numpy as np
import pytest
import tensorflow_datasets

from bert_corpus import encoding
from bert_jax.tokenizers.tokenizer import (
    Tokenizer,
    load_tokenizer,
    tokenizer_from_bytes,
    write_sha256,
)
from bert_jax.tools import train_vocab
from tests.helpers.corpora import write_tfds, write_vocabulary
from tests.helpers.models import write_random_encoder

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "tokenization.json.gz"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXT = """The quick brown fox jumps over the lazy dog. It was not amused by that.
A river runs through the old town, and the bridge over the river is older than the town.
Whoever walks there in the evening hears the water and sees the lights of the boats.
"""


def wordpiece(*pieces: str) -> Tokenizer:
    return tokenizer_from_bytes("vocab.txt", "\n".join([*SPECIAL, *pieces]).encode())


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT * 20)
    return str(path)


@pytest.fixture(scope="module")
def sentencepiece_tokenizer(text_file):
    content = train_vocab.train_vocabulary([text_file], "sentencepiece", 120, True, 1)
    return tokenizer_from_bytes("spiece.model", content)


@pytest.mark.parametrize("case", ["uncased", "cased"])
def test_wordpiece_ids_equal_the_reference_implementation(case):
    golden = json.loads(gzip.decompress(GOLDEN.read_bytes()))
    content = "".join(f"{piece}\n" for piece in golden[case]["vocabulary"]).encode()
    tokenizer = tokenizer_from_bytes("vocab.txt", content)
    assert tokenizer.lower_case == (case == "uncased")
    ids = tokenizer.encode_batch(golden["texts"])
    assert len(ids) >= 300
    for text, text_ids, expected in zip(golden["texts"], ids, golden[case]["ids"], strict=True):
        assert text_ids == expected, repr(text)
        assert tokenizer.encode(text) == expected
    known = np.concatenate([np.array(row, int) for row in ids]) != tokenizer.unk_id
    assert known.mean() > 0.8, "the golden vocabulary is too small for this test"


ODD = (
    "abcXYZ  é\u0308[MASK]##'\u0301\u200b\x1c\x85"
    "\u2028\u3000中文日本,.!İßΣς\t\n\r\ufeff\x00\ufffd😀-—１２ﬁ가각"
)


@pytest.mark.parametrize("cased", [False, True])
def test_words_that_are_encoded_once_have_the_ids_of_whole_texts(cased, monkeypatch):
    """Characters that normalization joins, splits, drops or changes, around spaces and words."""
    monkeypatch.setattr(encoding, "MAX_CACHED_CHARACTERS", 5000)
    letters = [*"abcxyz", *("##" + letter for letter in "abcxyz"), *"[]#',.!-中é가"]
    tokenizer = wordpiece(*letters, *(["X", "Y", "Z"] if cased else []))
    assert tokenizer.lower_case != cased
    encoder = encoding.Encoder(tokenizer)
    rng = random.Random(0)
    texts = ["".join(rng.choices(ODD, k=rng.randint(0, 30))) for _ in range(20_000)]
    for start in range(0, len(texts), 1000):
        batch = texts[start : start + 1000]
        expected = [np.array(ids, np.uint16).tobytes() for ids in tokenizer.encode_batch(batch)]
        assert encoder.encode(batch) == expected


@pytest.mark.parametrize("case", ["uncased", "cased", "sentencepiece"])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("town\u200b river", ["town", "river"]),
        ("town\u200b\u200d", ["town"]),
        ("town\u00ad river", ["town", "river"]),
        ("\ufefftown\u2060", ["town"]),
        ("\u202atown\u202c, \u2068river\u2069.", ["town", ",", "river", "."]),
        ("town\x00 river\x7f", ["town", "river"]),
        ("town\ufffd river\ue000", ["town", "river"]),
        ("town \u200b \u200briver", ["town", "river"]),
        # Default-ignorable marks and letters.
        ("town\ufe0f river\U000e0100", ["town", "river"]),
        ("town\u034f river\u17b4", ["town", "river"]),
        ("town\u180b river\u180f\u200b", ["town", "river"]),
        ("town\U000e0041\U000e007f, \U000e0001river", ["town", ",", "river"]),
        ("\u200b", []),
        ("\u200b \u00ad\x00", []),
    ],
)
def test_format_characters_around_a_word_belong_to_no_piece(
    sentencepiece_tokenizer, case, text, words
):
    pieces = ["town", "river", ".", ","] + ["Town", "River"] * (case == "cased")
    tokenizer = sentencepiece_tokenizer if case == "sentencepiece" else wordpiece(*pieces)
    assert tokenizer.lower_case == (case != "cased")
    ((ids, offsets),) = tokenizer.encode_with_offsets([text])
    assert len(ids) == len(offsets)
    covered = [text[begin:end] for begin, end in offsets.tolist()]
    assert "".join(covered) == "".join(words)
    for word in words:  # An answer is cut out of the text from its first to its last piece.
        first = int(np.searchsorted(offsets[:, 1], text.index(word), side="right"))
        last = int(np.searchsorted(offsets[:, 0], text.index(word) + len(word))) - 1
        assert text[offsets[first, 0] : offsets[last, 1]] == word


@pytest.mark.parametrize("cased", [False, True])
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("e\u0301\u200b x", ["e\u0301", "x"]),  # A combining accent.
        ("e\u200b\u0301 x", ["e\u200b\u0301", "x"]),
        ("e\u0301\ufe0f x", ["e\u0301", "x"]),  # Of this letter there are no variants.
        ("\u2764\ufe0f\u200b x\ufe0f", ["\u2764\ufe0f", "x"]),
        ("\u1820\u180b x", ["\u1820\u180b", "x"]),
        ("e\ufe0f\u0301 x", ["e\ufe0f\u0301", "x"]),
        ("x\u3164 e\uffa0 \u115fx", ["x", "e", "x"]),  # Fillers, which are letters of Hangul.
        ("\u200b\u0130\u200b x", ["\u0130", "x"]),  # Its lower case has two characters.
        ("\ufb01\u200b x", ["\ufb01", "x"]),  # A ligature.
        ("x\u200bx \u0645\u06cc\u200c\u062e", ["x\u200bx", "\u0645\u06cc\u200c\u062e"]),
    ],
)
def test_accents_and_format_characters_inside_a_piece_stay(cased, text, pieces):
    tokenizer = wordpiece("e", "i", "xx", "x", *(["X", "XX", "E", "I"] if cased else []))
    assert tokenizer.lower_case != cased
    ((_, offsets),) = tokenizer.encode_with_offsets([text])
    assert [text[begin:end] for begin, end in offsets.tolist()] == pieces


@pytest.mark.parametrize("cased", [False, True])
def test_answer_holds_the_variation_selector_of_its_last_ideograph(cased):
    tokenizer = wordpiece("x", *(["X", "XX"] if cased else []))
    text = "x \u845b\U000e0100\ufe0f\u200b x"
    ((_, offsets),) = tokenizer.encode_with_offsets([text])
    before_last_x = offsets[offsets[:, 1] <= text.rindex(" ")]
    assert text[2 : before_last_x[:, 1].max()] == "\u845b\U000e0100"


@pytest.mark.parametrize("method", ["encode_batch", "encode_with_offsets"])
def test_string_in_place_of_a_list_of_texts_is_refused(sentencepiece_tokenizer, method):
    """Its characters would be taken for texts."""
    for tokenizer in (wordpiece("town"), sentencepiece_tokenizer):
        encode = getattr(tokenizer, method)
        with pytest.raises(TypeError, match=rf"{method} takes a list of texts, got 'town'"):
            encode("town")
        assert len(encode(("town", "river"))) == len(encode(iter(["town", "river"]))) == 2


def test_special_tokens_in_text_are_not_recognized():
    tokenizer = wordpiece("[", "]", "mask", "sep")
    assert tokenizer.encode("[MASK] [SEP]") == [5, 7, 6, 5, 8, 6]


def test_vocabulary_determines_the_case():
    assert wordpiece("a", "[unused0]", "[ENT]", "é").lower_case
    assert not wordpiece("a", "[unused0]", "Paris").lower_case
    assert wordpiece("cafe").encode("CAFÉ") == [5]
    assert wordpiece("Cafe", "CAFÉ").encode("CAFÉ") == [6]


def test_words_over_200_characters_are_unknown():
    """As in the released tokenizer.py; transformers has a limit of 100."""
    tokenizer = wordpiece("x", "##x")
    assert tokenizer.encode("x" * 200) == [5] + [6] * 199
    assert tokenizer.encode("x" * 201) == [tokenizer.unk_id]


def test_word_start_marks_pieces_that_begin_a_word(sentencepiece_tokenizer):
    assert wordpiece("un", "##able", "#").word_start.tolist() == [True] * 6 + [False, True]
    ids = sentencepiece_tokenizer.encode("the quick river")
    assert sentencepiece_tokenizer.word_start[ids].sum() == 3
    assert sentencepiece_tokenizer.word_start[list(sentencepiece_tokenizer.special_ids)].all()


def test_decode_and_lookups():
    tokenizer = wordpiece("un", "##able", "to")
    assert tokenizer.decode([2, 5, 6, 7, 4]) == "[CLS] unable to [MASK]"
    assert tokenizer.id_to_token(6) == "##able" and tokenizer.token_to_id("##able") == 6
    assert tokenizer.mask_token == "[MASK]"
    with pytest.raises(IndexError, match="token id 8"):
        tokenizer.id_to_token(8)


def test_sentencepiece_has_the_same_interface(sentencepiece_tokenizer):
    tokenizer = sentencepiece_tokenizer
    assert tokenizer.special_ids == (0, 1, 2, 3, 4)
    assert [tokenizer.id_to_token(index) for index in range(5)] == SPECIAL
    assert tokenizer.lower_case and tokenizer.vocab_size <= 120
    ids = tokenizer.encode("The old Town")
    assert ids == tokenizer.encode("the old town")
    assert tokenizer.decode([2, *ids, 4]) == "[CLS] the old town[MASK]"
    assert not set(tokenizer.encode("[MASK] [SEP]")) & {2, 3, 4}


@pytest.mark.parametrize("rest", [", and the bridge", "s of the boats", " of the river", "", "."])
def test_text_after_a_mask_is_tokenized_as_after_a_word(sentencepiece_tokenizer, rest):
    for tokenizer in (sentencepiece_tokenizer, wordpiece("s", "of", "the", "and", ",", ".", "?")):
        # No piece contains "?", so it is a token of its own, like a mask.
        expected = tokenizer.encode(f"the ?{rest}")[len(tokenizer.encode("the ?")) :]
        assert tokenizer.encode(rest, continues=True) == expected


def test_sentencepiece_folds_case_and_keeps_accents(sentencepiece_tokenizer):
    assert wordpiece("cafe").encode("Café") == [5]
    assert sentencepiece_tokenizer.encode("THÉ")[-1] == sentencepiece_tokenizer.unk_id
    assert sentencepiece_tokenizer.encode("THE") == sentencepiece_tokenizer.encode("the")


def test_tokenizer_can_be_pickled(sentencepiece_tokenizer):
    for tokenizer in (wordpiece("a", "##b"), sentencepiece_tokenizer):
        again = pickle.loads(pickle.dumps(tokenizer))
        assert again.sha256 == tokenizer.sha256 and len(again.sha256) == 64
        assert again.encode("ab river") == tokenizer.encode("ab river")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n", r"lacks \[MASK\]"),
        (b"a\nb\n", r"lacks \[PAD\], \[UNK\], \[CLS\], \[SEP\], \[MASK\]"),
        (b"a\nb\na\n", "line 3: 'a' is already on line 1"),
        (b"a\n\nb\n", "line 2 is empty"),
        (b"a\nb\xff\n", "line 2, byte 3: not UTF-8"),
    ],
)
def test_bad_vocabulary_is_a_clear_error(tmp_path, content, message):
    path = tmp_path / "vocab.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load_tokenizer(path)
    assert str(path) in str(error.value)


def test_missing_vocabulary_and_damaged_model_are_clear_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"train_vocab\.py"):
        load_tokenizer(tmp_path / "absent.txt")
    (tmp_path / "broken.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match="not an intact SentencePiece model"):
        load_tokenizer(tmp_path / "broken.model")


@pytest.mark.parametrize("kind", ["wordpiece", "sentencepiece", "bpe"])
def test_vocabulary_training_is_deterministic(text_file, kind):
    size = 320 if kind == "bpe" else 120
    first = train_vocab.train_vocabulary([text_file], kind, size, True, 1)
    # Each training has another hash seed; this one also reads the text in other processes.
    assert first == train_vocab.train_vocabulary([text_file], kind, size, True, 2)


def test_trained_wordpiece_begins_with_the_special_tokens_and_knows_its_text(text_file):
    content = train_vocab.train_vocabulary([text_file], "wordpiece", 200, False, 1)
    tokenizer = tokenizer_from_bytes("vocab.txt", content)
    assert tokenizer.special_ids == (0, 1, 2, 3, 4)
    assert not tokenizer.lower_case
    assert tokenizer.unk_id not in tokenizer.encode(TEXT)
    assert tokenizer.vocab_size <= 200


def test_vocabulary_can_be_trained_on_a_tfds_data_set(tmp_path, text_file):
    text = {"text": tensorflow_datasets.features.Text()}
    write_tfds(tmp_path, "tales", {"train": [{"text": TEXT * 20}]}, text)
    arguments = ("wordpiece", 200, True, 1)
    content = train_vocab.train_vocabulary(["tfds:tales"], *arguments, data_dir=str(tmp_path))
    assert content == train_vocab.train_vocabulary([text_file], *arguments)


def test_overlong_words_are_not_trained_on(tmp_path, capsys):
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 20 + f"{'q7' * 100} {'q8' * 101}. " * 30)
    content = train_vocab.train_vocabulary([str(path)], "wordpiece", 200, True, 1)
    assert "30 words of over 200 characters" in capsys.readouterr().out
    assert b"q7q7" in content and b"8" not in content


def test_overlong_sentences_are_cut_and_trained_on(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("river town " * 400)  # A sentence of over 4,192 bytes.
    content = train_vocab.train_vocabulary([str(path)], "sentencepiece", 30, True, 1)
    tokenizer = tokenizer_from_bytes("spiece.model", content)
    assert tokenizer.unk_id not in tokenizer.encode("river town")


def test_size_below_the_number_of_characters_is_a_clear_error(text_file):
    with pytest.raises(ValueError, match=r"--size=20 is too small: .* need \d+ pieces$"):
        train_vocab.train_vocabulary([text_file], "sentencepiece", 20, True, 1)


def test_training_on_blank_text_is_a_clear_error(tmp_path):
    (tmp_path / "blank.txt").write_text("\n \n")
    with pytest.raises(ValueError, match="no words"):
        train_vocab.train_vocabulary([str(tmp_path / "blank.txt")], "wordpiece", 100, True, 1)


@pytest.mark.parametrize("path", ["run", "run/checkpoints", "run/checkpoints/7"])
def test_a_run_holds_its_vocabulary(tmp_path, path):
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    write_random_encoder(tmp_path / "run/checkpoints/7", tokenizer)
    (tmp_path / "run/config.json").write_text("{}")
    loaded = load_tokenizer(tmp_path / path)
    assert loaded.sha256 == tokenizer.sha256 and loaded.files() == tokenizer.files()
    with pytest.raises(ValueError, match="the casing of a stored tokenizer is fixed"):
        load_tokenizer(tmp_path / path, lower_case=not tokenizer.lower_case)


@pytest.mark.parametrize("damage", [b"AAAA", b"\xff", b"{", b""])
def test_a_damaged_vocabulary_of_a_checkpoint_is_refused(tmp_path, damage):
    path = tmp_path / "7/vocabulary/metadata"
    path.parent.mkdir(parents=True)
    content = base64.b64encode("\n".join([*SPECIAL, "a"]).encode())
    values = {"filename": "vocab.txt", "sha256": "0" * 64, "base64": content.decode()}
    path.write_bytes(json.dumps(values).encode() if damage == b"AAAA" else damage)
    with pytest.raises(ValueError, match=r"vocabulary/metadata is damaged"):
        load_tokenizer(tmp_path / "7")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("bert-base-uncased", "hf download bert-base-uncased --local-dir DIR, and give DIR; or"),
        ("google-bert/bert-base-uncased", "hf download google-bert/bert-base-uncased --local-dir"),
        ("vocab.txt", "no vocabulary at vocab.txt; train one with tools/train_vocab.py"),
        ("runs/vocab", "no vocabulary at runs/vocab; train one with tools/train_vocab.py"),
        ("/absent/a/b", "no vocabulary at /absent/a/b; train one with tools/train_vocab.py"),
        ("runs", "no vocabulary at runs"),
    ],
)
def test_path_without_vocabulary_is_an_error_with_a_fix(tmp_path, monkeypatch, path, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(FileNotFoundError, match=expected):
        load_tokenizer(path)


def test_no_changed_bit_of_a_vocabulary_with_a_checksum_is_silent(tmp_path):
    path = write_vocabulary(tmp_path / "vocab.txt")
    write_sha256(path)
    checksum = tmp_path / "vocab.txt.sha256"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert checksum.read_text() == f"{digest}  vocab.txt\n"
    intact, rng = load_tokenizer(path).sha256, random.Random(0)
    for changed in [path] * 100 + [checksum] * 30:
        content = bytearray(changed.read_bytes())
        content[rng.randrange(64 if changed == checksum else len(content))] ^= 1 << rng.randrange(8)
        original = changed.read_bytes()
        changed.write_bytes(content)
        with pytest.raises(ValueError, match=r"vocab\.txt is damaged, or was changed"):
            load_tokenizer(path)
        with pytest.raises(ValueError, match=r"remove vocab\.txt\.sha256"):
            load_tokenizer(tmp_path)
        changed.write_bytes(original)
    assert load_tokenizer(path).sha256 == intact
    checksum.unlink()
    path.write_text(path.read_text() + "own\n")
    assert load_tokenizer(path).token_to_id("own")
