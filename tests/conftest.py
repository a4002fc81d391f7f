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
