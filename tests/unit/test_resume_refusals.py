"""A checkpoint whose factors mean something else under the present settings is refused by flag and saved value."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.shampoo.config import ShampooConfig, flag_of
from megatron.shampoo.mcore import resume
from megatron.shampoo.mcore.arguments import config_of, resolve_
from megatron.shampoo.mcore.resume import check_resume

LAYOUT = {
    **dict.fromkeys((*resume._MODEL, *resume._KEPT), None), "world_size": 4, "tensor_model_parallel_size": 2,
    "data_parallel_size": 2, "expert_model_parallel_size": 1, "use_distributed_optimizer": True, "bf16": True,
    "dist_ckpt_optim_fully_reshardable": True, "num_layers": 2, "hidden_size": 64, "num_attention_heads": 8,
    "group_query_attention": True, "num_query_groups": 4,
}  # fmt: skip
RATES = {
    **dict.fromkeys(resume._SCHEDULE, None), "lr": 1e-3, "min_lr": 1e-5, "train_iters": 100,
    "override_opt_param_scheduler": False, "use_checkpoint_opt_param_scheduler": False,
}  # fmt: skip


def arguments(**settings: Any) -> SimpleNamespace:
    """Arguments of a run with these settings of ours, and with others of Megatron's as `given`."""
    given = settings.pop("given", {})
    own = {f"shampoo_{name}": settings.get(name) for name in ShampooConfig.__dataclass_fields__}
    usual = {
        "load": "runs", "finetune": False, "no_load_optim": None, "no_save_optim": None, "optimizer": "adam",
        "second_order_optimizer": "shampoo",
    }  # fmt: skip
    return SimpleNamespace(**{**usual, **LAYOUT, **RATES, **own, **given})


def check(monkeypatch: pytest.MonkeyPatch, saved: SimpleNamespace | None, now: SimpleNamespace) -> None:
    """Resume from a checkpoint that a run with the saved arguments has written, by this version."""
    stored = copy.copy(saved)
    if stored is not None:
        resolve_(stored, config_of(stored))
    check_stored(monkeypatch, stored, now)


