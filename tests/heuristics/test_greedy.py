"""Greedy schedules: valid wherever they are found, and found wherever they are promised."""

import math
from collections import defaultdict
from dataclasses import replace

import pytest

from kit.instances import (
    make_rng,
    random_costs,
    random_graph,
    random_instances,
    random_schedule,
    random_state_problems,
    random_step,
    state_costs,
)
from kit.oracle import optimum
from kit.rotation import parametrize_parts
from kit.worked import even_costs, recompute_before_update_problem, skip_graph, skip_problem
from layered import make_random_layered
from poetmodel.clock import limit_time
from poetmodel.device import Costs, Device
from poetmodel.errors import TimeLimitError
from poetmodel.graph import (
    Graph,
    checkpoint_all_peak_bytes,
    checkpoint_all_profile,
    floor,
    operation,
)
from poetmodel.graph.catalogue import load_model
from poetmodel.heuristics import greedy
from poetmodel.heuristics.earlier_recomputation import EarlierRecomputation
from poetmodel.heuristics.greedy import construct, keep_all_if_within_budgets, page_everything
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.heuristics.penalties import PenalizedObjective
from poetmodel.heuristics.recoveries import Recoveries
from poetmodel.heuristics.repair import Repair
from poetmodel.heuristics.restorations import PAGE_IN, RECOMPUTE, STORAGE_HOME, Restoration
from poetmodel.problem import Problem
from poetmodel.result import Status
from poetmodel.schedule import GraphIdentity, Schedule, check_schedule, checkpoint_all, simulate
from poetmodel.solver import solve
from poetmodel.solver.outcome import make_candidate


def value(problem, schedule):
    """Return the minimized quantity of a schedule after checking that it is valid."""
    verdict = check_schedule(problem, schedule)
    assert not verdict.violations, verdict.violations
    return problem.objective.value_of(verdict.simulation)


