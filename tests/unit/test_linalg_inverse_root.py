"""Inverse roots on the matrices that break eigensolvers, and with solvers that break in every known way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.shampoo.config import Solver
from megatron.shampoo.linalg import eigen as module
from megatron.shampoo.linalg.inverse_root import inverse_root
from megatron.shampoo.preconditioner.ladder import RUNGS, Refreshed, Task, climb

EPSILON = 1e-6
EIGH = torch.linalg.eigh


def with_spectrum(eigenvalues: Tensor, seed: int = 0) -> Tensor:
    """A float64 symmetric matrix with these eigenvalues and a random basis."""
    size = len(eigenvalues)
    basis = torch.linalg.qr(
        torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ).Q
    return basis @ torch.diag(eigenvalues.double()) @ basis.mT


def gram(rows: int, columns: int, seed: int = 0) -> Tensor:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return matrix @ matrix.mT


def expected_root(matrix: Tensor, root: int, epsilon: float) -> Tensor:
    """The formula in float64, through the singular value decomposition."""
    U, S, _ = torch.linalg.svd(matrix.double())
    return U @ torch.diag((S + epsilon * S[0]) ** (-1 / root)) @ U.mT


def embedding_like(rows: int = 127, columns: int = 16, hit: int = 3) -> Tensor:
    """GG' of a gradient in which only a few rows are not zero."""
    gradient = torch.zeros(rows, columns, dtype=torch.float64)
    gradient[5 : 5 + hit] = torch.randn(hit, columns, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return gradient @ gradient.mT


TABLE: dict[str, Tensor] = {
    "rank one": gram(24, 1),
    "half rank": gram(24, 12),
    "identity": torch.eye(24, dtype=torch.float64),
    "one large eigenvalue": with_spectrum(torch.cat([torch.ones(1) * 1e6, torch.ones(23)])),
    "repeated eigenvalues": with_spectrum(torch.tensor([1.0] * 8 + [2.0] * 8 + [3.0] * 8)),
    "condition 1e6": with_spectrum(torch.logspace(-6, 0, 24, dtype=torch.float64)),
    "condition 1e17": with_spectrum(torch.logspace(-17, 0, 24, dtype=torch.float64)),
    "few rows of an embedding": embedding_like(),
    "near-zero diagonal": torch.full((24, 24), 1e-12, dtype=torch.float64) + torch.eye(24, dtype=torch.float64) * 1e-9,
    "tiny": gram(24, 30) * 1e-24,
    "huge": gram(24, 30) * 1e24,
    "diagonal with zeros": torch.diag(torch.tensor([0.0] * 12 + [1.0] * 12, dtype=torch.float64)),
    "one element": torch.tensor([[3.0]], dtype=torch.float64),
}


@pytest.mark.parametrize("name", list(TABLE))
def test_root_of_difficult_matrices_in_float64(name: str) -> None:
    result = inverse_root(TABLE[name], 4, EPSILON)
    assert bool(result.usable)
    expected = expected_root(TABLE[name], 4, EPSILON)
    # An eigenvalue of zero comes out as 1e-16 of the largest: relative to the damping 1e-10.
    assert (result.root - expected).norm() / expected.norm() < 1e-9


@pytest.mark.parametrize("name", list(TABLE))
def test_root_of_difficult_matrices_in_float32(name: str) -> None:
    matrix = TABLE[name].float()
    result = inverse_root(matrix, 4, EPSILON)
    assert bool(result.usable)
    assert result.root.isfinite().all()
    expected = expected_root(TABLE[name], 4, EPSILON)
    # float32 knows a zero eigenvalue to about 24 x 6e-8 of the largest: with damping 1e-6 the root may be 1/3 off.
    assert (result.root.double() - expected).norm() / expected.norm() < 0.35
    # Where the root is applied, to a gradient that made the factor, that does not matter.
    residual = (
        torch.linalg.matrix_power(result.root.double(), 4) @ matrix.double()
        - torch.linalg.matrix_power(expected, 4) @ TABLE[name]
    )
    assert residual.abs().max() < 0.35


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-3), (torch.float64, 1e-6)], ids=["float32", "float64"])
def test_accuracy_at_condition_1e6(dtype: torch.dtype, bound: float) -> None:
    # Applied to a gradient with that covariance. A float32 decomposition knows the smallest eigenvalue, 1e-6 of the
    # largest, to 2e-7 / 1e-6 (measured: 1e-3 in the product); a float64 one of the same float32 matrix to its rounding.
    matrix = with_spectrum(torch.logspace(-6, 0, 256, dtype=torch.float64)).float()
    eigenvalues, basis = torch.linalg.eigh(matrix.double())
    noise = torch.randn(256, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    gradient = basis @ (eigenvalues.sqrt()[:, None] * noise)
    exact = expected_root(matrix, 4, 1e-9) @ gradient
    ours = inverse_root(matrix, 4, 1e-9, dtype).root.double() @ gradient
    assert (ours - exact).norm() / exact.norm() < bound


@pytest.mark.parametrize("root", [1, 2, 4])
def test_exponent_is_one_over_the_root(root: int) -> None:
    result = inverse_root(torch.diag(torch.tensor([16.0, 81.0], dtype=torch.float64)), root, 1e-15)
    expected = torch.diag(torch.tensor([16.0, 81.0], dtype=torch.float64) ** (-1 / root))
    torch.testing.assert_close(result.root, expected, rtol=1e-12, atol=1e-12)


def test_condition_is_that_of_the_damped_matrix() -> None:
    matrix = torch.diag(torch.tensor([4.0, 2.0, 0.0], dtype=torch.float64))
    result = inverse_root(matrix, 4, 1e-3)
    torch.testing.assert_close(result.condition, torch.tensor((4.0 + 4e-3) / 4e-3, dtype=torch.float64))


def test_zero_matrix_has_the_identity_for_its_root() -> None:
    result = inverse_root(torch.zeros(2, 5, 5), 4, EPSILON)
    torch.testing.assert_close(result.root, torch.eye(5).expand(2, 5, 5))
    assert result.usable.tolist() == [True, True]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_non_finite_matrix_spoils_only_itself(bad: float) -> None:
    batch = torch.stack([gram(6, 8, seed).float() for seed in range(3)])
    alone = inverse_root(batch, 4, EPSILON)
    spoiled = batch.clone()
    spoiled[1, 2, 3] = bad
    result = inverse_root(spoiled, 4, EPSILON)
    assert result.usable.tolist() == [True, False, True]
    torch.testing.assert_close(result.root[[0, 2]], alone.root[[0, 2]], rtol=0, atol=0)


def test_input_is_not_modified() -> None:
    batch = torch.stack([gram(6, 8), torch.full((6, 6), torch.nan, dtype=torch.float64), torch.zeros(6, 6)])
    before = batch.clone()
    fourth_roots(batch)
    torch.testing.assert_close(batch, before, rtol=0, atol=0, equal_nan=True)


NUM_RUNGS = len(RUNGS[Solver.EIGH])


def fourth_roots(factors: Tensor) -> Refreshed:
    """By the ladder of eigendecompositions: in float64, then the same on the CPU."""
    return climb(factors, None, Task(root=4, trace_scaled=False, epsilon=EPSILON), Solver.EIGH)


def raising(matrix: Tensor) -> None:
    """As cuSOLVER does: the input is overwritten before the error."""
    matrix.fill_(torch.nan)
    raise torch.linalg.LinAlgError("linalg.eigh: The algorithm failed to converge")


def silent_nan(matrix: Tensor) -> tuple[Tensor, Tensor]:
    eigenvalues, basis = EIGH(matrix)
    return eigenvalues, torch.full_like(basis, torch.nan)


def not_orthogonal(matrix: Tensor) -> tuple[Tensor, Tensor]:
    eigenvalues, basis = EIGH(matrix)
    basis = basis.clone()
    basis[..., 0] = basis[..., 1]
    return eigenvalues, basis


Eigensolver = Callable[[Tensor], object]
BROKEN: dict[str, Eigensolver] = {"raises": raising, "silent nan": silent_nan, "not orthogonal": not_orthogonal}


@pytest.fixture
def break_eigh(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Eigensolver, Callable[[Tensor], bool]], list[torch.dtype]]:
    """Puts a broken solver in the place of torch's for the inputs that `when` picks; gives the dtypes of all calls."""

    def install(solver: Eigensolver, when: Callable[[Tensor], bool]) -> list[torch.dtype]:
        dtypes: list[torch.dtype] = []

        def eigh(matrix: Tensor) -> object:
            dtypes.append(matrix.dtype)
            return solver(matrix) if when(matrix) else EIGH(matrix)

        monkeypatch.setattr(module.torch.linalg, "eigh", eigh)
        return dtypes

    return install


