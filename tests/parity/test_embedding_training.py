"""Twenty steps of training for search against the trainers of sentence-transformers.

Both sides start from the same weights, read the same texts with their own tokenizers, and train
without dropout on the same batches: `train_ours` with `bert_jax.finetune`, and `train_theirs`.
"""

import pathlib
import random

import numpy as np
import pytest
from safetensors.numpy import load_file

from bert_jax.checkpoints.export import save_huggingface
from bert_jax.checkpoints.read import read_model
from bert_jax.configs.finetune import retrieval as config_file
from bert_jax.data.features import batch_indices, steps_per_epoch
from bert_jax.finetune import train_and_evaluate
from tests.helpers.corpora import WORDS, write_vocabulary
from tests.helpers.json_lines import write_lines

datasets = pytest.importorskip("datasets")
torch = pytest.importorskip("torch")
of_vectors = pytest.importorskip("sentence_transformers.sentence_transformer")
losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
of_sparse = pytest.importorskip("sentence_transformers.sparse_encoder")
sparse_losses = pytest.importorskip("sentence_transformers.sparse_encoder.losses")
sparse_modules = pytest.importorskip("sentence_transformers.sparse_encoder.modules")
samplers = pytest.importorskip("sentence_transformers.base.sampler")

EXAMPLES, BATCH_SIZE, EPOCHS = 29, 8, 5  # An epoch has four batches; the last has 5 examples.
STEPS = EPOCHS * steps_per_epoch(EXAMPLES, BATCH_SIZE)
LENGTH = 16
SIZES, WEIGHTS = (32, 12, 4), (1.0, 0.5, 0.25)  # Of Matryoshka; the first is the hidden size.
LEARNING_RATE, WARMUP_FRACTION = 1e-3, 0.2


