"""Windows over contexts, answers as tokens and back, and the search for the best spans."""

import random

import numpy as np
import pytest

from bert_corpus.vocabulary import train_sentencepiece
from bert_jax.data.features import ModelInput
from bert_jax.tasks import spans
from bert_jax.tasks.spans import Passage, SpanConfig
from bert_jax.tokenizers.tokenizer import SPECIAL_TOKENS, tokenizer_from_bytes
from tests.helpers.corpora import train_bpe, without_special_tokens

# Composed and decomposed accents, CJK, Hangul (which decomposes), letters whose lower case is
# longer, and characters that tokenization drops inside a word.
LETTERS = [
    *"abcxyzABC0159é\u00f1\u00c5\u0130\u00df\u00bd北京한글",
    "e\u0301",
    "o\u0308",
    "s\u00ad",
    "t\u200bt",
]
FORMAT = "\u00ad\u200b"
SPACES = [" ", " ", " ", "  ", "\u00a0", "\t", "\n\n", "\u2003", " \u00a0 "]
MARKS = ["", "", "", ",", ".", ")", "%", "…"]


def random_context(rng: random.Random, marks=MARKS) -> tuple[str, list[tuple[int, int]]]:
    """Returns a text, and the characters of each word without the mark that follows it."""
    text, words = rng.choice(["", " ", "\u00a0"]), []
    for _ in range(rng.randint(1, 60)):
        word = "".join(rng.choices(LETTERS, k=rng.randint(1, 6)))
        words.append((len(text), len(text) + len(word)))
        text += word + rng.choice(marks) + rng.choice(SPACES)
    return text, words


def wordpiece(letters: str):
    pieces = [*SPECIAL_TOKENS, *letters, *(f"##{letter}" for letter in letters)]
    return tokenizer_from_bytes("vocab.txt", "\n".join(pieces).encode())


def random_lines() -> str:
    rng = random.Random(1)
    return "\n".join(" ".join(random_context(rng)[0].split()) for _ in range(200))


def sentencepiece(directory):
    path = directory / "text.txt"
    path.write_text(random_lines())
    return tokenizer_from_bytes("spiece.model", train_sentencepiece(str(path), 150, False))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {
        "cased": wordpiece("abcxyzABC0159é北京,.)%…"),
        "uncased": wordpiece("abcxyz0159en北京,.)%…"),
        "sentencepiece": sentencepiece(tmp_path_factory.mktemp("spiece")),
        "bpe": train_bpe(tmp_path_factory.mktemp("bpe"), random_lines()),
        "bare": without_special_tokens(wordpiece("abcxyzABC0159é北京,.)%…")),
    }


KINDS = ["cased", "uncased", "sentencepiece", "bpe", "bare"]


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_are_ordered_and_cover_all_but_white_space_and_format(tokenizers, kind):
    rng = random.Random(0)
    for _ in range(200):
        text, _ = random_context(rng)
        ((ids, offsets),) = tokenizers[kind].encode_with_offsets([text])
        assert ids == tokenizers[kind].encode(text)
        assert offsets.shape == (len(ids), 2)
        assert (np.diff(offsets, axis=0) >= 0).all()
        assert (offsets[:, 0] <= offsets[:, 1]).all()
        covered = {place for begin, end in offsets for place in range(begin, end)}
        visible = {n for n, each in enumerate(text) if not (each.isspace() or each in FORMAT)}
        assert visible <= covered


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [24, 64])
def test_labels_of_an_answer_decode_to_its_text(tokenizers, kind, length):
    rng, tokenizer, recovered = random.Random(length), tokenizers[kind], 0
    config = SpanConfig(max_seq_length=length, max_query_length=8, doc_stride=5)
    # A SentencePiece piece may hold a letter, one of BPE an accent, and the mark after it.
    marks = [""] if kind in ("sentencepiece", "bpe") else MARKS
    for _ in range(150):
        context, words = random_context(rng, marks)
        first = rng.randrange(len(words))
        last = min(first + rng.randrange(3), len(words) - 1)
        begin, end = words[first][0], words[last][1]
        (passage,) = spans.make_passages([("ab, xyz", context)], tokenizer, config)
        tokens = spans.locate((context[begin:end], begin), passage)
        for window, feature in zip(
            passage.windows, spans.label_windows(passage, tokens), strict=True
        ):
            if feature.label != (0, 0):
                shift = window.start - passage.context_start(feature, window)
                low, high = np.array(feature.label) + shift
                found = context[passage.offsets[low, 0] : passage.offsets[high, 1]]
                assert found == context[begin:end].rstrip(FORMAT)
                recovered += 1
    assert recovered > 100


