"""What is checked of a run's arguments before anything is built, and how a mistake is told."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from megatron.gpt.arguments import check_load, tidy_help
from megatron.gpt.errors import reported_to_user


def load_arguments(**changes: Any) -> argparse.Namespace:
    defaults = {
        "load": None, "ckpt_step": None, "non_persistent_ckpt_type": None, "pretrained_checkpoint": None,
        "exit_on_missing_checkpoint": True, "rank": 0,
    }  # fmt: skip
    return argparse.Namespace(**(defaults | changes))


def test_a_folder_without_a_checkpoint_is_an_error_where_the_user_wants_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--load {tmp_path}: .*latest_checkpointed_iteration.txt.*check the path"):
        check_load(load_arguments(load=str(tmp_path)))
    with pytest.raises(ValueError, match="iter_0000007"):
        check_load(load_arguments(load=str(tmp_path), ckpt_step=7))


def test_otherwise_it_is_a_warning_on_rank_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_load(load_arguments(load=str(tmp_path), exit_on_missing_checkpoint=False))
    assert "random weights" in capsys.readouterr().out
    check_load(load_arguments(load=str(tmp_path), exit_on_missing_checkpoint=False, rank=1))
    assert capsys.readouterr().out == ""


def test_a_checkpoint_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    (tmp_path / "iter_0000007").mkdir()
    check_load(load_arguments(load=str(tmp_path)))
    check_load(load_arguments(load=str(tmp_path), ckpt_step=7))
    check_load(load_arguments())
    assert capsys.readouterr().out == ""


def test_help_with_a_bare_percent_sign_is_shown_as_written() -> None:
    parser = argparse.ArgumentParser("prog")
    parser.add_argument("--headroom", help="1.10 = 10%).")
    parser.add_argument("--depth", default=3, help="layers (default %(default)s)")
    with pytest.raises(ValueError, match="format"):
        parser.format_help()
    tidy_help(parser)
    text = parser.format_help()
    assert "1.10 = 10%)." in text
    assert "layers (default 3)" in text
    assert "[--headroom" not in parser.format_usage()


@pytest.mark.parametrize("kind", [AssertionError, ValueError, NotImplementedError])
def test_a_refused_argument_ends_with_one_line(kind: type[Exception]) -> None:
    with pytest.raises(SystemExit, match=r"^prog: error: --flag 3: too many") as ended, reported_to_user("prog"):
        raise kind("--flag 3: too many")
    assert "\n" not in str(ended.value)


def test_an_assertion_without_words_is_shown_as_written() -> None:
    # Compiled here, since pytest gives its own assertions words.
    program = compile("assert False", __file__, "exec")
    with pytest.raises(SystemExit, match=r"^prog: error: .* \[here, line 1\]$"), reported_to_user("prog"):
        exec(program, {"__name__": "here"})


def test_a_fault_of_the_program_keeps_its_traceback() -> None:
    with pytest.raises(KeyError), reported_to_user("prog"):
        {}["missing"]
