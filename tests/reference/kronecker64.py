"""Kronecker-factored optimizers of one matrix in float64 numpy, written from the papers.

Sources: Gupta et al. 2018 (arXiv:1802.09568) for Shampoo; Agarwal et al. 2020 (arXiv:2002.11803) for grafting; Shi et
al. 2023 (arXiv:2309.06497) for moving averages with bias correction, momentum before preconditioning and the start
step; Morwani et al. 2024 (arXiv:2406.17748) for inverse square roots with a trace scale; Xie et al. 2025
(arXiv:2503.20762) for one factor; Vyas et al. 2024 (arXiv:2409.11321) for SOAP, here with the current gradient in its
own basis; Lin et al. 2025 (arXiv:2509.03378) for KL-Shampoo and KL-SOAP, here with the averages of the eigenvalues in
Gauss-Seidel order and corrected for their start; Loshchilov and Hutter 2017 (arXiv:1711.05101) for decoupled weight
decay. Damping of roots is relative to the largest eigenvalue, that of a second moment in the basis to its mean.

Letters: W weight, G gradient, M first moment, V second moment, X averaged gradient, P step of the grafting method, D
direction, L (m x m) and R (n x n) factor matrices, Q_L and Q_R their eigenbases, X_L and X_R their inverse roots, V_Q
second moment in the basis, l_L and l_R eigenvalues of the KL methods (averages, not those of L and R), t the number of
gradients so far, num_averaged of those among them that are not zero.
"""

from __future__ import annotations

import numpy as np

from tests.reference.shampoo64 import BlockedShampoo64

ROOT_METHODS = ("shampoo", "one-sided")
BASIS_METHODS = ("soap", "kl-soap", "kl-shampoo")
KL_METHODS = ("kl-soap", "kl-shampoo")
KL_FLOOR = 1e-4


def inverse_root(matrix: np.ndarray, root: int, epsilon: float) -> np.ndarray:
    """(A + epsilon lambda_max I)^(-1/root) of a symmetric positive semi-definite A; the identity where A is zero."""
    eigenvalues, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    if eigenvalues[-1] <= 0:
        return np.eye(len(matrix))
    eigenvalues = np.maximum(eigenvalues, 0) + epsilon * eigenvalues[-1]
    return vectors @ np.diag(eigenvalues ** (-1 / root)) @ vectors.T


def eigenbasis(matrix: np.ndarray) -> np.ndarray:
    """Eigenvectors as columns, in ascending order of their eigenvalues; the identity where A is zero."""
    return np.linalg.eigh((matrix + matrix.T) / 2)[1]


def tracked_basis(matrix: np.ndarray, previous: np.ndarray) -> np.ndarray:
    """One step of orthogonal iteration of A + 0.05 mean(diag A) I from the previous basis; that basis where A is zero.

    Orthogonalised by the Cholesky factor of the Gram matrix: P = Q R has P'P = R'R, with a positive diagonal of R.
    """
    if not matrix.any():
        return previous
    shifted = (matrix + matrix.T) / 2 + 0.05 * np.mean(np.diag(matrix)) * np.eye(len(matrix))
    product = shifted / np.abs(shifted).max() @ previous
    return np.linalg.solve(np.linalg.cholesky(product.T @ product), product.T).T


def root_in_basis(matrix: np.ndarray, basis: np.ndarray, root: int, epsilon: float) -> np.ndarray:
    """Q (l + epsilon max(l))^(-1/root) Q' with l = diag(Q' A Q); the identity where A is zero."""
    if not matrix.any():
        return np.eye(len(matrix))
    values = np.maximum(np.diag(basis.T @ matrix @ basis), 0)
    return basis @ np.diag((values + epsilon * values.max()) ** (-1 / root)) @ basis.T


def floored(eigenvalues: np.ndarray) -> np.ndarray:
    """Eigenvalues no smaller than `KL_FLOOR` of their mean."""
    return np.maximum(eigenvalues, KL_FLOOR * eigenvalues.mean())


def resolved_side(method: str, side: str | None, shape: tuple[int, int]) -> str:
    """Which factors there are: both, left or right."""
    if side is None:
        side = "smaller" if method == "one-sided" else "both"
    if side == "smaller":
        side = "left" if shape[0] <= shape[1] else "right"
    return side


