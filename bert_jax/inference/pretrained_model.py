"""Loads a trained model and applies it: `bert_jax.load(directory)`. One CPU is enough."""

import functools
import itertools
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, overload

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from scipy.special import expit, softmax

from bert_jax.checkpoints.parameters import hint_for_unexpected, unexpected_tensors
from bert_jax.checkpoints.read import read_model
from bert_jax.data.features import ModelInput
from bert_jax.inference import forward
from bert_jax.inference.masked_text import Fill, fill_texts
from bert_jax.inference.table_prediction import predict_table
from bert_jax.inference.text_encoder import ROWS_PER_BATCH, TextEncoder
from bert_jax.inference.text_inputs import (
    TextOrPair,
    Texts,
    TextsOrPairs,
    as_list,
    check_texts,
    check_whole,
)
from bert_jax.model.architecture import config_from_settings
from bert_jax.model.encoder import EncoderModel
from bert_jax.model.execution import CHOICES
from bert_jax.model.heads import HEADS, make_model
from bert_jax.objectives.masked_lm import PretrainingModel
from bert_jax.objectives.replaced_tokens import Discriminator
from bert_jax.tasks import spans
from bert_jax.tasks.multiple_choice import Ranked
from bert_jax.tasks.spans import Answer
from bert_jax.tasks.tagging import Tagging, tag_texts
from bert_jax.tasks.text_classification import Classification, best_labels


def find_device(platform: str) -> jax.Device:
    """Returns the first device of a platform. Raises ValueError without one."""
    try:
        return jax.devices(platform)[0]
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
    return PretrainedModel(config, tokenizer, params, settings, str(directory), name)


class Replaced(NamedTuple):
    """The tokens of a text, and the probability of each to be replaced, float32 `[length]`."""

    tokens: list[str]
    probabilities: np.ndarray


