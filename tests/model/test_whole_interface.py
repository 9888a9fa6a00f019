"""An architecture elsewhere that uses every part of the interface of `model/architecture.py`.

Its layers alternate between windows, in which all see the first token of their sequence and it sees
all, and whole sequences; the first has no norm; there are no biases; positions rotate; all layers
share a parameter; the last module is a norm; it drops elements at a place of its own; and it has a
format of its own in transformers.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

import bert_jax
from bert_jax import finetune, pretrain
from bert_jax.checkpoints.export import save_huggingface
from bert_jax.configs.finetune import text_classification
from bert_jax.model.attention import attention, scaled_scores
from bert_jax.model.attention_mask import AttentionMask
from bert_jax.model.dropout import Dropout, add_with_dropout, apply_dropout
from bert_jax.model.encoder import Encoder
from bert_jax.model.execution import ExecutionPlan
from bert_jax.model.layers import TokenEmbedding
from bert_jax.model.modernbert import Rotation, rotate, rotation
from bert_jax.model.transformers_format import HeadNames, TransformersFormat
from bert_jax.sharding.rules import EMBEDDING_SPEC
from tests.helpers.corpora import build_small_corpus, write_vocabulary
from tests.helpers.models import random_params
from tests.helpers.runs import small_config


@dataclasses.dataclass(frozen=True)
class Config:
    vocab_size: int
    hidden_size: int = 16
    num_layers: int = 6
    num_heads: int = 2
    max_position_embeddings: int = 128
    dropout_rate: float = 0.1
    attention_dropout_rate: float | None = None
    causal: bool = False
    initializer_range: float = 0.1
    window: int = 3

    architecture: ClassVar[str] = __name__
    fixed_fields: ClassVar[tuple[str, ...]] = ("hidden_size", "num_layers", "num_heads", "window")


def dense(config: Config, num_outputs: int) -> nn.Dense:
    initializer = nn.initializers.truncated_normal(config.initializer_range)
    return nn.Dense(num_outputs, use_bias=False, kernel_init=initializer)


def norm(name: str | None = None) -> nn.LayerNorm:
    return nn.LayerNorm(use_bias=False, name=name)


class Embeddings(nn.Module):
    config: Config
    dtype: str = "float32"

    def setup(self):
        sizes = self.config.vocab_size, self.config.hidden_size, self.config.initializer_range
        self.token_embedding = TokenEmbedding(*sizes, self.dtype)

    def __call__(self, tokens, segment_ids, position_ids, dropout=None):
        return apply_dropout(self.token_embedding(tokens).astype(self.dtype), dropout)


class Inputs(NamedTuple):
    mask: AttentionMask
    rotation: Rotation
    scale: jax.Array


class LayerInputs(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, batch):
        config = self.config
        scale = self.param("scale", nn.initializers.ones, (config.hidden_size,), jnp.float32)
        turned = rotation(batch["position_ids"], 100.0, config.hidden_size // config.num_heads)
        is_global = batch["position_ids"] == 0
        mask = AttentionMask(batch["sequence_ids"], config.causal, is_global=is_global)
        return Inputs(mask, turned, scale)


class EncoderLayer(nn.Module):
    config: Config
    is_first: bool
    is_local: bool

    dropout_places: ClassVar[Mapping[str, str]] = {
        "attention": "attention_rate",
        "output": "rate",
        "expanded": "rate",
    }

    def setup(self):
        size = self.config.hidden_size
        if not self.is_first:
            self.norm = norm()
        self.query, self.key, self.value = (dense(self.config, size) for _ in range(3))
        self.expand, self.contract = dense(self.config, 2 * size), dense(self.config, size)

    def __call__(self, x, inputs, dropout):
        return self.finish(x, self.attend(x, inputs, dropout), dropout)

    def attend(self, x, inputs, dropout):
        query, key, value = self.projections(x, inputs)
        rate, num_heads = dropout.get("attention"), self.config.num_heads
        return attention(query, key, value, self.mask(inputs), num_heads=num_heads, dropout=rate)

    def finish(self, x, context, dropout):
        y = apply_dropout(nn.relu(self.expand(context)), dropout.get("expanded"))
        return add_with_dropout(x, self.contract(y), dropout.get("output"))

    def scores(self, x, inputs):
        query, key, _ = self.projections(x, inputs)
        return scaled_scores(query, key, self.config.num_heads), self.mask(inputs)

    def projections(self, x, inputs):
        x = x if self.is_first else self.norm(x)
        query, key = self.query(x) * inputs.scale.astype(x.dtype), self.key(x)
        num_heads = self.config.num_heads
        query, key = (rotate(y, inputs.rotation, num_heads) for y in (query, key))
        return query, key, self.value(x)

    def mask(self, inputs):
        return inputs.mask.with_window(self.config.window) if self.is_local else inputs.mask


def encoder_layers(config):
    return tuple(
        EncoderLayer(config, is_first=i == 0, is_local=i % 2 == 1, parent=None)
        for i in range(config.num_layers)
    )


class Last(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x):
        return norm("norm")(x)


class Pooler(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x):
        return jnp.tanh(x)


class LmHead(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x, token_embedding):
        return token_embedding.logits(x, jnp.zeros(token_embedding.padded_vocab_size))


class PairHead(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, pooled):
        return dense(self.config, 2)(pooled)


RULES = (
    (r"token_embedding/embedding$", EMBEDDING_SPEC),
    (r"layers/(query|key|value|expand)/kernel$", P(None, "fsdp")),
    (r"(kernel|scale)$", P()),
)


def flops_per_row(config, length, num_outputs, num_targets, num_pairs):
    return 2.0 * config.num_layers * length * 8 * config.hidden_size**2


LAYER = "own.layers.{layer}"
TRANSFORMERS = TransformersFormat(
    class_prefix="Own",
    prefix="own.",
    names={
        "encoder/embeddings/token_embedding": "own.tokens",
        "encoder/layer_inputs": "own.shared",
        "encoder/layers/norm": f"{LAYER}.norm",
        "encoder/layers/query": f"{LAYER}.projections",
        "encoder/layers/key": f"{LAYER}.projections",
        "encoder/layers/value": f"{LAYER}.projections",
        "encoder/layers/expand": f"{LAYER}.expand",
        "encoder/layers/contract": f"{LAYER}.contract",
        "encoder/last/norm": "own.norm",
    },
    parts={f"encoder/layers/{n}": (i, 3) for i, n in enumerate(("query", "key", "value"))},
    padded=("encoder/embeddings/token_embedding/embedding",),
    tied={},
    heads={"ForSequenceClassification": HeadNames()},
    headless={(): "OwnModel"},
    config_from_json=lambda values: Config(values["vocab_size"]),
    config_to_json=lambda config: {"model_type": "own", "vocab_size": config.vocab_size},
)


@pytest.mark.slow
def test_loops_over_periods_equal_unrolled_layers_with_dropout():
    config = Config(40)
    tokens = np.random.default_rng(0).integers(1, 40, (2, 12)).astype(np.int32)
    names = ("tokens", "position_ids", "segment_ids", "sequence_ids")
    batch = dict.fromkeys(names, np.ones_like(tokens)) | {"tokens": tokens}
    batch["position_ids"] = np.arange(12, dtype=np.int32)[None].repeat(2, 0)
    dropout = Dropout(jax.random.key(0), np.arange(2), 0.2)
    encoders = [Encoder(config, ExecutionPlan(scans_layers=loops)) for loops in (False, True)]
    params = random_params(encoders[0], batch, std=0.1)
    assert params["layers"]["norm"]["scale"].shape == (5, 16)
    gradients = []
    for encoder in encoders:

        def loss(params, encoder=encoder):
            return jnp.sum(encoder.apply({"params": params}, batch, dropout)[:, :, 0])

        gradients.append(jax.jit(jax.grad(loss))(params))
    assert np.abs(gradients[0]["layer_inputs"]["scale"]).max() > 1e-6
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *gradients)


@pytest.mark.slow
def test_it_is_pretrained_finetuned_saved_loaded_and_exported_to_its_own_format(tmp_path):
    corpus = build_small_corpus(tmp_path, write_vocabulary(tmp_path / "vocab.txt"))
    config = small_config(corpus)
    with config.unlocked():
        config.model = {"architecture": __name__, "dropout_rate": 0.1}
        config.mesh = {"data": 4, "fsdp": 2, "tensor": 1}
    pretrain.train_and_evaluate(config, tmp_path / "pretrained")
    (tmp_path / "train.csv").write_text("text,label\n" + "the river,a\na town,b\n" * 8)
    config = text_classification.get_config()
    config.init_from = str(tmp_path / "pretrained")
    config.data.train = config.data.dev = str(tmp_path / "train.csv")
    config.max_seq_length, config.batch_size, config.num_epochs = 16, 8, 1.0
    config.freeze_layers = 2
    finetune.train_and_evaluate(config.lock(), tmp_path / "run")
    pretrained, model = bert_jax.load(tmp_path / "pretrained"), bert_jax.load(tmp_path / "run")
    for name in ("query", "norm"):  # The first two layers are frozen; the first has no norm.
        count = 2 if name == "query" else 1
        (before, after) = (
            jax.tree.leaves(each.params["encoder"]["layers"][name])[0]
            for each in (pretrained, model)
        )
        np.testing.assert_array_equal(before[:count], after[:count])
        assert np.abs(before[count:] - after[count:]).max() > 0
    assert model.classify("the river").label in ("a", "b")
    maps = model.attention("the river a town the river").probabilities
    assert (maps[0] > 0).all() and (maps[1][:, 0] > 0).all() and (maps[1][:, :, 0] > 0).all()
    assert (maps[1][:, 1, 5:] == 0).all() and maps[1].shape[-1] > 5

    save_huggingface(tmp_path / "exported", model.params, model.settings, model.tokenizer)
    values = json.loads((tmp_path / "exported/config.json").read_text())
    assert values["architectures"] == ["OwnForSequenceClassification"]
    tensors = load_file(tmp_path / "exported/model.safetensors")
    layers = model.params["encoder"]["layers"]
    assert "own.layers.0.norm.weight" not in tensors
    for layer in (1, 5):
        joined = [layers[name]["kernel"][layer].T for name in ("query", "key", "value")]
        stored = tensors[f"own.layers.{layer}.projections.weight"]
        np.testing.assert_array_equal(stored, np.concatenate(joined))
        norm_scale = layers["norm"]["scale"][layer - 1]
        np.testing.assert_array_equal(tensors[f"own.layers.{layer}.norm.weight"], norm_scale)
    # Joined: two fewer for each of six layers. Stacked: of each layer that has it.
    count = sum(len(leaf) for leaf in jax.tree.leaves(layers)) - 2 * 6
    others = len(flatten_dict(model.params)) - len(flatten_dict(layers))
    assert len(tensors) == count + others
