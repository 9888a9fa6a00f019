import collections
import random

import numpy as np
import pytest

from bert_corpus.pairs import make_pairs
from bert_corpus.readers import Document
from bert_corpus.sentences import cut_sentence, split_sentences


def cut(ids, max_seq_length):
    pieces = cut_sentence(np.array(ids, np.uint16).tobytes(), max_seq_length)
    return [np.frombuffer(piece, np.uint16).tolist() for piece in pieces]


@pytest.mark.parametrize(
    ("length", "max_seq_length", "piece_lengths"),
    [
        (509, 512, [509]),  # fills a pair, and is truncated as released
        (510, 512, [255, 255]),
        (511, 512, [255, 255, 1]),
        (128, 128, [128]),  # prose
        (129, 128, [63, 63, 3]),
        (128, 16, [128]),
        (129, 16, [7] * 18 + [3]),
        (130, 5, [1] * 130),
        (0, 16, [0]),
    ],
)
def test_only_sentences_longer_than_pairs_and_prose_are_cut(length, max_seq_length, piece_lengths):
    pieces = cut(list(range(length)), max_seq_length)
    assert [len(piece) for piece in pieces] == piece_lengths
    assert [token for piece in pieces for token in piece] == list(range(length))


@pytest.mark.parametrize("max_seq_length", [5, 16, 64, 127, 128, 512])
def test_two_pieces_fill_a_pair_and_lose_at_most_one_token(max_seq_length):
    documents = [cut([number] * 20_000, max_seq_length) for number in range(2)]
    pairs = make_pairs(documents, 0, max_seq_length, 0.0, random.Random(0), range(1))
    lengths = [len(pair.first) + len(pair.second) for pair in pairs[:-1]]
    assert set(lengths) == {max_seq_length - 3}
    assert max(pair.num_truncated for pair in pairs[:-1]) <= 1


def test_pages_between_brackets_stay_in_the_pairs():
    text = "A river runs (past the town. " + "It is old. The bridge is older. " * 600 + ")"
    (sentence,) = split_sentences(Document(text))
    num_tokens = len(sentence.split())
    document = cut(list(range(num_tokens)), 128)
    pairs = make_pairs([document], 0, 128, 0.0, random.Random(0), range(1))
    assert sum(pair.num_truncated for pair in pairs) < 0.02 * num_tokens


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("東京は日本の首都であり、大都市である。", 1),
        ("彼は「はい。」", 1),
        ("नमस्ते।", 1),
        ("سلام؟", 1),
        ("စာ။", 1),
        ("ពាក្យ។", 1),
        ("བོད་ཡིག།  ", 1),
        ("안녕하세요. ", 1),
        ("The cat sat. ", 1),
        ("X!Y?", 2),
    ],
)
def test_text_without_spaces_is_split_in_linear_time(unit, expected):
    # The library alone would take minutes for some of them.
    sentences = split_sentences(Document(unit * 50_000))
    assert len(sentences) == pytest.approx(expected * 50_000, abs=1)
    assert max(map(len, sentences)) <= len(unit)


@pytest.mark.parametrize(
    ("text", "longest"),
    [
        ("กรุงเทพ" * 20_000, 1000),
        ("กรุงเทพ เป็นเมือง " * 9000, 200),
        ("1。2。" * 40_000, 1000),
        ("é" * 9999, 1000),
    ],
)
def test_sentences_without_spaces_and_ends_are_cut(text, longest):
    sentences = split_sentences(Document(text))
    assert max(map(len, sentences)) == pytest.approx(longest, rel=0.02)
    assert "".join(sentences).replace(" ", "") == text.replace(" ", "")


def test_a_long_word_of_ascii_and_a_long_sentence_with_spaces_stay_whole():
    for text in ("x" * 100_000, "x.y&z=" * 20_000, "“one two " * 20_000 + "”"):
        assert split_sentences(Document(text)) == [" ".join(text.split())]


def test_an_abbreviation_of_khmer_ends_one_sentence():
    assert split_sentences(Document("ឆ្កែ ឆ្មា ។ល។ ពាក្យ។")) == ["ឆ្កែ ឆ្មា ។ល។", "ពាក្យ។"]


def test_phrases_of_thai_are_joined_to_sentences():
    phrase = "แม่น้ำสายนี้ไหลผ่านเมืองเก่าและสะพานก็เก่าแก่กว่าตัวเมือง"
    text = " ".join([phrase] * 12)
    sentences = split_sentences(Document(text))
    assert 3 <= len(sentences) <= 6 and " ".join(sentences) == text


def test_no_sentence_continues_in_another_paragraph():
    text = "A heading\n\nThe boat sank. It was\nold\n \nThe next paragraph."
    expected = ["A heading", "The boat sank.", "It was old", "The next paragraph."]
    assert split_sentences(Document(text), "split", "en", collections.Counter()) == expected
