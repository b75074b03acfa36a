"""The driver's loop: its reports, and its end."""

import math
import time
from dataclasses import replace

import pytest

from kit.instances import scarce_problem
from kit.rotation import mark_seeds_except, parametrize_parts
from kit.searches import make_session, prove
from kit.worked import comb_problem, skip_problem
from poetmodel.backends import call as call_module
from poetmodel.backends.highs import Highs
from poetmodel.backends.protocol import BackendProgress, RawSolution, SolverStatus
from poetmodel.heuristics.greedy import construct, page_everything
from poetmodel.model.grouping import Grouping
from poetmodel.problem import Quantity
from poetmodel.problem.infeasibility import infeasibility_reason
from poetmodel.process import WorkerProcess
from poetmodel.result import Termination
from poetmodel.schedule import checkpoint_all
from poetmodel.solver.lazy import primal_worker, row_generation
from poetmodel.solver.lazy.primal import PrimalHeuristic
from poetmodel.solver.lazy.row_generation import RowGeneration
from poetmodel.solver.outcome import make_candidate, reported_bound
from poetmodel.solver.policy import HEURISTICS, Policy
from poetmodel.solver.request import Request


def greedy(problem):
    """Return the constructive start."""
    schedule = construct(problem)
    return make_candidate(problem, schedule)


def solved(problem, *, start=None, **choices):
    """Solve to gap 0, by default without a start."""
    request = Request(**{"gap": 0.0, "time_limit_s": 300.0, **choices})
    return prove(problem, request, start=start)


def value_of(outcome):
    """Return the value of the result."""
    assert not outcome.best.violations
    return outcome.best.value


# -- what it reports -----------------------------------------------------------------------------
def test_statistics_tell_rounds_rows_and_columns(monkeypatch):
    """The worked example is proven at once, with one row: stage 2 is the maximum of keep-all.

    Its columns are keeping, recomputing, paging in and paging out `a`: `b` and `c` are free.
    With RAM for all tensors, there is no column. The comb needs several rounds, fewer rows than
    stages, and far fewer columns than the whole model. With one thread, no process is prepared.
    """
    outcome = solved(skip_problem())
    assert outcome.termination == Termination.PROVED
    assert (value_of(outcome), outcome.bound) == pytest.approx((1.0, 1.0))
    statistics = outcome.statistics
    assert statistics["rounds"] <= 1  # none where the linear phase proves it
    assert (statistics["enforced_rows"], statistics["columns"]) == (1, 4)
    assert statistics["rows"] >= 3
    assert set(outcome.versions) == {"highs", "highspy"}
    assert outcome.build_s > 0
    assert outcome.log
    problem = comb_problem(4, 100)
    outcome = solved(problem)
    assert value_of(outcome) == outcome.bound == 0.0
    assert outcome.best.schedule == checkpoint_all(problem.graph)
    outcome = solved(comb_problem())
    assert outcome.statistics["rounds"] > 1
    assert 1 < outcome.statistics["enforced_rows"] < 20
    assert outcome.statistics["nodes"] >= 0
    assert 0.0 <= outcome.statistics["root_bound"] <= outcome.bound
    assert 20 < outcome.statistics["columns"] < 150
    monkeypatch.setattr(primal_worker, "PrimalWorker", lambda _: pytest.fail("made ready"))
    assert solved(comb_problem(6, 9), threads=1).termination == Termination.PROVED


def session_with(value, bound=2.0):
    """Begin a solve with a bound and a schedule of some value, or none."""
    problem = comb_problem()
    best = None if value is None else replace(greedy(problem), value=value)
    return make_session(problem, Request(gap=0.0, time_limit_s=300.0), best, bound=bound)


def test_the_allowance_of_a_cutoff_is_no_bound():
    """A bound equal to the cutoff proves the best value; other bounds stay."""
    session = session_with(10.0)
    relaxation = session.build_relaxation(Grouping(20))
    cutoff = session.cutoff_limits(relaxation)["objective_cutoff"]
    assert cutoff * relaxation.unit > 10.0
    assert session.to_problem_bound(relaxation, cutoff) == 10.0
    for value in (5.0, 10.1):
        assert session.to_problem_bound(relaxation, value / relaxation.unit) == pytest.approx(value)
    session = session_with(None)
    assert session.to_problem_bound(relaxation, 1e9) == pytest.approx(1e9 * relaxation.unit)


