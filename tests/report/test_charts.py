"""What the charts of a report show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kit.report_subjects import subject, training_problem
from kit.worked import even_costs, skip_graph, skip_problem
from poetmodel.problem import Problem
from poetmodel.report.charts import KINDS, address_chart, front_chart, map_chart
from poetmodel.report.pictures import Kind, stage_map
from poetmodel.schedule import Schedule


def cells(chart: dict[str, Any]) -> dict[tuple[int, int], tuple[Kind, bool, str]]:
    """Spread the runs of a chart."""
    found = {}
    for column, first, last, which in chart["runs"]:
        for row in range(first, last + 1):
            kind, marked, words = chart["labels"][which]
            assert (row, column) not in found
            found[row, column] = (KINDS[kind], marked, words)
    return found


@pytest.mark.parametrize("recompute", [True, False])
def test_runs_are_the_cells_of_the_map(*, recompute: bool) -> None:
    """The packed form holds what the other pictures draw."""
    one = subject(skip_problem(recompute=recompute))
    found = cells(map_chart(one.graph, one.schedule))
    grid = stage_map(one.graph, one.schedule)
    assert {place: kind for place, (kind, _, _) in found.items()} == {
        (cell.row, cell.column): cell.kind for cell in grid.cells
    }
    assert {place for place, (_, marked, _) in found.items() if marked} == {
        (cell.row, cell.column) for cell in grid.cells if cell.mark
    }


def test_labels_count_the_bytes_of_what_happens() -> None:
    """Of a node with two tensors, only the kept one counts."""
    graph = skip_graph(mask=True)
    problem = Problem(graph, even_costs(graph), ram=40)
    schedule = Schedule(
        R=((0, 0), (1, 1), (2, 2), (3, 1), (3, 2), (3, 3)),
        S_RAM=((1, 0), (2, 0), (2, 1), (3, 0), (3, 3)),
    )
    found = cells(map_chart(problem.graph, schedule))
    assert found[3, 2] == (Kind.RECOMPUTED, False, "recomputed 5 B; kept in RAM 1 B")
    assert found[1, 0] == found[2, 0] == (Kind.KEPT, False, "kept in RAM 4 B")


def test_addresses_of_the_plan() -> None:
    """A box for each copy with its words; none of a schedule without a plan."""
    one = subject(skip_problem(recompute=False))
    chart = address_chart(one)
    assert chart is not None
    assert one.places is not None
    assert len(chart["boxes"]) == len(one.places.rectangles) == 5
    words = [box[5] for box in chart["boxes"]]
    assert words[0].startswith("a: computed, 4 B, at ")
    assert any(text.startswith("a: paged in, 4 B, at ") for text in words)
    assert chart["limit"] == max(box[3] + 16 for box in chart["boxes"])
    assert chart["end"] == one.simulation.makespan_s
    assert address_chart(replace(one, places=None)) is None


def test_first_reads_of_state_are_page_ins_of_the_map() -> None:
    """What is resident is in RAM at the step of its node; nothing is computed there."""
    one = subject(training_problem(900))
    found = cells(map_chart(one.graph, one.schedule))
    index = one.graph.node_index
    places = {name: (index[name], index[name]) for name in ("w1", "w2", "h")}
    assert found[places["w1"]][0] == Kind.PAGED_IN
    assert found[places["w2"]][0] == Kind.KEPT
    assert found[places["h"]][0] == Kind.COMPUTED


def row(key: str, ram: int, overhead_j: float, **keys: Any) -> dict[str, Any]:
    """Make a row of a sweep."""
    fixed = {"method": "optimal", "backend": "highs", "ram": "50%", "status": "optimal"}
    figures = {"peak_ram_bytes": ram, "overhead_j": overhead_j, "energy_j": 10 + overhead_j}
    return {**fixed, **figures, "key": key, "baseline_energy_j": 10.0, **keys}


def test_front_of_a_sweep() -> None:
    """A line per method, by RAM; the edge has what no smaller peak undercuts."""
    rows = [
        row("b", 200, 0.5),
        row("a", 100, 1.0),
        row("c", 300, 0.7, method="lru-paging", backend=None, status="feasible"),
        row("d", 300, 0.0) | {"energy_j": None, "overhead_j": None, "peak_ram_bytes": None},
    ]
    chart = front_chart(rows, rows[:2])
    assert [line["name"] for line in chart["lines"]] == ["optimal, highs", "lru-paging"]
    assert chart["lines"][0]["x"] == [100, 200]
    assert chart["lines"][0]["y"] == [10, 5]
    assert chart["lines"][1]["proven"] == [False]
    assert (chart["front"]["x"], chart["front"]["y"]) == ([100, 200], [10, 5])
    assert "on the front" in chart["lines"][0]["texts"][0]
    assert "on the front" not in chart["lines"][1]["texts"][0]
    assert not chart["log"]
    assert front_chart([row("a", 100, 1.0), row("b", 200, 0.01)], [])["log"]
