"""Timeline of a plan as plain values: RAM, core, bus, budget and keep-all over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from poetmodel.device import StorageMode
from poetmodel.graph import Graph, checkpoint_all_profile
from poetmodel.plan import Op, Plan, PlanCheck
from poetmodel.plan.simulation import check_plan
from poetmodel.plan.stays import list_stays
from poetmodel.report.pictures import rounded, size_unit, time_unit
from poetmodel.report.subject import Subject, free_costs
from poetmodel.schedule.machine import Content, Origin, Stay
from poetmodel.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator


AGAIN: Final = "a"
"""Letter of a recomputation in a timeline."""
FIRST_READ: Final = "r"
"""Letter of a first read of state from storage in a timeline."""
LETTERS: Final = {
    Op.COMPUTE: "c",
    Op.PAGE_IN: "i",
    Op.PAGE_OUT: "o",
    Op.WAIT: "w",
    Op.FREE: "f",
}
"""Letters of instructions; recomputations and first reads have their own."""
ORIGINS: Final = tuple(Origin)
IN_PARTS: Final = "keep-all in parts"
"""Name of keep-all if operations of a compiled step run in parts; its peak is below that of the
step as captured."""


def timeline_chart(subject: Subject) -> dict[str, Any] | None:
    """Return the timeline of a schedule in the format of `plan_chart`.

    If only costs are missing, its x axis is the instruction index. None for an invalid schedule.
    """
    if subject.plan is not None and subject.check is not None:
        chart = plan_chart(subject.graph, subject.plan, subject.check)
    elif subject.simulation.valid:
        chart = _without_times(subject)
    else:
        return None
    return chart if subject.step is None else _add_reserved_bytes(subject, chart)


def _add_reserved_bytes(subject: Subject, chart: dict[str, Any]) -> dict[str, Any]:
    """Shift all RAM curves of a compiled step's timeline up by its reserved bytes.

    The reserved bytes are the lowest band; its index is below those of all workspaces. The keep-all
    curve is capped at the step's keep-all peak, and is lower if operations run in parts.
    """
    base, n = subject.reserved_bytes, len(chart["ops"])
    places, kept = chart["ghost"]
    peaks = [min(base + ram, subject.keep_all_bytes) for ram in kept]
    runs_in_parts = max(peaks, default=0) < subject.keep_all_bytes
    band = [-1 - len(subject.graph.nodes), base, -1, n, ORIGINS.index(Origin.RESIDENT)]
    return {
        **chart,
        **{key: [base + ram for ram in chart[key]] for key in ("during", "after")},
        "stays": [
            *chart["stays"],
            *([[*band, 0, -1, 0, -1]] if base and chart["stays"] else []),
        ],
        "ghost": [places, peaks],
        "ghost_name": IN_PARTS if runs_in_parts else "keep-all",
        **_budget_values(subject.budget_bytes, subject.peak_ram_bytes),
    }


def plan_chart(graph: Graph, plan: Plan, check: PlanCheck) -> dict[str, Any]:
    """Return the data of a plan's timeline.

    ``ops``, ``of``: a letter and the index of a node or tensor for each instruction.
    ``issued``: issue time of each instruction, and the end of the plan; None without times.
    ``work``: position, start and end of each instruction that takes time. ``during``, ``after``:
    RAM at each instruction, as measured by `check_plan` [B]. ``stays``: contents of RAM: a tensor
    or, below 0, the workspace of node -1 - k; bytes, begin and end, an index of `ORIGINS`, whether
    it was copied to storage, position and bytes of an overwrite in place, the position of its
    replacement, and the computations that read it; -1 for none. ``ghost``: the instructions that
    first compute each node, and the RAM of keep-all there.
    """
    factor, unit = time_unit(check.makespan_s or 0.0)
    records = check.records
    issued = [record.issued_s for record in records] + [check.makespan_s or 0.0]
    ops = "".join(_letters(graph, plan))
    read = plan.first_reads(graph)
    item_indices = [
        read[index] if letter == FIRST_READ else index
        for letter, (_, index) in zip(ops, plan.program, strict=True)
    ]
    return {
        "ops": ops,
        "of": item_indices,
        "issued": [rounded(time / factor) for time in issued] if check.makespan_s else None,
        "work": [
            [position, rounded(record.start_s / factor), rounded(record.end_s / factor)]
            for position, record in enumerate(records)
            if record.end_s > record.start_s
        ],
        "unit": unit,
        "during": [record.peak_bytes for record in records],
        "after": [record.ram_bytes for record in records],
        "stays": [_stay_values(stay) for stay in list_stays(graph, plan)],
        "peak": check.peak_position or 0,
        **_keep_all_profile(graph, ops, item_indices),
        **_budget_values(plan.ram_budget_bytes, check.peak_ram_bytes),
    }


def plan_title(graph: Graph, plan: Plan, check: PlanCheck) -> str:
    """Return the title of a plan's timeline."""
    on_device = f" on {plan.device}" if plan.device else ""
    stall = f", stall {format_seconds(check.stall_s)}" if check.stall_s else ""
    return (
        f"{graph.name}{on_device}, {plan.mode} transfers: "
        f"{format_seconds(check.makespan_s or 0.0)}{stall}, peak RAM "
        f"{format_bytes(check.peak_ram_bytes)}"
    )


def _letters(graph: Graph, plan: Plan) -> Iterator[str]:
    """Yield the letter of each instruction."""
    computed: set[int] = set()
    first_reads = plan.first_reads(graph)
    for op, index in plan.program:
        if op != Op.COMPUTE:
            yield LETTERS[op]
        elif index in first_reads:
            yield FIRST_READ
        else:
            yield AGAIN if index in computed else LETTERS[op]
            computed.add(index)


def _stay_values(stay: Stay) -> list[int]:
    """Return an entry of ``stays`` of `plan_chart`."""
    return [
        stay.index if stay.content == Content.OUTPUT else -1 - stay.index,
        stay.bytes,
        stay.begin,
        stay.end,
        ORIGINS.index(stay.origin),
        int(stay.paged_out),
        -1 if stay.overwritten_at is None else stay.overwritten_at,
        stay.overwritten_bytes,
        -1 if stay.replaced_by is None else stay.replaced_by,
        *stay.reads,
    ]


def _keep_all_profile(graph: Graph, ops: str, of: list[int]) -> dict[str, Any]:
    """Return the RAM of keep-all at the instructions that first compute each node."""
    profile = checkpoint_all_profile(graph)
    first = [position for position, letter in enumerate(ops) if letter == LETTERS[Op.COMPUTE]]
    kept = [position for position in first if not graph.nodes[of[position]].is_state]
    return {"ghost": [kept, [profile[of[position]] for position in kept]]}


def _budget_values(budget: int | None, peak_bytes: int) -> dict[str, Any]:
    """Return the budget of a chart, its name, and the unit of the RAM axis."""
    scale, unit = size_unit(max(peak_bytes, budget or 0))
    return {
        "budget": budget,
        "budget_name": "" if budget is None else f"budget {format_bytes(budget)}",
        "size": unit,
        "scale": scale,
    }


def _without_times(subject: Subject) -> dict[str, Any]:
    """Return the timeline of a schedule without costs."""
    from poetmodel.planner import make_plan

    graph, budget = subject.graph, subject.budget_bytes
    plan = make_plan(
        graph,
        free_costs(graph),
        subject.schedule,
        mode=StorageMode.BLOCKING,
        ram_budget_bytes=budget if budget is None or budget > 0 else None,
    )
    return plan_chart(graph, plan, check_plan(graph, None, plan))
