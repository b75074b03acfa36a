"""Charts of a report: of a schedule, and of the history of a solve."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from kit.instances import make_rng
from kit.plans import parse_plan, random_plan, random_state_plan
from kit.report_subjects import subject, training_problem
from kit.worked import even_costs, skip_graph, skip_problem
from poetmodel.device import Costs, Device
from poetmodel.device.ram import keep_all_ram_use
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.graph.catalogue import load_model
from poetmodel.plan import Arena, check_arena, check_plan
from poetmodel.planner import make_plan
from poetmodel.problem import Problem
from poetmodel.report.charts import (
    KINDS,
    address_chart,
    gauge_chart,
    map_chart,
)
from poetmodel.report.pictures import Kind, format_move_counts
from poetmodel.report.timeline import ORIGINS, plan_chart, timeline_chart
from poetmodel.schedule import Schedule, checkpoint_all


def cells(chart):
    """Spread the runs of a chart."""
    found = {}
    for column, first, last, which in chart["runs"]:
        for row in range(first, last + 1):
            kind, marked, words = chart["labels"][which]
            assert (row, column) not in found
            found[row, column] = (KINDS[kind], marked, words)
    return found


def test_cells_tell_what_happens():
    """Computed, recomputed, paged in, kept; page-outs are marked; several tensors share a cell."""
    graph = skip_graph(mask=True)  # tensors 2 and 3 are both of node c
    schedule = Schedule(
        R=((0, 0), (1, 1), (2, 2), (2, 1), (3, 3)),
        S_RAM=((1, 0), (2, 0), (3, 2), (3, 3)),
        S_AUX=((1, 0), (2, 0), (3, 0)),
        M_in=((3, 0),),
        M_out=((0, 0), (2, 3)),
    )
    chart = map_chart(graph, schedule)
    assert chart["columns"] == ["a", "b", "c", "d"]
    found = {place: (kind, marked) for place, (kind, marked, _) in cells(chart).items()}
    assert found == {
        (0, 0): (Kind.COMPUTED, True),
        (1, 0): (Kind.KEPT, False),
        (1, 1): (Kind.COMPUTED, False),
        (2, 0): (Kind.KEPT, False),
        (2, 1): (Kind.RECOMPUTED, False),
        (2, 2): (Kind.COMPUTED, True),
        (3, 0): (Kind.PAGED_IN, False),
        (3, 2): (Kind.KEPT, False),
        (3, 3): (Kind.COMPUTED, False),
    }
    assert format_move_counts(schedule) == "1 recomputation, 2 page-outs, 1 page-in"


def test_labels_count_the_bytes_of_what_happens():
    """Of a node with two tensors, only the kept one counts.

    Resident tensors are in RAM at the step of their node, which computes nothing.
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
    assert len(chart["boxes"]) == len(one.planned.arena_check.rectangles) == 5
    words = [box[5] for box in chart["boxes"]]
    assert words[0].startswith("a: computed, 4 B, at ")
    assert any(text.startswith("a: paged in, 4 B, at ") for text in words)
    assert chart["limit"] == max(box[3] + 16 for box in chart["boxes"])
    assert chart["end"] == one.simulation.makespan_s
    assert address_chart(replace(one, planned=replace(one.planned, arena_check=None))) is None


def test_map_of_addresses():
    """A box for each copy, from its instruction to its free, coloured by its origin."""
    graph = skip_graph(workspace=True)
    made = parse_plan("c0 o0 c1 c2 f1 w0 c1 f1 f0 i0 w0 c3 f0 f2")
    costs = even_costs(graph, page_in=(7.0, 0.5), page_out=(5.0, 0.25))
    copies = ((0, 0, 0), (2, 1, 8), (3, 2, 16), (6, 1, 24), (9, 0, 0), (11, 3, 8))
    offsets = [(p, "output", i, at) for p, i, at in copies]
    offsets += [(2, "workspace", 1, 4), (6, "workspace", 1, 4)]
    arena = Arena(bytes=30, lower_bound_bytes=16, alignment=1, offsets=tuple(offsets))
    check, places = check_plan(graph, costs, made), check_arena(graph, made, arena)
    shown = SimpleNamespace(
        graph=graph, planned=SimpleNamespace(plan=made, check=check, arena_check=places)
    )
    chart = address_chart(shown)
    assert (chart["x_name"], chart["y_name"]) == ("time [s]", "address [B]")
    assert (chart["end"], chart["limit"], chart["limit_name"]) == (19, 30, "arena 30 B")
    # c ends at 6 s; b again from 6 s to 8 s; then a goes, and is back at 15 s.
    assert [
        (words.partition(":")[0], KINDS[kind], start, start + length, low, low + height)
        for kind, start, length, low, height, words, _ in chart["boxes"]
    ] == [
        ("a", Kind.COMPUTED, 0, 8, 0, 4),
        ("b", Kind.COMPUTED, 1, 6, 8, 14),
        ("b", Kind.WORKSPACE, 1, 3, 4, 5),
        ("c", Kind.COMPUTED, 3, 19, 16, 21),
        ("b", Kind.RECOMPUTED, 6, 8, 24, 30),
        ("b", Kind.WORKSPACE, 6, 8, 4, 5),
        ("a", Kind.PAGED_IN, 8, 19, 0, 4),
        ("d", Kind.COMPUTED, 15, 19, 8, 11),
    ]
    assert chart["boxes"][0][5] == "a: computed, 4 B, at 0 to 4, instructions from 0 to 8"


