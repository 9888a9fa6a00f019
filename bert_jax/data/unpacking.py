"""From packed rows as they lie on disk to the arrays a model takes; runs on device."""

import jax
import jax.numpy as jnp


def unpack_rows(rows: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Expands the boundaries of the pairs in each row to one value a position.

    Args:
      rows: `tokens` `[batch, length]` and `pairs` `[batch, P, 3]` of any integer dtype, of each
        pair the position of [CLS], of its second segment's first token, and one past its last
        [SEP] (all 0 where a slot is free); in pre-training `nsp_labels` uint8 `[batch, P]`.

    Returns:
      int32 `tokens`, `segment_ids`, `position_ids`, `sequence_ids`, each `[batch, length]` (0 on
      padding); int32 `cls_positions` `[batch, P]`; and with `nsp_labels` int32 `nsp_labels` and
      float32 `nsp_weights` `[batch, P]`, 1 where there is a pair.
    """
    tokens = rows["tokens"].astype(jnp.int32)
    start, second, end = jnp.moveaxis(rows["pairs"].astype(jnp.int32), -1, 0)
    position = jnp.arange(tokens.shape[1])[None, :, None]
    inside = (position >= start[:, None]) & (position < end[:, None])  # [batch, length, P]
    number = jnp.arange(1, start.shape[1] + 1)
    covered = jnp.any(inside, axis=-1)
    own_start = jnp.sum(inside * start[:, None], axis=-1)
    batch = {
        "tokens": tokens,
        "segment_ids": jnp.sum(inside & (position >= second[:, None]), axis=-1),
        "position_ids": jnp.where(covered, position[..., 0] - own_start, 0),
        "sequence_ids": jnp.sum(inside * number, axis=-1),
        "cls_positions": start,
    }
    if "nsp_labels" in rows:
        batch["nsp_labels"] = rows["nsp_labels"].astype(jnp.int32)
        batch["nsp_weights"] = (end > 0).astype(jnp.float32)
    return batch
