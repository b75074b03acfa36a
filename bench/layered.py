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
LONGEST: Final = 1000
"""Maximum duration [units]."""
SIZES: Final = (1900.0, 5500.0)
"""Mean and upper limit of the exponential distribution of sizes [units]."""
UNIT_FLOPS: Final = 1_000_000
"""FLOP of one unit of time."""
UNIT_BYTES: Final = 1024
"""Bytes of one unit of memory [B]."""


def random_layered(n: int, seed: int) -> Graph:
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
    order is like theirs: each node is drawn from those whose inputs are computed. Times and memory
    have no units there. Here they are FLOP and bytes, so that the energy of a recomputation is in
    proportion to its time on a device whose energy depends on FLOP alone.

    References
    ----------
    Bartan, Li, Teague, Lott, Dilkina, Moccasin: Efficient tensor rematerialization for neural
    networks, ICML 2023, arXiv:2304.14463; their graphs are made as in Gagrani et al., Neural
    topological ordering for computation graphs, NeurIPS 2022, arXiv:2207.05899, appendix A.
    """
    chance = random.Random(f"{n} {seed}")  # noqa: S311 (no secret)
    layers = _layers(chance, n)
    inputs: list[set[int]] = [set() for _ in range(n)]
    for before, after in pairwise(layers):
        _join(chance, before, after, inputs)
    _skip(chance, layers, inputs)
    ordered = _in_random_order(chance, inputs)
    return Graph(name=f"random-layered-{n}-{seed}", nodes=tuple(_nodes(chance, ordered)))


def _layers(chance: random.Random, n: int) -> list[range]:
    """Draw the sizes of layers; return the nodes of each layer, from the source to the sink."""
    mean = 2 * chance.uniform(*WIDTHS) * math.sqrt(n)
    sizes = [1]
    while sum(sizes) < n - 1:
        size = round(mean * chance.uniform(1 - VARIATION, 1 + VARIATION))
        sizes.append(min(max(1, size), n - 1 - sum(sizes)))
    ends = list(accumulate((*sizes, 1), initial=0))
    return [range(*pair) for pair in pairwise(ends)]


def _join(
    chance: random.Random, before: Sequence[int], after: Sequence[int], inputs: list[set[int]]
) -> None:
    """Add edges between two adjacent layers to `inputs`.

    Each node of the second reads at least one of the first; each node of the first is read.
    """
    read: set[int] = set()
    for k in after:
        inputs[k].add(chance.choice(before))
        inputs[k] |= {i for i in before if chance.random() < DENSITY}
        read |= inputs[k]
    for i in before:
        if i not in read:
            inputs[chance.choice(after)].add(i)


def _skip(chance: random.Random, layers: Sequence[range], inputs: list[set[int]]) -> None:
    """Add edges that skip layers to `inputs`, from any node to one of a random later layer."""
    wanted = round(sum(map(len, inputs)) * SKIPS / (1 - SKIPS))
    begins = [(i, depth) for depth, layer in enumerate(layers[:-2]) for i in layer]
    for _ in range(wanted):
        i, depth = chance.choice(begins)
        inputs[chance.choice(layers[chance.randrange(depth + 2, len(layers))])].add(i)


def _in_random_order(chance: random.Random, inputs: Sequence[set[int]]) -> list[set[int]]:
    """Draw a random execution order; return the inputs of the nodes, renumbered in this order."""
    missing = [len(read) for read in inputs]
    readers: list[list[int]] = [[] for _ in inputs]
    for k, read in enumerate(inputs):
        for i in read:
            readers[i].append(k)
    position: dict[int, int] = {}
    ready = [0]
    while ready:
        k = ready.pop(chance.randrange(len(ready)))
        position[k] = len(position)
        for reader in readers[k]:
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    return [{position[i] for i in inputs[k]} for k in position]


def _nodes(chance: random.Random, inputs: Sequence[set[int]]) -> Iterator[Node]:
    mean, most = SIZES
    ends = (0, len(inputs) - 1)
    for k, read in enumerate(inputs):
        size = chance.expovariate(1 / mean)
        while size > most:
            size = chance.expovariate(1 / mean)
        yield operation(
            f"v{k}",
            output_bytes=max(1, round(size)) * UNIT_BYTES,
            inputs=tuple(f"v{i}" for i in sorted(read)),
            flops=0 if k in ends else chance.randint(1, LONGEST) * UNIT_FLOPS,
            bytes_moved=0,
        )