@pytest.mark.parametrize("solver", list(BROKEN))
def test_a_broken_solver_marks_the_roots_unusable(break_eigh: Callable, solver: str) -> None:
    break_eigh(BROKEN[solver], lambda matrix: True)
    batch = torch.stack([gram(6, 8, seed).float() for seed in range(2)])
    assert inverse_root(batch, 4, EPSILON).usable.tolist() == [False, False]


@pytest.mark.parametrize("solver", list(BROKEN))
def test_failure_of_the_first_attempt_is_retried_on_a_copy(break_eigh: Callable, solver: str) -> None:
    batch = torch.stack([gram(6, 8, seed).float() for seed in range(3)])
    before = batch.clone()
    right = inverse_root(batch, 4, EPSILON, torch.float64).root
    # An attempt that raises is repeated for each matrix alone before the next attempt begins.
    num_calls = 4 if solver == "raises" else 1
    dtypes = break_eigh(BROKEN[solver], lambda matrix: len(dtypes) <= num_calls)
    result = fourth_roots(batch)
    torch.testing.assert_close(result.root, right, rtol=0, atol=0)
    torch.testing.assert_close(batch, before, rtol=0, atol=0)
    assert result.rung.tolist() == [1, 1, 1]
    assert dtypes == [torch.float64] * (num_calls + 1)


