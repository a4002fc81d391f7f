"""What a seam is, and how seams are put into Megatron.

A seam puts one function of ours in the place of one of Megatron's, where Megatron has no hook. Megatron's files are
never copied or edited; a run changes the functions in its own process, before it parses its arguments.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Function = Callable[..., Any]

_MARK = "__megatron_shampoo_seam__"


@dataclass(frozen=True, kw_only=True)
class Seam:
    """One function of Megatron's and what takes its place."""

    name: str
    """Unique among the seams."""
    target: str
    """Dotted name of the function or method, as its callers look it up: ``package.module.Class.method``."""
    reason: str
    """What is wrong or missing without the seam."""
    tested_versions: tuple[str, ...] = ("0.19",)
    """Release series of megatron-core (major.minor) that the seam was tested with."""
    probe: Callable[[], bool]
    """Whether this Megatron still behaves as ``reason`` says; cheap, and without process groups."""
    replace: Callable[[Function], Function]
    """From Megatron's function to the one that takes its place."""

    def needed(self) -> bool:
        """Whether this Megatron needs the seam; a later one may have mended the fault itself."""
        return self.probe()

    def installed(self) -> bool:
        """Whether the seam is in place."""
        owner, attribute = self._locate()
        return self.name in _seams_of(getattr(owner, attribute))

    def apply(self) -> None:
        """Put our function in the place of Megatron's. Staticmethods and classmethods stay what they are."""
        owner, attribute = self._locate()
        static = inspect.getattr_static(owner, attribute)
        kind = type(static) if isinstance(static, (staticmethod, classmethod)) else None
        original = static.__func__ if kind is not None else static
        replacement = self.replace(original)
        setattr(replacement, _MARK, (*_seams_of(original), self.name))
        setattr(owner, attribute, replacement if kind is None else kind(replacement))

    def _locate(self) -> tuple[Any, str]:
        """The module or class that holds the target, and the target's name in it."""
        *path, attribute = self.target.split(".")
        depth = len(path)
        while depth:
            try:
                owner = importlib.import_module(".".join(path[:depth]))
                break
            except ModuleNotFoundError as error:
                if error.name is None or not ".".join(path).startswith(error.name):
                    raise
                depth -= 1
        else:
            raise ValueError(f"seam {self.name}: {self.target} is in no module")
        for part in path[depth:]:
            owner = getattr(owner, part)
        return owner, attribute


def _seams_of(function: Any) -> tuple[str, ...]:
    """Names of the seams in a function, innermost first."""
    return getattr(function, _MARK, ())


def check_version(seams: Iterable[Seam], version: str) -> None:
    """Refuse a megatron-core that a seam was not tested with.

    Args:
        seams: the seams that are to be installed.
        version: the installed megatron-core's.

    Raises:
        NotImplementedError: its major.minor is not among a seam's tested versions.
    """
    series = ".".join(version.split(".")[:2])
    for seam in seams:
        if series not in seam.tested_versions:
            tested = " or ".join(f"{tested}.*" for tested in seam.tested_versions)
            raise NotImplementedError(
                f"megatron-core {version} is installed, but {seam.target}, which this package replaces in part, was "
                f"tested with megatron-core {tested} only. Install that version: pip install "
                f"'megatron-core=={seam.tested_versions[-1]}.*'"
            )


def install(seams: Iterable[Seam]) -> list[str]:
    """Install the seams that this Megatron needs and that are not in place yet.

    Args:
        seams: in the order in which they are to be applied.

    Returns:
        Names of the seams that this call applied.

    Raises:
        NotImplementedError: the installed megatron-core is not one that the seams were tested with.
    """
    from megatron.core.package_info import __version__

    seams = tuple(seams)
    check_version(seams, __version__)
    applied = []
    for seam in seams:
        if not seam.installed() and seam.needed():
            seam.apply()
            applied.append(seam.name)
    return applied
