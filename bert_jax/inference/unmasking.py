"""Generates tokens in place of masks step by step: iterative unmasking, as of masked diffusion.

Each step predicts all masked tokens of a row at once, then keeps some of them. What is kept is not
masked again, except by "mask_predict". Text that is given is never changed. With as many steps as
masks, one token is revealed at a time, and in a random order these are samples of the model's own
distribution; with fewer steps, tokens revealed in the same step are sampled independently.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from bert_jax.data.features import ModelInput
from bert_jax.inference import forward
from bert_jax.inference.masked_text import find_masks

ORDERS = ("random", "confidence", "mask_predict")
ROWS_PER_BATCH = 8


class Slots(NamedTuple):
    """The positions of a batch of rows to unmask; those that a row does not need are unused.

    Attributes:
      tokens: int32 `[B, K]`, the mask where nothing is revealed yet.
      scores: float32 `[B, K]`: the smallest are masked again. -inf where nothing is revealed, +inf
        where it stays for good, and in unused slots.
    """

    tokens: jax.Array
    scores: jax.Array


def first_slots(tokens: np.ndarray, mask_id: int) -> Slots:
    """Returns the slots of int32 tokens `[B, K]`, of which those that are not masks are unused."""
    scores = np.where(tokens == mask_id, -np.inf, np.inf)
    return Slots(jnp.asarray(tokens), jnp.asarray(scores, jnp.float32))


def num_masked_after(step: int, num_steps: int | None, num_masks: np.ndarray) -> np.ndarray:
    """Returns how many of its masks each row still has after `step`, counted from 0: int `[B]`.

    About equally many are revealed in each step. A row with fewer masks than `num_steps`, or None,
    takes as many steps as it has masks.
    """
    steps = num_masks if num_steps is None else np.minimum(num_steps, num_masks)
    return num_masks * np.maximum(steps - step - 1, 0) // np.maximum(steps, 1)


def unmask_step(
    keys: jax.Array,
    logits: jax.Array,
    slots: Slots,
    num_masked: jax.Array,
    order: str,
    temperature: jax.Array | float,
    mask_id: int,
) -> Slots:
    """Returns the slots after a step, in which `num_masked`, int32 `[B]`, are still masks.

    Sahoo et al. (2024) go from a rate t to s by revealing each masked token with the probability
    (t - s) / t. Here their number is fixed, so that no step is idle: which ones they are is as
    random.

    Args:
      keys: `[B]`, of this step.
      logits: float32 `[B, K, V]`; -inf or the minimum float32 for tokens that are never generated.
      order: which tokens stay: "random"; "confidence", the most probable ones; "mask_predict", the
        most probable ones, where those of earlier steps may also be masked again (Ghazvininejad et
        al., 2019, section 3.2).
      temperature: divides the logits; 0 takes the most probable token. Confidence is at 1.
    """
    log_probabilities = jax.nn.log_softmax(logits)
    keys = jax.vmap(jax.random.split)(keys)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys[:, 0])
    # The largest of logits / temperature + noise is a sample.
    drawn = jnp.argmax(log_probabilities + temperature * noise, axis=-1)
    if order == "random":
        scores = jax.vmap(lambda key: jax.random.uniform(key, drawn.shape[1:]))(keys[:, 1])
    else:
        scores = jnp.take_along_axis(log_probabilities, drawn[..., None], axis=-1)[..., 0]
    is_masked = slots.tokens == mask_id
    tokens = jnp.where(is_masked, drawn, slots.tokens)
    scores = jnp.where(is_masked, scores, slots.scores)
    ranks = jnp.argsort(jnp.argsort(scores, axis=1), axis=1)
    is_masked = ranks < num_masked[:, None]
    if order != "mask_predict":
        scores = jnp.full_like(scores, jnp.inf)
    return Slots(jnp.where(is_masked, mask_id, tokens), jnp.where(is_masked, -jnp.inf, scores))


@functools.partial(jax.jit, static_argnames=("model", "order", "special_ids", "mask_id"))
def unmask_rows(
    model: nn.Module,
    params: dict,
    rows: dict,
    positions: jax.Array,
    slots: Slots,
    num_masked: jax.Array,
    keys: jax.Array,
    step: jax.Array,
    temperature: jax.Array,
    *,
    order: str,
    special_ids: tuple[int, ...],
    mask_id: int,
) -> Slots:
    """Returns the slots, which are at int32 `positions` `[B, K]` of the rows, after a step.

    `keys` `[B]` are those of the rows for all steps. Special tokens are not generated. The
    other arguments are those of `unmask_step`.
    """
    row = jnp.arange(len(positions))[:, None]
    tokens = jnp.asarray(rows["tokens"]).at[row, positions].set(slots.tokens)
    rows = forward.with_ranks(model.config, rows | {"tokens": tokens}, mask_id)
    logits = forward.token_logits(model, params, rows, positions)
    is_special = jnp.isin(jnp.arange(logits.shape[-1]), jnp.array(special_ids))
    logits = jnp.where(is_special, jnp.finfo(jnp.float32).min, logits)
    keys = jax.vmap(jax.random.fold_in, (0, None))(keys, step)
    return unmask_step(keys, logits, slots, num_masked, order, temperature, mask_id)


def unmask(
    model: nn.Module,
    params: dict,
    features: Sequence[ModelInput],
    count: int,
    tokenizer,
    num_steps: int | None,
    temperature: float,
    order: str,
    seed: int,
    on_step: Callable[[list[np.ndarray]], object] | None = None,
) -> list[np.ndarray]:
    """Returns the tokens generated at the masks of each feature, int32 `[masks]`.

    `count` is the number of slots of a row, at least that of the masks of any feature. The result
    for a feature is that of a call with it alone, but for rounding, if its index were the same.
    `on_step` is called with the tokens after each step, which are the mask where none is revealed.
    """
    special_ids, mask_id = tuple(tokenizer.special_ids), tokenizer.mask_id
    limit, batches, slots = model.config.max_position_embeddings, [], []
    for members, rows in forward.batch_by_length(features, ROWS_PER_BATCH, limit, max_sequences=1):
        indices = np.full(len(rows["tokens"]), len(features))  # Of an empty row.
        indices[: len(members)] = [index for (index,) in members]
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), indices)
        positions = find_masks(rows["tokens"], mask_id, count)
        num_masks = np.sum(rows["tokens"] == mask_id, axis=1)
        batches.append((indices, keys, rows, positions, num_masks))
        slots.append(first_slots(np.take_along_axis(rows["tokens"], positions, axis=1), mask_id))
    last = max((int(np.max(num_masks)) for *_, num_masks in batches), default=0)
    last = last if num_steps is None else min(num_steps, last)

    def tokens_at_masks() -> list[np.ndarray]:
        result = [None] * len(features)
        for (indices, *_, num_masks), batch_slots in zip(batches, slots, strict=True):
            tokens = np.asarray(batch_slots.tokens)
            for row, index in enumerate(indices[indices < len(features)]):
                result[index] = tokens[row, : num_masks[row]]
        return result

    for step in tqdm.trange(last, delay=3, mininterval=1.0, leave=False):
        for number, (_, keys, rows, positions, num_masks) in enumerate(batches):
            slots[number] = unmask_rows(
                model,
                params,
                rows,
                positions,
                slots[number],
                num_masked_after(step, num_steps, num_masks),
                keys,
                step,
                temperature,
                order=order,
                special_ids=special_ids,
                mask_id=mask_id,
            )
        if on_step is not None:
            on_step(tokens_at_masks())
    return tokens_at_masks()
