"""Runs of a model from one starting checkpoint, and how they are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.launch import Launcher, RunResult
from tests.layouts.cases import ITERATIONS, OURS
from tests.tiny import Layout


class Model:
    """A model with starting weights in a checkpoint, and its runs on one rank."""

    def __init__(self, launcher: Launcher, flags: list[str], folder: Path) -> None:
        """Save the starting weights.

        Args:
            launcher: runs `pretrain_gpt.py`.
            flags: of the model.
            folder: for the checkpoint.
        """
        self.launcher, self.flags, self.folder = launcher, flags, folder
        self.num_heads = int(flags[flags.index("--num-attention-heads") + 1])
        self._runs: dict[tuple[str, ...], RunResult] = {}
        saving = ["--save", folder, "--save-interval", "1", "--no-save-optim", "--no-save-rng"]
        launcher.run([*flags, *OURS, "--train-iters", "1", "--lr", "0", *saving]).check()

    def alone(self, *settings: str, probe: str = "count") -> RunResult:
        """The run on one rank, made once for each choice of settings."""
        key = (probe, *settings)
        if key not in self._runs:
            self._runs[key] = self.train(Layout(), probe, *settings)
        return self._runs[key]

    def train(self, layout: Layout, probe: str | None, *flags: str) -> RunResult:
        """Train ten steps from the starting weights.

        Args:
            layout: of the run.
            probe: function of `tests.probes`.
            flags: beside the model's and the layout's; they come last and so may replace others.
        """
        loading = ["--load", self.folder, "--finetune", "--no-load-optim", "--no-load-rng"]
        loading += ["--micro-batch-size", "1" if layout.dp == 3 else "3"]  # fewer, larger messages
        return self.launcher.run(
            [*self.flags, *layout.flags, *OURS, *loading, *flags],
            world_size=layout.world_size,
            setup=f"tests.probes:{probe}" if probe else None,
            record=["parameters"],
        ).check()

    def worst(
        self, result: RunResult, *settings: str, probe: str = "count", matrices_only: bool = False
    ) -> dict[str, float]:
        """Worst relative differences of a run from the one on one rank, of all parameters or of matrices alone."""
        alone = self.alone(*settings, probe=probe)
        parameters, expected = (compared(run, self.num_heads) for run in (result, alone))
        assert parameters.keys() == expected.keys()
        if matrices_only:
            expected = {name: tensor for name, tensor in expected.items() if tensor.ndim > 1}
        return {
            "loss": relative(result.losses, alone.losses),
            "gradient norm": relative(result.grad_norms, alone.grad_norms),
            "parameter": max(difference(parameters[name], tensor) for name, tensor in expected.items()),
        }


def compared(result: RunResult, heads: int) -> dict[str, torch.Tensor]:
    """Parameters by global name, but for the key bias of the GPT model.

    Softmax does not change when all keys move by a constant, so the key bias has no gradient but rounding noise, which
    Adam brings to full size: with plain Adam too it differs between any two layouts.
    """
    parameters = result.parameters()
    for name, tensor in parameters.items():
        if name.endswith("linear_qkv.bias"):
            parameters[name] = tensor.view(heads, 3, -1)[:, [0, 2]].flatten()
    return parameters


def difference(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative difference of two tensors in the Frobenius norm, computed in float32."""
    expected = expected.float()
    return float((tensor.float() - expected).norm() / expected.norm())


def relative(values: list[float], expected: list[float]) -> float:
    """Largest relative difference of any step."""
    assert len(values) == len(expected) == ITERATIONS
    return max(abs(value - other) / abs(other) for value, other in zip(values, expected, strict=True))


def check_collectives(result: RunResult, layout: Layout) -> int:
    """None of ours on tensor- or pipeline-parallel groups; on data-parallel ones as planned.

    Args:
        result: of a run with the probe `count`.
        layout: of the run.

    Returns:
        Bytes that all ranks send in a step.
    """
    assert layout.world_size == len(result.records)
    total = 0
    for record in result.records:
        optimizers = list(record["setup"]["optimizers"].values())
        for ours in optimizers:
            assert ours["group"] == _replicas(result, record, ours["expert"], layout.instances)
        shared = [ours for ours in optimizers if len(ours["group"]) > 1]
        expected: list[tuple[str, list[int]]] = []
        for ours in shared:
            calls = 1 if ours["replicated"] else 2
            name = "all_gather_into_tensor" if ours["replicated"] else "all_to_all_single"
            expected += [(name, ours["group"])] * calls * ours["steps"]
        seen = [(name, ranks) for name, ranks, _ in record["setup"]["collectives"]]
        assert sorted(seen) == sorted(expected)
        sent = sum(numel for _, _, numel in record["setup"]["collectives"])
        assert sent == sum(ours["bytes_sent"] for ours in shared)
        assert all(ours["bytes_sent"] == ours["steps"] * ours["planned_bytes"] for ours in shared)
        total += sum(ours["planned_bytes"] for ours in shared)
    return total


def _replicas(result: RunResult, record: dict[str, Any], expert: bool, instances: int) -> list[int]:
    """The ranks that hold the same parameters, within one instance of the distributed optimizer."""
    same = ("etp", "ep", "pp") if expert else ("tp", "pp")
    mine = record["position"]
    ranks = [
        rank for rank, other in enumerate(result.records) if all(other["position"][axis] == mine[axis] for axis in same)
    ]
    size = len(ranks) // instances
    first = ranks.index(record["rank"]) // size * size
    return ranks[first : first + size]


def check_grid(result: RunResult, alone: RunResult) -> None:
    """The blocks of all ranks together are those of one rank, with the same refresh turns."""
    assert _grid(result) == _grid(alone)


def _grid(result: RunResult) -> set[str]:
    return {
        repr(row)
        for record in result.records
        for ours in record["setup"]["optimizers"].values()
        for row in ours["grid"]
    }
