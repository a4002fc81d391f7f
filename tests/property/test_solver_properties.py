"""Algebra of the batched solvers: Newton roots, tracked eigenbases, Gram matrices in half the memory traffic."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.shampoo.linalg.basis import off_diagonal_ratio, track_basis
from megatron.shampoo.linalg.inverse_root import inverse_root
from megatron.shampoo.linalg.newton import coupled_newton, newton_denman_beavers
from megatron.shampoo.linalg.symmetric import average_gram_, symmetric_from_lower

DOUBLE = torch.float64
ROOTS = st.sampled_from([2, 4])
SEEDS = st.integers(0, 2**31)
FEW = settings(max_examples=25, deadline=None, derandomize=True)
NEWTONS = {"newton": coupled_newton, "newton-db": newton_denman_beavers}
EACH_NEWTON = pytest.mark.parametrize("name", list(NEWTONS))


def random_orthogonal(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=DOUBLE)).Q


def with_spectrum(eigenvalues: Tensor, seed: int = 0) -> Tensor:
    basis = random_orthogonal(len(eigenvalues), seed)
    matrix = basis @ eigenvalues.to(DOUBLE).diag() @ basis.mT
    return (matrix + matrix.mT) / 2


def gram(rows: int, columns: int, seed: int = 0) -> Tensor:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)
    return matrix @ matrix.mT


@st.composite
def matrices(draw: st.DrawFn, largest_condition: float = 6, largest_scale: float = 10) -> Tensor:
    """A symmetric positive definite matrix of drawn size, condition number and scale (as powers of ten)."""
    size, seed = draw(st.integers(1, 20)), draw(SEEDS)
    condition, scale = draw(st.floats(0, largest_condition)), draw(st.floats(-largest_scale, largest_scale))
    return with_spectrum(torch.logspace(scale - condition, scale, size, dtype=DOUBLE), seed)


def bound_of(matrix: Tensor) -> float:
    """No smaller than the largest eigenvalue."""
    return min(float(matrix.norm()), float(matrix.abs().sum(dim=-1).max()))


def damped(matrix: Tensor, epsilon: float) -> Tensor:
    return matrix + epsilon * bound_of(matrix) * torch.eye(len(matrix), dtype=matrix.dtype)


def exact_root(matrix: Tensor, root: int) -> Tensor:
    """A^(-1/root) by numpy's eigendecomposition in float64."""
    eigenvalues, vectors = np.linalg.eigh(matrix.double().numpy())
    return torch.from_numpy(vectors @ np.diag(eigenvalues ** (-1 / root)) @ vectors.T)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def residual_of(root_matrix: Tensor, root: int, matrix: Tensor) -> float:
    product = torch.linalg.matrix_power(root_matrix.double(), root) @ matrix.double()
    return float((product - torch.eye(len(matrix), dtype=DOUBLE)).norm()) / math.sqrt(len(matrix))


# Newton roots in float64. An iteration stops once its residual is small enough for float32, between 1e-6 and rounding;
# the root is then wrong by that, in Frobenius norm, over p. Rounding of 1e-16 times the condition of the damped matrix,
# at most 1 / epsilon = 1e6, is 1e-10, with room for what an iteration makes of it.
CONVERGED = 2e-6


def error_allowed(size: int, residual: Tensor) -> float:
    assert float(residual) < CONVERGED
    return math.sqrt(size) * float(residual) + 1e-8


@EACH_NEWTON
@FEW
@given(matrices(), ROOTS, st.sampled_from([1e-6, 1e-4, 1e-2]))
def test_newton_finds_the_root_of_the_damped_matrix(name: str, matrix: Tensor, root: int, epsilon: float) -> None:
    result = NEWTONS[name](matrix, root, epsilon)
    error = relative_error(result.root, exact_root(damped(matrix, epsilon), root))
    assert error < error_allowed(len(matrix), result.residual)
    assert result.root.shape == matrix.shape
    assert result.residual.shape == ()


