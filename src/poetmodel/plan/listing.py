"""Listings of plans: text with one line per instruction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from poetmodel.device import StorageMode
from poetmodel.schedule.instructions import Instruction, Op
from poetmodel.schedule.machine import BEFORE, Content, InstructionRecord
from poetmodel.units import ESTIMATES, format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.graph import Graph
    from poetmodel.plan.arena import Arena, CopyOffset
    from poetmodel.plan.check import PlanCheck
    from poetmodel.plan.program import Plan

MAX_ALIGNED_NAME_LENGTH: Final = 48
"""Maximum length of names that are padded to a common width."""
STALL_MARK: Final = "!"
"""Mark in the lines of instructions at which the core stalls."""


def plan_listing(graph: Graph, plan: Plan, check: PlanCheck, arena: Arena | None = None) -> str:
    """Return a plan as text: metrics, then a line per instruction with clock, RAM and a remark.

    ``!`` marks waits at which the core stalls, ``<- peak`` the first instruction with the peak RAM.
    Violations follow. Without costs, times are 0.
    """
    lines = [
        *_heading_lines(graph, plan, check, arena),
        "",
        *_instruction_lines(graph, plan, check, arena),
    ]
    if check.violations:
        lines += ["", "not valid:", *(f"  {violation}" for violation in check.violations)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _heading_lines(
    graph: Graph, plan: Plan, check: PlanCheck, arena: Arena | None
) -> Iterator[str]:
    """Yield a title, then lines with time, energy, peak RAM, arena and homes of state."""
    device = f" on {plan.device}" if plan.device else ""
    yield (
        f"Plan for {graph.name}{device}, {plan.mode} transfers: {len(plan.program)} instructions, "
        f"{len(graph.nodes)} nodes{'' if check.makespan_s is None else f' ({ESTIMATES})'}"
    )
    if check.makespan_s is not None:
        stall = f", stall {format_seconds(check.stall_s or 0.0)}"
        yield (
            f"  time    {format_seconds(check.makespan_s)}: compute "
            f"{format_seconds(check.compute_s or 0.0)}, transfers "
            f"{format_seconds(check.transfer_s or 0.0)}"
            f"{stall if plan.mode == StorageMode.DMA else ''}"
        )
        yield f"  energy  {format_joules(check.energy_j or 0.0)}"
    budget = ""
    if plan.ram_budget_bytes is not None:
        budget = f", of a budget of {format_bytes(plan.ram_budget_bytes)}"
    position_text = "" if check.peak_position is None else f" at instruction {check.peak_position}"
    yield f"  RAM     peak {format_bytes(check.peak_ram_bytes)}{position_text}{budget}"
    if arena is not None:
        yield f"  arena   {format_bytes(arena.bytes)}, {describe_fragmentation(arena)}"
    homes = describe_homes(graph, plan)
    if homes:
        yield f"  state   {homes}"


def describe_fragmentation(arena: Arena) -> str:
    """Return a phrase with an arena's lower bound and fragmentation."""
    bound = f"lower bound {format_bytes(arena.lower_bound_bytes)}"
    return f"{bound}, fragmentation {arena.fragmentation_ratio:.2%}"


def describe_homes(graph: Graph, plan: Plan) -> str:
    """Return a phrase with the number and bytes of state tensors by home; "" without state."""
    resident, sizes = plan.resident or (), graph.tensor_bytes
    homes = {
        "resident": [sizes[i] for i in graph.state_tensors if i in resident],
        "read on storage" if plan.memory_mapped else "on storage": [
            sizes[i] for i in graph.state_tensors if i not in resident
        ],
    }
    return ", ".join(
        f"{len(state)} tensor{'s' if len(state) > 1 else ''} of {format_bytes(sum(state))} {home}"
        for home, state in homes.items()
        if state
    )


def _instruction_lines(
    graph: Graph, plan: Plan, check: PlanCheck, arena: Arena | None
) -> Iterator[str]:
    """Yield the table head and one line per instruction."""
    factor, unit = _time_unit(check.makespan_s or 0.0)
    time_head = f"time [{unit}]"
    text = InstructionText(graph, plan)
    names = [text.format_name(instruction) for instruction in plan.program]
    width = max((len(name) for name in names if len(name) <= MAX_ALIGNED_NAME_LENGTH), default=0)
    times = [f"{record.issued_s / factor:,.3f}" for record in check.records]
    time_width = max(map(len, [time_head, *times]))
    yield f"    {'#':>5}  {time_head:>{time_width}}  {'RAM after':>11}"
    offset_remarks = _OffsetRemarks(graph, plan, arena)
    executed_instructions: set[Instruction] = set()
    for position, (instruction, record) in enumerate(zip(plan.program, check.records, strict=True)):
        verb = text.format_verb(instruction, is_repeated=instruction in executed_instructions)
        executed_instructions.add(instruction)
        has_stall = instruction.op == Op.WAIT and record.end_s > record.start_s
        remark = text.format_remark(instruction, record) + offset_remarks.format_offsets(
            position, instruction
        )
        if position == check.peak_position:
            remark += f"  <- peak {format_bytes(record.peak_bytes)}"
        yield (
            f"  {STALL_MARK if has_stall else ' '} {position:>5}  {times[position]:>{time_width}}  "
            f"{format_bytes(record.ram_bytes):>11}  {verb:<9}  {names[position]:<{width}}  {remark}"
        )


