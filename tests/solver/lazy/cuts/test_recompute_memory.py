"""Recompute-memory cuts: by hand, and against exhaustive search where RAM is scarce."""

from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from kit.instances import seeded
from kit.oracle import optimum
from kit.relaxation import (
    CLOSE,
    activity,
    broken,
    no_rows,
    placed,
    ram_limit,
    random_rows,
    relaxation_of,
)
from kit.rotation import parts
from kit.worked import costs_of, making, unit_problem, written
from poetmodel.backends.protocol import Limits
from poetmodel.backends.registry import backend
from poetmodel.graph import Graph, Tensor, checkpoint_all_peak_bytes, floor
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.model.aggregated import Grouping
from poetmodel.model.events import recomputable_nodes
from poetmodel.problem import Problem
from poetmodel.problem.infeasibility import obstacle
from poetmodel.result import Termination
from poetmodel.solver.lazy import proof, prove
from poetmodel.solver.lazy.cuts import Cut
from poetmodel.solver.lazy.cuts.recompute_memory import (
    RecomputeMemoryOrigin,
    RecomputeMemorySeparator,
)
from poetmodel.solver.lazy.session import Session
from poetmodel.solver.request import Request

BROKEN = 1e-6
"""Least violation of a cut that is asked for."""


restoring = partial(relaxation_of, restoring=True)


def whole(relaxation):
    """Return the least value of a relaxation with its cuts, and where; None where there is none."""
    raw = backend("highs").solve(relaxation.cut_form(), Limits(rel_gap=0.0))
    assert raw.x is not None or raw.infeasible
    return (None if raw.objective is None else raw.objective * relaxation.unit), raw.x


def true_value(problem):
    """Return the least value by exhaustive search, beyond what every schedule pays."""
    best = optimum(problem)
    return None if best is None else best.value - problem.objective.baseline


def separator(relaxation):
    """Return the separator of a relaxation."""
    return RecomputeMemorySeparator(relaxation, 400)


def origin(first, last, output):
    """Return what a cut of node 0 beside tensor 1 is about."""
    return RecomputeMemoryOrigin(
        first_stage=first, last_stage=last, node=0, output=output, tensors=(1,)
    )


def noted(origin):
    """Return a cut of another relaxation, of which only what it is about counts."""
    return Cut.of((), lower=0.0, origin=origin)


def with_cuts_added(relaxation):
    """Return the least value once no answer breaks a cut; the cuts are left in place."""
    while True:
        value, x = whole(relaxation)
        found = [] if x is None else separator(relaxation).separate(x, BROKEN)
        if not found:
            return value
        relaxation.cuts += found


# -- by hand -------------------------------------------------------------------------------------
def crowded_problem(*, workspace=3, tail=False, reads=False):
    """State a problem in which a cheap recomputation has no room beside what stays.

    ====  =====  ===== ========= =============
    node  reads  bytes workspace to make again
    ====  =====  ===== ========= =============
    k            3     3         1 J
    a            5               4 J
    y     (a)    0     3
    x     k      0
    z     a      0
    (w)          0
    ====  =====  ===== ========= =============

    In 10 bytes of RAM not both of `a` and `k` can stay while `y` runs: 5 + 3 + 3. Making `k` again
    for `x` takes 3 + 3 beside the 5 of `a`. So `k` stays and `a` is made again for `z`, 4 J; or, if
    `y` reads `a`, both are made again, 5 J. With 2 bytes of workspace there is room for `k`, 1 J.
    """
    lines = [f"k 3+{workspace}", "a 5", f"y! 0+3{' a' * reads}", "x! 0 k", "z! 0 a"]
    graph = written(*lines, *["w! 0"] * tail)
    prices = [1.0, 4.0] + [1.0] * (len(graph.nodes) - 2)
    costs = costs_of(graph, prices)
    return Problem(graph, costs, ram=10)


def rows_of(problem, *stages):
    """Build the relaxation with the rows of these stages."""
    return restoring(problem, Grouping(len(problem.graph.nodes), frozenset(stages)))


