"""Kronecker factors of a block: accumulate them, and turn them into inverse roots.

Legend: G is a block's gradient (m x n), L its left factor matrix (m x m), R its right one (n x n).
"""

from __future__ import annotations

from torch import Tensor

from megatron.shampoo.linalg.precision import full_float32


def update_factors_(left: Tensor, right: Tensor, gradient: Tensor, beta: float) -> None:
    """Accumulate the factor matrices of a batch of blocks in place.

    L <- beta L + (1 - beta) G G',  R <- beta R + (1 - beta) G' G.

    Args:
        left: `(blocks, m, m)` float32, overwritten.
        right: `(blocks, n, n)` float32, overwritten.
        gradient: `(blocks, m, n)` float32.
        beta: decay per step.

    Source: Gupta et al. 2018 (arXiv:1802.09568), algorithm 1, with a moving average in place of the sum.
    """
    with full_float32():
        left.baddbmm_(gradient, gradient.mT, beta=beta, alpha=1.0 - beta)
        right.baddbmm_(gradient.mT, gradient, beta=beta, alpha=1.0 - beta)


def bias_correction(beta: float, num_updates: Tensor) -> Tensor:
    """Weight 1 - beta^t that t updates of a moving average started at zero have put into it.

    Args:
        beta: decay per step.
        num_updates: t, `(...)`, integer.

    Returns:
        `(...)` float64.
    """
    return 1.0 - beta ** num_updates.double()
