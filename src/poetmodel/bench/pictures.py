"""Pictures of sweeps and figures: panels with lines, or maps of schedules."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from poetmodel.bench.runs import graph_of
from poetmodel.bench.summaries import grouped, is_solved, overhead_ratio
from poetmodel.files import write_bytes
from poetmodel.report.drawing import check_picture
from poetmodel.report.panels import sheet
from poetmodel.report.pictures import Map, Panel, stage_map
from poetmodel.report.scheme import following_scheme
from poetmodel.schedule import GraphIdentity, Schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from poetmodel.bench.tables import Row

FORMS: Final = dict.fromkeys((".png", ".svg", ".pdf"), ("matplotlib",))
"""What draws a picture, by the ending of its file."""


def panels(
    name: str,
    rows: Sequence[Row],
    schedule_of: Callable[[str], Mapping[str, Any] | None] = lambda _: None,
) -> tuple[Panel, ...] | tuple[Map, ...]:
    """Return the picture of a figure, of rows as `poetmodel.bench.tables.rows` gives them.

    Maps are drawn of schedule files, whose content `schedule_of` finds by the key of a run.
    """
    if name == "figure2":
        return tuple(_maps(rows, schedule_of))
    makers = {"solvers": _solved, "table3": _peaks_and_times}
    return tuple(makers.get(name, overheads)(rows))


def digest(shown: Sequence[Panel] | Sequence[Map]) -> str:
    """Return what identifies the content of a picture; its file carries it."""
    text = json.dumps([asdict(panel) for panel in shown])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _maps(
    rows: Sequence[Row], schedule_of: Callable[[str], Mapping[str, Any] | None]
) -> Iterable[Map]:
    """Yield the map of each schedule, with what it moves in its title."""
    for row in rows:
        document = schedule_of(row["key"])
        if document is None:
            continue
        graph = graph_of(row["model"])
        schedule = Schedule.of_entries(document, GraphIdentity.of(graph))
        grid = stage_map(graph, schedule)
        moved = grid.title.removeprefix(f"{graph.name}: ")
        yield Map(title=f"{row['model']}, {row['device']}, {row['ram']}\n{moved}", grid=grid)


def overheads(table: Sequence[Row]) -> tuple[Panel, ...]:
    """Return the energy overhead against the RAM budget: a panel per model, device and deadline.

    Each method is a line; where several solvers were used, so is each solver.
    """
    shown = []
    several = len({row["backend"] for row in table} - {None}) > 1
    for (model, device, deadline), rows in grouped(table, "model", "device", "deadline").items():
        lines = []
        for (method, backend), line in grouped(rows, "method", "backend").items():
            points = [
                (row["ram_budget_bytes"] / 1024, 100 * ratio)
                for row in line
                if (ratio := overhead_ratio(row)) is not None
            ]
            name = f"{method}, {backend}" if several and backend else method
            lines.append((name, tuple(sorted(points))))
        limit = "" if deadline is None else f"\ndeadline {deadline}"
        shown.append(
            Panel(
                title=f"{model}, {device}{limit}",
                x_name="RAM budget [KiB]",
                y_name="energy overhead",
                lines=tuple(lines),
            )
        )
    return tuple(shown)


def _peaks_and_times(table: Sequence[Row]) -> Iterable[Panel]:
    for (model, device), rows in grouped(table, "model", "device").items():
        lines = []
        for (method, deadline), line in grouped(rows, "method", "deadline").items():
            points = [
                (row["peak_ram_bytes"] / 1024, 1000 * row["makespan_s"])
                for row in line
                if row["energy_j"] is not None
            ]
            limit = "" if deadline is None else f", deadline {deadline}"
            lines.append((method + limit, tuple(sorted(points))))
        yield Panel(
            title=f"{model}, {device}",
            x_name="peak RAM [KiB]",
            y_name="time [ms]",
            lines=tuple(lines),
            scale="plain",
        )


def _solved(table: Sequence[Row]) -> Iterable[Panel]:
    """Yield how many runs each solver and formulation has solved after which time."""
    for (limit_s,), rows in grouped(table, "time_limit_s").items():
        lines = []
        for (formulation, backend), line in grouped(rows, "formulation", "backend").items():
            times = sorted(row["seconds"] for row in line if is_solved(row))
            points = tuple((time_s, float(k)) for k, time_s in enumerate(times, start=1))
            lines.append((f"{formulation}, {backend}", points))
        yield Panel(
            title=f"limit {limit_s:g} s",
            x_name="time [s]",
            y_name="runs solved",
            lines=tuple(lines),
            scale="time",
        )


def check_form(path: Path) -> None:
    """Raise unless a picture of this name can be drawn; nothing is written."""
    check_picture(path, FORMS)


def draw(path: Path, shown: Sequence[Panel] | Sequence[Map], *, columns: int | None = None) -> None:
    """Draw panels or maps into a file, row by row; the same ones give the same bytes.

    By default at most three panels or two maps stand side by side. SVG follows the colour scheme
    of the page that shows it.
    """
    check_form(path)
    form = path.suffix[1:].lower()
    drawn = sheet(shown, form, columns=columns, note=f"data {digest(shown)}")
    write_bytes(path, following_scheme(drawn.decode()).encode() if form == "svg" else drawn)
