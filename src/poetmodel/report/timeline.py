"""Timeline of a plan as plain values: RAM, core, bus, budget and keep-all over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from poetmodel.case.opening import Checked, zero_costs
from poetmodel.device import StorageMode
from poetmodel.graph import Graph, checkpoint_all_profile
from poetmodel.plan import Op, Plan, PlanCheck
from poetmodel.plan.simulation import check_plan
from poetmodel.plan.stays import list_stays
from poetmodel.report.pictures import round_for_chart, size_unit, time_unit
from poetmodel.schedule.machine import BEFORE, Content, Origin, Stay
from poetmodel.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator


RECOMPUTATION: Final = "a"
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
"""Origins of copies; a timeline contains their indices."""
DIVIDED_KEEP_ALL: Final = "keep-all in pieces"
"""Name of the keep-all curve if operations of a compiled step are divided into pieces. Its peak is
below that of the captured step."""


def timeline_chart(subject: Checked) -> dict[str, Any] | None:
    """Return the timeline of a schedule like `plan_chart`; None if it cannot execute."""
    if subject.planned is not None:
        chart = plan_chart(subject.graph, subject.planned.plan, subject.planned.check)
    elif subject.simulation.valid:
        chart = _make_untimed_chart(subject)
    else:
        return None
    return chart if subject.step is None else _add_reserved_bytes(subject, chart)


def _add_reserved_bytes(subject: Checked, chart: dict[str, Any]) -> dict[str, Any]:
    """Return a compiled step's timeline with all RAM curves raised by its reserved bytes."""
    reserved_bytes, n_instructions = subject.reserved_bytes, len(chart["ops"])
    positions, keep_all_ram = chart["ghost"]
    peaks = [min(reserved_bytes + ram_bytes, subject.keep_all_bytes) for ram_bytes in keep_all_ram]
    is_divided = max(peaks, default=0) < subject.keep_all_bytes
    reserved_band = Stay(
        content=Content.WORKSPACE,
        index=len(subject.graph.nodes),
        origin=Origin.RESIDENT,
        bytes=reserved_bytes,
        begin=BEFORE,
        end=n_instructions,
    )
    return {
        **chart,
        **{
            key: [reserved_bytes + ram_bytes for ram_bytes in chart[key]]
            for key in ("during", "after")
        },
        "stays": [
            *chart["stays"],
            *([_stay_values(reserved_band)] if reserved_bytes and chart["stays"] else []),
        ],
        "ghost": [positions, peaks],
        "ghost_name": DIVIDED_KEEP_ALL if is_divided else "keep-all",
        **_budget_values(subject.budget_bytes, subject.peak_ram_bytes),
    }


def plan_chart(graph: Graph, plan: Plan, check: PlanCheck) -> dict[str, Any]:
    """Return the data of a plan's timeline; positions are indices of instructions.

    Returns
    -------
    dict
        - ``ops``, ``of``: the letter of each instruction, as one text, and the index of its node
          for a computation, else (also for a first read) of its tensor.
        - ``issued``: issue time of each instruction, and the end of the plan; None without times or
          with a makespan of 0. ``unit``: unit of times.
        - ``work``: position, start and end of each instruction that takes time.
        - ``during``, ``after``: RAM during and after each instruction [B].
        - ``stays``: contents of RAM, each a list of numbers: the index of a tensor, or -1 - k for
          the workspace of node k; bytes; positions of begin (-1 before the program) and end; an
          index of `ORIGINS`; 1 if it was copied to storage, else 0; position (-1 for none) and
          bytes of an overwrite in place; index of the tensor that replaced it (-1 for none); and
          the positions of the computations that read it.
        - ``ghost``: positions of the first computations of nodes, without nodes that hold state,
          and the RAM of keep-all there [B].
        - ``peak``: position of the peak; 0 without one.
        - ``size``, ``scale``: unit of the RAM axis, and its bytes.
        - ``budget``, ``budget_name``: RAM budget [B] and its label; None and empty without one.
    """
    unit_s, unit_name = time_unit(check.makespan_s or 0.0)
    records = check.records
    issue_times = [record.issued_s for record in records] + [check.makespan_s or 0.0]
    ops = "".join(_instruction_letters(graph, plan))
    first_reads = plan.first_reads(graph)
    item_indices = [
        first_reads[index] if letter == FIRST_READ else index
        for letter, (_, index) in zip(ops, plan.program, strict=True)
    ]
    return {
        "ops": ops,
        "of": item_indices,
        "issued": [round_for_chart(time_s / unit_s) for time_s in issue_times]
        if check.makespan_s
        else None,
        "work": [
            [
                position,
                round_for_chart(record.start_s / unit_s),
                round_for_chart(record.end_s / unit_s),
            ]
            for position, record in enumerate(records)
            if record.end_s > record.start_s
        ],
        "unit": unit_name,
        "during": [record.peak_bytes for record in records],
        "after": [record.ram_bytes for record in records],
        "stays": [_stay_values(stay) for stay in list_stays(graph, plan)],
        "peak": check.peak_position or 0,
        **_keep_all_profile(graph, ops, item_indices),
        **_budget_values(plan.ram_budget_bytes, check.peak_ram_bytes),
    }


