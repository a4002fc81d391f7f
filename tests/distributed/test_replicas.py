"""Which ranks are said to differ."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron.shampoo.collective.replicas import drifted
from tests.distributed._helpers import run_ranks


def compare(odd: dict[int, list[int]]) -> dict[int, list[int]]:
    """Four tensors, of which number `index` is another one on the ranks `odd[index]`."""
    rank = dist.get_rank()
    tensors = [torch.full((3, 5), float(index + 1)) for index in range(4)]
    for index, ranks in odd.items():
        if rank in ranks:
            tensors[index][2, 1] += 1e-6
    world = dist.group.WORLD
    assert world is not None
    return drifted(tensors, world)


def test_the_odd_ranks_are_named_on_every_rank() -> None:
    odd = {1: [2], 3: [0]}
    assert run_ranks(compare, 3, odd) == [odd] * 3
    assert run_ranks(compare, 3, {}) == [{}] * 3


def test_of_two_ranks_the_first_counts() -> None:
    assert run_ranks(compare, 2, {2: [0]}) == [{2: [1]}] * 2
