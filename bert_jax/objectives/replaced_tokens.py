"""Replaced-token detection: ELECTRA (Clark et al., 2020, sections 2 and 3.1).

    masked tokens -> generator, a small masked LM -> logits at the masked positions
        tokens sampled from these, at the masked positions -> discriminator
            -> for each position, the logit of "this token was replaced"

A sample that equals the original token counts as original. No gradient passes through the samples.
Only the discriminator is used afterwards. Unless the generator has embeddings of its own, both read
the discriminator's, and the generator predicts with them. The parameter tree has them once, under
`encoder/embeddings`: what `generator/encoder/embeddings` lacks is taken from there whenever the
generator is applied.

Disentangled (DeBERTaV3; He et al., 2021, section 3.3), the discriminator reads the sum of a shared
table, through which it has no gradient, and of a difference, from 0, that only it reads:
"difference" in the parameters. A model that is loaded has the sum.
"""

import dataclasses
import zlib
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from bert_jax.data.masking import Masking, row_keys
from bert_jax.model.architecture import architecture_of
from bert_jax.model.dropout import Dropout
from bert_jax.model.encoder import Encoder
from bert_jax.model.execution import ExecutionPlan
from bert_jax.model.layers import Dense, activate
from bert_jax.objectives import Batch, Sums
from bert_jax.objectives.masked_lm import (
    MaskedLm,
    PretrainingModel,
    flops_per_row,
    loss_sums,
)

# As in the released code, which shares what is in its scope "electra/embeddings"; the layer that
# widens or narrows them for an encoder is each encoder's own.
SHARED = ("token_embedding", "position_embedding", "segment_embedding", "layer_norm")
DISENTANGLED = ("token_embedding", "position_embedding")


@dataclasses.dataclass(frozen=True)
class GeneratorSettings:
    """The generator beside a discriminator, and the weight of their losses: `config.generator`.

    Attributes:
      hidden_fraction: its hidden size, heads and feed-forward size, as a fraction of the
        discriminator's.
      num_layers: None: as many as the discriminator.
      ties_embeddings: whether both share the embeddings named in `SHARED`.
      disentangles_embeddings: whether they share only those of `DISENTANGLED`, and the
        discriminator adds a difference of its own.
      discriminator_weight: of the discriminator's loss; the generator's has the weight 1.
    """

    hidden_fraction: float = 0.25
    num_layers: int | None = None
    ties_embeddings: bool = True
    disentangles_embeddings: bool = False
    discriminator_weight: float = 50.0

    def config(self, discriminator):
        """Returns the generator's model config. Raises ValueError if there is none."""
        fraction = self.hidden_fraction
        if not 0 < fraction <= 1:
            raise ValueError(
                f"config.generator.hidden_fraction={fraction}: expected more than 0 and at most "
                "1, as a generator is no wider than the discriminator whose embeddings it reads"
            )
        if self.disentangles_embeddings and not self.ties_embeddings:
            raise ValueError(
                "config.generator.disentangles_embeddings=True: both models read one table, so set "
                "config.generator.ties_embeddings=True"
            )
        hidden_size = round(discriminator.hidden_size * fraction)
        num_heads = max(round(discriminator.num_heads * fraction), 1)
        num_layers = discriminator.num_layers if self.num_layers is None else self.num_layers
        has_width = "embedding_size" in {field.name for field in dataclasses.fields(discriminator)}
        width = (has_width and discriminator.embedding_size) or discriminator.hidden_size
        is_projected = self.ties_embeddings and width != hidden_size
        if is_projected and not has_width:
            raise ValueError(
                f"config.generator.hidden_fraction={fraction}: embeddings of model.architecture="
                f"{discriminator.architecture} are as wide as its layers, so a narrower generator "
                "cannot read them: set config.generator.ties_embeddings=False, or hidden_fraction=1"
            )
        own_width = {"embedding_size": width if is_projected else None} if has_width else {}
        try:
            return dataclasses.replace(
                discriminator,
                hidden_size=hidden_size,
                num_heads=num_heads,
                intermediate_size=round(discriminator.intermediate_size * fraction),
                num_layers=num_layers,
                **own_width,
            )
        except ValueError as error:
            raise ValueError(
                f"config.generator.hidden_fraction={fraction} and num_layers={num_layers} give "
                f"no generator for a discriminator of hidden size {discriminator.hidden_size} with "
                f"{discriminator.num_heads} heads: {error}"
            ) from None


