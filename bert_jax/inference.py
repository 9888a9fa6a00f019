"""Loads a trained model and applies it: `bert_jax.load(directory)`. One CPU is enough."""

import dataclasses
import functools
import itertools
import pathlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from scipy.special import softmax

from bert_jax.data.features import Feature
from bert_jax.interop.parameters import unexpected_tensors
from bert_jax.interop.read import read_model
from bert_jax.model import forward
from bert_jax.model.config import BertConfig
from bert_jax.model.heads import HEADS, make_model
from bert_jax.tasks import spans
from bert_jax.tasks.conll import Sentence
from bert_jax.tasks.masked_text import Fill, best_fills, tokenize_masked
from bert_jax.tasks.sequences import make_sequences
from bert_jax.tasks.spans import Answer
from bert_jax.tasks.tagged_text import Tagging, split_words, tagged_text
from bert_jax.tasks.tagging import best_tags, tagging_features
from bert_jax.tasks.text_classification import Classification, best_labels
from bert_jax.tokenization import Tokenizer

__all__ = ["Answer", "Classification", "Fill", "PretrainedModel", "Ranked", "Tagging", "load"]


Texts = str | Sequence[str]  # One text, or several.


def load(directory: str | pathlib.Path) -> "PretrainedModel":
    """Loads a model, whatever devices wrote it; warns about unused and missing tensors.

    `directory` is a run's workdir (its best checkpoint is used, or else the latest), a checkpoint,
    or a Hugging Face transformers or Google release directory. Raises FileNotFoundError if
    it holds no model, CheckpointError if it is damaged, and ValueError if it cannot be converted.
    """
    params, settings, tokenizer, report = read_model(directory)
    if found := unexpected_tensors(report):
        hint = "a head is loaded if `architectures` in config.json names its class"
        warnings.warn(f"{directory}: {found}; {hint}", stacklevel=2)
    # Computes in float32: bfloat16 is for the accelerators that trained the model.
    config = dataclasses.replace(BertConfig(**settings["bert"]), dtype="float32")
    return PretrainedModel(config, tokenizer, jax.device_put(params), settings, str(directory))


class Ranked(NamedTuple):
    """A candidate, its index in the input, its logit, and the softmax of the logits."""

    text: str
    index: int
    score: float
    probability: float


