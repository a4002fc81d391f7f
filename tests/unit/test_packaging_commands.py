"""`make`, `.ci/run`, the search for Python and the tools: they work from anywhere and tell the truth."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
TOOLS = sorted(path.name for path in (ROOT / "tools").glob("*.py"))
WANTED = (ROOT / ".python-version").read_text().strip()


def write_script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def fake_python(path: Path, version: str, has_venv: bool = True) -> Path:
    """An interpreter that answers the two questions `find_python.sh` asks."""
    answer = "exit 0" if has_venv else "exit 1"
    return write_script(path, f'case "$2" in *version_info*) echo {version} ;; *) {answer} ;; esac')


def find_python(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{home / 'bin'}:/usr/bin:/bin", "HOME": str(home)}
    command = [str(ROOT / "tools" / "find_python.sh"), *arguments]
    return subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True)


def test_python_is_found_in_pyenv_before_path(tmp_path: Path) -> None:
    inside = fake_python(tmp_path / ".pyenv" / "versions" / f"{WANTED}.7" / "bin" / "python", WANTED)
    fake_python(tmp_path / "bin" / f"python{WANTED}", WANTED)
    assert find_python(tmp_path).stdout.strip() == str(inside)


@pytest.mark.parametrize("name", [f"python{WANTED}", "python3", "python"])
def test_python_is_found_on_path_past_another_version(tmp_path: Path, name: str) -> None:
    for other in ("python3", "python"):
        fake_python(tmp_path / "bin" / other, "3.9")
    write_script(tmp_path / "bin" / f"python{WANTED}", "exit 127")  # what an inactive pyenv shim does
    wanted = fake_python(tmp_path / "bin" / name, WANTED)
    assert find_python(tmp_path).stdout.strip() == str(wanted)


def test_a_missing_python_is_an_error_that_says_where_it_was_looked_for(tmp_path: Path) -> None:
    fake_python(tmp_path / "bin" / "python3", "3.9")
    write_script(tmp_path / "bin" / f"python{WANTED}", "exit 127")
    fake_python(tmp_path / "bin" / "python", "2.7")
    done = find_python(tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert f"no Python {WANTED} found" in done.stderr
    assert f"python{WANTED}: does not run" in done.stderr
    assert "python3: is Python 3.9" in done.stderr
    assert f"{tmp_path}/.pyenv/versions/{WANTED}/bin/python: not found" in done.stderr
    assert "make PYTHON=" in done.stderr


@pytest.mark.parametrize(
    ("version", "message"), [("3.9", "is Python 3.9"), (None, "not found")], ids=["another version", "missing"]
)
def test_a_named_python_that_will_not_do_is_refused_not_replaced(
    tmp_path: Path, version: str | None, message: str
) -> None:
    fake_python(tmp_path / "bin" / "python3", WANTED)
    named = tmp_path / "mine"
    if version:
        fake_python(named, version)
    done = find_python(tmp_path, str(named))
    assert done.returncode == 1 and done.stdout == ""
    assert f"PYTHON={named} {message}" in done.stderr


def test_a_python_without_ensurepip_is_refused_with_the_remedy(tmp_path: Path) -> None:
    fake_python(tmp_path / "bin" / f"python{WANTED}", WANTED, has_venv=False)
    done = find_python(tmp_path)
    assert done.returncode == 1 and f"python{WANTED}-venv" in done.stderr


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*help.*)$", makefile, re.MULTILINE)
    listed = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"^  make (\w+)", listed, re.MULTILINE)) == set(phony.split())


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout's build files, and the only Python there is: one that writes down what make asks of it."""
    folder = tmp_path / "checkout"
    (folder / "tools").mkdir(parents=True)
    for name in (
        "Makefile",
        "constraints.txt",
        "pyproject.toml",
        "setup.py",
        ".python-version",
        "tools/find_python.sh",
    ):
        shutil.copy(ROOT / name, folder / name)
    body = f"""
    case "$1 $2" in
        *version_info*) echo {WANTED} ;;
        "-m venv") mkdir -p "$4/bin"; cp "$0" "$4/bin/python"; echo venv >> {tmp_path}/asked ;;
        "-m pip") echo pip >> {tmp_path}/asked; [ ! -e {tmp_path}/broken ] ;;
    esac"""
    write_script(tmp_path / "bin" / f"python{WANTED}", body)
    return folder


def make_install(checkout: Path) -> list[str]:
    """What one `make install` asks of Python."""
    asked = checkout.parent / "asked"
    asked.write_text("")
    environment = {"PATH": f"{checkout.parent / 'bin'}:/usr/bin:/bin", "HOME": str(checkout.parent)}
    subprocess.run(["make", "install"], cwd=checkout, env=environment, capture_output=True)
    return asked.read_text().split()


def test_make_installs_once_and_again_only_when_the_versions_change(checkout: Path) -> None:
    assert make_install(checkout) == ["venv", "pip", "pip"]
    assert make_install(checkout) == []
    later = (checkout / ".venv" / ".installed").stat().st_mtime + 10
    os.utime(checkout / "constraints.txt", (later, later))
    assert make_install(checkout) == ["pip", "pip"]


def test_make_finishes_an_interrupted_install(checkout: Path) -> None:
    (checkout.parent / "broken").touch()
    assert make_install(checkout) == ["venv", "pip"]
    (checkout.parent / "broken").unlink()
    assert make_install(checkout) == ["pip", "pip"]
    assert make_install(checkout) == []


def test_make_builds_the_venv_anew_if_its_python_is_gone_or_the_checkout_was_moved(checkout: Path) -> None:
    make_install(checkout)
    (checkout / ".venv" / "bin" / "python").unlink()
    assert make_install(checkout) == ["venv", "pip", "pip"]
    moved = checkout.rename(checkout.parent / "moved")
    assert make_install(moved) == ["venv", "pip", "pip"]
    assert make_install(moved) == []


@pytest.mark.parametrize(
    ("failing", "called", "succeeds"),
    [
        (None, ["install", "lint", "test"], True),
        ("install", ["install"], False),
        ("lint", ["install", "lint", "test"], False),
        ("test", ["install", "lint", "test"], False),
    ],
)
def test_ci_fails_if_any_of_its_steps_fails(
    tmp_path: Path, failing: str | None, called: list[str], succeeds: bool
) -> None:
    log = tmp_path / "called"
    write_script(tmp_path / "make", f'for last; do :; done; echo "$last" >> {log}; [ "$last" != "{failing}" ]')
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([ROOT / ".ci" / "run"], env=environment, cwd=tmp_path, capture_output=True)
    assert log.read_text().split() == called
    assert (done.returncode == 0) == succeeds


def pins() -> dict[str, str]:
    lines = [line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs)
    return {canonicalize_name(name): version for name, version in pairs}


def test_constraints_pin_every_dependency_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tested = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    for requirement in map(Requirement, tested):
        pinned = pins()[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pinned), f"{requirement}: constraints.txt has {pinned}"


def test_tested_versions_stand_in_the_constraints_file_alone() -> None:
    for name in ("pyproject.toml", "Makefile", ".ci/run", "setup.py"):
        assert not re.search(r"==\s*\d", (ROOT / name).read_text()), name


@pytest.mark.parametrize("tool", TOOLS)
def test_help_works_from_any_folder_without_loading_torch_or_megatron(tmp_path: Path, tool: str) -> None:
    command = [sys.executable, "-X", "importtime", str(ROOT / "tools" / tool), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:")
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert loaded & {"torch", "transformers", "matplotlib", "megatron.core", "megatron.training"} == set()
