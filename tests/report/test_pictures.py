"""The pictures: a plan over time, and the map of a schedule, stage by node."""

from __future__ import annotations

from plan_words import PAGED, plan
from poetmodel.plan import check_plan
from poetmodel.report.pictures import Kind, Timeline, plan_timeline, stage_map
from poetmodel.schedule import Schedule
from worked import even_costs, skip_graph


def described(text: str, mode: str = "dma") -> Timeline:
    """Describe the picture of a program of `skip_graph`."""
    graph = skip_graph()
    made = plan(text, mode, ram_budget_bytes=13)
    costs = even_costs(graph, page_in=(7.0, 0.5), page_out=(5.0, 0.25))
    return plan_timeline(graph, made, check_plan(graph, costs, made))


def test_lanes_of_a_plan() -> None:
    """Core with stalls and bus, with the times of the walk."""
    lanes = described(PAGED).lanes
    core, bus = lanes["core"], lanes["bus"]
    assert [(bar.start, bar.end, bar.kind, bar.name) for bar in core] == [
        (0, 1, Kind.COMPUTED, "a"),
        (1, 3, Kind.COMPUTED, "b"),
        (3, 6, Kind.STALL, "a"),
        (6, 9, Kind.COMPUTED, "c"),
        (9, 16, Kind.STALL, "a"),
        (16, 20, Kind.COMPUTED, "d"),
    ]
    assert [(bar.start, bar.end, bar.kind, bar.name) for bar in bus] == [
        (1, 6, Kind.PAGED_OUT, "a"),
        (9, 16, Kind.PAGED_IN, "a"),
    ]
    assert bus[0].details == "1: paged out a, takes 5 s, 4 B, RAM 4 B"


def test_curve_of_a_plan() -> None:
    """RAM during each step, and after it, against the budget."""
    curve = described(PAGED)
    assert curve.curve_name == "RAM [B]"
    assert (curve.limit, curve.limit_name) == (13, "budget 13 B")
    held = dict(curve.points)  # the last value at each time
    assert held == {0.0: 4, 1.0: 10, 3.0: 10, 6.0: 11, 9.0: 9, 16.0: 12, 20.0: 3}


def test_curve_has_the_workspace_of_a_step() -> None:
    """While b is computed its workspace counts: 4 + 6 + 1 B from 1 s to 3 s."""
    graph = skip_graph(workspace=True)
    made = plan("c0 c1 c2 f1 c3 f0 f2")
    points = plan_timeline(graph, made, check_plan(graph, even_costs(graph), made)).points
    assert points[3:5] == ((1.0, 11), (3.0, 10))


def test_recomputation_and_blocking_transfers() -> None:
    """A second computation has its own kind; without DMA the bus still has its lane."""
    picture = described("c0 o0 c1 f0 c2 c1 f1 i0 c3 f0 f2", "blocking")
    assert picture.kinds == (Kind.COMPUTED, Kind.RECOMPUTED, Kind.PAGED_IN, Kind.PAGED_OUT)
    assert picture.lanes["bus"][0].start == 1


def test_plan_without_transfers_has_no_bus() -> None:
    """One lane is enough."""
    assert list(described("c0 c1 c2 f1 c3 f0 f2").lanes) == ["core"]


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
