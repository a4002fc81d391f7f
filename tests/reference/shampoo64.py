"""Shampoo of one matrix in float64 numpy, written from the papers.

Sources: Gupta et al. 2018 (arXiv:1802.09568), algorithm 1, for the factor matrices and the inverse fourth roots;
Agarwal et al. 2020 (arXiv:2002.11803) for grafting; Shi et al. 2023 (arXiv:2309.06497) for moving averages with bias
correction, momentum before preconditioning and the start step; Loshchilov and Hutter 2017 (arXiv:1711.05101) for
decoupled weight decay. Damping is relative to the largest eigenvalue.
"""

from __future__ import annotations

import itertools

import numpy as np


def inverse_fourth_root(matrix: np.ndarray, epsilon: float) -> np.ndarray:
    """(A + epsilon lambda_max I)^(-1/4) of a symmetric positive semi-definite A; the identity where A is zero."""
    eigenvalues, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    if eigenvalues[-1] <= 0:
        return np.eye(len(matrix))
    eigenvalues = np.maximum(eigenvalues, 0) + epsilon * eigenvalues[-1]
    return vectors @ np.diag(eigenvalues**-0.25) @ vectors.T


class Shampoo64:
    """One matrix W and everything that Shampoo keeps for it."""

    def __init__(
        self,
        weight: np.ndarray,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        weight_decay: float = 0.0,
        factor_beta: float = 0.95,
        epsilon: float = 1e-6,
        grafting: str = "adam",
        interval: int = 1,
        start_step: int = 1,
        turn: int = 0,
    ) -> None:
        rows, columns = weight.shape
        self.W = weight.astype(np.float64)
        self.L, self.R = np.zeros((rows, rows)), np.zeros((columns, columns))
        self.L_root, self.R_root = np.eye(rows), np.eye(columns)
        self.M, self.V = np.zeros((rows, columns)), np.zeros((rows, columns))
        self.t = 0
        self.num_refreshes = 0
        self.lr, self.betas, self.adam_eps, self.weight_decay = lr, betas, adam_eps, weight_decay
        self.factor_beta, self.epsilon, self.grafting = factor_beta, epsilon, grafting
        self.interval, self.start_step, self.turn = interval, start_step, turn

    def step(self, gradient: np.ndarray) -> None:
        """Take one step with gradient G."""
        G = gradient.astype(np.float64)
        self.t += 1
        (b1, b2), b = self.betas, self.factor_beta
        self.M = b1 * self.M + (1 - b1) * G
        self.V = b2 * self.V + (1 - b2) * G * G
        self.L = b * self.L + (1 - b) * G @ G.T
        self.R = b * self.R + (1 - b) * G.T @ G
        momentum = self.M / (1 - b1**self.t)
        if self._refresh_is_due():
            correction = 1 - b**self.t
            self.L_root = inverse_fourth_root(self.L / correction, self.epsilon)
            self.R_root = inverse_fourth_root(self.R / correction, self.epsilon)
            self.num_refreshes += 1
        graft = momentum
        if self.grafting == "adam":
            graft = momentum / (np.sqrt(self.V / (1 - b2**self.t)) + self.adam_eps)
        update = graft
        if self.t >= self.start_step:
            update = self.L_root @ momentum @ self.R_root
            norm = np.linalg.norm(update)
            if self.grafting != "none" and norm > 0:
                update = update * (np.linalg.norm(graft) / norm)
        self.W = self.W * (1 - self.lr * self.weight_decay) - self.lr * update

    def _refresh_is_due(self) -> bool:
        if self.t <= self.start_step:
            return self.t == self.start_step
        doubled = self.t < self.interval and self.t in {2**k for k in range(20)}
        return doubled or (self.t + self.turn) % self.interval == 0


class BlockedShampoo64:
    """A matrix cut into blocks, each a `Shampoo64` of its own.

    A dimension of length d is cut into k = ceil(d / block_size) pieces at floor(d i / k).
    """

    def __init__(self, weight: np.ndarray, *, block_size: int, first_turn: int = 0, **settings: object) -> None:
        self.shape = weight.shape
        self.places = self._places(weight.shape, block_size)
        self.blocks = [
            Shampoo64(weight[place], turn=first_turn + number, **settings)  # type: ignore[arg-type]
            for number, place in enumerate(self.places)
        ]

    @classmethod
    def _places(cls, shape: tuple[int, ...], block_size: int) -> list[tuple[slice, slice]]:
        rows, columns = (cls._cuts(length, block_size) for length in shape)
        return [(slice(*r), slice(*c)) for r in rows for c in columns]

    @staticmethod
    def _cuts(length: int, block_size: int) -> list[tuple[int, int]]:
        pieces = -(-length // block_size)
        ends = [length * i // pieces for i in range(pieces + 1)]
        return list(itertools.pairwise(ends))

    @property
    def W(self) -> np.ndarray:  # noqa: N802
        """The whole matrix."""
        whole = np.empty(self.shape)
        for place, block in zip(self.places, self.blocks, strict=True):
            whole[place] = block.W
        return whole

    def step(self, gradient: np.ndarray) -> None:
        """Take one step of every block."""
        for place, block in zip(self.places, self.blocks, strict=True):
            block.step(gradient[place])
