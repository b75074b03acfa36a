"""The driver's loop: what it reports, and how it stops."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kit import jobs
from kit.instances import scarce_problem
from kit.oracle import optimum
from kit.rotation import Part, parts
from kit.worked import comb_graph, comb_problem, even_costs, skip_problem
from poetmodel.backends.protocol import BackendProgress, RawSolution
from poetmodel.device import Costs
from poetmodel.errors import BackendError
from poetmodel.graph import Graph, operation
from poetmodel.heuristics.greedy import construct, page_everything
from poetmodel.model.aggregated import Grouping
from poetmodel.problem import Problem, Quantity
from poetmodel.problem.infeasibility import obstacle
from poetmodel.process import WorkerProcess
from poetmodel.result import Termination
from poetmodel.schedule import checkpoint_all
from poetmodel.solver.lazy import LazyParams, primal_worker, row_generation, solve_lazily
from poetmodel.solver.lazy.params import HEURISTICS
from poetmodel.solver.lazy.primal import PrimalHeuristic
from poetmodel.solver.lazy.row_generation import RowGeneration
from poetmodel.solver.lazy.session import Session
from poetmodel.solver.outcome import reported_bound, verify_schedule
from poetmodel.solver.request import Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.solver.outcome import Candidate, Outcome
    from poetmodel.solver.request import SolveProgress


def greedy(problem: Problem) -> Candidate:
    """Return the constructive start."""
    schedule = construct(problem)
    assert schedule is not None
    return verify_schedule(problem, schedule)


def solved(problem: Problem, **choices: Any) -> Outcome:
    """Solve to gap 0, by default from nothing."""
    first = choices.pop("first", None)
    start = choices.pop("start", None)
    params = choices.pop("params", None)
    request = Request(**{"gap": 0.0, "time_limit_s": 300.0, **choices})
    return solve_lazily(problem, request, start=start, first=first, params=params)


def value_of(outcome: Outcome) -> float:
    """Return the value of what was found."""
    assert outcome.candidate is not None
    assert not outcome.candidate.violations
    return outcome.candidate.value


# -- what it reports -----------------------------------------------------------------------------


def test_the_worked_example_takes_no_second_round() -> None:
    """Checkpoint-all is worst in stage 2; with its row the answer is right at once.

    The columns are keeping, recomputing, paging in and paging out `a`: `b` and `c` are free.
    """
    outcome = solved(skip_problem())
    assert outcome.termination == Termination.PROVED
    assert value_of(outcome) == pytest.approx(1.0)
    assert outcome.bound == pytest.approx(1.0)
    statistics = outcome.statistics
    assert statistics["rounds"] <= 1  # none where the linear phase proves it
    assert (statistics["enforced_rows"], statistics["columns"]) == (1, 4)
    assert statistics["rows"] >= 3
    assert set(outcome.versions) == {"highs", "highspy"}
    assert outcome.build_s > 0
    assert outcome.log


def test_statistics_tell_rounds_rows_and_columns() -> None:
    """Several rounds, fewer rows than stages, and far fewer columns than the whole model has."""
    problem = comb_problem()
    outcome = solved(problem)
    assert outcome.termination == Termination.PROVED
    assert outcome.statistics["rounds"] > 1
    assert 1 < outcome.statistics["enforced_rows"] < 20
    assert outcome.statistics["nodes"] >= 0
    assert 0.0 <= outcome.statistics["root_bound"] <= outcome.bound
    assert 20 < outcome.statistics["columns"] < 150


def rounds_of(value: float | None, bound: float) -> RowGeneration:
    """Begin a solve with a bound and a schedule of some value, or none."""
    problem = comb_problem()
    best = None if value is None else replace(greedy(problem), value=value)
    session = Session(problem, Request(gap=0.0, time_limit_s=300.0), best, bound=bound)
    return RowGeneration(session, Grouping(20))


def test_the_allowance_of_a_cutoff_is_no_bound() -> None:
    """Nothing below the cutoff means nothing below the best value; more is a contradiction."""
    session = rounds_of(10.0, 2.0).session
    relaxation = session.build(Grouping(20))
    cutoff = session.cutoff(relaxation)["objective_cutoff"]
    assert cutoff * relaxation.unit > 10.0
    assert session.within_cutoff(relaxation, cutoff) == 10.0
    assert session.within_cutoff(relaxation, 5.0 / relaxation.unit) == pytest.approx(5.0)
    assert session.within_cutoff(relaxation, 10.1 / relaxation.unit) == pytest.approx(10.1)
    session = rounds_of(None, 2.0).session
    assert session.within_cutoff(relaxation, 1e9) == pytest.approx(1e9 * relaxation.unit)


@pytest.mark.parametrize("large", [10**6, 10**9])
def test_few_written_bytes_beside_large_tensors(large: int) -> None:
    """The best schedule writes a few bytes, in units of the largest tensor hardly anything."""
    chain = (
        operation("wide", output_bytes=large),
        operation("small", output_bytes=3, inputs=("wide",), recomputable=False),
        operation("other", output_bytes=large, inputs=("small",)),
        operation("last", output_bytes=1, inputs=("other",)),
        operation("end", output_bytes=large, inputs=("last", "small")),
        operation("sum", output_bytes=large, inputs=("end",)),
    )
    graph = Graph(name="wide", nodes=chain)
    problem = Problem(graph, even_costs(graph), ram=2 * large + 1, minimize="writes")
    best = optimum(problem)
    outcome = solved(problem)
    assert best is not None
    assert outcome.termination == Termination.PROVED
    assert value_of(outcome) == pytest.approx(best.value - problem.objective.baseline)


def test_what_a_run_that_went_wrong_told_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bounds on the way are void; what the second run ended with counts."""
    rounds = rounds_of(10.0, 2.0)
    session = rounds.session
    relaxation = session.build(Grouping(20))
    solve = type(session.solver).solve

    def misled(solver: Any, form: Any, limits: Any, **given: Any) -> RawSolution:
        given["on_progress"](BackendProgress(incumbent=None, bound=9.0, x=None))
        assert session.bounds.lower > 2.0
        return replace(solve(solver, form, limits, **given), solved_again=True)

    monkeypatch.setattr(type(session.solver), "solve", misled)

    def watch(progress: BackendProgress) -> bool:
        assert progress.bound is not None
        session.raise_bound(progress.bound)
        return True

    assert session.solve(relaxation.form, watch=watch) is not None
    assert session.bounds.lower == 2.0