def plan_title(graph: Graph, plan: Plan, check: PlanCheck) -> str:
    """Return a timeline's title: graph, device, transfer mode, makespan, stall, peak RAM."""
    device_text = f" on {plan.device}" if plan.device else ""
    stall_text = f", stall {format_seconds(check.stall_s)}" if check.stall_s else ""
    return (
        f"{graph.name}{device_text}, {plan.mode} transfers: "
        f"{format_seconds(check.makespan_s or 0.0)}{stall_text}, peak RAM "
        f"{format_bytes(check.peak_ram_bytes)}"
    )


def _instruction_letters(graph: Graph, plan: Plan) -> Iterator[str]:
    """Yield the letter of each instruction: of `LETTERS`, else `RECOMPUTATION` or `FIRST_READ`."""
    computed_nodes: set[int] = set()
    first_reads = plan.first_reads(graph)
    for op, index in plan.program:
        if op != Op.COMPUTE:
            yield LETTERS[op]
        elif index in first_reads:
            yield FIRST_READ
        else:
            yield RECOMPUTATION if index in computed_nodes else LETTERS[op]
            computed_nodes.add(index)


def _stay_values(stay: Stay) -> list[int]:
    """Return a copy or workspace as an entry of ``stays`` of `plan_chart`."""
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


def _keep_all_profile(graph: Graph, ops: str, item_indices: list[int]) -> dict[str, Any]:
    """Return ``ghost`` of `plan_chart`: first computations and RAM of keep-all [B]."""
    profile = checkpoint_all_profile(graph)
    first_positions = [
        position for position, letter in enumerate(ops) if letter == LETTERS[Op.COMPUTE]
    ]
    operator_positions = [
        position for position in first_positions if not graph.nodes[item_indices[position]].is_state
    ]
    return {
        "ghost": [
            operator_positions,
            [profile[item_indices[position]] for position in operator_positions],
        ]
    }


def _budget_values(budget_bytes: int | None, peak_bytes: int) -> dict[str, Any]:
    """Return ``budget``, ``budget_name``, ``size`` and ``scale`` of `plan_chart`."""
    scale, unit_name = size_unit(max(peak_bytes, budget_bytes or 0))
    return {
        "budget": budget_bytes,
        "budget_name": "" if budget_bytes is None else f"budget {format_bytes(budget_bytes)}",
        "size": unit_name,
        "scale": scale,
    }


def _make_untimed_chart(subject: Checked) -> dict[str, Any]:
    """Return the timeline of a schedule over instructions instead of time; costs are ignored."""
    from poetmodel.planner import make_plan

    graph, budget_bytes = subject.graph, subject.budget_bytes
    plan = make_plan(
        graph,
        zero_costs(graph),
        subject.schedule,
        mode=StorageMode.BLOCKING,
        ram_budget_bytes=budget_bytes if budget_bytes is None or budget_bytes > 0 else None,
    )
    return plan_chart(graph, plan, check_plan(graph, None, plan))
