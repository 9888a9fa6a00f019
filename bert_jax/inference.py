"""A checkpoint in a notebook: `bert_jax.load(directory)`, one CPU is enough."""

import dataclasses
import functools
import itertools
import pathlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax import partitioning
from bert_jax.data.features import Feature, RowShape, make_sequence
from bert_jax.interop.parameters import surprising_tensors
from bert_jax.interop.read import read_model
from bert_jax.model.bert import Bert, BertForPreTraining, gather_positions
from bert_jax.model.config import BertConfig
from bert_jax.model.feature_based import FeatureBasedTagger
from bert_jax.model.heads import BertForTask, make_model
from bert_jax.tasks import spans
from bert_jax.tasks.conll import Sentence
from bert_jax.tasks.tagged_text import Tagging, split_words, tagged_text
from bert_jax.tasks.tagging import best_numbers, tagging_features
from bert_jax.tasks.text_classification import text_features, truncate
from bert_jax.tokenization import Tokenizer
from bert_jax.training import finetune_step as task_step

POOLINGS = ("mean", "cls", "pooler")


class Fill(NamedTuple):
    """One way to fill in a mask: the piece, its probability, and the text with it."""

    token: str
    probability: float
    text: str


class Classification(NamedTuple):
    """The likeliest label of a text, and its probability."""

    label: str
    probability: float


class Ranked(NamedTuple):
    """A candidate: its text, its place in what was given, its score and its probability."""

    text: str
    index: int
    score: float
    probability: float


class Answer(NamedTuple):
    """An answer: its text, its probability, and which characters of the context it is.

    "No answer" is the empty text.
    """

    text: str
    probability: float
    begin: int
    end: int


