"""KerasHub's side of the benchmarks, on its JAX backend; see `make .venv-keras/installed`.

What a user of KerasHub gets: its model classes as they are (the feed-forward layers have the
approximate GELU), Keras's own AdamW, and for fine-tuning and vectors its tokenizer and
preprocessors, `fit` and `predict`. Weights are random, or read from a directory in transformers'
format by `from_preset`. TensorFlow, which KerasHub requires and imports, only shuffles examples.
"""

import collections
import os
import time
from typing import NamedTuple

os.environ["KERAS_BACKEND"] = "jax"  # Keras reads it once, when it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import keras
import keras_hub
import numpy as np
import tensorflow as tf

from bert_jax.model.config import BertConfig


class State(NamedTuple):
    """The variables of a model and its optimizer, as Keras lists them."""

    trainable: list[jax.Array]
    non_trainable: list[jax.Array]  # Seeds of the dropout layers.
    optimizer: list[jax.Array]


def masked_lm(config: BertConfig, dtype: str) -> keras_hub.models.BertMaskedLM:
    """Returns a masked-LM model with random float32 weights that computes in `dtype`."""
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=config.vocab_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        hidden_dim=config.hidden_size,
        intermediate_dim=config.intermediate_size,
        dropout=config.dropout_rate,
        max_sequence_length=config.max_position_embeddings,
        num_segments=config.type_vocab_size,
        dtype="float32" if dtype == "float32" else f"mixed_{dtype}",
    )
    return keras_hub.models.BertMaskedLM(backbone)


def make_optimizer(learning_rate) -> keras.optimizers.AdamW:
    """Returns AdamW with BERT's settings; the rate is a number or a schedule of Keras."""
    optimizer = keras.optimizers.AdamW(
        learning_rate, weight_decay=0.01, epsilon=1e-6, global_clipnorm=1.0
    )
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    return optimizer


def make_pretrain_step(config: BertConfig, dtype: str):
    """Returns a state and the jitted (state, batch) -> (state, loss), which donates the state.

    The loss is the mean over the masked positions. There is no next-sentence prediction, for which
    KerasHub has no head, so XLA leaves out the pooler.
    """
    model = masked_lm(config, dtype)
    optimizer = make_optimizer(1e-4)
    optimizer.build(model.trainable_variables)
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss_fn(trainable, non_trainable, batch):
        inputs = {name: x for name, x in batch.items() if name != "targets"}
        logits, non_trainable = model.stateless_call(
            trainable, non_trainable, inputs, training=True
        )
        return loss_function(batch["targets"], logits), non_trainable

    def update_step(state, batch):
        value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, non_trainable), gradients = value_and_grad(
            state.trainable, state.non_trainable, batch
        )
        trainable, variables = optimizer.stateless_apply(
            state.optimizer, gradients, state.trainable
        )
        return State(trainable, non_trainable, variables), loss

    state = State(
        trainable=[variable.value for variable in model.trainable_variables],
        non_trainable=[variable.value for variable in model.non_trainable_variables],
        optimizer=[variable.value for variable in optimizer.variables],
    )
    return state, jax.jit(update_step, donate_argnums=0)


