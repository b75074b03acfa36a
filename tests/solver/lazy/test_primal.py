"""The search for schedules: repair, a local search, and no claims."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kit.instances import scarce_problem, seeded
from kit.relaxation import CLOSE, random_rows, run_rounds, solved
from kit.rotation import Part, parts
from kit.worked import comb_problem, skip_problem
from poetmodel.heuristics.greedy import construct, page_everything
from poetmodel.model.aggregated import Grouping
from poetmodel.problem.infeasibility import obstacle
from poetmodel.solver.lazy.primal import IDLE_ITERATIONS_PER_COLUMN, PrimalHeuristic, examine
from poetmodel.solver.lazy.session import Session
from poetmodel.solver.outcome import verify_schedule
from poetmodel.solver.request import Request

if TYPE_CHECKING:
    from poetmodel.problem import Problem


def session_of(problem: Problem, *, greedy: bool = False) -> Session:
    """Begin a solve, from nothing or from the constructive schedule."""
    schedule = construct(problem) if greedy else None
    best = None if schedule is None else verify_schedule(problem, schedule)
    return Session(problem, Request(gap=0.0, time_limit_s=300.0), best)


def test_an_answer_that_keeps_all_rows_is_offered() -> None:
    """Disaggregated, verified, and the best so far; nothing is left to enforce."""
    session = session_of(skip_problem())
    relaxation = session.build(Grouping(4, frozenset({2})))
    x = solved(relaxation).x
    assert x is not None
    assert examine(session, relaxation, x) == ([], [], {})
    assert session.bounds.incumbent is not None
    assert session.bounds.incumbent.value == pytest.approx(1.0)


def test_rows_that_an_answer_breaks_are_told() -> None:
    """With no row enforced, everything stays in RAM, and row 2 is broken; nothing is offered."""
    session = session_of(skip_problem())
    relaxation = session.build(Grouping(4))
    assert examine(session, relaxation, np.zeros(0)) == ([2], [], {})
    assert session.bounds.incumbent is None


def test_with_the_peak_minimized_every_valid_answer_is_offered() -> None:
    """An answer above the peak that it claims breaks a row, and is a schedule all the same."""
    session = session_of(skip_problem(minimize="ram", ram=15))
    relaxation = session.build(Grouping(4))
    raw = solved(relaxation)
    assert raw.x is not None
    assert examine(session, relaxation, raw.x) == ([2], [], {})
    assert session.bounds.incumbent is not None
    assert session.bounds.incumbent.value == 15


def test_the_best_schedule_is_where_a_solve_begins() -> None:
    """As a point of the relaxation, or nothing where there is none or it has no room."""
    problem = comb_problem(6, 9)
    relaxation = session_of(problem).build(Grouping(12, frozenset({5, 6})))
    assert session_of(problem).start_point(relaxation) is None
    x = session_of(problem, greedy=True).start_point(relaxation)
    assert x is not None
    assert relaxation.form.violation(x) <= CLOSE


def test_an_answer_that_does_not_fit_becomes_a_schedule_by_repair() -> None:
    """It is mended and offered without any solve."""
    problem = comb_problem(6, 9)
    session = session_of(problem)
    relaxation = session.build(Grouping(12, frozenset({5})))
    x = solved(relaxation).x
    assert x is not None
    assert examine(session, relaxation, x).stages
    assert session.bounds.incumbent is None
    PrimalHeuristic(session).repair(relaxation.disaggregate(x).schedule())
    assert session.bounds.incumbent is not None
    assert not session.bounds.incumbent.violations
    assert not session.log


def session_that_pages_everything() -> Session:
    """Begin a solve with a schedule that is far from the best."""
    problem = comb_problem(6, 9)
    everything = page_everything(problem)
    assert everything is not None
    session = session_of(problem)
    assert session.offer(everything)
    return session


def test_the_best_schedule_is_improved_locally() -> None:
    """The search goes on from what the session holds, here everything paged."""
    session = session_that_pages_everything()
    assert session.bounds.incumbent is not None
    before = session.bounds.incumbent.value
    search = PrimalHeuristic(session)
    search.improve()
    assert session.bounds.incumbent.value < before
    assert search.idle_iterations_per_column > IDLE_ITERATIONS_PER_COLUMN


@pytest.mark.parametrize("turns", [0, 50])
def test_a_local_search_ends_when_something_better_waits(turns: int) -> None:
    """After any number of turns; what it has found by then is offered."""
    session = session_that_pages_everything()
    before = session.bounds.incumbent
    asked = 0

    def waits() -> bool:
        nonlocal asked
        asked += 1
        return asked > turns

    search = PrimalHeuristic(session, is_waited_for=waits)
    search.idle_iterations_per_column = session.columns = 1_000
    search.improve()
    assert asked == turns + 1
    assert session.bounds.incumbent is not before


@parts(2)
def test_a_search_claims_nothing_and_finds_nothing_wrong(part: Part) -> None:
    """On random problems no schedule is better than the optimum, and no bound moves."""
    found = 0
    for number in part.of(range(25)):
        problem = scarce_problem(f"search/{number}", (5, 9))
        if obstacle(problem) is not None:
            continue
        best = run_rounds(problem).value
        session = session_of(problem)
        bound = session.bounds.lower
        relaxation = session.build(random_rows(seeded(f"from/{number}"), problem))
        raw = solved(relaxation)
        if raw.x is not None:
            PrimalHeuristic(session).repair(relaxation.disaggregate(raw.x).schedule())
        assert session.bounds.lower == bound
        if session.bounds.incumbent is not None:
            found += 1
            assert best is not None
            assert session.bounds.incumbent.value >= best - CLOSE, number
    assert found > part.share(8)
