"""Imports point down, the verifier stands alone, and importing the package is light."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = (
    "pyomo",
    "highspy",
    "networkx",
    "pydantic",
    "torch",
    "matplotlib",
    "plotly",
    "distributed",
    "gurobipy",
    "pyscipopt",
    "scipy",
)
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
}


def lint_imports(source: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
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


def test_contracts_are_kept(tmp_path: Path) -> None:
    """No module imports from above its layer, nor the verifier from what it verifies."""
    done = lint_imports(ROOT / "src", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("violation", VIOLATIONS)
def test_a_violation_breaks_the_contract(violation: str, tmp_path: Path) -> None:
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


def loaded_by(statement: str) -> set[str]:
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
def test_import_is_light(statement: str) -> None:
    """Neither the package nor its command line loads solvers, modelling or graph libraries."""
    loaded = loaded_by(statement)
    assert "poetmodel" in loaded
    assert loaded.isdisjoint(HEAVY), sorted(loaded.intersection(HEAVY))
