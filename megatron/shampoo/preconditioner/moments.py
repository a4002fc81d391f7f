"""Elementwise moments of lists of shards, and the Adam step used for grafting."""

from __future__ import annotations

import torch
from torch import Tensor


def update_moments_(
    gradients: list[Tensor], first: list[Tensor], second: list[Tensor], betas: tuple[float, float]
) -> None:
    """Update first and second moments in place: m <- b1 m + (1-b1) g, v <- b2 v + (1-b2) g^2.

    Args:
        gradients: g, one tensor for each shard.
        first: m, of the same shapes.
        second: v, of the same shapes.
        betas: (b1, b2).

    Source: Kingma and Ba 2014 (arXiv:1412.6980), algorithm 1.
    """
    torch._foreach_lerp_(first, gradients, 1.0 - betas[0])
    torch._foreach_mul_(second, betas[1])
    torch._foreach_addcmul_(second, gradients, gradients, 1.0 - betas[1])


def adam_step(
    first: list[Tensor], second: list[Tensor], steps: list[int], betas: tuple[float, float], eps: float
) -> list[Tensor]:
    """Adam's bias-corrected steps (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps), before the learning rate.

    Args:
        first: m.
        second: v.
        steps: t of each shard, counted from 1.
        betas: (b1, b2).
        eps: added to the denominator.

    Returns:
        One tensor for each shard.

    Source: Kingma and Ba 2014 (arXiv:1412.6980), algorithm 1.
    """
    denominators = torch._foreach_sqrt(second)
    torch._foreach_div_(denominators, [(1.0 - betas[1] ** step) ** 0.5 for step in steps])
    torch._foreach_add_(denominators, eps)
    torch._foreach_mul_(denominators, [1.0 - betas[0] ** step for step in steps])
    return list(torch._foreach_div(first, denominators))