@pytest.mark.parametrize("solver", list(BROKEN))
def test_failure_of_every_attempt_is_told(break_eigh: Callable, solver: str) -> None:
    batch = torch.stack([gram(6, 8, seed).float() for seed in range(3)])
    before = batch.clone()
    break_eigh(BROKEN[solver], lambda matrix: True)
    assert fourth_roots(batch).rung.tolist() == [NUM_RUNGS] * 3
    torch.testing.assert_close(batch, before, rtol=0, atol=0)


def test_a_solver_that_fails_on_one_matrix_leaves_the_others_right(break_eigh: Callable) -> None:
    # Marked by a trace that the scaling to unit size keeps: only the second matrix is negative there.
    batch = torch.stack([gram(6, 8, seed).float() for seed in range(3)])
    right = fourth_roots(batch).root
    assert right is not None
    marked = batch.clone()
    marked[1] = -marked[1]
    dtypes = break_eigh(raising, lambda matrix: bool((matrix.diagonal(dim1=-2, dim2=-1).sum(-1) < 0).any()))
    result = fourth_roots(marked)
    assert result.rung.tolist() == [0, NUM_RUNGS, 0]
    assert result.root is not None
    torch.testing.assert_close(result.root[[0, 2]], right[[0, 2]], rtol=0, atol=0)
    # The batch, each of its matrices, then the failed one again: as a batch of one and alone.
    assert dtypes == [torch.float64] * (4 + 2)


def test_other_errors_of_the_solver_are_not_swallowed(break_eigh: Callable) -> None:
    def out_of_memory(matrix: Tensor) -> None:
        raise torch.OutOfMemoryError("out of memory")

    break_eigh(out_of_memory, lambda matrix: True)
    with pytest.raises(torch.OutOfMemoryError):
        inverse_root(gram(4, 4), 4, EPSILON)
