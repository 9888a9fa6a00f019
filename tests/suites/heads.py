"""What every head must hold; a new head's test gives its sizes and a reference.

CASE = heads.HeadCase(settings, features, reference)

@pytest.mark.parametrize("holds", heads.HEAD)
def test_head(holds, tmp_path):
    holds(CASE, tmp_path)
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from scipy.sparse import issparse

import bert_jax
from bert_jax.checkpoints.export import save_huggingface
from bert_jax.checkpoints.native import write_checkpoint
from bert_jax.checkpoints.parameters import model_settings
from bert_jax.checkpoints.read import read_model
from bert_jax.checkpoints.transformers_config import format_of
from bert_jax.data.features import (
    HIDDEN,
    NO_LABEL,
    NO_VECTOR,
    ModelInput,
    RowShape,
    finetune_batches,
    unpack_rows,
)
from bert_jax.finetuning.step import make_finetune_step, make_predict_step, predict
from bert_jax.model import heads
from bert_jax.model.architecture import architecture_of
from bert_jax.model.config import pools_last
from bert_jax.sharding.mesh import BATCH_SPEC, batch_sharding, make_mesh
from bert_jax.sharding.rules import TASK_RULES, infer_shardings, stack_shardings
from bert_jax.tokenizers.stored import Layout
from bert_jax.tokenizers.tokenizer import load_tokenizer
from bert_jax.training.optimizer import Hyperparameters
from bert_jax.training.state import TrainState
from tests.helpers.corpora import with_layout, write_vocabulary
from tests.helpers.models import (
    assert_trees_equal,
    random_params,
    small_deberta_config,
    small_esm_config,
    small_longformer_config,
    small_model_config,
    small_modernbert_config,
    small_mpnet_config,
    small_xlnet_config,
)

# The vocabulary needs no padding, which exports leave out.
NUM_FEATURES, LENGTH, VOCAB = 13, 64, 128
CONFIG = small_model_config(VOCAB, num_layers=1, num_heads=2, dropout_rate=0.0)
ARCHITECTURES = {
    "modernbert": small_modernbert_config(VOCAB, num_heads=2),
    "mpnet": small_mpnet_config(VOCAB, num_heads=2, dropout_rate=0.0),
    "esm": small_esm_config(VOCAB, num_heads=2, mask_id=4),
    "deberta": small_deberta_config(VOCAB, num_heads=2, dropout_rate=0.0),
    "longformer": small_longformer_config(VOCAB, num_heads=2, dropout_rate=0.0, sep_id=7),
    "xlnet": small_xlnet_config(VOCAB, num_heads=2, dropout_rate=0.0),
}
"""The model configs of architectures other than BERT's."""
KEY = jax.random.key(2)


@dataclasses.dataclass(frozen=True, eq=False)
class HeadCase:
    """A head, and what is expected of it.

    Attributes:
      settings: as a checkpoint stores them: its name ("task"), "labels", and options.
      features: a batch with labels.
      reference: (outputs for each feature, their labels) -> the mean loss, in float64.
      label_shape: the shape of a label, which a task sets.
      is_exported: whether transformers or sentence-transformers has a class for it.
      config: of the encoder.
    """

    settings: Mapping
    features: Sequence[ModelInput]
    reference: Callable[[list[np.ndarray], list], float]
    label_shape: tuple[int, ...] | None = None
    is_exported: bool = True
    config: object = CONFIG

    @functools.cached_property
    def head(self) -> heads.Head:
        head = heads.find_head(self.settings)
        if self.label_shape is None:
            return head
        layout = dataclasses.replace(head.label_layout, shape=self.label_shape)
        return dataclasses.replace(head, label_layout=layout)

    @functools.cached_property
    def model(self):
        return heads.make_model(self.config, self.settings)

    @functools.cached_property
    def params(self) -> dict:
        rows = self.row_shape().build([], 1)
        return random_params(self.model, rows | unpack_rows(rows), std=0.02)

    @property
    def labels(self) -> list:
        return [feature.label for feature in self.features]

    def row_shape(self, packed: bool = True) -> RowShape:
        each = len(self.features[0].sequences)
        max_sequences = (8 if packed else 1) * each
        return RowShape(LENGTH, max_sequences, self.head.label_layout, 0, each)