class PretrainedModel:
    """A model restored by `load`, in float32 on one device.

    For a list of inputs, methods return a list; for a single one (a string, or a tuple: a pair of
    texts or the words of one text), just its result. Lengths include [CLS] and [SEP]. Overlong
    texts are truncated, as in fine-tuning, with a warning. An argument of the wrong type raises
    TypeError; an invalid value, or a model without the head that a method needs, ValueError.

    Attributes:
      config: the architecture.
      tokenizer: the tokenizer of its vocabulary.
      params: the parameter tree: "bert", and "mlm", "nsp" and "head" where the model has them.
      settings: the resolved configuration, as stored in the checkpoint.
      head: `settings["head"]`, the "task", "labels" and lengths of a fine-tuned head, or None.
      source: the directory given to `load`.
    """

    def __init__(
        self,
        config: BertConfig,
        tokenizer: Tokenizer,
        params: dict,
        settings: dict | None = None,
        source: str = "",
    ):
        self.config, self.tokenizer, self.params = config, tokenizer, params
        self.settings, self.source = settings or {}, source
        self.head = self.settings.get("head")
        self._max_length = (self.head or {}).get("max_seq_length", config.max_position_embeddings)

    def __repr__(self) -> str:
        config, size = self.config, sum(leaf.size for leaf in jax.tree.leaves(self.params))
        sizes = f"{config.num_layers} layers, hidden size {config.hidden_size}, {size:,} parameters"
        head = self.head or {"task": "no task", "labels": ()}
        labels = f"{', '.join(head['labels']):.200}" or "no labels"
        return f"PretrainedModel({self.source}: {sizes}; head for {head['task']}: {labels})"

    def fill_mask(self, text: str, top_k: int = 5) -> list[Fill] | list[list[Fill]]:
        """Predicts the masked tokens of a text.

        Args:
          text: a text with one or more masks (`[MASK]`). It is not truncated.
          top_k: number of predictions for each mask.

        Returns:
          The most probable tokens, best first; for several masks, one such list per mask.
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
            raise ValueError(f"text has {len(tokens)} tokens, expected at most {limit}: shorten it")
        feature = Feature((np.array(tokens),), (len(tokens),))
        ((_, rows),) = forward.batch_by_length([feature], 1, limit)
        positions = np.pad([masks], ((0, 0), (0, -len(masks) % 8)))  # Few shapes are compiled.
        logits = forward.mlm_logits(self.config, self.params, rows, positions)[0, : len(masks)]
        probabilities = np.asarray(jax.nn.softmax(logits, axis=-1))
        fills = best_fills(text, probabilities, top_k, self.tokenizer)
        return fills[0] if len(fills) == 1 else fills

    def answer(
        self, question: Texts, context: Texts, top_k: int = 1, null_threshold: float | None = None
    ) -> list[Answer] | list[list[Answer]]:
        """Finds answers to a question in a context of any length (paper, sections 4.2 and 4.3).

        Returns the best first; their probabilities are normalized over the 20 best.

        Args:
          question, context: non-empty texts, or lists of them; several questions share one context
            or have one each.
          top_k: maximum number of answers, at most 20.
          null_threshold: margin by which the logits of "no answer" must exceed an answer's to rank
            above it. None: as fine-tuned; a SQuAD 1.1 model then always answers.
        """
        (questions, is_single), (contexts, is_shared) = _as_list(question), _as_list(context)
        for name, texts in (("question", questions), ("context", contexts)):
            if not all(isinstance(text, str) for text in texts):
                raise TypeError(f"{name} must be a string or a list of strings, got {texts!r:.60}")
            if not all(map(str.strip, texts)):
                raise ValueError(f"the {name} is empty")
        contexts *= len(questions) if is_shared else 1
        if len(questions) != len(contexts):
            found = f"{len(questions)} questions and {len(contexts)} contexts"
            raise ValueError(f"{found}: expected one context, or one for each question")
        _check_top_k(top_k, spans.N_BEST)
        head = self._need_head("answer questions", "span")
        config = spans.span_config(head, self.config.max_position_embeddings)
        if null_threshold is not None:
            if not isinstance(null_threshold, int | float | np.number):
                raise TypeError(f"null_threshold must be a number, got {null_threshold!r}")
            config = dataclasses.replace(config, null_answers=True, null_threshold=null_threshold)
        pairs = list(zip(questions, contexts, strict=True))
        passages = spans.make_passages(pairs, self.tokenizer, config)
        all_outputs = iter(self._head_outputs([f for each in passages for f in each.features]))
        found = []
        for passage in passages:
            outputs = list(itertools.islice(all_outputs, len(passage.features)))
            found.append(spans.best_answers(passage, outputs, config)[:top_k])
        return found[0] if is_single else found

    def encode(
        self,
        texts: Texts,
        pooling: str | None = None,
        batch_size: int = 32,
        max_length: int | None = None,
    ) -> np.ndarray:
        """Computes a vector for each text, float32 `[num_texts, hidden_size]`; `[hidden]` for one.

        Args:
          pooling: "mean" of the last layer over all tokens; "cls", the last layer at [CLS]; or
            "pooler", the tanh layer above that. None: "mean"; for a bi-encoder its own, and
            normalized if it was trained that way.
          batch_size: maximum number of texts per forward pass.
          max_length: maximum in tokens. None: the size of the position table; for a bi-encoder
            `head["max_seq_length"]` (for queries, give `head["max_query_length"]`).
        """
        texts, is_single = _as_list(texts)
        bi_encoder = self.head if self.head and self.head["task"] == "embedding" else {}
        limit = self.config.max_position_embeddings
        if max_length is None:
            max_length = bi_encoder.get("max_seq_length", limit)
        if not 2 <= max_length <= limit:
            raise ValueError(f"max_length must be in [2, {limit}], got {max_length!r}")
        normalize = pooling is None and bi_encoder.get("normalize", False)
        pooling = bi_encoder.get("pooling", "mean") if pooling is None else pooling
        if pooling not in ("mean", "cls", "pooler"):
            raise ValueError(f"pooling must be 'mean', 'cls' or 'pooler', got {pooling!r}")
        params = self.params["bert"]
        if pooling == "pooler" and "pooler" not in params:
            raise ValueError("this model has no pooler: choose another pooling, 'mean' or 'cls'")
        function = functools.partial(forward.pooled_vectors, self.config, pooling, params)
        found = self._apply(function, self._features(texts, max_length), batch_size=batch_size)
        vectors = np.array(found, np.float32).reshape(-1, self.config.hidden_size)
        if normalize:
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors[0] if is_single else vectors

    def features(
        self, texts: Texts, layers: Sequence[int] | None = None, batch_size: int = 32
    ) -> np.ndarray | list[np.ndarray]:
        """Computes hidden states as features (paper, section 5.3), [CLS] and [SEP] included.

        Returns float32 `[num_tokens, len(layers), hidden_size]` for each text. Layer 0 is the
        embeddings, -1 the last layer; by default the last four, or fewer if the model has fewer.
        """
        texts, is_single = _as_list(texts)
        last, params = self.config.num_layers, self.params["bert"]
        layers = tuple(range(max(last - 3, 1), last + 1) if layers is None else layers)
        if not layers or not all(-last - 1 <= layer <= last for layer in layers):
            raise ValueError(f"layers must be in [{-last - 1}, {last}], got {layers!r}")
        features = self._features(texts, self.config.max_position_embeddings)
        function = functools.partial(forward.hidden_states, self.config, layers, params)
        found = self._apply(function, features, per_position=True, batch_size=batch_size)
        return found[0] if is_single else found

    def classify(
        self, texts: Texts | Sequence[tuple[str, str]], top_k: int | None = None
    ) -> Classification | float | list[Classification] | list[float] | list[list[Classification]]:
        """Classifies texts or pairs of texts, or predicts a value for each.

        Returns:
          The most probable label of each text, or with `top_k` a list of them, best first; for a
          multi-label head all labels with a probability above 0.5, for a regression head the value.
        """
        if top_k is None:
            head = self._need_head("classify", "classification", "multi_label", "regression")
        else:
            head = self._need_head("rank labels", "classification", "multi_label")
            _check_top_k(top_k, len(head["labels"]))
        texts, is_single = _as_list(texts)
        outputs = self._head_outputs(self._features(texts, self._max_length, pairs=True))
        if head["task"] == "regression":
            found = [float(output[0]) for output in outputs]
        else:
            multi_label = head["task"] == "multi_label"
            found = [best_labels(head["labels"], output, multi_label)[:top_k] for output in outputs]
            if multi_label and top_k is None:
                found = [[each for each in own if each.probability > 0.5] for own in found]
            elif top_k is None:
                found = [own[0] for own in found]
        return found[0] if is_single else found

    def rank(self, text: str, candidates: Sequence[str]) -> list[Ranked]:
        """Ranks passages for a query (cross-encoder) or endings of a story, best first."""
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
        probabilities = softmax(scores)
        order = np.argsort(-scores, kind="stable").tolist()
        return [Ranked(candidates[i], i, float(scores[i]), float(probabilities[i])) for i in order]

    def tag(self, texts: str | Sequence[str | Sequence[str]]) -> Tagging | list[Tagging]:
        """Tags the words of texts of any length, and finds the entities that the tags mark.

        A text is split into words and punctuation marks, or given as a tuple of words (in a list of
        texts also as a list), which are joined by spaces. Entities have a type, character offsets
        `[start, end)` and, like words, a probability.
        """
        head = self._need_head("tag words", "tagging", "feature_based")
        texts, is_single = _as_list(texts)
        split = list(map(split_words, texts))
        sentences = [Sentence([text[s:e] for s, e in own], [], None, 0) for text, own in split]
        limit = self._max_length
        features, positions, _ = tagging_features(sentences, (), self.tokenizer, limit, False)
        tags = best_tags(self._head_outputs(features), positions, head["labels"])
        found = [tagged_text(text, own, itertools.islice(tags, len(own))) for text, own in split]
        return found[0] if is_single else found

    def _need_head(self, purpose: str, *tasks: str) -> Mapping:
        """Returns the settings of the head. Raises ValueError if it is for none of `tasks`."""
        if not self.head or self.head["task"] not in tasks:
            found = f"a head for {self.head['task']}" if self.head else "no head of a task"
            fix = f"load one fine-tuned for {' or '.join(tasks)}"
            raise ValueError(f"this model has {found}, so it cannot {purpose}: {fix}")
        return self.head

    def _features(
        self, texts: Sequence, max_length: int, pairs: bool = False, max_first: int | None = None
    ) -> list[Feature]:
        """Tokenizes texts, or if `pairs` also pairs of texts; warns about truncated ones."""
        parts = [text if pairs and isinstance(text, tuple | list) else (text,) for text in texts]
        strings = all(isinstance(part, str) for each in parts for part in each)
        if not strings or {*map(len, parts)} not in (set(), {1}, {2}):
            expected = "a string" + ", a pair of strings (a tuple)" * pairs + " or a list of these"
            raise TypeError(f"texts must be {expected}, got {texts!r:.60}")
        sequences, truncated = make_sequences(parts, self.tokenizer, max_length, max_first)
        if any(truncated):
            message = f"{sum(truncated)} of {len(parts)} texts are truncated to {max_length} tokens"
            warnings.warn(message, stacklevel=3)
        return [Feature((tokens,), (second_start,)) for tokens, second_start in sequences]

    def _head_outputs(self, features: Sequence[Feature]) -> list[np.ndarray]:
        """Returns the head's output for each feature, as described in `heads.Outputs`."""
        model, head = make_model(self.config, self.head), HEADS[self.head["task"]]
        function = functools.partial(forward.head_outputs, model, self.params)
        return [head.output(own) for own in self._apply(function, features, head.per_position)]

    def _apply(
        self,
        function: Callable[[dict], jax.Array],
        features: Sequence[Feature],
        per_position: bool = False,
        batch_size: int = 32,
    ) -> list[np.ndarray]:
        """Returns the output of `function` for each feature, from batches of similar length."""
        found = [np.zeros(0)] * len(features)
        limit = self.config.max_position_embeddings
        for indices, rows in forward.batch_by_length(features, batch_size, limit):
            for index, output in zip(indices, np.asarray(function(rows)), strict=False):
                size = len(features[index]) if per_position else len(output)
                found[index] = output[:size].copy()  # A view would keep the whole batch.
        return found


def _as_list(inputs: object) -> tuple[list, bool]:
    """Returns the inputs as a list, and whether there is only one (a string or a tuple)."""
    if isinstance(inputs, Iterable) and not isinstance(inputs, str | tuple):
        return list(inputs), False
    return [inputs], True


def _check_top_k(top_k: int, limit: int) -> None:
    if not isinstance(top_k, int | np.integer) or not 1 <= top_k <= limit:
        raise ValueError(f"top_k must be a whole number in [1, {limit}], got {top_k!r}")
