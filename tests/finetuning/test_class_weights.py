"""Weights of classes."""

import dataclasses

import numpy as np
import pytest

from bert_jax.data.features import NO_LABEL, ModelInput
from bert_jax.finetuning.class_weights import find_class_weights
from bert_jax.model import heads
from bert_jax.tasks.task import Task


def task_of(head: heads.Head, labels: list) -> Task:
    train = [ModelInput((np.zeros(3, np.int32),), (3,), label) for label in labels]
    return Task(head, ("a", "b", "c"), train, (), "dev/f1")


@pytest.mark.parametrize(
    ("head", "labels"),
    [
        (heads.CLASSIFICATION, [0, 1, 0, 2, 0, 1]),
        (heads.TAGGING, [np.array([0, NO_LABEL, 1]), np.array([0, 2, 0]), np.array([1, NO_LABEL])]),
    ],
    ids=["classification", "tagging"],
)
def test_balanced_weights_give_each_class_the_same_sum(head, labels):
    """As scikit-learn's class_weight="balanced": 6 labels, 3 of a, 2 of b, 1 of c."""
    weights = find_class_weights(("balanced",), task_of(head, labels))
    assert weights == pytest.approx((6 / 9, 1, 2))
    # A class without an example does not change the others' weights.
    absent = dataclasses.replace(task_of(head, labels), labels=("a", "b", "c", "d"))
    assert find_class_weights(("balanced",), absent) == pytest.approx((6 / 9, 1, 2, 1))
    assert find_class_weights((), task_of(head, labels)) == ()


def test_a_weight_of_a_class_without_examples_is_refused():
    task = dataclasses.replace(
        task_of(heads.CLASSIFICATION, [0, 1, 0]), labels=("a", "b", "missing")
    )
    with pytest.raises(
        ValueError, match=r"class_weights=1,2,3: 'missing' has the weight 3, but no"
    ):
        find_class_weights((1, 2, 3), task)
    assert find_class_weights((1, 2, 1), task) == (1, 2, 1)


def test_a_class_that_a_fraction_lacks_has_weight_1_which_is_logged(caplog):
    task = task_of(heads.CLASSIFICATION, [0, 1, 0])
    for fraction in (0.0, 1.0):
        with pytest.raises(ValueError, match=r"class_weights=b=2,c=5: 'c' has the weight 5"):
            find_class_weights(("b=2,c=5",), task, fraction)
    assert not caplog.records
    assert find_class_weights(("b=2,c=5",), task, 0.01) == (1, 2, 1)
    (record,) = caplog.records
    assert "'c' has the weight 5" in record.getMessage()


def test_weights_that_outweigh_the_frequent_class_are_reported(caplog):
    task = task_of(heads.CLASSIFICATION, [0] * 95 + [1] * 4 + [2])
    find_class_weights(("balanced",), task)
    (record,) = caplog.records
    expected = "'c' (1 of 100 labels in train) has 95 times the weight of 'a' (95), so it is "
    assert expected + "predicted at any probability above 0.01" in record.getMessage()
    assert "up to 99 % of its predictions" in record.getMessage()
    assert record.getMessage().endswith("config.class_weights=1,4.87,9.75")
    find_class_weights((1, 4.87, 9.75), task)
    assert len(caplog.records) == 1


def test_the_weights_that_a_warning_proposes_are_accepted_without_one(caplog):
    task = task_of(heads.CLASSIFICATION, [0] * 900 + [1] * 10)
    find_class_weights(("balanced",), task)
    (record,) = caplog.records
    proposed = record.getMessage().rpartition("config.class_weights=")[2]
    assert proposed == "1,9.49,1"
    assert find_class_weights(tuple(map(float, proposed.split(","))), task) == (1, 9.49, 1)
    assert len(caplog.records) == 1


def test_weights_are_given_by_name_and_others_are_1():
    task = task_of(heads.CLASSIFICATION, [0, 1, 2])
    assert find_class_weights(("c=2.5,a=3",), task) == (3, 1, 2.5)
    for given in (("d=2",), ("a=2", "a=3"), ("a=-1",), ("a=2", 1, 1)):
        with pytest.raises(ValueError, match=r"config\.class_weights="):
            find_class_weights(given, task)
