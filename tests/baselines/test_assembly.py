"""What a device could do, in order, becomes a valid schedule with the same computations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from chains import chain_costs, training_chain
from instances import random_graph, seeded
from poetmodel.baselines.assembly import Trace, assemble, fitted
from poetmodel.errors import MethodNotApplicableError
from poetmodel.plan import Instruction, Op
from poetmodel.problem import Problem
from poetmodel.schedule import checkpoint_all, simulate

if TYPE_CHECKING:
    import random

    from poetmodel.graph import Graph


class Wanderer:
    """Computes a graph on demand, evicting and paging out at random in between."""

    def __init__(self, rng: random.Random, graph: Graph) -> None:
        self.rng, self.graph, self.trace = rng, graph, Trace(graph)
        self.done: set[int] = set()

    def run(self) -> Trace:
        """Do all nodes in order."""
        for k in range(len(self.graph.nodes)):
            self.compute(k, frozenset())
            self.done.add(k)
            self.lose_some(frozenset(), 0.2)
        return self.trace

    def compute(self, k: int, needed: frozenset[int]) -> None:
        """Compute a node, whatever it takes; what is needed stays."""
        pinned = needed | set(self.graph.inputs_of[k])
        for i in self.graph.inputs_of[k]:
            self.fetch(i, pinned)
        self.lose_some(pinned, 0.3)
        self.trace.compute(k)

    def fetch(self, i: int, needed: frozenset[int]) -> None:
        """Page a tensor in or make it again."""
        k = self.graph.node_of[i]
        if i in self.trace.ram:
            return
        lost = not self.graph.nodes[k].recomputable
        if lost or (i in self.trace.aux and self.rng.random() < 0.7):
            self.trace.page_in(i)
        else:
            self.compute(k, needed)

    def lose_some(self, pinned: frozenset[int], chance: float) -> None:
        """Page some tensors out, and free most of them and some others."""
        for i in sorted(self.trace.ram - pinned):
            if self.rng.random() < chance:
                only_here = not self.graph.nodes[self.graph.node_of[i]].recomputable
                if only_here or self.rng.random() < 0.5:
                    self.trace.page_out(i)
                if self.rng.random() < 0.8:
                    self.trace.free(i)


@pytest.mark.parametrize("seed", range(60))
def test_assembled_schedules_are_valid(seed: int) -> None:
    """Whatever is evicted, paged and recomputed on demand, the judge finds no rule broken."""
    rng = seeded(f"trace/{seed}")
    graph = random_graph(rng, (3, 9))
    trace = Wanderer(rng, graph).run()
    schedule = trace.schedule()
    assert simulate(graph, None, schedule).violations == ()
    done = [step.index for step in trace.events if step.op == Op.COMPUTE]
    assert {k for _, k in schedule.R} == set(done)
    assert len(schedule.R) <= len(done)


def test_keeping_everything_is_checkpoint_all() -> None:
    """Computations alone, with frees at last uses or without any, compute every node once."""
    graph = training_chain([2, 3, 1])
    plain = assemble(graph, [Instruction(Op.COMPUTE, k) for k in range(len(graph.nodes))])
    assert plain.R == checkpoint_all(graph).R
    trace = Trace(graph)
    for k in range(len(graph.nodes)):
        trace.compute(k)
        for i in sorted(i for i in trace.ram if max(graph.users_of[i], default=0) <= k):
            trace.free(i)
    assert trace.schedule() == checkpoint_all(graph)


def test_eviction_before_any_use_ends_with_the_stage_before() -> None:
    """A tensor evicted to make room is not in RAM when the stage begins; a page-out keeps it.

    x, f1, f2: f1 is paged out and freed after f2 is there, and paged in for the gradient of f2.
    """
    graph = training_chain([1, 1, 1], loss=False)
    f1, g2 = graph.tensor_index["f1"], graph.node_index["g2"]
    trace = Trace(graph)
    for k in (0, 1, 2):
        trace.compute(k)
    trace.page_out(f1)
    trace.free(f1)
    trace.page_in(f1)
    for k in (3, 4):
        trace.compute(k)
    schedule = trace.schedule()
    moves = (schedule.M_out, schedule.S_AUX, schedule.M_in)
    assert moves == (((2, f1),), ((g2, f1),), ((g2, f1),))
    assert (g2, f1) not in schedule.S_RAM
    assert simulate(graph, None, schedule).valid


def test_eviction_in_the_midst_of_a_stage_is_one_before_it() -> None:
    """A tensor that a stage frees unread, after recomputing something, does not begin with it."""
    graph = training_chain([1, 1, 1], loss=False)
    f1, f2 = graph.tensor_index["f1"], graph.tensor_index["f2"]
    trace = Trace(graph)
    for k in (0, 1, 2, 3):
        trace.compute(k)
    trace.free(f1)
    trace.compute(1)
    trace.free(f2)
    trace.compute(4)
    schedule = trace.schedule()
    assert (4, 1) in schedule.R
    assert {i for t, i in schedule.S_RAM if t == 4} == {0, graph.tensor_index["g2"]}
    assert simulate(graph, None, schedule).valid


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([(Op.COMPUTE, 1)], "before node 0"),
        ([(Op.COMPUTE, 0)], "end before node 1"),
        ([], "end before node 0"),
    ],
)
def test_events_that_are_no_execution_are_refused(
    steps: list[tuple[Op, int]], message: str
) -> None:
    """First computations come in graph order, and all of them come."""
    with pytest.raises(ValueError, match=message):
        assemble(training_chain([1, 1, 1]), [Instruction(*step) for step in steps])


def test_trace_refuses_what_cannot_be_done() -> None:
    """Inputs must be there, and only what is somewhere can be moved."""
    trace = Trace(training_chain([1, 1, 1]))
    with pytest.raises(ValueError, match="needs tensors"):
        trace.compute(1)
    with pytest.raises(ValueError, match="not on storage"):
        trace.page_in(0)
    for act in (trace.page_out, trace.free):
        with pytest.raises(ValueError, match="not in RAM"):
            act(0)


def test_fitted_gives_a_method_less_until_the_budget_is_kept() -> None:
    """A method that takes two bytes too much is run again with two bytes less."""
    graph = training_chain([1] * 5)
    costs = chain_costs(graph)
    peak = simulate(graph, None, checkpoint_all(graph)).peak_ram_bytes
    tight = Problem(graph, costs, ram=peak - 2)
    asked = []

    def run(ram_bytes: int) -> object:
        asked.append(ram_bytes)
        return checkpoint_all(graph)

    with pytest.raises(MethodNotApplicableError, match=f"needs {peak} B"):
        fitted(tight, run)  # type: ignore[arg-type]
    assert asked[:3] == [peak - 2, peak - 4, peak - 6]
    loose = Problem(graph, costs, ram=peak)
    assert fitted(loose, run) == checkpoint_all(graph)  # type: ignore[arg-type]
