"""Random layered graphs, on which papers on rematerialization compare solvers."""

from __future__ import annotations

import math
import random
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

from poetmodel.graph import Graph, Node, operation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

WIDTHS: Final = (0.25, 0.45)
"""Range of the width factor, about that of the published graphs."""
VARIATION: Final = 0.75
"""Maximum deviation of a layer's size from the mean, as a fraction of the mean."""
DENSITY: Final = 0.2
"""Probability of each further edge between nodes of adjacent layers; each node has one edge."""
SKIPS: Final = 0.14
"""Fraction of edges that skip at least one layer."""
MAX_DURATION: Final = 1000
"""Maximum duration [units]."""
SIZES: Final = (1900.0, 5500.0)
"""Mean of the exponential distribution of sizes, and the maximum size [units]."""
UNIT_FLOPS: Final = 1_000_000
"""FLOP of one unit of time."""
UNIT_BYTES: Final = 1024
"""Bytes of one unit of memory [B]."""


def make_random_layered(node_count: int, seed: int) -> Graph:
    """Return a random layered graph: one source, layers of random sizes, one sink.

    Adjacent layers are connected at random, and further edges skip layers. Durations are uniform,
    sizes exponential, the execution order is random. There is no backward pass. Equal arguments
    give equal graphs on every machine.

    Notes
    -----
    The parameters are those that the files of the graphs of Moccasin have in their names (width,
    variation of the layers, density of edges and of skip connections). Their meanings were derived
    from these files: a layer has ``2 * width * sqrt(n)`` nodes in the mean; every node reads one of
    the layer before, and each other one with a probability of a fifth; every node is on a path from
    the source to the sink; 14 % of the edges go from a random node to a random later layer. The
    order is drawn as there: each node from those whose inputs are computed. Times and memory
    have no units there. Here they are FLOP and bytes, so that the energy of a recomputation is in
    proportion to its time on a device whose energy depends on FLOP alone.

    References
    ----------
    Bartan, Li, Teague, Lott, Dilkina, Moccasin: Efficient tensor rematerialization for neural
    networks, ICML 2023, arXiv:2304.14463; their graphs are made as in Gagrani et al., Neural
    topological ordering for computation graphs, NeurIPS 2022, arXiv:2207.05899, appendix A.
    """
    generator = random.Random(f"{node_count} {seed}")  # noqa: S311 (no secret)
    layers = _draw_layers(generator, node_count)
    inputs: list[set[int]] = [set() for _ in range(node_count)]
    for before, after in pairwise(layers):
        _connect_layers(generator, before, after, inputs)
    _add_skip_edges(generator, layers, inputs)
    ordered = _draw_order(generator, inputs)
    return Graph(
        name=f"random-layered-{node_count}-{seed}", nodes=tuple(_draw_nodes(generator, ordered))
    )


def _draw_layers(generator: random.Random, node_count: int) -> list[range]:
    """Draw the sizes of layers; return the node numbers of each layer, from source to sink."""
    mean = 2 * generator.uniform(*WIDTHS) * math.sqrt(node_count)
    sizes = [1]
    while sum(sizes) < node_count - 1:
        size = round(mean * generator.uniform(1 - VARIATION, 1 + VARIATION))
        sizes.append(min(max(1, size), node_count - 1 - sum(sizes)))
    ends = list(accumulate((*sizes, 1), initial=0))
    return [range(*pair) for pair in pairwise(ends)]


def _connect_layers(
    generator: random.Random, before: Sequence[int], after: Sequence[int], inputs: list[set[int]]
) -> None:
    """Add random edges from the nodes `before` to those of the next layer, `after`, to `inputs`.

    Each node of `after` reads at least one of `before`, and each node of `before` is read.
    """
    node_inputs: set[int] = set()
    for k in after:
        inputs[k].add(generator.choice(before))
        inputs[k] |= {i for i in before if generator.random() < DENSITY}
        node_inputs |= inputs[k]
    for i in before:
        if i not in node_inputs:
            inputs[generator.choice(after)].add(i)


def _add_skip_edges(
    generator: random.Random, layers: Sequence[range], inputs: list[set[int]]
) -> None:
    """Add edges from random nodes to random nodes at least two layers later to `inputs`."""
    edge_count = round(sum(map(len, inputs)) * SKIPS / (1 - SKIPS))
    sources = [(i, depth) for depth, layer in enumerate(layers[:-2]) for i in layer]
    for _ in range(edge_count):
        i, depth = generator.choice(sources)
        inputs[generator.choice(layers[generator.randrange(depth + 2, len(layers))])].add(i)


def _draw_order(generator: random.Random, inputs: Sequence[set[int]]) -> list[set[int]]:
    """Draw a random execution order; return the inputs of the nodes, renumbered in this order."""
    missing_inputs = [len(node_inputs) for node_inputs in inputs]
    readers: list[list[int]] = [[] for _ in inputs]
    for k, node_inputs in enumerate(inputs):
        for i in node_inputs:
            readers[i].append(k)
    position: dict[int, int] = {}
    ready = [0]
    while ready:
        k = ready.pop(generator.randrange(len(ready)))
        position[k] = len(position)
        for reader in readers[k]:
            missing_inputs[reader] -= 1
            if not missing_inputs[reader]:
                ready.append(reader)
    return [{position[i] for i in inputs[k]} for k in position]


def _draw_nodes(generator: random.Random, inputs: Sequence[set[int]]) -> Iterator[Node]:
    mean_size, max_size = SIZES
    end_nodes = (0, len(inputs) - 1)
    for k, node_inputs in enumerate(inputs):
        size = generator.expovariate(1 / mean_size)
        while size > max_size:
            size = generator.expovariate(1 / mean_size)
        yield operation(
            f"v{k}",
            output_bytes=max(1, round(size)) * UNIT_BYTES,
            inputs=tuple(f"v{i}" for i in sorted(node_inputs)),
            flops=0 if k in end_nodes else generator.randint(1, MAX_DURATION) * UNIT_FLOPS,
            bytes_moved=0,
        )