class Kronecker64:
    """One matrix W and everything that its method keeps for it.

    Settings that are None are what the method takes for them: see `docs/optimizer.md`.
    """

    def __init__(
        self,
        weight: np.ndarray,
        *,
        method: str = "shampoo",
        root: int | None = None,
        side: str | None = None,
        grafting: str | None = None,
        momentum_placement: str = "before",
        nesterov: bool = False,
        bias_correction: bool = True,
        update_rms_clip: float | None = None,
        weight_decay_mode: str = "decoupled",
        lr: float = 1e-3,
        max_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        factor_beta: float = 0.95,
        epsilon: float = 1e-6,
        interval: int = 1,
        start_step: int = 1,
        turn: int = 0,
        tracks: bool = False,
    ) -> None:
        m, n = weight.shape
        self.tracks = tracks
        self.method = method
        self.side = resolved_side(method, side, (m, n))
        self.has_left, self.has_right = self.side in ("both", "left"), self.side in ("both", "right")
        self.root = root or (4 if self.side == "both" else 2)
        self.grafting = grafting or ("adam" if method in ROOT_METHODS else "none")
        self.momentum_placement, self.nesterov, self.bias_correction = momentum_placement, nesterov, bias_correction
        if update_rms_clip is None:
            update_rms_clip = 2.0 if self.grafting == "none" else 0.0
        self.update_rms_clip = update_rms_clip
        self.weight_decay_mode, self.weight_decay = weight_decay_mode, weight_decay
        self.lr, self.max_lr = lr, lr if max_lr is None else max_lr
        self.betas, self.eps = betas, eps
        self.factor_beta, self.epsilon = factor_beta, epsilon
        self.interval, self.start_step, self.turn = interval, start_step, turn

        self.W = weight.astype(np.float64)
        self.M, self.V = np.zeros((m, n)), np.zeros((m, n))
        self.L, self.R = np.zeros((m, m)), np.zeros((n, n))
        self.X_L, self.X_R = np.eye(m), np.eye(n)
        self.Q_L, self.Q_R = np.eye(m), np.eye(n)
        self.V_Q = np.zeros((m, n))
        self.l_L: np.ndarray | None = None
        self.l_R: np.ndarray | None = None
        self.t = self.num_averaged = self.num_refreshes = self.num_clipped = 0

    def step(self, gradient: np.ndarray) -> None:
        """Take one step with gradient G."""
        G = gradient.astype(np.float64)
        if self.weight_decay_mode == "l2":
            G = G + self.weight_decay * self.W
        self.t += 1
        self._update_preconditioner(G)
        self._update_second_moment(G)
        if self.momentum_placement == "before":
            D = self._direction(self._averaged(G))
        else:
            D = self._averaged(self._direction(G))
        self.W = self.W * self._decay() - self.lr * D

    def _update_preconditioner(self, G: np.ndarray) -> None:
        if self.method in KL_METHODS:
            self._accumulate_kl(G)
            self._refresh_if_due()
            if G.any():  # zeros say nothing of the size of gradients
                self._average_eigenvalues(G)
        else:
            b = self.factor_beta
            self.L = b * self.L + (1 - b) * G @ G.T
            self.R = b * self.R + (1 - b) * G.T @ G
            self._refresh_if_due()
        if self.method in ("soap", "kl-soap"):
            b2 = self.betas[1]
            self.V_Q = b2 * self.V_Q + (1 - b2) * (self.Q_L.T @ G @ self.Q_R) ** 2

    def _refresh_if_due(self) -> None:
        if not self._refresh_is_due():
            return
        self.num_refreshes += 1
        if self.method in ROOT_METHODS:
            self._refresh_roots()
        else:
            self._refresh_bases()

    def _accumulate_kl(self, G: np.ndarray) -> None:
        """L <- b L + (1 - b)/n G R^-1 G', R <- b R + (1 - b)/m G' L^-1 G with the inverses from before this step."""
        m, n = G.shape
        b = self.factor_beta
        if not G.any():
            self.L, self.R = b * self.L, b * self.R
            return
        if self.l_L is None or self.l_R is None:
            rms = np.sqrt(np.mean(G**2))
            self.l_L, self.l_R = np.full(m, rms), np.full(n, rms)
        L_inverse = self.Q_L @ np.diag(1 / floored(self.l_L)) @ self.Q_L.T
        R_inverse = self.Q_R @ np.diag(1 / floored(self.l_R)) @ self.Q_R.T
        self.L = b * self.L + (1 - b) / n * G @ R_inverse @ G.T
        self.R = b * self.R + (1 - b) / m * G.T @ L_inverse @ G

    def _average_eigenvalues(self, G: np.ndarray) -> None:
        """Average the eigenvalues of L with the R before this step, then those of R with the new ones of L."""
        assert self.l_L is not None and self.l_R is not None
        self.num_averaged += 1
        start = self.factor_beta**self.num_averaged
        b = (self.factor_beta - start) / (1 - start)
        squares = (self.Q_L.T @ G @ self.Q_R) ** 2
        self.l_L = b * self.l_L + (1 - b) * (squares / floored(self.l_R)[None, :]).mean(axis=1)
        self.l_R = b * self.l_R + (1 - b) * (squares / floored(self.l_L)[:, None]).mean(axis=0)

    def _refresh_roots(self) -> None:
        correction = 1 - self.factor_beta**self.t
        L, R = self.L / correction, self.R / correction
        if self.tracks:
            self.Q_L, self.Q_R = tracked_basis(L, self.Q_L), tracked_basis(R, self.Q_R)
        if self.has_left:
            self.X_L = self._root(L, self.Q_L)
        if self.has_right:
            self.X_R = self._root(R, self.Q_R)
        if self.root == 2 and self.side == "both":
            self.X_L, self.X_R = np.trace(L) ** 0.25 * self.X_L, np.trace(R) ** 0.25 * self.X_R

    def _root(self, matrix: np.ndarray, basis: np.ndarray) -> np.ndarray:
        if self.tracks:
            return root_in_basis(matrix, basis, self.root, self.epsilon)
        return inverse_root(matrix, self.root, self.epsilon)

    def _basis(self, matrix: np.ndarray, previous: np.ndarray) -> np.ndarray:
        return tracked_basis(matrix, previous) if self.tracks else eigenbasis(matrix)

    def _refresh_bases(self) -> None:
        """New eigenbases; what is kept per basis vector follows by the squared cosines between new and old ones."""
        new_L = self._basis(self.L, self.Q_L) if self.has_left else self.Q_L
        new_R = self._basis(self.R, self.Q_R) if self.has_right else self.Q_R
        cosines_L, cosines_R = (new_L.T @ self.Q_L) ** 2, (new_R.T @ self.Q_R) ** 2
        self.V_Q = cosines_L @ self.V_Q @ cosines_R.T
        if self.l_L is not None and self.l_R is not None:
            self.l_L, self.l_R = cosines_L @ self.l_L, cosines_R @ self.l_R
        self.Q_L, self.Q_R = new_L, new_R

    def _refresh_is_due(self) -> bool:
        if self.t <= self.start_step:
            return self.t == self.start_step
        doubled = self.t < self.interval and self.t in {2**k for k in range(20)}
        return doubled or (self.t + self.turn) % self.interval == 0

    def _update_second_moment(self, G: np.ndarray) -> None:
        b2 = self.betas[1]
        if self.grafting == "adagrad":
            self.V = self.V + G**2
        else:
            self.V = b2 * self.V + (1 - b2) * G**2

    def _averaged(self, G: np.ndarray) -> np.ndarray:
        """The first moment after G enters it, as Adam (or, with `nesterov`, as NAdam) uses it."""
        b1 = self.betas[0]
        self.M = b1 * self.M + (1 - b1) * G
        average, power = self.M, self.t
        if self.nesterov:
            average, power = b1 * self.M + (1 - b1) * G, self.t + 1
        return average / (1 - b1**power) if self.bias_correction else average

    def _grafting_step(self, X: np.ndarray) -> np.ndarray:
        if self.grafting in ("none", "sgd"):
            return X
        V = self.V
        if self.grafting == "adam" and self.bias_correction:
            V = V / (1 - self.betas[1] ** self.t)
        return X / (np.sqrt(V) + self.eps)

    def _preconditioned(self, X: np.ndarray) -> np.ndarray:
        if self.method in ROOT_METHODS:
            return self.X_L @ X @ self.X_R
        Z = self.Q_L.T @ X @ self.Q_R
        if self.method == "kl-shampoo":
            if self.l_L is None or self.l_R is None:  # no gradient but zeros so far
                return np.zeros_like(X)
            Z = Z / np.sqrt(np.outer(floored(self.l_L), floored(self.l_R)))
        else:
            V_Q = self.V_Q + self.epsilon * self.V_Q.mean()
            if self.bias_correction:
                V_Q = V_Q / (1 - self.betas[1] ** self.t)
            Z = Z / (np.sqrt(V_Q) + self.eps)
        return self.Q_L @ Z @ self.Q_R.T

    def _direction(self, X: np.ndarray) -> np.ndarray:
        P = self._grafting_step(X)
        D = P
        if self.t >= self.start_step:
            D = self._preconditioned(X)
            norm = np.linalg.norm(D)
            if self.grafting != "none" and norm > 0:
                D = D * (np.linalg.norm(P) / norm)
        rms = np.sqrt(np.mean(D**2))
        if 0 < self.update_rms_clip < rms:
            self.num_clipped += 1
            D = D * (self.update_rms_clip / rms)
        return D

    def _decay(self) -> float:
        if self.weight_decay_mode == "decoupled":
            return 1 - self.lr * self.weight_decay
        if self.weight_decay_mode == "independent":
            return 1 - self.weight_decay * self.lr / self.max_lr
        return 1.0


class BlockedKronecker64(BlockedShampoo64):
    """A matrix cut into blocks, each a `Kronecker64` of its own.

    A dimension of length d is cut into k = ceil(d / block_size) pieces at floor(d i / k). Which side is the smaller one
    is said of the whole matrix, not of the block.
    """

    def __init__(
        self,
        weight: np.ndarray,
        *,
        block_size: int,
        first_turn: int = 0,
        method: str = "shampoo",
        side: str | None = None,
        **settings: object,
    ) -> None:
        self.shape = weight.shape
        self.places = self._places(weight.shape, block_size)
        side = resolved_side(method, side, (weight.shape[0], weight.shape[1]))
        self.blocks = [
            Kronecker64(weight[place], turn=first_turn + number, method=method, side=side, **settings)  # type: ignore[arg-type]
            for number, place in enumerate(self.places)
        ]

    def step(self, gradient: np.ndarray, lr: float | None = None) -> None:
        """Take one step of every block, from now on with this learning rate if one is given."""
        for place, block in zip(self.places, self.blocks, strict=True):
            block.lr = block.lr if lr is None else lr
            block.step(gradient[place])
