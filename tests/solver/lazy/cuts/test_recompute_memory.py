"""Recompute-memory cuts: by hand, and against exhaustive search where RAM is scarce."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np
import pytest

from kit.instances import seeded
from kit.oracle import optimum
from kit.relaxation import CLOSE, broken, no_rows, placed, ram_limit, random_rows
from kit.rotation import Part, parts
from poetmodel.backends.protocol import Limits
from poetmodel.backends.registry import backend
from poetmodel.device import Costs
from poetmodel.graph import Graph, Node, Tensor, checkpoint_all_peak_bytes, floor, operation
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.model.aggregated import Grouping
from poetmodel.model.events import recomputable_nodes
from poetmodel.problem import Problem
from poetmodel.problem.infeasibility import obstacle
from poetmodel.result import Termination
from poetmodel.solver.lazy import solve, solve_lazily
from poetmodel.solver.lazy.cuts import Cut
from poetmodel.solver.lazy.cuts.recompute_memory import (
    RecomputeMemoryOrigin,
    RecomputeMemorySeparator,
)
from poetmodel.solver.lazy.relaxation import Relaxation
from poetmodel.solver.lazy.session import Session
from poetmodel.solver.request import Request

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from poetmodel.schedule import Schedule

BROKEN = 1e-6
"""Least violation of a cut that is asked for."""


def restoring(problem: Problem, grouping: Grouping) -> Relaxation:
    """Build a relaxation that recompute-memory cuts are valid for."""
    return Relaxation.build(problem, grouping, recomputable_nodes(problem), restoring=True)


def whole(relaxation: Relaxation) -> tuple[float | None, NDArray[np.float64] | None]:
    """Return the least value of a relaxation with its cuts, and where; None where there is none."""
    raw = backend("highs").solve(relaxation.cut_form(), Limits(rel_gap=0.0))
    assert raw.x is not None or raw.infeasible
    return (None if raw.objective is None else raw.objective * relaxation.unit), raw.x


def true_value(problem: Problem) -> float | None:
    """Return the least value by exhaustive search, beyond what every schedule pays."""
    best = optimum(problem)
    return None if best is None else best.value - problem.objective.baseline


def separator(relaxation: Relaxation) -> RecomputeMemorySeparator:
    """Return the separator of a relaxation."""
    return RecomputeMemorySeparator(relaxation, 400)


def origin(first: int, last: int, output: int | None) -> RecomputeMemoryOrigin:
    """Return what a cut of node 0 beside tensor 1 is about."""
    return RecomputeMemoryOrigin(
        first_stage=first, last_stage=last, node=0, output=output, tensors=(1,)
    )


def noted(origin: RecomputeMemoryOrigin) -> Cut:
    """Return a cut of another relaxation, of which only what it is about counts."""
    return Cut.of((), lower=0.0, origin=origin)


def origin_of(cut: Cut) -> RecomputeMemoryOrigin:
    """Return what a recompute-memory cut is about."""
    assert isinstance(cut.origin, RecomputeMemoryOrigin)
    return cut.origin


def activity(cut: Cut, x: NDArray[np.float64]) -> float:
    """Return by how much a point is above a cut's right-hand side; negative where it breaks it."""
    return float(sum(value * x[column] for value, column in cut.terms)) - cut.lower


def with_cuts_added(relaxation: Relaxation) -> float | None:
    """Return the least value once no answer breaks a cut; the cuts are left in place."""
    while True:
        value, x = whole(relaxation)
        found = [] if x is None else separator(relaxation).separate(x, BROKEN)
        if not found:
            return value
        relaxation.cuts += found


def even(graph: Graph, ram: int) -> Problem:
    """State a problem without paging in which every computation costs 1."""
    ones = [1.0] * len(graph.nodes)
    costs = Costs.from_arrays(graph, compute_time_s=ones, compute_energy_j=ones)
    return Problem(graph, costs, ram=ram)


# -- by hand -------------------------------------------------------------------------------------


def crowded_problem(*, workspace: int = 3, tail: bool = False, reads: bool = False) -> Problem:
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
    nodes = (
        operation("k", output_bytes=3, workspace_bytes=workspace),
        operation("a", output_bytes=5),
        operation(
            "y",
            output_bytes=0,
            inputs=("a",) if reads else (),
            workspace_bytes=3,
            recomputable=False,
        ),
        operation("x", output_bytes=0, inputs=("k",), recomputable=False),
        operation("z", output_bytes=0, inputs=("a",), recomputable=False),
        operation("w", output_bytes=0, recomputable=False),
    )
    graph = Graph(name="crowded", nodes=nodes if tail else nodes[:-1])
    prices = [1.0, 4.0] + [1.0] * (len(graph.nodes) - 2)
    costs = Costs.from_arrays(graph, compute_time_s=prices, compute_energy_j=prices)
    return Problem(graph, costs, ram=10)


