"""The same tokens are found in another tokenizer, whatever its marks and casing."""

import json

import numpy as np
import pytest

from bert_jax.tokenizers.overlap import find_overlap
from bert_jax.tokenizers.tokenizer import load_tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def wordpiece(directory, pieces, lower_case):
    directory.mkdir()
    (directory / "vocab.txt").write_text("".join(f"{p}\n" for p in [*pieces, *SPECIAL]))
    return load_tokenizer(directory / "vocab.txt", lower_case=lower_case)


def bpe(directory, pieces):
    """Returns a BPE of bytes and of `pieces`, each of which is merged from left to right."""
    import tokenizers

    directory.mkdir()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    names, merges = [*ROBERTA, *alphabet], []
    for piece in pieces:
        for end in range(2, len(piece) + 1):
            if piece[:end] not in names:
                names.append(piece[:end])
                merges.append((piece[: end - 1], piece[end - 1]))
    model = tokenizers.models.BPE({name: i for i, name in enumerate(names)}, merges)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(ROBERTA)
    (directory / "tokenizer.json").write_text(backend.to_str())
    (directory / "config.json").write_text('{"model_type": "roberta"}')
    return load_tokenizer(directory)


def unigram(directory, pieces):
    scores = [[piece, -float(len(pieces) - i) / 10] for i, piece in enumerate(pieces)]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}
    spec = {
        "model": {"type": "Unigram", "unk_id": 1, "vocab": [[s, 0.0] for s in SPECIAL] + scores},
        "pre_tokenizer": metaspace,
        "decoder": metaspace,
    }
    directory.mkdir()
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    (directory / "config.json").write_text('{"model_type": "deberta-v2"}')
    return load_tokenizer(directory)


# Old and new tokenizer, and for some new tokens the old pieces.
CASES = {
    "wordpiece in wordpiece": (
        lambda path: wordpiece(path, ["the", "##s", "s", ",", "re", "##st", "##e"], True),
        lambda path: wordpiece(path, ["##s", "The", "the", "rest", "##ese", ",", "qx"], False),
        {
            "##s": ["##s"],
            "The": ["the"],
            "the": ["the"],
            "rest": ["re", "##st"],
            "##ese": ["##e", "##s", "##e"],
            ",": [","],
            "qx": [],
        },
    ),
    "bpe in wordpiece": (
        lambda path: wordpiece(path, ["the", "##s", ",", "re", "##st", "cafe"], True),
        lambda path: bpe(path, ["Ġthe", "Ġrest", "Ġ,", "ĠcafÃ©"]),
        {
            "Ġthe": ["the"],
            "Ġrest": ["re", "##st"],
            "s": ["##s"],
            "S": ["##s"],
            ",": [","],
            "Ġ,": [","],
            "ĠcafÃ©": ["cafe"],
            "Ã": [],
            "Ġ": [],
        },
    ),
    "wordpiece in bpe": (
        lambda path: bpe(path, ["Ġthe", "Ġre", "st"]),
        lambda path: wordpiece(path, ["the", "rest", "##st", "##s", "s", "."], False),
        {
            "the": ["Ġthe"],
            "rest": ["Ġre", "st"],
            "##st": ["st"],
            "##s": ["s"],
            "s": ["Ġ", "s"],
            ".": ["."],
        },
    ),
    "unigram in bpe": (
        lambda path: bpe(path, ["Ġthe", "Ġre", "st"]),
        lambda path: unigram(path, ["▁the", "▁rest", "st", "the", "▁"]),
        {"▁the": ["Ġthe"], "▁rest": ["Ġre", "st"], "st": ["st"], "the": ["t", "h", "e"], "▁": []},
    ),
    "bpe in unigram": (
        lambda path: unigram(path, ["▁the", "▁re", "st", "s", "t", "▁"]),
        lambda path: bpe(path, ["Ġthe", "Ġrest", "st"]),
        {"Ġthe": ["▁the"], "Ġrest": ["▁re", "st"], "st": ["st"], "s": ["s"], "q": []},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_found_by_their_text_and_place(name, tmp_path):
    make_old, make_new, expected = CASES[name]
    old, new = make_old(tmp_path / "old"), make_new(tmp_path / "new")
    overlap = find_overlap(old, new)
    for token, pieces in expected.items():
        index = new.token_to_id(token)
        assert [old.id_to_token(i) for i in overlap.pieces[index]] == pieces, token
        shared = old.token_to_id(pieces[0]) if len(pieces) == 1 else -1
        assert overlap.shared[index] == shared, token
    for role in ("pad_id", "unk_id", "cls_id", "sep_id", "mask_id"):
        assert overlap.shared[getattr(new, role)] == getattr(old, role)


def test_a_tokenizer_shares_all_tokens_with_itself(tmp_path):
    for tokenizer in (
        bpe(tmp_path / "bpe", ["Ġthe", "ĠcafÃ©"]),
        wordpiece(tmp_path / "wordpiece", ["the", "##s", "##Ü", "[unused1]", "!"], False),
        unigram(tmp_path / "unigram", ["▁the", "▁", "s"]),
    ):
        shared = find_overlap(tokenizer, tokenizer).shared
        np.testing.assert_array_equal(shared, np.arange(tokenizer.vocab_size))