@pytest.mark.parametrize(
    "answer",
    [
        "😀",
        "👍🏽",
        "👨‍👩‍👧",
        "🇫🇷",
        "❤️",
        "café",
        "cafe\u0301",
        "Ångström",
        "北京",
        "a😀b",
        "naïve 😀 café",
        "½",
    ],
)
def test_bytes_of_a_character_in_several_pieces_decode_to_whole_characters(tokenizers, answer):
    tokenizer, config = tokenizers["bpe"], SpanConfig(max_seq_length=128)
    context = f"Ça 😀😀: {answer} 😀, and {answer}."
    for start in (context.index(answer, 4), context.rindex(answer)):
        (passage,) = spans.make_passages([("Où ça, 😀?", context)], tokenizer, config)
        (feature,) = spans.label_windows(passage, spans.locate((answer, start), passage))
        outputs = [np.eye(len(feature), dtype=np.float32)[list(feature.label)].T]
        best = spans.rank_answers(passage, outputs, config).answers[0]
        assert (best.text, best.start, best.end) == (answer, start, start + len(answer))


@pytest.mark.parametrize("seed", range(20))
def test_windows_cover_all_tokens_and_own_those_with_their_largest_context(seed):
    rng = random.Random(seed)
    count, room, stride = rng.randint(0, 200), rng.randint(1, 60), rng.randint(1, 70)
    windows = spans.cut_windows(count, room, stride)
    assert all(end - begin <= room for begin, end, _ in windows)
    for token in range(count):
        context = [
            min(token - begin, end - 1 - token) + 0.01 * (end - begin)
            if begin <= token < end
            else -1
            for begin, end, _ in windows
        ]
        assert max(context) >= 0
        owners = [
            number
            for number, (begin, end, is_max_context) in enumerate(windows)
            if begin <= token < end and is_max_context[token - begin]
        ]
        assert owners == [context.index(max(context))]


def test_each_token_of_a_passage_is_owned_by_one_window(tokenizers):
    config = SpanConfig(max_seq_length=32, max_query_length=8, doc_stride=7)
    context = "ab c. " * 40
    with pytest.warns(UserWarning, match="1 of 1 questions are truncated to 8 tokens"):
        (passage,) = spans.make_passages([("x" * 50, context)], tokenizers["cased"], config)
    times = np.zeros(len(passage.offsets), int)
    for window, feature in zip(passage.windows, passage.features, strict=True):
        times[window.start : window.end] += window.is_max_context
        tokens = feature.sequences[0]
        assert len(tokens) == len(feature) <= 32
        assert feature.second_starts == (10,)  # [CLS], 8 of 50, [SEP].
    assert (times == 1).all()
    assert len(passage.windows) > 3


def random_passage(rng: np.random.Generator) -> tuple[Passage, list[np.ndarray]]:
    """Returns tokens of one letter out of two, so that texts repeat, and random outputs."""
    count = int(rng.integers(1, 30))
    context = "".join(rng.choice([*"ab"], count))
    windows = spans.cut_windows(count, 12, 5)
    features = [
        ModelInput((np.zeros(end - begin + 4, np.int32),), (3,)) for begin, end, _ in windows
    ]
    offsets = np.stack([np.arange(count), np.arange(count) + 1], axis=1)
    outputs = [rng.normal(size=(len(each), 2)).astype(np.float32) for each in features]
    return Passage(context, offsets, windows, features), outputs


@pytest.mark.parametrize("seed", range(20))
def test_best_spans_equal_an_exhaustive_search(seed):
    passage, outputs = random_passage(np.random.default_rng(seed))
    expected = {}
    for window, output in zip(passage.windows, outputs, strict=True):
        for first in range(window.start, window.end):
            for last in range(first, min(first + 4, window.end)):
                if window.is_max_context[first - window.start]:
                    start = output[first - window.start + 3, 0]
                    end = output[last - window.start + 3, 1]
                    text = passage.context[first : last + 1]
                    expected[text] = max(expected.get(text, -np.inf), start + end)
    found = spans.best_spans(passage, outputs, max_answer_length=4, n_best=5)
    assert [passage.text(span) for span in found] == sorted(expected, key=expected.get)[:-6:-1]
    np.testing.assert_allclose([s.score for s in found], sorted(expected.values())[:-6:-1], 1e-6)


