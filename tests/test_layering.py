"""A module imports only from what stands before it on the way through."""

import ast
from pathlib import Path

import pytest

import autop_ac

PACKAGE = Path(autop_ac.__file__).parent
# graph before sharding, whose costs come from graph/cost.py and graph/devices.py
ORDER = ("capture", "graph", "sharding", "recompute", "lowering", "runtime", "report")
# these import from no stage, and every stage may import from them
COMMON = (
    "config",
    "documented",
    "errors",
    "folding",
    "near",
    "selectors",
    "policies",
    "annotate",
    "placements",
)
# what ties all stages together
TOP = (
    "__init__",
    "__main__",
    "agree",
    "api",
    "backend",
    "build",
    "cli",
    "constrain",
    "progress",
    "target",
)
FILES = sorted(PACKAGE.rglob("*.py"))


def imported(path, package=PACKAGE):
    """Modules of the package that a file imports, as ``(line, ("graph", "facts"))``."""
    here = path.relative_to(package).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first, *rest = alias.name.split(".")
                if first == "autop_ac":
                    yield node.lineno, tuple(rest)
        elif isinstance(node, ast.ImportFrom):
            parts = tuple((node.module or "").split(".")) if node.module else ()
            if node.level:
                base = here[: len(here) - node.level + 1]
            elif parts and parts[0] == "autop_ac":
                base, parts = (), parts[1:]
            else:
                continue
            if parts:
                yield node.lineno, (*base, *parts)
            else:  # `from . import x`: x may be a module or a name
                for alias in node.names:
                    yield node.lineno, (*base, alias.name)


def layer(parts):
    """Where a module stands: its stage's number, -1 for what is common, None for the top."""
    name = parts[0] if parts else "__init__"
    if name in ORDER:
        return ORDER.index(name)
    if name in COMMON or name.startswith("_torch"):
        return -1
    return None


def violations(path, package=PACKAGE):
    parts = path.relative_to(package).with_suffix("").parts
    own = layer(parts)
    if own is None:
        return [] if parts[0] in TOP else [f"{path.name} stands nowhere on the way through"]
    found = []
    for line, target in imported(path, package):
        other = layer(target)
        if other is None or other > own:
            found.append(f"{'/'.join(parts)}.py:{line} imports {'.'.join(target) or 'autop_ac'}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_back_along_the_way_and_never_ahead(path):
    assert violations(path) == []


def test_every_stage_is_there_and_none_is_missing_from_the_order():
    folders = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
    assert folders == set(ORDER)


@pytest.mark.parametrize(
    ("line", "allowed"),
    [
        ("from ..graph.facts import Facts", True),
        ("from ..errors import ConfigError", True),
        ("from .. import _torch_sharding as private", True),
        ("from .plan import ShardingPlan", True),
        ("import torch", True),
        ("from ..recompute.plan import Wish", False),
        ("from .. import api", False),
        ("from ..api import AutoParallel", False),
        ("import autop_ac.lowering.compile", False),
        ("from autop_ac import launch", False),
        ("from autop_ac.report import build", False),
        ("def late():\n    from ..runtime.launch import launch", False),
    ],
)
def test_the_check_sees_what_is_wrong(tmp_path, line, allowed):
    folder = tmp_path / "sharding"
    folder.mkdir()
    path = folder / "new.py"
    path.write_text(line)
    assert (violations(path, tmp_path) == []) == allowed


def test_private_parts_of_torch_stay_in_their_modules():
    allowed = ("torch.utils._pytree",)  # torch offers it under no other name
    for path in FILES:
        if path.name.startswith("_torch"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                private = name.startswith("torch.") and "._" in name
                assert not private or name.startswith(allowed), f"{path}: {name}"
