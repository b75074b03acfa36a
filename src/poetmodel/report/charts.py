"""Charts of a report as compact JSON values, which the scripts of the page draw."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.ram import (
    KIND_NAMES,
    DeviceRam,
    RamUse,
    keep_all_ram_use,
    tensor_kind,
)
from poetmodel.plan import Op
from poetmodel.report.pictures import (
    COLOURS,
    DARK_COLOURS,
    RAM_KIND_COLOURS,
    Kind,
    dominant_kind,
    round_for_chart,
    size_unit,
    stage_actions,
    time_unit,
)
from poetmodel.report.presenter import escape_controls
from poetmodel.schedule.machine import BEFORE, Content
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.case.opening import Checked
    from poetmodel.graph import Graph
    from poetmodel.plan import ArenaCheck, Plan
    from poetmodel.plan.arena_check import Rectangle
    from poetmodel.schedule import Schedule


KINDS: Final = tuple(Kind)
"""Kinds of actions; charts contain indices into this tuple."""


def list_action_kinds() -> list[dict[str, str]]:
    """List the kinds of actions with name, key and colours (light, dark), as in `KINDS`."""
    return [
        {
            "name": str(kind),
            "light": COLOURS[kind],
            "dark": DARK_COLOURS[kind],
            "key": kind.name.lower(),
        }
        for kind in KINDS
    ]


def list_ram_kinds() -> list[dict[str, str]]:
    """List the kinds of RAM use, reserved bytes last, with the keys of `list_action_kinds`."""
    return [
        {"name": name, "key": name, "light": light, "dark": dark}
        for name, (light, dark) in zip((*KIND_NAMES, "reserved"), RAM_KIND_COLOURS, strict=True)
    ]


def graph_chart(graph: Graph) -> dict[str, Any]:
    """Return the data about the graph for charts; tensors are [name, bytes, node index, kind]."""
    return {
        "nodes": [escape_controls(node.name) for node in graph.nodes],
        "tensors": [
            [
                escape_controls(tensor.name),
                graph.tensor_bytes[i],
                graph.node_of[i],
                tensor_kind(graph, i),
            ]
            for i, tensor in enumerate(graph.tensors)
        ],
    }


def map_chart(graph: Graph, schedule: Schedule) -> dict[str, Any]:
    """Return the map of a schedule, stages by nodes (POET, ICML 2022, figure 2).

    ``labels``: the different cells: index into `KINDS`, whether paged out, description. ``runs``:
    vertical sequences of equal cells: column, first row, last row, index into ``labels``.
    """
    labels: dict[tuple[int, bool, str], int] = {}
    labels_by_column: dict[int, list[tuple[int, int]]] = {}
    for (t, k), actions in sorted(stage_actions(graph, schedule).items()):
        description = "; ".join(
            f"{kind} {format_bytes(sum(graph.tensor_bytes[i] for i in actions[kind]))}"
            for kind in KINDS
            if kind in actions
        )
        key = (KINDS.index(dominant_kind(actions)), Kind.PAGED_OUT in actions, description)
        labels_by_column.setdefault(k, []).append((t, labels.setdefault(key, len(labels))))
    sequences: list[list[int]] = []
    for column, stage_labels in sorted(labels_by_column.items()):
        for t, label in stage_labels:
            last_sequence = sequences[-1] if sequences else None
            if (
                last_sequence is not None
                and last_sequence[0] == column
                and last_sequence[2:] == [t - 1, label]
            ):
                last_sequence[2] = t
            else:
                sequences.append([column, t, t, label])
    return {
        "columns": [escape_controls(node.name) for node in graph.nodes],
        "labels": [list(label) for label in labels],
        "runs": sequences,
    }


def address_chart(subject: Checked) -> dict[str, Any] | None:
    """Return the chart of addresses over time of a plan; None without a plan or addresses.

    ``boxes``: for each copy or workspace its kind, start, length, lowest address and height in the
    units of the axes, description, and tensor index (None for a workspace). ``end``: the makespan,
    or 1 if that is 0; ``limit``: the size of the arena. The other values are texts.
    """
    planned = subject.planned
    if planned is None or planned.arena_check is None:
        return None
    graph, plan = subject.graph, planned.plan
    check, arena_check = planned.check, planned.arena_check
    factor, time_unit_name = time_unit(check.makespan_s or 0.0)
    scale, unit_name = size_unit(arena_check.bytes)
    times = [record.issued_s / factor for record in check.records]
    times.append((check.makespan_s or 0.0) / factor)
    boxes = []
    for kind, rectangle in _rectangles_with_kinds(graph, plan, arena_check):
        low_address, n_bytes = rectangle.offset, rectangle.bytes
        if low_address is None or not n_bytes:
            continue
        is_output = rectangle.content == Content.OUTPUT
        name = (graph.tensors if is_output else graph.nodes)[rectangle.index].name
        is_first = rectangle.begin == BEFORE
        start_time = 0.0 if is_first else times[rectangle.begin]
        begin_text = "from the start" if is_first else f"from {rectangle.begin}"
        position_text = (
            f"at {low_address:,} to {low_address + n_bytes:,}, "
            f"instructions {begin_text} to {rectangle.end}"
        )
        boxes.append(
            [
                KINDS.index(kind),
                *map(
                    round_for_chart,
                    (
                        start_time,
                        times[rectangle.end] - start_time,
                        low_address / scale,
                        n_bytes / scale,
                    ),
                ),
                escape_controls(f"{name}: {kind}, {format_bytes(n_bytes)}, {position_text}"),
                rectangle.index if is_output else None,
            ]
        )
    return {
        "boxes": boxes,
        "end": round_for_chart(times[-1]) or 1,
        "limit": round_for_chart(arena_check.bytes / scale),
        "x_name": f"time [{time_unit_name}]",
        "y_name": f"address [{unit_name}]",
        "limit_name": f"arena {format_bytes(arena_check.bytes)}",
    }


def _rectangles_with_kinds(
    graph: Graph, plan: Plan, arena_check: ArenaCheck
) -> Iterator[tuple[Kind, Rectangle]]:
    """Yield (kind, rectangle) of `arena_check`; the kind of a copy is its origin."""
    computed_tensors: set[int] = set()
    state_tensors = set(graph.state_tensors)
    for rectangle in arena_check.rectangles:
        if rectangle.content == Content.WORKSPACE:
            yield Kind.WORKSPACE, rectangle
        elif rectangle.begin == BEFORE:
            yield Kind.KEPT, rectangle
        elif plan.program[rectangle.begin].op == Op.PAGE_IN or rectangle.index in state_tensors:
            yield Kind.PAGED_IN, rectangle
        else:
            yield (
                Kind.RECOMPUTED if rectangle.index in computed_tensors else Kind.COMPUTED,
                rectangle,
            )
            computed_tensors.add(rectangle.index)


def gauge_chart(subjects: Sequence[Checked]) -> dict[str, Any] | None:
    """Return the RAM use [B] of valid schedules with a device, and of keep-all on it, or None."""
    gauged_subjects = [
        (subject, device_ram)
        for subject in subjects
        if (device_ram := subject.device_ram) is not None and subject.verdict.valid
    ]
    if not gauged_subjects:
        return None
    rows = [_gauge_row(subject.label, device_ram) for subject, device_ram in gauged_subjects]
    keep_all_rows: dict[str, dict[str, Any]] = {}
    for subject, _ in gauged_subjects:
        device, graph = subject.problem.costs.device, subject.graph
        ram_use = keep_all_ram_use(graph).add_reserved_bytes(subject.reserved_bytes)
        keep_all_ram = DeviceRam.compare(device, graph, ram_use)
        if keep_all_ram is not None:
            keep_all_rows[keep_all_ram.device] = _gauge_row("keep-all", keep_all_ram)
    return {"rows": rows, "keep_all": list(keep_all_rows.values())}


def _gauge_row(label: str, device_ram: DeviceRam) -> dict[str, Any]:
    """Return a row of `gauge_chart` [B]: RAM of the device, use by kind, free and missing bytes."""
    return {
        "label": label,
        "device": device_ram.device,
        "ram": device_ram.ram_bytes,
        "parts": [getattr(device_ram.use, kind_field.name) for kind_field in fields(RamUse)],
        "free": device_ram.free_bytes,
        "missing": device_ram.missing_bytes,
    }
