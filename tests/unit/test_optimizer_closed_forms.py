"""Cases in which Shampoo's update is known in closed form, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from megatron.shampoo import Shampoo, ShampooConfig

DOUBLE = torch.float64


def run(weight: Tensor, gradients: Sequence[Tensor], lr: float = 1.0, **settings: object) -> Tensor:
    """Weight after one Shampoo step for each gradient. Settings go to the optimizer or to its config.

    Roots are exact unless the settings say otherwise.
    """
    own = {key: settings.pop(key) for key in ("betas", "eps", "weight_decay") if key in settings}
    parameter = torch.nn.Parameter(weight.clone())
    config = ShampooConfig(**{"solver": "eigh", **settings})  # type: ignore[arg-type]
    optimizer = Shampoo([parameter], lr=lr, config=config, **own)  # type: ignore[arg-type]
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def run_adamw(weight: Tensor, gradients: Sequence[Tensor], lr: float, betas: tuple[float, float], eps: float) -> Tensor:
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([parameter], lr=lr, betas=betas, eps=eps, weight_decay=0.0)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def random_matrices(count: int, rows: int, columns: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, columns, generator=generator, dtype=DOUBLE) for _ in range(count)]


def random_orthogonal(size: int, seed: int) -> Tensor:
    return torch.linalg.qr(random_matrices(1, size, size, seed)[0]).Q


@pytest.mark.parametrize(("rows", "columns"), [(6, 6), (9, 4), (4, 9)])
def test_without_averages_the_update_is_the_polar_factor(rows: int, columns: int) -> None:
    # L = GG', R = G'G and M = G: L^(-1/4) G R^(-1/4) = U S^(-1/2) S S^(-1/2) V' = U V'.
    (gradient,) = random_matrices(1, rows, columns)
    U, _, Vh = torch.linalg.svd(gradient, full_matrices=False)
    weight = torch.zeros_like(gradient)
    updated = run(weight, [gradient], betas=(0.0, 0.95), factor_beta=0.0, epsilon=1e-14, grafting="none")
    # Damping epsilon = 1e-14 changes a singular value's image by epsilon (s_max / s)^2 / 2.
    torch.testing.assert_close(-updated, U @ Vh, rtol=0, atol=1e-9)


@pytest.mark.parametrize("grafting", ["none", "adam"])
def test_blocks_of_one_element_are_adam_without_its_epsilon(grafting: str) -> None:
    # Then L = R = the moving average v of g^2, and L^(-1/4) m R^(-1/4) = m / sqrt(v).
    weight, *gradients = random_matrices(13, 5, 4)
    betas = (0.9, 0.95)
    ours = run(
        weight,
        gradients,
        lr=0.01,
        betas=betas,
        eps=0.0,
        block_size=1,
        factor_beta=betas[1],
        refresh_interval=1,
        epsilon=1e-14,
        grafting=grafting,
    )
    torch.testing.assert_close(ours, run_adamw(weight, gradients, 0.01, betas, 0.0), rtol=1e-11, atol=1e-11)


def test_blocks_of_one_element_without_momentum_are_rmsprop() -> None:
    weight, *gradients = random_matrices(9, 3, 4)
    ours = run(
        weight,
        gradients,
        lr=0.01,
        betas=(0.0, 0.5),
        block_size=1,
        factor_beta=0.9,
        refresh_interval=1,
        epsilon=1e-14,
        grafting="none",
    )
    square, expected = torch.zeros_like(weight), weight.clone()
    for step, gradient in enumerate(gradients, start=1):
        square = 0.9 * square + 0.1 * gradient**2
        expected = expected - 0.01 * gradient / (square / (1 - 0.9**step)).sqrt()
    torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-11)


Method = Callable[[Tensor, Sequence[Tensor]], Tensor]
ROTATED_METHODS: dict[str, Method] = {
    grafting: lambda weight, gradients, grafting=grafting: run(  # type: ignore[misc]
        weight, gradients, lr=0.1, grafting=grafting, refresh_interval=2, weight_decay=0.1
    )
    for grafting in ("sgd", "none")
}


def rotation_error(method: Method) -> float:
    """|f(P W Q', P G Q') - P f(W, G) Q'| relative to what f does to W, for orthogonal P and Q."""
    weight, *gradients = random_matrices(7, 6, 9, seed=3)
    P, Q = random_orthogonal(6, 4), random_orthogonal(9, 5)
    plain = method(weight, gradients)
    rotated = method(P @ weight @ Q.T, [P @ gradient @ Q.T for gradient in gradients])
    return float((rotated - P @ plain @ Q.T).norm() / (plain - weight).norm())