@pytest.mark.parametrize(
    ("context", "first", "last"),
    [
        ("ab\u00ad xyz", "a", "\u00ad"),
        ("ab\u200b. xyz", "a", "\u200b"),
        ("xyz \u00adab", "\u00ad", "b"),
        ("xyz \u00adab\u00ad\u00ad", "\u00ad", None),
    ],
)
def test_empty_tokens_at_the_ends_of_an_answer_are_removed(tokenizers, context, first, last):
    config = SpanConfig(32, max_query_length=8)
    (passage,) = spans.make_passages([("ab", context)], tokenizers["sentencepiece"], config)
    ((_, raw),) = tokenizers["sentencepiece"]._encode_raw([context])
    surfaces = [context[start:end] for start, end in raw]
    (feature,) = passage.features
    output = np.zeros([len(feature.sequences[0]), 2], np.float32)
    output[feature.second_starts[0] + surfaces.index(first), 0] = 9.0
    end = len(surfaces) - 1 if last is None else surfaces.index(last)
    output[feature.second_starts[0] + end, 1] = 9.0
    (best, *_) = spans.best_spans(passage, [output], 30, 20)
    assert passage.text(best) == "ab" and best.score == 18


def test_null_span_has_the_lowest_score_over_the_windows():
    outputs = [np.array([[2.0, 3.0]]), np.array([[4.0, 0.5]]), np.array([[9.0, 9.0]])]
    assert spans.null_span(Passage("", None, [], []), outputs) == (0, 0, 4.0, 0.5)


def test_no_answer_is_at_the_last_token_where_that_is_cls():
    passage = Passage("", None, [], [], num_after=2, cls_last=True)
    assert passage.no_answer(ModelInput((np.arange(7),), (7,))) == (6, 6)
    outputs = [np.array([[2.0, 3.0], [1.0, 0.5]]), np.array([[9.0, 9.0], [7.0, 7.0]])]
    assert spans.null_span(passage, outputs) == (0, 0, 1.0, 0.5)


def test_context_without_tokens_has_the_empty_answer(tokenizers):
    (passage,) = spans.make_passages([("ab", "\u200b")], tokenizers["cased"], SpanConfig())
    (feature,) = passage.features
    best = spans.best_spans(passage, [np.zeros((len(feature), 2), np.float32)], 30, 20)
    assert [passage.text(span) for span in best] == [""]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mark", [*"\u200b\u00ad\u200e\ufeff\u2060\x00\ufffd"])
def test_an_answer_has_no_format_characters_around_it(tokenizers, kind, mark):
    context = f"xyz {mark}abc{mark} {mark}9{mark}, b{mark}"
    config = SpanConfig(max_seq_length=64, max_query_length=8)
    (passage,) = spans.make_passages([("ab", context)], tokenizers[kind], config)
    for answer in ("xyz", "abc", f"abc{mark} {mark}9", "b"):
        start = context.rindex(answer)
        (feature,) = spans.label_windows(passage, spans.locate((answer, start), passage))
        outputs = [np.eye(len(feature), dtype=np.float32)[list(feature.label)].T]
        best = spans.best_spans(passage, outputs, max_answer_length=30, n_best=1)[0]
        assert passage.text(best) == answer


def test_a_span_without_text_is_no_answer(tokenizers):
    """SentencePiece makes tokens of a soft hyphen, and of the space before an unknown letter."""
    (passage,) = spans.make_passages(
        [("ab", "\u00ad abc")], tokenizers["sentencepiece"], SpanConfig()
    )
    (feature,) = passage.features
    widths = passage.offsets[:, 1] - passage.offsets[:, 0]
    assert 0 in widths
    outputs = np.zeros((len(feature), 2), np.float32)
    outputs[feature.second_starts[0] + np.flatnonzero(widths == 0)] = 9
    best = spans.best_spans(passage, [outputs], max_answer_length=30, n_best=20)
    assert "" not in [passage.text(span) for span in best]
