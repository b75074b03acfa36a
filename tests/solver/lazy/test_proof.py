"""The way in: whether any schedule keeps a deadline, and how several sessions become one."""

from collections import Counter

import pytest

from kit.instances import scarce_problem
from kit.oracle import optimum
from kit.relaxation import SOLVER_TOLERANCE, group_all_stages
from kit.rotation import parametrize_parts
from kit.searches import prove
from kit.worked import comb_problem, skip_problem
from poetmodel.problem import Quantity
from poetmodel.problem.infeasibility import infeasibility_reason
from poetmodel.result import Termination
from poetmodel.solver.lazy import proof
from poetmodel.solver.lazy.proof import (
    PROOF_MARGIN,
    can_search_fastest,
    decide_deadline,
    generate_rows,
)
from poetmodel.solver.outcome import make_candidate
from poetmodel.solver.policy import SWITCHES, Policy
from poetmodel.solver.request import Request
from poetmodel.solver.search import Search


def timed_comb(deadline):
    """State the problem of a comb of six teeth in 9 B, with a deadline on all times together."""
    return comb_problem(6, 9, deadline=deadline, deadline_counts="serial")


def least_time_s():
    """Return the time of the fastest schedule of the comb."""
    free = timed_comb("200%").without_limits(Quantity.TIME, minimize=Quantity.TIME)
    best = prove(free, unlimited(), start=None).best
    assert best.simulation.time_s is not None
    return best.simulation.time_s


def unlimited(**choices):
    """Return a request with time enough."""
    return Request(**{"gap": 0.0, "time_limit_s": 300.0, **choices})


def below(problem, ceiling):
    """Look for schedules below a value."""
    search = Search(problem=problem, request=unlimited(), ceiling=ceiling)
    generate_rows(search)
    return search


def fastest(problem, request=None, bound=0.0):
    """Decide whether any schedule keeps the deadline."""
    search = Search(problem=problem, request=request or unlimited(), bound=bound)
    decide_deadline(search)
    return search


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
    """A makespan is no sum, and if time is minimized, there is no second problem."""
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
        assert (verdict.best is None) == infeasible, seed
        if verdict.best is not None:
            assert not make_candidate(problem, verdict.best.schedule).violations
        assert verdict.termination != Termination.INTERRUPTED
        seen[infeasible] += 1
    assert min(seen[True], seen[False]) > part.divide(9), seen


@parametrize_parts(2)
def test_a_solve_without_a_schedule_asks_for_the_fastest(part, monkeypatch):
    """Out of patience at once, it ends with the same optimum, or the same proof."""
    asked = []

    def noted(search):
        asked.append(search)
        return decide_deadline(search)

    monkeypatch.setattr(proof, "decide_deadline", noted)
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
            assert outcome.best.value == pytest.approx(value, abs=SOLVER_TOLERANCE), seed
        seen[outcome.is_infeasible] += 1
    assert min(seen[True], seen[False]) > part.divide(3), seen
    assert len(asked) > part.divide(10)


def test_with_a_schedule_nothing_is_asked(monkeypatch):
    """Nor before patience is at its end, nor without a deadline."""
    monkeypatch.setattr(proof, "decide_deadline", None)
    problem = timed_comb("200%")
    best = prove(problem, unlimited(), start=None).best
    for stated, start in ((problem, best), (problem.without_limits(Quantity.TIME), None)):
        outcome = prove(stated, unlimited(policy=AT_ONCE), start=start)
        assert outcome.termination == Termination.PROVED


def test_without_a_verdict_the_solve_goes_on(monkeypatch):
    """With the present schedule, or one that is late; the caller's stop ends it."""
    problem = timed_comb("200%")
    found = fastest(problem).best
    for start in (found, None):

        def decided(search, start=start):
            search.best = start
            return False

        monkeypatch.setattr(proof, "decide_deadline", decided)
        outcome = prove(problem, unlimited(policy=AT_ONCE))
        assert outcome.termination == Termination.PROVED
        assert outcome.best is not None

    def stopped(search):
        search.best = found
        search.end(Termination.INTERRUPTED)
        return True

    monkeypatch.setattr(proof, "decide_deadline", stopped)
    outcome = prove(problem, unlimited(policy=AT_ONCE))
    assert outcome.termination == Termination.INTERRUPTED
    assert outcome.best is found
    starts = []

    def late(search, first=None):
        starts.append(search.best)
        generate_rows(search, first)
        if len(starts) == 1:
            search.best = found
            search.end(Termination.TIME_LIMIT)

    monkeypatch.setattr(proof, "generate_rows", late)
    outcome = prove(problem, unlimited(policy=AT_ONCE))
    assert starts == [None, found]
    assert outcome.termination == Termination.PROVED
    assert outcome.best.value <= found.value


def test_figures_are_those_of_all_parts(monkeypatch):
    """The most columns and rows of any model, and all rounds, whichever part they belong to."""
    problem = timed_comb(f"{least_time_s() - 1e-3} s")
    figures = []

    def noted(search, first=None):
        generate_rows(search, first)
        figures.append(dict(search.statistics))

    monkeypatch.setattr(proof, "generate_rows", noted)
    outcome = prove(problem, unlimited(policy=AT_ONCE))
    assert outcome.is_infeasible
    assert len(figures) == 2
    assert outcome.statistics["rounds"] == sum(part["rounds"] for part in figures)
    assert outcome.statistics["columns"] == max(part["columns"] for part in figures) > 0


def test_a_schedule_that_keeps_the_deadline_is_enough(monkeypatch):
    """The search for the fastest one ends with it, without an interruption."""
    problem = timed_comb("200%")
    monkeypatch.setattr(proof, "construct", lambda *_, **__: None)
    told = []
    verdict = fastest(problem, unlimited(on_progress=told.append))
    assert verdict.best is not None
    assert not make_candidate(problem, verdict.best.schedule).violations
    assert (verdict.termination, verdict.stop_reason) == (None, None)
    assert told[-1].schedule is verdict.best.schedule


def test_a_ceiling_above_the_deadline_proves_no_more_than_it_says():
    """A schedule at the deadline is found; a bound proves only that no schedule is below it.

    A callback gets results of the problem, never of the fastest schedule, and ends it.
    """
    least_s = least_time_s()
    for change, infeasible in ((0.0, False), (1e-3, False), (-1e-3, True)):
        deadline = f"{least_s + change} s"
        verdict = fastest(timed_comb(deadline))
        assert verdict.is_infeasible == infeasible
        assert (verdict.best is None) == infeasible
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
    best = prove(problem, unlimited(), start=None).best
    ceiling = best.value / 2
    outcome = below(problem, ceiling)
    assert outcome.bound >= ceiling
    assert not outcome.is_infeasible
    above = below(problem, best.value * 2)
    assert above.best.value == pytest.approx(best.value)


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
    """Without any of them, the optimum is proven all the same."""
    problem = comb_problem(8, 9, deadline="200%", deadline_counts="serial")
    usual, other = (
        prove(problem, request, start=None, first_grouping=group_all_stages(problem))
        for request in (unlimited(), unlimited(policy=policy))
    )
    assert other.termination == Termination.PROVED
    assert other.best.value == pytest.approx(usual.best.value, abs=SOLVER_TOLERANCE)
    assert other.bound == pytest.approx(usual.bound, abs=SOLVER_TOLERANCE)
