"""Drafts made to fit, and made cheaper: within the limit, with nothing that is not allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from instances import random_instances, seeded
from poetmodel.graph import floor
from poetmodel.heuristics.partial_schedule import PartialSchedule, Restoration
from poetmodel.heuristics.penalties import PenalizedObjective, price
from poetmodel.heuristics.repair import Repair
from poetmodel.solver.outcome import verify_schedule
from worked import skip_problem

if TYPE_CHECKING:
    from poetmodel.problem import Problem


def repair_of(problem: Problem, partial: PartialSchedule, **choices: Any) -> Repair:
    """Return a repair at the problem's prices and budget."""
    return Repair(
        problem,
        partial,
        PenalizedObjective(problem).prices(0.0),
        problem.usable_ram_bytes,
        **choices,
    )


def test_the_worked_example() -> None:
    """`a` is made again for `d`: the cheaper way to free it in stage 2."""
    problem = skip_problem()
    partial = PartialSchedule(problem.graph)
    assert repair_of(problem, partial).fit()
    assert partial.restorations() == [Restoration(3, 0, recompute=True)]


def test_what_fits_keeps_budget_and_storage_and_does_only_what_is_allowed() -> None:
    """On 200 random problems the judge finds nothing but deadlines and energies exceeded."""
    fitting = 0
    for number, problem in enumerate(random_instances(200, (4, 14), seed=92)):
        partial = PartialSchedule(problem.graph)
        repair = repair_of(problem, partial, rng=seeded(number))
        if not repair.fit(noise=number % 2):
            continue
        fitting += 1
        repair.tighten(noise=number % 2)
        violations = verify_schedule(problem, partial.schedule()).violations
        assert all(v.startswith(("time", "energy")) for v in violations), violations
    assert fitting > 120


def test_tightening_leaves_nothing_that_could_go() -> None:
    """No restoration can go without exceeding the budget, and the price has not risen."""
    for problem in random_instances(60, (4, 12), seed=93, paging=True):
        partial = PartialSchedule(problem.graph)
        repair = repair_of(problem, partial)
        if not repair.fit():
            continue
        before = price(repair.prices, partial)
        repair.tighten()
        assert price(repair.prices, partial) <= before + 1e-12
        for restoration in partial.restorations():
            if restoration.recompute:
                continue
            mark = partial.mark()
            partial.remove(restoration)
            assert not partial.fits(problem.usable_ram_bytes)
            partial.undo(mark)


def test_any_partial_schedule_can_be_repaired_where_everything_may_be_paged() -> None:
    """From random recomputations too, down to the floor."""
    for number, problem in enumerate(
        random_instances(
            80, (4, 12), seed=94, deadline=False, aux_limit=False, energy_budget=False, paging=True
        )
    ):
        graph, rng = problem.graph, seeded(f"mend/{number}")
        partial = PartialSchedule(graph)
        for t in range(1, len(graph.nodes)):
            k = rng.randrange(t)
            if problem.may_recompute(k):
                partial.add(Restoration(t, k, recompute=True))
        repair = repair_of(problem, partial)
        repair.limit_bytes = floor(graph).bytes
        assert repair.fit()
        assert partial.peak_bytes() <= floor(graph).bytes


def test_without_time_it_gives_up() -> None:
    """Past its time nothing is changed any more."""
    problem = skip_problem()
    partial = PartialSchedule(problem.graph)
    assert not repair_of(problem, partial, until_s=0.0).fit()
    assert partial.restorations() == []