class PretrainedModel:
    """A BERT and what to ask of it: `config`, `tokenizer`, `params`, `settings` as saved.

    `head` describes the task that it was fine-tuned for, by its "task" and "labels"; None: for
    none.
    """

    def __init__(
        self,
        config: BertConfig,
        tokenizer: Tokenizer,
        params: dict,
        settings: Mapping | None = None,
    ):
        self.config, self.tokenizer, self.params = config, tokenizer, params
        self.settings = settings or {}
        self.head = self.settings.get("head")

    def fill_mask(self, text: str, top_k: int = 5) -> list[Fill] | list[list[Fill]]:
        """The `top_k` likeliest pieces for each mask in `text`, likeliest first.

        A list of `Fill` for a text with one mask, and a list of such lists for several, each mask
        filled with the others left open. Raises TypeError for what is not one text, and ValueError
        for a text without a mask or longer than the position table, an impossible `top_k`, or a
        model without a masked-LM head.
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
        if "mlm" not in self.params:
            raise ValueError("this model has no masked-LM head, so it cannot fill in masks")
        limit = self.config.max_position_embeddings
        if len(tokens) > limit:
            raise ValueError(
                f"the text has {len(tokens)} tokens with [CLS] and [SEP], but this model's "
                f"position table ends at {limit}: shorten or split it"
            )
        row = np.full((1, _padded_length(len(tokens), limit)), self.tokenizer.pad_id, np.int32)
        row[0, : len(tokens)] = tokens
        slots = np.zeros((1, -(-len(positions) // 8) * 8), np.int32)  # Few shapes here too.
        slots[0, : len(positions)] = positions
        lengths = np.array([len(tokens)], np.int32)
        logits = _mlm_logits(self.config, self.params, row, lengths, slots)
        return logits[0, : len(positions)]

    def answer(
        self, question: str, context: str, top_k: int = 1, null_threshold: float | None = None
    ) -> list[Answer]:
        """The `top_k` best answers to `question` out of `context`, of any length, best first.

        A model of SQuAD 2.0 answers the empty text where none is likelier, by more than the
        threshold that was best on its development set. Probabilities are among the 20 best answers.

        Args:
          null_threshold: by how much the logits for no answer must exceed an answer's; with it any
            model may answer the empty text. None: as the head was trained, which those of other
            libraries do not tell: they always answer.

        Raises:
          TypeError: `question` or `context` is not one string, `null_threshold` no number.
          ValueError: one of them is empty, `top_k` is not in 1 to 20, or the model has no head that
            finds spans.
        """
        for name, text in (("question", question), ("context", context)):
            if not isinstance(text, str):
                raise TypeError(f"{name} must be one string, got {type(text).__name__}")
            if not text.strip():
                raise ValueError(f"the {name} is empty")
        if not isinstance(top_k, int | np.integer) or not 1 <= top_k <= spans.N_BEST:
            raise ValueError(f"top_k must be a whole number in [1, {spans.N_BEST}], got {top_k!r}")
        head = self._need_head("answer questions", "span")
        settings = spans.settings_of(head, self.config.max_position_embeddings)
        if null_threshold is not None:
            if not isinstance(null_threshold, int | float | np.number):
                raise TypeError(f"null_threshold must be a number, got {null_threshold!r}")
            settings = dataclasses.replace(
                settings, null_answers=True, null_threshold=null_threshold
            )
        (passage,) = spans.make_passages([question], [context], self.tokenizer, settings)
        outputs = self._head_outputs(passage.features)
        ranked = spans.best_spans(passage, outputs, settings.max_answer_length, spans.N_BEST)
        if settings.null_answers:
            null = spans.null_span(outputs)
            place = sum(null.score - span.score <= settings.null_threshold for span in ranked)
            ranked.insert(place, null)
        answers = zip(ranked, spans.probabilities(ranked), strict=True)
        return [
            Answer(passage.text(span), probability, span.begin, span.end)
            for span, probability in itertools.islice(answers, int(top_k))
        ]

    def encode(
        self,
        texts: Sequence[str],
        pooling: str | None = None,
        batch_size: int = 32,
        max_length: int | None = None,
    ) -> np.ndarray:
        """One vector a text: float32 `[num_texts, hidden_size]`.

        Args:
          texts: any number; one of more than `max_length` tokens is cut, with a warning.
          pooling: "mean" over the last layer at all tokens, [CLS] and [SEP] among them; "cls", the
            last layer at [CLS]; "pooler", tanh(dense(cls)), what next-sentence prediction sees.
            None: a bi-encoder's own, and its length 1 if it was trained so; of others "mean".
          batch_size: texts at a time, which are of like length.
          max_length: in tokens, [CLS] and [SEP] among them. None: a bi-encoder's passages in
            training, `head["max_seq_length"]` (its queries had `head["max_query_length"]`); of
            others the position table.

        Raises:
          TypeError: `texts` is one string, or holds something else.
          ValueError: an unknown pooling, an impossible batch size or length, or the model has no
            pooler.
        """
        normalize, most = False, self.config.max_position_embeddings
        own = self.head if self.head and self.head["task"] == "embedding" else {}
        if max_length is None:
            max_length = min(own.get("max_seq_length", most), most)
        if not 2 <= max_length <= most:
            raise ValueError(f"max_length must be in [2, {most}], got {max_length!r}")
        if pooling is None:
            pooling, normalize = own.get("pooling", "mean"), own.get("normalize", False)
        if pooling not in POOLINGS:
            raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}")
        if pooling == "pooler" and "pooler" not in self.params["bert"]:
            raise ValueError("this model has no pooler: choose another pooling, 'mean' or 'cls'")
        vectors = np.zeros((len(texts), self.config.hidden_size), np.float32)
        for indices, tokens, lengths in self._batches(texts, batch_size, max_length):
            found = _pooled(self.config, pooling, self.params["bert"], tokens, lengths)
            vectors[indices] = found[: len(indices)]
        if normalize:
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors

    def features(
        self,
        texts: Sequence[str],
        layers: Sequence[int] = (-4, -3, -2, -1),
        batch_size: int = 32,
    ) -> list[np.ndarray]:
        """Hidden states as features: section 5.3 of the paper takes the last four layers.

        Args:
          texts, batch_size: see `encode`.
          layers: 0 for the embeddings, 1 to `num_layers`, or from the end, -1 for the last.

        Returns:
          For each text float32 `[tokens, len(layers), hidden_size]`, [CLS] first and [SEP] last.

        Raises:
          TypeError: as `encode`.
          ValueError: no layers or one that is not there, or an impossible batch size.
        """
        layers, count = tuple(layers), self.config.num_layers + 1
        if not layers or not all(-count <= layer < count for layer in layers):
            raise ValueError(
                f"layers must be some of 0 (the embeddings) to {count - 1}, or of -1 (the last) to "
                f"{-count}, got {layers!r}"
            )
        found = [np.zeros(0)] * len(texts)
        limit = self.config.max_position_embeddings
        for indices, tokens, lengths in self._batches(texts, batch_size, limit):
            states = _features(self.config, layers, self.params["bert"], tokens, lengths)
            states = np.asarray(states)
            for index, length, state in zip(indices, lengths, states, strict=False):
                found[index] = state[:length].copy()  # A view would keep the whole batch.
        return found

    def classify(
        self, texts: Sequence[str | tuple[str, str]]
    ) -> list[Classification] | list[float]:
        """The likeliest label of each text or pair of texts; its value if the head gives one.

        What is longer than the texts were in fine-tuning is cut as they were, with a warning.

        Raises:
          TypeError: `texts` is one string, or holds something else than texts or than pairs.
          ValueError: the model has no head for it.
        """
        head = self._need_head("classify", "classification", "regression")
        parts = [text if isinstance(text, tuple | list) else (text,) for text in texts]
        if (
            isinstance(texts, str)
            or {len(each) for each in parts} not in (set(), {1}, {2})
            or not all(isinstance(part, str) for each in parts for part in each)
        ):
            raise TypeError("texts must be a list of strings, or a list of pairs of strings")
        if not parts:
            return []
        limit = self.config.max_position_embeddings
        limit = min(limit, head.get("max_seq_length", limit))
        features, cut = text_features(parts, [None] * len(parts), self.tokenizer, limit)
        if cut:
            warnings.warn(
                f"{cut} of {len(parts)} texts have more tokens than {limit}, [CLS] and [SEP] among "
                "them: the rest of them is left out",
                stacklevel=2,
            )
        outputs = self._head_outputs(features)
        if head["task"] == "regression":
            return [float(output[0]) for output in outputs]
        found = []
        for output in outputs:
            best = int(np.argmax(output))
            probability = float(np.exp(output[best] - np.logaddexp.reduce(output)))
            found.append(Classification(head["labels"][best], probability))
        return found

    def rank(self, text: str, candidates: Sequence[str]) -> list[Ranked]:
        """The `candidates`, likeliest first: passages for a query, or endings of a story.

        For models fine-tuned to rerank passages (the cross-encoder) or for multiple choice. The
        probabilities are among the candidates; the scores are what they are the softmax of. What is
        longer than the texts were in fine-tuning is cut as they were, with a warning.

        Raises:
          TypeError: `text` is not one string, or `candidates` not a list of them.
          ValueError: the model has no head for it.
        """
        head = self._need_head("rank texts", "multiple_choice")
        if isinstance(candidates, str) or not all(
            isinstance(each, str) for each in (text, *candidates)
        ):
            raise TypeError("text must be one string, and candidates a list of strings")
        if not candidates:
            return []
        limit = self.config.max_position_embeddings
        limit = min(limit, head.get("max_seq_length", limit))
        first, *others = self.tokenizer.encode_batch([text, *candidates])
        query_room, room = head.get("max_query_length", limit) - 2, limit - 3
        cut = sum(len(first) > query_room or len(first) + len(each) > room for each in others)
        if cut:
            warnings.warn(
                f"{cut} of {len(others)} pairs of text and candidate have more tokens than this "
                "model takes: the rest of them is left out",
                stacklevel=2,
            )
        pairs = [truncate([first[:query_room], each], room) for each in others]
        sequences = [make_sequence(self.tokenizer, *pair) for pair in pairs]
        features = [Feature((tokens,), (second,), None) for tokens, second in sequences]
        scores = np.concatenate(self._head_outputs(features))
        probabilities = np.exp(scores - np.logaddexp.reduce(scores))
        return [
            Ranked(candidates[index], int(index), float(scores[index]), float(probabilities[index]))
            for index in np.argsort(-scores, kind="stable")
        ]

    def tag(self, text: str | Sequence[str]) -> Tagging:
        """A tag for each word, and the entities that they mark, as the tagger was trained to.

        Args:
          text: is split into words and punctuation marks; or a list of words, for which characters
            count as if a space stood between them. Any length: a long one is taken in windows.

        Raises:
          TypeError: neither a string nor a list of strings.
          ValueError: the model has no tagging head.
        """
        head = self._need_head("tag words", "tagging", "feature_based")
        words, places = split_words(text)
        if not words:
            return Tagging([], [])
        limit = self.config.max_position_embeddings
        length = min(head.get("max_seq_length", limit), limit)
        sentence = Sentence(words, [], None, 0)
        features, positions, _ = tagging_features([sentence], (), self.tokenizer, length, False)
        numbers = best_numbers(self._head_outputs(features), positions)
        tags = [head["labels"][number] for number in numbers]
        return tagged_text(text, words, places, tags)

    def _need_head(self, purpose: str, *tasks: str) -> Mapping:
        """What the settings say of the head; ValueError if it is for none of `tasks`."""
        if not self.head or self.head["task"] not in tasks:
            found = f"a head for {self.head['task']}" if self.head else "no head of a task"
            raise ValueError(
                f"this model has {found}, so it cannot {purpose}: load one that was fine-tuned for "
                f"{' or '.join(tasks)}"
            )
        return self.head

    def _head_outputs(self, features: Sequence[Feature]) -> list[np.ndarray]:
        """What the head gives for each feature, as `tasks.task.Outputs` describes it."""
        model = make_model(self.config, self.head)
        length = _padded_length(max(map(len, features)), self.config.max_position_embeddings)
        shape = RowShape(length, max(length // 8, 1), model.kind, self.tokenizer.pad_id)
        step, sharding = _head_step(model)
        # Few shapes here too: as many rows as features could take, or as are good at once.
        most = task_step.rows_at_once(length, 0, sharding.mesh)
        chunk_rows = min(most, 1 << (len(features) - 1).bit_length())
        return task_step.predict(step, self.params, features, shape, chunk_rows, sharding)

    def _batches(
        self, texts: Sequence[str], batch_size: int, limit: int
    ) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
        """Indices of texts of like length, their int32 `[rows, length]` tokens, and lengths.

        What is longer than `limit` is cut, with a warning. Rows after the texts are of length 0.
        """
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise TypeError("texts must be a list of strings; put a single one into a list")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        tokenizer = self.tokenizer
        rows = tokenizer.encode_batch(texts)
        if cut := sum(len(row) > limit - 2 for row in rows):
            warnings.warn(
                f"{cut} of {len(texts)} texts have more tokens than {limit}, [CLS] and [SEP] among "
                "them: the rest of them is left out",
                stacklevel=3,
            )
        rows = [[tokenizer.cls_id, *row[: limit - 2], tokenizer.sep_id] for row in rows]
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        for start in range(0, len(order), batch_size):
            indices = order[start : start + batch_size]
            size = min(batch_size, 1 << (len(indices) - 1).bit_length())
            length = _padded_length(len(rows[indices[-1]]), limit)
            tokens = np.full((size, length), tokenizer.pad_id, np.int32)
            lengths = np.zeros(size, np.int32)
            for slot, index in enumerate(indices):
                lengths[slot] = len(rows[index])
                tokens[slot, : lengths[slot]] = rows[index]
            yield indices, tokens, lengths


def _padded_length(length: int, limit: int) -> int:
    """Up to a quarter more than `length`, at least 16, so that few lengths are ever compiled."""
    step = max(16, (1 << (length - 1).bit_length()) // 8)
    return min(-(-length // step) * step, limit)


def _inputs(tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, ...]:
    """int32 `[B, L]`, `[B]`: one text a row -> the four inputs of `Bert`."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    sequence_ids = (positions < lengths[:, None]).astype(jnp.int32)
    return tokens, jnp.zeros_like(tokens), positions, sequence_ids


