"""Interval cuts: they cut off the point they are made for, and no schedule, in finer groups too."""

from collections import Counter
from dataclasses import replace
from importlib import import_module
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pytest

from kit.instances import make_rng, random_schedule, scarce_problem
from kit.oracle import optimum
from kit.own_rows import add_random_rows
from kit.relaxation import (
    SOLVER_TOLERANCE,
    compute_excess,
    find_minimum,
    make_relaxation,
    random_rows,
    solve_relaxation,
    whole_points,
)
from kit.rotation import parametrize_parts
from kit.worked import comb_graph, even_costs, parse_graph, unit_problem
from poetmodel.backends.protocol import Limits
from poetmodel.backends.registry import backend
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.model.grouping import Grouping
from poetmodel.problem import Problem, Quantity
from poetmodel.problem.infeasibility import infeasibility_reason
from poetmodel.solver.lazy.cuts.interval import IntervalOrigin, IntervalSeparator
from poetmodel.solver.lazy.cuts.rounding import RoundingSeparator, largest_sum
from poetmodel.solver.policy import CUT_FAMILIES, Policy

VIOLATED = 1e-3
"""Least violation that is looked for."""


def separate(relaxation, x, most=400):
    """Return the interval cuts that a point violates."""
    return IntervalSeparator(relaxation, most).separate(x, VIOLATED)


def origin_of(first, last, reader, chain, *, ends):
    """Return the origin of a cut of an interval of stages before a reader's first computation."""
    return IntervalOrigin(
        first_stage=first,
        last_stage=last,
        reader=reader,
        is_for_recomputation=False,
        chain=chain,
        ends_in_recomputation=ends,
    )


def restate(relaxation, origin):
    """State a cut in the columns of a relaxation."""
    return next(IntervalSeparator(relaxation, 1).state_cut(origin), None)


# -- by hand -------------------------------------------------------------------------------------
def spread_problem():
    """State a problem whose linear relaxation recomputes one node thinly in several groups.

    `a` (1 B) is read by `k` (4 B), and that by the last three nodes. Between them lie stages that
    fill the RAM.
    """
    graph = parse_graph("a! 1", "k 4 a", "x! 4", "y! 4 x", "u! 0 k", "z! 4 y", "v! 0 k z")
    return unit_problem(graph, ram=9)


GROUPS = Grouping(7, frozenset({1, 2, 3, 5}))
"""Stages 0-1, 2, 3, 4-5 and 6 of the spread problem: groups 0 to 4."""


def point_of(relaxation, values):
    """Return a point with these entries, else zeros."""
    x = np.zeros(relaxation.form.n_columns)
    for name, entries in values.items():
        columns = getattr(relaxation, name)
        for index, value in entries.items():
            x[columns[index]] = value
    return x


def test_a_recomputation_spread_over_groups_is_cut_off():
    """A half of `k` each in groups 2 and 3, for its reader in stage 4, of half of `a`.

    The node's recomputations in groups 2 and 3 sum to 1, but only half of `a` is available:
    half of `a` and nothing of `k` enter group 2.
    """
    problem = spread_problem()
    relaxation = make_relaxation(problem, GROUPS)
    halves = {
        "kept": {(0, a): 0.5 for i, a in relaxation.kept if i == 0},
        "recomputed": {(2, 1): 0.5, (3, 1): 0.5},
    }
    x = point_of(relaxation, halves)
    found = separate(relaxation, x)
    wanted = [cut for cut in found if cut.origin.chain == ((1, False), (0, False))]
    assert wanted
    for cut in wanted:
        assert not cut.origin.ends_in_recomputation
        assert compute_excess(cut, x) == pytest.approx(-0.5)
    # By hand, for the interval of groups 2 and 3 and the reader `u` of stage 4: k enters group 2,
    # or a does.
    origin = origin_of(3, 4, 4, ((1, False), (0, False)), ends=False)
    cut = restate(relaxation, origin)
    assert cut.lower == 1.0
    enters = {(i, relaxation.events.keep_index(i, 0, 2)) for i in (0, 1)}
    assert dict(zip(cut.space, cut.values, strict=True)) == {
        relaxation.kept[index]: 1.0 for index in enters
    }


