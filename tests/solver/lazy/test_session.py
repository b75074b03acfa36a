"""State of a lazy solve, offered schedules and cuts, and its search for schedules."""

from pkgutil import iter_modules
from types import SimpleNamespace

import numpy as np
import pytest

from kit.instances import make_rng, scarce_problem
from kit.relaxation import SOLVER_TOLERANCE, random_rows, run_rounds, solve_relaxation
from kit.rotation import parametrize_parts
from kit.searches import make_session
from kit.worked import comb_problem, skip_problem
from poetmodel.backends.protocol import BackendProgress, RawSolution, SolverStatus
from poetmodel.clock import processor_clock
from poetmodel.heuristics.greedy import construct, page_everything
from poetmodel.model.grouping import Grouping
from poetmodel.problem.infeasibility import infeasibility_reason
from poetmodel.schedule import Schedule
from poetmodel.solver.lazy import cuts
from poetmodel.solver.lazy.primal import PrimalHeuristic, offer_solution
from poetmodel.solver.outcome import make_candidate
from poetmodel.solver.request import Request


def session_of(problem, *, greedy=False):
    """Begin a solve, without a start or from the constructive schedule."""
    schedule = construct(problem) if greedy else None
    best = None if schedule is None else make_candidate(problem, schedule)
    return make_session(problem, Request(gap=0.0, time_limit_s=300.0), best)


def offer(session, relaxation, x):
    """Offer a solution; return the rows that it breaks."""
    return offer_solution(session, relaxation, x, relaxation.to_restorations(x))


def test_a_call_of_a_solver_is_limited_by_the_clock_of_its_request(monkeypatch):
    """Other programs lengthen no call: only its own processor time does, up to its limit."""
    seconds = SimpleNamespace(wall=0.0, own=0.0)
    monkeypatch.setattr("time.monotonic", lambda: seconds.wall)
    monkeypatch.setattr("time.process_time", lambda: seconds.own)

    def work_at_a_quarter_of_a_core(_form, limits, *, on_progress, **_):
        assert limits.time_s == pytest.approx(1000.0)
        while on_progress(BackendProgress(incumbent=None, bound=None, x=None)):
            seconds.wall, seconds.own = seconds.wall + 2.0, seconds.own + 0.5
        return RawSolution(status=SolverStatus.INTERRUPTED)

    with processor_clock(1000.0):
        session = session_of(skip_problem())
        session.solver = SimpleNamespace(solve=work_at_a_quarter_of_a_core)
        relaxation = session.build_relaxation(Grouping(4, frozenset({2})))
        raw = session.solve_form(relaxation.form, max_s=10.0)
    assert raw.status == SolverStatus.TIME_LIMIT
    assert seconds.own == 10.5
    assert session.search.stop_reason is None


@pytest.mark.parametrize(
    ("limits", "enforced", "broken", "value"),
    [
        pytest.param({}, {2}, [], 1.0, id="keeps all rows"),
        # With no row enforced, everything stays in RAM, and row 2 is broken.
        pytest.param({}, set(), [2], None, id="breaks a row"),
        # An answer above the peak that it claims breaks a row, and is a schedule all the same.
        pytest.param({"minimize": "ram", "ram": 15}, set(), [2], 15, id="peak"),
    ],
)
def test_a_valid_answer_is_offered(limits, enforced, broken, value):
    """Disaggregated, verified, and the best so far; violated rows are returned."""
    session = session_of(skip_problem(**limits))
    relaxation = session.build_relaxation(Grouping(4, frozenset(enforced)))
    x = solve_relaxation(relaxation).x if relaxation.form.n_columns else np.zeros(0)
    assert offer(session, relaxation, x) == (broken, [], {})
    best = session.search.best
    assert (best and best.value) == (value and pytest.approx(value))


def test_an_answer_that_does_not_fit_becomes_a_schedule_by_repair():
    """It is mended and offered without any solve; with the best one, as a point, a solve begins."""
    problem = comb_problem(6, 9)
    session = session_of(problem)
    relaxation = session.build_relaxation(Grouping(12, frozenset({5})))
    x = solve_relaxation(relaxation).x
    assert offer(session, relaxation, x).stages
    assert session.search.best is None
    PrimalHeuristic(session).repair(relaxation.to_restorations(x))
    assert not session.search.best.violations
    assert not session.search.log
    relaxation = session_of(problem).build_relaxation(Grouping(12, frozenset({5, 6})))
    assert session_of(problem).start_point(relaxation) is None
    x = session_of(problem, greedy=True).start_point(relaxation)
    assert relaxation.form.max_violation(x) <= SOLVER_TOLERANCE


