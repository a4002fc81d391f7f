"""Every method and every option against the float64 oracle: same gradients, 12 steps, all weights after every step."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import pytest
import torch

from megatron.shampoo import Shampoo, ShampooConfig
from tests.reference.kronecker64 import BlockedKronecker64

STEPS = 12
LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.97), 1e-8, 0.1
# float64: 12 steps of size lr with rounding that small eigenvalues and eps amplify.
# float32: 12 steps of size lr with rounding in weights, factors and bases.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-6}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])

Settings = dict[str, object]
Shapes = Sequence[tuple[int, int]]

# The factors of a first gradient that is square have full rank: eigenbases and roots are then unique.
SQUARE: Shapes = [(6, 6), (10, 10), (5, 5)]  # at block size 6: 1 + 4 + 1 blocks
WIDE: Shapes = [(4, 7), (5, 11)]  # the left factor of every gradient has full rank, in blocks of 5 x 5 and 5 x 6 too
TALL: Shapes = [(7, 4), (11, 5)]
ANY: Shapes = [(12, 7), (5, 9)]

METHODS: dict[str, tuple[Settings, Shapes]] = {
    "shampoo": ({"method": "shampoo"}, ANY),
    "shampoo ungrafted": ({"method": "shampoo", "grafting": "none", "epsilon": 1e-3}, ANY),
    "shampoo root 2": ({"method": "shampoo", "root": 2, "grafting": "none", "epsilon": 1e-3}, ANY),
    "shampoo left": ({"method": "shampoo", "side": "left"}, WIDE),
    "shampoo right root 4": ({"method": "shampoo", "side": "right", "root": 4, "grafting": "none"}, TALL),
    "shampoo smaller": ({"method": "shampoo", "side": "smaller", "grafting": "none"}, [*WIDE, *TALL]),
    "one-sided": ({"method": "one-sided"}, [*WIDE, *TALL, (6, 6)]),
    "one-sided ungrafted": ({"method": "one-sided", "grafting": "none"}, [*WIDE, *TALL, (6, 6)]),
    "one-sided left root 4": ({"method": "one-sided", "side": "left", "root": 4}, WIDE),
    "one-sided right": ({"method": "one-sided", "side": "right", "grafting": "sgd"}, TALL),
    "soap": ({"method": "soap"}, SQUARE),
    "soap left": ({"method": "soap", "side": "left"}, WIDE),
    "soap right": ({"method": "soap", "side": "right"}, TALL),
    "soap smaller": ({"method": "soap", "side": "smaller"}, [*WIDE, *TALL]),
    "kl-soap": ({"method": "kl-soap"}, SQUARE),
    "kl-shampoo": ({"method": "kl-shampoo"}, SQUARE),
}


def gradients_of(shape: tuple[int, int], scale: float, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Gradients whose rows and columns differ in size fourfold: their factors are not near the identity."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.logspace(-0.3, 0.3, shape[0], dtype=torch.float64)[:, None]
    columns = torch.logspace(0.3, -0.3, shape[1], dtype=torch.float64)[None, :]
    common = torch.randn(shape, generator=generator, dtype=torch.float64)
    noise = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(STEPS)]
    return [(scale * rows * columns * (common + n)).to(dtype) for n in noise]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Matrices and their gradients, and what an optimizer is told beside its config."""

    shapes: Shapes
    dtype: torch.dtype
    block_size: int = 6
    scale: float = 1.0
    zero_steps: Collection[int] = ()
    schedule: bool = False
    max_lr: float | None = None
    betas: tuple[float, float] = BETAS
    eps: float = EPS

    def weights(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(shape, generator=generator).to(self.dtype) for shape in self.shapes]

    def steps(self) -> Iterator[tuple[float, list[torch.Tensor]]]:
        """Learning rate and a gradient for each matrix."""
        series = [gradients_of(shape, self.scale, self.dtype, seed) for seed, shape in enumerate(self.shapes)]
        for step, gradients in enumerate(zip(*series, strict=True)):
            lr = LR * (1 - step / (2 * STEPS)) if self.schedule else LR
            zero = step + 1 in self.zero_steps
            yield lr, [torch.zeros_like(gradient) if zero else gradient for gradient in gradients]

    def optimizer(self, weights: list[torch.nn.Parameter], settings: Settings) -> Shampoo:
        group = {"params": weights} | ({} if self.max_lr is None else {"max_lr": self.max_lr})
        config = ShampooConfig(block_size=self.block_size, **{"solver": "eigh", **settings})  # type: ignore[arg-type]
        return Shampoo([group], lr=LR, betas=self.betas, eps=self.eps, weight_decay=DECAY, config=config)

    def oracles(self, settings: Settings) -> list[BlockedKronecker64]:
        """An oracle for each matrix, whose blocks are numbered one after the other."""
        settings = {"interval" if name == "refresh_interval" else name: value for name, value in settings.items()}
        settings["tracks"] = settings.pop("solver", "eigh") != "eigh"
        own = {"lr": LR, "max_lr": self.max_lr, "betas": self.betas, "eps": self.eps, "weight_decay": DECAY}
        oracles: list[BlockedKronecker64] = []
        for weight in self.weights():
            first_turn = sum(len(oracle.blocks) for oracle in oracles)
            oracles.append(
                BlockedKronecker64(weight.numpy(), block_size=self.block_size, first_turn=first_turn, **own, **settings)
            )
        return oracles


