"""A long run with faults at random steps: nothing leaks, nothing drifts, it goes on. `make soak` is the long one."""

from __future__ import annotations

import math

import pytest

from tests.launch import Launcher
from tests.soak.faults import NOT_FINITE, RAISES, SHARES, SILENT, SPIKE, fault_of
from tests.tiny import Layout, tiny_gpt

SHAMPOO = ["--optimizer", "shampoo", "--shampoo-block-size", "8", "--shampoo-refresh-interval", "4"]
MAX_GROWTH = 4 << 20
"""Bytes that the process may grow by between the middle and the end: logs, records and fragments of the heap. A leak of
the optimizer's own state, 30 KiB, would come to 30 MiB in 1,000 steps."""


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "replicated"])
def test_a_run_with_random_faults_goes_on(
    launcher: Launcher, request: pytest.FixtureRequest, distributed: bool
) -> None:
    steps = request.config.getoption("soak_steps")
    layout = Layout(dp=2, distributed=distributed)
    model = tiny_gpt(hidden=16, heads=2, seq_length=16, vocab=31, global_batch=4, iters=steps, log_interval=100)
    flags = [*model, *layout.flags, *SHAMPOO, "--shampoo-check-replicas", "100", "--micro-batch-size", "2"]
    flags += ["--no-check-for-nan-in-loss-and-grad"]
    result = launcher.run(flags, world_size=2, setup="tests.soak.faults:inject", timeout=60 + steps).check()
    planned = [fault_of(step, 2)[0] for step in range(1, steps + 1)]
    for record in result.records:
        assert record["iterations"] == list(range(1, steps + 1))
        assert record["setup"]["faults"] == {name: planned.count(name) for name in SHARES}
        assert record["skipped"] == [name == NOT_FINITE for name in planned]
        memory = dict(record["setup"]["memory"])
        growth = memory[max(memory)] - memory[max(memory) // 100 * 50]
        print(f"{layout}: {steps} steps, faults {record['setup']['faults']}, grew by {growth / 2**20:.2f} MiB")
        assert growth < MAX_GROWTH
    assert all(planned.count(name) for name in (NOT_FINITE, SPIKE, RAISES, SILENT))
    assert "failed, eigh in float32 was used" in result.output or "every solver failed" in result.output
    assert all(map(math.isfinite, result.losses))
    assert sum(result.losses[-10:]) / 10 < result.losses[0] - 0.2


def test_a_frozen_rank_ends_the_others_after_megatrons_timeout(
    launcher: Launcher, request: pytest.FixtureRequest
) -> None:
    """One minute is the shortest that Megatron takes."""
    if request.config.getoption("soak_steps") < 1000:
        pytest.skip("runs in `make soak`")
    flags = [*tiny_gpt(iters=8), *Layout(dp=2).flags, *SHAMPOO, "--distributed-timeout-minutes", "1"]
    result = launcher.run(flags, world_size=2, setup="tests.probes:freeze_in_exchange", timeout=200)
    assert not result.timed_out and result.first_failed == 0
    assert 60 < result.wall_seconds < 100
    assert "Timed out waiting" in result.logs[0].read_text()
