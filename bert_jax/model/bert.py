"""BERT (Devlin et al., 2018) as Flax linen modules: embeddings, encoder, pooler, two heads.

Checkpoints, sharding rules and converters rely on the parameter names. The encoder's parameters
are stacked over layers (leading axis `num_layers`) whether the layers run as a loop or unrolled.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from bert_jax.model.attention import attention, kernel_attention, uses_kernel
from bert_jax.model.config import BertConfig
from bert_jax.model.dropout import Dropout, add_dropout, dropout, layer_dropouts
from bert_jax.model.kernels.attention_tpu import interleave
from bert_jax.model.layer_loop import LayerStacks, run_layers
from bert_jax.model.layers import Dense, LayerNorm, gelu
from bert_jax.model.sublayers import sublayer_output, uses_sublayer_kernel
from bert_jax.sharding.collectives import gather_data, gather_fsdp, map_fsdp_shards
from bert_jax.sharding.mesh import FSDP_BATCH_SPEC
from bert_jax.sharding.rules import EMBEDDING_SPEC

BERT_INPUTS = ("tokens", "segment_ids", "position_ids", "sequence_ids")


@jax.named_scope("feed_forward")
@functools.partial(nn.remat, prevent_cse=False)
def _dense_after_gelu(dense: Dense, x: jax.Array) -> jax.Array:
    """Recomputes GELU in the backward pass, so that the layer loop saves only `x`: half as much."""
    return dense(gelu(x))


def apply_dropout(module: nn.Module, x: jax.Array, settings: Dropout | None) -> jax.Array:
    """Applies `dropout` with the module's rng; returns `x` without `settings`."""
    return dropout(module.make_rng("dropout"), x, settings) if settings else x


class Embeddings(nn.Module):
    """Token + position + segment embeddings, LayerNorm, dropout (section 3, figure 2)."""

    config: BertConfig

    def setup(self):
        config = self.config
        initializer = nn.initializers.truncated_normal(config.initializer_range)

        def table(name, num_rows):
            return self.param(name, initializer, (num_rows, config.hidden_size), jnp.float32)

        # One copy per shard of the rows, `[fsdp, vocab, hidden]`: gathered once for both the lookup
        # and the MLM head, whose gradients are added first and then summed over `fsdp` once.
        self.gathered_token_embedding = map_fsdp_shards(
            lambda shard: gather_fsdp(shard, config.dtype, 0)[None],
            (EMBEDDING_SPEC,),
            table("token_embedding", config.padded_vocab_size),
            out_specs=P("fsdp", "tensor"),
            axes=("fsdp", "tensor"),
        )
        self.position_embedding = table("position_embedding", config.max_position_embeddings)
        self.segment_embedding = table("segment_embedding", config.type_vocab_size)
        self.layer_norm = LayerNorm(config)

    def __call__(self, tokens, position_ids, segment_ids, dropout=None) -> jax.Array:
        """Embeds three int32 `[batch, length]` arrays as `[batch, length, hidden]`."""

        def lookup(copies, positions, tokens, position_ids):
            return jnp.take(copies[0], tokens, axis=0) + jnp.take(positions, position_ids, axis=0)

        tables = self.gathered_token_embedding, self.position_embedding
        x = map_fsdp_shards(
            lookup,
            (FSDP_BATCH_SPEC, P(), FSDP_BATCH_SPEC, FSDP_BATCH_SPEC),
            *tables,
            tokens,
            position_ids,
        )
        # With two segments, a one-hot product has a far cheaper gradient than a gather.
        segments = jax.nn.one_hot(segment_ids, self.config.type_vocab_size, dtype=x.dtype)
        x += segments @ self.segment_embedding
        return apply_dropout(self, self.layer_norm(x), dropout)


PROJECTIONS, FUSED = ("query", "key", "value"), "query_key_value"