@pytest.mark.parametrize("repairs", [True, False])
def test_an_answer_on_the_way_becomes_a_schedule_by_repair(
    monkeypatch: pytest.MonkeyPatch, *, repairs: bool
) -> None:
    """Without a local search: the running solve waits. Without that repair there is none yet."""
    monkeypatch.setattr(PrimalHeuristic, "improve", lambda _: pytest.fail("a local search"))
    problem = comb_problem()
    params = LazyParams(heuristics=HEURISTICS - ({"repair_on_the_way"} if not repairs else set()))
    session = Session(problem, Request(gap=0.0), None, params=params)
    rounds = RowGeneration(session, Grouping(20))
    relaxation = session.build(Grouping(20, frozenset({9})))
    raw = session.solve(relaxation.form)
    assert raw is not None
    assert raw.x is not None
    assert row_generation.examine(session, relaxation, raw.x)
    assert session.bounds.incumbent is None
    progress = BackendProgress(incumbent=raw.objective, bound=None, x=raw.x)
    assert rounds._watch(relaxation, progress)
    assert (session.bounds.incumbent is not None) == repairs


def test_the_same_seed_gives_the_same_course() -> None:
    """With one thread and time enough: same schedules, same bound, same rounds.

    How often a solver tells of its bound on the way is a matter of time.
    """
    problem = comb_problem()

    def course() -> tuple[Any, ...]:
        values: dict[float | None, None] = {}

        def watch(progress: SolveProgress) -> None:
            values[progress.incumbent] = None

        outcome = solved(problem, seed=5, on_progress=watch)
        assert outcome.candidate is not None
        return outcome.candidate.schedule, outcome.bound, dict(outcome.statistics), list(values)

    assert course() == course()


def test_a_gap_that_is_asked_for_is_enough() -> None:
    """With a gap of a half it stops earlier, and claims no more than it proved."""
    problem = comb_problem(12, 13)
    exact, rough = solved(problem), solved(problem, gap=0.5)
    assert rough.termination == Termination.PROVED
    assert value_of(rough) * 0.5 <= rough.bound * (1 + 1e-9)
    assert rough.bound <= value_of(exact) * (1 + 1e-9) <= value_of(rough) * (1 + 2e-9)
    assert rough.statistics["rounds"] <= exact.statistics["rounds"]


