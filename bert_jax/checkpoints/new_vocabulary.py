"""Gives a model more tokens, or another vocabulary: every table with a row for each token.

These are the token embeddings, the output bias, an untied decoder, and the same of an ELECTRA's
generator. A new row is a weighted mean of old rows.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import flax
import numpy as np

from bert_jax.checkpoints.parameters import LoadedModel, model_settings, parameter_shapes
from bert_jax.data.features import check_layout
from bert_jax.model.architecture import config_from_settings
from bert_jax.objectives.replaced_tokens import GeneratorSettings
from bert_jax.tokenizers.new_words import add_words
from bert_jax.tokenizers.overlap import find_overlap
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
    """Returns a model with one token for each new word.

    Texts without new words, or words that begin with one, keep their ids, and the logits of old
    tokens bit for bit; with byte-level BPE, longer words never change. Probabilities change, since
    new tokens take part in the softmax.

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


class Replacement(NamedTuple):
    """A model with another vocabulary, and where the vectors of its tokens come from.

    Attributes:
      model: with the new tokenizer.
      num_shared: how many tokens keep their vectors; special tokens are among them.
      num_similar: how many are means of shared tokens that are used similarly.
      num_pieces: how many, too rare for that, are the mean of their old pieces.
      num_mean: how many, of which nothing is known, are the mean of all shared tokens.
      examples: new token -> the shared tokens of the largest weights, and these.
    """

    model: LoadedModel
    num_shared: int
    num_similar: int
    num_pieces: int
    num_mean: int
    examples: dict[str, list[tuple[str, float]]]


def replace_vocabulary(
    model: LoadedModel, tokenizer: Tokenizer, vectors: np.ndarray, num_examples: int = 5
) -> Replacement:
    """Returns a model with another vocabulary (FOCUS; Dobler and de Melo, 2023, section 3).

    Tokens that the old tokenizer has keep their rows. Any other row is a mean of these, weighted by
    the sparsemax of the cosines between static vectors of the new tokens. Of tokens without such a
    vector, the paper draws random rows; here they are the mean of their old pieces, or of all
    shared tokens.

    Args:
      vectors: float [vocab_size, dimensions], of the new tokens in text of the new language or
        domain; of length 1, or 0 for none.

    Raises ValueError if no token with a vector is shared, or the model does not fit the tokenizer.
    """
    overlap = find_overlap(model.tokenizer, tokenizer)
    shared = np.flatnonzero(overlap.shared >= 0)
    has_vector = vectors.any(axis=1)
    anchors = shared[has_vector[shared]]
    if not len(anchors):
        raise ValueError(
            "the vocabularies share no token that is frequent in the text, so there is nothing to "
            "start from: train a new model"
        )
    mixed, examples = {}, {}
    others = np.setdiff1d(np.arange(tokenizer.vocab_size), shared)
    similar = others[has_vector[others]]
    for index, weights in zip(similar, _similarities(vectors, similar, anchors), strict=True):
        chosen = np.flatnonzero(weights)
        mixed[int(index)] = overlap.shared[anchors[chosen]], weights[chosen]
        if len(examples) < num_examples:
            best = chosen[np.argsort(-weights[chosen], kind="stable")[:3]]
            examples[tokenizer.id_to_token(index)] = [
                (tokenizer.id_to_token(anchors[each]), float(weights[each])) for each in best
            ]
    num_pieces = 0
    for index in others[~has_vector[others]]:
        sources = overlap.pieces[index] or overlap.shared[shared]
        num_pieces += bool(overlap.pieces[index])
        mixed[int(index)] = np.array(sources), np.full(len(sources), 1 / len(sources))
    fields = {}
    for name, role in (("mask_id", tokenizer.mask_id), ("sep_id", tokenizer.sep_id)):
        if hasattr(config_from_settings(model.settings), name):
            fields[name] = role
    rows = NewRows(overlap.shared, mixed)
    return Replacement(
        change_rows(model, tokenizer, tokenizer.vocab_size, rows, **fields),
        num_shared=len(shared),
        num_similar=len(similar),
        num_pieces=num_pieces,
        num_mean=len(others) - len(similar) - num_pieces,
        examples=examples,
    )


def _similarities(
    vectors: np.ndarray, tokens: np.ndarray, anchors: np.ndarray
) -> Iterator[np.ndarray]:
    """Yields for each token its weights of the anchors, float64 [anchors], which sum to 1."""
    for block in np.array_split(tokens, -(-len(tokens) // 256)) if len(tokens) else ():
        yield from sparsemax(vectors[block].astype(np.float64) @ vectors[anchors].T)


def sparsemax(scores: np.ndarray) -> np.ndarray:
    """Returns the point of the simplex closest to each row (Martins and Astudillo, 2016).

    `scores` are float [rows, n]; most of the weights are 0.
    """
    descending = -np.sort(-scores, axis=1)
    sums = np.cumsum(descending, axis=1)
    ranks = np.arange(1, scores.shape[1] + 1)
    size = np.sum(1 + ranks * descending > sums, axis=1, keepdims=True)
    threshold = (np.take_along_axis(sums, size - 1, axis=1) - 1) / size
    return np.maximum(scores - threshold, 0)


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
