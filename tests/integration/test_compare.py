"""`make compare`'s program with real training runs of a model that trains in seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_compare import make_corpus

ROOT = Path(__file__).resolve().parents[2]
SHRINK = [
    *("--num-layers", "1", "--hidden-size", "32", "--seq-length", "32", "--max-position-embeddings", "32"),
    *("--micro-batch-size", "4", "--global-batch-size", "4"),
]  # fmt: skip


def test_two_optimizers_are_compared_from_corpus_to_table(tmp_path: Path) -> None:
    command = [
        *(sys.executable, str(ROOT / "tools" / "compare.py"), "--data", str(make_corpus(tmp_path))),
        *("--out", str(tmp_path / "out"), "--optimizers", "adam,shampoo", "--steps", "4", "--eval-interval", "2"),
        *("--grid", "adam=1e-2", "--grid", "shampoo=1e-2", "--seeds", "1", "--eval-tokens", "128", "--", *SHRINK),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    by_name = {one["name"]: one for one in results["optimizers"]}
    assert set(by_name) == {"adam", "shampoo"}
    assert [run["measured"]["outcome"] for run in results["runs"]] == ["finished", "finished"]
    for run in results["runs"]:
        measured = run["measured"]
        assert [step for step, _ in measured["train"]] == [1, 2, 3, 4]
        assert [step for step, _, _ in measured["held_out"]] == [2, 4]
        assert measured["held_out"][1][2] < measured["held_out"][0][2] < measured["train"][0][1] + 0.1
        assert 0 < measured["held_out"][0][1] < measured["held_out"][1][1] == pytest.approx(measured["seconds"])
        log = (tmp_path / "out" / run["folder"] / "train.log").read_text()
        # The held-out set of 128 tokens is 4 samples, read one by one at every evaluation.
        assert log.count("Evaluating iter 4/4") == 1
        assert not (tmp_path / "out" / run["folder"] / "cache").exists()
    # AdamW and Shampoo began alike: one model, one order of the data.
    first, second = (run["measured"]["train"][0] for run in results["runs"])
    assert first == second
    assert by_name["adam"]["steps_to_reference"]["mean"] == pytest.approx(1.0)
    assert by_name["shampoo"]["speed"]["mean"] > 0
    assert results["corpus"]["held_out_tokens"] == 128
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| AdamW | 0.01 |" in table and "| Shampoo | 0.01 |" in table
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_flag_that_megatron_refuses_is_a_row_with_the_reason(tmp_path: Path) -> None:
    command = [
        *(sys.executable, str(ROOT / "tools" / "compare.py"), "--data", str(make_corpus(tmp_path))),
        *("--out", str(tmp_path / "out"), "--optimizers", "adam", "--steps", "4", "--grid", "adam=1e-2"),
        *("--seeds", "1", "--eval-tokens", "128", "--", "--no-such-flag"),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| AdamW | none | none |" in table
    assert "failed: status 2: pretrain_gpt.py: error: unrecognized arguments: --no-such-flag" in table
