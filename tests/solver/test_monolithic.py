"""One model, one solve: starts, what the verifier rejects, and what may be said on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyomo.environ as pyo
import pytest

from kit.worked import comb_graph, even_costs, skip_problem
from poetmodel.backends.compiler import compile_model
from poetmodel.backends.highs import Highs
from poetmodel.backends.protocol import RawSolution, SolverStatus
from poetmodel.errors import VerificationError
from poetmodel.model import build
from poetmodel.model.compact import COMPACT
from poetmodel.problem import Problem
from poetmodel.result import Status, Termination
from poetmodel.schedule import Schedule, checkpoint_all
from poetmodel.solver import SolveProgress, monolithic, solve
from poetmodel.solver.monolithic import TERMINATIONS, solve_model, start_values
from poetmodel.solver.outcome import verify_schedule
from poetmodel.solver.request import Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.backends.protocol import Limits
    from poetmodel.backends.standard_form import StandardForm

RECOMPUTED = Schedule(R=((0, 0), (1, 1), (2, 2), (3, 0), (3, 3)), S_RAM=((1, 0), (2, 1), (3, 2)))
"""The best schedule of the worked example."""


def test_every_way_of_a_back_end_to_stop_is_translated() -> None:
    """The table is closed: a new way must be given a meaning."""
    inner = {SolverStatus.INFEASIBLE_OR_UNBOUNDED, SolverStatus.FAILED}
    assert set(TERMINATIONS) == set(SolverStatus) - inner


# -- starts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reductions", [True, False])
def test_a_valid_schedule_is_a_complete_start(reductions: bool) -> None:
    """Every column has a value, and the model is satisfied."""
    model = build(skip_problem(), reductions=reductions)
    form = compile_model(model)
    values = start_values(form, RECOMPUTED)
    assert values is not None
    assert form.violation(values) == 0.0
    assert form.value(values) == pytest.approx(100.0)  # a tenth of the baseline


@pytest.mark.parametrize("minimize", ["energy", "time", "ram", "writes"])
def test_a_start_has_the_value_that_the_verifier_gives_it(minimize: str) -> None:
    """In the unit of the minimized quantity."""
    problem = skip_problem(minimize=minimize)
    model = build(problem)
    form = compile_model(model)
    values = start_values(form, RECOMPUTED)
    assert values is not None
    found = form.value(values) * model.objective_unit
    assert found == pytest.approx(verify_schedule(problem, RECOMPUTED).value)


def test_a_start_that_is_above_the_budget_breaks_the_model() -> None:
    """All kept takes 15 of 13 bytes."""
    model = build(skip_problem())
    form = compile_model(model)
    values = start_values(form, checkpoint_all(model.problem.graph))
    assert values is not None
    assert form.violation(values) > 0.1


def test_a_start_says_nothing_of_own_variables() -> None:
    """Their columns are left to the solver."""
    model = build(skip_problem())
    model.own = pyo.Var(bounds=(0, 1))
    model.row = pyo.Constraint(expr=model.own >= model.R[3, 0])
    values = start_values(compile_model(model), RECOMPUTED)
    assert values is not None
    assert np.isnan(values).sum() == 1


def test_paper_takes_no_start() -> None:
    """Its variables mean something else."""
    model = build(skip_problem(), "paper")
    assert start_values(compile_model(model), RECOMPUTED) is None


# -- what the verifier rejects --------------------------------------------------------------------


def rejecting(monkeypatch: pytest.MonkeyPatch, *, late: bool) -> None:
    """Let the first run return all kept, as a coarse tolerance might, and perhaps no second one."""
    run = Highs.solve
    calls = 0

    def first(self: Highs, form: StandardForm, limits: Limits, **options: Any) -> RawSolution:
        nonlocal calls
        calls += 1
        if calls > 1 and late:
            return RawSolution(status=SolverStatus.TIME_LIMIT)
        raw = run(self, form, limits, **options)
        assert form.layout is not None
        schedule = checkpoint_all(form.layout.model.problem.graph)
        return replace(raw, x=start_values(form, schedule)) if calls == 1 else raw

    monkeypatch.setattr(Highs, "solve", first)


def test_what_breaks_a_limit_is_excluded_and_the_model_solved_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second answer is returned, with both bounds and times."""
    rejecting(monkeypatch, late=False)
    result = solve(skip_problem(), formulation="compact", gap=0.0)
    assert (result.status, result.overhead_j) == (Status.OPTIMAL, 1.0)


def test_what_breaks_a_limit_is_not_returned_when_time_is_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then the start is what is left, and the bound of the first run holds."""
    rejecting(monkeypatch, late=True)
    result = solve(skip_problem(), formulation="compact", gap=0.0)
    assert result.schedule is not None
    assert result.violations == ()
    assert result.bound_j == pytest.approx(11.0)


def test_a_model_without_a_start_has_nothing_left_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """No schedule, no claim, and the reason is the time."""
    rejecting(monkeypatch, late=True)
    model = build(skip_problem())
    outcome = solve_model(model, Request(gap=0.0), start=None, trimmed=False)
    assert outcome.candidate is None
    assert outcome.termination == Termination.TIME_LIMIT


def test_what_keeps_every_row_and_is_rejected_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the model is wrong, and nothing of it is believed."""
    monkeypatch.setattr(
        monolithic, "schedule_of", lambda model, _: checkpoint_all(model.problem.graph)
    )
    with pytest.raises(VerificationError, match="peak RAM 15 B") as caught:
        solve(skip_problem(), formulation="compact")
    assert len(caught.value.violations) == 1


def test_an_ablation_that_is_rejected_is_an_error() -> None:
    """A formulation without memory rows has schedules that no device can run."""
    model = build(skip_problem(), COMPACT.without("memory", name="endless"))
    with pytest.raises(VerificationError, match="peak RAM 15 B"):
        solve(model)


# -- on the way --------------------------------------------------------------------------------


def seen_progress(change: Callable[[pyo.ConcreteModel], None]) -> list[SolveProgress]:
    """Solve a model of some size after a change; return what was reported."""
    graph = comb_graph(9)
    costs = even_costs(graph, page_in=(9, 9), page_out=(9, 9))
    model = build(Problem(graph, costs, ram=17))
    change(model)
    reported: list[SolveProgress] = []
    solve(model, gap=0.0, on_progress=reported.append)
    assert reported
    return reported


def test_progress_of_a_model_counts_overhead() -> None:
    """In joules beyond the baseline, bounds from below."""
    reported = seen_progress(lambda _: None)
    assert any(p.incumbent is not None for p in reported)
    assert all(p.bound is None or p.bound >= 0 for p in reported)


def test_progress_under_an_own_objective_says_nothing_of_energy() -> None:
    """Neither its values nor its bounds are energies."""

    def mine(model: pyo.ConcreteModel) -> None:
        model.objective.deactivate()
        model.mine = pyo.Objective(expr=sum(model.R.values()) + sum(model.S_RAM.values()))

    assert all(p.incumbent is None and p.bound is None for p in seen_progress(mine))


def test_progress_of_a_restriction_tells_no_bound() -> None:
    """What a part of the stages proves is no bound of the problem."""
    graph = comb_graph(9)
    costs = even_costs(graph, page_in=(9, 9), page_out=(9, 9))
    model = build(Problem(graph, costs, ram=17), stages="events")
    reported: list[SolveProgress] = []
    solve(model, on_progress=reported.append)
    assert reported
    assert all(p.bound is None for p in reported)
