"""The head that a task takes from its initial weights."""

import numpy as np
import pytest

from bert_jax.finetuning.pretrained_head import initial_params
from bert_jax.model.config import BertConfig
from bert_jax.model.modernbert import ModernBertConfig

BERT = BertConfig()


def test_bilstm_is_taken_over_with_its_head_and_must_have_the_same_size():
    params = {"encoder": {"pooler": np.zeros(1)}, "head": {}, "lstm": {}}
    saved_head = {"task": "classification", "labels": ["north", "south"], "lstm_size": 4}
    initial = initial_params(params, BERT, saved_head, saved_head, new_head=False)
    assert set(initial) == {"encoder", "head", "lstm"}
    for saved, new in ((4, 0), (0, 4), (4, 8)):
        heads = [saved_head | {"lstm_size": size} for size in (saved, new)]
        with pytest.raises(ValueError, match=rf"={saved}, .* {new}: .*model\.lstm_size={saved}"):
            initial_params(params, BERT, *heads, new_head=False)
        assert set(initial_params(params, BERT, *heads, new_head=True)) == {"encoder"}


def test_head_of_another_kind_is_ignored_and_reported(caplog):
    params = {"encoder": {"pooler": np.zeros(1)}, "head": {}}
    saved_head = {"task": "classification", "labels": ["north", "south"]}
    task_head = saved_head | {"task": "tagging"}
    with caplog.at_level("INFO"):
        assert set(initial_params(params, BERT, saved_head, task_head, new_head=False)) == {
            "encoder"
        }
    assert "Ignoring the head for classification in the weights: this task needs" in caplog.text


@pytest.mark.parametrize(
    ("task", "has_pooler"), [("classification", True), ("tagging", True), ("embedding", False)]
)
def test_pooler_of_modernbert_starts_from_the_head_for_tokens(task, has_pooler):
    """As in transformers, whose classes give both the same name; taggers read it, too."""
    transform = {"dense": {"kernel": np.ones((2, 2))}}
    params = {"encoder": {"layers": {}}, "mlm": {"transform": transform, "bias": np.zeros(3)}}
    head = {"task": task, "labels": ["a", "b"]}
    initial = initial_params(params, ModernBertConfig(), None, head, new_head=False)
    expected = {"layers": {}} | ({"pooler": transform} if has_pooler else {})
    assert initial == {"encoder": expected}


def test_a_dense_layer_after_pooling_goes_on_if_the_task_has_it():
    dense = {"size": 8, "has_bias": False, "activation": "identity"}
    params = {"encoder": {"layers": {}}, "projection_0": {"kernel": np.zeros((2, 8))}}
    task = {"task": "embedding", "labels": [], "pooling": "mean", "normalize": True}
    head = task | {"projections": [dense]}
    assert set(initial_params(params, BERT, head, head, new_head=False)) == set(params)
    assert set(initial_params(params, BERT, head, task, new_head=True)) == {"encoder"}
    for projections, named in (
        ([dense], "vector_size=8"),
        ([dense | {"has_bias": True}], "projections"),
        ([dense, dense], "projections"),
    ):
        with pytest.raises(ValueError, match=named):
            saved = head | {"projections": projections}
            initial_params(params, BERT, saved, task, new_head=False)


def test_a_multi_vector_head_goes_on_if_the_task_has_the_same():
    dense = {"size": 8, "has_bias": False, "activation": "identity"}
    params = {"encoder": {"layers": {}}, "projection_0": {"kernel": np.zeros((2, 8))}}
    head = {"task": "multi_vector", "labels": [], "projections": [dense], "skip_words": ["."]}
    head |= {"query_expansion": None, "prompts": {"query": "[Q] ", "document": ""}}
    assert set(initial_params(params, BERT, head, head, new_head=False)) == set(params)
    for name, value in (
        ("projections", [dense | {"size": 4}]),
        ("query_expansion", {"length": 8}),
        ("skip_words", []),
        ("similarity", "meanmaxsim"),
    ):
        with pytest.raises(ValueError, match=name):
            initial_params(params, BERT, head, head | {name: value}, new_head=False)
    prompts = {"prompts": {"query": "", "document": ""}}
    with pytest.raises(ValueError, match="query_prompt"):
        initial_params(params, BERT, head, head | prompts, new_head=False)
