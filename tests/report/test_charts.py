"""What the charts of a report show: one schedule, several, and how a solve went."""

from bisect import bisect_right
from dataclasses import replace

import pytest

from kit.instances import random_instances
from kit.report_subjects import subject, training_problem
from kit.worked import comb_problem, even_costs, skip_graph, skip_problem
from poetmodel.device import Costs, Device
from poetmodel.device.room import keep_all_use
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.graph.catalogue import load_model
from poetmodel.problem import Problem
from poetmodel.report.charts import (
    KINDS,
    address_chart,
    front_chart,
    gauge_chart,
    map_chart,
    overlay_chart,
    progress_chart,
    progress_of,
)
from poetmodel.report.pictures import Kind, stage_map
from poetmodel.schedule import Schedule
from poetmodel.solver import solve


def cells(chart):
    """Spread the runs of a chart."""
    found = {}
    for column, first, last, which in chart["runs"]:
        for row in range(first, last + 1):
            kind, marked, words = chart["labels"][which]
            assert (row, column) not in found
            found[row, column] = (KINDS[kind], marked, words)
    return found


@pytest.mark.parametrize("recompute", [True, False])
def test_runs_are_the_cells_of_the_map(*, recompute):
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


def test_labels_count_the_bytes_of_what_happens():
    """Of a node with two tensors, only the kept one counts.

    What is resident is in RAM at the step of its node; nothing is computed there.
    """
    graph = skip_graph(mask=True)
    problem = Problem(graph, even_costs(graph), ram=40)
    schedule = Schedule(
        R=((0, 0), (1, 1), (2, 2), (3, 1), (3, 2), (3, 3)),
        S_RAM=((1, 0), (2, 0), (2, 1), (3, 0), (3, 3)),
    )
    found = cells(map_chart(problem.graph, schedule))
    assert found[3, 2] == (Kind.RECOMPUTED, False, "recomputed 5 B; kept in RAM 1 B")
    assert found[1, 0] == found[2, 0] == (Kind.KEPT, False, "kept in RAM 4 B")
    one = subject(training_problem(900))
    found = cells(map_chart(one.graph, one.schedule))
    index = one.graph.node_index
    places = {name: (index[name], index[name]) for name in ("w1", "w2", "h")}
    assert (found[places["w1"]][0], found[places["w2"]][0]) == (Kind.PAGED_IN, Kind.KEPT)
    assert found[places["h"]][0] == Kind.COMPUTED


def test_addresses_of_the_plan():
    """A box for each copy with its words; none of a schedule without a plan."""
    one = subject(skip_problem(recompute=False))
    chart = address_chart(one)
    assert len(chart["boxes"]) == len(one.places.rectangles) == 5
    words = [box[5] for box in chart["boxes"]]
    assert words[0].startswith("a: computed, 4 B, at ")
    assert any(text.startswith("a: paged in, 4 B, at ") for text in words)
    assert chart["limit"] == max(box[3] + 16 for box in chart["boxes"])
    assert chart["end"] == one.simulation.makespan_s
    assert address_chart(replace(one, places=None)) is None


def row(key, ram, overhead_j, **keys):
    """Make a row of a sweep."""
    fixed = {"method": "optimal", "backend": "highs", "ram": "50%", "status": "optimal"}
    figures = {"peak_ram_bytes": ram, "overhead_j": overhead_j, "energy_j": 10 + overhead_j}
    return {**fixed, **figures, "key": key, "baseline_energy_j": 10.0, **keys}


def test_front_of_a_sweep():
    """A line per method, by RAM; the edge has what no smaller peak undercuts."""
    rows = [
        row("b", 200, 0.5),
        row("a", 100, 1.0),
        row("c", 300, 0.7, method="lru-paging", backend=None, status="feasible"),
        row("d", 300, 0.0) | {"energy_j": None, "overhead_j": None, "peak_ram_bytes": None},
    ]
    chart = front_chart(rows, rows[:2])
    assert [line["name"] for line in chart["lines"]] == ["optimal, highs", "lru-paging"]
    assert (chart["lines"][0]["x"], chart["lines"][0]["y"]) == ([100, 200], [10, 5])
    assert chart["lines"][1]["proven"] == [False]
    assert (chart["front"]["x"], chart["front"]["y"]) == ([100, 200], [10, 5])
    assert "on the front" in chart["lines"][0]["texts"][0]
    assert "on the front" not in chart["lines"][1]["texts"][0]
    assert not chart["log"]
    assert front_chart([row("a", 100, 1.0), row("b", 200, 0.01)], [])["log"]