def test_a_cut_is_stated_again_in_finer_groups_unless_it_says_nothing():
    """An interval keeps its stages, in other columns; cuts exclude no 0/1 point."""
    problem = spread_problem()
    relaxation = make_relaxation(problem, GROUPS)
    assert separate(relaxation, solve_relaxation(relaxation).x) == []
    coarse = make_relaxation(problem, Grouping(7, frozenset({1, 2, 5})))
    origin = origin_of(3, 6, 6, ((1, False),), ends=True)
    before = restate(coarse, origin)
    again = {coarse.recomputed[g, 1] for g in (2, 3)}
    assert again < set(before.space)
    fine = make_relaxation(problem, GROUPS)
    after = restate(fine, origin)
    assert after.origin == before.origin == origin
    assert {fine.recomputed[g, 1] for g in (2, 3, 4)} < set(after.space)
    origin = origin_of(0, 4, 4, ((1, False),), ends=True)
    assert restate(relaxation, origin) is None
    # Row 4 in place of row 3 is of a stage that reads `k`, which is surely there afterwards.
    sure = make_relaxation(problem, Grouping(7, frozenset({4})))
    late = replace(origin, first_stage=5, last_stage=6, reader=6)
    assert restate(sure, late) is None
    # A recomputation that the finer grouping has no room for needs nothing.
    assert restate(sure, replace(late, is_for_recomputation=True, reader=3)) is None


# -- on random instances -------------------------------------------------------------------------
class Separated(NamedTuple):
    """A relaxation, and cuts with the fractional point that each was made for."""

    seed: str
    relaxation: Any
    cuts: Any


def separated(numbers, kind, n, *, own=False):
    """Yield random relaxations with cuts for random points; with `own` constraints or not.

    No row need hold at such a point: a cut is valid for a grouping, for any point.
    """
    for number in numbers:
        seed = f"cuts-{kind}/{number}"
        problem = scarce_problem(seed, n)
        if own:
            rng = make_rng(f"own constraints of {seed}")
            choices = {"recompute": problem.recompute, "paging": problem.can_page}
            schedule = random_schedule(rng, problem.graph, **choices)
            problem = add_random_rows(rng, problem, schedule)
        if infeasibility_reason(problem) is not None:
            continue
        rng = make_rng(f"rows of {seed}")
        relaxation = make_relaxation(
            problem, random_rows(rng, problem, rng.choice((0.3, 0.5, 0.8)))
        )
        found = []
        for _ in range(3):
            share, most = rng.choice((0.2, 0.5, 0.9)), rng.choice((0.2, 0.5, 1.0))
            columns = range(relaxation.form.n_columns)
            x = np.array([rng.uniform(0, most) if rng.random() < share else 0.0 for _ in columns])
            found += [(cut, x) for cut in separate(relaxation, x)]
        if found:
            yield Separated(seed, relaxation, found)


def test_a_cut_cuts_off_the_point_that_it_was_made_for():
    """A cut restated for the same groups is the same row; no cut is repeated."""
    count = 0
    for seed, relaxation, found in separated(range(40), "off", (6, 10)):
        for cut, x in found:
            assert compute_excess(cut, x) < -VIOLATED / 2, seed
            assert restate(relaxation, cut.origin) == cut
        once = separate(relaxation, found[0][1])
        assert len({tuple(cut.terms) for cut in once}) == len(once)
        count += len(found)
    assert count > 300


def test_no_more_cuts_come_at_once_than_may_be():
    """Of too many, the most violated ones are selected."""
    _, relaxation, found = max(separated(range(20), "most", (9, 12)), key=lambda one: len(one.cuts))
    x = found[0][1]
    every = separate(relaxation, x)
    assert 6 < len(every) <= 400
    few = separate(relaxation, x, most=3)
    assert len(few) == 3
    worst = sorted(compute_excess(cut, x) for cut in every)
    assert max(compute_excess(cut, x) for cut in few) <= worst[3] + SOLVER_TOLERANCE


