"""Multi-vector models (ColBERT): from the ids of a text to its tokens, and scores by MaxSim.

Late interaction (Khattab and Zaharia, 2020, "ColBERT", section 3) compares each token of a query
with all tokens of a passage. The rules are those of sentence-transformers' MultiVectorEncoder.
"""

from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.data.features import HIDDEN, NO_VECTOR, make_sequence
from bert_jax.losses.similarity import max_similarities
from bert_jax.tokenizers.tokenizer import Tokenizer

PASSAGES_AT_ONCE = 64
QUERIES_AT_ONCE = 256
SCORES_AT_ONCE = 1 << 24  # 64 MB.


class TokenRules:
    """How the ids of a query or a passage become the tokens that a multi-vector model reads.

    A query is filled with masks up to a length, if its head has a "query_expansion": a mapping with
    "length", "token" (None: the mask), and "attend", whether tokens attend to these masks. The
    tokens of passages that are "skip_words" have no vectors. Raises ValueError for what the
    tokenizer cannot do.
    """

    def __init__(self, settings: Mapping, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._expansion = settings.get("query_expansion")
        if self._expansion:
            self._expansion_id = _expansion_id(self._expansion["token"], tokenizer)
        self._skipped = skipped_ids(settings.get("skip_words", ()), tokenizer)

    def query(self, ids: Sequence[int]) -> tuple[np.ndarray, int, np.ndarray]:
        """Returns the ids of the sequence, where its second segment starts, and `token_kinds`."""
        tokens, second_start = make_sequence(self._tokenizer, ids)
        if not self._expansion:
            return tokens, second_start, np.zeros(len(tokens), np.int32)
        missing = max(self._expansion["length"] - len(tokens), 0)
        kinds = np.zeros(len(tokens) + missing, np.int32)
        if not self._expansion["attend"]:
            kinds[len(tokens) :] = HIDDEN
        tokens = np.append(tokens, np.full(missing, self._expansion_id, np.int32))
        return tokens, len(tokens), kinds

    def passage(self, ids: Sequence[int]) -> tuple[np.ndarray, int, np.ndarray]:
        """Returns what `query` returns, for the ids of a passage."""
        tokens, second_start = make_sequence(self._tokenizer, ids)
        kinds = np.where(np.isin(tokens, self._skipped), NO_VECTOR, 0)
        return tokens, second_start, kinds.astype(np.int32)


def _expansion_id(token: str | None, tokenizer: Tokenizer) -> int:
    """Returns the id with which queries are filled. Raises ValueError."""
    if tokenizer.layout.cls_last:
        raise ValueError("query_expansion: masks after a query are not supported with [CLS] last")
    if token is None:
        if tokenizer.mask_id is None:
            fix = "name another token, or leave query_expansion out"
            raise ValueError(f"query_expansion: the tokenizer has no mask token: {fix}")
        return tokenizer.mask_id
    try:
        return tokenizer.token_to_id(token)
    except KeyError:
        expected = "expected a token of the vocabulary"
        raise ValueError(f"query_expansion: token is {token!r}: {expected}") from None


def skipped_ids(words: Sequence[str], tokenizer: Tokenizer) -> np.ndarray:
    """Returns the ids, int32, of those words that are one token of the vocabulary."""
    ids = []
    for word in words:
        try:
            index = tokenizer.token_to_id(word)
        except KeyError:
            continue
        # Other unknown tokens would be skipped with it.
        if index != tokenizer.unk_id or word == tokenizer.id_to_token(tokenizer.unk_id):
            ids.append(index)
    return np.array(ids, np.int32)


def as_token_vectors(vectors: np.ndarray | Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the vectors of each text: of a list, of `[texts, tokens, size]`, or of one text.

    Raises ValueError for other shapes.
    """
    is_one = isinstance(vectors, np.ndarray) and vectors.ndim == 2
    texts = [np.asarray(each, np.float32) for each in ([vectors] if is_one else vectors)]
    if wrong := [list(each.shape) for each in texts if each.ndim != 2]:
        raise ValueError(f"expected vectors of tokens [tokens, size] of each text, got {wrong[0]}")
    return texts


def max_similarity_rows(
    queries: Sequence[np.ndarray], passages: Sequence[np.ndarray], mean: bool = False
) -> Iterator[np.ndarray]:
    """Yields the MaxSim of each query with all passages, float32 `[passages]`.

    Computes it on JAX's device in blocks of equally long texts, so that memory is bounded.

    Args:
      queries, passages: of each text the vectors `[tokens, size]`, of which those that are 0 do not
        count.
      mean: whether to divide by the number of tokens of the query.
    """
    order = sorted(range(len(passages)), key=lambda index: len(passages[index]))
    step = max(1, min(QUERIES_AT_ONCE, SCORES_AT_ONCE // max(len(passages), 1)))
    for start in range(0, len(queries), step):
        block = queries[start : start + step]
        padded, scores = pad_texts(block), np.zeros((len(block), len(passages)), np.float32)
        for first in range(0, len(order), PASSAGES_AT_ONCE):
            chosen = order[first : first + PASSAGES_AT_ONCE]
            found = _max_similarities(padded, pad_texts([passages[index] for index in chosen]))
            scores[:, chosen] = np.asarray(found)[: len(block), : len(chosen)]
        if mean:
            counts = [np.count_nonzero(np.any(query, axis=1)) for query in block]
            scores /= np.maximum(counts, 1)[:, None]
        yield from scores


_max_similarities = jax.jit(max_similarities)


def pad_texts(texts: Sequence[np.ndarray]) -> jax.Array:
    """Returns float32 `[texts, tokens, size]`, filled with 0; both numbers are powers of two.

    So there are few shapes, for each of which JAX compiles.
    """
    longest = max(map(len, texts))
    shape = [1 << (max(count, 1) - 1).bit_length() for count in (len(texts), longest)]
    padded = np.zeros((*shape, texts[0].shape[1]), np.float32)
    for row, text in zip(padded, texts, strict=False):
        row[: len(text)] = text
    return jnp.asarray(padded)
