"""Refresh of inverse roots with the fallback ladder: solver, LAPACK on a copy, the block's previous root."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.shampoo.linalg.inverse_root import inverse_root
from megatron.shampoo.linalg.precision import full_float32


class Refreshed(NamedTuple):
    """Result of `refresh_roots`."""

    root: Tensor
    """`(blocks, d, d)`: new where usable, the previous one elsewhere."""
    condition: Tensor
    """`(blocks,)` condition number of the damped factor; the previous root's entries are not touched."""
    retried: Tensor
    """`(blocks,)` bool: the first attempt failed."""
    failed: Tensor
    """`(blocks,)` bool: the previous root was kept."""


def refresh_roots(factors: Tensor, previous: Tensor, root: int, epsilon: float, dtype: torch.dtype) -> Refreshed:
    """Inverse p-th roots of a batch of bias-corrected factor matrices.

    Args:
        factors: `(blocks, d, d)` float32; not modified.
        previous: `(blocks, d, d)`, what to keep where no root can be had.
        root: p.
        epsilon: damping relative to the largest eigenvalue.
        dtype: of the first attempt's eigendecomposition.

    Source: the ladder follows what Distributed Shampoo does (retry in double precision, then keep the last root);
    cuSOLVER's failures: pytorch issues 94772 and 105359.
    """
    with full_float32():
        roots, condition, usable = inverse_root(factors, root, epsilon, dtype)
        retried = ~usable
        if bool(retried.any()):
            # On the CPU, by another library than a GPU's: cuSOLVER has failed on matrices that LAPACK solves.
            again = inverse_root(factors[retried].cpu(), root, epsilon, torch.float64)
            for mine, other in zip((roots, condition, usable), again, strict=True):
                mine[retried] = other.to(mine.device)
    failed = ~usable
    roots = torch.where(failed[:, None, None], previous, roots)
    return Refreshed(roots, condition, retried, failed)
