"""`solve` as a whole: problems, models, starts, limits, interruption, and reasons."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyomo.environ as pyo
import pytest

from kit.instances import random_instances
from kit.oracle import optimum
from kit.worked import (
    comb_graph,
    comb_problem,
    costs_of,
    even_costs,
    rename_graph,
    skip_graph,
    skip_problem,
)
from poetmodel.backends.highs import Highs
from poetmodel.backends.protocol import RawSolution, SolverStatus
from poetmodel.errors import InputError, ScheduleError, TimeLimitError, TooLargeError
from poetmodel.graph import Graph, operation
from poetmodel.heuristics.greedy import construct, page_everything
from poetmodel.model import build
from poetmodel.problem import Problem
from poetmodel.result import Status, Termination
from poetmodel.schedule import GraphIdentity, Schedule, check_schedule, checkpoint_all
from poetmodel.solver import lazy, monolithic, solve, task
from poetmodel.solver.outcome import make_candidate

EXACT = ["lazy", "compact"]
"""The formulations whose results are proved for the problem."""


def hard_problem():
    """State a problem that no back end proves in half a minute, for stopping on the way."""
    return comb_problem(16, 25, 9.0)


def medium_problem():
    """Return a problem that needs some branching, and about a second."""
    return comb_problem(9, 17, 9.0)


def with_own_variable(problem):
    """Build a model with rows for which the feasibility of a schedule is unknown."""
    model = build(problem)
    model.own = pyo.Var(bounds=(0, 2))
    model.beside = pyo.Constraint(expr=model.own + sum(model.M_in.values()) >= 1)
    return model


def as_it_is(problem):
    """Return the problem itself, beside `build` that makes a model of it."""
    return problem


def loose_start():
    """Return a problem on which greedy is not the best, and a best schedule of it."""
    for problem in random_instances(200, 5, seed=77, minimize="energy"):
        best, greedy = optimum(problem), construct(problem)
        if best is not None and greedy is not None:
            least, found = (make_candidate(problem, s).value for s in (best.schedule, greedy))
            if found > least + 1:
                return problem, best.schedule
    pytest.fail("greedy is the best everywhere")


# -- problems ----------------------------------------------------------------------------------
@pytest.mark.parametrize("formulation", EXACT)
def test_a_problem_is_solved_and_proved(formulation, monkeypatch):
    """Value, bound, gap and schedule of the worked example.

    If keep-all fits, it is optimal, and at the floor, so is the peak: without a solver.
    """
    problem = skip_problem()
    result = solve(problem, formulation=formulation, gap=0.0)
    assert (result.status, result.termination) == (Status.OPTIMAL, Termination.PROVED)
    assert (result.energy_j, result.bound_j, result.overhead_j, result.gap) == (11, 11, 1, 0)
    schedule = result.require_schedule()
    assert [pair for pair in schedule.R if pair[0] != pair[1]] == [(3, 0)]
    assert schedule.M_out == ()
    assert schedule.identity == GraphIdentity.from_graph(problem.graph)
    assert result.violations == check_schedule(problem, schedule).violations == ()
    assert result.formulation == formulation
    monkeypatch.setattr(Highs, "solve", lambda *_, **__: pytest.fail("called a solver"))
    result = solve(skip_problem(ram=15), formulation=formulation)
    assert result.schedule == checkpoint_all(skip_graph())
    assert (result.status, result.termination) == (Status.OPTIMAL, Termination.PROVED)
    assert (result.gap, result.overhead_j) == (0.0, 0.0)
    least = solve(skip_problem(ram=12, minimize="ram"), formulation=formulation)
    assert (least.status, least.value) == (Status.OPTIMAL, 12)
    graph = Graph(name="one", nodes=(operation("a", output_bytes=3),))
    one = solve(Problem(graph, even_costs(graph), ram=3), formulation=formulation)
    assert (one.status, one.overhead_j) == (Status.OPTIMAL, 0.0)


@pytest.mark.parametrize("formulation", EXACT)
def test_results_are_the_same_every_time(formulation):
    """One seed, one result: schedule, values, proof, rounds and history.

    Only the number of reports of a solver's bound depends on time.
    """

    def course():
        told = {}
        result = solve(
            medium_problem(),
            formulation=formulation,
            seed=3,
            on_progress=lambda progress: told.setdefault(progress.value) is None,
        )
        document = result.to_dict()
        for key in ("build_s", "solve_s", "primal_integral_s", "history"):
            del document[key]
        return document, dict(result.statistics), list(told)

    assert course() == course()


# -- arguments ---------------------------------------------------------------------------------
WRONG = {
    "time_limit": (0, -1.0, float("inf"), "60", True),
    "gap": (-0.1, float("nan"), "1%"),
    "threads": (0, 1.5, True),
    "seed": (-1, 0.5),
    "formulation": ("compcat",),
    "backend": ("cplex",),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_wrong_arguments_are_refused(name, value):
    """The error names the argument and its value."""
    with pytest.raises(InputError, match=f"^{name.replace('_', ' ')}.*{value}"):
        solve(skip_problem(), **{name: value})


def test_a_model_is_solved_as_it_was_built():
    """Another formulation is refused, its own is accepted. All wrong arguments are listed."""
    with pytest.raises(InputError) as caught:
        solve(skip_problem(), time_limit=0, gap=-1, threads=0, seed=-1)
    assert len(caught.value.faults) == 4
    model = build(skip_problem())
    with pytest.raises(InputError, match=r"^formulation: .*'compact'"):
        solve(model, formulation="paper")
    assert solve(model, formulation="compact").formulation == "compact"
    open_ = build(skip_problem(), reductions=False)
    assert solve(open_, formulation="compact").formulation == "compact-unreduced"


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"on_progress": 3}, "on_progress: expected a function, got 3"),
        ({"solver_options": [1]}, "solver_options: expected a dictionary, got a list"),
        ({"solver_options": 3}, "solver_options: expected a dictionary, got 3"),
    ],
)
def test_keywords_of_another_type_are_refused(keywords, message):
    """The error names the keyword, before a solve begins."""
    with pytest.raises(InputError, match=f"^{message}"):
        solve(skip_problem(), **keywords)


@pytest.mark.parametrize("thing", [None, "resnet18", skip_graph(), pyo.ConcreteModel()])
def test_what_is_neither_problem_nor_model_is_refused(thing):
    """The error states the expected types."""
    with pytest.raises(InputError, match="takes a Problem or a model"):
        solve(thing)


@pytest.mark.slow
def test_a_chain_of_fifty_thousand_nodes_and_its_gradient_has_a_schedule():
    """It is verified, within the default time limit on an idle machine; no file holds it."""
    problem = chain_problem(50_000)
    result = solve(problem, time_limit=240, on_progress=lambda told: told.value is None)
    schedule = result.require_schedule()
    assert result.violations == ()
    with pytest.raises(TooLargeError, match="coarsen the graph"):
        schedule.to_dict()


@pytest.mark.parametrize("make", [as_it_is, build], ids=["problem", "model"])
def test_a_makespan_is_solved_either_way(make):
    """A problem and a model of it keep a deadline that counts the plan's makespan."""
    result = solve(make(skip_problem(deadline=12, deadline_counts="overlap")))
    assert result.simulation.time_s == result.simulation.planned_s
    assert result.simulation.time_s <= 12
    assert solve(make(skip_problem(deadline_counts="overlap"))).overhead_j == 1.0


