"""How large a model will be, before it is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from poetmodel.model.events import find_events, recomputable_nodes

if TYPE_CHECKING:
    from poetmodel.problem import Problem

TERM_S: Final = 5e-6
"""Time to build and compile one term of a row, measured on one 2 GHz core with Pyomo 6.10 [s]."""


def estimated_terms(problem: Problem, formulation: str) -> int:
    """Return about how many terms the rows of a model have."""
    graph = problem.graph
    n = len(graph.nodes)
    if formulation == "paper":
        edges = sum(len(inputs) for inputs in graph.inputs_of)
        return n * n * 6 + edges * n * 6
    events = find_events(problem, range(n), recomputable=recomputable_nodes(problem))
    alive = [0] * (n + 1)
    for i, k in enumerate(graph.node_of):
        if graph.tensor_bytes[i] and events.events[i]:
            alive[k + 1] += 1
            alive[events.events[i][-1]] -= 1
    steps = [1] * n
    for k in range(n):
        pages = (events.page_in[i] for i in graph.outputs_of[k])
        for t in {*events.recompute[k], *(t for stages in pages for t in stages)}:
            steps[t] += 1
    total = crossing = 0
    for t in range(n):
        crossing += alive[t]
        total += crossing * steps[t]
    return total


def estimated_build_s(problem: Problem, formulation: str) -> float:
    """Return about how long building and compiling a model takes [s]."""
    return estimated_terms(problem, formulation) * TERM_S
