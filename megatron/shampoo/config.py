"""Hyper-parameters of the optimizer, each declared once: Megatron's flags are generated from these fields."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any


class Grafting(enum.StrEnum):
    """Which optimizer's step norm the search direction of a block takes over."""

    ADAM = "adam"
    SGD = "sgd"
    NONE = "none"


def _knob(default: Any, text: str, allowed: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text, "allowed": allowed})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShampooConfig:
    """Settings of the Kronecker-factored part of the optimizer.

    Learning rate, betas, Adam's epsilon and weight decay are not here: they come with the parameter groups,
    as for any `torch.optim.Optimizer`.
    """

    block_size: int = _knob(
        1024,
        "largest side of a block, the sub-matrix with factor matrices of its own",
        "an integer >= 1",
    )
    """Rows or columns. Source of the default: Distributed Shampoo (arXiv:2309.06497, section 4) and DASH."""

    tp_alignment: int | None = _knob(
        None,
        "number of equal segments into which a tensor-parallel dimension is cut before it is cut into blocks; a run "
        "with the same value is the same run at every tensor-parallel size that divides it "
        "(default: the tensor-parallel size)",
        "a multiple of the tensor-parallel size",
    )
    """Segments. None stands for the current tensor-parallel size."""

    refresh_interval: int = _knob(
        10,
        "steps between two computations of a block's inverse roots; the blocks take turns, so that step time is flat",
        "an integer >= 1",
    )
    """Steps. Default: SOAP (arXiv:2409.11321) and DASH (arXiv:2602.02016) lose little up to 10."""

    factor_beta: float = _knob(
        0.95,
        "decay of the exponential moving average of the factor matrices, bias-corrected",
        "a number in [0, 1)",
    )
    """Per step."""

    epsilon: float = _knob(
        1e-6,
        "damping added to the eigenvalues of a factor matrix, relative to its largest eigenvalue",
        "a number in (0, 1)",
    )
    """Relative, so that the update does not change when all gradients are scaled."""

    grafting: Grafting = _knob(  # noqa: RUF009 (a field, like its neighbours: ruff knows dataclasses.field alone)
        Grafting.ADAM,
        "the optimizer whose step norm each block's search direction takes over",
        "adam, sgd or none",
    )
    """`none` leaves the norm of the preconditioned momentum, which is much smaller than Adam's."""

    start_step: int = _knob(
        1,
        "first step that uses the preconditioner; before it a block takes its grafting optimizer's step while its "
        "factor matrices fill",
        "an integer >= 1",
    )
    """Step number, counted from 1."""

    log_interval: int = _knob(
        100,
        "steps between two writes of the metrics to the log and to TensorBoard (0: never)",
        "an integer >= 0",
    )
    """Steps."""

    def __post_init__(self) -> None:
        """Check every field by itself.

        Raises:
            ValueError: a value outside its range; names the field, the value and what is allowed.
        """
        object.__setattr__(self, "grafting", self._grafting())
        for name, least in (("block_size", 1), ("refresh_interval", 1), ("start_step", 1), ("log_interval", 0)):
            self._require(name, _is_int(getattr(self, name)) and getattr(self, name) >= least)
        if self.tp_alignment is not None:
            self._require("tp_alignment", _is_int(self.tp_alignment) and self.tp_alignment >= 1)
        self._require("factor_beta", _is_real(self.factor_beta) and 0.0 <= self.factor_beta < 1.0)
        self._require("epsilon", _is_real(self.epsilon) and 0.0 < self.epsilon < 1.0)

    def _grafting(self) -> Grafting:
        try:
            return Grafting(self.grafting)
        except ValueError:
            self._require("grafting", False)
            raise

    def _require(self, name: str, holds: bool) -> None:
        if holds:
            return
        allowed = {field.name: field.metadata["allowed"] for field in dataclasses.fields(self)}[name]
        raise ValueError(f"{flag_of(name)} {getattr(self, name)!s}: allowed is {allowed}")


def flag_of(field_name: str) -> str:
    """Command-line flag of a `ShampooConfig` field, e.g. `--shampoo-block-size`."""
    return "--shampoo-" + field_name.replace("_", "-")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
