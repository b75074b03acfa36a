"""Check that every method must pass: a valid schedule within the limits, or a refusal."""

from poetmodel.errors import MethodNotApplicableError
from poetmodel.schedule import simulate


def valid_or_refused(method, problem):
    """Execute a method; assert that its schedule is valid, within RAM, and makes allowed decisions.

    Returns None if the method refuses, which needs a reason.
    """
    try:
        schedule = method(problem)
    except MethodNotApplicableError as error:
        assert len(str(error)) > 20  # noqa: PT017 - either outcome is fine
        return None
    simulation = simulate(problem.graph, problem.costs, schedule)
    assert simulation.violations == ()
    assert simulation.peak_ram_bytes <= problem.usable_ram_bytes
    if not problem.recompute:
        assert all(t == k for t, k in schedule.R)
    if not problem.can_page:
        assert schedule.M_in == schedule.M_out == ()
    return schedule
