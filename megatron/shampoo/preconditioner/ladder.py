"""The fallback ladder of a refresh, as data: what is tried, in order, for every solver.

    solver      tried in order
    eigh        float64; the same from a copy on the CPU
    qr          power iteration and QR; eigh in float32; eigh in float64 from a copy on the CPU
    newton(-db) the iteration; eigh in float64; the same from a copy on the CPU

What follows is the caller's: a block keeps its previous root or basis, and after some failures in a row goes on with
the identity, that is with its grafted momentum, or with Adam for the methods that have Adam in the basis.

Source: torch's eigensolvers fail on matrices that another library solves (pytorch issues 94772, 105359, 144384), so the
last attempt is LAPACK's, on a copy that no failed call can have touched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.shampoo.config import Solver
from megatron.shampoo.linalg.basis import rayleigh, track_basis
from megatron.shampoo.linalg.eigen import eigenbasis, is_finite, sizes
from megatron.shampoo.linalg.inverse_root import assembled_root, condition_of, damped_values
from megatron.shampoo.linalg.isolation import isolated
from megatron.shampoo.linalg.newton import NewtonRoot, coupled_newton, newton_denman_beavers
from megatron.shampoo.linalg.precision import full_float32
from megatron.shampoo.linalg.symmetric import symmetric_from_lower

MAX_RESIDUAL = 0.3
"""Largest |X^p A - I|_F / sqrt(d) of an iteration's root that may be used. Source: a truncated iteration acts as more
damping and stays harmless at p = 4 up to such residuals (numerical study behind docs/methods.md)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What a refresh is to compute."""

    root: int | None
    """p of the inverse p-th root; None: the eigenbasis itself."""
    trace_scaled: bool
    """Whether the root is multiplied by the fourth root of the factor's trace."""
    epsilon: float
    """Damping of the root, relative to the largest eigenvalue."""


class Solved(NamedTuple):
    """What one rung gives for a batch of factors `(batch, d, d)`."""

    root: Tensor | None
    """`(batch, d, d)`, None if the eigenbasis was asked for."""
    basis: Tensor | None
    """`(batch, d, d)`, None for a solver that has none."""
    condition: Tensor
    """`(batch,)`, of the damped factor; NaN for a solver that does not know it."""
    usable: Tensor
    """`(batch,)` bool."""


class Rung(NamedTuple):
    """One attempt."""

    name: str
    solve: Callable[[Tensor, Tensor | None, Task], Solved]
    """(factors with both triangles, previous bases, task) -> result; modifies neither."""


def _from_eigen(factors: Tensor, values: Tensor, basis: Tensor, usable: Tensor, task: Task) -> Solved:
    dtype = factors.dtype
    if task.root is None:
        return Solved(None, basis.to(dtype), condition_of(damped_values(values, task.epsilon)).to(dtype), usable)
    _, is_zero, _ = sizes(factors)
    root, condition = assembled_root(values, basis, task.root, task.epsilon, is_zero)
    usable = usable & is_finite(root)
    return Solved(root.to(dtype), basis.to(dtype), condition.to(dtype), usable)


def _eigh(precision: torch.dtype, on_cpu: bool) -> Callable[[Tensor, Tensor | None, Task], Solved]:
    def solve(factors: Tensor, _: Tensor | None, task: Task) -> Solved:
        source = factors.cpu() if on_cpu else factors
        found = _from_eigen(source, *eigenbasis(source, precision), task)
        return Solved(*(None if tensor is None else tensor.to(factors.device) for tensor in found))  # type: ignore[arg-type]

    return solve


def _qr(factors: Tensor, previous: Tensor | None, task: Task) -> Solved:
    assert previous is not None
    basis, usable = track_basis(factors, previous)
    return _from_eigen(factors, rayleigh(factors, basis), basis, usable, task)


def _newton(iteration: Callable[[Tensor, int, float], NewtonRoot]) -> Callable[[Tensor, Tensor | None, Task], Solved]:
    def solve(factors: Tensor, _: Tensor | None, task: Task) -> Solved:
        assert task.root is not None
        root, residual, _steps = iteration(factors, task.root, task.epsilon)
        return Solved(root, None, torch.full_like(residual, torch.nan), residual <= MAX_RESIDUAL)

    return solve


