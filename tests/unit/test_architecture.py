"""Imports point downwards only: the layers of the code, read from the sources with `ast`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Layer and height, the most specific prefix decides. Two layers of one height know nothing of each other.
LAYERS = {
    "megatron.shampoo.config": ("config", 0),
    "megatron.shampoo.methods": ("config", 0),
    "megatron.shampoo.plan": ("plan", 1),
    "megatron.shampoo.linalg": ("linalg", 1),
    "megatron.shampoo.collective": ("collective", 2),
    "megatron.shampoo.preconditioner": ("preconditioner", 2),
    "megatron.shampoo": ("optimizer", 3),
    # What a seam is, and the one that is not of Shampoo: the benchmark may know them, and nothing else of mcore.
    "megatron.shampoo.mcore.seams.registry": ("seams", 4),
    "megatron.shampoo.mcore.seams.training_step": ("seams", 4),
    "megatron.shampoo.mcore": ("mcore", 5),
    "megatron.experiments": ("experiments", 5),
    "tools": ("tools", 6),
    "pretrain_gpt": ("pretrain_gpt", 6),
}
MAY_IMPORT_MEGATRON = ("megatron.shampoo.mcore", "megatron.gpt", "megatron.cpu", "megatron.data_tools", "pretrain_gpt")
KNOWS_NOTHING_OF_SHAMPOO = ("megatron.cpu", "megatron.data_tools", "megatron.demo", "megatron.gpt")
PURE = tuple(f"megatron.shampoo.{name}" for name in ("config", "methods", "plan", "linalg", "preconditioner"))


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def is_within_any(module: str, packages: tuple[str, ...]) -> bool:
    return any(is_within(module, package) for package in packages)


def layer_of(module: str) -> tuple[str, int] | None:
    prefixes = [prefix for prefix in LAYERS if is_within(module, prefix)]
    return LAYERS[max(prefixes, key=len)] if prefixes else None


def modules(root: Path) -> dict[str, Path]:
    """All modules of the product by dotted name."""
    paths = [*(root / "megatron").rglob("*.py"), *(root / "tools").rglob("*.py"), root / "pretrain_gpt.py"]
    names = {path: ".".join(path.relative_to(root).with_suffix("").parts) for path in paths if path.exists()}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """What a module imports, wherever in the module it does so; `from a import b` is `a.b` if that is a module."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                # Of Megatron's own modules only the top is judged, so their files need not be looked up.
                yield full if full in known or base == "megatron" else base


def violations(root: Path) -> list[str]:
    """Every import that breaks a rule, as `module imports target: rule`."""
    known = modules(root)
    return [
        f"{module} imports {target}: {rule}"
        for module, path in sorted(known.items())
        for target in imports(module, path, known)
        for rule in broken_rules(module, target)
    ]


def broken_rules(module: str, target: str) -> Iterator[str]:
    own, other = layer_of(module), layer_of(target)
    if own and other and own[0] != other[0] and own[1] <= other[1]:
        yield f"{own[0]} must not know {other[0]}"
    if is_within(module, "megatron") and is_within_any(target, ("tools", "pretrain_gpt")):
        yield "the library must not know its commands"
    if is_within(target, "tests"):
        yield "the product must not know its tests"
    if is_within_any(module, KNOWS_NOTHING_OF_SHAMPOO) and is_within(target, "megatron.shampoo"):
        yield "works without Shampoo"
    if is_within_any(target, ("megatron.core", "megatron.training")) and not is_within_any(module, MAY_IMPORT_MEGATRON):
        yield "Megatron stays behind the glue"
    if is_within(module, "megatron.shampoo.plan") and is_within(target, "torch"):
        yield "plans are integers"
    if layer_of(module) == ("config", 0) and is_within(target, "torch"):
        yield "settings are words and numbers"
    if is_within_any(module, PURE) and is_within(target, "torch.distributed"):
        yield "maths and plans need no process group"


def test_imports_point_downwards_only() -> None:
    assert violations(ROOT) == []


def test_every_layer_exists() -> None:
    names = modules(ROOT)
    layers = {layer[0] for layer in map(layer_of, names) if layer}
    assert layers == {name for name, _ in LAYERS.values()}
    assert len(names) > 40


