"""Greedy schedules: valid wherever they are found, and found wherever they are promised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kit.instances import random_instances, random_state_problems
from kit.oracle import optimum
from kit.rotation import Part, parts
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
from poetmodel.schedule import checkpoint_all, verify
from poetmodel.solver import solve

if TYPE_CHECKING:
    from poetmodel.schedule import Schedule


def value(problem: Problem, schedule: Schedule) -> float:
    """Return the minimized quantity of a schedule after checking that it is valid."""
    verdict = verify(problem, schedule)
    assert not verdict.violations, verdict.violations
    return problem.objective.measured(verdict.simulation)


def shipped(model: str, **limits: object) -> Problem:
    """State a problem of a shipped model on a Raspberry Pi 4B."""
    graph = load_model(model)
    return Problem(graph, Costs.estimate(graph, Device.load("rpi4b")), **limits)  # type: ignore[arg-type]


def test_the_worked_example() -> None:
    """Recomputing `a` is cheaper than paging it, and greedy sees that."""
    problem = skip_problem()
    schedule = construct(problem)
    assert schedule is not None
    assert value(problem, schedule) == 11.0
    assert (3, 0) in schedule.R


@pytest.mark.parametrize(
    ("limits", "energy_j"), [({"recompute": False}, 12.0), ({"paging": False}, 11.0)]
)
def test_it_does_without_what_is_not_allowed(limits: dict[str, bool], energy_j: float) -> None:
    """Paging alone and recomputing alone both find the best schedule here."""
    problem = skip_problem(**limits)
    schedule = construct(problem)
    assert schedule is not None
    assert value(problem, schedule) == energy_j


def test_nothing_is_returned_where_nothing_is_allowed() -> None:
    """What is infeasible has no greedy schedule."""
    assert construct(skip_problem(recompute=False, paging=False)) is None
    assert page_everything(skip_problem(paging=False)) is None


def test_all_kept_is_returned_where_it_fits() -> None:
    """It is the schedule that nothing can beat, and only valid with room for all."""
    problem = skip_problem(ram=15)
    assert trivial(problem) == construct(problem) == checkpoint_all(problem.graph)
    assert trivial(skip_problem(ram=14)) is None
    assert trivial(skip_problem(ram=15, deadline=9)) is None


def test_everything_paged_has_the_least_peak() -> None:
    """At the floor of 12 bytes every tensor goes out, and comes back at each use."""
    problem = skip_problem(ram=12)
    schedule = page_everything(problem)
    assert schedule is not None
    assert verify(problem, schedule).simulation.peak_ram_bytes == floor(skip_graph()).bytes
    assert not verify(problem, schedule).violations
    assert len(schedule.R) == 4


@parts(3)
def test_schedules_of_random_problems_are_valid_and_no_better_than_the_best(part: Part) -> None:
    """Greedy never breaks a rule or limit, and never beats exhaustive search: 300 problems."""
    found = 0
    for problem in part.of(random_instances(300, (3, 5), seed=51, below_floor=True)):
        schedule = construct(problem)
        if schedule is None:
            continue
        best = optimum(problem)
        assert best is not None
        assert value(problem, schedule) >= best.value - 1e-9
        found += 1
    assert found > part.share(200)


@parts(3)
def test_schedules_of_larger_random_problems_are_valid(part: Part) -> None:
    """The same without the comparison, up to 25 nodes: 200 problems."""
    found = 0
    for problem in part.of(random_instances(200, (6, 25), seed=52)):
        schedule = construct(problem)
        if schedule is not None:
            value(problem, schedule)
            found += 1
    assert found > part.share(100)


@parts(3)
def test_most_feasible_problems_have_one(part: Part) -> None:
    """Of small problems that have a schedule at all, greedy finds one of nine in ten."""
    feasible = found = 0
    for problem in part.of(random_instances(300, (3, 5), seed=53)):
        if optimum(problem) is not None:
            feasible += 1
            found += construct(problem) is not None
    assert found >= 0.9 * feasible


@pytest.mark.parametrize("at_floor", [True, False])
@parts(3)
def test_with_paging_and_no_limits_one_is_always_found(part: Part, at_floor: bool) -> None:
    """Any budget from the floor on will do, where storage, time and energy are not limited."""
    unlimited = dict.fromkeys(("deadline", "aux_limit", "energy_budget"), False)
    for problem in part.of(random_instances(200, (3, 20), seed=54, paging=True, **unlimited)):
        ram = max(1, floor(problem.graph).bytes) if at_floor else problem.ram_budget_bytes
        stated = Problem(
            problem.graph,
            problem.costs,
            ram=ram,
            minimize=problem.minimize,
            recompute=problem.recompute,
        )
        schedule, everything = construct(stated), page_everything(stated)
        assert schedule is not None
        assert everything is not None
        value(stated, schedule)
        value(stated, everything)


@pytest.mark.parametrize(
    ("model", "ram"), [("resnet18-cifar", "40%"), ("paper/bert", "40%"), ("mobilenetv2", "50%")]
)
def test_shipped_models_have_one(model: str, ram: str) -> None:
    """Graphs of a few hundred nodes have one, with little more energy than the baseline."""
    problem = shipped(model, ram=ram)
    schedule = construct(problem)
    assert schedule is not None
    assert value(problem, schedule) < 1.1 * problem.baseline_energy_j


@pytest.mark.slow
@pytest.mark.parametrize("limits", [{}, {"paging": False}, {"deadline": "130%"}])
def test_large_models_have_one(limits: dict[str, object]) -> None:
    """BERT-base, 500 nodes, at 40 %: with paging, without, and under a deadline."""
    problem = shipped("bert-base", ram="40%", **limits)
    schedule = construct(problem)
    assert schedule is not None
    assert value(problem, schedule) < 1.2 * problem.baseline_energy_j


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bert-base", "resnet50", "resnet18-cifar", "vgg16"])
def test_large_models_have_one_at_the_floor(model: str) -> None:
    """The tightest budget there is, with paging."""
    problem = shipped(model, ram=floor(load_model(model)).bytes)
    schedule = construct(problem)
    assert schedule is not None
    value(problem, schedule)


def test_first_attempt_ends_with_the_time_limit() -> None:
    """Even the first attempt looks at the clock, so that no graph is too large to be given up."""
    with time_limit(-1), pytest.raises(TimeLimitError):
        construct(skip_problem())


def test_first_schedule_drops_what_is_needless_when_time_is_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_solve_goes_on_without_a_greedy_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the greedy schedule is given up for its time, the problem is solved all the same."""

    def give_up(*_: object, **__: object) -> None:
        raise TimeLimitError

    monkeypatch.setattr("poetmodel.solver.facade.construct", give_up)
    assert solve(skip_problem()).status == Status.OPTIMAL