class ReplacedTokenHead(nn.Module):
    """Predicts of each token whether it was replaced (section 2)."""

    config: object

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

    config: object
    plan: ExecutionPlan = ExecutionPlan()

    def setup(self):
        self.encoder = Encoder(self.config, self.plan)
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
      plan: how both run.
      settings: of the generator.
    """

    settings: GeneratorSettings = GeneratorSettings()

    def setup(self):
        super().setup()
        if self.is_initializing():
            self.param("generator", self._init_generator)
            if self.settings.disentangles_embeddings:
                self.param("difference", self._init_difference)

    @property
    def encoders(self) -> dict[str, object]:
        """The model config of each encoder, by its path in the parameters."""
        return {"encoder": self.config, "generator/encoder": self.settings.config(self.config)}

    @property
    def generator(self) -> PretrainingModel:
        """A masked LM without next-sentence head."""
        config = self.encoders["generator/encoder"]
        return PretrainingModel(config, False, self.plan, parent=None)

    def _init_generator(self, key: jax.Array) -> dict:
        params = self.generator.init(key, _any_batch())["params"]
        if not self.settings.ties_embeddings:
            return params
        embeddings = params["encoder"]["embeddings"]
        shared = DISENTANGLED if self.settings.disentangles_embeddings else SHARED
        discriminator = PretrainingModel(self.config, False, parent=None)
        shapes = jax.eval_shape(discriminator.init, key, _any_batch())["params"]["encoder"]
        own = {
            name: module
            for name, module in embeddings.items()
            # A LayerNorm that follows the projection is as wide as each model.
            if name not in shared or _shapes(module) != _shapes(shapes["embeddings"][name])
        }
        others = {name: x for name, x in params["encoder"].items() if name != "embeddings"}
        return params | {"encoder": others | ({"embeddings": own} if own else {})}

    def _init_difference(self, key: jax.Array) -> dict:
        tables = jax.eval_shape(self.generator.init, key, _any_batch())["params"]["encoder"]
        return {
            name: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), table)
            for name, table in tables["embeddings"].items()
            if name in DISENTANGLED
        }


def _shapes(tree) -> dict:
    return jax.tree.map(lambda leaf: leaf.shape, tree)


def _any_batch() -> dict[str, jax.Array]:
    """Returns a batch to initialize a model with: it has no influence."""
    names = "tokens", "segment_ids", "position_ids", "sequence_ids", "target_positions"
    return dict.fromkeys(names, jnp.zeros((1, 2), jnp.int32))


def discriminator_params(params: dict) -> dict:
    """Returns the parameters with the tables that the discriminator reads under "encoder"."""
    embeddings = dict(params["encoder"]["embeddings"])
    for name, difference in params.get("difference", {}).items():
        embeddings[name] = jax.tree.map(
            lambda shared, own: jax.lax.stop_gradient(shared) + own, embeddings[name], difference
        )
    return params | {"encoder": params["encoder"] | {"embeddings": embeddings}}


def usable_params(params: dict) -> dict:
    """Returns the parameters of a run as they are used: each model has the tables that it reads."""
    if "difference" not in params:
        return params
    of_generator = generator_params(params)["encoder"]["embeddings"]
    own = {name: of_generator[name] for name in params["difference"]}
    merged = discriminator_params(params)
    del merged["difference"]
    return _with_generator_embeddings(merged, lambda embeddings: embeddings | own)


def has_own_tables(params: dict) -> bool:
    """Returns whether a generator is beside the encoder, and has tables of embeddings."""
    embeddings = params.get("generator", {}).get("encoder", {}).get("embeddings", {})
    return "token_embedding" in embeddings


def trainable_params(params: dict) -> dict:
    """Returns the parameters of a run from those of `usable_params`, up to rounding.

    Raises ValueError if the tables of both models have different shapes.
    """
    embeddings = params["encoder"]["embeddings"]
    of_generator = params["generator"]["encoder"]["embeddings"]
    shared = {name: of_generator[name] for name in DISENTANGLED if name in of_generator}
    for name, table in shared.items():
        ours, theirs = (module["embedding"].shape for module in (embeddings[name], table))
        if ours != theirs:
            raise ValueError(
                f"config.generator.disentangles_embeddings=True: {name} is {ours} in the "
                f"discriminator and {theirs} in the generator, expected equal shapes: start from "
                "models whose embeddings are equally wide"
            )
    difference = {
        name: jax.tree.map(lambda ours, theirs: ours - theirs, embeddings[name], table)
        for name, table in shared.items()
    }
    encoder = params["encoder"] | {"embeddings": embeddings | shared}
    return _with_generator_embeddings(
        params | {"encoder": encoder, "difference": difference},
        lambda own: {name: module for name, module in own.items() if name not in shared},
    )


def _with_generator_embeddings(params: dict, change) -> dict:
    """Returns the parameters with `change` applied to what the generator has of embeddings."""
    encoder = dict(params["generator"]["encoder"])
    if embeddings := change(encoder.pop("embeddings", {})):
        encoder["embeddings"] = embeddings
    return params | {"generator": params["generator"] | {"encoder": encoder}}


def generator_params(params: dict) -> dict:
    """Returns all of the generator's parameters, from the ones of `ReplacedTokenModel`."""
    generator, embeddings = params["generator"], params["encoder"]["embeddings"]
    shared = {name: embeddings[name] for name in SHARED if name in embeddings}
    encoder = generator["encoder"]
    embeddings = shared | encoder.get("embeddings", {})
    return generator | {"encoder": encoder | {"embeddings": embeddings}}


