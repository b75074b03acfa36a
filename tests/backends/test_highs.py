"""HiGHS alone: its statuses and its scheduler."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import highspy
import numpy as np
import pytest

from kit.instances import scarce_problem
from poetmodel.backends import Limits, RawSolution, SolverStatus
from poetmodel.backends.call import SolverCall
from poetmodel.backends.compiler import compile_model
from poetmodel.backends.highs import STATUS, Highs, _is_misfit, fresh_scheduler
from poetmodel.backends.standard_form import StandardForm
from poetmodel.errors import BackendError
from poetmodel.model import build

if TYPE_CHECKING:
    from poetmodel.backends.protocol import BackendProgress


def test_every_status_has_a_meaning() -> None:
    """A new release cannot add a status unseen."""
    assert set(STATUS) == set(highspy.HighsModelStatus.__members__)
    assert STATUS["kOptimal"] is SolverStatus.OPTIMAL


def test_cutoff_below_the_optimum_is_not_an_optimum() -> None:
    """What HiGHS calls optimal under a cutoff that nothing meets is not passed on as optimal."""
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 100, (5, 40))
    form = StandardForm.from_arrays(
        weights,
        rng.integers(1, 100, 40),
        upper=1.0,
        row_lower=weights.sum(1) // 2,
        integer=True,
    )
    result = Highs().solve(form, Limits(time_s=60.0, objective_cutoff=500.0))
    assert result.status is SolverStatus.CUTOFF  # the optimum is 503
    assert (result.x, result.bound) == (None, 500.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_basis_changes_no_value(seed: int) -> None:
    """Of a linear model that has got further rows, which its last optimum breaks."""
    rng = np.random.default_rng(seed)
    weights, costs = rng.integers(1, 100, (12, 40)), rng.integers(1, 100, 40)
    least = weights.sum(1) // 3
    few, all_rows = (
        StandardForm.from_arrays(weights[:n], costs, upper=1.0, row_lower=least[:n])
        for n in (3, 12)
    )
    first = Highs().solve(few, Limits())
    assert first.basis is not None
    assert len(first.basis.columns) == 40
    assert sum(row == first.basis.basic for row in first.basis.rows) < 3
    basis = replace(first.basis, rows=[*first.basis.rows, *[first.basis.basic] * 9])
    again, anew = Highs().solve(all_rows, Limits(), basis=basis), Highs().solve(all_rows, Limits())
    assert again.status is SolverStatus.OPTIMAL
    assert again.objective == pytest.approx(anew.objective)
    assert again.bound == pytest.approx(again.objective)


def test_a_basis_of_another_model_is_refused() -> None:
    """It has a value for each column and row."""
    form = StandardForm.from_arrays([[1.0, 1.0]], [1.0, 2.0], row_lower=1.0)
    basis = Highs().solve(form, Limits()).basis
    assert basis is not None
    with pytest.raises(BackendError, match="'highs': refused the basis"):
        Highs().solve(form, Limits(), basis=replace(basis, rows=[]))


def test_only_a_linear_optimum_has_a_basis() -> None:
    """Neither branch and bound nor what is infeasible."""
    form = StandardForm.from_arrays([[1.0]], [1.0], upper=1.0, row_lower=0.5, integer=True)
    assert Highs().solve(form, Limits()).basis is None
    above = StandardForm.from_arrays([[1.0]], [1.0], upper=1.0, row_lower=2.0)
    assert Highs().solve(above, Limits()).basis is None


def test_small_coefficients_count() -> None:
    """Coefficients below 1e-9, which HiGHS drops by default, are kept."""
    form = StandardForm.from_arrays([[1e-10]], [1.0], row_lower=1e-3, upper=1e8)
    assert Highs().solve(form, Limits()).objective == pytest.approx(1e7, rel=1e-3)


def test_refused_model_is_an_error() -> None:
    """A coefficient that HiGHS cannot take is an error, not a wrong answer."""
    form = StandardForm.from_arrays([[1e16]], [1.0], row_lower=1.0)
    with pytest.raises(BackendError, match="refused the model"):
        Highs().solve(form, Limits())


def test_scheduler_is_renewed_but_not_from_a_callback() -> None:
    """Every solve gets a fresh scheduler, except one inside another's callback."""
    resets: list[bool] = []
    fake = SimpleNamespace(Highs=SimpleNamespace(resetGlobalScheduler=resets.append))
    fresh_scheduler(fake)
    assert resets == [True]
    form = StandardForm.from_arrays([[3.0, 5.0]], [4.0, 6.0], row_lower=7.0, integer=True)
    Highs().solve(form, Limits(), on_progress=lambda _: fresh_scheduler(fake))
    assert resets == [True]
    fresh_scheduler(fake)
    assert resets == [True, True]


