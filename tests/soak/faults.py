"""A setup for `tests.launch`: faults at random steps, the same every time, and the memory of the process."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

NOT_FINITE, SPIKE, RAISES, SILENT = "not finite", "spike", "solver raises", "solver gives NaN"
SHARES = {NOT_FINITE: 0.01, SPIKE: 0.01, RAISES: 0.02, SILENT: 0.02}
"""Share of the steps with each fault."""
MEMORY_EVERY = 50
"""Steps between two looks at the process's memory."""


def fault_of(step: int, world_size: int) -> tuple[str, int, int]:
    """What goes wrong in a step: the fault (or none), the rank that it hits, and a number for further choices."""
    source = random.Random(step)
    draw, victim, choice = source.random(), source.randrange(world_size), source.randrange(1 << 16)
    for name, share in SHARES.items():
        if draw < share:
            return name, victim, choice
        draw -= share
    return "", victim, choice


def inject() -> dict[str, Any]:
    """Spoil gradients before they are reduced, and solvers while they compute.

    Returns:
        Filled during the run: `faults` {name: steps}, `memory` [[step, resident bytes]].
    """
    import torch
    import torch.distributed as dist
    from megatron.core.distributed import DistributedDataParallel

    seen: dict[str, Any] = {"faults": dict.fromkeys(SHARES, 0), "memory": []}
    step, now = [0], [""]
    finish = DistributedDataParallel.finish_grad_sync

    @functools.wraps(finish)
    def finish_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        step[0] += 1
        name, victim, choice = fault_of(step[0], dist.get_world_size())
        now[0] = name if dist.get_rank() == victim else ""
        if name:
            seen["faults"][name] += 1
        gradients = [parameter.main_grad for parameter in self.module.parameters()]
        if now[0] == NOT_FINITE:
            gradients[choice % len(gradients)].view(-1)[0] = [float("nan"), float("inf")][choice % 2]
        if name == SPIKE:
            for gradient in gradients:
                gradient.mul_(1e4)
        if step[0] % MEMORY_EVERY == 0:
            seen["memory"].append([step[0], _resident_bytes()])
        return finish(self, *args, **kwargs)

    DistributedDataParallel.finish_grad_sync = finish_grad_sync
    for name in ("eigh", "qr"):
        setattr(torch.linalg, name, _unreliable(getattr(torch.linalg, name), now))
    return seen


def _unreliable(original: Callable, now: list[str]) -> Callable:
    import torch

    @functools.wraps(original)
    def solver(*args: Any, **kwargs: Any) -> Any:
        if now[0] == RAISES:
            raise torch.linalg.LinAlgError("planted failure")
        found = original(*args, **kwargs)
        return type(found)([part * torch.nan for part in found]) if now[0] == SILENT else found

    return solver


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
