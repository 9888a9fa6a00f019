"""SpanBERT: masked LM, and each token of a span from the tokens around it (Joshi et al., 2020).

A span is a maximal run of masked tokens: spans that were drawn next to each other count as one, so
that the two tokens around it are never masked themselves ("observed", section 3.2). No special
token is masked, and every sequence begins and ends with one: both are of the span's own sequence.
The two losses predict the same tokens, and are added with equal weights.
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from bert_jax.data.masking import Masking, span_boundaries
from bert_jax.model.architecture import architecture_of
from bert_jax.model.dropout import Dropout
from bert_jax.model.encoder import Encoder, is_few
from bert_jax.model.execution import ExecutionPlan
from bert_jax.model.layers import Dense, Embedding, LayerNorm, TokenEmbedding, activate
from bert_jax.objectives import Batch, Sums
from bert_jax.objectives.masked_lm import MaskedLm, loss_sums, target_counts

POSITION_SIZE = 200
"""Size of the position embeddings (Joshi et al., 2020, section 4.2)."""
NUM_PLACES = 64
"""Places in a span with an embedding of their own; all later ones share the last. A span of 10
words rarely has half as many pieces."""
EPSILON = 1e-12  # For LayerNorm, as in BERT.


class SpanBoundaryHead(nn.Module):
    """Predicts a token of a span from the two tokens around the span (section 3.2).

    The last product shares its matrix with the token embedding, as in the masked-LM head.
    """

    config: object

    @nn.compact
    def __call__(
        self,
        left: jax.Array,  # [B, K, H], hidden states of the last token before each target's span
        right: jax.Array,  # [B, K, H], of the first token after it
        places: jax.Array,  # int32 [B, K]: 0, 1, ... in the span
        token_embedding: TokenEmbedding,
    ) -> jax.Array:
        """Returns float32 logits `[B, K, padded_vocab]`."""
        initializer_range = self.config.initializer_range
        position_embedding = Embedding(
            NUM_PLACES, POSITION_SIZE, initializer_range, name="position_embedding"
        )
        position = position_embedding(jnp.clip(places, 0, NUM_PLACES - 1)).astype(left.dtype)
        x = jnp.concatenate([left, right, position], axis=-1)
        x = activate("gelu", Dense(self.config.hidden_size, initializer_range, name="dense_1")(x))
        x = LayerNorm(EPSILON, name="layer_norm_1")(x)
        x = activate(
            "gelu", Dense(token_embedding.num_features, initializer_range, name="dense_2")(x)
        )
        x = LayerNorm(EPSILON, name="layer_norm_2")(x)
        shape = (token_embedding.padded_vocab_size,)
        bias = self.param("bias", nn.initializers.zeros, shape, jnp.float32)
        return token_embedding.logits(x, bias)


class SpanBoundaryModel(nn.Module):
    """Encoder, masked-LM head ("mlm"), and span-boundary head ("sbo").

    Attributes:
      config: the model config.
      plan: how it runs.
    """

    config: object
    plan: ExecutionPlan = ExecutionPlan()

    def setup(self):
        self.encoder = Encoder(self.config, self.plan)
        self.mlm = architecture_of(self.config).LmHead(self.config)
        self.sbo = SpanBoundaryHead(self.config)

    def __call__(
        self, batch: dict[str, jax.Array], dropout: Dropout | float | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns float32 logits `[B, K, padded_vocab]` of both heads.

        The batch has the inputs of `Encoder`, and int32 `[B, K]` `target_positions`, to predict
        tokens at, `left_positions`, `right_positions` and `places`, as of `span_boundaries`.
        """
        names = "target_positions", "left_positions", "right_positions"
        positions = jnp.concatenate([batch[name] for name in names], axis=1)
        targets, left, right = jnp.split(self.encoder(batch, dropout, positions), 3, axis=1)
        token_embedding = self.encoder.embeddings.token_embedding
        return (
            self.mlm(targets, token_embedding),
            self.sbo(left, right, batch["places"], token_embedding),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class SpanBoundary:
    """Predicts masked tokens twice: from their own hidden states, and from those around their span.

    Attributes:
      masking: how rows are masked.
    """

    masking: Masking

    causal: ClassVar[bool] = False
    main_loss: ClassVar[str] = "mlm_loss"
    main_accuracy: ClassVar[str] = "mlm_accuracy"
    rules: ClassVar[tuple] = (
        # Its rows, of two hidden states and a position, are no multiple of large powers of 2.
        (r"sbo/dense_1/kernel$", P(None, "tensor")),
        (r"sbo/dense_2/kernel$", P("fsdp", "tensor")),
        (r"sbo/bias$", P("tensor")),
        (r"sbo/", P()),
    )

    @staticmethod
    def max_predictions(config, given: int | None, length: int) -> int:
        """Returns the maximum number of masked positions in a row, as for masked LM."""
        return MaskedLm.max_predictions(config, given, length)

    @classmethod
    def from_config(cls, config, tokenizer, max_predictions: int) -> "SpanBoundary":
        """Builds the objective of a phase. Raises ValueError for pairs or an invalid masking."""
        if config.next_sentence:
            raise ValueError(
                "config.objective=span_boundary trains on single segments, without sentence "
                "pairs: set config.next_sentence=False"
            )
        if config.masking.unit == "token":
            raise ValueError(
                "config.objective=span_boundary predicts spans, but masking.unit is 'token': set "
                "config.masking.unit=span (or whole_word, ngram)"
            )
        return cls(MaskedLm.from_config(config, tokenizer, max_predictions).masking)

    def make_model(self, model_config, plan: ExecutionPlan) -> SpanBoundaryModel:
        """Builds the model."""
        return SpanBoundaryModel(model_config, plan)

    def prepare(self, rows: Batch, key: jax.Array) -> Batch:
        """Unpacks and masks rows as masked LM does, and finds the tokens around each span."""
        batch = MaskedLm(self.masking).prepare(rows, key)
        length = batch["tokens"].shape[1]
        return batch | span_boundaries(batch["target_positions"], batch["target_weights"], length)

    def counts(self, batch: Batch) -> dict[str, jax.Array]:
        """Returns the number of targets, at least 1, for each of the two losses."""
        count = target_counts(batch, "mlm", next_sentence=False)["mlm_loss"]
        return {"mlm_loss": count, "sbo_loss": count}

    @staticmethod
    def total_loss(losses: dict[str, jax.Array | float]) -> jax.Array | float:
        """Returns the sum of both mean losses (section 3.2)."""
        return losses["mlm_loss"] + losses["sbo_loss"]

    def sums(
        self,
        model: SpanBoundaryModel,
        params: dict,
        batch: Batch,
        dropout: Dropout | None = None,
    ) -> Sums:
        """Returns the loss and accuracy of each head over a batch, as sums and counts."""
        logits, span_logits = model.apply({"params": params}, batch, dropout)
        targets, weights = batch["targets"], batch["target_weights"]
        return loss_sums("mlm", logits, targets, weights) | loss_sums(
            "sbo", span_logits, targets, weights
        )

    def flops_per_row(self, model_config, length: int, max_sequences: int) -> float:
        """Returns the FLOPs of a training step for one row."""
        return flops_per_row(model_config, length, self.masking.max_predictions)


def flops_per_row(model_config, length: int, num_targets: int) -> float:
    """Returns the FLOPs of the matrix products of one training step for one row.

    As `masked_lm.flops_per_row`; the last layer finishes three positions for each target.
    """
    hidden = model_config.hidden_size
    embedding_size = getattr(model_config, "embedding_size", None) or hidden
    span_head = (2 * hidden + POSITION_SIZE) * hidden
    span_head += hidden * embedding_size + embedding_size * model_config.padded_vocab_size
    num_outputs = 3 * num_targets
    forward = architecture_of(model_config).flops_per_row(
        model_config,
        length,
        num_outputs=num_outputs if is_few(num_outputs, length) else length,
        num_targets=num_targets,
        num_pairs=0,
    )
    return 3 * (forward + 2.0 * num_targets * span_head)


Objective = SpanBoundary
