"""Gurobi alone: its statuses and its licence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from poetmodel.backends import Limits, SolverStatus
from poetmodel.backends.gurobi import STATUS, Gurobi, _failure, _model
from poetmodel.backends.standard_form import StandardForm
from poetmodel.errors import BackendError, BackendUnavailableError

pytestmark = pytest.mark.gurobi
gurobipy = pytest.importorskip("gurobipy")

MODEL = SimpleNamespace(NumVars=2345, NumConstrs=20001)


def error(name: str) -> Any:
    """Return Gurobi's own error of that name."""
    return gurobipy.GurobiError(getattr(gurobipy.GRB.Error, name), "as Gurobi says")


def test_every_status_has_a_meaning() -> None:
    """A new release cannot add a status unseen."""
    assert set(STATUS) == {name for name in dir(gurobipy.GRB.Status) if name.isupper()}
    assert STATUS["OPTIMAL"] is SolverStatus.OPTIMAL


def test_too_large_for_the_licence() -> None:
    """The refusal names the limits, the model's sizes, and the way to another back end."""
    ours = _failure(gurobipy, error("SIZE_LIMIT_EXCEEDED"), MODEL)
    assert isinstance(ours, BackendUnavailableError)
    assert "2,000 variables and 2,000 constraints" in str(ours)
    assert "this model has 2,345 and 20,001" in str(ours)
    assert "--backend highs" in str(ours)


@pytest.mark.parametrize("name", ["NO_LICENSE", "NETWORK", "JOB_REJECTED"])
def test_licence_errors(name: str) -> None:
    """Other licence troubles leave the back end unavailable, too."""
    ours = _failure(gurobipy, error(name), MODEL)
    assert isinstance(ours, BackendUnavailableError)
    assert "--backend highs" in str(ours)


def test_other_errors_are_failures() -> None:
    """What is not the licence's fault is not blamed on it."""
    ours = _failure(gurobipy, error("OUT_OF_MEMORY"), MODEL)
    assert type(ours) is BackendError
    assert "as Gurobi says" in str(ours)


def test_no_licence_at_the_start() -> None:
    """Without any licence the environment does not start, which is said so."""

    def refuse(**_: object) -> None:
        raise error("NO_LICENSE")

    fake = SimpleNamespace(Env=refuse, GurobiError=gurobipy.GurobiError)
    with (
        pytest.raises(BackendUnavailableError, match=r"cannot start .* --backend highs"),
        _model(fake, quiet=True),
    ):
        pass


def test_size_limit_for_real() -> None:
    """A model one variable above the free licence is refused, and nothing else is tried."""
    if not _is_limited():
        pytest.skip("the licence at hand has no size limit")
    form = StandardForm.from_arrays(np.ones((1, 2001)), np.ones(2001), row_lower=1.0)
    with pytest.raises(BackendUnavailableError, match="2,001 and 1"):
        Gurobi().solve(form, Limits())


def _is_limited() -> bool:
    with _model(gurobipy, quiet=True) as probe:
        probe.addMVar(2001)
        try:
            probe.optimize()
        except gurobipy.GurobiError as refusal:
            return bool(refusal.errno == gurobipy.GRB.Error.SIZE_LIMIT_EXCEEDED)
    return False
