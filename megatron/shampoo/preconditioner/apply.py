"""From a batch of (momentum) gradients to search directions: the three ways to apply factors, grafting, the clip.

Legend: X is what is preconditioned (m x n), a gradient or a momentum; Q_L, Q_R are the factors' eigenbases.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.shampoo.linalg.precision import full_float32


def apply_sides(left: Tensor | None, x: Tensor, right: Tensor | None) -> Tensor:
    """Products A X B of a batch of blocks; a matrix that is None is the identity.

    With inverse roots L^(-1/p), R^(-1/p): the search direction. With Q_L' and Q_R: into the eigenbasis; with Q_L and
    Q_R': back.

    Args:
        left: `(blocks, m, m)`.
        x: `(blocks, m, n)`.
        right: `(blocks, n, n)`.

    Returns:
        `(blocks, m, n)`; the input itself where both are None.

    Source: Gupta et al. 2018 (arXiv:1802.09568), algorithm 1; momentum before preconditioning as in
    Distributed Shampoo (arXiv:2309.06497).
    """
    with full_float32():
        if left is not None:
            x = torch.bmm(left, x)
        if right is not None:
            x = torch.bmm(x, right)
    return x


def update_second_moment_(moment: Tensor, rotated: Tensor, weight: float | Tensor) -> None:
    """V <- V + weight (Z^2 - V) in place, with Z the gradient in the eigenbasis.

    Args:
        moment: V, `(blocks, m, n)`.
        rotated: Z, `(blocks, m, n)`.
        weight: 1 - beta2, a number or `(blocks, 1, 1)`.

    Source: SOAP (arXiv:2409.11321), algorithm 3.
    """
    moment.lerp_(rotated.square(), weight)


def divide_by_adam_(x: Tensor, moment: Tensor, correction: float | Tensor, eps: Tensor, damping: float) -> Tensor:
    """X / (sqrt((V + damping mean(V)) / correction) + eps), in place on X.

    The relative damping is what SOAP lacks: in its eigenbasis, directions that carry nothing but rounding errors stand
    alone (a layer norm's output is orthogonal to the ones vector, for instance), and Adam brings them to full size.

    Args:
        x: in the eigenbasis, `(blocks, m, n)`, overwritten.
        moment: V, `(blocks, m, n)`.
        correction: 1 - beta2^t, or 1.
        eps: in units of x, `(blocks, 1, 1)`.
        damping: relative to a block's mean second moment.

    Source: SOAP (arXiv:2409.11321), algorithm 3, with the damping.
    """
    root = correction**0.5
    floor = damping * moment.mean((-2, -1), keepdim=True)
    return x.mul_(root).div_((moment + floor).sqrt_().add_(eps * root))


def divide_by_eigenvalues_(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """X_ij / sqrt(l_L,i l_R,j), in place.

    Args:
        x: in the eigenbases, `(blocks, m, n)`, overwritten.
        left: l_L, `(blocks, m)`, positive.
        right: l_R, `(blocks, n)`, positive.

    Source: Lin et al. (arXiv:2509.03378).
    """
    return x.mul_(left.rsqrt().unsqueeze(-1)).mul_(right.rsqrt().unsqueeze(-2))


def graft_factor(own: Tensor, norm: Tensor) -> Tensor:
    """Factors |P| / |U| that give directions the norms of their grafting steps, zero for a zero direction.

    Args:
        own: |U|_F, `(blocks,)`.
        norm: |P|_F, `(blocks,)`.

    Source: Agarwal et al. 2020 (arXiv:2002.11803).
    """
    return torch.where(own > 0, norm / own, torch.zeros_like(own))


def clip_factor(norm: Tensor, limit: float, numel: int) -> Tensor:
    """Factors that bound the root mean square of directions: min(1, limit sqrt(numel) / |U|).

    Args:
        norm: |U|_F, `(blocks,)`.
        limit: largest root mean square.
        numel: elements of a block.
    """
    return torch.where(norm > 0, limit * numel**0.5 / norm, torch.ones_like(norm)).clamp_max(1)
