"""The table of the layout suite: rows from test reports, for the terminal, as JSON and in the documentation."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.launch import ROOT
from tests.layouts.cases import CASES

PAGE = ROOT / "docs" / "parallelism.md"
BEGIN, END = "<!-- table of the layout suite: begin -->", "<!-- table of the layout suite: end -->"
COLUMNS = (
    "model", "layout", "loss at 10", "gradient norm at 1", "loss differs by", "gradient norm by", "parameter by",
    "bytes a step", "verdict",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """One case, or the run on one rank that cases are compared with."""

    group: str
    layout: str
    loss: float
    grad_norm: float
    differences: dict[str, float] = dataclasses.field(default_factory=dict)
    """Worst relative ones of loss, gradient norm and parameter; empty for one rank."""
    sent: int = 0
    """Bytes that all ranks together send in a step of the optimizer, all of them over data-parallel groups."""
    verdict: str = ""

    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of `COLUMNS`."""
        differences = [_short(self.differences.get(name)) for name in ("loss", "gradient norm", "parameter")]
        sent = f"{self.sent:,}" if self.differences else ""
        return (
            self.group, self.layout, f"{self.loss:.6f}", f"{self.grad_norm:.6f}", *differences, sent, self.verdict
        )  # fmt: skip


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}".replace("e-0", "e-") if value else "0"


def rows_of(reports: Iterable[Any]) -> list[Row]:
    """Rows of the suite's test reports, in the order of the cases; those on one rank before theirs.

    Args:
        reports: pytest's, of the calls of tests.
    """
    found: dict[str, tuple[dict[str, Any], bool]] = {}
    for report in reports:
        properties = dict(report.user_properties)
        if "case" in properties:
            found[properties["case"]] = (properties, report.passed)
    rows: list[Row] = []
    for case in CASES:
        properties, passed = found.get(str(case), ({}, False))
        if "measured" not in properties:
            continue
        if case.group not in {row.group for row in rows}:
            rows.append(Row(case.group, "one rank", *properties["alone"]))
        loss, grad_norm, differences = properties["measured"]
        verdict = "same" if passed else "DIFFERS"
        rows.append(Row(case.group, case.name, loss, grad_norm, differences, properties.get("bytes", 0), verdict))
    return rows


def as_markdown(rows: Sequence[Row]) -> str:
    """The table with its heading of hardware and versions."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(row.cells())} |" for row in rows]
    return f"{_circumstances()}\n\n" + "\n".join(lines) + "\n"


def write(rows: Sequence[Row], folder: Path) -> None:
    """Write `results.json` and `table.md`.

    Args:
        rows: of the table.
        folder: made if need be.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    (folder / "table.md").write_text(as_markdown(rows))


def put_into(page: Path, rows: Sequence[Row]) -> None:
    """Replace the table in a page of the documentation.

    Args:
        page: has the two marks `BEGIN` and `END`.
        rows: of the new table.
    """
    before, rest = page.read_text().split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{as_markdown(rows)}{END}{after}")


def show(rows: Sequence[Row]) -> None:
    """Print the table to the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="One training run on every layout", title_justify="left")
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if number in (0, 1, 8) else "right")
    for row in rows:
        table.add_row(*row.cells(), style="red" if row.verdict == "DIFFERS" else None)
    console = Console()
    console.width = max(console.width, 170)  # a table that a file or a narrow terminal would fold is unreadable
    console.print(table)


def _circumstances() -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "megatron-core"))
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return (
        f"{os.cpu_count()} CPU cores ({platform.machine()}), no GPU, gloo; python {platform.python_version()}, "
        f"{versions}; commit {commit or 'unknown'}."
    )