def fuse_projections(layers: dict, leaves=("kernel", "bias"), join: Callable = interleave) -> dict:
    """Returns the parameters of layers with one fused projection, as the attention kernel expects.

    Joins the `leaves` of queries, keys and values that exist. One product of three times the size
    is faster than three, most of all for the gradient of their common input.
    """
    if not set(PROJECTIONS) <= set(layers):
        return layers
    parts, rest = [dict(layers[name]) for name in PROJECTIONS], dict(layers)
    fused = dict(layers.get(FUSED, {}))
    for leaf in leaves:
        if leaf in parts[0]:
            fused[leaf] = join(*(part.pop(leaf) for part in parts))
    rest |= zip(PROJECTIONS, parts, strict=True)
    return {name: value for name, value in (rest | {FUSED: fused}).items() if value}


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each with dropout, residual, then LayerNorm.

    Its parameters may also be those of `fuse_projections`. Returns `[B, L, H]`; at int32 `[B, K]`
    positions, `[B, K, H]`.
    """

    config: BertConfig

    @nn.compact
    def __call__(
        self,
        x,
        sequence_ids,
        dropouts=(None,) * 3,
        stacks: LayerStacks | None = None,
        positions=None,
    ):
        config, hidden = self.config, self.config.hidden_size
        attention_dropout, *dropouts = dropouts
        settings, uses_kernels = (sequence_ids, config, attention_dropout), False
        if self.has_variable("params", FUSED):
            projections = Dense(config, 3 * hidden, adds_bias=False, name=FUSED)(x)
            context = kernel_attention(*projections, *settings, stacks)
            uses_kernels = positions is None and uses_sublayer_kernel(config, x.size // hidden)
        else:
            dense = (Dense(config, hidden, adds_bias=False, name=name) for name in PROJECTIONS)
            (query, query_bias), (key, _), (value, value_bias) = (layer(x) for layer in dense)
            context = attention(query, key, value, (query_bias, value_bias), *settings)
        if positions is not None:  # What follows treats each position on its own.
            x, context = gather_positions(x, positions), gather_positions(context, positions)
            dropouts = [each and each.at(positions) for each in dropouts]

        output = functools.partial(sublayer_output, config, self.variables["params"], stacks)
        if uses_kernels:
            names = "attention_output", "attention_layer_norm", "context", "attention_sum"
            x = output(names, context, x, dropouts[0])
        else:
            dense = Dense(config, hidden, fsdp_axis=1, adds_bias=False, name="attention_output")
            x = add_dropout(dropouts[0], x, *dense(context))
            x = LayerNorm(config, name="attention_layer_norm")(x)
        x = stacks.save("attention_output", x) if stacks else x
        y, bias = Dense(config, config.intermediate_size, adds_bias=False, name="intermediate")(x)
        y = y if uses_kernels else y + bias.astype(y.dtype)
        y = stacks.save("intermediate", y, reread=True) if stacks else y
        if uses_kernels:
            names = "output", "output_layer_norm", "intermediate", "sum"
            return output(names, y, x, dropouts[1], bias)
        dense = Dense(config, hidden, fsdp_axis=1, adds_bias=False, name="output")
        x = add_dropout(dropouts[1], x, *_dense_after_gelu(dense, y))
        return LayerNorm(config, name="output_layer_norm")(x)


class Encoder(nn.Module):
    """Runs `num_layers` encoder layers whose parameters are stacked on axis 0."""

    config: BertConfig

    @nn.compact
    def __call__(self, x, sequence_ids, dropout=None, positions=None, all_layers: bool = False):
        """Returns `[B, L, H]`; with `all_layers`, `x` and all outputs: `[1 + layers, B, L, H]`.

        With int32 `[B, K]` positions, returns `[B, K, H]`: the last layer's feed-forward network
        then computes only those.
        """
        config = self.config

        def init_layers(key):
            layer, inputs = EncoderLayer(config, parent=None), (x[:1, :1], sequence_ids[:1, :1])
            keys = jax.random.split(key, config.num_layers)
            return jax.vmap(lambda key: layer.init(key, *inputs)["params"])(keys)

        if self.is_initializing():
            self.param("layers", init_layers)
        params = self.get_variable("params", "layers")
        if uses_kernel(config, x.shape[1]):
            params = fuse_projections(params)
        loops = config.scan_layers and config.num_layers > 1
        layers = [functools.partial(_apply_layer, config, is_last) for is_last in (False, True)]
        if config.remat != "none":
            policy = jax.checkpoint_policies.checkpoint_dots if config.remat == "dots" else None
            options = {"policy": policy, "prevent_cse": not loops}
            layers = [jax.checkpoint(layer, **options) for layer in layers]
        layer, last_layer = layers if positions is not None else (layers[0], None)
        dropouts = ()
        if dropout:
            sizes = config.num_layers, config.num_heads, x.shape[1]
            dropouts = layer_dropouts(self.make_rng("dropout"), dropout, *sizes)
        shared = sequence_ids, positions, [each._replace(words=None) for each in dropouts]
        stacked = params, [each.words for each in dropouts]
        if loops and not all_layers:
            saves = config.remat == "none"
            return run_layers(layer, saves, stacked[0], x, shared, stacked[1], last_layer)

        def apply(x, stacked, layer=layer):
            layer_params, words = stacked
            x = layer(gather_data(layer_params, x.dtype), x, shared, words, None)
            return x, x

        if loops:
            return jnp.concatenate([x[None], jax.lax.scan(apply, x, stacked)[1]])
        outputs, (leaves, tree) = [x], jax.tree.flatten(stacked)
        *first, last = zip(*map(jnp.unstack, leaves), strict=True)
        for each in first:
            outputs.append(apply(outputs[-1], tree.unflatten(each))[0])
        outputs.append(apply(outputs[-1], tree.unflatten(last), last_layer or layer)[0])
        return jnp.stack(outputs) if all_layers else outputs[-1]


def _apply_layer(config: BertConfig, is_last: bool, params, x, shared, words, stacks) -> jax.Array:
    sequence_ids, positions, dropouts = shared
    dropouts = [d._replace(words=w) for d, w in zip(dropouts, words, strict=True)]
    layer, positions = EncoderLayer(config, parent=None), positions if is_last else None
    inputs = x, sequence_ids, dropouts or (None,) * 3, stacks, positions
    return layer.apply({"params": params}, *inputs)


class Bert(nn.Module):
    """Embeddings, encoder and pooler, shared by all tasks.

    Takes int32 `[B, L]` arrays from `unpack_rows`, for B rows of length L with up to P sequences
    each, and settings for dropout, which also needs the "dropout" rng; None disables it.
    """

    config: BertConfig

    def setup(self):
        self.embeddings = Embeddings(self.config)
        self.encoder = Encoder(self.config)
        self.pooler = Dense(self.config, self.config.hidden_size)

    def __call__(
        self, *inputs: jax.Array, dropout=None, positions=None, all_layers=False
    ) -> jax.Array:
        """Returns hidden states `[B, L, H]`; with `all_layers`, `[1 + num_layers, B, L, H]`.

        The inputs are `BERT_INPUTS`. At int32 `[B, K]` positions it returns `[B, K, H]`, for less
        computation if they are few.
        """
        tokens, segment_ids, position_ids, sequence_ids = inputs
        x = self.embeddings(tokens, position_ids, segment_ids, dropout)
        if positions is None or is_few(positions.shape[1], x.shape[1]):
            return self.encoder(x, sequence_ids, dropout, positions, all_layers)
        return gather_positions(self.encoder(x, sequence_ids, dropout), positions)

    def pool(self, hidden: jax.Array) -> jax.Array:
        """Returns tanh(dense(hidden)) for `[B, P, H]`, hidden states at `pooled_positions`."""
        return jnp.tanh(self.pooler(hidden))


class MlmHead(nn.Module):
    """Dense, GELU, LayerNorm, then the transposed token embedding and a bias of its own."""

    config: BertConfig

    @nn.compact
    def __call__(self, hidden: jax.Array, gathered_token_embedding: jax.Array) -> jax.Array:
        """Returns float32 logits `[B, K, padded_vocab]` for hidden states `[B, K, H]`.

        Ids beyond the vocabulary, which only pad it to a whole tile, get the minimum float32: they
        have zero probability and are never predicted.
        """
        config = self.config
        x = gelu(Dense(config, config.hidden_size, name="transform")(hidden))
        x = LayerNorm(config, name="layer_norm")(x)
        bias = self.param("bias", nn.initializers.zeros, (config.padded_vocab_size,), jnp.float32)

        def product(copies, x):
            table, axes = copies[0].astype(x.dtype), (((x.ndim - 1,), (1,)), ((), ()))
            return jax.lax.dot_general(x, table, axes, preferred_element_type=jnp.float32)

        logits = map_fsdp_shards(
            product, (FSDP_BATCH_SPEC, FSDP_BATCH_SPEC), gathered_token_embedding, x
        )
        real = jnp.arange(config.padded_vocab_size) < config.vocab_size
        logits = _add_bias(config.dtype, logits, bias)
        return jnp.where(real, logits, jnp.finfo(jnp.float32).min)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _add_bias(dtype, logits, bias):
    return logits + bias


def _add_bias_backward(dtype, _, dlogits):
    # Computes dlogits once, in the dtype of both products: else each would compute the softmax.
    dbias = jnp.sum(dlogits, (0, 1))
    dlogits, dbias = jax.lax.optimization_barrier((dlogits.astype(dtype), dbias))
    return dlogits.astype(jnp.float32), dbias


_add_bias.defvjp(lambda *args: (_add_bias(*args), None), _add_bias_backward)


class BertForPreTraining(nn.Module):
    """BERT with the masked-LM and next-sentence heads (section 3.1).

    In a causal model the masked-LM head predicts the next token. Without `next_sentence` the model
    has neither pooler nor next-sentence head (section 5.1, "No NSP").
    """

    config: BertConfig
    next_sentence: bool = True

    def setup(self):
        self.bert = Bert(self.config)
        self.mlm = MlmHead(self.config)
        if self.next_sentence:
            initializer = nn.initializers.truncated_normal(self.config.initializer_range)
            self.nsp = nn.Dense(2, dtype=jnp.float32, kernel_init=initializer)

    def __call__(self, *inputs: jax.Array, dropout=None) -> tuple[jax.Array, jax.Array | None]:
        """Returns float32 logits `[B, K, padded_vocab]` and `[B, P, 2]` (IsNext, NotNext) or None.

        The inputs are the four of `Bert`, then the `mlm_positions` to predict at, int32 `[B, K]`,
        and the `pooled_positions` of the sequences, int32 `[B, P]`.
        """
        *inputs, mlm_positions, pooled_positions = inputs
        positions = mlm_positions
        if self.next_sentence:
            positions = jnp.concatenate([mlm_positions, pooled_positions], axis=1)
        hidden = self.bert(*inputs, dropout=dropout, positions=positions)
        masked, pooled = jnp.split(hidden, [mlm_positions.shape[1]], axis=1)
        mlm_logits = self.mlm(masked, self.bert.embeddings.gathered_token_embedding)
        return mlm_logits, self.nsp(self.bert.pool(pooled)) if self.next_sentence else None


def is_few(num_positions: int, length: int) -> bool:
    """Returns whether the last layer computes only these positions, rather than all."""
    return num_positions <= length // 2


def gather_positions(hidden: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns `hidden` `[B, L, H]` at int32 `[B, K]` positions: `[B, K, H]`."""
    return jnp.take_along_axis(hidden, positions[:, :, None], axis=1)
