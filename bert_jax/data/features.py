"""Packs the features of a task into rows of one shape, to minimize padding, and unpacks rows.

A row holds as many sequences as fit, each attending only within itself; so the number of rows
varies from batch to batch. The arrays are allocated for the maximum and the rows fill the first
microbatches; a step skips the empty ones, so that one compiled program serves all batches.
`unpack_rows` turns any packed rows, of pre-training too, into the batch that `Encoder` takes.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from bert_jax.data.packing import pack_lengths

NO_LABEL = -1
NO_VECTOR, HIDDEN = 1, 2
"""Kinds of tokens of a multi-vector model, beside 0: those whose vectors do not count, and those
that no token attends to."""
COMPARED_SEQUENCES = 16  # With each position at a time, in `unpack_rows`.


@dataclasses.dataclass(frozen=True)
class ModelInput:
    """The model's input for one example, or for one window of it.

    Attributes:
      sequences: int32 `[length]` each, as `make_sequence` joins a text or a pair. One; for
        multiple choice one per choice; for embedding a query, its passage, and any hard negatives.
      second_starts: start of segment 1 in each sequence; its length if there is none.
      label: target, None if unknown. Classification: index of the class; regression: value;
        multiple choice: index of the choice; tagging: int32 `[length]`, NO_LABEL where nothing is
        predicted; span: first, last position; embedding: int32 `[passages]`, the numbers of its
        passages, equal for equal ones, then those of all others that answer its query.
      teacher_outputs: what a teacher's head returns for it, an entry of `model.heads.Outputs`; None
        without a teacher.
      token_kinds: of each sequence, int32 `[length]`, the kinds of its tokens in a multi-vector
        model: 0, NO_VECTOR or HIDDEN. None: all 0. Either all features of a batch have them, or
        none.
      global_positions: of its only sequence, the tokens that see all of it and are seen by all
        (Longformer). None: those of the model. Either all features of a batch have them, or none.
    """

    sequences: tuple[np.ndarray, ...]
    second_starts: tuple[int, ...]
    label: int | float | np.ndarray | tuple[int, int] | None = None
    teacher_outputs: np.ndarray | None = None
    global_positions: tuple[int, ...] | None = None
    token_kinds: tuple[np.ndarray, ...] | None = None

    def __len__(self) -> int:
        return sum(map(len, self.sequences))


def make_sequence(
    tokenizer, first: Sequence[int], second: Sequence[int] | None = None
) -> tuple[np.ndarray, int]:
    """Joins one text or two by `tokenizer.layout`, such as `[CLS] first [SEP] second [SEP]`.

    Returns the ids, and the start of segment 1: their number if there is none. Beside one text, a
    [CLS] at the end is segment 1. Raises ValueError for a text without tokens where there are no
    special tokens either.
    """
    layout = tokenizer.layout
    before, after = layout.around(tokenizer.cls_id, tokenizer.sep_id)
    ids = [*before, *first]
    start = None
    if second is not None:
        ids += [tokenizer.sep_id] * layout.num_separators
        start = len(ids)
        ids += second
    ids += after
    if not ids:
        raise ValueError(
            "a text has no tokens, and this tokenizer adds no special tokens: remove it"
        )
    if start is None:
        start = len(ids) - layout.cls_last
    return np.array(ids, np.int32), start if layout.has_segments else len(ids)


def check_layout(model_config, tokenizer) -> None:
    """Raises ValueError if a tokenizer puts [CLS] or [SEP] where the model does not expect it.

    A Longformer finds the texts of a pair by two separators between them.
    """
    expects_last = getattr(model_config, "cls_last", False)
    if expects_last != tokenizer.layout.cls_last:
        cls, place = tokenizer.id_to_token(tokenizer.cls_id), "last" if expects_last else "first"
        raise ValueError(
            f"{model_config.architecture} expects {cls} {place} in a sequence, where the tokenizer "
            "does not put it: use the model's own, or set `post_processor` in its tokenizer.json "
            "(XLNet's makes `a <sep> b <sep> <cls>`)"
        )
    if hasattr(model_config, "global_tokens"):
        expected = 2, model_config.sep_id
        if (found := (tokenizer.layout.num_separators, tokenizer.sep_id)) != expected:
            raise ValueError(
                f"{model_config.architecture} expects {expected[0]} separators with the id "
                f"{expected[1]} (sep_id; in config.json sep_token_id) between the texts of a pair, "
                f"where the tokenizer puts {found[0]} with the id {found[1]}: use the model's own, "
                "set `post_processor` in its tokenizer.json (RoBERTa's makes "
                f"`<s> a </s></s> b </s>`), or train a model with sep_id={found[1]}"
            )


def check_segments(model_config, features: Iterable[ModelInput]) -> None:
    """Raises ValueError for a text pair if the model has no segment for the second text."""
    if getattr(model_config, "type_vocab_size", 0) != 1:  # With 0 there are no segments to add.
        return
    for feature in features:
        for sequence, second in zip(feature.sequences, feature.second_starts, strict=True):
            if second < len(sequence):
                raise ValueError(ONE_SEGMENT)


ONE_SEGMENT = (
    "type_vocab_size is 1, so the model has no segment for the second text of a pair: use a model "
    "with 2 or a tokenizer whose pairs have one segment, such as RoBERTa's (for any of "
    'transformers, set "model_input_names": ["input_ids", "attention_mask"] in its '
    "tokenizer_config.json)"
)


@dataclasses.dataclass(frozen=True)
class LabelLayout:
    """How the labels of a head are laid out in rows: one per feature, or `per_position`."""

    dtype: type = np.int32
    per_position: bool = False  # NO_LABEL where there is none.
    shape: tuple[int, ...] = ()  # The shape of one label.
    is_ragged: bool = False  # A label has up to `shape` entries; NO_LABEL fills the others.
    holds_positions: bool = False  # Labels are positions in the feature, offset in the row.


def max_features(length: int, tokens_per_slot: int = 8) -> int:
    """Returns how many features a row may hold, for rows of `length` tokens per feature's sequence.

    Enough for short texts to fill it, up to 1,024 tokens. No more: heads have arrays of sequences
    by positions, which would grow with the square of the length. For `tokens_per_slot` see `Head`.
    """
    return max(1, min(length // tokens_per_slot, 128))


@dataclasses.dataclass(frozen=True)
class RowShape:
    """Rows of `length` tokens with at most `max_sequences` sequences, and the head's labels.

    With a `teacher_layout`, features have `teacher_outputs`, and so have rows.
    """

    length: int
    max_sequences: int
    label_layout: LabelLayout
    pad_id: int
    sequences_per_feature: int = 1
    teacher_layout: LabelLayout | None = None

    def pack(self, features: Sequence[ModelInput]) -> list[list[int]]:
        """Returns the indices of the features in each row; ValueError if one is too long."""
        lengths = [len(feature) for feature in features]
        if lengths and max(lengths) > self.length:
            raise ValueError(f"a feature of {max(lengths)} tokens in rows of {self.length}")
        return pack_lengths(lengths, self.length, self.max_sequences // self.sequences_per_feature)

    def build(
        self, row_features: Iterable[Sequence[ModelInput]], num_rows: int
    ) -> dict[str, np.ndarray]:
        """Returns `num_rows` rows: the first hold `row_features`, in order, the others padding."""
        layout, each = self.label_layout, self.sequences_per_feature
        tokens = np.full((num_rows, self.length), self.pad_id, np.int32)
        bounds = np.zeros((num_rows, self.max_sequences, 3), np.int32)
        weights = np.zeros((num_rows, self.max_sequences // each), np.float32)
        labels = np.full(tokens.shape, NO_LABEL, layout.dtype)
        if not layout.per_position:
            padding = NO_LABEL if layout.is_ragged else 0
            labels = np.full((*weights.shape, *layout.shape), padding, layout.dtype)
        row_features = list(row_features)
        is_global = np.zeros(tokens.shape, bool)
        kinds = np.zeros(tokens.shape, np.int32)
        for row, features in enumerate(row_features):
            end = slot = 0
            for index, feature in enumerate(features):
                first = end
                if feature.global_positions:
                    is_global[row, np.add(feature.global_positions, first)] = True
                if feature.token_kinds:
                    own = np.concatenate(feature.token_kinds)
                    kinds[row, first : first + len(own)] = own
                for sequence, second in zip(feature.sequences, feature.second_starts, strict=True):
                    start, end = end, end + len(sequence)
                    tokens[row, start:end] = sequence
                    bounds[row, slot] = start, start + second, end
                    slot += 1
                if feature.label is not None:
                    weights[row, index] = 1
                    slots = slice(first, end) if layout.per_position else index
                    if layout.is_ragged:
                        slots = index, slice(len(feature.label))
                    labels[row][slots] = np.add(feature.label, first * layout.holds_positions)
        rows = dict(tokens=tokens, sequence_bounds=bounds, weights=weights, labels=labels)
        if any(each.global_positions is not None for each in itertools.chain(*row_features)):
            rows["is_global"] = is_global
        if any(each.token_kinds is not None for each in itertools.chain(*row_features)):
            rows["token_kinds"] = kinds
        if self.teacher_layout:
            rows["teacher_outputs"] = self._lay_out_teacher(row_features, num_rows)
        return rows

    def _lay_out_teacher(
        self, row_features: Sequence[Sequence[ModelInput]], num_rows: int
    ) -> np.ndarray:
        """Returns float32 `[num_rows, length, outputs]` if per position, else `[.., slots, ..]`."""
        layout, slots = self.teacher_layout, self.max_sequences // self.sequences_per_feature
        size = self.length if layout.per_position else slots
        outputs = np.zeros((num_rows, size, *layout.shape), layout.dtype)
        for row, features in enumerate(row_features):
            end = 0
            for index, feature in enumerate(features):
                start, end = end, end + len(feature)
                places = slice(start, end) if layout.per_position else index
                outputs[row, places] = feature.teacher_outputs
        return outputs

    def batches(
        self, features: Sequence[ModelInput], num_rows: int
    ) -> Iterator[tuple[list[list[int]], dict[str, np.ndarray]]]:
        """Yields every feature once: the indices of those in each row, and the `num_rows` rows."""
        packed = self.pack(features)
        for start in range(0, len(packed), num_rows):
            members = packed[start : start + num_rows]
            yield members, self.build(([features[i] for i in row] for row in members), num_rows)


def to_devices(rows: dict[str, np.ndarray], sharding: Sharding) -> dict[str, jax.Array]:
    """Copies rows to the devices of this process, to each its own."""
    return {
        name: jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
        for name, array in rows.items()
    }


def unpack_rows(rows: dict[str, jax.Array], pools_last: bool = False) -> dict[str, jax.Array]:
    """Expands packed rows, as read from disk, into the arrays that the model takes. Runs on device.

    Args:
      rows: `tokens` `[batch, length]`, `sequence_bounds` `[batch, max_sequences, 3]` and in
        pre-training `nsp_labels` `[batch, max_sequences]`, as in `row_dtype`, of any integer dtype;
        with positions that a caller chose as global, bool `is_global` `[batch, length]`.
      pools_last: whether the pooler reads the last token of a sequence (`model.config.pools_last`).

    Returns:
      int32 `tokens`, `segment_ids` (1 in the second segment), `position_ids` (restarting
      in each sequence) and `sequence_ids` (1, 2, ... in each row), all `[batch, length]` and 0 on
      padding; int32 `pooled_positions` `[batch, max_sequences]`, of the first token, or if
      `pools_last` of the last one; and given `nsp_labels`, these as int32 and float32 `nsp_weights`
      `[batch, max_sequences]`, 1 for a sequence with a second segment, 0 for one without or an
      unused slot; `is_global` as it is. If [CLS] is last and segments are used (XLNet), single
      texts have a second segment, too: such models are not trained on `nsp_labels`.
    """
    tokens = rows["tokens"].astype(jnp.int32)
    bounds = rows["sequence_bounds"].astype(jnp.int32)
    start, second, end = jnp.moveaxis(bounds, -1, 0)
    batch = {
        "tokens": tokens,
        "pooled_positions": jnp.maximum(end - 1, 0) if pools_last else start,
    }
    batch |= _describe_positions(bounds, tokens.shape[1])
    if "is_global" in rows:
        batch["is_global"] = rows["is_global"]
    if "nsp_labels" in rows:
        batch["nsp_labels"] = rows["nsp_labels"].astype(jnp.int32)
        batch["nsp_weights"] = (end > second).astype(jnp.float32)
    return batch


def _describe_positions(bounds: jax.Array, length: int) -> dict[str, jax.Array]:
    """Returns the arrays of `unpack_rows` that describe positions, for `[batch, sequences, 3]`.

    Compares all positions with a few sequences at a time, so that no array is of positions by
    sequences: a long row may have hundreds.
    """
    position = jnp.arange(length)[None, :, None]
    size = min(bounds.shape[1], COMPARED_SEQUENCES)

    def describe(few, first_number):
        start, second, end = jnp.moveaxis(few, -1, 0)[:, :, None]  # [batch, 1, size]
        inside = (position >= start) & (position < end)
        return {
            "segment_ids": jnp.sum(inside & (position >= second), axis=-1),
            "position_ids": jnp.sum(inside * (position - start), axis=-1),
            "sequence_ids": jnp.sum(inside * (first_number + jnp.arange(size)), axis=-1),
        }

    def add(index, sums):
        few = jax.lax.dynamic_slice_in_dim(padded, index * size, size, axis=1)
        return jax.tree.map(jnp.add, sums, describe(few, 1 + index * size))

    sums = describe(bounds[:, :size], 1)
    padded = jnp.pad(bounds, ((0, 0), (0, -bounds.shape[1] % size), (0, 0)))
    count = padded.shape[1] // size
    return jax.lax.fori_loop(1, count, add, sums) if count > 1 else sums


def steps_per_epoch(num_features: int, batch_size: int) -> int:
    """Returns the number of batches; the last may be smaller, and none is dropped."""
    return -(-num_features // batch_size)


@functools.lru_cache(64)  # One for each of many trials.
def epoch_order(num_features: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the order of the features in an epoch, a permutation of their indices."""
    return np.random.default_rng((seed, epoch)).permutation(num_features)


