"""A method of one's own: save what takes longest to compute, recompute the rest."""

from poetmodel import Problem, Schedule, simulate
from poetmodel.baselines import recompute_once
from poetmodel.errors import MethodNotApplicableError


def costliest(problem: Problem) -> Schedule:
    """Save as many of the tensors that take longest to compute as fit."""
    graph, time_s = problem.graph, problem.table.compute_time_s
    order = sorted(range(len(graph.tensors)), key=lambda i: -time_s[graph.node_of[i]])
    for n_saved in range(len(order), -1, -5):
        schedule = recompute_once(graph, order[:n_saved])
        if simulate(graph, None, schedule).peak_ram_bytes <= problem.usable_ram_bytes:
            return schedule
    raise MethodNotApplicableError("nothing that it saves fits")
