"""Where a linear relaxation's answer, spread over stages, asks for more RAM than there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from poetmodel.solver.lazy.relaxation import Relaxation


def stage_loads(relaxation: Relaxation, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return about the bytes of every stage row for a fractional point, shape (stages,).

    What a group brings back is taken to be there from the first computation that reads it to the
    last one in the group, what it keeps on from there.
    """
    graph, grouping, events = relaxation.problem.graph, relaxation.grouping, relaxation.events
    sizes, group_of = graph.tensor_bytes, grouping.group_of
    n = len(graph.nodes)
    change = np.zeros(n + 1)
    own = np.zeros(n)
    for t, node in enumerate(graph.nodes):
        own[t] = node.output_bytes + node.workspace_bytes
        own[t] += sum(sizes[i] for i in graph.inputs_of[t])
    sure = relaxation.model.group_events.kept
    for i, k in enumerate(graph.node_of):
        if not sizes[i] or not graph.users_of[i]:
            continue
        begin = group_of[k]
        keeps = []
        for a in range(len(events.events[i])):
            column = relaxation.kept.get((i, a))
            keeps.append(float((i, a) in sure) if column is None else float(x[column]))
        readers: dict[int, list[int]] = {}
        for j in graph.users_of[i]:
            readers.setdefault(group_of[j], []).append(j)
        held = _Span(change, sizes[i])
        last = max(readers.get(begin, [k]))
        held.add(k, last, 1.0)
        after = last
        level = keeps[0] if keeps else 0.0
        for a, event in enumerate(events.events[i]):
            held.add(after, grouping.last_stage[event - 1], level)
            entry = level
            brought = _brought(relaxation, x, event, i, k)
            leave = keeps[a + 1] if a + 1 < len(keeps) else 0.0
            first_stage, last_stage = grouping.first_stage[event], grouping.last_stage[event]
            here = readers.get(event)
            if here:
                held.add(first_stage - 1, here[0], entry)
                held.add(here[0], here[-1], min(1.0, entry + brought))
                after = here[-1]
            else:
                held.add(first_stage - 1, last_stage, entry)
                after = last_stage
            level = leave
        for q in graph.users_of[i]:
            # A tensor that the stage reads counts among its own, not among those that cross it.
            change[q] -= held.at(q)
            change[q + 1] += held.at(q)
        change[k] -= held.at(k)
        change[k + 1] += held.at(k)
    return own + np.cumsum(change)[:n]


class _Span:
    """What one tensor adds across the ends of stages."""

    def __init__(self, change: NDArray[np.float64], size: int) -> None:
        self.change = change
        self.size = size
        self.parts: list[tuple[int, int, float]] = []

    def add(self, begin: int, end: int, level: float) -> None:
        """Hold `level` of the tensor across the ends of stages begin..end-1."""
        if end > begin and level > 0:
            self.change[begin] += level * self.size
            self.change[end] -= level * self.size
            self.parts.append((begin, end, level))

    def at(self, stage: int) -> float:
        """Return what is held across the end of a stage [B]."""
        return self.size * sum(level for begin, end, level in self.parts if begin <= stage < end)


def _brought(relaxation: Relaxation, x: NDArray[np.float64], group: int, i: int, k: int) -> float:
    total = 0.0
    for columns, index in ((relaxation.paged_in, i), (relaxation.recomputed, k)):
        column = columns.get((group, index))
        if column is not None:
            total += float(x[column])
    return total
