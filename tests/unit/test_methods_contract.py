"""What holds for every method: resuming, gradients that are missing, zero, tiny or huge, determinism, precision."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.shampoo import Shampoo, ShampooConfig
from megatron.shampoo.config import Grafting, Method, MomentumPlacement, Solver
from megatron.shampoo.methods import Application, recipe_of
from megatron.shampoo.preconditioner import factors

METHODS = [method.value for method in Method]
CASES: list[dict[str, Any]] = [{"method": method} for method in METHODS]
CASES += [{"method": method, "solver": "qr"} for method in METHODS]
CASES += [
    {"method": method, "solver": solver} for method in ("shampoo", "one-sided") for solver in ("newton", "newton-db")
]
CASES += [{"method": method, "momentum_placement": "after", "nesterov": True} for method in METHODS]
CASES += [{"method": "shampoo", "root": 2}, {"method": "soap", "side": "right"}, {"method": "shampoo", "side": "left"}]
NAMES = ["-".join(str(value) for value in case.values()) for case in CASES]
every_case = pytest.mark.parametrize("case", CASES, ids=NAMES)


def make(case: dict[str, Any], seed: int = 0) -> tuple[list[nn.Parameter], Shampoo]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(12, 10), (6, 16), (5,)]
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    config = ShampooConfig(**{"block_size": 6, "refresh_interval": 3, **case})
    return weights, Shampoo(weights, lr=0.01, weight_decay=0.1, config=config)


def step(weights: Sequence[nn.Parameter], optimizer: Shampoo, number: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(number)
    for weight in weights:
        weight.grad = scale * torch.randn(weight.shape, generator=generator)
    optimizer.step()


def everything(weights: Sequence[nn.Parameter], optimizer: Shampoo) -> list[Tensor]:
    moments = [value for weight in weights for value in optimizer.state[weight].values()]
    stacks = [value for state in optimizer.states for value in state.state_dict().values()]
    return [tensor.detach().clone() for tensor in [*weights, *moments, *stacks]]


def assert_equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def test_the_cases_name_every_method_placement_and_solver() -> None:
    assert {case["method"] for case in CASES} == set(METHODS)
    assert {case.get("solver", "auto") for case in CASES} | {"eigh"} == {solver.value for solver in Solver}
    assert {case.get("momentum_placement", "before") for case in CASES} == {it.value for it in MomentumPlacement}


@every_case
def test_goes_on_bit_for_bit_from_a_saved_state(case: dict[str, Any]) -> None:
    weights, optimizer = make(case)
    for number in range(5):
        step(weights, optimizer, number)
    state = copy.deepcopy(optimizer.state_dict())
    others, resumed = make(case, seed=1)
    with torch.no_grad():
        for mine, theirs in zip(others, weights, strict=True):
            mine.copy_(theirs)
    resumed.load_state_dict(state)
    for number in range(5, 10):
        step(weights, optimizer, number)
        step(others, resumed, number)
    assert_equal(everything(weights, optimizer), everything(others, resumed))


@every_case
def test_two_runs_are_the_same_bit_for_bit(case: dict[str, Any]) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            weights, optimizer = make(case)
            for number in range(6):
                step(weights, optimizer, number)
            runs.append(everything(weights, optimizer))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_equal(*runs)


@every_case
def test_the_first_step_changes_every_matrix(case: dict[str, Any]) -> None:
    weights, optimizer = make(case)
    before = [weight.detach().clone() for weight in weights]
    step(weights, optimizer, 0)
    for mine, old in zip(weights, before, strict=True):
        moved = mine.detach() - old * (1 - 0.01 * 0.1)
        assert bool((moved != 0).float().mean() > 0.9)


@every_case
def test_a_parameter_without_gradient_and_its_state_stay_as_they_are(case: dict[str, Any]) -> None:
    weights, optimizer = make(case)
    for number in range(4):
        step(weights, optimizer, number)
    before, others = everything(weights, optimizer), [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.grad = None
    optimizer.step()
    assert_equal(before, everything(weights, optimizer))
    weights[0].grad = torch.randn(weights[0].shape)
    optimizer.step()
    assert not torch.equal(weights[0], others[0])
    for weight, old in zip(weights[1:], others[1:], strict=True):
        torch.testing.assert_close(weight.detach(), old, rtol=0, atol=0)
    counts = {
        name: int(n) for state in optimizer.states for name, n in zip(state.names, state.num_updates, strict=True)
    }
    assert {n for name, n in counts.items() if name.startswith("parameter 0")} == {5}
    assert {n for name, n in counts.items() if name.startswith("parameter 1")} == {4}


@every_case
def test_zero_gradients_from_the_start_and_later(case: dict[str, Any]) -> None:
    weights, optimizer = make(case)
    start = [weight.detach().clone() for weight in weights]
    for _ in range(4):
        step(weights, optimizer, 0, scale=0.0)
    for weight, old in zip(weights, start, strict=True):
        torch.testing.assert_close(weight.detach(), old * (1 - 0.01 * 0.1) ** 4)
    for number in range(1, 5):
        step(weights, optimizer, number)
    for _ in range(20):
        step(weights, optimizer, 0, scale=0.0)
    step(weights, optimizer, 9)
    assert all(bool(tensor.isfinite().all()) for tensor in [*weights, *_products(optimizer)])


@every_case
@pytest.mark.parametrize("scale", [1e8, 1e-20])
def test_gradients_of_any_size_give_the_same_direction(case: dict[str, Any], scale: float) -> None:
    """Adam's absolute epsilon, in the graft and in the basis, is what may shorten the steps for tiny gradients."""
    # The squares of 1e-20 are zero in float32, and with them the second moment that the graft divides by.
    underflows = recipe_of(ShampooConfig(**case)).grafting is Grafting.ADAM and scale < 1e-10
    runs = []
    for factor in (1.0, scale):
        weights, optimizer = make(case)
        for group in optimizer.param_groups:
            group.update(eps=1e-8 if underflows else 0.0, weight_decay=0.0)
        before = [weight.detach().clone() for weight in weights[:2]]
        for number in range(5):
            step(weights, optimizer, number, factor)
        assert all(bool(tensor.isfinite().all()) for tensor in [*weights[:2], *_products(optimizer)])
        runs.append([mine.detach() - old for mine, old in zip(weights, before, strict=False)])
    for plain, scaled in zip(*runs, strict=True):
        if underflows:
            assert float(scaled.norm()) < 1e-6 * float(plain.norm())  # as short as Adam's
            continue
        torch.testing.assert_close(scaled, plain, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("method", METHODS)
def test_steps_stay_bounded_whatever_the_gradients_do(method: str) -> None:
    weights, optimizer = make({"method": method})
    generator = torch.Generator().manual_seed(3)
    for scale in (1e-20, 1.0, 1e12, 1e-6, 0.0, 1e15, 1e-12, 1.0):
        before = weights[0].detach().clone()
        weights[0].grad = scale * torch.randn(12, 10, generator=generator)
        optimizer.step()
        moved = (weights[0].detach() - before * (1 - 0.001)) / 0.01
        assert float(moved.square().mean().sqrt()) < 40, (
            scale
        )  # Adam's own step after such a jump is up to 1/sqrt(1-b2)


@pytest.mark.parametrize(
    ("method", "field", "tensor"),
    [*((method, "factor_dtype", "factor") for method in METHODS), ("shampoo", "root_dtype", "inverse")],
)
def test_storage_in_bfloat16_halves_it_and_stays_close(method: str, field: str, tensor: str) -> None:
    runs = []
    for precision in ("fp32", "bf16"):
        weights, optimizer = make({"method": method, field: precision})
        before = weights[0].detach().clone()
        for number in range(6):
            step(weights, optimizer, number)
        stored = getattr(optimizer.states[0].sides[0], tensor)
        assert stored.element_size() == (4 if precision == "fp32" else 2)
        runs.append(weights[0].detach() - before)
    difference = float((runs[0] - runs[1]).norm() / runs[0].norm())
    assert 0 < difference < 0.35, difference


@pytest.mark.parametrize("settings", [{}, {"method": "one-sided", "root": 4}, {"max_dim": 40, "root": 4}])
@pytest.mark.parametrize("left", ["ones", "random"])
def test_fourth_roots_in_bfloat16_descend_along_a_gradient_of_rank_one(settings: dict[str, Any], left: str) -> None:
    generator = torch.Generator().manual_seed(0)
    vector = torch.ones(32) if left == "ones" else torch.randn(32, generator=generator)
    gradient = torch.outer(vector, torch.randn(48, generator=generator))
    weight = nn.Parameter(torch.zeros(32, 48))
    config = ShampooConfig(root_dtype="bf16", refresh_interval=1, **settings)  # type: ignore[arg-type]
    optimizer = Shampoo([weight], lr=1.0, betas=(0.0, 0.95), config=config)
    for number in range(12):
        before = weight.detach().clone()
        weight.grad = gradient * (1 + 0.1 * number)
        optimizer.step()
        assert torch.cosine_similarity((before - weight).flatten(), gradient.flatten(), dim=0) > 0.9


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("growth", [1e30, 1e37, 1e40, 1e60])
def test_gradients_that_grow_beyond_all_bounds_leave_weights_finite(method: str, growth: float) -> None:
    weights, optimizer = make({"method": method})
    for number in range(24):
        weights[0].grad = torch.full((12, 10), 1e-25 if number < 5 else 1e-25 * growth)
        optimizer.step()
        assert weights[0].isfinite().all(), number


@pytest.mark.parametrize("method", ["kl-soap", "kl-shampoo"])
@pytest.mark.parametrize("factor_beta", [0.0, 0.5])
def test_eigenvalues_outlive_gradients_whose_squares_underflow(method: str, factor_beta: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weights, optimizer = make({"method": method, "factor_beta": factor_beta})
    for number in range(30):
        scale = 1e-24 if number in (10, 11) else 1.0
        weights[0].grad = scale * torch.randn(12, 10, generator=generator)
        optimizer.step()
        for state in optimizer.states:
            for side in state.sides:
                assert side.eigenvalues is None or side.eigenvalues.isfinite().all(), number


@pytest.mark.parametrize("method", ["soap", "kl-soap", "kl-shampoo"])
def test_a_refresh_is_skipped_while_the_old_basis_fits(method: str) -> None:
    counts = []
    for tolerance in (0.0, 0.9):
        weights, optimizer = make({"method": method, "refresh_interval": 1, "refresh_tolerance": tolerance})
        skipped = 0
        for _ in range(6):
            step(weights, optimizer, 0)  # the same gradient: its eigenbasis fits for ever
            skipped += optimizer.metrics.skipped
        counts.append((optimizer.num_root_computations, skipped))
    factors = sum(len(state.stack.blocks) * len(state.sides) for state in optimizer.states)
    assert counts == [(6 * factors, 0), (factors, 5 * factors)]


def test_equal_blocks_are_computed_in_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    bmm = torch.bmm

    def counted(a: Tensor, b: Tensor) -> Tensor:
        shapes.append(tuple(a.shape))
        return bmm(a, b)

    monkeypatch.setattr(torch, "bmm", counted)
    weights = [nn.Parameter(torch.randn(8, 8)) for _ in range(5)]
    optimizer = Shampoo(weights, config=ShampooConfig(block_size=4, refresh_interval=10))
    step(weights, optimizer, 0)
    assert shapes == [(20, 4, 4)] * 4  # one for each factor, and one for each root


@pytest.mark.parametrize("method", METHODS)
def test_batched_equals_looped(method: str) -> None:
    """Many blocks in one optimizer step as each block by itself does."""
    config = ShampooConfig(method=method, block_size=4, refresh_interval=1)
    whole = nn.Parameter(torch.randn(8, 12, generator=torch.Generator().manual_seed(0)))
    places = list(itertools.product(range(0, 8, 4), range(0, 12, 4)))
    pieces = [nn.Parameter(whole.detach()[i : i + 4, j : j + 4].clone()) for i, j in places]
    together, apart = Shampoo([whole], config=config), [Shampoo([piece], config=config) for piece in pieces]
    for number in range(6):
        step([whole], together, number)
        for (i, j), piece, optimizer in zip(places, pieces, apart, strict=True):
            assert whole.grad is not None
            piece.grad = whole.grad[i : i + 4, j : j + 4].clone()
            optimizer.step()
    for (i, j), piece in zip(places, pieces, strict=True):
        torch.testing.assert_close(whole[i : i + 4, j : j + 4], piece, rtol=1e-4, atol=1e-6)


def test_without_factors_it_is_adamw_bit_for_bit() -> None:
    weights, optimizer = make({"max_dim": 0})
    plain = [nn.Parameter(weight.detach().clone()) for weight in weights]
    adamw = torch.optim.AdamW(plain, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for number in range(5):
        step(weights, optimizer, number)
        for mine, theirs in zip(weights, plain, strict=True):
            assert mine.grad is not None
            theirs.grad = mine.grad.clone()
        adamw.step()
    assert_equal([weight.detach() for weight in weights], [weight.detach() for weight in plain])
    assert optimizer.states == []


def test_a_side_above_the_limit_has_no_factor() -> None:
    _, optimizer = make({"max_dim": 10})
    sides = {state.names[0].split("[")[0]: state.stack.sides for state in optimizer.states}
    assert sides == {"parameter 0": (False, True), "parameter 1": (True, False)}


def test_application_decides_what_is_kept() -> None:
    for method in METHODS:
        _, optimizer = make({"method": method})
        has_moment = all(state.second_moment is not None for state in optimizer.states)
        assert has_moment is (recipe_of(optimizer.config).application is Application.ADAM)


def _products(optimizer: Shampoo) -> list[Tensor]:
    return [side.inverse for state in optimizer.states for side in state.sides]


def test_a_compiled_step_is_the_eager_step() -> None:
    def train(compiles: bool) -> list[Tensor]:
        weights, optimizer = make({"method": "soap"})

        def take() -> None:
            optimizer.step()

        stepper = torch.compile(take, backend="eager") if compiles else take
        for number in range(6):
            generator = torch.Generator().manual_seed(number)
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            stepper()
        return everything(weights, optimizer)

    assert_equal(train(compiles=False), train(compiles=True))


@pytest.mark.parametrize("first", [1e-39, 1.5e-38, 1e-20, 1e15, 2e38])
@pytest.mark.parametrize("method", METHODS)
def test_a_strange_first_gradient_is_forgotten(method: str, first: float) -> None:
    """The scale of products follows gradients that grow, so later steps are those of ordinary gradients."""
    generator = torch.Generator().manual_seed(5)
    lengths = []
    for start in (1.0, first):
        weights, optimizer = make({"method": method, "refresh_interval": 1})
        weights[0].grad = start * torch.ones(12, 10)
        optimizer.step()
        generator.manual_seed(5)
        steps = 80 if start > 1 else 12
        for _ in range(steps):
            before = weights[0].detach().clone()
            weights[0].grad = torch.randn(12, 10, generator=generator)
            optimizer.step()
        moved = (weights[0].detach() - before * (1 - 0.001)) / 0.01
        assert bool(moved.isfinite().all())
        lengths.append(float(moved.square().mean().sqrt()))
    if first < 1:
        assert 0.4 * lengths[0] < lengths[1] < 2.5 * lengths[0], lengths
    assert all(bool(tensor.isfinite().all()) for tensor in _products(optimizer))


@every_case
def test_rescaling_the_state_changes_no_direction(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that is raised at the second gradient, by 2^24, against one that is left."""
    runs, scales = [], []
    for growth in (2.0**20, 2.0**60):
        monkeypatch.setattr(factors, "MAX_GROWTH", growth)
        weights, optimizer = make(case)
        for group in optimizer.param_groups:
            group.update(eps=0.0)
        for number in range(8):
            step(weights, optimizer, number, 2.0**-24 if number == 0 else 1.0)
        runs.append([weight.detach().clone() for weight in weights])
        scales.append(float(optimizer.states[0].scale[0]))
    assert scales[0] > 2.0**20 * scales[1]
    for mine, theirs in zip(*runs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def test_skipped_refreshes_of_roots_still_follow_the_eigenvalues() -> None:
    weight = nn.Parameter(torch.zeros(6, 6))
    config = ShampooConfig(solver="qr", refresh_tolerance=0.5, refresh_interval=1, grafting="none", update_rms_clip=0)
    optimizer = Shampoo([weight], lr=1.0, betas=(0.0, 0.95), config=config)
    sizes = torch.tensor([100.0, 10.0, 1.0, 1.0, 0.1, 0.01])
    for number in range(200):
        before = weight.detach().clone()
        weight.grad = torch.diag(sizes if number < 5 else sizes.flip(0))
        optimizer.step()
    # For diagonal gradients the direction of fourth roots is the sign, but for the damping of the smallest ones.
    assert optimizer.metrics.skipped == 2
    moved = (before - weight.detach()).diagonal()
    torch.testing.assert_close(moved[2:], torch.ones(4), rtol=0.1, atol=0.1)


def test_independent_decay_needs_a_learning_rate_to_be_relative_to() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = Shampoo([weight], lr=0.0, weight_decay=0.1, config=ShampooConfig(weight_decay_mode="independent"))
    optimizer.param_groups[0]["lr"] = 0.1
    weight.grad = torch.ones(4, 4)
    with pytest.raises(ValueError, match="highest learning rate"):
        optimizer.step()


def test_a_step_under_autocast_is_the_step_without() -> None:
    runs = []
    for enabled in (False, True):
        weights, optimizer = make({"method": "soap"})
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            for number in range(4):
                step(weights, optimizer, number)
        runs.append(everything(weights, optimizer))
    assert_equal(*runs)
