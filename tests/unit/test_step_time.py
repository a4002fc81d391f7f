"""tools/step_time.py: medians and ratios of real runs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "step_time.py"


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("step_time", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_has_medians_and_ratios(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    tool.show({"sgd": [0.1, 0.2, 0.3], "shampoo": [0.5, 0.4, 0.6]})
    printed = capsys.readouterr().out
    assert "0.2000" in printed and "0.5000" in printed and "2.500" in printed


def test_the_first_steps_are_left_out(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "\n".join(f" iteration | elapsed time per iteration (ms): {ms}.5 | lm loss" for ms in range(1000, 1013))
    done = subprocess.CompletedProcess([], 0, stdout=lines, stderr="")
    monkeypatch.setattr(tool.subprocess, "run", lambda *args, **kwargs: done)
    assert tool.run("adam", 13, []) == pytest.approx([1.0105, 1.0115, 1.0125])


def test_a_failed_run_shows_the_end_of_its_log(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(*args: Any, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, stdout="", stderr="what went wrong")

    monkeypatch.setattr(tool.subprocess, "run", failed)
    with pytest.raises(SystemExit, match="what went wrong"):
        tool.run("adam", 13, [])


def test_a_missing_corpus_is_an_error_by_name(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, TOOL, "--data", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "prepare_corpus.py" in done.stderr