@dataclasses.dataclass(frozen=True, eq=False)
class ReplacedTokens:
    """Predicts masked tokens with a generator, and finds replaced ones with a discriminator.

    Attributes:
      masking: how rows are masked for the generator.
      generator: its size, and the weight of the discriminator's loss.
    """

    masking: Masking
    generator: GeneratorSettings

    causal: ClassVar[bool] = False
    main_loss: ClassVar[str] = "mlm_loss"  # The generator's: of the two, only it has a perplexity.
    main_accuracy: ClassVar[str] = "mlm_accuracy"
    rules: ClassVar[tuple] = (
        (r"discriminator/dense/kernel$", P("fsdp", "tensor")),
        (r"discriminator/output/kernel$", P()),
    )
    max_predictions = staticmethod(MaskedLm.max_predictions)

    @classmethod
    def from_config(cls, config, tokenizer, max_predictions: int) -> "ReplacedTokens":
        """Builds the objective of a phase. Raises ValueError if the config is not ELECTRA's."""
        if "generator" not in config:
            raise ValueError(
                "config.objective=replaced_tokens needs the fields of config.generator, which "
                "this configuration lacks: start from configs/pretrain/electra_small.py"
            )
        if config.next_sentence:
            raise ValueError(
                "config.objective=replaced_tokens has no next-sentence loss: set "
                "config.next_sentence=False"
            )
        masking = MaskedLm.from_config(config, tokenizer, max_predictions).masking
        return cls(masking, GeneratorSettings(**config.generator))

    def make_model(self, model_config, plan: ExecutionPlan) -> ReplacedTokenModel:
        """Builds the model; `model_config` is the discriminator's.

        Raises ValueError for a generator that does not fit it.
        """
        self.generator.config(model_config)
        return ReplacedTokenModel(model_config, plan, self.generator)

    def prepare(self, rows: Batch, key: jax.Array) -> Batch:
        """Unpacks and masks rows, as `MaskedLm` does with the same key.

        Adds int32 `original_tokens` `[B, L]`, and uint32 `sampling_keys` `[B, words]`: the data of
        a PRNG key for the samples of each row, like its masks a function of (key, row, epoch).
        """
        batch = MaskedLm(self.masking, next_sentence=False).prepare(rows, key)
        key = jax.random.fold_in(key, zlib.crc32(b"samples"))
        keys = row_keys(key, rows["row_ids"], rows["epochs"], self.masking.repeat_after)
        return batch | {
            "original_tokens": rows["tokens"].astype(jnp.int32),
            "sampling_keys": jax.random.key_data(keys),
        }

    def counts(self, batch: Batch) -> dict[str, jax.Array]:
        """Returns the numbers of masked tokens, and of all tokens but padding; at least 1."""
        return {
            "mlm_loss": jnp.maximum(jnp.sum(batch["target_weights"]), 1),
            "replaced_loss": jnp.maximum(jnp.sum(batch["sequence_ids"] > 0), 1),
        }

    def total_loss(self, losses: dict[str, jax.Array | float]) -> jax.Array | float:
        """Returns the generator's mean loss and the weighted one of the discriminator."""
        weight = self.generator.discriminator_weight
        return losses["mlm_loss"] + weight * losses["replaced_loss"]

    def sums(
        self,
        model: ReplacedTokenModel,
        params: dict,
        batch: Batch,
        dropout: Dropout | None = None,
    ) -> Sums:
        """Returns the loss and accuracy of both models over a batch, as sums and counts.

        For the discriminator ("replaced") also precision and recall of replaced tokens.
        """
        # At a place of its own, so that the two encoders do not drop the same elements.
        generator_dropout = dropout and dropout.at_place("generator")
        variables = {"params": generator_params(params)}
        token_logits, _ = model.generator.apply(variables, batch, generator_dropout)
        samples = sample_tokens(batch["sampling_keys"], token_logits)
        batch, is_replaced = replace_tokens(batch, samples)
        sums = self.model_sums(model, params, batch, is_replaced, dropout)
        return loss_sums("mlm", token_logits, batch["targets"], batch["target_weights"]) | sums

    def model_sums(self, model, params, batch, is_replaced, dropout) -> Sums:
        """Returns the sums of the discriminator on the rows that the generator corrupted."""
        logits = model.apply({"params": discriminator_params(params)}, batch, dropout)
        return discriminator_sums(logits, is_replaced, batch)

    def flops_per_row(self, model_config, length: int, max_sequences: int) -> float:
        """Returns the FLOPs of a training step for one row: of generator and discriminator."""
        generator = flops_per_row(
            self.generator.config(model_config),
            length,
            self.masking.max_predictions,
            max_sequences,
            next_sentence=False,
        )
        encoder = architecture_of(model_config).flops_per_row(
            model_config, length, num_outputs=length, num_targets=0, num_pairs=0
        )
        head = 2.0 * length * (model_config.hidden_size**2 + model_config.hidden_size)
        return generator + 3 * (encoder + head)