@EACH_NEWTON
@FEW
@given(matrices(), ROOTS)
def test_the_residual_is_that_of_the_root_that_is_returned(name: str, matrix: Tensor, root: int) -> None:
    # In float32, where it is far from zero: the product is known to rounding times the condition, here 1e4.
    result = NEWTONS[name](matrix.float(), root, 1e-4)
    actual = residual_of(result.root, root, damped(matrix.float(), 1e-4))
    assert float(result.residual) == pytest.approx(actual, rel=0.5, abs=3e-3)


@EACH_NEWTON
@FEW
@given(matrices(), ROOTS)
def test_newton_roots_are_symmetric_and_positive(name: str, matrix: Tensor, root: int) -> None:
    result = NEWTONS[name](matrix, root, 1e-6).root
    assert relative_error(result.mT, result) < 1e-10
    assert float(torch.linalg.eigvalsh(result).min()) > 0


@EACH_NEWTON
@FEW
@given(matrices(), st.floats(1e-8, 1e8), ROOTS)
def test_newton_root_of_a_scaled_matrix(name: str, matrix: Tensor, factor: float, root: int) -> None:
    scaled = NEWTONS[name](factor * matrix, root, 1e-6).root
    assert relative_error(scaled, factor ** (-1 / root) * NEWTONS[name](matrix, root, 1e-6).root) < 1e-8


@EACH_NEWTON
@FEW
@given(matrices(largest_condition=4), SEEDS, ROOTS)
def test_newton_root_turns_with_the_basis(name: str, matrix: Tensor, seed: int, root: int) -> None:
    # The bound that damping is relative to depends on the basis: 1e-12 of it is 1e-8 of the smallest eigenvalue.
    Q = random_orthogonal(len(matrix), seed)
    turned = NEWTONS[name](Q @ matrix @ Q.mT, root, 1e-12).root
    assert relative_error(turned, Q @ NEWTONS[name](matrix, root, 1e-12).root @ Q.mT) < 1e-6


@EACH_NEWTON
@FEW
@given(st.lists(SEEDS, min_size=1, max_size=5), st.integers(1, 9), ROOTS)
def test_a_batch_of_newton_roots_equals_one_by_one(name: str, seeds: list[int], size: int, root: int) -> None:
    # Of different conditions, so that they converge at different steps.
    batch = torch.stack([with_spectrum(torch.logspace(-(seed % 6), 0, size, dtype=DOUBLE), seed) for seed in seeds])
    together = NEWTONS[name](batch.unsqueeze(0), root, 1e-6)
    assert together.root.shape == (1, len(seeds), size, size)
    assert together.residual.shape == (1, len(seeds))
    for number, matrix in enumerate(batch):
        alone = NEWTONS[name](matrix, root, 1e-6)
        # In a batch a root may be improved while others are not done.
        assert float(together.residual[0, number]) < CONVERGED
        assert relative_error(together.root[0, number], alone.root) < 2 * error_allowed(size, alone.residual)


@FEW
@given(matrices())
def test_the_fourth_root_is_two_square_roots(matrix: Tensor) -> None:
    fourth = newton_denman_beavers(matrix, 4, 1e-6).root
    assert relative_error(fourth @ fourth, newton_denman_beavers(matrix, 2, 1e-6).root) < 1e-5


# Applied to gradients that have the matrix for their covariance: error of X G relative to float64, for 256 eigenvalues
# evenly spaced in their logarithm. The figures are those of plain numpy iterations (newton-db at 1e8: of this
# code, which keeps the best iterate where a plain one diverges) and of torch's float32 decomposition without anything
# around it. Five times as much is allowed for another seed and another order of operations.
FLOAT32_ERRORS = {
    ("newton", 1e4, 2): 4e-5,
    ("newton", 1e4, 4): 6e-6,
    ("newton", 1e6, 2): 2e-3,
    ("newton", 1e6, 4): 8e-5,
    ("newton", 1e8, 2): 9e-2,
    ("newton", 1e8, 4): 2e-3,
    ("newton-db", 1e4, 2): 6e-5,
    ("newton-db", 1e4, 4): 9e-6,
    ("newton-db", 1e6, 2): 3e-3,
    ("newton-db", 1e6, 4): 2e-4,
    ("newton-db", 1e8, 2): 9e-2,
    ("newton-db", 1e8, 4): 3e-3,
    ("eigh", 1e4, 2): 2e-4,
    ("eigh", 1e4, 4): 2e-5,
    ("eigh", 1e6, 2): 2e-2,
    ("eigh", 1e6, 4): 1e-3,
}