def result_of(problem: Problem, settings: Settings) -> np.ndarray:
    """All weights after the oracles' last step, as a vector."""
    oracles = problem.oracles(settings)
    for lr, gradients in problem.steps():
        for oracle, gradient in zip(oracles, gradients, strict=True):
            oracle.step(gradient.numpy(), lr)
    return np.concatenate([oracle.W.ravel() for oracle in oracles])


def compare(problem: Problem, settings: Settings, oracle_settings: Settings | None = None) -> list[BlockedKronecker64]:
    """Run both, compare all weights after every step, and return the oracles."""
    settings = {"refresh_interval": 1, **settings}
    weights = [torch.nn.Parameter(weight) for weight in problem.weights()]
    optimizer = problem.optimizer(weights, settings)
    oracles = problem.oracles(settings if oracle_settings is None else oracle_settings)
    for step, (lr, gradients) in enumerate(problem.steps(), start=1):
        optimizer.param_groups[0]["lr"] = lr
        for weight, oracle, gradient in zip(weights, oracles, gradients, strict=True):
            weight.grad = gradient.clone()
            oracle.step(gradient.numpy(), lr)
        optimizer.step()
        tolerance = TOLERANCE[problem.dtype]
        for number, (weight, oracle) in enumerate(zip(weights, oracles, strict=True)):
            message = f"step {step}, weight {number}"
            ours = weight.detach().numpy()
            np.testing.assert_allclose(ours, oracle.W, rtol=tolerance, atol=tolerance, err_msg=message)
    return oracles


def damping_of(dtype: torch.dtype, method: object) -> Settings:
    """More damping where float32 needs it.

    A first gradient is diagonal in the eigenbases of its own factors. What soap divides there, off the diagonal, is
    rounding over the root of the damping: eigenvectors have errors of 1e-6 in float32.
    """
    return {"epsilon": 1e-3} if dtype is torch.float32 and method in ("soap", "kl-soap") else {}


@DTYPES
@pytest.mark.parametrize("refresh_interval", [1, 4])
@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_matches_the_oracle(name: str, refresh_interval: int, dtype: torch.dtype) -> None:
    settings, shapes = METHODS[name]
    damping = damping_of(dtype, settings["method"])
    oracles = compare(Problem(shapes, dtype), {"refresh_interval": refresh_interval, **damping, **settings})
    turns = STEPS // refresh_interval
    assert all(block.num_refreshes >= turns for oracle in oracles for block in oracle.blocks)


