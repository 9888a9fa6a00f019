"""SpanBERT: masked LM, and each token of a span from the tokens around it (Joshi et al., 2020).

A span is a maximal run of masked tokens: spans that were drawn next to each other count as one, so
that the two tokens around it are never masked themselves ("observed", section 3.2). No special
token is masked, and every sequence begins and ends with one: both are of the span's own sequence.
The two losses predict the same tokens, and are added with equal weights.
"""

import dataclasses
from typing import ClassVar

import jax
from jax.sharding import PartitionSpec as P

from bert_jax.data.masking import Masking, span_boundaries
from bert_jax.model import span_boundary
from bert_jax.model.dropout import Dropout
from bert_jax.model.execution import Execution
from bert_jax.model.span_boundary import SpanBoundaryModel
from bert_jax.objectives.masked_lm import MaskedLm, loss_sums, target_counts


@dataclasses.dataclass(frozen=True, eq=False)
class SpanBoundary:
    """Predicts masked tokens twice: from their own hidden states, and from those around their span.

    Attributes:
      masking: how rows are masked.
    """

    masking: Masking

    causal: ClassVar[bool] = False
    main_loss: ClassVar[str] = "mlm"
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
                "--config.objective=span_boundary trains on single segments, without sentence "
                "pairs: set --config.next_sentence=False"
            )
        if config.masking.unit == "token":
            raise ValueError(
                "--config.objective=span_boundary predicts spans, but masking.unit is 'token': set "
                "--config.masking.unit=span (or whole_word, ngram)"
            )
        return cls(MaskedLm.from_config(config, tokenizer, max_predictions).masking)

    def make_model(self, config, execution: Execution) -> SpanBoundaryModel:
        """Builds the model for an architecture's configuration."""
        return SpanBoundaryModel(config, execution)

    def example_batch(self) -> dict[str, jax.Array]:
        """Returns a batch to initialize the model."""
        return span_boundary.example_batch()

    def prepare(self, rows: dict[str, jax.Array], key: jax.Array) -> dict[str, jax.Array]:
        """Unpacks and masks rows as masked LM does, and finds what is around each target's span."""
        batch = MaskedLm(self.masking).prepare(rows, key)
        length = batch["tokens"].shape[1]
        return batch | span_boundaries(batch["target_positions"], batch["target_weights"], length)

    def counts(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the number of targets, at least 1, for each of the two losses."""
        count = target_counts(batch, "mlm", next_sentence=False)["mlm"]
        return {"mlm": count, "sbo": count}

    @staticmethod
    def total_loss(losses: dict[str, jax.Array | float]) -> jax.Array | float:
        """Returns the sum of both mean losses (section 3.2)."""
        return losses["mlm"] + losses["sbo"]

    def sums(
        self,
        model: SpanBoundaryModel,
        params: dict,
        batch: dict[str, jax.Array],
        dropout: Dropout | None = None,
    ) -> dict[str, jax.Array]:
        """Returns sums over a batch, float32: losses in nats, correct predictions, counts."""
        logits, span_logits = model.apply({"params": params}, batch, dropout)
        targets, weights = batch["targets"], batch["target_weights"]
        return loss_sums("mlm", logits, targets, weights) | loss_sums(
            "sbo", span_logits, targets, weights
        )

    def flops_per_row(self, config, length: int, max_sequences: int) -> float:
        """Returns the FLOPs of a training step for one row."""
        return span_boundary.flops_per_row(config, length, self.masking.max_predictions)


Objective = SpanBoundary
