"""What a plan may do with state tensors and their replacements, for the simulator of plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from poetmodel.plan.program import Op
from poetmodel.schedule.state import faults_of_resident

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.device import Device
    from poetmodel.graph import Graph
    from poetmodel.plan.program import Plan


class PlanState:
    """Homes of the state of a graph, and what a program has done with it so far."""

    def __init__(self, graph: Graph, plan: Plan, device: Device | None) -> None:
        self.graph = graph
        state = set(graph.state_tensors)
        sizes = graph.tensor_bytes
        self.mapped = plan.memory_mapped
        self.resident = state.intersection(plan.resident or ())
        self.on_storage = state - self.resident
        self.read_there = self.on_storage if self.mapped else set[int]()
        """State that the core reads on storage."""
        self.held = self.resident | self.read_there
        """State that no instruction moves or frees."""
        self.first_reads = plan.first_reads(graph)
        self.ram_bytes = sum(sizes[i] for i in self.resident)
        self.storage_bytes = sum(sizes[i] for i in self.on_storage)
        self.read: set[int] = set()
        """State on storage that was read."""
        self.replaced: dict[int, int] = {}
        """State that was replaced, with the node that did."""
        self.written: set[int] = set()
        """Replacements that were paged out."""
        self.violations = tuple(self._of_homes(plan, device))

    def _of_homes(self, plan: Plan, device: Device | None) -> Iterator[str]:
        yield from faults_of_resident(self.graph, plan.resident or ())
        if device is not None and self.on_storage and self.mapped != device.is_memory_mapped:
            yield (
                "memory_mapped: the plan reads state on storage "
                f"{'where it lies' if self.mapped else 'into RAM'}, and the storage of "
                f"{device.key or device.name} is {'not ' if self.mapped else ''}memory-mapped"
            )

    @property
    def unwritten(self) -> list[int]:
        """Replacements of state on storage that were not paged out, ascending."""
        new_of = self.graph.replacement_of
        return sorted({new_of[i] for i in self.on_storage & new_of.keys()} - self.written)

    def outputs(self, k: int) -> list[int]:
        """Return what a computation puts into RAM of its own: no state, no replacement."""
        made = self.graph.outputs_of[k]
        return [i for i in made if i not in self.held and i not in self.graph.state_of]

    def replacements(self, k: int) -> list[tuple[int, int]]:
        """Return the state that a computation replaces, each with its replacement."""
        made = self.graph.outputs_of[k]
        return [(self.graph.state_of[i], i) for i in made if i in self.graph.state_of]

    def fault_of_reading(self, i: int) -> str:
        """Return what is wrong with a computation that reads a tensor; empty where nothing."""
        return f"reads {self._name(i)}, {self._gone(i)}" if i in self.replaced else ""

    def fault(self, op: Op, i: int) -> str:
        """Return why nothing like this is done to a tensor; empty where nothing forbids it."""
        if i in self.graph.state_of:
            return self._fault_of_replacement(op, i, self.graph.state_of[i])
        if i in self.resident:
            return "is resident state, which is neither moved nor freed"
        if i not in self.on_storage:
            return ""
        if op == Op.PAGE_OUT:
            return "is state, which is never paged out; only its replacement is"
        if i in self.read_there:
            return "is state on memory-mapped storage, where the core reads it"
        if i in self.replaced:
            return f"is state {self._gone(i)}"
        if op == Op.PAGE_IN and i not in self.read:
            return "is state, which the compute of its node reads for the first time"
        return ""

    def _fault_of_replacement(self, op: Op, new: int, old: int) -> str:
        if old in self.resident:
            return f"replaces {self._name(old)}, which is resident: it is neither moved nor freed"
        if op == Op.PAGE_IN:
            return f"replaces {self._name(old)}, and nothing reads it in the same step"
        if op == Op.PAGE_OUT and new in self.written:
            return f"replaces {self._name(old)} and was paged out already"
        if op == Op.FREE and new not in self.written:
            return f"replaces {self._name(old)} and must be paged out before it goes"
        return ""

    def _gone(self, old: int) -> str:
        return f"which {self.graph.nodes[self.replaced[old]].name!r} has replaced"

    def _name(self, i: int) -> str:
        return f"tensor {self.graph.tensors[i].name!r}"
