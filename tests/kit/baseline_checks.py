"""What every method must keep: valid within its limits, or refused."""

from poetmodel.errors import MethodNotApplicableError
from poetmodel.schedule import simulate


def valid_or_refused(method, problem):
    """Run a method and assert that its schedule is valid, within RAM, and does what is allowed.

    None where the method refuses, which it must do with a reason.
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
