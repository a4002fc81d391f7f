"""Algebra of inverse roots, for any size, condition number and scale, in float64."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.shampoo.linalg.inverse_root import inverse_root

ROOTS = st.sampled_from([1, 2, 4])
EPSILONS = st.sampled_from([1e-8, 1e-6, 1e-3])
FEW = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """A symmetric positive definite matrix of drawn size, condition number and scale."""
    size, seed = draw(st.integers(1, 24)), draw(st.integers(0, 2**31))
    condition, scale = draw(st.floats(0, 8)), draw(st.floats(-20, 20))
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    spectrum = torch.logspace(scale - condition, scale, size, dtype=torch.float64)
    return basis @ torch.diag(spectrum) @ basis.mT


def largest(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


def assert_same(actual: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    assert float((actual - expected).norm()) <= tolerance * float(expected.norm())


@FEW
@given(matrices(), ROOTS, EPSILONS)
def test_power_of_the_root_inverts_the_damped_matrix(matrix: Tensor, root: int, epsilon: float) -> None:
    eye = torch.eye(len(matrix), dtype=matrix.dtype)
    result = inverse_root(matrix, root, epsilon)
    product = torch.linalg.matrix_power(result.root, root) @ (matrix + epsilon * largest(matrix) * eye)
    assert float((product - eye).abs().max()) < 1e-5  # rounding 1e-16 x condition 1e8, with room for the size


@FEW
@given(matrices(), ROOTS, EPSILONS)
def test_root_is_symmetric_and_positive(matrix: Tensor, root: int, epsilon: float) -> None:
    X = inverse_root(matrix, root, epsilon).root
    assert_same(X.mT, X, 1e-12)
    assert float(torch.linalg.eigvalsh(X).min()) > 0


@FEW
@given(matrices(), st.integers(0, 2**31), ROOTS, EPSILONS)
def test_root_turns_with_the_basis(matrix: Tensor, seed: int, root: int, epsilon: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(matrix.shape, generator=generator, dtype=matrix.dtype)).Q
    turned = inverse_root(Q @ matrix @ Q.mT, root, epsilon).root
    assert_same(turned, Q @ inverse_root(matrix, root, epsilon).root @ Q.mT)


@FEW
@given(matrices(), st.floats(1e-8, 1e8), ROOTS, EPSILONS)
def test_root_of_a_scaled_matrix(matrix: Tensor, factor: float, root: int, epsilon: float) -> None:
    scaled = inverse_root(factor * matrix, root, epsilon).root
    assert_same(scaled, factor ** (-1 / root) * inverse_root(matrix, root, epsilon).root)


@FEW
@given(matrices(), ROOTS, EPSILONS)
def test_fourth_root_is_the_square_root_of_the_square_root(matrix: Tensor, root: int, epsilon: float) -> None:
    X = inverse_root(matrix, 2 * root, epsilon).root
    assert_same(X @ X, inverse_root(matrix, root, epsilon).root)


@FEW
@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=5), st.integers(1, 9), ROOTS)
def test_batch_equals_one_by_one(seeds: list[int], size: int, root: int) -> None:
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    factors = [torch.randn(size, size + 2, generator=generator, dtype=torch.float64) for generator in generators]
    batch = torch.stack([factor @ factor.mT for factor in factors])
    together = inverse_root(batch.unsqueeze(0), root, 1e-6)
    assert together.root.shape == (1, len(seeds), size, size)
    assert together.condition.shape == together.usable.shape == (1, len(seeds))
    for matrix, ours in zip(batch, together.root[0], strict=True):
        assert_same(ours, inverse_root(matrix, root, 1e-6).root, 1e-9)
