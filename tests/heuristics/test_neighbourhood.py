"""Local search: valid schedules, never better than the best, the same for the same seed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kit.instances import random_instances, random_state_problems, scarce_problem
from kit.oracle import optimum
from kit.rotation import Part, parts
from kit.worked import skip_problem
from poetmodel.device import Costs, Device
from poetmodel.graph.catalogue import load_model
from poetmodel.heuristics import neighbourhood
from poetmodel.heuristics.greedy import construct, refitted
from poetmodel.heuristics.neighbourhood import LargeNeighbourhoodSearch
from poetmodel.heuristics.penalties import WORST
from poetmodel.heuristics.repair import RepairStyle
from poetmodel.heuristics.restorations import restorations_of
from poetmodel.problem import Problem, Quantity
from poetmodel.solver import solve
from poetmodel.solver.outcome import verify_schedule


def searched(problem: Problem, turns: int, seed: int = 0) -> LargeNeighbourhoodSearch:
    """Search from keep-all for some turns."""
    search = LargeNeighbourhoodSearch(problem, seed=seed)
    search.consider([])
    for _ in range(turns):
        search.iterate()
    return search


def test_the_worked_example() -> None:
    """The optimum, 1 J beyond the baseline, from nothing."""
    search = searched(skip_problem(), 3)
    assert search.best == (0.0, 1.0)
    schedule = search.schedule()
    assert schedule is not None
    assert verify_schedule(skip_problem(), schedule).value == 1.0


@pytest.mark.parametrize("minimize", list(Quantity))
@parts(3)
def test_what_it_finds_is_valid_worth_what_it_says_and_no_better_than_the_best(
    part: Part,
    minimize: str,
) -> None:
    """Against exhaustive search on 60 problems a quantity, with all limits."""
    found = optimal = 0
    for problem in part.of(random_instances(60, (3, 5), seed=95, minimize=minimize)):
        search = searched(problem, 25)
        schedule = search.schedule()
        if schedule is None:
            continue
        found += 1
        candidate = verify_schedule(problem, schedule)
        assert not candidate.violations
        assert search.best.value == pytest.approx(candidate.value, abs=1e-9)
        best = optimum(problem)
        assert best is not None
        least = verify_schedule(problem, best.schedule).value
        assert candidate.value >= least - 1e-9
        optimal += candidate.value <= least + 1e-9
    assert found > part.share(30)
    assert optimal > 0.8 * found


def test_it_goes_on_from_a_schedule_and_never_returns_a_worse_one() -> None:
    """The greedy schedules of 30 scarce problems, some of them made better."""
    better = 0
    for number in range(30):
        problem = scarce_problem(f"improve/{number}", (8, 14))
        start = construct(problem)
        if start is None:
            continue
        value = verify_schedule(problem, start).value
        search = LargeNeighbourhoodSearch(problem)
        search.consider(restorations_of(problem.graph, start))
        for _ in range(30):
            search.iterate()
        schedule = search.schedule()
        assert schedule is not None
        after = verify_schedule(problem, schedule).value
        assert after <= value + 1e-9
        better += after < value - 1e-9
    assert better > 0


def test_the_seed_determines_the_course() -> None:
    """Two searches with one seed agree in the end; the search reaches beyond greedy."""
    graph = load_model("paper/resnet18-cifar")
    problem = Problem(graph, Costs.estimate(graph, Device.load("paper-m4")), ram="20%")
    greedy = construct(problem)
    assert greedy is not None
    one, two = searched(problem, 25, seed=3), searched(problem, 25, seed=3)
    assert one.best == two.best
    assert one.schedule() == two.schedule()
    assert one.best.value < verify_schedule(problem, greedy).value


def test_without_time_it_finds_nothing() -> None:
    """A search that may not take any time ends with nothing, not with something invalid."""
    search = LargeNeighbourhoodSearch(skip_problem())
    search.until_s = 0.0
    assert not search.consider([])
    assert search.best == WORST
    assert search.schedule() is None


@pytest.mark.slow
def test_long_chains_are_found_where_pages_are_dear() -> None:
    """On a board with dear pages one line computes again what the others would page.

    With pages preferred to long chains alone, the search stays above 0.24 J here.
    """
    graph = load_model("resnet18-cifar")
    problem = Problem(graph, Costs.estimate(graph, Device.load("nrf52840")), ram="35%")
    assert searched(problem, 500).best.value < 0.19


def test_a_search_may_be_of_another_style(monkeypatch: pytest.MonkeyPatch) -> None:
    """One trajectory that does not page, whatever that costs."""
    graph = load_model("resnet18-cifar")
    problem = Problem(graph, Costs.estimate(graph, Device.load("nrf52840")), ram="60%")
    monkeypatch.setattr(neighbourhood, "STYLES", (RepairStyle(pages=False),))
    search = LargeNeighbourhoodSearch(problem)
    search.consider([])
    for _ in range(10):
        search.iterate()
    schedule = search.schedule()
    assert schedule is not None
    assert not schedule.M_in


def test_with_state_it_finds_nearly_all_optima() -> None:
    """Which state has its home where, with all objectives and limits: 60 problems."""
    feasible = optimal = 0
    for problem in random_state_problems(60, (3, 7), seed=97):
        best = solve(problem, formulation="compact", gap=0.0).schedule
        search = searched(problem, 25)
        schedule = search.schedule()
        if best is None:
            assert schedule is None
            continue
        feasible += 1
        if schedule is not None:
            least, found = (verify_schedule(problem, each) for each in (best, schedule))
            assert not found.violations
            assert search.best.value == pytest.approx(found.value, abs=1e-9)
            assert found.value >= least.value - 1e-9
            optimal += found.value <= least.value + 1e-9
    assert optimal >= 0.9 * feasible > 36


def test_a_schedule_is_refitted_to_less_ram() -> None:
    """What keeps a budget is repaired to keep a smaller one, where there is such a schedule."""
    graph = load_model("paper/resnet18-cifar")
    costs = Costs.estimate(graph, Device.load("paper-m4"))
    more, less = (Problem(graph, costs, ram=ram, paging=False) for ram in ("60%", "50%"))
    schedule = construct(more)
    assert schedule is not None
    assert verify_schedule(less, schedule).violations
    again = refitted(less, schedule)
    assert again is not None
    assert not verify_schedule(less, again).violations
    assert refitted(replace(less, ram=less.floor.bytes - 1), schedule) is None