@pytest.mark.parametrize(
    ("numbers", "kind", "n", "own", "cuts", "each"),
    [
        pytest.param(range(40), "valid", (6, 10), False, 300, 20, marks=pytest.mark.slow),
        # A page-out, a page-in or a recomputation that serves nothing else cuts nothing off.
        pytest.param(range(40), "own", (5, 8), True, 300, 0, marks=pytest.mark.slow),
        *(
            pytest.param(range(b, b + 40), "more", (5, 13), False, 200, 0, marks=pytest.mark.seeds)
            for b in range(0, 600, 40)
        ),
    ],
    ids=str,
)
def test_every_point_of_a_relaxation_keeps_its_cuts(numbers, kind, n, own, cuts, each):
    """Points of finer relaxations satisfy them, too, after they are restated."""
    seen = Counter()
    for seed, relaxation, found in separated(numbers, kind, n, own=own):
        rng = make_rng(f"points of {seed}")
        points = list(whole_points(rng, relaxation, 5))
        more = random_rows(rng, relaxation.problem, 0.4)
        rows = (tuple(more.stage_rows), tuple(more.step_rows))
        finer = make_relaxation(relaxation.problem, relaxation.grouping.with_rows(*rows))
        fine_points = list(whole_points(rng, finer, 5))
        for cut, _ in found:
            least = min((compute_excess(cut, x) for x in points), default=0.0)
            assert least >= -SOLVER_TOLERANCE, (seed, cut)
            again = restate(finer, cut.origin)
            if again is not None:
                assert all(compute_excess(again, x) >= -SOLVER_TOLERANCE for x in fine_points), (
                    seed,
                    again,
                )
            seen["cuts"] += 1
            seen["tight"] += least <= SOLVER_TOLERANCE
            seen["stated again"] += again is not None
            seen["for a recomputation"] += cut.origin.is_for_recomputation
            seen["chains"] += len(cut.origin.chain) > 1
            seen["by page-out"] += any(by_page_out for _, by_page_out in cut.origin.chain)
    assert seen["cuts"] > cuts
    assert seen["tight"] > 0.5 * seen["cuts"]  # none could be any stronger
    assert len(seen) == 6 or not each
    assert min(seen.values()) > each, seen


def test_no_family_cuts_off_a_point_of_the_relaxation():
    """The cuts of each family, for a random point and for the point with everything."""
    compared = Counter()
    for seed, relaxation, found in separated(range(20), "valid", (5, 8)):
        cuts = set()
        for family in CUT_FAMILIES:
            module = import_module(f"poetmodel.solver.lazy.cuts.{family}")
            separator = module.make_separator(relaxation, Policy(), lambda: False)
            for point in (found[0][1], np.ones(relaxation.form.n_columns)):
                cuts.update(separator.separate(point, VIOLATED))
        for x in whole_points(make_rng(f"points of {seed}"), relaxation, 3):
            for cut in cuts:
                assert compute_excess(cut, x) >= -SOLVER_TOLERANCE, (seed, cut)
        compared.update(cut.name for cut in cuts)
    assert compared.keys() == set(CUT_FAMILIES), compared


@parametrize_parts(3)
def test_best_schedules_keep_the_cuts(part):
    """The points of schedules by exhaustive search, best for any quantity, are never cut off."""
    admitted = compared = 0
    for seed, relaxation, found in part.select(separated(range(60), "best", (4, 5))):
        problem = relaxation.problem
        for quantity in (*Quantity, problem.minimize):
            best = optimum(replace(problem, minimize=quantity))
            x = (
                None
                if best is None
                else relaxation.schedule_point(
                    PartialSchedule.from_schedule(problem.graph, best.schedule).schedule()
                )
            )
            if x is None:
                continue
            admitted += 1
            for cut, _ in found:
                assert compute_excess(cut, x) >= -SOLVER_TOLERANCE, (seed, cut)
                compared += 1
    assert admitted > part.divide(50)
    assert compared > part.divide(300)


@pytest.mark.parametrize(
    ("ram", "page"), [(10, None), (10, (3.0, 3.0)), (11, (3.0, 3.0)), (13, None)]
)
def test_cuts_raise_the_linear_bound_and_keep_the_optimum(ram, page):
    """On a comb of eight teeth, rounds of cuts close a part of the gap to the same optimum."""
    graph = comb_graph(8)
    problem = Problem(graph, even_costs(graph, page_in=page, page_out=page), ram=ram)
    relaxation = make_relaxation(problem, Grouping(16, frozenset(range(2, 15))))
    found = []
    bounds = []
    for _ in range(8):
        raw = backend("highs").solve(relaxation.form_with_cuts(found).linear_relaxation(), Limits())
        bounds.append(raw.objective)
        found += separate(relaxation, raw.x)
    assert np.diff(bounds).min() > -SOLVER_TOLERANCE
    whole = [find_minimum(form) for form in (relaxation.form, relaxation.form_with_cuts(found))]
    assert whole[0] == pytest.approx(whole[1], abs=SOLVER_TOLERANCE)
    assert 1.02 * bounds[0] < bounds[-1] <= whole[0] + SOLVER_TOLERANCE