# -- starts ------------------------------------------------------------------------------------
@pytest.mark.parametrize("formulation", EXACT)
def test_a_start_is_what_is_left_when_time_is_out(formulation):
    """A start that is better than greedy is returned if no better one is found."""
    problem, schedule = loose_start()
    result = solve(problem, formulation=formulation, start=schedule, time_limit=1e-6)
    assert result.schedule == schedule
    assert (result.status, result.bound_j) == (Status.FEASIBLE, problem.baseline_energy_j)


WASTEFUL = Schedule(
    R=tuple((t, t) for t in range(4)),
    S_RAM=((1, 0), (2, 1), (3, 2)),
    S_AUX=((1, 0), (2, 0), (3, 0)),
    M_out=((0, 0), (1, 0)),
    M_in=((3, 0),),
)
"""`a` is paged, and paged out twice."""


@pytest.mark.parametrize("formulation", EXACT)
@pytest.mark.parametrize(
    ("start", "broken"), [(WASTEFUL, 0), (checkpoint_all(skip_graph()), 1)], ids=["paged", "kept"]
)
def test_a_start_does_not_stand_in_the_way(formulation, start, broken):
    """The optimum is found from a wasteful start, and from one that needs 15 of 13 bytes."""
    problem = skip_problem(recompute=False)
    assert len(check_schedule(problem, start).violations) == broken
    result = solve(problem, formulation=formulation, start=start, gap=0.0)
    assert (result.status, result.overhead_j) == (Status.OPTIMAL, 2.0)