def write_encoder(directory: pathlib.Path, class_name: str = "BertModel") -> pathlib.Path:
    """Writes a small model of transformers, with all parameters random, and without dropout."""
    import transformers

    write_vocabulary(directory / "vocab.txt")
    config = transformers.BertConfig(
        vocab_size=len((directory / "vocab.txt").read_text().split()),
        hidden_size=SIZES[0],
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    model = getattr(transformers, class_name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return directory


def make_lines(num_negatives: int) -> list[dict]:
    """Returns queries of 1 to 8 and passages of 1 to 20 words, some longer than `LENGTH` tokens.

    All differ: sentence-transformers takes a passage that occurs twice in a batch for a negative,
    bert_jax does not.
    """
    rng, used = random.Random(0), set()

    def text(longest):
        while (words := " ".join(rng.choices(WORDS, k=rng.randint(1, longest)))) in used:
            pass
        used.add(words)
        return words

    return [
        {
            "query": text(8),
            "positive": text(20),
            "negatives": [text(20) for _ in range(num_negatives)],
        }
        for _ in range(EXAMPLES)
    ]


def train_ours(
    argument: str, changes: dict, model: pathlib.Path, lines: list[dict], workdir: pathlib.Path
) -> dict[str, np.ndarray]:
    """Trains with configs/finetune/retrieval.py:`argument`; returns the parameters as exported."""
    config = config_file.get_config(argument)
    config.init_from = str(model)
    config.data.train = str(write_lines(workdir.with_suffix(".jsonl"), lines))
    config.data.num_negatives = len(lines[0]["negatives"])
    config.data.max_query_length = config.max_seq_length = LENGTH
    config.batch_size, config.num_epochs = BATCH_SIZE, float(EPOCHS)
    config.learning_rate, config.warmup_fraction = LEARNING_RATE, WARMUP_FRACTION
    config.decay_from, config.save_training_state = "warmup_end", False
    config.update_from_flattened_dict(changes)
    train_and_evaluate(config.lock(), workdir)
    trained = read_model(workdir)
    save_huggingface(workdir / "exported", trained.params, trained.settings, trained.tokenizer)
    return load_file(workdir / "exported/model.safetensors")


def train_theirs(trainer_class, arguments_class, model, loss, lines, workdir) -> None:
    """Trains `model` as `train_ours` does: the optimizer is AdamW on both sides."""

    class OurOrder(samplers.DefaultBatchSampler):
        def __iter__(self):
            first = self.epoch * len(self)
            for step in range(first, first + len(self)):
                yield batch_indices(EXAMPLES, BATCH_SIZE, 0, step).tolist()

    columns = {name: [line[name] for line in lines] for name in ("query", "positive")}
    for number in range(len(lines[0]["negatives"])):
        columns[f"negative_{number}"] = [line["negatives"][number] for line in lines]
    arguments = arguments_class(
        str(workdir),
        per_device_train_batch_size=BATCH_SIZE,
        batch_sampler=OurOrder,
        num_train_epochs=EPOCHS,
        learning_rate=LEARNING_RATE,
        warmup_steps=WARMUP_FRACTION,
        weight_decay=0.01,
        adam_epsilon=1e-6,
        max_grad_norm=1.0,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
    )
    trainer = trainer_class(model, arguments, datasets.Dataset.from_dict(columns), loss=loss)
    trainer.train()
    assert trainer.state.global_step == STEPS


def check_parameters(before, actual, expected) -> None:
    """Raises AssertionError unless the parameters of both sides have moved to the same values.

    The bias of keys changes no softmax: its gradient is rounding, which Adam magnifies.
    """
    errors = {name: np.abs(actual[name] - expected[name]).max() for name in expected}
    others = [name for name in expected if not name.endswith("key.bias")]
    moved = min(np.abs(actual[name] - before[name]).max() for name in others)
    worst, worst_of_others = max(errors.values()), max(errors[name] for name in others)
    print(f"moved {moved:.1e} or more; end {worst:.1e} apart, without keys {worst_of_others:.1e}")
    assert moved > 2e-3 and worst < 1e-5 and worst_of_others < 1e-6


IN_BATCH = losses.MultipleNegativesRankingLoss
MATRYOSHKA = {"loss.matryoshka_sizes": SIZES, "loss.matryoshka_weights": WEIGHTS}


def matryoshka(model):
    return losses.MatryoshkaLoss(model, IN_BATCH(model), SIZES, WEIGHTS)


@pytest.mark.parametrize(
    ("num_negatives", "changes", "make_loss"),
    [(0, {}, IN_BATCH), (1, {}, IN_BATCH), (1, MATRYOSHKA, matryoshka)],
    ids=["in batch", "hard negative", "Matryoshka"],
)
def test_a_bi_encoder_ends_with_the_same_parameters(num_negatives, changes, make_loss, tmp_path):
    lines, directory = make_lines(num_negatives), write_encoder(tmp_path)
    transformer = modules.Transformer(str(directory), max_seq_length=LENGTH)
    pooling = modules.Pooling(transformer.get_embedding_dimension(), "mean")
    model = of_vectors.SentenceTransformer(modules=[transformer, pooling], device="cpu")
    actual = train_ours("bi_encoder", changes, directory, lines, tmp_path / "ours")
    train_theirs(
        of_vectors.SentenceTransformerTrainer,
        of_vectors.SentenceTransformerTrainingArguments,
        model,
        make_loss(model),
        lines,
        tmp_path / "theirs",
    )
    before = load_file(directory / "model.safetensors")
    expected = {name: each.detach().numpy() for name, each in transformer.model.named_parameters()}
    # Neither side trains the pooler, and ours leaves it out.
    for name in expected.keys() - actual.keys():
        np.testing.assert_array_equal(expected.pop(name), before[name])
    check_parameters(before, actual, expected)


def test_a_dense_layer_of_the_weights_is_trained(tmp_path):
    lines, directory, start = make_lines(1), write_encoder(tmp_path), tmp_path / "start"
    transformer = modules.Transformer(str(directory), max_seq_length=LENGTH)
    pooling = modules.Pooling(transformer.get_embedding_dimension(), "mean")
    dense = modules.Dense(SIZES[0], 12, bias=False, activation_function=torch.nn.Identity())
    parts = [transformer, pooling, dense, modules.Normalize()]
    model = of_vectors.SentenceTransformer(modules=parts, device="cpu")
    model.save(str(start))
    before = {"weight": dense.linear.weight.detach().numpy().copy()}
    train_ours("bi_encoder", {"similarity.vector_size": 12}, start, lines, tmp_path / "ours")
    train_theirs(
        of_vectors.SentenceTransformerTrainer,
        of_vectors.SentenceTransformerTrainingArguments,
        model,
        IN_BATCH(model),
        lines,
        tmp_path / "theirs",
    )
    actual = load_file(tmp_path / "ours/exported/2_Dense/model.safetensors")["linear.weight"]
    expected = dense.linear.weight.detach().numpy()
    check_parameters(before, {"weight": actual}, {"weight": expected})


def test_a_sparse_encoder_ends_with_the_same_parameters(tmp_path):
    lines, directory = make_lines(1), write_encoder(tmp_path, "BertForMaskedLM")
    transformer = modules.Transformer(
        str(directory), max_seq_length=LENGTH, transformer_task="fill-mask"
    )
    pooling = sparse_modules.SpladePooling("max")
    model = of_sparse.SparseEncoder(modules=[transformer, pooling], device="cpu")
    in_batch = sparse_losses.SparseMultipleNegativesRankingLoss(model)
    loss = sparse_losses.SpladeLoss(
        model, in_batch, query_regularizer_weight=0.05, document_regularizer_weight=0.03
    )
    changes = {"loss.query_flops_weight": 0.05, "loss.passage_flops_weight": 0.03}
    actual = train_ours("bi_encoder,splade", changes, directory, lines, tmp_path / "ours")
    train_theirs(
        of_sparse.SparseEncoderTrainer,
        of_sparse.SparseEncoderTrainingArguments,
        model,
        loss,
        lines,
        tmp_path / "theirs",
    )
    expected = {name: each.detach().numpy() for name, each in transformer.model.named_parameters()}
    check_parameters(load_file(directory / "model.safetensors"), actual, expected)
