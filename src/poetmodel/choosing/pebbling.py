"""The least RAM in which tensors can be made without paging, however often nodes are computed.

This is the pebble game (Sethi, 1975) with sizes: a node may be computed when its inputs are there.
The order and the stages of schedules do not matter in it, so that what it needs every schedule
needs that trains the same parameters, and maybe others.

References
----------
R. Sethi, "Complete register allocation problems", SIAM Journal on Computing 4, 1975,
doi:10.1137/0204020.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from poetmodel.graph import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.choosing.freezing import Freezable

MOST_STATES: Final = 500
"""Most sets of tensors that one question looks at."""


class PebbleGame:
    """What the nodes of a step need, without state, which has RAM of its own.

    Notes
    -----
    Let some tensors be in RAM together. One of them was made last; when its node was computed, the
    others were there, and its inputs were. So the least RAM for a set is the least, over its
    tensors, of the larger of two: what this step takes, and the least RAM for the inputs with the
    others. Sets of ancestors come to an end.
    """

    def __init__(self, freezable: Freezable) -> None:
        self.freezable = freezable
        self.graph = freezable.graph
        self._reached: dict[frozenset[int], int] = {}
        """A RAM in which a set of tensors can be made, of those that were seen to be so."""

    def least_bytes(self, name: str, least: int) -> int:
        """Return a lower bound on the RAM to train a parameter, from one that is known [B]."""
        graph = self.graph
        for u, node in enumerate(graph.nodes):
            if self.freezable.owner.get(u) == name and not node.is_state:
                read = (i for i in graph.inputs_of[u] if not self._is_state(i))
                least = self._least_bytes(frozenset(read), least)
        return least

    def _least_bytes(self, wanted: frozenset[int], least: int) -> int:
        left = MOST_STATES
        while left > 0:
            failed, more = self._failed(wanted, least, left)
            if more is None:
                return least
            least = more
            left -= failed
        return least

    def _failed(self, wanted: frozenset[int], limit: int, most: int) -> tuple[int, int | None]:
        """Return the number of sets visited, and the next limit to try where this is too low."""
        above: int | None = None
        path = [(wanted, self._before(wanted))]
        seen = {wanted}
        while path:
            tensors, steps = path[-1]
            if not tensors or self._reached.get(tensors, limit + 1) <= limit:
                for met, _ in path:
                    self._reached[met] = min(limit, self._reached.get(met, limit))
                return len(seen), None
            for needed, size in steps:
                if size > limit:
                    above = size if above is None else min(above, size)
                elif needed not in seen:
                    seen.add(needed)
                    path.append((needed, self._before(needed)))
                    break
            else:
                path.pop()
            if len(seen) > most:
                return len(seen), limit
        return len(seen), above

    def _before(self, tensors: frozenset[int]) -> Iterator[tuple[frozenset[int], int]]:
        """Yield for each tensor that may be the last what was there before, and what it took."""
        graph, sizes = self.graph, self.graph.tensor_bytes
        for k in sorted({graph.node_of[i] for i in tensors}):
            node = graph.nodes[k]
            wanted = tensors.intersection(graph.outputs_of[k])
            read = self._read(k, wanted)
            others = tensors - wanted
            needed = others | read
            taken = sum(sizes[i] for i in needed) + node.workspace_bytes
            made_now = wanted if node.phase == Phase.BACKWARD else graph.outputs_of[k]
            taken += sum(sizes[i] for i in made_now)
            taken -= graph.shared_bytes(k, read - others)
            yield needed, taken

    def _read(self, k: int, wanted: frozenset[int]) -> frozenset[int]:
        """Return the inputs that a node reads for some of its outputs, without state."""
        graph = self.graph
        inputs: tuple[int, ...] = graph.inputs_of[k]
        if graph.nodes[k].phase == Phase.BACKWARD and len(wanted) < len(graph.outputs_of[k]):
            names = self.freezable.read_for(k, {graph.tensors[i].name for i in wanted})
            inputs = tuple(graph.tensor_index[name] for name in names)
        return frozenset(i for i in inputs if not self._is_state(i))

    def _is_state(self, i: int) -> bool:
        return self.graph.nodes[self.graph.node_of[i]].is_state
