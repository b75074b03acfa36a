"""Variants of a problem: begun from what is known, with the best bound, in a shared time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kit.worked import skip_problem
from poetmodel.problem import Constraint, Quantity
from poetmodel.schedule import simulate
from poetmodel.solver import solve
from poetmodel.solver.sensitivity import variants as module
from poetmodel.solver.sensitivity.variants import ChangedProblem, solve_variants

if TYPE_CHECKING:
    import pytest

    from poetmodel.problem import Problem


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the options of each solve."""
    calls: list[dict[str, Any]] = []

    def record(problem: Problem, **options: Any) -> Any:
        calls.append({"problem": problem, **options})
        return solve(problem, **options)

    monkeypatch.setattr(module, "solve", record)
    return calls


def test_best_valid_schedule_so_far_is_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one that breaks a limit of the next variant, nor one of another objective."""
    calls = recorded(monkeypatch)
    roomy, tight = skip_problem(ram=15), skip_problem(ram=13)
    given = solve(tight).require_schedule()
    fast = skip_problem(ram=13, minimize="time")
    problems = (roomy, tight, skip_problem(ram=14), fast)
    results = solve_variants(
        [ChangedProblem(problem=problem) for problem in problems], time_limit=9, start=given
    )
    assert calls[0]["start"] == given
    assert calls[1]["start"] == given
    assert calls[2]["start"] == results[1].schedule
    assert calls[3]["start"] == given


def test_bound_of_a_relaxation_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is proven with more RAM holds with less; not if that allows less of something else."""
    tight = skip_problem(ram=13)
    roomy = replace(tight, ram=14)

    def bounds(*found: tuple[Problem, float]) -> list[float | None]:
        results = iter([replace(solve(problem), objective_bound=bound) for problem, bound in found])
        monkeypatch.setattr(module, "solve", lambda *_, **__: next(results))
        variants = [ChangedProblem(problem=problem) for problem, _ in found]
        both = solve_variants(variants, time_limit=9)
        return [result.objective_bound for result in both]

    assert bounds((tight, 3.0), (roomy, 5.0)) == [5.0, 5.0]
    assert bounds((tight, 5.0), (roomy, 3.0)) == [5.0, 3.0]
    assert bounds((tight, 3.0), (replace(roomy, paging=False), 5.0)) == [3.0, 5.0]
    assert bounds((tight, 3.0), (replace(roomy, deadline=20), 5.0)) == [3.0, 5.0]
    assert bounds((tight, 3.0), (replace(roomy, minimize="time"), 5.0)) == [3.0, 5.0]
    wear, other = (
        replace(tight, constraints=(Constraint(name="x", terms=terms, upper=9),))
        for terms in ({"bytes_written": 1}, {"bytes_read": 1})
    )
    assert bounds((wear, 3.0), (roomy, 5.0)) == [5.0, 5.0]
    assert bounds((tight, 3.0), (wear, 5.0)) == [3.0, 5.0]
    assert bounds((other, 3.0), (wear, 5.0)) == [3.0, 5.0]
    one, two = (
        replace(problem, minimize="own", own_objective=(("energy_j", weight),))
        for problem, weight in ((tight, 1), (roomy, 2))
    )
    assert bounds((one, 13.0), (two, 15.0)) == [13.0, 15.0]


def test_time_is_shared_and_none_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one leaves the next ones share; without any time left each gets the least."""
    calls = recorded(monkeypatch)
    three = [ChangedProblem(problem=skip_problem())] * 3
    solve_variants(three, time_limit=30)
    shares = [call["time_limit"] for call in calls]
    assert 9 < shares[0] <= 10
    assert 10 < shares[1] <= 15
    assert 15 < shares[2] <= 30
    calls.clear()
    solve_variants(three, time_limit=0, least_s=0.5)
    assert [call["time_limit"] for call in calls] == [0.5] * 3


def test_paging_first_reaches_the_minimum_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start then takes exactly the minimum RAM; without room on storage there is none."""
    calls = recorded(monkeypatch)
    for aux, peak in ((None, 12), (0, None)):
        problem = skip_problem(aux_bytes=aux).without(Quantity.RAM, minimize=Quantity.RAM)
        solve_variants([ChangedProblem(problem=problem, paging_first=True)], time_limit=20)
        start = calls[-1]["start"]
        found = start and simulate(problem.graph, None, start).peak_ram_bytes
        assert found == peak
        assert calls[-1]["time_limit"] <= 10
