"""Accumulation of the Kronecker factors of a batch of blocks.

Legend: G is a block's gradient (m x n), L its left factor matrix (m x m), R its right one (n x n). Of a factor only the
lower triangle is kept up to date.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.shampoo.linalg.norms import largest_entry
from megatron.shampoo.linalg.precision import full_float32
from megatron.shampoo.linalg.symmetric import average_gram_

MAX_EXPONENT = 100
"""Of a scale, in either direction: its inverse, and what is multiplied by it, stay normal float32 numbers."""

MAX_GROWTH = 2.0**20
"""Largest entry of a normalised gradient; at a larger one the scale is raised. Products stay far from float32's limits,
and gradients that shrink again by as much are still far from underflow."""


class Normalised(NamedTuple):
    """Result of `normalise_`."""

    scale: Tensor
    """`(blocks,)`, power of two; zero while no gradient but zero was seen."""
    shrink: Tensor
    """`(blocks,)`, power of two: the old scale over the new one, 1 where there was none."""
    is_nonzero: Tensor
    """`(blocks,)` bool: this gradient is finite and not zero."""


def normalise_(gradient: Tensor, scale: Tensor) -> Normalised:
    """Divide every block's gradient by the block's scale, in place; set scales that are not set yet, raise small ones.

    The scale is the power of two at the largest entry of the first gradient that is not zero, so that products of
    gradients neither underflow nor overflow: float32 squares of 1e-20 are zero. Being a power of two it costs no
    rounding. A gradient that is not finite becomes zero: a moving average would keep it for ever.

    Args:
        gradient: `(blocks, m, n)`, overwritten.
        scale: `(blocks,)`, zero where not set; not modified.
    """
    peak = largest_entry(gradient)
    finite = peak.isfinite()
    is_nonzero = finite & (peak > 0)
    exponent = torch.frexp(peak)[1].clamp(-MAX_EXPONENT, MAX_EXPONENT)
    fitting = torch.ldexp(torch.ones_like(peak), exponent)
    is_new = is_nonzero & ((scale == 0) | (peak > MAX_GROWTH * scale))
    renewed = torch.where(is_new, torch.maximum(fitting, scale), scale)
    shrink = torch.where(is_new & (scale > 0), scale / renewed, torch.ones_like(scale))
    # NaN times zero is NaN. On a GPU to look whether there is any would cost a synchronisation.
    if gradient.is_cuda or not bool(finite.all()):
        gradient.masked_fill_(~finite[:, None, None], 0)
    gradient.mul_(torch.where(renewed > 0, 1 / renewed, torch.ones_like(renewed))[:, None, None])
    return Normalised(renewed, shrink, is_nonzero)


def update_factors_(left: Tensor | None, right: Tensor | None, gradient: Tensor, beta: float) -> None:
    """Accumulate outer products in place: L <- beta L + (1 - beta) G G',  R <- beta R + (1 - beta) G' G.

    Args:
        left: `(blocks, m, m)`, overwritten; None where the blocks have no left factor.
        right: `(blocks, n, n)`, likewise.
        gradient: `(blocks, m, n)`.
        beta: decay per step.

    Source: Gupta et al. 2018 (arXiv:1802.09568), algorithm 1, with a moving average in place of the sum.
    """
    with full_float32():
        if left is not None:
            average_gram_(left, gradient, 1.0 - beta)
        if right is not None:
            average_gram_(right, gradient.mT, 1.0 - beta)


def update_whitened_factors_(
    left: Tensor,
    right: Tensor,
    gradient: Tensor,
    bases: tuple[Tensor, Tensor],
    eigenvalues: tuple[Tensor, Tensor],
    beta: float,
) -> Tensor:
    """Accumulate products whitened by the other factor, in place.

    L <- beta L + (1 - beta)/n G Q_R diag(1/l_R) Q_R' G',  R <- beta R + (1 - beta)/m G' Q_L diag(1/l_L) Q_L' G.

    Args:
        left: `(blocks, m, m)`, overwritten.
        right: `(blocks, n, n)`, overwritten.
        gradient: `(blocks, m, n)`.
        bases: Q_L `(blocks, m, m)` and Q_R `(blocks, n, n)`, of the last refresh.
        eigenvalues: l_L `(blocks, m)` and l_R `(blocks, n)`, positive.
        beta: decay per step.

    Returns:
        The gradient in the basis, Q_L' G Q_R, `(blocks, m, n)`.

    Source: Lin et al. (arXiv:2509.03378), the stationarity condition of the Kullback-Leibler objective.
    """
    rows, columns = gradient.shape[-2:]
    with full_float32():
        by_right = torch.bmm(gradient, bases[1])
        rotated = torch.bmm(bases[0].mT, by_right)
        by_right.mul_((columns * eigenvalues[1]).rsqrt().unsqueeze(-2))
        average_gram_(left, by_right, 1.0 - beta)
        by_left = torch.bmm(bases[0].mT, gradient)
        by_left.mul_((rows * eigenvalues[0]).rsqrt().unsqueeze(-1))
        average_gram_(right, by_left.mT, 1.0 - beta)
    return rotated


def bias_correction(beta: float, num_updates: Tensor) -> Tensor:
    """Weight 1 - beta^t that t updates of a moving average started at zero have put into it.

    Args:
        beta: decay per step.
        num_updates: t, `(...)`, integer.

    Returns:
        `(...)` float64.
    """
    return 1.0 - beta ** num_updates.double()
