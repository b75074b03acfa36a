"""Greedy schedules: valid wherever they are found, and found wherever they are promised."""

from dataclasses import replace

import pytest

from kit.instances import random_instances, random_state_problems
from kit.oracle import optimum
from kit.rotation import parts
from kit.worked import in_time_problem, skip_graph, skip_problem
from poetmodel.clock import time_limit
from poetmodel.device import Costs, Device
from poetmodel.errors import TimeLimitError
from poetmodel.graph import floor
from poetmodel.graph.catalogue import load_model
from poetmodel.graph.zoo import random_layered
from poetmodel.heuristics import greedy
from poetmodel.heuristics.greedy import construct, page_everything, trivial
from poetmodel.problem import Problem
from poetmodel.result import Status
from poetmodel.schedule import check_schedule, checkpoint_all
from poetmodel.solver import solve


def value(problem, schedule):
    """Return the minimized quantity of a schedule after checking that it is valid."""
    verdict = check_schedule(problem, schedule)
    assert not verdict.violations, verdict.violations
    return problem.objective.measured(verdict.simulation)


@pytest.mark.parametrize(
    ("model", "limits", "most"),
    [
        ("resnet18-cifar", {"ram": "40%"}, 1.1),
        ("paper/bert", {"ram": "40%"}, 1.1),
        ("mobilenetv2", {"ram": "50%"}, 1.1),
        pytest.param("bert-base", {"ram": "40%"}, 1.2, marks=pytest.mark.slow),
        pytest.param("bert-base", {"ram": "40%", "paging": False}, 1.2, marks=pytest.mark.slow),
        pytest.param("bert-base", {"ram": "40%", "deadline": "130%"}, 1.2, marks=pytest.mark.slow),
        pytest.param("bert-base", {}, 99, marks=pytest.mark.slow),
        pytest.param("resnet50", {}, 99, marks=pytest.mark.slow),
        pytest.param("resnet18-cifar", {}, 99, marks=pytest.mark.slow),
        pytest.param("vgg16", {}, 99, marks=pytest.mark.slow),
    ],
)
def test_shipped_models_have_one(model, limits, most):
    """Graphs of hundreds of nodes, with little more energy than the baseline, or at the floor."""
    graph = load_model(model)
    costs = Costs.estimate(graph, Device.load("rpi4b"))
    problem = Problem(graph, costs, **{"ram": floor(graph).bytes, **limits})
    assert value(problem, construct(problem)) < most * problem.baseline_energy_j


@pytest.mark.parametrize(
    ("limits", "energy_j"), [({}, 11.0), ({"recompute": False}, 12.0), ({"paging": False}, 11.0)]
)
def test_it_does_without_what_is_not_allowed(limits, energy_j):
    """Recomputing `a` is cheaper than paging it; each alone finds the best schedule here."""
    problem = skip_problem(**limits)
    schedule = construct(problem)
    assert value(problem, schedule) == energy_j
    assert ((3, 0) in schedule.R) == (energy_j == 11.0)


def test_all_kept_is_returned_where_it_fits():
    """Nothing can beat it, and it is only valid with room for all; what is infeasible has none.

    At the floor of 12 bytes every tensor goes out, and comes back at each use.
    """
    problem = skip_problem(ram=15)
    assert trivial(problem) == construct(problem) == checkpoint_all(problem.graph)
    assert trivial(skip_problem(ram=14)) is None
    assert trivial(skip_problem(ram=15, deadline=9)) is None
    assert construct(skip_problem(recompute=False, paging=False)) is None
    assert page_everything(skip_problem(paging=False)) is None
    problem = skip_problem(ram=12)
    schedule = page_everything(problem)
    value(problem, schedule)
    assert check_schedule(problem, schedule).simulation.peak_ram_bytes == floor(skip_graph()).bytes
    assert len(schedule.R) == 4


