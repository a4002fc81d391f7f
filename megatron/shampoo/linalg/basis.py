"""Tracking of an eigenbasis that moves slowly: one power iteration and one QR decomposition from the previous one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.shampoo.linalg.eigen import is_orthogonal, sizes

SHIFT = 0.05
"""Added to the eigenvalues of a factor, relative to their mean. It leaves eigenvectors alone and makes the step a
continuous function of the matrix: without it the directions of the smallest eigenvalues are those of rounding errors,
and two layouts of one run drift apart (tests/integration/test_layouts.py)."""


class Tracked(NamedTuple):
    """Result of `track_basis`."""

    basis: Tensor
    """`(..., d, d)`, orthogonal; column i continues column i of the previous basis."""
    usable: Tensor
    """`(...,)` bool: finite and orthogonal."""


def track_basis(matrices: Tensor, basis: Tensor) -> Tracked:
    """One step of orthogonal iteration: Q <- qr((A + shift I) Q).Q, with signs that make R's diagonal positive.

    The eigenbasis by descending eigenvalues is the fixed point that attracts. The columns are not sorted first, as
    SOAP's reference code does: two columns that change places because of a rounding error give another basis.

    Args:
        matrices: A, `(..., d, d)`, symmetric positive semi-definite, both triangles are read; not modified.
        basis: Q of the previous refresh, `(..., d, d)`, orthogonal; not modified.

    Returns:
        A matrix that is not finite, or whose result is not orthogonal, is marked, alone in its batch; a zero matrix
        leaves the basis as it was.

    Raises:
        RuntimeError: the library's decomposition failed.

    Source: SOAP, algorithm 4 (arXiv:2409.11321), with a shift and without the sorting.
    """
    scale, is_zero, finite = sizes(matrices)
    eye = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    work = torch.where((is_zero | ~finite)[..., None, None], eye, matrices / scale)
    diagonal = work.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(SHIFT * diagonal.mean(-1, keepdim=True))
    tracked, triangle = torch.linalg.qr(work @ basis)
    sign = torch.where(triangle.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(tracked)
    tracked = tracked * sign.unsqueeze(-2)
    return Tracked(tracked, finite & is_orthogonal(tracked))


def rayleigh(matrices: Tensor, basis: Tensor) -> Tensor:
    """Eigenvalue estimates diag(Q' A Q), clamped at zero, `(..., d)`."""
    return (basis * (matrices @ basis)).sum(-2).clamp_min(0)


def off_diagonal_ratio(matrices: Tensor, basis: Tensor) -> Tensor:
    """How badly a basis fits: |B - diag B| / |B| with B = Q' A Q, Frobenius norms, `(...,)`; zero for a zero matrix.

    Source: Purifying Shampoo (arXiv:2506.03595): |A - Q diag(B) Q'| is the off-diagonal norm.
    """
    rotated = basis.mT @ matrices @ basis
    whole = torch.linalg.matrix_norm(rotated)
    off = torch.linalg.matrix_norm(rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1)))
    return torch.where(whole > 0, off / whole, torch.zeros_like(whole))


def carry_weights(new: Tensor, old: Tensor) -> Tensor:
    """Weights (Q_new' Q_old)^2, elementwise, that carry a diagonal in the old basis to the new one, `(..., d, d)`.

    With C = Q_new' Q_old the matrix Q_old diag(v) Q_old' has the diagonal (C o C) v in the new basis: a reordered or
    reflected column takes its value along, and a rotation mixes.
    """
    return (new.mT @ old).square()