# -- several schedules, and the RAM of their device ------------------------------------------------


def test_gauge_adds_up():
    """Parts and free RAM sum to the RAM; keep-all has its own peak."""
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
    assert keep_all_ram_use(graph).total_bytes == checkpoint_all_peak_bytes(graph)
    assert whole["missing"] > 0


# -- timeline ------------------------------------------------------------------------------------
RESIDENT = ORIGINS.index("resident")


def sums(chart):
    """Add the bands of a chart up as a reader of the values would: during and after each one."""
    n = len(chart["ops"])
    during, after = [0] * n, [0] * n
    for _, size, begin, end, _, _, overwritten_at, given, _, *_ in chart["stays"]:
        for p in range(max(begin, 0), min(end + 1, n)):
            held = size - (given if 0 <= overwritten_at <= p else 0)
            during[p] += held
            after[p] += held if p < end else 0
    return during, after


@pytest.mark.parametrize("mode", ["blocking", "dma"])
def test_bands_add_up_to_the_checked_ram(mode):
    """During and after every instruction of random plans, with state and without."""
    for seed in range(25):
        rng = make_rng(f"timeline/{mode}/{seed}")
        for graph, costs, made in (random_plan(rng, mode), random_state_plan(rng, mode)):
            check = check_plan(graph, costs, made)
            chart = plan_chart(graph, made, check)
            assert sums(chart) == (chart["during"], chart["after"])
            assert chart["during"] == [record.peak_bytes for record in check.records]
            assert chart["after"] == [record.ram_bytes for record in check.records]


def test_the_ghost_is_keep_all():
    """Its highest point is the keep-all peak; of keep-all itself it is the RAM at every node."""
    graph = load_model("mlp")
    costs = even_costs(graph)
    made = make_plan(graph, costs, checkpoint_all(graph), mode="blocking")
    chart = plan_chart(graph, made, check_plan(graph, costs, made))
    places, kept = chart["ghost"]
    assert max(kept) == checkpoint_all_peak_bytes(graph)
    assert [chart["during"][p] for p in places] == kept


def test_without_costs_it_goes_by_instruction():
    """Without costs there are no times, and the peak is the simulator's.

    One that cannot run has no timeline.
    """
    one = subject(skip_problem(recompute=False))
    chart = timeline_chart(replace(one, planned=None, costs=None))
    assert (chart["issued"], chart["work"]) == (None, [])
    assert max(chart["during"]) == one.simulation.peak_ram_bytes
    assert sums(chart) == (chart["during"], chart["after"])
    broken = Schedule(R=((0, 0), (1, 1), (2, 2), (3, 3), (9, 9)), S_RAM=((1, 0), (2, 1)))
    one = subject(skip_problem(), broken)
    assert one.planned is None
    assert timeline_chart(one) is None


@pytest.mark.parametrize("planned", [True, False])
def test_resident_state_is_there_all_the_time(*, planned):
    """From before the first instruction to the end, with costs or without."""
    one = subject(training_problem(900))
    if not planned:
        one = replace(one, planned=None)
    chart = timeline_chart(one)
    resident = [stay for stay in chart["stays"] if stay[4] == RESIDENT]
    assert sum(stay[1] for stay in resident) == 300
    assert all((stay[2], stay[3]) == (-1, len(chart["ops"])) for stay in resident)
    assert max(chart["during"]) == one.simulation.peak_ram_bytes
