"""Megatron's compiled dataset helpers, as its wheel ships them."""

from __future__ import annotations

import importlib.util
import os

from megatron.core.datasets import utils


def _keep_shipped_helpers() -> None:
    """Stand in for `make`: there is nothing to build."""


def use_shipped_helpers() -> None:
    """Keep `pretrain` from building the helpers when they are there already.

    Megatron 0.19 runs `make` in its dataset directory at every start. Its wheel ships the compiled helpers and no
    Makefile, so `make` fails and ends the run. A source checkout has a Makefile, and there nothing changes.
    """
    folder = os.path.dirname(utils.__file__)
    shipped = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    if shipped and not os.path.exists(os.path.join(folder, "Makefile")):
        utils.compile_helpers = _keep_shipped_helpers
