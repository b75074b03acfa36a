"""The search for schedules: restrictions that grow, valid schedules, and no claims."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from instances import seeded
from lazy_rounds import CLOSE, no_rows, random_rows, run_rounds, scarce_problem, solved
from poetmodel.heuristics.greedy import construct, page_everything
from poetmodel.heuristics.partial_schedule import Restoration
from poetmodel.model.aggregated import Grouping
from poetmodel.problem.infeasibility import obstacle
from poetmodel.solver.lazy import LazyParams
from poetmodel.solver.lazy.primal import PrimalHeuristic, RelaxedAnswer, examine
from poetmodel.solver.lazy.relaxation import UsedDecisions
from poetmodel.solver.lazy.session import Session
from poetmodel.solver.outcome import verify_schedule
from poetmodel.solver.request import Request
from worked import comb_problem, skip_problem

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
    assert examine(session, relaxation, x) == ([], [])
    assert session.bounds.incumbent is not None
    assert session.bounds.incumbent.value == pytest.approx(1.0)


def test_rows_that_an_answer_breaks_are_told() -> None:
    """With no row enforced, everything stays in RAM, and row 2 is broken; nothing is offered."""
    session = session_of(skip_problem())
    relaxation = session.build(Grouping(4))
    assert examine(session, relaxation, np.zeros(0)) == ([2], [])
    assert session.bounds.incumbent is None


def test_with_the_peak_minimized_every_valid_answer_is_offered() -> None:
    """An answer above the peak that it claims breaks a row, and is a schedule all the same."""
    session = session_of(skip_problem(minimize="ram", ram=15))
    relaxation = session.build(Grouping(4))
    raw = solved(relaxation)
    assert raw.x is not None
    assert examine(session, relaxation, raw.x) == ([2], [])
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


def test_a_search_finds_a_schedule_from_one_answer() -> None:
    """From the answer of a coarse relaxation on to a valid schedule, with rows of its own."""
    problem = comb_problem(6, 9)
    session = session_of(problem)
    relaxation = session.build(Grouping(12, frozenset({5})))
    x = solved(relaxation).x
    assert x is not None
    search = PrimalHeuristic(session, relaxation.grouping)
    search.run(RelaxedAnswer.of(relaxation, x, 0.01))
    assert session.bounds.incumbent is not None
    assert not session.bounds.incumbent.violations
    assert search.grouping.stage_rows > relaxation.grouping.stage_rows
    assert session.bounds.lower == 0.0


def test_a_search_is_repeated_only_for_something_new() -> None:
    """The same answer again is no reason to search, unless forced."""
    problem = comb_problem(6, 9)
    session = session_of(problem)
    relaxation = session.build(Grouping(12, frozenset({5})))
    x = solved(relaxation).x
    assert x is not None
    search = PrimalHeuristic(session, relaxation.grouping)
    search.run(RelaxedAnswer.of(relaxation, x, 0.01))
    before = len(session.log)
    search.run(RelaxedAnswer.of(relaxation, x, 0.01))
    assert len(session.log) == before
    search.run(RelaxedAnswer.of(relaxation, x, 0.01), force=True)
    assert len(session.log) > before


def test_a_search_that_finds_nothing_is_repeated_more_and_more_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After 2, 4, 8 more answers; after the next one again once it has found something."""
    session = session_of(comb_problem(6, 9), greedy=True)
    relaxation = session.build(Grouping(12, frozenset({5})))
    x = solved(relaxation).x
    assert x is not None
    answer = RelaxedAnswer.of(relaxation, x, 0.01)
    turns: list[int] = []
    finds = False

    def restricted(search: PrimalHeuristic, *_: object) -> None:
        turns.append(turn)
        best = search.session.bounds.incumbent
        assert best is not None
        if finds:
            search.session.bounds.incumbent = replace(best, value=best.value - 1e-3)

    monkeypatch.setattr(PrimalHeuristic, "repair", lambda *_: None)
    monkeypatch.setattr(PrimalHeuristic, "_solve_restricted", restricted)
    search = PrimalHeuristic(session, relaxation.grouping)
    for turn in range(1, 20):
        search.allowed.recomputed.clear()
        finds = turn > 7
        search.run(answer)
    assert turns == [1, 3, 7, 15, 16, 17, 18, 19]


