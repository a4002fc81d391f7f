"""Seams are applied once, where they are needed, to a Megatron that they were tested with."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

import pytest

from megatron.shampoo.mcore.seams import registry
from megatron.shampoo.mcore.seams.registry import Function, Seam, check_version, install


class Holder:
    """A class as Megatron might have it."""

    def method(self, value: int) -> int:
        return value

    @staticmethod
    def static(value: int) -> int:
        return value

    @classmethod
    def named(cls, value: int) -> tuple[str, int]:
        return cls.__name__, value


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with a function and a class to put seams into."""
    fake = ModuleType("fake_megatron")
    fake.function = lambda value: value  # type: ignore[attr-defined]
    fake.Holder = type("Holder", (Holder,), dict(vars(Holder)))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_megatron", fake)
    return fake


def plus_ten(original: Function) -> Function:
    """Add ten to the last argument."""

    @functools.wraps(original)
    def replaced(*args: Any) -> Any:
        return original(*args[:-1], args[-1] + 10)

    return replaced


def seam(target: str = "function", *, needed: bool = True, name: str = "plus ten", **fields: Any) -> Seam:
    """A seam into the fake module."""
    return Seam(
        name=name, target=f"fake_megatron.{target}", reason="test", probe=lambda: needed, replace=plus_ten, **fields
    )  # fmt: skip


def test_function_is_replaced_once(module: ModuleType) -> None:
    assert install([seam()]) == ["plus ten"] and install([seam()]) == []
    assert module.function(1) == 11
    assert seam().installed()


@pytest.mark.parametrize(
    ("target", "call", "expected"),
    [
        ("Holder.method", lambda holder: holder().method(1), 11),
        ("Holder.static", lambda holder: holder.static(1), 11),
        ("Holder.static", lambda holder: holder().static(1), 11),
        ("Holder.named", lambda holder: holder.named(1), ("Holder", 11)),
    ],
)
def test_methods_stay_what_they_are(module: ModuleType, target: str, call: Any, expected: Any) -> None:
    install([seam(target)])
    assert call(module.Holder) == expected
    assert install([seam(target)]) == []


def test_two_seams_into_one_function_are_both_found(module: ModuleType) -> None:
    first, second = seam(), seam(name="plus ten more")
    assert install([first, second]) == ["plus ten", "plus ten more"]
    assert module.function(1) == 21
    assert install([second, first]) == []


def test_seam_that_is_not_needed_is_left_out(module: ModuleType) -> None:
    assert install([seam(needed=False)]) == []
    assert module.function(1) == 1 and not seam().installed()


def test_target_that_is_gone_is_an_error(module: ModuleType) -> None:
    with pytest.raises(AttributeError, match="no_such_function"):
        install([seam("no_such_function")])


@pytest.mark.parametrize("version", ["0.20.0", "0.18.3", "1.19.0"])
def test_untested_megatron_is_refused_with_both_versions(version: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"megatron-core {version} is installed.*0\.19\.\*"):
        check_version([seam()], version)


@pytest.mark.parametrize("version", ["0.19.0", "0.19.2", "0.19.3rc1", "0.19.2+cu128"])
def test_tested_series_is_accepted(version: str) -> None:
    check_version([seam()], version)


def test_install_checks_the_installed_megatron_before_it_changes_anything(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.core.package_info.__version__", "0.42.0")
    with pytest.raises(NotImplementedError, match=r"0\.42\.0"):
        registry.install([seam()])
    assert module.function(1) == 1
