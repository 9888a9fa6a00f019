"""Features of a task packed into rows of one shape: no step is spent on padding short texts.

A row holds as many sequences as fit, each attending only within itself, as in pre-training; so a
batch of so many examples is a varying number of rows. It lies in an array with room for the most
there can be, and its rows fill chunks in order: a step computes the first `num_chunks` and leaves
the rest. One program is compiled, whatever the lengths.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from bert_jax.corpus.packing import pack_lengths
from bert_jax.data.batches import local_rows, place, take

NO_LABEL = -1


@dataclasses.dataclass(frozen=True)
class Feature:
    """What the model is given of one example, or of one window of it.

    Attributes:
      sequences: int32 `[length]` each, `[CLS] ... [SEP]` or `[CLS] ... [SEP] ... [SEP]`. One, but
        for multiple choice, which has one for each choice, and embedding: a query, its passage,
        and what else is no passage of it. What is only predicted may have fewer.
      second_starts: where segment 1 begins in each; its length, if there is none.
      label: what the head is to give, None where it is not known. classification: the number of
        the class, or the value (float). multiple_choice: the number of the choice. tagging: int32
        `[length]`, NO_LABEL where nothing is predicted. span: its first and last position.
        embedding: int32 `[passages]`, a number for each passage, the same for the same text.
    """

    sequences: tuple[np.ndarray, ...]
    second_starts: tuple[int, ...]
    label: int | float | np.ndarray | tuple[int, int] | None = None

    def __len__(self) -> int:
        return sum(map(len, self.sequences))


def make_sequence(tokenizer, first: Sequence[int], second: Sequence[int] | None = None):
    """`[CLS] first [SEP]`, or `[CLS] first [SEP] second [SEP]`, and where segment 1 begins."""
    ids = [tokenizer.cls_id, *first, tokenizer.sep_id]
    start = len(ids)
    if second is not None:
        ids += [*second, tokenizer.sep_id]
    return np.array(ids, np.int32), start


@dataclasses.dataclass(frozen=True)
class RowShape:
    """How features lie in rows: `length` tokens, at most `num_sequences`; `kind` is of the head."""

    length: int
    num_sequences: int
    kind: str
    pad_id: int
    sequences_per_feature: int = 1

    def pack(self, features: Sequence[Feature]) -> list[list[int]]:
        """For each row the indices of the features in it; ValueError if one is too long."""
        lengths = [len(feature) for feature in features]
        if lengths and max(lengths) > self.length:
            raise ValueError(f"a feature of {max(lengths)} tokens in rows of {self.length}")
        most = self.num_sequences // self.sequences_per_feature
        return pack_lengths(lengths, self.length, most)

    def empty(self, num_rows: int) -> dict[str, np.ndarray]:
        """`num_rows` rows of padding: what `fill` fills, and a step takes."""
        slots = self.num_sequences
        rows = {
            "tokens": np.full((num_rows, self.length), self.pad_id, np.int32),
            "pairs": np.zeros((num_rows, slots, 3), np.int32),
            "weights": np.zeros((num_rows, slots // self.sequences_per_feature), np.float32),
        }
        if self.kind == "tagging":
            rows["labels"] = np.full((num_rows, self.length), NO_LABEL, np.int32)
        elif self.kind == "span":
            rows["labels"] = np.zeros((num_rows, slots, 2), np.int32)
        elif self.kind == "embedding":
            passages = self.sequences_per_feature - 1
            rows["labels"] = np.zeros((*rows["weights"].shape, passages), np.int32)
        else:
            dtype = np.float32 if self.kind == "regression" else np.int32
            rows["labels"] = np.zeros(rows["weights"].shape, dtype)
        return rows

    def fill(self, rows: dict[str, np.ndarray], row: int, features: Sequence[Feature]) -> None:
        """Writes `features` into one row, in order."""
        end = slot = 0
        for place_in_row, feature in enumerate(features):
            start = end
            for tokens, second in zip(feature.sequences, feature.second_starts, strict=True):
                begin, end = end, end + len(tokens)
                rows["tokens"][row, begin:end] = tokens
                rows["pairs"][row, slot] = begin, begin + second, end
                slot += 1
            if feature.label is None:
                continue
            rows["weights"][row, place_in_row] = 1
            if self.kind == "tagging":
                rows["labels"][row, start:end] = feature.label
            elif self.kind == "span":
                rows["labels"][row, place_in_row] = np.add(feature.label, start)
            else:
                rows["labels"][row, place_in_row] = feature.label


def steps_per_epoch(num_features: int, batch_size: int) -> int:
    """The last batch of an epoch may be smaller; none is dropped."""
    return -(-num_features // batch_size)


def batch_features(num_features: int, batch_size: int, seed: int, step: int) -> np.ndarray:
    """Indices of the features of batch `step` (from 0), shuffled anew in each epoch."""
    epoch, place_in_epoch = divmod(step, steps_per_epoch(num_features, batch_size))
    order = np.random.default_rng((seed, epoch)).permutation(num_features)
    return order[place_in_epoch * batch_size : (place_in_epoch + 1) * batch_size]


def train_batches(
    features: Sequence[Feature],
    shape: RowShape,
    sharding: jax.sharding.Sharding,
    *,
    batch_size: int,
    chunk_rows: int,
    seed: int,
    start: int,
    stop: int,
) -> Iterator[tuple[dict[str, jax.Array], int]]:
    """Batches `start` to `stop`: (rows `[chunk_rows * chunks, ...]`, how many chunks are in use).

    Row r of chunk c lies at `r * chunks + c`, so that each device holds a part of every chunk.
    """
    chunks = -(-batch_size // chunk_rows)
    local = local_rows(sharding, chunk_rows * chunks)
    for step in range(start, stop):
        chosen = batch_features(len(features), batch_size, seed, step)
        chosen = [features[index] for index in chosen]
        packed = shape.pack(chosen)
        rows = shape.empty(chunk_rows * chunks)
        for index, members in enumerate(packed):
            chunk, row = divmod(index, chunk_rows)
            shape.fill(rows, row * chunks + chunk, [chosen[member] for member in members])
        yield (
            place(
                {name: take(array, local) for name, array in rows.items()},
                sharding,
                chunk_rows * chunks,
            ),
            -(-len(packed) // chunk_rows),
        )


def eval_batches(
    features: Sequence[Feature],
    shape: RowShape,
    sharding: jax.sharding.Sharding,
    chunk_rows: int,
) -> Iterator[tuple[dict[str, jax.Array], list[list[int]]]]:
    """Every feature once: (rows `[chunk_rows, ...]`, the indices of the features in each row)."""
    packed = shape.pack(features)
    local = local_rows(sharding, chunk_rows)
    for first in range(0, len(packed), chunk_rows):
        members = packed[first : first + chunk_rows]
        rows = shape.empty(chunk_rows)
        for row, indices in enumerate(members):
            shape.fill(rows, row, [features[index] for index in indices])
        own = {name: take(array, local) for name, array in rows.items()}
        yield place(own, sharding, chunk_rows), members
