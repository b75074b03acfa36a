"""The way in: whether any schedule keeps a deadline, and how several sessions become one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kit.instances import scarce_problem
from kit.oracle import optimum
from kit.relaxation import CLOSE
from kit.rotation import Part, parts
from kit.worked import comb_problem, skip_problem
from poetmodel.problem import Problem, Quantity
from poetmodel.problem.infeasibility import obstacle
from poetmodel.result import Termination
from poetmodel.solver.lazy import LazyParams, solve, solve_lazily
from poetmodel.solver.lazy.session import Session
from poetmodel.solver.lazy.solve import (
    MARGIN,
    find_fastest,
    generate_rows,
    has_fastest,
)
from poetmodel.solver.outcome import Candidate, Outcome, verify_schedule
from poetmodel.solver.request import Request, SolveProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from poetmodel.model.aggregated import Grouping


def timed_comb(deadline: str) -> Problem:
    """State the problem of a comb of six teeth in 9 B, with a deadline on all times together."""
    return comb_problem(6, 9, deadline=deadline, deadline_counts="serial")


def least_time_s() -> float:
    """Return the time of the fastest schedule of the comb."""
    free = timed_comb("200%").without(Quantity.TIME, minimize=Quantity.TIME)
    best = solve_lazily(free, unlimited(), start=None).candidate
    assert best is not None
    assert best.simulation.time_s is not None
    return best.simulation.time_s


def unlimited(**choices: object) -> Request:
    """Ask for a proof, with time enough."""
    return Request(**{"gap": 0.0, "time_limit_s": 300.0, **choices})  # type: ignore[arg-type]


def below(problem: Problem, ceiling: float) -> Outcome:
    """Look for schedules below a value."""
    return generate_rows(Session(problem, unlimited(), ceiling=ceiling))


def fastest(problem: Problem, request: Request | None = None, bound: float = 0.0) -> Outcome:
    """Look for the fastest schedule."""
    return find_fastest(problem, request or unlimited(), bound, LazyParams())


AT_ONCE = LazyParams(without_schedule_time_ratio=0.0)
"""Ask for the fastest schedule at once."""


def with_deadlines(count: int, kind: str, n: tuple[int, int]) -> Iterator[tuple[str, Problem]]:
    """Yield problems with a deadline that are not infeasible at a glance, with their seeds."""
    for number in range(count):
        seed = f"fastest-{kind}/{number}"
        counts = ("serial", "compute")[number % 2]
        problem = scarce_problem(seed, n, deadline_counts=counts)
        if obstacle(problem) is None and has_fastest(problem):
            yield seed, problem


def test_only_a_deadline_on_a_sum_of_times_is_looked_at() -> None:
    """A makespan is no sum, and where time is minimized there is nothing else to ask."""
    assert has_fastest(skip_problem(deadline="150%", deadline_counts="serial"))
    assert has_fastest(skip_problem(deadline="150%", deadline_counts="compute"))
    assert not has_fastest(skip_problem())
    assert not has_fastest(skip_problem(deadline="150%", deadline_counts="overlap"))
    assert not has_fastest(skip_problem(deadline="150%", deadline_counts="serial", minimize="time"))
    with pytest.raises(ValueError, match="no deadline"):
        fastest(skip_problem())


def check_verdicts(count: int, kind: str, n: tuple[int, int]) -> Counter[bool]:
    """Hold verdicts against exhaustive search; return how often there is no schedule."""
    seen: Counter[bool] = Counter()
    for seed, problem in with_deadlines(count, kind, n):
        verdict = fastest(problem)
        infeasible = optimum(problem) is None
        assert verdict.infeasible == infeasible, seed
        assert (verdict.candidate is None) == infeasible, seed
        if verdict.candidate is not None:
            assert not verify_schedule(problem, verdict.candidate.schedule).violations
        assert verdict.termination != Termination.INTERRUPTED
        seen[infeasible] += 1
    return seen


def test_verdicts_are_those_of_exhaustive_search() -> None:
    """A schedule that keeps every limit, or a proof that there is none."""
    seen = check_verdicts(120, "verdict", (4, 5))
    assert min(seen[True], seen[False]) > 2, seen


@pytest.mark.seeds
def test_more_verdicts_are_those_of_exhaustive_search() -> None:
    """The same on 1,500 problems of up to six nodes."""
    seen = check_verdicts(1500, "verdict", (4, 6))
    assert min(seen[True], seen[False]) > 50, seen


@parts(2)
def test_a_solve_without_a_schedule_asks_for_the_fastest(
    part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of patience at once, it ends with the same optimum, or the same proof."""
    asked = []
    find: Callable[..., object] = find_fastest

    def noted(*given: object) -> object:
        asked.append(given)
        return find(*given)

    monkeypatch.setattr(solve, "find_fastest", noted)
    seen: Counter[bool] = Counter()
    for seed, problem in part.of(with_deadlines(160, "solve", (4, 5))):
        outcome = solve_lazily(problem, unlimited(), start=None, params=AT_ONCE)
        best = optimum(problem)
        assert outcome.termination == Termination.PROVED, seed
        assert outcome.infeasible == (best is None), seed
        if best is None:
            assert outcome.reason.startswith("proved: "), seed
            assert "the deadline of" in outcome.reason
        else:
            assert outcome.candidate is not None
            value = best.value - problem.objective.baseline
            assert outcome.candidate.value == pytest.approx(value, abs=CLOSE), seed
        seen[outcome.infeasible] += 1
    assert min(seen[True], seen[False]) > part.share(3), seen
    assert len(asked) > part.share(10)