@pytest.mark.parametrize("seed", [16475, 16560, 16859, 17078, 17570])
def test_presolve_does_not_lose_the_optimum(seed: int) -> None:
    """Models that HiGHS 1.15 and 1.16 call infeasible with all rules of their presolve.

    With the rule that misleads them the error shows, and such models are solved again.
    """
    problem = scarce_problem(f"rooms {seed}", (9, 13))
    form = compile_model(build(problem))
    safe = Highs().solve(form, Limits(rel_gap=0.0, options={"presolve": "off"}))
    assert safe.x is not None
    best = form.objective @ safe.x
    for options in ({}, {"presolve_rule_off": 0}):
        lines: list[str] = []
        raw = Highs().solve(form, Limits(rel_gap=0.0, options=options, log=lines.append))
        assert raw.status == SolverStatus.OPTIMAL
        assert raw.x is not None
        assert form.objective @ raw.x == pytest.approx(best)
        again = any("solving again without it" in line for line in lines)
        assert raw.solved_again == again == any(map(_is_misfit, lines))
        assert options or not again


@pytest.mark.parametrize("misled_by", ["presolve", "start"])
def test_a_second_run_begins_with_nothing_of_the_first(
    monkeypatch: pytest.MonkeyPatch, misled_by: str
) -> None:
    """Neither a bound, nor a solution, nor a stop that was requested because of them."""
    form = compile_model(build(scarce_problem("rooms 16475", (9, 13))))
    run = Highs._run_once
    runs: list[tuple[str | None, bool]] = []
    reported: list[tuple[float | None, float | None]] = []

    def misled(self: Highs, call: SolverCall) -> Any:
        runs.append((call.options.get("presolve"), call.start is not None))
        if len(runs) > 1:
            return run(self, call)
        call.solution(-5.0, lambda: np.zeros(form.n_columns), -5.0)
        call.tick(1e6)
        return RawSolution(status=SolverStatus.INTERRUPTED), misled_by

    def enough(progress: BackendProgress) -> bool:
        reported.append((progress.incumbent, progress.bound))
        return progress.incumbent != -5.0

    monkeypatch.setattr(Highs, "_run_once", misled)
    best = run(Highs(), SolverCall(form, Limits(rel_gap=0.0)))[0].x
    raw = Highs().solve(form, Limits(rel_gap=0.0), start=best, on_progress=enough)
    again = ("off", True) if misled_by == "presolve" else (None, False)
    assert runs[:2] == [(None, True), again]
    assert (raw.status, raw.solved_again) == (SolverStatus.OPTIMAL, True)
    after = reported[reported.index((-5.0, -5.0)) + 1 :]
    assert raw.objective is not None
    assert all(incumbent != -5.0 for incumbent, _ in after)
    assert all(bound is None or bound <= raw.objective + 1e-6 for _, bound in after)


