"""Every setting of the optimizer is checked when it is made; the message names flag, value and what is allowed."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from pathlib import Path
from subprocess import run

import pytest
import torch

from megatron.shampoo import Grafting, Shampoo, ShampooConfig
from megatron.shampoo.config import flag_of

BAD = {
    "block_size": (0, -1, 1.5, "8", None, True),
    "tp_alignment": (0, -2, 1.0, "2", True),
    "refresh_interval": (0, -10, 2.5, "10", None, False),
    "factor_beta": (1.0, -0.1, 1.5, math.nan, math.inf, "0.9", None, True),
    "epsilon": (0.0, 1.0, -1e-6, math.nan, math.inf, "1e-6", None),
    "grafting": ("Adam", "rmsprop", "", None, 1),
    "start_step": (0, -1, 1.0, None, True),
    "log_interval": (-1, 0.5, "10", None, True),
}
GOOD = {
    "block_size": (1, 4096),
    "tp_alignment": (None, 1, 8),
    "refresh_interval": (1, 1000),
    "factor_beta": (0, 0.0, 0.999),
    "epsilon": (1e-30, 0.5),
    "grafting": ("adam", "sgd", "none", Grafting.SGD),
    "start_step": (1, 100),
    "log_interval": (0, 7),
}


def test_tables_name_every_field() -> None:
    fields = {field.name for field in dataclasses.fields(ShampooConfig)}
    assert set(BAD) == set(GOOD) == fields


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_bad_value_is_refused_with_flag_value_and_what_is_allowed(field: str, value: object) -> None:
    allowed = next(it.metadata["allowed"] for it in dataclasses.fields(ShampooConfig) if it.name == field)
    message = f"{flag_of(field)} {value}: allowed is {allowed}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ShampooConfig(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in GOOD.items() for value in values])
def test_good_value_is_taken(field: str, value: object) -> None:
    assert getattr(ShampooConfig(**{field: value}), field) == value  # type: ignore[arg-type]


def test_every_field_says_what_it_is_and_what_is_allowed() -> None:
    for field in dataclasses.fields(ShampooConfig):
        assert field.metadata["help"]
        assert field.metadata["allowed"]


def test_settings_are_frozen_and_by_keyword() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ShampooConfig().block_size = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        ShampooConfig(64)  # type: ignore[misc]


def test_flag_has_the_name_of_its_field() -> None:
    assert flag_of("tp_alignment") == "--shampoo-tp-alignment"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1e-3),
        ("lr", math.nan),
        ("betas", (1.0, 0.9)),
        ("betas", (0.9, 1.0)),
        ("betas", (-0.1, 0.9)),
        ("betas", (0.9,)),
        ("betas", (0.9, 0.95, 0.99)),
        ("eps", -1e-8),
        ("weight_decay", -0.1),
    ],
)
@pytest.mark.parametrize("per_group", [False, True], ids=["default", "group"])
def test_bad_hyper_parameter_is_refused(name: str, value: object, per_group: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(3, 3))
    with pytest.raises(ValueError, match=f"{name} .*allowed is"):
        if per_group:
            Shampoo([{"params": [weight], name: value}])
        else:
            Shampoo([weight], **{name: value})  # type: ignore[arg-type]


def test_tensor_parallel_alignment_needs_tensor_parallelism() -> None:
    with pytest.raises(ValueError, match="tp_alignment 2"):
        Shampoo([torch.nn.Parameter(torch.ones(4, 4))], config=ShampooConfig(tp_alignment=2))


def test_config_and_package_import_without_torch() -> None:
    code = "import megatron.shampoo, megatron.shampoo.config, sys; sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0
