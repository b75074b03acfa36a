"""One model, one solve: starts, rejected schedules, and reports."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyomo.environ as pyo
import pytest

from kit.instances import make_rng, random_instance
from kit.worked import comb_problem, skip_problem
from poetmodel.backends.compiler import compile_model
from poetmodel.backends.highs import Highs
from poetmodel.backends.protocol import RawSolution, SolverStatus
from poetmodel.errors import VerificationError
from poetmodel.model import build
from poetmodel.model.compact import COMPACT
from poetmodel.result import Status, Termination
from poetmodel.schedule import Schedule, checkpoint_all
from poetmodel.schedule.document import load_document
from poetmodel.schedule.relations import format_document
from poetmodel.solver import SolveProgress, monolithic, solve
from poetmodel.solver.extended import prove_model
from poetmodel.solver.monolithic import TERMINATIONS, schedule_point
from poetmodel.solver.outcome import make_candidate
from poetmodel.solver.request import Request
from poetmodel.solver.search import MAX_HISTORY_ENTRIES, Search

RECOMPUTED = Schedule(R=((0, 0), (1, 1), (2, 2), (3, 0), (3, 3)), S_RAM=((1, 0), (2, 1), (3, 2)))
"""The best schedule of the worked example."""


# -- starts ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("minimize", "reductions"),
    [("energy", True), ("energy", False), ("time", True), ("ram", True), ("writes", True)],
)
def test_a_valid_schedule_is_a_complete_start(minimize, *, reductions):
    """Each column has a value, the model is satisfied, and the value is the verifier's.

    Keep-all, which needs 15 of 13 bytes, violates a row.
    """
    problem = skip_problem(minimize=minimize)
    model = build(problem, reductions=reductions)
    form = compile_model(model)
    values = schedule_point(form, RECOMPUTED)
    assert minimize == "ram" or form.max_violation(values) == 0.0
    found = form.objective_value(values) * model.objective_unit
    assert found == pytest.approx(make_candidate(problem, RECOMPUTED).value)
    kept = schedule_point(form, checkpoint_all(problem.graph))
    assert minimize == "ram" or form.max_violation(kept) > 0.1


def test_a_start_says_nothing_of_own_variables():
    """Their columns are left to the solver; those of `paper` mean something else altogether."""
    model = build(skip_problem())
    model.own = pyo.Var(bounds=(0, 1))
    model.row = pyo.Constraint(expr=model.own >= model.R[3, 0])
    assert np.isnan(schedule_point(compile_model(model), RECOMPUTED)).sum() == 1
    paper = build(skip_problem(), "paper")
    assert schedule_point(compile_model(paper), RECOMPUTED) is None


# -- what the verifier rejects --------------------------------------------------------------------
RUN = Highs.solve


def rejecting(monkeypatch, *, late):
    """Let the first run return all kept, as a coarse tolerance might, and perhaps no second one."""
    calls = []

    def first(self, form, limits, **options):
        calls.append(form)
        if len(calls) > 1 and late:
            return RawSolution(status=SolverStatus.TIME_LIMIT)
        raw = RUN(self, form, limits, **options)
        schedule = checkpoint_all(form.layout.model.problem.graph)
        return replace(raw, x=schedule_point(form, schedule)) if len(calls) == 1 else raw

    monkeypatch.setattr(Highs, "solve", first)


@pytest.mark.parametrize("late", [False, True])
def test_what_breaks_a_limit_is_excluded_and_the_model_solved_again(monkeypatch, *, late):
    """The second result is returned; without time for it, the start, and the bound of the first.

    Without a start, nothing is claimed then, and the reason is the time.
    """
    rejecting(monkeypatch, late=late)
    result = solve(skip_problem(), formulation="compact", gap=0.0)
    assert (result.violations, result.bound_j) == ((), pytest.approx(11.0))
    assert result.require_schedule()
    assert late or (result.status, result.overhead_j) == (Status.OPTIMAL, 1.0)
    if late:
        rejecting(monkeypatch, late=True)
        model = build(skip_problem())
        search = Search(problem=model.problem, request=Request(gap=0.0))
        prove_model(model, search, start=None)
        assert (search.best, search.termination) == (None, Termination.TIME_LIMIT)


def test_what_keeps_every_row_and_is_rejected_is_an_error(monkeypatch):
    """Then the model is wrong, and its result is discarded.

    For example, a formulation without memory rows has schedules that no device can run.
    """
    model = build(skip_problem(), COMPACT.without("memory", name="endless"))
    with pytest.raises(VerificationError, match="peak RAM 15 B"):
        solve(model)
    monkeypatch.setattr(
        monolithic, "schedule_from_columns", lambda model, _: checkpoint_all(model.problem.graph)
    )
    with pytest.raises(VerificationError, match="peak RAM 15 B") as caught:
        solve(skip_problem(), formulation="compact")
    assert len(caught.value.violations) == 1


# -- on the way --------------------------------------------------------------------------------
def progress_of(model, **options):
    """Solve; return the reports."""
    reported = []
    solve(model, on_progress=reported.append, **options)
    assert reported
    return reported


def test_progress_under_an_own_objective_says_nothing_of_energy():
    """Neither its values nor its bounds are energies."""
    model = build(comb_problem(9, 17, 9.0))
    model.objective.deactivate()
    model.mine = pyo.Objective(expr=sum(model.R.values()) + sum(model.S_RAM.values()))
    assert {(p.value, p.bound) for p in progress_of(model, gap=0.0)} == {(None, None)}


# -- what is requested, and how incumbent and bound met --------------------------------------------
def _rising(values):
    known = [value for value in values if value is not None]
    return known == sorted(known) and values[len(values) - len(known) :] == known


def check(result):
    """Check that times rise, both sides close in, and that the end is the result."""
    seconds, incumbents, bounds = map(list, zip(*result.history, strict=True))
    assert all(0 <= one <= other for one, other in pairwise(seconds))
    assert _rising([None if value is None else -value for value in incumbents])
    assert _rising(bounds)
    objective = result.problem.objective
    assert incumbents[-1] == objective.overhead_of(result.simulation)
    assert objective.baseline + bounds[-1] == pytest.approx(result.proven_bound)
    assert seconds[-1] == result.wall_s


@pytest.mark.parametrize("minimize", ["energy", "time", "ram", "writes"])
@pytest.mark.parametrize("formulation", ["lazy", "compact"])
def test_history_ends_with_the_result(formulation, minimize):
    """Values fall and bounds rise, in the unit of the objective, until they meet."""
    result = solve(skip_problem(minimize=minimize), formulation=formulation)
    assert result.status == Status.OPTIMAL
    check(result)


@pytest.mark.parametrize("counts", ["serial", "overlap"])
def test_history_of_a_deadline(counts):
    """A makespan, which is solved through surrogates, has one history."""
    check(solve(comb_problem(deadline="200%", deadline_counts=counts)))


@pytest.mark.parametrize("seed", range(6))
def test_watcher_sees_what_the_history_keeps(seed):
    """Each moment before the end was reported, and a watcher still stops the solve."""
    told = []
    problem = random_instance(make_rng(seed))
    result = solve(problem, on_progress=told.append)
    if result.schedule is None:
        return
    check(result)
    assert {moment[0] for moment in result.history[:-1]} <= {each.seconds for each in told}
    stopped = solve(comb_problem(), on_progress=lambda _: False)
    assert stopped.status == Status.FEASIBLE


def moment(seconds, overhead, bound):
    """Return the state of a solve after some seconds."""
    return SolveProgress(seconds=seconds, overhead=overhead, overhead_bound=bound)


def test_long_histories_are_thinned():
    """First and last moment stay; a value or bound that is worse than an earlier one is omitted."""
    search = Search(problem=skip_problem(), request=Request())
    for at in range(10_000):
        search.report(20_000.0 - at, float(at))
    assert len(search.history) <= MAX_HISTORY_ENTRIES
    assert search.history[0][1:] == (20_000.0, 0.0)
    assert search.history[-1][1:] == (10_001.0, 9999.0)
    search = Search(problem=skip_problem(), request=Request(), states_bound=False)
    for incumbent, bound in ((None, None), (None, 3), (9, 2), (9, 3), (8, 4)):
        search.report(incumbent, bound)
    assert [entry[1:] for entry in search.history] == [(None, 3), (9, 3), (8, 4)]


def test_file_keeps_the_history():
    """The read history is the written one, to ten digits."""
    result = solve(comb_problem())
    document = load_document("x", format_document(result.to_dict()).encode())
    assert len(document.history) == len(result.history)
    for read, made in zip(document.history, result.history, strict=True):
        assert read == pytest.approx(made, rel=1e-9)


# -- what is requested ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("incumbent", "bound", "gap"),
    [
        *((4.0, 3.0, 0.25), (4.0, 4.0, 0.0), (4.0, 5.0, 0.0), (0.0, 0.0, 0.0), (4.0, 0.0, 1.0)),
        *((None, 1.0, None), (4.0, None, None)),
    ],
)
def test_gap_of_progress(incumbent, bound, gap):
    """A fraction of the incumbent; None while either side is missing."""
    assert moment(1.0, incumbent, bound).gap == gap


def test_defaults_of_a_request():
    """HiGHS, a minute from the request on, one thread, a gap of 0.01 % of the overhead.

    Each status of a back end has a termination.
    """
    assert Request(time_limit_s=1000.0).remaining_s() > 900.0
    assert Request(time_limit_s=1e-9).remaining_s() == 0.0
    assert Request().elapsed_s() >= 0.0
    request = Request()
    assert (request.backend, request.time_limit_s) == ("highs", 60.0)
    assert (request.gap, request.threads, request.seed) == (1e-4, 1, 0)
    inner = {SolverStatus.INFEASIBLE_OR_UNBOUNDED, SolverStatus.FAILED}
    assert set(TERMINATIONS) == set(SolverStatus) - inner
