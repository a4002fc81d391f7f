"""The optimizer's own metrics, to Megatron's TensorBoard writer and one line of the log."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from megatron.shampoo.optimizer import Shampoo
from megatron.shampoo.refreshing import MAX_FAILURES_IN_A_ROW


def time_next_step(optimizers: Sequence[Shampoo], iteration: int, interval: int) -> None:
    """Switch the clocks on where the next step will be logged: timing costs a device synchronisation.

    Args:
        optimizers: this rank's.
        iteration: of the step to come, counted from 1.
        interval: `--shampoo-log-interval`.
    """
    for optimizer in optimizers:
        optimizer.clock.enabled = _is_logged(iteration, interval)


def log_step(optimizers: Sequence[Shampoo], iteration: int, interval: int, writer: Any) -> None:
    """Write the metrics of the step just taken, if its turn has come.

    Args:
        optimizers: this rank's; may be none.
        iteration: of the step, counted from 1.
        interval: `--shampoo-log-interval`.
        writer: Megatron's TensorBoard writer; None on ranks without one.

    Collective: every rank, in logged steps.
    """
    if not _is_logged(iteration, interval):
        return
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [_figures(optimizer) for optimizer in optimizers])
    if dist.get_rank() < dist.get_world_size() - 1:
        return
    for family, prefix in ((False, "shampoo"), (True, "shampoo-expert")):
        figures = [it for of_rank in everyone for it in of_rank if it["is_expert"] is family and it["blocks"]]
        if not figures:
            continue
        values = _summary(figures)
        if writer is not None:
            for name, value in values.items():
                writer.add_scalar(f"{prefix}/{name}", value, iteration)
        shown = " | ".join(f"{name}: {value:.4g}" for name, value in values.items())
        print(f" {prefix} at iteration {iteration} | {shown}", flush=True)


def _is_logged(iteration: int, interval: int) -> bool:
    return interval > 0 and iteration % interval == 0


def _figures(optimizer: Shampoo) -> dict[str, Any]:
    """Figures of one optimizer of one rank."""
    ages = [(state.num_updates - state.refreshed_at).tolist() for state in optimizer.states]
    return {
        "is_expert": bool(optimizer.param_groups[0]["is_expert_parallel"]),
        "blocks": len(optimizer.plan.blocks),
        "refreshes": optimizer.metrics.refreshes,
        "bytes": optimizer.planned_bytes,
        "ages": [age for stack in ages for age in stack],
        "conditions": [
            value
            for state in optimizer.states
            for side in state.sides
            for value in side.condition.tolist()
            if not math.isnan(value)  # the Newton iterations do not know it
        ],
        "skipped": optimizer.metrics.skipped,
        "failed": optimizer.metrics.failed,
        "given_up": [
            float(count >= MAX_FAILURES_IN_A_ROW)
            for state in optimizer.states
            for side in state.sides
            for count in side.failures.tolist()
        ],
        "ratios": [value for ratio in optimizer.metrics.graft_ratios for value in ratio.tolist()],
        "seconds": optimizer.clock.seconds(),
    }


def _summary(ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    def together(key: str) -> list[float]:
        return [value for rank in ranks for value in rank[key]] or [0.0]

    phases = sorted({phase for rank in ranks for phase in rank["seconds"]})
    return {
        "refreshes": float(sum(rank["refreshes"] for rank in ranks)),
        "refreshes-skipped": float(sum(rank["skipped"] for rank in ranks)),
        "refreshes-failed": float(sum(rank["failed"] for rank in ranks)),
        "factors-given-up": sum(together("given_up")),
        "root-age-max": max(together("ages")),
        "condition-max": max(together("conditions")),
        "condition-median": statistics.median(together("conditions")),
        "graft-ratio-mean": statistics.fmean(together("ratios")),
        "exchanged-bytes": float(sum(rank["bytes"] for rank in ranks)),
        **{f"seconds-{phase}": max(rank["seconds"].get(phase, 0.0) for rank in ranks) for phase in phases},
    }
