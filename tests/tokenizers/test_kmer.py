import itertools
import json

import numpy as np
import pytest
import tokenizers

from bert_corpus.vocabulary import kmer_vocabulary, train_vocabulary
from bert_jax.data.features import make_sequence
from bert_jax.tokenizers.export import transformers_files
from bert_jax.tokenizers.kmer import kmer_spec
from bert_jax.tokenizers.tokenizer import load_tokenizer, tokenizer_from_bytes
from tests.helpers.corpora import random_sequences, store_tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def pieces_of(text, k, letters):
    """Returns the pieces of a text, by its definition, one character after another."""
    pieces = []
    for word in text.split():
        word, start = word.upper(), 0
        while start < len(word):
            part = word[start : start + k]
            if len(part) < k or not set(part) <= set(letters):
                part = word[start]
            pieces.append(part if set(part) <= set(letters) else "[UNK]")
            start += len(part)
    return pieces


@pytest.mark.parametrize(("k", "letters"), [(1, "ACGT"), (3, "ACGU"), (6, "ACGT")])
def test_kmers_do_not_overlap_and_are_stored_as_the_librarys_tokenizer(tmp_path, k, letters):
    (tmp_path / "text").write_text("ACGT\n")
    content = kmer_vocabulary(str(tmp_path / "text"), k, letters)
    tokenizer = tokenizer_from_bytes("kmer.json", content)
    singles = [] if k == 1 else letters
    expected = [*SPECIAL, *singles, *map("".join, itertools.product(letters, repeat=k))]
    assert [tokenizer.id_to_token(index) for index in range(tokenizer.vocab_size)] == expected
    assert tokenizer.word_start.all() and not tokenizer.lower_case
    texts = random_sequences()
    ids = tokenizer.encode_batch(texts)
    for text, found in zip(texts, ids, strict=True):
        assert [*map(tokenizer.id_to_token, found)] == pieces_of(text, k, letters), text
    found, offsets = tokenizer.encode_with_offsets(["acNgtacg acg"])[0]
    np.testing.assert_array_equal(
        [end - start for start, end in offsets],
        [len(piece) if piece != "[UNK]" else 1 for piece in pieces_of("acNgtacg acg", k, letters)],
    )
    stored = store_tokenizer(tokenizer, tmp_path / "stored")
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "stored/tokenizer.json"))
    (tmp_path / "exported").mkdir()
    for name, content in transformers_files(tokenizer.stored, 512).items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "exported" / name).write_text(text)
    exported = load_tokenizer(tmp_path / "exported")
    assert stored.encode_batch(texts) == exported.encode_batch(texts) == ids
    assert stored.sha256 == exported.sha256 == tokenizer.sha256
    sequence = library.encode("ACGTACG", "ACGU")
    tokens, second = make_sequence(tokenizer, *map(tokenizer.encode, ("ACGTACG", "ACGU")))
    assert sequence.ids == tokens.tolist()
    assert sequence.type_ids == [0] * second + [1] * (len(tokens) - second)


@pytest.mark.parametrize(
    ("k", "letters", "message"),
    [
        (6, "ACGTA", "--letters=ACGTA; expected distinct capital letters"),
        (6, "acgt", "--letters=acgt; expected distinct capital letters"),
        (6, "A C", "--letters=A C; expected distinct"),
        (10, "ACGT", "--k=10 of 4 letters gives 1,048,576 k-mers; expected at most 524,288"),
    ],
)
def test_impossible_kmers_are_a_clear_error(k, letters, message):
    with pytest.raises(ValueError, match=message):
        kmer_spec(k, letters)


def test_characters_that_are_none_of_the_letters_are_reported(tmp_path, capsys):
    (tmp_path / "a.fa").write_text(f">1\n{'ACGT' * 24}NNRY\n")
    train_vocabulary([f"{tmp_path}/a.fa"], "kmer", 0, False, 1)
    error = capsys.readouterr().err
    assert "warning: 4.00% of the characters are none of --letters=ACGT" in error
    assert "(NRY)" in error