# -- rounding ------------------------------------------------------------------------------------
MOST_SUMS = 1 << 20


def largest_by_trial(sizes, limit):
    """Return the largest sum up to a limit among all choices."""
    sums = [sum(some) for r in range(len(sizes) + 1) for some in combinations(sizes, r)]
    return max(total for total in sums if total <= limit)


def test_the_largest_sum_is_that_of_all_choices():
    """With sizes that repeat, many times or not, have a divisor, or are above the limit.

    Above too many sums the divisor counts: the sum may be too large then, never too small.
    """
    rng = make_rng("sums")
    reached = 0
    for _ in range(300):
        factor, most = rng.choice((1, 3, 64)), rng.choice((2, 5, 30))
        sizes = [factor * rng.randint(1, most) for _ in range(rng.randint(1, 9))]
        limit = rng.randint(0, sum(sizes) + 2)
        found = largest_sum(sizes, limit, MOST_SUMS)
        assert found == largest_by_trial(sizes, limit), (sizes, limit)
        reached += found == limit
    assert 50 < reached < 250
    for count in range(1, 40):
        sums = [7 * a + 5 * b for a in range(count + 1) for b in (0, 1)]
        for limit in range(7 * count + 8):
            found = largest_sum([7] * count + [5], limit, MOST_SUMS)
            assert found == max(total for total in sums if total <= limit)
            assert largest_sum([7] * count, limit, MOST_SUMS) == min(limit // 7, count) * 7
    assert largest_sum([6, 9], 40, 10) == 39
    assert largest_sum([6, 9], 32, 10) == 15


def test_rows_of_a_graph_by_hand():
    """Four tensors of 10 B and one of 1 B before a node of 1 B, in 26 B: two large ones fit.

    With the peak minimized the budget of a row is a column, and there are none.
    """
    large = [f"{name} 10" for name in "abcd"]
    graph = parse_graph(*large, "small 1", "full 1", "end 1 a b small", "last 1 c d end")
    relaxation = make_relaxation(unit_problem(graph, ram=26), Grouping(8, frozenset({5})))
    rows = {
        tuple(sorted((-value for value in cut.values), reverse=True)): -cut.lower
        for cut in RoundingSeparator(relaxation, MOST_SUMS).rows()
    }
    assert rows == {(1.0, 1.0, 1.0, 1.0): 2.0, (1.0, 1.0, 1.0, 1.0, 0.1): 2.1}
    x = np.full(relaxation.form.n_columns, 0.6)
    separator = RoundingSeparator(relaxation, MOST_SUMS)
    assert separator.separate(x, 0.45) == []
    assert len(separator.separate(x, 0.35)) == 2
    looks = iter([False, True])  # the time is over after the first row
    assert len(RoundingSeparator(relaxation, MOST_SUMS, lambda: next(looks)).rows()) == 1
    problem = scarce_problem("rounded/ram", 8, minimize="ram")
    relaxation = make_relaxation(problem, Grouping(8, frozenset(range(8))))
    assert RoundingSeparator(relaxation, MOST_SUMS).rows() == []


@parametrize_parts(30)
def test_optima_stay_and_linear_bounds_rise(part):
    """On random relaxations with several outputs, workspaces and all limits.

    Few bounds rise, because other rows already state most limits.
    """
    compared = raised = 0
    for number in part.select(range(1500)):
        seed = f"rounded/{number}"
        problem = scarce_problem(seed, (5, 13))
        if problem.minimize == Quantity.RAM or infeasibility_reason(problem) is not None:
            continue
        relaxation = make_relaxation(
            problem, random_rows(make_rng(f"rows of {seed}"), problem, 0.5)
        )
        rows = RoundingSeparator(relaxation, MOST_SUMS).rows()
        if not rows:
            continue
        whole, tightened = find_minimum(relaxation.form), relaxation.form_with_cuts(rows)
        again = find_minimum(tightened)
        assert (whole is None) == (again is None), seed
        if whole is None:
            continue
        assert again == pytest.approx(whole, abs=SOLVER_TOLERANCE), seed
        below, above = (
            find_minimum(relaxation.form.linear_relaxation()),
            find_minimum(tightened.linear_relaxation()),
        )
        assert below - SOLVER_TOLERANCE <= above <= whole + SOLVER_TOLERANCE, seed
        compared += 1
        raised += above > below + SOLVER_TOLERANCE
    assert compared > part.divide(150)
    assert raised > 0 or part.number > 0