@parts(3)
def test_schedules_of_random_problems_are_valid_and_no_better_than_the_best(part):
    """Of 300 problems greedy solves nine of ten that have a schedule, and breaks no rule or limit.

    So it is for 200 problems of up to 25 nodes, which exhaustive search cannot solve.
    """
    found = feasible = larger = 0
    for problem in part.of(random_instances(300, (3, 5), seed=51, below_floor=True)):
        schedule, best = construct(problem), optimum(problem)
        feasible += best is not None
        if schedule is not None:
            assert value(problem, schedule) >= best.value - 1e-9
            found += 1
    for problem in part.of(random_instances(200, (6, 25), seed=52)):
        schedule = construct(problem)
        if schedule is not None:
            value(problem, schedule)
            larger += 1
    assert found >= 0.9 * feasible > part.share(200)
    assert larger > part.share(100)


def unlimited(*, with_state, at_floor):
    """Return problems with paging and neither deadline nor limits of storage and energy."""
    if with_state:
        free = {"paging": True, "aux_bytes": None, "deadline": None}
        return random_state_problems(150, (3, 20), seed=56, at_floor=at_floor, **free)
    free = dict.fromkeys(("deadline", "aux_limit", "energy_budget"), False)
    problems = random_instances(200, (3, 20), seed=54, paging=True, **free)
    if not at_floor:
        return problems
    return [replace(each, ram=max(1, floor(each.graph).bytes)) for each in problems]


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("at_floor", [True, False])
@parts(3)
def test_with_paging_and_no_limits_one_is_always_found(part, with_state, at_floor):
    """Any budget from the floor on will do, where storage, time and energy are not limited."""
    for problem in part.of(unlimited(with_state=with_state, at_floor=at_floor)):
        for schedule in (construct(problem), page_everything(problem)):
            value(problem, schedule)


def test_first_schedule_drops_what_is_needless_when_time_is_up(monkeypatch):
    """Making it took all the time there is, and dropping takes a share of that."""
    graph = random_layered(100, 0)
    costs = Costs.estimate(graph, Device.load("paper-m4"))
    problem = Problem(graph, costs, ram="80%", paging=False)
    late = []
    for ratio in (0.0, 1e3):
        monkeypatch.setattr(greedy, "DROP_TIME_RATIO", ratio)
        late.append(construct(problem, most_s=0.0))
    whole = construct(problem)
    values = [value(problem, schedule) for schedule in (*late, whole) if schedule is not None]
    assert values[0] > values[1] == values[2]


def test_solve_goes_on_without_a_greedy_schedule(monkeypatch):
    """Where it is given up for its time; even the first attempt looks at the clock."""

    def give_up(*_, **__):
        raise TimeLimitError

    monkeypatch.setattr("poetmodel.solver.facade.construct", give_up)
    assert solve(skip_problem()).status == Status.OPTIMAL
    with time_limit(-1), pytest.raises(TimeLimitError):
        construct(skip_problem())


@parts(2)
def test_schedules_with_state_are_valid_and_no_better_than_the_best(part):
    """Homes, in-place operators, all objectives and limits: 60 problems against ``compact``."""
    feasible = found = 0
    for problem in part.of(random_state_problems(60, (3, 7), seed=55)):
        best = solve(problem, formulation="compact", gap=0.0)
        schedule = construct(problem)
        feasible += best.schedule is not None
        if schedule is not None:
            assert value(problem, schedule) >= value(problem, best.schedule) - 1e-9
            found += 1
    assert found >= 0.95 * feasible > part.share(40)


def test_without_paging_all_state_stays_in_ram():
    """Nothing has a home on storage that may not be used."""
    found = 0
    for problem in random_state_problems(60, (3, 8), seed=57, paging=False, minimize="energy"):
        schedule = construct(problem)
        if schedule is not None and problem.graph.state_tensors:
            assert schedule.resident == problem.graph.state_tensors
            found += 1
    assert found > 10


def test_what_reads_state_is_computed_again_before_that_is_replaced():
    """`a` leaves RAM for the workspace of `b`, and is made again in the stage that replaces `w`.

    At its next need, `d`, that would be too late.
    """
    problem = in_time_problem()
    schedule = construct(problem)
    assert [(t, k) for t, k in schedule.R if k < t] == [(4, 2)]
    assert not schedule.M_in
    assert value(problem, schedule) == 6.0
