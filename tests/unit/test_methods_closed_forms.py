"""What is known of the methods in closed form: polar factors, Adam in a basis, symmetries, fixed points, spikes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.shampoo import Shampoo, ShampooConfig

DOUBLE = torch.float64
ROUNDING = 2.2e-16
SEEDS = st.integers(0, 2**31)
SIDES = st.integers(2, 8)
CONDITIONS = st.floats(0, 6).map(lambda power: 10.0**power)
FEW = settings(max_examples=10, deadline=None, derandomize=True)

Settings = dict[str, object]
SOAPS = ["soap", "kl-soap"]
BASIS_METHODS = [*SOAPS, "kl-shampoo"]


class Trial:
    """One parameter with its optimizer, which tells the direction that a gradient is turned into."""

    def __init__(
        self,
        shape: Sequence[int],
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        dtype: torch.dtype = DOUBLE,
        **config: object,
    ) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(*shape, dtype=dtype))
        config = {"solver": "eigh", "refresh_interval": 1, **config}
        self.optimizer = Shampoo(
            [self.parameter],
            lr=1.0,
            betas=betas,
            eps=eps,
            config=ShampooConfig(**config),  # type: ignore[arg-type]
        )

    def step(self, gradient: Tensor) -> Tensor:
        """The weight starts from zero at every step, so that minus the direction is what is left in it."""
        with torch.no_grad():
            self.parameter.zero_()
        self.parameter.grad = gradient.clone().to(self.parameter.dtype)
        self.optimizer.step()
        return -self.parameter.detach().clone()

    def run(self, gradients: Iterable[Tensor]) -> list[Tensor]:
        return [self.step(gradient) for gradient in gradients]

    @property
    def momentum(self) -> Tensor:
        return self.optimizer.state[self.parameter]["exp_avg"].view_as(self.parameter)


def directions(gradients: Sequence[Tensor], **options: object) -> list[Tensor]:
    return Trial(gradients[0].shape, **options).run(gradients)  # type: ignore[arg-type]


class AdamTrial:
    """The same for AdamW of torch, which can start from given moments."""

    def __init__(self, shape: Sequence[int], betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(*shape, dtype=DOUBLE))
        self.optimizer = torch.optim.AdamW([self.parameter], lr=1.0, betas=betas, eps=eps, weight_decay=0.0)

    def start_from(self, step: int, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        moments = {"exp_avg": exp_avg.clone(), "exp_avg_sq": exp_avg_sq.clone()}
        self.optimizer.state[self.parameter] = {"step": torch.tensor(float(step)), **moments}

    def step(self, gradient: Tensor) -> Tensor:
        with torch.no_grad():
            self.parameter.zero_()
        self.parameter.grad = gradient.clone()
        self.optimizer.step()
        return -self.parameter.detach().clone()


def adam_directions(gradients: Sequence[Tensor], **options: object) -> list[Tensor]:
    trial = AdamTrial(gradients[0].shape, **options)  # type: ignore[arg-type]
    return [trial.step(gradient) for gradient in gradients]


def random_matrices(count: int, rows: int, columns: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, columns, generator=generator, dtype=DOUBLE) for _ in range(count)]


def random_orthogonal(size: int, seed: int) -> Tensor:
    return torch.linalg.qr(random_matrices(1, size, size, seed)[0]).Q


def svd_of_condition(rows: int, columns: int, condition: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """U (rows x k), S (k) from 1 down to 1 / condition, V (columns x k)."""
    rank = min(rows, columns)
    spectrum = torch.logspace(0, -math.log10(condition), rank, dtype=DOUBLE)
    return random_orthogonal(rows, seed)[:, :rank], spectrum, random_orthogonal(columns, seed + 1)[:, :rank]


def gradients_of_condition(count: int, rows: int, columns: int, condition: float, seed: int) -> list[Tensor]:
    """Gradients with the same singular values, each with singular vectors of its own."""
    parts = [svd_of_condition(rows, columns, condition, seed + 2 * number) for number in range(count)]
    return [U @ S.diag() @ V.mT for U, S, V in parts]


def matrix_normals(count: int, rows: int, columns: int, condition: float, seed: int) -> list[Tensor]:
    """A Z B' with Z of independent normal entries; A A' and B B' have that condition and random eigenvectors."""
    spectra = [torch.logspace(0, -math.log10(condition) / 2, size, dtype=DOUBLE) for size in (rows, columns)]
    A, B = (random_orthogonal(len(s), seed + 1 + number) @ s.diag() for number, s in enumerate(spectra))
    return [A @ Z @ B.mT for Z in random_matrices(count, rows, columns, seed)]