@pytest.mark.parametrize("make", [as_it_is, build], ids=["problem", "model"])
def test_a_start_for_another_graph_and_what_is_no_schedule_are_refused(make):
    """The errors name both graphs, and the argument."""
    with pytest.raises(ScheduleError, match="made for graph 'comb'"):
        solve(make(skip_problem()), start=checkpoint_all(comb_graph()))
    with pytest.raises(InputError, match=r"^start: .*3"):
        solve(make(skip_problem()), start=3)


def test_a_start_that_breaks_a_constraint_of_the_model_is_not_returned():
    """At the time limit, only schedules that satisfy user constraints are returned."""
    problem, schedule = loose_start()
    free, bound = build(problem), build(problem)
    used = [bound.R[t, k] for t, k in schedule.R if k < t]
    used += [bound.M_in[t, i] for t, i in schedule.M_in]
    bound.other = pyo.Constraint(expr=sum(used) <= len(used) - 1)
    assert solve(free, start=schedule, time_limit=1e-6).schedule == schedule
    result = solve(bound, start=schedule, time_limit=1e-6)
    assert result.schedule != schedule


def test_a_user_s_own_variables_need_values_before_a_start_counts():
    """Whether a start satisfies rows over variables without values is unknown."""
    model = build(skip_problem())
    model.own = pyo.Var(bounds=(1, 2))
    model.row = pyo.Constraint(expr=model.own >= 1 + model.R[3, 0])
    result = solve(model, time_limit=1e-6)
    assert (result.status, result.schedule) == (Status.UNKNOWN, None)
    assert solve(model).overhead_j == 1.0


# -- infeasible --------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [as_it_is, build], ids=["problem", "model"])
@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"ram": 11}, "RAM budget 11 B: the minimum RAM is 12 B, which node 'd' needs for a (4 B)"),
        ({"deadline": 9}, "deadline 9 s: .* 10 s, without any transfer"),
        ({"deadline": 9, "deadline_counts": "compute"}, "deadline 9 s: .* 10 s; no schedule"),
        ({"energy_budget": 9.5}, "energy budget 9.5 J: .* 10 J; no schedule needs less"),
        ({"ram": 105, "count_parameters": True}, ".*take 100 B.*; 112 B with the parameters"),
    ],
)
def test_what_no_schedule_can_keep_is_reported_without_a_solver(make, limits, words):
    """Floor with step and tensors, deadline, energy: proved, with the least that is possible."""
    problem = skip_problem(**limits)
    if "count_parameters" in limits:
        graph = replace(skip_graph(workspace=True), resident_bytes={"parameters": 100})
        problem = replace(problem, graph=graph)
    result = solve(make(problem))
    assert (result.status, result.termination) == (Status.INFEASIBLE, Termination.PROVED)
    assert re.match(words.replace("(", r"\(").replace(")", r"\)"), result.reason)
    assert (result.schedule, result.energy_j, result.bound_j, result.gap) == (None,) * 4


@pytest.mark.parametrize("formulation", EXACT)
@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"recompute": False, "paging": False}, ["13 B", "without recomputation or paging"]),
        ({"deadline": 10.5}, ["RAM budget of 13 B", "deadline of 10.5 s (serial)"]),
        ({"energy_budget": 10.5}, ["RAM budget of 13 B", "energy budget of 10.5 J"]),
        ({"aux_bytes": 3, "recompute": False}, ["storage of 3 B", "without recomputation"]),
    ],
)
def test_what_a_solver_proves_infeasible_names_the_limits(formulation, limits, words):
    """No single limit is to blame: all of them are named."""
    problem = skip_problem(**limits)
    assert optimum(problem) is None
    result = solve(problem, formulation=formulation)
    assert (result.status, result.termination) == (Status.INFEASIBLE, Termination.PROVED)
    assert result.reason.startswith("proved: no schedule meets")
    assert all(word in result.reason for word in words)


