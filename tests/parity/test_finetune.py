"""Fine-tuning against transformers and torch, batch by batch (`make parity`)."""

import dataclasses
import json
import pathlib
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict
from safetensors.numpy import load_file

from bert_jax.checkpoints.export import save_huggingface
from bert_jax.checkpoints.read import read_model
from bert_jax.data.features import NO_LABEL, ModelInput, RowShape, finetune_batches, steps_per_epoch
from bert_jax.finetuning.step import make_finetune_step
from bert_jax.model.architecture import config_from_settings
from bert_jax.model.bert import RULES
from bert_jax.model.heads import HEADS, label_weights, make_model, with_positive_weights
from bert_jax.sharding.mesh import BATCH_SPEC, make_mesh
from bert_jax.sharding.rules import TASK_RULES, infer_shardings, stack_shardings
from bert_jax.tokenizers.export import transformers_files
from bert_jax.training.optimizer import Hyperparameters, make_optimizer, make_schedule
from bert_jax.training.state import TrainState
from tests.helpers.corpora import train_bpe
from tests.helpers.models import write_torch_model

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

EXAMPLES, LENGTH = 21, 16
CONFIG = ConfigDict(
    {
        "batch_size": 4,
        "num_epochs": 4.0,
        "learning_rate": 1e-3,
        "warmup_fraction": 0.1,
        "weight_decay": 0.01,
        "clip_norm": 1.0,
    }
)

# Positions begin at 2, and there is one segment.
ROBERTA = {"vocab_size": 300, "max_position_embeddings": 18, "type_vocab_size": 1}
ELECTRA = {"embedding_size": 8}


def write_byte_pairs(directory: pathlib.Path) -> None:
    """Writes a tokenizer of RoBERTa's kind in place of the WordPiece vocabulary."""
    (directory / "vocab.txt").unlink()
    for name, content in transformers_files(train_bpe(directory, "old king ").stored, 16).items():
        content = content if isinstance(content, str) else json.dumps(content)
        (directory / name).write_text(content)


def make_features(kind: str) -> list[ModelInput]:
    rng = np.random.default_rng(0)
    features = []
    for number in range(EXAMPLES):
        # For a span of one length, since transformers' softmax is over padding, too.
        length = LENGTH if kind == "span" else int(rng.integers(3, LENGTH + 1))
        label = {
            "classification": number % 3,
            "tagging": rng.integers(NO_LABEL, 5, length, dtype=np.int32),
            "span": tuple(sorted(rng.integers(0, length, 2).tolist())),
        }[kind]
        tokens = rng.integers(5, 40, length, dtype=np.int32)
        features.append(ModelInput((tokens,), (int(rng.integers(1, length)),), label))
    return features


def ours(model, features) -> dict:
    """Returns the parameters after all epochs on packed rows, two per microbatch."""
    head = model.settings["head"]
    network = make_model(
        dataclasses.replace(config_from_settings(model.settings), dropout_rate=0.0), head
    )
    num_steps = round(CONFIG.num_epochs * steps_per_epoch(EXAMPLES, CONFIG.batch_size))
    schedule = make_schedule(
        CONFIG.learning_rate, num_steps, round(CONFIG.warmup_fraction * num_steps)
    )
    optimizer = make_optimizer("adamw", schedule)
    mesh = make_mesh(devices=jax.devices()[:1])
    state = TrainState(np.int32(0), model.params, optimizer.init(model.params))
    shardings = infer_shardings(state, mesh, (*TASK_RULES, *RULES))
    state = state.map_trials(lambda tree: jax.tree.map(lambda leaf: np.asarray(leaf)[None], tree))
    state = jax.device_put(state, shardings.map_trials(stack_shardings))
    kind = HEADS[head["task"]]
    batch_size = CONFIG.batch_size
    update = make_finetune_step(network, kind, lambda _: optimizer, shardings, 2, batch_size)
    batches = finetune_batches(
        features,
        RowShape(LENGTH, 3, HEADS[head["task"]].label_layout, 0),
        NamedSharding(mesh, P("trial", *BATCH_SPEC)),
        batch_size=CONFIG.batch_size,
        rows_per_microbatch=2,
        seeds=[0],
        start=0,
        stop=num_steps,
    )
    keys, numbers = jax.random.split(jax.random.key(0), 1), Hyperparameters(*np.zeros((5, 1)))
    for rows, num_microbatches in batches:
        state, _ = update(state, rows, num_microbatches, keys, numbers)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[0], state.params)


