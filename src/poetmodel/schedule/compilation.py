"""Compilation of schedules to programs, with faults for invalid or missing entries."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from poetmodel.clock import check_time_limit, iterate_in_time
from poetmodel.schedule.instructions import Instruction, Op, Program
from poetmodel.schedule.relations import Pair, Schedule, Span, pairs_of_spans, spans_of_pairs

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from poetmodel.schedule.homes import Entry, Homes

Rows = defaultdict[int, list[int]]
"""Indices of nodes or tensors, by stage."""
_POSSIBLE_IN_FIRST_STAGE: Final = ("R", "M_out")
"""Relations that may have entries in the stage of a tensor's or node's first computation."""


class CompiledSchedule(NamedTuple):
    """The program of a schedule, and the faults of its entries."""

    program: Program
    """The instructions of the schedule, without omitted entries; see `compile_schedule`."""
    steps: list[Pair]
    """Stage and node of the step that each instruction belongs to."""
    faults: list[tuple[int, str]]
    """Messages of invalid or missing entries, each with the position of the next instruction."""


def compile_schedule(homes: Homes, schedule: Schedule) -> CompiledSchedule:
    """Compile a schedule to the program that a device with blocking storage executes.

    This is Algorithm 2 of Patil et al., POET (ICML 2022); ``docs/concepts/deviations.md`` lists the
    differences. The step of a node has the page-ins of its outputs, its computation, and the
    page-outs of its outputs. A tensor that ``S_RAM`` does not list in the next stage is freed after
    its last use in the stage, or at its node's step without one; state not at the step that
    replaces it. Entries that cannot be executed become faults and are omitted; forbidden or missing
    decisions are faults, too. The program of a valid schedule has the energy, time and peak RAM of
    its simulation.
    """
    compiler = _Compiler(homes, schedule)
    for t in range(len(homes.graph.nodes)):
        check_time_limit()
        compiler.compile_stage(t)
    return CompiledSchedule(tuple(compiler.program), compiler.steps, compiler.faults)


class _PresenceTracker:
    """Tracks the tensors that one relation, ``S_RAM`` or ``S_AUX``, lists in the current stage."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.tensors_from: Rows = defaultdict(list)
        """Tensors of the spans that begin with each stage."""
        self.tensors_until: Rows = defaultdict(list)
        """Tensors of the spans that end with each stage."""
        for i, first_stage, last_stage in spans:
            self.tensors_from[first_stage].append(i)
            self.tensors_until[last_stage].append(i)
        self.listed_tensors: set[int] = set()
        """Tensors that the schedule lists in the current stage."""
        self.missing_tensors: list[int] = []
        """Listed tensors that are absent, ascending."""

    def enter_stage(self, t: int, present_tensors: Container[int]) -> list[int]:
        """Move to the next stage, `t`; return its listed tensors that are absent."""
        self.listed_tensors.difference_update(self.tensors_until.get(t - 1, ()))
        new_tensors = self.tensors_from.get(t)
        # A listed tensor that is present is not freed. So only tensors of new spans, and tensors
        # that were missing before, can be missing.
        if new_tensors or self.missing_tensors:
            self.listed_tensors.update(new_tensors or ())
            candidates = {*self.missing_tensors, *(new_tensors or ())} & self.listed_tensors
            self.missing_tensors = sorted(i for i in candidates if i not in present_tensors)
        return self.missing_tensors

    def unlisted_next(self, t: int, tensors: Iterable[int]) -> set[int]:
        """Return those of `tensors` that stage ``t + 1`` does not list; `t` is the current one."""
        unlisted = set(tensors).difference(self.tensors_from.get(t + 1, ()))
        return unlisted - (self.listed_tensors & unlisted).difference(self.tensors_until.get(t, ()))


