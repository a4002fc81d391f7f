"""One training run, whatever the layout: losses, gradient norms and parameters of the real `pretrain_gpt.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.launch import Launcher, RunResult
from tests.tiny import Layout, tiny_gpt, tiny_llama

SHAMPOO = [
    "--optimizer", "shampoo", "--shampoo-block-size", "32", "--shampoo-tp-alignment", "4",
    "--shampoo-log-interval", "0", "--global-batch-size", "12",
]  # fmt: skip
SCHEDULE = ["--shampoo-start-step", "3", "--shampoo-refresh-interval", "3"]
MODELS = {
    "gpt": tiny_gpt(num_layers=4),
    "llama": tiny_llama(num_layers=2, heads=8, query_groups=4),
}
METHODS = ["soap", "kl-soap", "kl-shampoo", "one-sided"]
"""Beside the default; they take the same route through plan and exchange, so four layouts are enough."""
LOSS, GRAD_NORM, PARAMETER = 1e-5, 1e-5, 1e-4
"""Relative tolerances over 10 steps in float32. Rounding alone: gradients of two layouts differ by about 1e-7, and ten
steps of an optimizer that forgets the gradient's scale amplify that; plain Adam differs as much."""

GPT = [
    Layout(dp=2), Layout(dp=3), Layout(dp=4), Layout(tp=2), Layout(tp=4), Layout(pp=2), Layout(pp=2, vpp=2),
    Layout(tp=2, pp=2), Layout(tp=2, dp=2), Layout(tp=2, sp=True), Layout(dp=2, distributed=False),
    Layout(tp=2, dp=2, distributed=False), Layout(pp=2, dp=2),
]  # fmt: skip
LLAMA = [Layout(tp=2), Layout(tp=4), Layout(dp=3), Layout(tp=2, dp=2), Layout(tp=2, sp=True), Layout(pp=2)]
CASES = [("gpt", layout) for layout in GPT] + [("llama", layout) for layout in LLAMA]


class Model:
    """A model with starting weights in a checkpoint, and its run on one rank."""

    def __init__(self, launcher: Launcher, flags: list[str], folder: Path) -> None:
        self.launcher, self.flags, self.folder = launcher, flags, folder
        self.runs: dict[tuple[str, ...], RunResult] = {}
        saving = ["--save", folder, "--save-interval", "1", "--no-save-optim", "--no-save-rng"]
        launcher.run([*flags, *SHAMPOO, "--train-iters", "1", "--lr", "0", *saving]).check()

    def alone(self, *schedule: str) -> RunResult:
        """The run on one rank, made once for each schedule."""
        if schedule not in self.runs:
            self.runs[schedule] = self.train(Layout(), "tests.probes:count", *schedule)
        return self.runs[schedule]

    def train(self, layout: Layout, setup: str | None, *schedule: str) -> RunResult:
        loading = ["--load", self.folder, "--finetune", "--no-load-optim", "--no-load-rng"]
        loading += ["--micro-batch-size", "1" if layout.dp == 3 else "3"]  # fewer, larger messages
        return self.launcher.run(
            [*self.flags, *layout.flags, *SHAMPOO, *loading, *schedule],
            world_size=layout.world_size,
            setup=setup,
            record=["parameters"],
        ).check()

    def worst(self, result: RunResult, *schedule: str) -> dict[str, float]:
        """Worst relative differences of a run from the one on one rank."""
        alone = self.alone(*schedule)
        parameters, expected = compared(result), compared(alone)
        assert parameters.keys() == expected.keys()
        return {
            "loss": _relative(result.losses, alone.losses),
            "gradient norm": _relative(result.grad_norms, alone.grad_norms),
            "parameter": max(
                float((parameters[name] - tensor).norm() / tensor.norm()) for name, tensor in expected.items()
            ),
        }


def compared(result: RunResult) -> dict[str, torch.Tensor]:
    """Parameters by global name, but for the key bias of the GPT model.

    Softmax does not change when all keys move by a constant, so the key bias has no gradient but rounding noise, which
    Adam brings to full size: with plain Adam too it differs between any two layouts.
    """
    parameters = result.parameters()
    for name, tensor in parameters.items():
        if name.endswith("linear_qkv.bias"):
            parameters[name] = tensor.view(4, 3, 16)[:, [0, 2]].flatten()  # 4 heads of width 16
    return parameters


def _relative(values: list[float], expected: list[float]) -> float:
    assert len(values) == len(expected) == 10
    return max(abs(value - other) / abs(other) for value, other in zip(values, expected, strict=True))