def test_a_valid_schedule_refutes_a_proof_of_infeasibility(monkeypatch):
    """The problem is solved again without presolve; if that is as wrong, the schedule stays."""
    solve_form, asked = Highs.solve, []

    def wrong(self, form, limits, **more):
        asked.append(limits.presolve)
        if limits.presolve or not mended:
            return RawSolution(status=SolverStatus.INFEASIBLE)
        return solve_form(self, form, limits, **more)

    monkeypatch.setattr(Highs, "solve", wrong)
    for formulation in EXACT:
        for mended in (True, False):
            asked.clear()
            result = solve(skip_problem(), formulation=formulation)
            assert asked[0]
            assert not any(asked[1:])
            assert result.schedule is not None
            assert result.status == (Status.OPTIMAL if mended else Status.FEASIBLE)
            assert mended or "refutes" in result.reason


# -- running out of time, and being stopped ----------------------------------------------------
@pytest.mark.parametrize(
    ("make", "formulation"),
    [(as_it_is, "lazy"), (as_it_is, "compact"), (as_it_is, "paper"), (build, "compact")],
)
def test_without_time_the_greedy_schedule_is_returned(make, formulation):
    """It is valid, also for a model's rows, and the only bound is the baseline."""
    problem = hard_problem()
    result = solve(make(problem), formulation=formulation, time_limit=1e-6)
    assert (result.status, result.termination) == (Status.FEASIBLE, Termination.TIME_LIMIT)
    assert not check_schedule(problem, result.require_schedule()).violations
    assert (result.bound_j, result.gap) == (problem.baseline_energy_j, 1.0)


@pytest.mark.parametrize("formulation", ["compact", "paper"])
def test_building_ends_with_the_time_limit(formulation, monkeypatch, caplog):
    """For any estimate of its time: the greedy schedule is returned in time."""
    monkeypatch.setattr("poetmodel.model.building.estimate_build_s", lambda *_: 0.0)
    ends = []

    def check():
        ends.append(0.0)
        if len(ends) > 20:
            raise TimeLimitError("the time limit has passed")

    monkeypatch.setattr("poetmodel.model.arrays.check_time_limit", check)
    result = solve(hard_problem(), formulation=formulation)
    assert result.termination == Termination.TIME_LIMIT
    assert result.schedule is not None
    assert len(ends) == 21
    assert caplog.records == []


@pytest.mark.parametrize(("formulation", "threads"), [("compact", 1), ("lazy", 1), ("lazy", 2)])
def test_a_solver_that_looks_at_no_clock_is_left_behind(formulation, threads, monkeypatch):
    """The schedule at that time is the result; later reports are ignored."""
    problem, solved, over, told = skip_problem(), threading.Event(), threading.Event(), []
    run, best = Highs.run, solve(problem)

    def run_on(self, call):
        raw = run(self, call)
        solved.set()
        over.wait()
        call.report_solution(-1.0, lambda: np.zeros(call.form.n_columns), -1.0)
        return raw

    monkeypatch.setattr(Highs, "run", run_on)
    result = solve(
        problem, formulation=formulation, threads=threads, time_limit=2.0, on_progress=told.append
    )
    assert (result.status, result.termination) == (Status.FEASIBLE, Termination.TIME_LIMIT)
    assert not check_schedule(problem, result.require_schedule()).violations
    if formulation == "compact" and solved.is_set():  # a busy machine may be slower
        assert result.value == best.value
    before = len(told)
    over.set()
    for thread in threading.enumerate():
        if thread.name == "poetmodel-solve":
            thread.join(10)
    assert len(told) == before


def chain_problem(n):
    """State a problem with a chain of `n` nodes and its gradients, and half the RAM it uses."""
    nodes = [operation("f0", output_bytes=8)]
    for k in range(1, n):
        nodes.append(operation(f"f{k}", output_bytes=8, inputs=(f"f{k - 1}",)))
    for k in range(n):
        inputs = (f"b{k - 1}", f"f{n - 1 - k}") if k else (f"f{n - 1}",)
        nodes.append(operation(f"b{k}", output_bytes=8, inputs=inputs, phase="backward"))
    graph = Graph(name="chain", nodes=tuple(nodes))
    return Problem(graph, even_costs(graph), ram=4 * n)