def rms(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt())


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


# One gradient without averages.

NO_AVERAGES: Settings = {"betas": (0.0, 0.95), "factor_beta": 0.0, "grafting": "none", "epsilon": 1e-15}


def no_average_tolerance(condition: float) -> float:
    """For gradients with singular values from 1 to 1 / condition.

    An eigenvalue s^2 carries the damping and the rounding of the largest: a relative error of both times condition^2.
    A vector of eigenvalue zero turns by rounding over s^2 into one whose part of the gradient is s, and is multiplied
    by 1 / sqrt(damping).
    """
    return 10 * (1e-15 + ROUNDING) * condition**2 + 10 * ROUNDING * condition / math.sqrt(1e-15)


@pytest.mark.parametrize(
    "method",
    [
        {"method": "shampoo"},
        {"method": "shampoo", "root": 2, "side": "left"},
        {"method": "one-sided", "side": "left"},
        {"method": "one-sided", "side": "right"},
        {"method": "one-sided"},
    ],
    ids=["root 4 both", "root 2 left", "one-sided left", "one-sided right", "one-sided smaller"],
)
@FEW
@given(rows=SIDES, columns=SIDES, condition=CONDITIONS, seed=SEEDS)
def test_without_averages_the_direction_is_the_polar_factor(
    method: Settings, rows: int, columns: int, condition: float, seed: int
) -> None:
    U, S, V = svd_of_condition(rows, columns, condition, seed)
    (direction,) = directions([U @ S.diag() @ V.mT], **NO_AVERAGES, **method)
    assert (direction - U @ V.mT).abs().max() < no_average_tolerance(condition)


@FEW
@given(rows=SIDES, columns=SIDES, condition=CONDITIONS, seed=SEEDS)
def test_two_trace_scaled_square_roots_invert_the_singular_values(
    rows: int, columns: int, condition: float, seed: int
) -> None:
    # tr(L)^(1/4) L^(-1/2) G tr(R)^(1/4) R^(-1/2) = |G|_F U S^-1 V', since both traces are |G|_F^2.
    U, S, V = svd_of_condition(rows, columns, condition, seed)
    (direction,) = directions([U @ S.diag() @ V.mT], root=2, update_rms_clip=0.0, **NO_AVERAGES)
    expected = S.norm() * U @ (1 / S).diag() @ V.mT
    assert relative_error(direction, expected) < no_average_tolerance(condition)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@FEW
@given(rows=SIDES, columns=SIDES, condition=st.floats(1, 50), seed=SEEDS)
def test_the_first_direction_of_kl_shampoo_is_a_polar_factor_at_any_scale(
    scale: float, rows: int, columns: int, condition: float, seed: int
) -> None:
    # l_L = s^2 / (n r) and l_R = n r / m: the start value r cancels. Condition 50: no eigenvalue, 1 to 1/2500, is below
    # the floor of 1e-4 of their mean.
    U, S, V = svd_of_condition(rows, columns, condition, seed)
    direction = directions([scale * U @ S.diag() @ V.mT], method="kl-shampoo", update_rms_clip=0.0)[0]
    torch.testing.assert_close(direction, math.sqrt(rows) * U @ V.mT, rtol=0, atol=1e-9)


# Blocks with a side of length one.

UNDAMPED = 1e-30
"""A value of `epsilon` that adds nothing to any number here."""


def inverse_square_root(matrix: Tensor) -> Tensor:
    """A^(-1/2) of a positive definite 2 x 2 matrix: sqrt(A) = (A + sqrt(det A) I) / sqrt(tr A + 2 sqrt(det A))."""
    determinant = (matrix[0, 0] * matrix[1, 1] - matrix[0, 1] * matrix[1, 0]).sqrt()
    root = (matrix + determinant * torch.eye(2, dtype=DOUBLE)) / (matrix.trace() + 2 * determinant).sqrt()
    return torch.stack([root[1, 1], -root[0, 1], -root[1, 0], root[0, 0]]).view(2, 2) / determinant


