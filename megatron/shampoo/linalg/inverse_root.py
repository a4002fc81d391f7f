"""Inverse p-th roots of batches of symmetric positive semi-definite matrices, by eigendecomposition."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Below this largest entry a matrix counts as zero: its root is the identity. The smallest normal float32 is 1.2e-38.
ZERO_EIGENVALUE = 1e-36


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
        matrices: `(..., d, d)`, symmetric up to rounding; not modified.
        root: p, a positive integer.
        epsilon: relative damping.
        dtype: dtype of the eigendecomposition; None for that of the input.

    Returns:
        Roots in the input's dtype, condition numbers, and which are usable. An error or a non-finite value in one
        matrix marks that one alone.

    Source: Gupta et al. 2018 (arXiv:1802.09568); relative damping as in Distributed Shampoo's guidance.
    """
    try:
        return _eigh_root(matrices, root, epsilon, dtype or matrices.dtype)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # LinAlgError, and what cuSOLVER's own failures arrive as
        pass
    # One matrix of a batch failed: find out which, on copies, since a failed solver may have overwritten its input.
    single = matrices.reshape(-1, *matrices.shape[-2:])
    parts = [_one_root(matrix, root, epsilon, dtype or matrices.dtype) for matrix in single]
    batch = matrices.shape[:-2]
    return InverseRoot(
        torch.stack([part.root for part in parts]).reshape(matrices.shape),
        torch.stack([part.condition for part in parts]).reshape(batch),
        torch.stack([part.usable for part in parts]).reshape(batch),
    )


def _one_root(matrix: Tensor, root: int, epsilon: float, dtype: torch.dtype) -> InverseRoot:
    try:
        return _eigh_root(matrix, root, epsilon, dtype)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return InverseRoot(
            torch.full_like(matrix, torch.nan),
            matrix.new_tensor(torch.nan),
            torch.zeros((), dtype=torch.bool, device=matrix.device),
        )


def _eigh_root(matrices: Tensor, root: int, epsilon: float, dtype: torch.dtype) -> InverseRoot:
    work = matrices.to(dtype, copy=True)
    # Scaled to unit size: LAPACK and cuSOLVER lose accuracy near the ends of the exponent range.
    scale = work.abs().amax(dim=(-2, -1), keepdim=True)
    is_zero = scale.squeeze(-1).squeeze(-1) <= ZERO_EIGENVALUE
    finite = scale.isfinite().squeeze(-1).squeeze(-1)
    safe_scale = torch.where((is_zero | ~finite)[..., None, None], torch.ones_like(scale), scale)
    eye = torch.eye(work.shape[-1], dtype=dtype, device=work.device)
    # A matrix that is zero or not finite is replaced before the solver sees it: neither may spoil its batch.
    work = torch.where((is_zero | ~finite)[..., None, None], eye, work / safe_scale)
    eigenvalues, basis = torch.linalg.eigh(work)
    largest = eigenvalues[..., -1:]
    damped = eigenvalues.clamp_min(0) + epsilon * largest
    powers = (damped * safe_scale.squeeze(-1)).pow(-1.0 / root)
    roots = (basis * powers.unsqueeze(-2)) @ basis.mT
    roots = torch.where(is_zero[..., None, None], eye, roots)
    condition = (damped[..., -1] / damped[..., 0]).to(matrices.dtype)
    usable = finite & roots.isfinite().flatten(-2).all(-1) & _orthogonal(basis)
    return InverseRoot(roots.to(matrices.dtype), condition, usable)


def _orthogonal(basis: Tensor) -> Tensor:
    """Which bases satisfy |Q'Q - I| < 1e-3: on ill-conditioned input a solver may return others without an error."""
    eye = torch.eye(basis.shape[-1], dtype=basis.dtype, device=basis.device)
    return (basis.mT @ basis - eye).abs().amax(dim=(-2, -1)) < 1e-3
