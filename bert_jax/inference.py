"""Loads a trained model and applies it: `bert_jax.load(directory)`. One CPU is enough."""

import dataclasses
import functools
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from bert_jax import partitioning
from bert_jax.data.features import Feature, RowShape
from bert_jax.interop.parameters import unexpected_tensors
from bert_jax.interop.read import read_model
from bert_jax.model import forward
from bert_jax.model.config import BertConfig
from bert_jax.model.heads import HEADS, make_model
from bert_jax.tasks import spans
from bert_jax.tasks.conll import Sentence
from bert_jax.tasks.masked_text import Fill, best_fills, tokenize_masked
from bert_jax.tasks.sequences import make_sequences
from bert_jax.tasks.tagged_text import Tagging, split_words, tagged_text
from bert_jax.tasks.tagging import best_tags, tagging_features
from bert_jax.tasks.text_classification import most_probable
from bert_jax.tokenization import Tokenizer
from bert_jax.training import finetune_step

__all__ = ["Answer", "Classification", "Fill", "PretrainedModel", "Ranked", "Tagging", "load"]


def load(directory: str | pathlib.Path) -> "PretrainedModel":
    """Loads a model, whatever devices wrote it; warns of unused and missing tensors.

    Args:
      directory: a run's workdir, a checkpoint, or a directory of Hugging Face transformers or of
        Google's release. In a workdir the best checkpoint is used, or else the latest.

    Raises:
      FileNotFoundError: `directory` holds no model.
      CheckpointError: the checkpoint is damaged.
      ValueError: a directory of another library that cannot be converted.
    """
    params, settings, tokenizer, report = read_model(directory)
    if found := unexpected_tensors(report):
        warnings.warn(
            f"{directory}: {found}; a task's head is loaded if `architectures` in config.json "
            "names its class, such as BertForTokenClassification",
            stacklevel=2,
        )
    # Computes in float32: bfloat16 is for the accelerators that trained the model.
    config = dataclasses.replace(BertConfig(**settings["bert"]), dtype="float32")
    return PretrainedModel(config, tokenizer, jax.device_put(params), settings)


class Answer(NamedTuple):
    """An answer, its probability, and its characters `[begin, end)`; "" means no answer."""

    text: str
    probability: float
    begin: int
    end: int


class Classification(NamedTuple):
    """The most probable label, and its probability."""

    label: str
    probability: float


class Ranked(NamedTuple):
    """A candidate, its index in the input, its logit, and the softmax of the logits."""

    text: str
    index: int
    score: float
    probability: float