def check_stored(monkeypatch: pytest.MonkeyPatch, stored: SimpleNamespace | None, now: SimpleNamespace) -> None:
    monkeypatch.setattr(resume, "_saved_arguments", lambda args: stored)
    check_resume(now, config_of(now))


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # what was saved, what is now, the field that is named
    "another average": ({}, {"factor_beta": 0.9}, "factor_beta"),
    "another start": ({}, {"start_step": 5}, "start_step"),
    "shampoo, now soap": ({}, {"method": "soap"}, "method"),
    "soap, now shampoo": ({"method": "soap"}, {}, "method"),
    "soap, now kl-soap": ({"method": "soap"}, {"method": "kl-soap"}, "method"),
    "kl-soap, now kl-shampoo": ({"method": "kl-soap"}, {"method": "kl-shampoo"}, "method"),
    "shampoo by qr, now soap": ({"solver": "qr"}, {"method": "soap", "solver": "qr"}, "method"),
    "shampoo, now one-sided": ({}, {"method": "one-sided"}, "method"),
    "fourth root, now square root": ({"root": 4}, {"root": 2}, "root"),
    "both sides, now left": ({}, {"side": "left"}, "side"),
    "left, now right": ({"side": "left"}, {"side": "right"}, "side"),
    "adam grafting, now none": ({}, {"grafting": "none"}, "grafting"),
    "sgd grafting, now adagrad": ({"grafting": "sgd"}, {"grafting": "adagrad"}, "grafting"),
    "none for soap, now adam": ({"method": "soap"}, {"method": "soap", "grafting": "adam"}, "grafting"),
    "momentum before, now after": ({}, {"momentum_placement": "after"}, "momentum_placement"),
    "factors in fp32, now bf16": ({}, {"factor_dtype": "bf16"}, "factor_dtype"),
    "roots in bf16, now fp32": ({"root_dtype": "bf16"}, {}, "root_dtype"),
    "eigh, now qr": ({"solver": "eigh"}, {"solver": "qr"}, "solver"),
    "qr, now newton": ({"solver": "qr"}, {"solver": "newton"}, "solver"),
    "other blocks": ({"block_size": 64}, {"block_size": 32}, "block_size"),
    "other segments": ({}, {"tp_alignment": 4}, "tp_alignment"),
    "other turns": ({"refresh_interval": 5}, {}, "refresh_interval"),
    "sides of any length, now limited": ({}, {"max_dim": 64}, "max_dim"),
    "limited sides, now other ones": ({"max_dim": 0}, {"max_dim": 64}, "max_dim"),
    "keys and values split, now by heads": ({}, {"qkv": "heads"}, "qkv"),
    "fused, now split": ({"qkv": "fused"}, {}, "qkv"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_a_setting_that_the_state_depends_on_is_refused_with_both_values(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    before, after, field = REFUSED[case]
    saved, now = arguments(**before), arguments(**after)
    check(monkeypatch, saved, saved)
    check(monkeypatch, now, now)
    with pytest.raises(ValueError) as refused:
        check(monkeypatch, saved, now)
    message = str(refused.value)
    assert message.startswith(f"{flag_of(field)} {resolved(now, field)}: ")
    assert f"was saved with {resolved(saved, field)}," in message
    assert "--no-load-optim" in message
    now.no_load_optim = True
    check(monkeypatch, saved, now)
    now.no_load_optim, now.finetune = None, True
    check(monkeypatch, saved, now)


def resolved(args: SimpleNamespace, field: str) -> Any:
    """The value that a message tells: what a default stands for, where that is a matter of other settings."""
    config = config_of(args)
    own = getattr(config, field)
    if own is None:
        grafting = "adam" if config.method in ("shampoo", "one-sided") else "none"
        return {"side": "both", "grafting": grafting, "tp_alignment": 2}.get(field)
    return own


ACCEPTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the same": ({}, {}),
    "the same, of another method": ({"method": "kl-soap"}, {"method": "kl-soap"}),
    "defaults spelled out": (
        {},
        {"method": "shampoo", "side": "both", "grafting": "adam", "tp_alignment": 2, "block_size": 1024},
    ),
    "defaults of soap spelled out": ({"method": "soap"}, {"method": "soap", "side": "both", "grafting": "none"}),
    "defaults of one-sided spelled out": (
        {"method": "one-sided"},
        {"method": "one-sided", "side": "smaller", "grafting": "adam"},
    ),
    "eigh, now newton": ({"solver": "eigh"}, {"solver": "newton"}),
    "newton, now newton-db": ({"solver": "newton"}, {"solver": "newton-db"}),
    "eigh, now qr, where a basis is kept anyway": (
        {"method": "soap", "solver": "eigh"},
        {"method": "soap", "solver": "qr"},
    ),
    "Nesterov momentum": ({}, {"nesterov": True}),
    "no bias correction": ({}, {"bias_correction": False}),
    "a clip": ({}, {"update_rms_clip": 1.0}),
    "another weight decay": ({}, {"weight_decay_mode": "independent"}),
    "a tolerance": ({"solver": "qr"}, {"solver": "qr", "refresh_tolerance": 0.1}),
    "another damping": ({}, {"epsilon": 1e-4}),
    "other owners": ({}, {"ownership": "balanced"}),
    "another log": ({}, {"log_interval": 1}),
    "checked replicas": ({}, {"check_replicas": 100}),
    "more patience": ({}, {"solver_timeout": 3600.0}),
}


@pytest.mark.parametrize("case", list(ACCEPTED))
def test_a_setting_that_the_state_does_not_depend_on_may_change(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    before, after = ACCEPTED[case]
    check(monkeypatch, arguments(**before), arguments(**after))


def test_every_setting_is_either_free_to_change_or_refused() -> None:
    refused = {field for _, _, field in REFUSED.values()}
    free = {
        "nesterov", "bias_correction", "update_rms_clip", "weight_decay_mode", "refresh_tolerance",
        "epsilon", "ownership", "log_interval", "check_replicas", "solver_timeout",
    }  # fmt: skip
    assert refused & free == set()
    assert refused | free == set(ShampooConfig.__dataclass_fields__)
    assert free <= {name for _, after in ACCEPTED.values() for name in after}


def test_what_an_older_checkpoint_does_not_know_has_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = arguments(solver="qr")
    for name in ("method", "side", "qkv", "max_dim", "factor_dtype"):
        delattr(saved, f"shampoo_{name}")
    check_stored(monkeypatch, saved, arguments())
    with pytest.raises(ValueError, match=r"^--shampoo-method soap: the checkpoint was saved with shampoo"):
        check_stored(monkeypatch, saved, arguments(method="soap"))


def test_the_default_solver_of_an_older_checkpoint_is_the_one_of_then(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = arguments()  # "auto" by word, or no word at all: for roots that was eigh
    with pytest.raises(ValueError, match=r"^--shampoo-solver qr: the checkpoint was saved with eigh, and only one of"):
        check_stored(monkeypatch, saved, arguments())
    check_stored(monkeypatch, saved, arguments(solver="eigh"))
    check_stored(monkeypatch, arguments(method="soap"), arguments(method="soap"))


def test_the_solver_that_auto_stands_for_is_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = arguments()
    resolve_(stored, config_of(stored))
    assert stored.shampoo_solver == "qr"
    check_stored(monkeypatch, stored, arguments())
    with pytest.raises(ValueError, match=r"^--shampoo-solver eigh: the checkpoint was saved with qr, and only one of"):
        check_stored(monkeypatch, stored, arguments(solver="eigh"))


def test_nothing_to_load_is_nothing_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, None, arguments(method="soap"))
    other = arguments(given={"second_order_optimizer": None})
    check(monkeypatch, other, arguments(given={"load": None}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"no_save_optim": True}, "was saved with --no-save-optim; load the weights with --no-load-optim"),
        ({"second_order_optimizer": None}, "was saved with --optimizer adam, .*--no-load-optim or --finetune"),
        ({"num_layers": 4, "hidden_size": 32}, "of another model: num_layers 4 -> 2, hidden_size 32 -> 64"),
        ({"num_query_groups": 2}, "^--num-query-groups 4: the checkpoint is of another model, with 2"),
        ({"use_distributed_optimizer": False}, "in another form: use_distributed_optimizer False -> True"),
        ({"dist_ckpt_optim_fully_reshardable": False}, "saved by an older version, on whose layout"),
        ({"lr": 2e-3}, "^--lr 0.001: the checkpoint was saved with 0.002; add --override-opt-param-scheduler"),
        ({"train_iters": 50}, "^--lr-decay-iters 100: the checkpoint was saved with 50; add --override-opt"),
    ],
    ids=["weights alone", "optimizer", "model", "groups", "form", "version", "rate", "iterations"],
)
def test_what_else_differs_is_refused_whatever_the_method(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], message: str
) -> None:
    for method in ("shampoo", "kl-soap"):
        with pytest.raises((ValueError, NotImplementedError), match=message):
            check(monkeypatch, arguments(method=method, given=given), arguments(method=method))


