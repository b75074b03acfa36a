"""The compiled relaxations: their bounds, the points of schedules, cuts as rows."""

import numpy as np
import pytest

from kit.instances import make_rng, random_instances, random_schedule, scarce_problem
from kit.oracle import optimum
from kit.relaxation import (
    SOLVER_TOLERANCE,
    draw_groupings,
    find_minimum,
    make_relaxation,
    random_rows,
    solve_relaxation,
)
from kit.rotation import parametrize_parts
from kit.worked import comb_graph, even_costs, skip_problem
from poetmodel.backends.protocol import Limits
from poetmodel.backends.registry import backend
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.heuristics.restorations import PAGE_IN, RECOMPUTE, Restoration
from poetmodel.model.grouping import Grouping
from poetmodel.problem import Problem, Quantity
from poetmodel.problem.infeasibility import infeasibility_reason
from poetmodel.schedule import Schedule, checkpoint_all
from poetmodel.solver.lazy.cuts import Cut
from poetmodel.solver.lazy.cuts.interval import IntervalOrigin
from poetmodel.solver.lazy.disaggregation import ROUNDING
from poetmodel.solver.outcome import make_candidate

ORIGIN = IntervalOrigin(
    first_stage=0,
    last_stage=1,
    reader=1,
    is_for_recomputation=False,
    chain=(),
    ends_in_recomputation=False,
)


def feasible(count, seed, n=(3, 5)):
    """Yield tight random problems that have a schedule, with their least value."""
    for number in range(count):
        problem = scarce_problem(f"{seed}/{number}", n)
        best = None if infeasibility_reason(problem) is not None else optimum(problem)
        if best is not None:
            yield problem, best.value - problem.objective.baseline


def comb_problem(**limits):
    """State the problem of a comb of three teeth without paging."""
    graph = comb_graph(3)
    return Problem(graph, even_costs(graph, page_in=None, page_out=None), ram=9, **limits)


# -- bounds ------------------------------------------------------------------------------------
@parametrize_parts(3)
def test_more_rows_never_lower_the_bound(part):
    """The optimum grows with the rows that are enforced, and with all of them is the problem's."""
    for number, (problem, value) in part.select(enumerate(feasible(30, "relaxation-12"))):
        before = 0.0
        for grouping in draw_groupings(problem, make_rng(f"more/{number}"), 4):
            relaxation = make_relaxation(problem, grouping)
            found = find_minimum(relaxation.form)
            assert found * relaxation.unit >= before - SOLVER_TOLERANCE, (number, grouping)
            before = found * relaxation.unit
        n = len(problem.graph.nodes)
        steps = frozenset((t, k) for t in range(n) for k in range(t))
        whole = make_relaxation(problem, Grouping(n, frozenset(range(n)), steps))
        found = find_minimum(whole.form)
        assert found * whole.unit == pytest.approx(value, abs=SOLVER_TOLERANCE), number


def test_rows_are_stated_by_hand():
    """Without rows, there are no decisions. Row `c` excludes that `a` crosses it: 4 + 6 + 5 > 13 B.

    Groups are stages 0-2 and 3. `b` is used in the first one, `c` made by the row's own stage.
    """
    relaxation = make_relaxation(skip_problem(), Grouping(4))
    assert relaxation.form.n_columns == 0
    assert (relaxation.kept, relaxation.recomputed, relaxation.paged_in) == ({}, {}, {})
    relaxation = make_relaxation(skip_problem(), Grouping(4, frozenset({2})))
    assert set(relaxation.kept) == {(0, 0)}
    assert set(relaxation.recomputed) == {(1, 0)}
    assert set(relaxation.paged_in) == {(1, 0)}
    assert set(relaxation.paged_out) == {0}
    raw = solve_relaxation(relaxation)
    assert raw.objective * relaxation.unit == pytest.approx(1.0)  # recomputed for 1 J
    # `c`, made by the row's own stage, is kept at no cost.
    assert relaxation.to_restorations(raw.x) == [Restoration(3, 0, RECOMPUTE)]


