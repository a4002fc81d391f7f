"""Adam's checkpoints too move between runs with and without expert parallelism, and resume with another rate."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import seam_switches
from tests.launch import Launcher, RunResult
from tests.layouts.cases import EXPERTS
from tests.tiny import Layout, tiny_llama

SAVED, LAST = 2, 4
FLAGS = [*tiny_llama(heads=8, query_groups=4, iters=LAST), *EXPERTS, "--dataloader-type", "single",
         "--dist-ckpt-optim-fully-reshardable"]  # fmt: skip
FEW, MANY = Layout(), Layout(dp=2, ep=2)


def resume(launcher: Launcher, folder: Path, layout: Layout, *flags: str, off: tuple[str, ...] = ()) -> RunResult:
    return launcher.run(
        [*FLAGS, *layout.flags, "--load", folder, "--ckpt-step", SAVED, *flags],
        world_size=layout.world_size,
        setup=seam_switches.SETUP,
        env=seam_switches.off(*off),
    )


@pytest.mark.parametrize(("before", "after"), [(MANY, FEW), (FEW, MANY)], ids=["off", "on"])
def test_expert_parallelism_may_change(launcher: Launcher, tmp_path: Path, before: Layout, after: Layout) -> None:
    saving = [*FLAGS, *before.flags, "--save", tmp_path, "--save-interval", SAVED]
    unbroken = launcher.run(saving, world_size=before.world_size).check()
    resumed = resume(launcher, tmp_path, after).check()
    assert resumed.losses == pytest.approx(unbroken.losses[SAVED:], rel=1e-5)
    assert any(resume(launcher, tmp_path, after, off=("chain_length",)).returncodes)
    if before is FEW:
        return
    rates = ("--lr", "5e-4", "--override-opt-param-scheduler")
    resume(launcher, tmp_path, before, *rates).check()
    without = resume(launcher, tmp_path, before, *rates, off=("rates_of_sharded_groups",))
    assert any(without.returncodes) and "KeyError" in without.output
