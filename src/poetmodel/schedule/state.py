"""Where state tensors have their homes, and what that changes about executing a schedule.

For given homes the rest is an execution without state: what is resident takes RAM all the time and
nothing waits for it, what lies on storage is like a sample there, and a replacement weighs nothing,
since it is written in the memory of what it replaces.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from poetmodel.device import Device
    from poetmodel.graph import Graph
    from poetmodel.schedule.relations import Pair, Schedule

_OF_TENSORS: Final = ("S_RAM", "S_AUX", "M_in", "M_out")
_NO_TENSORS: Final[frozenset[int]] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Homes:
    """What one schedule makes of the state of a graph, for its execution."""

    sizes: Sequence[int]
    """What a copy of each tensor takes of RAM, in an execution without state [B]."""
    inputs: Sequence[Sequence[int]]
    """For each node the tensors that must be in RAM when it is computed."""
    outputs: Sequence[Sequence[int]]
    """For each node the tensors that are in RAM after it."""
    made_bytes: Sequence[int]
    """For each node what these take together [B]."""
    in_place: Collection[int] = ()
    """The nodes that may operate in place."""
    resident: frozenset[int] = _NO_TENSORS
    """State that is in RAM throughout."""
    ram_bytes: int = 0
    """What it takes [B]."""
    on_storage: frozenset[int] = _NO_TENSORS
    """State whose home is storage."""
    storage_bytes: int = 0
    """What it takes there [B]."""
    first_reads: Mapping[int, int] = field(default_factory=dict)
    """State that the step of its node pages in, once each."""
    replacements: frozenset[int] = _NO_TENSORS
    """The tensors that replace state."""
    faults: Mapping[tuple[str, int, int], str] = field(default_factory=dict)
    """Entries that state does not allow, and what is wrong with each."""
    unknown: tuple[str, ...] = ()
    """What is wrong with the list of resident state."""

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule, device: Device | None) -> Homes:
        """Return the homes that a schedule states; a device may be memory-mapped."""
        state = frozenset(graph.state_tensors)
        unknown = tuple(faults_of_resident(graph, schedule.resident))
        if graph.version == 1:
            return cls(
                sizes=graph.tensor_bytes,
                inputs=graph.inputs_of,
                outputs=graph.outputs_of,
                made_bytes=graph.output_bytes,
                unknown=unknown,
            )
        mapped = device is not None and device.is_memory_mapped
        resident = state.intersection(schedule.resident)
        on_storage = state - resident
        found = state if mapped else resident
        sizes = [0 if i in graph.state_of else size for i, size in enumerate(graph.tensor_bytes)]
        outputs = [tuple(i for i in made if i not in found) for made in graph.outputs_of]
        return cls(
            sizes=sizes,
            inputs=[tuple(i for i in read if i not in found) for read in graph.inputs_of],
            outputs=outputs,
            made_bytes=[sum(sizes[i] for i in made) for made in outputs],
            in_place=frozenset(k for k, pairs in enumerate(graph.in_place_of) if pairs),
            resident=resident,
            ram_bytes=sum(sizes[i] for i in resident),
            on_storage=on_storage,
            storage_bytes=sum(sizes[i] for i in on_storage),
            first_reads={} if mapped else Counter(on_storage),
            replacements=frozenset(graph.state_of),
            faults=dict(_Rules(graph, resident, mapped=mapped).faults(schedule)),
            unknown=unknown,
        )

    @property
    def violations(self) -> tuple[str, ...]:
        """Everything that state does not allow, in words."""
        entries = (f"{name}[{t},{k}]: {fault}" for (name, t, k), fault in self.faults.items())
        return (*self.unknown, *entries)

    def entries(self, schedule: Schedule, name: str) -> Sequence[Pair]:
        """Return the pairs of a relation that are executed: all but what state does not allow."""
        pairs: Sequence[Pair] = getattr(schedule, name)
        if not self.faults or name not in _OF_TENSORS:
            return pairs
        return [(t, i) for t, i in pairs if (name, t, i) not in self.faults]


def faults_of_resident(graph: Graph, resident: Iterable[int]) -> Iterator[str]:
    """Yield what is wrong with a list of resident state: what in it is no state tensor."""
    state = frozenset(graph.state_tensors)
    for i in resident:
        if not 0 <= i < len(graph.tensors):
            yield f"resident[{i}]: the graph has no such tensor"
        elif i not in state:
            yield f"resident[{i}]: tensor {graph.tensors[i].name!r} is no state tensor"


class _Rules:
    """The rules of state for each entry of a schedule."""

    def __init__(self, graph: Graph, resident: frozenset[int], *, mapped: bool) -> None:
        self.graph = graph
        self.resident = resident
        self.mapped = mapped
        self.state_of = {**graph.state_of, **{i: i for i in graph.state_tensors}}
        self.replaced_in = {old: graph.node_of[new] for old, new in graph.replacement_of.items()}

    def faults(self, schedule: Schedule) -> Iterator[tuple[tuple[str, int, int], str]]:
        """Yield every entry that breaks a rule, and what is wrong with it."""
        yield from self._computed_too_late(schedule.R)
        for name in _OF_TENSORS:
            for t, i in getattr(schedule, name):
                if i in self.state_of:
                    fault = self._fault(name, t, i)
                    if fault:
                        yield (name, t, i), fault
        written = set(schedule.M_out)
        for old, new in self.graph.replacement_of.items():
            stage = self.replaced_in[old]
            if old not in self.resident and (stage, new) not in written:
                yield (
                    ("M_out", stage, new),
                    f"{self._name(new)} must be paged out where it is made: it replaces "
                    f"{self._name(old)}, which is not resident",
                )

    def _computed_too_late(
        self, computed: Sequence[Pair]
    ) -> Iterator[tuple[tuple[str, int, int], str]]:
        """Yield the computations that read state after it was replaced."""
        replaced: dict[int, int] = {}  # for each node the first of its inputs to be replaced
        for k, read in enumerate(self.graph.inputs_of):
            known = [i for i in read if i in self.replaced_in]
            if known:
                replaced[k] = min(known, key=self.replaced_in.__getitem__)
        for t, k in computed:
            old = replaced.get(k)
            if old is not None and t > self.replaced_in[old]:
                node = self.graph.nodes[k].name
                yield ("R", t, k), f"node {node!r} reads {self._name(old)}, {self._gone(old)}"

    def _fault(self, name: str, t: int, i: int) -> str:
        """Return what is wrong with an entry about state or a replacement; empty where nothing."""
        old = self.state_of[i]
        gone_after = self.replaced_in.get(old, len(self.graph.nodes))
        who = self._name(i)
        if old in self.resident:
            what = "is resident" if i == old else f"replaces {self._name(old)}, which is resident"
            return f"{who} {what}: it is in no other relation"
        if i == old:
            if name == "M_out":
                return f"{who} is state, which is never paged out; only its replacement is"
            if t > gone_after:
                return f"{who} is state {self._gone(old)}"
            if self.mapped and name != "S_AUX":
                return f"{who} is state on memory-mapped storage, where the core reads it"
            return ""
        if name == "S_RAM":
            return f"{who} replaces {self._name(old)} and is not kept in RAM"
        if name == "M_in":
            return f"{who} replaces {self._name(old)}, and nothing reads it in the same step"
        if name == "M_out" and t > gone_after:
            return f"{who} is paged out where it is made, in stage {gone_after}"
        return ""

    def _gone(self, old: int) -> str:
        return f"which stage {self.replaced_in[old]} has replaced"

    def _name(self, i: int) -> str:
        return f"tensor {self.graph.tensors[i].name!r}"
