"""Masked LM through DeBERTa's enhanced mask decoder (He et al., 2020, section 3.2).

    tokens -> all layers but the last -> hidden states
        hidden states + absolute positions -> the last layer, twice -> head for tokens

In both applications of the last layer, queries are the result so far, and keys and values those
hidden states: the encoder knows only distances, and here the model may use the absolute position of
a token.
The decoder is used in pre-training only. An encoder that is trained so has the same layers as any.
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
from jax.sharding import PartitionSpec as P

from bert_jax.data.masking import Masking
from bert_jax.model.architecture import architecture_of
from bert_jax.model.dropout import Dropout, as_dropout, finishing_dropout, layer_dropout
from bert_jax.model.encoder import Encoder
from bert_jax.model.execution import ExecutionPlan
from bert_jax.model.layers import Embedding, TokenEmbedding, gather_positions
from bert_jax.objectives import Batch, Sums
from bert_jax.objectives.masked_lm import MaskedLm, flops_per_row, target_counts, target_sums

NUM_APPLICATIONS = 2  # Of the last layer.


class EnhancedDecoder(nn.Module):
    """The parameters that the decoder has beside the encoder: positions, and a head for tokens."""

    config: object

    def setup(self):
        config = self.config
        self.positions = Embedding(
            config.max_position_embeddings, config.hidden_size, config.initializer_range
        )
        self.head = architecture_of(config).LmHead(config)

    def first_queries(self, x: jax.Array, position_ids: jax.Array) -> jax.Array:
        """Returns hidden states `[B, L, H]` with the vectors of int32 `[B, L]` positions."""
        return x + self.positions(position_ids).astype(x.dtype)

    def __call__(self, x: jax.Array, token_embedding: TokenEmbedding) -> jax.Array:
        """Returns float32 logits `[B, K, padded_vocab]` for hidden states `[B, K, H]`."""
        return self.head(x, token_embedding)


class EnhancedMaskModel(nn.Module):
    """Encoder, and its enhanced mask decoder ("enhanced_decoder").

    Attributes:
      config: the model config.
      plan: how it runs.
    """

    config: object
    plan: ExecutionPlan = ExecutionPlan()

    def setup(self):
        self.encoder = Encoder(self.config, self.plan)
        self.enhanced_decoder = EnhancedDecoder(self.config)

    @property
    def encoders(self) -> dict[str, object]:
        """Names no encoder whose parameters a step may fuse: its layers run as they are defined."""
        return {}

    def __call__(
        self, batch: dict[str, jax.Array], dropout: Dropout | float | None = None
    ) -> tuple[jax.Array, None]:
        """Returns float32 logits `[B, K, padded_vocab]` at `target_positions`, int32 `[B, K]`.

        There is no head for pairs, as `PretrainingModel` has. Takes the arguments of `Encoder`.
        """
        config, (num_rows, length) = self.config, batch["tokens"].shape
        dropout = as_dropout(self, dropout, num_rows)
        x, inputs, params = self.encoder.to_last_layer(batch, dropout)
        layer = architecture_of(config).encoder_layers(config)[-1]
        dropouts = {}
        if dropout is not None:
            at_decoder = dropout.at_place("enhanced_decoder")
            sizes = NUM_APPLICATIONS, config.num_heads, length
            dropouts = layer_dropout(at_decoder, layer.dropout_places, *sizes)
        positions = batch["target_positions"]
        queries = self.enhanced_decoder.first_queries(x, batch["position_ids"])
        for number in range(NUM_APPLICATIONS):
            own = jax.tree.map(lambda leaf, number=number: leaf[number], dropouts)
            is_last = number == NUM_APPLICATIONS - 1

            def decode(params, queries, own, is_last=is_last):
                variables = {"params": params}
                attended = layer.apply(variables, x, inputs, own, queries, method="attend")
                if is_last:  # What follows treats each position on its own.
                    queries, attended = jax.tree.map(
                        lambda leaf: gather_positions(leaf, positions), (queries, attended)
                    )
                    own = finishing_dropout(own, positions)
                return layer.apply(variables, queries, attended, own, method="finish")

            queries = self.plan.with_remat(decode, in_loop=False)(params, queries, own)
        return self.enhanced_decoder(queries, self.encoder.embeddings.token_embedding), None


@dataclasses.dataclass(frozen=True, eq=False)
class EnhancedMaskedLm:
    """Predicts masked tokens through an enhanced mask decoder.

    Attributes:
      masking: how rows are masked.
    """

    masking: Masking

    causal: ClassVar[bool] = False
    main_loss: ClassVar[str] = "mlm_loss"
    main_accuracy: ClassVar[str] = "mlm_accuracy"
    rules: ClassVar[tuple] = (
        (r"enhanced_decoder/positions/embedding$", P()),
        (r"enhanced_decoder/head/transform/kernel$", P("fsdp", "tensor")),
        (r"enhanced_decoder/head/bias$", P("tensor")),
    )
    max_predictions = staticmethod(MaskedLm.max_predictions)

    @classmethod
    def from_config(cls, config, tokenizer, max_predictions: int) -> "EnhancedMaskedLm":
        """Builds the objective of a phase. Raises ValueError for a head that it does not have."""
        if config.next_sentence:
            raise ValueError(
                "config.objective=enhanced_masked_lm has no next-sentence loss: set "
                "config.next_sentence=False"
            )
        return cls(MaskedLm.from_config(config, tokenizer, max_predictions).masking)

    def make_model(self, model_config, plan: ExecutionPlan) -> EnhancedMaskModel:
        """Builds the model. Raises ValueError for another architecture, or a single layer."""
        if model_config.architecture != "deberta":
            raise ValueError(
                "config.objective=enhanced_masked_lm needs model.architecture=deberta, and it is "
                f"{model_config.architecture}: set config.objective=masked_lm"
            )
        if model_config.num_layers < 2:
            raise ValueError(
                "config.objective=enhanced_masked_lm applies the last layer to the result of "
                "others: set config.model.num_layers to at least 2"
            )
        return EnhancedMaskModel(model_config, plan)

    def prepare(self, rows: Batch, key: jax.Array) -> Batch:
        """Unpacks and masks rows, as `MaskedLm` does."""
        return MaskedLm(self.masking, next_sentence=False).prepare(rows, key)

    def counts(self, batch: Batch) -> dict[str, jax.Array]:
        """Returns the number of targets, at least 1."""
        return target_counts(batch, "mlm", next_sentence=False)

    def total_loss(self, losses: dict[str, jax.Array | float]) -> jax.Array | float:
        """Returns the mean loss of tokens."""
        return losses["mlm_loss"]

    def sums(
        self,
        model: EnhancedMaskModel,
        params: dict,
        batch: Batch,
        dropout: Dropout | None = None,
    ) -> Sums:
        """Returns the loss and accuracy over a batch, as sums and counts."""
        return target_sums(model, params, batch, dropout, "mlm")

    def flops_per_row(self, model_config, length: int, max_sequences: int) -> float:
        """Returns the FLOPs of a training step for one row: the last layer counts twice."""
        num_targets = self.masking.max_predictions
        layers = dataclasses.replace(model_config, num_layers=model_config.num_layers + 1)
        return flops_per_row(layers, length, num_targets, max_sequences, next_sentence=False)


Objective = EnhancedMaskedLm
