"""Graphs of a line, and what every method must keep: valid within its limits, or refused."""

from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import Graph, operation
from poetmodel.schedule import simulate


def graph_of(name, nodes):
    """Make a graph of nodes with one output each, as in ``"a 4; b! 2+6 a @backward"``.

    `b` has 2 bytes and a workspace of 6, reads `a`, is a backward node, and is never recomputed.
    """
    made = []
    for node in nodes.split("; "):
        label, sizes, *words = node.split()
        size, _, workspace = sizes.partition("+")
        phases = [word[1:] for word in words if word[0] == "@"]
        made.append(
            operation(
                label.rstrip("!"),
                output_bytes=int(size),
                workspace_bytes=int(workspace or 0),
                phase=phases[0] if phases else "forward",
                inputs=[word for word in words if word[0] != "@"],
                recomputable=not label.endswith("!"),
            )
        )
    return Graph(name=name, nodes=tuple(made))


def valid_or_refused(method, problem):
    """Run a method and assert that its schedule is valid, within RAM, and does what is allowed.

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


def _judged(problem, schedule):
    simulation = simulate(problem.graph, problem.costs, schedule)
    assert simulation.violations == ()
    assert simulation.peak_ram_bytes <= problem.usable_ram_bytes
    if not problem.recompute:
        assert all(t == k for t, k in schedule.R)
    if not problem.can_page:
        assert schedule.M_in == schedule.M_out == ()
    return schedule
