"""The scores by which dynamic tensor rematerialization evicts tensors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from poetmodel.graph import Graph

HEURISTICS: Final = ("full", "eq", "local", "msps", "lru", "size")
"""Scores of `dtr`. The tensor of the least score is evicted."""


class Scores:
    """Knows when tensors were used and which are evicted; the clock is compute time.

    With `nodes_once` a node counts once in a neighbourhood however many of its outputs are evicted;
    the authors' simulator counts every tensor.
    """

    def __init__(
        self, graph: Graph, cost: Sequence[float], heuristic: str, *, nodes_once: bool
    ) -> None:
        self.graph = graph
        self.sizes = graph.tensor_bytes
        self.cost = cost
        self.clock_s = 0.0
        self.last_use_s = [0.0] * len(self.sizes)
        self.evicted: set[int] = set()
        """Computed before, not in RAM, and recomputed if needed."""
        self._nodes_once = nodes_once
        self._sets = CostSets() if heuristic == "eq" else None
        scores: dict[str, Callable[[int], float]] = {
            "full": lambda i: self.per_byte_second(i, self.neighbourhood_cost(i)),
            "eq": lambda i: self.per_byte_second(i, self._cost_of_sets(i)),
            "local": lambda i: self.per_byte_second(i, self._own_cost(i)),
            "msps": lambda i: self._total(self.evicted_before(i)) / self.sizes[i],
            "lru": lambda i: -self._staleness_s(i),
            "size": lambda i: 1 / self.sizes[i],
        }
        self.score = scores[heuristic]
        """From a tensor in RAM to its score."""

    def use(self, i: int) -> None:
        """Record that tensor `i` is used now."""
        self.last_use_s[i] = self.clock_s

    def evict(self, i: int) -> None:
        """Record that tensor `i` left RAM and must be recomputed if needed."""
        self.evicted.add(i)
        if self._sets is not None:
            self._sets.add(i, self._own_cost(i), self._evicted_beside(i))

    def recover(self, i: int) -> None:
        """Record that tensor `i` is in RAM."""
        if i in self.evicted:
            self.evicted.remove(i)
            if self._sets is not None:
                self._sets.remove(i, self._own_cost(i))

    def per_byte_second(self, i: int, cost: float) -> float:
        """Return a cost over the size and the staleness of tensor `i`."""
        weight = self.sizes[i] * self._staleness_s(i)
        return cost / weight if weight > 0 else math.inf

    def neighbourhood_cost(self, i: int) -> float:
        """Return the cost of tensor `i` and its evicted neighbourhood."""
        return self._total({*self.evicted_before(i), *self.evicted_after(i)})

    def evicted_before(self, i: int) -> set[int]:
        """Return tensor `i` and the evicted ones that must be recomputed for it."""
        found = {i}
        todo = [i]
        while todo:
            for p in self.graph.inputs_of[self.graph.node_of[todo.pop()]]:
                if p in self.evicted and p not in found:
                    found.add(p)
                    todo.append(p)
        return found

    def evicted_after(self, i: int) -> set[int]:
        """Return the evicted tensors for which tensor `i` must be recomputed."""
        found: set[int] = set()
        todo = [i]
        while todo:
            for k in self.graph.users_of[todo.pop()]:
                for o in self.graph.outputs_of[k]:
                    if o in self.evicted and o not in found:
                        found.add(o)
                        todo.append(o)
        return found

    def _own_cost(self, i: int) -> float:
        return self.cost[self.graph.node_of[i]]

    def _staleness_s(self, i: int) -> float:
        return self.clock_s - self.last_use_s[i]

    def _total(self, tensors: Iterable[int]) -> float:
        nodes: Iterable[int] = (self.graph.node_of[u] for u in tensors)
        return math.fsum(self.cost[k] for k in (set(nodes) if self._nodes_once else nodes))

    def _evicted_beside(self, i: int) -> list[int]:
        """Return the evicted inputs of the node of tensor `i`, and outputs of its readers."""
        graph = self.graph
        before = graph.inputs_of[graph.node_of[i]]
        after = (o for k in graph.users_of[i] for o in graph.outputs_of[k])
        return [u for u in (*before, *after) if u in self.evicted]

    def _cost_of_sets(self, i: int) -> float:
        own = self._own_cost(i)
        return own if self._sets is None else own + self._sets.total(self._evicted_beside(i))


class CostSets:
    """Costs of connected sets of evicted tensors.

    A tensor that comes back takes its own cost out of its set, which stays whole. So sets become
    larger than the true ones: the paper's approximation.
    """

    def __init__(self) -> None:
        self._set_of: dict[int, int] = {}
        """The set of each evicted tensor."""
        self._cost: list[float] = []

    def add(self, i: int, cost: float, beside: Iterable[int]) -> None:
        """Add an evicted tensor, joined with the sets of those beside it."""
        joined = self._sets(beside)
        self._set_of |= {u: len(self._cost) for u, old in self._set_of.items() if old in joined}
        self._set_of[i] = len(self._cost)
        self._cost.append(sum((self._cost[old] for old in joined), start=cost))

    def remove(self, i: int, cost: float) -> None:
        """Take a tensor that is back out of its set."""
        if i in self._set_of:
            self._cost[self._set_of.pop(i)] -= cost

    def total(self, tensors: Iterable[int]) -> float:
        """Return the cost of the sets that the tensors are in, each set once."""
        return sum(self._cost[each] for each in self._sets(tensors))

    def _sets(self, tensors: Iterable[int]) -> list[int]:
        return sorted({self._set_of[u] for u in tensors if u in self._set_of})
