"""Change any one entry of a valid schedule: a violation, or figures change as they must."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

import pytest

from kit.closed_form import broken_entries, energy_j, memory_curve
from kit.instances import random_graph, random_instances, random_schedule, seeded
from kit.oracle import optimum
from kit.rotation import parts
from poetmodel.device import Costs
from poetmodel.schedule import RELATIONS, simulate

Pair = tuple[int, int]


class Mutation(NamedTuple):
    """One changed entry; a move takes one away and adds another to the same relation."""

    relation: str
    removed: Pair | None
    added: Pair | None

    def of(self, schedule):
        """Return the changed schedule."""
        pairs = set(getattr(schedule, self.relation)) - {self.removed}
        pairs |= {self.added} if self.added is not None else set()
        return replace(schedule, **{self.relation: tuple(pairs)})


def mutations(graph, schedule):
    """Yield every removal, every addition, and every move by one stage or index."""
    n = len(graph.nodes)
    for relation in RELATIONS:
        there = getattr(schedule, relation)
        limit = n if relation == "R" else len(graph.tensors)
        everywhere = {(t, k) for t in range(n) for k in range(limit)}
        for t, k in there:
            yield Mutation(relation, (t, k), None)
            for moved in ((t - 1, k), (t + 1, k), (t, k - 1), (t, k + 1)):
                if moved not in there:
                    yield Mutation(relation, (t, k), moved)
        for pair in sorted(everywhere.difference(there)):
            yield Mutation(relation, None, pair)


class Figures(NamedTuple):
    """Costs of a graph such that every entry costs something and no two of a relation the same."""

    compute_j: list[float]
    page_in_j: list[float]
    page_out_j: list[float]

    @classmethod
    def of(cls, graph):
        """Return whole joules, so that sums are exact."""
        n, m = len(graph.nodes), len(graph.tensors)
        return cls(
            [1.0 + k for k in range(n)],
            [100.0 + i for i in range(m)],
            [1000.0 + i for i in range(m)],
        )

    def costs(self, graph):
        """Return them as costs, with times of one second each."""
        return Costs.from_arrays(
            graph,
            compute_time_s=[1.0] * len(self.compute_j),
            compute_energy_j=self.compute_j,
            page_in=[(1.0, energy) for energy in self.page_in_j],
            page_out=[(1.0, energy) for energy in self.page_out_j],
        )

    def change_j(self, mutation):
        """Return what a mutation adds to the energy: the price of its entries, if they have one."""
        prices = {"R": self.compute_j, "M_in": self.page_in_j, "M_out": self.page_out_j}
        if mutation.relation not in prices:
            return 0.0
        price = prices[mutation.relation]
        added = price[mutation.added[1]] if mutation.added else 0.0
        return added - (price[mutation.removed[1]] if mutation.removed else 0.0)


def harmless(graph, schedule, mutation):
    """Return why a valid mutation changes no figure, by the only reasons there are."""
    relation, removed, added = mutation
    pairs = [pair for pair in (removed, added) if pair is not None]
    if relation == "S_AUX":
        return "storage keeps what it has, listed or not; no page-in needs the entry"
    if relation == "S_RAM" and all(_unseen(graph, schedule, *pair) for pair in pairs):
        return "no step sees it: the tensor is there to the end of one stage anyway, or empty"
    if removed and added and removed[1] == added[1]:
        if relation == "M_out":
            return "paged out in another stage, at a step that executes something anyway"
        if relation == "R" and graph.nodes[removed[1]].output_bytes == 0:
            return "computed in another stage, and takes no RAM in either"
        if relation == "M_in" and graph.tensor_bytes[removed[1]] == 0:
            return "paged in in another stage, and takes no RAM in either"
    return None


def _unseen(graph, schedule, t, i):
    """Return whether holding tensor `i` from stage `t - 1` to `t` is in no sum of any step."""
    k = graph.node_of[i]
    last_step = k == t - 1 or i in graph.inputs_of[t - 1]
    moves = (*schedule.M_in, *schedule.M_out)
    executed = {step for s, step in schedule.R if s == t}
    executed |= {graph.node_of[o] for s, o in moves if s == t}
    return graph.tensor_bytes[i] == 0 or (last_step and min(executed) > k)


def telling(graph):
    """Return a graph with distinct powers of two for sizes, so that a sum tells what is in it."""
    sizes = iter(2**e for e in range(60))
    nodes = tuple(
        replace(
            node,
            outputs=tuple(replace(made, bytes=made.bytes and next(sizes)) for made in node.outputs),
            workspace_bytes=node.workspace_bytes and next(sizes),
        )
        for node in graph.nodes
    )
    return replace(graph, nodes=nodes)


def flagged(run):
    """Return the entries that the violations name."""
    found = set()
    for violation in run.violations:
        match = re.match(r"(\w+)\[(-?\d+),(-?\d+)\]: ", violation)
        assert match, violation
        found.add((match[1], int(match[2]), int(match[3])))
    return found


def check_all(graph, schedule):
    """Check every mutation of a valid schedule; return how many are refused, felt and harmless."""
    figures = Figures.of(graph)
    costs = figures.costs(graph)
    before = simulate(graph, costs, schedule)
    assert before.valid
    counts = [0, 0, 0]
    for mutation in mutations(graph, schedule):
        changed = mutation.of(schedule)
        run = simulate(graph, costs, changed)
        limit = len(graph.nodes) if mutation.relation == "R" else len(graph.tensors)
        t, k = mutation.added or (0, 0)
        inside = 0 <= t < len(graph.nodes) and 0 <= k < max(limit, 1)
        bad = broken_entries(graph, changed) if inside else {(mutation.relation, t, k)}
        if bad:
            assert bad & flagged(run), (mutation, run.violations)
            counts[0] += 1
            continue
        assert run.valid, (mutation, run.violations)
        curve = memory_curve(graph, changed)
        assert {(p.stage, p.node): p.ram_bytes for p in run.curve} == curve, mutation
        assert run.peak_ram_bytes == max(curve.values()), mutation
        assert run.energy_j == energy_j(changed, *figures), mutation
        assert run.energy_j - before.energy_j == figures.change_j(mutation), mutation
        if (run.energy_j, run.curve) != (before.energy_j, before.curve):
            counts[1] += 1
        else:
            assert harmless(graph, schedule, mutation), mutation
            counts[2] += 1
    return counts[0], counts[1], counts[2]


@parts(4)
def test_every_mutation_of_random_schedules_is_refused_or_felt(part):
    """Of valid schedules, wasteful ones included, no entry can be changed unseen."""
    total = [0, 0, 0]
    for seed in part.of(range(80)):
        rng = seeded(f"mutations/{seed}")
        graph = telling(random_graph(rng, (2, 5)))
        for kind, count in enumerate(check_all(graph, random_schedule(rng, graph))):
            total[kind] += count
    assert min(total) > part.share(200), total


@parts(4)
def test_every_mutation_of_optimal_schedules_is_refused_or_felt(part):
    """Of schedules that are the best for their problem, no entry can be changed unseen."""
    total = [0, 0, 0]
    for problem in part.of(random_instances(60, (3, 5), seed=7, minimize="energy")):
        best = optimum(problem)
        if best is None:
            continue
        for kind, count in enumerate(check_all(telling(problem.graph), best.schedule)):
            total[kind] += count
    assert total[0] > part.share(1000), total
    assert total[1] > part.share(500), total


@pytest.mark.parametrize("seed", range(20))
def test_optimal_schedules_have_no_entry_to_spare(seed):
    """Taking away anything that costs energy from a best schedule makes it invalid."""
    for problem in random_instances(3, (3, 5), seed=seed, minimize="energy", zero_cost=False):
        best = optimum(problem)
        if best is None:
            continue
        for relation in ("R", "M_in", "M_out"):
            for pair in getattr(best.schedule, relation):
                changed = Mutation(relation, pair, None).of(best.schedule)
                run = simulate(problem.graph, problem.costs, changed)
                assert not run.valid or run.peak_ram_bytes > problem.usable_ram_bytes
