"""Checks and tokenizes the texts that a user gives, and describes their tokens."""

import dataclasses
import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np

from bert_jax.data.features import LabelLayout, ModelInput, RowShape, unpack_rows
from bert_jax.tasks.sequences import make_sequences, truncate_longest_first
from bert_jax.tokenizers.tokenizer import Tokenizer

Texts = str | Iterable[str]
"""A text, or several: a list, a tuple, an array, a column of a table, a generator."""
TextOrPair = str | tuple[str, str]
"""A text, or a pair: a tuple of two strings."""
TextsOrPairs = TextOrPair | Iterable[TextOrPair]
"""A text or a pair, or several of these."""


class Tokens(NamedTuple):
    """The tokens of a text or a pair as the model reads them: [CLS] first [SEP] second [SEP].

    Attributes:
      tokens: the pieces.
      ids: int32 `[length]`, their ids.
      segment_ids: int32 `[length]`, 0 up to the first [SEP], 1 in the second text of a pair; 2 for
        [CLS] where that is the last token.
      words: int32 `[length]`, the index of the word in its text, from 0; -1 for [CLS] and [SEP].
      offsets: int32 `[length, 2]`, characters `[start, end)` in its text; 0, 0 for [CLS] and [SEP].
    """

    tokens: list[str]
    ids: np.ndarray
    segment_ids: np.ndarray
    words: np.ndarray
    offsets: np.ndarray


def as_list(inputs: object, tuple_is_one: bool = False) -> tuple[list, slice | int]:
    """Returns the inputs as a list, and the index that selects all results or the only one.

    If `tuple_is_one`, a tuple of strings is one input: a pair of texts, or the words of a text.
    """
    is_one = isinstance(inputs, str | bytes | Mapping | Set) or not isinstance(inputs, Iterable)
    if tuple_is_one and isinstance(inputs, tuple):
        is_one = all(isinstance(each, str) for each in inputs)
    return ([inputs], 0) if is_one else (list(inputs), slice(None))


def check_texts(name: str, texts: Sequence, pairs: bool = False) -> list[Sequence[str]]:
    """Returns the strings of each text, or if `pairs` of each pair.

    Raises TypeError for what is not a string, and ValueError for a lone surrogate; both name the
    index of the text.
    """
    expected = "a string or a list of strings"
    if pairs:
        expected = "a string, a pair of strings (a tuple) or a list of these"
    parts = []
    for index, text in enumerate(texts):
        part = text if pairs and isinstance(text, tuple | list) else (text,)
        where = f" at index {index}" if len(texts) > 1 else ""
        if len(part) not in (1, 2) or not all(isinstance(each, str) for each in part):
            raise TypeError(f"{name} must be {expected}, got {text!r:.60}{where}")
        if parts and len(part) != len(parts[0]):
            mixed = "expected only texts or only pairs of texts"
            raise TypeError(f"{name} must be {expected}, got {text!r:.60}{where}: {mixed}")
        try:
            "".join(part).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name}: {error}, in {text!r:.60}{where}") from None
        parts.append(part)
    return parts


def as_texts_or_pairs(inputs: object) -> tuple[list[Sequence[str]], slice | int]:
    """Returns the strings of each text or pair, and the index that selects the results."""
    texts, chosen = as_list(inputs, tuple_is_one=True)
    return check_texts("texts", texts, pairs=True), chosen


def choose_length(length: int | None, limit: int, name: str = "max_length") -> int:
    """Returns a given length or, if it is None, the limit. Raises ValueError if it is invalid."""
    if length is None:
        return limit
    check_whole(name, length, 2, limit)
    return length


def check_whole(name: str, value: int, low: int, high: int) -> None:
    """Raises ValueError unless `value` is a whole number in `[low, high]`."""
    if not isinstance(value, int | np.integer) or not low <= value <= high:
        raise ValueError(f"{name} must be a whole number in [{low}, {high}], got {value!r}")


def make_features(
    texts: Sequence[Sequence[str]],
    tokenizer: Tokenizer,
    max_length: int,
    max_first: int | None = None,
    stacklevel: int = 3,
) -> list[ModelInput]:
    """Tokenizes texts and pairs, given as their strings; warns about truncated ones.

    `max_length` and `max_first` are as in `make_sequences`; `stacklevel` is that of the warning.
    """
    sequences, truncated = make_sequences(texts, tokenizer, max_length, max_first)
    if any(truncated):
        message = f"{sum(truncated)} of {len(texts)} texts are truncated to {max_length} tokens"
        warnings.warn(message, stacklevel=stacklevel)
    return [ModelInput((tokens,), (second_start,)) for tokens, second_start in sequences]


