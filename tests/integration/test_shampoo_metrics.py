"""The optimizer's metrics reach Megatron's TensorBoard writer."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.launch import Launcher
from tests.tiny import Layout, tiny_gpt


def test_metrics_are_written_at_every_interval(launcher: Launcher, tmp_path: Path) -> None:
    layout = Layout(dp=2)
    flags = ["--optimizer", "shampoo", "--shampoo-block-size", "48", "--shampoo-log-interval", "3"]
    flags += ["--shampoo-refresh-interval", "5", "--tensorboard-dir", str(tmp_path)]
    result = launcher.run([*tiny_gpt(iters=6), *layout.flags, *flags], world_size=2, setup="tests.probes:count").check()
    events = EventAccumulator(str(tmp_path))
    events.Reload()

    def values(name: str) -> list[float]:
        return [event.value for event in events.Scalars(f"shampoo/{name}")]

    assert [event.step for event in events.Scalars("shampoo/refreshes")] == [3, 6]
    assert all(0 <= age < 5 for age in values("root-age-max"))
    assert all(1 <= value <= 1.001e6 for value in values("condition-max") + values("condition-median"))
    assert all(ratio > 0 for ratio in values("graft-ratio-mean"))
    for phase in ("moments", "exchange", "accumulate", "refresh", "apply"):
        assert all(seconds > 0 for seconds in values(f"seconds-{phase}"))
    planned = sum(next(iter(r["setup"]["optimizers"].values()))["planned_bytes"] for r in result.records)
    assert planned > 0 and values("exchanged-bytes") == [planned, planned]
    assert "shampoo at iteration 3" in result.output
    for name in ("refreshes-skipped", "refreshes-failed", "factors-given-up"):
        assert values(name) == [0, 0]


@pytest.mark.parametrize("method", ["soap", "kl-shampoo"])
def test_skipped_refreshes_are_counted_apart(launcher: Launcher, tmp_path: Path, method: str) -> None:
    flags = ["--optimizer", "shampoo", "--shampoo-method", method, "--shampoo-solver", "qr", "--shampoo-log-interval"]
    flags += ["1", "--shampoo-refresh-tolerance", "0.9", "--shampoo-refresh-interval", "2", "--shampoo-block-size"]
    layout = Layout(dp=2)
    args = [*tiny_gpt(iters=4), *layout.flags, *flags, "48", "--tensorboard-dir", str(tmp_path)]
    result = launcher.run(args, world_size=2, setup="tests.probes:count").check()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    refreshes, skipped = (
        [event.value for event in events.Scalars(f"shampoo/{name}")] for name in ("refreshes", "refreshes-skipped")
    )
    blocks = sum(next(iter(record["setup"]["optimizers"].values()))["owned"] for record in result.records)
    # Everything at first; then by turns, and a tolerance of nine tenths leaves most of it as it is.
    assert (refreshes[0], skipped[0]) == (2 * blocks, 0)
    assert sum(skipped) > sum(refreshes[1:])
    assert sum(refreshes) == sum(inner["roots"] for r in result.records for inner in r["setup"]["optimizers"].values())


def test_what_a_solver_does_not_know_is_left_out(launcher: Launcher, tmp_path: Path) -> None:
    flags = ["--optimizer", "shampoo", "--shampoo-solver", "newton", "--shampoo-log-interval", "2"]
    args = [*tiny_gpt(iters=2), *Layout(dp=2).flags, *flags, "--tensorboard-dir", str(tmp_path)]
    launcher.run(args, world_size=2).check()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    for name in events.Tags()["scalars"]:
        assert all(math.isfinite(event.value) for event in events.Scalars(name)), name
    assert [event.value for event in events.Scalars("shampoo/refreshes-failed")] == [0]
