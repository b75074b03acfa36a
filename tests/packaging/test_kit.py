"""Who may import what lies inside a sub-package: its own tests, and the kit for all others."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ALSO = {
    "torch/": ("pytorch",),
    "torch/lowering": ("export",),
    "torch/step": ("export/test_kernels_updates.py",),
    "graph/zoo/state": ("cli/test_inspect.py",),
    "solver/sensitivity/alternatives": ("cli/test_explain.py",),
    "solver/sensitivity/explanation": ("cli/test_solve.py",),
}
"""Who may import modules besides the tests that lie as they do: a folder or a file."""


def imported(text: str) -> set[str]:
    """Return the dotted names of modules, or of what is in them, that a program imports."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def inner_module(name: str) -> str | None:
    """Return the path, without its ending, of the module inside a sub-package that is imported."""
    first, *parts = name.split(".")
    source = TESTS.parent / "src" / first
    for depth in range(len(parts), 2, -1):
        path = Path(*parts[:depth])
        if (source / path).with_suffix(".py").is_file() or (
            source / path / "__init__.py"
        ).is_file():
            return path.as_posix()
    return None


def faults(file: str, text: str) -> list[str]:
    """Return the imports in a file, named from `TESTS`, of what lies inside others' packages."""
    inner = {found for name in imported(text) if (found := inner_module(name)) is not None}
    return sorted(
        path
        for path in inner
        if not file.startswith(("kit/", "/".join(path.split("/")[:2]) + "/"))
        and not any(path.startswith(begin) and file.startswith(may) for begin, may in ALSO.items())
    )


def test_what_lies_inside_a_sub_package_is_imported_by_its_tests_and_the_kit() -> None:
    """A module such as ``solver/lazy/session`` may be split or renamed with one folder of tests."""
    files = {path.relative_to(TESTS).as_posix(): path for path in TESTS.rglob("*.py")}
    assert len(files) > 100
    wrong = {name: faults(name, path.read_text(encoding="utf-8")) for name, path in files.items()}
    assert not {name: paths for name, paths in wrong.items() if paths}


def test_each_exception_is_needed() -> None:
    """A file that no longer imports what it alone may is not listed."""
    for begin, places in ALSO.items():
        for may in places:
            path = TESTS / may
            files = path.glob("*.py") if path.is_dir() else [path]
            names = {name for file in files for name in imported(file.read_text(encoding="utf-8"))}
            assert any((inner_module(name) or "").startswith(begin) for name in names), (begin, may)


@pytest.mark.parametrize(
    ("file", "text", "wrong"),
    [
        ("solver/test_state.py", "from poetmodel.solver.lazy import LazyParams", []),
        ("solver/lazy/test_solve.py", "from poetmodel.solver.lazy.session import Session", []),
        ("kit/relaxation.py", "import poetmodel.solver.lazy.session", []),
        ("export/test_a.py", "from poetmodel.torch.lowering.step import lower", []),
        ("solver/test_a.py", "import poetmodel.solver.lazy.session", ["solver/lazy/session"]),
        ("model/test_a.py", "from poetmodel.solver.lazy import session", ["solver/lazy/session"]),
        ("cli/test_a.py", "def f():\n from poetmodel.graph.zoo.state import STATES",
         ["graph/zoo/state"]),
    ],
)  # fmt: skip
def test_an_import_from_elsewhere_is_noticed(file: str, text: str, wrong: list[str]) -> None:
    """Whichever way a program words it; a package itself is everybody's."""
    assert faults(file, text) == wrong