# -- points of schedules -----------------------------------------------------------------------
@parametrize_parts(3)
def test_points_of_schedules_are_admitted_and_cost_no_more(part):
    """The point of a best schedule, where it has one, keeps all rows and costs no more."""
    admitted, missing = 0, 0
    for number, (problem, value) in part.select(enumerate(feasible(60, "relaxation-14"))):
        best = optimum(problem)
        tidy = PartialSchedule.from_schedule(problem.graph, best.schedule).schedule()
        for grouping in draw_groupings(problem, make_rng(f"points/{number}"), 3):
            relaxation = make_relaxation(problem, grouping)
            x = relaxation.schedule_point(tidy)
            if x is None:
                missing += 1
                continue
            admitted += 1
            assert relaxation.form.max_violation(x) <= SOLVER_TOLERANCE
            stated = float(relaxation.form.objective @ x) * relaxation.unit
            bound = find_minimum(relaxation.form)
            assert (
                bound * relaxation.unit - SOLVER_TOLERANCE <= stated <= value + SOLVER_TOLERANCE
            ), (number, grouping)
    assert admitted > 4 * missing


def test_points_of_other_valid_schedules_are_points_or_nothing():
    """Also those of any schedule that the verifier accepts, however wasteful."""
    admitted = 0
    for number, problem in enumerate(random_instances(150, (3, 6), seed=15)):
        rng = make_rng(f"wasteful/{number}")
        schedule = random_schedule(rng, problem.graph, paging=problem.can_page)
        candidate = make_candidate(problem, schedule)
        if candidate.violations:
            continue
        relaxation = make_relaxation(problem, random_rows(rng, problem))
        x = relaxation.schedule_point(schedule)
        if x is not None:
            admitted += 1
            assert relaxation.form.max_violation(x) <= SOLVER_TOLERANCE
            stated = float(relaxation.form.objective @ x) * relaxation.unit
            if problem.minimize != Quantity.RAM:
                assert stated <= candidate.value + SOLVER_TOLERANCE
    assert admitted > 15


def test_a_point_reads_back_as_its_decisions():
    """Columns have the values of their decisions; a schedule that breaks a row has no point."""
    problem = skip_problem()
    everything = checkpoint_all(problem.graph)
    assert make_relaxation(problem, Grouping(4, frozenset({2}))).schedule_point(everything) is None
    assert (
        make_relaxation(problem, Grouping(4, frozenset({1}))).schedule_point(everything) is not None
    )
    relaxation = make_relaxation(problem, Grouping(4, frozenset({2})))
    paged = Schedule(
        R=tuple((t, t) for t in range(4)),
        S_RAM=((1, 0), (2, 1), (3, 2)),
        S_AUX=((1, 0), (2, 0), (3, 0)),
        M_in=((3, 0),),
        M_out=((0, 0),),
    )
    assert not make_candidate(problem, paged).violations
    x = relaxation.schedule_point(paged)
    assert relaxation.to_restorations(x) == [Restoration(3, 0, PAGE_IN)]
    assert x[relaxation.paged_out[0]] == 1
    assert float(relaxation.form.objective @ x) * relaxation.unit == pytest.approx(2.0)


# -- cuts as rows ------------------------------------------------------------------------------
def test_cuts_become_rows():
    """A form with cuts has one more row for each, at least its right-hand side."""
    relaxation = make_relaxation(skip_problem(), Grouping(4, frozenset({2})))
    column = relaxation.recomputed[1, 0]
    cut = Cut.from_terms([(1.0, column)], lower=1.0, origin=ORIGIN, is_in_bytes=False)
    form = relaxation.form_with_cuts([cut])
    assert form.n_rows == relaxation.form.n_rows + 1
    assert form.row_lower[-1] == 1.0
    assert np.isinf(form.row_upper[-1])
    assert form.matrix[[-1]].toarray().tolist() == [
        [float(j == column) for j in range(form.n_columns)]
    ]
    raw = backend("highs").solve(form, Limits(rel_gap=0.0))
    assert raw.x[column] == 1
    assert relaxation.form_with_cuts([]) is relaxation.form


def test_the_budget_is_what_a_point_keeps_within():
    """If the peak is minimized, it is the point's claim instead, except rounding errors."""
    relaxation = make_relaxation(skip_problem(), Grouping(4, frozenset({2})))
    point = [0.0] * relaxation.form.n_columns
    assert relaxation.claimed_ram_bytes(point) == 13
    least = make_relaxation(skip_problem(minimize="ram"), Grouping(4, frozenset({2})))
    point = [0.0] * least.form.n_columns
    point[least.peak_column] = 12 / 13
    assert least.claimed_ram_bytes(point) == pytest.approx(12, rel=2 * ROUNDING)
    assert least.claimed_ram_bytes(point) > 12
    point[least.peak_column] = 1.0
    assert least.claimed_ram_bytes(point) == 13  # never above the budget
