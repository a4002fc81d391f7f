"""Plain Adam in Megatron's distributed optimizer resumes bit for bit; without a seam, the fault that it mends shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.shampoo.mcore.seams import bucket_padding, step_per_parameter
from tests import seam_switches
from tests.launch import Launcher, RunResult
from tests.tiny import Layout, tiny_gpt

SAVE_STEP, OWN_STEPS, LOAD_WITHOUT, SAVE_EMPTY, LOAD_EMPTY = (seam.name for seam in step_per_parameter.SEAMS)
PADDING = bucket_padding.SEAMS[0].name

FORMATS = {"dp_reshardable": [], "fully_reshardable": ["--dist-ckpt-optim-fully-reshardable"]}
# One bucket per parameter: those of 64 elements are padded to 128, and rank 1 holds nothing but the padding.
SEVERAL_BUCKETS = ["--overlap-grad-reduce", "--ddp-bucket-size", "1"]
MODELS = {"fp32, many buckets": SEVERAL_BUCKETS, "bf16, one bucket": ["--bf16"]}
LAYOUT = Layout(dp=2)
SAVED, LAST = 2, 4


class Trained:
    """A run that saves at iteration `SAVED` and goes on to `LAST`."""

    def __init__(self, launcher: Launcher, folder: Path, flags: list[str], left_out: tuple[str, ...] = ()) -> None:
        self.launcher, self.folder, self.flags = launcher, folder, [*tiny_gpt(iters=LAST), *LAYOUT.flags, *flags]
        self.unbroken = self.run(["--save", folder, "--save-interval", SAVED], left_out)

    def run(self, flags: list[str | Path | int], left_out: tuple[str, ...]) -> RunResult:
        return self.launcher.run(
            [*self.flags, *flags],
            world_size=LAYOUT.world_size,
            setup=seam_switches.SETUP,
            env=seam_switches.off(*left_out),
            record=["parameters"],
        )

    def resume(self, *left_out: str) -> RunResult:
        """Load the checkpoint of iteration `SAVED` and go on to `LAST`."""
        return self.run(["--load", self.folder, "--ckpt-step", SAVED], left_out)

    def is_equal(self, resumed: RunResult) -> bool:
        """Whether losses, norms and parameters of a resumed run are bit for bit those of the unbroken one."""
        resumed.check()
        assert resumed.records[0]["iterations"] == list(range(SAVED + 1, LAST + 1))
        parameters, expected = resumed.parameters(), self.unbroken.parameters()
        return (
            resumed.losses == self.unbroken.losses[SAVED:]
            and resumed.grad_norms == self.unbroken.grad_norms[SAVED:]
            and parameters.keys() == expected.keys()
            and all(torch.equal(parameters[name], tensor) for name, tensor in expected.items())
        )


@pytest.fixture(scope="module")
def trained(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Trained]:
    """By model and format, a trained and saved run with all seams."""
    runs = {
        (model, checkpoint): Trained(launcher, tmp_path_factory.mktemp("checkpoint"), flags + FORMATS[checkpoint])
        for model, flags in MODELS.items()
        for checkpoint in FORMATS
    }
    for run in runs.values():
        run.unbroken.check()
    return runs


@pytest.mark.parametrize("checkpoint", FORMATS)
@pytest.mark.parametrize("model", MODELS)
def test_resume_is_bit_for_bit(trained: dict[tuple[str, str], Trained], model: str, checkpoint: str) -> None:
    run = trained[model, checkpoint]
    assert run.is_equal(run.resume())


@pytest.mark.parametrize("checkpoint", FORMATS)
def test_without_own_steps_a_resume_differs(trained: dict[tuple[str, str], Trained], checkpoint: str) -> None:
    run = trained["fp32, many buckets", checkpoint]
    assert not run.is_equal(run.resume(OWN_STEPS))


@pytest.mark.parametrize(
    ("seam", "checkpoint", "message"),
    [
        (SAVE_STEP, "dp_reshardable", "assert len(steps) == 1"),
        (SAVE_STEP, "fully_reshardable", "assert len(steps) == 1"),
        (LOAD_WITHOUT, "fully_reshardable", "KeyError: 'step'"),
        (LOAD_WITHOUT, "dp_reshardable", "a leaf Variable that requires grad"),
        (LOAD_EMPTY, "dp_reshardable", "Cannot merge two lists with different lengths"),
    ],
)
def test_without_the_seam_a_resume_fails(
    trained: dict[tuple[str, str], Trained], seam: str, checkpoint: str, message: str
) -> None:
    resumed = trained["fp32, many buckets", checkpoint].resume(seam)
    assert 0 not in resumed.returncodes
    assert message in resumed.output


def test_without_the_seam_a_bucket_of_padding_cannot_be_saved(launcher: Launcher, tmp_path: Path) -> None:
    run = Trained(launcher, tmp_path, SEVERAL_BUCKETS, (SAVE_EMPTY,))
    assert "AssertionError: empty bucket encountered" in run.unbroken.output
    assert any(run.unbroken.returncodes)


def test_without_the_seam_state_behind_padding_is_saved_wrong(launcher: Launcher, tmp_path: Path) -> None:
    run = Trained(launcher, tmp_path, SEVERAL_BUCKETS + FORMATS["fully_reshardable"], (PADDING,))
    run.unbroken.check()
    assert not run.is_equal(run.resume())


def test_fully_reshardable_state_of_many_buckets_moves_to_another_layout(
    trained: dict[tuple[str, str], Trained], launcher: Launcher
) -> None:
    run = trained["fp32, many buckets", "fully_reshardable"]
    load = ["--load", run.folder, "--ckpt-step", SAVED]
    flags = [*tiny_gpt(iters=LAST), *Layout(tp=2).flags, *load]
    moved = launcher.run(flags, world_size=2, setup=seam_switches.SETUP).check()
    assert moved.losses == pytest.approx(run.unbroken.losses[SAVED:], rel=1e-6)
