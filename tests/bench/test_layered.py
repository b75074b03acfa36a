"""Random layered graphs: their shape, and that numbers alone decide them."""

from statistics import mean

import pytest

from layered import random_layered
from poetmodel.errors import GraphError

PUBLISHED = {100: 236, 250: 944, 500: 2461, 1000: 5875}
"""Edges of the graphs of github.com/haoming-codes/moccasin, ff7ad8b, by their nodes."""


@pytest.mark.parametrize("n", [4, 5, 30, 100])
@pytest.mark.parametrize("seed", range(5))
def test_every_node_is_between_source_and_sink(n, seed):
    """One node reads nothing, one is read by nothing, and an edge goes forward."""
    graph = random_layered(n, seed)
    assert len(graph.nodes) == n
    assert [k for k in range(n) if not graph.inputs_of[k]] == [0]
    assert [i for i in range(n) if not graph.users_of[i]] == [n - 1]
    assert all(i < k for k in range(n) for i in graph.inputs_of[k])
    assert graph.nodes[0].flops == graph.nodes[-1].flops == 0


def test_numbers_decide_the_graph():
    """The same graph on every machine and in every version; another seed is another graph.

    The published number of edges lies among those of some seeds. Durations are uniform to 1000
    units; the middle size is about 1,400, the largest 5,500.
    """
    first = random_layered(100, 1)
    assert first == random_layered(100, seed=1)
    assert first.sha256.startswith("ac158c81")
    assert len({random_layered(100, seed).sha256 for seed in range(10)}) == 10
    for n, edges in PUBLISHED.items():
        found = [random_layered(n, seed).n_edges for seed in range(10)]
        assert min(found) < edges < max(found)
    nodes = [node for seed in range(5) for node in random_layered(500, seed).nodes]
    units = sorted(node.output_bytes / 1024 for node in nodes)
    assert 450 < mean(node.flops / 1e6 for node in nodes) < 550
    assert max(node.flops for node in nodes) <= 1000e6
    assert 1150 < units[len(units) // 2] < 1450
    assert units[-1] <= 5500


def test_training_graph_has_every_gradient():
    """Each tensor but the sample has one, of its size, which reads what its readers read.

    The forward pass is the graph without one, and the backward pass takes twice its FLOP.
    """
    plain = random_layered(40, 3)
    graph = random_layered(40, 3, backward=True)
    assert [node.inputs for node in graph.nodes[:40]] == [node.inputs for node in plain.nodes]
    assert [node.name for node in graph.nodes[40:]] == [f"dv{k}" for k in range(39, 0, -1)]
    by_name = {node.name: node for node in graph.nodes}
    for node in graph.nodes[1:40]:
        gradient = by_name[f"d{node.name}"]
        assert gradient.output_bytes == node.output_bytes
        readers = [reader for reader in graph.nodes[:40] if node.name in reader.inputs]
        read = {f"d{r.name}" for r in readers} | {name for r in readers for name in r.inputs}
        assert set(gradient.inputs) == (read or {node.name})
    forward, backward = (
        sum(node.flops for node in part) for part in (plain.nodes, graph.nodes[40:])
    )
    through_the_sample = sum(
        2 * node.flops / len(node.inputs) for node in plain.nodes if "v0" in node.inputs
    )
    assert backward == pytest.approx(2 * forward - through_the_sample, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"n": 3}, "n: expected a whole number from 4, got 3"),
        ({"n": 10.0}, "n: expected a whole number from 4, got 10.0"),
        ({"n": True, "seed": -1}, "n: .* got True; seed: expected a whole number from 0, got -1"),
    ],
)
def test_number_out_of_range_is_refused(arguments, said):
    """Every fault is said at once."""
    with pytest.raises(GraphError, match=said):
        random_layered(**arguments)