class _OffsetRemarks:
    """Remarks on the offsets of the copies that instructions make."""

    def __init__(self, graph: Graph, plan: Plan, arena: Arena | None) -> None:
        self.graph = graph
        self.resident_nodes = [graph.node_of[i] for i in plan.resident or ()]
        self.copies_of_position: dict[int, list[CopyOffset]] = {}
        for copy in () if arena is None else arena.offsets:
            self.copies_of_position.setdefault(copy.position, []).append(copy)

    def format_offsets(self, position: int, instruction: Instruction) -> str:
        """Return a remark on the offsets of the copies that an instruction makes, or ""."""
        copies = self.copies_of_position.get(position, [])
        if instruction.op == Op.COMPUTE and instruction.index in self.resident_nodes:
            outputs = self.graph.outputs_of[instruction.index]
            copies = [
                copy for copy in self.copies_of_position.get(BEFORE, []) if copy.index in outputs
            ]
        if len(copies) == 1 and copies[0].content == Content.OUTPUT:
            return f", at {copies[0].offset:,}"
        return "".join(f", {self._copy_name(copy)} at {copy.offset:,}" for copy in copies)

    def _copy_name(self, copy: CopyOffset) -> str:
        return (
            "workspace"
            if copy.content == Content.WORKSPACE
            else self.graph.tensors[copy.index].name
        )


class InstructionText:
    """Verbs, names and remarks of a plan's instructions."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.graph = graph
        self.is_dma = plan.mode == StorageMode.DMA
        self.first_reads = plan.first_reads(graph)
        self.unmoved_state_nodes = {
            k for k, node in enumerate(graph.nodes) if node.is_state and k not in self.first_reads
        }
        """State nodes whose ``compute`` moves no bytes."""
        self.resident = plan.resident or ()
        self.is_mapped = plan.memory_mapped

    def format_verb(self, instruction: Instruction, *, is_repeated: bool) -> str:
        """Return the verb of an instruction, such as ``page in``, ``wait for`` or ``recompute``.

        To compute a state node is to ``read`` it from storage, or else to ``hold`` it.
        """
        op, index = instruction
        if op == Op.COMPUTE and index in self.first_reads:
            return "read"
        if op == Op.COMPUTE and index in self.unmoved_state_nodes:
            return "hold"
        if op == Op.COMPUTE and is_repeated:
            return "recompute"
        return "wait for" if op == Op.WAIT else op.replace("_", " ")

    def format_name(self, instruction: Instruction) -> str:
        """Return the name of the node or tensor; ``number`` and index if the graph lacks it."""
        items = self.graph.nodes if instruction.op == Op.COMPUTE else self.graph.tensors
        if 0 <= instruction.index < len(items):
            return items[instruction.index].name
        return f"number {instruction.index}"

    def format_remark(self, instruction: Instruction, record: InstructionRecord) -> str:
        """Return the remark: duration, bytes, home, in-place outputs or stall; "?" if unknown."""
        op, index = instruction
        duration_text = format_seconds(record.end_s - record.start_s)
        items = self.graph.nodes if op == Op.COMPUTE else self.graph.tensors
        if not (op == Op.WAIT or 0 <= index < len(items)):
            return "?"
        if op == Op.COMPUTE and index in self.first_reads:
            return f"from storage, {self._format_transfer(self.first_reads[index], record)}"
        if op == Op.COMPUTE and index in self.unmoved_state_nodes:
            return self._format_state(index)
        if op == Op.COMPUTE:
            return f"takes {duration_text}{self._format_in_place(index, record)}"
        if op == Op.WAIT:
            return f"STALL {duration_text}" if record.end_s > record.start_s else "done already"
        tensors = self.graph.tensors
        state_name = tensors[index].replaces
        if op == Op.FREE:
            size = 0 if state_name is not None and self.is_mapped else tensors[index].bytes
            return f"frees {format_bytes(size)}"
        write_back_text = f"writes {state_name} back, " if state_name is not None else ""
        return f"{write_back_text}{self._format_transfer(index, record)}"

    def _format_transfer(self, i: int, record: InstructionRecord) -> str:
        """Return bytes and duration of a transfer of tensor `i`, and its wait for the bus."""
        size = format_bytes(self.graph.tensor_bytes[i])
        delay_s = record.start_s - record.issued_s
        delay_text = (
            f", after {format_seconds(delay_s)} for the bus" if self.is_dma and delay_s > 0 else ""
        )
        duration_text = format_seconds(record.end_s - record.start_s)
        return f"{size} {'beside the core ' if self.is_dma else ''}in {duration_text}{delay_text}"

    def _format_state(self, k: int) -> str:
        (i,) = self.graph.outputs_of[k]
        size = format_bytes(self.graph.tensor_bytes[i])
        return f"{size}, {'resident' if i in self.resident else 'read on storage'}"

    def _format_in_place(self, k: int, record: InstructionRecord) -> str:
        tensors = self.graph.tensors
        pairs = [pair for pair in self.graph.in_place_of[k] if pair[1] in record.in_place]
        return "".join(
            f", {tensors[output].name} in place of {tensors[overwritten].name}"
            for output, overwritten in pairs
        )


def _time_unit(longest_s: float) -> tuple[float, str]:
    """Return the size [s] and name of the largest unit in which `longest_s` is at least 100."""
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
    fitting_units = (unit for unit in units if longest_s >= 100 * unit[0])
    return next(fitting_units, units[-1] if longest_s > 0 else units[0])
