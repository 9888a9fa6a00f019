"""Loads a trained model and applies it: `bert_jax.load(directory)`. One CPU is enough."""

import dataclasses
import functools
import itertools
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

import flax.linen as nn
import jax
import numpy as np
from scipy.special import softmax

from bert_jax.checkpoints.parameters import unexpected_tensors
from bert_jax.checkpoints.read import read_model
from bert_jax.data.features import ModelInput
from bert_jax.model import forward
from bert_jax.model.architecture import config_from_settings
from bert_jax.model.heads import EMBEDDING, HEADS, TaskModel, make_model
from bert_jax.model.pooling import POOLINGS
from bert_jax.model.pretraining import PretrainingModel
from bert_jax.tasks import spans
from bert_jax.tasks.masked_text import Fill, best_fills, tokenize_masked
from bert_jax.tasks.multiple_choice import Ranked
from bert_jax.tasks.sequences import make_sequences
from bert_jax.tasks.table_prediction import predict_table
from bert_jax.tasks.tagging import Tagging, tag_texts
from bert_jax.tasks.text_classification import Classification, best_labels
from bert_jax.tokenization import Tokenizer

Texts = str | Sequence[str]
# The activations of more rows leave a CPU's caches: MiniLM takes 3 % longer with 32, 19 % with 64.
ROWS_PER_BATCH = 16


def load(directory: str | os.PathLike) -> "PretrainedModel":
    """Loads a model, whatever devices wrote it; warns about unused and missing tensors.

    `directory` is a run's workdir (its best checkpoint is used, or else the latest), a checkpoint,
    or a Hugging Face transformers or Google release directory. Raises FileNotFoundError if
    it holds no model, CheckpointError if it is damaged, and ValueError if it cannot be converted.
    """
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(f"directory must be the path of a model's directory, got {directory!r}")
    params, settings, tokenizer, report = read_model(directory)
    if unexpected := unexpected_tensors(report):
        hint = "a head is loaded if `architectures` in config.json names its class"
        warnings.warn(f"{directory}: {unexpected}; {hint}", stacklevel=2)
    config = config_from_settings(settings)
    return PretrainedModel(config, tokenizer, jax.device_put(params), settings, str(directory))


class Attention(NamedTuple):
    """The tokens of a text, and attention probabilities, float32 `[layer, head, from, to]`."""

    tokens: list[str]
    probabilities: np.ndarray


