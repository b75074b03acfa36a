"""Schedules as values; any one entry of a valid one that is changed is noticed."""

import gc
import pickle
import re
from dataclasses import FrozenInstanceError, replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.closed_form import simulate_in_closed_form
from kit.instances import make_rng, random_graph, random_instances, random_schedule
from kit.oracle import optimum
from kit.rotation import parametrize_parts
from kit.strategies import graphs
from poetmodel.clock import limit_time
from poetmodel.device import Costs
from poetmodel.errors import ScheduleError, TimeLimitError, TooLargeError
from poetmodel.graph import Graph, operation
from poetmodel.schedule import RELATIONS, GraphIdentity, Schedule, checkpoint_all, simulate


class Mutation(NamedTuple):
    """One changed entry; a move removes one and adds another to the same relation."""

    relation: str
    removed: tuple[int, int] | None
    added: tuple[int, int] | None

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

    def energy_j(self, schedule):
        """Return the energy of all entries."""
        paid = zip(self, (schedule.R, schedule.M_in, schedule.M_out), strict=True)
        return sum(price[k] for price, pairs in paid for _, k in pairs)

    def change_j(self, mutation):
        """Return the energy that a mutation adds: the cost of its entries, if they have one."""
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
    """Return a graph whose sizes are distinct powers of two, so that a sum identifies its terms."""
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
        blunt = simulate_in_closed_form(graph, changed) if inside else None
        bad = blunt.violations if inside else {(mutation.relation, t, k)}
        if bad:
            assert bad & flagged(run), (mutation, run.violations)
            counts[0] += 1
            continue
        assert run.valid, (mutation, run.violations)
        assert {(p.stage, p.node): p.ram_bytes for p in run.curve} == blunt.curve, mutation
        assert run.peak_ram_bytes == max(blunt.curve.values()), mutation
        assert run.energy_j == figures.energy_j(changed), mutation
        assert run.energy_j - before.energy_j == figures.change_j(mutation), mutation
        if (run.energy_j, run.curve) != (before.energy_j, before.curve):
            counts[1] += 1
        else:
            assert harmless(graph, schedule, mutation), mutation
            counts[2] += 1
    return counts[0], counts[1], counts[2]


@parametrize_parts(4)
def test_every_mutation_of_random_schedules_is_refused_or_felt(part):
    """Of valid schedules, wasteful ones included, no entry can be changed unseen."""
    total = [0, 0, 0]
    for seed in part.select(range(80)):
        rng = make_rng(f"mutations/{seed}")
        graph = telling(random_graph(rng, (2, 5)))
        for kind, count in enumerate(check_all(graph, random_schedule(rng, graph))):
            total[kind] += count
    assert min(total) > part.divide(200), total


@parametrize_parts(4)
def test_every_mutation_of_optimal_schedules_is_refused_or_felt(part):
    """Of schedules that are the best for their problem, no entry can be changed unseen."""
    total = [0, 0, 0]
    for problem in part.select(random_instances(60, (3, 5), seed=7, minimize="energy")):
        best = optimum(problem)
        if best is None:
            continue
        for kind, count in enumerate(check_all(telling(problem.graph), best.schedule)):
            total[kind] += count
    assert total[0] > part.divide(1000), total
    assert total[1] > part.divide(500), total


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


# -- values --------------------------------------------------------------------------------------
@pytest.fixture
def skip():
    """Return x, y(x), z(y), w(z, x); x lies on storage."""
    return Graph(
        name="skip",
        nodes=(
            operation("x", output_bytes=8, on_aux=True),
            operation("y", output_bytes=8, inputs=("x",)),
            operation("z", output_bytes=8, inputs=("y",)),
            operation("w", output_bytes=1, inputs=("z", "x")),
        ),
    )


def test_pairs_are_put_in_order():
    """Pairs in any order, from any iterable, twice or as lists, become one sorted tuple."""
    pairs = [[2, 2], (0, 0), (1, 1), (2, 2), (2, 0)]
    schedule = Schedule(R=pairs, S_RAM=iter([(2, 1), (1, 0)]))  # type: ignore[arg-type]
    assert schedule.R == ((0, 0), (1, 1), (2, 0), (2, 2))
    assert schedule.S_RAM == ((1, 0), (2, 1))
    assert (schedule.S_AUX, schedule.M_in, schedule.M_out) == ((), (), ())
    counted = Schedule(R=tuple(zip(np.arange(2), np.arange(2), strict=True)))
    assert all(type(number) is int for pair in counted.R for number in pair)  # as JSON needs it


@pytest.mark.parametrize("pairs", [((0, 0.0),), ((0,),), ((0, 1, 2),), (0, 1), ("ab",), None])
def test_anything_but_pairs_of_whole_numbers_is_refused(pairs):
    """A fraction is never rounded to an index; the error names the relation."""
    with pytest.raises(ScheduleError, match="M_in: expected pairs of whole numbers"):
        Schedule(R=(), M_in=pairs)


