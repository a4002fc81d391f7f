"""The methods as combinations: a source of factor statistics, and how the factors are applied to a gradient.

method       statistics            application                          factors   grafting
shampoo      outer products        inverse roots, p = 4                 both      adam
one-sided    outer products        inverse root, p = 2                  smaller   adam
soap         outer products        Adam in the factors' eigenbasis      both      none
kl-soap      whitened products     Adam in the factors' eigenbasis      both      none
kl-shampoo   whitened products     averaged eigenvalues in their basis  both      none
"""

from __future__ import annotations

import dataclasses
import enum

from megatron.shampoo.config import AUTO_SOLVER, Grafting, Method, ShampooConfig, Side, Solver

UNGRAFTED_RMS_CLIP = 2.0
"""Default limit of an ungrafted direction's root mean square. Source: a gradient spike between two refreshes gives 3 to
4 with every order of operations; a stationary run stays below 1.4 (tests/unit/test_methods_closed_forms.py)."""


class Estimator(enum.Enum):
    """What the factor matrices average."""

    OUTER = enum.auto()
    """G G' and G' G. Source: Gupta et al. 2018 (arXiv:1802.09568)."""
    KL = enum.auto()
    """G S_R^-1 G' / n and G' S_L^-1 G / m: each is whitened by the other. Source: Lin et al. (arXiv:2509.03378)."""


class Application(enum.Enum):
    """How the factors turn a gradient into a search direction."""

    ROOT = enum.auto()
    """L^(-1/p) G R^(-1/p)."""
    ADAM = enum.auto()
    """Adam with its second moment in the eigenbasis. Source: Vyas et al. (arXiv:2409.11321)."""
    SPECTRAL = enum.auto()
    """Division by the roots of averaged eigenvalues, in the eigenbasis. Source: Lin et al. (arXiv:2509.03378)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A configuration with every default that depends on the method filled in."""

    estimator: Estimator
    application: Application
    side: Side
    grafting: Grafting
    update_rms_clip: float
    """0: no limit."""
    solver: Solver
    """Never `auto`."""

    @property
    def keeps_basis(self) -> bool:
        """Whether an eigenbasis of every factor is part of the state."""
        return self.application is not Application.ROOT or self.solver is Solver.QR


_COMBINATIONS = {
    Method.SHAMPOO: (Estimator.OUTER, Application.ROOT, Side.BOTH, Grafting.ADAM),
    Method.ONE_SIDED: (Estimator.OUTER, Application.ROOT, Side.SMALLER, Grafting.ADAM),
    Method.SOAP: (Estimator.OUTER, Application.ADAM, Side.BOTH, Grafting.NONE),
    Method.KL_SOAP: (Estimator.KL, Application.ADAM, Side.BOTH, Grafting.NONE),
    Method.KL_SHAMPOO: (Estimator.KL, Application.SPECTRAL, Side.BOTH, Grafting.NONE),
}


def recipe_of(config: ShampooConfig) -> Recipe:
    """The combination that a configuration asks for."""
    estimator, application, side, usual_grafting = _COMBINATIONS[config.method]
    grafting = config.grafting or usual_grafting
    clip = config.update_rms_clip
    if clip is None:
        clip = UNGRAFTED_RMS_CLIP if grafting is Grafting.NONE else 0.0
    return Recipe(
        estimator=estimator,
        application=application,
        side=config.side or side,
        grafting=grafting,
        update_rms_clip=clip,
        solver=AUTO_SOLVER if config.solver is Solver.AUTO else config.solver,
    )


def factor_sides(shape: tuple[int, int], config: ShampooConfig) -> tuple[bool, bool]:
    """Whether a matrix has a left and a right factor; neither means AdamW.

    Args:
        shape: rows and columns of the whole logical matrix.
        config: side, method and longest side with a factor.
    """
    side = recipe_of(config).side
    if side is Side.SMALLER:
        side = Side.LEFT if shape[0] <= shape[1] else Side.RIGHT
    limit = config.max_dim
    fits = [limit is None or length <= limit for length in shape]
    if config.method in (Method.KL_SOAP, Method.KL_SHAMPOO) and not all(fits):
        return (False, False)  # each factor is whitened by the other
    return (side is not Side.RIGHT and fits[0], side is not Side.LEFT and fits[1])


def root_of(sides: tuple[bool, bool], config: ShampooConfig) -> int:
    """P of a matrix's inverse roots: twice the number of its factors unless the user says otherwise."""
    return config.root or 2 * sum(sides)
