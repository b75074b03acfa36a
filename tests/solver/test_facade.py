"""`solve` as a whole: problems, models, starts, limits, interruption, and what infeasible says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pyomo.environ as pyo
import pytest

from kit.instances import random_instance, random_instances, seeded
from kit.oracle import optimum
from kit.own_rows import constrained
from kit.rotation import Part, parts
from kit.worked import comb_graph, even_costs, skip_graph, skip_problem
from poetmodel.backends.highs import Highs
from poetmodel.backends.protocol import Limits, RawSolution, SolverStatus
from poetmodel.errors import InputError, ScheduleError, TimeLimitError, TooLargeError
from poetmodel.graph import Graph, operation
from poetmodel.heuristics.greedy import construct, page_everything
from poetmodel.model import build
from poetmodel.problem import Problem
from poetmodel.result import SolveResult, Status, Termination
from poetmodel.schedule import GraphIdentity, Schedule, checkpoint_all, verify
from poetmodel.solver import SolveProgress, facade, lazy, monolithic, solve
from poetmodel.solver.outcome import verify_schedule

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.backends.call import SolverCall
    from poetmodel.solver.request import Request

EXACT = ["lazy", "compact"]
"""The formulations whose results are proved for the problem."""


def hard_problem() -> Problem:
    """State a problem that no back end proves in half a minute, for stopping on the way."""
    graph = comb_graph(16)
    return Problem(graph, even_costs(graph, page_in=(9, 9), page_out=(9, 9)), ram=25)


def as_it_is(problem: Problem) -> Problem:
    """Return the problem itself, beside `build` that makes a model of it."""
    return problem


def medium_problem() -> Problem:
    """State a problem that takes a solver some branching, and about a second."""
    graph = comb_graph(9)
    return Problem(graph, even_costs(graph, page_in=(9, 9), page_out=(9, 9)), ram=17)


def loose_start() -> tuple[Problem, Schedule]:
    """Return a problem on which greedy is not the best, and a best schedule of it."""
    for problem in random_instances(200, 5, seed=77, minimize="energy"):
        best, greedy = optimum(problem), construct(problem)
        if best is None or greedy is None:
            continue
        if (
            verify_schedule(problem, greedy).value
            > verify_schedule(problem, best.schedule).value + 1
        ):
            return problem, best.schedule
    pytest.fail("greedy is the best everywhere")


# -- problems ----------------------------------------------------------------------------------


@pytest.mark.parametrize("formulation", EXACT)
def test_a_problem_is_solved_and_proved(formulation: str) -> None:
    """Value, bound, gap and schedule of the worked example."""
    problem = skip_problem()
    result = solve(problem, formulation=formulation, gap=0.0)
    assert (result.status, result.termination) == (Status.OPTIMAL, Termination.PROVED)
    assert (result.energy_j, result.bound_j, result.overhead_j, result.gap) == (11, 11, 1, 0)
    schedule = result.require_schedule()
    assert [pair for pair in schedule.R if pair[0] != pair[1]] == [(3, 0)]
    assert schedule.M_out == ()
    assert schedule.identity == GraphIdentity.of(problem.graph)
    assert result.violations == verify(problem, schedule).violations == ()
    assert result.formulation == formulation


@pytest.mark.parametrize("formulation", EXACT)
@pytest.mark.parametrize(
    ("minimize", "value"), [("energy", 11.0), ("time", 11.0), ("ram", 12), ("writes", 0)]
)
def test_each_quantity_is_minimized(formulation: str, minimize: str, value: float) -> None:
    """One recomputation costs 1 J and 1 s; 12 bytes are the floor; nothing need be written."""
    result = solve(skip_problem(minimize=minimize), formulation=formulation, gap=0.0)
    assert (result.status, result.objective_value) == (Status.OPTIMAL, value)
    assert (result.objective_bound, result.objective_gap) == (value, 0.0)


def test_a_problem_is_solved_by_lazy_by_default() -> None:
    """The result says which formulation and which back end made it, and their versions."""
    result = solve(skip_problem())
    assert (result.formulation, result.backend) == ("lazy", "highs")
    assert {"poetmodel", "highs"} <= set(result.versions)


@pytest.mark.parametrize("formulation", EXACT)
def test_all_kept_is_returned_where_it_fits(
    formulation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No solver is called where nothing can cost less."""
    monkeypatch.setattr(Highs, "solve", lambda *_, **__: pytest.fail("called a solver"))
    problem = skip_problem(ram=15)
    result = solve(problem, formulation=formulation)
    assert result.schedule == checkpoint_all(problem.graph)
    assert (result.status, result.gap, result.overhead_j) == (Status.OPTIMAL, 0.0, 0.0)
    assert result.termination == Termination.PROVED


