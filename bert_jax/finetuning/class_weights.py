"""Finds the weights of classes in the loss, given or balanced."""

from collections.abc import Sequence

import numpy as np
from absl import logging

from bert_jax.data.features import NO_LABEL
from bert_jax.tasks.labels import LARGE_RATIO, read_weights
from bert_jax.tasks.task import Task


def find_class_weights(
    given: Sequence, task: Task, train_fraction: float = 0.0
) -> tuple[float, ...]:
    """Returns the weight of each class of a task; () for no weights.

    `given` has the weights, in the order of the labels or by name as `read_weights`, or is
    ("balanced",): labels / (classes * labels of the class). A class without training examples is
    not counted and has weight 1, as it never enters the loss. Raises ValueError if another weight
    is given for it, unless the examples are a `train_fraction` (0: all): it is then replaced, which
    is logged. Warns if a weight is so large that its class is predicted where it is improbable.
    """
    given = weights = tuple(given)
    if not given:
        return ()
    classes = task.labels if task.head.predicts in ("class", "tag") else ()
    if classes:
        labels = np.concatenate([np.ravel(feature.label) for feature in task.train])
        counts = np.bincount(labels[labels != NO_LABEL], minlength=len(classes))
    if given == ("balanced",) and classes:
        balanced = counts.sum() / (np.count_nonzero(counts) * np.maximum(counts, 1))
        weights = tuple(np.where(counts, balanced, 1.0).tolist())
    weights = read_weights(weights, classes, "config.class_weights")
    absent = [
        f"{label!r} has the weight {weight:g}, but no examples in train"
        for label, weight, count in zip(classes, weights, counts, strict=True)
        if not count and weight != 1
    ]
    if absent and not 0 < train_fraction < 1:
        raise ValueError(
            f"config.class_weights={','.join(map(str, given))}: {absent[0]}: give it the weight 1, "
            "or remove the class"
        )
    for message in absent:
        logging.warning("class_weights, train_fraction=%g: %s: using 1", train_fraction, message)
    weights = tuple(np.where(counts, weights, 1.0).tolist())
    warn_of_large_weights(classes, weights, counts)
    return weights


def warn_of_large_weights(
    classes: Sequence[str], weights: Sequence[float], counts: np.ndarray
) -> None:
    """Warns if the weight of a class is so large that it is predicted where it is improbable.

    A calibrated model predicts the class, not the most frequent one, if its probability p times its
    weight exceeds 1 - p times the weight of the most frequent class.
    """
    weights, is_present = np.array(weights), counts > 0
    frequent = int(np.argmax(counts))
    rare = int(np.argmax(np.where(is_present, weights, 0)))
    ratio = weights[rare] / weights[frequent]
    if ratio < LARGE_RATIO:
        return
    roots = np.sqrt(weights / weights[is_present].min()).round(2)
    roots[~is_present] = 1  # The only weight that such a class may have.
    logging.warning(
        "class_weights: %r (%d of %d labels in train) has %.3g times the weight of %r (%d), so it "
        "is predicted at any probability above %.2g: more of its examples are found, but up to "
        "%.0f %% of its predictions may be wrong. Compare precision in predictions/*_classes.tsv "
        "with a run without weights, or with their square roots: config.class_weights=%s",
        classes[rare],
        counts[rare],
        counts.sum(),
        ratio,
        classes[frequent],
        counts[frequent],
        1 / (1 + ratio),
        100 * ratio / (1 + ratio),
        ",".join(f"{root:g}" for root in roots),
    )
