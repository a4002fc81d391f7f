"""Megatron's command line on CPU: what is set by itself, and what is refused by name."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
from typing import Any

from megatron import cpu
from tests.child_process import run_in_child

ACCEPTED = [
    "--transformer-impl local",
    "--distributed-backend gloo",
    "--attention-backend unfused",
    "--cuda-graph-impl none",
    "--moe-token-dispatcher-type alltoall",
    "--context-parallel-size 1",
    "--no-bias-gelu-fusion --use-cpu-initialization",
    "--sequence-parallel --swiglu --normalization RMSNorm --bf16",
]


def megatron_parser() -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(argparse.ArgumentParser("pretrain_gpt.py"))


def refused_argv(action: argparse.Action, is_refused: Any) -> list[str]:
    """A command line that asks for a value which the rule is to refuse."""
    flag = action.option_strings[0]
    if action.nargs == 0:
        return [flag]
    for choice in action.choices or ():
        if is_refused(choice):
            return [flag, getattr(choice, "name", choice)]
    return [flag, "2"]


def parse(argv: list[str]) -> tuple[argparse.Namespace | None, str, str]:
    """Parse with the CPU's parser: arguments (None if refused), standard output, standard error."""
    from megatron.cpu import flags

    args, out, err = None, io.StringIO(), io.StringIO()
    # What is refused ends the process; the tests read the message.
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
        args = flags.adapt(megatron_parser()).parse_args(argv)
    return args, out.getvalue(), err.getvalue()


def test_everything_in_the_tables_is_refused_by_flag_value_and_remedy() -> None:
    def check() -> None:
        cpu.install_if_needed()
        from megatron.cpu.flags import REFUSALS

        actions = {action.dest: action for action in megatron_parser()._actions}
        for rule in REFUSALS:
            action = actions[rule.dest]
            assert rule.flag in action.option_strings, f"Megatron has no {rule.flag}"
            argv = refused_argv(action, rule.is_refused)
            args, _, error = parse(argv)
            assert args is None, f"{argv} was accepted"
            assert error.startswith("pretrain_gpt.py: error: " + " ".join(argv)), error
            assert len(error.splitlines()) == 1
            assert rule.allowed in error
            assert rule.remedy in error

    run_in_child(check)


def test_defaults_of_megatron_and_what_a_cpu_can_run_are_accepted() -> None:
    def check() -> None:
        cpu.install_if_needed()
        for line in ["", *ACCEPTED]:
            args, _, error = parse(line.split())
            assert args is not None, error
            assert (args.transformer_impl, args.distributed_backend) == ("local", "gloo")
            assert args.use_cpu_initialization
            assert not any([args.bias_gelu_fusion, args.apply_rope_fusion, args.gradient_accumulation_fusion])

    run_in_child(check)


def test_a_window_and_context_parallelism_exclude_each_other() -> None:
    def check() -> None:
        cpu.install_if_needed()
        both = ["--window-size", "8,0", "--context-parallel-size", "2"]
        args, _, error = parse(both)
        assert args is None
        assert error.startswith("pretrain_gpt.py: error: --window-size (8, 0): on CPU")
        assert len(error.splitlines()) == 1
        assert parse(both[:2])[0] is not None
        assert parse(both[2:])[0] is not None

    run_in_child(check)


def test_rank_0_alone_says_in_one_line_what_was_set() -> None:
    def check() -> None:
        from megatron.cpu.flags import CPU_DEFAULTS

        cpu.install_if_needed()
        os.environ["RANK"] = "0"
        _, said, _ = parse([])
        assert len(said.splitlines()) == 1
        assert all(default.typed in said for default in CPU_DEFAULTS)
        os.environ["RANK"] = "1"
        assert parse([])[1] == ""

    run_in_child(check)
