"""A schedule by stages: what is computed, kept and moved in each (POET, ICML 2022, figure 2)."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from poetmodel.report.pictures import Cell, Grid, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from poetmodel.graph import Graph
    from poetmodel.schedule import Schedule


def stage_map(graph: Graph, schedule: Schedule) -> Grid:
    """Describe the map of a schedule: a row per stage, a column per node.

    Parameters
    ----------
    graph : Graph
        The graph that it was made for.
    schedule : Schedule
        The schedule.

    Returns
    -------
    Grid
        Each cell is computed, recomputed, paged in or kept, in this order where several apply to
        the tensors of one node; what is paged out bears a mark.
    """
    names = tuple(node.name for node in graph.nodes)
    cells = tuple(
        _cell(t, k, kinds, f"stage {t} ({names[t]}), {names[k]}")
        for (t, k), kinds in sorted(stage_actions(graph, schedule).items())
    )
    moved = (
        f"{sum(k < t for t, k in schedule.R)} recomputations, {len(schedule.M_out)} page-outs, "
        f"{len(schedule.M_in)} page-ins"
    )
    return Grid(
        title=f"{graph.name}: {moved}",
        row_name="stage, by the node it first computes",
        column_name="node",
        rows=names,
        columns=names,
        cells=cells,
    )


def stage_actions(
    graph: Graph, schedule: Schedule
) -> dict[tuple[int, int], dict[Kind, tuple[int, ...]]]:
    """Return what happens in each stage to the tensors of each node.

    Parameters
    ----------
    graph : Graph
        The graph that the schedule was made for.
    schedule : Schedule
        The schedule.

    Returns
    -------
    dict
        By stage and node: the tensors that are computed, recomputed, kept, paged in or paged out,
        ascending.
    """
    found: defaultdict[tuple[int, int], dict[Kind, tuple[int, ...]]] = defaultdict(dict)
    for t, k in schedule.R:
        found[t, k][Kind.RECOMPUTED if k < t else Kind.COMPUTED] = graph.outputs_of[k]
    for kind, pairs in (
        (Kind.KEPT, schedule.S_RAM),
        (Kind.PAGED_IN, schedule.M_in),
        (Kind.PAGED_OUT, schedule.M_out),
    ):
        for t, i in pairs:
            there = found[t, graph.node_of[i]]
            there[kind] = (*there.get(kind, ()), i)
    return dict(found)


def colour_of(kinds: Iterable[Kind]) -> Kind:
    """Return the kind that colours a cell of which several hold."""
    held = set(kinds)
    order = (Kind.COMPUTED, Kind.RECOMPUTED, Kind.PAGED_IN, Kind.KEPT)
    return next((kind for kind in order if kind in held), Kind.PAGED_OUT)


def _cell(row: int, column: int, kinds: Iterable[Kind], place: str) -> Cell:
    held = set(kinds)
    mark = Kind.PAGED_OUT if Kind.PAGED_OUT in held else None
    kind = colour_of(held)
    words = ", ".join(str(kind) for kind in Kind if kind in held)
    return Cell(row=row, column=column, kind=kind, mark=mark, details=f"{place}: {words}")
