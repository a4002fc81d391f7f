"""The start-up report: what goes where, printed once by rank 0."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist

from megatron.shampoo.mcore.routing import Route
from megatron.shampoo.optimizer import Shampoo
from megatron.shampoo.plan.grid import grid_of
from megatron.shampoo.plan.parts import Part
from megatron.shampoo.plan.plan import Plan


@dataclasses.dataclass(frozen=True)
class _Line:
    """One parameter's line in the report, with its layer (or expert) number taken out so that equal lines join."""

    name: str
    shape: str
    route: str
    parts: str
    blocks: int
    factors: int
    numel: int


@dataclasses.dataclass
class _Share:
    """What one rank contributes to the report."""

    lines: list[_Line]
    cut: int
    travelling: int
    num_blocks: int
    sent_bytes: int
    balance: float


def start_report(routes: Sequence[Route], optimizers: Sequence[Shampoo]) -> None:
    """Print the routes of all parameters of the model, block totals, cut blocks, traffic and balance.

    Args:
        routes: of this rank's parameters.
        optimizers: this rank's, dense before expert.

    Collective: every rank. The lines are gathered over all ranks once, at the start.
    """
    share = _share_of(routes, optimizers)
    shares: list[_Share | None] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, share)
    if dist.get_rank() == 0:
        print(_text([share for share in shares if share is not None], optimizers), flush=True)


def _share_of(routes: Sequence[Route], optimizers: Sequence[Shampoo]) -> _Share:
    speaks = _speaks_for()
    lines = [_line(route, optimizers) for route in routes if speaks[route.is_expert]]
    loads = [_balance(optimizer.plan) for optimizer in optimizers if optimizer.plan.blocks]
    owned = [(it.plan, block) for it in optimizers for stack in it.schedule.stacks for block in stack.blocks]
    return _Share(
        lines=lines,
        cut=sum(plan.is_cut(block) for plan, block in owned),
        travelling=sum(plan.travels(block) for plan, block in owned),
        num_blocks=len(owned),
        sent_bytes=sum(optimizer.planned_bytes for optimizer in optimizers),
        balance=max(loads, default=1.0),
    )


def _speaks_for() -> dict[bool, bool]:
    """Whether this rank reports the experts (True) and the other parameters (False) that it shares with other ranks."""
    from megatron.core import parallel_state as mpu

    return {
        False: mpu.get_tensor_model_parallel_rank() == 0 == mpu.get_data_parallel_rank(with_context_parallel=True),
        True: mpu.get_expert_tensor_parallel_rank() == 0 == mpu.get_expert_data_parallel_rank(),
    }


def _line(route: Route, optimizers: Sequence[Shampoo]) -> _Line:
    name = re.sub(r"\.(layers|local_experts)\.\d+\.", r".\1.*.", route.name)
    name = re.sub(r"(linear_fc[12]\.weight)\d+$", r"\1*", name)
    shape = "x".join(map(str, route.parameter.shape))
    if not route.is_preconditioned:
        return _Line(name, shape, f"AdamW ({route.reason})", "", 0, 0, route.parameter.numel())
    optimizer = next(it for it in optimizers if any(known.name == route.name for known in it.plan.parameters))
    alignment, block_size = optimizer.placement.tp_alignment, optimizer.config.block_size
    grids = []
    for part in route.parts:
        rows, columns = grid_of(part, block_size, alignment)
        grids.append((part, len(rows), len(columns), rows[0][1] - rows[0][0], columns[0][1] - columns[0][0]))
    text = ", ".join(
        f"{part.name} {part.global_shape[0]}x{part.global_shape[1]} in {i}x{j} blocks of {m}x{n}{_sides(part)}"
        for part, i, j, m, n in grids
    )
    blocks = sum(i * j for _, i, j, _, _ in grids)
    factors = sum(i * j * sum(part.sides) for part, i, j, _, _ in grids)
    return _Line(name, shape, "Shampoo", text, blocks, factors, route.parameter.numel())


def _sides(part: Part) -> str:
    if all(part.sides):
        return ""
    return f" ({'left' if part.sides[0] else 'right'} factor alone)"


def _method(optimizer: Shampoo) -> str:
    recipe = optimizer.recipe
    clip = f", update RMS at most {recipe.update_rms_clip:g}" if recipe.update_rms_clip else ""
    return f"{optimizer.config.method} with grafting {recipe.grafting}{clip}; solver {recipe.solver}"


def _balance(plan: Plan) -> float:
    load = plan.load()
    return max(load) * len(load) / sum(load)


def _text(shares: Sequence[_Share], optimizers: Sequence[Shampoo]) -> str:
    counted = Counter(line for share in shares for line in share.lines)
    width = max((len(line.name) for line in counted), default=0)
    rows = ["----- shampoo: what goes where (shapes are of one tensor-parallel rank, blocks of all) -----"]
    for line, count in counted.items():
        route = f"{line.route}: {line.parts}" if line.parts else line.route
        rows.append(f"  {line.name:<{width}}  {count:>3} x {line.shape:<12} {route}")
    preconditioned = sum(line.numel * count for line, count in counted.items() if line.blocks)
    everything = sum(line.numel * count for line, count in counted.items())
    blocks = sum(line.blocks * count for line, count in counted.items())
    factors = sum(line.factors * count for line, count in counted.items())
    interval = optimizers[0].config.refresh_interval if optimizers else 1
    rows += [
        f"  preconditioned: {preconditioned:,} of {everything:,} elements (one tensor-parallel rank), {blocks} blocks",
        *(f"  method: {_method(optimizer)}" for optimizer in optimizers[:1]),
        f"  factors: {factors}, about {factors / interval:.1f} refreshed per step (every {interval} steps, by turns)",
        f"  blocks cut by shard borders: {sum(share.cut for share in shares)} of "
        f"{sum(share.num_blocks for share in shares)}; that travel to their owner: "
        f"{sum(share.travelling for share in shares)}; exchanged bytes per step: {sum(s.sent_bytes for s in shares):,}",
        *(f"  owners: {optimizer.config.ownership}" for optimizer in optimizers[:1]),
        f"  balance over data-parallel ranks (max/mean of the cost model): "
        f"{max((share.balance for share in shares), default=1.0):.2f}",
        "----- end of shampoo -----",
    ]
    return "\n".join(rows)
