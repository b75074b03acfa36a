"""Trying a back end out: does it solve, and does its licence take a model of this size."""

from __future__ import annotations

import pytest

from poetmodel.backends import trial
from poetmodel.backends.registry import backend_names
from poetmodel.errors import BackendError, BackendUnavailableError, LicenceError


@pytest.mark.parametrize("name", backend_names())
def test_installed_back_ends_pass(name: str) -> None:
    """Each solver that is here solves the small model, and has nothing against its size."""
    try:
        trial.try_out(name)
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    assert trial.refusal(name, columns=2, rows=1) is None


@pytest.mark.parametrize("size", [{"columns": 2001, "rows": 1}, {"columns": 1, "rows": 2001}])
@pytest.mark.gurobi
def test_limited_licence_refuses_columns_and_rows(size: dict[str, int]) -> None:
    """The licence that comes with Gurobi takes 2,000 of each; HiGHS has none to refuse with."""
    pytest.importorskip("gurobipy")
    assert trial.refusal("highs", **size) is None
    refused = trial.refusal("gurobi", **size)
    if refused is None:
        pytest.skip("the licence at hand has no size limit")
    assert "size-limited licence" in str(refused)


def test_wrong_value_and_other_failures_are_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value other than the known one is an error; only the licence's no is a refusal."""
    monkeypatch.setattr(trial, "_least", lambda *_: 2.0)
    with pytest.raises(BackendError, match="it says 2"):
        trial.try_out("highs")

    def no(*_: object) -> float:
        msg = "too large"
        raise LicenceError(msg)

    monkeypatch.setattr(trial, "_least", no)
    assert str(trial.refusal("highs", columns=1, rows=1)) == "too large"
