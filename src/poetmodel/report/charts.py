"""The charts of a report as compact plain values, which the page draws."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.ram import KIND_NAMES, DeviceRam, RamUse, gauge, keep_all_ram_use, tensor_kind
from poetmodel.plan import Op
from poetmodel.report.pictures import (
    COLOURS,
    DARK_COLOURS,
    PART_COLOURS,
    Kind,
    colour_of,
    rounded,
    size_unit,
    stage_actions,
    time_unit,
)
from poetmodel.report.presenter import escaped
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
    """Return the kinds of what is in RAM with their colours, from the bottom of a stack."""
    return [
        {"name": name, "key": name, "light": light, "dark": dark}
        for name, (light, dark) in zip((*KIND_NAMES, "reserved"), PART_COLOURS, strict=True)
    ]


def graph_chart(graph: Graph) -> dict[str, Any]:
    """Return the data on the graph for the charts of a page.

    ``nodes``: their names. ``tensors``: name, bytes, index of the node that makes it, and kind:
    state, activation or gradient.
    """
    return {
        "nodes": [escaped(node.name) for node in graph.nodes],
        "tensors": [
            [escaped(tensor.name), graph.tensor_bytes[i], graph.node_of[i], tensor_kind(graph, i)]
            for i, tensor in enumerate(graph.tensors)
        ],
    }


def map_chart(graph: Graph, schedule: Schedule) -> dict[str, Any]:
    """Return the map of a schedule, stages by nodes (POET, ICML 2022, figure 2).

    ``columns``: names of the nodes. ``labels``: what a cell may hold: its kind as an index of
    `KINDS`, whether it is marked as paged out, and words with bytes. ``runs``: column, first row,
    last row and label of cells below each other that say the same.
    """
    labels: dict[tuple[int, bool, str], int] = {}
    cells: dict[int, list[tuple[int, int]]] = {}
    for (t, k), actions in sorted(stage_actions(graph, schedule).items()):
        words = "; ".join(
            f"{kind} {format_bytes(sum(graph.tensor_bytes[i] for i in actions[kind]))}"
            for kind in KINDS
            if kind in actions
        )
        key = (KINDS.index(colour_of(actions)), Kind.PAGED_OUT in actions, words)
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
        "columns": [escaped(node.name) for node in graph.nodes],
        "labels": [list(label) for label in labels],
        "runs": runs,
    }


def address_chart(subject: Subject) -> dict[str, Any] | None:
    """Return what of a plan lies where and when; None without addresses.

    ``boxes``: copies of tensors, from the instruction that makes each to the one that frees it, and
    workspaces: kind as an index of `KINDS`, start, length, lowest address, height, words, and the
    number of the tensor, None for a workspace.
    """
    graph, plan, check, places = subject.graph, subject.plan, subject.check, subject.places
    if plan is None or check is None or places is None:
        return None
    factor, unit = time_unit(check.makespan_s or 0.0)
    scale, unit_name = size_unit(places.bytes)
    times = [moment.issued_s / factor for moment in check.moments]
    times.append((check.makespan_s or 0.0) / factor)
    boxes = []
    for kind, rectangle in _kinds_of_copies(graph, plan, places):
        low, size = rectangle.offset, rectangle.bytes
        if low is None or not size:
            continue
        is_output = rectangle.content == Content.OUTPUT
        name = (graph.tensors if is_output else graph.nodes)[rectangle.index].name
        is_first = rectangle.begin == BEFORE
        start = 0.0 if is_first else times[rectangle.begin]
        begins = "from the start" if is_first else f"from {rectangle.begin}"
        place = f"at {low:,} to {low + size:,}, instructions {begins} to {rectangle.end}"
        boxes.append(
            [
                KINDS.index(kind),
                *map(rounded, (start, times[rectangle.end] - start, low / scale, size / scale)),
                escaped(f"{name}: {kind}, {format_bytes(size)}, {place}"),
                rectangle.index if is_output else None,
            ]
        )
    return {
        "boxes": boxes,
        "end": rounded(times[-1]) or 1,
        "limit": rounded(places.bytes / scale),
        "x_name": f"time [{unit}]",
        "y_name": f"address [{unit_name}]",
        "limit_name": f"arena {format_bytes(places.bytes)}",
    }


def _kinds_of_copies(
    graph: Graph, plan: Plan, places: ArenaCheck
) -> Iterator[tuple[Kind, Rectangle]]:
    """Yield all that has addresses, with how it came there."""
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
    """Return the RAM of the device that schedules take, and that keep-all would take.

    None where no device is known. ``rows``: label, RAM, parts, and what is free or missing [B];
    ``keep_all``: the same of keep-all on each device that the schedules have.
    """
    gauged = [subject for subject in subjects if subject.room is not None and subject.verdict.valid]
    if not gauged:
        return None
    rows = [_gauge(subject.label, subject.room) for subject in gauged]
    rooms: dict[str, dict[str, Any]] = {}
    for subject in gauged:
        device, graph = subject.problem.costs.device, subject.graph
        room = DeviceRam.compare(device, graph, keep_all_ram_use(graph))
        if room is not None:
            rooms[room.device] = _gauge("keep-all", room)
    return {"rows": rows, "keep_all": list(rooms.values())}


def _gauge(label: str, room: DeviceRam | None) -> dict[str, Any]:
    sizes: Mapping[str, Any] = gauge(room) or {}
    return {
        "label": label,
        "device": "" if room is None else room.device,
        "ram": sizes["ram_bytes"],
        "parts": [sizes[part.name] for part in fields(RamUse)],
        "free": sizes["free_bytes"],
        "missing": sizes["missing_bytes"],
    }