class PretrainedModel:
    """A model restored by `load`, in float32 on one device.

    Lengths count [CLS] and [SEP]. Texts that are too long are truncated, as in fine-tuning, with a
    warning. An argument of the wrong type raises TypeError; an invalid value, or a model without
    the head that a method needs, raises ValueError.

    Attributes:
      config: the architecture.
      tokenizer: the tokenizer of its vocabulary.
      params: the parameter tree: "bert", and "mlm", "nsp" and "head" where the model has them.
      settings: the resolved configuration, as stored in the checkpoint.
      head: `settings["head"]`, the "task", "labels" and lengths of a fine-tuned head, or None.
    """

    def __init__(
        self, config: BertConfig, tokenizer: Tokenizer, params: dict, settings: dict | None = None
    ):
        self.config, self.tokenizer, self.params = config, tokenizer, params
        self.settings = settings or {}
        self.head = self.settings.get("head")
        self._max_length = (self.head or {}).get("max_seq_length", config.max_position_embeddings)

    def fill_mask(self, text: str, top_k: int = 5) -> list[Fill] | list[list[Fill]]:
        """Predicts the tokens behind the masks of a text.

        Args:
          text: a text with one or several masks (`[MASK]`). It is not truncated.
          top_k: number of predictions for each mask.

        Returns:
          The most probable tokens, best first; for several masks such a list for each of them.

        Raises:
          ValueError: no mask, too long a text, a `top_k` out of range, or no masked-LM head.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be one string, got {type(text).__name__}")
        if self.tokenizer.mask_token not in text:
            raise ValueError(f"text has no {self.tokenizer.mask_token} to fill in: {text!r}")
        _check_top_k(top_k, self.config.vocab_size)
        if "mlm" not in self.params:
            raise ValueError("this model has no masked-LM head, so it cannot fill in masks")
        tokens, masks = tokenize_masked(text, self.tokenizer)
        limit = self.config.max_position_embeddings
        if len(tokens) > limit:
            found = f"{len(tokens)} tokens with [CLS] and [SEP]"
            raise ValueError(f"text has {found}, and this model takes at most {limit}: shorten it")
        feature = Feature((np.array(tokens),), (len(tokens),))
        ((_, rows),) = forward.batch_by_length([feature], 1, limit)
        positions = np.pad([masks], ((0, 0), (0, -len(masks) % 8)))  # Few shapes are compiled.
        logits = forward.mlm_logits(self.config, self.params, rows, positions)[0, : len(masks)]
        probabilities = np.asarray(jax.nn.softmax(logits, axis=-1))
        fills = best_fills(text, probabilities, top_k, self.tokenizer)
        return fills[0] if len(fills) == 1 else fills

    def answer(
        self, question: str, context: str, top_k: int = 1, null_threshold: float | None = None
    ) -> list[Answer]:
        """Finds answers to a question in a context of any length (paper, sections 4.2 and 4.3).

        Args:
          question, context: texts that are not empty.
          top_k: maximum number of answers, at most 20.
          null_threshold: margin by which the logits of "no answer" must exceed an answer's to rank
            above it. None: as fine-tuned; a SQuAD 1.1 model then always answers.

        Returns:
          The best answers, best first; probabilities are normalized over the 20 best.
        """
        for name, text in (("question", question), ("context", context)):
            if not isinstance(text, str):
                raise TypeError(f"{name} must be one string, got {type(text).__name__}")
            if not text.strip():
                raise ValueError(f"the {name} is empty")
        _check_top_k(top_k, spans.N_BEST)
        head = self._need_head("answer questions", "span")
        config = spans.span_config(head, self.config.max_position_embeddings)
        if null_threshold is not None:
            if not isinstance(null_threshold, int | float | np.number):
                raise TypeError(f"null_threshold must be a number, got {null_threshold!r}")
            config = dataclasses.replace(config, null_answers=True, null_threshold=null_threshold)
        (passage,) = spans.make_passages([(question, context)], self.tokenizer, config)
        outputs = self._head_outputs(passage.features)
        ranked = spans.best_spans(passage, outputs, config.max_answer_length, spans.N_BEST)
        if config.null_answers:
            null = spans.null_span(outputs)
            place = sum(null.score - span.score <= config.null_threshold for span in ranked)
            ranked.insert(place, null)
        best = list(zip(ranked, spans.probabilities(ranked), strict=True))[:top_k]
        return [Answer(passage.text(span), p, span.begin, span.end) for span, p in best]

    def encode(
        self,
        texts: Sequence[str],
        pooling: str | None = None,
        batch_size: int = 32,
        max_length: int | None = None,
    ) -> np.ndarray:
        """Computes a vector for each text.

        Args:
          texts: texts of any length.
          pooling: "mean" of the last layer over all tokens; "cls", the last layer at [CLS]; or
            "pooler", the tanh layer above that. None: "mean"; for a bi-encoder its own, and
            normalized if it was trained so.
          batch_size: maximum number of texts in a forward pass.
          max_length: in tokens. None: the position table; for a bi-encoder `head["max_seq_length"]`
            (for queries, give `head["max_query_length"]`).

        Returns:
          float32 `[num_texts, hidden_size]`.
        """
        bi_encoder = self.head if self.head and self.head["task"] == "embedding" else {}
        limit = self.config.max_position_embeddings
        if max_length is None:
            max_length = bi_encoder.get("max_seq_length", limit)
        if not 2 <= max_length <= limit:
            raise ValueError(f"max_length must be in [2, {limit}], got {max_length!r}")
        normalize = pooling is None and bi_encoder.get("normalize", False)
        if pooling is None:
            pooling = bi_encoder.get("pooling", "mean")
        if pooling not in ("mean", "cls", "pooler"):
            raise ValueError(f"pooling must be 'mean', 'cls' or 'pooler', got {pooling!r}")
        params = self.params["bert"]
        if pooling == "pooler" and "pooler" not in params:
            raise ValueError("this model has no pooler: choose another pooling, 'mean' or 'cls'")
        vectors = np.zeros((len(texts), self.config.hidden_size), np.float32)
        features = self._features(texts, max_length)
        for indices, rows in forward.batch_by_length(features, batch_size, max_length):
            pooled = forward.pooled_vectors(self.config, pooling, params, rows)
            vectors[indices] = pooled[: len(indices)]
        if normalize:
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors

    def features(
        self, texts: Sequence[str], layers: Sequence[int] = (-4, -3, -2, -1), batch_size: int = 32
    ) -> list[np.ndarray]:
        """Computes the hidden states of each text, as features (paper, section 5.3).

        Args:
          texts, batch_size: as in `encode`.
          layers: 0 is the embeddings, 1 to `num_layers` the layers, -1 the last layer.

        Returns:
          For each text float32 `[num_tokens, len(layers), hidden_size]`, [CLS] and [SEP] included.
        """
        layers, last = tuple(layers), self.config.num_layers
        if not layers or not all(-last - 1 <= layer <= last for layer in layers):
            raise ValueError(f"layers must be in [{-last - 1}, {last}], got {layers!r}")
        limit = self.config.max_position_embeddings
        features = self._features(texts, limit)
        found = [np.zeros(0)] * len(features)
        for indices, rows in forward.batch_by_length(features, batch_size, limit):
            states = forward.hidden_states(self.config, layers, self.params["bert"], rows)
            for index, state in zip(indices, np.asarray(states), strict=False):
                # A view would keep the whole batch.
                found[index] = state[: len(features[index])].copy()
        return found

    def classify(
        self, texts: Sequence[str | tuple[str, str]]
    ) -> list[Classification] | list[float]:
        """Classifies texts or pairs of texts, or predicts a value for each.

        Args:
          texts: texts or pairs.

        Returns:
          The most probable label of each; for a regression head, its value.
        """
        head = self._need_head("classify", "classification", "regression")
        features = self._features(texts, self._max_length, pairs=True)
        outputs = self._head_outputs(features) if features else []
        if head["task"] == "regression":
            return [float(output[0]) for output in outputs]
        best = map(most_probable, outputs)
        return [Classification(head["labels"][index], probability) for index, probability in best]

    def rank(self, text: str, candidates: Sequence[str]) -> list[Ranked]:
        """Ranks passages for a query (cross-encoder), or endings of a story (multiple choice).

        Args:
          text: the query, or the story.
          candidates: passages or endings.

        Returns:
          All candidates, best first.
        """
        head = self._need_head("rank texts", "multiple_choice")
        texts = [text, *candidates]
        if isinstance(candidates, str) or not all(isinstance(each, str) for each in texts):
            raise TypeError("text must be one string, and candidates a list of strings")
        if not candidates:
            return []
        pairs, limit = [(text, each) for each in candidates], self._max_length
        max_first = head.get("max_query_length", limit) - 2
        features = self._features(pairs, limit, pairs=True, max_first=max_first)
        scores = np.concatenate(self._head_outputs(features))
        probabilities = np.exp(scores - np.logaddexp.reduce(scores))
        order = np.argsort(-scores, kind="stable").tolist()
        return [Ranked(candidates[i], i, float(scores[i]), float(probabilities[i])) for i in order]

    def tag(self, text: str | Sequence[str]) -> Tagging:
        """Tags the words of a text of any length, and finds the entities that the tags mark.

        Args:
          text: a text, which is split into words and punctuation marks, or a list of words.

        Returns:
          `words` with their tags, and `entities` with their types and characters `[start, end)`. In
          a list of words, characters are counted as if a space separated them.
        """
        head = self._need_head("tag words", "tagging", "feature_based")
        text, places = split_words(text)
        if not places:
            return Tagging([], [])
        words, limit = [text[start:end] for start, end in places], self._max_length
        sentence = Sentence(words, [], None, 0)
        features, positions, _ = tagging_features([sentence], (), self.tokenizer, limit, False)
        numbers = best_tags(self._head_outputs(features), positions)
        return tagged_text(text, places, [head["labels"][number] for number in numbers])

    def _need_head(self, purpose: str, *tasks: str) -> Mapping:
        """Returns the settings of the head; raises ValueError if it is for none of `tasks`."""
        if not self.head or self.head["task"] not in tasks:
            found = f"a head for {self.head['task']}" if self.head else "no head of a task"
            raise ValueError(
                f"this model has {found}, so it cannot {purpose}: load one that was fine-tuned for "
                f"{' or '.join(tasks)}"
            )
        return self.head

    def _features(
        self, texts: Sequence, max_length: int, pairs: bool = False, max_first: int | None = None
    ) -> list[Feature]:
        """Tokenizes texts, or if `pairs` also pairs of texts; warns of truncated ones."""
        parts = [text if pairs and isinstance(text, tuple | list) else (text,) for text in texts]
        strings = all(isinstance(part, str) for each in parts for part in each)
        if isinstance(texts, str) or not strings or {*map(len, parts)} not in (set(), {1}, {2}):
            expected = "a list of strings" + ", or a list of pairs of strings" * pairs
            raise TypeError(f"texts must be {expected}, got {texts!r:.60}")
        sequences, truncated = make_sequences(parts, self.tokenizer, max_length, max_first)
        if any(truncated):
            warnings.warn(
                f"{sum(truncated)} of {len(parts)} texts are truncated to {max_length} tokens, "
                "[CLS] and [SEP] included",
                stacklevel=3,
            )
        return [Feature((tokens,), (second_start,)) for tokens, second_start in sequences]

    def _head_outputs(self, features: Sequence[Feature]) -> list[np.ndarray]:
        """Returns the head's output for each feature, as described at `heads.Outputs`."""
        model, head = make_model(self.config, self.head), HEADS[self.head["task"]]
        length = forward.padded_length(max(map(len, features)), self.config.max_position_embeddings)
        shape = RowShape(length, max(length // 8, 1), head.labels, self.tokenizer.pad_id)
        mesh = partitioning.make_mesh(devices=jax.devices()[:1])
        max_rows = finetune_step.default_microbatch_rows(length, 0, mesh)
        # A power of two, so that few shapes are compiled.
        num_rows = min(max_rows, 1 << (len(features) - 1).bit_length())
        sharding = partitioning.batch_sharding(mesh)
        return finetune_step.predict(
            _predict_step(model, mesh), self.params, head, features, shape, num_rows, sharding
        )


# Compiled once for each model.
_predict_step = functools.lru_cache(maxsize=4)(finetune_step.make_predict_step)


def _check_top_k(top_k: int, limit: int) -> None:
    if not isinstance(top_k, int | np.integer) or not 1 <= top_k <= limit:
        raise ValueError(f"top_k must be a whole number in [1, {limit}], got {top_k!r}")
