"""Gives a model more tokens, or another vocabulary: every table with a row for each token.

These are the token embeddings, the output bias, an untied decoder, and the same of an ELECTRA's
generator. A new row is a weighted mean of old rows.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import flax
import numpy as np

from bert_jax.checkpoints.parameters import LoadedModel, model_settings, parameter_shapes
from bert_jax.data.features import check_layout
from bert_jax.model.architecture import config_from_settings
from bert_jax.objectives.replaced_tokens import GeneratorSettings
from bert_jax.tokenizers.new_words import add_words
from bert_jax.tokenizers.suggest_words import NewWord
from bert_jax.tokenizers.tokenizer import Tokenizer


class NewRows(NamedTuple):
    """Where the rows of new tables come from.

    Attributes:
      copied: int `[rows]`, the old row that a new one equals; -1 for none.
      mixed: new row -> int old rows and their weights, for rows that are weighted means.
    """

    copied: np.ndarray
    mixed: dict[int, tuple[np.ndarray, np.ndarray]]


class Extension(NamedTuple):
    """A model with more tokens, and where they are.

    Attributes:
      model: with the extended tokenizer.
      ids: of the new words.
      num_unused: how many of them have the id of an `[unused]` piece.
      num_spare: how many have a row that no token had, as in padded vocabularies.
      num_new: how many have a new row.
    """

    model: LoadedModel
    ids: list[int]
    num_unused: int
    num_spare: int
    num_new: int


def extend_vocabulary(model: LoadedModel, words: Sequence[NewWord]) -> Extension:
    """Returns a model with one token for each new word; all other outputs stay.

    Each new row is the mean of the rows of the word's old pieces. Koto et al. (2021, IndoBERTweet)
    found it better than other ways to begin new words of a domain, and random rows five times
    slower. As the output bias is the mean, too, the logit of a new word is the mean of those of its
    old pieces: it exceeds no logit that the model had, where that of a random row may take most of
    the probability (Hewitt, 2021, "Initializing new word embeddings").

    Raises ValueError as `add_words`.
    """
    config = config_from_settings(model.settings)
    old_size, old_rows = model.tokenizer.vocab_size, config.vocab_size
    tokenizer, ids = add_words(model.tokenizer, [word.piece for word in words])
    vocab_size = max(old_rows, tokenizer.vocab_size)
    copied = np.arange(vocab_size)
    copied[old_rows:] = -1
    mixed = {}
    for index, word in zip(ids, words, strict=True):
        copied[index] = -1
        mixed[index] = np.array(word.ids), np.full(len(word.ids), 1 / len(word.ids))
    num_unused = sum(index < old_size for index in ids)
    num_new = sum(index >= old_rows for index in ids)
    extended = change_rows(model, tokenizer, vocab_size, NewRows(copied, mixed))
    return Extension(extended, ids, num_unused, len(ids) - num_unused - num_new, num_new)


def change_rows(
    model: LoadedModel, tokenizer: Tokenizer, vocab_size: int, rows: NewRows, **fields
) -> LoadedModel:
    """Returns a model with another tokenizer, and in every table the rows that `rows` says.

    `fields` are further fields of the model config that differ. Raises ValueError if the model
    does not fit the tokenizer.
    """
    old = config_from_settings(model.settings)
    config = dataclasses.replace(old, vocab_size=vocab_size, **fields)
    check_layout(config, tokenizer)
    params = flax.traverse_util.flatten_dict(model.params, sep="/")
    for path in token_tables(old, model.settings, params):
        params[path] = _new_table(np.asarray(params[path]), config.padded_vocab_size, rows)
    params = flax.traverse_util.unflatten_dict(params, sep="/")
    settings = model.settings | model_settings(config, params)
    return model._replace(params=params, settings=settings, tokenizer=tokenizer)


def token_tables(config, settings: Mapping, params: Mapping) -> list[str]:
    """Returns the paths of the parameters with a row for each token.

    They are those whose shape follows the size of the vocabulary. Of a module that only the run's
    objective knows, they are those with as many rows; raises ValueError if another size is the
    same.
    """
    known = {"": config}
    if "generator" in settings:
        known["generator/"] = GeneratorSettings(**settings["generator"]).config(config)
    shapes, others = {}, {}
    for prefix, each in known.items():
        larger = dataclasses.replace(each, vocab_size=config.padded_vocab_size + 1)
        for tree, of in ((shapes, each), (others, larger)):
            leaves = parameter_shapes(of, settings.get("head")).items()
            tree |= {prefix + path: leaf.shape for path, leaf in leaves}
    rows = config.padded_vocab_size
    tables = []
    for path, value in params.items():
        if path in shapes:
            if shapes[path] != others[path]:
                tables.append(path)
        elif np.shape(value)[:1] == (rows,):
            if rows in (config.hidden_size, config.intermediate_size):
                raise ValueError(
                    f"{path} is {np.shape(value)}, of which {rows} may be the padded vocabulary or "
                    "a width of the model: remove this module, which only pre-training uses"
                )
            tables.append(path)
    return tables


def _new_table(old: np.ndarray, num_rows: int, rows: NewRows) -> np.ndarray:
    table = np.zeros((num_rows, *old.shape[1:]), np.float32)
    copies = np.flatnonzero(rows.copied >= 0)
    table[copies] = old[rows.copied[copies]]
    for row, (sources, weights) in rows.mixed.items():
        table[row] = weights @ old[sources].astype(np.float64)
    return table
