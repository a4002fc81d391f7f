"""Refresh of roots and eigenbases: whose turn it is, and what happens when one cannot be computed."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.shampoo import Shampoo, ShampooConfig, refreshing
from megatron.shampoo.config import Method
from megatron.shampoo.linalg import eigen as module

EIGH = torch.linalg.eigh
ROOTED = ["shampoo", "one-sided"]
IN_A_BASIS = ["soap", "kl-soap", "kl-shampoo"]


def make(shape: tuple[int, int] = (8, 6), **settings: object) -> tuple[torch.nn.Parameter, Shampoo]:
    weight = torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    config = ShampooConfig(**{"refresh_interval": 1, "solver": "eigh", **settings})  # type: ignore[arg-type]
    return weight, Shampoo([weight], lr=0.01, config=config)


def failures(optimizer: Shampoo) -> dict[str, list[int]]:
    """Failed refreshes in a row of the blocks of the only stack, by side."""
    (state,) = optimizer.states
    return {side.side: side.failures.tolist() for side in state.sides}


def train(weight: torch.nn.Parameter, optimizer: Shampoo, steps: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()


def refresh_steps(optimizer: Shampoo, weight: torch.nn.Parameter, steps: int) -> dict[str, list[int]]:
    """For each block the steps in which its roots were computed."""
    found: dict[str, list[int]] = {}
    for step in range(1, steps + 1):
        train(weight, optimizer, 1, seed=step)
        for state in optimizer.states:
            for name, at in zip(state.names, state.refreshed_at.tolist(), strict=True):
                if at == step:
                    found.setdefault(name, []).append(step)
    return found


@pytest.mark.parametrize(("interval", "start_step"), list(itertools.product([1, 3, 5], [1, 2, 4])))
def test_first_refresh_at_the_start_step_then_by_turns(interval: int, start_step: int) -> None:
    weight, optimizer = make((8, 6), block_size=3, refresh_interval=interval, start_step=start_step)
    steps = 2 * interval + start_step + 2
    found = refresh_steps(optimizer, weight, steps)
    assert len(found) == 6
    # Blocks are named by grid row and column and numbered row by row: 3 rows of 2.
    for ordinal, (row, column) in enumerate(itertools.product(range(3), range(2))):
        doublings = {t for t in (1, 2, 4, 8, 16) if t < interval}
        turns = [t for t in range(start_step + 1, steps + 1) if t in doublings or (t + ordinal) % interval == 0]
        assert found[f"parameter 0[weight {row},{column}]"] == [start_step, *turns]


def test_refreshes_are_spread_evenly_over_the_interval() -> None:
    weight, optimizer = make((12, 12), block_size=3, refresh_interval=4)
    counts = []
    for step in range(11):
        train(weight, optimizer, 1, seed=step)
        counts.append(optimizer.metrics.refreshes)
    # Steps 1 and 2 refresh every block: it is younger than an interval, and its gradients have doubled.
    assert counts == [2 * 16] * 2 + [2 * 16 // 4] * 9
    assert optimizer.num_root_computations == sum(counts)


def test_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    # Sixteen blocks of 3 x 3, that is 32 factors of 9 elements, at most 5 to a batch.
    reference_weight, reference = make((12, 12), block_size=3)
    train(reference_weight, reference, 3)
    sizes: list[int] = []

    def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
        sizes.append(matrix.shape[0])
        return EIGH(matrix)

    monkeypatch.setattr(module.torch.linalg, "eigh", eigh)
    monkeypatch.setattr(refreshing, "MAX_BATCH_NUMEL", 5 * 9 + 8)
    weight, optimizer = make((12, 12), block_size=3)
    train(weight, optimizer, 3)
    assert sizes == [5, 5, 5, 5, 5, 5, 2] * 3
    torch.testing.assert_close(weight, reference_weight, rtol=1e-5, atol=1e-6)


def failing(dtypes: tuple[torch.dtype, ...], shape: int | None = None) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """A solver that overwrites its input and raises for these dtypes (and this size of matrix)."""

    def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
        if matrix.dtype in dtypes and shape in (None, matrix.shape[-1]):
            matrix.fill_(torch.nan)
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        return EIGH(matrix)

    return eigh


BOTH = (torch.float32, torch.float64)


def test_a_root_rescued_by_the_second_attempt_is_named_and_not_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weight, optimizer = make()
    plain_weight, plain = make()
    train(plain_weight, plain, 4)
    attempts = itertools.count()

    def nan_at_first(matrix: Tensor) -> tuple[Tensor, Tensor]:
        eigenvalues, basis = EIGH(matrix)
        return eigenvalues, basis if next(attempts) % 2 else torch.full_like(basis, torch.nan)

    monkeypatch.setattr(module.torch.linalg, "eigh", nan_at_first)
    with caplog.at_level(logging.WARNING, logger="megatron.shampoo"):
        train(weight, optimizer, 4)
    torch.testing.assert_close(weight, plain_weight, rtol=1e-4, atol=1e-5)
    assert failures(optimizer) == {"left": [0], "right": [0]}
    assert optimizer.metrics.failed == 0
    for side in ("left", "right"):
        assert (
            f"{side} root of parameter 0[weight 0,0]: eigh in float64 failed, eigh in float64 on the CPU was used"
        ) in caplog.text


def test_a_failed_root_keeps_the_previous_one_and_is_counted_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weight, optimizer = make()
    train(weight, optimizer, 2)
    left, right = optimizer.states[0].sides
    before = [(side.inverse.clone(), side.condition.clone(), side.factor.clone()) for side in (left, right)]
    monkeypatch.setattr(module.torch.linalg, "eigh", failing(BOTH, shape=8))
    with caplog.at_level(logging.WARNING, logger="megatron.shampoo"):
        train(weight, optimizer, 1)
    torch.testing.assert_close(left.inverse, before[0][0], rtol=0, atol=0)
    torch.testing.assert_close(left.condition, before[0][1], rtol=0, atol=0)
    assert not torch.equal(right.inverse, before[1][0])
    assert not torch.equal(left.factor, before[0][2])
    assert left.factor.isfinite().all()
    assert failures(optimizer) == {"left": [1], "right": [0]}
    assert optimizer.metrics.failed == 1
    assert "left root of parameter 0[weight 0,0]" in caplog.text
    assert "1 in a row" in caplog.text
    assert "right root" not in caplog.text
    assert weight.isfinite().all()


def lower(factor: Tensor) -> Tensor:
    """The symmetric matrix whose lower triangle this is."""
    return factor.tril() + factor.tril(-1).mT


def exact_root(optimizer: Shampoo, root: int) -> Tensor:
    """Inverse root of the left factor of the only block, in float64."""
    state = optimizer.states[0]
    assert state.left is not None
    weight = 1 - optimizer.config.factor_beta ** int(state.num_updates[0])
    factor = lower(state.left.factor[0].double()) / weight
    values, basis = EIGH(factor)
    damped = values.clamp_min(0) + optimizer.config.epsilon * values.max()
    return basis @ torch.diag(damped ** (-1 / root)) @ basis.mT


def test_three_failures_in_a_row_leave_the_identity_and_an_error_with_the_blocks_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weight, optimizer = make()
    train(weight, optimizer, 2)
    left, right = optimizer.states[0].sides
    kept = left.inverse.clone()
    monkeypatch.setattr(module.torch.linalg, "eigh", failing(BOTH, shape=8))
    for count in (1, 2):
        train(weight, optimizer, 1)
        assert failures(optimizer) == {"left": [count], "right": [0]}
        torch.testing.assert_close(left.inverse, kept, rtol=0, atol=0)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    train(weight, optimizer, 1)
    torch.testing.assert_close(left.inverse, torch.eye(8)[None], rtol=0, atol=0)
    assert not torch.equal(right.inverse, torch.eye(6)[None])
    assert failures(optimizer) == {"left": [3], "right": [0]}
    (error,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert error.startswith("left root of parameter 0[weight 0,0]: every solver failed 3 times in a row")
    assert "--shampoo-epsilon" in error
    # It goes on as long as it fails, and with the roots as soon as it does not.
    train(weight, optimizer, 2)
    assert failures(optimizer) == {"left": [5], "right": [0]}
    assert weight.isfinite().all()
    monkeypatch.setattr(module.torch.linalg, "eigh", EIGH)
    train(weight, optimizer, 1)
    assert failures(optimizer) == {"left": [0], "right": [0]}
    torch.testing.assert_close(left.inverse[0].double(), exact_root(optimizer, 4), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ROOTED)
def test_a_block_without_any_root_takes_its_grafting_step(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # With the identity for both roots a direction is the momentum, grafted: with SGD's norm that is SGD's step.
    weight, optimizer = make(method=method, grafting="sgd")
    train(weight, optimizer, 2)
    monkeypatch.setattr(module.torch.linalg, "eigh", failing(BOTH))
    train(weight, optimizer, 2)
    for seed in (7, 8):
        before = weight.detach().clone()
        train(weight, optimizer, 1, seed=seed)
        momentum = optimizer.state[weight]["exp_avg"] / (1 - 0.9 ** int(optimizer.state[weight]["step"]))
        torch.testing.assert_close(weight.detach(), before - 0.01 * momentum, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", IN_A_BASIS)
@pytest.mark.parametrize("solver", ["eigh", "qr"])
def test_an_eigenbasis_that_fails_stays_then_becomes_the_identity_then_recovers(
    method: str, solver: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weight, optimizer = make(method=method, solver=solver)
    train(weight, optimizer, 3)
    left, right = optimizer.states[0].sides
    kept = left.inverse.clone(), right.inverse.clone()
    monkeypatch.setattr(module.torch.linalg, "eigh", failing(BOTH))
    monkeypatch.setattr(torch.linalg, "qr", lambda matrix: raising(matrix))
    train(weight, optimizer, 2)
    torch.testing.assert_close((left.inverse, right.inverse), kept, rtol=0, atol=0)
    assert optimizer.metrics.failed == 2
    train(weight, optimizer, 1)
    torch.testing.assert_close((left.inverse, right.inverse), (torch.eye(8)[None], torch.eye(6)[None]), rtol=0, atol=0)
    assert failures(optimizer) == {"left": [3], "right": [3]}
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    for side, error in zip(("left", "right"), sorted(errors), strict=True):
        assert error.startswith(f"{side} eigenbasis of parameter 0[weight 0,0]: every solver failed 3 times in a row")
    train(weight, optimizer, 1)
    monkeypatch.undo()
    train(weight, optimizer, 1)
    assert failures(optimizer) == {"left": [0], "right": [0]}
    assert optimizer.metrics.failed == 0
    assert weight.isfinite().all()
    # As good a basis as that of a run in which nothing has failed.
    train(weight, optimizer, 3)
    for side in (left, right):
        basis, factor = side.inverse[0], lower(side.factor[0])
        torch.testing.assert_close(basis.mT @ basis, torch.eye(side.size), rtol=0, atol=1e-5)
        rotated = basis.mT @ factor @ basis
        off_diagonal = float((rotated - rotated.diagonal().diag()).norm() / rotated.norm())
        assert off_diagonal < {"eigh": 1e-4, "qr": 0.3}[solver]


def raising(matrix: Tensor) -> None:
    """A solver that overwrites its input and raises."""
    matrix.fill_(torch.nan)
    raise torch.linalg.LinAlgError("the algorithm failed to converge")


@pytest.mark.parametrize("method", ["soap", "kl-soap"])
def test_what_is_kept_in_the_basis_is_carried_to_the_identity(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The diagonal of Q diag(v) Q' is its variance in the new coordinates: the total stays.
    weight, optimizer = make(method=method)
    train(weight, optimizer, 3)
    state = optimizer.states[0]
    monkeypatch.setattr(module.torch.linalg, "eigh", failing(BOTH))
    weight_decay_free = weight.detach().clone()
    train(weight, optimizer, 2)
    assert state.second_moment is not None and state.left is not None and state.right is not None
    before = state.second_moment[0].double()
    bases = [side.inverse[0].double() for side in state.sides]
    weight.grad = torch.zeros(8, 6)  # adds nothing to the second moment
    optimizer.step()
    decayed = optimizer.param_groups[0]["betas"][1] * before
    carried = bases[0].square() @ decayed @ bases[1].square().mT
    torch.testing.assert_close(state.second_moment[0].double(), carried, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(carried.sum(), decayed.sum())
    assert not torch.equal(weight.detach(), weight_decay_free)


def root_error(optimizer: Shampoo) -> float:
    """Of the left root of the only block, relative."""
    exact, (left, _) = exact_root(optimizer, 4), optimizer.states[0].sides
    return float((left.inverse[0].double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("solver", "refreshes"), [("eigh", 1), ("qr", 12), ("newton", 1), ("newton-db", 1)])
def test_a_block_that_was_given_up_recovers_its_root(
    solver: str, refreshes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By QR the eigenbasis is found again from the identity, over some refreshes.
    weight, optimizer = make(solver=solver, epsilon=1e-4)
    twin_weight, twin = make(solver=solver, epsilon=1e-4)
    train(weight, optimizer, 3)
    train(twin_weight, twin, 3)
    with monkeypatch.context() as broken:
        broken.setattr(module.torch.linalg, "eigh", failing(BOTH))
        broken.setattr(torch.linalg, "qr", raising)
        broken.setattr(torch.linalg, "matrix_power", lambda matrix, power: torch.full_like(matrix, torch.nan))
        train(weight, optimizer, 3)
    train(twin_weight, twin, 3)
    left, _ = optimizer.states[0].sides
    torch.testing.assert_close(left.inverse, torch.eye(8)[None], rtol=0, atol=0)
    assert root_error(optimizer) > 0.1
    train(weight, optimizer, refreshes)
    train(twin_weight, twin, refreshes)
    # The factors are those of the twin, which never failed: they do not depend on the roots.
    torch.testing.assert_close(left.factor, twin.states[0].sides[0].factor, rtol=0, atol=0)
    assert root_error(optimizer) < 3 * root_error(twin) + 1e-3


def test_a_tolerance_does_not_keep_a_block_that_was_given_up_at_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    # Gradients along the axes have diagonal factors, of which the identity is an eigenbasis but no root.
    weight, optimizer = make((4, 4), solver="qr", refresh_tolerance=0.5)
    monkeypatch.setattr(module.torch.linalg, "eigh", failing(BOTH))
    monkeypatch.setattr(torch.linalg, "qr", raising)
    for step in range(8):
        weight.grad = torch.diag(torch.tensor([1.0, 2.0, 4.0, 8.0]))
        optimizer.step()
        if step == 3:
            monkeypatch.undo()
    assert failures(optimizer) == {"left": [0], "right": [0]}
    left, _ = optimizer.states[0].sides
    torch.testing.assert_close(left.inverse[0].double(), exact_root(optimizer, 4), rtol=1e-4, atol=1e-5)


def test_a_success_between_failures_begins_the_count_again(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, optimizer = make()
    for _ in range(3):
        monkeypatch.setattr(module.torch.linalg, "eigh", failing(BOTH))
        train(weight, optimizer, 2)
        assert failures(optimizer) == {"left": [2], "right": [2]}
        monkeypatch.setattr(module.torch.linalg, "eigh", EIGH)
        train(weight, optimizer, 1)
        assert failures(optimizer) == {"left": [0], "right": [0]}


def test_failures_before_the_first_root_take_the_grafting_step(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, optimizer = make(grafting="sgd")
    before = weight.detach().clone()
    monkeypatch.setattr(module.torch.linalg, "eigh", failing(BOTH))
    train(weight, optimizer, 1)
    assert weight.grad is not None
    torch.testing.assert_close(weight.detach(), before - 0.01 * weight.grad)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_factor_that_is_not_finite_never_reaches_a_root(bad: float) -> None:
    # The state of one of four blocks is spoilt; the others go on as if nothing had happened.
    weight, optimizer = make((8, 6), block_size=4)
    twin_weight, twin = make((8, 6), block_size=4)
    train(weight, optimizer, 2)
    train(twin_weight, twin, 2)
    left, _ = optimizer.states[0].sides
    left.factor[1, 0, 0] = bad
    train(weight, optimizer, 2, seed=5)
    train(twin_weight, twin, 2, seed=5)
    assert failures(optimizer) == {"left": [0, 2, 0, 0], "right": [0, 0, 0, 0]}
    assert left.inverse.isfinite().all()
    assert weight.isfinite().all()
    others = torch.ones_like(weight, dtype=torch.bool)
    others[0:4, 3:6] = False
    torch.testing.assert_close(weight[others], twin_weight[others], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", [*Method])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_never_reaches_a_factor(bad: float, method: str) -> None:
    weight, optimizer = make((8, 6), block_size=4, method=method)
    train(weight, optimizer, 2)
    assert weight.grad is not None
    weight.grad[0, 5] = bad
    optimizer.step()
    train(weight, optimizer, 5)
    for name, tensor in optimizer.states[0].state_dict().items():
        assert tensor.isfinite().all(), name
    # As with AdamW the element itself is lost; of the four blocks only its own takes harm.
    others = torch.ones_like(weight, dtype=torch.bool)
    others[0:4, 3:6] = False
    assert weight[others].isfinite().all()


def test_state_of_other_blocks_is_refused_with_the_reason() -> None:
    _, optimizer = make((8, 6), block_size=4)
    _, other = make((8, 6), block_size=3)
    _, wider = make((8, 9), block_size=4)
    state = optimizer.states[0]
    with pytest.raises(ValueError, match="the block grid or the owners differ"):
        state.load_state_dict(wider.states[0].state_dict())
    with pytest.raises(ValueError, match="expected"):
        state.load_state_dict({"scale": state.scale})
    with pytest.raises(ValueError, match="stacks"):
        optimizer.load_block_state_dict(other.block_state_dict())


@pytest.mark.parametrize(
    ("saved", "loading"),
    [
        ({"method": "soap"}, {"method": "shampoo"}),
        ({"method": "soap"}, {"method": "kl-soap"}),
        ({"method": "kl-soap"}, {"method": "kl-shampoo"}),
        ({"side": "left"}, {"side": "both"}),
        ({"solver": "qr"}, {"solver": "eigh"}),
    ],
    ids=["method", "estimator", "application", "side", "solver"],
)
def test_state_of_another_method_is_refused_with_the_flags_that_may_differ(
    saved: dict[str, str], loading: dict[str, str]
) -> None:
    _, optimizer = make(**saved)
    _, other = make(**loading)
    before = {name: tensor.clone() for name, tensor in other.states[0].state_dict().items()}
    with pytest.raises(ValueError, match=r"another --shampoo-method, --shampoo-side or --shampoo-solver saved it"):
        other.load_block_state_dict(optimizer.block_state_dict())
    for name, tensor in other.states[0].state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
