"""The fallback ladder of every solver: solvers that break in every known way, on all of a batch or on one matrix."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.shampoo import Shampoo, ShampooConfig
from megatron.shampoo.config import Solver
from megatron.shampoo.linalg import newton
from megatron.shampoo.preconditioner import ladder
from megatron.shampoo.preconditioner.ladder import Refreshed, Rung, Task, climb

SIZE, COUNT, EPSILON = 24, 5, 1e-6
TASKS = {
    "fourth root": Task(root=4, trace_scaled=False, epsilon=EPSILON),
    "square root": Task(root=2, trace_scaled=False, epsilon=EPSILON),
    "trace-scaled square root": Task(root=2, trace_scaled=True, epsilon=EPSILON),
    "eigenbasis": Task(root=None, trace_scaled=False, epsilon=EPSILON),
}
ATTEMPTS = {
    Solver.EIGH: ("eigh in float64", "eigh in float64 on the CPU"),
    Solver.QR: ("qr", "eigh in float32", "eigh in float64 on the CPU"),
    Solver.NEWTON: ("newton", "eigh in float64", "eigh in float64 on the CPU"),
    Solver.NEWTON_DB: ("newton-db", "eigh in float64", "eigh in float64 on the CPU"),
}
SOLVED = [
    (solver, task)
    for solver in ATTEMPTS
    for task in TASKS
    if task != "eigenbasis" or solver in (Solver.EIGH, Solver.QR)
]
"""What each solver is for."""
IDS = [f"{solver}-{task}" for solver, task in SOLVED]


# -- matrices


def orthogonal(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64)).Q


def factor(seed: int) -> Tensor:
    """A factor of condition 1e3, of which only the lower triangle means anything."""
    basis = orthogonal(seed)
    matrix = basis @ torch.diag(torch.logspace(0, -3, SIZE, dtype=torch.float64)) @ basis.mT
    return matrix.float().tril() + torch.full((SIZE, SIZE), 7.0).triu(1)


def factors() -> Tensor:
    return torch.stack([factor(seed) for seed in range(COUNT)])


def bases() -> Tensor:
    """The eigenbases of the factors, as an earlier refresh has left them: off by an angle of about 1e-3."""
    noise = 1e-3 * torch.randn(COUNT, SIZE, SIZE, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return torch.linalg.qr(torch.stack([orthogonal(seed) for seed in range(COUNT)]) + noise).Q.float()


def symmetric(lower: Tensor) -> Tensor:
    return lower.tril() + lower.tril(-1).mT


def exact_roots(lower: Tensor, task: Task) -> Tensor:
    """The formula in float64."""
    assert task.root is not None
    values, basis = torch.linalg.eigh(symmetric(lower.double()))
    damped = values + task.epsilon * values.amax(-1, keepdim=True)
    roots = (basis * damped.pow(-1 / task.root).unsqueeze(-2)) @ basis.mT
    return roots * values.sum(-1)[:, None, None].pow(0.25) if task.trace_scaled else roots


def assert_right(found: Refreshed, lower: Tensor, task: Task, tolerance: float = 2e-3) -> None:
    """The result is the root, or an orthogonal basis in which the factor is nearly diagonal."""
    if task.root is not None:
        assert found.root is not None
        exact = exact_roots(lower, task)
        assert float((found.root.double() - exact).norm() / exact.norm()) < tolerance
        return
    assert found.basis is not None
    basis = found.basis.double()
    torch.testing.assert_close(basis.mT @ basis, torch.eye(SIZE).double().expand_as(basis), rtol=0, atol=1e-5)
    rotated = basis.mT @ symmetric(lower.double()) @ basis
    off = rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1))
    assert float(off.norm() / rotated.norm()) < tolerance


def assert_same(one: Refreshed, other: Refreshed, which: slice | list[int] = slice(None)) -> None:
    """Bit for bit, for these matrices of the batch."""
    for name, mine, theirs in zip(one._fields, one, other, strict=True):
        assert (mine is None) == (theirs is None), name
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine[which], theirs[which], rtol=0, atol=0, equal_nan=name == "condition")


# -- broken solvers


def raises(original: Callable, matrix: Tensor, *args: Any) -> Any:
    matrix.fill_(torch.nan)
    raise torch.linalg.LinAlgError("the algorithm failed to converge")


def fails_in_the_library(original: Callable, matrix: Tensor, *args: Any) -> Any:
    matrix.fill_(torch.nan)
    raise RuntimeError("cusolver error: CUSOLVER_STATUS_EXECUTION_FAILED")


def silent_nan(original: Callable, matrix: Tensor, *args: Any) -> Any:
    found = original(matrix.clone(), *args)
    matrix.fill_(torch.nan)
    if isinstance(found, Tensor):
        return torch.full_like(found, torch.nan)
    return tuple(torch.full_like(tensor, torch.nan) for tensor in found)


def not_orthogonal(original: Callable, matrix: Tensor, *args: Any) -> Any:
    found = [tensor.clone() for tensor in original(matrix.clone(), *args)]
    matrix.fill_(torch.nan)
    # (eigenvalues, Q) of eigh, (Q, R) of qr: the orthogonal one.
    basis = next(tensor for tensor in found if is_orthogonal(tensor))
    basis[..., 0] = basis[..., 1]
    return tuple(found)


def is_orthogonal(matrix: Tensor) -> bool:
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        return False
    return bool((matrix.mT @ matrix - torch.eye(matrix.shape[-1])).abs().max() < 1e-3)


FAULTS = {
    "raises": raises,
    "fails in the library": fails_in_the_library,
    "silent nan": silent_nan,
    "not orthogonal": not_orthogonal,
}
"""Each overwrites its input before it fails."""
CALLED = ("eigh", "qr", "matrix_power")
"""Functions of `torch.linalg` that solvers call: whatever the attempt, one of them is on its way."""


class Sabotage:
    """Breaks the first attempts of a solver, and notes which attempts were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, solver: Solver) -> None:
        self.monkeypatch, self.solver = monkeypatch, solver
        self.made: list[str] = []
        self._current: int | None = None
        rungs = (self._watched(number, rung) for number, rung in enumerate(ladder.RUNGS[solver]))
        monkeypatch.setitem(ladder.RUNGS, solver, tuple(rungs))

    def _watched(self, number: int, rung: Rung) -> Rung:
        def solve(*args: Any) -> Any:
            self._current = number
            self.made.append(rung.name)
            try:
                return rung.solve(*args)
            finally:
                self._current = None

        return Rung(rung.name, solve)

    def install(self, fault: str, attempts: int, when: Callable[[Tensor], bool] = lambda matrix: True) -> None:
        """Break so many attempts, for the inputs that `when` picks."""
        for name in CALLED:
            original = getattr(torch.linalg, name)

            def broken(matrix: Tensor, *args: Any, original: Callable = original) -> Any:
                if self._current is not None and self._current < attempts and when(matrix):
                    return FAULTS[fault](original, matrix, *args)
                return original(matrix, *args)

            self.monkeypatch.setattr(torch.linalg, name, broken)


