"""Symmetric matrices of which only the lower triangle is kept up to date: half the work of a full product."""

from __future__ import annotations

import itertools

from torch import Tensor

STRIP = 128
"""Rows of a strip of the triangle: below that, matrix products lose more speed than the skipped half is worth."""


def lower_gram_(target: Tensor, x: Tensor, beta: float, alpha: float) -> Tensor:
    """Moving average of a product with itself, in place: S <- beta S + alpha X X' on at least the lower triangle.

    The rows are cut into strips, and each strip is multiplied with the rows up to its end: with k strips that is
    (k + 1) / 2k of the full product.

    Args:
        target: S, `(batch, d, d)`, overwritten; what lies above the diagonal is undefined afterwards.
        x: X, `(batch, d, k)`.
        beta: factor of what was there.
        alpha: factor of the product.

    Returns:
        The target.
    """
    size = target.shape[-1]
    strips = max(1, size // STRIP)
    ends = [size * strip // strips for strip in range(strips + 1)]
    for top, bottom in itertools.pairwise(ends):
        target[:, top:bottom, :bottom].baddbmm_(x[:, top:bottom], x[:, :bottom].mT, beta=beta, alpha=alpha)
    return target


def symmetric_from_lower(matrix: Tensor) -> Tensor:
    """The symmetric matrix with this lower triangle, as a new tensor."""
    lower = matrix.tril()
    return lower + matrix.tril(-1).mT
