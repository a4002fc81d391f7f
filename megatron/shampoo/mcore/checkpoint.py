"""Factors, roots and counters in Megatron's `torch_dist` checkpoints.

Moments and main parameters go through Megatron's own code. What the blocks add is stored by each rank under keys of
its own, so a checkpoint continues bit for bit on the layout that wrote it, and on no other (`resume` refuses those).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor

from megatron.shampoo.optimizer import Shampoo

KEY = "shampoo"
"""Entry of the blocks' state beside Megatron's own entries of an optimizer's state."""


def blocks_to_sharded(optimizer: Shampoo, expert: bool) -> dict[str, ShardedTensor]:
    """The blocks' state as sharded tensors, for saving and for loading into.

    Args:
        optimizer: the inner optimizer.
        expert: whether it is the one of expert-parallel parameters (keys of the two must differ).
    """
    prefix = f"optimizer.shampoo.{'expert' if expert else 'dense'}.rank_{dist.get_rank()}"
    return {
        name: ShardedTensor.from_rank_offsets(f"{prefix}.{name}", tensor, replica_id=0)
        for name, tensor in _tensors(optimizer)
    }


def load_blocks(optimizer: Shampoo, loaded: dict[str, Tensor]) -> None:
    """Take the blocks' state from a loaded checkpoint.

    Raises:
        RuntimeError: the checkpoint lacks it, or it belongs to other blocks.
    """
    expected = dict(_tensors(optimizer))
    missing = sorted(expected.keys() - loaded.keys())
    if missing:
        raise RuntimeError(
            f"the checkpoint lacks Shampoo's state {', '.join(missing)}: it was saved on another "
            "layout, or by an older version; load the weights alone with --no-load-optim"
        )
    if not torch.equal(loaded["plan"].cpu(), expected["plan"]):
        raise RuntimeError(
            "the checkpoint's Shampoo blocks are others than this run's: resume on the layout and with the "
            "--shampoo-* flags it was saved with, or start the optimizer anew with --no-load-optim"
        )
    for state, stack in _stacks(optimizer):
        state.load_state_dict({name: loaded[f"{stack}.{name}"] for name in state.state_dict()})


def _stacks(optimizer: Shampoo) -> Iterator[tuple[Any, str]]:
    # Blocks of one shape may have other sides: those of a wide and of a high matrix with one factor each.
    for state in optimizer.states:
        sides = "-".join(side.side for side in state.sides)
        yield state, f"{'x'.join(map(str, state.stack.shape))}.{sides}"


def _tensors(optimizer: Shampoo) -> Iterator[tuple[str, Tensor]]:
    yield "plan", torch.frombuffer(bytearray.fromhex(optimizer.plan.digest()), dtype=torch.uint8)
    for state, stack in _stacks(optimizer):
        for name, tensor in state.state_dict().items():
            yield f"{stack}.{name}", tensor
