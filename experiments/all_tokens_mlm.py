"""All-tokens MLM, the objective between BERT's and ELECTRA's, for experiments/electra.py.

Clark et al. (2020), section 3.4: a generator replaces tokens, as in ELECTRA, and the model predicts
the original of every token, not only whether it was replaced. It may copy: with probability D, the
sigmoid of ELECTRA's head, it predicts the token that it reads; otherwise as a masked LM.

    --config.objective=experiments.all_tokens_mlm
"""

import dataclasses

import jax
import jax.numpy as jnp

from bert_jax.model.architecture import architecture_of
from bert_jax.model.dropout import Dropout
from bert_jax.model.layers import cross_entropy
from bert_jax.objectives import Sums
from bert_jax.objectives.replaced_tokens import ReplacedTokenModel, ReplacedTokens


class AllTokensModel(ReplacedTokenModel):
    """ELECTRA's model with a masked-LM head ("mlm"); its own head ("discriminator") copies."""

    def setup(self):
        super().setup()
        self.mlm = architecture_of(self.config).LmHead(self.config)

    def __call__(
        self, batch: dict[str, jax.Array], dropout: Dropout | float | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns float32 logits of tokens, `[B, L, padded_vocab]`, and of copying, `[B, L]`."""
        hidden = self.encoder(batch, dropout)
        return self.mlm(hidden, self.encoder.embeddings.token_embedding), self.discriminator(hidden)


@dataclasses.dataclass(frozen=True, eq=False)
class AllTokensMlm(ReplacedTokens):
    """Predicts masked tokens with a generator, then all tokens of the row with its samples."""

    def make_model(self, model_config, plan) -> AllTokensModel:
        """Builds the model. Raises ValueError if the generator does not match `model_config`."""
        self.generator.config(model_config)
        return AllTokensModel(model_config, plan, self.generator)

    def model_sums(self, model, params, batch, is_replaced, dropout) -> Sums:
        """Returns the sums over all tokens, as "replaced"; correct if the probability is > 1/2."""
        logits, copy = model.apply({"params": params}, batch, dropout)
        losses = copying_loss(logits, copy, batch["original_tokens"], is_replaced)
        weights = (batch["sequence_ids"] > 0).astype(jnp.float32)
        count = jnp.sum(weights)
        return {
            "replaced_loss": (jnp.sum(losses * weights), count),
            "replaced_accuracy": (jnp.sum((losses < jnp.log(2.0)) * weights), count),
        }

    def flops_per_row(self, model_config, length: int, max_sequences: int) -> float:
        """Returns the FLOPs of a training step for one row: ELECTRA's plus all token logits."""
        width = model_config.embedding_size or model_config.hidden_size
        lm_head = 2.0 * length * width * (model_config.hidden_size + model_config.padded_vocab_size)
        return super().flops_per_row(model_config, length, max_sequences) + 3 * lm_head


def copying_loss(
    logits: jax.Array, copy: jax.Array, original: jax.Array, is_replaced: jax.Array
) -> jax.Array:
    """Returns -log(D [the input is the original] + (1 - D) softmax(logits)[original]), in nats.

    Takes float32 logits `[B, L, V]` and `copy` `[B, L]`, the logit of D; int32 and bool `[B, L]`.
    """
    as_masked_lm = -cross_entropy(logits, original)[0] - jax.nn.softplus(copy)
    copied = jnp.logaddexp(as_masked_lm, -jax.nn.softplus(-copy))
    return -jnp.where(is_replaced, as_masked_lm, copied)


Objective = AllTokensMlm
