"""Faults in a real run: gradients that are not finite, loss scales that overflow, a solver that fails."""

from __future__ import annotations

import math

import pytest

from tests.launch import Launcher
from tests.tiny import Layout, tiny_gpt

SHAMPOO = ["--optimizer", "shampoo", "--shampoo-block-size", "32", "--shampoo-refresh-interval", "2"]


@pytest.mark.parametrize("clip", ["0", "1"], ids=["no clipping", "clipping"])
@pytest.mark.parametrize("precision", [[], ["--bf16"]], ids=["fp32", "bf16"])
def test_a_nan_gradient_skips_the_step_everywhere(launcher: Launcher, clip: str, precision: list[str]) -> None:
    layout = Layout(tp=2, dp=2)
    flags = [*tiny_gpt(iters=5), *layout.flags, *SHAMPOO, *precision, "--clip-grad", clip]
    result = launcher.run(flags, world_size=4, setup="tests.probes:spoil_gradient").check()
    for record in result.records:
        assert record["skipped"] == [False, False, True, False, False]
        assert record["setup"]["unchanged"] == [True]
    assert all(map(math.isfinite, result.losses))
    assert "this step is skipped" in result.output
    assert "rank 3: gradient of decoder.layers." in result.output


def test_an_overflowing_loss_scale_leaves_the_state_alone(launcher: Launcher) -> None:
    layout = Layout(dp=2)
    scale = str(2.0**40)  # overflows float16 until it has been halved often enough
    flags = [*tiny_gpt(iters=6), *layout.flags, *SHAMPOO, "--fp16", "--initial-loss-scale", scale, "--hysteresis", "1"]
    result = launcher.run(flags, world_size=2, setup="tests.probes:count").check()
    skipped = result.records[0]["skipped"]
    assert skipped[0] and result.records[1]["skipped"] == skipped
    assert result.records[0]["setup"]["steps"] == skipped.count(False)


def test_a_solver_that_always_fails_stops_the_run_by_name(launcher: Launcher) -> None:
    flags = [*tiny_gpt(iters=8), *SHAMPOO]
    result = launcher.run(flags, setup="tests.probes:fail_solver")
    assert result.returncodes != [0]
    assert "left root of decoder.layers.0.self_attention.linear_proj.weight[weight 0,0] failed 3 times in a row" in (
        result.output
    )
    assert "--shampoo-epsilon" in result.output