def applied_error(root_of: Callable[[Tensor], Tensor], condition: float, root: int) -> float:
    matrix = with_spectrum(torch.logspace(0, -math.log10(condition), 256, dtype=DOUBLE), 3).float()
    eigenvalues, vectors = np.linalg.eigh(matrix.double().numpy())
    noise = np.random.default_rng(4).standard_normal((256, 32))
    gradient = torch.from_numpy(vectors @ (np.sqrt(np.maximum(eigenvalues, 0))[:, None] * noise))
    return relative_error(root_of(matrix).double() @ gradient, exact_root(matrix, root) @ gradient)


@pytest.mark.parametrize(("name", "condition", "root"), list(FLOAT32_ERRORS))
def test_accuracy_in_float32(name: str, condition: float, root: int) -> None:
    solver = {"eigh": functools.partial(inverse_root, dtype=torch.float32), **NEWTONS}[name]
    error = applied_error(lambda matrix: solver(matrix, root, 1e-12).root, condition, root)
    assert error < 5 * FLOAT32_ERRORS[name, condition, root]


# The matrices that break solvers.


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a solver says of a batch."""

    roots: Tensor
    accepted: Tensor


def by_eigh(batch: Tensor, root: int, epsilon: float) -> Answer:
    result = inverse_root(batch, root, epsilon)
    return Answer(result.root, result.usable)


def by_newton(solver: Callable[[Tensor, int, float], object]) -> Callable[[Tensor, int, float], Answer]:
    def solve(batch: Tensor, root: int, epsilon: float) -> Answer:
        result = solver(batch, root, epsilon)
        return Answer(result.root, result.residual < 0.1)  # type: ignore[attr-defined]

    return solve


SOLVERS = {"eigh": by_eigh, **{name: by_newton(solver) for name, solver in NEWTONS.items()}}
EACH_SOLVER = pytest.mark.parametrize("name", list(SOLVERS))
SIZE = 24
TABLE: dict[str, Tensor] = {
    "rank one": gram(SIZE, 1),
    "half rank": gram(SIZE, 12),
    "identity": torch.eye(SIZE, dtype=DOUBLE),
    "one large eigenvalue": with_spectrum(torch.cat([torch.full((1,), 1e6), torch.ones(SIZE - 1)])),
    "repeated eigenvalues": with_spectrum(torch.tensor([1.0] * 8 + [2.0] * 8 + [3.0] * 8)),
    "condition 1e6": with_spectrum(torch.logspace(-6, 0, SIZE, dtype=DOUBLE)),
    "condition 1e17": with_spectrum(torch.logspace(-17, 0, SIZE, dtype=DOUBLE)),
    "diagonal with zeros": torch.diag(torch.tensor([0.0] * 12 + [1.0] * 12, dtype=DOUBLE)),
    "small": gram(SIZE, 30) * 1e-10,
    "large": gram(SIZE, 30) * 1e10,
}


@pytest.mark.parametrize("root", [2, 4])
@pytest.mark.parametrize("matrix", list(TABLE))
@EACH_SOLVER
def test_root_of_difficult_matrices(name: str, matrix: str, root: int) -> None:
    difficult = TABLE[matrix]
    answer = SOLVERS[name](difficult[None], root, 1e-5)
    assert answer.accepted.tolist() == [True]
    relative_to = float(torch.linalg.matrix_norm(difficult, 2)) if name == "eigh" else bound_of(difficult)
    expected = exact_root(difficult + 1e-5 * relative_to * torch.eye(SIZE, dtype=DOUBLE), root)
    # eigh: a zero eigenvalue comes out as 1e-15 of the largest, 1e-10 of the damping. Newton: see CONVERGED.
    assert relative_error(answer.roots[0], expected) < (1e-8 if name == "eigh" else math.sqrt(SIZE) * CONVERGED)


@pytest.mark.parametrize("root", [2, 4])
@pytest.mark.parametrize("matrix", list(TABLE))
@EACH_SOLVER
def test_root_of_difficult_matrices_in_float32(name: str, matrix: str, root: int) -> None:
    difficult = TABLE[matrix].float()
    answer = SOLVERS[name](difficult[None], root, 1e-4)
    assert answer.accepted.tolist() == [True]
    relative_to = float(torch.linalg.matrix_norm(difficult, 2)) if name == "eigh" else bound_of(difficult)
    expected = exact_root(TABLE[matrix] + 1e-4 * relative_to * torch.eye(SIZE, dtype=DOUBLE), root)
    # A zero eigenvalue comes out as 24 x 6e-8 of the largest: 1.4e-2 of the damping.
    assert relative_error(answer.roots[0], expected) < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=["float32", "float64"])
@EACH_SOLVER
def test_the_root_of_zeros_is_the_identity(name: str, dtype: torch.dtype) -> None:
    batch = torch.stack([gram(6, 8).to(dtype), torch.zeros(6, 6, dtype=dtype)])
    answer = SOLVERS[name](batch, 4, 1e-6)
    assert answer.accepted.tolist() == [True, True]
    torch.testing.assert_close(answer.roots[1], torch.eye(6, dtype=dtype), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("root", [2, 4])
@EACH_SOLVER
def test_a_matrix_that_is_not_finite_spoils_only_itself(name: str, root: int, bad: float) -> None:
    batch = torch.stack([gram(6, 8, seed).float() for seed in range(3)])
    sound = SOLVERS[name](batch, root, 1e-4)
    assert sound.accepted.all()
    spoiled = batch.clone()
    spoiled[1, 3, 2] = spoiled[1, 2, 3] = bad
    answer = SOLVERS[name](spoiled, root, 1e-4)
    assert answer.accepted.tolist() == [True, False, True]
    torch.testing.assert_close(answer.roots[[0, 2]], sound.roots[[0, 2]], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("root", [2, 4])
@EACH_SOLVER
def test_nothing_that_is_not_finite_is_accepted(name: str, root: int) -> None:
    hard = [
        with_spectrum(torch.logspace(-17, 0, 6, dtype=DOUBLE)),
        with_spectrum(torch.linspace(-1, 1, 6)),  # not a factor: half of its eigenvalues are negative
        -torch.eye(6, dtype=DOUBLE),
        torch.full((6, 6), 1e38, dtype=DOUBLE),
        torch.full((6, 6), 1e-42, dtype=DOUBLE),
        torch.full((6, 6), torch.nan, dtype=DOUBLE),
    ]
    answer = SOLVERS[name](torch.stack(hard).float(), root, 1e-12)
    finite = answer.roots.isfinite().all(dim=-1).all(dim=-1)
    assert bool((finite | ~answer.accepted).all())
    assert not answer.accepted[-1]


@EACH_NEWTON
def test_newton_does_not_call_a_wrong_root_right(name: str) -> None:
    # Condition 1e12 in float32: no iteration can solve it, and the residual says so, of the root that comes back.
    matrix = with_spectrum(torch.logspace(-12, 0, SIZE, dtype=DOUBLE)).float()
    result = NEWTONS[name](matrix, 2, 1e-12)
    assert result.root.isfinite().all()
    actual = residual_of(result.root, 2, matrix)
    assert actual > 1e-2
    assert float(result.residual) > 1e-2


@EACH_SOLVER
def test_solvers_leave_their_input_alone(name: str) -> None:
    batch = torch.stack([gram(6, 8), torch.full((6, 6), torch.nan, dtype=DOUBLE), torch.zeros(6, 6, dtype=DOUBLE)])
    before = batch.clone()
    SOLVERS[name](batch, 4, 1e-6)
    torch.testing.assert_close(batch, before, rtol=0, atol=0, equal_nan=True)


# Tracked bases: Q <- qr((A + 0.05 mean eigenvalue I) Q).Q with signs that make R's diagonal positive.


def distinct_spectrum(size: int) -> Tensor:
    return 2.0 ** -torch.arange(size, dtype=DOUBLE)


def tracked_by_numpy(matrix: Tensor, basis: Tensor) -> Tensor:
    """By Cholesky instead of Householder: with B = (A + shift I) Q, R is the factor of B'B and the basis B R^-1."""
    shifted = matrix.numpy() + 0.05 * np.trace(matrix.numpy()) / len(matrix) * np.eye(len(matrix))
    product = shifted @ basis.numpy()
    triangle = np.linalg.cholesky(product.T @ product).T
    return torch.from_numpy(np.linalg.solve(triangle.T, product.T).T)


