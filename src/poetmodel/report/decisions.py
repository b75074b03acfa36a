"""The decision of a schedule for each tensor, and its cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule


class Choice(StrEnum):
    """What happens to a tensor between its first computation and its last use."""

    KEPT = "kept"
    """Computed once, in RAM from then to its last use."""
    RECOMPUTED = "recomputed"
    """Dropped and recomputed."""
    PAGED = "paged"
    """Paged in or out."""
    BOTH = "recomputed and paged"
    """Both of these."""
    UNREAD = "never read"
    """No node reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One tensor: the decision, how long it is in RAM, and the cost."""

    tensor: str
    """Its name."""
    node: str
    """The node that computes it."""
    size_bytes: int
    """Its size [B]."""
    choice: Choice
    """What happens to it."""
    first_stage: int
    """The stage of its first computation."""
    last_stage: int
    """The last stage that computes, reads, keeps or pages it."""
    ram_stages: int
    """Number of stages at whose start it is in RAM."""
    recomputed: int
    """Number of recomputations of its node."""
    paged_out: int
    """Transfers to storage."""
    paged_in: int
    """Transfers from storage."""
    energy_j: float
    """Energy to recompute and page it [J]."""
    time_s: float
    """Compute and transfer time of these [s]."""


def decisions(problem: Problem, schedule: Schedule) -> tuple[Decision, ...]:
    """Return what a schedule decides for each tensor of its graph, in the graph's order.

    Parameters
    ----------
    problem : Problem
        Graph and costs.
    schedule : Schedule
        A valid schedule of that graph.

    Returns
    -------
    tuple of Decision
        If a node has several tensors, the first one has the cost of recomputing the node, so that
        energies add up to the overhead (without idle power during overlapping transfers).
    """
    graph, table, energy = problem.graph, problem.table, problem.energy.coefficients
    again = Counter(k for t, k in schedule.R if k < t)
    outs, ins = (Counter(i for _, i in moved) for moved in (schedule.M_out, schedule.M_in))
    held = Counter(i for _, i in schedule.S_RAM)
    last = _last_stages(problem, schedule)
    found = []
    for i, k in enumerate(graph.node_of):
        energy_j = time_s = 0.0
        if again[k] and graph.outputs_of[k][0] == i:
            energy_j += again[k] * energy.compute[k]
            time_s += again[k] * table.compute_time_s[k]
        if outs[i]:
            energy_j += outs[i] * energy.page_out[i]
            time_s += outs[i] * table.page_out_time_s[i]
        if ins[i]:
            energy_j += ins[i] * energy.page_in[i]
            time_s += ins[i] * table.page_in_time_s[i]
        found.append(
            Decision(
                tensor=graph.tensors[i].name,
                node=graph.nodes[k].name,
                size_bytes=graph.tensor_bytes[i],
                choice=_choice(
                    read=bool(graph.users_of[i]), again=bool(again[k]), moved=bool(outs[i] + ins[i])
                ),
                first_stage=k,
                last_stage=last[i],
                ram_stages=held[i],
                recomputed=again[k],
                paged_out=outs[i],
                paged_in=ins[i],
                energy_j=energy_j,
                time_s=time_s,
            )
        )
    return tuple(found)


def _choice(*, read: bool, again: bool, moved: bool) -> Choice:
    if again and moved:
        return Choice.BOTH
    if again or moved:
        return Choice.RECOMPUTED if again else Choice.PAGED
    return Choice.KEPT if read else Choice.UNREAD


def _last_stages(problem: Problem, schedule: Schedule) -> list[int]:
    """Return the last stage that computes, reads, keeps or pages each tensor."""
    graph = problem.graph
    last = list(graph.node_of)
    for t, k in schedule.R:
        for i in (*graph.inputs_of[k], *graph.outputs_of[k]):
            last[i] = max(last[i], t)
    for pairs in (schedule.S_RAM, schedule.M_in, schedule.M_out):
        for t, i in pairs:
            last[i] = max(last[i], t)
    return last
