"""Inverse p-th roots by matrix products alone: coupled Newton and Newton-Denman-Beavers iterations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.shampoo.linalg.eigen import sizes

MAX_STEPS = 40
"""Condition 1e6 needs 21 (p = 2) steps of coupled Newton and 22 of Denman-Beavers, condition 1e8 six more."""

TOLERANCE = 1e-6
"""Residual at which the iteration stops; float32 reaches it up to condition 1e4, otherwise the best iterate is kept."""

CHECK_STEPS = 5
"""Iterations between two looks at the residuals: each look is a device synchronisation."""


class NewtonRoot(NamedTuple):
    """Result of an iteration."""

    root: Tensor
    """`(..., d, d)`, the iterate with the smallest residual; the identity for a zero matrix."""
    residual: Tensor
    """`(...,)`, |X^p (A + damping I) - I|_F / sqrt(d) of the returned root; NaN where the input was not finite."""
    steps: int
    """Iterations computed."""


def coupled_newton(matrices: Tensor, root: int, epsilon: float) -> NewtonRoot:
    """Inverse roots by the coupled Newton iteration.

    X_0 = z^(1/p) I, M_0 = z A with z = (1 + p) / (2 s), s an upper bound of the largest eigenvalue;
    T = ((1 + p) I - M) / p, X <- X T, M <- T^p M; then X -> A^(-1/p), M -> I.

    Args:
        matrices: A, `(..., d, d)`, symmetric positive semi-definite, both triangles are read; not modified.
        root: p.
        epsilon: damping, relative to s = min(|A|_F, largest row sum of absolute values).

    Source: Guo and Higham 2006, as used by Distributed Shampoo (arXiv:2309.06497). The bound is certified, unlike one
    from a power iteration.
    """
    work, scale, is_zero, finite = _normalised(matrices, epsilon)
    eye = torch.eye(work.shape[-1], dtype=work.dtype, device=work.device)
    # A matrix of one eigenvalue has a spectral radius of 1 after scaling: z (1 + epsilon) <= (1 + p) / 2 < p + 1.
    z = (1 + root) / (2 * (1 + epsilon))
    x, m = (z ** (1 / root)) * eye.expand_as(work), z * work
    best = _Best(x, work, root)
    steps = 0
    for steps in range(1, MAX_STEPS + 1):
        t = ((1 + root) * eye - m) / root
        x = x @ t
        power = torch.linalg.matrix_power(t, root)
        m = power @ m
        m = (m + m.mT) / 2
        best.offer(x, torch.linalg.matrix_norm(m - eye) / len(eye) ** 0.5)
        if steps % CHECK_STEPS == 0 and best.is_done():
            break
    return best.result(scale, is_zero, finite, steps)


def newton_denman_beavers(matrices: Tensor, root: int, epsilon: float) -> NewtonRoot:
    """Inverse square roots by the product form of Denman and Beavers, applied once for p = 2 and twice for p = 4.

    Y_0 = A / s, Z_0 = I; E = (3 I - Z Y) / 2, Y <- Y E, Z <- E Z; then Y -> (A/s)^(1/2), Z -> (A/s)^(-1/2).

    Args:
        matrices: A, `(..., d, d)`, symmetric positive semi-definite, both triangles are read; not modified.
        root: 2 or 4.
        epsilon: damping, relative to s as for `coupled_newton`.

    Raises:
        ValueError: another root.

    Source: Higham, Functions of Matrices, section 6.3; for Shampoo DASH (arXiv:2602.02016).
    """
    if root not in (2, 4):
        raise ValueError(f"root {root}: allowed are 2 and 4")
    work, scale, is_zero, finite = _normalised(matrices, epsilon)
    work = work / (1 + epsilon)
    steps = 0
    source, best = work, _Best(torch.eye(work.shape[-1], dtype=work.dtype, device=work.device), work, root)
    for level in range(root // 2):
        source, inverse, taken = _denman_beavers(source)
        steps += taken
        if level == root // 2 - 1:
            best.offer(inverse, best.residual_of(inverse))
    return best.result(scale * (1 + epsilon), is_zero, finite, steps)


def _denman_beavers(a: Tensor) -> tuple[Tensor, Tensor, int]:
    """Square root, inverse square root (those of the smallest residual |Z Y - I|) and the number of iterations."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    y, z = a, eye.expand_as(a)
    best_y, best_z, best = y, z, torch.full(a.shape[:-2], torch.inf, dtype=a.dtype, device=a.device)
    done = torch.zeros_like(best, dtype=torch.bool)
    steps = 0
    for steps in range(1, MAX_STEPS + 1):
        product = z @ y
        residual = torch.linalg.matrix_norm(product - eye) / len(eye) ** 0.5
        better = (residual < best) & ~done
        taken = better[..., None, None]
        best_y, best_z = torch.where(taken, y, best_y), torch.where(taken, z, best_z)
        best = torch.where(better, residual, best)
        if steps % CHECK_STEPS == 0:
            done = done | _is_done(best, residual)
            if bool(done.all()):
                break
        step = 1.5 * eye - 0.5 * product
        y, z = y @ step, step @ z
    return best_y, best_z, steps