@parts(2)
def test_schedules_with_state_are_valid_and_no_better_than_the_best(part: Part) -> None:
    """Homes, in-place operators, all objectives and limits: 60 problems against ``compact``."""
    feasible = found = 0
    for problem in part.of(random_state_problems(60, (3, 7), seed=55)):
        best = solve(problem, formulation="compact", gap=0.0)
        schedule = construct(problem)
        feasible += best.schedule is not None
        if schedule is not None:
            assert best.schedule is not None
            assert value(problem, schedule) >= value(problem, best.schedule) - 1e-9
            found += 1
    assert found >= 0.95 * feasible > part.share(40)


@pytest.mark.parametrize("at_floor", [True, False])
@parts(3)
def test_with_state_and_paging_one_is_always_found(part: Part, at_floor: bool) -> None:
    """Any budget from the floor on will do, which is what a step needs with state on storage."""
    free = {"paging": True, "aux_bytes": None, "deadline": None}
    for problem in part.of(random_state_problems(150, (3, 20), seed=56, at_floor=at_floor, **free)):
        for schedule in (construct(problem), page_everything(problem)):
            assert schedule is not None
            value(problem, schedule)


def test_without_paging_all_state_stays_in_ram() -> None:
    """Nothing has a home on storage that may not be used."""
    found = 0
    for problem in random_state_problems(60, (3, 8), seed=57, paging=False, minimize="energy"):
        schedule = construct(problem)
        if schedule is not None and problem.graph.state_tensors:
            assert schedule.resident == problem.graph.state_tensors
            found += 1
    assert found > 10


def test_what_reads_state_is_computed_again_before_that_is_replaced() -> None:
    """`a` leaves RAM for the workspace of `b`, and is made again in the stage that replaces `w`.

    At its next need, `d`, that would be too late.
    """
    problem = in_time_problem()
    schedule = construct(problem)
    assert schedule is not None
    assert [(t, k) for t, k in schedule.R if k < t] == [(4, 2)]
    assert not schedule.M_in
    assert value(problem, schedule) == 6.0
