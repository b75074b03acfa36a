"""Remove from a schedule what nothing needs: it only gets cheaper and smaller."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from poetmodel.schedule import Schedule, storage_entries

if TYPE_CHECKING:
    from poetmodel.graph import Graph


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
    stage reads it, or if it is wanted when the next stage begins; whatever supplies no wanted
    tensor goes. A page-out that is needed moves to the first computation, where the tensor is in
    RAM whatever else is dropped.
    """
    stages = _by_stage(schedule)
    n = len(graph.nodes)
    keep: dict[str, list[tuple[int, int]]] = {"R": [], "S_RAM": [], "M_in": []}
    wanted: set[int] = set()
    for t in range(n - 1, -1, -1):
        held, paged = stages["S_RAM"][t], stages["M_in"][t]
        steps = {*stages["R"][t], *(graph.node_of[i] for i in paged), t}
        for k in sorted(steps, reverse=True):
            made = wanted.intersection(graph.outputs_of[k])
            computed = k == t or (k in stages["R"][t] and not made <= held | paged)
            if k in stages["R"][t] and computed:
                keep["R"].append((t, k))
                wanted.difference_update(graph.outputs_of[k])
                wanted.update(graph.inputs_of[k])
            for i in paged & wanted & set(graph.outputs_of[k]):
                keep["M_in"].append((t, i))
                wanted.remove(i)
        keep["S_RAM"].extend((t, i) for i in wanted)
    on_aux = {i for i, k in enumerate(graph.node_of) if graph.nodes[k].on_aux}
    out = {i for _, i in keep["M_in"]} - on_aux
    return Schedule(
        R=tuple(keep["R"]),
        S_RAM=tuple(keep["S_RAM"]),
        S_AUX=storage_entries(graph, keep["M_in"]),
        M_in=tuple(keep["M_in"]),
        M_out=tuple((graph.node_of[i], i) for i in out),
        identity=schedule.identity,
    )


def _by_stage(schedule: Schedule) -> dict[str, dict[int, set[int]]]:
    stages: dict[str, dict[int, set[int]]] = {}
    for name in ("R", "S_RAM", "M_in"):
        stages[name] = defaultdict(set)
        for t, k in getattr(schedule, name):
            stages[name][t].add(k)
    return stages
