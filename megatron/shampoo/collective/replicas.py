"""Whether data-parallel ranks hold the same bits: one number for each tensor, compared by one collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_PIECE = 1 << 20
"""Elements hashed at once: bounds the temporary memory."""

_MULTIPLIER = 6364136223846793005
"""Odd, so that no change of one element can vanish modulo 2^64. Source: the multiplier of Knuth's MMIX generator."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> Tensor:
    """A number that depends on every bit of a tensor, and on nothing else.

    h <- a h + sum_i (2 i + 1) x_i modulo 2^64 over pieces of the tensor, with a odd and x_i the bits of element i as an
    integer: a change of one element always changes it, other changes do with a probability of about 1 - 2^-64.
    Integers add up to the same sum in any order.

    Args:
        tensor: of any shape and dtype with elements of 1, 2, 4 or 8 bytes.

    Returns:
        int64, no dimensions, on the tensor's device.
    """
    bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    weights = torch.arange(min(_PIECE, bits.numel()), device=bits.device).mul_(2).add_(1)
    result = torch.zeros((), dtype=torch.int64, device=bits.device)
    for piece in bits.split(_PIECE):
        result = result * _MULTIPLIER + (piece.long() * weights[: piece.numel()]).sum()
    return result


def drifted(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> dict[int, list[int]]:
    """Which tensors are not the same on all ranks of a group.

    Args:
        tensors: as many, in the same order, on every rank; at least one.
        group: the ranks that hold copies.

    Returns:
        For each tensor that differs, by its number, the ranks of the group whose bits are not those of most ranks (of
        equally many, those of the lowest rank count). The same on every rank.

    Collective: every rank of the group.
    """
    own = torch.stack([fingerprint(tensor) for tensor in tensors])
    everyone = own.new_empty(group.size(), len(own))
    dist.all_gather_into_tensor(everyone.view(-1), own, group=group)
    suspects = (everyone != everyone[0]).any(0).nonzero().flatten().tolist()
    found = {}
    for index in suspects:
        values = everyone[:, index].tolist()
        usual = Counter(values).most_common(1)[0][0]
        found[index] = [rank for rank, value in enumerate(values) if value != usual]
    return found
