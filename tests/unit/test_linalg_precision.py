"""Matrix products of the optimizer run in full float32, whatever the user chose for the model (case: TF32)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.shampoo import Shampoo, ShampooConfig
from megatron.shampoo.config import Method
from megatron.shampoo.linalg.precision import full_float32
from megatron.shampoo.preconditioner.factors import update_factors_

PRODUCTS = {"bmm", "baddbmm_", "baddbmm", "mm", "mv", "addmm_", "addmm", "dot", "_linalg_eigh", "linalg_qr"}


def settings() -> tuple[str, str]:
    """What float32 products on CUDA and in oneDNN are allowed to use now."""
    return (torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision)


class RecordPrecision(TorchDispatchMode):
    """Notes the precision setting at every matrix product, as the operators are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[str, str]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            self.seen.append((name, settings()))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def default_precision() -> Iterator[None]:
    """Torch's default before and after each test; the legacy setting first, since it writes the newer ones."""
    reset()
    yield
    reset()


def reset() -> None:
    torch.set_float32_matmul_precision("highest")
    for backend in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, torch.backends):
        backend.fp32_precision = "none"


def legacy(value: str) -> Callable[[], None]:
    return lambda: torch.set_float32_matmul_precision(value)


def per_backend() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


def for_everything() -> None:
    torch.backends.fp32_precision = "tf32"


CHOICES: dict[str, Callable[[], None]] = {
    "set_float32_matmul_precision medium": legacy("medium"),
    "set_float32_matmul_precision high": legacy("high"),
    "allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "fp32_precision of each backend": per_backend,
    "fp32_precision of everything": for_everything,
}


@pytest.mark.parametrize("choice", list(CHOICES))
def test_every_product_of_a_step_is_in_full_float32(choice: str) -> None:
    weight = torch.nn.Parameter(torch.randn(6, 4))
    optimizer = Shampoo([weight], config=ShampooConfig(refresh_interval=1))
    weight.grad = torch.randn(6, 4)
    CHOICES[choice]()
    with RecordPrecision() as record:
        optimizer.step()
    assert {"bmm", "linalg_qr"} <= {name for name, _ in record.seen}
    reduced = [(name, found) for name, found in record.seen if any(value in ("tf32", "bf16") for value in found)]
    assert reduced == []


@pytest.mark.parametrize(
    "settings",
    [
        *({"method": method} for method in Method),
        {"solver": "qr", "refresh_tolerance": 0.01},
        {"method": "kl-soap", "solver": "qr", "refresh_tolerance": 0.01},
        {"solver": "newton"},
        {"solver": "newton-db"},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_every_product_of_every_method_and_solver_is_in_full_float32(settings: dict[str, Any]) -> None:
    weight = torch.nn.Parameter(torch.randn(6, 4))
    optimizer = Shampoo([weight], config=ShampooConfig(refresh_interval=1, **settings))
    per_backend()
    with RecordPrecision() as record:
        for _ in range(3):
            weight.grad = torch.randn(6, 4)
            optimizer.step()
    assert len(record.seen) > 6
    reduced = [(name, found) for name, found in record.seen if any(value in ("tf32", "bf16") for value in found)]
    assert reduced == []


@pytest.mark.parametrize("choice", list(CHOICES))
def test_the_users_setting_is_there_after_a_step(choice: str) -> None:
    weight = torch.nn.Parameter(torch.randn(6, 4))
    optimizer = Shampoo([weight])
    weight.grad = torch.randn(6, 4)
    CHOICES[choice]()
    before = settings()
    optimizer.step()
    assert settings() == before


def test_the_users_setting_is_there_after_an_error() -> None:
    torch.set_float32_matmul_precision("medium")
    with pytest.raises(ZeroDivisionError), full_float32():
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == "medium"


def test_factor_of_a_gradient_spike_has_float32_accuracy() -> None:
    torch.set_float32_matmul_precision("medium")
    generator = torch.Generator().manual_seed(0)
    left, right = torch.zeros(1, 64, 64), torch.zeros(1, 48, 48)
    exact = torch.zeros(1, 64, 64, dtype=torch.float64)
    for step in range(10):
        gradient = torch.randn(1, 64, 48, generator=generator) * (1e4 if step == 5 else 1.0)
        update_factors_(left, right, gradient, 0.95)
        exact = 0.95 * exact + 0.05 * gradient.double() @ gradient.double().mT
    assert (left.double() - exact).norm() / exact.norm() < 1e-6