def rows_of(problem: Problem, *stages: int) -> Relaxation:
    """Build the relaxation with the rows of these stages."""
    return restoring(problem, Grouping(len(problem.graph.nodes), frozenset(stages)))


def test_a_recomputation_finds_no_room_beside_what_the_last_stage_reads() -> None:
    """The row of `y` alone lets `k` be made again; the cut lifts the bound to the optimum.

    In stages 3 and 4: 5 (1 - recomputed a) + 6 recomputed k <= 10. As the row of `y` leaves 7
    bytes to others, 3 recomputed k <= 7 - 5 (1 - recomputed a) says more.
    """
    problem = crowded_problem()
    relaxation = rows_of(problem, 2)
    value, x = whole(relaxation)
    assert value == pytest.approx(1.0)
    assert x is not None
    [cut] = separator(relaxation).separate(x, BROKEN)
    k, a = relaxation.recomputed[1, 0], relaxation.recomputed[1, 1]
    assert dict(zip(cut.space, cut.values, strict=True)) == pytest.approx({a: 0.5, k: -0.3})
    assert cut.lower == pytest.approx(-0.2)
    assert cut.origin == RecomputeMemoryOrigin(
        first_stage=3, last_stage=4, node=0, output=None, tensors=(1,)
    )
    assert with_cuts_added(relaxation) == pytest.approx(4.0)
    assert true_value(problem) == pytest.approx(4.0)


def test_the_first_reader_says_until_when_a_recomputation_happens() -> None:
    """If a stage after `z` ends the group, only that `k` is read before `a` tells that both meet.

    If `k` enters the group, it may be made again later, hence its term.
    """
    problem = crowded_problem(tail=True)
    relaxation = rows_of(problem, 2)
    value, x = whole(relaxation)
    assert value == pytest.approx(1.0)
    assert x is not None
    [cut] = separator(relaxation).separate(x, BROKEN)
    k, a = relaxation.recomputed[1, 0], relaxation.recomputed[1, 1]
    assert dict(zip(cut.space, cut.values, strict=True)) == pytest.approx(
        {a: 0.5, k: -0.3, relaxation.kept[0, 0]: 0.3}
    )
    assert cut.lower == pytest.approx(-0.2)
    assert cut.origin == RecomputeMemoryOrigin(
        first_stage=3, last_stage=5, node=0, output=0, tensors=(1,)
    )
    assert with_cuts_added(relaxation) == pytest.approx(4.0)
    assert true_value(problem) == pytest.approx(4.0)


def test_without_a_row_before_the_whole_budget_is_the_right_side() -> None:
    """A group that a step row's stage precedes: 5 (1 - recomputed a) + 6 recomputed k <= 10."""
    problem = crowded_problem()
    relaxation = restoring(problem, Grouping(5, step_rows=frozenset({(2, 1)})))
    cuts_of = separator(relaxation)
    [cut] = cuts_of.restate(noted(origin(3, 4, None)))
    k, a = (relaxation.recomputed[2, node] for node in (0, 1))
    assert dict(zip(cut.space, cut.values, strict=True)) == pytest.approx({a: 0.5, k: -0.6})
    assert cut.lower == pytest.approx(-0.5)


@pytest.mark.parametrize("tail", [False, True])
def test_there_is_no_cut_where_there_is_room(*, tail: bool) -> None:
    """A byte less of workspace, and all fits: 5 + 3 + 2; so it does whatever the point."""
    problem = crowded_problem(workspace=2, tail=tail)
    relaxation = rows_of(problem, 2)
    assert with_cuts_added(relaxation) == pytest.approx(1.0)
    assert relaxation.cuts == []
    everything = np.ones(relaxation.form.n_columns)
    assert separator(relaxation).separate(everything, BROKEN) == []
    assert true_value(problem) == pytest.approx(1.0)


