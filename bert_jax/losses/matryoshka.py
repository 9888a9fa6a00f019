"""Matryoshka representation learning: vectors that are useful when truncated."""

from collections.abc import Callable, Sequence

import jax

from bert_jax.losses.similarity import unit_vectors


def matryoshka(
    loss: Callable[..., jax.Array], sizes: Sequence[int], factors: Sequence[float]
) -> Callable[..., jax.Array]:
    """Returns the loss that sums `loss` over truncated vectors (Kusupati et al., 2022, section 3).

    MatryoshkaLoss: for each of `sizes`, vectors are truncated to it and normalized, and their loss
    is multiplied by its factor. The arguments of `loss` are vectors `[..., size]`, labels and
    weights, and by name the vectors of a guide. The result raises ValueError for vectors that are
    smaller than one of `sizes`.
    """

    def sum_over_sizes(vectors, labels, weights, **guide):
        if max(sizes) > vectors.shape[-1]:
            raise ValueError(
                f"a Matryoshka size of {max(sizes)}, but vectors have {vectors.shape[-1]}: set it "
                "to at most this number"
            )
        losses = (
            factor * loss(unit_vectors(vectors[..., :size]), labels, weights, **guide)
            for size, factor in zip(sizes, factors, strict=True)
        )
        return sum(losses)

    return sum_over_sizes
