"""Shampoo for Megatron: a Kronecker-factored optimizer inside the distributed optimizer.

`Shampoo` is also a plain `torch.optim.Optimizer` for one process. Names are imported on first use, so that
`import megatron.shampoo` costs nothing.
"""

from typing import Any

__version__ = "0.1.0"
__all__ = ["Grafting", "Shampoo", "ShampooConfig", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Shampoo":
        from megatron.shampoo.optimizer import Shampoo

        return Shampoo
    if name in ("Grafting", "ShampooConfig"):
        from megatron.shampoo import config

        return getattr(config, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