def pretrain_batch(masked_rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Names the masked rows of benchmarks/train_step.py as KerasHub does."""
    return {
        "token_ids": masked_rows["tokens"],
        "segment_ids": masked_rows["segment_ids"],
        "padding_mask": np.ones_like(masked_rows["tokens"]),
        "mask_positions": masked_rows["mlm_positions"],
        "targets": masked_rows["mlm_targets"],
    }


def pretrain_step(config: BertConfig, masked_rows: dict[str, np.ndarray], dtype: str):
    """Returns a function that runs one step, waits for it and returns its loss."""
    state, update = make_pretrain_step(config, dtype)
    batch = jax.device_put(pretrain_batch(masked_rows))

    def step() -> float:
        nonlocal state
        state, loss = update(state, batch)
        jax.block_until_ready(state)
        return float(loss)

    return step


class LinearSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Rises linearly to the peak, then is the peak times the fraction of steps that remain."""

    def __init__(self, peak: float, warmup_steps: int, num_steps: int):
        super().__init__()
        self.peak, self.warmup_steps, self.num_steps = peak, warmup_steps, num_steps

    def __call__(self, step):
        step = keras.ops.cast(step, "float32")
        rise, remaining = step / max(self.warmup_steps, 1), 1 - step / self.num_steps
        return self.peak * keras.ops.where(step < self.warmup_steps, rise, remaining)


def classification(config, train_set, test_set, seed: int) -> dict:
    """Returns the accuracy on `test_set`, and times; both sets are (texts, labels).

    `config` is one of configs/finetune/. Texts are tokenized once, padded to `max_seq_length`:
    KerasHub has neither packing nor dynamic padding. Its `fit` does not shuffle arrays, so it gets
    a shuffled dataset.
    """
    keras.utils.set_random_seed(seed)
    started = time.perf_counter()
    labels = sorted(set(train_set[1]))
    backbone = keras_hub.models.BertBackbone.from_preset(
        config.init_from, dropout=config.model.dropout_rate
    )
    preprocessor = keras_hub.models.BertTextClassifierPreprocessor(
        uncased_tokenizer(config.init_from),
        sequence_length=config.max_seq_length,
    )

    def features(texts):
        return {name: np.array(x) for name, x in preprocessor(list(texts)).items()}

    model = keras_hub.models.BertTextClassifier(
        backbone, len(labels), dropout=config.model.dropout_rate
    )
    texts, names = train_set
    num_steps = round(config.num_epochs * -(-len(texts) // config.batch_size))
    warmup_steps = round(config.warmup_fraction * num_steps)
    schedule = LinearSchedule(config.learning_rate, warmup_steps, num_steps)
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=make_optimizer(schedule),
        jit_compile=True,
    )
    numbers = [labels.index(name) for name in names]
    dataset = tf.data.Dataset.from_tensor_slices((features(texts), numbers))
    dataset = dataset.shuffle(len(texts), seed=seed).batch(config.batch_size).repeat()
    model.fit(dataset, steps_per_epoch=num_steps, shuffle=False, verbose=0)
    trained = time.perf_counter()
    predicted = model.predict(features(test_set[0]), batch_size=32, verbose=0).argmax(-1)
    correct = [labels[index] == name for index, name in zip(predicted, test_set[1], strict=True)]
    return {
        "score": sum(correct) / len(correct),
        "train_seconds": trained - started,
        "predict_seconds": time.perf_counter() - trained,
    }


def uncased_tokenizer(directory: str) -> keras_hub.models.BertTokenizer:
    """Returns the tokenizer of an uncased model, which by default keeps accents here."""
    return keras_hub.models.BertTokenizer.from_preset(directory, strip_accents=True)


def encode(directory: str, sentences: list[str], batch_size: int) -> tuple[float, np.ndarray]:
    """Returns the seconds, and the mean-pooled vectors of sentences, without normalization.

    `predict` compiles a program for each length and size of a batch, so sentences are grouped by
    the power of two, from 32, that they are padded to.
    """
    tokenizer = uncased_tokenizer(directory)
    backbone = keras_hub.models.BertBackbone.from_preset(directory)
    embedder = keras_hub.models.BertTextEmbedder(backbone, normalize=False)
    started = time.perf_counter()
    tokens = tokenizer(sentences)
    groups = collections.defaultdict(list)
    for index, ids in enumerate(tokens):
        length = len(ids) + 2  # [CLS] and [SEP].
        groups[min(max(32, 1 << (length - 1).bit_length()), 512)].append(index)
    vectors = np.empty((len(sentences), backbone.hidden_dim), np.float32)
    for length, indices in sorted(groups.items()):
        packer = keras_hub.layers.MultiSegmentPacker(
            sequence_length=length,
            start_value=tokenizer.cls_token_id,
            end_value=tokenizer.sep_token_id,
            pad_value=tokenizer.pad_token_id,
        )
        token_ids, segment_ids = map(np.array, packer([tokens[index] for index in indices]))
        features = {
            "token_ids": token_ids,
            "segment_ids": segment_ids,
            "padding_mask": token_ids != tokenizer.pad_token_id,
        }
        vectors[indices] = embedder.predict(features, batch_size=batch_size, verbose=0)
    return time.perf_counter() - started, vectors