def test_one_factor_of_a_column_is_full_matrix_adagrad_with_an_average() -> None:
    # A 2 x 3 matrix at block size 2 is cut into 2 x 1 and 2 x 2; only the first is looked at.
    gradients = random_matrices(12, 2, 3)
    options: Settings = {"betas": (0.0, 0.95), "block_size": 2, "grafting": "none", "factor_beta": 0.9, "epsilon": 1e-3}
    one = directions(gradients, method="one-sided", side="left", **options)
    two = directions(gradients, method="shampoo", **options)
    average = torch.zeros(2, 2, dtype=DOUBLE)
    largest_difference = 0.0
    for step, gradient in enumerate(gradients, start=1):
        column = gradient[:, :1]
        average = 0.9 * average + 0.1 * column @ column.mT
        corrected = average / (1 - 0.9**step)
        half_trace = corrected.trace() / 2
        largest = half_trace + (half_trace**2 - torch.linalg.det(corrected)).clamp(min=0).sqrt()
        expected = inverse_square_root(corrected + 1e-3 * largest * torch.eye(2, dtype=DOUBLE)) @ column
        torch.testing.assert_close(one[step - 1][:, :1], expected, rtol=1e-9, atol=1e-9)
        largest_difference = max(largest_difference, relative_error(two[step - 1][:, :1], expected))
    assert largest_difference > 0.1  # two fourth roots of a column are another method


ONE_ELEMENT: Settings = {"block_size": 1, "factor_beta": 0.95, "epsilon": UNDAMPED}


@pytest.mark.parametrize(
    ("eps", "method"),
    [
        (0.0, {"method": "shampoo", "root": 2, "grafting": "none", "update_rms_clip": 0.0}),
        (0.0, {"method": "one-sided", "grafting": "none", "update_rms_clip": 0.0}),
        (0.0, {"method": "shampoo", "grafting": "adam"}),
        (1e-2, {"method": "soap", "update_rms_clip": 0.0}),
        (1e-2, {"method": "kl-soap", "update_rms_clip": 0.0}),
        (1e-2, {"method": "soap", "side": "right", "update_rms_clip": 0.0}),
        (1e-2, {"method": "kl-shampoo", "grafting": "adam"}),
    ],
    ids=["trace scaled", "one-sided", "grafted", "soap", "kl-soap", "soap right", "kl-shampoo grafted"],
)
def test_blocks_of_one_element_are_adam(eps: float, method: Settings) -> None:
    gradients = random_matrices(15, 3, 4)
    ours = directions(gradients, eps=eps, **ONE_ELEMENT, **method)
    for actual, expected in zip(ours, adam_directions(gradients, eps=eps), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-13)


def test_one_fourth_root_of_one_element_is_not_adam() -> None:
    # One factor to the power -1/4 leaves the square root of the gradient's size: m / v^(1/4).
    gradients = random_matrices(5, 3, 4)
    options: Settings = {**ONE_ELEMENT, "grafting": "none", "update_rms_clip": 0.0}
    ours = directions(gradients, method="one-sided", root=4, betas=(0.0, 0.95), **options)
    v = sum(0.05 * 0.95 ** (4 - k) * g**2 for k, g in enumerate(gradients)) / (1 - 0.95**5)
    torch.testing.assert_close(ours[-1], gradients[-1] / v**0.25, rtol=1e-11, atol=0)  # type: ignore[operator]


def test_kl_shampoo_of_one_element_is_the_scalar_recursion() -> None:
    # Written for l_L l_R = p alone, with a = the corrected factor_beta: l_L <- f l_L with f = a + (1 - a) g^2 / p, then
    # l_R <- l_R (a + (1 - a) g^2 / (f p)). Whatever p starts from, a = 0 at the first step sets it to g^2.
    gradients = random_matrices(15, 3, 4)
    options: Settings = {"betas": (0.0, 0.95), "block_size": 1, "factor_beta": 0.9, "update_rms_clip": 0.0}
    ours = directions(gradients, method="kl-shampoo", **options)
    p = torch.full((3, 4), 1234.0, dtype=DOUBLE)
    for step, gradient in enumerate(gradients, start=1):
        a = (0.9 - 0.9**step) / (1 - 0.9**step)
        f = a + (1 - a) * gradient**2 / p
        p = f * p * (a + (1 - a) * gradient**2 / (f * p))
        torch.testing.assert_close(ours[step - 1], gradient / p.sqrt(), rtol=1e-11, atol=0)