def test_the_least_ram_is_returned_where_greedy_reaches_the_floor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A schedule at the floor has the least peak there is."""
    monkeypatch.setattr(Highs, "solve", lambda *_, **__: pytest.fail("called a solver"))
    result = solve(skip_problem(ram=12, minimize="ram"))
    assert (result.status, result.objective_value) == (Status.OPTIMAL, 12)


def test_a_graph_of_one_node() -> None:
    """There is nothing to decide."""
    graph = Graph(name="one", nodes=(operation("a", output_bytes=3),))
    result = solve(Problem(graph, even_costs(graph), ram=3))
    assert (result.status, result.overhead_j) == (Status.OPTIMAL, 0.0)


@pytest.mark.parametrize("formulation", EXACT)
def test_the_requested_gap_is_enough(formulation: str) -> None:
    """A looser gap is still optimal in the sense of the request, and the bound holds."""
    problem = medium_problem()
    exact = solve(problem, formulation=formulation, gap=0.0)
    loose = solve(problem, formulation=formulation, gap=0.5)
    assert loose.status == Status.OPTIMAL
    assert loose.gap is not None
    assert loose.gap <= 0.5
    assert loose.bound_j is not None
    assert exact.energy_j is not None
    assert loose.bound_j <= exact.energy_j + 1e-9


@pytest.mark.parametrize("formulation", EXACT)
def test_results_are_the_same_every_time(formulation: str) -> None:
    """One seed, one answer: schedule, figures, proof."""
    first, second = (
        solve(medium_problem(), formulation=formulation, seed=3).to_dict() for _ in range(2)
    )
    for key in ("build_s", "solve_s", "history"):
        del first[key], second[key]
    assert first == second


# -- arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"time_limit": 0}, "time limit: expected seconds above 0, got 0"),
        ({"time_limit": -1.0}, "time limit: expected seconds above 0"),
        ({"time_limit": float("inf")}, "time limit: expected seconds above 0, got inf"),
        ({"time_limit": "60"}, "time limit: expected seconds above 0, got '60'"),
        ({"gap": -0.1}, "gap: expected a finite fraction of 0 or more, got -0.1"),
        ({"gap": float("nan")}, "gap: expected a finite fraction"),
        ({"threads": 0}, "threads: expected a whole number from 1, got 0"),
        ({"threads": 1.5}, "threads: expected a whole number from 1"),
        ({"threads": True}, "threads: expected a whole number from 1"),
        ({"seed": -1}, "seed: expected a whole number from 0, got -1"),
        ({"formulation": "compcat"}, "formulation: expected lazy, compact or paper, got 'compcat'"),
        ({"backend": "cplex"}, "cplex"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    """The error names the argument and says what is accepted."""
    with pytest.raises(InputError, match=message):
        solve(skip_problem(), **arguments)


def test_all_wrong_arguments_are_reported_at_once() -> None:
    """One error carries every fault."""
    with pytest.raises(InputError) as caught:
        solve(skip_problem(), time_limit=0, gap=-1, threads=0, seed=-1)
    assert len(caught.value.faults) == 4


@pytest.mark.parametrize("thing", [None, "resnet18", skip_graph(), pyo.ConcreteModel()])
def test_what_is_neither_problem_nor_model_is_refused(thing: Any) -> None:
    """The error says what is expected."""
    with pytest.raises(InputError, match="takes a Problem or a model made by build"):
        solve(thing)


def test_a_model_is_solved_as_it_was_built() -> None:
    """Another formulation cannot be requested any more; its own name can."""
    model = build(skip_problem())
    with pytest.raises(InputError, match="the model was built as 'compact'"):
        solve(model, formulation="paper")
    assert solve(model, formulation="compact").formulation == "compact"
    open_ = build(skip_problem(), reductions=False)
    assert solve(open_, formulation="compact").formulation == "compact-unreduced"


@pytest.mark.slow
def test_a_chain_of_fifty_thousand_nodes_and_its_gradient_has_a_schedule() -> None:
    """It is verified, within the default time limit on an idle machine; no file takes it."""
    problem = chain_problem(50_000)
    result = solve(problem, time_limit=240, on_progress=lambda told: told.incumbent is None)
    schedule = result.require_schedule()
    assert result.violations == ()
    with pytest.raises(TooLargeError, match="coarsen the graph"):
        schedule.to_dict()


@pytest.mark.parametrize("make", [as_it_is, build], ids=["problem", "model"])
def test_a_makespan_is_solved_either_way(make: Callable[[Problem], Any]) -> None:
    """A problem and a model of it keep a deadline that counts the plan's makespan."""
    result = solve(make(skip_problem(deadline=12, deadline_counts="overlap")))
    assert result.simulation is not None
    assert result.simulation.time_s == result.simulation.planned_s
    assert result.simulation.time_s <= 12
    assert solve(make(skip_problem(deadline_counts="overlap"))).overhead_j == 1.0


