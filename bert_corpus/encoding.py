"""Token ids as bytes of uint16 or uint32, which take a tenth or less of the memory of a list."""

import array
from collections.abc import Sequence

from bert_jax.data.packing import token_dtype
from bert_jax.tokenizers.tokenizer import Tokenizer

TYPECODES = {"uint16": "H", "uint32": "I"}  # of `array`
MAX_CACHED_CHARACTERS = 1 << 22  # of words whose ids are kept: about 100 MB


class Encoder:
    """Encodes texts with a tokenizer, each word of a WordPiece vocabulary once."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.typecode = TYPECODES[token_dtype(tokenizer.vocab_size)]
        self._encoded_words: dict[str, bytes] = {}
        self._cached_characters = 0

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Returns the ids of each text as the bytes of an array of `typecode`."""
        if not self.tokenizer.splits_at_spaces:
            return self._encode(texts)
        # No rule of the tokenizer looks across a space, and most words have occurred before.
        if self._cached_characters > MAX_CACHED_CHARACTERS:
            self._encoded_words, self._cached_characters = {}, 0
        words_of_texts = [text.split(" ") for text in texts]
        new_words = list(set().union(*words_of_texts).difference(self._encoded_words))
        self._encoded_words.update(zip(new_words, self._encode(new_words), strict=True))
        self._cached_characters += sum(map(len, new_words))
        encoded = self._encoded_words.__getitem__
        return [b"".join(map(encoded, words)) for words in words_of_texts]

    def _encode(self, texts: Sequence[str]) -> list[bytes]:
        encoded = self.tokenizer.encode_batch(texts)
        return [array.array(self.typecode, ids).tobytes() for ids in encoded]
