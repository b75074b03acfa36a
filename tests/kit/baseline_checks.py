"""What every method must keep, whatever it is: valid and within the limits it knows, or refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from poetmodel.errors import MethodNotApplicableError
from poetmodel.schedule import simulate

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule


def valid_or_refused(method: Callable[[Problem], Schedule], problem: Problem) -> Schedule | None:
    """Run a method and assert that its schedule is valid, within RAM, and does what is allowed.

    Returns
    -------
    Schedule or None
        None where the method refuses, which it must do with a reason.
    """
    try:
        schedule = method(problem)
    except MethodNotApplicableError as error:
        reason = str(error)
    else:
        return _judged(problem, schedule)
    assert len(reason) > 20
    return None


def _judged(problem: Problem, schedule: Schedule) -> Schedule:
    simulation = simulate(problem.graph, problem.costs, schedule)
    assert simulation.violations == ()
    assert simulation.peak_ram_bytes <= problem.usable_ram_bytes
    if not problem.recompute:
        assert all(t == k for t, k in schedule.R)
    if not problem.can_page:
        assert schedule.M_in == schedule.M_out == ()
    return schedule