# -- starts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("formulation", EXACT)
def test_a_start_is_what_is_left_when_time_is_out(formulation: str) -> None:
    """A start that is better than greedy is returned if nothing better is found."""
    problem, schedule = loose_start()
    result = solve(problem, formulation=formulation, start=schedule, time_limit=1e-6)
    assert result.schedule == schedule
    assert (result.status, result.bound_j) == (Status.FEASIBLE, problem.baseline_energy_j)


@pytest.mark.parametrize("formulation", EXACT)
def test_a_start_does_not_stand_in_the_way(formulation: str) -> None:
    """The optimum is found from a wasteful start as well."""
    problem = skip_problem(recompute=False)
    wasteful = Schedule(
        R=tuple((t, t) for t in range(4)),
        S_RAM=((1, 0), (2, 1), (3, 2)),
        S_AUX=((1, 0), (2, 0), (3, 0)),
        M_out=((0, 0), (1, 0)),
        M_in=((3, 0),),
    )
    assert not verify(problem, wasteful).violations
    result = solve(problem, formulation=formulation, start=wasteful, gap=0.0)
    assert (result.status, result.overhead_j) == (Status.OPTIMAL, 2.0)


@pytest.mark.parametrize("formulation", EXACT)
def test_a_start_that_breaks_a_limit_is_left_aside(formulation: str) -> None:
    """All kept takes 15 of 13 bytes: no schedule of the problem, so it is not one to begin from."""
    problem = skip_problem()
    result = solve(problem, formulation=formulation, start=checkpoint_all(problem.graph), gap=0.0)
    assert (result.status, result.overhead_j) == (Status.OPTIMAL, 1.0)


@pytest.mark.parametrize("make", [as_it_is, build], ids=["problem", "model"])
def test_a_start_for_another_graph_is_refused(make: Callable[[Problem], Any]) -> None:
    """The error names both graphs."""
    with pytest.raises(ScheduleError, match="made for graph 'comb'"):
        solve(make(skip_problem()), start=checkpoint_all(comb_graph()))


def test_a_start_that_is_no_schedule_is_refused() -> None:
    """In a sentence that names the argument."""
    with pytest.raises(InputError, match="start: expected a Schedule, got 3"):
        solve(skip_problem(), start=3)  # type: ignore[arg-type]


def test_a_start_that_breaks_a_constraint_of_the_model_is_not_returned() -> None:
    """When time is out under a user's own constraints, only what satisfies them is left."""
    problem, schedule = loose_start()
    free, bound = build(problem), build(problem)
    used = [bound.R[t, k] for t, k in schedule.R if k < t]
    used += [bound.M_in[t, i] for t, i in schedule.M_in]
    bound.other = pyo.Constraint(expr=sum(used) <= len(used) - 1)
    assert solve(free, start=schedule, time_limit=1e-6).schedule == schedule
    result = solve(bound, start=schedule, time_limit=1e-6)
    assert result.schedule != schedule


