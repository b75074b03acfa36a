"""The relations of the paper as users address them on a model: ``model.R[t, k]`` and the others."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from poetmodel.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.graph import Graph


class Relation(Mapping[tuple[int, int], Any]):
    """One relation over the triangle of stages and nodes or tensors.

    ``relation[t, k]`` is a Pyomo variable, or an expression (a constant one where the formulation
    has decided the entry); all can be used in constraints and objectives.
    """

    def __init__(self, name: str, graph: Graph, entry: Callable[[int, int], Any]) -> None:
        self._name = name
        self._graph = graph
        self._entry = entry

    def __getitem__(self, index: tuple[int, int]) -> Any:
        entry = self._indices(index)
        if entry is None:
            msg = (
                f"{self._name}[{index}]: no such entry; {self._name} is defined for stage t and "
                f"{'node k' if self._name == 'R' else 'tensor i'} with {self._domain}"
            )
            raise ModelError(msg)
        return self._entry(*entry)

    def get(self, index: tuple[int, int], default: Any = None) -> Any:
        """Return an entry, or `default` outside the triangle."""
        return self[index] if index in self else default  # noqa: SIM401  # this is `get`

    def __contains__(self, index: object) -> bool:
        return self._indices(index) is not None

    def _indices(self, index: object) -> tuple[int, int] | None:
        """Return an index as plain integers, or None where it is not one of the triangle."""
        if not isinstance(index, tuple) or len(index) != 2:  # noqa: PLR2004
            return None
        try:
            t, k = map(operator.index, index)
        except TypeError:
            return None
        n = len(self._graph.nodes)
        count = n if self._name == "R" else len(self._graph.tensors)
        if not (0 <= t < n and 0 <= k < count):
            return None
        first = k if self._name == "R" else self._graph.node_of[k]
        fits = first <= t if self._name in ("R", "M_out") else first < t
        return (t, k) if fits else None

    def __iter__(self) -> Iterator[tuple[int, int]]:
        n = len(self._graph.nodes)
        firsts = range(n) if self._name == "R" else self._graph.node_of
        shift = 0 if self._name in ("R", "M_out") else 1
        return ((t, k) for t in range(n) for k, first in enumerate(firsts) if first + shift <= t)

    def __len__(self) -> int:
        n = len(self._graph.nodes)
        firsts = range(n) if self._name == "R" else self._graph.node_of
        shift = 0 if self._name in ("R", "M_out") else 1
        return sum(n - first - shift for first in firsts)

    @property
    def _domain(self) -> str:
        return {"R": "0 <= k <= t", "M_out": "node(i) <= t"}.get(self._name, "node(i) < t") + (
            f" < {len(self._graph.nodes)}"
        )
