"""Joins corpora into one endless stream of rows: interleaved by weight, each from a given row on.

Which corpus row i comes from, and which of its rows it is, is a function of i alone: a run resumes
at any step, on any number of hosts.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from bert_jax.data.rows import Rows


def parse_mixture(text: str) -> dict[str, float | None]:
    """Returns the weight of each directory of a mixture: "wiki:0.7,books:0.3", or without weights.

    The weights of "wiki,books" are None. Raises ValueError for a repeated or empty directory, for a
    weight that is not a number above 0, and where only some have a weight.
    """
    weights = {}
    for part in text.split(","):
        directory, _, number = part.rpartition(":")
        try:
            weight = float(number)
        except ValueError:  # A colon of the path, as in gs://, or none.
            directory, weight = part, None
        if not directory:
            raise ValueError(f"expected DIR, DIR:WEIGHT,DIR:WEIGHT or DIR,DIR, got {part!r}")
        if weight is not None and not 0 < weight < math.inf:
            raise ValueError(f"the weight of {directory} is {number}; expected a number above 0")
        if directory in weights:
            raise ValueError(
                f"{directory} is listed twice: list it once, with the sum of the weights"
            )
        weights[directory] = weight
    without = [directory for directory, weight in weights.items() if weight is None]
    if 0 < len(without) < len(weights):
        raise ValueError(f"{without[0]} has no weight; give one to each directory, or to none")
    return weights


def weights_by_size(num_rows: Iterable[int], temperature: float) -> list[float]:
    """Returns the weights of corpora of `num_rows` rows: num_rows ** (1 / temperature).

    At 1 each has as many rows in the mixture as it has on disk. At a higher temperature small
    corpora weigh more: Lample and Conneau (2019), section 3.1, whose alpha is 1 / temperature.
    """
    return [float(count) ** (1 / temperature) for count in num_rows]


def source_names(directories: Iterable[str]) -> list[str]:
    """Returns a name of each corpus of a mixture: its path without what all paths share.

    Of corpus/de/128 and corpus/fr/128 these are "de" and "fr".
    """
    paths = [directory.rstrip("/").split("/") for directory in directories]
    for index in (0, -1):
        while len({path[index] for path in paths}) == 1 and min(map(len, paths)) > 1:
            for path in paths:
                del path[index]
    return ["/".join(path) for path in paths]


class RowStream:
    """The rows that a phase of pre-training reads.

    Each part of the stream has about as much of each corpus as its weight says: of the first n
    rows, the first corpus has floor(n x share), the second the same of those that remain, and so
    on. The rows of a corpus keep the order of its own stream.
    """

    def __init__(
        self,
        corpora: Sequence[Rows],
        weights: Sequence[float] = (1.0,),
        first_rows: Sequence[int] = (0,),
    ):
        """`first_rows` are the positions in the corpora's own streams at which this one begins."""
        self.corpora, self.weights, self.first_rows = corpora, weights, first_rows
        # The share of each corpus in the rows that the corpora before it leave; of the last: 1.
        self._shares_of_rest = [weight / sum(weights[n:]) for n, weight in enumerate(weights)]

    @property
    def shuffle_seed(self) -> int | None:
        return self.corpora[0].shuffle_seed

    def rows_of_each(self, num_rows: int | np.ndarray) -> np.ndarray:
        """Returns how many of the first `num_rows` rows each corpus has: int64 [corpora, ...]."""
        counts, left = [], np.asarray(num_rows, np.int64)
        for share in self._shares_of_rest:
            counts.append(np.floor(left * share).astype(np.int64))
            left = left - counts[-1]
        return np.stack(counts)

    def read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Returns the rows at positions [start, stop), with the fields of `Rows.read`.

        `epochs` are those of each row in its own corpus. `row_ids`, on which its masks depend, are
        those plus the rows of the corpora before, so that no two rows of a mixture share one.
        """
        batch, rows_before = {}, 0
        before = self.rows_of_each(np.arange(start, stop + 1))
        for rows, first, counts in zip(self.corpora, self.first_rows, before, strict=True):
            part = rows.read(first + int(counts[0]), first + int(counts[-1]))
            if len(self.corpora) == 1:
                return part
            places = np.flatnonzero(np.diff(counts))
            for name, values in part.items():
                if name not in batch:
                    batch[name] = np.empty((stop - start, *values.shape[1:]), values.dtype)
                batch[name][places] = values + rows_before if name == "row_ids" else values
            rows_before += rows.num_rows
        return batch
