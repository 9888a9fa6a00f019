"""The inputs that users pass; words of tokens, compared with the `tokenizers` library."""

import itertools
import random

import numpy as np
import pytest

from bert_corpus.vocabulary import train_byte_pair
from bert_jax.data.features import ModelInput
from bert_jax.inference.text_inputs import as_list, build_batch, describe_tokens
from bert_jax.tasks.sequences import make_sequences
from bert_jax.tokenizers.tokenizer import tokenizer_from_bytes
from bert_jax.tools.train_vocab import train_vocabulary
from tests.helpers.corpora import without_special_tokens

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = list("abcxyz")
PIECES = LETTERS + ["##" + letter for letter in LETTERS] + [",", ".", "!", "-", "中"]
TOKENIZER = tokenizer_from_bytes("vocab.txt", "\n".join([*SPECIAL, *PIECES]).encode())


def described(texts, tokenizer=TOKENIZER, length=64):
    """Returns the tokens of pairs (or texts) of at most `length` tokens."""
    sequences, _ = make_sequences(texts, tokenizer, length)
    features = [ModelInput((ids,), (second,)) for ids, second in sequences]
    return describe_tokens(texts, features, tokenizer)


@pytest.mark.parametrize("length", [64, 12])
def test_tokens_of_a_pair_without_segments_equal_tokens_of_its_texts(tmp_path, length):
    """RoBERTa's: two separators between the texts, and no segment to tell them apart."""
    (tmp_path / "text.txt").write_text("the old king built a road\nthe river made a village\n" * 9)
    content = train_byte_pair(str(tmp_path / "text.txt"), 290)
    tokenizer = tokenizer_from_bytes("bpe.json", content)
    pair = ("the old king", "the river made a village")
    (found,) = described([pair], tokenizer, length)
    names = [tokenizer.id_to_token(index) for index in (tokenizer.cls_id, tokenizer.sep_id)]
    assert found.tokens[0] == names[0] and found.tokens.count(names[1]) == 3
    second = len(found.tokens) - found.tokens[::-1].index(names[1], 1)
    assert len(found.tokens) <= length and not found.segment_ids.any()
    of_text = [0] * second + [1] * (len(found.tokens) - second)
    for text, token, word, (start, end) in zip(
        of_text, found.ids, found.words, found.offsets, strict=True
    ):
        if word >= 0:
            assert pair[text][start:end] == tokenizer.decode([token]).strip()
            assert pair[text].split()[word].find(pair[text][start:end]) >= 0
        else:
            assert tokenizer.id_to_token(token) in names and (start, end) == (0, 0)


@pytest.mark.parametrize("length", [64, 5])
def test_tokens_without_special_tokens_are_those_of_the_texts(length):
    pair, bare = ("ab c", "a, xyz b"), without_special_tokens(TOKENIZER)
    (found,), (whole,) = described([pair], bare, length), described([pair], TOKENIZER, length + 3)
    inside = np.flatnonzero(whole.words >= 0)
    for ours, expected in zip(found, whole, strict=True):
        np.testing.assert_array_equal(ours, np.asarray(expected)[inside])


@pytest.mark.parametrize(
    ("inputs", "of_strings", "of_a_single_tuple"),
    [
        ("ab", (["ab"], 0), (["ab"], 0)),
        (["a", "b"], (["a", "b"], slice(None)), (["a", "b"], slice(None))),
        (("a", "b"), (["a", "b"], slice(None)), ([("a", "b")], 0)),
        ((("a", "b"),), ([("a", "b")], slice(None)), ([("a", "b")], slice(None))),
        (("a", None), (["a", None], slice(None)), (["a", None], slice(None))),
        (iter("ab"), (["a", "b"], slice(None)), None),
        (np.array(["a", "b"]), (["a", "b"], slice(None)), (["a", "b"], slice(None))),
        ({"a": 1}, ([{"a": 1}], 0), ([{"a": 1}], 0)),
        (5, ([5], 0), ([5], 0)),
    ],
)
def test_several_inputs_and_a_single_one(inputs, of_strings, of_a_single_tuple):
    assert as_list(inputs) == of_strings
    if of_a_single_tuple:  # A generator is used up.
        assert as_list(inputs, tuple_is_one=True) == of_a_single_tuple


@pytest.mark.parametrize("length", [64, 9])
def test_words_and_offsets_equal_the_library(length):
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcxyzABC ,.!-中  ?é", k=rng.randint(0, 25))) for _ in range(200)]
    backend = TOKENIZER.stored.backend
    pairs = list(itertools.pairwise(texts))
    for pair, tokens in zip(pairs, described(pairs, length=length), strict=True):
        seps = np.flatnonzero(tokens.ids == TOKENIZER.sep_id)
        assert tokens.ids[0] == TOKENIZER.cls_id and len(seps) == 2 and len(tokens.ids) <= length
        assert tokens.segment_ids.tolist() == [int(i > seps[0]) for i in range(len(tokens.ids))]
        limits = ((1, seps[0]), (seps[0] + 1, seps[1]))
        for text, (start, end) in zip(pair, limits, strict=True):
            encoding = backend.encode(text, add_special_tokens=False)
            count = end - start
            assert tokens.tokens[start:end] == encoding.tokens[:count]
            assert tokens.words[start:end].tolist() == encoding.word_ids[:count]
            assert tokens.offsets[start:end].tolist() == [*map(list, encoding.offsets[:count])]
        assert (tokens.words[[0, *seps]] == -1).all() and not tokens.offsets[[0, *seps]].any()


def test_words_of_sentencepiece_begin_at_spaces(tmp_path):
    (tmp_path / "text.txt").write_text("the old town and the river runs through the town\n" * 50)
    content = train_vocabulary([str(tmp_path / "text.txt")], "sentencepiece", 40, True, 1)
    text = "the town runs"
    (tokens,) = described([(text,)], tokenizer_from_bytes("spiece.model", content))
    words = {}
    for word, (start, end) in zip(tokens.words.tolist(), tokens.offsets.tolist(), strict=True):
        words[word] = words.get(word, "") + text[start:end]
    assert words == {-1: "", 0: "the", 1: "town", 2: "runs"} and len(tokens.tokens) > 5


def test_pooled_position_of_a_left_to_right_model_is_the_last_token():
    feature = ModelInput((np.array([2, 5, 3], np.int32),), (3,))
    for causal, expected in ((False, 0), (True, 2)):
        batch = build_batch([feature], 8, pad_id=0, pools_last=causal)
        assert batch["pooled_positions"].tolist() == [[expected]]
        assert batch["sequence_bounds"].tolist() == [[[0, 3, 3]]]
