"""Refuses to build what would hide Megatron; all else about the package is in pyproject.toml."""

from pathlib import Path

from setuptools import setup

if (Path(__file__).resolve().parent / "megatron" / "__init__.py").exists():
    raise SystemExit(
        "megatron/__init__.py exists: it would hide megatron.core and megatron.training of the megatron-core package. "
        "Delete it: megatron is a namespace package that both distributions share."
    )

setup()