def test_schedules_are_values(skip):
    """A schedule for a graph carries its name, hash and the names of nodes and tensors.

    Keep-all has tensor x to stage 3, y to 2, z to 3, w nowhere; x is listed on storage after its
    node. Garbage collections are paused while pairs are made, and stay as they were, on or off.
    Equal relations are equal schedules, whichever graph they name; they hash, and stay.
    """
    identity = checkpoint_all(skip).identity
    assert identity == GraphIdentity.from_graph(skip)
    assert (identity.name, identity.sha256) == ("skip", skip.sha256)
    assert identity.nodes == identity.tensors == ("x", "y", "z", "w")
    schedule = checkpoint_all(skip)
    assert schedule.R == ((0, 0), (1, 1), (2, 2), (3, 3))
    assert schedule.S_RAM == ((1, 0), (2, 0), (2, 1), (3, 0), (3, 2))
    assert schedule.S_AUX == ((1, 0), (2, 0), (3, 0))
    assert (schedule.M_in, schedule.M_out) == ((), ())
    assert checkpoint_all(skip).S_RAM
    assert gc.isenabled()
    gc.disable()
    try:
        assert checkpoint_all(skip).S_RAM
        assert not gc.isenabled()
    finally:
        gc.enable()
    one = checkpoint_all(skip)
    other = replace(one, identity=None)
    assert one == other
    assert hash(one) == hash(other)
    assert one != replace(one, M_out=((0, 0),))
    assert pickle.loads(pickle.dumps(one)) == one  # noqa: S301 - made on the line itself
    with pytest.raises(FrozenInstanceError):
        one.R = ()  # type: ignore[misc]


@given(graph=graphs(on_aux=True), data=st.data())
@settings(deadline=None)
def test_order_of_pairs_means_nothing(graph, data):
    """A schedule is a set of entries: shuffled relations are the same schedule to the simulator."""
    schedule = checkpoint_all(graph)
    shuffled = Schedule(
        **{name: tuple(data.draw(st.permutations(getattr(schedule, name)))) for name in RELATIONS}
    )
    assert shuffled == schedule
    assert simulate(graph, None, shuffled) == simulate(graph, None, schedule)


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_of_stages_is_the_schedule_of_the_same_pairs(data):
    """Made from stages or from pairs in any order, a schedule is the same value."""
    pairs = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), unique=True)
    relations = {name: tuple(data.draw(pairs, label=name)) for name in RELATIONS}
    schedule = Schedule(**relations)
    rows = {
        name: [sorted(k for t, k in found if t == stage) for stage in range(7)]
        for name, found in relations.items()
    }
    made = Schedule.from_stages(identity=None, **rows)
    assert made == schedule
    assert made.identity is None


def test_pairs_of_spans_are_those_of_the_schedule():
    """Each stage has the tensors whose spans contain it; spans may touch, overlap or be empty."""
    spans = [(4, 1, 2), (2, 0, 1), (3, 2, 1), (2, 2, 3), (0, 3, 3), (4, 2, 2)]
    schedule = Schedule.from_spans(R=[(1, 1), (0, 0)], kept=spans, identity=None)
    pairs = ((0, 2), (1, 2), (1, 4), (2, 2), (2, 4), (3, 0), (3, 2))
    assert schedule == Schedule(R=((0, 0), (1, 1)), S_RAM=pairs)
    assert pairs == schedule.S_RAM
    assert schedule.kept == ((0, 3, 3), (2, 0, 3), (4, 1, 2))
    assert [i for i in range(6) if schedule.is_kept(1, i)] == [2, 4]


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_spans_have_the_pairs_that_were_given(data):
    """Whatever the stages, there or not; the relations of a copy are the same."""
    pairs = data.draw(st.lists(st.tuples(st.integers(-3, 6), st.integers(-2, 9)), unique=True))
    schedule = Schedule(R=(), S_RAM=tuple(pairs), S_AUX=tuple(pairs))
    for same in (schedule, replace(schedule, M_in=()), pickle.loads(pickle.dumps(schedule))):  # noqa: S301
        assert same.S_RAM == same.S_AUX == tuple(sorted(pairs))
        assert same == schedule
        assert hash(same) == hash(schedule)
    for t in range(-4, 8):
        assert [i for i in range(-3, 11) if schedule.is_kept(t, i)] == sorted(
            i for s, i in pairs if s == t
        )


def test_more_pairs_than_memory_holds_are_not_listed(skip, monkeypatch):
    """They are counted before any is made, and only their list needs them.

    Spans and stages are read within the open time limit.
    """
    monkeypatch.setattr("poetmodel.schedule.relations.MAX_PAIRS", 3)
    schedule = Schedule.from_spans(R=(), kept=[(0, 1, 3), (1, 5, 2)], identity=None)
    assert schedule.S_RAM == ((1, 0), (2, 0), (3, 0))
    schedule = checkpoint_all(skip)
    assert simulate(skip, None, schedule).valid
    assert "S_RAM 5" in repr(schedule)
    with pytest.raises(TooLargeError, match="5 tensors in one relation"):
        _ = schedule.S_RAM
    schedule = Schedule.from_spans(R=(), kept=[(0, 1, 2)], identity=None)
    with limit_time(-1):
        with pytest.raises(TimeLimitError):
            _ = schedule.S_RAM
        with pytest.raises(TimeLimitError):
            Schedule.from_stages(identity=None, R=[[0]])