# SOAP is Adam in a basis.


def test_soap_with_one_factor_is_adam_where_rows_are_orthogonal() -> None:
    # Then every G G' is diagonal and the left basis a permutation, which may change from step to step.
    sizes = torch.rand(12, 5, generator=torch.Generator().manual_seed(1), dtype=DOUBLE) + 0.5
    gradients = [row.diag() @ random_orthogonal(9, seed)[:5] for seed, row in enumerate(sizes)]
    ours = directions(gradients, method="soap", side="left", update_rms_clip=0.0, epsilon=UNDAMPED)
    for actual, expected in zip(ours, adam_directions(gradients), strict=True):
        # The factor is diagonal to rounding; its entries differ by at least 1e-4 of the largest.
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("method", SOAPS)
def test_soap_is_adam_where_rows_and_columns_have_one_entry(method: str) -> None:
    # G G' and G' G are then diagonal both, with distinct entries.
    sizes = torch.rand(12, 6, generator=torch.Generator().manual_seed(2), dtype=DOUBLE) + 0.5
    order = torch.randperm(6, generator=torch.Generator().manual_seed(3))
    gradients = [row.diag()[:, order] for row in sizes]
    ours = directions(gradients, method=method, update_rms_clip=0.0, epsilon=UNDAMPED)
    for actual, expected in zip(ours, adam_directions(gradients), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13)


QUIET_START, QUIET_STEPS = 10, 9
"""At interval 10 block 0 refreshes at steps 1, 2, 4, 8, 10, 20: none of the steps 11 to 19."""


def frozen_trial(method: str, gradients: Sequence[Tensor], Q_L: Tensor, Q_R: Tensor) -> Trial:
    """After `QUIET_START` steps, with these bases and a second moment of zeros."""
    trial = Trial(gradients[0].shape, method=method, refresh_interval=10, update_rms_clip=0.0, epsilon=UNDAMPED)
    trial.run(gradients[:QUIET_START])
    (state,) = trial.optimizer.states
    state.left.inverse.copy_(Q_L)
    state.right.inverse.copy_(Q_R)
    state.second_moment.zero_()
    return trial


@pytest.mark.parametrize("basis", ["identity", "random"])
@pytest.mark.parametrize("method", SOAPS)
def test_soap_between_two_refreshes_is_adam_in_its_basis(method: str, basis: str) -> None:
    gradients = random_matrices(QUIET_START + QUIET_STEPS, 5, 7)
    Q_L, Q_R = (random_orthogonal(n, n) if basis == "random" else torch.eye(n, dtype=DOUBLE) for n in (5, 7))
    trial = frozen_trial(method, gradients, Q_L, Q_R)
    adam = AdamTrial((5, 7))
    moment = Q_L.mT @ trial.momentum @ Q_R
    adam.start_from(QUIET_START, moment, torch.zeros_like(moment))
    for gradient in gradients[QUIET_START:]:
        expected = Q_L @ adam.step(Q_L.mT @ gradient @ Q_R) @ Q_R.mT
        # The second moment is small at first, so directions reach 10: rounding times that, in float64.
        torch.testing.assert_close(trial.step(gradient), expected, rtol=1e-12, atol=1e-12)
    (state,) = trial.optimizer.states
    torch.testing.assert_close(state.left.inverse[0], Q_L, rtol=0, atol=0)


@pytest.mark.parametrize("method", SOAPS)
def test_the_second_moment_whitens_the_gradients_that_made_it_in_any_basis(method: str) -> None:
    # Sum over steps of their weight times (Q_L' G Q_R)^2 / V_Q is 1 in every entry, so its mean is 1.
    gradients = random_matrices(QUIET_START + QUIET_STEPS, 5, 7)
    Q_L, Q_R = random_orthogonal(5, 1), random_orthogonal(7, 2)
    trial = frozen_trial(method, gradients, Q_L, Q_R)
    trial.run(gradients[QUIET_START:])
    (state,) = trial.optimizer.states
    V_Q = state.second_moment[0] * state.scale[0] ** 2
    last = QUIET_STEPS - 1
    whitened = [
        0.05 * 0.95 ** (last - number) * (Q_L.mT @ gradient @ Q_R) ** 2 / V_Q
        for number, gradient in enumerate(gradients[QUIET_START:])
    ]
    total = torch.stack(whitened).sum(dim=0)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("solver", "reorder"), [("eigh", True), ("eigh", False), ("qr", False)])
