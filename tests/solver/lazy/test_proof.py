"""The way in: whether any schedule keeps a deadline, and how several sessions become one."""

from collections import Counter
from dataclasses import replace

import pytest

from kit.instances import scarce_problem
from kit.oracle import optimum
from kit.relaxation import SOLVER_TOLERANCE, group_all_stages
from kit.rotation import parametrize_parts
from kit.worked import comb_problem, skip_problem
from poetmodel.problem import Quantity
from poetmodel.problem.infeasibility import infeasibility_reason
from poetmodel.result import Termination
from poetmodel.solver.lazy import proof, prove
from poetmodel.solver.lazy.proof import (
    PROOF_MARGIN,
    can_search_fastest,
    find_fastest_schedule,
    generate_rows,
)
from poetmodel.solver.lazy.session import Session
from poetmodel.solver.outcome import make_candidate
from poetmodel.solver.policy import SWITCHES, Policy
from poetmodel.solver.request import Request, SolveProgress


def timed_comb(deadline):
    """State the problem of a comb of six teeth in 9 B, with a deadline on all times together."""
    return comb_problem(6, 9, deadline=deadline, deadline_counts="serial")


def least_time_s():
    """Return the time of the fastest schedule of the comb."""
    free = timed_comb("200%").without_limits(Quantity.TIME, minimize=Quantity.TIME)
    best = prove(free, unlimited(), start=None).candidate
    assert best.simulation.time_s is not None
    return best.simulation.time_s


def unlimited(**choices):
    """Ask for a proof, with time enough."""
    return Request(**{"gap": 0.0, "time_limit_s": 300.0, **choices})


def below(problem, ceiling):
    """Look for schedules below a value."""
    return generate_rows(Session(problem, unlimited(), ceiling=ceiling))


def fastest(problem, request=None, bound=0.0):
    """Look for the fastest schedule."""
    return find_fastest_schedule(problem, request or unlimited(), bound)


AT_ONCE = Policy(without_schedule_time_ratio=0.0)
"""Ask for the fastest schedule at once."""


def with_deadlines(numbers, kind, n):
    """Yield problems with a deadline that are not infeasible at a glance, with their seeds."""
    for number in numbers:
        seed = f"fastest-{kind}/{number}"
        counts = ("serial", "compute")[number % 2]
        problem = scarce_problem(seed, n, deadline_counts=counts)
        if infeasibility_reason(problem) is None and can_search_fastest(problem):
            yield seed, problem


def test_only_a_deadline_on_a_sum_of_times_is_looked_at():
    """A makespan is no sum, and where time is minimized there is nothing else to ask."""
    assert can_search_fastest(skip_problem(deadline="150%", deadline_counts="serial"))
    assert can_search_fastest(skip_problem(deadline="150%", deadline_counts="compute"))
    assert not can_search_fastest(skip_problem())
    assert not can_search_fastest(skip_problem(deadline="150%", deadline_counts="overlap"))
    assert not can_search_fastest(
        skip_problem(deadline="150%", deadline_counts="serial", minimize="time")
    )
    with pytest.raises(ValueError, match="no deadline"):
        fastest(skip_problem())


@parametrize_parts(10)
def test_verdicts_are_those_of_exhaustive_search(part):
    """A schedule that keeps every limit, or a proof that there is none."""
    seen = Counter()
    for seed, problem in with_deadlines(part.select(range(1500)), "verdict", (4, 6)):
        verdict = fastest(problem)
        infeasible = optimum(problem) is None
        assert verdict.is_infeasible == infeasible, seed
        assert (verdict.candidate is None) == infeasible, seed
        if verdict.candidate is not None:
            assert not make_candidate(problem, verdict.candidate.schedule).violations
        assert verdict.termination != Termination.INTERRUPTED
        seen[infeasible] += 1
    assert min(seen[True], seen[False]) > part.divide(9), seen


@parametrize_parts(2)
def test_a_solve_without_a_schedule_asks_for_the_fastest(part, monkeypatch):
    """Out of patience at once, it ends with the same optimum, or the same proof."""
    asked = []
    find = find_fastest_schedule

    def noted(*given):
        asked.append(given)
        return find(*given)

    monkeypatch.setattr(proof, "find_fastest_schedule", noted)
    seen = Counter()
    for seed, problem in part.select(with_deadlines(range(160), "solve", (4, 5))):
        outcome = prove(problem, unlimited(policy=AT_ONCE), start=None)
        best = optimum(problem)
        assert outcome.termination == Termination.PROVED, seed
        assert outcome.is_infeasible == (best is None), seed
        if best is None:
            assert outcome.reason.startswith("proved: "), seed
            assert "the deadline of" in outcome.reason
        else:
            value = best.value - problem.objective.baseline
            assert outcome.candidate.value == pytest.approx(value, abs=SOLVER_TOLERANCE), seed
        seen[outcome.is_infeasible] += 1
    assert min(seen[True], seen[False]) > part.divide(3), seen
    assert len(asked) > part.divide(10)


def test_with_a_schedule_nothing_is_asked(monkeypatch):
    """Nor before patience is at its end, nor without a deadline."""
    monkeypatch.setattr(proof, "find_fastest_schedule", None)
    problem = timed_comb("200%")
    best = prove(problem, unlimited(), start=None).candidate
    for stated, start in ((problem, best), (problem.without_limits(Quantity.TIME), None)):
        outcome = prove(stated, unlimited(policy=AT_ONCE), start=start)
        assert outcome.termination == Termination.PROVED


