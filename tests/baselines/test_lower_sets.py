"""Chains of lower sets, against every chain by the estimates of the paper."""

import itertools
import math

import pytest

from kit.baseline_checks import check_method
from kit.instances import make_rng, random_instances, random_training_graph
from kit.worked import chain_costs, training_chain
from poetmodel.baselines import run
from poetmodel.baselines.lower_sets import LowerSets, lower_sets
from poetmodel.errors import InputError, MethodNotApplicableError
from poetmodel.graph import Graph, checkpoint_all_peak_bytes, operation
from poetmodel.heuristics.execution import evictable_tensors, first_backward_node
from poetmodel.problem import Problem
from poetmodel.schedule import checkpoint_all, simulate


class Estimates:
    """The forward pass as the paper has it: nodes, edges, times, sizes, and sets of nodes."""

    def __init__(self, graph, times):
        begin = first_backward_node(graph)
        own = {graph.node_of[i] for i in evictable_tensors(graph) if graph.node_of[i] < begin}
        self.nodes = sorted(own)
        self.edges = {
            (graph.node_of[i], k)
            for k in own
            for i in graph.inputs_of[k]
            if graph.node_of[i] in own
        }
        self.times = {k: times[k] for k in own}
        self.sizes = {
            k: sum(graph.tensor_bytes[i] for i in graph.outputs_of[k] if graph.users_of[i])
            for k in own
        }

    def lower_sets(self):
        """Return the sets that no edge enters from outside, by trying every set of nodes."""
        subsets = itertools.chain.from_iterable(
            itertools.combinations(self.nodes, count) for count in range(len(self.nodes) + 1)
        )
        return [
            frozenset(nodes)
            for nodes in subsets
            if all(a in nodes for a, b in self.edges if b in nodes)
        ]

    def chains(self, sets):
        """Yield every increasing chain of some sets from the empty one to all nodes."""

        def longer(chain):
            if len(chain[-1]) == len(self.nodes):
                yield chain[1:]
            for nodes in sets:
                if nodes > chain[-1]:
                    yield from longer((*chain, nodes))

        yield from longer((frozenset(),))

    def boundary(self, nodes):
        """Return the nodes of a set that others outside read."""
        return {a for a, b in self.edges if a in nodes and b not in nodes}

    def bytes(self, nodes):
        """Return the bytes of some nodes."""
        return sum(self.sizes[k] for k in nodes)

    def of(self, chain):
        """Return cost, saved bytes and peak of a chain."""
        saved, before, peak, cost = set(), frozenset(), 0, 0.0
        for nodes in chain:
            segment = nodes - before
            readers = {b for a, b in self.edges if a in nodes and b not in nodes}
            beside = {a for a, b in self.edges if b in readers and a not in nodes}
            working = 2 * self.bytes(segment) + self.bytes(readers) + self.bytes(beside)
            peak = max(peak, self.bytes(saved) + working)
            if len(nodes) < len(self.nodes):
                cost += sum(self.times[k] for k in segment - self.boundary(nodes))
            saved |= self.boundary(nodes)
            before = nodes
        return cost, self.bytes(saved), peak


def drawn(seed, layers=5):
    """Return a random training graph and the times of its nodes."""
    rng = make_rng(f"lower sets/{seed}")
    graph = random_training_graph(rng, layers)
    return graph, [rng.randint(1, 9) for _ in graph.nodes]


@pytest.mark.parametrize("seed", range(12))
def test_front_is_that_of_all_chains_of_all_lower_sets(seed):
    """Within every limit the program has the chains that none dominates in cost and saved bytes."""
    graph, times = drawn(seed)
    estimates = Estimates(graph, times)
    table = LowerSets(graph, times)
    sets = estimates.lower_sets()
    assert len(table.sets) == len(sets)
    every = [estimates.of(chain) for chain in estimates.chains(sets)]
    fit_budget = 0
    for part in range(2, 9):
        limit = table.total_bytes * part // 8
        points = {(cost, saved) for cost, saved, peak in every if peak <= limit}
        best = {
            (cost, saved)
            for cost, saved in points
            if not any(c <= cost and s <= saved and (c, s) != (cost, saved) for c, s in points)
        }
        found = table.undominated_chains(limit)
        assert {(chain.cost_s, chain.saved_bytes) for chain in found} == best
        fit_budget += bool(found)
        for chain in found:
            cost, saved, peak = estimates.of(chain.sets)
            assert (chain.cost_s, chain.saved_bytes) == (cost, saved)
            assert peak <= limit
    assert fit_budget