def assert_orthogonal(basis: Tensor, tolerance: float = 1e-12) -> None:
    eye = torch.eye(basis.shape[-1], dtype=basis.dtype).expand_as(basis)
    torch.testing.assert_close(basis.mT @ basis, eye, rtol=0, atol=tolerance)


@FEW
@given(st.integers(1, 12), st.floats(-10, 10), SEEDS)
def test_an_eigenbasis_in_any_order_is_a_fixed_point(size: int, scale: float, seed: int) -> None:
    eigenbasis = random_orthogonal(size, seed)
    matrix = eigenbasis @ (10.0**scale * distinct_spectrum(size)).diag() @ eigenbasis.mT
    shuffle = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    tracked = track_basis(matrix[None], eigenbasis[None, :, shuffle])
    assert tracked.usable.tolist() == [True]
    torch.testing.assert_close(tracked.basis[0], eigenbasis[:, shuffle], rtol=0, atol=1e-12)


@FEW
@given(matrices(), SEEDS)
def test_tracking_is_one_power_iteration_with_a_shift(matrix: Tensor, seed: int) -> None:
    basis = random_orthogonal(len(matrix), seed)
    tracked = track_basis(matrix[None], basis[None])
    assert tracked.usable.tolist() == [True]
    # Largest eigenvalue over shift: at most 20 x 20 = 400. Squared by the Gram matrix, times rounding: 4e-11.
    torch.testing.assert_close(tracked.basis[0], tracked_by_numpy(matrix, basis), rtol=0, atol=1e-9)
    assert_orthogonal(tracked.basis)