def with_global_positions(
    features: Sequence[ModelInput], positions: Iterable, model_config
) -> list[ModelInput]:
    """Returns the features of texts with the tokens that are global, a list of numbers for each.

    Raises ValueError for a number that is no token of its text, and for a model that has no global
    tokens; TypeError for what are not lists.
    """
    if not hasattr(model_config, "global_tokens"):
        name = model_config.architecture
        raise ValueError(f"global_positions: {name} has no global tokens; a Longformer has them")
    positions = list(positions)
    if len(positions) != len(features):
        counts = f"{len(positions)} lists and {len(features)} texts"
        raise ValueError(f"global_positions: {counts}: expected a list for each text")
    chosen = []
    for index, (feature, numbers) in enumerate(zip(features, positions, strict=True)):
        where = f" at index {index}" if len(features) > 1 else ""
        if isinstance(numbers, str) or not isinstance(numbers, Iterable):
            raise TypeError(
                f"global_positions must be lists of numbers, got {numbers!r:.60}{where}"
            )
        numbers = tuple(numbers)
        if len(features) == 1 and any(isinstance(each, list | tuple) for each in numbers):
            raise TypeError(
                f"global_positions must be numbers, got {[*numbers]!r:.60}: for a single text, "
                "pass a flat list"
            )
        for number in numbers:
            is_whole = isinstance(number, int | np.integer) and type(number) is not bool
            if not is_whole or not 0 <= number < len(feature):
                raise ValueError(
                    f"global_positions has {number!r}{where}, but the text has {len(feature)} "
                    f"tokens: expected whole numbers in [0, {len(feature) - 1}]"
                )
        chosen.append(dataclasses.replace(feature, global_positions=numbers))
    return chosen


def token_names(feature: ModelInput, tokenizer: Tokenizer) -> list[str]:
    """Returns the pieces of a feature's sequence."""
    return [tokenizer.id_to_token(index) for index in feature.sequences[0].tolist()]


def describe_tokens(
    texts: Sequence[Sequence[str]], features: Sequence[ModelInput], tokenizer: Tokenizer
) -> list[Tokens]:
    """Returns the tokens of each text or pair, whose model inputs are `features`."""
    encoded = iter(tokenizer.encode_with_offsets([*itertools.chain(*texts)]))
    described = []
    for text, feature in zip(texts, features, strict=True):
        (ids,), (second,) = feature.sequences, feature.second_starts
        words = np.full(len(ids), -1, np.int32)
        offsets = np.zeros((len(ids), 2), np.int32)
        parts, layout = [next(encoded) for _ in text], tokenizer.layout
        kept = [part_ids for part_ids, _ in parts]
        if len(text) == 2:  # Truncated as the features were.
            num_tokens = len(ids) - layout.num_special_tokens(2)
            kept = truncate_longest_first(*kept, num_tokens)
        start = layout.num_before
        for (part_ids, part_offsets), kept_ids in zip(parts, kept, strict=True):
            begins_word = tokenizer.word_start[part_ids]
            begins_word[:1] = True  # Whatever its piece.
            end = min(start + len(kept_ids), len(ids) - layout.num_after)
            words[start:end] = (np.cumsum(begins_word) - 1)[: end - start]
            offsets[start:end] = part_offsets[: end - start]
            start = end + layout.num_separators
        segment_ids = (np.arange(len(ids)) >= second).astype(np.int32)
        if layout.cls_last and layout.has_segments:
            segment_ids[-1] = 2
        tokens = token_names(feature, tokenizer)
        described.append(Tokens(tokens, ids, segment_ids, words, offsets))
    return described


def build_batch(
    features: Sequence[ModelInput], length: int, pad_id: int, pools_last: bool
) -> dict[str, np.ndarray]:
    """Builds a batch of one feature per row, padded to `length`: all that any module reads.

    `target_positions`, at which a masked-LM head predicts tokens, are all positions.
    """
    shape = RowShape(length, 1, LabelLayout(), pad_id)
    rows = shape.build([[feature] for feature in features], len(features))
    names = ("tokens", "sequence_bounds", "is_global")
    rows = {name: rows[name] for name in names if name in rows}
    batch = {name: np.asarray(array) for name, array in unpack_rows(rows, pools_last).items()}
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), rows["tokens"].shape)
    return rows | batch | {"target_positions": positions.copy()}