@pytest.fixture
def sabotage(monkeypatch: pytest.MonkeyPatch) -> Callable[[Solver], Sabotage]:
    return lambda solver: Sabotage(monkeypatch, solver)


def faults_of(solver: Solver) -> list[str]:
    """Newton's iterations have no basis."""
    newtons = solver in (Solver.NEWTON, Solver.NEWTON_DB)
    return [fault for fault in FAULTS if not (newtons and fault == "not orthogonal")]


# -- every attempt in turn


@pytest.mark.parametrize("solver", list(ATTEMPTS))
def test_the_ladder_is_the_documented_one(solver: Solver) -> None:
    assert tuple(rung.name for rung in ladder.RUNGS[solver]) == ATTEMPTS[solver]
    assert set(ladder.RUNGS) == set(ATTEMPTS)


@pytest.mark.parametrize(("solver", "task"), SOLVED, ids=IDS)
def test_a_solver_that_works_is_the_only_one_asked(sabotage: Callable, solver: Solver, task: str) -> None:
    watch = sabotage(solver)
    lower, previous = factors(), bases()
    found = climb(lower, previous, TASKS[task], solver)
    assert watch.made == [ATTEMPTS[solver][0]]
    assert found.rung.tolist() == [0] * COUNT
    assert_right(found, lower, TASKS[task])
    torch.testing.assert_close((lower, previous), (factors(), bases()), rtol=0, atol=0)


REACHED = [
    (solver, task, fault, attempts)
    for solver, task in SOLVED
    for fault in faults_of(solver)
    for attempts in range(1, len(ATTEMPTS[solver]))
]