def test_with_a_schedule_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor before patience is at its end, nor without a deadline."""
    monkeypatch.setattr(solve, "find_fastest", None)
    problem = timed_comb("200%")
    best = solve_lazily(problem, unlimited(), start=None).candidate
    assert best is not None
    assert (
        solve_lazily(problem, unlimited(), start=best, params=AT_ONCE).termination
        == Termination.PROVED
    )
    free = problem.without(Quantity.TIME)
    assert (
        solve_lazily(free, unlimited(), start=None, params=AT_ONCE).termination
        == Termination.PROVED
    )


def test_without_a_verdict_the_solve_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the schedule that was found, or without; the caller's stop ends it."""
    found = fastest(timed_comb("200%"))
    for start in (found.candidate, None):
        verdict = replace(found, candidate=start)
        monkeypatch.setattr(solve, "find_fastest", lambda *_, verdict=verdict: verdict)
        outcome = solve_lazily(timed_comb("200%"), unlimited(), start=None, params=AT_ONCE)
        assert outcome.termination == Termination.PROVED
        assert outcome.candidate is not None
    stopped = replace(found, termination=Termination.INTERRUPTED)
    monkeypatch.setattr(solve, "find_fastest", lambda *_: stopped)
    outcome = solve_lazily(timed_comb("200%"), unlimited(), start=None, params=AT_ONCE)
    assert outcome.termination == Termination.INTERRUPTED
    assert outcome.candidate is found.candidate


def test_a_schedule_that_comes_late_is_where_the_solve_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Patience is at its end, and then the search beside finds something all the same."""
    problem = timed_comb("200%")
    found = fastest(problem).candidate
    assert found is not None
    run = generate_rows
    starts: list[Candidate | None] = []

    def late(session: Session, first: Grouping | None = None) -> Outcome:
        starts.append(session.bounds.incumbent)
        outcome = run(session, first)
        if len(starts) > 1:
            return outcome
        return replace(outcome, termination=Termination.TIME_LIMIT, candidate=found)

    monkeypatch.setattr(solve, "generate_rows", late)
    outcome = solve_lazily(problem, unlimited(), start=None, params=AT_ONCE)
    assert starts == [None, found]
    assert outcome.termination == Termination.PROVED
    assert outcome.candidate is not None
    assert outcome.candidate.value <= found.value


def test_figures_are_those_of_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most columns and rows of any model, and all rounds, whichever part they belong to."""
    problem = timed_comb(f"{least_time_s() - 1e-3} s")
    figures: list[dict[str, Any]] = []
    run = generate_rows

    def noted(session: Session, first: Grouping | None = None) -> Outcome:
        outcome = run(session, first)
        figures.append(dict(outcome.statistics))
        return outcome

    monkeypatch.setattr(solve, "generate_rows", noted)
    outcome = solve_lazily(problem, unlimited(), start=None, params=AT_ONCE)
    assert outcome.infeasible
    assert len(figures) == 2
    assert outcome.statistics["rounds"] == sum(part["rounds"] for part in figures)
    assert outcome.statistics["columns"] == max(part["columns"] for part in figures) > 0


def test_what_was_found_stays_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """News from another thread may be older; the end it caused is not the caller's."""
    problem = timed_comb("200%")
    monkeypatch.setattr(solve, "construct", lambda *_, **__: None)

    def told_twice(session: Session, first: Grouping | None = None) -> Outcome:
        tell = session.request.on_progress
        assert tell is not None
        session.request = replace(session.request, on_progress=None)
        outcome = generate_rows(session, first)
        assert outcome.candidate is not None
        state = SolveProgress(seconds=1.0, incumbent=outcome.candidate.value, bound=0.0)
        assert tell(state) is False
        assert tell(replace(state, incumbent=None)) is False
        return replace(outcome, termination=Termination.INTERRUPTED)

    monkeypatch.setattr(solve, "generate_rows", told_twice)
    verdict = fastest(problem)
    assert verdict.candidate is not None
    assert verdict.termination != Termination.INTERRUPTED


def test_a_proof_needs_more_than_a_tolerance() -> None:
    """The ceiling is above the deadline; a schedule that just keeps it is found."""
    least_s = least_time_s()
    for change, infeasible in ((0.0, False), (1e-3, False), (-1e-3, True)):
        deadline = f"{least_s + change} s"
        verdict = fastest(timed_comb(deadline))
        assert verdict.infeasible == infeasible
        assert (verdict.candidate is None) == infeasible
    assert MARGIN > 1e-9


def test_a_callback_ends_the_search() -> None:
    """It is told what is known of the problem, never of the fastest schedule."""
    told: list[SolveProgress] = []

    def stop(progress: SolveProgress) -> bool:
        told.append(progress)
        return False

    problem = timed_comb(f"{least_time_s() - 1e-3} s")
    verdict = fastest(problem, unlimited(on_progress=stop), 0.25)
    assert verdict.termination == Termination.INTERRUPTED
    assert not verdict.infeasible
    assert {(progress.incumbent, progress.bound) for progress in told} == {(None, 0.25)}


def test_nothing_below_a_ceiling_is_no_proof_that_nothing_is_above() -> None:
    """The bound says it; the problem itself has schedules."""
    problem = timed_comb("200%").without(Quantity.TIME)
    best = solve_lazily(problem, unlimited(), start=None).candidate
    assert best is not None
    ceiling = best.value / 2
    outcome = below(problem, ceiling)
    assert outcome.bound >= ceiling
    assert not outcome.infeasible
    above = below(problem, best.value * 2)
    assert above.candidate is not None
    assert above.candidate.value == pytest.approx(best.value)
