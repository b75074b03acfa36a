"""Own constraints in the heuristics: what may not be done is not done, what is wanted is placed."""

from itertools import pairwise

import pytest

from kit.instances import random_instance, random_state_problems, seeded
from kit.oracle import optimum
from kit.own_rows import constrained
from kit.rotation import parts
from poetmodel.device import Costs
from poetmodel.graph import Graph, operation
from poetmodel.heuristics.greedy import construct
from poetmodel.heuristics.neighbourhood import LargeNeighbourhoodSearch
from poetmodel.heuristics.own_rows import OwnRows
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.heuristics.penalties import PenalizedObjective, price
from poetmodel.heuristics.restorations import PAGE_IN, PAGE_OUT, RECOMPUTE, Restoration
from poetmodel.problem import Problem
from poetmodel.schedule import simulate
from poetmodel.solver.outcome import as_candidate


def tight_problem(rule=None, **choices):
    """Return a chain that reads everything again at its end, within half of its keep-all peak."""
    names = ("a", "b", "c", "d", "e", "f")
    nodes = [operation("a", output_bytes=4)]
    nodes += [operation(name, output_bytes=4, inputs=(before,)) for before, name in pairwise(names)]
    nodes += [
        operation(f"{name}'", output_bytes=1, inputs=(name,)) for name in reversed(names[:-1])
    ]
    graph = Graph(name="tight", nodes=tuple(nodes))
    ones = [1] * len(nodes)
    costs = Costs.from_arrays(
        graph, compute_time_s=ones, compute_energy_j=ones,
        page_in=[(1, 2)] * len(nodes), page_out=[(1, 2)] * len(nodes),
    )  # fmt: skip
    problem = Problem(graph, costs, ram=16, deadline_counts="compute", **choices)
    return problem if rule is None else problem.subject_to(own=rule)


def made_of(problem):
    """Return what the greedy schedule of a problem does."""
    schedule = construct(problem)
    assert not as_candidate(problem, schedule).violations
    return simulate(problem.graph, problem.costs, schedule)


def test_without_own_constraints_there_are_no_rows():
    """With an objective that pays for something there are; page-outs that are paid for come."""
    problem = tight_problem()
    assert OwnRows.of(problem) is None
    assert OwnRows.of(problem.minimizing(lambda v: v.energy_j)) is None
    assert OwnRows.of(problem.minimizing(lambda v: v.energy_j - 3 * v.page_outs["a"])) is not None
    problem = tight_problem().minimizing(
        lambda v: v.recomputations["a"] - sum(v.page_outs.values())
    )
    assert len(made_of(problem).page_outs) == len(problem.graph.tensors)


@parts(3)
def test_rows_are_counted_as_the_simulator_counts_them(part):
    """Whatever is added, dropped and taken back, what is used is what a verified schedule uses."""
    for number in part.of(range(60)):
        rng = seeded(f"own rows/{number}")
        problem = constrained(rng, random_instance(rng, (3, 6)))
        objective = PenalizedObjective(problem)
        if objective.rows is None:
            continue
        partial = objective.partial()
        graph = problem.graph
        for _ in range(20):
            t = rng.randrange(len(graph.nodes))
            i = rng.randrange(len(graph.tensors)) if graph.tensors else 0
            made = Restoration(t, rng.randrange(t), RECOMPUTE) if t else None
            paged = Restoration(t, i, PAGE_IN) if graph.tensors else None
            out = Restoration.at_its_node(graph, i, PAGE_OUT) if graph.tensors else None
            for one in (made, paged, out):
                if one is None or (one.kind == PAGE_IN and one.stage <= graph.node_of[one.item]):
                    continue
                mark = partial.mark()
                partial.drop(one) if one in partial else partial.add(one)
                if rng.random() < 0.3:
                    partial.undo(mark)
        for limit, used in zip(objective.rows.limits, partial.used, strict=True):
            assert used == pytest.approx(price(limit.coefficients, partial), abs=1e-9)


@parts(3)
def test_greedy_and_search_return_only_what_keeps_all_rows_and_mostly_the_best(part):
    """On random problems with own constraints, beside exhaustive search."""
    found = best = feasible = 0
    for number in part.of(range(60)):
        rng = seeded(f"own/{number}")
        problem = constrained(rng, random_instance(rng, (3, 5)))
        least = optimum(problem)
        feasible += least is not None
        search = LargeNeighbourhoodSearch(problem)
        start = construct(problem)
        if start is not None:
            assert not as_candidate(problem, start).violations
            tidy = PartialSchedule.of(problem.graph, start, problem.wanted).schedule()
            assert not as_candidate(problem, tidy).violations
        search.consider([])
        for _ in range(30):
            search.iterate()
        schedule = search.schedule()
        if schedule is None:
            continue
        candidate = as_candidate(problem, schedule)
        assert not candidate.violations
        assert candidate.value == pytest.approx(search.best.value)
        found += 1
        best += problem.objective.measured(candidate.simulation) <= least.value + 1e-9
    assert found >= 0.9 * feasible
    assert best >= 0.8 * found


@pytest.mark.parametrize("wanted", ["home", "away", "read", "rewarded"])
def test_rows_on_homes_of_state_are_kept(wanted):
    """State that must stay in RAM, or must not, or is read twice, or is paid for being there."""
    found = 0
    for problem in random_state_problems(40, (4, 8), seed=98, aux_bytes=None, deadline=None):
        state = problem.graph.state_tensors
        if not state:
            continue

        def homes(v, state=state):
            return sum(v.resident[i] for i in state)

        stated = {
            "home": lambda p, one=state[-1]: p.subject_to(row=lambda v: v.resident[one] >= 1),
            "away": lambda p, s=state: p.subject_to(row=lambda v: 2 * homes(v) <= len(s)),
            "read": lambda p, one=state[0]: p.subject_to(row=lambda v: v.page_ins[one] >= 2),
            "rewarded": lambda p: p.minimizing(lambda v: v.energy_j - 3 * homes(v)),
        }[wanted](problem)
        schedule = construct(stated)
        if schedule is not None:
            assert not as_candidate(stated, schedule).violations
            found += 1
    assert found > (5 if wanted == "read" else 10)