@pytest.mark.parametrize("tail", [False, True])
def test_a_recomputation_finds_no_room_beside_what_stays(*, tail):
    """The row of `y` alone lets `k` be made again; the cut lifts the bound to the optimum.

    In stages 3 and 4: 5 (1 - recomputed a) + 6 recomputed k <= 10. As the row of `y` leaves 7
    bytes to others, 3 recomputed k <= 7 - 5 (1 - recomputed a) says more. If a stage after `z` ends
    the group (`tail`), only that `k` is read before `a` tells that both meet: the first reader says
    until when the recomputation happens. If `k` enters the group, it may be made again later.
    """
    problem = crowded_problem(tail=tail)
    relaxation = rows_of(problem, 2)
    value, x = whole(relaxation)
    assert value == pytest.approx(1.0)
    [cut] = separator(relaxation).separate(x, BROKEN)
    expected = {relaxation.recomputed[1, 1]: 0.5, relaxation.recomputed[1, 0]: -0.3}
    if tail:
        expected[relaxation.kept[0, 0]] = 0.3
    assert dict(zip(cut.space, cut.values, strict=True)) == pytest.approx(expected)
    assert cut.lower == pytest.approx(-0.2)
    assert cut.origin == (origin(3, 5, 0) if tail else origin(3, 4, None))
    assert with_cuts_added(relaxation) == pytest.approx(4.0)
    assert true_value(problem) == pytest.approx(4.0)


def test_without_a_row_before_the_whole_budget_is_the_right_side():
    """A group that a step row's stage precedes: 5 (1 - recomputed a) + 6 recomputed k <= 10."""
    problem = crowded_problem()
    relaxation = restoring(problem, Grouping(5, step_rows=frozenset({(2, 1)})))
    cuts_of = separator(relaxation)
    [cut] = cuts_of.restate(noted(origin(3, 4, None)))
    k, a = (relaxation.recomputed[2, node] for node in (0, 1))
    assert dict(zip(cut.space, cut.values, strict=True)) == pytest.approx({a: 0.5, k: -0.6})
    assert cut.lower == pytest.approx(-0.5)


@pytest.mark.parametrize("tail", [False, True])
def test_there_is_no_cut_where_there_is_room(*, tail):
    """A byte less of workspace, and all fits: 5 + 3 + 2; so it does whatever the point."""
    problem = crowded_problem(workspace=2, tail=tail)
    relaxation = rows_of(problem, 2)
    assert with_cuts_added(relaxation) == pytest.approx(1.0)
    assert relaxation.cuts == []
    everything = np.ones(relaxation.form.n_columns)
    assert separator(relaxation).separate(everything, BROKEN) == []
    assert true_value(problem) == pytest.approx(1.0)


def test_a_free_keep_is_left_out():
    """If `y` reads `a`, its row does not tell whether `a` stays: a schedule may let it go."""
    problem = crowded_problem(reads=True)
    relaxation = rows_of(problem, 2)
    assert with_cuts_added(relaxation) == pytest.approx(1.0)
    assert relaxation.cuts == []
    assert true_value(problem) == pytest.approx(5.0)
    finer = rows_of(problem, 2, 3)  # `a` now crosses the end of `x`, which does not read it
    assert with_cuts_added(finer) == pytest.approx(1.0)  # but it is not known to enter that group


def test_a_tensor_that_is_not_made_again_for_it_may_stay_is_left_out():
    """Between `w`, which reads `i`, and `z` nobody needs `i`, so `w` may as well keep it.

    The relaxation does not offer to make it again in stages 4 and 5. The only schedules do so: `i`
    has no room beside `a` and `k` in stage 4, and `a` none beside the workspace of `y` in stage 5.
    """
    graph = written("a! 5", "k 4", "i 2 a", "w! 0 i", "x! 0 a k", "y! 0+8", "z! 0+8 i")
    problem = unit_problem(graph, ram=10)
    assert true_value(problem) == pytest.approx(2.0)
    relaxation = rows_of(problem, 3, 5)
    assert (1, 2) not in relaxation.recomputed
    value = with_cuts_added(relaxation)
    assert value <= 2.0 + CLOSE


def test_a_cut_is_stated_for_each_group_that_its_group_became():
    """Where the node has a reader, or it is open when it runs; else nothing is said.

    After the row of `x`, stage 3 is a group, of which `a` must be kept on; stages 4 and 5 read no
    `k`, and it is not made again there.
    """
    problem = crowded_problem(tail=True)
    whole = noted(origin(3, 5, 0))
    finer = rows_of(problem, 2, 3)
    [cut] = separator(finer).restate(whole)
    assert cut.origin == origin(3, 3, 0)
    beyond = finer.events.segment(1, 0, 2)
    assert beyond is not None
    assert beyond != finer.events.segment(1, 0, 1)
    assert dict(zip(cut.space, cut.values, strict=True)) == pytest.approx(
        {
            finer.recomputed[1, 1]: 0.5,
            finer.kept[1, beyond]: -0.5,
            finer.recomputed[1, 0]: -0.3,
            finer.kept[0, 0]: 0.3,
        }
    )
    assert cut.lower == pytest.approx(-0.7)
    assert [again.origin for again in separator(rows_of(problem, 2)).restate(whole)] == [
        whole.origin
    ]
    # Without any row nothing is made again.
    assert list(separator(rows_of(problem)).restate(whole)) == []


