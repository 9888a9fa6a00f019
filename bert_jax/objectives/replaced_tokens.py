"""Replaced-token detection: ELECTRA (Clark et al., 2020, sections 2 and 3.1).

A generator predicts masked tokens. In their place the discriminator sees tokens that are sampled
from these predictions, and classifies every token as original or replaced; a sample that equals
the original token counts as original. No gradient passes through the samples.
"""

import dataclasses
import zlib
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from bert_jax.data.masking import Masking, row_keys
from bert_jax.model import pretraining
from bert_jax.model.architecture import architecture_of
from bert_jax.model.dropout import Dropout
from bert_jax.model.execution import Execution
from bert_jax.model.replaced_tokens import (
    GeneratorSettings,
    ReplacedTokenModel,
    generator_params,
)
from bert_jax.objectives.masked_lm import MaskedLm, loss_sums


@dataclasses.dataclass(frozen=True, eq=False)
class ReplacedTokens:
    """Predicts masked tokens with a generator, and finds replaced ones with a discriminator.

    Attributes:
      masking: how rows are masked for the generator.
      generator: its size, and the weight of the discriminator's loss.
    """

    masking: Masking
    generator: GeneratorSettings

    causal: ClassVar[bool] = False
    main_loss: ClassVar[str] = "mlm"  # The generator's: of the two, only it has a perplexity.
    rules: ClassVar[tuple] = (
        (r"discriminator/dense/kernel$", P("fsdp", "tensor")),
        (r"discriminator/output/kernel$", P()),
    )
    max_predictions = staticmethod(MaskedLm.max_predictions)

    @classmethod
    def from_config(cls, config, tokenizer, max_predictions: int) -> "ReplacedTokens":
        """Builds the objective of a phase. Raises ValueError if the config is not ELECTRA's."""
        if "generator" not in config:
            raise ValueError(
                "--config.objective=replaced_tokens needs the fields of config.generator, which "
                "this configuration lacks: start from configs/pretrain/electra_small.py"
            )
        if config.next_sentence:
            raise ValueError(
                "--config.objective=replaced_tokens has no loss for pairs: set "
                "--config.next_sentence=False"
            )
        masking = MaskedLm.from_config(config, tokenizer, max_predictions).masking
        return cls(masking, GeneratorSettings(**config.generator))

    def make_model(self, config, execution: Execution) -> ReplacedTokenModel:
        """Builds the model, `config` being the discriminator's.

        Raises ValueError for a generator that does not fit it.
        """
        self.generator.config(config)
        return ReplacedTokenModel(config, execution, self.generator)

    def example_batch(self) -> dict[str, jax.Array]:
        """Returns a batch to initialize the model."""
        return pretraining.example_batch()

    def prepare(self, rows: dict[str, jax.Array], key: jax.Array) -> dict[str, jax.Array]:
        """Unpacks and masks rows, as `MaskedLm` does with the same key.

        Adds int32 `original_tokens` `[B, L]`, and uint32 `sampling_keys` `[B, words]`: the data of
        a PRNG key for the samples of each row, like its masks a function of (key, row, epoch).
        """
        batch = MaskedLm(self.masking, next_sentence=False).prepare(rows, key)
        key = jax.random.fold_in(key, zlib.crc32(b"samples"))
        keys = row_keys(key, rows["row_ids"], rows["epochs"], self.masking.repeat_after)
        return batch | {
            "original_tokens": rows["tokens"].astype(jnp.int32),
            "sampling_keys": jax.random.key_data(keys),
        }

    def counts(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the numbers of masked tokens, and of all tokens but padding; at least 1."""
        return {
            "mlm": jnp.maximum(jnp.sum(batch["target_weights"]), 1),
            "replaced": jnp.maximum(jnp.sum(batch["sequence_ids"] > 0), 1),
        }

    def total_loss(self, losses: dict[str, jax.Array | float]) -> jax.Array | float:
        """Returns the generator's mean loss and the weighted one of the discriminator."""
        return losses["mlm"] + self.generator.discriminator_weight * losses["replaced"]

    def sums(
        self,
        model: ReplacedTokenModel,
        params: dict,
        batch: dict[str, jax.Array],
        dropout: Dropout | None = None,
    ) -> dict[str, jax.Array]:
        """Returns sums over a batch, float32: losses in nats, correct predictions, counts.

        For the discriminator ("replaced") also those for precision and recall of replaced tokens.
        """
        # At a place of its own, so that the two encoders do not drop the same elements.
        generator_dropout = dropout and dropout.at_place("generator")
        variables = {"params": generator_params(params)}
        token_logits, _ = model.generator.apply(variables, batch, generator_dropout)
        samples = sample_tokens(batch["sampling_keys"], token_logits)
        batch, is_replaced = replace_tokens(batch, samples)
        sums = self.model_sums(model, params, batch, is_replaced, dropout)
        return loss_sums("mlm", token_logits, batch["targets"], batch["target_weights"]) | sums

    def model_sums(self, model, params, batch, is_replaced, dropout) -> dict[str, jax.Array]:
        """Returns the sums of the discriminator on the rows that the generator made."""
        logits = model.apply({"params": params}, batch, dropout)
        return discriminator_sums(logits, is_replaced, batch)

    def flops_per_row(self, config, length: int, max_sequences: int) -> float:
        """Returns the FLOPs of a training step for one row: of generator and discriminator."""
        generator = pretraining.flops_per_row(
            self.generator.config(config),
            length,
            self.masking.max_predictions,
            max_sequences,
            next_sentence=False,
        )
        encoder = architecture_of(config).flops_per_row(
            config, length, num_outputs=length, num_targets=0, num_pairs=0
        )
        head = 2.0 * length * (config.hidden_size**2 + config.hidden_size)
        return generator + 3 * (encoder + head)


def sample_tokens(sampling_keys: jax.Array, logits: jax.Array) -> jax.Array:
    """Samples ids from the softmax of float32 logits `[B, K, V]`: int32 `[B, K]`.

    Adds Gumbel noise and takes the maximum (section 3.1, temperature 1). `sampling_keys` are those
    of `ReplacedTokens.prepare`. Ids that only pad the vocabulary have the minimum float32 as logit,
    and are never sampled.
    """
    keys = jax.random.wrap_key_data(sampling_keys)
    return jax.vmap(jax.random.categorical)(keys, jax.lax.stop_gradient(logits))


def replace_tokens(
    batch: dict[str, jax.Array], samples: jax.Array
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns the batch with samples, int32 `[B, K]`, in place of what was masked.

    Also returns bool `[B, L]`: which tokens are not the original ones.
    """
    original = batch["original_tokens"]
    # Unused slots have position 0, and replace nothing.
    is_at = batch["target_positions"][..., None] == jnp.arange(original.shape[1])
    is_at &= batch["target_weights"][..., None] > 0  # [B, K, L]
    sampled = jnp.sum(jnp.where(is_at, samples[..., None], 0), axis=1)
    tokens = jnp.where(jnp.any(is_at, axis=1), sampled, original)
    return batch | {"tokens": tokens}, tokens != original


def discriminator_sums(
    logits: jax.Array, is_replaced: jax.Array, batch: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Returns the sums of the discriminator's logits `[B, L]`, over all tokens but padding.

    [CLS] and [SEP] count, as in the released code.
    """
    weights = (batch["sequence_ids"] > 0).astype(jnp.float32)
    losses = jax.nn.softplus(logits) - logits * is_replaced
    is_found = logits > 0
    hits = jnp.sum(weights * (is_found & is_replaced))
    return {
        "replaced_loss": jnp.sum(losses * weights),
        "replaced_correct": jnp.sum((is_found == is_replaced) * weights),
        "replaced_count": jnp.sum(weights),
        "replaced_recall_hits": hits,
        "replaced_recall_count": jnp.sum(weights * is_replaced),
        "replaced_precision_hits": hits,
        "replaced_precision_count": jnp.sum(weights * is_found),
    }


Objective = ReplacedTokens
