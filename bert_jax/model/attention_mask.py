"""Which positions of a row attend to which others."""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """Describes which positions of a row attend to which others, without an array of all pairs.

    A position attends to those of its own sequence that neither `causal`, `window`, `ranks` nor
    `is_hidden` hide. Padding attends to padding, so that no softmax is empty; unless
    `sees_own_rank` is False, or with `only_global_queries` or `is_hidden`: then a position may see
    nothing, and attention gives it zeros. All arrays have one entry per position and can be sliced
    with the row.

    Attributes:
      sequence_ids: int32 `[batch, length]`: 1, 2, ... for each sequence, 0 for padding. Positions
        attend to each other if their ids are equal.
      causal: whether each position attends only to itself and earlier ones.
      window: how many positions to its left, and to its right, a position attends to; None: all.
      is_global: bool `[batch, length]`, the positions that the window does not concern: they attend
        to all of their sequence, and all of it attends to them (Longformer; Beltagy et al., 2020,
        section 3.1). None: none.
      only_global_queries: whether the other positions see nothing.
      ranks: int32 `[batch, length]`: a position attends to those whose rank is at most its own, so
        that the ranks of a permutation are its order of prediction (XLNet; Yang et al., 2019,
        section 2.2), and equal ranks see each other. None: all.
      sees_own_rank: False if a position attends only to smaller ranks than its own, as those that
        predict their own token must (the query stream of XLNet, section 2.3).
      is_hidden: bool `[batch, length]`, positions that no position attends to, not even
        itself, although they attend to others (ColBERT's masks after a query; Khattab and
        Zaharia, 2020, section 3.2). None: none.
    """

    sequence_ids: jax.Array
    causal: bool = dataclasses.field(default=False, metadata={"static": True})
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    is_global: jax.Array | None = None
    only_global_queries: bool = dataclasses.field(default=False, metadata={"static": True})
    ranks: jax.Array | None = None
    sees_own_rank: bool = dataclasses.field(default=True, metadata={"static": True})
    is_hidden: jax.Array | None = None

    def with_window(self, window: int) -> "AttentionMask":
        """Returns the mask of a layer that sees only `window` positions on each side."""
        return dataclasses.replace(self, window=window)

    def of_global_queries(self) -> "AttentionMask":
        """Returns the mask of an attention in which all but global positions see nothing."""
        return dataclasses.replace(self, only_global_queries=True)

    @property
    def may_hide_all(self) -> bool:
        """Whether there may be positions that see nothing, not even themselves."""
        sees_itself = self.ranks is None or self.sees_own_rank
        return self.only_global_queries or not sees_itself or self.is_hidden is not None

    def pairs(self) -> jax.Array:
        """Returns bool `[batch, 1, length, length]`: whether a query, the first, sees a key."""
        positions = jnp.arange(self.sequence_ids.shape[1])
        return self.pairs_with(self, positions, positions)

    def pairs_with(
        self, keys: "AttentionMask", query_positions: jax.Array, key_positions: jax.Array
    ) -> jax.Array:
        """Returns bool `[batch, 1, queries, keys]` for parts of a row: of queries, and of `keys`.

        The positions in the row are `[queries]` and `[keys]`.
        """

        def compare(compares, name: str) -> jax.Array:
            queries, others = getattr(self, name), getattr(keys, name)
            return compares(queries[:, None, :, None], others[:, None, None, :])

        offset = query_positions[:, None] - key_positions
        visible = compare(jnp.equal, "sequence_ids")
        if self.window is not None:
            is_near = jnp.abs(offset) <= self.window
            if self.is_global is not None:
                is_near |= compare(jnp.logical_or, "is_global")
            visible &= is_near
        if self.only_global_queries:
            visible &= self.is_global[:, None, :, None]
        if self.causal:
            visible &= offset >= 0
        if self.ranks is not None:
            compares = jnp.greater_equal if self.sees_own_rank else jnp.greater
            visible &= compare(compares, "ranks")
        if keys.is_hidden is not None:
            visible &= ~keys.is_hidden[:, None, None, :]
        return visible