@functools.partial(jax.jit, static_argnums=0)
def _mlm_logits(config: BertConfig, params: dict, tokens, lengths, slots) -> jax.Array:
    def logits(model):
        hidden = model.bert(*_inputs(tokens, lengths))
        return model.mlm(gather_positions(hidden, slots), model.bert.embeddings.token_embedding)

    return BertForPreTraining(config).apply({"params": params}, method=logits)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _pooled(config: BertConfig, pooling: str, params: dict, tokens, lengths) -> jax.Array:
    model, variables = Bert(config), {"params": params}
    hidden = model.apply(variables, *_inputs(tokens, lengths))
    if pooling == "pooler":
        cls_positions = jnp.zeros((len(tokens), 1), jnp.int32)
        return model.apply(variables, hidden, cls_positions, method="pool")[:, 0]
    if pooling == "cls":
        return hidden[:, 0]
    real = jnp.arange(tokens.shape[1]) < lengths[:, None]
    total = jnp.sum(hidden, axis=1, where=real[:, :, None], dtype=jnp.float32)
    return total / jnp.maximum(lengths, 1)[:, None]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _features(config: BertConfig, layers: tuple[int, ...], params: dict, tokens, lengths):
    """float32 `[B, L, len(layers), H]`."""
    states = Bert(config).apply({"params": params}, *_inputs(tokens, lengths), all_layers=True)
    return jnp.stack([states[layer] for layer in layers], axis=2).astype(jnp.float32)


@functools.lru_cache(maxsize=4)
def _head_step(model: BertForTask | FeatureBasedTagger):
    """The jitted step of `task_step.predict` on one device, and the sharding of its rows."""
    mesh = partitioning.make_mesh(devices=jax.devices()[:1])
    return task_step.make_predict_step(model, mesh), partitioning.batch_sharding(mesh)


def load(directory: str | pathlib.Path) -> PretrainedModel:
    """The model of a workdir or of one checkpoint, whatever devices wrote it.

    Directories of transformers and of Google's release are read as they are; see `read_model`. It
    warns of tensors that no part of the model is for, and of a task's head without tensors.
    """
    params, settings, tokenizer, report = read_model(directory)
    if found := surprising_tensors(report):
        warnings.warn(
            f"{directory}: {found}; the head of a task is read if `architectures` in config.json "
            "names its class, such as BertForTokenClassification",
            stacklevel=2,
        )
    # The parameters are float32; bfloat16 arithmetic is for the accelerators that trained them.
    config = dataclasses.replace(BertConfig(**settings["bert"]), dtype="float32")
    return PretrainedModel(config, tokenizer, jax.device_put(params), settings)
