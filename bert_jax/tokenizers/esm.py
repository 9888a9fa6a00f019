"""ESM's tokenizer, whose tokens are the letters of amino acids, in the format of `tokenizers`.

Pieces are found wherever they are in a text; what is between them, up to white space, is unknown.
"""

import re

from bert_jax.tokenizers.stored import SpecialTokens
from bert_jax.tokenizers.wordpiece import bert_spec

ESM_TOKENS = SpecialTokens(pad="<pad>", unk="<unk>", cls="<cls>", sep="<eos>", mask="<mask>")
# What Python takes for white space.
_BLANK = "".join(filter(str.isspace, map(chr, range(0x3001))))


def esm_spec(ids: dict[str, int], special_tokens: SpecialTokens = ESM_TOKENS) -> dict:
    """Returns ESM's tokenizer of a vocabulary, without a post-processor.

    Its model is a WordPiece, which reads a piece as itself, and anything else as unknown.
    """
    pieces = sorted({*ids}.difference(special_tokens), key=len, reverse=True)
    # Special tokens in a text are text: they are split, so that they do not match as pieces.
    special = (name for name in special_tokens if name)
    cuts = (f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in special)
    pattern = "|".join([*map(re.escape, pieces), *cuts])
    split = {"type": "Split", "invert": False}
    spec = bert_spec(ids, None, max_word_characters=100)
    spec["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            split | {"pattern": {"Regex": pattern}, "behavior": "Isolated"},
            split | {"pattern": {"Regex": rf"[{_BLANK}]+"}, "behavior": "Removed"},
        ],
    }
    spec["model"]["unk_token"] = special_tokens.unk
    return spec | {"normalizer": None, "decoder": None}


def is_esm(spec: dict, special_tokens: SpecialTokens) -> bool:
    """Returns whether a tokenizer is what transformers' EsmTokenizer makes of its vocabulary."""
    if spec["model"]["type"] != "WordPiece" or spec["normalizer"]:
        return False
    return (
        spec["pre_tokenizer"] == esm_spec(spec["model"]["vocab"], special_tokens)["pre_tokenizer"]
    )
