"""Gurobi alone: its options, its statuses and its licence."""

from types import SimpleNamespace

import numpy as np
import pytest

from poetmodel.backends import Limits, SolverStatus, backend
from poetmodel.backends.gurobi import _open_model, _translate_error
from poetmodel.backends.standard_form import MAXIMIZE, StandardForm
from poetmodel.errors import BackendError, BackendUnavailableError, LicenceError

pytestmark = pytest.mark.gurobi
gurobipy = pytest.importorskip("gurobipy")

MODEL = SimpleNamespace(NumVars=2345, NumConstrs=20001)


def error(name):
    """Return Gurobi's own error of that name."""
    return gurobipy.GurobiError(getattr(gurobipy.GRB.Error, name), "as Gurobi says")


def test_too_large_for_the_licence():
    """The refusal names the limits, the model's sizes, and the way to another back end."""
    ours = _translate_error(gurobipy, error("SIZE_LIMIT_EXCEEDED"), MODEL)
    assert isinstance(ours, BackendUnavailableError)
    assert "2,000 variables and 2,000 constraints" in str(ours)
    assert "this model has 2,345 and 20,001" in str(ours)
    assert "--backend highs" in str(ours)


@pytest.mark.parametrize(
    ("name", "error_class", "words"),
    [
        ("NO_LICENSE", LicenceError, "--backend highs"),
        ("NETWORK", LicenceError, "--backend highs"),
        ("JOB_REJECTED", LicenceError, "--backend highs"),
        ("OUT_OF_MEMORY", BackendError, "as Gurobi says"),
    ],
)
def test_other_errors(name, error_class, words):
    """Licence errors make the back end unavailable; other errors are failures of the solve."""
    ours = _translate_error(gurobipy, error(name), MODEL)
    assert type(ours) is error_class
    assert words in str(ours)


@pytest.mark.parametrize("name", ["TimeLimit", "timelimit", "TIMELIMIT"])
def test_option_overrides_the_time_limit(name):
    """Gurobi's names ignore case; in any case, an option overrides `Limits.time_s`."""
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 100, (5, 40))
    form = StandardForm.from_arrays(
        weights,
        rng.integers(1, 100, 40),
        upper=1.0,
        row_upper=weights.sum(1) // 2,
        integer=True,
        sense=MAXIMIZE,
    )
    result = backend("gurobi").solve(form, Limits(time_s=20.0, options={name: 0.0}))
    assert result.status is SolverStatus.TIME_LIMIT


def test_no_licence_at_the_start():
    """Without any licence, the environment does not start, and the error states this."""

    def refuse(**_):
        raise error("NO_LICENSE")

    fake = SimpleNamespace(Env=refuse, GurobiError=gurobipy.GurobiError)
    with (
        pytest.raises(BackendUnavailableError, match=r"cannot start .* --backend highs"),
        _open_model(fake, is_quiet=True),
    ):
        pass
