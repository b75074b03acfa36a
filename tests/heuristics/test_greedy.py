"""Greedy schedules: valid wherever they are found, and found wherever they are promised."""

from dataclasses import replace

import pytest

from kit.instances import random_instances, random_state_problems, seeded
from kit.oracle import optimum
from kit.rotation import parts
from kit.worked import even_costs, in_time_problem, skip_graph, skip_problem
from poetmodel.clock import time_limit
from poetmodel.device import Costs, Device
from poetmodel.errors import TimeLimitError
from poetmodel.graph import Graph, floor, operation
from poetmodel.graph.catalogue import load_model
from poetmodel.graph.zoo import random_layered
from poetmodel.heuristics import greedy
from poetmodel.heuristics.earlier_recomputation import EarlierRecomputation
from poetmodel.heuristics.greedy import construct, page_everything, trivial
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.heuristics.restorations import RECOMPUTE, Restoration
from poetmodel.problem import Problem
from poetmodel.result import Status
from poetmodel.schedule import check_schedule, checkpoint_all
from poetmodel.solver import solve
from poetmodel.solver.outcome import as_candidate


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

    monkeypatch.setattr("poetmodel.solver.task.construct", give_up)
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


# -- what does not fit into its stage, recomputed in an earlier one --------------------------------
def beside_problem():
    """State a problem in which `a` must be made again, but not in the stage that reads it.

    ====  ====== ===== ========= =====================================
    node  reads  bytes workspace RAM with `a` made again
    ====  ====== ===== ========= =====================================
    p            3               3
    a     p      4               3 + 4 = 7
    m     a      1               3 + 4 + 1 = 8
    h     m      1     4         3 + 1 + 1 + 4 = 9, and 10 with `a`
    g     h      3               3 + 1 + 4 = 8 for `a`, 4 + 1 + 3 = 8
    r     a, g   2               3 + 4 + 3 = 10 for `a`, 4 + 3 + 2 = 9
    ====  ====== ===== ========= =====================================
    """
    graph = Graph(
        name="beside",
        nodes=(
            operation("p", output_bytes=3),
            operation("a", output_bytes=4, inputs=("p",)),
            operation("m", output_bytes=1, inputs=("a",)),
            operation("h", output_bytes=1, inputs=("m",), workspace_bytes=4),
            operation("g", output_bytes=3, inputs=("h",)),
            operation("r", output_bytes=2, inputs=("a", "g")),
        ),
    )
    return Problem(graph, even_costs(graph, page_in=None, page_out=None), ram=9)


def test_nothing_moves_farther_than_it_may(monkeypatch):
    """Zero stages leave it where it is, one is enough, and a stage that fits is left alone.

    Greedy recomputes in the stage of `g`: in that of `r`, which reads `a`, its input is too much.
    """
    problem = beside_problem()
    late, early = Restoration(5, 1, RECOMPUTE), Restoration(4, 1, RECOMPUTE)
    for stages, moved in ((0, False), (1, True)):
        monkeypatch.setattr("poetmodel.heuristics.earlier_recomputation.STAGES", stages)
        partial = PartialSchedule(problem.graph, [late], working=problem.working_graph)
        earlier = EarlierRecomputation(
            partial=partial, limit_bytes=problem.usable_ram_bytes, has_room_for=lambda _: True
        )
        assert not earlier.relieve(4)
        assert earlier.relieve(5) is moved
        assert partial.restorations() == [early if moved else late]
    schedule = construct(beside_problem())
    assert [(t, k) for t, k in schedule.R if k < t] == [(4, 1)]


@parts(3)
def test_a_move_lowers_the_excess_and_adds_nothing(part):
    """On 300 random problems with random restorations: as many as before or fewer, none new."""
    moves = 0
    for number, problem in part.of(enumerate(random_instances(300, (6, 14), seed=97, paging=True))):
        rng, n = seeded(f"earlier/{number}"), len(problem.graph.nodes)
        partial = PartialSchedule(problem.graph, working=problem.working_graph)
        for t in range(1, n):
            k = rng.randrange(t)
            if problem.may_recompute(k):
                partial.add(Restoration(t, k, RECOMPUTE))
        limit = problem.usable_ram_bytes
        earlier = EarlierRecomputation(
            partial=partial, limit_bytes=limit, has_room_for=lambda _: True
        )
        for t in range(n):
            excess = (partial.peaks() - limit).clip(min=0).sum()
            before = {(r.item, r.kind) for r in partial.restorations()}
            count = len(partial.restorations())
            if not earlier.relieve(t):
                assert len(partial.restorations()) == count
                continue
            moves += 1
            assert (partial.peaks() - limit).clip(min=0).sum() < excess
            after = partial.restorations()
            assert len(after) <= count
            assert {(r.item, r.kind) for r in after} <= before
            found = as_candidate(problem, partial.schedule()).violations
            limits = ("peak RAM", "time", "energy", "storage")
            assert all(one.startswith(limits) for one in found), found
    assert moves > part.share(20)
