"""The optimizer's metrics reach Megatron's TensorBoard writer."""

from __future__ import annotations

from pathlib import Path

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
