"""Loads a trained model and applies it: `bert_jax.load(directory)`. One CPU is enough.

Each method goes the same way: texts -> features (`text_inputs`) -> packed rows of few shapes, and
their outputs (`forward`) -> results (`masked_text`, and the files of `tasks/`).
"""

import dataclasses
import functools
import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, overload

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from scipy.sparse import csr_array, issparse, vstack
from scipy.special import expit

from bert_jax.checkpoints.parameters import (
    hint_for_unexpected,
    trained_length,
    unexpected_tensors,
)
from bert_jax.checkpoints.read import read_model
from bert_jax.checkpoints.save import check_head, save_model
from bert_jax.checkpoints.sentence_transformers import similarity_of
from bert_jax.data.features import NO_VECTOR, LabelLayout, ModelInput, check_segments
from bert_jax.inference import forward, masked_text, unmasking
from bert_jax.inference.forward import ROWS_PER_BATCH
from bert_jax.inference.masked_text import Fills
from bert_jax.inference.predictions import Predictions, predict_table
from bert_jax.inference.text_inputs import (
    TextOrPair,
    Texts,
    TextsOrPairs,
    Tokens,
    as_list,
    as_texts_or_pairs,
    build_batch,
    check_texts,
    check_whole,
    choose_length,
    describe_tokens,
    make_features,
    token_names,
    with_global_positions,
)
from bert_jax.model.architecture import config_from_settings
from bert_jax.model.config import BertConfig, pools_last
from bert_jax.model.encoder import EncoderModel
from bert_jax.model.execution import CHOICES, Execution, ExecutionPlan, log_path, plan_execution
from bert_jax.model.heads import HEADS, find_head, make_model
from bert_jax.model.pooling import POOLINGS, SIMILARITIES
from bert_jax.objectives.masked_lm import PretrainingModel
from bert_jax.objectives.replaced_tokens import Discriminator
from bert_jax.tasks import pseudo_likelihood, spans, tagging
from bert_jax.tasks.multiple_choice import Ranked, rank_candidates
from bert_jax.tasks.prompts import find_prompt
from bert_jax.tasks.pseudo_likelihood import Score, describe_score, masked_copies
from bert_jax.tasks.queries import TokenizedTexts, make_feature
from bert_jax.tasks.spans import Answer
from bert_jax.tasks.tagging import Tagging
from bert_jax.tasks.task import TrainedHead
from bert_jax.tasks.text_classification import Classification, Classified, classify_output
from bert_jax.tasks.token_vectors import TokenRules, as_token_vectors, max_similarity_rows
from bert_jax.tokenizers.tokenizer import Tokenizer

TOKENS_PER_BLOCK = 1 << 21
"""Tokens of the masked copies that are in memory at a time."""


def find_device(platform: str) -> jax.Device:
    """Returns this process's first device of a platform. Raises ValueError without one."""
    try:
        return jax.local_devices(backend=platform)[0]
    except RuntimeError:
        fix = "for GPUs pip install 'jax[cuda12]', on a TPU VM 'jax[tpu]'"
        found = jax.default_backend()
        raise ValueError(f"device={platform!r}: JAX finds only {found} devices; {fix}") from None


def load(
    directory: str | os.PathLike,
    dtype: jax.typing.DTypeLike = "float32",
    device: jax.Device | str | None = None,
    verify_checksums: bool = True,
    allow_non_finite: bool = False,
) -> "PretrainedModel":
    """Loads a model, whatever devices wrote it; warns about unused and missing tensors.

    Raises FileNotFoundError if `directory` holds no model, CheckpointError if it is damaged,
    ValueError if it cannot be converted, and RuntimeError if there is no such device.

    Args:
      directory: a run's workdir (its best checkpoint is used, or else the latest) or a checkpoint,
        here or on a bucket (gs://), or a Hugging Face transformers or Google release directory.
      dtype: "float32" or "bfloat16", of hidden states and products; parameters and results are
        float32.
      device: where the parameters are, and so where the model computes: one of `jax.devices()`, or
        "cpu", "gpu" or "tpu". None: JAX's default device.
      verify_checksums: whether to compare the files of a native checkpoint with the checksums that
        were written with them. False reads the files once instead of twice.
      allow_non_finite: whether to warn about weights that are NaN or infinite, instead of raising
        CheckpointError.
    """
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(f"directory must be the path of a model's directory, got {directory!r}")
    if (name := jnp.dtype(dtype).name) not in CHOICES["dtype"]:
        raise ValueError(f"dtype must be one of {', '.join(CHOICES['dtype'])}, got {name}")
    device = find_device(device) if isinstance(device, str) else device
    with jax.default_device(device):
        params, settings, tokenizer, report = read_model(
            directory, verify_checksums, allow_non_finite
        )
    if unexpected := unexpected_tensors(report):
        hint = hint_for_unexpected(report)
        warnings.warn(f"{directory}: {unexpected}; {hint}", stacklevel=2)
    config = config_from_settings(settings)
    params = jax.device_put(params, device)
    model = PretrainedModel(config, tokenizer, params, settings, str(directory), name)
    log_path(model.plan, config, config.max_position_embeddings)
    return model


class Attention(NamedTuple):
    """The tokens of a text, and attention probabilities, float32 `[layer, head, from, to]`."""

    tokens: list[str]
    probabilities: np.ndarray


class Replaced(NamedTuple):
    """The tokens of a text, and the probability of each to be replaced, float32 `[length]`."""

    tokens: list[str]
    probabilities: np.ndarray


def blocks_of_tokens(features: Iterable[ModelInput], limit: int) -> Iterator[list[ModelInput]]:
    """Yields the features in blocks of up to `limit` tokens, or of a single longer one."""
    block, size = [], 0
    for feature in features:
        if block and size + len(feature) > limit:
            yield block
            block, size = [], 0
        block.append(feature)
        size += len(feature)
    if block:
        yield block


