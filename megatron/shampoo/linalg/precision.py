"""Full float32 matrix products, whatever the user set for TF32 or bfloat16 emulation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Run float32 matrix products at full precision inside the block, then restore the user's setting.

    A TF32 product in a factor update rotates the eigenbasis by tens of degrees after a gradient spike
    (Source: Emerging-Optimizers' precision notes, its pull request 218).
    """
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