@pytest.fixture(scope="module")
def models(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    return {name: Model(launcher, flags, tmp_path_factory.mktemp(name)) for name, flags in MODELS.items()}


@pytest.mark.parametrize(("model", "layout"), CASES, ids=[f"{model} {layout}" for model, layout in CASES])
def test_the_run_does_not_depend_on_the_layout(models: dict[str, Model], model: str, layout: Layout) -> None:
    result = models[model].train(layout, "tests.probes:count", *SCHEDULE)
    worst = models[model].worst(result, *SCHEDULE)
    print(f"{model} {layout}: {worst}")
    assert worst["loss"] <= LOSS and worst["gradient norm"] <= GRAD_NORM and worst["parameter"] <= PARAMETER, worst
    check_collectives(result, layout)
    check_grid(result, models[model].alone(*SCHEDULE))


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=4), Layout(dp=3), Layout(pp=2)], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_same_run_on_every_layout(models: dict[str, Model], method: str, layout: Layout) -> None:
    flags = ("--shampoo-method", method, "--shampoo-refresh-interval", "3")
    result = models["gpt"].train(layout, "tests.probes:count", *flags)
    worst = models["gpt"].worst(result, *flags)
    print(f"{method} {layout}: {worst}")
    assert worst["loss"] <= LOSS and worst["gradient norm"] <= GRAD_NORM and worst["parameter"] <= 2 * PARAMETER, worst
    check_collectives(result, layout)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp=3), Layout(dp=2, distributed=False)], ids=str)
@pytest.mark.parametrize("start_step", ["1", "3"])
def test_momentum_after_preconditioning_too(models: dict[str, Model], start_step: str, layout: Layout) -> None:
    """One payload travels to the owners instead of two, or grafting steps before the start step."""
    flags = ("--shampoo-momentum-placement", "after", "--shampoo-nesterov", "--shampoo-start-step", start_step)
    result = models["gpt"].train(layout, "tests.probes:count", *flags)
    worst = models["gpt"].worst(result, *flags)
    assert worst["loss"] <= LOSS and worst["gradient norm"] <= GRAD_NORM and worst["parameter"] <= 5 * PARAMETER, worst
    check_collectives(result, layout)


def test_soap_without_damping_is_another_run_on_every_layout(models: dict[str, Model]) -> None:
    """Negative control of the damping: without it Adam in the basis brings rounding errors to full size."""
    flags = ("--shampoo-method", "soap", "--shampoo-solver", "eigh", "--shampoo-epsilon", "1e-30")
    worst = models["gpt"].worst(models["gpt"].train(Layout(dp=3), None, *flags), *flags)
    assert worst["loss"] > LOSS and worst["gradient norm"] > 10 * GRAD_NORM, worst


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp=2)], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_with_the_default_schedule_too(models: dict[str, Model], model: str, layout: Layout) -> None:
    """The root of the very first gradient, of a nearly singular factor, amplifies rounding in the parameters more."""
    worst = models[model].worst(models[model].train(layout, None))
    assert worst["loss"] <= LOSS and worst["gradient norm"] <= GRAD_NORM and worst["parameter"] <= 5 * PARAMETER, worst


def check_collectives(result: RunResult, layout: Layout) -> None:
    """None of ours on tensor- or pipeline-parallel groups; on data-parallel ones as planned."""
    assert layout.world_size == len(result.records)
    for record in result.records:
        seen, position = record["setup"], record["position"]
        ours = next(iter(seen["optimizers"].values()))
        data_parallel = [
            rank for rank, other in enumerate(result.records)
            if (other["position"]["tp"], other["position"]["pp"]) == (position["tp"], position["pp"])
        ]  # fmt: skip
        names = {name for name, _, _ in seen["collectives"]}
        if layout.dp == 1:
            assert not names, f"one data-parallel rank, but {names}"
            continue
        assert names == {"all_to_all_single" if layout.distributed else "all_gather_into_tensor"}
        assert all(ranks == data_parallel for _, ranks, _ in seen["collectives"])
        assert len(seen["collectives"]) == 10 * (2 if layout.distributed else 1)
        assert sum(sent for _, _, sent in seen["collectives"]) == 10 * ours["planned_bytes"] == ours["bytes_sent"]


def check_grid(result: RunResult, alone: RunResult) -> None:
    """The blocks of all ranks together are those of one rank, with the same refresh turns."""
    blocks = {
        repr(row) for record in result.records for o in record["setup"]["optimizers"].values() for row in o["grid"]
    }
    expected = {repr(row) for o in alone.records[0]["setup"]["optimizers"].values() for row in o["grid"]}
    assert blocks == expected


def test_a_dropped_fragment_is_seen(models: dict[str, Model]) -> None:
    """Negative control: the comparison fails when one fragment of a cut block is lost."""
    result = models["gpt"].train(Layout(dp=2), "tests.probes:drop_fragment", *SCHEDULE)
    worst = models["gpt"].worst(result, *SCHEDULE)
    assert worst["parameter"] > 10 * PARAMETER, worst
    assert worst["loss"] > LOSS or worst["gradient norm"] > GRAD_NORM, worst


def test_another_alignment_is_another_run(models: dict[str, Model]) -> None:
    """Negative control: with another alignment the blocks are others, and so is the run."""
    other = ("--shampoo-tp-alignment", "1", "--shampoo-block-size", "64")
    worst = models["gpt"].worst(models["gpt"].train(Layout(), None, *SCHEDULE, *other), *SCHEDULE)
    assert worst["parameter"] > 10 * PARAMETER, worst
