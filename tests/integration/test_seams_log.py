"""The log lines show each interval's own loss; without the seam the second one shows the mean of two intervals."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from megatron.shampoo.mcore.seams import first_log_line
from tests import seam_switches
from tests.launch import Launcher, RunResult
from tests.tiny import tiny_gpt

NAME = first_log_line.SEAMS[0].name


def train(launcher: Launcher, iters: int, log_interval: int, *left_out: str) -> RunResult:
    """Run on one rank with the mends, but for some of them."""
    flags = tiny_gpt(iters=iters, log_interval=log_interval)
    return launcher.run(flags, setup=seam_switches.SETUP, env=seam_switches.off(*left_out)).check()


def logged_losses(result: RunResult) -> dict[int, float]:
    """The loss in each log line, by iteration."""
    return {int(i): float(loss) for i, loss in re.findall(r"iteration +(\d+)/.*lm loss: (\S+) ", result.output)}


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)


def test_each_line_shows_the_loss_of_its_own_iteration(launcher: Launcher) -> None:
    result = train(launcher, 4, 1)
    assert logged_losses(result) == pytest.approx(dict(enumerate(result.losses, start=1)), rel=1e-6)


def test_without_the_seam_the_second_line_shows_a_mean(launcher: Launcher) -> None:
    result = train(launcher, 3, 1, NAME)
    first, second, third = result.losses
    expected = {1: first, 2: mean([first, second]), 3: third}
    assert logged_losses(result) == pytest.approx(expected, rel=1e-6)
    assert abs(first - second) > 1e-3


def test_a_first_iteration_inside_an_interval_is_logged_and_counted_in_it(launcher: Launcher) -> None:
    result = train(launcher, 4, 2)
    expected = {1: result.losses[0], 2: mean(result.losses[:2]), 4: mean(result.losses[2:])}
    assert logged_losses(result) == pytest.approx(expected, rel=1e-6)
