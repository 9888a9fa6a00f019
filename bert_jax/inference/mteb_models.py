"""Makes a loaded model one that mteb evaluates: `pip install 'bert_jax[mteb]'`, mteb 2.

    import bert_jax, mteb
    from bert_jax.inference.mteb_models import mteb_model

    model = mteb_model(bert_jax.load("runs/bi_encoder"))
    results = mteb.evaluate(model, mteb.get_tasks(["SciFact"]))

These are mteb's `EncoderProtocol` and `CrossEncoderProtocol`, which need no base class.
"""

import pathlib
from collections.abc import Iterable, Mapping

import numpy as np

from bert_jax.inference.forward import ROWS_PER_BATCH
from bert_jax.inference.pretrained_model import PretrainedModel
from bert_jax.model.heads import find_head


def mteb_model(model: PretrainedModel, name: str = "") -> "MtebEncoder | MtebCrossEncoder":
    """Returns a model that `mteb.evaluate` takes.

    Args:
      model: a cross-encoder, a bi-encoder, or an encoder, whose vectors are means over the tokens.
      name: under which mteb stores the results, "organization/model". Default: "bert_jax/" and the
        name of the model's directory.

    Raises ValueError for a model with another head.
    """
    head = find_head(model.head) if model.head else None
    if head and head.predicts not in ("vector", "choice"):
        expected = "an encoder, a bi-encoder or a cross-encoder"
        raise ValueError(f"this model has a head for {model.head['task']}: expected {expected}")
    name = name or f"bert_jax/{pathlib.Path(model.source or 'model').absolute().name}"
    return (MtebCrossEncoder if head and head.predicts == "choice" else MtebEncoder)(model, name)


def _texts_of(inputs: Iterable[Mapping]) -> list[str]:
    """Returns the texts of mteb's batches."""
    return [text for batch in inputs for text in batch["text"]]


def _describe(model: PretrainedModel, name: str, **fields):
    """Returns mteb's description of a model."""
    from mteb.models.model_meta import ModelMeta

    length = (model.head or {}).get("max_seq_length", model.config.max_position_embeddings)
    return ModelMeta.create_empty({"name": name, "max_tokens": length, **fields})


class MtebEncoder:
    """The vectors of an encoder or a bi-encoder, with its prompts of queries and passages."""

    def __init__(self, model: PretrainedModel, name: str):
        self._model = model
        self._has_prompts = bool(model.head)
        self.mteb_model_meta = _describe(model, name)

    def encode(
        self,
        inputs: Iterable[Mapping],
        *,
        task_metadata: object,
        hf_split: str,
        hf_subset: str,
        prompt_type: object = None,
        batch_size: int = ROWS_PER_BATCH,
        **kwargs: object,
    ) -> np.ndarray:
        """Returns float32 `[texts, size]`; `prompt_type` is "query", "document" or None.

        `batch_size` is as for `PretrainedModel.encode`.
        """
        is_named = prompt_type is not None and self._has_prompts
        prompt_name = str(getattr(prompt_type, "value", prompt_type)) if is_named else None
        return self._model.encode(_texts_of(inputs), batch_size=batch_size, prompt_name=prompt_name)

    def similarity(self, embeddings1: np.ndarray, embeddings2: np.ndarray) -> np.ndarray:
        """Returns `[first, second]`: cosines, or of a head that does not normalize dot products."""
        first, second = map(self._rows, (embeddings1, embeddings2))
        return first @ second.T

    def similarity_pairwise(self, embeddings1: np.ndarray, embeddings2: np.ndarray) -> np.ndarray:
        """Returns the similarity of each vector with that in the same place, `[vectors]`."""
        first, second = map(self._rows, (embeddings1, embeddings2))
        return np.sum(first * second, axis=-1)

    def _rows(self, vectors: np.ndarray) -> np.ndarray:
        """Returns `[vectors, size]`, of length 1 unless the head is compared by dot products."""
        vectors = np.atleast_2d(np.asarray(vectors, np.float32))
        if self._model.head and not self._model.head["normalize"]:
            return vectors
        return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


class MtebCrossEncoder:
    """The scores of a cross-encoder."""

    def __init__(self, model: PretrainedModel, name: str):
        self._model = model
        self.mteb_model_meta = _describe(model, name, model_type=["cross-encoder"])

    def predict(
        self,
        inputs1: Iterable[Mapping],
        inputs2: Iterable[Mapping],
        *,
        task_metadata: object,
        hf_split: str,
        hf_subset: str,
        prompt_type: object = None,
        **kwargs: object,
    ) -> np.ndarray:
        """Returns the score of each query and passage in the same place, float32 `[pairs]`."""
        pairs = zip(_texts_of(inputs1), _texts_of(inputs2), strict=True)
        return self._model.score_pairs(list(pairs))
