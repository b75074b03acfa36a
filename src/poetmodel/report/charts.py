"""The charts of a report as compact plain values, which the page draws."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.room import kind_of
from poetmodel.report.pictures import (
    COLOURS,
    Kind,
    address_map,
    colour_of,
    plan_timeline,
    size_unit,
    stage_actions,
)
from poetmodel.report.presenter import escaped
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from poetmodel.graph import Graph
    from poetmodel.plan import Plan, PlanCheck
    from poetmodel.report.subject import Subject


KINDS: Final = tuple(Kind)
DARK: Final[Mapping[Kind, str]] = {
    Kind.COMPUTED: "#3A9BDC",
    Kind.RECOMPUTED: "#F0B93A",
    Kind.KEPT: "#3F6078",
    Kind.PAGED_IN: "#23C497",
    Kind.PAGED_OUT: "#E29AC4",
    Kind.STALL: "#F07F3C",
    Kind.WORKSPACE: "#8A949C",
}
"""The hues of `poetmodel.report.pictures.COLOURS` on a dark ground."""
LINES: Final = (
    ("#0072B2", "#4AA3DF"),
    ("#D55E00", "#F07F3C"),
    ("#009E73", "#23C497"),
    ("#CC79A7", "#E29AC4"),
    ("#8A6D00", "#F0B93A"),
    ("#555555", "#B4C0CA"),
)
"""Colours of lines, on a light and on a dark ground, after Okabe and Ito."""
DIGITS: Final = 8
"""Digits of times and sizes in a chart."""
DECADES: Final = 30
"""Values whose largest is so many times the least are drawn to a logarithmic scale."""
LATE: Final = 0.6
"""From this share of the time axis on a note stands to the left of what it is about."""


def kinds() -> list[dict[str, str]]:
    """Return the kinds of cells and bars with their colours."""
    return [
        {"name": str(kind), "light": COLOURS[kind], "dark": DARK[kind], "key": kind.name.lower()}
        for kind in KINDS
    ]


def graph_chart(graph: Graph) -> dict[str, Any]:
    """Return what the charts of a page know of the graph.

    ``nodes``: their names. ``tensors``: name, bytes, index of the node that makes it, and kind:
    state, activation or gradient.
    """
    return {
        "nodes": [escaped(node.name) for node in graph.nodes],
        "tensors": [
            [escaped(tensor.name), graph.tensor_bytes[i], graph.node_of[i], kind_of(graph, i)]
            for i, tensor in enumerate(graph.tensors)
        ],
    }


def stage_chart(subject: Subject) -> dict[str, Any]:
    """Return the map of a schedule, stages by nodes (POET, ICML 2022, figure 2).

    ``columns``: names of the nodes. ``labels``: what a cell may hold: its kind as an index of
    `KINDS`, whether it is marked as paged out, and words with bytes. ``runs``: column, first row,
    last row and label of cells below each other that say the same.
    """
    graph = subject.graph
    labels: dict[tuple[int, bool, str], int] = {}
    cells: dict[int, list[tuple[int, int]]] = {}
    for (t, k), actions in sorted(stage_actions(graph, subject.schedule).items()):
        words = "; ".join(
            f"{kind} {format_bytes(sum(graph.tensor_bytes[i] for i in actions[kind]))}"
            for kind in KINDS
            if kind in actions
        )
        key = (KINDS.index(colour_of(actions)), Kind.PAGED_OUT in actions, words)
        cells.setdefault(k, []).append((t, labels.setdefault(key, len(labels))))
    runs: list[list[int]] = []
    for column, found in sorted(cells.items()):
        for t, label in found:
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


def ram_chart(subject: Subject) -> dict[str, Any]:
    """Return core, bus and RAM over the time of the plan; without a plan, RAM step by step."""
    if subject.plan is None or subject.check is None:
        return _by_step(subject)
    return _by_time(subject.graph, subject.plan, subject.check)


def address_chart(subject: Subject) -> dict[str, Any] | None:
    """Return addresses against time; None without addresses.

    ``boxes``: kind as an index of `KINDS`, start, length, lowest address, height and words.
    """
    if subject.plan is None or subject.check is None or subject.places is None:
        return None
    picture = address_map(subject.graph, subject.plan, subject.check, subject.places)
    return {
        "boxes": [
            [
                KINDS.index(box.kind),
                *map(_short, (box.start, box.end - box.start, box.low, box.high - box.low)),
                escaped(box.details),
            ]
            for box in picture.boxes
        ],
        "end": _short(picture.end) or 1,
        "limit": _short(picture.limit),
        "x_name": picture.time_name,
        "y_name": picture.address_name,
        "limit_name": picture.limit_name,
    }


def front_chart(
    rows: Sequence[Mapping[str, Any]], front: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a sweep as energy overhead against peak RAM, a line per method.

    `rows` are all runs of one model, device and deadline, and `front` those that no other one
    beats, as ``poetmodel sweep --json --pareto`` prints them.
    """
    held = [row for row in rows if row["energy_j"] is not None and row["baseline_energy_j"]]
    scale, unit = size_unit(max((row["peak_ram_bytes"] for row in held), default=0))
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(held, key=lambda row: row["peak_ram_bytes"]):
        lines.setdefault(_method(row), []).append(row)
    kept = {row["key"] for row in front}
    found = [
        {
            "name": name,
            "x": [_short(row["peak_ram_bytes"] / scale) for row in points],
            "y": [_short(_overhead(row)) for row in points],
            "proven": [row["status"] == "optimal" for row in points],
            "texts": [_point(row, on_front=row["key"] in kept) for row in points],
        }
        for name, points in lines.items()
    ]
    shares = [_overhead(row) for row in held]
    edge: list[tuple[float, float]] = []
    for x, y in sorted((row["peak_ram_bytes"] / scale, _overhead(row)) for row in held):
        if not edge or y < edge[-1][1]:
            edge.append((_short(x), _short(y)))
    return {
        "lines": found,
        "front": {"x": [x for x, _ in edge], "y": [y for _, y in edge]},
        "size": unit,
        "scale": scale,
        "log": bool(shares) and min(shares) > 0 and max(shares) > DECADES * min(shares),
        "colours": [{"light": light, "dark": dark} for light, dark in LINES],
    }