@pytest.mark.parametrize("whose", ["override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"])
def test_another_schedule_is_accepted_where_it_is_clear_whose_counts(
    monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    saved = arguments(given={"lr": 2e-3, "train_iters": 50, "start_weight_decay": 0.1})
    check(monkeypatch, saved, arguments(given={whose: True}))


def test_another_layout_is_accepted_and_the_alignment_comes_from_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved = arguments(given={"world_size": 8, "tensor_model_parallel_size": 8, "data_parallel_size": 1})
    now = arguments()
    check(monkeypatch, saved, now)
    assert now.shampoo_tp_alignment == 8
    with pytest.raises(ValueError, match=r"^--shampoo-tp-alignment 2: the checkpoint was saved with 8"):
        check(monkeypatch, saved, arguments(tp_alignment=2))
    with pytest.raises(ValueError, match=r"^--tensor-model-parallel-size 2: .*--shampoo-tp-alignment 1, and 2 ranks"):
        check(monkeypatch, arguments(given={"tensor_model_parallel_size": 1}), arguments())


def test_experts_without_the_distributed_optimizer_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"use_distributed_optimizer": False}
    saved = arguments(given={**given, "expert_model_parallel_size": 2})
    with pytest.raises(NotImplementedError, match=r"^--expert-model-parallel-size 2 -> 1"):
        check(monkeypatch, saved, arguments(given=given))
    check(monkeypatch, saved, arguments(given={**given, "expert_model_parallel_size": 4}))
