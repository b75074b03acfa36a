"""The timeline of a plan: bands whose sum is the plan checker's RAM, budget and keep-all."""

from dataclasses import replace

import pytest

from kit.instances import seeded
from kit.plans import random_plan, random_state_plan
from kit.report_subjects import subject, training_problem
from kit.worked import even_costs, skip_problem
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.graph.catalogue import load_model
from poetmodel.plan import check_plan
from poetmodel.planner import make_plan
from poetmodel.report.timeline import ORIGINS, plan_chart, timeline_chart
from poetmodel.schedule import Schedule, checkpoint_all

RESIDENT = ORIGINS.index("resident")


def sums(chart):
    """Add the bands of a chart up as a reader of the values would: during and after each one."""
    n = len(chart["ops"])
    during, after = [0] * n, [0] * n
    for _, size, begin, end, _, _, given_at, given, _, *_ in chart["stays"]:
        for p in range(max(begin, 0), min(end + 1, n)):
            held = size - (given if 0 <= given_at <= p else 0)
            during[p] += held
            after[p] += held if p < end else 0
    return during, after


@pytest.mark.parametrize("mode", ["blocking", "dma"])
def test_bands_add_up_to_the_checked_ram(mode):
    """During and after every instruction of random plans, with state and without."""
    for seed in range(25):
        rng = seeded(f"timeline/{mode}/{seed}")
        for graph, costs, made in (random_plan(rng, mode), random_state_plan(rng, mode)):
            check = check_plan(graph, costs, made)
            chart = plan_chart(graph, made, check)
            assert sums(chart) == (chart["during"], chart["after"])
            assert chart["during"] == [moment.high_bytes for moment in check.moments]
            assert chart["after"] == [moment.ram_bytes for moment in check.moments]


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

    One that cannot run is drawn by step, as far as it names what is there: the RAM that the
    simulator found, without bands.
    """
    one = subject(skip_problem(recompute=False))
    chart = timeline_chart(replace(one, plan=None, check=None, places=None, costs=None))
    assert (chart["issued"], chart["work"]) == (None, [])
    assert max(chart["during"]) == one.simulation.peak_ram_bytes
    assert sums(chart) == (chart["during"], chart["after"])
    broken = Schedule(R=((0, 0), (1, 1), (2, 2), (3, 3), (9, 9)), S_RAM=((1, 0), (2, 1)))
    one = subject(skip_problem(), broken)
    assert one.plan is None
    chart = timeline_chart(one)
    assert (set(chart["ops"]), chart["stays"]) == ({"s"}, [])
    assert chart["during"] == [point.ram_bytes for point in one.simulation.curve]


@pytest.mark.parametrize("planned", [True, False])
def test_resident_state_is_there_all_the_time(*, planned):
    """From before the first instruction to the end, with costs or without."""
    one = subject(training_problem(900))
    if not planned:
        one = replace(one, plan=None, check=None)
    chart = timeline_chart(one)
    resident = [stay for stay in chart["stays"] if stay[4] == RESIDENT]
    assert sum(stay[1] for stay in resident) == 300
    assert all((stay[2], stay[3]) == (-1, len(chart["ops"])) for stay in resident)
    assert max(chart["during"]) == one.simulation.peak_ram_bytes
