"""What weight decay does in each of its modes, to matrices that are preconditioned and to parameters that are not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.shampoo import Shampoo, ShampooConfig
from megatron.shampoo.config import Method

LR, DECAY, STEPS = 0.02, 0.3, 6
OPTIONS: list[dict[str, Any]] = [
    *({"method": method} for method in Method),
    {"grafting": "none"},
    {"grafting": "sgd", "start_step": 3},
    {"momentum_placement": "after", "nesterov": True},
    {"method": "soap", "momentum_placement": "after"},
]
"""The decay is the same whatever makes the step."""
EVERYTHING = pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(map(str, options.values())))


def start() -> list[Tensor]:
    """A matrix in several blocks, a vector and a matrix with one column, which AdamW trains."""
    generator = torch.Generator().manual_seed(0)
    shapes: tuple[tuple[int, ...], ...] = ((7, 5), (6,), (4, 1))
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(tensor.shape, generator=generator, dtype=torch.float64) for tensor in start()]


def make(options: dict[str, Any], mode: str, decay: float = DECAY, **group: Any) -> tuple[list[nn.Parameter], Shampoo]:
    weights = [nn.Parameter(tensor) for tensor in start()]
    config = ShampooConfig(**{"block_size": 4, "refresh_interval": 2, "weight_decay_mode": mode, **options})
    return weights, Shampoo([{"params": weights, **group}], lr=LR, weight_decay=decay, config=config)


def step(weights: Sequence[nn.Parameter], optimizer: Shampoo, given: Sequence[Tensor]) -> None:
    for weight, gradient in zip(weights, given, strict=True):
        weight.grad = gradient.clone()
    optimizer.step()


def rates(number: int) -> float:
    """A schedule that warms up to the peak, LR, and decays."""
    return LR * (0.25, 1.0, 0.7, 0.4, 0.1, 0.0)[number]


Shrink = Callable[[float], float]


@EVERYTHING
@pytest.mark.parametrize(
    ("mode", "shrink"),
    [("decoupled", lambda lr: 1 - lr * DECAY), ("independent", lambda lr: 1 - lr / LR * DECAY)],
    ids=["decoupled", "independent"],
)
def test_weights_shrink_and_then_take_the_step_of_a_run_without_decay(
    options: dict[str, Any], mode: str, shrink: Shrink
) -> None:
    # Gradients that do not depend on the weights: the steps are those of the run without decay.
    weights, optimizer = make(options, mode)
    plain, without = make(options, mode, decay=0.0)
    for number in range(STEPS):
        before = [weight.detach().clone() for weight in weights]
        old = [weight.detach().clone() for weight in plain]
        for one in (optimizer, without):
            one.param_groups[0]["lr"] = rates(number)
        step(weights, optimizer, gradients(number))
        step(plain, without, gradients(number))
        for weight, mine, other, theirs in zip(weights, before, plain, old, strict=True):
            expected = shrink(rates(number)) * mine + (other - theirs)
            torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-12)


@EVERYTHING
def test_the_l2_penalty_is_part_of_the_gradient(options: dict[str, Any]) -> None:
    # In everything that gradients are in: moments, factors, bases, grafting.
    weights, optimizer = make(options, "l2")
    penalised, without = make(options, "l2", decay=0.0)
    for number in range(STEPS):
        own = gradients(number)
        added = [gradient + DECAY * weight.detach() for gradient, weight in zip(own, penalised, strict=True)]
        step(weights, optimizer, own)
        step(penalised, without, added)
        for weight, other in zip(weights, penalised, strict=True):
            torch.testing.assert_close(weight, other, rtol=1e-9, atol=1e-9)
    assert not torch.equal(weights[0].detach(), start()[0])
    for mine, theirs in zip(optimizer.block_state_dict(), without.block_state_dict(), strict=True):
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-6, atol=1e-9, equal_nan=True)


def test_the_l2_penalty_leaves_the_gradients_alone() -> None:
    weights, optimizer = make({}, "l2")
    step(weights, optimizer, gradients(0))
    for weight, gradient in zip(weights, gradients(0), strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=0, atol=0)


def test_modes_are_told_apart() -> None:
    found = {}
    for mode in ("decoupled", "independent", "l2"):
        weights, optimizer = make({}, mode)
        for number in range(3):
            step(weights, optimizer, gradients(number))
        found[mode] = weights
    for one, other in (("decoupled", "independent"), ("decoupled", "l2"), ("independent", "l2")):
        for mine, theirs in zip(found[one], found[other], strict=True):
            assert (mine - theirs).abs().max() > 1e-3


@pytest.mark.parametrize("mode", ["decoupled", "independent", "l2"])
def test_what_is_not_preconditioned_is_torchs_optimizer(mode: str) -> None:
    weights, optimizer = make({}, mode)
    theirs = [nn.Parameter(tensor) for tensor in start()[1:]]
    # Independent of the rate: AdamW multiplies its decay by the rate, so it gets what that leaves at the peak.
    decay = DECAY / LR if mode == "independent" else DECAY
    kind = torch.optim.Adam if mode == "l2" else torch.optim.AdamW
    other = kind(theirs, lr=LR, betas=(0.9, 0.95), weight_decay=decay)
    for number in range(STEPS):
        for one in (optimizer, other):
            one.param_groups[0]["lr"] = rates(number)
        step(weights, optimizer, gradients(number))
        for weight, gradient in zip(theirs, gradients(number)[1:], strict=True):
            weight.grad = gradient
        other.step()
    for mine, their in zip(weights[1:], theirs, strict=True):
        torch.testing.assert_close(mine, their, rtol=0, atol=0)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_the_peak_is_the_groups_own_where_megatron_names_it(decay: float) -> None:
    # Megatron's groups come with the rate of the first warm-up step, and the peak beside it.
    weights, optimizer = make({}, "independent", decay, lr=1e-6, max_lr=0.1)
    optimizer.param_groups[0]["lr"] = 0.05
    step(weights, optimizer, [torch.zeros_like(tensor) for tensor in start()])
    for weight, old in zip(weights, start(), strict=True):
        torch.testing.assert_close(weight.detach(), (1 - decay * 0.05 / 0.1) * old, rtol=1e-12, atol=1e-12)


def test_groups_have_peaks_of_their_own() -> None:
    tensors = start()
    weights = [nn.Parameter(tensor.clone()) for tensor in (tensors[0], tensors[0], tensors[1])]
    groups = [{"params": [weight], "lr": lr} for weight, lr in zip(weights, (0.1, 0.2, 0.4), strict=True)]
    config = ShampooConfig(weight_decay_mode="independent")  # type: ignore[arg-type]
    optimizer = Shampoo(groups, weight_decay=0.5, config=config)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    step(weights, optimizer, [torch.zeros_like(weight) for weight in weights])
    for weight, peak in zip(weights, (0.1, 0.2, 0.4), strict=True):
        old = tensors[0] if weight.ndim == 2 else tensors[1]
        torch.testing.assert_close(weight.detach(), (1 - 0.5 * 0.1 / peak) * old, rtol=1e-12, atol=1e-12)


def test_a_resumed_run_keeps_the_peak_it_was_made_with() -> None:
    # The rate that a checkpoint holds is that of its last step, in the middle of the schedule.
    weights, optimizer = make({}, "independent")
    optimizer.param_groups[0]["lr"] = 0.5 * LR
    step(weights, optimizer, gradients(0))
    resumed, again = make({}, "independent")
    with torch.no_grad():
        for mine, theirs in zip(resumed, weights, strict=True):
            mine.copy_(theirs)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number in (1, 2):
        step(weights, optimizer, gradients(number))
        step(resumed, again, gradients(number))
    for mine, theirs in zip(resumed, weights, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["decoupled", "independent", "l2"])
def test_a_group_with_a_rate_of_zero_stays(mode: str) -> None:
    weights, optimizer = make({}, mode, lr=0.0)
    for number in range(2):
        step(weights, optimizer, gradients(number))
    for weight, old in zip(weights, start(), strict=True):
        torch.testing.assert_close(weight.detach(), old, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["decoupled", "independent"])
def test_what_has_no_gradient_does_not_decay(mode: str) -> None:
    weights, optimizer = make({}, mode)
    for weight in weights:
        weight.grad = None
    optimizer.step()
    for weight, old in zip(weights, start(), strict=True):
        torch.testing.assert_close(weight.detach(), old, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["decoupled", "independent", "l2"])
def test_bf16_weights_follow_float32_to_their_rounding(mode: str) -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        weights = [nn.Parameter(tensor.bfloat16().to(dtype)) for tensor in start()]
        config = ShampooConfig(block_size=4, weight_decay_mode=mode)  # type: ignore[arg-type]
        optimizer = Shampoo(weights, lr=LR, weight_decay=DECAY, config=config)
        for number in range(3):
            step(weights, optimizer, [gradient.bfloat16().to(dtype) for gradient in gradients(number)])
        found.append([weight.detach().float() for weight in weights])
    for full, short in zip(*found, strict=True):
        torch.testing.assert_close(short, full, rtol=2**-6, atol=2**-7)
