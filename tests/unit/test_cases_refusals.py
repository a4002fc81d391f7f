"""What ``--optimizer shampoo`` does not work with is refused by flag, value and remedy; everything else passes."""

from __future__ import annotations

import argparse
import dataclasses
import enum
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.gpt.arguments import tidy_help
from megatron.shampoo.config import ShampooConfig, flag_of
from megatron.shampoo.mcore import validation
from megatron.shampoo.mcore.arguments import add_arguments, config_of, given_flags, shown_arguments
from megatron.shampoo.mcore.validation import validate_args


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """Megatron's parser with our arguments."""
    from megatron.training.arguments import add_megatron_arguments

    return add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


def arguments(**values: Any) -> SimpleNamespace:
    """A validated command line of a run that works."""
    given = {
        "optimizer": "adam", "second_order_optimizer": "shampoo", "tensor_model_parallel_size": 2,
        "group_query_attention": False, "num_query_groups": None, "num_attention_heads": 4, "kv_channels": 16,
        "ffn_hidden_size": 256, "save": None, "load": None, "ckpt_format": "torch_dist", "no_save_optim": None,
        "non_persistent_ckpt_type": None,
        "num_experts": None,
        **{f"shampoo_{name}": None for name in ShampooConfig.__dataclass_fields__},
    }  # fmt: skip
    return SimpleNamespace(**{**given, **values})


def test_what_works_passes() -> None:
    assert validate_args(arguments()) == ShampooConfig()
    assert validate_args(arguments(save="runs", shampoo_block_size=8)) == ShampooConfig(block_size=8)
    assert validate_args(arguments(ckpt_format="torch", save="runs", no_save_optim=True)) is not None
    assert validate_args(arguments(second_order_optimizer=None, use_mup=True)) is None


@pytest.mark.parametrize("refusal", validation._REFUSALS, ids=lambda refusal: refusal.flag)
def test_every_refusal_is_of_a_flag_that_megatron_has(refusal: Any, parser: argparse.ArgumentParser) -> None:
    action = next((action for action in parser._actions if refusal.flag in action.option_strings), None)
    assert action is not None, f"Megatron has no {refusal.flag}"
    assert action.dest == refusal.dest
    assert action.default in refusal.works
    with pytest.raises(NotImplementedError) as refused:
        validate_args(arguments(**{refusal.dest: True}))
    assert str(refused.value) == f"{refusal.flag} does not work with --optimizer shampoo; {refusal.remedy}"
    assert validate_args(arguments(second_order_optimizer=None, **{refusal.dest: True})) is None


def test_our_flags_with_another_optimizer_are_refused_with_their_values(parser: argparse.ArgumentParser) -> None:
    args = parser.parse_args(["--optimizer", "sgd", "--shampoo-block-size", "8", "--shampoo-grafting", "sgd"])
    with pytest.raises(ValueError, match=r"^--shampoo-grafting sgd, --shampoo-block-size 8: .* --optimizer sgd; "):
        validate_args(args)


@pytest.mark.parametrize(
    ("line", "given"),
    [
        ("--shampoo-method kl-soap --shampoo-solver qr", {"method": "kl-soap", "solver": "qr"}),
        ("--shampoo-root 2 --shampoo-side left", {"root": 2, "side": "left"}),
        ("--shampoo-nesterov --no-shampoo-bias-correction", {"nesterov": True, "bias_correction": False}),
        ("--no-shampoo-nesterov --shampoo-bias-correction", {"nesterov": False, "bias_correction": True}),
        ("--shampoo-momentum-placement after", {"momentum_placement": "after"}),
        ("--shampoo-weight-decay independent", {"weight_decay_mode": "independent"}),
        ("--shampoo-update-rms-clip 0.5", {"update_rms_clip": 0.5}),
        ("--shampoo-solver qr --shampoo-refresh-tolerance 0.1", {"solver": "qr", "refresh_tolerance": 0.1}),
        ("--shampoo-max-dim 0 --shampoo-qkv heads", {"max_dim": 0, "qkv": "heads"}),
        ("--shampoo-factor-dtype bf16 --shampoo-root-dtype fp32", {"factor_dtype": "bf16", "root_dtype": "fp32"}),
        ("--shampoo-grafting none --shampoo-start-step 7", {"grafting": "none", "start_step": 7}),
    ],
)
def test_a_flag_sets_its_field(parser: argparse.ArgumentParser, line: str, given: dict[str, Any]) -> None:
    args = parser.parse_args(["--optimizer", "shampoo", "--weight-decay", "0.2", *line.split()])
    assert config_of(args) == ShampooConfig(**given)
    assert args.weight_decay == 0.2
    assert len(given_flags(args)) == len(given)
    shown = shown_arguments(args)
    for name in ShampooConfig.__dataclass_fields__:
        assert getattr(shown, f"shampoo_{name}") == given.get(name, getattr(ShampooConfig(), name))


def test_every_field_has_a_flag_and_every_choice_is_offered(parser: argparse.ArgumentParser) -> None:
    actions = {action.dest: action for action in parser._actions}
    tidy_help(parser)
    text = parser.format_help()
    for field in dataclasses.fields(ShampooConfig):
        action = actions[f"shampoo_{field.name}"]
        assert flag_of(field.name) in action.option_strings
        assert flag_of(field.name) in text
        assert action.default is None
        if isinstance(field.default, enum.Enum):
            assert action.choices == [member.value for member in type(field.default)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--shampoo-method one-sided --shampoo-side both", "^--shampoo-side both: allowed is"),
        ("--shampoo-method soap --shampoo-root 4", "^--shampoo-root 4: allowed is"),
        ("--shampoo-method soap --shampoo-solver newton", "^--shampoo-solver newton: allowed is"),
        ("--shampoo-method soap --shampoo-start-step 2", "^--shampoo-start-step 2: allowed is"),
        ("--shampoo-solver eigh --shampoo-refresh-tolerance 0.1", "^--shampoo-refresh-tolerance 0.1: allowed is"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(parser: argparse.ArgumentParser, line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_args(parser.parse_args(["--optimizer", "shampoo", *line.split()]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shampoo_tp_alignment": 3}, "--shampoo-tp-alignment 3: allowed are multiples of .* 2, for instance 4"),
        ({"shampoo_tp_alignment": 6}, "--shampoo-tp-alignment 6 does not divide the 64 query rows"),
        ({"shampoo_tp_alignment": 64, "ffn_hidden_size": 96}, "does not divide the 96 --ffn-hidden-size"),
        ({"group_query_attention": True, "num_query_groups": 1}, "--num-query-groups 1 on .* --shampoo-qkv fused"),
        ({"save": "runs", "ckpt_format": "torch"}, "--ckpt-format torch cannot hold .* allowed is torch_dist"),
        ({"load": "runs", "ckpt_format": "torch_dcp"}, "--ckpt-format torch_dcp cannot hold .* allowed is torch_dist"),
        ({"non_persistent_ckpt_type": "local"}, "^--non-persistent-ckpt-type local cannot .* use .* global"),
    ],
    ids=["no multiple", "rows", "ffn", "query groups", "saving torch", "loading torch_dcp", "local"],
)
def test_a_value_that_cannot_work_is_refused_with_what_can(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=message):
        validate_args(arguments(**given))