@pytest.mark.parametrize(("solver", "task", "fault", "attempts"), REACHED)
def test_each_attempt_is_reached_in_turn_and_gives_what_it_gives_alone(
    sabotage: Callable, solver: Solver, task: str, fault: str, attempts: int
) -> None:
    lower, previous = factors(), bases()
    alone = ladder.RUNGS[solver][attempts].solve(symmetric(lower), previous, TASKS[task])
    watch = sabotage(solver)
    watch.install(fault, attempts)
    found = climb(lower, previous, TASKS[task], solver)
    assert found.rung.tolist() == [attempts] * COUNT
    assert list(dict.fromkeys(watch.made)) == list(ATTEMPTS[solver][: attempts + 1])
    assert_right(found, lower, TASKS[task])
    if TASKS[task].root is None:
        torch.testing.assert_close(found.basis, alone.basis, rtol=0, atol=0)
    elif not TASKS[task].trace_scaled:
        torch.testing.assert_close(found.root, alone.root, rtol=0, atol=0)
    torch.testing.assert_close(found.condition, alone.condition, rtol=0, atol=0)
    torch.testing.assert_close((lower, previous), (factors(), bases()), rtol=0, atol=0)


@pytest.mark.parametrize(("solver", "task"), SOLVED, ids=IDS)
@pytest.mark.parametrize("fault", list(FAULTS))
def test_failure_of_every_attempt_is_told(sabotage: Callable, solver: Solver, task: str, fault: str) -> None:
    if fault not in faults_of(solver):
        fault = "raises"
    lower, previous = factors(), bases()
    sabotage(solver).install(fault, attempts=99)
    found = climb(lower, previous, TASKS[task], solver)
    assert found.rung.tolist() == [len(ATTEMPTS[solver])] * COUNT
    torch.testing.assert_close((lower, previous), (factors(), bases()), rtol=0, atol=0)


# -- one bad matrix in a batch


BAD = 2
GOOD = [slot for slot in range(COUNT) if slot != BAD]


@pytest.mark.parametrize(("solver", "task"), SOLVED, ids=IDS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_matrix_that_is_not_finite_leaves_the_others_bit_for_bit(solver: Solver, task: str, bad: float) -> None:
    right = climb(factors(), bases(), TASKS[task], solver)
    lower = factors()
    lower[BAD, 3, 1] = bad
    found = climb(lower, bases(), TASKS[task], solver)
    assert found.rung.tolist() == [len(ATTEMPTS[solver]) if slot == BAD else 0 for slot in range(COUNT)]
    assert_same(found, right, GOOD)


@pytest.mark.parametrize(("solver", "task"), SOLVED, ids=IDS)
@pytest.mark.parametrize("kind", ["zero", "identity", "rank one", "condition 1e8"])
def test_another_matrix_in_its_place_leaves_the_others_bit_for_bit(solver: Solver, task: str, kind: str) -> None:
    # What a block gets may not depend on the blocks that share its batch: these are others on every layout.
    column = torch.randn(SIZE, 1, generator=torch.Generator().manual_seed(3))
    basis = orthogonal(BAD)
    replaced = {
        "zero": torch.zeros(SIZE, SIZE),
        "identity": torch.eye(SIZE),
        "rank one": column @ column.mT,
        "condition 1e8": (basis @ torch.diag(torch.logspace(0, -8, SIZE, dtype=torch.float64)) @ basis.mT).float(),
    }[kind]
    right = climb(factors(), bases(), TASKS[task], solver)
    lower = factors()
    lower[BAD] = replaced
    found = climb(lower, bases(), TASKS[task], solver)
    assert_same(found, right, GOOD)


@pytest.mark.parametrize("solver", [Solver.EIGH, Solver.QR])  # the matrix products of the others cannot raise on one
@pytest.mark.parametrize("task", list(TASKS))
@pytest.mark.parametrize("fault", ["raises", "fails in the library"])
@pytest.mark.parametrize("attempts", [1, 2, 99])
def test_a_matrix_on_which_a_solver_raises_leaves_the_others_bit_for_bit(
    sabotage: Callable, solver: Solver, task: str, fault: str, attempts: int
) -> None:
    right = climb(factors(), bases(), TASKS[task], solver)
    # A matrix that no factor is like marks the batch, or the copy of it, that the solver raises on. Whatever a solver
    # is given (the factor over its largest entry, its product with a basis, an iterate) has this one's proportions.
    lower, previous = factors(), bases()
    lower[BAD] = torch.diag(torch.tensor([1.0] * (SIZE - 1) + [0.5]))
    previous[BAD] = torch.eye(SIZE)
    unbroken = climb(lower, previous, TASKS[task], solver)
    sabotage(solver).install(fault, attempts, when=holds_a_diagonal_matrix)
    found = climb(lower, previous, TASKS[task], solver)
    assert found.rung.tolist() == [min(attempts, len(ATTEMPTS[solver])) if slot == BAD else 0 for slot in range(COUNT)]
    assert_same(found, right, GOOD)
    if attempts < len(ATTEMPTS[solver]) and TASKS[task].root is not None:
        assert found.root is not None and unbroken.root is not None
        torch.testing.assert_close(found.root[BAD], unbroken.root[BAD], rtol=1e-3, atol=1e-3)


def holds_a_diagonal_matrix(matrix: Tensor) -> bool:
    off = matrix - torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))
    return bool((off.abs().amax(dim=(-2, -1)) == 0).any())


