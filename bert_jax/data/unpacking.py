"""Expands packed rows, as read from disk, into the arrays that the model takes. Runs on device."""

import jax
import jax.numpy as jnp


def unpack_rows(rows: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Expands the boundaries of the pairs in each row to one value per position.

    Args:
      rows: `tokens` `[batch, length]`, `pairs` `[batch, max_pairs, 3]` and in pre-training
        `nsp_labels` `[batch, max_pairs]`, as in `row_dtype`, of any integer dtype.

    Returns:
      int32 `tokens`, `segment_ids`, `position_ids`, `sequence_ids`, each `[batch, length]` and 0 on
      padding; int32 `cls_positions` `[batch, max_pairs]`; and given `nsp_labels`, these as int32
      and float32 `nsp_weights` `[batch, max_pairs]`, 1 for a pair and 0 for an unused slot.
    """
    tokens = rows["tokens"].astype(jnp.int32)
    start, second, end = jnp.moveaxis(rows["pairs"].astype(jnp.int32), -1, 0)
    position = jnp.arange(tokens.shape[1])[None, :, None]
    inside = (position >= start[:, None]) & (position < end[:, None])  # [batch, length, max_pairs]
    batch = {
        "tokens": tokens,
        "segment_ids": jnp.sum(inside & (position >= second[:, None]), axis=-1),
        "position_ids": jnp.sum(inside * (position - start[:, None]), axis=-1),
        "sequence_ids": jnp.sum(inside * jnp.arange(1, start.shape[1] + 1), axis=-1),
        "cls_positions": start,
    }
    if "nsp_labels" in rows:
        batch["nsp_labels"] = rows["nsp_labels"].astype(jnp.int32)
        batch["nsp_weights"] = (end > 0).astype(jnp.float32)
    return batch
