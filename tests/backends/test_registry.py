"""The list of back ends: which there are, whether they solve, and what their licences refuse."""

from __future__ import annotations

import subprocess
import sys

import pytest

from poetmodel.backends import backend, backend_names, registry
from poetmodel.errors import (
    BackendError,
    BackendUnavailableError,
    InputError,
    LicenceError,
)


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


@pytest.mark.parametrize("name", backend_names())
def test_installed_back_ends_pass(name: str) -> None:
    """Each solver that is here solves the small model, and has nothing against its size."""
    try:
        registry.try_out(name)
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    assert registry.refusal(name, columns=2, rows=1) is None


@pytest.mark.parametrize("size", [{"columns": 2001, "rows": 1}, {"columns": 1, "rows": 2001}])
@pytest.mark.gurobi
def test_limited_licence_refuses_columns_and_rows(size: dict[str, int]) -> None:
    """The licence that comes with Gurobi takes 2,000 of each; HiGHS has none to refuse with."""
    pytest.importorskip("gurobipy")
    assert registry.refusal("highs", **size) is None
    refused = registry.refusal("gurobi", **size)
    if refused is None:
        pytest.skip("the licence at hand has no size limit")
    assert "size-limited licence" in str(refused)


def test_wrong_value_and_other_failures_are_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value other than the known one is an error; only the licence's no is a refusal."""
    monkeypatch.setattr(registry, "_least", lambda *_: 2.0)
    with pytest.raises(BackendError, match="it says 2"):
        registry.try_out("highs")

    def no(*_: object) -> float:
        raise LicenceError("too large")

    monkeypatch.setattr(registry, "_least", no)
    assert str(registry.refusal("highs", columns=1, rows=1)) == "too large"
