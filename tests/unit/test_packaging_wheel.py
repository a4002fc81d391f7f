"""The wheel adds to pip's `megatron.core` and never hides it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import megatron.shampoo

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


def copy_sources(target: Path) -> Path:
    """The checkout's own files: a build must not pick up a stale build/ and leaves its own behind."""
    shutil.copytree(ROOT / "megatron", target / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    for name in SOURCES:
        shutil.copy(ROOT / name, target)
    return target


def build(sources: Path, wheels: Path) -> subprocess.CompletedProcess[str]:
    command = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(sources)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    wheels = tmp_path_factory.mktemp("wheels")
    done = build(copy_sources(tmp_path_factory.mktemp("sources")), wheels)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = wheels.glob("*.whl")
    return path


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "megatron").rglob("*.py")}
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert {name for name in held if name.endswith(".py")} == expected
    assert {name for name in held if not name.startswith("megatron/")} == set()
    for package in ("shampoo", "cpu", "gpt", "data_tools", "demo"):
        assert f"megatron/{package}/__init__.py" in held


def test_the_wheel_has_no_top_level_init(wheel: Path) -> None:
    assert "megatron/__init__.py" not in zipfile.ZipFile(wheel).namelist()


def test_the_metadata_names_version_licence_and_extras(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    lines = archive.read(name).decode().splitlines()
    assert "Name: megatron-shampoo" in lines
    assert f"Version: {megatron.shampoo.__version__}" in lines
    assert "License-Expression: Apache-2.0" in lines
    assert {"Provides-Extra: te", "Provides-Extra: dev"} <= set(lines)
    required = [line for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert any("megatron-core" in line for line in required)
    # The project of that name on PyPI is not NVIDIA's; Transformer Engine is the user's choice.
    assert not any("apex" in line or "transformer-engine" in line for line in required)


def test_an_installed_copy_imports_beside_megatron_core(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(target), str(wheel)], check=True)
    script = (
        "import json, megatron.core, megatron.shampoo, megatron.cpu\n"
        "from importlib.metadata import version\n"
        "print(json.dumps([megatron.shampoo.__file__, megatron.cpu.__file__, megatron.core.__file__,\n"
        "                  version('megatron-shampoo'), sorted(megatron.shampoo.__all__),\n"
        "                  megatron.shampoo.Shampoo.__mro__[1].__module__]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(target)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env=environment, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shampoo, cpu, core, version, names, base = json.loads(done.stdout.splitlines()[-1])
    assert Path(shampoo).is_relative_to(target) and Path(cpu).is_relative_to(target)
    assert not Path(core).is_relative_to(target) and not Path(core).is_relative_to(ROOT / "megatron")
    assert version == megatron.shampoo.__version__
    assert "Shampoo" in names and base.startswith("torch.optim")


def test_a_build_with_a_top_level_init_is_refused(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    (copy_sources(sources) / "megatron" / "__init__.py").touch()
    done = build(sources, tmp_path)
    assert done.returncode != 0
    assert "would hide megatron.core" in done.stdout + done.stderr
