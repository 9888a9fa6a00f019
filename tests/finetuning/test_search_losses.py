"""Losses of bi-encoders and cross-encoders in the step: on any devices, in any microbatches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.configs.finetune import retrieval as config_file
from bert_jax.data.features import LabelLayout, RowShape, unpack_rows
from bert_jax.finetuning.finetune_setup import check_against_weights, check_batch_is_compared
from bert_jax.model.architecture import config_to_settings
from bert_jax.model.heads import CLASSIFICATION, EMBEDDING, Head
from bert_jax.model.pooling import tokens_of_sequences
from bert_jax.tasks.retrieval_losses import (
    LOSSES,
    MULTI_VECTOR_LOSSES,
    find_loss,
    head_with_loss,
)
from tests.helpers.models import small_model_config
from tests.suites import heads
from tests.suites.heads import LENGTH, NUM_FEATURES, HeadCase, assert_same, update

GUIDE_SIZE = 5
NUM_TEXTS = {"pair": 2, "class": 1}  # Of each example; of the other kinds of labels 3.
HEADS = {
    "bi_encoder": heads.heads.EMBEDDING,
    "multi_vector": heads.heads.MULTI_VECTOR,
    "bi_encoder,splade": heads.heads.SPARSE_EMBEDDING,
    "cross_encoder": heads.heads.CROSS_ENCODER,
}
SETTINGS = {
    "bi_encoder": heads.CASES["embedding"].settings,
    "multi_vector": heads.CASES["multi_vector"].settings,
    "bi_encoder,splade": heads.CASES["sparse_embedding"].settings,
    "cross_encoder": {"task": "multiple_choice", "labels": ["score"], "max_query_length": 8},
}


@dataclasses.dataclass(frozen=True, eq=False)
class LossCase(HeadCase):
    """A head with another loss, and vectors of a guide where it needs them."""

    loss_head: Head | None = None

    @property
    def num_texts(self):
        return len(self.features[0].sequences)

    @property
    def head(self):
        return self.loss_head

    def row_shape(self, packed=True):
        shape = super().row_shape(packed)
        if not self.head.takes_guide:
            return shape
        layout = LabelLayout(dtype=np.float32, shape=(self.num_texts, GUIDE_SIZE))
        return dataclasses.replace(shape, teacher_layout=layout)


def label_of(kind, number, num_passages, rng):
    """Returns a label of the `kind` of a `TrainingLoss`."""
    return {
        "pair": number % 2,
        "class": number % 3,
        "passages": np.array([number, 100 + number], np.int32),
        "first": 0,
        "relevance": rng.integers(0, 3, num_passages).astype(np.float32),
        "teacher_scores": rng.normal(size=num_passages).astype(np.float32),
    }[kind]


@functools.cache
def make_case(role, **fields) -> LossCase:
    recipe = "bi_encoder,colbert" if role == "multi_vector" else role
    config = config_file.get_config(recipe)
    config.loss.update(fields)
    loss = find_loss(config)
    if "temperature" in loss.settings:
        config.similarity.temperature = 0.5  # Gradients of about 1.
    rng, num_texts = np.random.default_rng(1), NUM_TEXTS.get(loss.labels, 3)
    if role == "cross_encoder" and loss.labels == "pair":
        num_texts = 1
    num_passages = num_texts - (role != "cross_encoder")
    features = [
        dataclasses.replace(feature, teacher_outputs=rng.normal(size=(num_texts, GUIDE_SIZE)))
        for feature in heads.make_features(
            lambda number, length, rng: label_of(loss.labels, number, num_passages, rng), num_texts
        )
    ]
    if role == "multi_vector":
        config.data.max_query_length = 15
        features = [*map(heads.with_token_kinds, features)]
    longest = max(np.size(feature.label) for feature in features)
    head = head_with_loss(HEADS[role], loss, config, longest)
    return LossCase(SETTINGS[role], features, lambda *_: 0.0, loss_head=head)


def loss_of_whole_batch(case: LossCase):
    """Returns the mean loss and its gradients: each feature in a row, all at once, no cache."""
    row, count = case.row_shape(), case.num_texts
    shape = RowShape(LENGTH, count, row.label_layout, 0, count, row.teacher_layout)
    rows = shape.build([[feature] for feature in case.features], NUM_FEATURES)
    batch = rows | unpack_rows(rows)

    def mean(params):
        outputs = case.model.apply({"params": params}, batch)
        if case.head.input_kind == "positions" and not case.head.loss:
            start, _, end = jnp.moveaxis(rows["sequence_bounds"], -1, 0)
            gather = functools.partial(tokens_of_sequences, max_tokens=15)
            outputs = jax.vmap(gather)(outputs, start, end - start)
        if case.head.loss:
            return jnp.mean(case.head.loss(outputs, rows))
        # One example per row.
        examples = {name: rows[name][:, 0] for name in rows if name.startswith("teacher")}
        examples |= {"labels": rows["labels"][:, 0], "weights": rows["weights"][:, 0]}
        examples |= {"step": 0.0, "num_steps": 1.0}
        return case.head.batch_loss(outputs, examples) / NUM_FEATURES

    return jax.device_get(jax.jit(jax.value_and_grad(mean))(case.params))


CASES = [
    ("cross_encoder", {"name": "lambda"}),  # Compares the scores of a batch.
    (
        "bi_encoder,splade",
        {"query_flops_weight": 0.2, "passage_flops_weight": 0.1, "flops_warmup_fraction": 0.0},
    ),
    ("bi_encoder", {"symmetric": True}),
    ("bi_encoder", {"matryoshka_sizes": (32, 8), "matryoshka_weights": (1.0, 0.5)}),
]
CASES += [
    (role, {"name": name})
    for role, losses in (LOSSES | {"multi_vector": MULTI_VECTOR_LOSSES}).items()
    for name in losses
    if name != "list_softmax" and (role, {"name": name}) not in CASES  # The head's own.
]


@pytest.mark.parametrize(
    ("role", "fields"),
    [
        pytest.param(*case, marks=pytest.mark.slow if index < 1 else pytest.mark.exhaustive)
        for index, case in enumerate(CASES)
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_update_equals_the_gradients_of_the_whole_batch(role, fields):
    case = make_case(role, **fields)
    (found,), num_microbatches = update(case, packed=False, devices=8, rows_per_microbatch=8)
    assert num_microbatches == 2
    assert_same([found], [loss_of_whole_batch(case)])
    assert any(np.any(leaf) for leaf in jax.tree.leaves(found[1]["encoder"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "role", ["bi_encoder", pytest.param("multi_vector", marks=pytest.mark.exhaustive)]
)
def test_one_microbatch_whose_rows_have_several_examples_has_these_gradients(role):
    case = make_case(role)
    found, num_microbatches = update(case, devices=8, rows_per_microbatch=8)
    assert num_microbatches == 1 and len(case.row_shape().pack(case.features)) < NUM_FEATURES
    assert_same(found, [loss_of_whole_batch(case)])


def test_a_batch_of_one_is_an_error_if_the_loss_compares_examples():
    config = config_file.get_config("bi_encoder,runlocal")
    config.batch_size = 1
    check_batch_is_compared(config, CLASSIFICATION)
    with pytest.raises(ValueError, match="batch_size=1"):
        check_batch_is_compared(config, EMBEDDING)


def test_a_matryoshka_size_above_that_of_the_vectors_is_an_error():
    config = config_file.get_config("bi_encoder,runlocal")
    config.loss.matryoshka_sizes = (16, 128)
    config.max_seq_length = 32
    settings = {"architecture": config_to_settings(small_model_config())}
    with pytest.raises(ValueError, match=r"matryoshka_sizes=\(16, 128\)"):
        check_against_weights(config, settings)
    config.similarity.vector_size = 128
    check_against_weights(config, settings)
    config.loss.matryoshka_sizes = (16, 129)
    with pytest.raises(ValueError, match=r"similarity\.vector_size"):
        check_against_weights(config, settings)
