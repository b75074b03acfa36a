"""The list of back ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

from poetmodel.backends import backend, backend_names
from poetmodel.errors import InputError


def test_names_begin_with_the_default() -> None:
    """The three back ends are known, whether installed or not."""
    assert backend_names() == ("highs", "scip", "gurobi")


@pytest.mark.parametrize("name", backend_names())
def test_backend_has_its_name(name: str) -> None:
    """A back end is found under the name it bears."""
    assert backend(name).name == name


@pytest.mark.parametrize("name", ["", "HiGHS", "cplex"])
def test_unknown_name_is_refused(name: str) -> None:
    """An unknown name is an input error that lists the known ones."""
    with pytest.raises(InputError, match=f"backend '{name}': expected one of highs, scip, gurobi"):
        backend(name)


def test_no_solver_is_loaded_before_it_is_used() -> None:
    """Looking a back end up, or asking whether it is there, imports no solver."""
    code = (
        "import sys\n"
        "from poetmodel.backends import backend, backend_names\n"
        "[backend(name).available() for name in backend_names()]\n"
        "print([m for m in ('highspy', 'pyscipopt', 'gurobipy', 'pyomo') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
