"""An architecture in a user's own file is pre-trained, fine-tuned, saved and loaded.

It is a small pre-LayerNorm transformer without biases, and needs no edit in the package.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import bert_jax
from bert_jax import finetune, pretrain
from bert_jax.checkpoints.read import read_model
from bert_jax.configs.finetune import text_classification
from bert_jax.configs.pretrain import bert_tiny
from bert_jax.model.attention import attention, scaled_scores
from bert_jax.model.attention_mask import AttentionMask
from bert_jax.model.dropout import add_with_dropout, apply_dropout
from bert_jax.model.encoder import Encoder
from bert_jax.model.execution import ExecutionPlan, log_path
from bert_jax.model.layers import Embedding, Identity, TokenEmbedding
from bert_jax.runtime.named_modules import import_part
from bert_jax.sharding.rules import EMBEDDING_SPEC
from bert_jax.tokenizers.tokenizer import load_tokenizer
from bert_jax.training.pretrain_setup import make_model_config
from tests.helpers.corpora import build_small_corpus, write_vocabulary
from tests.helpers.models import random_params
from tests.helpers.runs import small_config


@dataclasses.dataclass(frozen=True)
class Config:
    vocab_size: int
    hidden_size: int = 32
    num_layers: int = 2
    num_heads: int = 2
    max_position_embeddings: int = 128
    dropout_rate: float = 0.1
    attention_dropout_rate: float | None = None
    causal: bool = False
    initializer_range: float = 0.05

    architecture: ClassVar[str] = __name__
    fixed_fields: ClassVar[tuple[str, ...]] = ("hidden_size", "num_layers", "num_heads")


def dense(config: Config, num_outputs: int) -> nn.Dense:
    initializer = nn.initializers.truncated_normal(config.initializer_range)
    return nn.Dense(num_outputs, use_bias=False, kernel_init=initializer)


def norm() -> nn.LayerNorm:
    return nn.LayerNorm(use_bias=False)


class Embeddings(nn.Module):
    config: Config
    dtype: str = "float32"

    def setup(self):
        config = self.config
        size, initializer_range = config.hidden_size, config.initializer_range
        self.token_embedding = TokenEmbedding(
            config.vocab_size, size, initializer_range, self.dtype
        )
        self.position_embedding = Embedding(config.max_position_embeddings, size, initializer_range)

    def __call__(self, tokens, segment_ids, position_ids, dropout=None):
        x = self.token_embedding(tokens) + self.position_embedding(position_ids)
        return apply_dropout(x.astype(self.dtype), dropout)


class LayerInputs(nn.Module):
    config: Config

    def __call__(self, batch):
        return AttentionMask(batch["sequence_ids"], self.config.causal)


class EncoderLayer(nn.Module):
    config: Config

    dropout_places: ClassVar[Mapping[str, str]] = {
        "attention": "attention_rate",
        "attention_output": "rate",
        "output": "rate",
    }

    def setup(self):
        size = self.config.hidden_size
        self.attention_norm, self.feed_forward_norm = norm(), norm()
        self.query, self.key, self.value = (dense(self.config, size) for _ in range(3))
        self.mix = dense(self.config, size)
        self.expand, self.contract = dense(self.config, 2 * size), dense(self.config, size)

    def __call__(self, x, mask, dropout):
        return self.finish(x, self.attend(x, mask, dropout), dropout)

    def attend(self, x, mask, dropout):
        x = self.attention_norm(x)
        return attention(
            self.query(x),
            self.key(x),
            self.value(x),
            mask,
            num_heads=self.config.num_heads,
            dropout=dropout.get("attention"),
        )

    def finish(self, x, context, dropout):
        x = add_with_dropout(x, self.mix(context), dropout.get("attention_output"))
        y = self.contract(nn.relu(self.expand(self.feed_forward_norm(x))))
        return add_with_dropout(x, y, dropout.get("output"))

    def scores(self, x, mask):
        x = self.attention_norm(x)
        return scaled_scores(self.query(x), self.key(x), self.config.num_heads), mask


def encoder_layers(config):
    return (EncoderLayer(config, parent=None),) * config.num_layers


Last = Identity


class Pooler(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x):
        return norm()(x)


class LmHead(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x, token_embedding):
        return token_embedding.logits(norm()(x), jnp.zeros(token_embedding.padded_vocab_size))


class PairHead(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, pooled):
        return dense(self.config, 2)(pooled)


RULES = (
    (r"token_embedding/embedding$", EMBEDDING_SPEC),
    (r"layers/(query|key|value|expand)/kernel$", P(None, "fsdp")),
    (r"(embedding|kernel|scale)$", P()),
)


def flops_per_row(config, length, num_outputs, num_targets, num_pairs):
    return 2.0 * config.num_layers * length * 8 * config.hidden_size**2


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("own")
    return build_small_corpus(directory, write_vocabulary(directory / "vocab.txt"))


@pytest.fixture(scope="module")
def pretrained(corpus, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("pretrained")
    config = small_config(corpus)
    with config.unlocked():
        config.model = {"architecture": __name__, "dropout_rate": 0.1, "hidden_size": 32}
        config.mesh = {"data": 4, "fsdp": 2, "tensor": 1}
    pretrain.train_and_evaluate(config, workdir)
    return workdir


@pytest.mark.slow
def test_it_is_pretrained_on_a_mesh_and_its_checkpoint_names_it(pretrained):
    model = bert_jax.load(pretrained)
    assert isinstance(model.config, Config) and set(model.params) == {"encoder", "mlm", "nsp"}
    assert model.settings["architecture"]["name"] == __name__
    assert "encoder/layers" in model.settings["modules"]
    assert len(model.fill_mask("the [MASK]", top_k=3)) == 3
    assert model.encode(["the river", "a"]).shape == (2, 32)


@pytest.mark.slow
def test_it_is_finetuned_and_loaded(pretrained, tmp_path):
    (tmp_path / "train.csv").write_text("text,label\n" + "the river,a\na town,b\n" * 8)
    config = text_classification.get_config()
    config.init_from = str(pretrained)
    config.data.train = config.data.dev = str(tmp_path / "train.csv")
    config.max_seq_length, config.batch_size, config.num_epochs = 16, 8, 1.0
    finetune.train_and_evaluate(config.lock(), tmp_path / "run")
    model = bert_jax.load(tmp_path / "run")
    assert isinstance(model.config, Config)
    assert model.classify("the river").label in ("a", "b")
    assert "encoder/pooler" in model.settings["modules"]
    again = jax.tree.map(np.asarray, read_model(tmp_path / "run").params)
    jax.tree.map(np.testing.assert_array_equal, again, jax.device_get(model.params))


@pytest.mark.slow
def test_its_attention_weighs_its_values(tmp_path):
    config = Config(100)
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "vocab.txt"))
    batch = bert_jax.PretrainedModel(config, tokenizer, {}).batch("the river")
    params = random_params(Encoder(config), batch)
    model = bert_jax.PretrainedModel(config, tokenizer, {"encoder": params})
    probabilities = model.attention("the river").probabilities[0]  # [heads, from, to]
    layer = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    x = Embeddings(config).apply(
        {"params": params["embeddings"]},
        *(batch[name] for name in ("tokens", "segment_ids", "position_ids")),
    )
    apply = functools.partial(EncoderLayer(config).apply, {"params": layer})
    context = apply(x, AttentionMask(batch["sequence_ids"]), {}, method="attend")[0]
    values = norm().apply({"params": layer["attention_norm"]}, x)[0] @ layer["value"]["kernel"]
    values = values.reshape(len(values), config.num_heads, -1)
    weighed = jnp.einsum("hqk,khd->qhd", probabilities, values).reshape(context.shape)
    np.testing.assert_allclose(weighed, context, atol=1e-5)


def test_it_has_no_named_sizes_and_no_other_fields():
    config = bert_tiny.get_config()
    config.model = {"architecture": __name__, "size": "tiny"}
    with pytest.raises(ValueError, match=r"model\.size: tests.* has no such field: in a conf"):
        make_model_config(config, 100)
    config.model = {"architecture": __name__, "layer_norm_epsilon": 1e-12}
    with pytest.raises(ValueError, match=r"model\.layer_norm_epsilon: tests.* no such field"):
        make_model_config(config, 100)


def test_it_has_no_kernels_and_a_warning_says_so(caplog):
    plan = ExecutionPlan(uses_kernels=True, scans_layers=True)
    assert plan.path(Config(100), 128) == "scan"
    log_path(plan, Config(100), 128)
    assert "there is none for tests.model.test_own_architecture" in caplog.text


def test_a_checkpoint_cannot_choose_code_to_run():
    with pytest.raises(ValueError, match=r"needs the module 'this\.is_not_imported'"):
        import_part("bert_jax.model", "this.is_not_imported", "Config", only_imported=True)
    with pytest.raises(ValueError, match=r"no file 'brt' with encoder_layers"):
        import_part("bert_jax.model", "brt", "encoder_layers")


def test_a_module_elsewhere_is_missing_or_lacks_what_it_must_offer():
    with pytest.raises(ValueError, match=r"module 'tests\.brt' is not found: .* Python path"):
        import_part("bert_jax.model", "tests.brt", "encoder_layers")
    with pytest.raises(
        ValueError, match=r"module 'tests\.conftest' does not define encoder_layers"
    ):
        import_part("bert_jax.model", "tests.conftest", "encoder_layers")
