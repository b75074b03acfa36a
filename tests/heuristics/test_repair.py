"""Drafts made to fit, and made cheaper: within the limit, with nothing that is not allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from instances import random_instances, seeded
from poetmodel.graph import floor
from poetmodel.heuristics.partial_schedule import Draft, Supply
from poetmodel.heuristics.penalties import Aim
from poetmodel.heuristics.repair import Repair
from poetmodel.solver.outcome import judge
from worked import skip_problem

if TYPE_CHECKING:
    from poetmodel.problem import Problem


def repair_of(problem: Problem, draft: Draft, **choices: Any) -> Repair:
    """Return a repair at the problem's prices and budget."""
    return Repair(problem, draft, Aim(problem).prices(0.0), problem.usable_ram_bytes, **choices)


def test_the_worked_example() -> None:
    """`a` is made again for `d`: the cheaper way to free it in stage 2."""
    problem = skip_problem()
    draft = Draft(problem.graph)
    assert repair_of(problem, draft).fit()
    assert draft.supplies() == [Supply(3, 0, again=True)]


def test_what_fits_keeps_budget_and_storage_and_does_only_what_is_allowed() -> None:
    """On 200 random problems the judge finds nothing but deadlines and energies exceeded."""
    fitting = 0
    for number, problem in enumerate(random_instances(200, (4, 14), seed=92)):
        draft = Draft(problem.graph)
        repair = repair_of(problem, draft, rng=seeded(number))
        if not repair.fit(noise=number % 2):
            continue
        fitting += 1
        repair.tighten(noise=number % 2)
        violations = judge(problem, draft.schedule()).violations
        assert all(v.startswith(("time", "energy")) for v in violations), violations
    assert fitting > 120


def test_tightening_leaves_nothing_that_could_go() -> None:
    """No supply can be taken away without exceeding the budget, and none is dearer than before."""
    for problem in random_instances(60, (4, 12), seed=93, paging=True):
        draft = Draft(problem.graph)
        repair = repair_of(problem, draft)
        if not repair.fit():
            continue
        before = repair.prices.total(draft)
        repair.tighten()
        assert repair.prices.total(draft) <= before + 1e-12
        for supply in draft.supplies():
            if supply.again:
                continue
            mark = draft.mark()
            draft.remove(supply)
            assert not draft.fits(problem.usable_ram_bytes)
            draft.undo(mark)


def test_any_draft_can_be_mended_where_everything_may_be_paged() -> None:
    """From random recomputations too, down to the floor."""
    for number, problem in enumerate(
        random_instances(
            80, (4, 12), seed=94, deadline=False, aux_limit=False, energy_budget=False, paging=True
        )
    ):
        graph, rng = problem.graph, seeded(f"mend/{number}")
        draft = Draft(graph)
        for t in range(1, len(graph.nodes)):
            k = rng.randrange(t)
            if problem.may_recompute(k):
                draft.add(Supply(t, k, again=True))
        repair = repair_of(problem, draft)
        repair.limit_bytes = floor(graph).bytes
        assert repair.fit()
        assert draft.peak_bytes() <= floor(graph).bytes


def test_without_time_it_gives_up() -> None:
    """Past its time nothing is changed any more."""
    problem = skip_problem()
    draft = Draft(problem.graph)
    assert not repair_of(problem, draft, until_s=0.0).fit()
    assert draft.supplies() == []