def session_that_pages_everything():
    """Begin a solve with a schedule that is far from the best."""
    problem = comb_problem(6, 9)
    session = session_of(problem)
    assert session.search.offer(page_everything(problem))
    return session


@pytest.mark.parametrize("turns", [0, 50])
def test_a_local_search_ends_when_something_better_waits(turns):
    """After any number of turns; its schedule is offered."""
    session = session_that_pages_everything()
    before = session.search.best
    asked = 0

    def waits():
        nonlocal asked
        asked += 1
        return asked > turns

    search = PrimalHeuristic(session, should_stop=waits)
    search.idle_iterations_per_column = session.max_columns = 1_000
    search.improve()
    assert asked == turns + 1
    assert session.search.best is not before


def test_the_larger_the_gap_the_more_is_due_to_the_search():
    """Up to a share that leaves some time to relaxations; integer solves get the less."""
    search = PrimalHeuristic(session_that_pages_everything())
    search.started_s -= 1_000.0
    solve, policy = search.session.search, search.session.policy
    value, due = solve.best.value, []
    for gap in (0.5, 0.19, 0.15, 0.11, 0.05):
        solve.bound = value * (1 - gap)
        due.append(search.due_s)
    assert due == sorted(due, reverse=True)
    assert due[0] == pytest.approx(1_000 * policy.far_search_time_ratio, rel=0.05)
    assert due[-1] == pytest.approx(1_000 * policy.search_time_ratio, rel=0.05)
    assert due[0] > 1.1 * due[2] > 1.1 * 1.1 * due[-1]
    shares = [policy.solve_time_fraction(gap) for gap in (0.5, 0.19, 0.15, 0.11, 0.05)]
    assert shares == sorted(shares)
    assert shares[0] == policy.far_gap_time_ratio < policy.wide_gap_time_ratio == shares[-1]


@parametrize_parts(2)
def test_a_search_claims_nothing_and_finds_nothing_wrong(part):
    """On random problems no schedule is better than the optimum, and no bound moves."""
    found = 0
    for number in part.select(range(25)):
        problem = scarce_problem(f"search/{number}", (5, 9))
        if infeasibility_reason(problem) is not None:
            continue
        best = run_rounds(problem).value
        session = session_of(problem)
        bound = session.search.bound
        relaxation = session.build_relaxation(random_rows(make_rng(f"from/{number}"), problem))
        raw = solve_relaxation(relaxation)
        if raw.x is not None:
            PrimalHeuristic(session).repair(relaxation.to_restorations(raw.x))
        assert session.search.bound == bound
        if session.search.best is not None:
            found += 1
            assert session.search.best.value >= best - SOLVER_TOLERANCE, number
    assert found > part.divide(8)


# -- what is offered, and which cuts go along ------------------------------------------------------
def test_what_is_offered_is_improved():
    """Useless page-ins and page-outs are removed; a local search continues from all paged."""
    wasteful = Schedule(
        R=((0, 0), (1, 1), (2, 2), (3, 0), (3, 3)),
        S_RAM=((1, 0), (2, 1), (3, 2)),
        S_AUX=((2, 1), (3, 1)),
        M_in=((3, 1),),
        M_out=((1, 1),),
    )
    session = session_of(skip_problem())
    assert session.search.offer(wasteful)
    assert session.search.best.value == pytest.approx(1.0)
    assert session.search.best.schedule.M_in == ()
    session = session_that_pages_everything()
    before, search = session.search.best.value, PrimalHeuristic(session)
    search.improve()
    assert session.search.best.value < before
    assert search.idle_iterations_per_column > session.policy.idle_iterations_per_column


def test_cuts_go_along_into_finer_groupings():
    """Each is stated again in the columns of the new relaxation."""
    count = 0
    for number in range(10):
        problem = scarce_problem(f"along/{number}", (9, 12), minimize="energy")
        session = session_of(problem)
        n = len(problem.graph.nodes)
        coarse = session.build_relaxation(Grouping(n, frozenset(range(1, n, 2))))
        point = [0.3] * coarse.form.n_columns
        coarse.cuts = coarse.separators["interval"].separate(point, 1e-3)
        finer = session.build_relaxation(
            coarse.grouping.with_rows([t for t in range(n) if t % 3 == 0]), coarse
        )
        assert len(finer.cuts) <= len(coarse.cuts)
        origins = {cut.origin for cut in coarse.cuts}
        assert {cut.origin for cut in finer.cuts} <= origins
        count += len(finer.cuts)
    assert count > 10


def test_each_family_of_cuts_is_a_module_that_relaxations_use():
    """A module that the parameters do not name would separate no cuts."""
    relaxation = session_of(skip_problem()).build_relaxation(Grouping(4, frozenset({2})))
    assert set(relaxation.separators) == {name for _, name, _ in iter_modules(cuts.__path__)}