@DTYPES
@pytest.mark.parametrize("refresh_interval", [1, 4])
@pytest.mark.parametrize("name", list(METHODS))
def test_the_default_solver_matches_the_oracle_that_tracks(
    name: str, refresh_interval: int, dtype: torch.dtype
) -> None:
    settings, shapes = METHODS[name]
    compare(Problem(shapes, dtype), {"refresh_interval": refresh_interval, "solver": "auto", **settings})


def test_the_solvers_differ() -> None:
    # The negative control of the test above: the oracle with exact roots is another.
    problem, settings = Problem(ANY, torch.float64), {"refresh_interval": 4, "method": "shampoo"}
    with pytest.raises(AssertionError, match="step 1, weight 0"):
        compare(problem, {**settings, "solver": "auto"}, {**settings, "solver": "eigh"})


@DTYPES
@pytest.mark.parametrize("method", ["shampoo", "one-sided", "soap", "kl-soap", "kl-shampoo"])
@pytest.mark.parametrize(("refresh_interval", "start_step"), [(1, 4), (5, 3)])
def test_the_start_step_takes_the_grafting_step_before_it(
    method: str, refresh_interval: int, start_step: int, dtype: torch.dtype
) -> None:
    # Bases and eigenvalues start from the identity, so that gradients before the start step count as well.
    settings: Settings = {"method": method, "refresh_interval": refresh_interval, "start_step": start_step}
    compare(Problem(SQUARE, dtype), {**settings, "grafting": "adam"})


ADAM: Settings = {"grafting": "adam"}
# (name, methods, option, fields of the problem): each setting of an option must matter to the result.
OPTIONS: list[tuple[str, list[str], Settings, Settings]] = [
    ("grafting none", ["shampoo", "one-sided"], {"grafting": "none"}, {}),
    ("grafting sgd", ["shampoo", "kl-shampoo"], {"grafting": "sgd"}, {}),
    ("grafting adagrad", ["shampoo", "soap"], {"grafting": "adagrad"}, {}),
    ("grafting rmsprop", ["one-sided", "kl-soap"], {"grafting": "rmsprop"}, {}),
    ("grafting adam", ["soap", "kl-shampoo"], {"grafting": "adam"}, {}),
    ("momentum after", ["shampoo", "soap", "kl-shampoo"], {"momentum_placement": "after"}, {}),
    ("momentum after, ungrafted", ["shampoo"], {"momentum_placement": "after", "grafting": "none"}, {}),
    ("momentum after, late", ["kl-shampoo", "kl-soap"], {"momentum_placement": "after", "start_step": 4, **ADAM}, {}),
    ("nesterov", ["shampoo", "kl-soap"], {"nesterov": True}, {}),
    ("nesterov after", ["one-sided", "soap"], {"nesterov": True, "momentum_placement": "after"}, {}),
    ("no correction", ["shampoo", "soap", "kl-soap", "kl-shampoo"], {"bias_correction": False}, {}),
    ("no correction, nesterov", ["soap"], {"bias_correction": False, "nesterov": True}, {}),
    ("no correction, after", ["shampoo"], {"bias_correction": False, "momentum_placement": "after"}, {}),
    ("clip", ["shampoo", "soap", "kl-shampoo"], {"update_rms_clip": 0.3}, {}),
    ("clip after", ["kl-soap"], {"update_rms_clip": 0.3, "momentum_placement": "after"}, {}),
    ("independent decay", ["shampoo", "soap"], {"weight_decay_mode": "independent"}, {"schedule": True}),
    ("independent of max_lr", ["kl-soap"], {"weight_decay_mode": "independent"}, {"max_lr": 2e-3, "schedule": True}),
    ("l2 decay", ["shampoo", "kl-shampoo"], {"weight_decay_mode": "l2"}, {"schedule": True}),
    ("l2 decay, late", ["soap"], {"weight_decay_mode": "l2", "start_step": 3, **ADAM}, {}),
    ("short factor average", ["one-sided", "soap", "kl-shampoo"], {"factor_beta": 0.5}, {}),
    ("long factor average", ["shampoo", "kl-soap"], {"factor_beta": 0.999}, {}),
    ("no factor average", ["shampoo", "kl-shampoo"], {"factor_beta": 0.0}, {}),
    ("much damping", ["shampoo", "one-sided"], {"epsilon": 1e-2, "grafting": "none"}, {}),
    ("much damping", ["soap", "kl-soap"], {"epsilon": 1e-2}, {}),
]
OPTION_CASES = [
    pytest.param(method, option, fields, id=f"{name}-{method}")
    for name, methods, option, fields in OPTIONS
    for method in methods
]


