"""From schedules to programs: what each stage does, in order, and entries that cannot be done."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from poetmodel.clock import check_time_limit, watched
from poetmodel.schedule.instructions import Instruction, Op, Program
from poetmodel.schedule.relations import Pair, Schedule, Span, pairs_of_spans, spans_of_pairs

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from poetmodel.schedule.homes import Entry, Homes

Rows = defaultdict[int, list[int]]
_AT_ONCE: Final = ("R", "M_out")
"""Relations with entries in the stage in which something is first made."""


class CompiledSchedule(NamedTuple):
    """A schedule as a program."""

    program: Program
    steps: list[Pair]
    """Stage and node of the step that each instruction belongs to."""
    faults: list[tuple[int, str]]
    """Entries that cannot be carried out, in words, each with the instruction that comes next."""


def compiled(homes: Homes, schedule: Schedule) -> CompiledSchedule:
    """Write a schedule down as the program that a device with blocking storage runs.

    It is Algorithm 2 of Patil et al., POET (ICML 2022); ``docs/concepts/deviations.md`` lists what
    differs.
    It has page-ins, the computation and page-outs of every step, and frees. A stage frees what the
    next one does not begin with: after its last use there, or at its own step where nothing in the
    stage uses it.

    Entries that cannot be carried out are faults, and left out: those of no such stage or index,
    before what they are about is first made, or that state does not allow, and moves and holdings
    of what is not there. The program of a valid schedule has the energy, time and peak RAM of its
    simulation. Whether a computation finds its inputs is left to the machine. It takes
    time in proportion to what changes from stage to stage.
    """
    compiler = _Compiler(homes, schedule)
    for t in range(len(homes.graph.nodes)):
        check_time_limit()
        compiler.stage(t)
    return CompiledSchedule(tuple(compiler.program), compiler.steps, compiler.faults)


class _Holding:
    """The tensors that a schedule lists in each stage, in RAM or on storage."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.first: Rows = defaultdict(list)
        self.last: Rows = defaultdict(list)
        for i, first, last in spans:
            self.first[first].append(i)
            self.last[last].append(i)
        self.listed: set[int] = set()
        self.missing: list[int] = []
        """Those of them that are not there, ascending."""

    def enter(self, t: int, there: Container[int]) -> list[int]:
        """Begin a stage, with so much there; return what is missing."""
        self.listed.difference_update(self.last.get(t - 1, ()))
        first = self.first.get(t)
        # What was there stays while it is listed: only new entries, and those missing before, can
        # be missing.
        if first or self.missing:
            self.listed.update(first or ())
            candidates = {*self.missing, *(first or ())} & self.listed
            self.missing = sorted(i for i in candidates if i not in there)
        return self.missing

    def is_next(self, t: int, i: int) -> bool:
        """Return whether the stage after `t`, the present one, lists a tensor."""
        goes_on = i in self.listed and i not in self.last.get(t, ())
        return goes_on or i in self.first.get(t + 1, ())