def test_a_free_keep_is_left_out() -> None:
    """If `y` reads `a`, its row does not tell whether `a` stays: a schedule may let it go."""
    problem = crowded_problem(reads=True)
    relaxation = rows_of(problem, 2)
    assert with_cuts_added(relaxation) == pytest.approx(1.0)
    assert relaxation.cuts == []
    assert true_value(problem) == pytest.approx(5.0)
    finer = rows_of(problem, 2, 3)  # `a` now crosses the end of `x`, which does not read it
    assert with_cuts_added(finer) == pytest.approx(1.0)  # but it is not known to enter that group


def test_a_tensor_that_is_not_made_again_for_it_may_stay_is_left_out() -> None:
    """Between `w`, which reads `i`, and `z` nobody needs `i`, so `w` may as well keep it.

    The relaxation does not offer to make it again in stages 4 and 5. The only schedules do so: `i`
    has no room beside `a` and `k` in stage 4, and `a` none beside the workspace of `y` in stage 5.
    """
    graph = Graph(
        name="late",
        nodes=(
            operation("a", output_bytes=5, recomputable=False),
            operation("k", output_bytes=4),
            operation("i", output_bytes=2, inputs=("a",)),
            operation("w", output_bytes=0, inputs=("i",), recomputable=False),
            operation("x", output_bytes=0, inputs=("a", "k"), recomputable=False),
            operation("y", output_bytes=0, workspace_bytes=8, recomputable=False),
            operation("z", output_bytes=0, inputs=("i",), workspace_bytes=8, recomputable=False),
        ),
    )
    problem = even(graph, ram=10)
    assert true_value(problem) == pytest.approx(2.0)
    relaxation = rows_of(problem, 3, 5)
    assert (1, 2) not in relaxation.recomputed
    value = with_cuts_added(relaxation)
    assert value is not None
    assert value <= 2.0 + CLOSE


def test_a_cut_is_stated_for_each_group_that_its_group_became() -> None:
    """Where the node has a reader, or it is open when it runs; else nothing is said.

    After the row of `x`, stage 3 is a group, of which `a` must be kept on; stages 4 and 5 read no
    `k`, and it is not made again there.
    """
    problem = crowded_problem(tail=True)
    whole = noted(origin(3, 5, 0))
    finer = rows_of(problem, 2, 3)
    [cut] = separator(finer).restate(whole)
    assert cut.origin == RecomputeMemoryOrigin(
        first_stage=3, last_stage=3, node=0, output=0, tensors=(1,)
    )
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


