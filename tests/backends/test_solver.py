"""The common course of a solve, around a solver that says whatever a test wants it to."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from poetmodel.backends import BackendProgress, Limits, RawSolution, SolverStatus
from poetmodel.backends.solver import Solver
from poetmodel.backends.standard_form import MAXIMIZE, StandardForm
from poetmodel.errors import BackendError, BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from poetmodel.backends.call import SolverCall


class Puppet(Solver):
    """Returns the outcomes it was given, one per call."""

    name = "puppet"
    package = "math"
    remedy = "nothing"

    def __init__(
        self, *outcomes: RawSolution, during: Callable[[SolverCall], object] = bool
    ) -> None:
        self._outcomes = iter(outcomes)
        self._during = during

    def versions(self) -> dict[str, str]:
        """Return nothing."""
        return {}

    def run(self, call: SolverCall) -> RawSolution:
        """Do what the test wants and return the next outcome."""
        self._during(call)
        return next(self._outcomes)


def form(**changes: Any) -> StandardForm:
    """Return ``min x`` over whole numbers ``x >= 2``."""
    return StandardForm.from_arrays([[1.0]], [1.0], row_lower=2.0, integer=True, **changes)


def endless() -> StandardForm:
    """Return the same as a maximisation, which nothing bounds."""
    return form(sense=MAXIMIZE)


INFEASIBLE = RawSolution(status=SolverStatus.INFEASIBLE)
OPEN = RawSolution(status=SolverStatus.INFEASIBLE_OR_UNBOUNDED)


def test_ctrl_c_while_a_solver_is_loaded_is_no_missing_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is made with pybind11 says of it that its initialization failed."""
    text = "try:\n    raise KeyboardInterrupt\nexcept KeyboardInterrupt as error:\n"
    text += "    raise ImportError('initialization failed') from error\n"
    (tmp_path / "interrupted_solver.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(Puppet, "package", "interrupted_solver")
    with pytest.raises(KeyboardInterrupt):
        Puppet().module()
    monkeypatch.setattr(Puppet, "package", "no_such_solver")
    with pytest.raises(BackendUnavailableError):
        Puppet().module()


def test_bound_never_passes_the_objective() -> None:
    """A solver's bound that rounding put beyond its solution is cut back to it."""
    outcome = RawSolution(status=SolverStatus.OPTIMAL, x=np.array([2.0]), bound=2.0000001)
    assert Puppet(outcome).solve(form(), Limits()).bound == 2.0


def test_solution_is_rounded() -> None:
    """What comes back is whole, and its objective is computed from it."""
    outcome = RawSolution(status=SolverStatus.TIME_LIMIT, x=np.array([2.9999999]), bound=2.0)
    result = Puppet(outcome).solve(form(), Limits())
    assert (result.objective, result.bound) == (3.0, 2.0)
    assert result.x is not None
    assert result.x.tolist() == [3.0]


def test_solution_that_is_not_whole_is_an_error() -> None:
    """What is not whole is not a solution."""
    outcome = RawSolution(status=SolverStatus.OPTIMAL, x=np.array([2.5]), bound=2.0)
    with pytest.raises(BackendError, match="must be whole"):
        Puppet(outcome).solve(form(), Limits())


@pytest.mark.parametrize("status", [SolverStatus.FAILED, SolverStatus.OPTIMAL])
def test_no_result_is_an_error(status: SolverStatus) -> None:
    """A failure, or an optimum without values, is an error."""
    with pytest.raises(BackendError, match="without a result"):
        Puppet(RawSolution(status=status)).solve(form(), Limits())


def test_failure_after_a_stop_is_an_interruption() -> None:
    """A solver that fails because it was stopped was interrupted."""
    stop = threading.Event()
    puppet = Puppet(RawSolution(status=SolverStatus.FAILED), during=lambda _: stop.set())
    result = puppet.solve(form(), Limits(), stop=stop)
    assert result.status is SolverStatus.INTERRUPTED


def test_start_disproves_infeasibility() -> None:
    """A solver that calls a model infeasible which the start satisfies is asked again.

    Without presolve; where it says so again the start is what is known, and nothing is proved.
    """
    asked: list[bool] = []
    puppet = Puppet(INFEASIBLE, INFEASIBLE, during=lambda call: asked.append(call.limits.presolve))
    result = puppet.solve(form(), Limits(), start=np.array([2.0]))
    assert asked == [True, False]
    assert (result.status, result.objective) == (SolverStatus.OTHER_LIMIT, 2.0)
    assert (result.bound, result.infeasible, result.solved_again) == (None, False, True)


def test_start_within_tolerance_does_not() -> None:
    """A start that is off by the tolerance proves nothing against infeasibility."""
    model = StandardForm.from_arrays([[1.0]], [1.0], row_lower=2.0)
    start = np.array([2.0 - 1e-8])
    result = Puppet(INFEASIBLE).solve(model, Limits(), start=start)
    assert (result.infeasible, result.x, result.start_accepted) == (True, None, False)


def test_start_beats_a_worse_solution() -> None:
    """An accepted start is returned where the solver has nothing as good."""
    outcome = RawSolution(status=SolverStatus.TIME_LIMIT, x=np.array([9.0]), bound=2.0)
    result = Puppet(outcome).solve(form(), Limits(), start=np.array([3.0]))
    assert (result.objective, result.start_accepted) == (3.0, True)


def test_bounded_objective_settles_infeasible_or_unbounded() -> None:
    """Where bounds keep the objective finite, the open answer means infeasible."""
    assert Puppet(OPEN).solve(form(), Limits()).infeasible


@pytest.mark.parametrize(
    ("found", "status", "infeasible"),
    [
        (SolverStatus.OPTIMAL, SolverStatus.UNBOUNDED, False),
        (SolverStatus.INFEASIBLE, SolverStatus.INFEASIBLE, True),
        (SolverStatus.TIME_LIMIT, SolverStatus.TIME_LIMIT, False),
    ],
)
def test_any_solution_settles_infeasible_or_unbounded(
    found: SolverStatus, status: SolverStatus, *, infeasible: bool
) -> None:
    """Otherwise a solve for any solution tells which it is."""
    result = Puppet(OPEN, RawSolution(status=found)).solve(endless(), Limits())
    assert (result.status, result.infeasible) == (status, infeasible)
    assert (result.x, result.bound) == (None, None)


def test_infeasible_or_unbounded_when_stopped() -> None:
    """Told to stop meanwhile, the question stays open."""
    stop = threading.Event()
    puppet = Puppet(OPEN, during=lambda _: stop.set())
    result = puppet.solve(endless(), Limits(), stop=stop)
    assert result.status is SolverStatus.INTERRUPTED


def test_infeasible_or_unbounded_out_of_time() -> None:
    """Out of time, the question stays open."""
    result = Puppet(OPEN).solve(endless(), Limits(time_s=1e-9))
    assert result.status is SolverStatus.TIME_LIMIT


def test_infeasible_under_a_cutoff_is_a_cutoff() -> None:
    """Under a cutoff, no solution means none within it; the cutoff is then the bound."""
    result = Puppet(INFEASIBLE).solve(form(), Limits(objective_cutoff=1.5))
    assert (result.status, result.infeasible) == (SolverStatus.CUTOFF, False)
    assert (result.x, result.bound) == (None, 1.5)


def test_bound_never_passes_the_cutoff() -> None:
    """A bound that only the cutoff supports is cut back to it, whyever the solver stopped."""
    outcome = RawSolution(status=SolverStatus.TIME_LIMIT, x=np.array([9.0]), bound=8.0)
    assert Puppet(outcome).solve(form(), Limits(objective_cutoff=5.0)).bound == 5.0


def test_callback_error_comes_before_the_result() -> None:
    """What a callback raised is raised, whatever the solver made of it."""

    def fail(_: BackendProgress) -> bool:
        raise LookupError("no")

    puppet = Puppet(
        RawSolution(status=SolverStatus.FAILED),
        during=lambda w: w.solution(2.0, lambda: np.array([2.0])),
    )
    with pytest.raises(LookupError, match="no"):
        puppet.solve(form(), Limits(), on_progress=fail)
