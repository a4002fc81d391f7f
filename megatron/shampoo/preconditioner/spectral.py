"""Averaged eigenvalues of the two factors of a Kullback-Leibler fit.

Legend: Z is a block's gradient in the eigenbases (m x n), l_L (m) and l_R (n) the averaged eigenvalues: E[Z_ij^2] is
fitted by l_L,i l_R,j.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.shampoo.linalg.precision import full_float32

FLOOR = 1e-4
"""Smallest eigenvalue that is divided by, relative to the mean: directions that no gradient has shown yet."""


def floored(eigenvalues: Tensor) -> Tensor:
    """Eigenvalues `(..., d)`, at least `FLOOR` times their mean; where all are zero, what 0 can be divided by."""
    least = (FLOOR * eigenvalues.mean(-1, keepdim=True)).clamp_min(torch.finfo(eigenvalues.dtype).tiny)
    return torch.maximum(eigenvalues, least)


def first_eigenvalues(gradient: Tensor) -> Tensor:
    """Start of both averages: the root mean square of the first gradient, so that their product is its mean square.

    Args:
        gradient: `(blocks, m, n)`.

    Returns:
        `(blocks,)`.
    """
    return gradient.square().mean((-2, -1)).sqrt()


def average_eigenvalues(
    left: Tensor, right: Tensor, rotated: Tensor, beta: float, num_updates: Tensor
) -> tuple[Tensor, Tensor]:
    """One Gauss-Seidel step of the averages, with bias correction.

    b_t = (b - b^t) / (1 - b^t); l_L <- b_t l_L + (1 - b_t) mean_j Z_ij^2 / l_R,j; then, with the new l_L,
    l_R <- b_t l_R + (1 - b_t) mean_i Z_ij^2 / l_L,i. The start is forgotten at t = 1, whatever the gradient's scale.

    Args:
        left: l_L, `(blocks, m)`; not modified.
        right: l_R, `(blocks, n)`; not modified.
        rotated: Z, `(blocks, m, n)`.
        beta: b.
        num_updates: t of each block, this update counted, `(blocks,)`.

    Returns:
        The new l_L and l_R.

    Source: Lin et al. (arXiv:2509.03378), with the new l_L in the second line and bias correction: with both lines from
    the old averages their product reflects the error of the start instead of forgetting it.
    """
    squares = rotated.square()
    power = beta ** num_updates.to(rotated)
    weight = ((beta - power) / (1 - power))[:, None]
    # Means as products of a matrix and a vector: no second array of the squares' size.
    with full_float32():
        inverse = (1 / floored(right)).unsqueeze(-1)
        left = weight * left + (1 - weight) * torch.bmm(squares, inverse).squeeze(-1) / right.shape[-1]
        inverse = (1 / floored(left)).unsqueeze(-1)
        right = weight * right + (1 - weight) * torch.bmm(squares.mT, inverse).squeeze(-1) / left.shape[-1]
    return left, right
