"""Where state tensors have their homes, and what that changes for schedules and programs.

State in RAM takes that all the time and nothing waits for it. State on storage is like a sample
that lies there; where storage is memory-mapped the core reads it in place. A replacement is written
over what it replaces.
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
    """State of a graph so far in a program."""

    read: set[int] = field(default_factory=set)
    """State on storage that was read."""
    replaced: dict[int, int] = field(default_factory=dict)
    """State that was replaced, with the node that did."""
    written: set[int] = field(default_factory=set)
    """Replacements that were paged out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Homes:
    """The copies of tensors that the nodes of a graph read and make, for given homes of state.

    Programs are made of *steps*, in which the first read of state is the page-in that it is; in a
    program it is the ``compute`` of its node.
    """

    graph: Graph
    sizes: Sequence[int]
    """RAM of a copy of each tensor [B]."""
    inputs: Sequence[Sequence[int]]
    """For each node the tensors whose copies it reads."""
    outputs: Sequence[Sequence[int]]
    """For each node the tensors whose copies are in RAM after it."""
    new: Sequence[Sequence[int]]
    """Those that are written over no state."""
    step_bytes: Sequence[int]
    """For each node what it takes beside its inputs: new copies and its workspace [B]."""
    stored: frozenset[int]
    """The tensors that are on storage from the start."""
    resident: frozenset[int] = _NONE
    """State that is in RAM throughout."""
    ram_bytes: int = 0
    """Its RAM [B]."""
    on_storage: frozenset[int] = _NONE
    """State whose home is storage."""
    storage_bytes: int = 0
    """Its storage [B]."""
    mapped: bool = False
    """Whether the core reads that where it lies."""
    held: frozenset[int] = _NONE
    """State that no instruction moves or frees."""
    first_reads: Mapping[int, int] = field(default_factory=dict)
    """Nodes whose ``compute`` reads state from storage, each with its tensor."""
    replaced: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Nodes that replace state on storage, with the tensors whose copies end in that."""
    written_back: frozenset[int] = _NONE
    """The tensors that replace state on storage."""
    unknown: tuple[str, ...] = ()
    """Faults in the list of resident state."""

    @classmethod
    def of(cls, graph: Graph, resident: Iterable[int] = (), *, mapped: bool = False) -> Homes:
        """Return the graph under given homes: some state resident, the rest on storage.

        Parameters
        ----------
        graph : Graph
            The training graph.
        resident : iterable of int
            The tensors whose home is RAM. What is no state tensor is a fault, and left out.
        mapped : bool
            Whether storage is memory-mapped, so that the core reads state where it lies.
        """
        listed = tuple(resident)
        unknown = tuple(_unknown_state(graph, listed))
        state = frozenset(graph.state_tensors)
        sizes: Sequence[int] = graph.tensor_bytes
        workspaces = [node.workspace_bytes for node in graph.nodes]
        if not state:
            written = zip(workspaces, graph.output_bytes, strict=True)
            return cls(
                graph=graph,
                sizes=sizes,
                inputs=graph.inputs_of,
                outputs=graph.outputs_of,
                new=graph.outputs_of,
                step_bytes=[workspace + output for workspace, output in written],
                stored=graph.on_aux,
                mapped=mapped,
                unknown=unknown,
            )
        in_ram = state.intersection(listed)
        on_storage = state - in_ram
        held = state if mapped else in_ram
        replacement = graph.replacement_of
        written_back = frozenset(replacement[i] for i in on_storage if i in replacement)
        if mapped:  # replaced on storage, where the state is
            sizes = [0 if i in written_back else size for i, size in enumerate(sizes)]
        absent = held.union(replacement[i] for i in in_ram if i in replacement)
        outputs = [tuple(i for i in written if i not in absent) for written in graph.outputs_of]
        new = [tuple(i for i in written if i not in written_back) for written in outputs]
        replaced: dict[int, frozenset[int]] = {}
        for old in (state - held) & replacement.keys():
            k = graph.node_of[replacement[old]]
            replaced[k] = replaced.get(k, _NONE) | {old}
        return cls(
            graph=graph,
            sizes=sizes,
            inputs=[tuple(i for i in read if i not in absent) for read in graph.inputs_of],
            outputs=outputs,
            new=new,
            step_bytes=[
                workspace + sum(sizes[i] for i in written)
                for workspace, written in zip(workspaces, new, strict=True)
            ],
            stored=graph.on_aux | on_storage,
            resident=in_ram,
            ram_bytes=sum(sizes[i] for i in in_ram),
            on_storage=on_storage,
            storage_bytes=sum(sizes[i] for i in on_storage),
            mapped=mapped,
            held=held,
            first_reads={graph.node_of[i]: i for i in sorted(state - held)},
            replaced=replaced,
            written_back=written_back,
            unknown=unknown,
        )

    # -- programs ----------------------------------------------------------------------------

    def shared(self, k: int, dying: Collection[int]) -> dict[int, int]:
        """Return the inputs that node `k` overwrites, each with the bytes of it [B]."""
        pairs = self.graph.in_place_of[k]
        return {x: min(self.sizes[x], self.sizes[y]) for y, x in pairs if x in dying}

    def steps_of(self, program: Iterable[Instruction]) -> Program:
        """Return a program with first reads as page-ins."""
        reads = self.first_reads
        return tuple(
            Instruction(Op.PAGE_IN, reads[step.index])
            if step.op == Op.COMPUTE and step.index in reads
            else step
            for step in program
        )

    def program_of(self, steps: Iterable[Instruction]) -> Program:
        """Return steps with the first page-in of state as the ``compute`` of its node."""
        unread = {i: k for k, i in self.first_reads.items()}
        return tuple(
            Instruction(Op.COMPUTE, unread.pop(step.index))
            if step.op == Op.PAGE_IN and step.index in unread
            else step
            for step in steps
        )

    def unwritten(self, done: StateAccess) -> list[int]:
        """Return the replacements of state on storage that were not paged out, ascending."""
        return sorted(self.written_back - done.written)

    def fault_of_reading(self, i: int, done: StateAccess) -> str:
        """Return the faults of a computation that reads a tensor; empty if none."""
        return f"reads {self._name(i)}, {self._gone(i, done)}" if i in done.replaced else ""

    def fault(self, op: Op, i: int, done: StateAccess) -> str:
        """Return why nothing like this is done to a tensor; empty where nothing forbids it."""
        if i in self.graph.state_of:
            return self._fault_of_replacement(op, i, done)
        if i in self.resident:
            return "is resident state, which is neither moved nor freed"
        if i not in self.on_storage:
            return ""
        if op == Op.PAGE_OUT:
            return "is state, which is never paged out; only its replacement is"
        if self.mapped:
            return "is state on memory-mapped storage, where the core reads it"
        if i in done.replaced:
            return f"is state {self._gone(i, done)}"
        if op == Op.PAGE_IN and i not in done.read:
            return "is state, which the compute of its node reads for the first time"
        return ""

    def _fault_of_replacement(self, op: Op, new: int, done: StateAccess) -> str:
        old = self.graph.state_of[new]
        if old in self.resident:
            return f"replaces {self._name(old)}, which is resident: it is neither moved nor freed"
        if op == Op.PAGE_IN:
            return f"replaces {self._name(old)}, and nothing reads it in the same step"
        if op == Op.PAGE_OUT and new in done.written:
            return f"replaces {self._name(old)} and was paged out already"
        if op == Op.FREE and new not in done.written:
            return f"replaces {self._name(old)} and must be paged out before it goes"
        return ""

    # -- schedules ---------------------------------------------------------------------------

    def faults_of(self, schedule: Schedule) -> Iterator[tuple[Entry, str]]:
        """Yield every entry of a schedule that state does not allow, and what is wrong with it."""
        graph = self.graph
        if not graph.state_tensors:
            return
        yield from self._computed_too_late(schedule.R)
        about_state = {*graph.state_tensors, *graph.state_of}
        for relation, entries in (
            ("S_RAM", self._entries_of("S_RAM", schedule.kept, about_state)),
            ("S_AUX", self._entries_of("S_AUX", schedule.stored, about_state)),
            ("M_in", schedule.M_in),
            ("M_out", schedule.M_out),
        ):
            for t, i in entries:
                if i in about_state:
                    fault = self._fault_of_entry(relation, t, i)
                    if fault:
                        yield (relation, t, i), fault
        written = set(schedule.M_out)
        for old, new in graph.replacement_of.items():
            stage = graph.node_of[new]
            if old not in self.resident and (stage, new) not in written:
                yield (
                    ("M_out", stage, new),
                    f"{self._name(new)} must be paged out where it is made: it replaces "
                    f"{self._name(old)}, which is not resident",
                )

    def _entries_of(
        self, relation: str, spans: Iterable[Span], about_state: Collection[int]
    ) -> tuple[Pair, ...]:
        """Return the pairs of the spans in which state does not allow something: the last one."""
        return pairs_of_spans(
            [
                (i, first, last)
                for i, first, last in spans
                if i in about_state and self._fault_of_entry(relation, last, i)
            ]
        )

    def _computed_too_late(self, computed: Sequence[Pair]) -> Iterator[tuple[Entry, str]]:
        """Yield the computations that read state after it was replaced."""
        replacement, node_of = self.graph.replacement_of, self.graph.node_of
        first: dict[int, int] = {}  # for each node the first of its inputs to be replaced
        for k, read in enumerate(self.graph.inputs_of):
            olds = [i for i in read if i in replacement]
            if olds:
                first[k] = min(olds, key=lambda i: node_of[replacement[i]])
        for t, k in computed:
            old = first.get(k)
            if old is not None and t > node_of[replacement[old]]:
                node = self.graph.nodes[k].name
                fault = f"node {node!r} reads {self._name(old)}, {self._gone_after(old)}"
                yield ("R", t, k), fault

    def _fault_of_entry(self, relation: str, t: int, i: int) -> str:
        """Return the faults of an entry about state or a replacement; empty if none."""
        graph = self.graph
        old = graph.state_of.get(i, i)
        new = graph.replacement_of.get(old)
        last = len(graph.nodes) if new is None else graph.node_of[new]
        name = self._name(i)
        if old in self.resident:
            what = "is resident" if i == old else f"replaces {self._name(old)}, which is resident"
            return f"{name} {what}: it is in no other relation"
        if i == old:
            if relation == "M_out":
                return f"{name} is state, which is never paged out; only its replacement is"
            if t > last:
                return f"{name} is state {self._gone_after(old)}"
            if self.mapped and relation != "S_AUX":
                return f"{name} is state on memory-mapped storage, where the core reads it"
            return ""
        if relation == "S_RAM":
            return f"{name} replaces {self._name(old)} and is not kept in RAM"
        if relation == "M_in":
            return f"{name} replaces {self._name(old)}, and nothing reads it in the same step"
        if relation == "M_out" and t > last:
            return f"{name} is paged out where it is made, in stage {last}"
        return ""

    # -- words -------------------------------------------------------------------------------

    def _gone(self, old: int, done: StateAccess) -> str:
        return f"which {self.graph.nodes[done.replaced[old]].name!r} has replaced"

    def _gone_after(self, old: int) -> str:
        stage = self.graph.node_of[self.graph.replacement_of[old]]
        return f"which stage {stage} has replaced"

    def _name(self, i: int) -> str:
        return f"tensor {self.graph.tensors[i].name!r}"


def _unknown_state(graph: Graph, resident: Iterable[int]) -> Iterator[str]:
    """Yield what is wrong with a list of resident state: what in it is no state tensor."""
    state = frozenset(graph.state_tensors)
    for i in resident:
        if not 0 <= i < len(graph.tensors):
            yield f"resident[{i}]: the graph has no such tensor"
        elif i not in state:
            yield f"resident[{i}]: tensor {graph.tensors[i].name!r} is no state tensor"