def test_a_user_s_own_variables_need_values_before_a_start_counts() -> None:
    """Nobody knows whether a start satisfies rows over variables that it says nothing of."""
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
        (
            {"ram": 11},
            "RAM budget 11 B: the minimum RAM is 12 B, which step 'd' needs for "
            "a (4 B), c (5 B), d (3 B)",
        ),
        (
            {"deadline": 9},
            "deadline 9 s: a single pass over all nodes already takes 10 s, without any transfer; "
            "no schedule is faster",
        ),
        (
            {"deadline": 9, "deadline_counts": "compute"},
            "deadline 9 s: a single pass over all nodes already takes 10 s; no schedule is faster",
        ),
        (
            {"energy_budget": 9.5},
            "energy budget 9.5 J: a single pass over all nodes already takes 10 J; "
            "no schedule needs less",
        ),
    ],
)
def test_what_no_schedule_can_keep_is_reported_without_a_solver(
    make: Callable[[Problem], Any], limits: dict[str, Any], words: str
) -> None:
    """Floor with step and tensors, deadline, energy: proved, with the least that is possible."""
    result = solve(make(skip_problem(**limits)))
    assert (result.status, result.termination) == (Status.INFEASIBLE, Termination.PROVED)
    assert result.reason == words
    assert (result.schedule, result.energy_j, result.bound_j, result.gap) == (None,) * 4


def test_resident_bytes_are_part_of_the_words() -> None:
    """With parameters counted, the message says how much they take, and the floor with them."""
    nodes = skip_graph(workspace=True).nodes
    graph = Graph(name="heavy", nodes=nodes, resident_bytes={"parameters": 100})
    result = solve(Problem(graph, even_costs(graph), ram=105, count_parameters=True))
    assert result.status == Status.INFEASIBLE
    assert "of which parameters, gradients and optimizer take 100 B" in result.reason
    assert result.reason.endswith("; 112 B with the parameters, gradients and optimizer")


@pytest.mark.parametrize("formulation", EXACT)
@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (
            {"recompute": False, "paging": False},
            ["RAM budget of 13 B", "no recomputation", "no paging"],
        ),
        ({"deadline": 10.5}, ["RAM budget of 13 B", "deadline of 10.5 s (serial)"]),
        ({"energy_budget": 10.5}, ["RAM budget of 13 B", "energy budget of 10.5 J"]),
        ({"aux_bytes": 3, "recompute": False}, ["storage of 3 B", "no recomputation"]),
    ],
)
def test_what_a_solver_proves_infeasible_names_the_limits(
    formulation: str, limits: dict[str, Any], words: list[str]
) -> None:
    """No single limit is to blame: all of them are named."""
    problem = skip_problem(**limits)
    assert optimum(problem) is None
    result = solve(problem, formulation=formulation)
    assert (result.status, result.termination) == (Status.INFEASIBLE, Termination.PROVED)
    assert result.reason.startswith("proved: no schedule keeps")
    assert all(word in result.reason for word in words)