@pytest.mark.parametrize(
    ("model", "limits", "most"),
    [
        ("resnet18-cifar", {"ram": "40%"}, 1.1),
        ("paper/bert", {"ram": "40%"}, 1.1),
        ("mobilenetv2", {"ram": "50%"}, 1.1),
        pytest.param("bert-base", {"ram": "40%"}, 1.2, marks=pytest.mark.slow),
        pytest.param("bert-base", {"ram": "40%", "paging": False}, 1.2, marks=pytest.mark.seeds),
        pytest.param("bert-base", {"ram": "40%", "deadline": "130%"}, 1.2, marks=pytest.mark.seeds),
        pytest.param("bert-base", {}, 99, marks=pytest.mark.slow),
        pytest.param("resnet50", {}, 99, marks=pytest.mark.seeds),
        pytest.param("resnet18-cifar", {}, 99, marks=pytest.mark.seeds),
        pytest.param("vgg16", {}, 99, marks=pytest.mark.seeds),
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
    """The keep-all schedule is optimal, and valid only if it fits; infeasible problems have none.

    At the floor of 12 bytes, all tensors are paged out, and restored for each use.
    """
    problem = skip_problem(ram=15)
    assert (
        keep_all_if_within_budgets(problem) == construct(problem) == checkpoint_all(problem.graph)
    )
    assert keep_all_if_within_budgets(skip_problem(ram=14)) is None
    assert keep_all_if_within_budgets(skip_problem(ram=15, deadline=9)) is None
    assert construct(skip_problem(recompute=False, paging=False)) is None
    assert page_everything(skip_problem(paging=False)) is None
    problem = skip_problem(ram=12)
    schedule = page_everything(problem)
    value(problem, schedule)
    assert check_schedule(problem, schedule).simulation.peak_ram_bytes == floor(skip_graph()).bytes
    assert len(schedule.R) == 4


@parametrize_parts(3)
def test_schedules_of_random_problems_are_valid_and_no_better_than_the_best(part):
    """Of 300 problems greedy solves nine of ten that have a schedule, and breaks no rule or limit.

    So it is for 200 problems of up to 25 nodes, which exhaustive search cannot solve.
    """
    found = feasible = larger = 0
    for problem in part.select(random_instances(300, (3, 5), seed=51, below_floor=True)):
        schedule, best = construct(problem), optimum(problem)
        feasible += best is not None
        if schedule is not None:
            assert value(problem, schedule) >= best.value - 1e-9
            found += 1
    for problem in part.select(random_instances(200, (6, 25), seed=52)):
        schedule = construct(problem)
        if schedule is not None:
            value(problem, schedule)
            larger += 1
    assert found >= 0.9 * feasible > part.divide(200)
    assert larger > part.divide(100)


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
@parametrize_parts(8)
def test_with_paging_and_no_limits_one_is_always_found(part, with_state, at_floor):
    """Any budget from the floor on will do, where storage, time and energy are not limited."""
    for problem in part.select(unlimited(with_state=with_state, at_floor=at_floor)):
        for schedule in (construct(problem), page_everything(problem)):
            value(problem, schedule)


def test_first_schedule_drops_what_is_needless_when_time_is_up(monkeypatch):
    """After a construction that used all the time, dropping takes a fraction of its time."""
    graph = make_random_layered(100, 0)
    costs = Costs.estimate(graph, Device.load("paper-m4"))
    problem = Problem(graph, costs, ram="80%", paging=False)
    late = []
    for ratio in (0.0, 1e3):
        monkeypatch.setattr(greedy, "DROP_TIME_RATIO", ratio)
        late.append(construct(problem, max_s=0.0))
    whole = construct(problem)
    values = [value(problem, schedule) for schedule in (*late, whole) if schedule is not None]
    assert values[0] > values[1] == values[2]


def test_solve_goes_on_without_a_greedy_schedule(monkeypatch):
    """It is abandoned at its time limit; also the first attempt reads the clock."""

    def give_up(*_, **__):
        raise TimeLimitError

    monkeypatch.setattr("poetmodel.solver.task.construct", give_up)
    assert solve(skip_problem()).status == Status.OPTIMAL
    with limit_time(-1), pytest.raises(TimeLimitError):
        construct(skip_problem())


@parametrize_parts(2)
def test_schedules_with_state_are_valid_and_no_better_than_the_best(part):
    """Homes, in-place operators, all objectives and limits: 60 problems against ``compact``."""
    feasible = found = 0
    for problem in part.select(random_state_problems(60, (3, 7), seed=55)):
        best = solve(problem, formulation="compact", gap=0.0)
        schedule = construct(problem)
        feasible += best.schedule is not None
        if schedule is not None:
            assert value(problem, schedule) >= value(problem, best.schedule) - 1e-9
            found += 1
    assert found >= 0.95 * feasible > part.divide(40)


def test_without_paging_all_state_stays_in_ram():
    """Without paging, all state has its home in RAM."""
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
    problem = recompute_before_update_problem()
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
        monkeypatch.setattr("poetmodel.heuristics.earlier_recomputation.MAX_STAGES", stages)
        partial = PartialSchedule(problem.graph, [late], working_graph=problem.working_graph)
        earlier = EarlierRecomputation(
            partial=partial, limit_bytes=problem.usable_ram_bytes, fits_limits=lambda _: True
        )
        assert not earlier.relieve(4)
        assert earlier.relieve(5) is moved
        assert partial.restorations() == [early if moved else late]
    schedule = construct(beside_problem())
    assert [(t, k) for t, k in schedule.R if k < t] == [(4, 1)]


@parametrize_parts(3)
def test_a_move_lowers_the_excess_and_adds_nothing(part):
    """On 300 random problems with random restorations: as many as before or fewer, none new."""
    moves = 0
    for number, problem in part.select(
        enumerate(random_instances(300, (6, 14), seed=97, paging=True))
    ):
        rng, n = make_rng(f"earlier/{number}"), len(problem.graph.nodes)
        partial = PartialSchedule(problem.graph, working_graph=problem.working_graph)
        for t in range(1, n):
            k = rng.randrange(t)
            if problem.may_recompute(k):
                partial.add(Restoration(t, k, RECOMPUTE))
        limit = problem.usable_ram_bytes
        earlier = EarlierRecomputation(
            partial=partial, limit_bytes=limit, fits_limits=lambda _: True
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
            found = make_candidate(problem, partial.schedule()).violations
            limits = ("peak RAM", "time", "energy", "storage")
            assert all(one.startswith(limits) for one in found), found
    assert moves > part.divide(20)


# -- partial schedules ---------------------------------------------------------------------------
def highest(partial, simulation):
    """Return the highest RAM use of every stage as the simulator counts it."""
    found = defaultdict(int)
    for point in simulation.curve:
        found[point.stage] = max(found[point.stage], point.ram_bytes)
    return [found[t] for t in range(len(partial.graph.nodes))]


KINDS = ("none", "storage", "mapped")
"""Graphs without state, with state on storage that has to be read, and on mapped storage."""


def random_case(rng, state, n, **sizes):
    """Return a random graph and its costs."""
    if state == "none":
        graph = random_graph(rng, n, **sizes)
        return graph, random_costs(rng, graph)
    graph = random_step(rng, n, **sizes)
    return graph, state_costs(rng, graph, mapped=state == "mapped")


def random_restorations(rng, problem, chance):
    """Draw homes on storage, then recomputations and page-ins of anything anywhere."""
    graph, last, n = problem.graph, problem.graph.last_stages, len(problem.graph.nodes)
    reads_state = bool(graph.state_tensors)
    again = [
        Restoration(t, k, RECOMPUTE)
        for k, node in enumerate(graph.nodes)
        for t in range(k + 1, last[k] + 1 if reads_state else n)
        if node.recomputable and rng.random() < chance
    ]
    away = [i for i in graph.state_tensors if rng.random() < 0.6]
    unread = {*graph.state_tensors, *graph.replacement_of.values()}.difference(
        () if problem.reads_in_place else away
    )
    pages = [
        Restoration(t, i, PAGE_IN)
        for i, k in enumerate(graph.node_of)
        for t in range(k + 1, (last[k] + 1) if graph.nodes[k].is_state else n)
        if i not in unread and rng.random() < chance
    ]
    homes = [Restoration.at_its_node(graph, i, STORAGE_HOME) for i in away]
    return homes + rng.sample(again + pages, len(again) + len(pages))


def test_restorations_of_the_worked_example():
    """Without restorations, it is checkpoint-all; if `a` is recomputed, stage 2 excludes it.

    Restorations that only serve a removed one are removed with it: whole chains disappear.
    """
    graph = skip_graph()
    partial = PartialSchedule(graph)
    assert partial.schedule() == checkpoint_all(graph) == needed(graph, checkpoint_all(graph))
    assert partial.peaks().max() == checkpoint_all_peak_bytes(graph)
    assert partial.row_bytes.tolist() == list(checkpoint_all_profile(graph))
    assert partial.restorations() == []
    partial = PartialSchedule(skip_graph())
    before = int(partial.row_bytes[2])
    partial.add(Restoration(3, 0, RECOMPUTE))
    assert partial.row_bytes[2] == before - partial.sizes[0]
    assert partial.intervals[0] == []
    assert (3, 0) in partial.schedule().R
    assert (3, 0) not in partial.schedule().S_RAM
    assert partial.is_available(0, 3)
    assert partial.source(0, 3) == Restoration(3, 0, RECOMPUTE)
    partial = PartialSchedule(
        skip_graph(), [Restoration(3, 0, RECOMPUTE), Restoration(3, 1, RECOMPUTE)]
    )
    partial.remove(Restoration(3, 1, RECOMPUTE))
    assert Restoration(3, 0, RECOMPUTE) in partial  # d reads a itself
    partial.remove(Restoration(3, 0, RECOMPUTE))
    assert partial.restorations() == []


def test_useless_restorations_are_those_that_a_schedule_does_not_need():
    """Without useless restorations, the schedule has only what it needs."""
    for number in range(60):
        rng = make_rng(f"useless/{number}")
        graph = random_graph(rng, (4, 10), two_outputs=False, non_recomputable=False)
        problem = Problem(graph, random_costs(rng, graph), ram=1)
        partial = PartialSchedule(graph, random_restorations(rng, problem, 0.2))
        tidy = needed(graph, partial.schedule())
        while useless := [s for s in partial.restorations() if partial.is_useless(s)]:
            partial.drop(useless[0])
        assert partial.schedule() == tidy


def telling_costs(graph):
    """Make costs above 0 for everything, so that whatever is dropped is seen."""
    n, m = len(graph.nodes), len(graph.tensors)
    return Costs.from_arrays(
        graph,
        compute_time_s=[1.0 + k for k in range(n)],
        compute_energy_j=[2.0 + k for k in range(n)],
        page_in=[(1.0 + i, 3.0 + i) for i in range(m)],
        page_out=[(2.0 + i, 4.0 + i) for i in range(m)],
    )


def run(graph, schedule):
    """Simulate with telling costs."""
    return simulate(graph, telling_costs(graph), schedule, deadline_counts="serial")


def check_no_worse(graph, before, after):
    """Check validity, every sum, and the RAM of every step."""
    check_simulations(run(graph, before), run(graph, after))


def check_simulations(old, new):
    """Do that with two simulations."""
    assert old.valid
    assert new.valid, new.violations
    for name in (
        *("energy_j", "time_s", "compute_s", "transfer_s"),
        *("written_bytes", "read_bytes", "aux_used_bytes", "peak_ram_bytes"),
    ):
        assert getattr(new, name) <= getattr(old, name), name
    curve = {(point.stage, point.node): point.ram_bytes for point in old.curve}
    for point in new.curve:
        assert point.ram_bytes <= curve[point.stage, point.node]


def needed(graph, schedule):
    """Return the needs of a schedule."""
    return PartialSchedule.from_schedule(graph, schedule).schedule()


@pytest.mark.parametrize("state", KINDS)
@parametrize_parts(4)
def test_random_schedules_get_no_worse(part, state):
    """Energy, times, writes, storage, and the RAM of each step; homes of state stay."""
    shorter = 0
    for number in part.select(range(800 if state == "none" else 300)):
        rng = make_rng(f"needed/{state}/{number}")
        graph, costs = random_case(rng, state, (1, 8))
        if state == "none":
            costs, schedule = telling_costs(graph), random_schedule(rng, graph)
        else:
            schedule = random_schedule(rng, graph, mapped=state == "mapped")
        if schedule is None:
            continue
        working = Problem(graph, costs, ram=1).working_graph
        lean = PartialSchedule.from_schedule(graph, schedule, working_graph=working).schedule()
        old, new = (
            simulate(graph, costs, each, deadline_counts="serial") for each in (schedule, lean)
        )
        check_simulations(old, new)
        assert lean.resident == schedule.resident
        assert PartialSchedule.from_schedule(graph, lean, working_graph=working).schedule() == lean
        shorter += new.energy_j < old.energy_j
    assert shorter > part.divide(300 if state == "none" else 50)


def test_best_schedules_lose_nothing_that_costs():
    """Where every entry is needed, energy stays; 100 optima of exhaustive search."""
    for problem in random_instances(100, (3, 5), seed=61, minimize="energy"):
        best = optimum(problem)
        if best is not None:
            after = needed(problem.graph, best.schedule)
            check_no_worse(problem.graph, best.schedule, after)
            simulation = simulate(
                problem.graph, problem.costs, after, deadline_counts=problem.deadline_counts
            )
            assert simulation.energy_j == pytest.approx(best.value)


LEAN = Schedule(
    R=((0, 0), (1, 1), (2, 2), (3, 3)),
    S_RAM=((1, 0), (2, 1), (3, 2)),
    S_AUX=((1, 0), (2, 0), (3, 0)),
    M_in=((3, 0),),
    M_out=((0, 0),),
)
"""`a` of the skip graph is paged out at once and in for its last use."""


@pytest.mark.parametrize(
    "junk",
    [
        pytest.param({"S_RAM": ((3, 1),), "R": ((3, 0), (3, 1)), "M_in": ((3, 0),)}, id="R again"),
        pytest.param({"M_out": ((1, 0),)}, id="page-out twice"),
        pytest.param({"M_out": ((1, 1),), "S_AUX": ((2, 1), (3, 1))}, id="page-out for nothing"),
        pytest.param({"M_out": ((3, 3),)}, id="page-out of the last"),
        pytest.param(
            {"M_out": ((1, 1),), "S_AUX": ((2, 1), (3, 1)), "M_in": ((3, 1),)}, id="round trip"
        ),
        pytest.param({"S_RAM": ((3, 1),)}, id="kept for nothing"),
        pytest.param({"R": ((1, 0),)}, id="recomputed at once"),
        pytest.param({"R": ((2, 0),)}, id="recomputed for nothing"),
    ],
)
def test_planted_junk_goes(junk):
    """Useless restorations disappear completely."""
    graph = skip_graph()
    entries = {name: getattr(LEAN, name) + pairs for name, pairs in junk.items()}
    wasteful = replace(LEAN, **entries)
    assert run(graph, wasteful).valid
    lean = needed(graph, wasteful)
    check_no_worse(graph, wasteful, lean)
    if "R" not in junk or (3, 0) not in junk["R"]:
        assert lean == LEAN
    else:  # both ways to have `a` again: one of them is left
        assert len(lean.R) + len(lean.M_in) == 5


def test_a_late_page_out_moves_to_the_first_computation():
    """Kept only to be written later, a tensor need not be kept. The identity stays.

    Tensors on storage stay listed there. Made again for one tensor, a node makes the other too,
    which then need not be kept.
    """
    graph = skip_graph()
    late = replace(LEAN, S_RAM=((1, 0), (2, 0), (2, 1), (3, 2)), S_AUX=((3, 0),), M_out=((2, 0),))
    assert run(graph, late).valid
    assert needed(graph, late) == LEAN
    check_no_worse(graph, late, LEAN)
    identity = GraphIdentity.from_graph(graph)
    assert needed(graph, replace(late, identity=identity)).identity == identity
    graph = skip_graph(on_aux=True)
    schedule = replace(LEAN, M_out=((0, 0),))
    lean = needed(graph, schedule)
    assert (lean.S_AUX, lean.M_out) == (((1, 0), (2, 0), (3, 0)), ())
    check_no_worse(graph, schedule, lean)
    graph = skip_graph(mask=True)
    schedule = Schedule(
        R=((0, 0), (1, 1), (2, 2), (3, 2), (3, 3)),
        S_RAM=((1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 3)),
    )
    lean = needed(graph, schedule)
    assert (3, 2) in lean.R
    assert (3, 3) not in lean.S_RAM
    check_no_worse(graph, schedule, lean)


@pytest.mark.parametrize("state", KINDS)
@parametrize_parts(3)
def test_ram_is_that_of_the_simulator(part, state):
    """Homes, in-place operators and restorations at random, added, removed and undone."""
    for number in part.select(range(150)):
        rng = make_rng(f"partial/{state}/{number}")
        graph, costs = random_case(rng, state, (3, 12), max_bytes=50)
        problem = Problem(graph, costs, ram=1)
        partial = PartialSchedule(graph, working_graph=problem.working_graph)

        def check(partial):
            simulation = simulate(graph, costs, partial.schedule())  # noqa: B023 - called at once
            assert not simulation.violations
            assert partial.peaks().tolist() == highest(partial, simulation)
            assert partial.aux_used_bytes == simulation.aux_used_bytes
            assert partial.peaks().max() == simulation.peak_ram_bytes
            assert partial.fits(simulation.peak_ram_bytes)
            assert not partial.fits(simulation.peak_ram_bytes - 1)

        def state_of(partial):
            rows, peaks = partial.row_bytes.tolist(), partial.peaks().tolist()
            return partial.restorations(), rows, peaks, partial.aux_used_bytes

        assert partial.schedule() == checkpoint_all(graph)
        check(partial)
        restorations = random_restorations(rng, problem, rng.choice((0.05, 0.2, 0.5)))
        for restoration in restorations:
            partial.add(restoration)
        check(partial)
        before, mark = state_of(partial), partial.mark()
        for restoration in rng.sample(restorations, len(restorations) // 2):
            if restoration in partial:
                partial.remove(restoration)
        check(partial)
        again = PartialSchedule(graph, partial.restorations(), working_graph=problem.working_graph)
        assert again.schedule() == partial.schedule()
        check(again)
        assert again.intervals == partial.intervals
        for restoration in rng.sample(restorations, len(restorations) // 3):
            partial.drop(restoration) if restoration in partial else partial.add(restoration)
            if rng.random() < 0.3:  # what is known of some peaks is taken back, too
                partial.peak(rng.randrange(len(graph.nodes)))
        again = PartialSchedule(graph, partial.restorations(), working_graph=problem.working_graph)
        stages = range(len(graph.nodes))
        assert [partial.peak(t) for t in stages] == again.peaks().tolist()
        assert (partial.row_bytes.tolist(), partial.intervals) == (
            again.row_bytes.tolist(),
            again.intervals,
        )
        partial.undo(mark)
        assert state_of(partial) == before


@pytest.mark.parametrize("state", KINDS)
@parametrize_parts(3)
def test_what_is_at_hand_fits_by_the_simulator(part, state):
    """Inputs without a restoration are in RAM; if they are kept, no stage exceeds the limit."""
    kept = 0
    for number in part.select(range(60)):
        rng = make_rng(f"at hand/{state}/{number}")
        graph, costs = random_case(rng, state, (4, 12), max_bytes=50)
        problem = Problem(graph, costs, ram=1)
        partial = PartialSchedule(graph, working_graph=problem.working_graph)
        for restoration in random_restorations(rng, problem, 0.1):
            partial.add(restoration)
        peaks = partial.peaks()
        limit = int(peaks.max()) + rng.choice((0, 10, 30))
        prices = PenalizedObjective(problem).prices(0.0)
        recoveries = Recoveries(Repair(problem, partial, prices, limit))
        for k, node in enumerate(graph.nodes):
            for t in range(k + 1, graph.last_stages[k] + 1):
                if node.recomputable and Restoration(t, k, RECOMPUTE) not in partial:
                    inputs = partial.working_graph.inputs_of[k]
                    missing = [i for i in inputs if not partial.is_available(i, t)]
                    if len(missing) == 1 and recoveries.is_readable(missing[0], t):
                        mark, first = partial.mark(), partial.first_keeping_stage(missing[0], t)
                        partial.add(Restoration(t, k, RECOMPUTE))
                        assert partial.is_available(missing[0], t)
                        assert all(partial.peak(stage) <= limit for stage in range(first, t))
                        partial.undo(mark)
                        kept += 1
                    assert all(recoveries.is_readable(i, t) for i in inputs if i not in missing)
    assert kept


@pytest.mark.parametrize("state", KINDS)
@parametrize_parts(3)
def test_prices_of_recoveries_are_within_their_range(part, state):
    """No way back is cheaper than the least price; with a page-in none is dearer than the most."""
    cheaper = 0
    for number in part.select(range(60)):
        rng = make_rng(f"prices/{state}/{number}")
        graph, costs = random_case(rng, state, (4, 12), max_bytes=50)
        problem = Problem(graph, costs, ram=1)
        partial = PartialSchedule(graph, working_graph=problem.working_graph)
        limit = int(partial.peaks().max() * rng.uniform(0.3, 1.0))
        prices = PenalizedObjective(problem).prices(0.0)
        recoveries = Recoveries(Repair(problem, partial, prices, limit))
        for i, k in enumerate(graph.node_of):
            for t in range(k + 1, len(graph.nodes)):
                least, most = recoveries.price_range(i, t)
                found = recoveries.find_cheapest(i, t, len(graph.nodes), math.inf)
                if found is None:
                    assert most == math.inf
                else:
                    assert least <= found.price <= most
                    cheaper += found.price < most < math.inf
    assert cheaper


@pytest.mark.parametrize("state", KINDS)
def test_what_an_earlier_search_was_not_to_exceed_changes_no_recovery(state):
    """A search below the least price finds nothing; the next one, without limit, the cheapest."""
    found = 0
    for number in range(20):
        rng = make_rng(f"price limits/{state}/{number}")
        graph, costs = random_case(rng, state, (4, 10), max_bytes=50)
        problem = Problem(graph, costs, ram=1)
        partial = PartialSchedule(graph, working_graph=problem.working_graph)
        limit = int(partial.peaks().max() * rng.uniform(0.5, 1.0))
        repair = Repair(problem, partial, PenalizedObjective(problem).prices(0.0), limit)
        n = len(graph.nodes)
        for i, k in enumerate(graph.node_of):
            for t in range(k + 1, n):
                cheapest = Recoveries(repair).find_cheapest(i, t, n, math.inf)
                if cheapest is not None:
                    recoveries = Recoveries(repair)
                    assert recoveries.find_cheapest(i, t, n, cheapest.price) is None
                    assert recoveries.find_cheapest(i, t, n, math.inf) == cheapest
                    found += 1
    assert found


def test_state_that_comes_home_is_no_longer_paged_in():
    """Without its home on storage, state is not paged in; both come back together."""
    for number in range(20):
        graph = random_step(make_rng(f"home/{number}"), (5, 10))
        paged = [
            Restoration(need, i, PAGE_IN) for i in graph.state_tensors for need in graph.users_of[i]
        ]
        homes = [Restoration.at_its_node(graph, i, STORAGE_HOME) for i in graph.state_tensors]
        partial = PartialSchedule(graph, [*homes, *paged])
        before, mark = partial.restorations(), partial.mark()
        for home in homes:
            partial.remove(home)
        assert partial.schedule() == checkpoint_all(graph)
        partial.undo(mark)
        assert partial.restorations() == before