def test_what_a_run_that_went_wrong_told_is_taken_back(monkeypatch):
    """Its bounds are void as soon as the second run begins, and the callback gets the old one."""
    told = []
    session = session_with(10.0)
    session.search.request = replace(session.search.request, on_progress=told.append)
    relaxation = session.build_relaxation(Grouping(20, frozenset({9})))
    run, bounds = Highs._solve_once, []

    def misled(self, call):
        bounds.append(session.search.bound)
        if len(bounds) > 1:
            return run(self, call)
        call.report_progress(9.0)
        return RawSolution(status=SolverStatus.OTHER_LIMIT), "presolve"

    def watch(progress):
        if progress.bound is not None:
            session.search.prove(progress.bound)
        return True

    monkeypatch.setattr(call_module, "_MIN_REPORT_INTERVAL_S", -1.0)
    monkeypatch.setattr(Highs, "_solve_once", misled)
    assert session.solve_form(relaxation.form, progress_callback=watch) is not None
    assert bounds[:2] == [2.0, 2.0]
    assert [report.overhead_bound for report in told[:3]] == [9.0, 9.0, 2.0]


@pytest.mark.parametrize("repairs", [True, False])
def test_an_answer_on_the_way_becomes_a_schedule_by_repair(monkeypatch, *, repairs):
    """Without a local search: the running solve waits. Without that repair there is none yet."""
    monkeypatch.setattr(PrimalHeuristic, "improve", lambda _: pytest.fail("a local search"))
    policy = Policy(heuristics=HEURISTICS - (set() if repairs else {"repair_on_the_way"}))
    session = make_session(comb_problem(), Request(gap=0.0, policy=policy))
    relaxation = session.build_relaxation(Grouping(20, frozenset({9})))
    raw = session.solve_form(relaxation.form)
    restorations = relaxation.to_restorations(raw.x)
    assert row_generation.offer_solution(session, relaxation, raw.x, restorations)
    assert session.search.best is None
    progress = BackendProgress(incumbent=raw.objective, bound=None, x=raw.x)
    assert RowGeneration(session, Grouping(20))._handle_progress(relaxation, progress)
    assert (session.search.best is not None) == repairs


@pytest.mark.parametrize("nodes", [None, 0, 1, 2])
def test_a_solve_that_stays_at_its_root_ends(nodes):
    """With a wide gap, after some time without a better schedule; one that branches continues."""
    session = make_session(comb_problem(), Request(gap=0.0))
    assert session.search.offer(page_everything(session.search.problem))
    relaxation = session.build_relaxation(Grouping(20))
    rounds = RowGeneration(session, Grouping(20))
    still = BackendProgress(incumbent=None, bound=0.0, x=None, nodes=nodes)
    rounds._last_gain_s, rounds._max_root_idle_s = time.monotonic() - 10.0, 20.0
    assert rounds._handle_progress(relaxation, still)
    rounds._last_gain_s -= 15.0
    assert rounds._handle_progress(relaxation, replace(still, bound=0.1))  # the bound has risen
    assert rounds._handle_progress(relaxation, still)
    rounds._last_gain_s -= 25.0
    assert rounds._handle_progress(relaxation, still) == (nodes not in (0, 1))
    rounds._max_root_idle_s = math.inf  # near the end a solve takes the time it needs
    assert rounds._handle_progress(relaxation, still)


