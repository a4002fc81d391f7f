"""Apply a block's inverse roots to its (momentum) gradient, and graft the result's norm."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.shampoo.linalg.precision import full_float32


def apply_roots(left_root: Tensor, momentum: Tensor, right_root: Tensor) -> Tensor:
    """Search directions L^(-1/4) M R^(-1/4) of a batch of blocks.

    Args:
        left_root: `(blocks, m, m)`.
        momentum: `(blocks, m, n)`.
        right_root: `(blocks, n, n)`.

    Returns:
        `(blocks, m, n)`.

    Source: Gupta et al. 2018 (arXiv:1802.09568), algorithm 1; momentum before preconditioning as in
    Distributed Shampoo (arXiv:2309.06497).
    """
    with full_float32():
        return torch.bmm(torch.bmm(left_root, momentum), right_root)


def graft_norm_(direction: Tensor, norm: Tensor) -> Tensor:
    """Give every block's direction the norm of its grafting optimizer's step, in place.

    U <- U |P|_F / |U|_F; a zero direction stays zero.

    Args:
        direction: U, `(blocks, m, n)`, overwritten.
        norm: |P|_F, `(blocks,)`.

    Returns:
        The factors |P|_F / |U|_F, `(blocks,)`, zero for a zero direction.

    Source: Agarwal et al. 2020 (arXiv:2002.11803).
    """
    own = torch.linalg.vector_norm(direction, dim=(-2, -1))
    ratio = torch.where(own > 0, norm / own, torch.zeros_like(own))
    direction.mul_(ratio[..., None, None])
    return ratio
