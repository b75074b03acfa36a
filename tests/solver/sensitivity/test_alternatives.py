"""What other decisions would have cost: against the oracle, and never more than is known."""

from dataclasses import replace

import pytest

from kit.commands import training_step, write_graph
from kit.instances import random_instance, random_step, seeded
from kit.oracle import optimum
from kit.worked import bench_device, skip_problem
from poetmodel.device import Costs
from poetmodel.graph import Graph, checkpoint_all_peak_bytes
from poetmodel.problem import Problem
from poetmodel.result import Status, Termination
from poetmodel.schedule.decisions import Treatment, find_decisions
from poetmodel.solver import solve
from poetmodel.solver.sensitivity import variants
from poetmodel.solver.sensitivity.alternatives import (
    Forbidden,
    How,
    find_alternatives,
    value_of_ram,
)


def best(problem):
    """Return the best schedule of a problem."""
    return solve(problem, gap=0.0).require_schedule()


def test_alternatives_of_the_worked_example():
    """Instead of computing a again (1 J) it can be paged (2 J), but not be kept in 13 B.

    That is proved where nothing may be paged; where nothing may be written, it cannot be paged.
    With 15 B all is kept; letting a go from b to d costs 2 J paged and 1 J computed again, and
    with a deadline of one pass nothing can go. From 14 B, 1 B more saves the joule of computing
    a again. Without time questions get a little.
    """
    problem = skip_problem()
    paged, kept = find_alternatives(problem, best(problem), 0)
    assert (paged.forbidden, paged.becomes) == (Forbidden.RECOMPUTATION, Treatment.PAGED)
    assert (paged.how, paged.exact) == (How.SOLVED, True)
    assert (paged.energy_j, paged.least_j, paged.time_s) == (1.0, 1.0, 1.0)
    assert (kept.forbidden, kept.how, kept.energy_j) == (Forbidden.BOTH, How.BOUNDED, None)
    assert kept.least_j > 11
    problem = skip_problem(paging=False)
    (kept,) = find_alternatives(problem, best(problem), 0)
    assert (kept.forbidden, kept.how, kept.exact) == (Forbidden.BOTH, How.IMPOSSIBLE, True)
    problem = skip_problem().subject_to(wear=lambda v: v.bytes_written <= 3)
    schedule = best(problem)
    assert {other.how for other in find_alternatives(problem, schedule, 0)} == {How.IMPOSSIBLE}
    roomy = skip_problem().subject_to(wear=lambda v: v.bytes_written <= 4)
    paged, _ = find_alternatives(roomy, schedule, 0)
    assert (paged.how, paged.becomes, paged.energy_j) == (How.SOLVED, Treatment.PAGED, 1.0)
    for more in value_of_ram(problem, schedule):
        assert more.saved_j == 0.0
    problem = skip_problem(ram=15)
    paged, recomputed = find_alternatives(problem, best(problem), 0)
    assert (paged.becomes, paged.energy_j, paged.time_s) == (Treatment.PAGED, 2.0, 2.0)
    assert (recomputed.becomes, recomputed.energy_j) == (Treatment.RECOMPUTED, 1.0)
    assert {paged.how, recomputed.how} == {How.BOUNDED}
    assert not paged.exact
    assert find_alternatives(problem, best(problem), 3) == ()
    problem = skip_problem(ram=15, deadline="100%")
    assert [other.energy_j for other in find_alternatives(problem, best(problem), 0)] == [None] * 2
    problem = skip_problem(ram=14)
    for more in value_of_ram(problem, best(problem)):
        assert (more.more_bytes, more.saved_j, more.most_j) == (1, 1.0, 1.0)
        assert more.saved_j_per_kb == 1000.0
    assert value_of_ram(skip_problem(), best(skip_problem()))[0].saved_j == 0.0
    problem = skip_problem()
    assert len(find_alternatives(problem, best(problem), 0, time_limit=0.0)) == 2


def test_alternatives_are_those_of_an_exhaustive_search():
    """Without computing a node again, without paging a tensor: the oracle agrees on the price."""
    seen = set()
    choices = {"minimize": "energy", "aux_limit": False, "switches": False, "deadline": False}
    for number in ("3/19", "4/10", "4/17", "5/17", "5/22", "5/35"):
        problem = random_instance(seeded(number), (4, 6), **choices)
        result = solve(problem, gap=0.0)
        for decision in find_decisions(problem, result.require_schedule()):
            if decision.choice in (Treatment.RECOMPUTED, Treatment.PAGED):
                for other in find_alternatives(problem, result.require_schedule(), decision.tensor):
                    seen.add(_checked(problem, result.energy_j or 0.0, other))
    assert seen >= {(way, True) for way in tuple(Forbidden)[:2]}


def _checked(problem, energy_j, other):
    graph, i, dear = problem.graph, other.tensor, 1e4
    asked, name = problem, graph.tensors[i].name
    if other.forbidden != Forbidden.PAGING:
        nodes = list(graph.nodes)
        nodes[graph.node_of[i]] = replace(nodes[graph.node_of[i]], recomputable=False)
        asked = replace(asked, graph=replace(graph, nodes=tuple(nodes)))
    if other.forbidden != Forbidden.RECOMPUTATION and problem.costs.pages is not None:
        page = problem.costs.pages[name]
        page = replace(page, page_in=replace(page.page_in, energy_j=dear))
        pages = {**problem.costs.pages, name: page}
        asked = replace(asked, costs=replace(problem.costs, pages=pages))
    found = optimum(asked)
    if found is None or found.value >= dear:
        assert other.energy_j is None
        return other.forbidden, False
    assert other.energy_j == pytest.approx(found.value - energy_j, abs=1e-9)
    assert other.least_j <= other.energy_j
    return other.forbidden, True


