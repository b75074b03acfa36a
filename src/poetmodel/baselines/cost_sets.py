"""Costs of connected sets that grow by union-find, for the approximate score of `dtr`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class CostSets:
    """Costs of connected sets of evicted tensors, by union-find.

    A tensor that comes back takes its own cost out of its set but leaves the set whole, so that
    sets are larger than the true ones after a while: the paper's approximation.
    """

    def __init__(self, count: int) -> None:
        self._set_of: list[int | None] = [None] * count
        """For each evicted tensor an element of its set."""
        self._parent: list[int] = []
        self._cost: list[float] = []

    def add(self, i: int, cost: float, beside: Iterable[int]) -> None:
        """Add an evicted tensor, joined with the sets of those beside it."""
        own = len(self._parent)
        self._parent.append(own)
        self._cost.append(cost)
        self._set_of[i] = own
        for root in self._roots(beside):
            self._parent[root] = own
            self._cost[own] += self._cost[root]

    def remove(self, i: int, cost: float) -> None:
        """Take a tensor that is back out of its set."""
        element = self._set_of[i]
        if element is not None:
            self._cost[self._root(element)] -= cost
            self._set_of[i] = None

    def total(self, tensors: Iterable[int]) -> float:
        """Return the cost of the sets that the tensors are in, each set once."""
        return sum(self._cost[root] for root in self._roots(tensors))

    def _roots(self, tensors: Iterable[int]) -> list[int]:
        elements = (self._set_of[u] for u in tensors)
        return sorted({self._root(element) for element in elements if element is not None})

    def _root(self, element: int) -> int:
        while self._parent[element] != element:
            self._parent[element] = self._parent[self._parent[element]]
            element = self._parent[element]
        return element
