"""The state of a solve: messages to a parent, to the user, and after the end."""

from dataclasses import replace

import pytest

from kit.worked import skip_problem
from poetmodel.heuristics.greedy import page_everything
from poetmodel.problem import Quantity
from poetmodel.result import Termination
from poetmodel.schedule import Schedule
from poetmodel.solver.outcome import make_candidate
from poetmodel.solver.request import Request
from poetmodel.solver.search import Search
from poetmodel.solver.statement import restate

RECOMPUTED = Schedule(R=((0, 0), (1, 1), (2, 2), (3, 0), (3, 3)), S_RAM=((1, 0), (2, 1), (3, 2)))
"""`a` is recomputed for its last use: 1 J above a single pass."""


def search_of(**request):
    """Begin a search for the skip connection, and record its reports."""
    told = []
    request = Request(on_progress=told.append, **request)
    return Search(problem=skip_problem(), request=request), told


def test_a_schedule_of_a_child_reaches_its_parent_and_a_bound_does_not():
    """Unless it is a bound of the parent, too; a child begins with the bound of its parent."""
    search, told = search_of()
    search.prove(0.25)
    child = search.child(restate(search.problem, reference_value=2.0))
    assert child.bound == 0.25
    assert child.offer(RECOMPUTED)
    assert search.best is child.best
    child.prove(0.5)
    assert search.bound == 0.25
    assert (told[-1].overhead, told[-1].overhead_bound) == (1.0, 0.5)
    search.prove(child.bound)
    assert search.bound == 0.5


def test_a_child_with_another_objective_keeps_its_values_to_itself():
    """Its values are none of the parent, which does not receive them."""
    search, told = search_of()
    problem = search.problem.without_limits(Quantity.TIME, minimize=Quantity.TIME)
    forwarded = []

    def forward(*report):
        forwarded.append(report)
        return True

    child = search.child(problem, bound=0.0, parent=None, forward=forward)
    assert child.offer(RECOMPUTED)
    assert (search.best, told) == (None, [])
    assert forwarded[-1][0] == child.best.value


def test_the_callback_ends_parent_and_child():
    """For reports of either of them."""
    search, _ = search_of()
    search.request = replace(search.request, on_progress=lambda _: False)
    child = search.child(search.problem)
    assert child.offer(RECOMPUTED)
    assert search.stop_reason == child.stop_reason == Termination.INTERRUPTED
    assert child.is_done()


def test_what_an_abandoned_search_still_finds_is_ignored():
    """No schedules, bounds and reports; the earlier results stay."""
    search, told = search_of()
    assert search.offer(page_everything(search.problem))
    before, n_told = search.best_known(), len(told)
    search.abandon()
    assert search.offer(RECOMPUTED)
    search.prove(0.5)
    search.replace_bound(0.75)
    assert not search.report()
    assert (search.best_known(), len(told)) == (before, n_told)
    assert search.is_done()


def test_a_withdrawn_bound_is_corrected_for_the_user():
    """At once, also if a child withdraws it."""
    search, told = search_of()
    assert search.offer(RECOMPUTED)
    child = search.child(search.problem)
    child.prove(0.5)
    assert told[-1].overhead_bound == 0.5
    child.replace_bound(0.25)
    assert told[-1].overhead_bound == 0.25


@pytest.mark.parametrize(("bound", "ends"), [(0.5, False), (1.0, True)])
def test_a_search_ends_with_its_gap_its_ceiling_or_its_target(bound, ends):
    """A ceiling ends it without a schedule, a target without a bound."""
    search, _ = search_of(gap=0.0)
    search.store_if_best(make_candidate(search.problem, RECOMPUTED))
    search.prove(bound)
    assert search.is_closed() == ends
    ceiling = Search(problem=search.problem, request=search.request, ceiling=1.0, bound=bound)
    assert ceiling.is_closed() == ends
    search.target = 1.0
    assert search.is_closed()


def test_a_refuted_proof_is_dropped():
    """The schedule stays; the bound is the one known without a solve."""
    search, _ = search_of()
    search.store_if_best(make_candidate(search.problem, RECOMPUTED))
    search.prove(2.0)
    search.end(Termination.PROVED)
    assert search.is_refuted()
    search.drop_proof()
    assert (search.bound, search.termination) == (0.0, Termination.STALLED)
    assert search.best is not None
    assert "refutes" in search.reason
