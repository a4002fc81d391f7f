"""Full float32 matrix products, whatever the user set for TF32 or bfloat16 emulation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_BACKENDS: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
_FULL = "ieee"


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Run float32 matrix products at full precision inside the block, then restore the user's setting.

    A TF32 product in a factor update rotates the eigenbasis by tens of degrees after a gradient spike
    (Source: Emerging-Optimizers' precision notes, its pull request 218). Read and written through the settings per
    backend: `torch.get_float32_matmul_precision` raises where the user has used those (torch 2.9).
    """
    before = [backend.fp32_precision for backend in _BACKENDS]
    if before == [_FULL] * len(_BACKENDS):
        yield
        return
    for backend in _BACKENDS:
        backend.fp32_precision = _FULL
    try:
        yield
    finally:
        for backend, precision in zip(_BACKENDS, before, strict=True):
            backend.fp32_precision = precision
