"""At the end of the layout suite: its table."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import ROOT
from tests.layouts import table


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the table, write it to runs/layouts, and on request into the documentation."""
    if not config.getoption("all_layouts"):
        return
    reports = [it for outcome in ("passed", "failed") for it in terminalreporter.stats.get(outcome, [])]
    rows = table.rows_of(it for it in reports if it.when == "call")
    table.show(rows)
    table.write(rows, ROOT / "runs" / "layouts")
    if config.getoption("layout_docs"):
        table.put_into(table.PAGE, rows)
