"""Imports between layers and packages, light imports, and the map of the architecture."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kit.rotation import mark_seeds_except
from sample_functions import find_statements, parse_modules, substatements

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {
    *("pyomo", "highspy", "networkx", "pydantic", "torch", "matplotlib", "plotly"),
    *("dask", "distributed", "gurobipy", "pyscipopt", "scipy"),
}
"""Packages that only what needs them may load."""

VIOLATIONS = {
    "graph imports device": ("graph/forbidden.py", "import poetmodel.device"),
    "model imports the solver": ("model/forbidden.py", "from poetmodel.solver import solve"),
    "errors imports units": ("errors.py", "import poetmodel.units"),
    "simulator imports model": ("schedule/forbidden.py", "from poetmodel import model"),
    "simulator imports backends": ("schedule/forbidden.py", "import poetmodel.backends.registry"),
    "simulator of plans imports planner": ("plan/forbidden.py", "import poetmodel.planner"),
    "solver imports baselines": ("solver/forbidden.py", "import poetmodel.baselines"),
    "heuristics import solver": ("heuristics/forbidden.py", "import poetmodel.solver.request"),
    "report imports torch": ("report/forbidden.py", "import poetmodel.torch.compilation"),
    "capturing imports runtime": ("torch/capturing/forbidden.py", "import poetmodel.torch.runtime"),
    "planner imports backends": ("planner/forbidden.py", "import poetmodel.backends"),
    "tiles import the exporter": ("tiling/forbidden.py", "import poetmodel.export.flash"),
    "choosing imports the exporter": ("choosing/forbidden.py", "import poetmodel.export.folder"),
    "dynamo imports a baseline": ("torch/dynamo/forbidden.py", "import poetmodel.baselines.dtr"),
}


def lint_imports(source, cwd):
    """Check the contracts of pyproject.toml on the package below `source`."""
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(source)!r}); {program}",
        "--config",
        str(ROOT / "pyproject.toml"),
        "--no-cache",
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def test_contracts_are_kept(tmp_path):
    """No module imports a higher layer, nor the verifier the code that it verifies."""
    done = lint_imports(ROOT / "src", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "violation",
    mark_seeds_except(VIOLATIONS, {"graph imports device", "errors imports units"}),
)
def test_a_violation_breaks_the_contract(violation, tmp_path):
    """The contracts would notice: an import in the wrong direction fails the check."""
    package = tmp_path / "poetmodel"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "poetmodel", package, ignore=ignored)
    file, line = VIOLATIONS[violation]
    with (package / file).open("a", encoding="utf-8") as stream:
        stream.write(f"\n{line}\n")
    done = lint_imports(tmp_path, tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "BROKEN" in done.stdout


def loaded_by(statement):
    """Return the top-level packages that a fresh interpreter has loaded after a statement."""
    program = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COV")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import poetmodel",
        "import poetmodel.cli",
        "from poetmodel.graph.catalogue import load_model",
    ],
)
def test_import_is_light(statement):
    """Neither the package nor its command line loads solvers, modelling or graph libraries."""
    loaded = loaded_by(statement)
    assert "poetmodel" in loaded
    assert not loaded & HEAVY


# -- what lies inside a sub-package ----------------------------------------------------------------
TESTS = Path(__file__).resolve().parents[1]
ALSO = {
    "torch/": ("pytorch",),
    "torch/lowering": ("choosing", "export", "lowered", "tiling"),
    "torch/int8": ("export/test_kernels_q8_training.py",),
    "torch/step": ("export/test_kernels_updates.py",),
    "graph/zoo/state": ("cli/test_lists.py",),
    "solver/sensitivity/explanation": ("cli/test_solve.py",),
}
"""Who may import modules besides the tests that lie as they do: a folder or a file."""


def imported(text):
    """Return the dotted names of modules, or of their members, that a program imports."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def inner_module(name):
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


def faults(file, text):
    """Return the imports in a file, named from `TESTS`, of inner modules of other packages."""
    inner = {found for name in imported(text) if (found := inner_module(name)) is not None}
    return sorted(
        path
        for path in inner
        if not file.startswith(("kit/", "/".join(path.split("/")[:2]) + "/"))
        and not any(path.startswith(begin) and file.startswith(may) for begin, may in ALSO.items())
    )


@pytest.mark.slow
def test_what_lies_inside_a_sub_package_is_imported_by_its_tests_and_the_kit():
    """A module such as ``solver/lazy/session`` may be renamed with one folder of tests.

    A listed exception that no longer imports such a module is an error.
    """
    files = {path.relative_to(TESTS).as_posix(): path for path in TESTS.rglob("*.py")}
    assert len(files) > 100
    wrong = {name: faults(name, path.read_text(encoding="utf-8")) for name, path in files.items()}
    assert not {name: paths for name, paths in wrong.items() if paths}
    for begin, places in ALSO.items():
        for may in places:
            path = TESTS / may
            files = path.glob("*.py") if path.is_dir() else [path]
            names = {name for file in files for name in imported(file.read_text(encoding="utf-8"))}
            assert any((inner_module(name) or "").startswith(begin) for name in names), (begin, may)


@pytest.mark.parametrize(
    ("file", "text", "wrong"),
    [
        ("solver/test_state.py", "from poetmodel.solver.lazy import prove", []),
        ("solver/lazy/test_solve.py", "from poetmodel.solver.lazy.session import Session", []),
        ("kit/relaxation.py", "import poetmodel.solver.lazy.session", []),
        ("export/test_a.py", "from poetmodel.torch.lowering.step import lower", []),
        ("solver/test_a.py", "import poetmodel.solver.lazy.session", ["solver/lazy/session"]),
        ("model/test_a.py", "from poetmodel.solver.lazy import session", ["solver/lazy/session"]),
        ("cli/test_a.py", "def f():\n from poetmodel.graph.zoo.state import STATES",
         ["graph/zoo/state"]),
    ],
)  # fmt: skip
def test_an_import_from_elsewhere_is_noticed(file, text, wrong):
    """Whichever way a program words it; a package itself is everybody's."""
    assert faults(file, text) == wrong


