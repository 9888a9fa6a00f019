"""The distillation loss of fine-tuning; the teacher's outputs are stored with the examples."""

import dataclasses

from bert_jax.model.heads import Head


def with_soft_targets(head: Head, alpha: float, temperature: float) -> Head:
    """Returns `head` with the loss alpha * its own + (1 - alpha) * the divergence from a teacher.

    The divergence is `kl_divergence` (Hinton et al., 2015, section 2), for spans its mean over the
    first and the last position, and for regression the loss on the teacher's values as labels.
    """

    def loss(outputs, rows):
        soft = head.soft_loss(outputs, rows["teacher_outputs"], rows, temperature)
        return alpha * head.loss(outputs, rows) + (1 - alpha) * soft

    return dataclasses.replace(head, loss=loss)