# -- progress ------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("minimize", ["energy", "ram"])
def test_progress_only_gets_better(threads: int, minimize: str) -> None:
    """The bound never falls, the incumbent never rises, and they never cross."""
    problem = comb_problem(8, 13, minimize=minimize, deadline="120%")
    told: list[SolveProgress] = []
    outcome = solved(problem, threads=threads, on_progress=told.append)
    value = value_of(outcome)
    bounds = [progress.bound for progress in told if progress.bound is not None]
    incumbents = [progress.incumbent for progress in told if progress.incumbent is not None]
    assert len(bounds) == len(told) > 2
    assert bounds == sorted(bounds)
    assert incumbents == sorted(incumbents, reverse=True)
    assert incumbents[-1] == value
    assert max(bounds) <= value * (1 + 1e-6)
    assert outcome.candidate is not None
    bound = reported_bound(problem, outcome.candidate, outcome.bound)  # bytes are whole
    assert bound == pytest.approx(value)


# -- two threads ---------------------------------------------------------------------------------


AT_ONCE = LazyParams(worker_start_s=0.0)
"""Start the worker at once."""


@pytest.mark.slow
@pytest.mark.parametrize("start_s", [0.0, 0.3, 1e9])
def test_a_search_beside_the_proof_changes_no_value(
    start_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever its process starts, or if it never does; without leaving one."""
    params = LazyParams(worker_start_s=start_s)
    made: list[WorkerProcess] = []

    def noted() -> WorkerProcess:
        made.append(WorkerProcess())
        return made[-1]

    monkeypatch.setattr(primal_worker, "WorkerProcess", noted)
    problem = comb_problem(14, 13, 5.0)
    paged = verify_schedule(problem, page_everything(problem))
    outcome = solved(problem, start=paged, threads=2, params=params)
    assert outcome.termination == Termination.PROVED
    assert value_of(outcome) == pytest.approx(77.0)
    assert outcome.bound == pytest.approx(77.0)
    assert not any(process.is_alive for process in made)
    assert len(made) == 1 or start_s > 0.0
    assert 1 < outcome.statistics["enforced_rows"] < 28


def test_one_thread_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it make ready to."""
    monkeypatch.setattr(primal_worker, "PrimalWorker", lambda _: pytest.fail("made ready"))
    assert solved(comb_problem(6, 9), threads=1).termination == Termination.PROVED


def test_a_search_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with one thread; the solve does not go on without a word."""
    monkeypatch.setattr(primal_worker, "search_schedules", jobs.failing)
    with pytest.raises(BackendError, match="LookupError: of its own"):
        solved(comb_problem(14, 13, 5.0), threads=2, params=AT_ONCE)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="no such signals")
def test_the_proof_goes_on_without_a_search_that_was_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It searches by itself again, and the log tells."""
    monkeypatch.setattr(primal_worker, "search_schedules", jobs.ending)
    outcome = solved(comb_problem(14, 13, 5.0), threads=2, params=AT_ONCE)
    assert outcome.termination == Termination.PROVED
    assert value_of(outcome) == pytest.approx(77.0)
    assert "ended unexpectedly (status -9)" in outcome.log


# -- how it stops --------------------------------------------------------------------------------


def test_without_time_the_start_comes_back_with_a_bound() -> None:
    """Even if not a single relaxation could be solved."""
    problem = comb_problem()
    start = greedy(problem)
    outcome = solved(problem, start=start, time_limit_s=1e-9)
    assert outcome.termination == Termination.TIME_LIMIT
    assert outcome.candidate is start
    assert outcome.bound == 0.0
    assert outcome.statistics["rounds"] == 0
    least = comb_problem(minimize="ram")
    assert solved(least, time_limit_s=1e-9).bound == 8  # the floor: f1 reads f0


def test_without_time_or_start_nothing_is_claimed() -> None:
    """Neither a schedule nor that there is none."""
    outcome = solved(comb_problem(), time_limit_s=1e-9)
    assert outcome.termination == Termination.TIME_LIMIT
    assert outcome.candidate is None
    assert not outcome.infeasible
    assert "no schedule was found" in outcome.reason


def stop_after(calls: int) -> Callable[[SolveProgress], bool]:
    """Return a callback that answers False from some call on."""
    count = 0

    def watch(_: SolveProgress) -> bool:
        nonlocal count
        count += 1
        return count < calls

    return watch


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("calls", [1, 2, 4, 8, 16])
def test_a_callback_stops_the_rounds_anywhere(calls: int, threads: int) -> None:
    """What was found by then is returned, with a bound that holds."""
    problem = comb_problem(14, 13, 5.0)
    start = greedy(problem)
    outcome = solved(problem, start=start, threads=threads, on_progress=stop_after(calls))
    assert outcome.termination == Termination.INTERRUPTED
    assert value_of(outcome) <= start.value
    assert 0.0 <= outcome.bound <= 78.0 * (1 + 1e-6)  # the least value, by longer solves
    assert not outcome.infeasible


def test_ctrl_c_keeps_the_best_schedule_so_far() -> None:
    """A signal in the middle of the rounds ends them; the rounds' own schedule is returned."""
    problem = comb_problem(14, 13, 5.0)
    everything = page_everything(problem)  # dear, so that the rounds find better ones
    assert everything is not None
    start = verify_schedule(problem, everything)
    found: list[float] = []

    def interrupt(progress: SolveProgress) -> None:
        if progress.incumbent is not None and progress.incumbent < start.value and not found:
            found.append(progress.incumbent)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job has none
    try:
        outcome = solved(problem, start=start, on_progress=interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    assert found
    assert outcome.termination == Termination.INTERRUPTED
    assert value_of(outcome) <= found[0]
    assert outcome.bound <= value_of(outcome)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("calls", [1, 5, 15])
def test_a_callback_that_fails_is_heard(calls: int, threads: int) -> None:
    """Its exception ends the solve and comes out of it, whichever thread it was called from."""
    count = 0

    def fail(_: SolveProgress) -> None:
        nonlocal count
        count += 1
        if count >= calls:
            msg = "heard"
            raise LookupError(msg)

    with pytest.raises(LookupError, match="heard"):
        solved(comb_problem(14, 13, 5.0), on_progress=fail, threads=threads)


# -- infeasible problems -------------------------------------------------------------------------


def test_what_cannot_be_is_proved() -> None:
    """The skip connection without paging and recomputation needs 15 bytes."""
    outcome = solved(skip_problem(recompute=False, paging=False, ram=14))
    assert outcome.infeasible
    assert outcome.termination == Termination.PROVED
    assert outcome.candidate is None
    assert outcome.reason.startswith("proved: ")


# -- starts --------------------------------------------------------------------------------------


def test_the_best_start_is_proved_to_be_the_best() -> None:
    """Nothing better is found, the start itself comes back, and the bound meets it."""
    problem = comb_problem(8, 13)
    best = solved(problem).candidate
    assert best is not None
    outcome = solved(problem, start=best)
    assert outcome.termination == Termination.PROVED
    assert outcome.candidate is best
    assert outcome.bound == pytest.approx(best.value)


@pytest.mark.parametrize("minimize", list(Quantity))
@parts(2)
def test_a_start_changes_no_value(part: Part, minimize: str) -> None:
    """From the greedy schedule as from nothing."""
    count = 0
    for number in part.of(range(15)):
        problem = scarce_problem(f"starts/{number}", (5, 9), minimize=minimize)
        schedule = None if obstacle(problem) is not None else construct(problem)
        if schedule is None:
            continue
        count += 1
        start = verify_schedule(problem, schedule)
        assert not start.violations
        with_start, without = solved(problem, start=start), solved(problem)
        assert value_of(with_start) == pytest.approx(value_of(without), abs=1e-6), number
    assert count > part.share(4)


# -- numbers -------------------------------------------------------------------------------------


def two_peaks(size: int, ram: int) -> Problem:
    """State a problem with two equal peaks one after the other, each for one recomputation."""
    nodes = []
    for part, before in (("a", ()), ("b", ("a3",))):
        nodes += [
            operation(f"{part}0", output_bytes=size, inputs=before),
            operation(f"{part}1", output_bytes=size, inputs=(f"{part}0",)),
            operation(f"{part}2", output_bytes=size, inputs=(f"{part}1",)),
            operation(f"{part}3", output_bytes=1, inputs=(f"{part}2", f"{part}0")),
        ]
    graph = Graph(name="peaks", nodes=tuple(nodes))
    ones = [1.0] * 8
    costs = Costs.from_arrays(graph, compute_time_s=ones, compute_energy_j=ones)
    return Problem(graph, costs, ram=ram)


@pytest.mark.parametrize("size", [4, 4_000, 400_000_000])
def test_a_single_byte_counts_at_any_scale(size: int) -> None:
    """A row that is broken by one byte of a gigabyte is broken: both peaks cost a recomputation."""
    problem = two_peaks(size, 3 * size - 1)
    best = optimum(problem)
    assert best is not None
    assert best.value - problem.objective.baseline == 2.0
    outcome = solved(problem)
    assert outcome.termination == Termination.PROVED
    assert value_of(outcome) == 2.0


@pytest.mark.parametrize(("ram", "value"), [(300_000_004, 0.0), (300_000_003, 5.0)])
def test_what_only_a_tolerance_lets_through_is_cut_off(ram: int, value: float) -> None:
    """A row of tensors of 100 MB and of 4 B: to a solver, the last 4 B are nothing.

    Keeping all of `x`, `k`, `s` and `e` takes 300,000,004 bytes; without room for all of it, the
    cheapest is to make `s` (4 B) again.
    """
    graph = Graph(
        name="mixed",
        nodes=(
            operation("x", output_bytes=100_000_000),
            operation("s", output_bytes=4),
            operation("k", output_bytes=100_000_000),
            operation("e", output_bytes=100_000_000, inputs=("k",)),
            operation("u", output_bytes=0, inputs=("x",)),
            operation("v", output_bytes=0, inputs=("s", "e")),
        ),
    )
    costs = Costs.from_arrays(
        graph, compute_time_s=[1.0] * 6, compute_energy_j=[9.0, 5.0, 9.0, 9.0, 1.0, 1.0]
    )
    problem = Problem(graph, costs, ram=ram)
    outcome = solved(problem)
    assert outcome.termination == Termination.PROVED
    assert value_of(outcome) == value
    assert outcome.bound == pytest.approx(value, abs=1e-6)


def test_costs_of_any_size_are_compared() -> None:
    """Microjoules and megajoules have the same best schedule."""
    graph = comb_graph(6)
    schedules = []
    for unit in (1e-9, 1.0, 1e9):
        table = [unit * (k + 1) for k in range(12)]
        costs = Costs.from_arrays(graph, compute_time_s=table, compute_energy_j=table)
        outcome = solved(Problem(graph, costs, ram=9))
        assert outcome.termination == Termination.PROVED
        assert outcome.candidate is not None
        schedules.append(outcome.candidate.value / unit)
    assert schedules == pytest.approx([schedules[0]] * 3)


def test_where_nothing_need_be_decided_nothing_is_paid() -> None:
    """With RAM for everything the rounds end at keep-all, without a column."""
    problem = comb_problem(4, 100)
    outcome = solved(problem)
    assert value_of(outcome) == outcome.bound == 0.0
    assert outcome.candidate is not None
    assert outcome.candidate.schedule == checkpoint_all(problem.graph)


# -- back ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("scip", marks=pytest.mark.scip),
        pytest.param("gurobi", marks=pytest.mark.gurobi),
    ],
)
def test_every_back_end_finds_the_same_optimum(backend: str) -> None:
    """On random problems and on a comb, HiGHS and the others agree to gap 0."""
    pytest.importorskip({"scip": "pyscipopt", "gurobi": "gurobipy"}[backend])
    problems = [scarce_problem(f"solvers/{number}", (5, 8)) for number in range(12)]
    problems = [problem for problem in problems if obstacle(problem) is None]
    for number, problem in enumerate([*problems, comb_problem(7, 13)]):
        one, other = solved(problem), solved(problem, backend=backend)
        assert other.termination == Termination.PROVED, number
        assert one.infeasible == other.infeasible, number
        if not one.infeasible:
            assert value_of(other) == pytest.approx(value_of(one), abs=1e-6), number
            assert other.bound == pytest.approx(value_of(one), abs=1e-5), number
