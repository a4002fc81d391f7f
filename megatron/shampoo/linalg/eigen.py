"""Eigendecompositions of batches of symmetric positive semi-definite matrices, with a verdict for each matrix."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.shampoo.linalg.isolation import isolated
from megatron.shampoo.linalg.norms import largest_entry

ZERO_EIGENVALUE = 1e-36
"""Below this largest entry a matrix counts as zero: its basis is the identity. Smallest normal float32: 1.2e-38."""

MAX_SKEW = 1e-3
"""Largest |Q'Qx - x| for vectors x of signs, of a basis that may be used: a solver may return worse, and no error."""

NUM_PROBES = 8
"""Vectors that orthogonality is tested on."""


class Eigen(NamedTuple):
    """Result of `eigenbasis`."""

    values: Tensor
    """`(..., d)`, ascending, not negative, of the working dtype; ones for a zero matrix."""
    basis: Tensor
    """`(..., d, d)`, columns are eigenvectors, of the working dtype; the identity for a zero matrix."""
    usable: Tensor
    """`(...,)` bool: finite, orthogonal and computed without an error."""


def eigenbasis(matrices: Tensor, dtype: torch.dtype | None = None) -> Eigen:
    """Eigenvalues and eigenvectors: A = Q diag(l) Q'. Only the lower triangle is read.

    Args:
        matrices: `(..., d, d)`, symmetric; not modified.
        dtype: working dtype; None for that of the input.

    Returns:
        An error or a non-finite value in one matrix marks that one alone.
    """
    dtype = dtype or matrices.dtype
    batch = matrices.shape[:-2]
    found = isolated(
        functools.partial(_eigh, dtype=dtype),
        functools.partial(_failed, dtype=dtype),
        matrices.reshape(-1, *matrices.shape[-2:]),
    )
    return Eigen(*(each.reshape(batch + each.shape[1:]) for each in found))


def _failed(matrices: Tensor, dtype: torch.dtype) -> Eigen:
    basis = torch.full_like(matrices, torch.nan, dtype=dtype)
    return Eigen(basis[..., 0].clone(), basis, torch.zeros(len(matrices), dtype=torch.bool, device=matrices.device))


def _eigh(matrices: Tensor, dtype: torch.dtype) -> Eigen:
    work = matrices.to(dtype, copy=True)
    # Scaled to unit size: LAPACK and cuSOLVER lose accuracy near the ends of the exponent range.
    scale, is_zero, finite = sizes(work)
    replaced = (is_zero | ~finite)[..., None, None]
    eye = torch.eye(work.shape[-1], dtype=dtype, device=work.device)
    # A matrix that is zero or not finite is replaced before the solver sees it: neither may spoil its batch.
    work = torch.where(replaced, eye, work / scale)
    values, basis = torch.linalg.eigh(work)
    usable = finite & values.isfinite().all(-1) & is_orthogonal(basis)
    return Eigen(values.clamp_min(0) * scale.squeeze(-1), basis, usable)


def sizes(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Largest entries `(..., 1, 1)` (one where zero or not finite); which are zero, which finite (both `(...,)`)."""
    scale = largest_entry(matrices)[..., None, None]
    finite = scale.isfinite()
    is_zero = scale <= ZERO_EIGENVALUE
    scale = torch.where(is_zero | ~finite, torch.ones_like(scale), scale)
    return scale, is_zero[..., 0, 0], finite[..., 0, 0]


def is_orthogonal(basis: Tensor) -> Tensor:
    """Which bases `(..., d, d)` are finite and orthogonal: |Q'Qx - x| < `MAX_SKEW` |x|, largest entries.

    The vectors x are fixed, with signs that no eigenbasis knows of: products with a few vectors instead of Q'Q, which
    would cost a tenth of a refresh.
    """
    probe = _probe(basis.shape[-1], basis.dtype, basis.device)
    skew = largest_entry(basis.mT @ (basis @ probe) - probe)
    return skew < MAX_SKEW  # a comparison with NaN is false


def is_finite(matrices: Tensor) -> Tensor:
    """Which matrices `(..., d, d)` are finite in every entry."""
    return largest_entry(matrices).isfinite()


@functools.cache
def _probe(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Vectors of signs, `(size, NUM_PROBES)`; kept, since to make them costs a copy to the device."""
    generator = torch.Generator().manual_seed(size)
    return torch.randint(0, 2, (size, NUM_PROBES), generator=generator).mul(2).sub(1).to(device, dtype)
