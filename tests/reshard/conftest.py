"""At the end of the reshard suite: its table."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from tests.reshard.cases import PAIRS


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what every pair came to."""
    if not config.getoption("all_pairs"):
        return
    reports = [it for outcome in ("passed", "failed") for it in terminalreporter.stats.get(outcome, [])]
    found = {}
    for report in reports:
        row = dict(report.user_properties).get("pair")
        if report.when == "call" and row:
            found[f"{row[0]}: {row[1]} -> {row[2]}"] = (row, report.passed)
    table = Table(title="Saved on one layout, continued on another")
    for column in ("model", "saved on", "continued on", "loss differs by", "parameter by", "verdict"):
        table.add_column(column)
    for pair in PAIRS:
        if str(pair) in found:
            (group, before, after, loss, parameter), passed = found[str(pair)]
            table.add_row(group, before, after, _short(loss), _short(parameter), "same" if passed else "DIFFERS")
    Console(width=None if terminalreporter.isatty else 140).print(table)


def _short(value: float) -> str:
    return f"{value:.1e}" if value else "bit for bit"