@pytest.mark.parametrize("method", BASIS_METHODS)
def test_sign_and_order_of_basis_vectors_do_not_matter(method: str, solver: str, reorder: bool) -> None:
    # A QR decomposition takes columns one after the other: with that solver another order is another basis.
    rows, columns = 5, 7
    # The change comes between two refreshes (step 5 of interval 3: refreshes at 1, 2, 3, 6, 9, 12).
    gradients = random_matrices(12, rows, columns)
    options: Settings = {"method": method, "solver": solver, "refresh_interval": 3}
    plain, changed = Trial((rows, columns), **options), Trial((rows, columns), **options)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(7)
    for number, gradient in enumerate(gradients, start=1):
        if number == 5:
            (state,) = changed.optimizer.states
            for side, size, axis in ((state.left, rows, 1), (state.right, columns, 2)):
                order = torch.randperm(size, generator=generator) if reorder else torch.arange(size)
                signs = 2.0 * torch.randint(2, (size,), generator=generator) - 1
                assert signs.min() < 0 < signs.max()
                assert reorder != torch.equal(order, torch.arange(size))
                side.inverse.copy_((side.inverse * signs)[:, :, order])
                if side.eigenvalues is not None:
                    side.eigenvalues.copy_(side.eigenvalues[:, order])
                if method in SOAPS:
                    state.second_moment.copy_(state.second_moment.index_select(axis, order))
        # Sums in another order, and eigenvectors of a factor that has forgotten nothing: rounding of 1e-16 over gaps of
        # 1e-2 of the largest eigenvalue.
        torch.testing.assert_close(changed.step(gradient), plain.step(gradient), rtol=0, atol=1e-11)


@pytest.mark.parametrize("factor", [0.25, 3.0])
def test_kl_shampoo_does_not_depend_on_how_a_scale_is_split_between_its_factors(factor: float) -> None:
    gradients = random_matrices(12, 5, 7)
    plain, changed = Trial((5, 7), method="kl-shampoo"), Trial((5, 7), method="kl-shampoo")
    for number, gradient in enumerate(gradients, start=1):
        if number == 4:
            (state,) = changed.optimizer.states
            for side, by in ((state.left, factor), (state.right, 1 / factor)):
                side.factor.mul_(by)
                side.eigenvalues.mul_(by)
        torch.testing.assert_close(changed.step(gradient), plain.step(gradient), rtol=0, atol=1e-11)


# Symmetries. A basis is unique where singular values are distinct: the condition is drawn from 2 upwards.

DISTINCT = st.floats(0.3, 6).map(lambda power: 10.0**power)

SYMMETRIC: dict[str, Settings] = {
    "shampoo": {"method": "shampoo", "grafting": "none"},
    "shampoo, sgd": {"method": "shampoo", "grafting": "sgd"},
    "trace scaled": {"method": "shampoo", "root": 2, "grafting": "none", "update_rms_clip": 0.0},
    "one-sided": {"method": "one-sided", "grafting": "none"},
    "soap": {"method": "soap"},
    "soap, after": {"method": "soap", "momentum_placement": "after", "nesterov": True},
    "kl-soap": {"method": "kl-soap"},
    "kl-shampoo": {"method": "kl-shampoo"},
    "kl-shampoo, sgd": {"method": "kl-shampoo", "grafting": "sgd"},
}
EQUIVARIANCE_TOLERANCE = {"shampoo": 1e-8, "one-sided": 1e-8, "soap": 1e-7, "kl-soap": 1e-3, "kl-shampoo": 1e-3}


