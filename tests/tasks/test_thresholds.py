"""Thresholds of labels, tuned for the highest F1."""

import numpy as np
import pytest

from bert_jax.tasks import scores
from bert_jax.tasks.tables import Record
from bert_jax.tasks.task import TrainedHead
from bert_jax.tasks.text_classification import PREDICT_OPTIONS, classify_output, get_predictor
from bert_jax.tasks.thresholds import best_thresholds, exceed_thresholds


def test_thresholds_have_the_highest_f1_of_all():
    rng = np.random.default_rng(0)
    for _ in range(200):
        # Some equal logits, and labels without positive examples.
        logits = rng.choice(rng.normal(0, 3, 9), (rng.integers(1, 12), 4)).astype(np.float32)
        expected = rng.random(logits.shape) < rng.random(4) ** 2
        thresholds = best_thresholds(logits, expected)
        predicted = exceed_thresholds(logits, thresholds)
        for column, threshold in enumerate(thresholds):
            values = logits[:, column].astype(np.float64)
            tried = [-np.inf, *values, *np.nextafter(values, -np.inf), 0]
            f1 = [scores.f1(values > each, expected[:, column]) for each in tried]
            found = scores.f1(predicted[:, column], expected[:, column])
            assert found == pytest.approx(max(f1)) or not expected[:, column].any()
            # Where 0 is as good as any, it stays.
            assert threshold == 0 or f1[-1] < max(f1) or found == 0


def test_prediction_of_files_and_classify_use_the_same_thresholds():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (20, 3)).astype(np.float32)
    head = {"task": "multi_label", "labels": ["a", "b", "c"]}
    for tuned in ({}, {"logit_thresholds": [-1.5, 0.25, float(logits[3, 2])]}):
        expected = logits > np.array(tuned.get("logit_thresholds", 0.0))
        trained = TrainedHead(head | tuned, {}, None, 32)
        predictor = get_predictor(trained, PREDICT_OPTIONS, set())
        labels = [set(np.array(head["labels"])[row]) for row in expected]
        records = [({"text": "x", "label": ""}, tuple(each)) for each in labels]
        records = [Record(columns, "here", "0", names) for columns, names in records]
        lines = predictor.describe(records, list(logits))
        assert [set(line["prediction"]) for line in lines] == labels
        assert predictor.scores()["micro_f1"] == 1
        found = [classify_output(head | tuned, output, None) for output in logits]
        assert [{each.label for each in few} for few in found] == labels
        assert len(classify_output(head | tuned, logits[0], 3)) == 3
