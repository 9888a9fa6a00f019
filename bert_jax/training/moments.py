"""Takes Adam's moments from another run, of each parameter whose shape and meaning are the same."""

import pathlib
from collections.abc import Mapping

import jax
import numpy as np
import optax
from absl import logging
from flax.traverse_util import flatten_dict, unflatten_dict

from bert_jax.checkpoints.new_vocabulary import token_tables
from bert_jax.checkpoints.parameters import LoadedModel
from bert_jax.checkpoints.verify import load_training_state
from bert_jax.model.architecture import config_from_settings
from bert_jax.tokenizers.tokenizer import Tokenizer, read_stored


def read_moments(
    directory: pathlib.Path, params: Mapping, weights: LoadedModel
) -> optax.ScaleByAdamState:
    """Returns the moments in a checkpoint for a run that starts from `weights`; logs what is zero.

    A parameter has the moments of the one of its path if their shapes are the same. Of a table with
    more rows, and of more layers, the first ones have theirs. If the vocabularies differ, rows have
    theirs where a token has the same id in both. All others are zero.

    Args:
      params: of the run, or their shapes.

    Raises CheckpointError.
    """
    saved = _adam(load_training_state(directory)["opt_state"])
    means, squares = (flatten_dict(jax.device_get(saved[name]), sep="/") for name in ("mu", "nu"))
    shapes = {path: leaf.shape for path, leaf in flatten_dict(params, sep="/").items()}
    token_rows = {}
    tokenizer = read_stored(directory / "vocabulary")
    if tokenizer.sha256 != weights.tokenizer.sha256:
        same = _same_tokens(tokenizer, weights.tokenizer)
        config = config_from_settings(weights.settings)
        tables = token_tables(config, weights.settings, flatten_dict(params, sep="/"))
        token_rows = dict.fromkeys(tables, same)
    rows = {
        path: _rows_to_take(path, means[path].shape, shape, token_rows.get(path))
        for path, shape in shapes.items()
        if path in means
    }
    _log(directory, rows, shapes, means.keys() - shapes.keys())

    def fit(values: dict[str, np.ndarray]) -> dict:
        fitted = {}
        for path, shape in shapes.items():
            fitted[path] = np.zeros(shape, np.float32)
            if (taken := rows.get(path)) is not None:
                fitted[path][taken] = values[path][taken]
        return unflatten_dict(fitted, sep="/")

    count = np.asarray(jax.device_get(saved["count"]), np.int32)
    return optax.ScaleByAdamState(count=count, mu=fit(means), nu=fit(squares))


def _adam(state) -> Mapping:
    """Returns Adam's part of an optimizer state, as it is stored: nested lists and dicts."""
    if isinstance(state, Mapping) and "mu" in state:
        return state
    children = state.values() if isinstance(state, Mapping) else state
    found = [_adam(child) for child in children if isinstance(child, Mapping | list | tuple)]
    return next((each for each in found if each), {})


def _same_tokens(old: Tokenizer, new: Tokenizer) -> np.ndarray:
    """Returns the ids that are the same token in both vocabularies."""
    ids = range(min(old.vocab_size, new.vocab_size))
    return np.array([i for i in ids if old.id_to_token(i) == new.id_to_token(i)], np.int64)


def _rows_to_take(
    path: str, found: tuple[int, ...], wanted: tuple[int, ...], token_rows: np.ndarray | None
) -> slice | np.ndarray | None:
    """Returns which rows of a moment of shape `found` one of shape `wanted` takes; None: none."""
    if found[1:] != wanted[1:]:
        return None
    if token_rows is not None:
        return token_rows[token_rows < min(found[0], wanted[0])]
    if found == wanted:
        return slice(None)
    has_rows = path.endswith("/embedding") or path.startswith("encoder/layers/")
    return slice(found[0]) if has_rows and found[0] < wanted[0] else None


def _log(directory: pathlib.Path, rows: Mapping, shapes: Mapping, unused: set[str]) -> None:
    """Logs how many parameters have the moments of `directory`, and which have not, or in part."""
    groups = {}  # What a parameter takes -> paths.
    for path, shape in shapes.items():
        if (taken := rows.get(path)) is None:
            groups.setdefault("zero", []).append(path)
        elif shape and (count := len(np.arange(shape[0])[taken])) < shape[0]:
            groups.setdefault(f"{count:,} of {shape[0]:,} rows", []).append(path)
    if unused:
        groups["not used"] = unused
    taken = len(shapes) - len(groups.get("zero", ()))
    logging.info("Optimizer's moments of %s: taken for %d parameters", directory, taken)
    for what, paths in groups.items():
        logging.info("  %s, for %d: %s", what, len(paths), ", ".join(sorted(paths)))
