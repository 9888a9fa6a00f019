"""Files to predict with a cross-encoder: it ranks the passages of each query."""

import collections
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from bert_jax.data.features import ModelInput
from bert_jax.tasks import tables
from bert_jax.tasks.queries import Inputs, Query, TokenizedTexts, check_differs, iterate_queries
from bert_jax.tasks.rankings import Ranking, describe_rankings, rank_candidates
from bert_jax.tasks.retrieval_scores import TOP, rank_scores
from bert_jax.tasks.task import Outputs, TrainedHead, files_with_suffix, write_json_blocks


class RerankPredictor:
    """Ranks the passages of each query; see `bert_jax.tasks.task.Predictor`.

    An example is a list of lines: one, or consecutive ones with positives of the same query.
    """

    def __init__(self, trained: TrainedHead):
        self.writers = {".jsonl": write_json_blocks}
        self.notes: dict[str, int] = collections.Counter()
        self._trained = trained
        self._rankings: list[Ranking] = []  # In the block whose features were built last.
        self._ranks: list[np.ndarray] = []
        self._ranks_of_all: list[np.ndarray] = []
        self._grades: list[list[float]] = []

    def find_inputs(self, directory: pathlib.Path) -> list[tuple[pathlib.Path, str]]:
        return [(path, path.name) for path in files_with_suffix(directory, (".jsonl",))]

    def read(self, path: str | pathlib.Path) -> Iterator[list[Query]]:
        unused: dict[str, int] = {}
        lines = iterate_queries(path, unused)
        group: list[Query] = []
        for line in lines:
            if group and not (line.positive and group[0].positive and line.text == group[0].text):
                yield group
                group = []
            group.append(line)
        yield group
        tables.note_unused_keys(unused, "lines", self.notes)

    def features(self, examples: Sequence[list[Query]]) -> list[ModelInput]:
        tokenizer, length = self._trained.tokenizer, self._trained.max_seq_length
        max_query_length = self._trained.settings.get("max_query_length", length)
        queries = TokenizedTexts(tokenizer, max_query_length)
        passages = TokenizedTexts(tokenizer, length)
        inputs = Inputs(tokenizer, False, length, queries, passages)
        queries.add(line.text for group in examples for line in group)
        passages.add(text for group in examples for line in group for text in line.candidates())
        self._rankings, features = [], []
        for group in examples:
            for line in group:
                for negative in line.negatives:
                    check_differs(line, negative, passages)
            ranking = rank_candidates(list(range(len(group))), group, passages)
            if not ranking.passages:
                raise ValueError(f"{group[0].location}: no passages to rank: add 'negatives'")
            self._rankings.append(ranking)
            pairs = inputs.pairs(group[0].text, ranking.passages)
            features += [ModelInput((tokens,), (second,)) for tokens, second in pairs]
        return features

    def describe(self, examples: Sequence[list[Query]], outputs: Outputs) -> list[dict]:
        lines, end = [], 0
        for group, ranking in zip(examples, self._rankings, strict=True):
            start, end = end, end + len(ranking.passages)
            scores = np.concatenate(outputs[start:end])
            lines += describe_rankings(group, [(ranking, scores)])
            if ranking.positives:
                self._ranks.append(ranking.ranks(scores))
                self._ranks_of_all.append(ranking.ranks(scores, all_are_found=True))
                self._grades.append(ranking.grades)
        return lines

    def scores(self) -> dict[str, float]:
        if not self._ranks:
            return {}
        result, mrr = rank_scores(self._ranks, self._grades), f"mrr_at_{TOP}"
        result[f"{mrr}_if_all_found"] = rank_scores(self._ranks_of_all)[mrr]
        return result | {"queries": len(self._ranks)}