@dataclasses.dataclass(eq=False, repr=False)
class PretrainedModel:
    """A model restored by `load`, in float32 on one device.

    For a list of inputs, methods return a list; for a single one (a string, or a tuple: a pair of
    texts or the words of one text), just its result. Lengths include [CLS] and [SEP]. Texts that
    are too long are truncated, as in fine-tuning, with a warning; but fill_mask refuses them, and
    tag and answer (for contexts) take any length. An argument of the wrong type raises TypeError;
    an invalid value, or a model without the head that a method needs, ValueError.

    Attributes:
      config: the architecture.
      tokenizer: the tokenizer of its vocabulary.
      params: the parameter tree: "encoder", and "mlm", "nsp" and "head" where the model has them.
      settings: the resolved configuration, as stored in the checkpoint.
      source: the directory given to `load`.
    """

    config: object
    tokenizer: Tokenizer
    params: dict
    settings: dict = dataclasses.field(default_factory=dict)
    source: str = ""

    @property
    def head(self) -> dict | None:
        """The "task", "labels" and lengths of a fine-tuned head: `settings["head"]`, or None."""
        return self.settings.get("head")

    @property
    def module(self) -> nn.Module:
        """The Flax module of `params`: with the fine-tuned head, or else `PretrainingModel`."""
        if self.head:
            return make_model(self.config, self.head)
        return PretrainingModel(self.config, next_sentence="nsp" in self.params)

    def __repr__(self) -> str:
        config, size = self.config, sum(leaf.size for leaf in jax.tree.leaves(self.params))
        sizes = f"{config.num_layers} layers, hidden size {config.hidden_size}, {size:,} parameters"
        parts = (("mlm", "next token" if config.causal else "masked LM"), ("nsp", "next sentence"))
        pretrained = " and ".join(name for part, name in parts if part in self.params)
        head = self.head or {"task": pretrained, "labels": ()}
        purpose = ": ".join(filter(None, (head["task"], ", ".join(head["labels"])[:200])))
        purpose = "head for " * bool(purpose) + (purpose or "no head")
        return f"PretrainedModel({self.source}: {sizes}; {purpose})"

    def fill_mask(self, texts: Texts, top_k: int = 5) -> list[Fill] | list[list]:
        """Predicts the tokens of the masks (`[MASK]`) in texts, which are not truncated.

        Returns the `top_k` most probable, best first; for several masks one such list per mask.
        """
        texts, chosen = _as_list(texts)
        _check_texts("texts", texts)
        _check_whole("top_k", top_k, 1, self.tokenizer.vocab_size)
        if self.config.causal:
            raise ValueError("this model reads left to right, so it cannot fill in masks")
        missing = "" if "mlm" in self.params else "masked-LM head"
        if missing := missing or ("mask token" if self.tokenizer.mask_id is None else ""):
            raise ValueError(f"this model has no {missing}, so it cannot fill in masks")
        mask, limit, features = self.tokenizer.mask_token, self.config.max_position_embeddings, []
        for text in texts:
            if mask not in text:
                raise ValueError(f"text has no {mask} to fill in: {text!r}")
            tokens = tokenize_masked(text, self.tokenizer)
            if len(tokens) > limit:
                size = f"{len(tokens)} tokens, expected at most {limit}"
                raise ValueError(f"text has {size}: shorten {text!r:.60}")
            features.append(ModelInput((np.array(tokens),), (len(tokens),)))

        # One width for all rows of a call, and few over all calls, so that few shapes are compiled.
        largest = max((text.count(mask) for text in texts), default=1)
        count = max(8, 1 << (largest - 1).bit_length())

        def masked_logits(rows: dict) -> jax.Array:
            is_mask = rows["tokens"] == self.tokenizer.mask_id
            positions = np.argsort(~is_mask, axis=1, kind="stable")[:, :count]
            return forward.token_logits(self.config, self.params, rows, positions)

        def fill(index: int, logits: np.ndarray) -> list[Fill] | list[list[Fill]]:
            probabilities = softmax(logits[: texts[index].count(mask)], axis=-1)
            fills = best_fills(texts[index], probabilities, top_k, self.tokenizer)
            return fills[0] if len(fills) == 1 else fills

        fills = forward.apply_by_length(
            masked_logits, features, 8, limit, max_per_row=1, finish=fill
        )
        return fills[chosen]

    def answer(
        self, question: Texts, context: Texts, top_k: int = 1, null_threshold: float | None = None
    ) -> list[spans.Answer] | list[list[spans.Answer]]:
        """Finds answers to a question in a context of any length (paper, sections 4.2 and 4.3).

        Returns the best first; their probabilities are normalized over the 20 best.

        Args:
          question, context: non-empty texts, or lists of them; several questions share one context
            or have one each.
          top_k: maximum number of answers, at most 20.
          null_threshold: margin by which the logits of "no answer" must exceed an answer's to rank
            above it. None: as fine-tuned; a SQuAD 1.1 model then always answers.
        """
        (questions, chosen), (contexts, _) = _as_list(question), _as_list(context)
        for name, texts in (("question", questions), ("context", contexts)):
            _check_texts(name, texts)
            if not all(map(str.strip, texts)):
                raise ValueError(f"the {name} is empty")
        contexts *= len(questions) if isinstance(context, str) else 1
        if len(questions) != len(contexts):
            counts = f"{len(questions)} questions and {len(contexts)} contexts"
            raise ValueError(f"{counts}: expected one context, or one for each question")
        _check_whole("top_k", top_k, 1, spans.N_BEST)
        self._need_head("answer questions", "span")
        config = spans.span_config(self.head, self.config.max_position_embeddings)
        if null_threshold is not None:
            if not isinstance(null_threshold, int | float | np.number):
                raise TypeError(f"null_threshold must be a number, got {null_threshold!r}")
            config = config._replace(null_answers=True, null_threshold=null_threshold)
        pairs = list(zip(questions, contexts, strict=True))
        passages = spans.make_passages(pairs, self.tokenizer, config)
        windows = [window for passage in passages for window in passage.features]
        outputs = iter(self._head_outputs(windows))
        return [
            spans.best_answers(passage, [next(outputs) for _ in passage.windows], config)[:top_k]
            for passage in passages
        ][chosen]

    def encode(
        self,
        texts: Texts,
        pooling: str | None = None,
        batch_size: int = ROWS_PER_BATCH,
        max_length: int | None = None,
    ) -> np.ndarray:
        """Computes a vector for each text, float32 `[num_texts, size]`; `[size]` for one.

        Args:
          pooling: "pooler", the tanh layer above [CLS], or one of `bert_jax.model.pooling.POOLINGS`
            of the last layer, such as "mean" or "cls". None: "mean"; for a bi-encoder or a model of
            sentence-transformers its own, with its dense layers, normalization and prompt.
          batch_size: packed rows of 64 tokens per forward pass; proportionally fewer longer ones.
          max_length: maximum in tokens. None: max_position_embeddings; for a bi-encoder
            `head["max_seq_length"]` (for queries, pass `head["max_query_length"]`).
        """
        texts, chosen = _as_list(texts)
        bi_encoder = self.head if self.head and self.head["task"] == "embedding" else {}
        limit = self.config.max_position_embeddings
        if max_length is None:
            max_length = bi_encoder.get("max_seq_length", limit)
        _check_whole("max_length", max_length, 2, limit)
        if pooling not in (None, "pooler", *POOLINGS):
            raise ValueError(f"pooling must be one of {(*POOLINGS, 'pooler')}, got {pooling!r}")
        if pooling == "pooler" and "pooler" not in self.params["encoder"]:
            raise ValueError("this model has no pooler: choose another pooling, 'mean' or 'cls'")
        module = TaskModel(self.config, EMBEDDING, 0, pooling or "mean", normalize=False)
        if pooling is None and bi_encoder:
            module = make_model(self.config, {"normalize": False} | bi_encoder)
            _check_texts("texts", texts)
            texts = [bi_encoder.get("prompt", "") + text for text in texts]
        function = functools.partial(forward.head_outputs, module, self.params)
        features = self._features(texts, max_length)
        vectors = forward.apply_by_length(
            function, features, batch_size, limit, num_outputs=lambda feature: 1
        )
        return np.array(vectors, np.float32).reshape(len(texts), module.vector_size)[chosen]

    def hidden_states(
        self,
        texts: Texts,
        layers: int | Sequence[int] | None = None,
        batch_size: int = ROWS_PER_BATCH,
    ) -> np.ndarray | list[np.ndarray]:
        """Computes the hidden states of `layers`, [CLS] and [SEP] included.

        Returns float32 `[num_tokens, len(layers), hidden_size]` for each text. Layer 0 is the
        embeddings, -1 the last layer; by default the last four, or fewer if the model has fewer.
        """
        texts, chosen = _as_list(texts)
        last, params = self.config.num_layers, self.params["encoder"]
        layers = range(max(last - 3, 1), last + 1) if layers is None else layers
        layers = tuple(np.atleast_1d(np.asarray(layers, object)).tolist())
        valid = range(-last - 1, last + 1)
        if not layers or not all(type(layer) is int and layer in valid for layer in layers):
            raise ValueError(f"layers must be in [{-last - 1}, {last}], got {layers!r}")
        inputs = self._features(texts, limit := self.config.max_position_embeddings)
        function = functools.partial(forward.hidden_states, self.config, layers, params)
        return forward.apply_by_length(function, inputs, batch_size, limit)[chosen]

    features = hidden_states  # The paper's term (section 5.3).
    predict = predict_table

    def attention(self, texts: Texts) -> Attention | list[Attention]:
        """Computes how much each token attends to each other one, [CLS] and [SEP] included."""
        texts, chosen = _as_list(texts)
        features = self._features(texts, limit := self.config.max_position_embeddings)

        def finish(index: int, maps: np.ndarray) -> Attention:
            tokens = features[index].sequences[0].tolist()
            probabilities = maps[..., : len(tokens)].transpose(1, 2, 0, 3).copy()
            return Attention(list(map(self.tokenizer.id_to_token, tokens)), probabilities)

        function = functools.partial(forward.attention_maps, self.config, self.params["encoder"])
        maps = forward.apply_by_length(function, features, 8, limit, max_per_row=1, finish=finish)
        return maps[chosen]

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
            _check_whole("top_k", top_k, 1, len(head["labels"]))
        texts, chosen = _as_list(texts)
        outputs = self._head_outputs(self._features(texts, head["max_seq_length"], pairs=True))
        if head["task"] == "regression":
            return [float(output[0]) for output in outputs][chosen]
        is_multi = head["task"] == "multi_label"
        ranked = [best_labels(head["labels"], logits, is_multi)[:top_k] for logits in outputs]
        if is_multi and top_k is None:
            ranked = [[best for best in labels if best.probability > 0.5] for labels in ranked]
        elif top_k is None:
            ranked = [labels[0] for labels in ranked]
        return ranked[chosen]

    def rank(self, query: Texts, candidates: Sequence[str]) -> list[Ranked] | list[list[Ranked]]:
        """Ranks passages for a query (cross-encoder) or endings of a story, best first."""
        head = self._need_head("rank texts", "multiple_choice")
        (queries, chosen), limit = _as_list(query), head["max_seq_length"]
        texts = [*queries, *candidates]
        if isinstance(candidates, str) or not all(isinstance(text, str) for text in texts):
            raise TypeError("query must be a string or a list, and candidates a list of strings")
        pairs = list(itertools.product(queries, candidates))
        max_first = head.get("max_query_length", limit) - 2
        features = self._features(pairs, limit, pairs=True, max_first=max_first)
        rankings = []
        for scores in np.reshape(self._head_outputs(features), (len(queries), len(candidates))):
            probabilities = softmax(scores).tolist() if candidates else []
            ranked = map(Ranked, candidates, itertools.count(), scores.tolist(), probabilities)
            rankings.append(sorted(ranked, key=lambda candidate: -candidate.score))
        return rankings[chosen]

    def tag(
        self,
        texts: str | Sequence[str | Sequence[str]],
        documents: Sequence[object] | None = None,
    ) -> Tagging | list[Tagging]:
        """Tags the words of texts of any length, and finds the entities that the tags mark.

        A text is split into words and punctuation marks, or given as a tuple of words (in a list of
        texts also as a list), which are joined by spaces. Entities have a type, character offsets
        `[start, end)` and, like words, a probability. Of tags without prefixes (O, PER, LOC) a run
        of equal ones is an entity, unless the head was trained with scheme=none.

        `documents` names the document of each text, such as `["a", "a", "b"]`: a head trained with
        document_context reads consecutive texts of one document as context of each other. By
        default, each text is a document of its own.
        """
        head = self._need_head("tag words", "tagging", "feature_based")
        texts, chosen = _as_list(texts)
        if documents is not None and len(documents) != len(texts):
            counts = f"{len(documents)} documents and {len(texts)} texts"
            raise ValueError(f"{counts}: expected the document of each text")
        if documents is not None and not head.get("document_context"):
            reason = "the head was trained without document_context, so it reads each text alone"
            raise ValueError(f"documents cannot be used: {reason}")
        return tag_texts(
            texts,
            documents,
            self.tokenizer,
            head["max_seq_length"],
            head["labels"],
            head.get("scheme"),
            self._head_outputs,
        )[chosen]

    def _need_head(self, purpose: str, *tasks: str) -> Mapping:
        """Returns the settings of the head. Raises ValueError if it is for none of `tasks`."""
        if not self.head or self.head["task"] not in tasks:
            trained = f"a head for {self.head['task']}" if self.head else "no fine-tuned head"
            fix = f"load one fine-tuned for {' or '.join(tasks)}"
            raise ValueError(f"this model has {trained}, so it cannot {purpose}: {fix}")
        return {"max_seq_length": self.config.max_position_embeddings} | self.head

    def _features(
        self, texts: Sequence, max_length: int, pairs: bool = False, max_first: int | None = None
    ) -> list[ModelInput]:
        """Tokenizes texts, or if `pairs` also pairs of texts; warns about truncated ones."""
        parts = _check_texts("texts", texts, pairs)
        sequences, truncated = make_sequences(parts, self.tokenizer, max_length, max_first)
        if any(truncated):
            message = f"{sum(truncated)} of {len(parts)} texts are truncated to {max_length} tokens"
            warnings.warn(message, stacklevel=3)
        return [ModelInput((tokens,), (second_start,)) for tokens, second_start in sequences]

    def _head_outputs(self, features: Sequence[ModelInput]) -> list[np.ndarray]:
        """Returns the head's output for each feature, as described in `heads.Outputs`."""
        head = HEADS[self.head["task"]]
        function = functools.partial(forward.head_outputs, self.module, self.params)
        outputs = forward.apply_by_length(
            function,
            features,
            ROWS_PER_BATCH,
            self.config.max_position_embeddings,
            num_outputs=len if head.input_kind == "positions" else lambda feature: 1,
        )
        return list(map(head.feature_output, outputs))


