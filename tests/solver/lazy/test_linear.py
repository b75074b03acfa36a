"""The linear phase: rounds of cuts on one relaxation, and which rows are worth enforcing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from instances import seeded
from lazy_rounds import CLOSE, no_rows, random_rows, run_rounds, scarce_problem, solved
from poetmodel.errors import TimeLimitError
from poetmodel.model.grouping import Grouping
from poetmodel.problem.infeasibility import obstacle
from poetmodel.result import Termination
from poetmodel.solver.lazy.cuts.interval import separate
from poetmodel.solver.lazy.cuts.recompute_memory import Rooms
from poetmodel.solver.lazy.cuts.rounding import rounded_rows
from poetmodel.solver.lazy.linear import grow, tighten
from poetmodel.solver.lazy.primal import Answer
from poetmodel.solver.lazy.session import Session
from poetmodel.solver.request import Request
from poetmodel.time_limit import time_limit
from worked import comb_problem, skip_problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.problem import Problem


def session_of(problem: Problem, **choices: object) -> Session:
    """Begin a solve without a start."""
    return Session(problem, Request(**{"gap": 0.0, "time_limit_s": 300.0, **choices}), None)


def test_cuts_raise_the_bound_of_the_session() -> None:
    """The last value is above that of the first linear relaxation, and below the integer one."""
    session = session_of(comb_problem(8, 10))
    relaxation = session.build(Grouping(16, frozenset(range(2, 15))))
    first = session.solve(relaxation.form.relaxed())
    assert first is not None
    assert first.objective is not None
    answer = tighten(session, relaxation)
    assert answer.x is not None
    assert not answer.infeasible
    assert answer.value > 1.05 * first.objective
    assert session.bound == pytest.approx(answer.value * relaxation.unit)
    assert relaxation.cuts
    relaxation.cuts, kept = [], relaxation.cuts
    whole = solved(relaxation)
    assert whole.objective is not None
    assert answer.value <= whole.objective + CLOSE
    relaxation.cuts = kept
    assert solved(relaxation).objective == pytest.approx(whole.objective)


def test_a_linear_relaxation_without_a_point_proves_infeasibility() -> None:
    """The skip connection in 14 bytes, without any way to have `a` again."""
    session = session_of(skip_problem(recompute=False, paging=False, ram=14))
    answer = tighten(session, session.build(Grouping(4, frozenset({2}))))
    assert answer.infeasible
    assert answer.x is None
    _, answer, _ = grow(session, Grouping(4))
    assert answer.infeasible


def test_without_time_there_is_no_answer() -> None:
    """Neither a point nor a proof."""
    session = session_of(comb_problem(8, 9), time_limit_s=1e-9)
    answer = tighten(session, session.build(Grouping(16)))
    assert answer.x is None
    assert not answer.infeasible
    assert session.stopped == Termination.TIME_LIMIT


def test_rows_that_linear_answers_break_are_found() -> None:
    """From no row at all it comes to rows that give a bound, and tells of all that were broken."""
    session = session_of(comb_problem(8, 9))
    relaxation, answer, every = grow(session, Grouping(16))
    assert 0 < len(relaxation.grouping.stage_rows) <= len(every.stage_rows)
    assert relaxation.grouping.stage_rows <= every.stage_rows
    assert not every.step_rows
    assert answer.value > 0
    assert session.bound >= answer.value * relaxation.unit - CLOSE


def test_bounds_of_the_linear_phase_hold() -> None:
    """On random problems, from whatever rows, it is never above what bare rounds come to."""
    raised = 0
    for number in range(25):
        problem = scarce_problem(f"linear/{number}", (5, 9))
        if obstacle(problem) is not None:
            continue
        best = run_rounds(problem).value
        for first in (no_rows(problem), random_rows(seeded(f"first/{number}"), problem)):
            session = session_of(problem)
            relaxation, answer, every = grow(session, first)
            assert first.stage_rows <= relaxation.grouping.stage_rows <= every.stage_rows
            if best is None:
                continue
            assert not answer.infeasible, number
            assert session.bound <= best + CLOSE, number
            raised += session.bound > CLOSE
    assert raised > 10


@pytest.mark.parametrize("what", ["build", "restated", "rounded", "cuts", "rooms", "place"])
def test_every_part_of_a_round_ends_with_the_time_limit(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever Python does between two calls of the solver looks at the clock, and logs nothing."""
    session = session_of(comb_problem(8, 10))
    session.restoring = True
    relaxation = session.build(Grouping(16, frozenset(range(2, 15))))
    rooms = relaxation.rooms
    raw = session.solve(relaxation.form.relaxed())
    assert raw is not None
    assert raw.x is not None
    assert rooms is not None
    x = raw.x
    parts: dict[str, Callable[[], object]] = {
        "build": lambda: session.build(relaxation.grouping),
        "restated": lambda: Rooms(relaxation),
        "rounded": lambda: rounded_rows(relaxation),
        "cuts": lambda: separate(relaxation, x),
        "rooms": lambda: rooms.separate(x, 0.0),
        "place": lambda: Answer.of(relaxation, x),
    }
    parts[what]()
    with time_limit(-1), pytest.raises(TimeLimitError):
        parts[what]()
    assert caplog.records == []
