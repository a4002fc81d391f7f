"""Where a run is made: commit, sources, versions, hardware."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = ("megatron-core", "torch", "emerging-optimizers", "numpy")


def environment(root: Path) -> dict[str, Any]:
    """Describe the checkout and the machine.

    Args:
        root: of the checkout.

    Returns:
        For a JSON file: `commit` (None outside git) and whether files differ from it, `sources` (a hash of what a run
        executes of ours), versions, hardware.
    """
    return {
        "commit": _git(root, "rev-parse", "HEAD"),
        "is_modified": bool(_git(root, "status", "--porcelain", "--untracked-files=no")),
        "sources": sources_digest(root),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "hardware": {
            "processor": processor(),
            "cores": available_cores(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        },
    }


def sources_digest(root: Path) -> str:
    """Hash the sources that a run executes: two runs of one digest trained with the same code.

    Args:
        root: of the checkout.

    Returns:
        SHA-256 over `pretrain_gpt.py` and the packages that it uses, without the tools' own.
    """
    digest = hashlib.sha256()
    folders = [root / "megatron" / name for name in ("cpu", "data_tools", "gpt", "shampoo")]
    for path in [root / "pretrain_gpt.py", *(path for folder in folders for path in sorted(folder.rglob("*.py")))]:
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def available_cores() -> int:
    """Count the cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Name the processor."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
