"""The saved set is a minimum cut, and the knapsack shrinks with the budget."""

from __future__ import annotations

import itertools

import pytest

from chains import chain_costs, random_training_graph, training_chain
from instances import seeded
from poetmodel.baselines.engine import begin_of_backward, droppable
from poetmodel.baselines.min_cut import min_cut, saved_tensors
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import Graph, operation
from poetmodel.problem import Problem
from poetmodel.schedule import verify


def spares(graph: Graph, saved: set[int], once: set[int]) -> bool:
    """Return whether all that the backward pass reads can be made without the nodes of `once`."""
    free = droppable(graph)
    todo = {
        i for k in range(begin_of_backward(graph), len(graph.nodes)) for i in graph.inputs_of[k]
    }
    while todo:
        i = todo.pop()
        if i not in free or i in saved:
            continue
        if graph.node_of[i] in once:
            return False
        todo.update(graph.inputs_of[graph.node_of[i]])
    return True


@pytest.mark.parametrize("seed", range(12))
def test_no_smaller_set_spares_the_same_nodes(seed: int) -> None:
    """Among all sets of tensors, none of fewer bytes spares the nodes that must not run again."""
    rng = seeded(f"cut/{seed}")
    graph = random_training_graph(rng, 6, reads=0.2)
    free = sorted(droppable(graph))
    once = {graph.node_of[i] for i in free if rng.random() < 0.3}
    sizes = graph.tensor_bytes
    every = itertools.chain.from_iterable(
        itertools.combinations(free, count) for count in range(len(free) + 1)
    )
    least = min(sum(sizes[i] for i in s) for s in every if spares(graph, set(s), once))
    found = saved_tensors(graph, once)
    assert spares(graph, set(found), once)
    assert sum(sizes[i] for i in found) == least


def test_bytes_count_and_not_tensors() -> None:
    """A layer of nine bytes read by two of one byte: the two are saved, not the one."""
    graph = Graph(
        name="fork",
        nodes=(
            operation("x", output_bytes=1, phase="input"),
            operation("wide", output_bytes=9, inputs=("x",)),
            operation("a", output_bytes=1, inputs=("wide",)),
            operation("b", output_bytes=1, inputs=("wide",)),
            operation("g", output_bytes=1, phase="backward", inputs=("a", "b")),
        ),
    )
    saved = saved_tensors(graph, {graph.node_index["wide"]})
    assert {graph.tensors[i].name for i in saved} == {"a", "b"}


def test_less_ram_recomputes_more() -> None:
    """Nothing at 100 %, the cheap layers first below, and a reason where nothing fits."""
    graph = training_chain([2] * 9)
    seconds = [1] * len(graph.nodes)
    seconds[graph.node_index["f4"]] = 50
    costs = chain_costs(graph, seconds=seconds)
    extra = []
    for share in (100, 90, 75):
        problem = Problem(graph, costs, ram=f"{share}%")
        schedule = min_cut(problem)
        assert verify(problem, schedule).valid
        assert graph.node_index["f4"] not in {k for t, k in schedule.R if k < t}
        extra.append(len(schedule.R) - len(graph.nodes))
    assert extra[0] == 0 < extra[1] <= extra[2]
    with pytest.raises(MethodNotApplicableError, match="saved sets need at least"):
        min_cut(Problem(graph, costs, ram="45%"))