@dataclasses.dataclass(eq=False, repr=False)
class PretrainedModel:
    """A model on one device, restored by `load` or of parameters of your own.

    For a list of inputs, methods return a list; for a single one (a string, or a tuple: a pair of
    texts or the words of one text), just its result. Lengths include [CLS] and [SEP]. Texts that
    are too long are truncated, as in fine-tuning, with a warning; but fill_mask refuses them, and
    tag and answer (for contexts) take any length. An argument of the wrong type raises TypeError;
    an invalid value, or a model without the head that a method needs, ValueError.

    Attributes:
      config: the model config.
      tokenizer: the tokenizer of its vocabulary.
      params: the parameter tree: "encoder", and "mlm", "nsp", "discriminator" (with, in an ELECTRA
        run, its "generator") and "head" where the model has them.
      settings: the resolved configuration, as stored in the checkpoint. For own parameters only
        the head is needed: `{"head": {"task": "classification", "labels": ["no", "yes"]}}`.
      source: the directory given to `load`.
      dtype: "float32" or "bfloat16", of hidden states and products.
    """

    config: BertConfig  # Or the model config of another architecture.
    tokenizer: Tokenizer
    params: dict
    settings: dict = dataclasses.field(default_factory=dict)
    source: str = ""
    dtype: str = "float32"
    _has_warned: bool = dataclasses.field(default=False, init=False)  # About untrained positions.

    def __post_init__(self):
        check_head(self.head)

    @property
    def head(self) -> dict | None:
        """The "task", "labels" and lengths of a fine-tuned head: `settings["head"]`, or None."""
        return self.settings.get("head")

    @property
    def module(self) -> nn.Module:
        """The Flax module of `params`: with the fine-tuned or pre-training heads that it has.

        Heads of an objective or a module of your own are left out: apply your module, with this
        `config` and `plan`, to `params`.
        """
        if self.head:
            return make_model(self.config, self.head, self.plan)
        if "discriminator" in self.params:
            return Discriminator(self.config, self.plan)
        if "mlm" in self.params:
            return PretrainingModel(self.config, "nsp" in self.params, self.plan)
        return EncoderModel(self.config, self.plan)

    def __repr__(self) -> str:
        config, size = self.config, sum(leaf.size for leaf in jax.tree.leaves(self.params))
        sizes = f"{config.num_layers} layers, hidden size {config.hidden_size}, {size:,} parameters"
        predicted = {
            "mlm": "next token" if config.causal else "masked LM",
            "nsp": "sentence pairs",
            "discriminator": "replaced tokens",
        }
        purpose = " and ".join(name for part, name in predicted.items() if part in self.params)
        if self.head:
            labels = ", ".join(self.head["labels"])[:200]
            purpose = self.head["task"] + (f": {labels}" if labels else "")
        head = f"head for {purpose}" if purpose else "no head"
        return f"PretrainedModel({self.source}: {sizes}; {head})"

    def save(self, directory: str | os.PathLike, overwrite: bool = False) -> None:
        """Saves the model as a checkpoint, which `load` and `config.init_from` take.

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
        parts, chosen = as_texts_or_pairs(texts)
        max_length = choose_length(max_length, self.config.max_position_embeddings)
        features = make_features(parts, self.tokenizer, max_length)
        return describe_tokens(parts, features, self.tokenizer)[chosen]

    def batch(
        self,
        texts: TextsOrPairs,
        length: int | None = None,
        global_positions: Sequence | None = None,
    ) -> dict[str, np.ndarray]:
        """Builds the batch that `module` and `Encoder` take, one text or pair per row.

        Returns:
          int32 `[texts, length]` arrays, which are 0 (`tokens`: `tokenizer.pad_id`) on padding:
          `tokens`; `segment_ids`, those of `tokens()`; `position_ids`, 0, 1, ...;
          `sequence_ids`, 1 for all tokens of the text, which attend to each other alone. And where
          the text is: int32 `pooled_positions` `[texts, 1]`, of [CLS], and `sequence_bounds`
          `[texts, 1, 3]`: start, start of the second text, end. `target_positions`, at which a
          masked-LM head predicts, are all positions.

        Args:
          length: of all rows; longer texts are truncated. None: the longest text's. JAX
            compiles a function again for each new shape.
          global_positions: as for `encode`; the batch then has bool `is_global` `[texts, length]`.
        """
        parts, chosen = as_texts_or_pairs(texts)
        max_length = choose_length(length, self.config.max_position_embeddings, "length")
        features = self._make_features(parts, chosen, max_length, global_positions)
        check_segments(self.config, features)
        length = length or max(map(len, features), default=2)
        batch = build_batch(features, length, self.tokenizer.pad_id, pools_last(self.config))
        if self.tokenizer.layout.cls_last and self.tokenizer.layout.has_segments:
            segment_ids = batch["segment_ids"].copy()
            np.put_along_axis(segment_ids, batch["pooled_positions"], 2, axis=1)
            batch["segment_ids"] = segment_ids
        return batch

    def encode(
        self,
        texts: TextsOrPairs,
        pooling: str | None = None,
        batch_size: int = ROWS_PER_BATCH,
        max_length: int | None = None,
        normalize: bool = False,
        global_positions: Sequence | None = None,
        prompt_name: str | None = None,
        truncate_dim: int | None = None,
    ) -> np.ndarray:
        """Computes a vector for each text or pair, float32 `[num_texts, size]`; `[size]` for one.

        Args:
          pooling: "pooler", the tanh layer above [CLS], or one of `bert_jax.model.pooling.POOLINGS`
            of the last layer, such as "mean" or "cls". None: "mean"; for a bi-encoder or a model of
            sentence-transformers its own, with its dense layers, normalization and prompt.
          batch_size: packed rows of 64 tokens per forward pass; proportionally fewer longer ones.
          max_length: maximum in tokens. None: max_position_embeddings; for a bi-encoder
            `head["max_seq_length"]`, and if the prompt is "query" `head["max_query_length"]`.
          normalize: divides vectors by their length, so that dot products are cosines. Some models
            of sentence-transformers, and bi-encoders, do so anyway.
          global_positions: of a Longformer, the tokens of a text that are global: numbers of
            `tokens`, from 0, which is [CLS]; for several texts, a list of them for each. None:
            those of the model's head (`Head.global_tokens`); without a head, those of its
            `config.global_tokens`.
          prompt_name: of a bi-encoder or a model of sentence-transformers, what the texts are:
            "query", "document" (a passage), or another name of `head["prompts"]`, whose text
            precedes each of them. None: passages; of a model of sentence-transformers, its default.
          truncate_dim: number of the first dimensions to keep, for models that were trained so
            (Matryoshka). Vectors that are normalized have length 1 without the others. None: all,
            or as many as the model's head says.
        """
        parts, chosen = as_texts_or_pairs(texts)
        is_bi_encoder = bool(self.head) and find_head(self.head).predicts == "vector"
        if pooling is None and self.head and find_head(self.head).predicts == "token_vectors":
            fix = "call encode_tokens, or choose a pooling of the encoder, such as 'mean'"
            raise ValueError(f"this model has a vector for each token of a text: {fix}")
        if pooling is None and self._has_sparse_head:
            fix = "call encode_sparse, or set pooling for a vector of the hidden states"
            raise ValueError(f"this model was trained for sparse vectors: {fix}")
        if prompt_name is not None and (pooling is not None or not is_bi_encoder):
            reason = "pooling is set" if is_bi_encoder else "this model has no head for embeddings"
            raise ValueError(f"prompt_name={prompt_name!r}: {reason}, so there are no prompts")
        if max_length is None and is_bi_encoder:
            max_length = self.head.get("max_seq_length")
            if prompt_name == "query":
                max_length = self.head.get("max_query_length", max_length)
        max_length = choose_length(max_length, self.config.max_position_embeddings)
        if pooling not in (None, "pooler", *POOLINGS):
            raise ValueError(f"pooling must be one of {(*POOLINGS, 'pooler')}, got {pooling!r}")
        if pooling == "pooler" and "pooler" not in self.params["encoder"]:
            raise ValueError("this model has no pooler: choose another pooling, 'mean' or 'cls'")
        head = {"task": "embedding", "labels": (), "pooling": pooling or "mean", "normalize": False}
        if pooling is None and is_bi_encoder:
            head |= self.head
            prompt = find_prompt(self.head, prompt_name)
            parts = [(prompt + first, *second) for first, *second in parts]
        if normalize:
            head["normalize"] = True
        if truncate_dim is not None:
            full = make_model(self.config, head | {"truncate_dim": None}, self.plan)
            check_whole("truncate_dim", truncate_dim, 1, full.vector_size)
            head["truncate_dim"] = truncate_dim
        # Of the model's own config: global tokens are those of its own head.
        module = make_model(self.config, head, self.plan).clone(config=self.module.config)
        function = functools.partial(forward.head_outputs, module, self.params)
        features = self._make_features(parts, chosen, max_length, global_positions)
        rows = self._compute_rows(function, features, batch_size)
        vectors = np.empty((len(features), module.vector_size), np.float32)
        for index, vector in forward.split_rows(rows, [1] * len(features)):
            vectors[index] = vector
        return vectors[chosen]

    def encode_sparse(
        self,
        texts: TextsOrPairs,
        top_k: int | None = None,
        batch_size: int = 8,
        max_length: int | None = None,
        prompt_name: str | None = None,
    ) -> csr_array:
        """Computes a weight of each token of the vocabulary for each text or pair, as SPLADE does.

        Any masked LM has such vectors (`SparseModel`); they are of use after training for search,
        by a bi-encoder with `similarity.vectors=sparse`, or as in
        naver/splade-cocondenser-ensembledistil.

        Args:
          top_k: keeps the K largest weights of each text. None: as many as the model's head says,
            or all that are not 0.
          batch_size, max_length, prompt_name: as in `encode`.

        Returns:
          A SciPy array, float32 `[num_texts, vocab_size]`, for one text `[1, vocab_size]`; its
          columns are token ids. `a @ b.T` has the similarities of two of them.
        """
        parts, _ = as_texts_or_pairs(texts)
        self.check_fills_masks("weight the tokens of the vocabulary")
        if getattr(self.config, "has_query_stream", False):
            raise ValueError("XLNet predicts only masked tokens: encode_sparse needs another model")
        head = self.head if self._has_sparse_head else {"task": "sparse_embedding", "labels": ()}
        if prompt_name is not None and not self._has_sparse_head:
            reason = "this model has no head for sparse vectors, so there are no prompts"
            raise ValueError(f"prompt_name={prompt_name!r}: {reason}")
        if top_k is not None:
            check_whole("top_k", top_k, 1, self.config.vocab_size)
            head = head | {"top_k": top_k}
        if max_length is None:
            max_length = head.get("max_seq_length")
            if prompt_name == "query":
                max_length = head.get("max_query_length", max_length)
        prompt = find_prompt(head, prompt_name)
        parts = [(prompt + first, *second) for first, *second in parts]
        max_length = choose_length(max_length, self.config.max_position_embeddings)
        module = make_model(self.config, head, self.plan)
        params = {name: self.params[name] for name in ("encoder", "mlm")}
        function = functools.partial(forward.head_outputs, module, params)
        features = self._make_features(parts, slice(None), max_length, None)
        rows = self._compute_rows(function, features, batch_size)
        vectors = [csr_array((0, self.config.vocab_size), dtype=np.float32)]
        vectors += [None] * len(features)
        for index, weights in forward.split_rows(rows, [1] * len(features)):
            vectors[1 + index] = csr_array(weights)
        return vstack(vectors, format="csr")

    @property
    def _has_sparse_head(self) -> bool:
        return bool(self.head) and find_head(self.head).predicts == "sparse_vector"

    @overload
    def encode_tokens(
        self,
        texts: str,
        prompt_name: str = "document",
        batch_size: int = ROWS_PER_BATCH,
        max_length: int | None = None,
    ) -> np.ndarray: ...
    @overload
    def encode_tokens(
        self,
        texts: Iterable[str],
        prompt_name: str = "document",
        batch_size: int = ROWS_PER_BATCH,
        max_length: int | None = None,
    ) -> list[np.ndarray]: ...
    def encode_tokens(
        self,
        texts: Texts,
        prompt_name: str = "document",
        batch_size: int = ROWS_PER_BATCH,
        max_length: int | None = None,
    ) -> np.ndarray | list[np.ndarray]:
        """Computes a vector for each token of each text, float32 `[tokens, size]` (ColBERT).

        The model needs a multi-vector head. Its rules say which tokens have vectors: of passages
        those that are no punctuation, of queries also the masks that fill them.

        Args:
          prompt_name: what the texts are: "document" (a passage) or "query"; or another name of
            `head["prompts"]`, whose text precedes each passage.
          batch_size: as in `encode`.
          max_length: maximum in tokens, before the masks that fill a query. None:
            `head["max_seq_length"]`, of queries `head["max_query_length"]`.
        """
        trained = self._need_head("encode tokens", "token_vectors")
        texts, chosen = as_list(texts)
        check_texts("texts", texts)
        is_query = prompt_name == "query"
        if max_length is None:
            max_length = trained.max_seq_length
            if is_query:
                max_length = trained.settings.get("max_query_length", max_length)
        max_length = choose_length(max_length, self.config.max_position_embeddings)
        rules = TokenRules(trained.settings, self.tokenizer)
        inputs = TokenizedTexts(
            self.tokenizer, max_length, find_prompt(trained.settings, prompt_name)
        )
        inputs.add(texts)
        if truncated := inputs.num_truncated(texts):
            message = f"{truncated} of {len(texts)} texts are truncated to {max_length} tokens"
            warnings.warn(message, stacklevel=2)
        make_tokens = rules.query if is_query else rules.passage
        features = [make_feature([make_tokens(inputs.ids[text])]) for text in texts]
        results = self.head_outputs(features, batch_size)
        for index, feature in enumerate(features):
            results[index] = results[index][feature.token_kinds[0] != NO_VECTOR]
        return results[chosen]

    def similarity(
        self,
        first: np.ndarray | csr_array | list[np.ndarray],
        second: np.ndarray | csr_array | list[np.ndarray],
    ) -> np.ndarray:
        """Compares each of the vectors of `encode` with each: float32 `[len(first), len(second)]`.

        By the cosine or, of a bi-encoder that does not normalize, the dot product; a model of
        sentence-transformers may have the negative Euclidean or Manhattan distance. A multi-vector
        model compares results of `encode_tokens`, first of queries, then of passages, by MaxSim.
        Sparse vectors are compared by the dot product, or by the cosine if the head says so.

        Raises ValueError unless both are `[num, size]`, or `[size]` for one, of equal sizes; of a
        multi-vector model, lists of `[tokens, size]`, or one of them.
        """
        if self.head and find_head(self.head).predicts == "token_vectors":
            first, second = map(as_token_vectors, (first, second))
            if len(sizes := {each.shape[1] for each in (*first, *second)}) > 1:
                expected = "expected vectors of tokens [tokens, size] of equal sizes"
                raise ValueError(f"{expected}, got the sizes {sorted(sizes)}")
            mean = self.head.get("similarity") == "meanmaxsim"
            rows = list(max_similarity_rows(first, second, mean))
            return np.array(rows, np.float32).reshape(len(first), len(second))
        if issparse(first) and issparse(second) and first.shape[1] == second.shape[1]:
            name = similarity_of(self.head) if self._has_sparse_head else "dot"
            return SIMILARITIES[name](first, second).toarray()
        if issparse(first) or issparse(second):
            raise ValueError(
                f"expected sparse vectors of equal sizes, got {first.shape} and {second.shape}"
            )
        first, second = (np.atleast_2d(np.asarray(each, np.float32)) for each in (first, second))
        if first.ndim != 2 or second.ndim != 2 or first.shape[1] != second.shape[1]:
            shapes = f"{list(first.shape)} and {list(second.shape)}"
            raise ValueError(f"expected vectors [num, size] of equal sizes, got {shapes}")
        is_embedding = bool(self.head) and find_head(self.head).predicts == "vector"
        name = similarity_of({"normalize": True} | self.head) if is_embedding else "cosine"
        return SIMILARITIES[name](first, second)

    @overload
    def hidden_states(
        self,
        texts: TextOrPair,
        layers: int | Sequence[int] | None = None,
        batch_size: int = ROWS_PER_BATCH,
        global_positions: Sequence | None = None,
    ) -> np.ndarray: ...
    @overload
    def hidden_states(
        self,
        texts: Iterable[TextOrPair],
        layers: int | Sequence[int] | None = None,
        batch_size: int = ROWS_PER_BATCH,
        global_positions: Sequence | None = None,
    ) -> list[np.ndarray]: ...
    def hidden_states(
        self,
        texts: TextsOrPairs,
        layers: int | Sequence[int] | None = None,
        batch_size: int = ROWS_PER_BATCH,
        global_positions: Sequence | None = None,
    ) -> np.ndarray | list[np.ndarray]:
        """Computes the hidden states of `layers`, [CLS] and [SEP] included.

        Returns float32 `[num_tokens, len(layers), hidden_size]` for each text or pair. Layer 0 is
        the embeddings, -1 the last layer; by default the last four, or fewer if there are fewer.
        For `batch_size` and `global_positions` see `encode`.
        """
        parts, chosen = as_texts_or_pairs(texts)
        last = self.config.num_layers
        layers = range(max(last - 3, 1), last + 1) if layers is None else layers
        layers = tuple(np.atleast_1d(np.asarray(layers, object)).tolist())
        valid = range(-last - 1, last + 1)
        if not layers or not all(type(layer) is int and layer in valid for layer in layers):
            raise ValueError(f"layers must be in [{-last - 1}, {last}], got {layers!r}")
        limit = self.config.max_position_embeddings
        features = self._make_features(parts, chosen, limit, global_positions)
        function = functools.partial(
            forward.hidden_states, self.module.config, self.plan, layers, self.params["encoder"]
        )
        rows = self._compute_rows(function, features, batch_size)
        results = [None] * len(features)
        for index, states in forward.split_rows(rows, list(map(len, features))):
            results[index] = states.copy()
        return results[chosen]

    features = hidden_states  # The name in the paper, section 5.3.

    @overload
    def attention(
        self, texts: TextOrPair, global_positions: Sequence | None = None
    ) -> Attention: ...
    @overload
    def attention(
        self, texts: Iterable[TextOrPair], global_positions: Sequence | None = None
    ) -> list[Attention]: ...
    def attention(
        self, texts: TextsOrPairs, global_positions: Sequence | None = None
    ) -> Attention | list[Attention]:
        """Computes how much each token attends to each other one, [CLS] and [SEP] included.

        For `global_positions` see `encode`.
        """
        parts, chosen = as_texts_or_pairs(texts)
        limit = self.config.max_position_embeddings
        features = self._make_features(parts, chosen, limit, global_positions)
        function = functools.partial(
            forward.attention_maps, self.module.config, self.plan, self.params["encoder"]
        )
        results = [None] * len(features)
        for (index,), maps in self._compute_rows(function, features, 8, max_sequences=1):
            tokens = token_names(features[index], self.tokenizer)
            probabilities = maps[: len(tokens), ..., : len(tokens)].transpose(1, 2, 0, 3)
            results[index] = Attention(tokens, probabilities.copy())
        return results[chosen]

    @overload
    def fill_mask(self, texts: str, top_k: int = 5) -> Fills: ...
    @overload
    def fill_mask(self, texts: Iterable[str], top_k: int = 5) -> list[Fills]: ...
    def fill_mask(self, texts: Texts, top_k: int = 5) -> Fills | list[Fills]:
        """Predicts the tokens of the masks (`[MASK]`) in texts, which are not truncated.

        Returns the `top_k` most probable, best first; for a text with several masks one such list
        for each mask.
        """
        texts, chosen = as_list(texts)
        check_texts("texts", texts)
        check_whole("top_k", top_k, 1, self.tokenizer.vocab_size)
        self.check_fills_masks("fill in masks")
        limit = self.config.max_position_embeddings
        features = masked_text.masked_features(texts, self.tokenizer, limit)
        model = PretrainingModel(self.config, False, self.plan)
        count = masked_text.count_positions(texts, self.tokenizer.mask_token)

        def token_logits(rows: dict) -> jax.Array:
            positions = masked_text.find_masks(rows["tokens"], self.tokenizer.mask_id, count)
            rows = forward.with_ranks(self.config, rows, self.tokenizer.mask_id)
            return forward.token_logits(model, self.params, rows, positions)

        results = [None] * len(features)
        for (index,), logits in self._compute_rows(token_logits, features, 8, max_sequences=1):
            results[index] = masked_text.fill_text(texts[index], logits, top_k, self.tokenizer)
        return results[chosen]

    @overload
    def generate(
        self,
        prompts: str,
        length: int,
        steps: int | None = None,
        temperature: float = 1.0,
        order: str = "random",
        seed: int = 0,
        on_step: Callable[[str], object] | None = None,
    ) -> str: ...
    @overload
    def generate(
        self,
        prompts: Iterable[str],
        length: int,
        steps: int | None = None,
        temperature: float = 1.0,
        order: str = "random",
        seed: int = 0,
        on_step: Callable[[list[str]], object] | None = None,
    ) -> list[str]: ...
    def generate(
        self,
        prompts: Texts,
        length: int,
        steps: int | None = None,
        temperature: float = 1.0,
        order: str = "random",
        seed: int = 0,
        on_step: Callable | None = None,
    ) -> str | list[str]:
        """Generates text in place of masks: those in a prompt, and `length` more at its end.

        Masks are revealed in several steps, each with a pass over the text: see
        `inference/unmasking.py`. The rest of a prompt stays as it is. A model of masked diffusion
        (`objectives/masked_diffusion.py`) has learned to generate; a masked LM was trained with few
        masks, and does best with "mask_predict" or "confidence". The result is a function of the
        seed and the prompt's index. Prompts are not truncated: with its masks, one that is too long
        raises ValueError, as one without masks.

        Args:
          length: tokens to generate after each prompt; 0 only fills the masks in it.
          steps: about equally many tokens are revealed in each; more steps than masks count as
            their number. None: one token in each, which is slowest and best.
          temperature: divides the logits. 1: samples of the model; 0: the most probable tokens.
          order: which tokens are revealed first: "random"; "confidence", of all masked ones those
            that the model is most certain of; "mask_predict", the same, and in each step, tokens
            that have become uncertain are masked and predicted again.
          on_step: is called after each step with the result so far, with the remaining masks left
            in place.
        """
        prompts, chosen = as_list(prompts)
        check_texts("prompts", prompts)
        if self.config.causal:
            raise ValueError(
                "`generate` fills in masks, which needs a bidirectional model; sampling from a "
                "left-to-right model is not implemented"
            )
        self.check_fills_masks("generate text")
        limit = self.config.max_position_embeddings
        check_whole("length", length, 0, limit)
        if steps is not None:
            check_whole("steps", steps, 1, 2**31 - 1)
        check_whole("seed", seed, 0, 2**32 - 1)
        if not (isinstance(temperature, int | float | np.number) and 0 <= temperature < np.inf):
            raise ValueError(f"temperature must be a number of at least 0, got {temperature!r}")
        if order not in unmasking.ORDERS:
            raise ValueError(f"order must be one of {unmasking.ORDERS}, got {order!r}")
        features = masked_text.prompt_features(prompts, length, self.tokenizer, limit)
        self._warn_of_untrained_positions(features, stacklevel=3)
        texts = [prompt + length * self.tokenizer.mask_token for prompt in prompts]

        def filled(generated: list[np.ndarray]) -> str | list[str]:
            each = zip(texts, features, generated, strict=True)
            return [masked_text.fill_masks(*one, self.tokenizer) for one in each][chosen]

        model = PretrainingModel(self.config, False, self.plan)
        count = masked_text.count_positions(texts, self.tokenizer.mask_token)
        options = steps, float(temperature), order, seed
        report = None if on_step is None else lambda generated: on_step(filled(generated))
        generated = unmasking.unmask(
            model, self.params, features, count, self.tokenizer, *options, report
        )
        return filled(generated)

    @overload
    def score(
        self, texts: str, mask_rest_of_word: bool = False, batch_size: int = ROWS_PER_BATCH
    ) -> Score: ...
    @overload
    def score(
        self,
        texts: Iterable[str],
        mask_rest_of_word: bool = False,
        batch_size: int = ROWS_PER_BATCH,
    ) -> list[Score]: ...
    def score(
        self,
        texts: Texts,
        mask_rest_of_word: bool = False,
        batch_size: int = ROWS_PER_BATCH,
    ) -> Score | list[Score]:
        """Computes how probable texts are: the pseudo-log-likelihood of each token and text.

        Each token is masked alone and predicted from all others (Salazar et al., 2020), so that a
        text of n tokens is read n times. The pseudo-perplexity is not the perplexity of a model
        that reads left to right, and only comparable between models with one vocabulary. Special
        tokens in a text, such as "[MASK]", are scored as the text that they are; unknown words
        count as [UNK], with a warning. Texts are not truncated; one without tokens raises
        ValueError, as one that is too long.

        Args:
          mask_rest_of_word: whether the pieces that follow a token in its word are masked, too
            (Kauf and Ivanova, 2023), so that words of several pieces are not overestimated.
          batch_size: as for `encode`.
        """
        texts, chosen = as_list(texts)
        check_texts("texts", texts)
        self.check_fills_masks("score texts")
        limit = self.config.max_position_embeddings
        encoded = pseudo_likelihood.tokenize(texts, self.tokenizer, limit)
        if unknown := pseudo_likelihood.count_unknown(encoded, self.tokenizer):
            message = f"{unknown} of {len(texts)} texts have unknown words, scored as [UNK]"
            warnings.warn(message, stacklevel=2)
        copies = (
            copy
            for tokens in encoded
            for copy in masked_copies(tokens, self.tokenizer, mask_rest_of_word)
        )
        values = iter(self.log_probabilities(copies, batch_size))
        scores = [
            describe_score(ids, [next(values) for _ in ids], self.tokenizer) for ids, _ in encoded
        ]
        return scores[chosen]

    @overload
    def replaced_tokens(self, texts: TextOrPair) -> Replaced: ...
    @overload
    def replaced_tokens(self, texts: Iterable[TextOrPair]) -> list[Replaced]: ...
    def replaced_tokens(self, texts: TextsOrPairs) -> Replaced | list[Replaced]:
        """Computes the probability of each token of texts or pairs to be replaced (ELECTRA).

        [CLS] and [SEP] are included.
        """
        if "discriminator" not in self.params:
            fix = "load the discriminator of an ELECTRA run, or its ElectraForPreTraining"
            raise ValueError(f"this model has no head for replaced tokens: {fix}")
        parts, chosen = as_texts_or_pairs(texts)
        features = make_features(parts, self.tokenizer, self.config.max_position_embeddings)
        model = Discriminator(self.config, self.plan)
        function = functools.partial(forward.head_outputs, model, self.params)
        rows = self._compute_rows(function, features, ROWS_PER_BATCH)
        results = [None] * len(features)
        for index, logits in forward.split_rows(rows, list(map(len, features))):
            tokens = token_names(features[index], self.tokenizer)
            results[index] = Replaced(tokens, expit(logits))
        return results[chosen]

    @overload
    def classify(self, texts: TextOrPair, top_k: None = None) -> Classified: ...
    @overload
    def classify(self, texts: TextOrPair, top_k: int) -> list[Classification]: ...
    @overload
    def classify(self, texts: Iterable[TextOrPair], top_k: None = None) -> list[Classified]: ...
    @overload
    def classify(self, texts: Iterable[TextOrPair], top_k: int) -> list[list[Classification]]: ...
    def classify(
        self, texts: TextsOrPairs, top_k: int | None = None
    ) -> Classified | list[Classified] | list[list[Classification]]:
        """Classifies texts or pairs of texts, or predicts a value for each.

        Returns:
          Of each text, the most probable label; for a multi-label head the list of all labels with
          a probability above 0.5, or above their tuned thresholds, best first; for a regression
          head the value. With `top_k`, the list of the best labels, best first.
        """
        if top_k is None:
            trained = self._need_head("classify", "class", "label_set", "value")
        else:
            trained = self._need_head("rank labels", "class", "label_set")
            check_whole("top_k", top_k, 1, len(trained.settings["labels"]))
        parts, chosen = as_texts_or_pairs(texts)
        features = make_features(parts, self.tokenizer, trained.max_seq_length)
        outputs = self.head_outputs(features)
        return [classify_output(trained.settings, output, top_k) for output in outputs][chosen]

    @overload
    def tag(
        self, texts: str | tuple[str, ...], documents: Sequence[object] | None = None
    ) -> Tagging: ...
    @overload
    def tag(
        self, texts: Iterable[str | Sequence[str]], documents: Sequence[object] | None = None
    ) -> list[Tagging]: ...
    def tag(
        self,
        texts: str | Iterable[str | Sequence[str]],
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
        trained = self._need_head("tag words", "tag")
        texts, chosen = as_list(texts, tuple_is_one=True)
        if documents is not None and len(documents) != len(texts):
            counts = f"{len(documents)} documents and {len(texts)} texts"
            raise ValueError(f"{counts}: expected the document of each text")
        if documents is not None and not trained.settings.get("document_context"):
            reason = "the head was trained without document_context, so it reads each text alone"
            raise ValueError(f"documents cannot be used: {reason}")
        split = list(map(tagging.split_words, texts))
        features, positions = tagging.text_features(
            split, documents, self.tokenizer, trained.max_seq_length
        )
        outputs = self.head_outputs(features)
        labels, scheme = trained.settings["labels"], trained.settings.get("scheme")
        return tagging.describe_texts(split, positions, outputs, labels, scheme)[chosen]

    @overload
    def answer(
        self, question: str, context: Texts, top_k: int = 1, null_threshold: float | None = None
    ) -> list[Answer]: ...
    @overload
    def answer(
        self,
        question: Iterable[str],
        context: Texts,
        top_k: int = 1,
        null_threshold: float | None = None,
    ) -> list[list[Answer]]: ...
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
        (questions, chosen), (contexts, _) = as_list(question), as_list(context)
        for name, texts in (("question", questions), ("context", contexts)):
            check_texts(name, texts)
            if empty := [index for index, text in enumerate(texts) if not text.strip()]:
                where = f" at index {empty[0]}" if len(texts) > 1 else ""
                raise ValueError(f"the {name} is empty{where}")
        contexts *= len(questions) if isinstance(context, str) else 1
        if len(questions) != len(contexts):
            counts = f"{len(questions)} questions and {len(contexts)} contexts"
            raise ValueError(f"{counts}: expected one context, or one for each question")
        check_whole("top_k", top_k, 1, spans.N_BEST)
        trained = self._need_head("answer questions", "span")
        config = spans.span_config(trained.settings, trained.max_position_embeddings)
        if null_threshold is not None:
            if not isinstance(null_threshold, int | float | np.number):
                raise TypeError(f"null_threshold must be a number, got {null_threshold!r}")
            config = config._replace(null_answers=True, null_threshold=null_threshold)
        pairs = list(zip(questions, contexts, strict=True))
        passages = spans.make_passages(pairs, self.tokenizer, config)
        windows = [window for passage in passages for window in passage.features]
        outputs = iter(self.head_outputs(windows))
        return [
            spans.rank_answers(each, [next(outputs) for _ in each.windows], config).answers[:top_k]
            for each in passages
        ][chosen]

    @overload
    def rank(self, query: str, candidates: Iterable[str]) -> list[Ranked]: ...
    @overload
    def rank(self, query: Iterable[str], candidates: Iterable[str]) -> list[list[Ranked]]: ...
    def rank(self, query: Texts, candidates: Iterable[str]) -> list[Ranked] | list[list[Ranked]]:
        """Ranks passages for a query, or endings of a story, best first.

        With a cross-encoder, a multi-vector model (by MaxSim) or a model of multiple choice.
        """
        queries, chosen = as_list(query)
        if isinstance(candidates, str):
            raise TypeError(f"candidates must be a list of strings, got {candidates!r:.60}")
        candidates, _ = as_list(candidates)
        check_texts("query", queries)
        check_texts("candidates", candidates)
        if self.head and find_head(self.head).predicts == "token_vectors":
            vectors = self.encode_tokens(queries, "query"), self.encode_tokens(candidates)
            scores = self.similarity(*vectors)
        else:
            scores = self.score_pairs(list(itertools.product(queries, candidates)))
        scores = np.reshape(scores, (len(queries), len(candidates)))
        return [rank_candidates(candidates, each) for each in scores][chosen]

    def score_pairs(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """Returns the logit by which `rank` orders each query and candidate, float32 `[pairs]`."""
        trained = self._need_head("rank texts", "choice")
        limit = trained.max_seq_length
        max_first = trained.settings.get("max_query_length", limit)
        max_first -= self.tokenizer.layout.num_special_tokens(1)
        features = make_features(pairs, self.tokenizer, limit, max_first)
        return np.reshape(self.head_outputs(features), len(pairs)).astype(np.float32)

    def predict(
        self,
        table: object,
        text: str = "text",
        text_pair: str = "",
        label: str = "label",
        id: str = "",
        header_lines: int = 1,
        label_columns: Sequence[str] = (),
    ) -> Predictions:
        """Predicts each example of a table and scores the predictions of those with a label.

        The model needs a head for classification, multi-label classification or regression. The
        result equals that of `bert_jax.predict`, which for a model trained on GLUE also knows the
        benchmark's names of labels, and its scores.
        Warns about truncated and empty texts, columns that are not used, and labels that are
        missing or that the head does not have. Raises FileNotFoundError if the file is missing,
        ValueError if the table is invalid, and TypeError for anything but a table.

        Args:
          table: the path of a file, as in `bert_jax.predict`, or a list of dicts, a DataFrame or a
            Dataset, as `bert_jax.tasks.records` lists them.
          text, text_pair: columns of the text and, for a head trained on pairs, of the second text.
          label: column of the label; the table may lack it. A multi-label head takes a list in
            JSONL and dicts, or text with the separator that it was trained with ("|" if it stores
            none).
          id: column of unique ids; "": numbers from 0.
          header_lines: of a .csv or .tsv; the first names the columns, the others are skipped.
          label_columns: columns of 0 and 1, one for each label of a multi-label head, in place of
            `label`; the table may lack them.
        """
        trained = self._need_head("predict tables", "class", "label_set", "value")
        columns = {"text": text, "text_pair": text_pair, "label": label, "id": id}
        options = columns | {"header_lines": header_lines, "label_columns": label_columns}
        return predict_table(table, options, trained, self.head_outputs)

    def head_outputs(
        self,
        features: Sequence[ModelInput],
        batch_size: int = ROWS_PER_BATCH,
        mesh: Mesh | None = None,
    ) -> list[np.ndarray]:
        """Returns the head's output for each feature, as described in `heads.Outputs`.

        For `batch_size` see `encode`. With a `mesh` of the axis `data`, on all of whose devices
        `params` are, the rows are spread over them. Raises ValueError without a head.
        """
        if not self.head:
            raise ValueError("this model has no fine-tuned head: load one that has")
        head = find_head(self.head)
        function = functools.partial(forward.head_outputs, self.module, self.params)
        if mesh is not None:
            function = functools.partial(
                forward.spread_head_outputs, self.module, mesh, self.params
            )
        rows = self._compute_rows(function, features, batch_size)
        is_per_position = head.input_kind == "positions"
        counts = [len(feature) if is_per_position else 1 for feature in features]
        results = [None] * len(features)
        for index, outputs in forward.split_rows(rows, counts):
            results[index] = head.feature_output(outputs.copy())
        return results

    def log_probabilities(
        self,
        features: Iterable[ModelInput],
        batch_size: int = ROWS_PER_BATCH,
        mesh: Mesh | None = None,
    ) -> list[float]:
        """Returns the log probability of the token that each feature's label names, in nats.

        Features are those of `pseudo_likelihood.masked_copies`, read some at a time; for the others
        see `head_outputs`.
        """
        model = PretrainingModel(self.config, False, self.plan)
        compute = functools.partial(forward.head_outputs, model)
        if mesh is not None:
            compute = functools.partial(forward.spread_head_outputs, model, mesh)

        def function(rows: dict) -> jax.Array:
            rows = forward.with_ranks(self.config, rows, self.tokenizer.mask_id)
            return compute(self.params, rows, method="log_probabilities")

        labels, results = LabelLayout(per_position=True), []
        for block in blocks_of_tokens(features, TOKENS_PER_BLOCK):
            rows = self._compute_rows(function, block, batch_size, labels=labels)
            values = [0.0] * len(block)
            for index, (value,) in forward.split_rows(rows, [1] * len(block)):
                values[index] = float(value)
            results += values
        return results

    def _need_head(self, purpose: str, *predicts: str) -> TrainedHead:
        """Returns the head. Raises ValueError if it predicts none of `predicts`."""
        if not self.head or find_head(self.head).predicts not in predicts:
            trained = f"a head for {self.head['task']}" if self.head else "no fine-tuned head"
            names = (name for name, head in HEADS.items() if head.predicts in predicts)
            fix = f"load one fine-tuned for {' or '.join(names)}"
            raise ValueError(f"this model has {trained}, so it cannot {purpose}: {fix}")
        limit = self.config.max_position_embeddings
        return TrainedHead(self.head, self.settings.get("data", {}), self.tokenizer, limit)

    def check_fills_masks(self, purpose: str) -> None:
        """Raises ValueError if the model cannot predict masked tokens, and so not do `purpose`."""
        if self.config.causal:
            raise ValueError(f"this model reads left to right, so it cannot {purpose}")
        if "mlm" not in self.params:
            fix = ""
            if "generator" in self.params:
                command = f"--to=native --generator {self.source or 'SRC'} DST"
                fix = (
                    f": run tools/convert_checkpoint.py {command}, and load the generator from DST"
                )
            elif getattr(self.config, "family", "") == "electra":
                fix = ": load the checkpoint of the generator"
            reason = f"this model has no masked-LM head, so it cannot {purpose}"
            raise ValueError(f"{reason}{fix}")
        if self.tokenizer.mask_id is None:
            raise ValueError(f"this model has no mask token, so it cannot {purpose}")

    @property
    def plan(self) -> ExecutionPlan:
        """How the model runs, on the device that has its parameters and on rows of any length."""
        leaf = jax.tree.leaves(self.params)[0]
        device = next(iter(leaf.devices())) if isinstance(leaf, jax.Array) else jax.devices()[0]
        # Each length of rows is compiled: a loop over one layer compiles faster than all layers.
        return plan_execution(Execution(dtype=self.dtype, scan_layers=True), device)

    def _make_features(
        self,
        parts: Sequence[Sequence[str]],
        chosen: slice | int,
        max_length: int,
        global_positions: Sequence | None,
    ) -> list[ModelInput]:
        """Returns the features of texts or pairs, with the positions that the caller chose."""
        features = make_features(parts, self.tokenizer, max_length, stacklevel=4)
        if global_positions is None:
            return features
        is_one = not isinstance(chosen, slice)
        positions = [global_positions] if is_one else global_positions
        return with_global_positions(features, positions, self.config)

    def _compute_rows(
        self,
        function: Callable[[dict], jax.Array],
        features: Sequence[ModelInput],
        batch_size: int,
        max_sequences: int = 8,
        labels: LabelLayout = forward.UNUSED,
    ) -> Iterator[tuple[list[int], np.ndarray]]:
        """Returns `forward.compute_rows` of any features; warns once of untrained positions."""
        check_segments(self.config, features)
        self._warn_of_untrained_positions(features, stacklevel=4)
        limit = self.config.max_position_embeddings
        return forward.compute_rows(function, features, batch_size, limit, max_sequences, labels)

    def _warn_of_untrained_positions(self, features: Sequence[ModelInput], stacklevel: int) -> None:
        """Warns of a feature that is longer than all rows that the model was trained on, once."""
        lengths = (len(sequence) for feature in features for sequence in feature.sequences)
        longest, trained = max(lengths, default=0), trained_length(self.settings)
        if trained and longest > trained and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"an input has {longest} tokens, but the model was trained on at most {trained}: "
                "its later positions are untrained. Shorten the inputs (max_length, if the method "
                "has it), or train the model on longer rows",
                stacklevel=stacklevel,
            )