class _Compiler:
    """Compiles stages in ascending order, and tracks the content of RAM and storage."""

    def __init__(self, homes: Homes, schedule: Schedule) -> None:
        self.homes, self.graph, self.node_of = homes, homes.graph, homes.graph.node_of
        self.program: list[Instruction] = []
        self.steps: list[Pair] = []
        """Step of each instruction of `program`."""
        self.faults: list[tuple[int, str]] = [(0, fault) for fault in homes.resident_faults]
        state_faults = dict(homes.schedule_faults(schedule))
        for entry, fault in state_faults.items():
            self._add_fault(entry, fault)
        # The valid entries of each relation, by stage.
        self.computed = self._valid_rows("R", schedule.R, {})
        self.ram_tracker = _PresenceTracker(self._valid_spans("S_RAM", schedule.kept, state_faults))
        self.storage_tracker = _PresenceTracker(
            self._valid_spans("S_AUX", schedule.stored, state_faults)
        )
        self.paged_in = self._valid_rows("M_in", schedule.M_in, state_faults)
        self.paged_out = self._valid_rows("M_out", schedule.M_out, state_faults)
        self.in_ram: set[int] = set()
        """Tensors in RAM after the compiled stages, and those that the current stage adds."""
        self.on_storage = set(homes.stored)
        """Tensors on storage after the compiled steps."""

    # -- entries -----------------------------------------------------------------------------

    def _valid_rows(
        self, relation: str, pairs: Sequence[Pair], state_faults: Mapping[Entry, str]
    ) -> Rows:
        """Return valid indices by stage; add a fault per invalid entry that `state_faults` lacks.

        A forbidden recomputation is returned although it adds a fault.
        """
        rows: Rows = defaultdict(list)
        nodes, lists_nodes = self.graph.nodes, relation == "R"
        for t, index in iterate_in_time(pairs):
            if state_faults and (relation, t, index) in state_faults:
                continue
            fault = self._entry_fault(relation, t, index)
            if not fault:
                rows[t].append(index)
                if lists_nodes and index < t and not nodes[index].recomputable:
                    fault = f"node {nodes[index].name!r} must not be computed again"
            if fault:
                self._add_fault((relation, t, index), fault)
        return rows

    def _valid_spans(
        self, relation: str, spans: Sequence[Span], state_faults: Mapping[Entry, str]
    ) -> Sequence[Span]:
        """Return spans of valid entries; add a fault per invalid one that `state_faults` lacks."""
        faulty_tensors = {i for name, _, i in state_faults if name == relation}
        valid_spans: list[Span] = []
        suspect_spans: list[Span] = []
        for span in spans:
            i, first_stage, last_stage = span
            fault = self._entry_fault(relation, first_stage, i) or self._entry_fault(
                relation, last_stage, i
            )
            (suspect_spans if fault or i in faulty_tensors else valid_spans).append(span)
        pairs = []
        for t, i in pairs_of_spans(suspect_spans):
            if (relation, t, i) not in state_faults:
                fault = self._entry_fault(relation, t, i)
                if fault:
                    self._add_fault((relation, t, i), fault)
                else:
                    pairs.append((t, i))
        return [*valid_spans, *spans_of_pairs(pairs)]

    def _entry_fault(self, relation: str, t: int, index: int) -> str:
        """Return the reason why an entry's stage or index is invalid; "" if both are valid."""
        nodes, node_of, lists_nodes = self.graph.nodes, self.node_of, relation == "R"
        if not (0 <= t < len(nodes) and 0 <= index < len(nodes if lists_nodes else node_of)):
            return "the graph has no such stage or index"
        first_stage = index if lists_nodes else node_of[index]
        if t < first_stage or (t == first_stage and relation not in _POSSIBLE_IN_FIRST_STAGE):
            if lists_nodes:
                return f"node {nodes[index].name!r} is first computed in stage {first_stage}"
            return f"{self._tensor_label(index)} is first made in stage {first_stage}"
        return ""

    # -- stages ------------------------------------------------------------------------------

    def compile_stage(self, t: int) -> None:
        """Append the instructions and faults of stage `t`, the next one."""
        computed_nodes = set(self.computed.get(t, ()))
        self._enter_stage(t)
        if t not in computed_nodes:
            fault = f"node {self.graph.nodes[t].name!r} is not computed in its own stage"
            self._add_fault(("R", t, t), fault)
        page_in_faults = {i: self._page_in_fault(t, i) for i in self.paged_in.get(t, ())}
        frees = self._frees_by_step(
            t, computed_nodes, [i for i, fault in page_in_faults.items() if not fault]
        )
        page_ins_of_node, page_outs_of_node = (
            self._group_by_node(page_in_faults),
            self._group_by_node(self.paged_out.get(t, ())),
        )
        active_steps = computed_nodes.union(frees, page_ins_of_node, page_outs_of_node)
        for k in sorted(active_steps) if len(active_steps) > 1 else active_steps:
            for i in page_ins_of_node.get(k, ()):
                if page_in_faults[i]:
                    self._add_fault(("M_in", t, i), page_in_faults[i])
                else:
                    self.program.append(Instruction(Op.PAGE_IN, i))
            self._compile_step(
                t,
                k,
                page_outs_of_node.get(k, ()),
                frees.get(k, ()),
                is_computed=k in computed_nodes,
            )
            self.steps.extend([(t, k)] * (len(self.program) - len(self.steps)))
        for freed_tensors in frees.values():
            self.in_ram.difference_update(freed_tensors)

    def _enter_stage(self, t: int) -> None:
        """Move both trackers to stage `t`; add a fault for each listed tensor that is absent."""
        for i in self.ram_tracker.enter_stage(t, self.in_ram):
            fault = f"{self._tensor_label(i)} is not in RAM when stage {t} begins"
            self._add_fault(("S_RAM", t, i), fault)
        for i in self.storage_tracker.enter_stage(t, self.on_storage):
            fault = f"{self._tensor_label(i)} is not on storage when stage {t} begins"
            self._add_fault(("S_AUX", t, i), fault)

    def _frees_by_step(
        self, t: int, computed_nodes: Iterable[int], paged_in_tensors: list[int]
    ) -> dict[int, list[int]]:
        """Return the tensors to free in stage `t`, ascending, by the node of the freeing step.

        Adds tensors to `in_ram`; the caller removes those that are freed.
        """
        last_use_of: dict[int, int] = {}
        new_tensors = list(paged_in_tensors)
        for k in sorted(computed_nodes):  # Ascending, so that later uses overwrite earlier ones.
            new_tensors += self.homes.outputs[k]
            last_use_of.update(dict.fromkeys(self.homes.inputs[k], k))
        freed_tensors = self.ram_tracker.unlisted_next(t, new_tensors)
        freed_tensors.update(self.in_ram.intersection(self.ram_tracker.tensors_until.get(t, ())))
        self.in_ram.update(new_tensors)
        frees_after: dict[int, list[int]] = {}
        for i in sorted(freed_tensors):
            frees_after.setdefault(last_use_of.get(i, self.node_of[i]), []).append(i)
        return frees_after

    def _compile_step(
        self,
        t: int,
        k: int,
        page_outs: Sequence[int],
        frees: Sequence[int],
        *,
        is_computed: bool,
    ) -> None:
        """Append a step: its computation if `is_computed`, and its page-outs and frees."""
        homes, append = self.homes, self.program.append
        if is_computed:
            append(Instruction(Op.COMPUTE, k))
            if frees:
                # Replacements use the memory of the state that they replace.
                replaced_tensors = homes.replaced.get(k, ())
                frees = [i for i in frees if i not in replaced_tensors]
                step_tensors = {*homes.inputs[k], *homes.outputs[k]}.difference(page_outs)
                for i in frees:
                    if i in step_tensors:
                        append(Instruction(Op.FREE, i))
                frees = [i for i in frees if i not in step_tensors]
        for i in page_outs:
            if i in self.in_ram:
                append(Instruction(Op.PAGE_OUT, i))
                self.on_storage.add(i)
            else:
                self._add_fault(
                    ("M_out", t, i), f"{self._tensor_label(i)} is not in RAM at step {k}"
                )
            if i in frees:
                append(Instruction(Op.FREE, i))
        for i in frees:
            if i not in page_outs:
                append(Instruction(Op.FREE, i))

    def _page_in_fault(self, t: int, i: int) -> str:
        """Return the reason why a page-in is invalid in stage `t`; "" if it is valid."""
        if i not in self.on_storage or i not in self.storage_tracker.listed_tensors:
            return f"{self._tensor_label(i)} is not on storage when stage {t} begins"
        return f"{self._tensor_label(i)} is in RAM already" if i in self.in_ram else ""

    def _group_by_node(self, tensors: Iterable[int]) -> dict[int, list[int]]:
        tensors_of_node: dict[int, list[int]] = {}
        for i in tensors:
            tensors_of_node.setdefault(self.node_of[i], []).append(i)
        return tensors_of_node

    def _add_fault(self, entry: Entry, fault: str) -> None:
        relation, t, index = entry
        self.faults.append((len(self.program), f"{relation}[{t},{index}]: {fault}"))

    def _tensor_label(self, i: int) -> str:
        return f"tensor {self.graph.tensors[i].name!r}"
