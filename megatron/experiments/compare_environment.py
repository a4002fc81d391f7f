"""Where a run is made: commit, sources, versions, hardware."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import Any

import psutil

from megatron.cpu.environment import available_cores
from megatron.experiments.machine import git, package_versions, processor


def environment(root: Path) -> dict[str, Any]:
    """Describe the checkout and the machine.

    Args:
        root: of the checkout.

    Returns:
        For a JSON file: `commit` (None outside git) and whether files differ from it, `sources` (a hash of what a run
        executes of ours), versions, hardware.
    """
    return {
        "commit": git(root, "rev-parse", "HEAD"),
        "is_modified": bool(git(root, "status", "--porcelain", "--untracked-files=no")),
        "sources": sources_digest(root),
        "versions": {"python": platform.python_version(), **package_versions()},
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