@functools.cache
def predictor(case: HeadCase, devices: int = 1, **head_fields):
    """Returns a function from features to their outputs and mean loss."""
    head = dataclasses.replace(case.head, **head_fields)
    mesh = make_mesh(devices=jax.devices()[:devices])
    step, params = make_predict_step(case.model, mesh, head), stack(case.params)
    settings = {"shape": case.row_shape(), "num_rows": 4, "sharding": batch_sharding(mesh)}
    return lambda features: predict(step, params, head, features, **settings)[0]


def stack(tree, count: int = 1):
    """Returns a stack of equal trials."""
    return jax.tree.map(lambda leaf: np.stack([leaf] * count), tree)


@functools.cache  # Of each step, compiled once.
def build_update(
    case: HeadCase,
    *,
    packed: bool = True,
    rows_per_microbatch: int = 16,
    devices: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    num_trials: int = 1,
    class_weights: tuple[float, ...] = (),
):
    """Returns an SGD step, a function for its initial state, and its batch (rows, microbatches)."""
    mesh = make_mesh(fsdp=fsdp, tensor=tensor, devices=jax.devices()[:devices])
    head = dataclasses.replace(case.head, class_weights=class_weights)
    state = TrainState(np.zeros([], np.int32), case.params, optax.sgd(1.0).init(case.params))
    shardings = infer_shardings(state, mesh, (*TASK_RULES, *architecture_of(case.config).RULES))
    step = make_finetune_step(
        case.model,
        head,
        lambda values: optax.sgd(values.learning_rate),
        shardings,
        rows_per_microbatch,
        NUM_FEATURES,
    )
    (batch,) = finetune_batches(
        case.features,
        case.row_shape(packed),
        NamedSharding(mesh, P("trial", *BATCH_SPEC)),
        batch_size=NUM_FEATURES,
        rows_per_microbatch=rows_per_microbatch,
        seeds=[0] * num_trials,
        start=0,
        stop=1,
        is_compared=head.batch_loss is not None,
    )
    state = state.map_trials(functools.partial(stack, count=num_trials))
    shardings = shardings.map_trials(stack_shardings)
    return step, functools.partial(jax.device_put, state, shardings), batch


def numbers(*learning_rates: float, dropout_rate: float = 0.0) -> Hyperparameters:
    rates = [[rate, 0, 0, 1, dropout_rate] for rate in learning_rates]
    return Hyperparameters(*np.float32(rates).T)


def update(case: HeadCase, *, learning_rates=(1.0,), dropout_rate: float = 0.0, **settings):
    """Returns of each trial the loss of one batch and its gradients, and the microbatches."""
    num_trials = len(learning_rates)
    step, new_state, (rows, num_microbatches) = build_update(
        case, num_trials=num_trials, **settings
    )
    hyperparameters = numbers(*learning_rates, dropout_rate=dropout_rate)
    keys = jax.random.split(KEY, num_trials)
    after, metrics = step(new_state(), rows, num_microbatches, keys, hyperparameters)
    after, losses = jax.device_get((after.params, metrics["loss"]))
    moved = jax.tree.map(np.subtract, stack(case.params, num_trials), after)
    trials = [
        (float(losses[trial]), jax.tree.map(lambda leaf, trial=trial: leaf[trial], moved))
        for trial in range(num_trials)
    ]
    return trials, num_microbatches


