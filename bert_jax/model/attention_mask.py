"""Which positions of a row attend to which others."""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """Describes which positions of a row attend to which others, without an array of all pairs.

    Padding attends to padding, so that no softmax is empty.

    Attributes:
      sequence_ids: int32 `[batch, length]`: 1, 2, ... for each sequence, 0 for padding. Positions
        attend to each other if their ids are equal.
      causal: whether each position attends only to itself and earlier ones.
      window: how many positions to its left, and to its right, a position attends to; None: all.
    """

    sequence_ids: jax.Array
    causal: bool = dataclasses.field(default=False, metadata={"static": True})
    window: int | None = dataclasses.field(default=None, metadata={"static": True})

    def with_window(self, window: int) -> "AttentionMask":
        """Returns the mask of a layer that sees only `window` positions on each side."""
        return dataclasses.replace(self, window=window)

    def pairs(self) -> jax.Array:
        """Returns bool `[batch, 1, length, length]`: whether a query, the first, sees a key."""
        positions = jnp.arange(self.sequence_ids.shape[1])
        return self.pairs_of(self.sequence_ids, positions, self.sequence_ids, positions)

    def pairs_of(
        self,
        query_ids: jax.Array,
        query_positions: jax.Array,
        key_ids: jax.Array,
        key_positions: jax.Array,
    ) -> jax.Array:
        """Returns bool `[batch, 1, queries, keys]` for some positions, with their sequence ids.

        Ids are `[batch, queries]` or `[batch, keys]`, positions in the row `[queries]` or `[keys]`.
        """
        visible = query_ids[:, None, :, None] == key_ids[:, None, None, :]
        offset = query_positions[:, None] - key_positions
        if self.causal:
            visible &= offset >= 0
        if self.window is not None:
            visible &= jnp.abs(offset) <= self.window
        return visible
