"""Adam's steps in one pass over memory, against torch's optimizer and against the passes one by one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.shampoo.config import Grafting
from megatron.shampoo.preconditioner.moments import (
    adam_steps_,
    can_fuse,
    grafting_steps,
    momentum_weight,
    update_first_,
    update_second_,
)

BETAS, EPS = (0.9, 0.95), 1e-3
SHAPES = [(3, 5), (17,), (64, 33)]


def series(steps: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES] for _ in range(steps)]


def zeros() -> list[Tensor]:
    return [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]


def test_adam_steps_are_those_of_torchs_adam() -> None:
    parameters = [nn.Parameter(tensor) for tensor in zeros()]
    adam = torch.optim.Adam(parameters, lr=1.0, betas=BETAS, eps=EPS, foreach=False, fused=False)
    first, second, counts = zeros(), zeros(), [torch.zeros(()) for _ in SHAPES]
    for gradients in series(4):
        before = [parameter.detach().clone() for parameter in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        adam.step()
        steps = adam_steps_([gradient.clone() for gradient in gradients], first, second, counts, BETAS, EPS)
        for step, old, parameter in zip(steps, before, parameters, strict=True):
            torch.testing.assert_close(step, old - parameter.detach(), rtol=1e-12, atol=1e-12)
    for parameter, m, v, count in zip(parameters, first, second, counts, strict=True):
        state = adam.state[parameter]
        torch.testing.assert_close([m, v], [state["exp_avg"], state["exp_avg_sq"]], rtol=1e-12, atol=1e-12)
        assert count == state["step"] == 4


def test_adam_steps_are_the_passes_one_by_one_and_leave_gradients_alone() -> None:
    fused = zeros(), zeros(), [torch.zeros(()) for _ in SHAPES]
    first, second = zeros(), zeros()
    for number, gradients in enumerate(series(4), start=1):
        before = [gradient.clone() for gradient in gradients]
        steps = adam_steps_(gradients, *fused, BETAS, EPS)
        torch.testing.assert_close(gradients, before, rtol=0, atol=0)
        update_second_(gradients, second, BETAS[1], Grafting.ADAM)
        update_first_(gradients, first, BETAS[0])
        weights = [[momentum_weight(beta, number, False)] * len(SHAPES) for beta in BETAS]
        expected = grafting_steps(first, second, (weights[0], weights[1]), EPS)
        torch.testing.assert_close(steps, expected, rtol=1e-12, atol=1e-12)


def test_fusing_wants_one_type_and_memory_in_order() -> None:
    matrix = torch.ones(3, 4)
    assert can_fuse([matrix], [matrix, matrix])
    assert not can_fuse([matrix], [matrix.double()])
    assert not can_fuse([matrix], [torch.ones(4, 3).t()])
    assert not can_fuse([matrix], [torch.ones(3, 4, device="meta")])
