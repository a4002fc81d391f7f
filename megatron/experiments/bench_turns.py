"""Processes that train side by side and take their steps by turns: all share the machine's better and worse seconds.

A gate is a pair of pipes between the process that gives turns and one rank: a byte says go, eight bytes say how long
the step took. While others have their turn a rank waits in a read and costs nothing.
"""

from __future__ import annotations

import dataclasses
import os
import select
import struct
import time
from collections.abc import Sequence

_SECONDS = struct.Struct("d")


@dataclasses.dataclass(frozen=True, slots=True)
class Gate:
    """One end of the two pipes: file descriptors to read from and to write to."""

    reads: int
    writes: int

    def close(self) -> None:
        """Close both."""
        os.close(self.reads)
        os.close(self.writes)


def gates() -> tuple[Gate, Gate]:
    """Open the pipes of one rank.

    Returns:
        The end of the process that gives turns, and the rank's.
    """
    go_reads, go_writes = os.pipe()
    done_reads, done_writes = os.pipe()
    return Gate(done_reads, go_writes), Gate(go_reads, done_writes)


def wait_for_turns(gate: Gate) -> None:
    """Let every training step of this process wait for its turn and report its seconds.

    Args:
        gate: the rank's end.
    """
    from megatron.shampoo.mcore.seams.registry import install
    from megatron.shampoo.mcore.seams.training_step import step_by_turns

    def wait() -> None:
        if not os.read(gate.reads, 1):
            raise RuntimeError("the benchmark has ended")

    def report(seconds: float) -> None:
        os.write(gate.writes, _SECONDS.pack(seconds))

    install([step_by_turns(wait, report)])


def take_turn(ranks: Sequence[Gate], timeout_seconds: float) -> float | None:
    """Let all ranks of one run take one step.

    Args:
        ranks: ends of the process that gives turns.
        timeout_seconds: after which a step counts as failed.

    Returns:
        Seconds of the slowest rank; None where a rank has ended or takes too long.
    """
    for gate in ranks:
        try:
            os.write(gate.writes, b"g")
        except BrokenPipeError:
            return None
    slowest, deadline = 0.0, time.monotonic() + timeout_seconds
    waiting = [gate.reads for gate in ranks]
    while waiting:
        ready = select.select(waiting, [], [], max(0.0, deadline - time.monotonic()))[0]
        if not ready:
            return None
        for descriptor in ready:
            found = os.read(descriptor, _SECONDS.size)
            if len(found) < _SECONDS.size:
                return None
            slowest = max(slowest, _SECONDS.unpack(found)[0])
            waiting.remove(descriptor)
    return slowest
