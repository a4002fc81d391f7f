"""Symmetric matrices of which only the lower triangle is kept up to date: half the work of a full product."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

STRIP = 128
"""Rows of a strip of the triangle: below that, matrix products lose more speed than the skipped half is worth."""


def average_gram_(target: Tensor, x: Tensor, weight: float) -> Tensor:
    """Moving average of a product with itself, in place: S <- S + weight (X X' - S) on at least the lower triangle.

    The rows are cut into strips, and each strip is multiplied with the rows up to its end: with k strips that is
    (k + 1) / 2k of the full product.

    Args:
        target: S, `(batch, d, d)`, overwritten; what lies above the diagonal is undefined afterwards.
        x: X, `(batch, d, k)`.
        weight: of the product, 1 - beta.

    Returns:
        The target.
    """
    size = target.shape[-1]
    strips = max(1, size // STRIP)
    ends = [size * strip // strips for strip in range(strips + 1)]
    for top, bottom in itertools.pairwise(ends):
        mine, rows, others = target[:, top:bottom, :bottom], x[:, top:bottom], x[:, :bottom].mT
        if target.is_cuda:
            mine.baddbmm_(rows, others, beta=1.0 - weight, alpha=weight)
        else:
            # On CPU a product straight into a part of a matrix is no batched product but one call for each matrix.
            mine.lerp_(torch.bmm(rows, others), weight)
    return target


def symmetric_from_lower(matrix: Tensor) -> Tensor:
    """The symmetric matrix with this lower triangle, as a new tensor."""
    lower = matrix.tril()
    return lower + matrix.tril(-1).mT
