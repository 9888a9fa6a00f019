"""Pseudo-log-likelihoods: how probable a masked language model finds a text, token by token.

Each token is masked alone, and predicted from all others (Salazar et al., 2020, section 2.1), so
that a text of n tokens is read n times. A word of several pieces is then too probable, as each is
seen by the others: optionally, those that follow in its word are masked, too (Kauf and Ivanova,
2023, PLL-word-l2r).
"""

import collections
import itertools
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np

from bert_jax.data.features import NO_LABEL, ModelInput, make_sequence
from bert_jax.model.heads import Outputs
from bert_jax.tasks import tables
from bert_jax.tasks.task import TrainedHead, files_with_suffix, write_json_blocks
from bert_jax.tokenizers.tokenizer import Tokenizer


class Score(NamedTuple):
    """How probable a text is.

    Attributes:
      tokens: its pieces, without [CLS] and [SEP].
      log_probabilities: float32 `[tokens]`, of each given the others, in nats.
      log_likelihood: their sum: the pseudo-log-likelihood of the text.
      perplexity: exp of minus their mean: the pseudo-perplexity.
    """

    tokens: list[str]
    log_probabilities: np.ndarray
    log_likelihood: float
    perplexity: float


class Tokens(NamedTuple):
    """The token ids of a text, and int32 `[tokens]`, the number of each token's word."""

    ids: list[int]
    words: np.ndarray


def tokenize(texts: Sequence[str], tokenizer: Tokenizer, max_length: int) -> list[Tokens]:
    """Returns the tokens of each text, without [CLS] and [SEP].

    Raises ValueError for a text without tokens, or of more than `max_length` with [CLS] and [SEP].
    """
    limit = max_length - tokenizer.layout.num_special_tokens(1)
    encoded = [Tokens(*each) for each in tokenizer.encode_with_words(texts)]
    for text, (ids, _) in zip(texts, encoded, strict=True):
        if not ids:
            raise ValueError(f"the text {text!r:.60} has no tokens, so it has no score: remove it")
        if len(ids) > limit:
            size = f"{len(ids) + max_length - limit} tokens, expected at most {max_length}"
            raise ValueError(f"text has {size}: shorten {text!r:.60}")
    return encoded


def masked_copies(
    tokens: Tokens, tokenizer: Tokenizer, mask_rest_of_word: bool
) -> Iterator[ModelInput]:
    """Yields a feature for each token of a text, in which it is masked.

    Its label, int32 `[length]`, is the token at that position, and NO_LABEL elsewhere.
    """
    sequence, second_start = make_sequence(tokenizer, tokens.ids)
    first = tokenizer.layout.num_before
    for index, token in enumerate(tokens.ids):
        end = index + 1
        while (
            mask_rest_of_word and end < len(tokens.ids) and tokens.words[end] == tokens.words[index]
        ):
            end += 1
        masked, label = sequence.copy(), np.full(len(sequence), NO_LABEL, np.int32)
        masked[first + index : first + end] = tokenizer.mask_id
        label[first + index] = token
        yield ModelInput((masked,), (second_start,), label)


def count_unknown(encoded: Iterable[Tokens], tokenizer: Tokenizer) -> int:
    """Returns how many texts have an unknown word, which is scored as [UNK], whatever it is."""
    return sum(tokenizer.unk_id in tokens.ids for tokens in encoded)


def describe_score(
    ids: Sequence[int], log_probabilities: Sequence[float], tokenizer: Tokenizer
) -> Score:
    """Returns the score of a text with the given log probabilities of its tokens."""
    values = np.asarray(log_probabilities, np.float32)
    total = float(values.sum(dtype=np.float64))
    pieces = [tokenizer.id_to_token(token) for token in ids]
    return Score(pieces, values, total, float(np.exp(-total / len(ids))))


PREDICT_OPTIONS = {
    "text": "sentence_good",
    "text_pair": "sentence_bad",
    "id": "",
    "header_lines": 1,
    "mask_rest_of_word": False,
}
"""The columns are those of BLiMP (Warstadt et al., 2020)."""


def get_predictor(trained: TrainedHead, options: Mapping, given: Set[str]) -> "PairScorer":
    """Returns what compares the texts of minimal pairs, for a model with a masked-LM head."""
    return PairScorer(trained, options)


class PairScorer:
    """Scores minimal pairs: an acceptable text and one that is not; see `task.Predictor`.

    Features are the masked copies of both texts of each pair, and outputs the log probabilities of
    the tokens that their labels name.
    """

    def __init__(self, trained: TrainedHead, options: Mapping):
        self.writers = {".jsonl": write_json_blocks}
        self.notes: dict[str, int] = collections.Counter()
        self._tokenizer, self._max_length = trained.tokenizer, trained.max_position_embeddings
        self._columns = options["text"], options["text_pair"]
        self._options = options
        self._num_pairs = self._num_correct = 0

    def find_inputs(self, directory: pathlib.Path) -> list[tuple[pathlib.Path, str]]:
        paths = files_with_suffix(directory, tables.SUFFIXES)
        return [(path, f"{path.stem}.jsonl") for path in paths]

    def read(self, path: str | pathlib.Path) -> Iterator[tables.Record]:
        column = self._options["id"]
        columns = (*self._columns, *filter(None, (column,)))
        records = tables.iterate_table(path, columns, self._options["header_lines"])
        for number, record in enumerate(records):
            for each in self._columns:
                if not record.columns[each].strip():
                    raise ValueError(f"{record.location}: {each} is empty, so it has no score")
            yield record._replace(id=record.columns[column] if column else str(number))

    def features(self, examples: Sequence[tables.Record]) -> Iterator[ModelInput]:
        encoded = self._tokenize(examples)
        self.notes["texts with unknown words, which are scored as [UNK]"] += count_unknown(
            itertools.chain(*encoded), self._tokenizer
        )
        for tokens in itertools.chain(*encoded):
            yield from masked_copies(tokens, self._tokenizer, self._options["mask_rest_of_word"])

    def describe(self, examples: Sequence[tables.Record], outputs: Outputs) -> list[dict]:
        values, lines = iter(np.ravel(outputs)), []
        for record, pair in zip(examples, self._tokenize(examples), strict=True):
            good, bad = (
                describe_score(ids, [next(values) for _ in ids], self._tokenizer) for ids, _ in pair
            )
            is_correct = good.log_likelihood > bad.log_likelihood
            self._num_pairs += 1
            self._num_correct += is_correct
            lines.append(
                {"id": record.id}
                | record.columns
                | {
                    "prediction": self._columns[not is_correct],
                    "log_likelihoods": [good.log_likelihood, bad.log_likelihood],
                    "perplexities": [good.perplexity, bad.perplexity],
                }
            )
        return lines

    def scores(self) -> dict[str, float]:
        if not self._num_pairs:
            return {}
        return {"accuracy": self._num_correct / self._num_pairs, "examples": self._num_pairs}

    def _tokenize(self, examples: Sequence[tables.Record]) -> list[list[Tokens]]:
        """Returns the tokens of both texts of each pair."""
        encoded = []
        for record in examples:
            texts = [record.columns[column] for column in self._columns]
            try:
                encoded.append(tokenize(texts, self._tokenizer, self._max_length))
            except ValueError as error:
                raise ValueError(f"{record.location}: {error}") from None
        return encoded
