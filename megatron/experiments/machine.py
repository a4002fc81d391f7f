"""What results depend on beside the code: machine, versions, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("megatron-core", "torch", "emerging-optimizers", "numpy")


def describe(root: Path) -> dict[str, Any]:
    """Describe this machine and checkout.

    Args:
        root: the checkout.

    Returns:
        For JSON.
    """
    import psutil

    return {
        "processor": processor(),
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average_at_start": os.getloadavg(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": package_versions(),
        "commit": git(root, "rev-parse", "HEAD"),
        "uncommitted_changes": bool(git(root, "status", "--porcelain")),
    }


def processor() -> str:
    """Name the processor."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def package_versions() -> dict[str, str | None]:
    """Versions of the packages that results depend on; None where one is not installed."""
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git(root: Path, *arguments: str) -> str | None:
    """What git says about a checkout.

    Args:
        root: the checkout.
        *arguments: of git.

    Returns:
        Its output; None without git, or in an unpacked archive.
    """
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
