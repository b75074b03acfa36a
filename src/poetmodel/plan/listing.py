"""A plan as a text that a person can follow, line by line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from poetmodel.device import StorageMode
from poetmodel.plan.program import Op
from poetmodel.units import format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.graph import Graph
    from poetmodel.plan.program import Instruction, Plan
    from poetmodel.plan.simulation import Moment, PlanCheck

LONGEST_NAME: Final = 48
"""Names up to this length are aligned."""
MARK: Final = "!"
"""Begins the lines at which the core stands still."""


def plan_listing(graph: Graph, plan: Plan, check: PlanCheck) -> str:
    """Return a plan as lines of text; `check` is what `check_plan` found, with costs.

    After the figures of the whole plan comes one line per instruction: its number, the core's clock
    when it comes up, RAM after it, what it does to what, how long that takes, and where on the bus.
    Lines at which the core stands still begin with ``!``.
    """
    lines = [*_heading(graph, plan, check), "", *_lines(graph, plan, check)]
    if check.violations:
        lines += ["", "not valid:", *(f"  {violation}" for violation in check.violations)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _heading(graph: Graph, plan: Plan, check: PlanCheck) -> Iterator[str]:
    place = f" on {plan.device}" if plan.device else ""
    yield (
        f"Plan for {graph.name}{place}, {plan.mode} transfers: {len(plan.program)} instructions, "
        f"{len(graph.nodes)} nodes"
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


def _lines(graph: Graph, plan: Plan, check: PlanCheck) -> Iterator[str]:
    factor, unit = _unit(check.makespan_s or 0.0)
    head = f"time [{unit}]"
    names = [_name(graph, step) for step in plan.program]
    width = max((len(name) for name in names if len(name) <= LONGEST_NAME), default=0)
    times = [f"{moment.issued_s / factor:,.3f}" for moment in check.moments]
    column = max(map(len, [head, *times]))
    yield f"    {'#':>5}  {head:>{column}}  {'RAM after':>11}"
    computed: set[int] = set()
    for position, (step, moment) in enumerate(zip(plan.program, check.moments, strict=True)):
        verb = "wait for" if step.op == Op.WAIT else step.op.replace("_", " ")
        if step.op == Op.COMPUTE:
            verb = "recompute" if step.index in computed else verb
            computed.add(step.index)
        stalls = step.op == Op.WAIT and moment.end_s > moment.start_s
        remark = _remark(graph, step, moment, dma=plan.mode == StorageMode.DMA)
        if position == check.peak_position:
            remark += f"  <- peak {format_bytes(moment.high_bytes)}"
        yield (
            f"  {MARK if stalls else ' '} {position:>5}  {times[position]:>{column}}  "
            f"{format_bytes(moment.ram_bytes):>11}  {verb:<9}  {names[position]:<{width}}  {remark}"
        )


def _name(graph: Graph, step: Instruction) -> str:
    known = graph.nodes if step.op == Op.COMPUTE else graph.tensors
    return known[step.index].name if 0 <= step.index < len(known) else f"number {step.index}"


def _remark(graph: Graph, step: Instruction, moment: Moment, *, dma: bool) -> str:
    op, index = step
    time = format_seconds(moment.end_s - moment.start_s)
    if op == Op.COMPUTE:
        return f"takes {time}"
    if op == Op.WAIT:
        return f"STALL {time}" if moment.end_s > moment.start_s else "done already"
    sizes = graph.tensor_bytes
    size = format_bytes(sizes[index]) if 0 <= index < len(sizes) else "?"
    if op == Op.FREE:
        return f"gives {size} back"
    delay = moment.start_s - moment.issued_s
    after = f", after {format_seconds(delay)} for the bus" if dma and delay > 0 else ""
    return f"{size} {'beside the core ' if dma else ''}in {time}{after}"


def _unit(longest_s: float) -> tuple[float, str]:
    """Return the unit [s] in which the longest time has at least three digits before the point."""
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
    fitting = (unit for unit in units if longest_s >= 100 * unit[0])
    return next(fitting, units[-1] if longest_s > 0 else units[0])
