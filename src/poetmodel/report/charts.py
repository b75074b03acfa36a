"""Charts of a report as compact JSON values, which the page draws."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.ram import (
    KIND_NAMES,
    DeviceRam,
    RamUse,
    keep_all_ram_use,
    make_gauge,
    tensor_kind,
)
from poetmodel.plan import Op
from poetmodel.report.pictures import (
    COLOURS,
    DARK_COLOURS,
    PART_COLOURS,
    Kind,
    dominant_kind,
    rounded,
    size_unit,
    stage_actions,
    time_unit,
)
from poetmodel.report.presenter import escape_controls
from poetmodel.schedule.machine import BEFORE, Content
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from poetmodel.graph import Graph
    from poetmodel.plan import ArenaCheck, Plan
    from poetmodel.plan.arena_check import Rectangle
    from poetmodel.report.subject import Subject
    from poetmodel.schedule import Schedule


KINDS: Final = tuple(Kind)


def kinds() -> list[dict[str, str]]:
    """Return the kinds of cells and bars with their colours."""
    return [
        {
            "name": str(kind),
            "light": COLOURS[kind],
            "dark": DARK_COLOURS[kind],
            "key": kind.name.lower(),
        }
        for kind in KINDS
    ]


def parts() -> list[dict[str, str]]:
    """Return the kinds of RAM use with their colours, from the bottom of a stack."""
    return [
        {"name": name, "key": name, "light": light, "dark": dark}
        for name, (light, dark) in zip((*KIND_NAMES, "reserved"), PART_COLOURS, strict=True)
    ]


def graph_chart(graph: Graph) -> dict[str, Any]:
    """Return the data about the graph that the charts of a page need.

    ``nodes``: node names. ``tensors``: name, bytes, index of the node that computes it, and kind:
    state, activation or gradient.
    """
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

    ``columns``: node names. ``labels``: the different contents of cells: kind as an index of
    `KINDS`, whether the cell is marked as paged out, and a description with bytes. ``runs``:
    column, first row, last row and label of each vertical sequence of equal cells.
    """
    labels: dict[tuple[int, bool, str], int] = {}
    cells: dict[int, list[tuple[int, int]]] = {}
    for (t, k), actions in sorted(stage_actions(graph, schedule).items()):
        description = "; ".join(
            f"{kind} {format_bytes(sum(graph.tensor_bytes[i] for i in actions[kind]))}"
            for kind in KINDS
            if kind in actions
        )
        key = (KINDS.index(dominant_kind(actions)), Kind.PAGED_OUT in actions, description)
        cells.setdefault(k, []).append((t, labels.setdefault(key, len(labels))))
    runs: list[list[int]] = []
    for column, column_cells in sorted(cells.items()):
        for t, label in column_cells:
            last = runs[-1] if runs else None
            if last is not None and last[0] == column and last[2:] == [t - 1, label]:
                last[2] = t
            else:
                runs.append([column, t, t, label])
    return {
        "columns": [escape_controls(node.name) for node in graph.nodes],
        "labels": [list(label) for label in labels],
        "runs": runs,
    }


def address_chart(subject: Subject) -> dict[str, Any] | None:
    """Return the chart of addresses over time of a plan; None if the plan has no addresses.

    ``boxes``: copies of tensors, from the instruction that creates each to the one that frees it,
    and workspaces: kind as an index of `KINDS`, start, length, lowest address, height, description,
    and the index of the tensor, None for a workspace.
    """
    graph, plan, check, places = subject.graph, subject.plan, subject.check, subject.arena_check
    if plan is None or check is None or places is None:
        return None
    factor, time_unit_name = time_unit(check.makespan_s or 0.0)
    scale, unit_name = size_unit(places.bytes)
    times = [record.issued_s / factor for record in check.records]
    times.append((check.makespan_s or 0.0) / factor)
    boxes = []
    for kind, rectangle in _rectangles_with_kinds(graph, plan, places):
        low, size = rectangle.offset, rectangle.bytes
        if low is None or not size:
            continue
        is_output = rectangle.content == Content.OUTPUT
        name = (graph.tensors if is_output else graph.nodes)[rectangle.index].name
        is_first = rectangle.begin == BEFORE
        start = 0.0 if is_first else times[rectangle.begin]
        begins = "from the start" if is_first else f"from {rectangle.begin}"
        position_text = f"at {low:,} to {low + size:,}, instructions {begins} to {rectangle.end}"
        boxes.append(
            [
                KINDS.index(kind),
                *map(rounded, (start, times[rectangle.end] - start, low / scale, size / scale)),
                escape_controls(f"{name}: {kind}, {format_bytes(size)}, {position_text}"),
                rectangle.index if is_output else None,
            ]
        )
    return {
        "boxes": boxes,
        "end": rounded(times[-1]) or 1,
        "limit": rounded(places.bytes / scale),
        "x_name": f"time [{time_unit_name}]",
        "y_name": f"address [{unit_name}]",
        "limit_name": f"arena {format_bytes(places.bytes)}",
    }


def _rectangles_with_kinds(
    graph: Graph, plan: Plan, places: ArenaCheck
) -> Iterator[tuple[Kind, Rectangle]]:
    """Yield (kind, rectangle) for all contents with addresses; the kind is the origin of a copy."""
    computed: set[int] = set()
    read = set(graph.state_tensors)
    for rectangle in places.rectangles:
        if rectangle.content == Content.WORKSPACE:
            yield Kind.WORKSPACE, rectangle
        elif rectangle.begin == BEFORE:
            yield Kind.KEPT, rectangle
        elif plan.program[rectangle.begin].op == Op.PAGE_IN or rectangle.index in read:
            yield Kind.PAGED_IN, rectangle
        else:
            yield Kind.RECOMPUTED if rectangle.index in computed else Kind.COMPUTED, rectangle
            computed.add(rectangle.index)


def gauge_chart(subjects: Sequence[Subject]) -> dict[str, Any] | None:
    """Return the device RAM used by schedules and by keep-all; None if no device is known.

    ``rows``: label, RAM, parts, free and missing bytes [B] of each valid schedule; ``keep_all``:
    the same values of keep-all on each device of the schedules.
    """
    gauged = [subject for subject in subjects if subject.room is not None and subject.verdict.valid]
    if not gauged:
        return None
    rows = [_gauge_row(subject.label, subject.room) for subject in gauged]
    rooms: dict[str, dict[str, Any]] = {}
    for subject in gauged:
        device, graph = subject.problem.costs.device, subject.graph
        room = DeviceRam.compare(device, graph, keep_all_ram_use(graph))
        if room is not None:
            rooms[room.device] = _gauge_row("keep-all", room)
    return {"rows": rows, "keep_all": list(rooms.values())}


def _gauge_row(label: str, room: DeviceRam | None) -> dict[str, Any]:
    """Return the device RAM that a schedule uses, as a row of the chart."""
    sizes: Mapping[str, Any] = make_gauge(room) or {}
    return {
        "label": label,
        "device": "" if room is None else room.device,
        "ram": sizes["ram_bytes"],
        "parts": [sizes[part.name] for part in fields(RamUse)],
        "free": sizes["free_bytes"],
        "missing": sizes["missing_bytes"],
    }
