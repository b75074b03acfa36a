"""A new back end is one class: registered, it is known everywhere and passes the suite."""

import inspect
import json
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
from poetmodel.errors import BackendError, InputError
from poetmodel.sweeps import grid

ROOT = Path(__file__).parents[2]
LINES = 60


@pytest.fixture
def milp(monkeypatch):
    """Register the back end over ``scipy.optimize.milp`` for one test."""
    monkeypatch.setattr(registry, "_registered_solvers", {})
    return register(Milp)


@pytest.mark.slow
def test_the_suite_runs_on_a_registered_back_end():
    """A registered back end has all declared capabilities; tests of the rest are skipped."""
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
    """The error for an unknown name lists the valid ones."""
    with pytest.raises(InputError, match=f"expected one of highs, scip, gurobi, {milp.name}"):
        backend("abacus")
    said = invoke("solve", "mlp", "--device", "mkr1000", "--backend", "abacus", status=2).err
    assert "gurobi, milp, or FILE.py:CLASS" in said


@pytest.mark.parametrize("name", ["", "highs"])
def test_a_declaration_is_checked(name):
    """A declaration with an unknown capability or a used name is refused by name."""
    declared = {"name": name, "display_name": "X", "package": "x", "remedy": "pip install x"}
    declared |= {"run": None, "versions": None}
    with pytest.raises(InputError, match="declares no name" if not name else "'highs'"):
        register(type("X", (Solver,), declared))
    assert backend_names() == ("highs", "scip", "gurobi")


# -- a class in a file -----------------------------------------------------------------------------
FILE = Path(inspect.getfile(Milp))
SOLVE = ("solve", "mlp", "--device", "mkr1000", "--ram", "80%", "--backend")
WRONG = """
from poetmodel.backends.solver import Solver

class Half(Solver):
    name = display_name = package = remedy = "json"

class Raises(Half):
    def versions(self): return {}
    def run(self, call):
        print("no result of the command")
        raise ValueError("no luck")

class Returns(Raises):
    def run(self, call): return 3

def function(): ...
"""


def test_commands_take_a_class_of_a_file(tmp_path):
    """The file of the schedule names it, and is verified; nothing is registered."""
    out, name = tmp_path / "mlp.json", f"{FILE}:Milp"
    found = invoke(*SOLVE, name, "--out", out, "--json", status=0).json
    assert (found["status"], found["problem"]["backend"]) == ("optimal", name)
    assert invoke("verify", out, "--graph", "mlp", "--device", "mkr1000", status=0)
    assert invoke("report", out, "--out", tmp_path / "report.html", "--json", status=0)
    assert backend_names() == ("highs", "scip", "gurobi")


def test_sweeps_run_again_where_a_file_changed(tmp_path):
    """The file is part of a run's key; a class of this process alone is refused."""
    file, out = tmp_path / "own.py", tmp_path / "sweep"
    command = ("sweep", "mlp", "--devices", "mkr1000", "--ram", "80%", "--out", out, "--quiet")
    for text, count in ((FILE.read_text(), 1), (FILE.read_text() + "\n", 2)):
        file.write_text(text)
        invoke(*command, "--backends", f"{file}:Milp", status=0)
        records = (out / "cells.jsonl").read_text().splitlines()
        assert len(records) == count
        assert json.loads(records[-1])["status"] == "optimal"


def test_sweeps_refuse_what_other_processes_do_not_know(milp):
    """And names that nothing has."""
    for name, said in ((milp.name, "in this process only"), ("abacus", "expected one of highs")):
        with pytest.raises(InputError, match=said):
            grid(["mlp"], ["mkr1000"], ram=["80%"], backends=[name])


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("", 2, "own.py': name a class of the file: "),
        (":Absent", 2, "has no class 'Absent' (it has Half, Raises, Returns)"),
        (":function", 2, "has no class 'function'"),
        (":Half", 2, "back end Half: declares no run, versions"),
        (":Raises", 1, "run raised ValueError: no luck (own.py, line 11)"),
        (":Returns", 1, "run returned 3, not a RawSolution"),
    ],
)
def test_wrong_classes_are_one_sentence(tmp_path, name, status, said):
    """With the line where there is one; standard output has results alone."""
    (tmp_path / "own.py").write_text(WRONG)
    found = invoke(*SOLVE, f"{tmp_path / 'own.py'}{name}", "--json", status=status)
    assert said in found.err
    assert found.out == ""


def test_a_file_that_cannot_be_imported_is_said(tmp_path):
    """With its line."""
    (tmp_path / "own.py").write_text("1 / 0\n")
    for name, said in (("own.py:X", "ZeroDivisionError: .*line 1"), ("no.py:X", "No such file")):
        with pytest.raises((InputError, BackendError), match=said):
            backend(f"{tmp_path / name}")
