"""The loss of fine-tuning beside a teacher, whose outputs are stored with the examples."""

import dataclasses

import jax
import jax.numpy as jnp

from bert_jax.model.heads import Head, span_logits
from bert_jax.model.layers import kl_divergence


def with_soft_targets(head: Head, alpha: float, temperature: float) -> Head:
    """Returns `head` with the loss alpha * its own + (1 - alpha) * the divergence from a teacher.

    The divergence is `kl_divergence` (Hinton et al., 2015, section 2), for spans its mean over the
    first and the last position, and for regression the loss on the teacher's values as labels.
    """
    soft_loss = SOFT_LOSSES[head.name]

    def loss(outputs, rows):
        soft = soft_loss(head, outputs, rows["teacher_outputs"], rows, temperature)
        return alpha * head.loss(outputs, rows) + (1 - alpha) * soft

    return dataclasses.replace(head, loss=loss)


def _of_classes(head, outputs, teacher, rows, temperature):
    # The outputs for choices, one per sequence, become classes of their example.
    return kl_divergence(outputs.reshape(teacher.shape), teacher, temperature)


def _of_spans(head, outputs, teacher, rows, temperature):
    logits = (span_logits(each, rows) for each in (outputs, teacher))
    return jnp.mean(kl_divergence(*logits, temperature), axis=-1)


def _of_values(head, outputs, teacher, rows, temperature) -> jax.Array:
    return head.loss(outputs, rows | {"labels": teacher[..., 0]})  # In the units of the labels.


SOFT_LOSSES = {
    "classification": _of_classes,
    "multiple_choice": _of_classes,
    "tagging": _of_classes,
    "span": _of_spans,
    "regression": _of_values,
}
"""By the name of the head: (head, outputs, teacher's outputs, rows, temperature) -> losses."""
