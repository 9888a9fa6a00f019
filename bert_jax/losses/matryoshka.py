"""Matryoshka representation learning: vectors that are useful when truncated."""

from collections.abc import Callable, Sequence

import jax

from bert_jax.losses.similarity import unit_vectors


def matryoshka(
    loss: Callable[..., jax.Array], sizes: Sequence[int], weights: Sequence[float]
) -> Callable[..., jax.Array]:
    """Returns the loss that sums `loss` over truncated vectors (Kusupati et al., 2022, section 3).

    MatryoshkaLoss: for each of `sizes`, vectors are truncated to it and normalized, and their loss
    is multiplied by its weight. The first argument of `loss` is vectors `[..., size]`. The result
    raises ValueError for vectors that are smaller than one of `sizes`.
    """

    def sum_over_sizes(vectors, *rest):
        if max(sizes) > vectors.shape[-1]:
            raise ValueError(
                f"a Matryoshka size of {max(sizes)}, but vectors have {vectors.shape[-1]}: set it "
                "to at most this number"
            )
        losses = (
            weight * loss(unit_vectors(vectors[..., :size]), *rest)
            for size, weight in zip(sizes, weights, strict=True)
        )
        return sum(losses)

    return sum_over_sizes
