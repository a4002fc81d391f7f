"""Every setting of the optimizer is checked when it is made; the message names flag, value and what is allowed."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
import torch

from megatron.shampoo import Grafting, Shampoo, ShampooConfig
from megatron.shampoo.config import (
    Method,
    MomentumPlacement,
    Ownership,
    Precision,
    Qkv,
    Side,
    Solver,
    WeightDecay,
    flag_of,
)

BAD = {
    "method": ("Shampoo", "kl", "", None, 1, True),
    "root": (0, 1, 3, 8, -2, 2.0, "4", True),
    "side": ("Left", "top", "", 0, True),
    "grafting": ("Adam", "adamw", "", 1, False),
    "momentum_placement": ("Before", "none", "", None, 0, True),
    "nesterov": (1, 0, "true", None),
    "bias_correction": (1, 0, "false", None),
    "update_rms_clip": (-1.0, -1e-9, math.nan, math.inf, "2", True),
    "weight_decay_mode": ("L2", "none", "", None, True),
    "solver": ("Eigh", "jacobi", "newton_db", "", None, 1),
    "block_size": (0, -1, 1.5, "8", None, True),
    "max_dim": (-1, 1.0, "64", True, False),
    "qkv": ("Split", "head", "", None, True),
    "ownership": ("Local", "even", "", None, True),
    "tp_alignment": (0, -2, 1.0, "2", True),
    "refresh_interval": (0, -10, 2.5, "10", None, False),
    "refresh_tolerance": (-0.1, 1.0, 1.5, math.nan, math.inf, "0.1", None, True),
    "factor_beta": (1.0, -0.1, 1.5, math.nan, math.inf, "0.9", None, True),
    "epsilon": (0.0, 1.0, -1e-6, math.nan, math.inf, "1e-6", None),
    "factor_dtype": ("float32", "fp16", "BF16", "", None, True),
    "root_dtype": ("bfloat16", "fp64", "FP32", "", None, 32),
    "start_step": (0, -1, 1.0, None, True),
    "log_interval": (-1, 0.5, "10", None, True),
    "check_replicas": (-1, 0.5, "10", None, True),
    "solver_timeout": (-1, -0.5, math.nan, math.inf, "10", None, True),
}
GOOD = {
    "method": ("shampoo", "soap", "kl-soap", "kl-shampoo", "one-sided", Method.SOAP),
    "root": (None, 2, 4),
    "side": (None, "both", "left", "right", "smaller", Side.LEFT),
    "grafting": (None, "none", "sgd", "adagrad", "rmsprop", "adam", Grafting.SGD),
    "momentum_placement": ("before", "after", MomentumPlacement.AFTER),
    "nesterov": (True, False),
    "bias_correction": (True, False),
    "update_rms_clip": (None, 0, 0.0, 1, 2.5),
    "weight_decay_mode": ("decoupled", "independent", "l2", WeightDecay.L2),
    "solver": ("auto", "eigh", "qr", "newton", "newton-db", Solver.NEWTON_DB),
    "block_size": (1, 4096),
    "max_dim": (None, 0, 1, 4096),
    "qkv": ("split", "heads", "fused", Qkv.HEADS),
    "ownership": ("local", "balanced", Ownership.BALANCED),
    "tp_alignment": (None, 1, 8),
    "refresh_interval": (1, 1000),
    "refresh_tolerance": (0, 0.0),
    "factor_beta": (0, 0.0, 0.999),
    "epsilon": (1e-30, 0.5),
    "factor_dtype": ("fp32", "bf16", Precision.BF16),
    "root_dtype": ("fp32", "bf16", Precision.FP32),
    "start_step": (1, 100),
    "log_interval": (0, 7),
    "check_replicas": (0, 100),
    "solver_timeout": (0, 0.5, 3600),
}
ENUMS = {
    "method": Method,
    "side": Side,
    "grafting": Grafting,
    "momentum_placement": MomentumPlacement,
    "weight_decay_mode": WeightDecay,
    "solver": Solver,
    "qkv": Qkv,
    "ownership": Ownership,
    "factor_dtype": Precision,
    "root_dtype": Precision,
}


def refusal_of(field: str, value: object) -> str:
    """A pattern for the message that refuses a value."""
    allowed = next(it.metadata["allowed"] for it in dataclasses.fields(ShampooConfig) if it.name == field)
    return f"^{re.escape(f'{flag_of(field)} {value}: allowed is {allowed}')}$"


def test_tables_name_every_field() -> None:
    fields = {field.name for field in dataclasses.fields(ShampooConfig)}
    assert set(BAD) == set(GOOD) == fields


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_bad_value_is_refused_with_flag_value_and_what_is_allowed(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=refusal_of(field, value)):
        ShampooConfig(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in GOOD.items() for value in values])
def test_good_value_is_taken(field: str, value: object) -> None:
    assert getattr(ShampooConfig(**{field: value}), field) == value  # type: ignore[arg-type]


@pytest.mark.parametrize("field", list(ENUMS))
def test_a_word_becomes_a_member_and_every_member_is_allowed(field: str) -> None:
    kind: type[enum.Enum] = ENUMS[field]
    allowed = next(it.metadata["allowed"] for it in dataclasses.fields(ShampooConfig) if it.name == field)
    for member in kind:
        assert getattr(ShampooConfig(**{field: member.value}), field) is member
        assert re.search(rf"(?<![\w-]){re.escape(member.value)}(?![\w-])", allowed)


def test_enums_are_all_in_the_tables() -> None:
    found = {name for name, values in GOOD.items() if any(isinstance(value, enum.Enum) for value in values)}
    assert found == set(ENUMS)
    for name, kind in ENUMS.items():
        assert {member.value for member in kind} <= {str(value) for value in GOOD[name]}


# -- fields that depend on each other


REFUSED = {
    "a root of soap": ({"method": "soap", "root": 2}, "root"),
    "a root of kl-soap": ({"method": "kl-soap", "root": 4}, "root"),
    "a root of kl-shampoo": ({"method": "kl-shampoo", "root": 2}, "root"),
    "kl-soap on the left alone": ({"method": "kl-soap", "side": "left"}, "side"),
    "kl-soap on the smaller side": ({"method": "kl-soap", "side": "smaller"}, "side"),
    "kl-shampoo on the right alone": ({"method": "kl-shampoo", "side": "right"}, "side"),
    "one-sided on both": ({"method": "one-sided", "side": "both"}, "side"),
    "newton for soap": ({"method": "soap", "solver": "newton"}, "solver"),
    "newton-db for kl-soap": ({"method": "kl-soap", "solver": "newton-db"}, "solver"),
    "newton for kl-shampoo": ({"method": "kl-shampoo", "solver": "newton"}, "solver"),
    "a tolerance without a basis, eigh": ({"solver": "eigh", "refresh_tolerance": 0.1}, "refresh_tolerance"),
    "a tolerance without a basis, newton": ({"solver": "newton", "refresh_tolerance": 0.1}, "refresh_tolerance"),
    "a tolerance without a basis, one-sided": (
        {"method": "one-sided", "solver": "newton-db", "refresh_tolerance": 0.5},
        "refresh_tolerance",
    ),
    "a slow average in bf16": ({"factor_dtype": "bf16", "factor_beta": 0.991}, "factor_dtype"),
    "bases in bf16": ({"method": "soap", "root_dtype": "bf16"}, "root_dtype"),
    "kl bases in bf16": ({"method": "kl-shampoo", "root_dtype": "bf16"}, "root_dtype"),
    "square roots in bf16": ({"root": 2, "root_dtype": "bf16"}, "root_dtype"),
    "one-sided roots in bf16": ({"method": "one-sided", "root_dtype": "bf16"}, "root_dtype"),
    "one factor's roots in bf16": ({"side": "left", "root_dtype": "bf16"}, "root_dtype"),
    "roots in bf16, some of one factor": ({"max_dim": 64, "root_dtype": "bf16"}, "root_dtype"),
    "soap begins late": ({"method": "soap", "start_step": 2}, "start_step"),
    "kl-soap begins late": ({"method": "kl-soap", "start_step": 2, "grafting": "none"}, "start_step"),
    "kl-shampoo begins late": ({"method": "kl-shampoo", "start_step": 100}, "start_step"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_a_combination_that_cannot_be_is_refused_with_the_field_and_what_it_needs(case: str) -> None:
    settings, field = REFUSED[case]
    with pytest.raises(ValueError, match=refusal_of(field, settings[field])):
        ShampooConfig(**settings)  # type: ignore[arg-type]


CROSSED = {
    "method": [*Method],
    "root": [None, 2, 4],
    "side": [None, *Side],
    "solver": [*Solver],
    "grafting": [None, Grafting.NONE, Grafting.SGD],
    "start_step": [1, 2],
    "refresh_tolerance": [0.0, 0.1],
}


def crossed() -> Iterator[dict[str, Any]]:
    for values in itertools.product(*CROSSED.values()):
        yield dict(zip(CROSSED, values, strict=True))


def is_allowed(it: dict[str, Any]) -> bool:
    """The rules as docs/methods.md tells them."""
    if it["method"] in ("shampoo", "one-sided"):
        whole = not (it["method"] == "one-sided" and it["side"] == "both")
        return whole and (it["solver"] in ("auto", "qr") or it["refresh_tolerance"] == 0)
    grafted = it["grafting"] not in (None, "none")
    whole = it["side"] in (None, "both") or it["method"] == "soap"
    rootless = it["root"] is None and it["solver"] not in ("newton", "newton-db")
    return rootless and whole and (grafted or it["start_step"] == 1)


def is_accepted(it: dict[str, Any]) -> bool:
    try:
        ShampooConfig(**it)
    except ValueError:
        return False
    return True


def test_every_combination_is_taken_or_refused_by_the_rules() -> None:
    wrong = [it for it in crossed() if is_accepted(it) is not is_allowed(it)]
    assert wrong == []


def is_told_apart(it: dict[str, Any]) -> bool:
    """All solvers, sides and tolerances with the other defaults; the others with the defaults of these."""
    usual = [it["root"] is None, it["grafting"] is None, it["start_step"] == 1]
    return all(usual) or (it["side"] is None and it["solver"] == "auto" and it["refresh_tolerance"] == 0)


@pytest.mark.parametrize("method", [*Method])
def test_every_combination_that_is_taken_trains(method: Method) -> None:
    start = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    taken = [it for it in crossed() if it["method"] is method and is_accepted(it) and is_told_apart(it)]
    assert len(taken) > 10
    for settings in taken:
        weight = torch.nn.Parameter(start.clone())
        optimizer = Shampoo([weight], lr=0.01, config=ShampooConfig(refresh_interval=2, **settings))
        for step in range(4):
            weight.grad = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        assert weight.isfinite().all(), settings
        assert (weight != start).all(), settings


# -- what is the same for every field


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
    assert flag_of("weight_decay_mode") == "--shampoo-weight-decay"


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
    code = "import megatron.shampoo, megatron.shampoo.config, megatron.shampoo.methods, sys; "
    code += "sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0
