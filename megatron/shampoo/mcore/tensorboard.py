"""The optimizer's own metrics, to Megatron's TensorBoard writer and one line of the log."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from megatron.shampoo.optimizer import Shampoo


def time_next_step(optimizers: Sequence[Shampoo], iteration: int) -> None:
    """Switch the clocks on where the next step will be logged: timing costs a device synchronisation.

    Args:
        optimizers: this rank's.
        iteration: of the step to come, counted from 1.
    """
    for optimizer in optimizers:
        optimizer.clock.enabled = _is_logged(optimizer, iteration)


def log_step(optimizers: Sequence[Shampoo], iteration: int, writer: Any) -> None:
    """Write the metrics of the step just taken, if its turn has come.

    Args:
        optimizers: this rank's.
        iteration: of the step, counted from 1.
        writer: Megatron's TensorBoard writer; None on ranks without one.

    Collective: every rank of each optimizer's data-parallel group, in logged steps.
    """
    for number, optimizer in enumerate(optimizers):
        if not _is_logged(optimizer, iteration) or not optimizer.plan.blocks:
            continue
        values = _summary(_gathered(optimizer))
        prefix = "shampoo" if number == 0 else "shampoo-expert"
        if writer is not None:
            for name, value in values.items():
                writer.add_scalar(f"{prefix}/{name}", value, iteration)
        if dist.get_rank() == dist.get_world_size() - 1:
            shown = " | ".join(f"{name}: {value:.4g}" for name, value in values.items())
            print(f" {prefix} at iteration {iteration} (this pipeline stage) | {shown}", flush=True)


def _is_logged(optimizer: Shampoo, iteration: int) -> bool:
    interval = optimizer.config.log_interval
    return interval > 0 and iteration % interval == 0


def _gathered(optimizer: Shampoo) -> list[dict[str, Any]]:
    """Figures of every rank of the data-parallel group."""
    ages = [(state.num_updates - state.refreshed_at).tolist() for state in optimizer.states]
    own = {
        "refreshes": optimizer.metrics.refreshes,
        "bytes": optimizer.planned_bytes,
        "ages": [age for stack in ages for age in stack],
        "conditions": [value for state in optimizer.states for value in state.condition.flatten().tolist()],
        "ratios": [value for ratio in optimizer.metrics.graft_ratios for value in ratio.tolist()],
        "seconds": optimizer.clock.seconds(),
    }
    group = optimizer.placement.group
    everyone: list[Any] = [None] * optimizer.placement.num_ranks
    if group is None or len(everyone) == 1:
        return [own]
    dist.all_gather_object(everyone, own, group=group)
    return everyone


def _summary(ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    def together(key: str) -> list[float]:
        return [value for rank in ranks for value in rank[key]] or [0.0]

    phases = sorted({phase for rank in ranks for phase in rank["seconds"]})
    return {
        "refreshes": float(sum(rank["refreshes"] for rank in ranks)),
        "root-age-max": max(together("ages")),
        "condition-max": max(together("conditions")),
        "condition-median": statistics.median(together("conditions")),
        "graft-ratio-mean": statistics.fmean(together("ratios")),
        "exchanged-bytes": float(sum(rank["bytes"] for rank in ranks)),
        **{f"seconds-{phase}": max(rank["seconds"].get(phase, 0.0) for rank in ranks) for phase in phases},
    }
