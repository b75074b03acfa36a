"""Drafts made to fit, and made cheaper: within the limit, with nothing that is not allowed."""

from __future__ import annotations

from typing import Any

from kit.instances import random_instances, seeded
from kit.worked import skip_problem
from poetmodel.device import Costs
from poetmodel.graph import Graph, floor, operation
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.heuristics.penalties import PenalizedObjective, price
from poetmodel.heuristics.repair import Repair, RepairStyle
from poetmodel.heuristics.restorations import PAGE_IN, RECOMPUTE, Restoration
from poetmodel.problem import Problem
from poetmodel.solver.outcome import verify_schedule


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
    assert partial.restorations() == [Restoration(3, 0, RECOMPUTE)]


def test_what_fits_keeps_budget_and_storage_and_does_only_what_is_allowed() -> None:
    """On 200 random problems the verifier finds nothing but deadlines and energies exceeded."""
    fitting = 0
    for number, problem in enumerate(random_instances(200, (4, 14), seed=92)):
        partial = PartialSchedule(problem.graph)
        repair = repair_of(problem, partial, rng=seeded(number) if number % 2 else None)
        if not repair.fit():
            continue
        fitting += 1
        repair.drop_needless()
        violations = verify_schedule(problem, partial.schedule()).violations
        assert all(v.startswith(("time", "energy")) for v in violations), violations
    assert fitting > 120


def test_dropping_leaves_nothing_that_could_go() -> None:
    """No restoration can go without exceeding the budget, and the price has not risen."""
    for problem in random_instances(60, (4, 12), seed=93, paging=True):
        partial = PartialSchedule(problem.graph)
        repair = repair_of(problem, partial)
        if not repair.fit():
            continue
        before = price(repair.prices, partial)
        repair.drop_needless()
        assert price(repair.prices, partial) <= before + 1e-12
        for restoration in partial.restorations():
            if restoration.kind == RECOMPUTE:
                continue
            mark = partial.mark()
            partial.remove(restoration)
            assert not partial.fits(problem.usable_ram_bytes)
            partial.undo(mark)


def test_room_for_one_large_tensor_goes_to_several_small_ones() -> None:
    """Beside `work` there is room for `large`, or for three that cost nearly as much each."""
    sizes = {"large": 6, "small0": 2, "small1": 2, "small2": 2}
    nodes = [operation(name, output_bytes=size) for name, size in sizes.items()]
    work = operation("work", output_bytes=1, workspace_bytes=8)
    end = operation("end", output_bytes=1, phase="backward", inputs=("work", *sizes))
    graph = Graph(name="side by side", nodes=(*nodes, work, end))
    one = [1.0] * len(graph.nodes)
    page = [(1.0, 1.0 + size / 100) for size in graph.tensor_bytes]
    costs = Costs.from_arrays(
        graph, compute_time_s=one, compute_energy_j=one, page_in=page, page_out=page
    )
    problem = Problem(graph, costs, ram=15, recompute=False)
    pages = [Restoration(5, i, PAGE_IN) for i in range(4)]
    partial = PartialSchedule(graph, pages)
    repair_of(problem, partial).drop_needless()
    assert partial.restorations() == pages[:1]


def test_any_partial_schedule_can_be_repaired_where_everything_may_be_paged() -> None:
    """From random recomputations too, down to the floor."""
    for number, problem in enumerate(
        random_instances(
            80, (4, 12), seed=94, deadline=False, aux_limit=False, energy_budget=False, paging=True
        )
    ):
        graph, rng = problem.graph, seeded(f"repair/{number}")
        partial = PartialSchedule(graph)
        for t in range(1, len(graph.nodes)):
            k = rng.randrange(t)
            if problem.may_recompute(k):
                partial.add(Restoration(t, k, RECOMPUTE))
        repair = repair_of(problem, partial)
        repair.limit_bytes = floor(graph).bytes
        assert repair.fit()
        assert partial.peaks().max() <= floor(graph).bytes


def test_without_time_it_gives_up() -> None:
    """Past its time nothing is changed any more."""
    problem = skip_problem()
    partial = PartialSchedule(problem.graph)
    assert not repair_of(problem, partial, until_s=0.0).fit()
    assert partial.restorations() == []


def test_without_pages_nothing_is_paged_and_long_chains_are_found() -> None:
    """The style decides how tensors come back: each way leaves what fits, if anything does."""
    ways = {"pages": 0, "chains": 0}
    for problem in random_instances(60, (6, 14), seed=96, paging=True):
        for style in (RepairStyle(pages=False), RepairStyle(longest_chain=0)):
            partial = PartialSchedule(problem.graph)
            if not repair_of(problem, partial, style=style).fit():
                continue
            if style.pages:
                ways["pages"] += sum(partial.page_ins)
                assert not any(partial.recomputed) or not problem.can_page
            else:
                ways["chains"] += sum(map(len, partial.recomputed))
                assert not any(partial.page_ins)
    assert ways["pages"] > 0
    assert ways["chains"] > 0