def test_without_a_verdict_the_solve_goes_on(monkeypatch):
    """With the schedule that was found, or one that comes late; the caller's stop ends it."""
    found = fastest(timed_comb("200%"))
    for start in (found.candidate, None):
        verdict = replace(found, candidate=start)
        monkeypatch.setattr(proof, "find_fastest_schedule", lambda *_, verdict=verdict: verdict)
        outcome = prove(timed_comb("200%"), unlimited(policy=AT_ONCE), start=None)
        assert outcome.termination == Termination.PROVED
        assert outcome.candidate is not None
    stopped = replace(found, termination=Termination.INTERRUPTED)
    monkeypatch.setattr(proof, "find_fastest_schedule", lambda *_: stopped)
    outcome = prove(timed_comb("200%"), unlimited(policy=AT_ONCE), start=None)
    assert outcome.termination == Termination.INTERRUPTED
    assert outcome.candidate is found.candidate
    problem = timed_comb("200%")
    found = fastest(problem).candidate
    run = generate_rows
    starts = []

    def late(session, first=None):
        starts.append(session.bounds.incumbent)
        outcome = run(session, first)
        if len(starts) > 1:
            return outcome
        return replace(outcome, termination=Termination.TIME_LIMIT, candidate=found)

    monkeypatch.setattr(proof, "generate_rows", late)
    outcome = prove(problem, unlimited(policy=AT_ONCE), start=None)
    assert starts == [None, found]
    assert outcome.termination == Termination.PROVED
    assert outcome.candidate.value <= found.value


def test_figures_are_those_of_all_parts(monkeypatch):
    """The most columns and rows of any model, and all rounds, whichever part they belong to."""
    problem = timed_comb(f"{least_time_s() - 1e-3} s")
    figures = []
    run = generate_rows

    def noted(session, first=None):
        outcome = run(session, first)
        figures.append(dict(outcome.statistics))
        return outcome

    monkeypatch.setattr(proof, "generate_rows", noted)
    outcome = prove(problem, unlimited(policy=AT_ONCE), start=None)
    assert outcome.is_infeasible
    assert len(figures) == 2
    assert outcome.statistics["rounds"] == sum(part["rounds"] for part in figures)
    assert outcome.statistics["columns"] == max(part["columns"] for part in figures) > 0


def test_what_was_found_stays_found(monkeypatch):
    """News from another thread may be older; the end it caused is not the caller's."""
    problem = timed_comb("200%")
    monkeypatch.setattr(proof, "construct", lambda *_, **__: None)

    def told_twice(session, first=None):
        tell = session.request.on_progress
        assert tell is not None
        session.request = replace(session.request, on_progress=None)
        outcome = generate_rows(session, first)
        state = SolveProgress(seconds=1.0, overhead=outcome.candidate.value, overhead_bound=0.0)
        assert tell(state) is False
        assert tell(replace(state, overhead=None)) is False
        return replace(outcome, termination=Termination.INTERRUPTED)

    monkeypatch.setattr(proof, "generate_rows", told_twice)
    verdict = fastest(problem)
    assert verdict.candidate is not None
    assert verdict.termination != Termination.INTERRUPTED


def test_a_ceiling_above_the_deadline_proves_no_more_than_it_says():
    """A schedule that just keeps it is found; a bound says what is below, not that all is above.

    A callback is told what is known of the problem, never of the fastest schedule, and ends it.
    """
    least_s = least_time_s()
    for change, infeasible in ((0.0, False), (1e-3, False), (-1e-3, True)):
        deadline = f"{least_s + change} s"
        verdict = fastest(timed_comb(deadline))
        assert verdict.is_infeasible == infeasible
        assert (verdict.candidate is None) == infeasible
    assert PROOF_MARGIN > 1e-9
    told = []

    def stop(progress):
        told.append(progress)
        return False

    problem = timed_comb(f"{least_time_s() - 1e-3} s")
    verdict = fastest(problem, unlimited(on_progress=stop), 0.25)
    assert verdict.termination == Termination.INTERRUPTED
    assert not verdict.is_infeasible
    assert {(each.overhead, each.overhead_bound) for each in told} == {(None, 0.25)}
    problem = timed_comb("200%").without_limits(Quantity.TIME)
    best = prove(problem, unlimited(), start=None).candidate
    ceiling = best.value / 2
    outcome = below(problem, ceiling)
    assert outcome.bound >= ceiling
    assert not outcome.is_infeasible
    above = below(problem, best.value * 2)
    assert above.candidate.value == pytest.approx(best.value)


# -- policies: no answer depends on them -------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        *(Policy(**changes) for changes in SWITCHES.values()),
        Policy(cuts=frozenset(), heuristics=frozenset()),
        Policy(cut_rounds=1, cuts_per_round=1, rounds_without_gain=1),
        Policy(single_row_gain_ratio=0.0),
        Policy(few_rows=100, wide_gap_rows=100, single_row_gain_ratio=1.0),
    ],
)
def test_no_answer_depends_on_them(policy):
    """With anything left out the optimum is proved all the same."""
    problem = comb_problem(8, 9, deadline="200%", deadline_counts="serial")
    usual, other = (
        prove(problem, request, start=None, first_grouping=group_all_stages(problem))
        for request in (unlimited(), unlimited(policy=policy))
    )
    assert other.termination == Termination.PROVED
    assert other.candidate.value == pytest.approx(usual.candidate.value, abs=SOLVER_TOLERANCE)
    assert other.bound == pytest.approx(usual.bound, abs=SOLVER_TOLERANCE)
