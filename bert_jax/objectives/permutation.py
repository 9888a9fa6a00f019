"""Permutation language modeling in two streams (XLNet; Yang et al., 2019, sections 2.2 to 2.4).

    tokens, and a random order of them -> Encoder -> content stream, query stream
        query stream at the last tokens of the order -> head for tokens

Each sequence has an order of its own. Its last tokens are the targets ("partial prediction"):
each is predicted from all tokens before it in the order, whatever their places in the text. The
configuration says how many a row has (`masking.rate`, a budget per row, not per sequence) and
whether they are n-grams of 1 to 5 words (`masking.unit="ngram"`), with probability proportional to
1 / n; `configs/pretrain/xlnet_base.py` sets 1/6 and n-grams, as in the released code. The order of
targets is uniform. No token is replaced by a mask.
In the released code [SEP] and [CLS] are ordered among the targets; here, as all other tokens that
are not predicted, they come before them.
The query stream is computed at the targets alone, unless they are most of a row or more than 512.
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from bert_jax.data.features import unpack_rows
from bert_jax.data.masking import Masking, mask_tokens, row_keys
from bert_jax.model.architecture import architecture_of
from bert_jax.model.dropout import Dropout, as_dropout, dropout_at
from bert_jax.model.encoder import Encoder, is_few
from bert_jax.model.execution import ExecutionPlan
from bert_jax.objectives import Batch, Sums
from bert_jax.objectives.masked_lm import MaskedLm, target_counts, target_sums

NGRAM_LENGTHS = (1, 1 / 2, 1 / 3, 1 / 4, 1 / 5)


class PermutationModel(nn.Module):
    """Encoder, and a head for tokens ("mlm"), which reads the query stream.

    Attributes:
      config: the model config.
      plan: how it runs.
    """

    config: object
    plan: ExecutionPlan = ExecutionPlan()

    def setup(self):
        self.encoder = Encoder(self.config, self.plan)
        self.mlm = architecture_of(self.config).LmHead(self.config)

    def __call__(
        self, batch: dict[str, jax.Array], dropout: Dropout | float | None = None
    ) -> tuple[jax.Array, None]:
        """Returns float32 logits `[B, K, padded_vocab]` at `target_positions`, int32 `[B, K]`.

        The batch has the inputs of `Encoder`, with `ranks`. There is no next-sentence head, as
        `PretrainingModel` has. Takes the arguments of `Encoder`.
        """
        dropout = as_dropout(self, dropout, len(batch["tokens"]))
        streams = self.encoder(batch, dropout, batch["target_positions"])
        x = dropout_at(dropout, "permutation", streams.query)
        return self.mlm(x, self.encoder.embeddings.token_embedding), None


@dataclasses.dataclass(frozen=True, eq=False)
class Permutation:
    """Predicts the last tokens of a random order of each sequence.

    Attributes:
      masking: how the targets are chosen.
    """

    masking: Masking

    causal: ClassVar[bool] = False
    reads_query_stream: ClassVar[bool] = True
    main_loss: ClassVar[str] = "permutation_loss"
    main_accuracy: ClassVar[str] = "permutation_accuracy"
    rules: ClassVar[tuple] = ()
    max_predictions = staticmethod(MaskedLm.max_predictions)

    @classmethod
    def from_config(cls, config, tokenizer, max_predictions: int) -> "Permutation":
        """Builds the objective of a phase. Raises ValueError for what it does not have."""
        if config.next_sentence:
            raise ValueError(
                "config.objective=permutation has no next-sentence loss: set "
                "config.next_sentence=False"
            )
        if config.masking.keep_fraction != 1:
            raise ValueError(
                "config.objective=permutation replaces no token: set config.masking.keep_fraction=1"
                ", and mask_fraction and random_fraction to 0"
            )
        masking = MaskedLm.from_config(config, tokenizer, max_predictions).masking
        return cls(dataclasses.replace(masking, ngram_lengths=NGRAM_LENGTHS))

    def make_model(self, model_config, plan: ExecutionPlan) -> PermutationModel:
        """Builds the model. Raises ValueError for an architecture without a query stream."""
        if not getattr(model_config, "has_query_stream", False):
            raise ValueError(
                "config.objective=permutation needs model.architecture=xlnet, and it is "
                f"{model_config.architecture}: set config.objective=masked_lm"
            )
        return PermutationModel(model_config, plan)

    def prepare(self, rows: Batch, key: jax.Array) -> Batch:
        """Unpacks rows, and draws targets and their order: a function of (key, row, epoch)."""
        batch = unpack_rows(rows)
        keys = row_keys(key, rows["row_ids"], rows["epochs"], self.masking.repeat_after)
        target_keys, order_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
        batch |= mask_tokens(target_keys, batch["tokens"], batch["sequence_ids"], self.masking)
        return batch | {"ranks": draw_ranks(order_keys, batch)}

    def counts(self, batch: Batch) -> dict[str, jax.Array]:
        """Returns the number of targets, at least 1."""
        return target_counts(batch, "permutation", next_sentence=False)

    def total_loss(self, losses: dict[str, jax.Array | float]) -> jax.Array | float:
        """Returns the mean loss of tokens."""
        return losses["permutation_loss"]

    def sums(
        self,
        model: PermutationModel,
        params: dict,
        batch: Batch,
        dropout: Dropout | None = None,
    ) -> Sums:
        """Returns the loss and accuracy over a batch, as sums and counts."""
        return target_sums(model, params, batch, dropout, "permutation")

    def flops_per_row(self, model_config, length: int, max_sequences: int) -> float:
        """Returns the FLOPs of a training step for one row: two streams, three passes."""
        num_targets = self.masking.max_predictions
        forward = architecture_of(model_config).flops_per_row(
            model_config,
            length,
            num_outputs=num_targets if is_few(num_targets, length) else length,
            num_targets=num_targets,
            num_pairs=0,
            num_streams=2,
        )
        return 3 * forward


def draw_ranks(keys: jax.Array, batch: Batch) -> jax.Array:
    """Returns int32 `[B, L]`: 0 for tokens that are not predicted, 1, 2, ... for the targets.

    Takes keys `[B]`, and the targets of `mask_tokens`. The ranks of the targets of a row are a
    uniform random order, and so are those of each sequence in it.
    """

    def rank(key, positions, weights):
        length = batch["tokens"].shape[1]
        is_target = jnp.zeros(length).at[positions].max(weights) > 0
        # Numbers from 2 come after all targets.
        drawn = jnp.where(is_target, jax.random.uniform(key, (length,)), 2.0)
        return jnp.where(is_target, 1 + jnp.argsort(jnp.argsort(drawn)), 0)

    return jax.vmap(rank)(keys, batch["target_positions"], batch["target_weights"])


Objective = Permutation
