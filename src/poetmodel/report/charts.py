"""The charts of a report as compact plain values, which the page draws."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.room import PARTS, kind_of
from poetmodel.report.pictures import (
    COLOURS,
    DARK_COLOURS,
    LINE_COLOURS,
    PART_COLOURS,
    Kind,
    address_map,
    colour_of,
    rounded,
    size_unit,
    stage_actions,
)
from poetmodel.report.presenter import escaped
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from poetmodel.graph import Graph
    from poetmodel.report.pictures import AddressMap
    from poetmodel.report.subject import Subject
    from poetmodel.schedule import Schedule


KINDS: Final = tuple(Kind)
DECADES: Final = 30
"""Values whose largest is so many times the least are drawn to a logarithmic scale."""


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
        for name, (light, dark) in zip((*PARTS, "reserved"), PART_COLOURS, strict=True)
    ]


def line_colours() -> list[dict[str, str]]:
    """Return the colours of lines, by ground."""
    return [{"light": light, "dark": dark} for light, dark in LINE_COLOURS]


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
    """Return the map of the schedule of a report; see `map_chart`."""
    return map_chart(subject.graph, subject.schedule)


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


def address_chart(subject: Subject) -> dict[str, Any] | None:
    """Return the addresses of the plan of a report; None without addresses."""
    if subject.plan is None or subject.check is None or subject.places is None:
        return None
    return box_chart(address_map(subject.graph, subject.plan, subject.check, subject.places))


def box_chart(picture: AddressMap) -> dict[str, Any]:
    """Return addresses against time.

    ``boxes``: kind as an index of `KINDS`, start, length, lowest address, height, words, and the
    number of the tensor, None for a workspace.
    """
    return {
        "boxes": [
            [
                KINDS.index(box.kind),
                *map(rounded, (box.start, box.end - box.start, box.low, box.high - box.low)),
                escaped(box.details),
                box.tensor,
            ]
            for box in picture.boxes
        ],
        "end": rounded(picture.end) or 1,
        "limit": rounded(picture.limit),
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
            "x": [rounded(row["peak_ram_bytes"] / scale) for row in points],
            "y": [rounded(_overhead(row)) for row in points],
            "proven": [row["status"] == "optimal" for row in points],
            "texts": [_point(row, on_front=row["key"] in kept) for row in points],
        }
        for name, points in lines.items()
    ]
    shares = [_overhead(row) for row in held]
    edge: list[tuple[float, float]] = []
    for x, y in sorted((row["peak_ram_bytes"] / scale, _overhead(row)) for row in held):
        if not edge or y < edge[-1][1]:
            edge.append((rounded(x), rounded(y)))
    return {
        "lines": found,
        "front": {"x": [x for x, _ in edge], "y": [y for _, y in edge]},
        "size": unit,
        "scale": scale,
        "log": bool(shares) and min(shares) > 0 and max(shares) > DECADES * min(shares),
        "colours": line_colours(),
    }


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