# -- progress ------------------------------------------------------------------------------------
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("minimize", ["energy", "ram"])
def test_progress_only_gets_better(threads, minimize):
    """The bound never falls, the incumbent never rises, and they never cross."""
    problem, told = comb_problem(8, 13, minimize=minimize, deadline="120%"), []
    outcome = solved(problem, threads=threads, on_progress=told.append)
    value = value_of(outcome)
    bounds = [each.overhead_bound for each in told if each.overhead_bound is not None]
    incumbents = [each.overhead for each in told if each.overhead is not None]
    assert len(bounds) == len(told) > 2
    assert bounds == sorted(bounds)
    assert incumbents == sorted(incumbents, reverse=True)
    assert incumbents[-1] == value
    assert max(bounds) <= value * (1 + 1e-6)
    bound = reported_bound(problem, outcome.best, outcome.bound)  # bytes are whole
    assert bound == pytest.approx(value)


# -- two threads ---------------------------------------------------------------------------------
AT_ONCE = Policy(worker_start_s=0.0)
"""Start the worker at once."""


@pytest.mark.slow
@pytest.mark.parametrize("start_s", mark_seeds_except([0.0, 0.3, 1e9], [0.0]))
def test_a_search_beside_the_proof_changes_no_value(start_s, monkeypatch):
    """Whenever its process starts, or if it never does; no process is left."""
    policy = Policy(worker_start_s=start_s)
    made = []

    def noted():
        made.append(WorkerProcess())
        return made[-1]

    monkeypatch.setattr(primal_worker, "WorkerProcess", noted)
    problem = comb_problem(14, 13, 5.0)
    paged = make_candidate(problem, page_everything(problem))
    outcome = solved(problem, start=paged, threads=2, policy=policy)
    assert outcome.termination == Termination.PROVED
    assert value_of(outcome) == pytest.approx(77.0)
    assert outcome.bound == pytest.approx(77.0)
    assert not any(process.is_alive for process in made)
    assert len(made) == 1 or start_s > 0.0
    assert 1 < outcome.statistics["enforced_rows"] < 28


# -- how it stops --------------------------------------------------------------------------------
def test_without_time_the_start_comes_back_with_a_bound():
    """Also if no relaxation could be solved; without a start, nothing is claimed."""
    start = greedy(comb_problem())
    outcome = solved(comb_problem(), start=start, time_limit_s=1e-9)
    assert outcome.termination == Termination.TIME_LIMIT
    assert outcome.best is start
    assert (outcome.bound, outcome.statistics["rounds"]) == (0.0, 0)
    outcome = solved(comb_problem(minimize="ram"), time_limit_s=1e-9)
    assert outcome.termination == Termination.TIME_LIMIT
    assert outcome.bound == 8  # the floor: f1 reads f0
    assert (outcome.best, outcome.is_infeasible) == (None, False)
    assert "no schedule was found" in outcome.reason


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("calls", [1, 5, 15])
def test_a_callback_that_fails_is_heard(calls, threads):
    """Its exception ends the solve and is raised by it, in any thread."""
    told = []

    def fail(progress):
        told.append(progress)
        if len(told) >= calls:
            raise LookupError("heard")

    with pytest.raises(LookupError, match="heard"):
        solved(comb_problem(14, 13, 5.0), on_progress=fail, threads=threads)


# -- starts --------------------------------------------------------------------------------------
def test_the_best_start_is_proved_to_be_the_best():
    """No better schedule is found, the start is returned, and the bound equals its value."""
    problem = comb_problem(8, 13)
    best = solved(problem).best
    outcome = solved(problem, start=best)
    assert outcome.termination == Termination.PROVED
    assert outcome.best is best
    assert outcome.bound == pytest.approx(best.value)


@pytest.mark.parametrize("minimize", list(Quantity))
@parametrize_parts(2)
def test_a_start_changes_no_value(part, minimize):
    """From the greedy schedule as without a start."""
    count = 0
    for number in part.select(range(15)):
        problem = scarce_problem(f"starts/{number}", (5, 9), minimize=minimize)
        schedule = None if infeasibility_reason(problem) is not None else construct(problem)
        if schedule is None:
            continue
        count += 1
        start = make_candidate(problem, schedule)
        assert not start.violations
        with_start, without = solved(problem, start=start), solved(problem)
        assert value_of(with_start) == pytest.approx(value_of(without), abs=1e-6), number
    assert count > part.divide(4)
