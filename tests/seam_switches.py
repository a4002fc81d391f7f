"""A setup for `tests.launch`: Megatron's faults mended, but for those that the test wants to see."""

from __future__ import annotations

import os
from collections.abc import Mapping

from megatron.shampoo.mcore.seams import install_mends
from megatron.shampoo.mcore.seams.registry import Seam

SETUP = f"{__name__}:install"
_VARIABLE = "TEST_SEAMS_OFF"


def off(*names: str) -> Mapping[str, str]:
    """Environment in which `SETUP` leaves the named seams out."""
    return {_VARIABLE: "\n".join(names)}


def install() -> list[str]:
    """Install the mends but for those that `off` names; ``main`` does not install these later either.

    Returns:
        Names of the seams that were applied.
    """
    left_out = os.environ.get(_VARIABLE, "").split("\n")
    Seam.needed = lambda self: self.name not in left_out and self.probe()  # type: ignore[method-assign]
    return install_mends()
