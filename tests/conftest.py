"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launch import Launcher


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """One fork server for the session; it starts at the first run."""
    with Launcher() as running:
        yield running


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of suites with a `make` target: pytest reads those of a folder's own conftest too late."""
    parser.addoption("--all-layouts", action="store_true", help="run every layout, not only the quick ones")
    parser.addoption("--all-pairs", action="store_true", help="reshard between all pairs of layouts")
    parser.addoption("--soak-steps", type=int, default=300, help="steps of the soak test (default: 300)")
    parser.addoption("--layout-docs", action="store_true", help="put the layouts' table into docs/parallelism.md")


def pytest_configure() -> None:
    """One thread: the tests' matrices are so small that a second thread only waits, and others may use it."""
    import torch

    torch.set_num_threads(1)