@DTYPES
@pytest.mark.parametrize(("method", "option", "fields"), OPTION_CASES)
def test_every_option_matches_the_oracle(method: str, option: Settings, fields: Settings, dtype: torch.dtype) -> None:
    # Blocks refresh at different steps: at block size 6 there are 1 block and 4 blocks, of 3 and 4 on a side.
    problem = Problem([(6, 6), (7, 7)], dtype, **fields)  # type: ignore[arg-type]
    settings: Settings = {"method": method, "refresh_interval": 2, **damping_of(dtype, method), **option}
    oracles = compare(problem, settings)
    result = np.concatenate([oracle.W.ravel() for oracle in oracles])
    for name in option:
        without = result_of(problem, {key: value for key, value in settings.items() if key != name})
        assert np.abs(result - without).max() > 100 * TOLERANCE[torch.float32], name
    if "update_rms_clip" in option:
        assert min(block.num_clipped for oracle in oracles for block in oracle.blocks) > 0


@DTYPES
@pytest.mark.parametrize("method", ["soap", "kl-shampoo", "one-sided"])
def test_betas_and_eps_enter_as_in_adam(method: str, dtype: torch.dtype) -> None:
    problem = Problem(SQUARE, dtype, betas=(0.0, 0.9), eps=0.3)
    compare(problem, {"method": method, "grafting": "none" if method == "soap" else "adam"})


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e3, 1e6])
@pytest.mark.parametrize("method", ["shampoo", "one-sided", "soap", "kl-soap", "kl-shampoo"])
def test_gradients_of_any_size(method: str, scale: float) -> None:
    for dtype in (torch.float64, torch.float32):
        settings: Settings = {"method": method, "refresh_interval": 2, **damping_of(dtype, method)}
        compare(Problem(SQUARE, dtype, scale=scale), settings)


@DTYPES
@pytest.mark.parametrize("method", ["shampoo", "one-sided", "soap", "kl-soap", "kl-shampoo"])
@pytest.mark.parametrize("zero_steps", [(1, 2), (7,)], ids=["first", "later"])
def test_gradients_of_zeros_do_not_set_the_scale(method: str, zero_steps: tuple[int, ...], dtype: torch.dtype) -> None:
    compare(Problem(SQUARE, dtype, zero_steps=zero_steps), {"method": method, **damping_of(dtype, method)})


@DTYPES
@pytest.mark.parametrize(("method", "grafting"), [("shampoo", "none"), ("shampoo", "adam"), ("soap", "none")])
def test_a_side_longer_than_max_dim_has_no_factor(method: str, grafting: str, dtype: torch.dtype) -> None:
    # The length is that of the matrix, 7 and 11, though no block is longer than 6. One factor left: root 2.
    settings: Settings = {"method": method, "grafting": grafting, **damping_of(dtype, method)}
    for shapes, side in ((WIDE, "left"), (TALL, "right")):
        compare(Problem(shapes, dtype), {**settings, "max_dim": 6}, {**settings, "side": side})


@DTYPES
def test_a_matrix_longer_than_max_dim_on_both_sides_is_adamws(dtype: torch.dtype) -> None:
    start = torch.randn(7, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    config = ShampooConfig(method="soap", max_dim=6)  # type: ignore[arg-type]
    optimizer = Shampoo([ours], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, config=config)
    adamw = torch.optim.AdamW([theirs], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    for gradient in gradients_of((7, 8), 1.0, dtype, 0):
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        adamw.step()
    # The same formula in another order of operations: a few roundings of weights of size one.
    torch.testing.assert_close(ours, theirs, rtol=1e-6 if dtype is torch.float32 else 1e-14, atol=0)
