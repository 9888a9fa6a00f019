"""Finds probable label errors by confident learning (Northcutt et al., 2021, arXiv 1911.00068)."""

import re
import warnings
from collections.abc import Sequence

import numpy as np

from bert_jax.tasks.baselines import INVERSE_PENALTY, tf_idf_tables

NUM_FOLDS = 5
WORD = re.compile(r"\w+|[^\w\s]")


def out_of_fold(texts: Sequence[str], classes: np.ndarray, seed: int = 0) -> np.ndarray:
    """Returns the probabilities of the classes of each text, from a model that has not seen it.

    The model, a logistic regression of TF-IDF weights of words and pairs of words, is fitted on
    all folds but the text's own; each fold has its share of every class. Raises ImportError without
    scikit-learn, from the extra "baselines".

    Args:
      texts: `[examples]`.
      classes: int `[examples]`, of which at least two occur twice.

    Returns:
      float64 `[examples, classes]`, up to the highest class; 0 for a class without other examples.
    """
    from sklearn.linear_model import LogisticRegression

    words = [" ".join(WORD.findall(text.lower())) for text in texts]
    folds = _fold_of_each(classes, seed)
    probabilities = np.zeros((len(texts), int(classes.max()) + 1))
    for fold in range(NUM_FOLDS):
        parts = [np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)]
        if not len(parts[1]):  # There are fewer examples than folds.
            continue
        tables = tf_idf_tables([[words[index] for index in part] for part in parts])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of few iterations.
            model = LogisticRegression(C=INVERSE_PENALTY).fit(tables[0], classes[parts[0]])
        probabilities[np.ix_(parts[1], model.classes_)] = model.predict_proba(tables[1])
    return probabilities


def rank_label_errors(
    probabilities: np.ndarray, classes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ranks the labels by how probably they are wrong, given out-of-fold probabilities.

    An example counts in the confident joint (equation 1) as the class j with the highest
    probability of those that reach their threshold, the mean probability of j over the examples
    labeled j. Its label is a probable error if j is another class (the off-diagonal elements).
    These come first, then the others, both in ascending order of the probability of the label
    minus that of the best other class.

    Args:
      probabilities: `[examples, classes]`, at least two classes.
      classes: int `[examples]`, the labels.

    Returns:
      The indices of all examples in this order, int; and in the order of the examples, whether the
      label is a probable error, bool, and the best other class, int.
    """
    rows = np.arange(len(classes))
    num_classes = probabilities.shape[1]
    counts = np.bincount(classes, minlength=num_classes)
    own = probabilities[rows, classes]
    thresholds = np.bincount(classes, own, num_classes) / np.maximum(counts, 1)
    thresholds[counts == 0] = np.inf
    is_confident = probabilities >= thresholds
    joint = np.where(is_confident, probabilities, -1).argmax(axis=1)
    is_error = is_confident.any(axis=1) & (joint != classes)
    others = probabilities.copy()
    others[rows, classes] = -1
    best_other = others.argmax(axis=1)
    order = np.lexsort((own - others[rows, best_other], ~is_error))
    return order, is_error, best_other


def _fold_of_each(classes: np.ndarray, seed: int) -> np.ndarray:
    """Returns the fold of each example: those of a class are distributed over the folds."""
    folds = np.zeros(len(classes), int)
    shuffled = np.random.default_rng(seed).permutation(len(classes))
    in_order = shuffled[np.argsort(classes[shuffled], kind="stable")]
    folds[in_order] = np.arange(len(classes)) % NUM_FOLDS
    return folds
