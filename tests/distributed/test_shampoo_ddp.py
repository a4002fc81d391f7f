"""Shampoo by itself under torch's DistributedDataParallel: every replica computes everything, and all stay equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megatron.shampoo import Shampoo, ShampooConfig
from tests.distributed._helpers import run_ranks

STEPS, NUM_RANKS = 6, 2


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))


def batches(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)


def train(model: nn.Module, parts: int, part: int) -> tuple[list[Tensor], list[float]]:
    """Train on one of equal parts of every batch."""
    # The factors of eight samples are singular: rounding of 1e-7 over the damping is what two runs may differ by.
    config = ShampooConfig(block_size=6, refresh_interval=2, epsilon=1e-3)
    optimizer = Shampoo(model.parameters(), lr=0.01, weight_decay=0.1, config=config)
    losses = []
    for step in range(STEPS):
        inputs, targets = (tensor.chunk(parts)[part] for tensor in batches(step))
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return [parameter.detach() for parameter in model.parameters()], losses


def train_replica() -> Any:
    return train(DistributedDataParallel(make_model()), NUM_RANKS, dist.get_rank())


@pytest.fixture(scope="module")
def replicas() -> list[Any]:
    return run_ranks(train_replica, NUM_RANKS)


class TestDistributedDataParallel:
    """One world of two processes."""

    def test_replicas_are_equal_bit_for_bit(self, replicas: list[Any]) -> None:
        assert replicas[0][1] != replicas[1][1], "the replicas saw the same data"
        for one, other in zip(replicas[0][0], replicas[1][0], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)

    def test_result_is_that_of_one_process_on_the_whole_batch(self, replicas: list[Any]) -> None:
        # The mean of two halves' gradients rounds otherwise than the gradient of the whole.
        expected, _ = train(make_model(), 1, 0)
        for mine, theirs in zip(replicas[0][0], expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
