"""Inverse p-th roots of batches of symmetric positive semi-definite matrices, by eigendecomposition."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.shampoo.linalg.eigen import eigenbasis, is_finite, sizes


class InverseRoot(NamedTuple):
    """Result of `inverse_root`: the roots, their condition numbers and which of them may be used."""

    root: Tensor
    """`(..., d, d)`, symmetric, of the input's dtype."""
    condition: Tensor
    """`(...,)`, (largest + damping) / (smallest + damping) eigenvalue."""
    usable: Tensor
    """`(...,)` bool: finite and computed without an error."""


def inverse_root(matrices: Tensor, root: int, epsilon: float, dtype: torch.dtype | None = None) -> InverseRoot:
    """Inverse roots A^(-1/root) with damping relative to the largest eigenvalue.

    With A = Q diag(l) Q' and l_max = max(l): A^(-1/p) = Q diag((max(l, 0) + epsilon l_max)^(-1/p)) Q'.
    A zero matrix has the identity for its root: it holds no information, so it preconditions nothing.

    Args:
        matrices: `(..., d, d)`, symmetric up to rounding, only the lower triangle is read; not modified.
        root: p, a positive integer.
        epsilon: relative damping.
        dtype: dtype of the eigendecomposition; None for that of the input.

    Returns:
        Roots in the input's dtype, condition numbers, and which are usable. An error or a non-finite value in one
        matrix marks that one alone.

    Source: Gupta et al. 2018 (arXiv:1802.09568); relative damping as in Distributed Shampoo's guidance.
    """
    values, basis, usable = eigenbasis(matrices, dtype)
    _, is_zero, _ = sizes(matrices)
    roots, condition = assembled_root(values, basis, root, epsilon, is_zero)
    usable = usable & is_finite(roots)
    return InverseRoot(roots.to(matrices.dtype), condition.to(matrices.dtype), usable)


def assembled_root(values: Tensor, basis: Tensor, root: int, epsilon: float, is_zero: Tensor) -> tuple[Tensor, Tensor]:
    """Roots Q diag((l + epsilon max(l))^(-1/root)) Q', and the condition numbers of what they are roots of.

    Args:
        values: l, `(..., d)`, not negative.
        basis: Q, `(..., d, d)`.
        root: p.
        epsilon: relative damping.
        is_zero: `(...,)`, where the root is the identity.
    """
    damped = damped_values(values, epsilon)
    # In float64: torch's float32 powers round by their place in the batch, which differs between layouts.
    powers = damped.double().pow(-1.0 / root).to(damped)
    roots = (basis * powers.unsqueeze(-2)) @ basis.mT
    eye = torch.eye(basis.shape[-1], dtype=basis.dtype, device=basis.device)
    return torch.where(is_zero[..., None, None], eye, roots), condition_of(damped)


def damped_values(values: Tensor, epsilon: float) -> Tensor:
    """Eigenvalues l + epsilon max(l), `(..., d)`."""
    return values + epsilon * values.amax(-1, keepdim=True)


def condition_of(values: Tensor) -> Tensor:
    """Largest over smallest eigenvalue, `(...,)`."""
    return values.amax(-1) / values.amin(-1)