def turned(gradients: Sequence[Tensor], seed: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    rows, columns = gradients[0].shape
    P, Q = random_orthogonal(rows, seed + 1000), random_orthogonal(columns, seed + 1001)
    return P, Q, [P @ gradient @ Q.mT for gradient in gradients]


def equivariance_error(plain: Sequence[Tensor], after_turning: Sequence[Tensor], P: Tensor, Q: Tensor) -> float:
    """Largest over the steps of |f(P G Q') - P f(G) Q'| / |f(G)|."""
    return max(relative_error(a, P @ b @ Q.mT) for a, b in zip(after_turning, plain, strict=True))


@pytest.mark.parametrize("name", list(SYMMETRIC))
@FEW
@given(rows=SIDES, columns=SIDES, condition=DISTINCT, seed=SEEDS)
def test_directions_turn_with_the_coordinates(name: str, rows: int, columns: int, condition: float, seed: int) -> None:
    gradients = gradients_of_condition(6, rows, columns, condition, seed)
    P, Q, others = turned(gradients, seed)
    options: Settings = {"eps": 0.0, **SYMMETRIC[name]}
    error = equivariance_error(directions(gradients, **options), directions(others, **options), P, Q)
    assert error < EQUIVARIANCE_TOLERANCE[str(SYMMETRIC[name]["method"])]


@FEW
@given(rows=st.integers(4, 8), columns=st.integers(4, 8), condition=CONDITIONS, seed=SEEDS)
def test_adams_directions_do_not_turn_with_the_coordinates(
    rows: int, columns: int, condition: float, seed: int
) -> None:
    gradients = gradients_of_condition(6, rows, columns, condition, seed)
    P, Q, others = turned(gradients, seed)
    options: Settings = {"eps": 1e-8}
    assert equivariance_error(adam_directions(gradients, **options), adam_directions(others, **options), P, Q) > 0.3


SCALE_FREE: dict[str, Settings] = {
    **{name: chosen for name, chosen in SYMMETRIC.items() if chosen.get("grafting") != "sgd"},
    "shampoo left, adam": {"method": "shampoo", "side": "left", "root": 4, "grafting": "adam"},
    "kl-shampoo, adam": {"method": "kl-shampoo", "grafting": "adam"},
}
POWERS = st.floats(-6, 6).map(lambda power: 10.0**power)


@pytest.mark.parametrize("name", list(SCALE_FREE))
@FEW
@given(size=SIDES, condition=st.floats(2, 100), factor=POWERS, seed=SEEDS)
def test_directions_do_not_change_when_all_gradients_are_scaled(
    name: str, size: int, condition: float, factor: float, seed: int
) -> None:
    gradients = gradients_of_condition(6, size, size, condition, seed)
    options: Settings = {"eps": 0.0, **SCALE_FREE[name]}
    plain = directions(gradients, **options)
    scaled = directions([factor * gradient for gradient in gradients], **options)
    for actual, expected in zip(scaled, plain, strict=True):
        assert relative_error(actual, expected) < 1e-7


@pytest.mark.parametrize("factor", [1e-6, 1e-3, 1e3, 1e6])
@pytest.mark.parametrize("name", list(SCALE_FREE))
def test_directions_do_not_change_when_all_gradients_are_scaled_in_float32(name: str, factor: float) -> None:
    gradients = gradients_of_condition(8, 6, 6, 3.0, 5)
    # The first gradient is diagonal in its own bases: rounding of 1e-6 over a damping of sqrt(1e-3) off the diagonal.
    options: Settings = {"eps": 0.0, "epsilon": 1e-3, "dtype": torch.float32, **SCALE_FREE[name]}
    plain = directions(gradients, **options)
    scaled = directions([factor * gradient for gradient in gradients], **options)
    for actual, expected in zip(scaled, plain, strict=True):
        # Rounding of 6e-8, over gaps of a few hundredths between the eigenvalues of a factor.
        assert relative_error(actual, expected) < 1e-4


@FEW
@given(size=SIDES, condition=st.floats(1, 100), factor=POWERS, seed=SEEDS)
def test_one_fourth_root_alone_leaves_the_square_root_of_the_scale(
    size: int, condition: float, factor: float, seed: int
) -> None:
    gradients = gradients_of_condition(4, size, size, condition, seed)
    options: Settings = {"method": "one-sided", "root": 4, "grafting": "none", "update_rms_clip": 0.0}
    plain = directions(gradients, **options)[-1]
    scaled = directions([factor * gradient for gradient in gradients], **options)[-1]
    assert relative_error(scaled, math.sqrt(factor) * plain) < 1e-8


# Sizes of directions.


def test_kl_shampoo_finds_the_covariance_of_matrix_normal_gradients() -> None:
    rows, columns, warmup, steps = 3, 4, 600, 1600
    gradients = matrix_normals(steps, rows, columns, 30.0, seed=11)
    options: Settings = {"factor_beta": 0.995, "refresh_interval": 20, "update_rms_clip": 0.0}
    trial = Trial((rows, columns), method="kl-shampoo", betas=(0.0, 0.95), **options)
    trial.run(gradients[:warmup])
    squares = [float(direction.square().sum()) for direction in trial.run(gradients[warmup:])]
    # |U|^2 has mean 12 and standard deviation sqrt(24): 0.15 for the mean of 1000. The gradient is itself part of the
    # averages it is divided by, which takes off about a hundredth.
    assert sum(squares) / len(squares) == pytest.approx(rows * columns, rel=0.05)

    (state,) = trial.optimizer.states
    found = [side.inverse[0] @ side.eigenvalues[0].diag() @ side.inverse[0].mT for side in (state.left, state.right)]
    covariance = torch.kron(found[0], found[1]) * state.scale[0] ** 2
    A, B = (
        random_orthogonal(size, seed)
        @ torch.logspace(0, -math.log10(30.0), size, dtype=DOUBLE).diag()
        @ random_orthogonal(size, seed).mT
        for size, seed in ((rows, 12), (columns, 13))
    )
    # Entries of A are averaged over 400 gradients of 4 columns, those of B over 3 rows: standard deviations of 4%.
    assert relative_error(covariance, torch.kron(A, B)) < 0.15


@pytest.mark.parametrize("refresh_interval", [1, 10])
@pytest.mark.parametrize("condition", [1.0, 100.0])
@pytest.mark.parametrize(
    "method",
    [{"method": name} for name in BASIS_METHODS] + [{"method": "shampoo", "root": 2, "grafting": "none"}],
    ids=[*BASIS_METHODS, "trace scaled"],
)
def test_directions_of_independent_gradients_have_size_one(
    method: Settings, condition: float, refresh_interval: int
) -> None:
    gradients = matrix_normals(200, 24, 36, condition, seed=3)
    sizes = [rms(d) for d in directions(gradients, betas=(0.0, 0.95), refresh_interval=refresh_interval, **method)]
    assert 0.85 < sum(sizes[-20:]) / 20 < 1.1  # two intervals: the size varies with the age of the basis


SPIKE_STEP = 57


def sizes_around_a_spike(method: str, **options: object) -> list[float]:
    """RMS of the directions at the steps before, at and after a rank-one term of ten times the gradient's norm."""
    gradients = matrix_normals(SPIKE_STEP + 1, 24, 36, 1e4, seed=5)
    generator = torch.Generator().manual_seed(6)
    row, column = (torch.randn(size, generator=generator, dtype=DOUBLE) for size in (24, 36))
    spike = torch.outer(row, column)
    struck = gradients[SPIKE_STEP - 1]
    gradients[SPIKE_STEP - 1] = struck + 10 * struck.norm() * spike / spike.norm()
    return [rms(d) for d in directions(gradients, method=method, betas=(0.0, 0.95), **options)[-3:]]


@pytest.mark.parametrize("method", SOAPS)
@pytest.mark.parametrize(("solver", "bound"), [("eigh", 1.3), ("qr", 2.5)])
def test_a_spike_stays_small_when_it_is_in_its_own_basis(method: str, solver: str, bound: float) -> None:
    before, at, after = sizes_around_a_spike(method, solver=solver, update_rms_clip=0.0)
    assert 0.7 < before < 1.1
    assert at < bound
    assert after < bound


@pytest.mark.parametrize("method", SOAPS)
@pytest.mark.parametrize("solver", ["eigh", "qr"])
def test_a_spike_between_two_refreshes_meets_the_clip(method: str, solver: str) -> None:
    # The limit without clip is 1 / sqrt(1 - beta2) = 4.5: every entry new. This is what the default clip is there for.
    assert sizes_around_a_spike(method, solver=solver, refresh_interval=10, update_rms_clip=0.0)[1] > 3
    clipped = sizes_around_a_spike(method, solver=solver, refresh_interval=10)[1]
    assert clipped == pytest.approx(2.0, rel=1e-9)
