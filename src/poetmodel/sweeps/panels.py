"""Data of the panels and maps that show sweeps and figures of the paper."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from poetmodel.report.charts import map_chart
from poetmodel.report.pictures import Map, Panel, format_move_counts
from poetmodel.schedule import GraphIdentity, Schedule
from poetmodel.sweeps.runs import load_graph
from poetmodel.sweeps.summaries import group_rows, overhead_ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from poetmodel.sweeps.tables import Row


def figure_panels(
    name: str,
    rows: Sequence[Row],
    schedule_of: Callable[[str], Mapping[str, Any] | None] = lambda _: None,
) -> tuple[Panel, ...] | tuple[Map, ...]:
    """Return the pictures of a figure of the paper: maps for ``figure2``, times for ``table3``.

    All other names have panels of the overhead. `rows` come from `poetmodel.sweeps.tables.rows`.
    `schedule_of` returns the content of a run's schedule file by its key; None omits the map.
    """
    if name == "figure2":
        return tuple(_maps(rows, schedule_of))
    return tuple((_time_panels if name == "table3" else overhead_panels)(rows))


def data_digest(panels: Sequence[Panel] | Sequence[Map]) -> str:
    """Return a hash (16 hex digits) of the data of a picture, for the metadata of its file."""
    data_text = json.dumps([asdict(panel) for panel in panels])
    return hashlib.sha256(data_text.encode()).hexdigest()[:16]


def _maps(
    rows: Sequence[Row], schedule_of: Callable[[str], Mapping[str, Any] | None]
) -> Iterable[Map]:
    """Yield the map of each schedule; rows for which `schedule_of` returns None are skipped."""
    for row in rows:
        document = schedule_of(row["key"])
        if document is None:
            continue
        graph = load_graph(row["model"])
        schedule = Schedule.from_entries(document, GraphIdentity.from_graph(graph))
        run_name = f"{row['model']}, {row['device']}, {row['ram']}"
        title = f"{run_name}\n{format_move_counts(schedule)}"
        yield Map(title=title, chart=map_chart(graph, schedule))


def overhead_panels(rows: Sequence[Row]) -> tuple[Panel, ...]:
    """Return the energy overhead against the RAM budget: a panel per model, device and deadline.

    Overheads are in percent of the baseline, budgets in KiB, ascending.
    """
    panels = []
    has_several_solvers = len({row["backend"] for row in rows} - {None}) > 1
    for (model, device, deadline), panel_rows in group_rows(
        rows, "model", "device", "deadline"
    ).items():
        lines = []
        for (method, backend), line_rows in group_rows(panel_rows, "method", "backend").items():
            points = [
                (row["ram_budget_bytes"] / 1024, 100 * ratio)
                for row in line_rows
                if (ratio := overhead_ratio(row)) is not None
            ]
            name = f"{method}, {backend}" if has_several_solvers and backend else method
            lines.append((name, tuple(sorted(points))))
        deadline_text = "" if deadline is None else f"\ndeadline {deadline}"
        panels.append(
            Panel(
                title=f"{model}, {device}{deadline_text}",
                x_name="RAM budget [KiB]",
                y_name="energy overhead",
                lines=tuple(lines),
            )
        )
    return tuple(panels)


def pareto_panels(front: Sequence[Row]) -> tuple[Panel, ...]:
    """Return the Pareto front: overhead [%] against peak RAM [KiB], a panel per model and device.

    `front` is sorted by RAM. Rows that are on the front only because of their time are left out.
    """
    panels = []
    for (model, device), panel_rows in group_rows(front, "model", "device").items():
        points: list[tuple[float, float]] = []
        for row in panel_rows:  # by RAM
            ratio = overhead_ratio(row)
            if ratio is not None and (not points or 100 * ratio < points[-1][1]):
                points.append((row["peak_ram_bytes"] / 1024, 100 * ratio))
        panels.append(
            Panel(
                title=f"{model}, {device}",
                x_name="peak RAM [KiB]",
                y_name="energy overhead",
                lines=(("Pareto front", tuple(points)),),
            )
        )
    return tuple(panels)


def _time_panels(rows: Sequence[Row]) -> Iterable[Panel]:
    """Yield a panel per model and device: makespan [ms] against peak RAM, a line per method."""
    for (model, device), panel_rows in group_rows(rows, "model", "device").items():
        lines = []
        for (method, deadline), line_rows in group_rows(panel_rows, "method", "deadline").items():
            points = [
                (row["peak_ram_bytes"] / 1024, 1000 * row["makespan_s"])
                for row in line_rows
                if row["energy_j"] is not None
            ]
            deadline_text = "" if deadline is None else f", deadline {deadline}"
            lines.append((method + deadline_text, tuple(sorted(points))))
        yield Panel(
            title=f"{model}, {device}",
            x_name="peak RAM [KiB]",
            y_name="time [ms]",
            lines=tuple(lines),
            in_percent=False,
        )
