"""Factors, roots and counters in Megatron's `torch_dist` checkpoints, in coordinates of the model and not of a layout.

Moments and main parameters go through Megatron's own code. What the blocks add is stored under a key for each tensor
of each part of a parameter, `optimizer.shampoo.<parameter>.<part>.<tensor>`, as an array over the part's block grid, of
the global shape `(grid rows, grid columns, ...)`, where block (i, j) is the chunk at offset (i, j, 0, ...). The grid is
that of the whole matrix, so ranks of any layout read the blocks that they own now from wherever they were written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor

from megatron.shampoo.block_state import StackState
from megatron.shampoo.optimizer import Shampoo
from megatron.shampoo.plan.grid import grid_of

KEY = "shampoo"
"""Entry of the blocks' state beside Megatron's own entries of an optimizer's state."""

NUMBERS = "numbers"
"""Tensor with all that is one number for each block, in float64, which holds counters and float32 exactly: one small
entry in the place of seven keeps the list of entries short."""


@dataclasses.dataclass(frozen=True)
class _Entry:
    """One tensor of one block: where it lies in the state, and what of the checkpoint it is."""

    key: str
    grid: tuple[int, int]
    """Blocks of the whole part."""
    position: tuple[int, int]
    """The block's row and column in the grid."""
    shape: tuple[int, ...]
    """Of every chunk of the key: that of the part's largest block."""
    owned: tuple[Tensor, ...]
    """The block's own tensor, a view into the state; of `NUMBERS` the numbers in the state's order."""
    replica: tuple[int, int, int]

    @property
    def name(self) -> str:
        """Unique among a rank's entries."""
        return f"{self.key}[{self.position[0]},{self.position[1]}]"

    def data(self) -> Tensor:
        """The chunk: the state itself, in which Megatron reads and writes, or a copy where it is packed or padded."""
        if self.key.endswith(f".{NUMBERS}"):
            return torch.stack([number.double().cpu() for number in self.owned])
        (tensor,) = self.owned
        if tensor.shape == self.shape:
            return tensor
        padded = tensor.new_zeros(self.shape)
        padded[tuple(slice(length) for length in tensor.shape)] = tensor
        return padded

    def take(self, chunk: Tensor) -> None:
        """Put a loaded chunk into the state."""
        chunk = chunk.view(self.shape)
        if self.key.endswith(f".{NUMBERS}"):
            for number, value in zip(self.owned, chunk, strict=True):
                number.copy_(value)
            return
        (tensor,) = self.owned
        tensor.copy_(chunk[tuple(slice(length) for length in tensor.shape)])

    def sharded(self) -> ShardedTensor:
        """For Megatron to save, or to load into."""
        data = self.data()[None, None]
        return ShardedTensor(
            key=self.key,
            data=data,
            dtype=data.dtype,
            local_shape=tuple(data.shape),
            global_shape=(*self.grid, *self.shape),
            global_offset=(*self.position, *(0 for _ in self.shape)),
            axis_fragmentations=(*self.grid, *(1 for _ in self.shape)),
            replica_id=self.replica,
        )


def blocks_to_sharded(optimizer: Shampoo) -> dict[str, ShardedTensor]:
    """The state of the blocks that this rank owns as sharded tensors, for saving and for loading into.

    Args:
        optimizer: the inner optimizer.
    """
    return {entry.name: entry.sharded() for entry in _entries(optimizer)}


def load_blocks(optimizer: Shampoo, loaded: dict[str, Tensor]) -> None:
    """Take the blocks' state from a loaded checkpoint.

    Args:
        optimizer: the inner optimizer.
        loaded: chunks by the names that `blocks_to_sharded` gave; empty where this rank owns nothing.

    Raises:
        RuntimeError: the checkpoint lacks some of it; names it.
    """
    entries = list(_entries(optimizer))
    missing = [entry.name for entry in entries if entry.name not in loaded]
    if missing:
        raise RuntimeError(
            f"the checkpoint lacks Shampoo's state {', '.join(missing[:5])} ({len(missing)} in all): it is of other "
            "blocks or of an older version; load the weights alone with --no-load-optim"
        )
    for entry in entries:
        entry.take(loaded[entry.name])


def _entries(optimizer: Shampoo) -> Iterator[_Entry]:
    expert = bool(optimizer.param_groups and optimizer.param_groups[0]["is_expert_parallel"])
    for state in optimizer.states:
        for slot in range(len(state.stack.blocks)):
            yield from _entries_of_block(optimizer, state, slot, expert)


def _entries_of_block(optimizer: Shampoo, state: StackState, slot: int, expert: bool) -> Iterator[_Entry]:
    plan = optimizer.plan
    block = plan.blocks[state.stack.blocks[slot]]
    parameter = plan.parameters[block.parameter]
    part = parameter.parts[block.part]
    rows, columns = grid_of(part, optimizer.config.block_size, optimizer.placement.tp_alignment)
    longest = tuple(max(stop - start for start, stop in cuts) for cuts in (rows, columns))
    common: dict[str, Any] = {
        "grid": (len(rows), len(columns)),
        "position": block.grid,
        "replica": (0, _copy_of(part.tp_dim, expert), _instance(expert)),
    }
    prefix, numbers = f"optimizer.shampoo.{parameter.name}.{part.name}", []
    for name, tensor in state.state_dict().items():
        if tensor.ndim == 1:
            numbers.append(tensor[slot])
            continue
        side = {"left": longest[:1], "right": longest[1:]}.get(name.partition(".")[0])
        shape = longest if side is None else side * (tensor.ndim - 1)
        yield _Entry(f"{prefix}.{name}", shape=shape, owned=(tensor[slot],), **common)
    yield _Entry(f"{prefix}.{NUMBERS}", shape=(len(numbers),), owned=tuple(numbers), **common)


def _copy_of(tp_dim: int | None, expert: bool) -> int:
    """Which of the equal copies on tensor-parallel ranks this is: Megatron writes copy 0."""
    if tp_dim is not None:
        return 0
    return mpu.get_expert_tensor_parallel_rank() if expert else mpu.get_tensor_model_parallel_rank()


def _instance(expert: bool) -> int:
    """Number of this rank's instance of the distributed optimizer; all instances hold the same."""
    group = mpu.get_inter_distributed_optimizer_instance_group(check_initialized=False)
    return 0 if group is None else dist.get_rank(group)
