"""A plan over time: what core and bus do, and the RAM in use against the budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from poetmodel.plan import Op
from poetmodel.report.pictures import Bar, Curve, Kind, Lane, Timeline
from poetmodel.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.graph import Graph
    from poetmodel.plan import Instruction, Moment, Plan, PlanCheck

_TIMES: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_SIZES: Final = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
_KINDS: Final = {
    Op.PAGE_IN: Kind.PAGED_IN,
    Op.PAGE_OUT: Kind.PAGED_OUT,
    Op.WAIT: Kind.STALL,
}


def plan_timeline(graph: Graph, plan: Plan, check: PlanCheck) -> Timeline:
    """Describe the picture of a plan.

    Parameters
    ----------
    graph : Graph
        The graph that it was made for.
    plan : Plan
        The plan.
    check : PlanCheck
        What `poetmodel.plan.check_plan` found, with costs.

    Returns
    -------
    Timeline
        A lane for the core, with its stalls, one for the bus, and the RAM curve. In a blocking plan
        the core is busy while the bus is.
    """
    factor, unit = _unit(check.makespan_s or 0.0, _TIMES)
    scale, unit_name = size_unit(max(check.peak_ram_bytes, plan.ram_budget_bytes or 0))
    bars: dict[bool, list[Bar]] = {False: [], True: []}
    for on_bus, bar in _bars(graph, plan, check, factor):
        bars[on_bus].append(bar)
    lanes = [Lane(name="core", bars=tuple(bars[False]))]
    if bars[True]:
        lanes.append(Lane(name="bus", bars=tuple(bars[True])))
    points = tuple((time / factor, size / scale) for time, size in _levels(plan, check))
    budget = plan.ram_budget_bytes
    place = f" on {plan.device}" if plan.device else ""
    stall = f", stall {format_seconds(check.stall_s)}" if check.stall_s else ""
    return Timeline(
        title=(
            f"{graph.name}{place}, {plan.mode} transfers: "
            f"{format_seconds(check.makespan_s or 0.0)}{stall}, peak RAM "
            f"{format_bytes(check.peak_ram_bytes)}"
        ),
        time_name=f"time [{unit}]",
        lanes=tuple(lanes),
        curve=Curve(
            name=f"RAM [{unit_name}]",
            points=points,
            limit=None if budget is None else budget / scale,
            limit_name="" if budget is None else f"budget {format_bytes(budget)}",
        ),
    )


def size_unit(largest_bytes: float) -> tuple[float, str]:
    """Return the unit that suits sizes up to this one: its bytes and its name."""
    return _unit(largest_bytes, _SIZES)


def _bars(graph: Graph, plan: Plan, check: PlanCheck, factor: float) -> Iterator[tuple[bool, Bar]]:
    """Yield every bar that takes time, and whether it is the bus's."""
    computed: set[int] = set()
    for position, (step, moment) in enumerate(zip(plan.program, check.moments, strict=True)):
        op, index = step
        again = op == Op.COMPUTE and index in computed
        if op == Op.COMPUTE:
            computed.add(index)
        if moment.end_s <= moment.start_s:
            continue
        kind = _KINDS.get(op, Kind.RECOMPUTED if again else Kind.COMPUTED)
        bar = Bar(
            start=moment.start_s / factor,
            end=moment.end_s / factor,
            kind=kind,
            name=_name(graph, step),
            details=_details(graph, step, moment, f"{position}: {kind} {_name(graph, step)}"),
        )
        yield op in (Op.PAGE_IN, Op.PAGE_OUT), bar


def _name(graph: Graph, step: Instruction) -> str:
    known = graph.nodes if step.op == Op.COMPUTE else graph.tensors
    return known[step.index].name if 0 <= step.index < len(known) else f"number {step.index}"


def _details(graph: Graph, step: Instruction, moment: Moment, what: str) -> str:
    parts = [what, f"takes {format_seconds(moment.end_s - moment.start_s)}"]
    if step.op != Op.COMPUTE and 0 <= step.index < len(graph.tensors):
        parts.append(format_bytes(graph.tensor_bytes[step.index]))
    parts.append(f"RAM {format_bytes(moment.high_bytes)}")
    return ", ".join(parts)


def _levels(plan: Plan, check: PlanCheck) -> Iterator[tuple[float, int]]:
    """Yield (time [s], RAM from then on [B])."""
    yield 0.0, 0
    for step, moment in zip(plan.program, check.moments, strict=True):
        yield moment.issued_s, moment.high_bytes
        yield (moment.end_s if step.op == Op.COMPUTE else moment.issued_s), moment.ram_bytes
    if check.moments:
        yield check.makespan_s or 0.0, check.moments[-1].ram_bytes


def _unit(largest: float, units: tuple[tuple[float, str], ...]) -> tuple[float, str]:
    """Return the largest unit of which there is at least one, else the smallest."""
    return next((unit for unit in units if largest >= unit[0]), units[-1])
