"""Runs that save, runs that continue them elsewhere, and what their checkpoints hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from tests.launch import Launcher, RunResult
from tests.reshard.cases import LAST, MODELS, OURS, SAVED
from tests.tiny import Layout


class Saved:
    """An unbroken run, with a checkpoint on the way."""

    def __init__(self, launcher: Launcher, folder: Path, model: str, layout: Layout, flags: tuple[str, ...]) -> None:
        """Train.

        Args:
            launcher: runs `pretrain_gpt.py`.
            folder: for the checkpoint.
            model: key of `MODELS`.
            layout: that saves.
            flags: beside those of the model and the layout, also when it is resumed.
        """
        self.launcher, self.folder, self.layout = launcher, folder, layout
        self.flags = [*MODELS[model], *OURS, *flags]
        self.unbroken = self.train(layout, "--save", folder, "--save-interval", SAVED).check()

    def train(self, layout: Layout, *flags: Any, setup: str | None = None) -> RunResult:
        """A run with these flags in addition."""
        everything = [*self.flags, *layout.flags, *flags]
        return self.launcher.run(everything, world_size=layout.world_size, record=["parameters"], setup=setup)

    def resume(self, layout: Layout, *flags: Any, setup: str | None = None) -> RunResult:
        """Continue from the checkpoint."""
        return self.train(layout, "--load", self.folder, "--ckpt-step", SAVED, *flags, setup=setup)

    def worst(self, resumed: RunResult) -> dict[str, float]:
        """Largest relative differences between the rest of the unbroken run and a resumed one."""
        assert resumed.records[-1]["iterations"] == list(range(SAVED + 1, LAST + 1))
        parameters, expected = resumed.parameters(), self.unbroken.parameters()
        return {
            "loss": max(abs(a - b) / b for a, b in zip(resumed.losses, self.unbroken.losses[SAVED:], strict=True)),
            "parameter": max(_difference(parameters[name], tensor) for name, tensor in expected.items()),
        }


def _difference(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    rows = min(len(tensor), len(expected))  # a vocabulary may be padded to other lengths
    tensor, expected = tensor[:rows].float(), expected[:rows].float()
    return float((tensor - expected).norm() / expected.norm())


def tensors_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a `torch_dist` checkpoint, whole, by key."""
    state: dict[str, Any] = {}
    _load_state_dict(state, FileSystemReader(checkpoint), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


def differing(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> list[str]:
    """Keys whose tensors are not bit for bit the same; rows that pad a vocabulary do not count."""
    assert one.keys() == two.keys()
    return [key for key in one if not _equal(one[key], two[key])]


def _equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    if one.ndim and one.shape[0] != two.shape[0]:
        rows = min(len(one), len(two))
        one, two = one[:rows], two[:rows]
    return torch.equal(one.nan_to_num(nan=7.0), two.nan_to_num(nan=7.0))
