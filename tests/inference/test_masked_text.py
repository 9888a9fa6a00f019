"""Masked text is tokenized as one text, and filled in with natural spacing."""

import numpy as np

from bert_corpus.vocabulary import train_sentencepiece
from bert_jax.inference.masked_text import best_fills, tokenize_masked
from bert_jax.tokenizers.tokenizer import load_tokenizer, tokenizer_from_bytes
from tests.helpers.corpora import train_bpe, write_vocabulary


def test_sentencepiece_begins_no_word_after_a_mask_without_a_space(tmp_path):
    (tmp_path / "text.txt").write_text(
        "the river, and the town. people made a boat, as rivers do\n"
    )
    content = train_sentencepiece(str(tmp_path / "text.txt"), 60, True)
    tokenizer = tokenizer_from_bytes("spiece.model", content)
    tokens = tokenize_masked("a [MASK], and [MASK]s do", tokenizer)
    positions = [i for i, token in enumerate(tokens) if token == tokenizer.mask_id]
    pieces = [tokenizer.id_to_token(token) for token in tokens]
    assert "".join(pieces) == "[CLS]▁a[MASK],▁and[MASK]s▁do[SEP]"
    assert [pieces[position] for position in positions] == ["[MASK]", "[MASK]"]


def test_continuation_joins_the_word_before_the_mask(tmp_path):
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    probabilities = np.zeros((2, tokenizer.vocab_size), np.float32)
    probabilities[0, tokenizer.token_to_id("##s")] = 0.75
    probabilities[0, tokenizer.token_to_id("city")] = 0.25
    probabilities[1, tokenizer.token_to_id("king")] = 1
    fills = best_fills("the river [MASK] and [MASK].", probabilities, 2, tokenizer)
    assert [tuple(fill) for fill in fills[0]] == [
        ("##s", 0.75, "the rivers and [MASK]."),
        ("city", 0.25, "the river city and [MASK]."),
    ]
    assert fills[1][0] == ("king", 1, "the river [MASK] and king.")


def test_a_mask_of_roberta_takes_the_space_before_it(tmp_path):
    tokenizer = train_bpe(tmp_path, "The river and the town. The rivers and the city.\n" * 9)
    tokens = tokenize_masked("The <mask> of  <mask>s, <mask> and<mask>.", tokenizer)
    pieces = "".join(tokenizer.id_to_token(token) for token in tokens)
    assert pieces == "<s>The<mask>Ġof<mask>s,<mask>Ġand<mask>.</s>"
    probabilities = np.zeros((2, tokenizer.vocab_size), np.float32)
    probabilities[0, tokenizer.token_to_id("Ġt")] = 0.75
    probabilities[0, tokenizer.token_to_id("s")] = 0.25
    probabilities[1, tokenizer.token_to_id("Ġt")] = 1
    fills = best_fills("The river <mask>, and<mask>.", probabilities, 2, tokenizer)
    assert [fill.text for fill in fills[0]] == [
        "The river t, and<mask>.",
        "The rivers, and<mask>.",
    ]
    assert fills[1][0] == (" t", 1, "The river <mask>, and t.")
    assert [fill.token for fill in fills[0]] == [" t", "s"]
    assert tokenizer.encode(" t") == [tokenizer.token_to_id("Ġt")]


def test_fill_of_a_unigram_model_has_no_mark_of_words(tmp_path):
    (tmp_path / "text.txt").write_text("the river and the rivers and the town and the towns\n" * 9)
    content = train_sentencepiece(str(tmp_path / "text.txt"), 40, True)
    tokenizer = tokenizer_from_bytes("spiece.model", content)
    probabilities = np.zeros((1, tokenizer.vocab_size), np.float32)
    probabilities[0, [tokenizer.token_to_id(piece) for piece in ("▁town", "s")]] = 0.75, 0.25
    (fills,) = best_fills("a [MASK] b", probabilities, 2, tokenizer)
    assert [tuple(fill) for fill in fills] == [("town", 0.75, "a town b"), ("s", 0.25, "as b")]
