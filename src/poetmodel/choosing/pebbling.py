"""Lower bounds on the RAM to compute tensors without paging, with unlimited recomputation.

They come from the pebble game (Sethi, 1975) with sizes: a node may be computed if its inputs are in
RAM. The game ignores the order and the stages of schedules, so its minimum is a lower bound for
every schedule without paging that trains the same parameters, alone or with further parameters.

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

MAX_SETS: Final = 500
"""Maximum number of sets of tensors to visit for one update node."""


class PebbleGame:
    """Lower bounds on the RAM to train a parameter; the RAM of state is not counted.

    Notes
    -----
    Of tensors in RAM together, one was computed last, with the other tensors and its inputs in RAM.
    So the minimum RAM for a set is the minimum, over its tensors, of the maximum of the RAM of this
    computation and the minimum RAM for its inputs with the other tensors. The recursion ends,
    because the sets contain tensors of ever earlier nodes.
    """

    def __init__(self, freezable: Freezable) -> None:
        self.freezable = freezable
        self.graph = freezable.graph
        self._sufficient_bytes: dict[frozenset[int], int] = {}
        """For each set of tensors, RAM that suffices to compute it, as a search has shown [B]."""

    def min_bytes(self, name: str, bound: int) -> int:
        """Return a lower bound, at least `bound`, on the RAM to train a parameter [B]."""
        graph = self.graph
        for u, node in enumerate(graph.nodes):
            if self.freezable.updated_parameter_of.get(u) == name and not node.is_state:
                inputs = (i for i in graph.inputs_of[u] if not self._is_state(i))
                bound = self._raise_bound(frozenset(inputs), bound)
        return bound

    def _raise_bound(self, tensors: frozenset[int], bound: int) -> int:
        """Return a lower bound on the RAM to compute `tensors` [B], at least `bound`."""
        remaining_sets = MAX_SETS
        while remaining_sets > 0:
            n_visited, next_bound = self._search_order(tensors, bound, remaining_sets)
            if next_bound is None:
                return bound
            bound = next_bound
            remaining_sets -= n_visited
        return bound

    def _search_order(
        self, final_tensors: frozenset[int], max_bytes: int, max_sets: int
    ) -> tuple[int, int | None]:
        """Search backwards, depth first, for an order that needs at most `max_bytes`.

        Returns the number of sets visited, and None on success, otherwise the next limit to try:
        `max_bytes` again if more than `max_sets` sets were visited.
        """
        next_max_bytes: int | None = None
        path = [(final_tensors, self._predecessors(final_tensors))]
        visited = {final_tensors}
        while path:
            tensors, predecessors = path[-1]
            if not tensors or self._sufficient_bytes.get(tensors, max_bytes + 1) <= max_bytes:
                for tensor_set, _ in path:
                    self._sufficient_bytes[tensor_set] = min(
                        max_bytes, self._sufficient_bytes.get(tensor_set, max_bytes)
                    )
                return len(visited), None
            for required_set, ram_bytes in predecessors:
                if ram_bytes > max_bytes:
                    next_max_bytes = (
                        ram_bytes if next_max_bytes is None else min(next_max_bytes, ram_bytes)
                    )
                elif required_set not in visited:
                    visited.add(required_set)
                    path.append((required_set, self._predecessors(required_set)))
                    break
            else:
                path.pop()
            if len(visited) > max_sets:
                return len(visited), max_bytes
        return len(visited), next_max_bytes

    def _predecessors(self, tensors: frozenset[int]) -> Iterator[tuple[frozenset[int], int]]:
        """Yield (required tensors, RAM bytes) for each maker of `tensors`, if computed last."""
        graph, sizes = self.graph, self.graph.tensor_bytes
        for k in sorted({graph.node_of[i] for i in tensors}):
            node = graph.nodes[k]
            outputs = tensors.intersection(graph.outputs_of[k])
            inputs = self._inputs_for(k, outputs)
            other_tensors = tensors - outputs
            required_tensors = other_tensors | inputs
            ram_bytes = sum(sizes[i] for i in required_tensors) + node.workspace_bytes
            allocated_outputs = outputs if node.phase == Phase.BACKWARD else graph.outputs_of[k]
            ram_bytes += sum(sizes[i] for i in allocated_outputs)
            ram_bytes -= graph.shared_bytes(k, inputs - other_tensors)
            yield required_tensors, ram_bytes

    def _inputs_for(self, k: int, outputs: frozenset[int]) -> frozenset[int]:
        """Return the inputs that node `k` reads to compute `outputs`, without state."""
        graph = self.graph
        inputs: tuple[int, ...] = graph.inputs_of[k]
        if graph.nodes[k].phase == Phase.BACKWARD and len(outputs) < len(graph.outputs_of[k]):
            names = self.freezable.inputs_for(k, {graph.tensors[i].name for i in outputs})
            inputs = tuple(graph.tensor_index[name] for name in names)
        return frozenset(i for i in inputs if not self._is_state(i))

    def _is_state(self, i: int) -> bool:
        return self.graph.nodes[self.graph.node_of[i]].is_state