_ON_CPU = Rung("eigh in float64 on the CPU", _eigh(torch.float64, on_cpu=True))
_IN_FLOAT64 = Rung("eigh in float64", _eigh(torch.float64, on_cpu=False))

RUNGS: dict[Solver, tuple[Rung, ...]] = {
    Solver.EIGH: (_IN_FLOAT64, _ON_CPU),
    Solver.QR: (Rung("qr", _qr), Rung("eigh in float32", _eigh(torch.float32, on_cpu=False)), _ON_CPU),
    Solver.NEWTON: (Rung("newton", _newton(coupled_newton)), _IN_FLOAT64, _ON_CPU),
    Solver.NEWTON_DB: (Rung("newton-db", _newton(newton_denman_beavers)), _IN_FLOAT64, _ON_CPU),
}


class Refreshed(NamedTuple):
    """Result of `climb`."""

    root: Tensor | None
    basis: Tensor | None
    condition: Tensor
    rung: Tensor
    """`(batch,)`, on the CPU: number of the attempt that succeeded; that of attempts where none did."""


def climb(factors: Tensor, previous: Tensor | None, task: Task, solver: Solver) -> Refreshed:
    """Inverse roots or eigenbases of bias-corrected factors, by the first attempt that succeeds for each.

    Args:
        factors: `(batch, d, d)`, lower triangles; not modified.
        previous: `(batch, d, d)`, eigenbases of the last refresh, where they are kept.
        task: what to compute.
        solver: where on the ladder to begin.

    Returns:
        Entries of matrices that no attempt could solve are undefined.
    """
    rungs = RUNGS[solver]
    factors = symmetric_from_lower(factors)
    with full_float32():
        root, basis, condition, usable = _attempt(rungs[0], factors, previous, task)
        reached = torch.where(usable.cpu(), 0, len(rungs))
        for number, rung in enumerate(rungs[1:], start=1):
            todo = (reached == len(rungs)).nonzero().flatten()
            if not todo.numel():
                break
            slots = todo.to(factors.device)
            again = _attempt(rung, factors[slots], None if previous is None else previous[slots], task)
            for mine, other in zip((root, basis, condition), again[:3], strict=True):
                if mine is not None and other is not None:
                    mine[slots] = other.to(mine)
            reached[todo] = torch.where(again.usable.cpu(), number, len(rungs))
        if task.trace_scaled and root is not None:
            root = _trace_scaled(root, factors)
    return Refreshed(root, basis, condition, reached)


def _attempt(rung: Rung, factors: Tensor, previous: Tensor | None, task: Task) -> Solved:
    """One attempt on a batch; what makes it raise fails by itself."""

    def failed(one: Tensor, basis: Tensor | None) -> Solved:
        nothing = torch.full_like(one, torch.nan)
        condition = nothing[:, 0, 0].clone()
        root = None if task.root is None else nothing
        has_basis = task.root is None or basis is not None
        return Solved(
            root, nothing.clone() if has_basis else None, condition, torch.zeros_like(condition, dtype=torch.bool)
        )

    return isolated(lambda one, basis: rung.solve(one, basis, task), failed, factors, previous)


def root_in_basis(factors: Tensor, basis: Tensor, task: Task) -> Tensor:
    """Roots from a basis that fits well enough, with the factors' present eigenvalues in it.

    Args:
        factors: `(batch, d, d)`, both triangles.
        basis: `(batch, d, d)`.
        task: with a root.
    """
    root = _from_eigen(
        factors,
        rayleigh(factors, basis),
        basis,
        torch.ones(len(factors), dtype=torch.bool, device=factors.device),
        task,
    ).root
    assert root is not None
    return _trace_scaled(root, factors) if task.trace_scaled else root


def _trace_scaled(root: Tensor, factors: Tensor) -> Tensor:
    trace = factors.diagonal(dim1=-2, dim2=-1).sum(-1)
    return root * torch.where(trace > 0, trace, torch.ones_like(trace)).pow(0.25)[:, None, None]