def _is_done(best: Tensor, residual: Tensor) -> Tensor:
    """Which matrices have converged, or diverge from their best iterate (float32 can do no better).

    Such a matrix takes no later iterate, however long others of its batch need: its root must not depend on them.
    """
    return (best < TOLERANCE) | (residual > 2 * best) | residual.isnan()


class _Best:
    """The iterate with the smallest residual, for each matrix of a batch."""

    def __init__(self, x: Tensor, a: Tensor, root: int) -> None:
        self._a, self._root = a, root
        self._x = x.expand_as(a)
        self._residual = torch.full(a.shape[:-2], torch.inf, dtype=a.dtype, device=a.device)
        self._last = self._residual
        self._done = torch.zeros_like(self._residual, dtype=torch.bool)

    def residual_of(self, x: Tensor) -> Tensor:
        """|X^p A - I|_F / sqrt(d) on the normalised matrices."""
        eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        product = torch.linalg.matrix_power(x, self._root) @ self._a
        return torch.linalg.matrix_norm(product - eye) / len(eye) ** 0.5

    def offer(self, x: Tensor, residual: Tensor) -> None:
        """Take an iterate where it is better."""
        better = (residual < self._residual) & ~self._done
        self._x = torch.where(better[..., None, None], x, self._x)
        self._residual = torch.where(better, residual, self._residual)
        self._last = residual

    def is_done(self) -> bool:
        """Whether every matrix is done; those that are take no iterate any more."""
        self._done = self._done | _is_done(self._residual, self._last)
        return bool(self._done.all())

    def result(self, scale: Tensor, is_zero: Tensor, finite: Tensor, steps: int) -> NewtonRoot:
        """The roots of the matrices as they were before they were normalised."""
        x = (self._x + self._x.mT) / 2
        # Measured anew: the iteration's own residual is that of a product which rounding has let drift.
        residual = self.residual_of(x)
        eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        x = torch.where(is_zero[..., None, None], eye, x * scale.pow(-1.0 / self._root))
        residual = torch.where(finite, torch.where(is_zero, torch.zeros_like(residual), residual), torch.nan)
        return NewtonRoot(x, residual, steps)


def _normalised(matrices: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A / s + epsilon I with the certified bound s >= |A|_2, `(..., 1, 1)`; which matrices are zero, which finite."""
    largest, is_zero, finite = sizes(matrices)
    eye = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    work = torch.where((is_zero | ~finite)[..., None, None], eye, matrices / largest)
    bound = torch.minimum(torch.linalg.matrix_norm(work), work.abs().sum(-1).amax(-1))[..., None, None]
    return work / bound + epsilon * eye, largest * bound, is_zero, finite
