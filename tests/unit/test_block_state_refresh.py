"""Refresh of inverse roots: whose turn it is, and what happens when a root cannot be computed."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.shampoo import Shampoo, ShampooConfig, block_state
from megatron.shampoo.linalg import inverse_root as module

EIGH = torch.linalg.eigh


def make(shape: tuple[int, int] = (8, 6), **settings: object) -> tuple[torch.nn.Parameter, Shampoo]:
    weight = torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    config = ShampooConfig(**{"refresh_interval": 1, **settings})  # type: ignore[arg-type]
    return weight, Shampoo([weight], lr=0.01, config=config)


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
    monkeypatch.setattr(block_state, "MAX_BATCH_NUMEL", 5 * 9 + 8)
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
    assert optimizer.states[0].failures.tolist() == [[0, 0]]
    assert "left root of parameter 0[weight 0,0]" in caplog.text
    assert "right root of parameter 0[weight 0,0]" in caplog.text
    assert "computed again from a copy" in caplog.text


def test_a_failed_root_keeps_the_previous_one_and_is_counted_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weight, optimizer = make()
    train(weight, optimizer, 2)
    state = optimizer.states[0]
    left, right, condition = state.left_root.clone(), state.right_root.clone(), state.condition.clone()
    factor = state.left.clone()
    monkeypatch.setattr(module.torch.linalg, "eigh", failing(BOTH, shape=8))
    with caplog.at_level(logging.WARNING, logger="megatron.shampoo"):
        train(weight, optimizer, 1)
    torch.testing.assert_close(state.left_root, left, rtol=0, atol=0)
    torch.testing.assert_close(state.condition[:, 0], condition[:, 0], rtol=0, atol=0)
    assert not torch.equal(state.right_root, right)
    assert not torch.equal(state.left, factor)
    assert state.left.isfinite().all()
    assert state.failures.tolist() == [[1, 0]]
    assert "left root of parameter 0[weight 0,0]" in caplog.text
    assert "1 in a row" in caplog.text
    assert "right root" not in caplog.text
    assert weight.isfinite().all()


def test_three_failures_in_a_row_end_the_run_with_the_blocks_name(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, optimizer = make()
    train(weight, optimizer, 2)
    monkeypatch.setattr(module.torch.linalg, "eigh", failing(BOTH, shape=8))
    train(weight, optimizer, 2)
    assert weight.isfinite().all()
    with pytest.raises(RuntimeError, match=r"left root of parameter 0\[weight 0,0\] failed 3 times in a row"):
        train(weight, optimizer, 1)
    assert weight.isfinite().all()


def test_a_success_between_failures_begins_the_count_again(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, optimizer = make()
    for _ in range(3):
        monkeypatch.setattr(module.torch.linalg, "eigh", failing(BOTH))
        train(weight, optimizer, 2)
        assert optimizer.states[0].failures.tolist() == [[2, 2]]
        monkeypatch.setattr(module.torch.linalg, "eigh", EIGH)
        train(weight, optimizer, 1)
        assert optimizer.states[0].failures.tolist() == [[0, 0]]


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
    state = optimizer.states[0]
    state.left[1, 0, 0] = bad
    train(weight, optimizer, 2, seed=5)
    train(twin_weight, twin, 2, seed=5)
    assert state.failures.tolist() == [[0, 0], [2, 0], [0, 0], [0, 0]]
    assert state.left_root.isfinite().all()
    assert weight.isfinite().all()
    others = torch.ones_like(weight, dtype=torch.bool)
    others[0:4, 3:6] = False
    torch.testing.assert_close(weight[others], twin_weight[others], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_never_reaches_a_factor(bad: float) -> None:
    weight, optimizer = make((8, 6), block_size=4)
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
        state.load_state_dict({"left": state.left})
    with pytest.raises(ValueError, match="stacks"):
        optimizer.load_block_state_dict(other.block_state_dict())
