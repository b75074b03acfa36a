"""The charts of a report as compact plain values, which the page draws."""

from __future__ import annotations

from dataclasses import fields
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.room import PARTS, DeviceRoom, RamUse, gauge, keep_all_use, kind_of
from poetmodel.plan import Op, Plan, PlanCheck
from poetmodel.problem import Problem, Quantity
from poetmodel.report.pictures import (
    COLOURS,
    DARK_COLOURS,
    LINE_COLOURS,
    PART_COLOURS,
    AddressMap,
    Kind,
    address_map,
    colour_of,
    rounded,
    size_unit,
    stage_actions,
    time_unit,
)
from poetmodel.report.presenter import escaped, share
from poetmodel.result import relative_gap
from poetmodel.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from poetmodel.graph import Graph
    from poetmodel.report.subject import Subject
    from poetmodel.result import Moment
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
    """Return the data on the graph for the charts of a page.

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


# -- a sweep -----------------------------------------------------------------------------------


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
    front_points = [
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
        "lines": front_points,
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


# -- several schedules on common axes ----------------------------------------------------------

LEAST_PLANS: Final = 2
"""Plans that are worth common axes."""


def overlay_chart(subjects: Sequence[Subject]) -> dict[str, Any] | None:
    """Return the RAM curves of schedules over one time axis; None unless two have plans.

    ``curves``: label and name of each, the corners of its curve (from a time on so much RAM), and
    its budget.
    """
    planned = [
        (subject, subject.plan, subject.check)
        for subject in subjects
        if subject.plan is not None and subject.check is not None
    ]
    if len(planned) < LEAST_PLANS:
        return None
    factor, unit = time_unit(max(check.makespan_s or 0.0 for _, _, check in planned))
    sizes = [
        max(check.peak_ram_bytes, plan.ram_budget_bytes or 0) + subject.reserved_bytes
        for subject, plan, check in planned
    ]
    scale, size = size_unit(max(sizes))
    curves = []
    for subject, plan, check in planned:
        corners = list(_corners(subject.graph, plan, check))
        base, budget = subject.reserved_bytes, plan.ram_budget_bytes
        budget = None if budget is None else budget + base
        curves.append(
            {
                "label": subject.label,
                "name": escaped(subject.sources.schedule),
                "x": [rounded(time / factor) for time, _ in corners],
                "y": [rounded((base + ram) / scale) for _, ram in corners],
                "budget": None if budget is None else rounded(budget / scale),
                "budget_name": "" if budget is None else format_bytes(budget),
            }
        )
    return {"curves": curves, "time": unit, "size": size, "colours": line_colours()}


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
        room = DeviceRoom.of(device, graph, keep_all_use(graph))
        if room is not None:
            rooms[room.device] = _gauge("keep-all", room)
    return {"rows": rows, "keep_all": list(rooms.values())}


def _gauge(label: str, room: DeviceRoom | None) -> dict[str, Any]:
    sizes: Mapping[str, Any] = gauge(room) or {}
    return {
        "label": label,
        "device": "" if room is None else room.device,
        "ram": sizes["ram_bytes"],
        "parts": [sizes[part.name] for part in fields(RamUse)],
        "free": sizes["free_bytes"],
        "missing": sizes["missing_bytes"],
    }


def _corners(graph: Graph, plan: Plan, check: PlanCheck) -> Iterator[tuple[float, int]]:
    """Yield from when on how much RAM is in use, wherever that changes.

    What is there for no time at all, such as a peak within a free, is a point before what stays.
    """
    before = -1
    end_s = check.makespan_s or 0.0
    for time_s, levels in groupby(_levels(graph, plan, check), key=itemgetter(0)):
        levels_bytes = [ram for _, ram in levels]
        if max(levels_bytes) > max(levels_bytes[-1], before):
            yield time_s, max(levels_bytes)
        if levels_bytes[-1] != before or time_s == end_s:
            yield time_s, levels_bytes[-1]
        before = levels_bytes[-1]


def _levels(graph: Graph, plan: Plan, check: PlanCheck) -> Iterator[tuple[float, int]]:
    yield 0.0, sum(graph.tensor_bytes[i] for i in plan.resident or ())
    first_reads = plan.first_reads(graph)
    for (op, index), moment in zip(plan.program, check.moments, strict=True):
        computes = op == Op.COMPUTE and index not in first_reads
        yield moment.issued_s, moment.high_bytes
        yield (moment.end_s if computes else moment.issued_s), moment.ram_bytes
    if check.moments:
        yield check.makespan_s or 0.0, check.moments[-1].ram_bytes


# -- how incumbent and bound of a solve met ----------------------------------------------------

LEAST_MOMENTS: Final = 2
"""Moments that are worth a chart."""


def progress_of(subject: Subject) -> dict[str, Any] | None:
    """Return the chart of a schedule file; None where it has no history to show."""
    document = subject.document
    if document.problem is None or (subject.costs is None and document.problem.minimize != "ram"):
        return None
    return progress_chart(subject.problem, document.history, status=document.status)


def progress_chart(
    problem: Problem, history: Sequence[Moment], *, status: str | None
) -> dict[str, Any] | None:
    """Return incumbent and bound over the time of a solve; None with fewer than two moments.

    ``history``: as in `SolveResult`; ``factor``: its values in the chart's unit are divided by it;
    ``end``: how it ended, in words.
    """
    if len(history) < LEAST_MOMENTS:
        return None
    factor, unit, name = _scale(problem, [moment[1] for moment in history])
    return {
        "history": [list(moment) for moment in history],
        "factor": factor,
        "unit": unit,
        "y_name": name,
        "proven": status == "optimal",
        "end": _end(history[-1], status),
    }


def _scale(problem: Problem, values: Sequence[float | None]) -> tuple[float, str, str]:
    """Return the divisor of values, their unit, and their name."""
    most = max((value for value in values if value is not None), default=0.0)
    if problem.minimize == Quantity.ENERGY and problem.baseline_energy_j > 0:
        return problem.baseline_energy_j / 100, "%", "energy above a single pass"
    if problem.minimize == Quantity.TIME:
        return *time_unit(most), "time beyond a single pass"
    if problem.minimize in (Quantity.RAM, Quantity.WRITES):
        what = "peak RAM" if problem.minimize == Quantity.RAM else "written to storage"
        return *size_unit(most), what
    return 1.0, "", "own objective, beyond what every schedule pays"


def _end(last: Moment, status: str | None) -> str:
    seconds, incumbent, bound = last
    after = f"after {format_seconds(seconds)}"
    if status == "optimal":
        return f"proven optimal {after}"
    if incumbent is None:
        return f"no schedule {after}"
    left = relative_gap(incumbent, bound or 0.0)
    return f"stopped {after}: at most {share(left)} of this could be saved"
