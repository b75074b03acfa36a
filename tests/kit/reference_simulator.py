"""The reference simulator: executes a schedule itself, stage by stage, without a program.

`simulate` compiles a schedule and lets the machine run the program; this is a second way to the
same figures and the same words, and shares no code with it but the use of RAM by kind.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from copy import copy
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.room import RamUse, ram_use
from poetmodel.schedule import RELATIONS, MemoryPoint

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from poetmodel.graph import Graph
    from poetmodel.schedule import Schedule

Pair = tuple[int, int]
_OF_TENSORS: Final = ("S_RAM", "S_AUX", "M_in", "M_out")
_NO_TENSORS: Final[frozenset[int]] = frozenset()


def reference_figures(graph: Graph, schedule: Schedule, *, mapped: bool) -> dict[str, Any]:
    """Return what `simulate` says of a schedule beside times and energies, by its names."""
    homes = Homes.of(graph, schedule, mapped=mapped)
    execution = _ScheduleExecution(graph, schedule, homes)
    execution.run()
    peak_tensors, peak_use = execution.at_peak()
    sizes = graph.tensor_bytes
    moved = {
        name: Counter(i for _, i in getattr(schedule, name) if 0 <= i < len(sizes))
        for name in ("M_in", "M_out")
    }
    moved["M_in"].update(homes.first_reads)
    paged_out = moved["M_out"].keys() - execution.aux_from_start - homes.replacements
    return {
        "violations": tuple(execution.violations),
        "curve": tuple(execution.curve),
        "peak": execution.peak if execution.curve else MemoryPoint(0, 0, 0),
        "peak_tensors": peak_tensors,
        "peak_use": peak_use,
        "aux_used_bytes": homes.storage_bytes + sum(sizes[i] for i in paged_out),
        "written_bytes": sum(sizes[i] * times for i, times in moved["M_out"].items()),
        "read_bytes": sum(sizes[i] * times for i, times in moved["M_in"].items()),
        "page_ins": moved["M_in"],
        "page_outs": moved["M_out"],
        "resident": homes.resident,
    }


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
    def of(cls, graph: Graph, schedule: Schedule, *, mapped: bool) -> Homes:
        """Return the homes that a schedule states; storage may be memory-mapped."""
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


class _ScheduleExecution:
    """The state of one simulation: what is in RAM and on storage now."""

    def __init__(self, graph: Graph, schedule: Schedule, homes: Homes) -> None:
        self.graph = graph
        self.homes = homes
        self.sizes = homes.sizes
        self.inputs = homes.inputs
        self.outputs = homes.outputs
        self.in_place = homes.in_place
        self.node_of = graph.node_of
        self.step_bytes = [
            made + node.workspace_bytes
            for node, made in zip(graph.nodes, homes.made_bytes, strict=True)
        ]
        self.aux_from_start = graph.on_aux
        self.violations: list[str] = list(homes.violations)
        self.curve: list[MemoryPoint] = []
        self.peak = MemoryPoint(0, 0, -1)
        self._peak_start: tuple[set[int], set[int]] = (set(), set())
        self.ram: set[int] = set()
        self.ram_bytes = homes.ram_bytes
        self.aux = {*self.aux_from_start, *homes.on_storage}
        self.stages: dict[str, list[list[int]]] = {}
        for name in RELATIONS:
            self.stages[name] = self._by_stage(name, homes.entries(schedule, name))

    def _by_stage(self, name: str, pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
        """Return the indices of each stage; pairs that cannot be are violations."""
        nodes, of_nodes = self.graph.nodes, name == "R"
        n = len(nodes)
        made_by: Sequence[int] = range(n) if of_nodes else self.node_of
        limit, later = len(made_by), name not in ("R", "M_out")
        first = [node + later for node in made_by]
        rows: list[list[int]] = [[] for _ in range(n + 1)]
        for t, group in groupby(pairs, key=itemgetter(0)):
            row = [k for _, k in group]
            known = not of_nodes and 0 <= t < n and min(row) >= 0 and max(row) < limit
            if known and max(map(first.__getitem__, row)) <= t:  # quick: there are millions
                rows[t].extend(row)
                continue
            for k in row:
                fault = ""
                if not (0 <= k < limit and 0 <= t < n):
                    fault = "the graph has no such stage or index"
                elif t < first[k]:
                    what = f"node {nodes[k].name!r}" if of_nodes else self._tensor(k)
                    fault = f"{what} is first made in stage {made_by[k]}"
                else:
                    rows[t].append(k)
                    if of_nodes and k < t and not nodes[k].recomputable:
                        fault = f"node {nodes[k].name!r} must not be computed again"
                if fault:
                    self.violations.append(f"{name}[{t},{k}]: {fault}")
        return rows

    def _tensor(self, i: int) -> str:
        return f"tensor {self.graph.tensors[i].name!r}"

    def run(self) -> None:
        for t in range(len(self.graph.nodes)):
            self._begin(t)
            start = (set(self.ram), set(self.aux))
            self._steps(t)
            if self.peak.stage == t:
                self._peak_start = start

    def at_peak(self) -> tuple[tuple[int, ...], RamUse]:
        """Execute the stage of the peak again, up to its step; return the tensors and their use."""
        if not self.curve:
            return (), RamUse()
        t, k = self.peak.stage, self.peak.node
        again = copy(self)
        again.violations, again.curve = [], []
        again.ram, again.aux = map(set, self._peak_start)
        again.ram_bytes = self._bytes_of(again.ram)
        dying = again._done_with(t).get(k, ())
        again._steps(t, stop=k)
        held = tuple(sorted((again.ram | self.homes.resident) - self.homes.replacements))
        if not _contains(self.stages["R"][t], k):
            return held, ram_use(self.graph, held)
        # An old copy of an output, kept or paged in, counts beside the new one.
        old = self._peak_start[0].union(self.stages["M_in"][t]).intersection(self.outputs[k])
        return held, ram_use(self.graph, (*held, *old), step=k, dying=dying)

    def _bytes_of(self, ram: set[int]) -> int:
        """Return what some tensors and the resident state take of RAM."""
        return self.homes.ram_bytes + sum(self.sizes[i] for i in ram)

    def _begin(self, t: int) -> None:
        kept = set(self.stages["S_RAM"][t])
        for i in sorted(kept - self.ram) if kept != self.ram else ():
            self.violations.append(
                f"S_RAM[{t},{i}]: {self._tensor(i)} is not in RAM when stage {t} begins"
            )
        for i in sorted(set(self.stages["S_AUX"][t]) - self.aux):
            self.violations.append(
                f"S_AUX[{t},{i}]: {self._tensor(i)} is not on storage when stage {t} begins"
            )
        if self.ram != kept:
            # What the violations say is missing stays missing.
            self.ram &= kept
            self.ram_bytes = self._bytes_of(self.ram)

    def _steps(self, t: int, *, stop: int | None = None) -> None:
        computed = set(self.stages["R"][t])
        if t not in computed:
            self.violations.append(
                f"R[{t},{t}]: node {self.graph.nodes[t].name!r} is not computed in its own stage"
            )
        page_in = self._by_node(self.stages["M_in"][t])
        page_out = self._by_node(self.stages["M_out"][t])
        done_with = self._done_with(t)
        for k in sorted(computed | page_in.keys() | page_out.keys() | done_with.keys()):
            for i in page_in.get(k, ()):
                self._page_in(t, k, i)
            shared_bytes = 0
            if k in computed:
                if k in self.in_place:
                    shared_bytes = self.graph.shared_bytes(k, done_with.get(k, ()))
                self._compute(t, k, shared_bytes)
            for i in page_out.get(k, ()):
                self._page_out(t, k, i, shared_bytes)
            if k == stop:
                return
            for i in done_with.get(k, ()):
                if i in self.ram:
                    self.ram.remove(i)
                    self.ram_bytes -= self.sizes[i]

    def _by_node(self, tensors: Iterable[int]) -> dict[int, list[int]]:
        made_by: dict[int, list[int]] = {}
        for i in tensors:
            made_by.setdefault(self.node_of[i], []).append(i)
        return made_by

    def _done_with(self, t: int) -> dict[int, list[int]]:
        """Return for each step of stage `t` the tensors that may go after it.

        Of all that the stage may hold and the next one does not begin with, each at its last use,
        or at its own step where nothing in the stage uses it.
        """
        computed = self.stages["R"][t]
        held = self.ram.union(self.stages["M_in"][t])
        last_use: dict[int, int] = {}
        for k in computed:  # ascending, so that the last use stays
            held.update(self.outputs[k])
            for i in self.inputs[k]:
                last_use[i] = k
        done: dict[int, list[int]] = {}
        for i in held.difference(self.stages["S_RAM"][t + 1]):
            done.setdefault(last_use.get(i, self.node_of[i]), []).append(i)
        return done

    def _page_in(self, t: int, k: int, i: int) -> None:
        listed = self.stages["S_AUX"][t]
        if i not in self.aux or not _contains(listed, i):
            self.violations.append(
                f"M_in[{t},{i}]: {self._tensor(i)} is not on storage when stage {t} begins"
            )
        elif i in self.ram:
            self.violations.append(f"M_in[{t},{i}]: {self._tensor(i)} is in RAM already")
        else:
            self.ram.add(i)
            self.ram_bytes += self.sizes[i]
            self._record(t, k, self.ram_bytes)

    def _compute(self, t: int, k: int, shared_bytes: int) -> None:
        """Compute node `k`, whose outputs take so much over from inputs that die at its step."""
        ram = self.ram
        if not ram.issuperset(self.inputs[k]):
            tensors = self.graph.tensors
            missing = ", ".join(repr(tensors[i].name) for i in self.inputs[k] if i not in ram)
            node = self.graph.nodes[k].name
            self.violations.append(f"R[{t},{k}]: node {node!r} needs {missing} in RAM")
        self._record(t, k, self.ram_bytes + self.step_bytes[k] - shared_bytes)
        for i in self.outputs[k]:
            if i not in ram:
                ram.add(i)
                self.ram_bytes += self.sizes[i]

    def _page_out(self, t: int, k: int, i: int, shared_bytes: int) -> None:
        if i not in self.ram:
            self.violations.append(f"M_out[{t},{i}]: {self._tensor(i)} is not in RAM at step {k}")
            return
        self.aux.add(i)
        self._record(t, k, self.ram_bytes - shared_bytes)

    def _record(self, t: int, k: int, ram_bytes: int) -> None:
        point = MemoryPoint(t, k, ram_bytes)
        if ram_bytes > self.peak.ram_bytes:
            self.peak = point
        curve = self.curve
        if curve and curve[-1].node == k and curve[-1].stage == t:
            if ram_bytes > curve[-1].ram_bytes:
                curve[-1] = point
        else:
            curve.append(point)


def _contains(ordered: list[int], i: int) -> bool:
    place = bisect_left(ordered, i)
    return place < len(ordered) and ordered[place] == i
