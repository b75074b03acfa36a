"""The linear phase: rounds of cuts on one relaxation, and which rows are worth enforcing."""

import numpy as np
import pytest

from kit.instances import make_rng, random_instances, scarce_problem
from kit.relaxation import (
    SOLVER_TOLERANCE,
    group_all_stages,
    make_relaxation,
    random_rows,
    run_rounds,
    solve_relaxation,
)
from kit.rotation import parametrize_parts
from kit.searches import make_session
from kit.worked import comb_graph, comb_problem, even_costs, skip_problem
from poetmodel.clock import limit_time
from poetmodel.errors import TimeLimitError
from poetmodel.graph import checkpoint_all_profile
from poetmodel.model.grouping import Grouping
from poetmodel.problem import Problem
from poetmodel.problem.infeasibility import infeasibility_reason
from poetmodel.result import Termination
from poetmodel.solver.lazy.cuts.rounding import RoundingSeparator
from poetmodel.solver.lazy.linear import add_cuts, add_rows, stage_loads
from poetmodel.solver.lazy.session import Session
from poetmodel.solver.request import Request


def session_of(problem, **choices):
    """Begin a solve without a start."""
    request = Request(**{"gap": 0.0, "time_limit_s": 300.0, **choices})
    return make_session(problem, request)


def test_cuts_and_rows_raise_the_bound_of_the_session():
    """Above the first linear relaxation, below the integer one; from no row at all there is one."""
    session = session_of(comb_problem(8, 10))
    relaxation = session.build_relaxation(Grouping(16, frozenset(range(2, 15))))
    first = session.solve_form(relaxation.form.linear_relaxation())
    answer = add_cuts(session, relaxation)
    assert answer.x is not None
    assert not answer.is_infeasible
    assert answer.value > 1.05 * first.objective
    assert session.search.bound == pytest.approx(answer.value * relaxation.unit)
    assert relaxation.cuts
    relaxation.cuts, kept = [], relaxation.cuts
    whole = solve_relaxation(relaxation)
    assert answer.value <= whole.objective + SOLVER_TOLERANCE
    relaxation.cuts = kept
    assert solve_relaxation(relaxation).objective == pytest.approx(whole.objective)
    session = session_of(comb_problem(8, 9))
    relaxation, answer = add_rows(session, Grouping(16))
    assert relaxation.grouping.stage_rows
    assert not relaxation.grouping.step_rows
    assert answer.value > 0
    assert session.search.bound >= answer.value * relaxation.unit - SOLVER_TOLERANCE


def test_rounds_of_cuts_begin_from_the_last_basis(monkeypatch):
    """The basis changes no value: each is that of the relaxation solved from scratch."""
    session = session_of(comb_problem(8, 10))
    solve = session.solve_form
    begun = []

    def compared(_, form, basis=None):
        begun.append(basis)
        raw, anew = solve(form, basis=basis), solve(form)
        assert raw.objective == pytest.approx(anew.objective)
        return raw

    monkeypatch.setattr(Session, "solve_form", compared)
    relaxation = session.build_relaxation(Grouping(16, frozenset(range(2, 15))))
    add_cuts(session, relaxation)
    assert len(begun) > 2
    assert begun[0] is None
    for basis in begun[1:]:
        assert len(basis.columns) == relaxation.form.n_columns
        assert len(basis.rows) > relaxation.form.n_rows


def test_a_linear_relaxation_without_a_point_proves_infeasibility():
    """The skip connection in 14 bytes without a way to have `a` again; without time, no answer."""
    session = session_of(skip_problem(recompute=False, paging=False, ram=14))
    answer = add_cuts(session, session.build_relaxation(Grouping(4, frozenset({2}))))
    assert answer.is_infeasible
    assert answer.x is None
    _, answer = add_rows(session, Grouping(4))
    assert answer.is_infeasible
    problem = comb_problem(8, 9)
    relaxation = session_of(problem).build_relaxation(Grouping(16))
    session = session_of(problem, time_limit_s=1e-9)
    answer = add_cuts(session, relaxation)
    assert answer.x is None
    assert not answer.is_infeasible
    assert session.search.stop_reason == Termination.TIME_LIMIT