def test_what_misleads_the_second_run_is_left_out_of_a_third(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The start first, then presolve, each once."""
    form = StandardForm.from_arrays([[3.0, 5.0]], [4.0, 6.0], row_lower=7.0, integer=True)
    misleading = ["start", "presolve", "presolve"]
    runs: list[tuple[str | None, bool]] = []

    def misled(_: Highs, call: SolverCall) -> Any:
        runs.append((call.options.get("presolve"), call.start is not None))
        return RawSolution(status=SolverStatus.TIME_LIMIT), misleading[len(runs) - 1]

    monkeypatch.setattr(Highs, "_run_once", misled)
    raw = Highs().solve(form, Limits(), start=np.array([0.0, 2.0]))
    assert runs == [(None, True), (None, False), ("off", False)]
    assert raw.solved_again


@pytest.mark.parametrize("is_lasting", [False, True])
def test_an_optimum_without_a_solution_is_none(
    monkeypatch: pytest.MonkeyPatch, is_lasting: bool
) -> None:
    """It is looked for again without presolve; where that says the same nothing is known."""
    form = StandardForm.from_arrays([[3.0, 5.0]], [4.0, 6.0], row_lower=7.0, integer=True)
    run = Highs._run_once

    def empty(self: Highs, call: SolverCall) -> Any:
        if is_lasting or "presolve" not in call.options:
            return RawSolution(status=SolverStatus.OPTIMAL, bound=9.0), None
        return run(self, call)

    monkeypatch.setattr(Highs, "_run_once", empty)
    raw = Highs().solve(form, Limits(rel_gap=0.0))
    assert raw.solved_again
    if is_lasting:
        assert (raw.status, raw.x, raw.bound) == (SolverStatus.OTHER_LIMIT, None, None)
    else:
        assert (raw.status, raw.objective) == (SolverStatus.OPTIMAL, 10.0)


def test_the_callers_word_on_presolve_counts() -> None:
    """Who asks for presolve gets what it gives."""
    form = compile_model(build(scarce_problem("rooms 16475", (9, 13))))
    options = {"presolve": "on", "presolve_rule_off": 0}
    assert Highs().solve(form, Limits(rel_gap=0.0, options=options)).infeasible


def test_rounding_errors_are_no_misfit() -> None:
    """HiGHS tells of small violations too."""
    text = "WARNING: Solution with objective 6 has untransformed violations: "
    assert _is_misfit(f"{text}bound = 0; integrality = 0; row = 2 (row 7)")
    assert _is_misfit(f"{text}bound = 1.073 (col 1533); integrality = 1.386e-14; row = 0")
    assert not _is_misfit(f"{text}bound = 0; integrality = 0; row = 2.1e-06 (row 7)")
    newer = "variable bound = 0; constraint bound = {} (row 7); integrality = 1.2e-14"
    assert _is_misfit(text + newer.format("1"))
    assert not _is_misfit(text + newer.format("2.1e-06"))
    assert not _is_misfit("Solving report")


# -- what presolve gets wrong ------------------------------------------------------------------


@pytest.mark.parametrize("off", [0.0, 2e-8, 5e-8, 9e-8, 2e-7])
def test_a_bound_that_a_row_nearly_implies_stays_a_bound(off: float) -> None:
    """``min p`` with ``p >= 0.25 + off`` and ``p >= 0.25 + k / 6``; 0.41667 is not its optimum.

    Presolve makes an equation of the second row, and rounds ``k >= 6 off`` up to 1.
    """
    form = StandardForm.from_arrays(
        [[0.0, 1.0, 1.0], [-1.0, 1 / 6, 0.0]],
        [1.0, 0.0, 0.0],
        lower=[0.25 + off, 0.0, 0.0],
        upper=1.0,
        integer=[False, True, True],
        row_lower=[1.0, -np.inf],
        row_upper=[np.inf, -0.25],
    )
    raw = Highs().solve(form, Limits(rel_gap=0.0))
    assert raw.status is SolverStatus.OPTIMAL
    assert raw.objective == pytest.approx(0.25 + off, abs=1e-9)
    assert raw.bound is not None
    assert raw.bound <= 0.25 + off + 1e-9


TINY_COST = (
    [
        [-1.0, 1.0, -1.0, 0.0, -1.0, 0.0, 0.0],
        [0.0, -1.0, 0.0, -1.0, 0.0, -1.0, 0.0],
        [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, -1.0],
        [0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0],
        [1.0, 0.0, 1.0, 0.0, 1.0, 7 / 11, 0.0],
        [0.0, 1.0, 0.0, 7 / 23, 0.0, 7 / 23, 0.0],
    ],
    [0.0, -1.0, 0.0, 1.0, 1.0, 57 / 22, 57 / 46],
)
"""Rows and their right-hand sides of seven binaries, the first of which costs next to nothing."""


@pytest.mark.parametrize("cost", [0.0, 2e-11, 1e-9, 9e-8, 1.1e-7, 1e-3])
@pytest.mark.parametrize("sense", [1, -1])
def test_costs_below_the_tolerance_do_not_mislead(cost: float, sense: int) -> None:
    """The optimum is -383 less the small cost, and the bound is not above it; -234 is none."""
    rows, most = TINY_COST
    costs = np.array([-cost, 0.0, -234.0, -149.0, 0.0, 0.0, 0.0])
    form = StandardForm.from_arrays(
        rows, sense * costs, upper=1.0, integer=True, row_upper=most, sense=sense
    )
    raw = Highs().solve(form, Limits(rel_gap=0.0))
    assert raw.status is SolverStatus.OPTIMAL
    assert raw.objective == pytest.approx(-383.0 * sense - cost * sense, abs=2e-7)
    assert raw.bound is not None
    assert sense * raw.bound <= -383.0 - cost + 1e-9
    for cutoff, status in ((-382.0, SolverStatus.OPTIMAL), (-384.0, SolverStatus.CUTOFF)):
        limits = Limits(rel_gap=0.0, objective_cutoff=sense * cutoff)
        assert Highs().solve(form, limits).status is status


@pytest.mark.parametrize(
    "wrong",
    [
        RawSolution(status=SolverStatus.INFEASIBLE),
        RawSolution(status=SolverStatus.OPTIMAL, x=np.array([3.0, 0.0]), bound=12.0),
    ],
)
def test_proofs_of_small_models_are_confirmed(
    monkeypatch: pytest.MonkeyPatch, wrong: RawSolution
) -> None:
    """A solve without presolve that finds something better takes the place of a wrong one."""
    form = StandardForm.from_arrays([[3.0, 5.0]], [4.0, 6.0], row_lower=7.0, integer=True)
    run, runs = Highs._run_once, []

    def misled(self: Highs, call: SolverCall) -> Any:
        runs.append(call.options.get("presolve"))
        return run(self, call) if "presolve" in call.options else (wrong, None)

    monkeypatch.setattr(Highs, "_run_once", misled)
    raw = Highs().solve(form, Limits(rel_gap=0.0))
    assert runs == [None, "off", "off"]
    assert (raw.status, raw.objective) == (SolverStatus.OPTIMAL, 10.0)
    assert raw.solved_again


@pytest.mark.parametrize("ends", ["late", "in an error"])
def test_what_was_not_confirmed_is_not_called_optimal(
    monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """Without presolve a few models take minutes; what such a solve proves itself still holds."""
    form = StandardForm.from_arrays([[3.0, 5.0]], [4.0, 6.0], row_lower=7.0, integer=True)
    run, lines = Highs._run_once, list[str]()

    def unfinished(self: Highs, call: SolverCall) -> Any:
        if "presolve" not in call.options:
            return run(self, call)
        if ends == "late":
            return RawSolution(status=SolverStatus.TIME_LIMIT, bound=9.0), None
        raise BackendError("stopped with an error")

    monkeypatch.setattr(Highs, "_run_once", unfinished)
    raw = Highs().solve(form, Limits(rel_gap=0.0, log=lines.append))
    assert (raw.status, raw.objective) == (SolverStatus.OTHER_LIMIT, 10.0)
    assert raw.bound == (9.0 if ends == "late" else None)
    assert any("not confirmed" in line for line in lines)
