"""ELECTRA (Clark et al., 2020, section 2): a generator replaces tokens, a discriminator finds them.

    masked tokens -> generator, a small masked LM -> logits at the masked positions
        tokens sampled from these, at the masked positions -> discriminator
            -> for each position, the logit of "this token was replaced"

Only the discriminator is used afterwards. Unless the generator has embeddings of its own, both read
the discriminator's, and the generator predicts with them. The parameter tree has them once, under
`encoder/embeddings`: what `generator/encoder/embeddings` lacks is taken from there whenever the
generator is applied.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from bert_jax.model.config import BertConfig
from bert_jax.model.dropout import Dropout
from bert_jax.model.encoder import Encoder
from bert_jax.model.execution import Execution
from bert_jax.model.layers import Dense, activate
from bert_jax.model.pretraining import PretrainingModel, example_batch

# As in the released code, which shares what is in its scope "electra/embeddings"; the layer that
# widens or narrows them for an encoder is each encoder's own.
SHARED = ("token_embedding", "position_embedding", "segment_embedding", "layer_norm")


@dataclasses.dataclass(frozen=True)
class GeneratorSettings:
    """The generator beside a discriminator, and the weight of their losses: `config.generator`.

    Attributes:
      hidden_fraction: its hidden size, heads and feed-forward size, as a fraction of the
        discriminator's.
      num_layers: None: as many as the discriminator.
      ties_embeddings: whether both share the embeddings named in `SHARED`.
      discriminator_weight: of the discriminator's loss; the generator's has the weight 1.
    """

    hidden_fraction: float = 0.25
    num_layers: int | None = None
    ties_embeddings: bool = True
    discriminator_weight: float = 50.0

    def config(self, discriminator: BertConfig) -> BertConfig:
        """Returns the generator's architecture. Raises ValueError if there is no such generator."""
        if discriminator.architecture != "bert":
            raise ValueError(
                "replaced tokens need model.architecture=bert, whose embeddings may be narrower or "
                f"wider than the generator, not {discriminator.architecture}"
            )
        fraction = self.hidden_fraction
        if not 0 < fraction <= 1:
            raise ValueError(
                f"--config.generator.hidden_fraction={fraction}: expected more than 0 and at most "
                "1, as a generator is no wider than the discriminator whose embeddings it reads"
            )
        hidden_size = round(discriminator.hidden_size * fraction)
        num_heads = max(round(discriminator.num_heads * fraction), 1)
        width = discriminator.embedding_size or discriminator.hidden_size
        is_projected = self.ties_embeddings and width != hidden_size
        num_layers = discriminator.num_layers if self.num_layers is None else self.num_layers
        try:
            return dataclasses.replace(
                discriminator,
                hidden_size=hidden_size,
                num_heads=num_heads,
                intermediate_size=round(discriminator.intermediate_size * fraction),
                num_layers=num_layers,
                embedding_size=width if is_projected else None,
            )
        except ValueError as error:
            raise ValueError(
                f"--config.generator.hidden_fraction={fraction} and num_layers={num_layers} give "
                f"no generator for a discriminator of hidden size {discriminator.hidden_size} with "
                f"{discriminator.num_heads} heads: {error}"
            ) from None


class ReplacedTokenHead(nn.Module):
    """Predicts of each token whether it was replaced (section 2)."""

    config: BertConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps hidden states `[B, L, H]` to float32 logits `[B, L]`."""
        config = self.config
        x = Dense(config.hidden_size, config.initializer_range, name="dense")(x)
        x = activate(config.activation, x)
        initializer = nn.initializers.truncated_normal(config.initializer_range)
        output = nn.Dense(1, dtype=jnp.float32, kernel_init=initializer, name="output")
        return output(x)[..., 0]


class Discriminator(nn.Module):
    """Encoder, and head for replaced tokens ("discriminator")."""

    config: BertConfig
    execution: Execution = Execution()

    def setup(self):
        self.encoder = Encoder(self.config, self.execution)
        self.discriminator = ReplacedTokenHead(self.config)

    def __call__(
        self, batch: dict[str, jax.Array], dropout: Dropout | float | None = None
    ) -> jax.Array:
        """Returns float32 logits `[B, L]`, of "replaced"; takes the arguments of `Encoder`."""
        return self.discriminator(self.encoder(batch, dropout))


class ReplacedTokenModel(Discriminator):
    """What is pre-trained: a discriminator, with the parameters of its generator ("generator").

    The module computes the discriminator; `generator` is the module of the generator, to be applied
    to `generator_params`.

    Attributes:
      config: of the discriminator.
      execution: how both run.
      settings: of the generator.
    """

    settings: GeneratorSettings = GeneratorSettings()

    def setup(self):
        super().setup()
        if self.is_initializing():
            self.param("generator", self._init_generator)

    @property
    def encoders(self) -> dict[str, BertConfig]:
        """The configuration of each encoder, by its path in the parameters."""
        return {"encoder": self.config, "generator/encoder": self.settings.config(self.config)}

    @property
    def generator(self) -> PretrainingModel:
        """A masked LM without next-sentence head."""
        config = self.encoders["generator/encoder"]
        return PretrainingModel(config, False, self.execution, parent=None)

    def _init_generator(self, key: jax.Array) -> dict:
        params = self.generator.init(key, example_batch())["params"]
        if not self.settings.ties_embeddings:
            return params
        embeddings = params["encoder"]["embeddings"]
        own = {name: embeddings[name] for name in embeddings if name not in SHARED}
        layers = {"layers": params["encoder"]["layers"]}
        return params | {"encoder": layers | ({"embeddings": own} if own else {})}


def generator_params(params: dict) -> dict:
    """Returns all of the generator's parameters, from the ones of `ReplacedTokenModel`."""
    generator, embeddings = params["generator"], params["encoder"]["embeddings"]
    shared = {name: embeddings[name] for name in SHARED if name in embeddings}
    encoder = generator["encoder"]
    embeddings = shared | encoder.get("embeddings", {})
    return generator | {"encoder": encoder | {"embeddings": embeddings}}
