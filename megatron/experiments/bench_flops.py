"""Operations in the matrix products that a method cannot do without, in one step of one block.

A block has gradient G, `(m, n)`; a product of `(a, b)` and `(b, c)` counts 2abc operations, one with a symmetric
result half of that. Elementwise work and the refresh (roots, eigenbases) are not in here: the benchmark measures the
refresh by itself, with all products that belong to it.
"""

from __future__ import annotations

import dataclasses

from megatron.experiments.bench_names import METHODS, REFRESH_INTERVAL

_WITH_ROOTS = ("shampoo", "one-sided")
_WITH_BOTH_SIDES_COUPLED = ("kl-soap", "kl-shampoo")


@dataclasses.dataclass(frozen=True, slots=True)
class Products:
    """Operations of one step of one block, on average over a refresh interval."""

    accumulate: float
    """To update the factor matrices."""
    apply: float
    """To precondition."""

    @property
    def total(self) -> float:
        """Both."""
        return self.accumulate + self.apply


def sides(method: str, matrix: tuple[int, int]) -> tuple[bool, bool]:
    """Which factors a block has under the defaults of its method.

    Args:
        method: one of `METHODS`.
        matrix: shape of the whole matrix that the block belongs to.

    Returns:
        Left and right. One-sided takes that of the matrix's smaller side, the left one if they are equal.
    """
    if method != "one-sided":
        return True, True
    left = matrix[0] <= matrix[1]
    return left, not left


def products(
    method: str,
    block: tuple[int, int],
    has: tuple[bool, bool] = (True, True),
    *,
    momentum_after: bool = False,
    interval: int = REFRESH_INTERVAL,
) -> Products:
    """Count the operations of one step.

    With L the left and R the right factor, Q their eigenbases and X the momentum:

    - shampoo, one-sided: GG', G'G; the roots times X.
    - soap: GG', G'G; G into the basis, X into the basis, the result back.
    - kl-soap, kl-shampoo: Y = G Q_R and Q_L'G, a symmetric product of each; Q_L'Y, for which Y is computed anew where
      the basis has just changed; X into the basis, the result back.

    With momentum after preconditioning X is G, and one way into the basis falls away.

    Args:
        method: one of `METHODS`.
        block: (m, n).
        has: whether there is a left and a right factor.
        momentum_after: momentum of the preconditioned gradient in place of momentum before.
        interval: steps from one refresh to the next.

    Returns:
        The counts.

    Raises:
        ValueError: an unknown method, or one side of a method that needs both.
    """
    if method not in METHODS:
        raise ValueError(f"method {method!r}: allowed are {', '.join(METHODS)}")
    if method in _WITH_BOTH_SIDES_COUPLED and not all(has):
        raise ValueError(f"method {method!r}: needs both factors, has {has}")
    m, n = block
    left, right = 2.0 * m * m * n, 2.0 * m * n * n
    one_way = has[0] * left + has[1] * right
    symmetric = one_way / 2
    into_basis = 0.0 if momentum_after else one_way
    if method in _WITH_ROOTS:
        return Products(symmetric, one_way)
    if method == "soap":
        return Products(symmetric, one_way + into_basis + one_way)
    return Products(one_way + symmetric, left + right / interval + into_basis + one_way)