def test_alternatives_out_of_time_or_after_ctrl_c_are_unknown(monkeypatch):
    """Without schedule and bound no price is given; an interrupted solve is the last one."""
    problem = skip_problem()
    schedule = best(problem)
    blank = replace(
        solve(problem), schedule=None, simulation=None, status=Status.UNKNOWN, objective_bound=None
    )
    monkeypatch.setattr(variants, "solve", lambda *_, **__: blank)
    for other in find_alternatives(problem, schedule, 0):
        assert (other.how, other.energy_j, other.least_j) == (How.BOUNDED, None, None)
        assert not other.exact
    more = value_of_ram(problem, schedule)[0]
    assert (more.saved_j, more.saved_j_per_kb, more.most_j) == (None, None, 1.0)

    def interrupted(problem, **options):
        return replace(solve(problem, **options), termination=Termination.INTERRUPTED)

    monkeypatch.setattr(variants, "solve", interrupted)
    paged, kept = find_alternatives(problem, schedule, 0)
    assert (paged.forbidden, paged.energy_j, paged.least_j) == (Forbidden.RECOMPUTATION, None, None)
    assert kept.least_j is not None
    assert [more.saved_j is None for more in value_of_ram(problem, schedule)] == [False, True]


def test_kept_tensors_beside_resident_state_could_leave_ram():
    """What it costs at most to page a kept tensor is found with state in RAM too."""
    rng, paged = seeded("kept beside state"), 0
    for _ in range(30):
        graph = random_step(rng, (5, 8), flops=1_000_000)
        costs = Costs.estimate(graph, bench_device())
        problem = Problem(graph, costs, ram=2 * max(1, checkpoint_all_peak_bytes(graph)))
        schedule = best(problem)
        for decision in find_decisions(problem, schedule):
            if decision.choice == Treatment.KEPT:
                for other in find_alternatives(problem, schedule, decision.tensor):
                    if other.becomes == Treatment.PAGED:
                        paged += other.energy_j > 0
    assert paged > 10


@pytest.mark.slow
def test_other_homes_of_state_cost_what_the_best_schedule_with_them_costs():
    """Each home but that of the schedule, against another formulation with the home fixed."""
    rng, seen = seeded("other homes of state"), set()
    for _ in range(40):
        graph = random_step(rng, (4, 7), flops=1_000_000)
        if not graph.state_tensors:
            continue
        share = rng.choice((0.0, 0.3, 0.7))
        costs = Costs.estimate(graph, bench_device())
        low, high = Problem(graph, costs, ram=1).floor.bytes, checkpoint_all_peak_bytes(graph)
        problem = Problem(graph, costs, ram=max(1, low + int(share * (high - low))))
        result = solve(problem, gap=0.0)
        for decision in find_decisions(problem, result.require_schedule()):
            i, choice = decision.tensor, decision.choice
            others = find_alternatives(problem, result.require_schedule(), i)
            if choice == Treatment.REPLACEMENT:
                assert others == ()
            if choice not in (Treatment.RESIDENT, Treatment.ON_STORAGE):
                continue
            (other,) = others
            moved = int(choice == Treatment.ON_STORAGE)
            there = problem.subject_to(there=lambda v, i=i, moved=moved: v.resident[i] == moved)
            known = solve(there, formulation="compact", gap=0.0)
            seen.add((choice, other.how))
            if known.energy_j is None:
                assert other.how == How.IMPOSSIBLE
                continue
            extra_j = known.energy_j - (result.energy_j or 0.0)
            assert other.least_j - 1e-9 <= extra_j <= other.energy_j + 1e-9
            assert other.energy_j == pytest.approx(extra_j, rel=1e-3, abs=1e-9)
            assert other.becomes in (Treatment.RESIDENT, Treatment.ON_STORAGE)
            assert other.becomes != choice
    assert {Treatment.RESIDENT, Treatment.ON_STORAGE} == {choice for choice, _ in seen}
    assert {How.SOLVED, How.IMPOSSIBLE} <= {how for _, how in seen}


def test_own_constraints_on_homes_hold_for_their_alternatives(tmp_path):
    """A home that an own constraint asks for has no alternative, whatever the constraint's name."""
    graph = Graph.load(write_graph(tmp_path / "step.graph.json", training_step()))
    problem = Problem(graph, Costs.estimate(graph, bench_device()), ram=1140)
    apart = problem.subject_to(**{"home of w1": lambda v: v.resident["w1"] == 0})
    w1, w2 = graph.tensor_index["w1"], graph.tensor_index["w2"]
    schedule = best(apart)
    assert schedule.resident == (w2,)
    (other,) = find_alternatives(apart, schedule, w1)
    assert other.how == How.IMPOSSIBLE
    (other,) = find_alternatives(apart, schedule, w2)
    assert (other.becomes, other.exact) == (Treatment.ON_STORAGE, True)
