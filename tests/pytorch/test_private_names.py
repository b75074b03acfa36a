"""Private names of PyTorch stand in one module of captures; what a release moved is named."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

import poetmodel

CAPTURING = Path(poetmodel.__file__).parent / "torch" / "capturing"
PRIVATE = CAPTURING / "front_private.py"


def is_private(name):
    """Return whether a dotted name of PyTorch has a private part.

    `torch.utils` has public trees and dispatch modes in modules with such names; the names of
    operators are those of graphs.
    """
    parts = [*name.split("."), ""]
    hidden = any(part.startswith("_") and not part.startswith("__") for part in parts)
    return parts[0] == "torch" and parts[1] not in ("ops", "utils") and hidden


def private_names(text, outer=None):
    """Return the private names of PyTorch that a module imports or looks up, also by an alias.

    What it looks up only where ``hasattr`` finds it does not count. `outer` has the dotted names
    behind what the module imports from the module of private names.
    """
    tree, found, optional, dotted = ast.parse(text), set(), set(), {}
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                found |= {alias.name for alias in node.names}
                dotted |= {alias.asname: alias.name for alias in node.names if alias.asname}
            case ast.ImportFrom(module=str(module)):
                names = {alias.asname or alias.name: alias.name for alias in node.names}
                if outer is not None and module.endswith(f".{PRIVATE.stem}"):
                    dotted |= {name: outer[name] for name in names if name in outer}
                else:
                    dotted |= {name: f"{module}.{inner}" for name, inner in names.items()}
                    found |= {f"{module}.{inner}" for inner in names.values()}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute() if re.fullmatch(r"[\w.]+", ast.unparse(node)):
                root, _, rest = ast.unparse(node).partition(".")
                found.add(f"{dotted.get(root, root)}.{rest}")
            case ast.Call(func=ast.Name("hasattr"), args=[ast.Name(root), ast.Constant(rest)]):
                optional.add(f"{dotted.get(root, root)}.{rest}")
    return {name for name in found - optional if is_private(name)}


def imported_names(text):
    """Return the dotted name behind each name that a module imports from PyTorch."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch")
        for alias in node.names
    }


def all_private_names():
    """Return the private names that the captures use through their one module."""
    outer = imported_names(PRIVATE.read_text(encoding="utf-8"))
    texts = (path.read_text(encoding="utf-8") for path in CAPTURING.glob("*.py"))
    return sorted({name for text in texts for name in private_names(text, outer)})


def exists(name):
    """Return whether this release of PyTorch has a dotted name: modules, then attributes."""
    modules = name.split(".")
    attributes = []
    while True:
        try:
            found = import_module(".".join(modules))
            break
        except ModuleNotFoundError:
            attributes.insert(0, modules.pop())
    for attribute in attributes:
        if not hasattr(found, attribute):
            return False
        found = getattr(found, attribute)
    return True


@pytest.mark.parametrize("name", all_private_names())
def test_private_names_are_where_they_were(name):
    """Each name that the front takes from PyTorch's inside exists in this release."""
    assert exists(name)


@pytest.mark.parametrize(
    "path", sorted({*CAPTURING.glob("*.py")} - {PRIVATE}), ids=lambda path: path.stem
)
def test_only_one_module_has_private_names(path):
    """What else a capture needs of PyTorch is public."""
    assert private_names(path.read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("from torch._guards import tracing", {"torch._guards.tracing"}),
        ("import torch._dynamo as d; d.config", {"torch._dynamo", "torch._dynamo.config"}),
        ("from torch import fx; fx._hidden.name", {"torch.fx._hidden", "torch.fx._hidden.name"}),
        ("torch._C._set_grad_enabled(True)", {"torch._C._set_grad_enabled", "torch._C"}),
        ("from torch.utils import _pytree; torch.ops.aten; model._modules", set()),
        ("torch.Tensor.__add__", set()),
        ("hasattr(torch, '_new') and torch._new", set()),
    ],
)
def test_private_names_are_found(text, names):
    """Imports and attributes count; trees of `torch.utils`, operators and methods do not."""
    assert private_names(text) == names


def test_names_that_a_release_moved_do_not_exist():
    """Neither a module nor an attribute of one is taken for another."""
    assert not exists("torch._dynamo.moved")
    assert not exists("torch._moved.name")
    assert not exists("torch._C._moved")