@FEW
@given(matrices(largest_condition=17), st.floats(-10, 10), SEEDS)
def test_tracking_does_not_depend_on_scale_or_amplify_rounding(matrix: Tensor, power: float, seed: int) -> None:
    size, basis = len(matrix), random_orthogonal(len(matrix), seed)
    noise = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)
    other = 10.0**power * (matrix + 1e-13 * bound_of(matrix) * (noise + noise.mT))
    # The shift keeps small eigenvalues out of it: 1e-13 times largest eigenvalue over shift, 400, and the size.
    torch.testing.assert_close(
        track_basis(matrix[None], basis[None]).basis, track_basis(other[None], basis[None]).basis, rtol=0, atol=1e-8
    )


@FEW
@given(matrices(), SEEDS, SEEDS)
def test_tracking_turns_with_the_coordinates_and_follows_signs(matrix: Tensor, seed: int, other: int) -> None:
    size = len(matrix)
    basis, turn = random_orthogonal(size, seed), random_orthogonal(size, other)
    signs = 2.0 * torch.randint(2, (size,), generator=torch.Generator().manual_seed(seed)) - 1
    plain = track_basis(matrix[None], basis[None]).basis
    turned = track_basis((turn @ matrix @ turn.mT)[None], (turn @ basis * signs)[None]).basis
    torch.testing.assert_close(turned, turn @ plain * signs, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=["float32", "float64"])
