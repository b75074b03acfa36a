"""A new back end is one class: registered, it is known everywhere and passes the suite."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit.commands import invoke
from kit.milp import Milp
from poetmodel.backends import registry
from poetmodel.backends.registry import backend, backend_names, register, solver_packages
from poetmodel.backends.solver import Solver
from poetmodel.errors import InputError

ROOT = Path(__file__).parents[2]
LINES = 60


@pytest.fixture
def milp(monkeypatch):
    """Register the back end over ``scipy.optimize.milp`` for one test."""
    monkeypatch.setattr(registry, "_registered_solvers", {})
    return register(Milp)


@pytest.mark.slow
def test_the_suite_runs_on_a_registered_back_end():
    """All that it declares it keeps; what it declares not to do is skipped, and said."""
    path = os.pathsep.join((str(ROOT / "tests"), str(ROOT / "src")))
    suite = str(ROOT / "tests" / "backends" / "test_conformance.py")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "kit.milp",
            "-q",
            "-k",
            "milp",
            "--no-header",
            suite,
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stdout
    passed = int(done.stdout.rpartition(" passed")[0].rpartition("\n")[2].split()[-1])
    assert passed >= 40, done.stdout
    assert "declares no callbacks" in done.stdout
    assert len(inspect.getsource(Milp).splitlines()) < LINES


def test_commands_know_it(milp, tmp_path):
    """It solves from the command line, with options of its own; its package has a version."""
    assert backend_names()[-1] == "milp"
    assert isinstance(backend("milp"), milp)
    assert solver_packages()[-1] == "scipy"
    assert "scipy" in invoke("--version", status=0).out
    out = tmp_path / "mlp.schedule.json"
    how = ("--device", "mkr1000", "--ram", "80%", "--backend", "milp")
    found = invoke(
        "solve", "mlp", *how, "--solver-option", "node_limit=5000", "--out", out, "--json", status=0
    ).json
    assert (found["status"], found["problem"]["backend"]) == ("optimal", "milp")
    assert found["problem"]["solver_options"] == {"node_limit": 5000}
    assert invoke("verify", out, "--graph", "mlp", "--device", "mkr1000", status=0)


def test_errors_name_it(milp):
    """Where another name is given, what it may be."""
    with pytest.raises(InputError, match=f"expected one of highs, scip, gurobi, {milp.name}"):
        backend("abacus")
    said = invoke("solve", "mlp", "--device", "mkr1000", "--backend", "abacus", status=2).err
    assert "'gurobi', 'milp'" in said


@pytest.mark.parametrize("name", ["", "highs"])
def test_a_declaration_is_checked(name):
    """What is not declared is named, and so is a name that is taken."""
    declared = {"name": name, "display_name": "X", "package": "x", "remedy": "pip install x"}
    with pytest.raises(InputError, match="declares no name" if not name else "'highs'"):
        register(type("X", (Solver,), declared))
    assert backend_names() == ("highs", "scip", "gurobi")
