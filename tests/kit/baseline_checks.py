"""Check that every method must pass: a valid schedule within the limits, or a refusal."""

from poetmodel.errors import MethodNotApplicableError
from poetmodel.schedule import simulate


def check_method(method, problem):
    """Execute a method; return its schedule, or None if the method refuses the problem.

    Asserts that the schedule is valid, is within the usable RAM, and makes only allowed decisions,
    and that a refusal has a reason.
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