def assert_same(one, other):
    """Compares losses and gradients of trials."""
    for (loss, gradients), (other_loss, other_gradients) in zip(one, other, strict=True):
        assert loss == pytest.approx(other_loss, abs=1e-5)
        for a, b in zip(*map(jax.tree.leaves, (gradients, other_gradients)), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def as_dense(output) -> np.ndarray:
    """Returns a head's output of a feature, which may be sparse, as a NumPy array."""
    return output.toarray() if issparse(output) else output


def loss_equals_float64(case: HeadCase, directory):
    """The mean loss of predictions equals the reference; other heads have none without a batch."""
    outputs, loss = predictor(case)(case.features)
    if case.head.batch_loss:
        assert loss is None
    else:
        assert loss == pytest.approx(case.reference(outputs, case.labels), rel=1e-5)


def packing_changes_no_prediction(case: HeadCase, directory):
    """Outputs in packed rows equal those of each feature alone, and have its length."""
    packed, _ = predictor(case)(case.features)
    for feature, one in zip(case.features, packed, strict=True):
        (alone,), _ = predictor(case)([feature])
        np.testing.assert_allclose(as_dense(one), as_dense(alone), atol=1e-5)
        if case.head.input_kind == "positions":
            size = len(case.settings["labels"]) or case.model.vector_size
            assert one.shape == (len(feature), size)


APART = {"packed": False, "rows_per_microbatch": 8, "devices": 4}


def update_depends_on_no_packing_microbatches_and_devices(case: HeadCase, directory):
    """Nor does the loss in training, which equals the reference."""
    packed, num_microbatches = update(case)
    apart, num_apart = update(case, **APART)
    assert (num_microbatches, num_apart) == (1, 2)
    assert_same(packed, apart)
    outputs, _ = predictor(case)(case.features)
    assert packed[0][0] == pytest.approx(case.reference(outputs, case.labels), rel=1e-5)
    # Something is learned, and of the encoder only where it is trained.
    gradients = packed[0][1]
    has_moved = any(np.any(leaf) for leaf in jax.tree.leaves(gradients["encoder"]))
    assert has_moved == case.head.trains_encoder
    assert any(np.any(leaf) for leaf in jax.tree.leaves(gradients))


def stacked_trials_equal_single_ones(case: HeadCase, directory):
    """Trials of several learning rates in one program are the same as each alone."""
    rates = (1.0, 0.25)
    stacked, _ = update(case, learning_rates=rates)
    for trial, rate in enumerate(rates):
        alone, _ = update(case, learning_rates=(rate,))
        assert_same([stacked[trial]], alone)


def save(case: HeadCase, directory):
    """Writes a checkpoint and returns its settings and tokenizer."""
    words = [f"w{number}" for number in range(VOCAB - 8)]
    pad_id = max(0, getattr(case.config, "position_offset", 0) - 1)  # As transformers has it.
    tokenizer = load_tokenizer(write_vocabulary(directory / "vocab.txt", words, pad_id))
    if getattr(case.config, "cls_last", False):
        tokenizer = with_layout(tokenizer, Layout(cls_last=True))
    if hasattr(case.config, "sep_id"):
        sep = tokenizer.id_to_token(case.config.sep_id)
        tokenizer = with_layout(tokenizer, Layout(2, False), sep=sep)
    settings = model_settings(case.config, case.params) | {"head": dict(case.settings)}
    write_checkpoint(directory / "saved", case.params, settings, tokenizer)
    return settings, tokenizer


def saved_head_predicts_the_same_when_loaded(case: HeadCase, directory):
    """The module that `load` builds of the settings has the outputs of training."""
    save(case, directory)
    model = bert_jax.load(directory / "saved")
    assert_trees_equal(model.params, case.params)
    shape = dataclasses.replace(case.row_shape(), max_sequences=len(case.features[0].sequences))
    rows = shape.build([[feature] for feature in case.features], NUM_FEATURES)
    batch = rows | unpack_rows(rows, pools_last(case.config))
    outputs = np.asarray(jax.jit(model.module.apply)({"params": model.params}, batch))
    expected, _ = predictor(case)(case.features)
    for row, feature, one in zip(outputs, case.features, expected, strict=True):
        is_position = case.head.input_kind == "positions"
        count = len(feature) if is_position else len(feature.sequences)
        found = case.head.feature_output(row[:count])
        np.testing.assert_allclose(as_dense(found), as_dense(one), atol=1e-5)


def exported_head_is_read_again(case: HeadCase, directory):
    """The tensors under transformers' names are the same parameters, and the settings the same."""
    settings, tokenizer = save(case, directory)
    if not case.is_exported:
        with pytest.raises(ValueError, match="has no head for"):
            save_huggingface(directory / "exported", case.params, settings, tokenizer)
        return
    save_huggingface(directory / "exported", case.params, settings, tokenizer)
    model = read_model(directory / "exported")
    assert_trees_equal(model.params, case.params)
    assert not model.report.unused
    assert model.settings["head"] == case.settings


HEAD = [
    pytest.param(each, id=each.__name__, marks=marks)
    for each, marks in (
        (loss_equals_float64, ()),
        (packing_changes_no_prediction, ()),
        (saved_head_predicts_the_same_when_loaded, ()),
        (exported_head_is_read_again, ()),
        (update_depends_on_no_packing_microbatches_and_devices, pytest.mark.slow),
        (stacked_trials_equal_single_ones, pytest.mark.slow),
    )
]
"""The properties of a head: functions of its case and an empty directory."""


def make_features(label: Callable, num_sequences: int = 1) -> list[ModelInput]:
    """Returns features of random tokens, with `label(number, length, rng)`."""
    rng, features = np.random.default_rng(0), []
    for number in range(NUM_FEATURES):
        sequences = tuple(
            rng.integers(5, VOCAB, rng.integers(3, 12), dtype=np.int32)
            for _ in range(num_sequences)
        )
        length = len(sequences[0])
        features.append(
            ModelInput(sequences, tuple(map(len, sequences)), label(number, length, rng))
        )
    return features


def nats(logits, labels) -> np.ndarray:
    """Returns -log softmax(logits)[label] of each, in float64."""
    logits, labels = np.asarray(logits, np.float64), np.asarray(labels)
    return np.logaddexp.reduce(logits, axis=-1) - logits[np.arange(len(labels)), labels]


def mean_nats(outputs, labels) -> float:
    return nats(np.stack(outputs), labels).mean()


def mean_binary_nats(outputs, labels) -> float:
    """BCEWithLogitsLoss: the mean over labels and examples."""
    probabilities = 1 / (1 + np.exp(-np.stack(outputs).astype(np.float64)))
    return -np.log(np.where(np.stack(labels) == 1, probabilities, 1 - probabilities)).mean()


def mean_square(outputs, labels) -> float:
    return np.mean((np.ravel(outputs).astype(np.float64) - labels) ** 2)


def mean_nats_of_tags(outputs, labels) -> float:
    """The mean over all labeled positions, not over features."""
    outputs, labels = np.concatenate(outputs), np.concatenate(labels)
    return nats(outputs[labels >= 0], labels[labels >= 0]).mean()


def mean_nats_of_spans(outputs, labels) -> float:
    """The mean of first and last token, each among the positions of the feature."""
    losses = [nats(logits.T, label) for logits, label in zip(outputs, labels, strict=True)]
    return np.mean(losses)


def in_batch_loss(vectors, labels, temperature: float) -> float:
    """Returns the sum over queries in float64, from the `ModelInput.label` of each example."""
    vectors, total = np.float64(vectors), 0.0
    count = vectors.shape[1] - 1
    for query, label in enumerate(labels):
        right = {label[0], *label[count:]} - {NO_LABEL}
        logits = [vectors[query, 0] @ vectors[query, 1] / temperature]
        for other, passages in enumerate(labels):
            for place, number in enumerate(passages[:count], start=1):
                if number not in right:
                    logits.append(vectors[query, 0] @ vectors[other, place] / temperature)
        total += np.logaddexp.reduce(logits) - logits[0]
    return total


def mean_in_batch_loss(outputs, labels) -> float:
    return in_batch_loss(outputs, labels, 0.05) / len(labels)


def max_similarity(query: np.ndarray, passage: np.ndarray) -> float:
    """Returns the sum, over the tokens of a query, of the largest product with a passage's."""
    return (query @ passage.T).max(axis=1).sum() if len(passage) else 0.0


def mean_late_interaction_loss(outputs, labels) -> float:
    """Returns the mean over queries in float64, with MaxSim in place of dot products."""
    texts = [
        np.split(np.float64(tokens), np.cumsum(list(map(len, feature.sequences)))[:-1])
        for tokens, feature in zip(outputs, MULTI_VECTOR_FEATURES, strict=True)
    ]
    texts = [[tokens[tokens.any(axis=1)] for tokens in example] for example in texts]
    total = 0.0
    for (query, positive, _), label in zip(texts, labels, strict=True):
        right = {label[0], *label[2:]} - {NO_LABEL}
        logits = [max_similarity(query, positive)]
        for example, numbers in zip(texts, labels, strict=True):
            for passage, number in zip(example[1:], numbers, strict=False):
                if number not in right:
                    logits.append(max_similarity(query, passage))
        total += np.logaddexp.reduce(logits) - logits[0]
    return total / len(labels)


def with_token_kinds(feature: ModelInput) -> ModelInput:
    """Returns the feature with three hidden tokens after its query, and passages with few vectors.

    Some tokens of passages have none, and so have all of a passage.
    """
    query, *passages = feature.sequences
    query = np.append(query, np.int32([4, 4, 4]))
    kinds = [np.where(np.arange(len(query)) < len(query) - 3, 0, HIDDEN)]
    kinds += [np.where(passage % 4 == 3, NO_VECTOR, 0) for passage in passages]
    lengths = (len(query), *map(len, passages))
    return dataclasses.replace(
        feature, sequences=(query, *passages), second_starts=lengths, token_kinds=tuple(kinds)
    )


def mean_sparse_in_batch_loss(outputs, labels) -> float:
    return in_batch_loss([each.toarray() for each in outputs], labels, 1.0) / len(labels)


def passages_of(number, length, rng):
    """Each two queries have the same passage; some passages answer other queries, too."""
    own = number // 2
    others = [other for other in range(2, 5) if other != own] if 2 <= own < 5 else []
    return np.array([own, 100 + number, *others], np.int32)


def tags_of(number, length, rng):
    return rng.integers(NO_LABEL, 4, length, dtype=np.int32)


MULTI_VECTOR_FEATURES = [*map(with_token_kinds, make_features(passages_of, num_sequences=3))]
TAGS = ["O", "B-X", "I-X", "B-Y"]
CASES = {
    "classification": HeadCase(
        {"task": "classification", "labels": ["no", "maybe", "yes"]},
        make_features(lambda number, length, rng: number % 3),
        mean_nats,
    ),
    "multi_label": HeadCase(
        {"task": "multi_label", "labels": ["a", "b", "c"]},
        make_features(
            lambda number, length, rng: np.array([number % 2, number % 3 == 0, 1], np.float32)
        ),
        mean_binary_nats,
        label_shape=(3,),
    ),
    "regression": HeadCase(
        {"task": "regression", "labels": ["score"]},
        make_features(lambda number, length, rng: number / 7),
        mean_square,
    ),
    "multiple_choice": HeadCase(
        {"task": "multiple_choice", "labels": ["score"]},
        make_features(lambda number, length, rng: number % 3, num_sequences=3),
        mean_nats,
    ),
    "tagging": HeadCase(
        {"task": "tagging", "labels": TAGS}, make_features(tags_of), mean_nats_of_tags
    ),
    "tagging with a BiLSTM": HeadCase(
        {"task": "tagging", "labels": TAGS, "lstm_size": 6},
        make_features(tags_of),
        mean_nats_of_tags,
        is_exported=False,
    ),
    "feature_based": HeadCase(
        {"task": "feature_based", "labels": TAGS, "features": "weighted_sum", "lstm_size": 6},
        make_features(tags_of),
        mean_nats_of_tags,
        is_exported=False,
    ),
    "span": HeadCase(
        {"task": "span", "labels": ["start", "end"]},
        make_features(lambda number, length, rng: (1, length - 1)),
        mean_nats_of_spans,
    ),
    "embedding": HeadCase(
        {
            "task": "embedding",
            "labels": [],
            "pooling": "mean",
            "normalize": True,
            "max_seq_length": 16,
        },
        make_features(passages_of, num_sequences=3),
        mean_in_batch_loss,
        label_shape=(4,),
    ),
    "multi_vector": HeadCase(
        {
            "task": "multi_vector",
            "labels": [],
            "projections": [{"size": 12, "has_bias": False, "activation": "identity"}],
            "normalize": True,
            "max_seq_length": 16,
            "max_query_length": 8,
            "query_expansion": {"strategy": "fixed", "length": 8, "attend": False, "token": None},
            "skip_words": [],
            "prompts": {"query": "", "document": ""},
        },
        MULTI_VECTOR_FEATURES,
        mean_late_interaction_loss,
        label_shape=(4,),
    ),
    "sparse_embedding": HeadCase(
        {"task": "sparse_embedding", "labels": [], "max_seq_length": 16},
        make_features(passages_of, num_sequences=3),
        mean_sparse_in_batch_loss,
        label_shape=(4,),
    ),
}
"""A case of each of `heads.HEADS`."""


def on_architecture(case: HeadCase, name: str) -> HeadCase:
    """Returns the case of a head on another architecture than BERT's."""
    config, form = ARCHITECTURES[name], case.head.transformers
    has_class = bool(form) and form.class_suffix in ("", *format_of(config).heads)
    is_exported = case.is_exported and has_class
    settings = dict(case.settings)
    if "query_expansion" in settings:  # Few architectures can hide the masks after a query.
        settings["query_expansion"] = None
    return dataclasses.replace(case, config=config, settings=settings, is_exported=is_exported)
