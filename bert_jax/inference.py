"""A checkpoint in a notebook: `bert_jax.load(directory)`, one CPU is enough."""

import dataclasses
import functools
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.checkpoint import load_checkpoint
from bert_jax.config import BertConfig
from bert_jax.model import BertForPreTraining
from bert_jax.tokenization import Tokenizer

LENGTH_STEP = 32
"""Texts are padded up to a multiple of this, so that few lengths are ever compiled."""


class Fill(NamedTuple):
    """One way to fill in a mask: the piece, its probability, and the text with it."""

    token: str
    probability: float
    text: str


class PretrainedModel:
    """A pre-trained BERT: `config`, `tokenizer`, `params` and what to ask of it."""

    def __init__(self, config: BertConfig, tokenizer: Tokenizer, params: dict):
        self.config, self.tokenizer, self.params = config, tokenizer, params
        self._apply = jax.jit(BertForPreTraining(config).apply)

    def fill_mask(self, text: str, top_k: int = 5) -> list[Fill] | list[list[Fill]]:
        """The `top_k` likeliest pieces for each mask in `text`, likeliest first.

        A list of `Fill` for a text with one mask, and a list of such lists for several, each mask
        filled with the others left open. Raises TypeError for what is not one text, and ValueError
        for a text without a mask or longer than the position table, or an impossible `top_k`.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be one string, got {type(text).__name__}")
        tokenizer = self.tokenizer
        parts = text.split(tokenizer.mask_token)
        if len(parts) == 1:
            raise ValueError(f"text has no {tokenizer.mask_token} to fill in: {text!r}")
        size = self.config.vocab_size
        if not isinstance(top_k, int | np.integer) or not 1 <= top_k <= size:
            raise ValueError(f"top_k must be a whole number in [1, {size}], got {top_k!r}")
        tokens = [tokenizer.cls_id, *tokenizer.encode(parts[0])]
        masks = []
        for part in parts[1:]:
            masks.append(len(tokens))
            tokens += [tokenizer.mask_id, *tokenizer.encode(part, continues=True)]
        tokens.append(tokenizer.sep_id)
        logits = self._mlm_logits(tokens, masks)
        probabilities = np.asarray(jax.nn.softmax(logits, axis=-1))
        fills = []
        for number, row in enumerate(probabilities):
            before, after = parts[: number + 1], parts[number + 1 :]
            fills.append([])
            for token_id in np.argsort(-row, kind="stable")[:top_k]:
                token = tokenizer.id_to_token(int(token_id))
                open_text = tokenizer.mask_token.join
                # A piece that continues a word joins the one before it.
                start = open_text(before)
                start = start.rstrip() if not tokenizer.word_start[token_id] else start
                word = token.removeprefix("##").removeprefix("▁")
                filled = start + word + open_text(after)
                fills[-1].append(Fill(token, float(row[token_id]), filled))
        return fills[0] if len(fills) == 1 else fills

    def _mlm_logits(self, tokens: list[int], positions: list[int]) -> jax.Array:
        """float32 `[len(positions), padded_vocab_size]` for one sequence of token ids."""
        limit = self.config.max_position_embeddings
        if len(tokens) > limit:
            raise ValueError(
                f"the text has {len(tokens)} tokens with [CLS] and [SEP], but this model's "
                f"position table ends at {limit}: shorten or split it"
            )
        length = min(-(-len(tokens) // LENGTH_STEP) * LENGTH_STEP, limit)
        row = np.full((1, length), self.tokenizer.pad_id, np.int32)
        row[0, : len(tokens)] = tokens
        sequence_ids = (np.arange(length) < len(tokens)).astype(np.int32)[None]
        slots = np.zeros((1, -(-len(positions) // 8) * 8), np.int32)  # Few shapes here too.
        slots[0, : len(positions)] = positions
        mlm_logits, _ = self._apply(
            {"params": self.params},
            row,
            np.zeros_like(row),
            np.arange(length, dtype=np.int32)[None],
            sequence_ids,
            slots,
            np.zeros((1, 1), np.int32),
        )
        return mlm_logits[0, : len(positions)]


def load(directory: str | pathlib.Path) -> PretrainedModel:
    """The model of a workdir or of one checkpoint, whatever devices wrote it.

    Raises FileNotFoundError where there is no checkpoint, CheckpointError for a damaged one.
    """
    params, settings, tokenizer = load_checkpoint(directory, abstract_params)
    # The parameters are float32; bfloat16 arithmetic is for the accelerators that trained them.
    config = dataclasses.replace(BertConfig(**settings["bert"]), dtype="float32")
    return PretrainedModel(config, tokenizer, params)


def abstract_params(settings: dict) -> dict:
    """The tree of shapes and dtypes of a checkpoint's parameters, from its settings."""
    ids = jnp.zeros((1, 2), jnp.int32)
    model = BertForPreTraining(BertConfig(**settings["bert"]))
    init = functools.partial(model.init, jax.random.key(0))
    return jax.eval_shape(init, *[ids] * 6)["params"]
