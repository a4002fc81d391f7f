"""Faults in a real run: gradients that are not finite, loss scales that overflow, a solver that fails."""

from __future__ import annotations

import math
import re

import pytest

from tests.launch import Launcher, RunResult
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


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--shampoo-solver", "eigh"], "root"),
        (["--shampoo-solver", "newton"], "root"),
        (["--shampoo-method", "soap", "--shampoo-solver", "qr"], "eigenbasis"),
    ],
    ids=["eigh", "newton", "soap by qr"],
)
def test_a_solver_that_always_fails_is_named_and_the_run_goes_on(
    launcher: Launcher, flags: list[str], what: str
) -> None:
    layout = Layout(dp=2)
    args = [*tiny_gpt(iters=8), *layout.flags, *SHAMPOO, "--shampoo-log-interval", "4", *flags]
    result = launcher.run(args, world_size=2, setup="tests.probes:fail_solver").check()
    name = "decoder.layers.0.self_attention.linear_proj.weight[weight 0,0]"
    assert f"left {what} of {name}: every solver failed, the previous one stays (1 in a row)" in result.output
    assert f"left {what} of {name}: every solver failed 3 times in a row" in result.output
    assert "--shampoo-epsilon" in result.output
    assert all(map(math.isfinite, result.losses)) and len(result.losses) == 8
    assert result.losses[-1] < result.losses[0] - 0.1, "the grafting steps train"
    figures = [line for line in result.output.splitlines() if "shampoo at iteration" in line]
    assert len(figures) == 2
    for line in figures:
        values = dict(entry.split(": ") for entry in line.split(" | ")[1:])
        assert float(values["refreshes-failed"]) > 0
    # Two factors for each of the blocks, all of them given up after the third refresh.
    assert float(values["factors-given-up"]) == 2 * sum(blocks_of(result))


def test_a_solver_that_recovers_is_used_again(launcher: Launcher) -> None:
    layout = Layout(dp=2)
    flags = [*tiny_gpt(iters=12), *layout.flags, *SHAMPOO, "--shampoo-log-interval", "2"]
    result = launcher.run(flags, world_size=2, setup="tests.probes:fail_solver_for_a_while").check()
    given_up = re.findall(r"factors-given-up: (\S+)", result.output)
    failed = re.findall(r"refreshes-failed: (\S+)", result.output)
    # Steps 2 to 12 by twos: a third failure comes in step 3 or 4, and the last one in step 8.
    assert [float(value) > 0 for value in given_up] == [False, True, True, True, False, False]
    assert [float(value) > 0 for value in failed] == [True, True, True, True, False, False]
    assert all(map(math.isfinite, result.losses))


def blocks_of(result: RunResult) -> list[int]:
    """Blocks in the model, as the report at the start has them."""
    return [int(found) for found in re.findall(r"elements \(one tensor-parallel rank\), (\d+) blocks", result.output)]
