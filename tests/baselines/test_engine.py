"""Whatever a method executes, in any order, becomes a valid schedule of the same computations."""

from itertools import count
from types import SimpleNamespace

import pytest

from kit.instances import random_graph, seeded
from kit.worked import chain_costs, training_chain
from poetmodel.baselines.engine import Execution, cheapest, fitted
from poetmodel.clock import check_time_limit, time_limit
from poetmodel.errors import MethodNotApplicableError, TimeLimitError
from poetmodel.planner import verify
from poetmodel.problem import Problem
from poetmodel.schedule import checkpoint_all, simulate


class Wanderer(Execution):
    """Computes a graph on demand; frees tensors at random in between."""

    def __init__(self, rng, graph):
        super().__init__(graph)
        self.rng = rng
        self.done = []

    def run(self):
        """Do all nodes in order."""
        for k in range(len(self.graph.nodes)):
            self.supply(k, frozenset())
            self.lose_some(frozenset(), 0.2)

    def supply(self, k, needed):
        """Compute a node, whatever it takes; what is needed stays."""
        pinned = needed | set(self.graph.inputs_of[k])
        for i in self.graph.inputs_of[k]:
            if i not in self.ram:
                self.fetch(i, pinned)
        self.lose_some(pinned, 0.3)
        self.compute(k)
        self.done.append(k)

    def fetch(self, i, needed):
        """Page a tensor in or recompute it."""
        k = self.graph.node_of[i]
        if not self.graph.nodes[k].recomputable or self.rng.random() < 0.4:
            self.page_in(i)
        else:
            self.supply(k, needed)

    def lose_some(self, pinned, chance):
        """Free some tensors."""
        for i in sorted(self.ram - pinned):
            if self.rng.random() < chance:
                self.free(i)


@pytest.mark.parametrize("seed", range(60))
def test_recorded_schedules_are_valid(seed):
    """Whatever is freed, paged in and recomputed on demand, the simulator finds no violation."""
    rng = seeded(f"trace/{seed}")
    graph = random_graph(rng, (3, 9))
    wanderer = Wanderer(rng, graph)
    wanderer.run()
    schedule = wanderer.schedule()
    assert simulate(graph, None, schedule).violations == ()
    assert {k for _, k in schedule.R} == set(wanderer.done)
    assert len(schedule.R) <= len(wanderer.done)


def test_keeping_everything_is_keep_all():
    """Computations alone, with frees at last uses or without any, compute every node once.

    A tensor that a stage frees unread, after recomputing something, does not begin with it.
    """
    graph = training_chain([2, 3, 1])
    plain, freeing = Execution(graph), Execution(graph)
    for k in range(len(graph.nodes)):
        plain.compute(k)
        freeing.compute(k)
        for i in sorted(i for i in freeing.ram if max(graph.users_of[i], default=0) <= k):
            freeing.free(i)
    assert plain.schedule().R == checkpoint_all(graph).R
    assert freeing.schedule() == checkpoint_all(graph)
    graph = training_chain([1, 1, 1], loss=False)
    f1, f2 = graph.tensor_index["f1"], graph.tensor_index["f2"]
    execution = Execution(graph)
    for k in (0, 1, 2, 3):
        execution.compute(k)
    execution.free(f1)
    execution.compute(1)
    execution.free(f2)
    execution.compute(4)
    schedule = execution.schedule()
    assert (4, 1) in schedule.R
    assert {i for t, i in schedule.S_RAM if t == 4} == {0, graph.tensor_index["g2"]}
    assert simulate(graph, None, schedule).valid


def test_room_is_made_by_evictions_and_refused_without_a_victim():
    """The step and the bytes are in the reason; RAM is counted with every compute and free."""
    execution = Execution(training_chain([4, 3, 1]), limit_bytes=9)
    execution.compute(0)
    execution.compute(1)
    assert execution.ram_bytes == 7
    execution.make_room(2, 2)
    with pytest.raises(MethodNotApplicableError, match="'f2' takes 3 B more, 7 B of 9 B"):
        execution.make_room(3, 2)
    execution.evict(0)
    execution.make_room(3, 2)
    assert execution.ram_bytes == 3


def test_fitted_gives_a_method_less_until_the_budget_is_kept():
    """A method that takes two bytes too much gets two bytes less."""
    graph = training_chain([1] * 5)
    costs = chain_costs(graph)
    peak = simulate(graph, None, checkpoint_all(graph)).peak_ram_bytes
    tight = Problem(graph, costs, ram=peak - 2)
    given = []

    def run(ram_bytes):
        given.append(ram_bytes)
        return checkpoint_all(graph)

    with pytest.raises(MethodNotApplicableError, match=f"needs {peak} B"):
        fitted(tight, run)  # type: ignore[arg-type]
    assert given[:3] == [peak - 2, peak - 4, peak - 6]
    loose = Problem(graph, costs, ram=peak)
    assert fitted(loose, run) == checkpoint_all(graph)  # type: ignore[arg-type]


def test_cheapest_keeps_what_was_found_before_the_time_limit(monkeypatch):
    """A rule without end takes neither the schedule of an earlier one nor the time to verify it.

    The clock goes on by 1 s with each look.
    """
    looks = map(float, count())
    monkeypatch.setattr("poetmodel.clock.time", SimpleNamespace(monotonic=lambda: next(looks)))
    graph = training_chain([1] * 5)
    problem = Problem(graph, chain_costs(graph), ram="100%")

    def endless():
        while True:
            check_time_limit()

    def keep_all():
        return checkpoint_all(graph)

    with time_limit(1000):
        schedule = cheapest(problem, (keep_all, endless))
        assert verify(problem, schedule).valid
    with time_limit(1000), pytest.raises(TimeLimitError):
        cheapest(problem, (endless, keep_all))