def _by_time(graph: Graph, plan: Plan, check: PlanCheck) -> dict[str, Any]:
    picture = plan_timeline(graph, plan, check)
    bars: list[list[Any]] = []
    for place, lane in enumerate(picture.lanes.values()):
        for bar in lane:
            start, length = _short(bar.start), _short(bar.end - bar.start)
            bars.append([place, KINDS.index(bar.kind), start, length, escaped(bar.details)])
    points = _corners(picture.points)
    position = check.peak_position or 0
    moment = check.moments[position]
    step = plan.program[position]
    known = graph.nodes if step.op == "compute" else graph.tensors
    last = points[-1][0] or 1.0
    factor = last / (check.makespan_s or 1.0)
    scale, unit = size_unit(max(check.peak_ram_bytes, plan.ram_budget_bytes or 0))
    name = escaped(known[step.index].name)
    reads = step.op == "compute" and step.index in plan.first_reads(graph)
    words = f"{position}: {'read' if reads else step.op.replace('_', ' ')} {name}"
    return {
        "lanes": list(picture.lanes),
        "bars": bars,
        "time": picture.time_name.partition("[")[2].rstrip("]"),
        "x_name": picture.time_name,
        "texts": None,
        **_curve(points, picture.limit, picture.limit_name, unit),
        **_band(graph, plan.resident or (), scale),
        "peak": {
            "x": _short(moment.issued_s * factor),
            "y": _short(check.peak_ram_bytes / scale),
            "name": name,
            "text": f"peak step {words}, {format_bytes(check.peak_ram_bytes)}",
            "late": moment.issued_s * factor > LATE * last,
        },
    }


def _by_step(subject: Subject) -> dict[str, Any]:
    graph, simulation = subject.graph, subject.simulation
    curve, budget = simulation.curve, subject.budget_bytes
    scale, unit = size_unit(max(simulation.peak_ram_bytes, budget or 0))
    texts = [
        f"step {x}: {escaped(graph.nodes[point.node].name)} in stage {point.stage}, "
        f"{format_bytes(point.ram_bytes)}"
        for x, point in enumerate(curve)
    ]
    x = curve.index(simulation.peak) if simulation.peak in curve else 0
    points = [(float(at), point.ram_bytes / scale) for at, point in enumerate(curve)]
    name = escaped(graph.nodes[simulation.peak.node].name)
    return {
        "lanes": [],
        "bars": [],
        "time": "steps",
        "x_name": "step of the schedule",
        "texts": texts,
        **_curve(
            points or [(0.0, 0.0)],
            None if budget is None else budget / scale,
            "" if budget is None else f"budget {format_bytes(budget)}",
            unit,
        ),
        **_band(graph, subject.schedule.resident, scale),
        "peak": {
            "x": x,
            "y": _short(simulation.peak_ram_bytes / scale),
            "name": name,
            "text": f"peak at {texts[x]}" if texts else "",
            "late": x > LATE * len(curve),
        },
    }


def _curve(
    points: Sequence[tuple[float, float]], limit: float | None, limit_name: str, unit: str
) -> dict[str, Any]:
    highest = max([y for _, y in points] + [limit or 0.0])
    return {
        "x": [_short(x) for x, _ in points],
        "y": [_short(y) for _, y in points],
        "limit": None if limit is None else _short(limit),
        "limit_name": limit_name,
        "size": unit,
        "top": _short(1.1 * highest) or 1,
    }


def _band(graph: Graph, resident: Iterable[int], scale: float) -> dict[str, Any]:
    """Return the height of what resident state takes all the time, the floor of the curve."""
    band = sum(graph.tensor_bytes[i] for i in resident if i in graph.state_tensors)
    if not band:
        return {"band": None, "band_name": ""}
    return {"band": _short(band / scale), "band_name": f"resident state {format_bytes(band)}"}


def _corners(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Leave out points of a step curve that nobody sees: of no change, or inside a jump."""
    kept: list[tuple[float, float]] = []
    for point, following in pairwise(points):
        if kept and kept[-1][1] == point[1] and following[0] > point[0]:
            continue
        inside = kept and kept[-1][0] == point[0] == following[0]
        if inside and min(kept[-1][1], following[1]) <= point[1] <= max(kept[-1][1], following[1]):
            continue
        kept.append(point)
    return [*kept, *points[-1:]]


def _method(row: Mapping[str, Any]) -> str:
    return ", ".join(part for part in (row["method"], row["backend"]) if part)


def _overhead(row: Mapping[str, Any]) -> float:
    """Return the energy overhead as a percentage of the baseline."""
    share: float = 100 * row["overhead_j"] / row["baseline_energy_j"]
    return share


def _point(row: Mapping[str, Any], *, on_front: bool) -> str:
    parts = [
        f"{escaped(_method(row))} at {escaped(row['ram'])}",
        f"overhead {_overhead(row):.4g} %",
        f"peak {format_bytes(row['peak_ram_bytes'])}",
        "proven optimal" if row["status"] == "optimal" else "not proven",
    ]
    return ", ".join(parts + ["on the front of energy, RAM and time"] * on_front)


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