@pytest.mark.parametrize("seed", range(12))
def test_pruned_family_is_part_of_all_and_more_room_never_costs_more(seed):
    """Each pruned set is a lower set; the least cost rises neither with sets nor with the limit."""
    graph, times = drawn(seed, layers=7)
    exact, pruned = (LowerSets(graph, times, family) for family in ("exact", "pruned"))
    assert {frozenset(places) for places in pruned.sets} <= {frozenset(p) for p in exact.sets}
    before = {exact: math.inf, pruned: math.inf}
    for part in range(1, 13):
        limit = exact.total_bytes * part // 12
        least = {
            table: min(
                (chain.cost_s for chain in table.undominated_chains(limit)), default=math.inf
            )
            for table in before
        }
        assert least[exact] <= least[pruned]
        assert all(least[table] <= before[table] for table in before)
        before = least
    assert before == {exact: 0.0, pruned: 0.0}


def test_chain_of_layers_by_hand():
    """Of four layers of 4, 1, 4 and 4 bytes the second is saved: the first runs again."""
    chain = training_chain([4, 1, 4, 4], gradient_bytes=1)
    table = LowerSets(chain, [1.0] * len(chain.nodes))
    chains = [
        [sorted(map(table.nodes.index, nodes)) for nodes in found.sets]
        for found in table.undominated_chains(table.total_bytes * 3 // 4)
    ]
    assert [[0, 1], list(range(len(table.nodes)))] in chains


def wide(count):
    """Return a graph whose forward pass has `count` nodes side by side."""
    side = [operation(f"a{k}", output_bytes=4) for k in range(count)]
    names = tuple(node.name for node in side)
    loss = operation("loss", output_bytes=1, phase="loss", inputs=names)
    grads = [
        operation(f"g{k}", output_bytes=1, phase="backward", inputs=("loss", f"a{k}"))
        for k in range(count)
    ]
    return Graph(name="wide", nodes=(*side, loss, *grads))


def test_many_lower_sets_are_pruned():
    """Twelve nodes side by side have 4,096 lower sets and one more; 14 are left of them."""
    graph = wide(12)
    assert len(LowerSets(graph, [1.0] * len(graph.nodes)).sets) == 14
    assert len(LowerSets(wide(5), [1.0] * 11).sets) == 2**5 + 1
    problem = Problem(graph, chain_costs(graph), ram=checkpoint_all_peak_bytes(graph) - 1)
    with pytest.raises(MethodNotApplicableError, match="more than 1,000 lower sets"):
        run(problem, "lower-sets:exact")
    with pytest.raises(InputError, match="expected one of exact, pruned"):
        lower_sets(problem, "all")


@pytest.mark.parametrize("family", ["", pytest.param("pruned", marks=pytest.mark.slow)])
def test_schedules_keep_the_budget_or_are_refused(family):
    """On random graphs: valid, within RAM, and no node runs more than twice."""
    again = 0
    problems = list(random_instances(30, (3, 9), resident=True, below_floor=True, seed=71))
    for seed in range(8):
        graph, times = drawn(seed, layers=6)
        costs = chain_costs(graph, seconds=times)
        problems += [Problem(graph, costs, ram=f"{share}%") for share in (90, 75, 60)]
    for problem in problems:
        schedule = check_method(lambda each: lower_sets(each, family), problem)
        if schedule is not None:
            nodes = [k for _, k in schedule.R]
            assert max(map(nodes.count, nodes)) <= 2
            again += len(nodes) > len(problem.graph.nodes)
    assert again > 5


def test_nothing_is_recomputed_where_everything_fits():
    """At the keep-all peak the schedule is keep-all; a byte less recomputes, or is refused."""
    graph = training_chain([5, 2, 5, 2, 5, 2], gradient_bytes=1)
    problem = Problem(graph, chain_costs(graph), ram="100%")
    assert lower_sets(problem) == checkpoint_all(graph)
    less = Problem(graph, chain_costs(graph), ram=checkpoint_all_peak_bytes(graph) - 1)
    schedule = lower_sets(less)
    assert len(schedule.R) > len(graph.nodes)
    assert simulate(graph, None, schedule).peak_ram_bytes < checkpoint_all_peak_bytes(graph)