def test_a_graph_too_large_for_a_file_is_solved(monkeypatch):
    """Files list a tensor for each stage: their size grows with the square of a chain.

    A model that is too large for memory claims nothing, and raises no error.
    """
    monkeypatch.setattr("poetmodel.schedule.relations.MAX_PAIRS", 1000)
    result = solve(chain_problem(200))
    assert (result.status, result.termination) == (Status.OPTIMAL, Termination.PROVED)
    with pytest.raises(TooLargeError, match="coarsen the graph"):
        result.require_schedule().to_dict()
    model = build(chain_problem(10))
    monkeypatch.setattr("poetmodel.schedule.relations.MAX_PAIRS", 10)
    result = solve(model)
    assert (result.status, result.termination) == (Status.UNKNOWN, Termination.STALLED)
    assert "coarsen the graph" in result.reason


@pytest.mark.parametrize("make", [as_it_is, build], ids=["problem", "model"])
def test_the_limit_holds_for_all_that_is_done_before_the_solver(make, monkeypatch):
    """Where not even the first schedule is made in time, no model is built and none solved."""
    given = make(chain_problem(10))
    monkeypatch.setattr(task, "GRACE_S", -1.0)
    for place in ("backends.highs.Highs.solve", "solver.lazy.relaxation.build_relaxation"):
        monkeypatch.setattr(f"poetmodel.{place}", lambda *_, **__: pytest.fail("went on"))
    result = solve(given, time_limit=1e-6)
    assert (result.status, result.termination) == (Status.UNKNOWN, Termination.TIME_LIMIT)
    assert "20 nodes" in result.reason


def test_compiling_a_model_ends_with_the_time_limit(monkeypatch):
    """Whether the greedy schedule keeps rows over own variables is not known: it is no answer."""

    def too_late():
        raise TimeLimitError("the time limit has passed")

    monkeypatch.setattr("poetmodel.backends.compiler.check_time_limit", too_late)
    result = solve(with_own_variable(medium_problem()))
    assert (result.status, result.termination) == (Status.UNKNOWN, Termination.TIME_LIMIT)
    assert result.reason == "the time limit passed while the model was built"


@pytest.mark.parametrize("make", [as_it_is, build], ids=["problem", "model"])
def test_what_a_late_solver_found_is_verified_and_kept(make, monkeypatch):
    """Solvers may exceed the limit by seconds; schedule and bound count all the same."""
    given, run = make(medium_problem()), Highs.solve

    def overrun(self, form, limits, **options):
        late_s = time.monotonic() + limits.time_s + 0.5
        raw = run(self, form, replace(limits, time_s=60.0), **options)
        time.sleep(max(0.0, late_s - time.monotonic()))
        return raw

    monkeypatch.setattr(Highs, "solve", overrun)
    monkeypatch.setattr("poetmodel.solver.monolithic.GRACE_S", 0.45)  # counts from then on
    result = solve(given, formulation="compact", time_limit=3.0)
    assert result.status == Status.OPTIMAL
    assert result.statistics["columns"] > 0


@pytest.mark.parametrize("threads", [1, 2])
def test_a_limit_that_passes_between_two_solves_keeps_the_schedule(threads, monkeypatch):
    """Cuts, placement and the verifier look at the clock, too; bound and schedule are kept."""

    def too_late(*_, **__):
        raise TimeLimitError("the time limit has passed")

    monkeypatch.setattr("poetmodel.solver.lazy.linear.stage_loads", too_late)
    result = solve(hard_problem(), threads=threads)
    assert (result.status, result.termination) == (Status.FEASIBLE, Termination.TIME_LIMIT)
    assert result.require_schedule()
    assert result.violations == ()
    assert result.overhead_bound_j > 0


@pytest.mark.parametrize("formulation", EXACT)
def test_a_time_limit_on_the_way_keeps_bound_and_schedule(formulation):
    """The present schedule and bound are returned."""
    problem = hard_problem()
    result = solve(problem, formulation=formulation, gap=0.0, time_limit=1.5)
    assert result.status in (Status.FEASIBLE, Status.OPTIMAL)
    assert problem.baseline_energy_j <= result.bound_j <= result.energy_j
    assert not check_schedule(problem, result.require_schedule()).violations