def sample_tokens(sampling_keys: jax.Array, logits: jax.Array) -> jax.Array:
    """Samples ids from the softmax of float32 logits `[B, K, V]`: int32 `[B, K]`.

    Adds Gumbel noise and takes the maximum (section 3.1, temperature 1). `sampling_keys` are those
    of `ReplacedTokens.prepare`. Ids that only pad the vocabulary have the minimum float32 as logit,
    and are never sampled.
    """
    keys = jax.random.wrap_key_data(sampling_keys)
    return jax.vmap(jax.random.categorical)(keys, jax.lax.stop_gradient(logits))


def replace_tokens(batch: Batch, samples: jax.Array) -> tuple[Batch, jax.Array]:
    """Returns the batch with samples, int32 `[B, K]`, in place of what was masked.

    Also returns bool `[B, L]`: which tokens are not the original ones.
    """
    original = batch["original_tokens"]
    # Unused slots have position 0, and replace nothing: theirs is outside of the row.
    length, is_used = original.shape[1], batch["target_weights"] > 0
    positions = jnp.where(is_used, batch["target_positions"], length)
    replace = jax.vmap(lambda row, at, values: row.at[at].set(values, mode="drop"))
    tokens = replace(original, positions, samples)
    return batch | {"tokens": tokens}, tokens != original


def discriminator_sums(logits: jax.Array, is_replaced: jax.Array, batch: Batch) -> Sums:
    """Returns the sums of the discriminator's logits `[B, L]`, over all tokens but padding.

    [CLS] and [SEP] count, as in the released code.
    """
    weights = (batch["sequence_ids"] > 0).astype(jnp.float32)
    losses = jax.nn.softplus(logits) - logits * is_replaced
    is_found = logits > 0
    count, hits = jnp.sum(weights), jnp.sum(weights * (is_found & is_replaced))
    num_replaced = jnp.sum(weights * is_replaced)
    return {
        "replaced_loss": (jnp.sum(losses * weights), count),
        "replaced_accuracy": (jnp.sum((is_found == is_replaced) * weights), count),
        "replaced_fraction": (num_replaced, count),
        "replaced_recall": (hits, num_replaced),
        "replaced_precision": (hits, jnp.sum(weights * is_found)),
    }


Objective = ReplacedTokens
