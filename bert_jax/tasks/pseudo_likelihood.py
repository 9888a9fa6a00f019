"""Pseudo-log-likelihoods: how probable a masked language model finds a text, token by token.

Each token is masked alone, and predicted from all others (Salazar et al., 2020, section 2.1), so
that a text of n tokens is read n times. A word of several pieces is then too probable, as each is
seen by the others: optionally, those that follow in its word are masked, too (Kauf and Ivanova,
2023, PLL-word-l2r).
"""

import collections
import pathlib
from collections.abc import Iterator, Mapping, Sequence, Set
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


def masked_copies(
    text: str, ids: Sequence[int], tokenizer: Tokenizer, max_length: int, mask_rest_of_word: bool
) -> list[ModelInput]:
    """Returns a feature for each token of a text of these ids, in which it is masked.

    Its label, int32 `[length]`, is the token at that position, and NO_LABEL elsewhere. Raises
    ValueError for a text without tokens, or of more than `max_length` with [CLS] and [SEP].
    """
    if not ids:
        raise ValueError(f"the text {text!r:.60} has no tokens, so it has no score: remove it")
    sequence, second_start = make_sequence(tokenizer, ids)
    if len(sequence) > max_length:
        size = f"{len(sequence)} tokens, expected at most {max_length}"
        raise ValueError(f"text has {size}: shorten {text!r:.60}")
    first = tokenizer.layout.num_around
    begins_word = tokenizer.word_start[ids]
    copies = []
    for index, token in enumerate(ids):
        end = index + 1
        while mask_rest_of_word and end < len(ids) and not begins_word[end]:
            end += 1
        masked, label = sequence.copy(), np.full(len(sequence), NO_LABEL, np.int32)
        masked[first + index : first + end] = tokenizer.mask_id
        label[first + index] = token
        copies.append(ModelInput((masked,), (second_start,), label))
    return copies


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
        paths = files_with_suffix(directory, (".csv", ".tsv", ".tab", ".jsonl"))
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

    def features(self, examples: Sequence[tables.Record]) -> list[ModelInput]:
        rest, copies = self._options["mask_rest_of_word"], []
        for record, encoded in zip(examples, self._encode(examples), strict=True):
            for column, ids in zip(self._columns, encoded, strict=True):
                text = record.columns[column]
                try:
                    copies += masked_copies(text, ids, self._tokenizer, self._max_length, rest)
                except ValueError as error:
                    raise ValueError(f"{record.location}: {error}") from None
        return copies

    def describe(self, examples: Sequence[tables.Record], outputs: Outputs) -> list[dict]:
        values, lines = iter(np.ravel(outputs)), []
        for record, encoded in zip(examples, self._encode(examples), strict=True):
            good, bad = (
                describe_score(ids, [next(values) for _ in ids], self._tokenizer) for ids in encoded
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

    def _encode(self, examples: Sequence[tables.Record]) -> list[list[list[int]]]:
        """Returns the token ids of both texts of each pair."""
        firsts, seconds = (
            self._tokenizer.encode_batch([record.columns[column] for record in examples])
            for column in self._columns
        )
        return [list(pair) for pair in zip(firsts, seconds, strict=True)]
