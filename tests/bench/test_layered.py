"""Random layered graphs: their shape, decided by numbers alone."""

from statistics import mean

import pytest

from layered import make_random_layered

PUBLISHED = {100: 236, 250: 944, 500: 2461, 1000: 5875}
"""Edges of the graphs of github.com/haoming-codes/moccasin, ff7ad8b, by their nodes."""


@pytest.mark.parametrize("n", [4, 5, 30, 100])
@pytest.mark.parametrize("seed", range(5))
def test_every_node_is_between_source_and_sink(n, seed):
    """The source has no inputs, the sink no readers, and edges go forward."""
    graph = make_random_layered(n, seed)
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
    first = make_random_layered(100, 1)
    assert first == make_random_layered(100, seed=1)
    assert first.sha256.startswith("ac158c81")
    assert len({make_random_layered(100, seed).sha256 for seed in range(10)}) == 10
    for n, edges in PUBLISHED.items():
        found = [make_random_layered(n, seed).n_edges for seed in range(10)]
        assert min(found) < edges < max(found)
    nodes = [node for seed in range(5) for node in make_random_layered(500, seed).nodes]
    units = sorted(node.output_bytes / 1024 for node in nodes)
    assert 450 < mean(node.flops / 1e6 for node in nodes) < 550
    assert max(node.flops for node in nodes) <= 1000e6
    assert 1150 < units[len(units) // 2] < 1450
    assert units[-1] <= 5500