# -- what may be used


@pytest.mark.parametrize("solver", [Solver.NEWTON, Solver.NEWTON_DB])
@pytest.mark.parametrize("task", [task for task in TASKS if task != "eigenbasis"])
def test_an_iteration_that_has_not_converged_is_not_used(
    monkeypatch: pytest.MonkeyPatch, solver: Solver, task: str
) -> None:
    monkeypatch.setattr(newton, "MAX_STEPS", 2)
    found = climb(factors(), None, TASKS[task], solver)
    assert found.rung.tolist() == [1] * COUNT
    assert_right(found, factors(), TASKS[task], 1e-4)


@pytest.mark.parametrize("task", list(TASKS))
def test_a_spoilt_previous_basis_is_not_followed(task: str) -> None:
    previous = bases()
    previous[BAD, 3, 4] = torch.nan
    found = climb(factors(), previous, TASKS[task], Solver.QR)
    assert found.rung.tolist() == [1 if slot == BAD else 0 for slot in range(COUNT)]
    assert_right(found, factors(), TASKS[task])


@pytest.mark.parametrize(("solver", "task"), SOLVED, ids=IDS)
def test_a_zero_factor_has_the_identity_for_its_root_and_some_basis(solver: Solver, task: str) -> None:
    found = climb(torch.zeros(2, SIZE, SIZE), bases()[:2], TASKS[task], solver)
    eye = torch.eye(SIZE).expand(2, SIZE, SIZE)
    assert found.rung.tolist() == [0, 0]
    if TASKS[task].root is not None:
        torch.testing.assert_close(found.root, eye, rtol=0, atol=0)
    if found.basis is not None:
        torch.testing.assert_close(found.basis.mT @ found.basis, eye, rtol=0, atol=1e-5)


@pytest.mark.parametrize("solver", [Solver.EIGH, Solver.QR, Solver.NEWTON, Solver.NEWTON_DB])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_the_scale_of_a_factor_does_not_matter(solver: Solver, scale: float) -> None:
    task = TASKS["fourth root"]
    found = climb(scale * factors(), bases(), task, solver)
    assert found.rung.tolist() == [0] * COUNT and found.root is not None
    exact = exact_roots(scale * factors().double(), task)
    assert float((found.root.double() - exact).norm() / exact.norm()) < 2e-3


@pytest.mark.parametrize("solver", [Solver.EIGH, Solver.QR, Solver.NEWTON, Solver.NEWTON_DB])
def test_the_fourth_root_of_the_trace_scales_the_root(solver: Solver) -> None:
    plain = climb(factors(), bases(), TASKS["square root"], solver).root
    scaled = climb(factors(), bases(), TASKS["trace-scaled square root"], solver).root
    assert plain is not None and scaled is not None
    trace = factors().diagonal(dim1=-2, dim2=-1).sum(-1)
    torch.testing.assert_close(scaled, plain * trace.pow(0.25)[:, None, None])


