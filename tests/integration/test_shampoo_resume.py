"""Checkpoints of Shampoo: bit for bit on the layout that saved them, refused by name elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch import Launcher, RunResult
from tests.tiny import Layout, tiny_gpt, tiny_llama

SHAMPOO = [
    "--optimizer", "shampoo", "--shampoo-block-size", "32", "--shampoo-refresh-interval", "4", "--shampoo-start-step",
    "2", "--dataloader-type", "single",
]  # fmt: skip
SAVED, LAST = 3, 7
RUNS = {
    "DP2 distributed": (tiny_gpt(iters=LAST), Layout(dp=2), []),
    "DP2 fully reshardable, overlap": (
        tiny_gpt(iters=LAST), Layout(dp=2), ["--dist-ckpt-optim-fully-reshardable", "--overlap-grad-reduce",
                                             "--overlap-param-gather"],
    ),
    "TP2 replicated bf16": (tiny_llama(iters=LAST), Layout(tp=2, distributed=False), ["--bf16"]),
    "PP2 fp16": (tiny_gpt(iters=LAST), Layout(pp=2), ["--fp16", "--initial-loss-scale", "1024"]),
    "DP2 kl-soap, bf16 factors": (
        tiny_gpt(iters=LAST), Layout(dp=2), ["--shampoo-method", "kl-soap", "--shampoo-grafting", "adam",
                                             "--shampoo-factor-dtype", "bf16"],
    ),
    # Blocks of 32 x 32 with a left factor (fc2) and with a right one (fc1): two states of one shape.
    "TP2 one-sided": (tiny_gpt(iters=LAST), Layout(tp=2), ["--shampoo-method", "one-sided"]),
    "DP2 soap by qr, averaged directions": (
        tiny_gpt(iters=LAST), Layout(dp=2), ["--shampoo-method", "soap", "--shampoo-solver", "qr",
                                             "--shampoo-refresh-tolerance", "0.1", "--shampoo-momentum-placement",
                                             "after", "--shampoo-start-step", "1", "--shampoo-factor-dtype", "bf16"],
    ),
    "DP2 replicated kl-shampoo": (
        tiny_gpt(iters=LAST), Layout(dp=2, distributed=False), ["--shampoo-method", "kl-shampoo", "--shampoo-nesterov",
                                                                "--shampoo-start-step", "1"],
    ),
    "DP2 newton, adagrad": (
        tiny_gpt(iters=LAST), Layout(dp=2), ["--shampoo-solver", "newton", "--shampoo-grafting", "adagrad",
                                             "--shampoo-weight-decay", "independent"],
    ),
    "one rank, dropout": (
        tiny_gpt(iters=LAST), Layout(distributed=False), ["--attention-dropout", "0.1", "--hidden-dropout", "0.1"],
    ),
}  # fmt: skip


class Run:
    """A run that saves at iteration `SAVED` and goes on to `LAST`."""

    def __init__(self, launcher: Launcher, folder: Path, name: str, setup: str | None = None) -> None:
        model, self.layout, extra = RUNS[name]
        self.launcher, self.folder = launcher, folder
        self.flags = [*model, *SHAMPOO, *extra]
        self.unbroken = self._train(["--save", folder, "--save-interval", SAVED], setup=setup).check()

    def _train(self, flags: list, layout: Layout | None = None, setup: str | None = None) -> RunResult:
        layout = layout or self.layout
        return self.launcher.run(
            [*self.flags, *layout.flags, *flags], world_size=layout.world_size, record=["parameters"], setup=setup
        )

    def resume(self, *flags: str, layout: Layout | None = None, setup: str | None = None) -> RunResult:
        return self._train(["--load", self.folder, "--ckpt-step", SAVED, *flags], layout, setup)

    def is_continued_by(self, resumed: RunResult) -> bool:
        parameters, expected = resumed.parameters(), self.unbroken.parameters()
        assert resumed.records[-1]["iterations"] == list(range(SAVED + 1, LAST + 1))
        return (
            resumed.losses == self.unbroken.losses[SAVED:]
            and resumed.grad_norms == self.unbroken.grad_norms[SAVED:]
            and all(torch.equal(parameters[name], tensor) for name, tensor in expected.items())
        )


@pytest.fixture(scope="module")
def distributed(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(launcher, tmp_path_factory.mktemp("checkpoint"), "DP2 distributed")


@pytest.mark.parametrize("name", RUNS)
def test_resume_is_bit_for_bit(launcher: Launcher, tmp_path: Path, name: str) -> None:
    run = Run(launcher, tmp_path, name)
    assert run.is_continued_by(run.resume().check())


@pytest.mark.parametrize("setup", ["with_transformer_engine", "with_apex"])
@pytest.mark.parametrize("name", ["DP2 distributed", "TP2 replicated bf16", "PP2 fp16"])
def test_resume_where_a_fused_adam_is_installed(launcher: Launcher, tmp_path: Path, name: str, setup: str) -> None:
    """Its presence changes where Megatron looks for the optimizer's step."""
    run = Run(launcher, tmp_path, name, f"tests.probes:{setup}")
    resumed = run.resume(setup=f"tests.probes:{setup}").check()
    assert run.is_continued_by(resumed)
    without = Run(launcher, tmp_path, name)
    assert without.unbroken.losses == run.unbroken.losses
    # A checkpoint of either kind is one of the other.
    assert run.is_continued_by(without.resume(setup=f"tests.probes:{setup}").check())
    assert without.is_continued_by(without.resume().check())