# -- on random instances -------------------------------------------------------------------------
def cramped_problem(seed, n):
    """Make a problem little above the floor, of large workspaces and nodes of up to two outputs."""
    rng = seeded(seed)
    while True:
        several, density = rng.choice((0, 0, 0.3)), rng.choice((0.2, 0.3, 0.4))
        once, spaces = rng.choice((0.1, 0.4)), rng.choice((0.2, 0.5))
        nodes = []
        tensors = []
        for k in range(rng.randint(*n)):
            names = [f"n{k}", *(f"n{k}.b" for _ in range(rng.random() < several))]
            nodes.append(
                making(
                    f"n{k}",
                    [name for name in tensors if rng.random() < density],
                    [Tensor(name=name, bytes=rng.randint(0, 6)) for name in names],
                    workspace_bytes=rng.randint(1, 8) if rng.random() < spaces else 0,
                    recomputable=rng.random() >= once,
                )
            )
            tensors += names
        graph = Graph(name="cramped", nodes=tuple(nodes))
        low, high = floor(graph).bytes, checkpoint_all_peak_bytes(graph)
        if 0 < low < high:
            break
    ram = rng.randint(low, min(high - 1, low + 2))
    prices = [float(rng.randint(1, 4)) for _ in nodes]
    pages = [(float(rng.randint(1, 5)),) * 2 for _ in tensors] if rng.random() < 0.5 else None
    costs = costs_of(graph, prices, pages=pages)
    aux = rng.randint(1, 8) if pages is not None and rng.random() < 0.3 else None
    return Problem(graph, costs, ram=ram, aux_bytes=aux)


def cramped(numbers, kind, n):
    """Yield cramped problems that are not infeasible at a glance, with their seeds."""
    for number in numbers:
        seed = f"rooms-{kind}/{number}"
        problem = cramped_problem(seed, n)
        if obstacle(problem) is None:
            yield seed, problem


def random_cuts(rng, relaxation, points):
    """Return recompute-memory cuts for random points that keep much and bring back a part of it."""
    cuts_of = separator(relaxation)
    found = []
    again = [*relaxation.recomputed.values(), *relaxation.paged_in.values()]
    for _ in range(points):
        share, some = rng.choice((0.5, 0.8, 1.0)), rng.choice((0.2, 0.4))
        x = np.array([float(rng.random() < share) for _ in range(relaxation.form.n_columns)])
        for column in again:
            x[column] = rng.choice((0.5, 1.0)) * (rng.random() < some)
        cuts = cuts_of.separate(x, BROKEN)
        for cut in cuts:
            assert list(cuts_of.restate(cut)) == [cut]
        found += cuts
    return list({tuple(cut.terms): cut for cut in found}.values())


def restated(relaxation, cuts):
    """Return cuts of a coarser relaxation in the groups of this one."""
    cuts_of = separator(relaxation)
    every = [again for cut in cuts for again in cuts_of.restate(cut)]
    return list({tuple(cut.terms): cut for cut in every}.values())


def by_cuts(problem, rng, seen):
    """Solve a problem by rows of stages, cuts and, where these say nothing, finer groups.

    Cuts of linear answers, of integer ones and of random points are all added.
    """
    relaxation = restoring(problem, no_rows(problem))
    if rng.random() < 0.4:
        rows = random_rows(rng, problem).stage_rows
        relaxation = restoring(problem, Grouping(len(problem.graph.nodes), rows))
    while True:
        value, x = whole(relaxation)
        if x is None:
            return value
        stages, steps = broken(placed(relaxation, x), ram_limit(relaxation, x))
        if not stages and not steps:
            return value
        if not stages:
            linear = backend("highs").solve(relaxation.cut_form().relaxed(), Limits()).x
            thin = separator(relaxation).separate(linear, BROKEN)
            found = separator(relaxation).separate(x, BROKEN)
            more = random_cuts(rng, relaxation, 3)
            relaxation.cuts += [*thin, *found, *more]
            seen.update({"linear": len(thin), "integer": len(found), "random": len(more)})
            seen["by reader"] += sum(cut.origin.output is not None for cut in found)
            if found:
                continue
            seen["parts"] += 1
        grouping = relaxation.grouping
        finer = grouping.add(stages[:1]) if stages else grouping.add(step_rows=steps[:1])
        following = restoring(problem, finer)
        following.cuts = restated(following, relaxation.cuts)
        seen["restated"] += len(following.cuts)
        relaxation = following