# -- incumbent and bound over time -----------------------------------------------------------------
def test_history_of_the_file_is_drawn():
    """Energies are shares of a single pass, and the end says whether it is proven."""
    one = subject(comb_problem())
    chart = progress_of(one)
    assert chart["history"] == [list(moment) for moment in one.document.history]
    assert chart["unit"] == "%"
    assert 100 * chart["factor"] == pytest.approx(one.problem.baseline_energy_j)
    assert chart["proven"]
    assert chart["end"].startswith("proven optimal after ")
    assert progress_of(replace(one, document=replace(one.document, history=()))) is None
    assert progress_of(replace(one, costs=None)) is None


@pytest.mark.parametrize(
    ("minimize", "unit", "name", "history", "status", "end"),
    [
        ("time", "s", "time beyond a single pass", [(0.5, 4.0, 1.0), (60.0, 4.0, 3.0)],
         "feasible", "stopped after 60 s: at most 25 %"),
        ("ram", "B", "peak RAM", [(0.5, None, 1.0), (60.0, None, 3.0)],
         None, "no schedule after 60 s"),
        ("writes", "B", "written to storage", [(0.5, 4.0, None), (2.0, 4.0, 4.0)],
         "optimal", "proven optimal after 2 s"),
    ],
)  # fmt: skip
def test_other_quantities_have_their_units(minimize, unit, name, history, status, end):
    """What is minimized is drawn; how the solve ended, and what was open then, is told."""
    problem = replace(comb_problem(), minimize=minimize)
    chart = progress_chart(problem, history, status=status)
    assert (chart["unit"], chart["y_name"]) == (unit, name)
    assert chart["end"].startswith(end)


# -- several schedules, and the RAM of their device ------------------------------------------------
@pytest.mark.parametrize("mode", ["blocking", "dma"])
def test_curves_are_those_of_the_plans(mode):
    """At each instruction a curve has the RAM that the plan checker found, its peak included."""
    one = subject(skip_problem(), mode=mode)
    other = subject(skip_problem(recompute=False), label="B", mode=mode)
    assert overlay_chart([one]) is gauge_chart([one]) is None  # no other, and no device
    chart = overlay_chart([one, other])
    assert [curve["label"] for curve in chart["curves"]] == ["A", "B"]
    for each, curve in zip((one, other), chart["curves"], strict=True):
        assert curve["x"] == sorted(curve["x"])
        assert max(curve["y"]) == each.check.peak_ram_bytes  # in bytes, since it is below 1 KiB
        assert curve["budget"] == each.plan.ram_budget_bytes
        assert each.check.makespan_s is not None
        assert curve["x"][-1] == pytest.approx(each.check.makespan_s)
        following = each.check.moments[1:]
        for step, moment, after in zip(
            each.plan.program, each.check.moments, following, strict=False
        ):
            if after.issued_s > moment.issued_s:
                inside = (moment.issued_s + after.issued_s) / 2
                ram = moment.high_bytes if step.op == "compute" else moment.ram_bytes
                assert curve["y"][bisect_right(curve["x"], inside) - 1] == ram


def test_gauge_adds_up():
    """Parts and what is free make up the RAM; keep-all has its own peak."""
    graph = load_model("mlp")
    costs = Costs.estimate(graph, Device.load("nano33ble"))
    subjects = [
        subject(Problem(graph, costs, ram=ram), label=label)
        for ram, label in (("80%", "A"), ("100%", "B"))
    ]
    chart = gauge_chart(subjects)
    assert [row["label"] for row in chart["rows"]] == ["A", "B"]
    for row in (*chart["rows"], *chart["keep_all"]):
        assert sum(row["parts"]) + row["free"] - row["missing"] == row["ram"]
    (whole,) = chart["keep_all"]
    resident = graph.total_resident_bytes
    assert sum(whole["parts"]) == checkpoint_all_peak_bytes(graph) + resident
    assert keep_all_use(graph).total_bytes == checkpoint_all_peak_bytes(graph)
    assert whole["missing"] > 0


def test_random_plans_have_their_peaks():
    """The highest point of a curve is the peak, also where it lasts no time."""
    for problem in random_instances(20):
        one = subject(problem, mode="dma") if solve(problem).schedule else None
        if one and one.check:
            chart = overlay_chart([one, replace(one, label="B")])
            assert max(chart["curves"][0]["y"]) == one.check.peak_ram_bytes