def forget_factors() -> None:
    """Negative control: a resumed rank loses its factors (the checkpoint is read into the very tensors)."""
    from megatron.shampoo.mcore import checkpoint

    def load_blocks(optimizer: Any, loaded: Any) -> None:
        for state in optimizer.states:
            for side in state.sides:
                side.factor.zero_()

    checkpoint.load_blocks = load_blocks


def test_without_its_factors_a_resume_differs(distributed: Run) -> None:
    resumed = distributed.resume(setup="tests.integration.test_shampoo_resume:forget_factors").check()
    assert not distributed.is_continued_by(resumed)


REFUSED = {
    "ranks that would cut blocks": (Layout(tp=2), [], "are cut for --shampoo-tp-alignment 1, and 2 ranks would cut"),
    "another kind of optimizer": (Layout(dp=2, distributed=False), [], "use_distributed_optimizer True -> False"),
    "other blocks": (Layout(dp=2), ["--shampoo-block-size", "64"], "--shampoo-block-size 64"),
    "other turns": (Layout(dp=2), ["--shampoo-refresh-interval", "5"], "--shampoo-refresh-interval 5"),
    "another precision": (Layout(dp=2), ["--bf16"], "bf16 False -> True"),
    "another method": (
        Layout(dp=2), ["--shampoo-method", "one-sided"],
        "--shampoo-method one-sided: the checkpoint was saved with shampoo",
    ),
    "a solver without a basis": (
        Layout(dp=2), ["--shampoo-solver", "eigh"], "--shampoo-solver eigh: the checkpoint was saved with",
    ),
    "another grafting": (
        Layout(dp=2), ["--shampoo-grafting", "sgd"], "--shampoo-grafting sgd: the checkpoint was saved with adam",
    ),
    "shorter sides": (Layout(dp=2), ["--shampoo-max-dim", "64"], "--shampoo-max-dim 64: the checkpoint was saved with"),
    "heads": (Layout(dp=2), ["--shampoo-qkv", "heads"], "--shampoo-qkv heads: the checkpoint was saved with split"),
    "another learning rate": (Layout(dp=2), ["--lr", "5e-4"], "--lr 0.0005: the checkpoint was saved with 0.001"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_resume_is_refused_by_name(distributed: Run, case: str) -> None:
    layout, flags, message = REFUSED[case]
    resumed = distributed.resume(*flags, layout=layout)
    assert all(resumed.returncodes) and message in resumed.output
    assert "--no-load-optim" in resumed.output or "--override-opt-param-scheduler" in resumed.output
    assert "Traceback" not in resumed.output


def test_the_default_alignment_spelled_out_is_the_same(distributed: Run) -> None:
    assert distributed.is_continued_by(distributed.resume("--shampoo-tp-alignment", "1").check())


def test_what_the_state_does_not_depend_on_may_change(launcher: Launcher, tmp_path: Path) -> None:
    run = Run(launcher, tmp_path, "DP2 newton, adagrad")
    flags = ["--shampoo-solver", "eigh", "--shampoo-weight-decay", "l2", "--shampoo-nesterov"]
    resumed = run.resume(*flags, "--shampoo-epsilon", "1e-4", "--shampoo-update-rms-clip", "1").check()
    assert resumed.losses[0] == run.unbroken.losses[SAVED]
    assert not run.is_continued_by(resumed)


def test_weights_alone_load_on_another_layout(distributed: Run) -> None:
    resumed = distributed.resume("--no-load-optim", "--no-load-rng", layout=Layout(tp=2, dp=2)).check()
    assert resumed.losses[0] == pytest.approx(distributed.unbroken.losses[SAVED], rel=1e-5)


def test_adam_s_state_is_not_taken_for_shampoo_s(launcher: Launcher, tmp_path: Path) -> None:
    flags = [*tiny_gpt(iters=2), *Layout(dp=2).flags]
    launcher.run([*flags, "--save", tmp_path, "--save-interval", "1"], world_size=2).check()
    resumed = launcher.run([*flags, "--load", tmp_path, "--optimizer", "shampoo"], world_size=2)
    assert all(resumed.returncodes) and "was saved with --optimizer adam" in resumed.output


RATES = ["--lr", "5e-4", "--weight-decay", "0.2", "--decoupled-lr", "2e-4"]
"""Of a run that was saved with rates of 1e-3 and 4e-4, and a decay of 0.01."""


@pytest.mark.parametrize("optimizer", [SHAMPOO, ["--dataloader-type", "single"]], ids=["shampoo", "adam"])
@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=2, distributed=False)], ids=str)
def test_a_run_resumes_with_another_rate(
    launcher: Launcher, tmp_path: Path, layout: Layout, optimizer: list[str]
) -> None:
    """The flag says whose rates count; the output layer and the embedding have their own, in both cases."""
    model = [*tiny_llama(iters=LAST), *layout.flags, *optimizer]
    saved = [*model, "--decoupled-lr", "4e-4", "--save", tmp_path, "--save-interval", SAVED]
    loading = [*model, *RATES, "--load", tmp_path, "--ckpt-step", SAVED]
    unbroken = launcher.run(saved, world_size=2).check()
    new = launcher.run([*loading, "--override-opt-param-scheduler"], world_size=2).check()
    old = launcher.run([*loading, "--use-checkpoint-opt-param-scheduler"], world_size=2).check()
    assert _rates(unbroken) == _rates(old) == {1e-3, 4e-4}
    assert _rates(new) == {5e-4, 2e-4}
    assert new.losses[0] == old.losses[0] == unbroken.losses[SAVED]
    assert new.losses[1:] != old.losses[1:]


def _rates(result: RunResult) -> set[float]:
    return {rate for record in result.records for rates in record["learning_rates"] for rate in rates}