def check_optima(numbers, kind, n):
    """Hold solves with recompute-memory cuts against exhaustive search; return what there was."""
    seen = Counter()
    for seed, problem in cramped(numbers, kind, n):
        before = seen.total()
        value = by_cuts(problem, seeded(f"rows of {seed}"), seen)
        if seen.total() > before:
            assert value == pytest.approx(true_value(problem), abs=CLOSE), seed
            seen["compared"] += 1
    return seen


# fmt: off
CROSSED = (
    12, 37, 44, 68, 79, 87, 91, 105, 108, 111, 119, 122, 123, 130, 144, 151, 165, 202, 204, 222,
    227, 233, 238, 240, 243, 254, 260, 268, 271, 288, 327, 343, 361, 397, 410, 418, 423, 441, 462,
    463, 478, 497, 539, 545, 560, 576, 585, 589, 621, 635, 641, 659, 660, 666, 678, 686, 711, 714,
    716, 719, 741, 742, 756, 762, 768, 782, 788, 793, 812, 845, 854, 861, 866, 891, 896, 898,
)
# fmt: on
"""Which of the first 900 cramped problems come to where these cuts are looked for."""
BY_READER = (144, 222)
"""Those with a cut of which a reader says until when the recomputation happens."""


@parts(3)
def test_recompute_memory_cuts_change_no_optimum(part):
    """With all that are found on the way the last relaxation has the optimum of the problem."""
    seen = check_optima(sorted({*BY_READER, *part.of(CROSSED)}), "optimum", (5, 7))
    assert seen["compared"] > part.share(40), seen
    assert min(seen[way] for way in ("integer", "restated", "parts")) > part.share(9), seen
    assert min(seen["linear"], seen["by reader"]) > 1, seen
    assert seen["random"] > part.share(25)


@parts(24)
def test_recompute_memory_cuts_change_no_optimum_of_more(part):
    """The same on 3,000 problems."""
    seen = check_optima(part.of(range(3000)), "optima", (5, 7))
    assert part.number == 0 or min(seen["random"], seen["restated"]) > 0, seen


def is_tidy(problem, schedule):
    """Return whether a schedule brings back only what the argument for the cuts says it may.

    Nodes whose recomputation is offered; pages in stages that read them.
    """
    graph, again = problem.graph, recomputable_nodes(problem)
    computed = set(schedule.R)
    return all(again[k] for t, k in computed if k < t) and all(
        any((t, j) in computed for j in graph.users_of[i]) for t, i in schedule.M_in
    )


def best_schedules(rng, problem, count):
    """Yield tidy schedules of a problem, best for random prices."""
    graph = problem.graph
    for _ in range(count):
        prices = [rng.uniform(0.1, 1.0) for _ in graph.nodes]
        pages = [(rng.uniform(0.1, 1.0),) * 2 for _ in graph.tensors] if problem.can_page else None
        costs = costs_of(graph, prices, pages=pages)
        best = optimum(Problem(graph, costs, ram=problem.ram, aux_bytes=problem.aux_bytes))
        if best is not None:
            schedule = PartialSchedule.of(graph, best.schedule).schedule()
            if is_tidy(problem, schedule):
                yield schedule