def cramped_problem(seed: str, n: tuple[int, int]) -> Problem:
    """Make a problem little above the floor, of large workspaces and nodes of up to two outputs."""
    rng = seeded(seed)
    while True:
        several, density = rng.choice((0, 0, 0.3)), rng.choice((0.2, 0.3, 0.4))
        once, spaces = rng.choice((0.1, 0.4)), rng.choice((0.2, 0.5))
        nodes: list[Node] = []
        tensors: list[str] = []
        for k in range(rng.randint(*n)):
            names = [f"n{k}", *(f"n{k}.b" for _ in range(rng.random() < several))]
            nodes.append(
                Node(
                    name=f"n{k}",
                    op="op",
                    phase="forward",
                    inputs=tuple(name for name in tensors if rng.random() < density),
                    outputs=tuple(Tensor(name=name, bytes=rng.randint(0, 6)) for name in names),
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
    costs = Costs.from_arrays(
        graph, compute_time_s=prices, compute_energy_j=prices, page_in=pages, page_out=pages
    )
    aux = rng.randint(1, 8) if pages is not None and rng.random() < 0.3 else None
    return Problem(graph, costs, ram=ram, aux_bytes=aux)


def cramped(numbers: Iterable[int], kind: str, n: tuple[int, int]) -> Iterator[tuple[str, Problem]]:
    """Yield cramped problems that are not infeasible at a glance, with their seeds."""
    for number in numbers:
        seed = f"rooms-{kind}/{number}"
        problem = cramped_problem(seed, n)
        if obstacle(problem) is None:
            yield seed, problem


def random_cuts(rng: random.Random, relaxation: Relaxation, points: int) -> list[Cut]:
    """Return recompute-memory cuts for random points that keep much and bring back a part of it."""
    cuts_of = separator(relaxation)
    found: list[Cut] = []
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


def restated(relaxation: Relaxation, cuts: list[Cut]) -> list[Cut]:
    """Return cuts of a coarser relaxation in the groups of this one."""
    cuts_of = separator(relaxation)
    every = [again for cut in cuts for again in cuts_of.restate(cut)]
    return list({tuple(cut.terms): cut for cut in every}.values())


def by_cuts(problem: Problem, rng: random.Random, seen: Counter[str]) -> float | None:
    """Solve a problem by rows of stages, cuts and, where these say nothing, finer groups.

    Cuts of linear answers, of integer ones and of random points are all added.
    """
    relaxation = restoring(problem, no_rows(problem))
    if rng.random() < 0.4:
        relaxation = restoring(problem, Grouping(len(problem.graph.nodes), some_rows(rng, problem)))
    while True:
        value, x = whole(relaxation)
        if x is None:
            return value
        stages, steps = broken(placed(relaxation, x), ram_limit(relaxation, x))
        if not stages and not steps:
            return value
        if not stages:
            linear = backend("highs").solve(relaxation.cut_form().relaxed(), Limits()).x
            assert linear is not None
            thin = separator(relaxation).separate(linear, BROKEN)
            found = separator(relaxation).separate(x, BROKEN)
            more = random_cuts(rng, relaxation, 3)
            relaxation.cuts += [*thin, *found, *more]
            seen.update({"linear": len(thin), "integer": len(found), "random": len(more)})
            seen["by reader"] += sum(origin_of(cut).output is not None for cut in found)
            if found:
                continue
            seen["parts"] += 1
        grouping = relaxation.grouping
        finer = grouping.add(stages[:1]) if stages else grouping.add(step_rows=steps[:1])
        following = restoring(problem, finer)
        following.cuts = restated(following, relaxation.cuts)
        seen["restated"] += len(following.cuts)
        relaxation = following


def some_rows(rng: random.Random, problem: Problem) -> frozenset[int]:
    """Return random stages."""
    rows: frozenset[int] = random_rows(rng, problem).stage_rows
    return rows


def check_optima(numbers: Iterable[int], kind: str, n: tuple[int, int]) -> Counter[str]:
    """Hold solves with recompute-memory cuts against exhaustive search; return what there was."""
    seen: Counter[str] = Counter()
    for seed, problem in cramped(numbers, kind, n):
        before = seen.total()
        value = by_cuts(problem, seeded(f"rows of {seed}"), seen)
        if seen.total() > before:
            assert value == pytest.approx(true_value(problem), abs=CLOSE), seed
            seen["compared"] += 1
    return seen


# fmt: off
CROSSED: Final = (
    12, 37, 44, 68, 79, 87, 91, 105, 108, 111, 119, 122, 123, 130, 144, 151, 165, 202, 204, 222,
    227, 233, 238, 240, 243, 254, 260, 268, 271, 288, 327, 343, 361, 397, 410, 418, 423, 441, 462,
    463, 478, 497, 539, 545, 560, 576, 585, 589, 621, 635, 641, 659, 660, 666, 678, 686, 711, 714,
    716, 719, 741, 742, 756, 762, 768, 782, 788, 793, 812, 845, 854, 861, 866, 891, 896, 898,
)
# fmt: on
"""Which of the first 900 cramped problems come to where these cuts are looked for."""
BY_READER: Final = (144, 222)
"""Those with a cut of which a reader says until when the recomputation happens."""


@parts(3)
def test_recompute_memory_cuts_change_no_optimum(part: Part) -> None:
    """With all that are found on the way the last relaxation has the optimum of the problem."""
    seen = check_optima(sorted({*BY_READER, *part.of(CROSSED)}), "optimum", (5, 7))
    assert seen["compared"] > part.share(40), seen
    assert min(seen[way] for way in ("integer", "restated", "parts")) > part.share(9), seen
    assert min(seen["linear"], seen["by reader"]) > 1, seen
    assert seen["random"] > part.share(25)


@pytest.mark.seeds
def test_recompute_memory_cuts_change_no_optimum_of_more() -> None:
    """The same on 3,000 problems."""
    seen = check_optima(range(3000), "optima", (5, 7))
    assert min(seen["integer"], seen["random"], seen["restated"]) > 50, seen


def is_tidy(problem: Problem, schedule: Schedule) -> bool:
    """Return whether a schedule brings back only what the argument for the cuts says it may.

    Nodes whose recomputation is offered; pages in stages that read them.
    """
    graph, again = problem.graph, recomputable_nodes(problem)
    computed = set(schedule.R)
    return all(again[k] for t, k in computed if k < t) and all(
        any((t, j) in computed for j in graph.users_of[i]) for t, i in schedule.M_in
    )


def best_schedules(rng: random.Random, problem: Problem, count: int) -> Iterator[Schedule]:
    """Yield tidy schedules of a problem, best for random prices."""
    graph = problem.graph
    for _ in range(count):
        prices = [rng.uniform(0.1, 1.0) for _ in graph.nodes]
        pages = [(rng.uniform(0.1, 1.0),) * 2 for _ in graph.tensors] if problem.can_page else None
        costs = Costs.from_arrays(
            graph, compute_time_s=prices, compute_energy_j=prices, page_in=pages, page_out=pages
        )
        best = optimum(Problem(graph, costs, ram=problem.ram, aux_bytes=problem.aux_bytes))
        if best is not None:
            schedule = PartialSchedule.of(graph, best.schedule).schedule()
            if is_tidy(problem, schedule):
                yield schedule


def check_points(count: int, kind: str, n: tuple[int, int]) -> Counter[str]:
    """Hold cuts, in finer groups too, against points of schedules; return what there was."""
    seen: Counter[str] = Counter()
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
    return seen


@pytest.mark.slow
def test_schedules_keep_recompute_memory_cuts() -> None:
    """The points of the best schedules for random prices break none, in finer groups neither."""
    seen = check_points(200, "points", (5, 7))
    assert seen["compared"] > 200, seen
    assert seen["finer"] > 100, seen
    assert seen["tight"] > 10, seen


@pytest.mark.seeds
def test_more_schedules_keep_recompute_memory_cuts() -> None:
    """The same on 600 problems."""
    assert check_points(600, "more", (5, 7))["compared"] > 600


def test_no_more_cuts_come_at_once_than_may_be() -> None:
    """Of too many the most violated ones are taken."""
    every: list[Cut] = []
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


def test_recompute_memory_cuts_stay_when_rows_are_added() -> None:
    """Each once, tight or not; interval cuts have the relations behind them and may go."""
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
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """Return the sessions of solves to come."""
    made: list[Session] = []
    start: Callable[..., Session] = Session

    def noted(*given: object, **named: object) -> Session:
        made.append(start(*given, **named))
        return made[-1]

    monkeypatch.setattr(solve, "Session", noted)
    return made


def by_driver(problem: Problem, threads: int = 1) -> float | None:
    """Return the least value beyond what every schedule pays; None where there is none."""
    request = Request(gap=0.0, time_limit_s=300.0, threads=threads)
    outcome = solve_lazily(problem, request, start=None, first=no_rows(problem))
    assert outcome.termination == Termination.PROVED
    if outcome.infeasible:
        return None
    assert outcome.candidate is not None
    assert outcome.bound is not None
    assert outcome.bound <= outcome.candidate.value + CLOSE
    return outcome.candidate.value


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize(("reads", "value"), [(False, 4.0), (True, 5.0)])
def test_a_solve_turns_to_recompute_memory_cuts(
    sessions: list[Session], threads: int, value: float, *, tail: bool, reads: bool
) -> None:
    """As soon as an answer breaks steps before their stage's own and nothing else."""
    assert by_driver(crowded_problem(tail=tail, reads=reads), threads) == pytest.approx(value)
    assert [session.restoring for session in sessions] == [True]


def test_where_ram_is_minimized_there_are_no_recompute_memory_cuts(sessions: list[Session]) -> None:
    """Their right sides are the budget; the peak is 10 B or 11 B all the same."""
    problem = replace(crowded_problem(), minimize="ram")
    best = optimum(problem)
    assert best is not None
    request = Request(gap=0.0, time_limit_s=300.0)
    outcome = solve_lazily(problem, request, start=None, first=no_rows(problem))
    assert outcome.candidate is not None
    assert outcome.candidate.value == pytest.approx(best.value)
    assert [session.restoring for session in sessions] == [False]


def check_driver(count: int, kind: str, sessions: list[Session]) -> int:
    """Hold the driver against exhaustive search; return how often it turned to these cuts."""
    for seed, problem in cramped(range(count), kind, (5, 7)):
        value = by_driver(problem)
        if sessions[-1].restoring:
            assert value == pytest.approx(true_value(problem), abs=CLOSE), seed
    return sum(session.restoring for session in sessions)


def test_solves_with_recompute_memory_cuts_are_exact(sessions: list[Session]) -> None:
    """On the cramped problems that need them."""
    assert check_driver(40, "driver", sessions) > 0


@pytest.mark.seeds
def test_more_solves_with_recompute_memory_cuts_are_exact(sessions: list[Session]) -> None:
    """On those of 800, the quick ones among them."""
    assert check_driver(800, "driver", sessions) > 15