def batch_indices(num_features: int, batch_size: int, seed: int, step: int) -> np.ndarray:
    """Returns the indices of the features of batch `step` (from 0), reshuffled in each epoch."""
    epoch, batch = divmod(step, steps_per_epoch(num_features, batch_size))
    return epoch_order(num_features, seed, epoch)[batch * batch_size : (batch + 1) * batch_size]


def finetune_batches(
    features: Sequence[ModelInput],
    shape: RowShape,
    sharding: Sharding,
    *,
    batch_size: int,
    rows_per_microbatch: int,
    seeds: Sequence[int],
    start: int,
    stop: int,
    is_compared: bool = False,
) -> Iterator[tuple[dict[str, jax.Array], int]]:
    """Yields batches `start` to `stop` as (rows, number of microbatches in use).

    Arrays have a leading axis for the trials, each with the order of its seed. Row r of microbatch
    m is at index `r * max_microbatches + m`, so that every device holds a shard of every
    microbatch. If the loss compares the examples of a batch (`is_compared`), a batch that
    fits in one microbatch has no empty ones: the step has a faster program for these.
    """
    max_microbatches = -(-batch_size // rows_per_microbatch)

    def interleave(*arrays):
        stacked = np.stack(arrays)
        microbatches = stacked.reshape(len(seeds), -1, rows_per_microbatch, *stacked.shape[2:])
        return microbatches.swapaxes(1, 2).reshape(stacked.shape)

    for step in range(start, stop):
        orders = [batch_indices(len(features), batch_size, seed, step) for seed in seeds]
        chosen = [[features[index] for index in order] for order in orders]
        packed = [shape.pack(batch) for batch in chosen]
        num_microbatches = -(-max(map(len, packed)) // rows_per_microbatch)
        is_whole = is_compared and num_microbatches == 1
        num_rows = rows_per_microbatch * (1 if is_whole else max_microbatches)
        rows = [
            shape.build(([batch[i] for i in row] for row in members), num_rows)
            for batch, members in zip(chosen, packed, strict=True)
        ]
        yield to_devices(jax.tree.map(interleave, *rows), sharding), num_microbatches
