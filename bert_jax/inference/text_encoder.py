"""An encoder and its tokenizer: tokens, batches, hidden states, attention and vectors of texts."""

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, overload

import numpy as np

from bert_jax.checkpoints.parameters import trained_length
from bert_jax.checkpoints.save import check_head, save_model
from bert_jax.data.features import ModelInput, check_segments
from bert_jax.inference import forward
from bert_jax.inference.text_inputs import (
    TextOrPair,
    TextsOrPairs,
    Tokens,
    as_list,
    build_batch,
    check_texts,
    check_whole,
    describe_tokens,
)
from bert_jax.model.config import BertConfig
from bert_jax.model.execution import Execution
from bert_jax.model.heads import make_model
from bert_jax.model.pooling import POOLINGS
from bert_jax.tasks.sequences import make_sequences
from bert_jax.tokenizers.tokenizer import Tokenizer

# The activations of more rows leave a CPU's caches: MiniLM takes 3 % longer with 32, 19 % with 64.
ROWS_PER_BATCH = 16


class Attention(NamedTuple):
    """The tokens of a text, and attention probabilities, float32 `[layer, head, from, to]`."""

    tokens: list[str]
    probabilities: np.ndarray


@dataclasses.dataclass(eq=False, repr=False)
class TextEncoder:
    """The methods of `PretrainedModel` that need no head; it documents the attributes."""

    config: BertConfig  # Or the configuration of another architecture.
    tokenizer: Tokenizer
    params: dict
    settings: dict = dataclasses.field(default_factory=dict)
    source: str = ""
    dtype: str = "float32"
    _has_warned: bool = dataclasses.field(default=False, init=False)  # of untrained positions

    def __post_init__(self):
        check_head(self.head)

    @property
    def head(self) -> dict | None:
        """The "task", "labels" and lengths of a fine-tuned head: `settings["head"]`, or None."""
        return self.settings.get("head")

    @property
    def _execution(self) -> Execution:
        # Each length of rows is compiled: a loop over one layer compiles faster than all layers.
        return Execution(dtype=self.dtype, scan_layers=True)

    def save(self, directory: str | os.PathLike, overwrite: bool = False) -> None:
        """Saves the model as a checkpoint, which `load` and `--config.init_from` take.

        Parameters, also changed ones, are stored in float32, with the settings, the head among
        them, and the vocabulary. `overwrite` replaces a checkpoint. Raises FileExistsError,
        CheckpointError, and ValueError if parameters and settings do not fit together.
        """
        save_model(
            directory,
            config=self.config,
            tokenizer=self.tokenizer,
            params=self.params,
            settings=self.settings,
            overwrite=overwrite,
        )

    @overload
    def tokens(self, texts: TextOrPair, max_length: int | None = None) -> Tokens: ...
    @overload
    def tokens(
        self, texts: Iterable[TextOrPair], max_length: int | None = None
    ) -> list[Tokens]: ...
    def tokens(self, texts: TextsOrPairs, max_length: int | None = None) -> Tokens | list[Tokens]:
        """Returns the tokens of each text or pair, with their words and their characters.

        They are the tokens of `hidden_states` and `attention`, up to `max_length`; None:
        max_position_embeddings.
        """
        parts, chosen = self._parts(texts)
        features = self._features(parts, self._max_length(max_length))
        return describe_tokens(parts, features, self.tokenizer)[chosen]

    def batch(self, texts: TextsOrPairs, length: int | None = None) -> dict[str, np.ndarray]:
        """Builds the batch that `module` and `Encoder` take, one text or pair per row.

        Returns:
          int32 `[texts, length]` arrays, which are 0 (`tokens`: `tokenizer.pad_id`) on padding:
          `tokens`; `segment_ids`, 1 in the second text of a pair; `position_ids`, 0, 1, ...;
          `sequence_ids`, 1 for all tokens of the text, which attend to each other alone. And where
          the text is: int32 `pooled_positions` `[texts, 1]`, of [CLS], and `sequence_bounds`
          `[texts, 1, 3]`: start, start of the second text, end. `target_positions`, at which a
          masked-LM head predicts, are all positions.

        Args:
          length: of all rows; longer texts are truncated. None: the longest text's. JAX
            compiles a function again for each new shape.
        """
        parts, _ = self._parts(texts)
        features = self._features(parts, self._max_length(length, "length"))
        check_segments(self.config, features)
        length = length or max(map(len, features), default=2)
        return build_batch(features, length, self.tokenizer.pad_id, self.config.causal)

    def encode(
        self,
        texts: TextsOrPairs,
        pooling: str | None = None,
        batch_size: int = ROWS_PER_BATCH,
        max_length: int | None = None,
        normalize: bool = False,
    ) -> np.ndarray:
        """Computes a vector for each text or pair, float32 `[num_texts, size]`; `[size]` for one.

        Args:
          pooling: "pooler", the tanh layer above [CLS], or one of `bert_jax.model.pooling.POOLINGS`
            of the last layer, such as "mean" or "cls". None: "mean"; for a bi-encoder or a model of
            sentence-transformers its own, with its dense layers, normalization and prompt.
          batch_size: packed rows of 64 tokens per forward pass; proportionally fewer longer ones.
          max_length: maximum in tokens. None: max_position_embeddings; for a bi-encoder
            `head["max_seq_length"]` (for queries, pass `head["max_query_length"]`).
          normalize: divides vectors by their length, so that dot products are cosines. Some models
            of sentence-transformers, and bi-encoders, do so anyway.
        """
        parts, chosen = self._parts(texts)
        bi_encoder = self.head if self.head and self.head["task"] == "embedding" else {}
        max_length = self._max_length(
            bi_encoder.get("max_seq_length") if max_length is None else max_length
        )
        if pooling not in (None, "pooler", *POOLINGS):
            raise ValueError(f"pooling must be one of {(*POOLINGS, 'pooler')}, got {pooling!r}")
        if pooling == "pooler" and "pooler" not in self.params["encoder"]:
            raise ValueError("this model has no pooler: choose another pooling, 'mean' or 'cls'")
        settings = {"task": "embedding", "labels": (), "pooling": pooling or "mean"}
        settings |= {"normalize": False}
        if pooling is None and bi_encoder:
            settings |= bi_encoder
            parts = [(bi_encoder.get("prompt", "") + first, *second) for first, *second in parts]
        settings |= {"normalize": True} if normalize else {}
        module = make_model(self.config, settings, self._execution)
        function = functools.partial(forward.head_outputs, module, self.params)
        features = self._features(parts, max_length)
        vectors = self._apply(function, features, batch_size, num_outputs=lambda feature: 1)
        return np.array(vectors, np.float32).reshape(len(parts), module.vector_size)[chosen]

    @overload
    def hidden_states(
        self,
        texts: TextOrPair,
        layers: int | Sequence[int] | None = None,
        batch_size: int = ROWS_PER_BATCH,
    ) -> np.ndarray: ...
    @overload
    def hidden_states(
        self,
        texts: Iterable[TextOrPair],
        layers: int | Sequence[int] | None = None,
        batch_size: int = ROWS_PER_BATCH,
    ) -> list[np.ndarray]: ...
    def hidden_states(
        self,
        texts: TextsOrPairs,
        layers: int | Sequence[int] | None = None,
        batch_size: int = ROWS_PER_BATCH,
    ) -> np.ndarray | list[np.ndarray]:
        """Computes the hidden states of `layers`, [CLS] and [SEP] included.

        Returns float32 `[num_tokens, len(layers), hidden_size]` for each text or pair. Layer 0 is
        the embeddings, -1 the last layer; by default the last four, or fewer if there are fewer.
        """
        parts, chosen = self._parts(texts)
        last, params = self.config.num_layers, self.params["encoder"]
        layers = range(max(last - 3, 1), last + 1) if layers is None else layers
        layers = tuple(np.atleast_1d(np.asarray(layers, object)).tolist())
        valid = range(-last - 1, last + 1)
        if not layers or not all(type(layer) is int and layer in valid for layer in layers):
            raise ValueError(f"layers must be in [{-last - 1}, {last}], got {layers!r}")
        inputs = self._features(parts, self._max_length())
        function = functools.partial(
            forward.hidden_states, self.config, self._execution, layers, params
        )
        return self._apply(function, inputs, batch_size)[chosen]

    features = hidden_states  # The paper's term (section 5.3).

    @overload
    def attention(self, texts: TextOrPair) -> Attention: ...
    @overload
    def attention(self, texts: Iterable[TextOrPair]) -> list[Attention]: ...
    def attention(self, texts: TextsOrPairs) -> Attention | list[Attention]:
        """Computes how much each token attends to each other one, [CLS] and [SEP] included."""
        parts, chosen = self._parts(texts)
        features = self._features(parts, self._max_length())

        def finish(index: int, maps: np.ndarray) -> Attention:
            tokens = features[index].sequences[0].tolist()
            probabilities = maps[..., : len(tokens)].transpose(1, 2, 0, 3).copy()
            return Attention(list(map(self.tokenizer.id_to_token, tokens)), probabilities)

        function = functools.partial(
            forward.attention_maps, self.config, self._execution, self.params["encoder"]
        )
        return self._apply(function, features, 8, max_sequences=1, finish=finish)[chosen]

    def _parts(self, texts: TextsOrPairs) -> tuple[list[Sequence[str]], slice | int]:
        """Returns the strings of each text or pair, and the index that selects the results."""
        texts, chosen = as_list(texts, tuple_is_one=True)
        return check_texts("texts", texts, pairs=True), chosen

    def _max_length(self, length: int | None = None, name: str = "max_length") -> int:
        """Returns the length or, if it is None, the maximum. Raises ValueError if invalid."""
        limit = self.config.max_position_embeddings
        if length is not None:
            check_whole(name, length, 2, limit)
        return length or limit

    def _features(
        self, texts: Sequence[Sequence[str]], max_length: int, max_first: int | None = None
    ) -> list[ModelInput]:
        """Tokenizes the strings of texts or pairs; warns about truncated ones."""
        sequences, truncated = make_sequences(texts, self.tokenizer, max_length, max_first)
        if any(truncated):
            message = f"{sum(truncated)} of {len(texts)} texts are truncated to {max_length} tokens"
            warnings.warn(message, stacklevel=3)
        return [ModelInput((tokens,), (second_start,)) for tokens, second_start in sequences]

    def _apply(
        self, function: Callable, features: Sequence[ModelInput], batch_size: int, **options
    ) -> list:
        """Applies a function to features of any lengths; warns once of untrained positions."""
        check_segments(self.config, features)
        lengths = (len(sequence) for feature in features for sequence in feature.sequences)
        longest, trained = max(lengths, default=0), trained_length(self.settings)
        if trained and longest > trained and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"an input has {longest} tokens, but the model was trained on at most {trained}: "
                "its later positions are untrained. Shorten the inputs (max_length, if the method "
                "has it), or train the model on longer rows",
                stacklevel=3,
            )
        limit = self.config.max_position_embeddings
        return forward.apply_by_length(function, features, batch_size, limit, **options)
