"""The map of a schedule: stage by node."""

from __future__ import annotations

from poetmodel.report import Kind, stage_map
from poetmodel.schedule import Schedule
from worked import skip_graph


def test_cells_tell_what_happens() -> None:
    """Computed, recomputed, paged in, kept; page-outs are marked; several tensors share a cell."""
    graph = skip_graph(mask=True)  # tensors 2 and 3 are both of node c
    schedule = Schedule(
        R=((0, 0), (1, 1), (2, 2), (2, 1), (3, 3)),
        S_RAM=((1, 0), (2, 0), (3, 2), (3, 3)),
        S_AUX=((1, 0), (2, 0), (3, 0)),
        M_in=((3, 0),),
        M_out=((0, 0), (2, 3)),
    )
    grid = stage_map(graph, schedule)
    assert grid.rows == grid.columns == ("a", "b", "c", "d")
    cells = {(cell.row, cell.column): (cell.kind, cell.mark) for cell in grid.cells}
    assert cells == {
        (0, 0): (Kind.COMPUTED, Kind.PAGED_OUT),
        (1, 0): (Kind.KEPT, None),
        (1, 1): (Kind.COMPUTED, None),
        (2, 0): (Kind.KEPT, None),
        (2, 1): (Kind.RECOMPUTED, None),
        (2, 2): (Kind.COMPUTED, Kind.PAGED_OUT),
        (3, 0): (Kind.PAGED_IN, None),
        (3, 2): (Kind.KEPT, None),
        (3, 3): (Kind.COMPUTED, None),
    }
    assert grid.kinds == (Kind.COMPUTED, Kind.RECOMPUTED, Kind.KEPT, Kind.PAGED_IN)
    assert grid.marks == (Kind.PAGED_OUT,)
    details = {(cell.row, cell.column): cell.details for cell in grid.cells}
    assert details[0, 0] == "stage 0 (a), a: computed, paged out"
    assert grid.title == "skip: 1 recomputations, 2 page-outs, 1 page-ins"