@pytest.mark.parametrize(
    ("gap", "expected"),
    [(0.009, [2.0, 2.0]), (0.04, [5.0, 5.0]), (0.06, [5.0, 10.0])],
)
def test_far_from_a_proof_the_restricted_relaxation_gets_more_time(
    gap: float, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second one on: the first may have had hardly an answer to begin from."""
    session = session_of(comb_problem(6, 9), greedy=True)
    assert session.bounds.incumbent is not None
    session.bounds.lower = session.bounds.incumbent.value * (1 - gap)
    search = PrimalHeuristic(session, Grouping(12))
    times: list[float] = []

    def restricted(search: PrimalHeuristic, _: object, until: float) -> None:
        times.append(until - search.session.request.elapsed_s())

    monkeypatch.setattr(PrimalHeuristic, "_solve_restricted", restricted)
    for _ in range(2):
        search.restrict(Grouping(12))
    assert times == pytest.approx(expected, abs=0.5)


def test_an_answer_that_does_not_fit_becomes_a_schedule_by_repair() -> None:
    """It is mended and offered without any solve."""
    problem = comb_problem(6, 9)
    session = session_of(problem)
    relaxation = session.build(Grouping(12, frozenset({5})))
    x = solved(relaxation).x
    assert x is not None
    rows, _ = examine(session, relaxation, x)
    assert rows
    assert session.bounds.incumbent is None
    PrimalHeuristic(session, relaxation.grouping).repair(RelaxedAnswer.of(relaxation, x, 0.01))
    assert session.bounds.incumbent is not None
    assert not session.bounds.incumbent.violations
    assert not session.log


def test_the_best_schedule_is_improved_locally() -> None:
    """The search goes on from what the session holds, here everything paged."""
    problem = comb_problem(6, 9)
    everything = page_everything(problem)
    assert everything is not None
    session = session_of(problem)
    assert session.offer(everything)
    assert session.bounds.incumbent is not None
    before = session.bounds.incumbent.value
    search = PrimalHeuristic(session, Grouping(12))
    search.improve()
    assert session.bounds.incumbent.value < before
    assert search.idle_iterations_per_column > LazyParams().idle_iterations_per_column


@pytest.mark.parametrize("turns", [0, 50])
def test_a_local_search_ends_when_something_better_waits(turns: int) -> None:
    """After any number of turns; what it has found by then is offered."""
    problem = comb_problem(6, 9)
    everything = page_everything(problem)
    assert everything is not None
    session = session_of(problem)
    assert session.offer(everything)
    before = session.bounds.incumbent
    asked = 0

    def waits() -> bool:
        nonlocal asked
        asked += 1
        return asked > turns

    search = PrimalHeuristic(session, Grouping(12), is_waited_for=waits)
    search.idle_iterations_per_column = session.columns = 1_000
    search.improve()
    assert asked == turns + 1
    assert session.bounds.incumbent is not before


def test_an_answer_is_told_in_terms_of_the_graph() -> None:
    """What it brings back, in stages; what it uses, in spans of them; no columns.

    Row 2 of the skip connection is enforced: the groups are the stages 0 to 2, and 3. In the second
    one `a` is recomputed, for 1 J.
    """
    session = session_of(skip_problem())
    relaxation = session.build(Grouping(4, frozenset({2})))
    x = solved(relaxation).x
    assert x is not None
    answer = RelaxedAnswer.of(relaxation, x, 0.01)
    assert answer.grouping == relaxation.grouping
    assert answer.restorations == (Restoration(3, 0, recompute=True),)
    assert answer.used == UsedDecisions(recomputed=((0, 3, 3),), paged_in=())
    x = x.copy()
    x[relaxation.paged_in[1, 0]] = 0.25
    assert RelaxedAnswer.of(relaxation, x, 0.01).used == UsedDecisions(
        recomputed=((0, 3, 3),), paged_in=((0, 3, 3),)
    )


def test_a_best_schedule_that_is_not_allowed_is_no_start() -> None:
    """The search goes on without it: HiGHS refuses a start that breaks the bounds of columns."""
    problem = comb_problem(6, 9)
    session = session_of(problem, greedy=True)
    relaxation = session.build(Grouping(12, frozenset({5, 6})))
    search = PrimalHeuristic(session, relaxation.grouping)
    search.allowed.recomputed.clear()
    search.allowed.paged_in.clear()
    x = np.zeros(relaxation.form.n_columns)
    x[next(iter(relaxation.paged_in.values()))] = 1.0
    start = session.start_point(relaxation)
    assert start is not None
    before = len(session.log)
    search.run(RelaxedAnswer.of(relaxation, x, 0.01))
    assert len(session.log) > before


def test_a_search_claims_nothing_and_finds_nothing_wrong() -> None:
    """On random problems no schedule is better than the optimum, and no bound moves."""
    found = 0
    for number in range(25):
        problem = scarce_problem(f"search/{number}", (5, 9))
        if obstacle(problem) is not None:
            continue
        best = run_rounds(problem).value
        session = session_of(problem)
        bound = session.bounds.lower
        relaxation = session.build(random_rows(seeded(f"from/{number}"), problem))
        raw = solved(relaxation)
        search = PrimalHeuristic(session, no_rows(problem))
        if raw.x is not None:
            search.run(RelaxedAnswer.of(relaxation, raw.x, 0.01), force=True)
        assert session.bounds.lower == bound
        if session.bounds.incumbent is not None:
            found += 1
            assert best is not None
            assert session.bounds.incumbent.value >= best - CLOSE, number
    assert found > 8
