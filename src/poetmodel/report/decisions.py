"""The decisions of a schedule as rows of a table."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from poetmodel.schedule.decisions import Choice, find_decisions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule

WORDS: Final = {
    **{choice: str(choice) for choice in Choice},
    Choice.BOTH: "recomputed and paged",
    Choice.UNUSED: "never read",
}


def decision_rows(problem: Problem, schedule: Schedule) -> Iterator[dict[str, Any]]:
    """Yield a row for each tensor, in the order of the graph.

    If a node has several tensors, the first one has the cost of recomputing the node, so that
    energies add up to the overhead (without idle power during overlapping transfers).
    """
    graph = problem.graph
    starts_in_ram = Counter(i for _, i in schedule.S_RAM)
    for decision in find_decisions(problem, schedule):
        i = decision.tensor
        k = graph.node_of[i]
        not_its_own = 0 if graph.outputs_of[k][0] == i else len(decision.recomputed)
        yield {
            "tensor": graph.tensors[i].name,
            "node": graph.nodes[k].name,
            "size_bytes": graph.tensor_bytes[i],
            "choice": WORDS[decision.choice],
            "first_stage": k,
            "last_stage": decision.in_ram[-1][1],
            "ram_stages": starts_in_ram[i],
            "recomputed": len(decision.recomputed),
            "paged_out": len(decision.paged_out),
            "paged_in": len(decision.paged_in),
            "energy_j": decision.energy_j - not_its_own * problem.energy.coefficients.compute[k],
            "time_s": decision.time_s - not_its_own * problem.table.compute_time_s[k],
        }