# -- one meaning of a text -------------------------------------------------------------------------
def trees():
    """Return the parsed modules of the package, by path below it."""
    package = ROOT / "src" / "poetmodel"
    return {
        path.relative_to(package): tree
        for path, _, tree in parse_modules()
        if path.is_relative_to(package)
    }


def sizes_parsed(tree):
    """Return the fields of budgets and tiles whose sizes a program parses by itself."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    fields = {
        argument.value.value
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "parse_size"
        for argument in call.keywords
        if argument.arg == "field" and isinstance(argument.value, ast.Constant)
    }
    return fields & {"ram", "tile"}


def test_one_module_says_what_budgets_and_tiles_mean():
    """Only `poetmodel.budgets` interprets budgets and sizes of tiles."""
    parsing = [
        path.relative_to(ROOT).as_posix()
        for path, text, tree in parse_modules()
        if "parse_size" in text and sizes_parsed(tree)
    ]
    assert parsing == ["src/poetmodel/budgets.py"]
    assert sizes_parsed(ast.parse('parse_size(given, field="ram", base_bytes=8)')) == {"ram"}


# -- circles ---------------------------------------------------------------------------------------


def imports_in(tree, *, types):
    """Yield the imports of a module and of its functions; for types alone too with `types`."""
    for node in substatements(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        else:
            yield from imports_in(node, types=types)


def circles(imports):
    """Return the largest sets of modules in which each one reaches all others, sorted."""

    def reach(name):
        found, pending = set(), [name]
        while pending:
            pending += (new := imports[pending.pop()] - found)
            found |= new
        return found

    reached = {name: reach(name) for name in imports}
    mutual = {
        name: {other for other in reached[name] if name in reached[other]} for name in imports
    }
    return {tuple(sorted(group)) for group in mutual.values() if len(group) > 1}


@pytest.mark.parametrize("types", [False, True])
def test_no_modules_import_each_other(types):
    """Also not in functions: a part can be read, and reused, with the modules below it."""
    modules = {}
    for path, tree in trees().items():
        parts = ("poetmodel", *path.with_suffix("").parts)
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = tree
    imports = {}
    for name, tree in modules.items():
        pairs = set(imports_in(tree, types=types))
        named = {f"{module}.{part}" if f"{module}.{part}" in modules else module
                 for module, part in pairs}  # fmt: skip
        imports[name.removeprefix("poetmodel.")] = {
            found.removeprefix("poetmodel.") for found in named & set(modules) - {name}
        }
    assert len(imports) > 300
    assert circles(imports) == set()


def test_a_circle_is_noticed():
    """Of two modules or more, however many import one of them; a chain is none."""
    chain = {"a": {"b"}, "b": {"c"}, "c": set(), "d": {"a"}}
    assert circles(chain) == set()
    assert circles(chain | {"c": {"a"}}) == {("a", "b", "c")}


# -- the map of the architecture -------------------------------------------------------------------
def test_every_place_on_the_map_exists():
    """Each file and folder of the map exists.

    If the page has ``file: name``, the file defines that class, function or constant.
    """
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    part = page.split("## Where to change what")[1].split("## Recipes")[0]
    rows = [line for line in part.splitlines() if line.startswith("| ")]
    places = [place for row in rows[1:] for place in re.findall(r"`([^` ]*[/.][^` ]*)`", row)]
    assert len(places) > 40
    lost = [
        place
        for place in places
        if not any(any(base.glob(place)) for base in (ROOT / "src" / "poetmodel", ROOT))
    ]
    assert not lost
    names = re.findall(r"([\w/]+\.py): (\w+(?:\.\w+)*)", page)
    assert len(names) > 20
    for file, name in names:
        bases = (ROOT / "src" / "poetmodel" / file, ROOT / file)
        source = next(path for path in bases if path.is_file()).read_text(encoding="utf-8")
        for part in name.split("."):
            defined = rf"^ *(class|def) {part}\b|^{part}\b.*="
            assert re.search(defined, source, re.MULTILINE), f"{file}: {name}"


def test_each_python_of_the_classifiers_is_tested():
    """The oldest one by every part of tox, and a part of its own for each newer one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    prefix = "Programming Language :: Python :: 3."
    named = [c.removeprefix(prefix) for c in project["classifiers"] if c.startswith(prefix)]
    assert project["requires-python"] == f">=3.{named[0]}"
    parts = f"[testenv:nightly-py3{{{','.join(named[1:])}}}]"
    assert parts in (ROOT / "tox.ini").read_text(encoding="utf-8")


def test_the_oldest_pytorch_that_is_promised_is_tested():
    """And the newest on the index: a part of tox names no release for it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (needed,) = project["optional-dependencies"]["torch"]
    parts = (ROOT / "tox.ini").read_text(encoding="utf-8")
    assert f"oldest: {needed.replace('>=', '==')}.0\n    newest: torch\n" in parts


def test_no_class_name_is_given_twice():
    """The name of a class identifies it."""
    files = {}
    for path, tree in trees().items():
        for node in find_statements(tree):
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(path.name)
    assert len(files) > 300
    assert {name: paths for name, paths in files.items() if len(paths) > 1} == {}
