"""Remove from a schedule what nothing needs: it only gets cheaper and smaller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from poetmodel.schedule import paged_at_once, rows_of_pairs
from poetmodel.time_limit import check_time_limit

if TYPE_CHECKING:
    from poetmodel.graph import Graph
    from poetmodel.schedule import Schedule

_NOTHING: Final[frozenset[int]] = frozenset()


def trim(graph: Graph, schedule: Schedule) -> Schedule:
    """Return the schedule without keeps, page-ins, page-outs and recomputations that serve nothing.

    Parameters
    ----------
    graph : Graph
        The training graph.
    schedule : Schedule
        A valid schedule.

    Returns
    -------
    Schedule
        Valid too, with no more energy, time, writes or RAM at any step.

    Notes
    -----
    Walks backwards from the last stage. A tensor is wanted before a step if a later step of the
    stage reads it, or if it is wanted when the next stage begins; whatever restorations no wanted
    tensor goes. A page-out that is needed moves to the first computation, where the tensor is in
    RAM whatever else is dropped.
    """
    n = len(graph.nodes)
    computed = rows_of_pairs(schedule.R, n)
    held = rows_of_pairs(schedule.S_RAM, n)
    paged = rows_of_pairs(schedule.M_in, n)
    wanted: set[int] = set()
    for t in range(n - 1, -1, -1):
        check_time_limit()
        busy = computed[t] != [t] or paged[t]
        there = {*held[t], *paged[t]} if busy else _NOTHING
        chosen, arriving = set(computed[t]), set(paged[t])
        computed[t], paged[t] = [], []
        for k in sorted({*chosen, *(graph.node_of[i] for i in arriving), t}, reverse=True):
            made = wanted.intersection(graph.outputs_of[k])
            if k in chosen and (k == t or not made <= there):
                computed[t].append(k)
                wanted.difference_update(graph.outputs_of[k])
                wanted.update(graph.inputs_of[k])
            for i in sorted(arriving & wanted & set(graph.outputs_of[k]), reverse=True):
                paged[t].append(i)
                wanted.remove(i)
        computed[t].reverse()
        paged[t].sort()
        if wanted != set(held[t]):
            held[t] = sorted(wanted)
    return paged_at_once(graph, R=computed, S_RAM=held, M_in=paged, identity=schedule.identity)
