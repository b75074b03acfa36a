"""Homes of state tensors, and their effect on schedules and programs.

Resident state occupies RAM during the whole step and is never paged. State on storage is treated as
a sample on storage; if storage is memory-mapped, the core reads such state in place. A replacement
is written over its state tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from poetmodel.schedule.instructions import Instruction, Op, Program
from poetmodel.schedule.relations import Pair, Schedule, Span, pairs_of_spans

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from poetmodel.graph import Graph

Entry = tuple[str, int, int]
"""An entry of a schedule: relation, stage and index."""

_NONE: Final[frozenset[int]] = frozenset()


@dataclass(slots=True)
class StateAccess:
    """Accesses to state up to the current instruction of a program."""

    read: set[int] = field(default_factory=set)
    """State that was read from storage into RAM."""
    replaced: dict[int, int] = field(default_factory=dict)
    """State that was replaced, with the node that replaced it."""
    written: set[int] = field(default_factory=set)
    """Replacements that were paged out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Homes:
    """Homes of state, and the tensors that nodes read from RAM and make in RAM as copies.

    In a program, the first read of state on storage is the ``compute`` of the state's node;
    `expand_first_reads` states this read as a page-in.
    """

    graph: Graph
    """The training graph."""
    sizes: Sequence[int]
    """RAM of one copy of each tensor [B]; 0 for replacements on memory-mapped storage."""
    inputs: Sequence[Sequence[int]]
    """Inputs of each node, except unmoved state."""
    outputs: Sequence[Sequence[int]]
    """Outputs of each node, except unmoved state and replacements of resident state."""
    new_outputs: Sequence[Sequence[int]]
    """The tensors of `outputs` that replace no state."""
    step_bytes: Sequence[int]
    """RAM that each node allocates in addition to its inputs: new copies and workspace [B]."""
    stored: frozenset[int]
    """Tensors on storage when the training step begins."""
    resident: frozenset[int]
    """State that is in RAM during the whole training step."""
    ram_bytes: int
    """RAM of resident state [B]."""
    on_storage: frozenset[int]
    """State whose home is storage."""
    storage_bytes: int
    """Size of state on storage [B]."""
    is_mapped: bool
    """Whether the core reads state from storage in place."""
    unmoved_state: frozenset[int]
    """State that no instruction moves or frees."""
    first_reads: Mapping[int, int]
    """Nodes whose ``compute`` reads state from storage into RAM, with the state tensor."""
    replaced: Mapping[int, frozenset[int]]
    """Nodes that replace state on storage, with the state tensors whose copies they overwrite;
    empty if `is_mapped`."""
    written_back: frozenset[int]
    """Replacements of state on storage."""
    resident_faults: tuple[str, ...]
    """Messages about errors in the list of resident state."""

    @classmethod
    def from_resident(
        cls, graph: Graph, resident: Iterable[int] = (), *, is_mapped: bool = False
    ) -> Homes:
        """Return the homes with the state in `resident` in RAM and the rest on storage.

        Tensors that are not state go to `resident_faults`. `is_mapped`: state is read in place.
        """
        resident_tensors = tuple(resident)
        resident_faults = tuple(_resident_faults(graph, resident_tensors))
        state = frozenset(graph.state_tensors)
        sizes: Sequence[int] = graph.tensor_bytes
        workspaces = [node.workspace_bytes for node in graph.nodes]
        in_ram = state.intersection(resident_tensors)
        on_storage = state - in_ram
        unmoved_state = state if is_mapped else in_ram
        replacement = graph.replacement_of
        written_back = frozenset(replacement[i] for i in on_storage if i in replacement)
        if is_mapped:  # Replacements are written on storage.
            sizes = [0 if i in written_back else size for i, size in enumerate(sizes)]
        uncopied_tensors = unmoved_state.union(replacement[i] for i in in_ram if i in replacement)
        outputs = [
            tuple(i for i in node_outputs if i not in uncopied_tensors)
            for node_outputs in graph.outputs_of
        ]
        new_outputs = [
            tuple(i for i in node_outputs if i not in written_back) for node_outputs in outputs
        ]
        state_replaced_by: dict[int, frozenset[int]] = {}
        for state_tensor in (state - unmoved_state) & replacement.keys():
            k = graph.node_of[replacement[state_tensor]]
            state_replaced_by[k] = state_replaced_by.get(k, _NONE) | {state_tensor}
        return cls(
            graph=graph,
            sizes=sizes,
            inputs=[
                tuple(i for i in node_inputs if i not in uncopied_tensors)
                for node_inputs in graph.inputs_of
            ],
            outputs=outputs,
            new_outputs=new_outputs,
            step_bytes=[
                workspace + sum(sizes[i] for i in node_outputs)
                for workspace, node_outputs in zip(workspaces, new_outputs, strict=True)
            ],
            stored=graph.on_aux | on_storage,
            resident=in_ram,
            ram_bytes=sum(sizes[i] for i in in_ram),
            on_storage=on_storage,
            storage_bytes=sum(sizes[i] for i in on_storage),
            is_mapped=is_mapped,
            unmoved_state=unmoved_state,
            first_reads={graph.node_of[i]: i for i in sorted(state - unmoved_state)},
            replaced=state_replaced_by,
            written_back=written_back,
            resident_faults=resident_faults,
        )

    # -- programs ----------------------------------------------------------------------------

    def overwritten_bytes(self, k: int, dying_tensors: Collection[int]) -> dict[int, int]:
        """Return the bytes overwritten of each of `dying_tensors` by node `k` in place [B]."""
        pairs = self.graph.in_place_of[k]
        return {
            source: min(self.sizes[source], self.sizes[output])
            for output, source in pairs
            if source in dying_tensors
        }

    def expand_first_reads(self, program: Iterable[Instruction]) -> Program:
        """Return `program`; page-ins of state replace the ``compute`` of nodes in `first_reads`."""
        reads = self.first_reads
        return tuple(
            Instruction(Op.PAGE_IN, reads[instruction.index])
            if instruction.op == Op.COMPUTE and instruction.index in reads
            else instruction
            for instruction in program
        )

    def collapse_first_reads(self, instructions: Iterable[Instruction]) -> Program:
        """Return the program of `instructions`: the inverse of `expand_first_reads`."""
        unread_state = {i: k for k, i in self.first_reads.items()}
        return tuple(
            Instruction(Op.COMPUTE, unread_state.pop(instruction.index))
            if instruction.op == Op.PAGE_IN and instruction.index in unread_state
            else instruction
            for instruction in instructions
        )

    def missing_write_backs(self, access: StateAccess) -> list[int]:
        """Return the replacements of state on storage that were never paged out, ascending."""
        return sorted(self.written_back - access.written)

    def read_fault(self, i: int, access: StateAccess) -> str:
        """Return the reason why a computation must not read tensor `i`; "" if it may."""
        return (
            f"reads {self._tensor_label(i)}, {self._replaced_by_phrase(i, access)}"
            if i in access.replaced
            else ""
        )

    def instruction_fault(self, op: Op, i: int, access: StateAccess) -> str:
        """Return why rules of state forbid a transfer, wait or free of a tensor; "" if allowed."""
        if i in self.graph.state_of:
            return self._replacement_fault(op, i, access)
        if i in self.resident:
            return "is resident state, which is neither moved nor freed"
        if i not in self.on_storage:
            return ""
        if op == Op.PAGE_OUT:
            return "is state, which is never paged out; only its replacement is"
        if self.is_mapped:
            return "is state on memory-mapped storage, where the core reads it"
        if i in access.replaced:
            return f"is state {self._replaced_by_phrase(i, access)}"
        if op == Op.PAGE_IN and i not in access.read:
            return "is state, which the compute of its node reads for the first time"
        return ""

    def _replacement_fault(self, op: Op, new: int, access: StateAccess) -> str:
        """Return why a transfer, wait or free of replacement `new` is forbidden; "" if allowed."""
        old = self.graph.state_of[new]
        if old in self.resident:
            label = self._tensor_label(old)
            return f"replaces {label}, which is resident: it is neither moved nor freed"
        if op == Op.PAGE_IN:
            return f"replaces {self._tensor_label(old)}, and nothing reads it in the same step"
        if op == Op.PAGE_OUT and new in access.written:
            return f"replaces {self._tensor_label(old)} and was paged out already"
        if op == Op.FREE and new not in access.written:
            return f"replaces {self._tensor_label(old)} and must be paged out before it is freed"
        return ""

    # -- schedules ---------------------------------------------------------------------------

    def schedule_faults(self, schedule: Schedule) -> Iterator[tuple[Entry, str]]:
        """Yield entries that rules of state forbid, and missing write-backs, with messages."""
        graph = self.graph
        if not graph.state_tensors:
            return
        yield from self._late_reads(schedule.R)
        state_and_replacements = {*graph.state_tensors, *graph.state_of}
        for relation, entries in (
            ("S_RAM", self._pairs_of_suspect_spans("S_RAM", schedule.kept, state_and_replacements)),
            (
                "S_AUX",
                self._pairs_of_suspect_spans("S_AUX", schedule.stored, state_and_replacements),
            ),
            ("M_in", schedule.M_in),
            ("M_out", schedule.M_out),
        ):
            for t, i in entries:
                if i in state_and_replacements:
                    fault = self._entry_fault(relation, t, i)
                    if fault:
                        yield (relation, t, i), fault
        page_outs = set(schedule.M_out)
        for old, new in graph.replacement_of.items():
            stage = graph.node_of[new]
            if old not in self.resident and (stage, new) not in page_outs:
                yield (
                    ("M_out", stage, new),
                    f"{self._tensor_label(new)} must be paged out where it is made: it replaces "
                    f"{self._tensor_label(old)}, which is not resident",
                )

    def _pairs_of_suspect_spans(
        self, relation: str, spans: Iterable[Span], state_and_replacements: Collection[int]
    ) -> tuple[Pair, ...]:
        """Return the sorted pairs of all spans of state or replacements with an invalid last pair.

        Other spans have none: an entry forbidden in one stage is so in all later ones.
        """
        return pairs_of_spans(
            [
                (i, first, last)
                for i, first, last in spans
                if i in state_and_replacements and self._entry_fault(relation, last, i)
            ]
        )

    def _late_reads(self, computations: Sequence[Pair]) -> Iterator[tuple[Entry, str]]:
        """Yield (entry of ``R``, message) for each computation that reads replaced state."""
        replacement, node_of = self.graph.replacement_of, self.graph.node_of
        # For each node, the input that is replaced first.
        first_replaced_input: dict[int, int] = {}
        for k, inputs in enumerate(self.graph.inputs_of):
            replaced_inputs = [i for i in inputs if i in replacement]
            if replaced_inputs:
                first_replaced_input[k] = min(
                    replaced_inputs, key=lambda i: node_of[replacement[i]]
                )
        for t, k in computations:
            state_tensor = first_replaced_input.get(k)
            if state_tensor is not None and t > node_of[replacement[state_tensor]]:
                node = self.graph.nodes[k].name
                label = self._tensor_label(state_tensor)
                fault = f"node {node!r} reads {label}, {self._replaced_in_phrase(state_tensor)}"
                yield ("R", t, k), fault

    def _entry_fault(self, relation: str, t: int, i: int) -> str:
        """Return why rules of state forbid an entry of state or a replacement; "" if allowed."""
        graph = self.graph
        old = graph.state_of.get(i, i)
        new = graph.replacement_of.get(old)
        last_stage = len(graph.nodes) if new is None else graph.node_of[new]
        name = self._tensor_label(i)
        if old in self.resident:
            description = (
                "is resident"
                if i == old
                else f"replaces {self._tensor_label(old)}, which is resident"
            )
            return f"{name} {description}: it is in no other relation"
        if i == old:
            if relation == "M_out":
                return f"{name} is state, which is never paged out; only its replacement is"
            if t > last_stage:
                return f"{name} is state {self._replaced_in_phrase(old)}"
            if self.is_mapped and relation != "S_AUX":
                return f"{name} is state on memory-mapped storage, where the core reads it"
            return ""
        if relation == "S_RAM":
            return f"{name} replaces {self._tensor_label(old)} and is not kept in RAM"
        if relation == "M_in":
            return (
                f"{name} replaces {self._tensor_label(old)}, and nothing reads it in the same step"
            )
        if relation == "M_out" and t > last_stage:
            return f"{name} is paged out where it is made, in stage {last_stage}"
        return ""

    # -- phrases for messages ------------------------------------------------------------------

    def _replaced_by_phrase(self, old: int, access: StateAccess) -> str:
        return f"which {self.graph.nodes[access.replaced[old]].name!r} has replaced"

    def _replaced_in_phrase(self, old: int) -> str:
        stage = self.graph.node_of[self.graph.replacement_of[old]]
        return f"which stage {stage} has replaced"

    def _tensor_label(self, i: int) -> str:
        return f"tensor {self.graph.tensors[i].name!r}"


def _resident_faults(graph: Graph, resident: Iterable[int]) -> Iterator[str]:
    """Yield a message for each resident tensor that is unknown or not state."""
    state = frozenset(graph.state_tensors)
    for i in resident:
        if not 0 <= i < len(graph.tensors):
            yield f"resident[{i}]: the graph has no such tensor"
        elif i not in state:
            yield f"resident[{i}]: tensor {graph.tensors[i].name!r} is no state tensor"