@pytest.mark.parametrize("formulation", EXACT)
def test_progress_is_reported(formulation):
    """Seconds grow, values do not get worse, bounds never exceed the result.

    Each value of `lazy` has a valid schedule of that value, up to the result itself.
    """
    problem, seen = hard_problem(), []
    gap = 0.05 if formulation == "lazy" else 0.25
    result = solve(problem, formulation=formulation, gap=gap, on_progress=seen.append)
    assert [p.seconds for p in seen] == sorted(p.seconds for p in seen)
    values = [p.value for p in seen if p.value is not None]
    assert min(values) >= result.value - 1e-6
    bounds = [p.bound for p in seen if p.bound is not None]
    assert result.baseline_energy_j <= min(bounds) <= max(bounds) <= result.value + 1e-6
    assert all(p.gap is None or 0 <= p.gap <= 1 for p in seen)
    assert seen[0].value is not None
    if formulation == "lazy":
        for progress in seen:
            verdict = check_schedule(problem, progress.schedule)
            assert verdict.valid
            assert verdict.simulation.energy_j == pytest.approx(progress.value)
            assert verdict.simulation.overhead_j == pytest.approx(progress.overhead)
        assert len(set(values)) > 1
        assert seen[-1].schedule == result.schedule


@pytest.mark.parametrize(("formulation", "threads"), [("lazy", 1), ("lazy", 2), ("compact", 1)])
@pytest.mark.parametrize("calls", [1, 2, 4, 8])
def test_a_callback_stops_the_solve(formulation, threads, calls):
    """Returning False at any call ends it with the best schedule so far, and a true bound."""
    told = []

    def stop_then(progress):
        told.append(progress)
        return len(told) < calls

    problem = hard_problem()
    result = solve(
        problem, formulation=formulation, threads=threads, gap=0.0, on_progress=stop_then
    )
    assert (result.status, result.termination) == (Status.FEASIBLE, Termination.INTERRUPTED)
    assert not check_schedule(problem, result.require_schedule()).violations
    assert problem.baseline_energy_j <= result.bound_j <= result.energy_j
    assert len(told) < calls + 3


class _Interrupted:
    """A back end during which Ctrl-C is hit twice."""

    def versions(self):
        return {"interrupted": "1"}

    def solve(self, *_, **__):
        raise KeyboardInterrupt


def test_ctrl_c_keeps_the_greedy_schedule(monkeypatch):
    """If the solver has no schedule yet, the start is the result.

    A start is not returned if its feasibility for user rows is unknown.
    """
    monkeypatch.setattr(monolithic, "backend", lambda _: _Interrupted())
    problem = skip_problem()
    result = solve(problem, formulation="compact")
    assert (result.status, result.termination) == (Status.FEASIBLE, Termination.INTERRUPTED)
    assert not check_schedule(problem, result.require_schedule()).violations
    assert result.gap == 1.0
    result = solve(with_own_variable(problem))
    assert (result.status, result.termination) == (Status.UNKNOWN, Termination.INTERRUPTED)
    assert result.schedule is None


class _Late:
    """A back end that ends by itself while Ctrl-C is hit, and then notes whether it is stopped."""

    def __init__(self):
        self.stopped = []

    def versions(self):
        return {"late": "1"}

    def solve(self, *_, stop, **__):
        self.stopped.append(stop.is_set())
        if len(self.stopped) == 1:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.wait(10)
            return RawSolution(status=SolverStatus.OTHER_LIMIT)
        status = SolverStatus.INTERRUPTED if stop.is_set() else SolverStatus.OTHER_LIMIT
        return RawSolution(status=status)


def test_ctrl_c_holds_for_later_calls_of_the_solver(monkeypatch):
    """If one ends just then, the next call, in another unit, does not use the time that is left."""
    late = _Late()
    monkeypatch.setattr(monolithic, "backend", lambda _: late)
    result = solve(skip_problem(), formulation="compact", gap=0.0)
    assert result.termination == Termination.INTERRUPTED
    assert late.stopped == [False, True]


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeLimitError])
def test_no_schedule_that_was_reported_is_lost(error, monkeypatch):
    """Of an interrupted solve, for example by a second Ctrl-C, the best schedule is the result."""
    problem = skip_problem()
    best, paged = solve(problem), page_everything(problem)
    assert best.simulation is not None
    value = problem.objective.overhead_of(best.simulation)

    def cut_short(search, **_):
        search.offer(best.schedule)
        raise error

    monkeypatch.setattr(task, "construct", lambda *_, **__: paged)
    monkeypatch.setattr(lazy, "prove", cut_short)
    result = solve(problem)
    assert result.termination in (Termination.INTERRUPTED, Termination.TIME_LIMIT)
    assert result.schedule == best.schedule != paged
    assert result.history[-1][1] == value


