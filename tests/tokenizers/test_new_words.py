"""New words are one token each; texts without them keep their ids, whatever the tokenizer."""

import json
import re

import pytest

from bert_jax.tokenizers.new_words import add_words, ids_after_space, piece_of_word
from bert_jax.tokenizers.suggest_words import (
    count_savings,
    given_words,
    suggest_words,
    words_of_text,
)
from bert_jax.tokenizers.tokenizer import BytePairTokenizer, SentencePieceTokenizer, load_tokenizer
from tests.helpers.corpora import store_tokenizer, write_esm_vocabulary, write_vocabulary
from tests.helpers.tokenizers import NEW_WORDS, WRITERS, random_texts, write_tokenizer


def split(tokenizer, text: str) -> list[str]:
    """Returns the words of a text as the model of a tokenizer gets them."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        return re.findall("▁[^▁]*", tokenizer.normalize(text))
    backend = tokenizer.stored.backend
    normalized = backend.normalizer.normalize_str(text) if backend.normalizer else text
    return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(normalized)]


def usable(tokenizer, words) -> dict[str, list[int]]:
    """Returns by piece the ids of those of `words` that can be added."""
    found = {}
    for word in words:
        (ids,) = ids_after_space(tokenizer, [word])
        if len(ids) > 1 and tokenizer.unk_id not in ids and len(split(tokenizer, word)) == 1:
            found[piece_of_word(tokenizer, word)] = ids
    return found


@pytest.mark.parametrize("name", WRITERS)
def test_only_texts_with_new_words_change(name, tmp_path):
    tokenizer = write_tokenizer(name, tmp_path / "model")
    pieces = usable(tokenizer, NEW_WORDS)
    assert len(pieces) > 12
    extended, ids = add_words(tokenizer, [*pieces])
    assert [extended.id_to_token(index) for index in ids] == [*pieces]
    assert extended.special_ids == tokenizer.special_ids and extended.layout == tokenizer.layout
    assert extended.sha256 != tokenizer.sha256

    texts = random_texts(800)
    before, after = tokenizer.encode_batch(texts), extended.encode_batch(texts)
    old_pieces = dict(zip(ids, pieces.values(), strict=True))
    is_exact = isinstance(tokenizer, BytePairTokenizer)  # Others change longer words, too.
    num_changed, seen = 0, set()
    for text, old, new in zip(texts, before, after, strict=True):
        words = split(tokenizer, text)
        begins = {word for word in words if word.startswith(tuple(pieces))}
        has_new = bool(begins & pieces.keys() if is_exact else begins)
        if not has_new:
            assert new == old, text
        num_changed += new != old
        seen.update(new)
        if not begins - pieces.keys():  # Whole words only: their pieces are merged.
            assert [each for index in new for each in old_pieces.get(index, [index])] == old, text
    assert num_changed > 100 and len(seen & {*ids}) > 0.8 * len(ids)
    stored = store_tokenizer(extended, tmp_path / "stored")
    assert stored.encode_batch(texts) == after and stored.sha256 == extended.sha256


def test_unused_pieces_are_taken_first_unless_texts_have_them(tmp_path):
    path = write_vocabulary(tmp_path / "vocab.txt", ["[unused7]", "[unused2]", *"abxyz"])
    pieces = path.read_text() + "".join(f"##{letter}\n" for letter in "abxyz")
    path.write_text(pieces)
    tokenizer = load_tokenizer(path)
    first = tokenizer.token_to_id("[unused7]")
    extended, ids = add_words(tokenizer, ["ab", "ax", "ay"])
    assert ids == [first, first + 1, tokenizer.vocab_size]
    assert extended.encode("ab ax ay b") == [*ids, tokenizer.token_to_id("b")]
    assert extended.vocab_size == tokenizer.vocab_size + 1

    (tmp_path / "found").mkdir()
    (tmp_path / "found/vocab.txt").write_text(pieces)
    (tmp_path / "found/config.json").write_text('{"model_type": "bert"}')
    config = {"additional_special_tokens": ["[unused7]"]}
    (tmp_path / "found/tokenizer_config.json").write_text(json.dumps(config))
    _, ids = add_words(load_tokenizer(tmp_path / "found"), ["ab", "ax"])
    assert ids == [first + 1, tokenizer.vocab_size]


def test_pieces_that_no_merge_makes_keep_texts_from_changing(tmp_path):
    tokenizer = write_tokenizer("bpe", tmp_path / "model")
    spec = json.loads((tmp_path / "model/tokenizer.json").read_text())
    spec["model"]["vocab"]["Ġtroponin"] = tokenizer.vocab_size
    (tmp_path / "model/tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ValueError, match="such as 'Ġtroponin', are words that its merges do not"):
        add_words(load_tokenizer(tmp_path / "model"), ["Ġstent"])


def test_a_word_with_an_added_token_inside_is_an_error_that_shows_its_ids(tmp_path):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "s", "t", "##t", "##e", "##n"]
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
    model |= {"max_input_chars_per_word": 100, "vocab": {p: i for i, p in enumerate(pieces)}}
    flags = dict.fromkeys(("special", "single_word", "lstrip", "rstrip", "normalized"), False)
    spec = {"model": model, "pre_tokenizer": {"type": "BertPreTokenizer"}}
    spec["added_tokens"] = [{"id": len(pieces), "content": "ten"} | flags]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match=r"'stent' would be read as s ten t \(ids \[5, 10, 6\]\)"):
        add_words(load_tokenizer(tmp_path), ["stent"])


def test_a_piece_that_has_a_better_split_is_not_added_again(tmp_path):
    vocabulary = [["[PAD]", 0.0], ["[UNK]", 0.0], ["[CLS]", 0.0], ["[SEP]", 0.0], ["[MASK]", 0.0]]
    vocabulary += [["▁st", -1.0], ["ent", -1.0], ["▁stent", -9.0], ["▁", -2.0]]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}
    model = {"type": "Unigram", "unk_id": 1, "vocab": vocabulary}
    spec = {"model": model, "pre_tokenizer": metaspace, "decoder": metaspace}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "config.json").write_text('{"model_type": "deberta-v2"}')
    tokenizer = load_tokenizer(tmp_path)
    words = words_of_text(tokenizer, {"stent": 9})
    assert suggest_words(tokenizer, words.values(), 9, 1) == (
        [],
        {"already in the vocabulary, but split differently": 1},
    )
    with pytest.raises(ValueError, match="but to this tokenizer ▁st ent is more probable"):
        given_words(tokenizer, ["stent"], {})
    with pytest.raises(ValueError, match="'▁stent' is a piece already"):
        add_words(tokenizer, ["▁stent"])


def test_suggestions_are_ranked_by_the_tokens_that_they_save(tmp_path):
    path = write_vocabulary(
        tmp_path / "vocab.txt", [*"abc", *(f"##{each}" for each in "abc"), "c1"]
    )
    tokenizer = load_tokenizer(path)
    counts = {"abc": 3, "ab,": 4, "ab": 1, "aaaa": 1, "c": 9, "abq": 9, "12": 9, "bb": 3}
    words = words_of_text(tokenizer, counts)
    chosen, reasons = suggest_words(tokenizer, words.values(), number=9, min_count=2)
    # (count) x (pieces - 1)
    assert [(word.text, word.saved) for word in chosen] == [("abc", 6), ("ab", 5), ("bb", 3)]
    # "12" and ","; "abq"; "aaaa".
    assert [*reasons.values()] == [2, 1, 1]
    extended, _ = add_words(tokenizer, ["ab"])
    savings = count_savings(tokenizer, extended, ["ab"], counts)
    assert savings.changed == {"abc": 3}
    sizes = {"abc": 3, "ab,": 3, "ab": 2, "aaaa": 4, "c": 1, "abq": 1, "12": 1, "bb": 2}
    total = sum(counts.values())
    before = sum(counts[word] * size for word, size in sizes.items())
    assert savings.tokens_before == pytest.approx(before / total)
    assert savings.tokens_after == pytest.approx((before - 3 - 4 - 1) / total)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["abc", "a b"], r"line 2: 'a b' is not one word to the tokenizer, which reads a, b"),
        (["a-b"], r"line 1: 'a-b' is not one word to the tokenizer, which reads a, -, b"),
        (["\u200b"], "reads no word"),
        (["aq"], r"line 1: 'aq' has \[UNK\] among its pieces"),
        (["C"], "line 1: 'C' is already the piece 'c': remove it"),
        (["", " "], "it has no words"),
    ],
)
def test_a_list_with_what_cannot_be_a_word_is_an_error(lines, message, tmp_path):
    path = write_vocabulary(tmp_path / "vocab.txt", [*"abc", *(f"##{each}" for each in "abc")])
    with pytest.raises(ValueError, match=message):
        given_words(load_tokenizer(path), lines, {})


def test_a_list_is_normalized_and_repetitions_are_counted(tmp_path):
    path = write_vocabulary(tmp_path / "vocab.txt", [*"abc", *(f"##{each}" for each in "abc")])
    words, repeated = given_words(load_tokenizer(path), ["AB ", "", "ab", "áa"], {})
    assert [word.piece for word in words] == ["ab", "aa"] and repeated == 2


def test_amino_acids_have_no_words(tmp_path):
    write_esm_vocabulary(tmp_path / "esm")
    with pytest.raises(ValueError, match="is not one word to the tokenizer"):
        piece_of_word(load_tokenizer(tmp_path / "esm"), "MKT")