class PretrainedModel(TextEncoder):
    """A model on one device, restored by `load` or of parameters of your own.

    For a list of inputs, methods return a list; for a single one (a string, or a tuple: a pair of
    texts or the words of one text), just its result. Lengths include [CLS] and [SEP]. Texts that
    are too long are truncated, as in fine-tuning, with a warning; but fill_mask refuses them, and
    tag and answer (for contexts) take any length. An argument of the wrong type raises TypeError;
    an invalid value, or a model without the head that a method needs, ValueError.

    Attributes:
      config: the architecture.
      tokenizer: the tokenizer of its vocabulary.
      params: the parameter tree: "encoder", and "mlm", "nsp", "discriminator" (with, in an ELECTRA
        run, its "generator") and "head" where the model has them.
      settings: the resolved configuration, as stored in the checkpoint. For own parameters only
        the head is needed: `{"head": {"task": "classification", "labels": ["no", "yes"]}}`.
      source: the directory given to `load`.
      dtype: "float32" or "bfloat16", of hidden states and products.
    """

    @property
    def module(self) -> nn.Module:
        """The Flax module of `params`: with the fine-tuned or pre-training heads that it has."""
        if self.head:
            return make_model(self.config, self.head, self._execution)
        if "discriminator" in self.params:
            return Discriminator(self.config, self._execution)
        if "mlm" not in self.params:
            return EncoderModel(self.config, self._execution)
        return PretrainingModel(self.config, "nsp" in self.params, self._execution)

    def __repr__(self) -> str:
        config, size = self.config, sum(leaf.size for leaf in jax.tree.leaves(self.params))
        sizes = f"{config.num_layers} layers, hidden size {config.hidden_size}, {size:,} parameters"
        parts = [("mlm", "next token" if config.causal else "masked LM"), ("nsp", "sentence pairs")]
        parts.append(("discriminator", "replaced tokens"))
        pretrained = " and ".join(name for part, name in parts if part in self.params)
        head = self.head or {"task": pretrained, "labels": ()}
        purpose = ": ".join(filter(None, (head["task"], ", ".join(head["labels"])[:200])))
        purpose = "head for " * bool(purpose) + (purpose or "no head")
        return f"PretrainedModel({self.source}: {sizes}; {purpose})"

    # What depends on the number of masks or the task of the head is Any for a type checker, which
    # knows neither, and which would refuse most uses of a union.
    @overload
    def fill_mask(self, texts: str, top_k: int = 5) -> list[Any]: ...
    @overload
    def fill_mask(self, texts: Iterable[str], top_k: int = 5) -> list[list[Any]]: ...
    def fill_mask(self, texts: Texts, top_k: int = 5) -> list[Fill] | list[list]:
        """Predicts the tokens of the masks (`[MASK]`) in texts, which are not truncated.

        Returns the `top_k` most probable, best first; for several masks one such list per mask.
        """
        texts, chosen = as_list(texts)
        check_texts("texts", texts)
        check_whole("top_k", top_k, 1, self.tokenizer.vocab_size)
        if self.config.causal:
            raise ValueError("this model reads left to right, so it cannot fill in masks")
        missing = "" if "mlm" in self.params else "masked-LM head"
        if missing := missing or ("mask token" if self.tokenizer.mask_id is None else ""):
            fix = ""
            if "generator" in self.params:
                command = f"--to=native --generator {self.source or 'SRC'} DST"
                fix = (
                    f": run tools/convert_checkpoint.py {command}, and load the generator from DST"
                )
            elif getattr(self.config, "family", "") == "electra":
                fix = ": load the checkpoint of the generator"
            raise ValueError(f"this model has no {missing}, so it cannot fill in masks{fix}")
        model = PretrainingModel(self.config, False, self._execution)
        token_logits = functools.partial(forward.token_logits, model, self.params)
        limit = self.config.max_position_embeddings
        return fill_texts(texts, top_k, self.tokenizer, limit, token_logits, self._apply)[chosen]

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
        parts, chosen = self._parts(texts)
        features = self._features(parts, self._max_length())

        def finish(index: int, logits: np.ndarray) -> Replaced:
            tokens = features[index].sequences[0].tolist()
            return Replaced(list(map(self.tokenizer.id_to_token, tokens)), expit(logits))

        model = Discriminator(self.config, self._execution)
        function = functools.partial(forward.replaced_logits, model, self.params)
        return self._apply(function, features, ROWS_PER_BATCH, finish=finish)[chosen]

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
        self._need_head("answer questions", "span")
        config = spans.span_config(self.head, self.config.max_position_embeddings)
        if null_threshold is not None:
            if not isinstance(null_threshold, int | float | np.number):
                raise TypeError(f"null_threshold must be a number, got {null_threshold!r}")
            config = config._replace(null_answers=True, null_threshold=null_threshold)
        pairs = list(zip(questions, contexts, strict=True))
        passages = spans.make_passages(pairs, self.tokenizer, config)
        windows = [window for passage in passages for window in passage.features]
        outputs = iter(self.head_outputs(windows))
        return [
            spans.best_answers(passage, [next(outputs) for _ in passage.windows], config)[:top_k]
            for passage in passages
        ][chosen]

    @overload
    def classify(self, texts: TextOrPair, top_k: None = None) -> Any: ...
    @overload
    def classify(self, texts: TextOrPair, top_k: int) -> list[Classification]: ...
    @overload
    def classify(self, texts: Iterable[TextOrPair], top_k: None = None) -> list[Any]: ...
    @overload
    def classify(self, texts: Iterable[TextOrPair], top_k: int) -> list[list[Classification]]: ...
    def classify(
        self, texts: TextsOrPairs, top_k: int | None = None
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
            check_whole("top_k", top_k, 1, len(head["labels"]))
        parts, chosen = self._parts(texts)
        outputs = self.head_outputs(self._features(parts, head["max_seq_length"]))
        if head["task"] == "regression":
            return [float(output[0]) for output in outputs][chosen]
        is_multi = head["task"] == "multi_label"
        ranked = [best_labels(head["labels"], logits, is_multi, top_k) for logits in outputs]
        if is_multi and top_k is None:
            ranked = [[best for best in labels if best.probability > 0.5] for labels in ranked]
        elif top_k is None:
            ranked = [labels[0] for labels in ranked]
        return ranked[chosen]

    predict = predict_table

    @overload
    def rank(self, query: str, candidates: Iterable[str]) -> list[Ranked]: ...
    @overload
    def rank(self, query: Iterable[str], candidates: Iterable[str]) -> list[list[Ranked]]: ...
    def rank(self, query: Texts, candidates: Iterable[str]) -> list[Ranked] | list[list[Ranked]]:
        """Ranks passages for a query (cross-encoder) or endings of a story, best first."""
        head = self._need_head("rank texts", "multiple_choice")
        (queries, chosen), limit = as_list(query), head["max_seq_length"]
        if isinstance(candidates, str):
            raise TypeError(f"candidates must be a list of strings, got {candidates!r:.60}")
        candidates, _ = as_list(candidates)
        check_texts("query", queries)
        check_texts("candidates", candidates)
        pairs = list(itertools.product(queries, candidates))
        max_first = head.get("max_query_length", limit)
        max_first -= self.tokenizer.layout.num_special_tokens(1)
        features = self._features(pairs, limit, max_first)
        rankings = []
        for scores in np.reshape(self.head_outputs(features), (len(queries), len(candidates))):
            probabilities = softmax(scores).tolist() if candidates else []
            ranked = map(Ranked, candidates, itertools.count(), scores.tolist(), probabilities)
            rankings.append(sorted(ranked, key=lambda candidate: -candidate.score))
        return rankings[chosen]

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
        head = self._need_head("tag words", "tagging", "feature_based")
        texts, chosen = as_list(texts, tuple_is_one=True)
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
            self.head_outputs,
        )[chosen]

    def _need_head(self, purpose: str, *tasks: str) -> Mapping:
        """Returns the settings of the head. Raises ValueError if it is for none of `tasks`."""
        if not self.head or self.head["task"] not in tasks:
            trained = f"a head for {self.head['task']}" if self.head else "no fine-tuned head"
            fix = f"load one fine-tuned for {' or '.join(tasks)}"
            raise ValueError(f"this model has {trained}, so it cannot {purpose}: {fix}")
        return {"max_seq_length": self.config.max_position_embeddings} | self.head

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
        head = HEADS[self.head["task"]]
        function = functools.partial(forward.head_outputs, self.module, self.params)
        if mesh is not None:
            function = functools.partial(
                forward.spread_head_outputs, self.module, mesh, self.params
            )
        num_outputs = len if head.input_kind == "positions" else lambda feature: 1
        outputs = self._apply(function, features, batch_size, num_outputs=num_outputs)
        return list(map(head.feature_output, outputs))
