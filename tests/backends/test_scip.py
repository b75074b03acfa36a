"""SCIP alone: its statuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from poetmodel.backends import SolverStatus
from poetmodel.backends.scip import STATUS, _optimize
from poetmodel.errors import BackendError

pytestmark = pytest.mark.scip
pyscipopt = pytest.importorskip("pyscipopt")


def test_every_status_has_a_meaning() -> None:
    """A new release cannot add a status unseen."""
    names = {name.lower() for name in dir(pyscipopt.SCIP_STATUS) if name.isupper()}
    assert set(STATUS) == names
    assert STATUS["gaplimit"] is SolverStatus.OPTIMAL


def test_failure_is_ours() -> None:
    """PySCIPOpt's nameless exceptions come out as errors of the back end."""

    def fail() -> None:
        msg = "SCIP: error in LP solver!"
        raise Exception(msg)  # noqa: TRY002 - what PySCIPOpt does

    with pytest.raises(BackendError, match=r"'scip': failed .SCIP: error in LP solver!"):
        _optimize(SimpleNamespace(optimizeNogil=fail))