@pytest.mark.parametrize(
    ("count", "kind", "compared", "in_finer", "tight"),
    [
        pytest.param(200, "points", 200, 100, 10, marks=pytest.mark.slow),
        pytest.param(600, "more", 600, 0, 0, marks=pytest.mark.seeds),
    ],
)
def test_schedules_keep_recompute_memory_cuts(count, kind, compared, in_finer, tight):
    """The points of the best schedules for random prices break none, in finer groups neither."""
    n = (5, 7)
    seen = Counter()
    for seed, problem in cramped(range(count), kind, n):
        rng = seeded(f"points of {seed}")
        relaxation = restoring(problem, random_rows(rng, problem))
        cuts = random_cuts(rng, relaxation, 8)
        if not cuts:
            continue
        more = random_rows(rng, problem)
        rows = (tuple(more.stage_rows), tuple(more.step_rows))
        finer = restoring(problem, relaxation.grouping.add(*rows))
        again = restated(finer, cuts)
        for schedule in best_schedules(rng, problem, 4):
            for one, stated in ((relaxation, cuts), (finer, again)):
                x = one.start(schedule)
                if x is None:
                    continue
                for cut in stated:
                    above = activity(cut, x)
                    assert above >= -CLOSE, (seed, cut)
                    seen["tight"] += above <= CLOSE
                seen["compared"] += len(stated)
                seen["finer"] += len(stated) * (one is finer)
    assert seen["compared"] > compared, seen
    assert seen["finer"] > in_finer, seen
    assert seen["tight"] > tight, seen


def test_the_worst_cuts_come_first_and_stay_when_rows_are_added():
    """Of too many the most violated; each once, tight or not, where interval cuts may go again."""
    every = []
    worst, point = rows_of(crowded_problem()), np.zeros(0)
    for seed, problem in cramped(range(60), "most", (6, 8)):
        rng = seeded(f"rows of {seed}")
        relaxation = restoring(problem, random_rows(rng, problem))
        x = np.array([float(rng.random() < 0.7) for _ in range(relaxation.form.n_columns)])
        for column in relaxation.recomputed.values():
            x[column] = float(rng.random() < 0.3)
        found = separator(relaxation).separate(x, BROKEN)
        if len(found) > len(every):
            every, worst, point = found, relaxation, x
    assert len(every) > 1
    assert RecomputeMemorySeparator(worst, 1).separate(point, BROKEN) == every[:1]
    seen = 0
    for seed, problem in cramped(range(60), "stay", (6, 8)):
        relaxation = restoring(problem, random_rows(seeded(f"rows of {seed}"), problem))
        relaxation.separators = {"recompute_memory": separator(relaxation)}
        cuts = random_cuts(seeded(seed), relaxation, 20)
        other = Cut.of([(1.0, 0)], lower=0.0, name="interval")
        relaxation.cuts = [*cuts, other]
        relaxation.lasting = cuts[:1]
        relaxation.make_lasting()
        assert relaxation.cuts == [other]
        assert Counter(relaxation.lasting) == Counter(cuts)
        seen += len(cuts) > 1
    assert seen > 5


# -- in the driver -------------------------------------------------------------------------------
@pytest.fixture
def sessions(monkeypatch):
    """Return the sessions of solves to come."""
    made = []
    start = Session

    def noted(*given, **named):
        made.append(start(*given, **named))
        return made[-1]

    monkeypatch.setattr(proof, "Session", noted)
    return made


def by_driver(problem, threads=1):
    """Return the least value beyond what every schedule pays; None where there is none."""
    request = Request(gap=0.0, time_limit_s=300.0, threads=threads)
    outcome = prove(problem, request, start=None, first=no_rows(problem))
    assert outcome.termination == Termination.PROVED
    if outcome.infeasible:
        return None
    assert outcome.bound <= outcome.candidate.value + CLOSE
    return outcome.candidate.value


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize(("reads", "value"), [(False, 4.0), (True, 5.0)])
def test_a_solve_turns_to_recompute_memory_cuts(sessions, threads, value, *, tail, reads):
    """As soon as an answer breaks steps before their stage's own and nothing else."""
    assert by_driver(crowded_problem(tail=tail, reads=reads), threads) == pytest.approx(value)
    assert [session.restoring for session in sessions] == [True]


def test_where_ram_is_minimized_there_are_no_recompute_memory_cuts(sessions):
    """Their right sides are the budget; the peak is 10 B or 11 B all the same."""
    problem = replace(crowded_problem(), minimize="ram")
    assert by_driver(problem) == pytest.approx(optimum(problem).value)
    assert [session.restoring for session in sessions] == [False]


@parts(16)
def test_solves_with_recompute_memory_cuts_are_exact(part, sessions):
    """On the cramped problems that need them."""
    for seed, problem in cramped(part.of(range(800)), "driver", (5, 7)):
        value = by_driver(problem)
        if sessions[-1].restoring:
            assert value == pytest.approx(true_value(problem), abs=CLOSE), seed
    assert any(session.restoring for session in sessions) or part.number > 0
