"""Chen's methods on chains worked by hand; a minimum cut against all sets; keep-all."""

import itertools
from math import sqrt

import pytest

from kit.baseline_checks import graph_of
from kit.instances import random_training_graph, seeded
from kit.worked import chain_costs, training_chain
from poetmodel.baselines.engine import begin_of_backward, droppable
from poetmodel.baselines.saved_sets import (
    chen_greedy,
    chen_sqrt,
    min_cut,
    recompute_once,
    saved_tensors,
)
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import Graph, operation
from poetmodel.problem import Problem
from poetmodel.schedule import check_schedule, simulate


def problem_of(graph, ram="100%"):
    """Return a problem over a graph where every node takes a second."""
    return Problem(graph, chain_costs(graph), ram=ram)


def test_square_root_of_nine_layers():
    """Worked by hand: nine layers and the loss, ten candidates, one in four is kept.

    Kept are f4 and f8, and f9 and the loss, with which the backward pass begins; f1..f3 and f5..f7
    are made once more.
    """
    graph = training_chain([1] * 10)
    schedule = chen_sqrt(problem_of(graph))
    names = [graph.nodes[k].name for t, k in schedule.R if k < t]
    assert sorted(names) == ["f1", "f2", "f3", "f5", "f6", "f7"]
    begin = graph.node_index["gl"]
    kept = {graph.tensors[i].name for t, i in schedule.S_RAM if t == begin}
    assert kept == {"x", "f4", "f8", "f9", "loss"}


@pytest.mark.parametrize("length", [16, 64, 144])
def test_peak_grows_with_the_root_of_the_length(length):
    """On a chain of unit tensors the peak is at most two roots and a few tensors."""
    graph = training_chain([1] * (length + 1))
    schedule = chen_sqrt(problem_of(graph))
    peak = simulate(graph, None, schedule).peak_ram_bytes
    assert peak <= 2 * sqrt(length + 1) + 7
    counts = [k for t, k in schedule.R if k < t]
    assert len(counts) == len(set(counts))


def test_greedy_keeps_what_fits():
    """Nothing is recomputed at 100 %; less RAM costs more computations, up to the refusal."""
    graph = training_chain([2, 1, 3, 1, 2, 4, 1, 1, 3, 1])
    extra = []
    for share in (100, 80, 70):
        problem = problem_of(graph, f"{share}%")
        schedule = chen_greedy(problem)
        assert check_schedule(problem, schedule).valid
        extra.append(len(schedule.R) - len(graph.nodes))
    assert extra[0] == 0
    assert extra == sorted(extra)
    assert extra[-1] > 0
    with pytest.raises(MethodNotApplicableError, match="need at least"):
        chen_greedy(problem_of(graph, "45%"))


def test_outputs_that_are_still_read_are_kept_together():
    """The second output of a kept node is kept with the first."""
    graph = training_chain([1] * 10, tapes=[1] * 9)
    schedule = chen_sqrt(problem_of(graph))
    begin = graph.node_index["gl"]
    kept = {graph.tensors[i].name for t, i in schedule.S_RAM if t == begin}
    assert {"f4", "f4.tape", "f8", "f8.tape"} <= kept


def spares(graph, saved, once):
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
def test_no_smaller_set_spares_the_same_nodes(seed):
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
    schedule = recompute_once(graph, found)
    assert simulate(graph, None, schedule).valid
    again = [k for t, k in schedule.R if k < t]
    assert len(again) == len(set(again))


def test_bytes_count_and_not_tensors():
    """A layer of nine bytes read by two of one byte: the two are saved, not the one."""
    graph = graph_of("fork", "x 1 @input; wide 9 x; a 1 wide; b 1 wide; g 1 a b @backward")
    saved = saved_tensors(graph, {graph.node_index["wide"]})
    assert {graph.tensors[i].name for i in saved} == {"a", "b"}


def test_nothing_to_save_is_no_error():
    """A graph whose forward pass is its sample alone has no tensor that could be dropped."""
    nodes = (
        operation("x", output_bytes=4, phase="input"),
        operation("g", output_bytes=1, phase="backward", inputs=("x",)),
    )
    assert saved_tensors(Graph(name="sample", nodes=nodes), ()) == frozenset()


def test_less_ram_recomputes_more():
    """Nothing at 100 %, the cheap layers first below, and a reason where nothing fits."""
    graph = training_chain([2] * 9)
    seconds = [1] * len(graph.nodes)
    seconds[graph.node_index["f4"]] = 50
    costs = chain_costs(graph, seconds=seconds)
    extra = []
    for share in (100, 90, 75):
        problem = Problem(graph, costs, ram=f"{share}%")
        schedule = min_cut(problem)
        assert check_schedule(problem, schedule).valid
        assert graph.node_index["f4"] not in {k for t, k in schedule.R if k < t}
        extra.append(len(schedule.R) - len(graph.nodes))
    assert extra[0] == 0 < extra[1] <= extra[2]
    with pytest.raises(MethodNotApplicableError, match="saved sets need at least"):
        min_cut(Problem(graph, costs, ram="45%"))
