"""Losses that compare the scores of a query's passages with a teacher's.

`scores` and `teacher` are float32 `[examples, n]`, of the positive first; `weights` are float32
`[examples]`, 0 for unused examples. The scores of a bi-encoder are `own_dot_products`, those of
late interaction `own_max_similarities`, both in `losses/similarity.py`.
"""

import jax
import jax.numpy as jnp


def margin_mse_loss(scores: jax.Array, teacher: jax.Array, weights: jax.Array) -> jax.Array:
    """Sums the mean squared error of the margins between the positive and each negative.

    Hofstätter et al. (2020, "Cross-architecture knowledge distillation"); MarginMSELoss, also of
    sparse, multi-vector and cross-encoders.
    """
    errors = (scores[:, :1] - scores[:, 1:]) - (teacher[:, :1] - teacher[:, 1:])
    return jnp.sum(jnp.mean(jnp.square(errors), axis=-1) * weights)


def score_divergence_loss(
    scores: jax.Array,
    teacher: jax.Array,
    weights: jax.Array,
    temperature: float = 1.0,
    teacher_temperature: float = 1.0,
) -> jax.Array:
    """Sums temperature^2 * KL(teacher || student) of the softmax over the passages, in nats.

    Lin et al. (2020, "Tightly-coupled teachers"); DistillKLDivLoss. The temperatures divide the
    scores of the student and of the teacher.
    """
    log_student = jax.nn.log_softmax(scores / temperature)
    log_teacher = jax.nn.log_softmax(teacher / teacher_temperature)
    losses = jnp.sum(jnp.exp(log_teacher) * (log_teacher - log_student), axis=-1)
    return temperature**2 * jnp.sum(losses * weights)