def _as_list(inputs: object) -> tuple[list, slice | int]:
    """Returns the inputs as a list, and the index that selects all results or the only one."""
    if isinstance(inputs, Iterable) and not isinstance(inputs, str | bytes | tuple | Mapping | Set):
        return list(inputs), slice(None)
    return [inputs], 0  # A string or a tuple, or of a wrong type.


def _check_texts(name: str, texts: Sequence, pairs: bool = False) -> list[Sequence[str]]:
    """Returns the strings of each text, or if `pairs` of each pair. Raises TypeError."""
    parts = [text if pairs and isinstance(text, tuple | list) else (text,) for text in texts]
    are_strings = all(isinstance(part, str) for part in itertools.chain(*parts))
    if not are_strings or {*map(len, parts)} not in (set(), {1}, {2}):
        expected = "a string or a list of strings"
        if pairs:
            expected = "a string, a pair of strings (a tuple) or a list of these"
        got = texts[0] if len(texts) == 1 else texts
        raise TypeError(f"{name} must be {expected}, got {got!r:.60}")
    "".join(itertools.chain(*parts)).encode()  # Raises ValueError for a lone surrogate.
    return parts


def _check_whole(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int | np.integer) or not low <= value <= high:
        raise ValueError(f"{name} must be a whole number in [{low}, {high}], got {value!r}")