@pytest.mark.parametrize("grafting", list(ROTATED_METHODS))
def test_update_turns_with_the_coordinates(grafting: str) -> None:
    # The singular factor of the first refresh limits it to rounding / damping = 1e-16 / 1e-6.
    assert rotation_error(ROTATED_METHODS[grafting]) < 1e-8


def test_adamw_does_not_turn_with_the_coordinates() -> None:
    assert rotation_error(lambda weight, gradients: run_adamw(weight, gradients, 0.1, (0.9, 0.95), 1e-8)) > 0.1


def test_adam_grafting_takes_its_norm_from_the_coordinates() -> None:
    # Only the direction of a grafted step turns with the coordinates.
    def adam_grafted(weight: Tensor, gradients: Sequence[Tensor]) -> Tensor:
        return run(weight, gradients, lr=0.1, grafting="adam", refresh_interval=1)

    weight, gradient = random_matrices(2, 6, 9, seed=3)
    P, Q = random_orthogonal(6, 4), random_orthogonal(9, 5)
    plain = adam_grafted(torch.zeros_like(weight), [gradient])
    rotated = adam_grafted(torch.zeros_like(weight), [P @ gradient @ Q.T])
    back = P.T @ rotated @ Q
    torch.testing.assert_close(back / back.norm(), plain / plain.norm(), rtol=0, atol=1e-8)


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 7.0, 1e4])
@pytest.mark.parametrize(("grafting", "start_step"), [("none", 1), ("adam", 1), ("adam", 3)])
def test_update_does_not_change_when_all_gradients_are_scaled(scale: float, grafting: str, start_step: int) -> None:
    weight, *gradients = random_matrices(9, 8, 5, seed=6)
    settings = {"lr": 0.1, "eps": 0.0, "grafting": grafting, "refresh_interval": 3, "start_step": start_step}
    one = run(weight, gradients, **settings)  # type: ignore[arg-type]
    scaled = run(weight, [scale * gradient for gradient in gradients], **settings)  # type: ignore[arg-type]
    torch.testing.assert_close(scaled, one, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_sgd_grafting_scales_the_update_with_the_gradients(scale: float) -> None:
    weight, *gradients = random_matrices(9, 8, 5, seed=6)
    one = run(weight, gradients, lr=0.1, grafting="sgd", refresh_interval=3) - weight
    scaled = run(weight, [scale * g for g in gradients], lr=0.1 / scale, grafting="sgd", refresh_interval=3) - weight
    torch.testing.assert_close(scaled, one, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("grafting", ["adam", "sgd"])
def test_a_grafted_step_has_the_norm_of_its_grafting_optimizer_in_every_block(grafting: str) -> None:
    gradients = random_matrices(6, 8, 6, seed=7)
    weight = torch.zeros(8, 6, dtype=DOUBLE)
    before = run(weight, gradients[:-1], lr=1.0, grafting=grafting, block_size=4, refresh_interval=1)
    step = run(weight, gradients, lr=1.0, grafting=grafting, block_size=4, refresh_interval=1) - before
    if grafting == "adam":
        graft = run_adamw(weight, gradients, 1.0, (0.9, 0.95), 1e-8) - run_adamw(
            weight, gradients[:-1], 1.0, (0.9, 0.95), 1e-8
        )
    else:
        graft = sum(0.1 * 0.9 ** (5 - k) * g for k, g in enumerate(gradients)) / (1 - 0.9**6)  # type: ignore[assignment]
    for rows in (slice(0, 4), slice(4, 8)):
        for columns in (slice(0, 3), slice(3, 6)):
            torch.testing.assert_close(step[rows, columns].norm(), graft[rows, columns].norm(), rtol=1e-9, atol=0)