@parametrize_parts(2)
def test_bounds_of_the_linear_phase_hold(part):
    """On random problems, from any rows, the bound is never above that of plain rounds."""
    raised = 0
    for number in part.select(range(25)):
        problem = scarce_problem(f"linear/{number}", (5, 9))
        if infeasibility_reason(problem) is not None:
            continue
        best = run_rounds(problem).value
        for first in (group_all_stages(problem), random_rows(make_rng(f"first/{number}"), problem)):
            session = session_of(problem)
            relaxation, answer = add_rows(session, first)
            assert first.stage_rows <= relaxation.grouping.stage_rows
            if best is None:
                continue
            assert not answer.is_infeasible, number
            assert session.search.bound <= best + SOLVER_TOLERANCE, number
            raised += session.search.bound > SOLVER_TOLERANCE
    assert raised > part.divide(10)


@pytest.mark.parametrize("what", ["build", "taken over", "rounded", "interval", "disaggregated"])
def test_every_part_of_a_round_ends_with_the_time_limit(what, caplog):
    """All Python code between two calls of the solver checks the clock, and logs nothing."""
    session = session_of(comb_problem(8, 10))
    relaxation = session.build_relaxation(Grouping(16, frozenset(range(2, 15))))
    raw = session.solve_form(relaxation.form.linear_relaxation())
    assert raw.x is not None
    x = raw.x
    relaxation.cuts = relaxation.separate(x, 1e-3)
    parts = {
        "build": lambda: session.build_relaxation(relaxation.grouping),
        "taken over": lambda: relaxation.restate_cuts(relaxation),
        "rounded": lambda: RoundingSeparator(relaxation, 1 << 20).rows(),
        "interval": lambda: relaxation.separators["interval"].separate(x, 1e-3),
        "disaggregated": lambda: relaxation.to_restorations(x),
    }
    parts[what]()
    with limit_time(-1), pytest.raises(TimeLimitError):
        parts[what]()
    assert caplog.records == []


# -- fractional answers on stages ----------------------------------------------------------------
def test_keeping_everything_asks_for_what_checkpoint_all_does():
    """Whatever the groups: every tensor is kept to its last use, and loads are the same bytes."""
    for number, problem in enumerate(random_instances(80, (1, 12), seed=51, recompute=False)):
        relaxation = make_relaxation(problem, random_rows(make_rng(f"all/{number}"), problem))
        x = np.zeros(relaxation.form.n_columns)
        x[list(relaxation.kept.values())] = 1.0
        expected = checkpoint_all_profile(problem.graph)
        assert stage_loads(relaxation, x).tolist() == pytest.approx(expected), number


def test_loads_of_stages_by_hand():
    """Of `a` (4 B), kept over row 2 by halves and had again by halves in stage 3, half crosses.

    `f1` of the comb, made again in the group of stages 4-5, is there for `g1` in 4, `f0` for `g0`
    in 5. f0 f1 f2 have 4 B each and g2 g1 g0 1 B each.
    """
    relaxation = make_relaxation(skip_problem(), Grouping(4, frozenset({2})))
    x = np.zeros(relaxation.form.n_columns)
    for share, crossing in ((0.0, 11), (0.5, 13), (1.0, 15)):
        x[relaxation.kept[0, 0]] = share
        x[relaxation.recomputed[1, 0]] = 1 - share
        assert stage_loads(relaxation, x).tolist() == [4, 10, crossing, 12]
    graph = comb_graph(3)
    problem = Problem(graph, even_costs(graph, page_in=None, page_out=None), ram=9)
    relaxation = make_relaxation(problem, Grouping(6, frozenset({3})))
    x = np.zeros(relaxation.form.n_columns)
    x[relaxation.recomputed[1, 0]] = x[relaxation.recomputed[1, 1]] = 1.0
    assert stage_loads(relaxation, x).tolist() == [4, 8, 8, 5, 6, 6]
    # Kept through instead: beside f2 and g2 as well.
    whole = np.zeros(relaxation.form.n_columns)
    whole[list(relaxation.kept.values())] = 1.0
    assert stage_loads(relaxation, whole).tolist() == [4, 8, 12, 13, 10, 6]
