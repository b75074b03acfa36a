"""Windows of schedules chosen anew: never worse, never wrong, and the best if all is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from instances import random_instances
from poetmodel.heuristics.greedy import construct, page_everything
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.heuristics.penalties import PenalizedObjective, price
from poetmodel.solver.lazy import LazyParams, solve_lazily
from poetmodel.solver.lazy.primal import PrimalHeuristic
from poetmodel.solver.lazy.session import Session
from poetmodel.solver.lazy.window import Window, WindowSearch
from poetmodel.solver.outcome import accepted
from poetmodel.solver.request import Request
from state_problems import state_problem
from worked import comb_problem

if TYPE_CHECKING:
    from poetmodel.problem import Problem


def session_of(problem: Problem, **params: int) -> Session:
    """Return a session that has everything paged, or else the greedy schedule."""
    paged = page_everything(problem)
    start = None if paged is None else accepted(problem, paged)
    if start is None:
        greedy = construct(problem)
        start = None if greedy is None else accepted(problem, greedy)
    return Session(problem, Request(gap=0.0), start, params=LazyParams(**params))


def searched(session: Session, turns: int) -> float:
    """Return the value of the best schedule after so many windows."""
    heuristic = PrimalHeuristic(session)
    assert heuristic.windows is not None
    for _ in range(turns):
        found = heuristic.windows.turn()
        if found is not None:
            heuristic.neighbourhood.consider(found)
            heuristic._offer()
    assert session.bounds.incumbent is not None
    return session.bounds.incumbent.value


def test_a_window_of_all_stages_finds_the_best_schedule() -> None:
    """From everything paged; the optimum is that of `lazy`."""
    problem = comb_problem(6, 9)
    best = solve_lazily(problem, Request(gap=0.0), start=None).candidate
    assert best is not None
    session = session_of(problem, window_stages=12)
    assert session.bounds.upper() > best.value
    assert searched(session, 3) == pytest.approx(best.value)


def test_short_windows_gain_too() -> None:
    """Four stages at a time, until passes without gain have made them longer."""
    problem = comb_problem(6, 9)
    session = session_of(problem, window_stages=4)
    before = session.bounds.upper()
    assert searched(session, 8) < before


def test_what_windows_find_is_valid_and_never_better_than_the_best() -> None:
    """On 40 random problems with all limits; every answer that is offered passes the verifier."""
    better = 0
    for problem in random_instances(40, (5, 9), seed=98, paging=True):
        session = session_of(problem, window_stages=5)
        if session.bounds.incumbent is None or not WindowSearch.is_for(problem):
            continue
        before = session.bounds.incumbent.value
        if before <= 0:
            continue
        value = searched(session, 6)
        best = solve_lazily(problem, Request(gap=0.0), start=None).candidate
        assert best is not None
        assert best.value - 1e-6 * (1 + abs(best.value)) <= value <= before
        assert not session.bounds.incumbent.violations
        better += value < before
    assert better > 5


def test_windows_of_whole_steps_leave_state_where_it_is() -> None:
    """On 120 training steps with state: better schedules that pass the verifier, the same homes."""
    better = 0
    for seed in range(120):
        problem = state_problem(f"windows/{seed}", (5, 9))
        session = session_of(problem, window_stages=5)
        start = session.bounds.incumbent
        if start is None or start.value <= 0 or not WindowSearch.is_for(problem):
            continue
        found = WindowSearch(session, is_waited_for=lambda: False).turn()
        if found is not None:
            partial = PartialSchedule(problem.graph, found, working=problem.working_graph)
            assert partial.resident == set(start.schedule.resident)
        better += searched(session, 6) < start.value
        best = solve_lazily(problem, Request(gap=0.0), start=None).candidate
        assert best is not None
        assert best.value - 1e-6 * (1 + abs(best.value)) <= session.bounds.upper() <= start.value
    assert better > 10


def test_a_window_leaves_alone_what_is_outside_of_it() -> None:
    """Its schedule has the same restorations there, and pays what the window claims to gain."""
    problem = comb_problem(6, 9)
    session = session_of(problem)
    assert session.bounds.incumbent is not None
    partial = PartialSchedule.of(problem.graph, session.bounds.incumbent.schedule)
    prices = PenalizedObjective(problem).objective
    window = Window(problem, partial, 5, 9, prices=prices, most_nodes=20)
    raw = session.solve(window.form(1.0))
    assert raw is not None
    assert raw.x is not None
    after = PartialSchedule(problem.graph, window.restorations(raw.x))
    assert after.fits(problem.usable_ram_bytes)
    outside = [one for one in partial.restorations() if not 5 <= one.stage <= 9]
    assert [one for one in after.restorations() if not 5 <= one.stage <= 9] == outside
    gain = window.cost(prices) - float(window.form(1.0).objective @ raw.x)
    assert gain > 0
    assert price(prices, partial) - price(prices, after) == pytest.approx(gain)