def test_megatron_is_a_namespace_package() -> None:
    assert not (ROOT / "megatron" / "__init__.py").exists()


@pytest.mark.parametrize(
    ("module", "source", "rule"),
    [
        ("megatron/shampoo/plan/grid.py", "from megatron.shampoo.optimizer import S", "plan must not know optimizer"),
        ("megatron/shampoo/plan/grid.py", "import torch", "plans are integers"),
        ("megatron/shampoo/plan/grid.py", "from megatron.shampoo import linalg", "plan must not know linalg"),
        ("megatron/shampoo/plan/grid.py", "from ..linalg import roots", "plan must not know linalg"),
        ("megatron/shampoo/linalg/roots.py", "from ..collective.a import b", "linalg must not know collective"),
        ("megatron/shampoo/linalg/roots.py", "def f():\n    import torch.distributed", "need no process group"),
        ("megatron/shampoo/collective/a.py", "import megatron.shampoo.preconditioner", "collective must not know"),
        ("megatron/shampoo/config.py", "from megatron.shampoo.plan import grid", "config must not know plan"),
        ("megatron/shampoo/methods.py", "from megatron.shampoo import plan", "config must not know plan"),
        ("megatron/shampoo/methods.py", "from megatron.shampoo import optimizer", "config must not know optimizer"),
        ("megatron/shampoo/methods.py", "import torch", "settings are words and numbers"),
        ("megatron/shampoo/optimizer.py", "from megatron.shampoo.mcore import x", "optimizer must not know mcore"),
        ("megatron/shampoo/optimizer.py", "from megatron.experiments import x", "optimizer must not know experiments"),
        ("megatron/experiments/a.py", "from megatron.core import parallel_state", "stays behind the glue"),
        ("megatron/experiments/a.py", "def f():\n    import megatron.training", "stays behind the glue"),
        ("megatron/experiments/a.py", "from megatron.shampoo.mcore import build", "experiments must not know mcore"),
        ("megatron/experiments/a.py", "from megatron.shampoo.mcore.seams.optimizer import a", "must not know mcore"),
        ("megatron/shampoo/mcore/a.py", "from megatron.experiments import machine", "mcore must not know experiments"),
        ("megatron/shampoo/optimizer.py", "from megatron.core import parallel_state", "stays behind the glue"),
        ("megatron/shampoo/optimizer.py", "from megatron import training", "stays behind the glue"),
        ("megatron/shampoo/mcore/a.py", "import tools.demo", "the library must not know its commands"),
        ("megatron/cpu/a.py", "from megatron.shampoo import Shampoo", "works without Shampoo"),
        ("megatron/demo/a.py", "from megatron.training import get_args", "stays behind the glue"),
        ("tools/a.py", "from tests.tiny import tiny_gpt", "the product must not know its tests"),
    ],
)
def test_a_planted_upward_import_is_found(tmp_path: Path, module: str, source: str, rule: str) -> None:
    for name in ("shampoo/linalg/__init__", "shampoo/preconditioner/__init__", "shampoo/plan/__init__"):
        (tmp_path / f"megatron/{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"megatron/{name}.py").touch()
    assert violations(tmp_path) == []
    (tmp_path / module).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / module).write_text(source)
    assert any(rule in found for found in violations(tmp_path)), violations(tmp_path)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("megatron/shampoo/optimizer.py", "from megatron.shampoo.plan import plan\nfrom .config import ShampooConfig"),
        ("megatron/shampoo/mcore/a.py", "import megatron.core\nfrom megatron.shampoo import optimizer"),
        ("megatron/shampoo/plan/owners.py", "from megatron.shampoo.methods import recipe_of"),
        ("megatron/experiments/a.py", "from megatron.shampoo import Shampoo\nfrom megatron.demo import session"),
        ("megatron/shampoo/linalg/a.py", "import torch\nfrom .b import c"),
        ("megatron/gpt/a.py", "from megatron.training import get_args"),
        ("pretrain_gpt.py", "from megatron.shampoo import mcore"),
    ],
)
def test_a_downward_import_is_allowed(tmp_path: Path, module: str, source: str) -> None:
    (tmp_path / module).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / module).write_text(source)
    assert violations(tmp_path) == []