@pytest.mark.parametrize(("solver", "task"), SOLVED, ids=IDS)
def test_a_lack_of_memory_is_not_taken_for_a_failure(
    monkeypatch: pytest.MonkeyPatch, solver: Solver, task: str
) -> None:
    def out_of_memory(*args: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    for name in CALLED:
        monkeypatch.setattr(torch.linalg, name, out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        climb(factors(), bases_without_qr(), TASKS[task], solver)


def bases_without_qr() -> Tensor:
    return torch.eye(SIZE).repeat(COUNT, 1, 1)


# -- in the optimizer: names in the log, counters


def shampoo(solver: Solver, method: str) -> tuple[torch.nn.Parameter, Shampoo]:
    weight = torch.nn.Parameter(torch.randn(8, 6, generator=torch.Generator().manual_seed(0)))
    config = ShampooConfig(method=method, solver=solver, refresh_interval=1, block_size=6, epsilon=1e-4)  # type: ignore[arg-type]
    return weight, Shampoo([weight], lr=0.01, config=config)


def train(weight: torch.nn.Parameter, optimizer: Shampoo, steps: range) -> None:
    for step in steps:
        weight.grad = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        optimizer.step()


METHODS = [("shampoo", solver) for solver in ATTEMPTS] + [
    (method, solver) for method in ("soap", "kl-soap", "kl-shampoo") for solver in (Solver.EIGH, Solver.QR)
]
NAMED = [(method, solver, attempts) for method, solver in METHODS for attempts in range(1, len(ATTEMPTS[solver]))]


@pytest.mark.parametrize(("method", "solver", "attempts"), NAMED)
def test_the_attempt_that_was_used_is_named_with_the_block(
    sabotage: Callable, caplog: pytest.LogCaptureFixture, method: str, solver: Solver, attempts: int
) -> None:
    weight, optimizer = shampoo(solver, method)
    with caplog.at_level(logging.WARNING, logger="megatron.shampoo"):
        train(weight, optimizer, range(3))
        assert caplog.messages == []
        sabotage(solver).install("raises", attempts)
        train(weight, optimizer, range(3, 4))
    failed, used = ATTEMPTS[solver][attempts - 1], ATTEMPTS[solver][attempts]
    what = "root" if method == "shampoo" else "eigenbasis"
    assert sorted(caplog.messages) == [
        f"{side} {what} of parameter 0[weight {row},0]: {failed} failed, {used} was used"
        for side in ("left", "right")
        for row in (0, 1)
    ]
    assert optimizer.metrics.failed == 0
    assert all(side.failures.tolist() == [0, 0] for state in optimizer.states for side in state.sides)
    assert weight.isfinite().all()


@pytest.mark.parametrize(("method", "solver"), METHODS)
def test_the_last_resort_is_counted_named_and_left_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str, solver: Solver
) -> None:
    weight, optimizer = shampoo(solver, method)
    train(weight, optimizer, range(3))
    (state,) = optimizer.states
    kept = [side.inverse.clone() for side in state.sides]
    with monkeypatch.context() as broken:
        Sabotage(broken, solver).install("raises", attempts=99)
        for number in (1, 2, 3, 4):
            train(weight, optimizer, range(2 + number, 3 + number))
            assert optimizer.metrics.failed == 4
            for side, inverse in zip(state.sides, kept, strict=True):
                assert side.failures.tolist() == [number] * 2
                expected = inverse if number < 3 else torch.eye(side.size).expand_as(inverse)
                torch.testing.assert_close(side.inverse, expected, rtol=0, atol=0)
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2 * 4
    for number, error in enumerate(sorted(errors)):
        assert f"[weight {number % 4 // 2},0]: every solver failed {3 + number % 2} times in a row" in error
    caplog.clear()
    train(weight, optimizer, range(7, 8))
    assert caplog.messages == []
    assert optimizer.metrics.failed == 0
    for side in state.sides:
        assert side.failures.tolist() == [0, 0]
        assert not torch.equal(side.inverse, torch.eye(side.size).expand_as(side.inverse))
    assert weight.isfinite().all()


@pytest.mark.parametrize(("method", "solver"), METHODS)
def test_one_block_that_is_given_up_leaves_the_others_bit_for_bit(
    method: str, solver: Solver, caplog: pytest.LogCaptureFixture
) -> None:
    runs = []
    for bad in (False, True):
        weight, optimizer = shampoo(solver, method)
        train(weight, optimizer, range(3))
        for side in optimizer.states[0].sides:
            side.factor[1] = torch.nan if bad else side.factor[1]
        train(weight, optimizer, range(3, 8))
        runs.append((weight.detach(), optimizer.states[0]))
    (right, good), (found, spoilt) = runs
    torch.testing.assert_close(found[:4], right[:4], rtol=0, atol=0)
    assert not torch.equal(found[4:], right[4:])
    assert found.isfinite().all()
    for mine, theirs in zip(spoilt.sides, good.sides, strict=True):
        assert mine.failures.tolist() == [0, 5]
        torch.testing.assert_close(mine.inverse[0], theirs.inverse[0], rtol=0, atol=0)
        torch.testing.assert_close(mine.inverse[1], torch.eye(mine.size), rtol=0, atol=0)
    assert all("[weight 1,0]" in message for message in caplog.messages)