class _Compiler:
    """Content of RAM and storage from stage to stage, and the program so far."""

    def __init__(self, homes: Homes, schedule: Schedule) -> None:
        self.homes, self.graph, self.node_of = homes, homes.graph, homes.graph.node_of
        self.program: list[Instruction] = []
        self.steps: list[Pair] = []
        self.faults: list[tuple[int, str]] = [(0, fault) for fault in homes.unknown]
        unlawful = dict(homes.faults_of(schedule))
        for entry, fault in unlawful.items():
            self._object(entry, fault)
        self.computed = self._rows("R", schedule.R, {})
        self.kept = _Holding(self._spans("S_RAM", schedule.kept, unlawful))
        self.stored = _Holding(self._spans("S_AUX", schedule.stored, unlawful))
        self.paged_in = self._rows("M_in", schedule.M_in, unlawful)
        self.paged_out = self._rows("M_out", schedule.M_out, unlawful)
        self.in_ram: set[int] = set()
        self.on_storage = set(homes.stored)

    # -- entries by themselves ---------------------------------------------------------------

    def _rows(self, relation: str, pairs: Sequence[Pair], unlawful: Mapping[Entry, str]) -> Rows:
        """Return the indices of each stage, without those that cannot be."""
        rows: Rows = defaultdict(list)
        nodes, of_nodes = self.graph.nodes, relation == "R"
        for t, k in watched(pairs):
            if unlawful and (relation, t, k) in unlawful:
                continue
            fault = self._fault(relation, t, k)
            if not fault:
                rows[t].append(k)
                if of_nodes and k < t and not nodes[k].recomputable:
                    fault = f"node {nodes[k].name!r} must not be computed again"
            if fault:
                self._object((relation, t, k), fault)
        return rows

    def _spans(
        self, relation: str, spans: Sequence[Span], unlawful: Mapping[Entry, str]
    ) -> Sequence[Span]:
        """Return spans without the entries that cannot be."""
        about = {i for name, _, i in unlawful if name == relation}
        whole: list[Span] = []
        broken: list[Span] = []
        for span in spans:
            i, first, last = span
            at_fault = self._fault(relation, first, i) or self._fault(relation, last, i)
            (broken if at_fault or i in about else whole).append(span)
        pairs = []
        for t, i in pairs_of_spans(broken):
            if (relation, t, i) not in unlawful:
                fault = self._fault(relation, t, i)
                if fault:
                    self._object((relation, t, i), fault)
                else:
                    pairs.append((t, i))
        return [*whole, *spans_of_pairs(pairs)]

    def _fault(self, relation: str, t: int, k: int) -> str:
        """Return the faults of an entry by itself; empty if none."""
        nodes, made_by, of_nodes = self.graph.nodes, self.node_of, relation == "R"
        if not (0 <= t < len(nodes) and 0 <= k < len(nodes if of_nodes else made_by)):
            return "the graph has no such stage or index"
        first = k if of_nodes else made_by[k]
        if t < first or (t == first and relation not in _AT_ONCE):
            what = f"node {nodes[k].name!r}" if of_nodes else self._tensor(k)
            return f"{what} is first made in stage {first}"
        return ""

    # -- stages ------------------------------------------------------------------------------

    def stage(self, t: int) -> None:
        """Write down what a stage does, step by step."""
        computed = set(self.computed.get(t, ()))
        self._begin(t)
        if t not in computed:
            fault = f"node {self.graph.nodes[t].name!r} is not computed in its own stage"
            self._object(("R", t, t), fault)
        unable = {i: self._fault_of_page_in(t, i) for i in self.paged_in.get(t, ())}
        going = self._going(t, computed, [i for i, fault in unable.items() if not fault])
        page_in, page_out = self._by_node(unable), self._by_node(self.paged_out.get(t, ()))
        acts = computed.union(going, page_in, page_out)
        for k in sorted(acts) if len(acts) > 1 else acts:
            for i in page_in.get(k, ()):
                if unable[i]:
                    self._object(("M_in", t, i), unable[i])
                else:
                    self.program.append(Instruction(Op.PAGE_IN, i))
            self._step(t, k, page_out.get(k, ()), going.get(k, ()), is_computed=k in computed)
            self.steps.extend([(t, k)] * (len(self.program) - len(self.steps)))
        for gone in going.values():
            self.in_ram.difference_update(gone)

    def _begin(self, t: int) -> None:
        """Enter a stage; report tensors that it claims in RAM or on storage and that are absent."""
        for i in self.kept.enter(t, self.in_ram):
            fault = f"{self._tensor(i)} is not in RAM when stage {t} begins"
            self._object(("S_RAM", t, i), fault)
        for i in self.stored.enter(t, self.on_storage):
            fault = f"{self._tensor(i)} is not on storage when stage {t} begins"
            self._object(("S_AUX", t, i), fault)

    def _going(self, t: int, computed: Iterable[int], brought: list[int]) -> dict[int, list[int]]:
        """Bring tensors into RAM; return for each step those that go after it, ascending."""
        last_use: dict[int, int] = {}
        for k in sorted(computed):  # ascending, so that the last use stays
            brought += self.homes.outputs[k]
            last_use.update(dict.fromkeys(self.homes.inputs[k], k))
        going = {i for i in brought if not self.kept.is_next(t, i)}
        going.update(self.in_ram.intersection(self.kept.last.get(t, ())))
        self.in_ram.update(brought)
        gone_after: dict[int, list[int]] = {}
        for i in sorted(going):
            gone_after.setdefault(last_use.get(i, self.node_of[i]), []).append(i)
        return gone_after

    def _step(
        self,
        t: int,
        k: int,
        leaving: Sequence[int],
        going: Sequence[int],
        *,
        is_computed: bool,
    ) -> None:
        """Compute a node and page tensors out; free those whose last step this is."""
        homes, append = self.homes, self.program.append
        if is_computed:
            append(Instruction(Op.COMPUTE, k))
            if going:
                ending = homes.replaced.get(k, ())  # the replacement is in its place
                going = [i for i in going if i not in ending]
                touched = {*homes.inputs[k], *homes.outputs[k]}.difference(leaving)
                for i in going:
                    if i in touched:
                        append(Instruction(Op.FREE, i))
                going = [i for i in going if i not in touched]
        for i in leaving:
            if i in self.in_ram:
                append(Instruction(Op.PAGE_OUT, i))
                self.on_storage.add(i)
            else:
                self._object(("M_out", t, i), f"{self._tensor(i)} is not in RAM at step {k}")
            if i in going:
                append(Instruction(Op.FREE, i))
        for i in going:
            if i not in leaving:
                append(Instruction(Op.FREE, i))

    def _fault_of_page_in(self, t: int, i: int) -> str:
        if i not in self.on_storage or i not in self.stored.listed:
            return f"{self._tensor(i)} is not on storage when stage {t} begins"
        return f"{self._tensor(i)} is in RAM already" if i in self.in_ram else ""

    def _by_node(self, tensors: Iterable[int]) -> dict[int, list[int]]:
        made_by: dict[int, list[int]] = {}
        for i in tensors:
            made_by.setdefault(self.node_of[i], []).append(i)
        return made_by

    def _object(self, entry: Entry, fault: str) -> None:
        relation, t, k = entry
        self.faults.append((len(self.program), f"{relation}[{t},{k}]: {fault}"))

    def _tensor(self, i: int) -> str:
        return f"tensor {self.graph.tensors[i].name!r}"