def train_reference(model, features, kind: str, monkeypatch) -> None:
    """Trains `model` with the loop of benchmarks/finetune.py, in our order of examples."""
    import torch
    import transformers_side

    def collate(chosen):
        batch = {
            "input_ids": np.full((len(chosen), LENGTH), model.config.pad_token_id),
            "attention_mask": np.zeros((len(chosen), LENGTH), int),
            "token_type_ids": np.zeros((len(chosen), LENGTH), int),
        }
        for row, feature in enumerate(chosen):
            length = len(feature)
            batch["input_ids"][row, :length] = feature.sequences[0]
            batch["attention_mask"][row, :length] = 1
            segment = min(1, model.config.type_vocab_size - 1)  # RoBERTa has one.
            batch["token_type_ids"][row, feature.second_starts[0] : length] = segment
        if kind == "tagging":
            batch["labels"] = np.full((len(chosen), LENGTH), -100)
            for row, feature in enumerate(chosen):
                batch["labels"][row, : len(feature)] = np.where(
                    feature.label == NO_LABEL, -100, feature.label
                )
        elif kind == "span":
            starts, ends = np.array([feature.label for feature in chosen]).T
            batch |= {"start_positions": starts, "end_positions": ends}
        else:
            batch["labels"] = np.array([feature.label for feature in chosen])
        return {name: torch.tensor(values) for name, values in batch.items()}

    epochs = iter(range(round(CONFIG.num_epochs)))

    def our_order(count):
        return torch.tensor(np.random.default_rng((0, next(epochs))).permutation(count))

    monkeypatch.setattr(torch, "randperm", our_order)
    transformers_side.train(model, collate, features, CONFIG)


@pytest.mark.parametrize(
    ("architecture", "kind", "settings"),
    [
        ("BertForSequenceClassification", "classification", {"num_labels": 3}),
        ("BertForTokenClassification", "tagging", {"num_labels": 5}),
        ("BertForQuestionAnswering", "span", {}),
        ("RobertaForSequenceClassification", "classification", ROBERTA | {"num_labels": 3}),
        ("ElectraForSequenceClassification", "classification", ELECTRA | {"num_labels": 3}),
    ],
)
def test_the_same_batches_lead_to_the_same_parameters(
    architecture, kind, settings, tmp_path, monkeypatch
):
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = write_torch_model(tmp_path, architecture, std=0.05, **settings, **no_dropout)
    if architecture.startswith("Roberta"):
        write_byte_pairs(tmp_path)
    features, read = make_features(kind), read_model(tmp_path)
    before = load_file(tmp_path / "model.safetensors")

    actual = ours(read, features)
    save_huggingface(tmp_path / "ours", actual, read.settings, read.tokenizer)
    train_reference(model, features, kind, monkeypatch)
    actual = load_file(tmp_path / "ours" / "model.safetensors")
    expected = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    assert actual.keys() == before.keys()
    # The bias of a span's head changes no softmax: its gradient is rounding, which Adam magnifies;
    # in the layers below, what shifts all logits does the same, less.
    compared = actual.keys() - {"qa_outputs.bias"}
    worst = max(float(np.abs(actual[name] - expected[name]).max()) for name in compared)
    moved = max(float(np.abs(actual[name] - before[name]).max()) for name in actual)
    print(
        f"{architecture}: parameters moved by up to {moved:.3f}, and end at most {worst:.1e} apart"
    )
    assert moved > 0.005 and worst < (2e-5 if kind == "span" else 1e-6)


@pytest.mark.parametrize("kind", ["classification", "tagging", "multi_label"])
def test_losses_equal_torch(kind):
    """CrossEntropyLoss(weight), and BCEWithLogitsLoss for several labels per text."""
    import torch

    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (5, 7, 4)).astype(np.float32)
    labels = rng.integers(NO_LABEL if kind == "tagging" else 0, 4, (5, 7), dtype=np.int32)
    weights = (0.2, 1.0, 3.0, 0.5)
    head = HEADS[kind]
    if kind == "multi_label":
        labels = rng.integers(0, 2, logits.shape).astype(np.float32)
        head = with_positive_weights(head, weights)
        function = torch.nn.BCEWithLogitsLoss(pos_weight=torch.tensor(weights))
        loss = function(torch.tensor(logits), torch.tensor(labels))
    else:
        head = dataclasses.replace(head, class_weights=weights)
        function = torch.nn.CrossEntropyLoss(torch.tensor(weights), ignore_index=NO_LABEL)
        loss = function(
            torch.tensor(logits).reshape(-1, 4), torch.tensor(labels).reshape(-1).long()
        )
    rows = {"labels": labels, "weights": np.ones((5, 7), np.float32)}
    counts = label_weights(head, rows)
    ours = np.sum(head.loss(logits, rows) * counts) / np.sum(counts)
    assert ours == pytest.approx(float(loss), rel=1e-6)
