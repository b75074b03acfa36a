"""The common course of a solve, around a solver that says whatever a test wants it to."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from poetmodel.backends import Limits, Progress, Termination
from poetmodel.backends.solver import Outcome, Solver, Status
from poetmodel.backends.standard_form import MAXIMIZE, StandardForm
from poetmodel.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.backends.watch import Watch


class Puppet(Solver):
    """Returns the outcomes it was given, one per call."""

    name = "puppet"
    features = frozenset()
    package = "math"
    remedy = "nothing"

    def __init__(self, *outcomes: Outcome, during: Callable[[Watch], object] = bool) -> None:
        self._outcomes = iter(outcomes)
        self._during = during

    def versions(self) -> dict[str, str]:
        """Return nothing."""
        return {}

    def run(self, form: Any, limits: Any, watch: Watch, start: Any) -> Outcome:
        """Do what the test wants and return the next outcome."""
        del form, limits, start
        self._during(watch)
        return next(self._outcomes)


def form(**changes: Any) -> StandardForm:
    """Return ``min x`` over whole numbers ``x >= 2``."""
    return StandardForm.from_arrays([[1.0]], [1.0], row_lower=2.0, integer=True, **changes)


def endless() -> StandardForm:
    """Return the same as a maximisation, which nothing bounds."""
    return form(sense=MAXIMIZE)


OPEN = Outcome(status=Status.INFEASIBLE_OR_UNBOUNDED)


def test_bound_never_passes_the_objective() -> None:
    """A solver's bound that rounding put beyond its solution is cut back to it."""
    outcome = Outcome(status=Status.OPTIMAL, x=np.array([2.0]), bound=2.0000001)
    assert Puppet(outcome).solve(form(), Limits()).bound == 2.0


def test_solution_is_rounded() -> None:
    """What comes back is whole, and its objective is computed from it."""
    outcome = Outcome(status=Status.TIME_LIMIT, x=np.array([2.9999999]), bound=2.0)
    result = Puppet(outcome).solve(form(), Limits())
    assert (result.objective, result.bound) == (3.0, 2.0)
    assert result.x is not None
    assert result.x.tolist() == [3.0]


def test_solution_that_is_not_whole_is_an_error() -> None:
    """What is not whole is not a solution."""
    outcome = Outcome(status=Status.OPTIMAL, x=np.array([2.5]), bound=2.0)
    with pytest.raises(BackendError, match="must be whole"):
        Puppet(outcome).solve(form(), Limits())


def test_violation_is_reported() -> None:
    """A solution that breaks a row comes with the measure of it."""
    outcome = Outcome(status=Status.OPTIMAL, x=np.array([1.0]), bound=1.0)
    assert Puppet(outcome).solve(form(), Limits()).violation == 1.0


@pytest.mark.parametrize("status", [Status.FAILED, Status.OPTIMAL])
def test_no_result_is_an_error(status: Status) -> None:
    """A failure, or an optimum without values, is an error."""
    with pytest.raises(BackendError, match="without a result"):
        Puppet(Outcome(status=status)).solve(form(), Limits())


def test_failure_after_a_stop_is_an_interruption() -> None:
    """A solver that fails because it was stopped was interrupted."""
    stop = threading.Event()
    puppet = Puppet(Outcome(status=Status.FAILED), during=lambda _: stop.set())
    result = puppet.solve(form(), Limits(), stop=stop)
    assert result.termination is Termination.INTERRUPTED


def test_start_disproves_infeasibility() -> None:
    """A solver that calls a model infeasible which the start satisfies is not believed."""
    with pytest.raises(BackendError, match=r"the start .* satisfies it"):
        Puppet(Outcome(status=Status.INFEASIBLE)).solve(form(), Limits(), start=np.array([2.0]))


def test_start_within_tolerance_does_not() -> None:
    """A start that is off by the tolerance proves nothing against infeasibility."""
    model = StandardForm.from_arrays([[1.0]], [1.0], row_lower=2.0)
    start = np.array([2.0 - 1e-8])
    result = Puppet(Outcome(status=Status.INFEASIBLE)).solve(model, Limits(), start=start)
    assert (result.infeasible, result.x, result.start_accepted) == (True, None, False)


def test_start_beats_a_worse_solution() -> None:
    """An accepted start is returned where the solver has nothing as good."""
    outcome = Outcome(status=Status.TIME_LIMIT, x=np.array([9.0]), bound=2.0)
    result = Puppet(outcome).solve(form(), Limits(), start=np.array([3.0]))
    assert (result.objective, result.start_accepted) == (3.0, True)


def test_bounded_objective_settles_infeasible_or_unbounded() -> None:
    """Where bounds keep the objective finite, the open answer means infeasible."""
    assert Puppet(OPEN).solve(form(), Limits()).infeasible


@pytest.mark.parametrize(
    ("found", "termination", "infeasible"),
    [
        (Status.OPTIMAL, Termination.UNBOUNDED, False),
        (Status.INFEASIBLE, Termination.PROVED, True),
        (Status.TIME_LIMIT, Termination.TIME_LIMIT, False),
    ],
)
def test_any_solution_settles_infeasible_or_unbounded(
    found: Status, termination: Termination, *, infeasible: bool
) -> None:
    """Otherwise a solve for any solution tells which it is."""
    result = Puppet(OPEN, Outcome(status=found)).solve(endless(), Limits())
    assert (result.termination, result.infeasible) == (termination, infeasible)
    assert (result.x, result.bound) == (None, None)


def test_infeasible_or_unbounded_when_stopped() -> None:
    """Told to stop meanwhile, the question stays open."""
    stop = threading.Event()
    puppet = Puppet(OPEN, during=lambda _: stop.set())
    result = puppet.solve(endless(), Limits(), stop=stop)
    assert result.termination is Termination.INTERRUPTED


def test_infeasible_or_unbounded_out_of_time() -> None:
    """Out of time, the question stays open."""
    result = Puppet(OPEN).solve(endless(), Limits(time_s=1e-9))
    assert result.termination is Termination.TIME_LIMIT


def test_infeasible_under_a_cutoff_is_a_cutoff() -> None:
    """Under a cutoff, no solution means none within it; the cutoff is then the bound."""
    result = Puppet(Outcome(status=Status.INFEASIBLE)).solve(form(), Limits(objective_cutoff=1.5))
    assert (result.termination, result.infeasible) == (Termination.CUTOFF, False)
    assert (result.x, result.bound) == (None, 1.5)


def test_bound_never_passes_the_cutoff() -> None:
    """A bound that only the cutoff supports is cut back to it, whyever the solver stopped."""
    outcome = Outcome(status=Status.TIME_LIMIT, x=np.array([9.0]), bound=8.0)
    assert Puppet(outcome).solve(form(), Limits(objective_cutoff=5.0)).bound == 5.0


def test_callback_error_comes_before_the_result() -> None:
    """What a callback raised is raised, whatever the solver made of it."""

    def fail(_: Progress) -> bool:
        msg = "no"
        raise LookupError(msg)

    puppet = Puppet(
        Outcome(status=Status.FAILED), during=lambda w: w.solution(2.0, lambda: np.array([2.0]))
    )
    with pytest.raises(LookupError, match="no"):
        puppet.solve(form(), Limits(), on_progress=fail)