INTERRUPTED = """\
import os, signal, sys, time
import poetmodel as pm
sys.path.insert(0, sys.argv[2])
from kit.worked import comb_problem
problem, calls = comb_problem(16, 25, 9.0), []
def interrupt(progress):
    calls.append(progress)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
result = pm.solve(problem, gap=0.0, formulation=sys.argv[1], on_progress=interrupt)
verdict = pm.verify(problem, result.require_schedule())
print(result.status, result.termination, len(verdict.violations))
"""


@pytest.mark.skipif(os.name != "posix", reason="signals as on POSIX systems")
@pytest.mark.parametrize("formulation", EXACT)
def test_ctrl_c_during_a_real_solve(formulation):
    """A real SIGINT, in a process of its own, ends with the best schedule so far, verified."""
    command = [sys.executable, "-c", INTERRUPTED, formulation, str(Path(__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.split() == ["feasible", "interrupted", "0"], done.stderr


# -- properties --------------------------------------------------------------------------------
def test_the_result_carries_what_was_requested_and_what_was_solved():
    """Limits, gap, times, sizes, log and versions; names do not matter to status and optimum."""
    result = solve(medium_problem(), formulation="compact", gap=0.5, time_limit=30, seed=1)
    assert (result.requested_gap, result.time_limit_s) == (0.5, 30.0)
    assert result.build_s > 0
    assert result.solve_s > 0
    assert {"columns", "rows", "nonzeros", "nodes"} <= set(result.statistics)
    assert "HiGHS" in result.log
    assert {"poetmodel", "highs"} <= set(result.versions)
    by_default = solve(skip_problem())
    assert (by_default.formulation, by_default.backend) == ("lazy", "highs")
    for problem in random_instances(20, (3, 5), seed=32, minimize="energy", switches=False):
        table, graph = problem.table, rename_graph(problem.graph)
        costs = costs_of(
            graph,
            table.compute_time_s,
            table.compute_energy_j,
            list(zip(table.page_in_time_s, table.page_in_energy_j, strict=True)),
            list(zip(table.page_out_time_s, table.page_out_energy_j, strict=True)),
            device=problem.costs.device,
        )
        both = problem, replace(problem, graph=graph, costs=costs)
        first, second = (solve(each, formulation="compact", gap=0.0) for each in both)
        assert (first.status, first.energy_j) == (second.status, second.energy_j)


# -- own constraints -----------------------------------------------------------------------------
def wanted_again(often, **choices):
    """Return a problem in which `b` is to be recomputed, which has room only before `d` is made."""
    graph = Graph(
        name="again",
        nodes=(
            replace(operation("a", output_bytes=4), recomputable=False),
            replace(operation("b", output_bytes=1, inputs=("a",)), workspace_bytes=8),
            replace(operation("d", output_bytes=2), recomputable=False),
            operation("c", output_bytes=1, inputs=("d",)),
        ),
    )
    costs = even_costs(graph, page_in=(1, 3), page_out=(1, 2))
    problem = Problem(graph, costs, ram=13, **choices)
    return problem.subject_to(again=lambda v: v.recomputations["b"] >= often)


@pytest.mark.parametrize(
    ("often", "paging", "overhead_j"),
    [(1, True, 2), (2, True, 9), (3, True, None), (1, False, 2), (2, False, None)],
)
def test_what_has_no_room_where_groups_want_it_is_decided_by_stages(often, paging, overhead_j):
    """Once is free; twice pages `d` out and in; more, or twice without paging, is infeasible."""
    result = solve(wanted_again(often, paging=paging), time_limit=60)
    assert result.status == (Status.INFEASIBLE if overhead_j is None else Status.OPTIMAL)
    assert result.overhead_j == (overhead_j and pytest.approx(overhead_j))
