"""Where an optimizer's parameters lie: what the glue (or one process by itself) tells the optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.shampoo.config import ShampooConfig
from megatron.shampoo.methods import factor_sides
from megatron.shampoo.plan.parts import MatrixParameter, Part


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """The preconditioned parameters of a data-parallel group as one of its ranks sees them."""

    parameters: tuple[MatrixParameter, ...]
    """In an order that is the same on every rank of the group."""
    shards: tuple[Tensor | None, ...]
    """For each parameter the optimizer's own tensor: the flat shard, the whole parameter, or None (holds nothing)."""
    group: dist.ProcessGroup | None
    """The data-parallel group that shares the parameters; None for one process."""
    tp_alignment: int
    device: torch.device
    dtype: torch.dtype = torch.float32
    """Of factors, moments and messages; the same on every rank of the group, also on those that hold nothing."""

    @property
    def num_ranks(self) -> int:
        """Data-parallel size."""
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        """Rank in the data-parallel group."""
        return 0 if self.group is None else self.group.rank()


def place_alone(groups: Sequence[dict], config: ShampooConfig) -> Placement:
    """Placement of an ordinary optimizer on one process: every matrix is one part, held whole.

    Args:
        groups: parameter groups; a group with `precondition=False` (embeddings, output layers) is left to AdamW.
        config: decides which matrices have factors; its tensor-parallel alignment must be None or 1, there is nothing
            to align with.

    Raises:
        ValueError: a tensor-parallel alignment, or a parameter that is not contiguous.
    """
    if config.tp_alignment not in (None, 1):
        raise ValueError(
            f"tp_alignment {config.tp_alignment}: without Megatron there is no tensor parallelism; leave it None"
        )
    tensors = list(_matrices(groups, config))
    parameters = []
    for index, tensor in enumerate(tensors):
        if not tensor.is_floating_point():
            raise ValueError(f"parameter {index} is {tensor.dtype}: allowed are real floating-point matrices")
        if not tensor.is_contiguous():
            raise ValueError(f"parameter {index} of shape {tuple(tensor.shape)} is not contiguous: call .contiguous()")
        shape = (tensor.shape[0], tensor.shape[1])
        part = Part(name="weight", global_shape=shape, sides=factor_sides(shape, config))
        parameters.append(MatrixParameter(name=f"parameter {index}", shape=shape, parts=(part,)))
    double = bool(tensors) and all(tensor.dtype == torch.float64 for tensor in tensors)
    return Placement(
        parameters=tuple(parameters),
        shards=tuple(tensors),
        group=None,
        tp_alignment=1,
        device=tensors[0].device if tensors else torch.device("cpu"),
        dtype=torch.float64 if double else torch.float32,
    )


def _matrices(groups: Sequence[dict], config: ShampooConfig) -> Iterable[Tensor]:
    for group in groups:
        if group.get("precondition", True):
            yield from (tensor for tensor in group["params"] if tensor.ndim == 2 and _has_factors(tensor, config))


def _has_factors(tensor: Tensor, config: ShampooConfig) -> bool:
    shape = (tensor.shape[0], tensor.shape[1])
    return min(shape) > 1 and any(factor_sides(shape, config))


def known_to_all(groups: Mapping[int, int], placement: Placement) -> dict[int, int]:
    """The parameter groups of all parameters of the plan, also of those that this rank does not hold.

    Args:
        groups: for each parameter that this rank holds the number of its group.
        placement: this rank's.

    Returns:
        For each parameter of the plan the number of its group.

    Raises:
        RuntimeError: on every rank, where two ranks have a parameter in different groups.

    Collective: every rank of the group.
    """
    if placement.group is None or placement.num_ranks == 1:
        return dict(groups)
    gathered: list[dict[int, int]] = [{} for _ in range(placement.num_ranks)]
    dist.all_gather_object(gathered, dict(groups), group=placement.group)
    known: dict[int, int] = {}
    for found in gathered:
        for index, number in found.items():
            if known.setdefault(index, number) != number:
                raise RuntimeError(
                    f"{placement.parameters[index].name} is in parameter groups {known[index]} and {number} on two "
                    "data-parallel ranks: make the optimizer with the same groups in the same order on every rank"
                )
    return known


def check_same_plan(digest: str, placement: Placement) -> None:
    """Refuse to start where ranks of the group made different plans: their messages would not match.

    Raises:
        RuntimeError: on every rank, naming the ranks that differ from the group's first.

    Collective: every rank of the group.
    """
    if placement.group is None or placement.num_ranks == 1:
        return
    digests: list[str | None] = [None] * placement.num_ranks
    dist.all_gather_object(digests, digest, group=placement.group)
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if others:
        raise RuntimeError(
            f"data-parallel ranks {others} have other Shampoo blocks or settings than rank 0 of their group: start "
            "every rank with the same --shampoo-* flags and the same model"
        )