def test_a_valid_schedule_refutes_a_proof_of_infeasibility(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The problem is solved again without presolve; if that is as wrong, the schedule stays."""
    solve_form, asked = Highs.solve, []

    def wrong(self: Highs, form: Any, limits: Limits, **more: Any) -> RawSolution:
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


@pytest.mark.parametrize("formulation", EXACT)
def test_without_time_the_greedy_schedule_is_returned(formulation: str) -> None:
    """It is valid, and the only bound is the baseline."""
    problem = hard_problem()
    result = solve(problem, formulation=formulation, time_limit=1e-6)
    assert (result.status, result.termination) == (Status.FEASIBLE, Termination.TIME_LIMIT)
    assert not verify(problem, result.require_schedule()).violations
    assert (result.bound_j, result.gap) == (problem.baseline_energy_j, 1.0)


def test_a_model_without_time_returns_the_greedy_schedule_too() -> None:
    """The model's rows are satisfied by it, so it is an answer."""
    result = solve(build(hard_problem()), time_limit=1e-6)
    assert (result.status, result.termination) == (Status.FEASIBLE, Termination.TIME_LIMIT)
    assert result.gap == 1.0


@pytest.mark.parametrize("formulation", ["compact", "paper"])
def test_building_ends_with_the_time_limit(
    formulation: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However long the estimate says that it takes: the greedy schedule is returned in time."""
    monkeypatch.setattr("poetmodel.model.building.estimated_build_s", lambda *_: 0.0)
    ends: list[float] = []

    def check() -> None:
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
def test_a_solver_that_looks_at_no_clock_is_left_behind(
    formulation: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is known by then is the answer; what it tells later is not heard."""
    problem, over, told = skip_problem(), threading.Event(), list[SolveProgress]()
    run, best = Highs.run, solve(problem)

    def run_on(self: Highs, call: SolverCall) -> RawSolution:
        raw = run(self, call)
        over.wait()
        call.solution(-1.0, lambda: np.zeros(call.form.n_columns), -1.0)
        return raw

    monkeypatch.setattr(Highs, "run", run_on)
    result = solve(
        problem, formulation=formulation, threads=threads, time_limit=2.0, on_progress=told.append
    )
    assert not over.is_set()
    assert (result.status, result.termination) == (Status.FEASIBLE, Termination.TIME_LIMIT)
    assert not verify(problem, result.require_schedule()).violations
    if formulation == "compact":
        assert result.objective_value == best.objective_value
    before = len(told)
    over.set()
    for thread in threading.enumerate():
        if thread.name == "poetmodel-solve":
            thread.join(10)
    assert len(told) == before


def chain_problem(n: int) -> Problem:
    """State a problem with a chain of `n` nodes and its gradients, and half the RAM it uses."""
    forward = [operation("f0", output_bytes=8)]
    for k in range(1, n):
        forward.append(operation(f"f{k}", output_bytes=8, inputs=(f"f{k - 1}",)))
    backward = [operation("b0", output_bytes=8, inputs=(f"f{n - 1}",), phase="backward")]
    for k in range(1, n):
        inputs = (f"b{k - 1}", f"f{n - 1 - k}")
        backward.append(operation(f"b{k}", output_bytes=8, inputs=inputs, phase="backward"))
    graph = Graph(name="chain", nodes=(*forward, *backward))
    return Problem(graph, even_costs(graph, page_in=(1, 1), page_out=(1, 1)), ram=4 * n)


def test_a_graph_too_large_for_the_limit_ends_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where not even the first schedule is made in time, no model is built."""

    def build_anyway(*_: object, **__: object) -> None:
        pytest.fail("a model was built after the time limit")

    monkeypatch.setattr(facade, "GRACE_S", -1.0)
    monkeypatch.setattr("poetmodel.solver.lazy.relaxation.build_relaxation", build_anyway)
    result = solve(chain_problem(2500), time_limit=1e-6)
    assert (result.status, result.termination) == (Status.UNKNOWN, Termination.TIME_LIMIT)
    assert "5,000 nodes" in result.reason


def test_a_graph_too_large_for_a_file_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files list a tensor once for each stage: that of a chain grows with its square."""
    monkeypatch.setattr("poetmodel.schedule.relations.MOST_PAIRS", 1000)
    result = solve(chain_problem(200))
    assert (result.status, result.termination) == (Status.OPTIMAL, Termination.PROVED)
    with pytest.raises(TooLargeError, match="coarsen the graph"):
        result.require_schedule().to_dict()


@pytest.mark.parametrize("make", [as_it_is, build], ids=["problem", "model"])
def test_the_limit_holds_for_all_that_is_done_before_the_solver(
    make: Callable[[Problem], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a problem and for a model of it; the solver is not called."""
    given = make(chain_problem(10))
    monkeypatch.setattr(facade, "GRACE_S", -1.0)
    monkeypatch.setattr(Highs, "solve", lambda *_, **__: pytest.fail("called a solver"))
    result = solve(given, time_limit=1e-6)
    assert (result.status, result.termination) == (Status.UNKNOWN, Termination.TIME_LIMIT)
    assert "20 nodes" in result.reason


def test_compiling_a_model_ends_with_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the greedy schedule keeps rows over own variables is not known: it is no answer."""
    model = build(medium_problem())
    model.own = pyo.Var(bounds=(0, 2))
    model.beside = pyo.Constraint(expr=model.own + sum(model.M_in.values()) >= 1)

    def too_late() -> None:
        raise TimeLimitError("the time limit has passed")

    monkeypatch.setattr("poetmodel.backends.compiler.check_time_limit", too_late)
    result = solve(model)
    assert (result.status, result.termination) == (Status.UNKNOWN, Termination.TIME_LIMIT)
    assert result.reason == "the time limit passed while the model was built"


def test_a_model_too_large_for_memory_ends_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a problem does: nothing is claimed, and no error is raised."""
    model = build(chain_problem(10))
    monkeypatch.setattr("poetmodel.schedule.relations.MOST_PAIRS", 10)
    result = solve(model)
    assert (result.status, result.termination) == (Status.UNKNOWN, Termination.STALLED)
    assert "coarsen the graph" in result.reason


@pytest.mark.parametrize("make", [as_it_is, build], ids=["problem", "model"])
def test_what_a_late_solver_found_is_verified_and_kept(
    make: Callable[[Problem], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Solvers may overrun the limit by seconds; schedule and bound count all the same."""
    given, run = make(medium_problem()), Highs.solve

    def overrun(self: Highs, form: Any, limits: Any, **options: Any) -> RawSolution:
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
def test_a_limit_that_passes_between_two_solves_keeps_the_schedule(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cuts, placement and the verifier look at the clock, too; bound and schedule are kept."""

    def too_late(*_: object, **__: object) -> None:
        raise TimeLimitError("the time limit has passed")

    monkeypatch.setattr("poetmodel.solver.lazy.linear.stage_loads", too_late)
    problem = hard_problem()
    result = solve(problem, threads=threads)
    assert (result.status, result.termination) == (Status.FEASIBLE, Termination.TIME_LIMIT)
    assert not verify(problem, result.require_schedule()).violations
    assert result.overhead_bound_j > 0


def test_paper_without_time_returns_the_greedy_schedule() -> None:
    """It is valid, and nothing is proved of it."""
    result = solve(hard_problem(), formulation="paper", time_limit=1e-6)
    assert (result.status, result.termination) == (Status.FEASIBLE, Termination.TIME_LIMIT)
    assert (result.violations, result.gap) == ((), 1.0)


@pytest.mark.parametrize("formulation", EXACT)
def test_a_time_limit_on_the_way_keeps_bound_and_schedule(formulation: str) -> None:
    """What was found and proved until then is returned."""
    problem = hard_problem()
    result = solve(problem, formulation=formulation, gap=0.0, time_limit=1.5)
    assert result.status in (Status.FEASIBLE, Status.OPTIMAL)
    assert result.bound_j is not None
    assert result.energy_j is not None
    assert problem.baseline_energy_j <= result.bound_j <= result.energy_j
    assert not verify(problem, result.require_schedule()).violations


@pytest.mark.parametrize("formulation", EXACT)
def test_progress_is_reported(formulation: str) -> None:
    """Seconds grow, incumbents do not get worse, bounds never pass the answer."""
    seen: list[SolveProgress] = []

    def note(progress: SolveProgress) -> None:
        seen.append(progress)

    problem = hard_problem()
    result = solve(problem, formulation=formulation, gap=0.25, on_progress=note)
    assert result.overhead_j is not None
    assert seen[0].incumbent is not None
    assert [p.seconds for p in seen] == sorted(p.seconds for p in seen)
    incumbents = [p.incumbent for p in seen if p.incumbent is not None]
    assert min(incumbents) >= result.overhead_j - 1e-6
    bounds = [p.bound for p in seen if p.bound is not None]
    assert max(bounds) <= result.overhead_j + 1e-6
    assert all(p.gap is None or 0 <= p.gap <= 1 for p in seen)


def test_progress_brings_the_best_schedule() -> None:
    """With each incumbent of `lazy` comes a valid schedule of that value, to the answer itself."""
    seen: list[SolveProgress] = []

    def note(progress: SolveProgress) -> None:
        seen.append(progress)

    problem = hard_problem()
    result = solve(problem, gap=0.05, on_progress=note)
    for progress in seen:
        assert progress.schedule is not None
        verdict = verify(problem, progress.schedule)
        assert verdict.valid
        assert verdict.simulation.overhead_j == pytest.approx(progress.incumbent)
    assert len({progress.incumbent for progress in seen}) > 1
    assert seen[-1].schedule == result.schedule


@pytest.mark.parametrize("formulation", EXACT)
@pytest.mark.parametrize("calls", [1, 2, 4])
def test_a_callback_stops_the_solve(formulation: str, calls: int) -> None:
    """Returning False at any call ends it with the best schedule so far."""
    count = 0

    def stop_then(_: SolveProgress) -> bool:
        nonlocal count
        count += 1
        return count < calls

    problem = hard_problem()
    result = solve(problem, formulation=formulation, gap=0.0, on_progress=stop_then)
    assert (result.status, result.termination) == (Status.FEASIBLE, Termination.INTERRUPTED)
    assert not verify(problem, result.require_schedule()).violations
    assert count < calls + 3


def test_a_callback_that_fails_is_heard() -> None:
    """Its error ends the solve and is not swallowed."""

    def fail(_: SolveProgress) -> bool:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        solve(hard_problem(), on_progress=fail)


class _Interrupted:
    """A back end during which Ctrl-C is hit twice."""

    def versions(self) -> dict[str, str]:
        return {"interrupted": "1"}

    def solve(self, *_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt


def test_ctrl_c_keeps_the_greedy_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the solver had nothing yet, the schedule that it began from is the answer."""
    monkeypatch.setattr(monolithic, "backend", lambda _: _Interrupted())
    problem = skip_problem()
    result = solve(problem, formulation="compact")
    assert (result.status, result.termination) == (Status.FEASIBLE, Termination.INTERRUPTED)
    assert not verify(problem, result.require_schedule()).violations
    assert result.gap == 1.0


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeLimitError])
def test_no_schedule_that_was_reported_is_lost(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a solve is cut short, by a second Ctrl-C, say, the best one is the answer."""
    problem = skip_problem()
    best, paged = solve(problem), page_everything(problem)
    assert best.simulation is not None
    value = problem.objective.overhead(best.simulation)

    def cut_short(_: Problem, request: Request, **__: Any) -> NoReturn:
        request.report(value, 0.0, best.schedule)
        raise error

    monkeypatch.setattr(facade, "construct", lambda *_, **__: paged)
    monkeypatch.setattr(lazy, "solve_lazily", cut_short)
    result = solve(problem)
    assert result.termination in (Termination.INTERRUPTED, Termination.TIME_LIMIT)
    assert result.schedule == best.schedule != paged
    assert result.history[-1][1] == value


def test_ctrl_c_on_a_model_claims_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule of which nobody knows whether it satisfies the user's rows is not returned."""
    monkeypatch.setattr(monolithic, "backend", lambda _: _Interrupted())
    model = build(skip_problem())
    model.own = pyo.Var(bounds=(0, 2))
    model.beside = pyo.Constraint(expr=model.own + sum(model.M_in.values()) >= 1)
    result = solve(model)
    assert (result.status, result.termination) == (Status.UNKNOWN, Termination.INTERRUPTED)
    assert result.schedule is None


@pytest.mark.skipif(os.name != "posix", reason="signals as on POSIX systems")
@pytest.mark.parametrize("formulation", EXACT)
def test_ctrl_c_during_a_real_solve(formulation: str, tmp_path: Path) -> None:
    """A real SIGINT, in a process of its own, ends with the best schedule so far, verified."""
    script = tmp_path / "interrupted.py"
    script.write_text(
        "\n".join(
            (
                "import os, signal, sys, time",
                f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})",
                "import poetmodel as pm",
                "from kit.worked import comb_graph, even_costs",
                "graph = comb_graph(16)",
                "costs = even_costs(graph, page_in=(9, 9), page_out=(9, 9))",
                "calls = []",
                "def interrupt(progress):",
                "    calls.append(progress)",
                "    if len(calls) == 3:",
                f"        os.kill(os.getpid(), signal.{signal.SIGINT.name})",
                "        time.sleep(0.5)",
                "problem = pm.Problem(graph, costs, ram=25)",
                "options = {'formulation': sys.argv[1], 'on_progress': interrupt}",
                "result = pm.solve(problem, gap=0.0, **options)",
                "verdict = pm.verify(problem, result.require_schedule())",
                "print(result.status, result.termination, len(verdict.violations))",
            )
        ),
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, str(script), formulation], capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == ["feasible", "interrupted", "0"], done.stderr


# -- properties --------------------------------------------------------------------------------


@pytest.mark.parametrize("formulation", EXACT)
def test_more_ram_never_costs_more(formulation: str) -> None:
    """The optimum does not grow with the budget, nor with what is allowed."""
    for problem in random_instances(12, (4, 6), seed=31, minimize="energy", switches=False):
        given = {
            "deadline": problem.deadline_s,
            "deadline_counts": problem.deadline_counts,
            "aux_bytes": problem.aux_limit_bytes,
            "energy_budget": problem.energy_budget_j,
        }

        def least(given: dict[str, Any] = given, problem: Problem = problem, **more: Any) -> float:
            stated = Problem(problem.graph, problem.costs, **{**given, **more})
            found = solve(stated, formulation=formulation, gap=0.0).energy_j
            return float("inf") if found is None else found

        ram = problem.ram_budget_bytes
        here = least(ram=ram)
        assert least(ram=ram + 2) <= here + 1e-6
        assert here <= least(ram=ram, paging=False) + 1e-6
        assert here <= least(ram=ram, recompute=False) + 1e-6


def test_names_do_not_matter() -> None:
    """Renamed operations, in the same order, have the same optimum."""
    for problem in random_instances(20, (3, 5), seed=32, minimize="energy", switches=False):
        graph = problem.graph
        new = {tensor.name: f"t{i}" for i, tensor in enumerate(graph.tensors)}
        nodes = tuple(
            type(node)(
                name=f"op{k}",
                op=node.op,
                phase=node.phase,
                inputs=tuple(new[name] for name in node.inputs),
                outputs=tuple(type(t)(name=new[t.name], bytes=t.bytes) for t in node.outputs),
                workspace_bytes=node.workspace_bytes,
                recomputable=node.recomputable,
                on_aux=node.on_aux,
            )
            for k, node in enumerate(graph.nodes)
        )
        table = problem.table
        costs = type(problem.costs).from_arrays(
            other := Graph(name="renamed", nodes=nodes),
            compute_time_s=table.compute_time_s,
            compute_energy_j=table.compute_energy_j,
            page_in=list(zip(table.page_in_time_s, table.page_in_energy_j, strict=True)),
            page_out=list(zip(table.page_out_time_s, table.page_out_energy_j, strict=True)),
            device=problem.costs.device,
        )
        limits: dict[str, Any] = {
            "ram": problem.ram_budget_bytes,
            "deadline": problem.deadline_s,
            "deadline_counts": problem.deadline_counts,
            "aux_bytes": problem.aux_limit_bytes,
            "energy_budget": problem.energy_budget_j,
        }
        first, second = (
            solve(stated, formulation="compact", gap=0.0)
            for stated in (problem, Problem(other, costs, **limits))
        )
        assert first.status == second.status
        assert first.energy_j == second.energy_j


def test_the_result_carries_what_was_requested_and_what_was_solved() -> None:
    """Limits, gap, times, sizes and log are there for a report."""
    result: SolveResult = solve(
        medium_problem(), formulation="compact", gap=0.5, time_limit=30, seed=1
    )
    assert (result.requested_gap, result.time_limit_s) == (0.5, 30.0)
    assert result.build_s > 0
    assert result.solve_s > 0
    assert {"columns", "rows", "nonzeros", "nodes"} <= set(result.statistics)
    assert "HiGHS" in result.log


def test_first_schedule_is_announced_before_pyomo_is_loaded() -> None:
    """Loading what builds models takes longer than the first schedule of a large graph."""
    script = (
        "import sys, poetmodel as pm\n"
        "from poetmodel.graph.catalogue import load_model\n"
        "graph = load_model('mlp')\n"
        "costs = pm.Costs.estimate(graph, pm.Device.load('mkr1000'))\n"
        "reported = []\n"
        "def note(progress):\n"
        "    reported.append((progress.incumbent is not None, 'pyomo' in sys.modules))\n"
        "pm.solve(pm.Problem(graph, costs, ram='70%'), on_progress=note)\n"
        "print(reported[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "(True, False)"


# -- own constraints -----------------------------------------------------------------------------


def wanted_again(often: int, **choices: Any) -> Problem:
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
def test_what_has_no_room_where_groups_want_it_is_decided_by_stages(
    often: int, paging: bool, overhead_j: float | None
) -> None:
    """Once is free; twice takes `d` out and in; three times, or twice without paging, cannot be."""
    result = solve(wanted_again(often, paging=paging), time_limit=60)
    if overhead_j is None:
        assert result.status == Status.INFEASIBLE
    else:
        assert result.status == Status.OPTIMAL
        assert result.overhead_j == pytest.approx(overhead_j)


@pytest.mark.parametrize("threads", [1, 2])
@parts(3)
def test_own_constraints_and_objectives_are_decided_as_exhaustive_search_decides(
    part: Part,
    threads: int,
) -> None:
    """Random rows, wanted decisions, rewards: same optimum, same infeasibility."""
    infeasible = 0
    for number in part.of(range(60 if threads == 1 else 6)):
        rng = seeded(f"own constraints/{number}")
        problem = constrained(rng, random_instance(rng, (3, 5)))
        best = optimum(problem)
        result = solve(problem, gap=0.0, time_limit=120, threads=threads)
        infeasible += best is None
        if best is None:
            assert result.status == Status.INFEASIBLE, number
        else:
            assert result.status == Status.OPTIMAL, number
            assert result.objective_value == pytest.approx(best.value, abs=1e-6), number
    assert infeasible or threads > 1
