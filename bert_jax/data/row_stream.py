"""Joins corpora into one endless stream of rows: interleaved by weight, each from a given row on.

Which corpus row i comes from, and which of its rows it is, is a function of i alone: a run resumes
at any step, on any number of hosts.
"""

from collections.abc import Sequence

import numpy as np

from bert_jax.data.rows import Rows


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
        self._shares = [weight / sum(weights[n:]) for n, weight in enumerate(weights)]

    @property
    def shuffle_seed(self) -> int | None:
        return self.corpora[0].shuffle_seed

    def rows_of_each(self, num_rows: int | np.ndarray) -> np.ndarray:
        """Returns how many of the first `num_rows` rows each corpus has: int64 [corpora, ...]."""
        counts, left = [], np.asarray(num_rows, np.int64)
        for share in self._shares:
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
