"""Masked diffusion (MDLM, Sahoo et al., 2024; LLaDA, Nie et al., 2025): encoders that generate.

Of each sequence, a fraction t of the tokens becomes [MASK], where t is uniform in (0, 1]. With the
cross-entropy of the masked tokens weighted by 1 / t, the expected sum over a sequence is an upper
bound on -log p(sequence), of its tokens given its length (the negative ELBO, NELBO; Sahoo et al.,
section 3): in nats per token, it is comparable with the loss of an autoregressive model.
`inference/unmasking.py` samples from the model.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.data.features import unpack_rows
from bert_jax.data.masking import row_keys
from bert_jax.model.dropout import Dropout
from bert_jax.model.execution import ExecutionPlan
from bert_jax.model.layers import cross_entropy
from bert_jax.objectives import Batch, Sums
from bert_jax.objectives.masked_lm import PretrainingModel, flops_per_row

# The fractions of two irrational numbers, in units of 2^-32: (sqrt(5) - 1) / 2 and sqrt(2) - 1.
GOLDEN_RATIO, ROOT_OF_2 = np.uint32(0x9E3779B9), np.uint32(0x6A09E667)


@dataclasses.dataclass(frozen=True)
class MaskedDiffusion:
    """Predicts all tokens that are masked, at rates from 0 to 1.

    Attributes:
      special_ids: never masked, such as [CLS] and [SEP]: they say where a sequence ends.
      mask_id: id of [MASK], which has probability 0 as a prediction.
    """

    special_ids: tuple[int, ...]
    mask_id: int

    causal: ClassVar[bool] = False
    main_loss: ClassVar[str] = "diffusion_loss"
    main_accuracy: ClassVar[str] = "diffusion_accuracy"
    rules: ClassVar[tuple] = ()

    @staticmethod
    def max_predictions(config, given: int | None, length: int) -> int:
        """Returns the length of a row: at the rate 1, all of its tokens are predicted."""
        return length

    @classmethod
    def from_config(cls, config, tokenizer, max_predictions: int) -> "MaskedDiffusion":
        """Builds the objective of a phase; `config.masking` has no effect. Raises ValueError."""
        if tokenizer.mask_id is None:
            raise ValueError("the vocabulary of the corpus has no [MASK]: diffusion needs one")
        if config.next_sentence:
            raise ValueError(
                "config.objective=masked_diffusion has no next-sentence loss: set "
                "config.next_sentence=False"
            )
        return cls(tuple(tokenizer.special_ids), tokenizer.mask_id)

    def make_model(self, model_config, plan: ExecutionPlan) -> PretrainingModel:
        """Builds the model: that of masked LM, which is not told the rate."""
        return PretrainingModel(model_config, next_sentence=False, plan=plan)

    def prepare(self, rows: Batch, key: jax.Array) -> Batch:
        """Unpacks and masks rows: a function of (key, row, epoch, position in the stream)."""
        batch = unpack_rows(rows)
        rate_key, mask_key = jax.random.split(key)
        rates = mask_rates(rate_key, rows["stream_positions"], batch["sequence_ids"])
        keys = row_keys(mask_key, rows["row_ids"], rows["epochs"])
        draws = jax.vmap(lambda key: jax.random.uniform(key, rates.shape[1:]))(keys)
        return batch | self.mask_tokens(batch, rates, draws)

    def mask_tokens(self, batch: Batch, rates: jax.Array, draws: jax.Array) -> Batch:
        """Masks, of the n tokens of a sequence that are not special, l = ceil(t n), at least one.

        As t is uniform in (0, 1], l is uniform in 1 ... n, and n / l takes the place of 1 / t: the
        expected loss is the same as if each token were masked with the probability t (Nie et al.,
        2025, section 2.4), but its variance is far smaller, as no weight exceeds n.

        `batch` is that of `unpack_rows`; float32 `rates`, t, and uniform `draws` are `[B, L]`.
        Returns, all `[B, L]`: int32 `tokens`, with masks; float32 `maskable`, 1 for each of the n;
        and at all positions, in order, int32 `target_positions` and `targets`, float32
        `target_weights`, 1 for a masked token, and `target_factors`, n / l for a masked token.
        """
        tokens, sequence_ids = batch["tokens"], batch["sequence_ids"]
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        maskable = (sequence_ids > 0) & ~jnp.isin(tokens, jnp.array(self.special_ids))
        num_slots = batch["pooled_positions"].shape[1] + 1  # Of sequences, and of padding.
        num_maskable = jax.vmap(
            lambda values, ids: jax.ops.segment_sum(values, ids, num_slots)[ids]
        )(maskable.astype(jnp.float32), sequence_ids)
        num_masked = jnp.ceil(rates * num_maskable)
        # Sorted by sequence, with padding last, each sequence stays where it is in the row.
        ids = jnp.where(sequence_ids > 0, sequence_ids, num_slots)
        order = jnp.lexsort((jnp.where(maskable, draws, 2.0), ids), axis=1)
        ranks = jnp.argsort(order, axis=1) - (places - batch["position_ids"])
        chosen = maskable & (ranks < num_masked)
        return {
            "tokens": jnp.where(chosen, self.mask_id, tokens),
            "maskable": maskable.astype(jnp.float32),
            "target_positions": places,
            "targets": tokens,
            "target_weights": chosen.astype(jnp.float32),
            "target_factors": jnp.where(chosen, num_maskable / jnp.maximum(num_masked, 1), 0.0),
        }

    def counts(self, batch: Batch) -> dict[str, jax.Array]:
        """Returns the number of tokens that might have been masked, at least 1."""
        return {"diffusion_loss": jnp.maximum(jnp.sum(batch["maskable"]), 1)}

    def total_loss(self, losses: dict[str, jax.Array | float]) -> jax.Array | float:
        """Returns the bound, in nats per token."""
        return losses["diffusion_loss"]

    def sums(
        self,
        model: PretrainingModel,
        params: dict,
        batch: Batch,
        dropout: Dropout | None = None,
    ) -> Sums:
        """Returns the bound, and the accuracy at masked tokens, as sums and counts."""
        logits, _ = model.apply({"params": params}, batch, dropout)
        is_mask = jnp.arange(logits.shape[-1]) == self.mask_id
        logits = jnp.where(is_mask, jnp.finfo(jnp.float32).min, logits)
        losses, correct = cross_entropy(logits, batch["targets"])
        weights = batch["target_weights"]
        return {
            "diffusion_loss": (
                jnp.sum(losses * batch["target_factors"]),
                jnp.sum(batch["maskable"]),
            ),
            "diffusion_accuracy": (jnp.sum(correct * weights), jnp.sum(weights)),
        }

    def flops_per_row(self, model_config, length: int, max_sequences: int) -> float:
        """Returns the FLOPs of a training step for one row, with predictions at all positions."""
        return flops_per_row(model_config, length, length, max_sequences, next_sentence=False)


def mask_rates(key: jax.Array, stream_positions: jax.Array, sequence_ids: jax.Array) -> jax.Array:
    """Returns the mask rate of each token's sequence, float32 `[B, L]` in (0, 1].

    The fractional parts of u + i x golden ratio fill an interval evenly, whatever the first i and
    their number (Weyl). If i is the position of a row in its stream, so do the rates of any batch,
    microbatch or held-out rows, and no rate depends on how the rows are split into these.
    `stream_positions` is uint32 `[B]`, and u uniform. Sequences that are packed into one row are
    independent: each has a rate of its own, by a second irrational number.
    """
    shift = jax.random.bits(key, dtype=jnp.uint32)
    fraction = shift + stream_positions.astype(jnp.uint32)[:, None] * GOLDEN_RATIO
    fraction += sequence_ids.astype(jnp.uint32) * ROOT_OF_2  # Modulo 2^32, as all sums here.
    return ((fraction >> 8) + 1).astype(jnp.float32) * 2.0**-24


Objective = MaskedDiffusion
