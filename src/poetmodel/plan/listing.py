"""A plan as a text that a person can follow, line by line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from poetmodel.device import StorageMode
from poetmodel.schedule.instructions import Instruction, Op
from poetmodel.schedule.machine import BEFORE, Content, Moment
from poetmodel.units import ESTIMATES, format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.graph import Graph
    from poetmodel.plan.arena import Arena, Placed
    from poetmodel.plan.check import PlanCheck
    from poetmodel.plan.program import Plan

LONGEST_NAME: Final = 48
"""Names up to this length are aligned."""
MARK: Final = "!"
"""Begins the lines at which the core stands still."""


def plan_listing(graph: Graph, plan: Plan, check: PlanCheck, arena: Arena | None = None) -> str:
    """Return a plan as lines of text; `check` is what `check_plan` found, with costs.

    After the figures of the whole plan comes one line per instruction: its number, the core's clock
    when it comes up, RAM after it, what it does to what, how long that takes, and where on the bus.
    Lines at which the core stands still begin with ``!``. With an arena, what is made has its
    offset.
    """
    lines = [*_heading(graph, plan, check, arena), "", *_lines(graph, plan, check, arena)]
    if check.violations:
        lines += ["", "not valid:", *(f"  {violation}" for violation in check.violations)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _heading(graph: Graph, plan: Plan, check: PlanCheck, arena: Arena | None) -> Iterator[str]:
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
    at = "" if check.peak_position is None else f" at instruction {check.peak_position}"
    yield f"  RAM     peak {format_bytes(check.peak_ram_bytes)}{at}{budget}"
    if arena is not None:
        yield f"  arena   {format_bytes(arena.bytes)}, {fragmentation_in_words(arena)}"
    homes = homes_in_words(graph, plan)
    if homes:
        yield f"  state   {homes}"


def fragmentation_in_words(arena: Arena) -> str:
    """Return the factor by which a block is larger than it must be."""
    bound = f"lower bound {format_bytes(arena.lower_bound_bytes)}"
    return f"{bound}, fragmentation {arena.fragmentation:.2%}"


def homes_in_words(graph: Graph, plan: Plan) -> str:
    """Return the bytes of state with a home in RAM, and on storage; empty without state."""
    resident, sizes = plan.resident or (), graph.tensor_bytes
    homes = {
        "resident": [sizes[i] for i in graph.state_tensors if i in resident],
        "read on storage" if plan.memory_mapped else "on storage": [
            sizes[i] for i in graph.state_tensors if i not in resident
        ],
    }
    return ", ".join(
        f"{len(kept)} tensor{'s' if len(kept) > 1 else ''} of {format_bytes(sum(kept))} {home}"
        for home, kept in homes.items()
        if kept
    )


def _lines(graph: Graph, plan: Plan, check: PlanCheck, arena: Arena | None) -> Iterator[str]:
    factor, unit = _unit(check.makespan_s or 0.0)
    head = f"time [{unit}]"
    words = Words(graph, plan)
    names = [words.name(step) for step in plan.program]
    width = max((len(name) for name in names if len(name) <= LONGEST_NAME), default=0)
    times = [f"{moment.issued_s / factor:,.3f}" for moment in check.moments]
    column = max(map(len, [head, *times]))
    yield f"    {'#':>5}  {head:>{column}}  {'RAM after':>11}"
    places = _Places(graph, plan, arena)
    computed: set[Instruction] = set()
    for position, (step, moment) in enumerate(zip(plan.program, check.moments, strict=True)):
        verb = words.verb(step, again=step in computed)
        computed.add(step)
        stalls = step.op == Op.WAIT and moment.end_s > moment.start_s
        remark = words.remark(step, moment) + places.remark(position, step)
        if position == check.peak_position:
            remark += f"  <- peak {format_bytes(moment.high_bytes)}"
        yield (
            f"  {MARK if stalls else ' '} {position:>5}  {times[position]:>{column}}  "
            f"{format_bytes(moment.ram_bytes):>11}  {verb:<9}  {names[position]:<{width}}  {remark}"
        )


class _Places:
    """Where what the instructions of a plan make lies, in words."""

    def __init__(self, graph: Graph, plan: Plan, arena: Arena | None) -> None:
        self.graph = graph
        self.held = [graph.node_of[i] for i in plan.resident or ()]
        self.begun: dict[int, list[Placed]] = {}
        for copy in () if arena is None else arena.offsets:
            self.begun.setdefault(copy.position, []).append(copy)

    def remark(self, position: int, step: Instruction) -> str:
        """Return the offsets of what an instruction makes, or holds; empty without any."""
        begun = self.begun.get(position, [])
        if step.op == Op.COMPUTE and step.index in self.held:
            held = self.graph.outputs_of[step.index]
            begun = [copy for copy in self.begun.get(BEFORE, []) if copy.index in held]
        if len(begun) == 1 and begun[0].content == Content.OUTPUT:
            return f", at {begun[0].offset:,}"
        return "".join(f", {self._name(copy)} at {copy.offset:,}" for copy in begun)

    def _name(self, copy: Placed) -> str:
        return (
            "workspace"
            if copy.content == Content.WORKSPACE
            else self.graph.tensors[copy.index].name
        )


class Words:
    """Actions of a plan's instructions, in words."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.graph = graph
        self.dma = plan.mode == StorageMode.DMA
        self.first_reads = plan.first_reads(graph)
        self.held = {k for k, node in enumerate(graph.nodes) if node.is_state}
        self.held -= self.first_reads.keys()
        self.resident = plan.resident or ()
        self.mapped = plan.memory_mapped

    def verb(self, step: Instruction, *, again: bool) -> str:
        """Return the action; `again` says that it was done before."""
        op, index = step
        if op == Op.COMPUTE and index in self.first_reads:
            return "read"
        if op == Op.COMPUTE and index in self.held:
            return "hold"
        if op == Op.COMPUTE and again:
            return "recompute"
        return "wait for" if op == Op.WAIT else op.replace("_", " ")

    def name(self, step: Instruction) -> str:
        """Return the object of the action."""
        known = self.graph.nodes if step.op == Op.COMPUTE else self.graph.tensors
        if 0 <= step.index < len(known):
            return known[step.index].name
        return f"number {step.index}"

    def remark(self, step: Instruction, moment: Moment) -> str:
        """Return the duration, and further remarks."""
        op, index = step
        time = format_seconds(moment.end_s - moment.start_s)
        if op == Op.COMPUTE and index in self.first_reads:
            return f"from storage, {self._moved(self.first_reads[index], moment)}"
        if op == Op.COMPUTE and index in self.held:
            return self._format_offsets(index)
        if op == Op.COMPUTE:
            return f"takes {time}{self._in_place(index, moment)}"
        if op == Op.WAIT:
            return f"STALL {time}" if moment.end_s > moment.start_s else "done already"
        tensors = self.graph.tensors
        if not 0 <= index < len(tensors):
            return "?"
        old = tensors[index].replaces
        if op == Op.FREE:
            size = 0 if old is not None and self.mapped else tensors[index].bytes
            return f"gives {format_bytes(size)} back"
        written = f"writes {old} back, " if old is not None else ""
        return f"{written}{self._moved(index, moment)}"

    def _moved(self, i: int, moment: Moment) -> str:
        size = format_bytes(self.graph.tensor_bytes[i])
        delay = moment.start_s - moment.issued_s
        after = f", after {format_seconds(delay)} for the bus" if self.dma and delay > 0 else ""
        time = format_seconds(moment.end_s - moment.start_s)
        return f"{size} {'beside the core ' if self.dma else ''}in {time}{after}"

    def _format_offsets(self, k: int) -> str:
        (i,) = self.graph.outputs_of[k]
        size = format_bytes(self.graph.tensor_bytes[i])
        return f"{size}, {'resident' if i in self.resident else 'read on storage'}"

    def _in_place(self, k: int, moment: Moment) -> str:
        tensors = self.graph.tensors
        pairs = [pair for pair in self.graph.in_place_of[k] if pair[1] in moment.in_place]
        return "".join(f", {tensors[y].name} in place of {tensors[x].name}" for y, x in pairs)


def _unit(longest_s: float) -> tuple[float, str]:
    """Return the unit [s] in which the longest time has at least three digits before the point."""
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
    fitting = (unit for unit in units if longest_s >= 100 * unit[0])
    return next(fitting, units[-1] if longest_s > 0 else units[0])