def test_tracking_converges_to_the_eigenbasis_by_descending_eigenvalues(dtype: torch.dtype) -> None:
    matrix, basis = with_spectrum(distinct_spectrum(5), 1).to(dtype)[None], torch.eye(5, dtype=dtype)[None]
    ratios = []
    for _ in range(100):
        basis = track_basis(matrix, basis).basis
        ratios.append(float(off_diagonal_ratio(matrix, basis)))
    # Mean eigenvalue 0.39, shift 0.019: the slowest pair shrinks by (1/16 + 0.019) / (1/8 + 0.019) = 0.57 a step.
    assert ratios[0] > 0.05
    assert ratios[30] < 1e-5
    assert ratios[-1] < 10 * torch.finfo(dtype).eps
    assert_orthogonal(basis, 10 * torch.finfo(dtype).eps)
    quotients = (basis.mT @ matrix @ basis).diagonal(dim1=-2, dim2=-1)[0]
    torch.testing.assert_close(quotients, distinct_spectrum(5).to(dtype), rtol=1e-5, atol=0)


@FEW
@given(st.lists(SEEDS, min_size=1, max_size=5), st.integers(1, 9))
def test_a_batch_of_tracked_bases_equals_one_by_one(seeds: list[int], size: int) -> None:
    batch = torch.stack([with_spectrum(distinct_spectrum(size), seed) for seed in seeds])
    bases = torch.stack([random_orthogonal(size, seed + 1) for seed in seeds])
    together = track_basis(batch, bases)
    assert together.basis.shape == batch.shape
    assert together.usable.shape == (len(seeds),)
    for number in range(len(seeds)):
        alone = track_basis(batch[number : number + 1], bases[number : number + 1])
        torch.testing.assert_close(together.basis[number], alone.basis[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("spoil", ["matrix", "basis"])
def test_what_is_not_finite_spoils_only_its_own_basis(spoil: str, bad: float) -> None:
    batch = torch.stack([gram(6, 8, seed).float() for seed in range(3)])
    bases = torch.stack([random_orthogonal(6, seed).float() for seed in range(3)])
    sound = track_basis(batch, bases)
    assert sound.usable.all()
    spoiled = (batch if spoil == "matrix" else bases).clone()
    spoiled[1, 3, 2] = spoiled[1, 2, 3] = bad
    tracked = track_basis(spoiled, bases) if spoil == "matrix" else track_basis(batch, spoiled)
    assert tracked.usable.tolist() == [True, False, True]
    torch.testing.assert_close(tracked.basis[[0, 2]], sound.basis[[0, 2]], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=["float32", "float64"])
@pytest.mark.parametrize("matrix", list(TABLE))
def test_tracked_bases_of_difficult_matrices_are_orthogonal(matrix: str, dtype: torch.dtype) -> None:
    difficult = TABLE[matrix].to(dtype)[None]
    basis = random_orthogonal(SIZE, 1).to(dtype)[None]
    tracked = track_basis(difficult, basis)
    # Householder's QR gives an orthogonal matrix whatever the rank.
    assert tracked.usable.tolist() == [True]
    assert_orthogonal(tracked.basis, 50 * torch.finfo(dtype).eps)


def test_a_matrix_of_zeros_leaves_its_basis_as_it_was() -> None:
    bases = torch.stack([random_orthogonal(6, seed).float() for seed in range(2)])
    tracked = track_basis(torch.stack([gram(6, 8).float(), torch.zeros(6, 6)]), bases)
    assert tracked.usable.tolist() == [True, True]
    torch.testing.assert_close(tracked.basis[1], bases[1], rtol=0, atol=1e-6)
    assert (tracked.basis[0] - bases[0]).abs().max() > 0.1


def test_tracking_leaves_its_input_alone() -> None:
    batch, bases = gram(6, 8)[None].expand(2, 6, 6).clone(), random_orthogonal(6, 1)[None].expand(2, 6, 6).clone()
    before = batch.clone(), bases.clone()
    track_basis(batch, bases)
    off_diagonal_ratio(batch, bases)
    torch.testing.assert_close((batch, bases), before, rtol=0, atol=0)


@FEW
@given(matrices(), SEEDS)
def test_the_off_diagonal_ratio_is_the_error_of_the_matrix_that_the_basis_keeps(matrix: Tensor, seed: int) -> None:
    Q = random_orthogonal(len(matrix), seed)
    kept = Q @ (Q.mT @ matrix @ Q).diagonal().diag() @ Q.mT
    ratio = off_diagonal_ratio(matrix[None], Q[None])
    assert ratio.shape == (1,)
    assert float(ratio) == pytest.approx(float((matrix - kept).norm() / matrix.norm()), rel=1e-6, abs=1e-7)


@FEW
@given(st.integers(2, 12), st.floats(-10, 10), SEEDS)
def test_the_off_diagonal_ratio_of_an_eigenbasis_is_zero(size: int, scale: float, seed: int) -> None:
    eigenbasis = random_orthogonal(size, seed)
    matrix = eigenbasis @ (10.0**scale * distinct_spectrum(size)).diag() @ eigenbasis.mT
    assert (
        float(off_diagonal_ratio(matrix[None], eigenbasis[None])) < 1e-7
    )  # the root of a difference of squares or not


def test_the_off_diagonal_ratio_of_zeros_is_zero() -> None:
    ratio = off_diagonal_ratio(torch.zeros(2, 5, 5), torch.eye(5).expand(2, 5, 5))
    assert ratio.tolist() == [0.0, 0.0]


# Gram matrices of which the lower triangle is kept.

SIZES = [(1, 1), (1, 5), (5, 1), (7, 3), (64, 20), (129, 64), (300, 40), (513, 30)]


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=["float32", "float64"])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_average_gram_is_the_moving_average_of_outer_products(rows: int, columns: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(2, rows, columns, generator=generator, dtype=dtype)
    start = torch.randn(2, rows, rows, generator=generator, dtype=dtype)
    target, address = start.clone(), 0
    address = target.data_ptr()
    before = x.clone()
    average_gram_(target, x, 0.25)
    assert target.data_ptr() == address
    torch.testing.assert_close(x, before, rtol=0, atol=0)
    expected = 0.75 * start.double() + 0.25 * x.double() @ x.double().mT
    # Sums of `columns` products of size one.
    tolerance = 50 * torch.finfo(dtype).eps
    torch.testing.assert_close(target.double().tril(), expected.tril(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [5, 129, 300])
def test_what_stands_above_the_diagonal_does_not_matter(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    above = torch.full((2, rows, rows), torch.nan).triu(1)
    target = torch.zeros(2, rows, rows)
    series = [torch.randn(2, rows, 8, generator=generator) for _ in range(3)]
    expected = torch.zeros(2, rows, rows)
    for x in series:
        target = target.tril() + above.nan_to_num(7.0)
        average_gram_(target, x, 0.1)
        expected = 0.9 * expected + 0.1 * x @ x.mT
    torch.testing.assert_close(symmetric_from_lower(target), expected, rtol=1e-5, atol=1e-5)


@FEW
@given(st.integers(1, 12), st.integers(1, 3), SEEDS)
def test_symmetric_from_lower_mirrors_the_lower_triangle(size: int, batch: int, seed: int) -> None:
    matrix = torch.randn(batch, size, size, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)
    garbage = matrix.masked_fill(torch.ones(size, size, dtype=torch.bool).triu(1), torch.nan)
    before = garbage.clone()
    result = symmetric_from_lower(garbage)
    torch.testing.assert_close(result.tril(), matrix.tril(), rtol=0, atol=0)
    torch.testing.assert_close(result.mT, result, rtol=0, atol=0)
    torch.testing.assert_close(garbage, before, rtol=0, atol=0, equal_nan=True)
