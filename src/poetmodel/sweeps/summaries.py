"""Summary tables of the figures of the paper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from poetmodel.result import Status
from poetmodel.sweeps.measurement import NOT_APPLICABLE, NOT_INSTALLED, REFUSED
from poetmodel.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from poetmodel.sweeps.tables import Row

CLOSED_GAP: Final = 1e-4
"""Maximum gap of a proven optimum: the default gap tolerance of sweeps."""
_STATUS_TEXTS: Final[Mapping[str, str]] = {
    NOT_APPLICABLE: "-",
    Status.INFEASIBLE: "impossible",
    Status.UNKNOWN: "none in time",
    REFUSED: "refused by the licence",
    NOT_INSTALLED: "not installed",
}
"""Text that a table shows for a status without a schedule; other statuses are shown unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A table of texts and formatted numbers."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    n_text_columns: int
    """Number of leading columns that contain names or limits; all other columns have formatted
    numbers or a status."""


def figure_summaries(name: str, rows: Sequence[Row]) -> tuple[Summary, ...]:
    """Return the tables of a figure of the paper from rows of `poetmodel.sweeps.tables`."""
    summary_functions = {"figure2": _map_summary, "table3": _pofo_summaries}
    return tuple(summary_functions.get(name, _method_summaries)(rows))


def status_text(row: Row) -> str:
    """Return the text that a table shows for a row without a schedule, by the row's status."""
    status = str(row["status"])
    return _STATUS_TEXTS.get(status, status)


def group_rows(rows: Iterable[Row], *columns: str) -> dict[tuple[Any, ...], list[Row]]:
    """Group rows by their values in some columns, in the order of first occurrence."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return groups


def overhead_ratio(row: Row) -> float | None:
    """Return the overhead as a fraction of the baseline; None without a schedule or baseline."""
    if row["overhead_j"] is None or not row["baseline_energy_j"]:
        return None
    return float(row["overhead_j"] / row["baseline_energy_j"])


def format_fraction(ratio: float | None) -> str:
    """Format a fraction as a percentage with at most three significant digits; None as a dash."""
    return "-" if ratio is None else f"{100 * ratio:.3g} %"


# -- overheads ---------------------------------------------------------------------------------


def _method_summaries(rows: Sequence[Row]) -> Iterable[Summary]:
    """Yield a table of overheads for each model and device: methods in rows, budgets in columns."""
    for (model, device), panel_rows in group_rows(rows, "model", "device").items():
        budgets = tuple(dict.fromkeys(row["ram"] for row in panel_rows))
        has_deadlines = any(row["deadline"] for row in panel_rows)
        lines = []
        for (deadline, method), line_rows in group_rows(panel_rows, "deadline", "method").items():
            text_by_ram = {row["ram"]: _overhead_text(row) for row in line_rows}
            deadline_cells = (deadline or "none",) if has_deadlines else ()
            lines.append((*deadline_cells, method, *(text_by_ram.get(ram, "") for ram in budgets)))
        heads = ("deadline", "method") if has_deadlines else ("method",)
        yield Summary(
            title=f"Energy overhead: {model}, {device}",
            heads=(*heads, *budgets),
            rows=tuple(lines),
            n_text_columns=len(heads),
        )


def _overhead_text(row: Row) -> str:
    """Return the overhead, or else `status_text`; for ``optimal`` also a gap above `CLOSED_GAP`."""
    ratio = overhead_ratio(row)
    if ratio is None:
        return status_text(row)
    text = format_fraction(ratio)
    if row["method"] == "optimal" and row["axis_gap"] is not None and row["axis_gap"] > CLOSED_GAP:
        text += f" (gap {format_fraction(row['axis_gap'])})"
    return text


# -- maps --------------------------------------------------------------------------------------


def _map_summary(rows: Sequence[Row]) -> Iterable[Summary]:
    """Yield one table: counts of recomputations and transfers, and overhead, of each run."""
    lines = []
    for row in rows:
        counts = (_format_count(row[name]) for name in ("recomputed", "paged_out", "paged_in"))
        lines.append(
            (*(row[name] for name in ("model", "device", "ram")), *counts, _overhead_text(row))
        )
    text_heads = ("model", "device", "RAM")
    yield Summary(
        title="Schedules of the maps",
        heads=(*text_heads, "recomputed", "paged out", "paged in", "overhead"),
        rows=tuple(lines),
        n_text_columns=len(text_heads),
    )


def _format_count(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


# -- POFO --------------------------------------------------------------------------------------


def _pofo_summaries(rows: Sequence[Row]) -> Iterable[Summary]:
    """Yield a table for each model and device that compares POFO with the optimum, by RAM budget.

    The last two columns have the smallest peak of the schedules of ``optimal``, with any budget or
    deadline, whose makespan is at most POFO's, and the percentages of RAM and time that it saves.
    """
    for (model, device), device_rows in group_rows(rows, "model", "device").items():
        optimal_rows = [
            row for row in device_rows if row["method"] == "optimal" and row["energy_j"] is not None
        ]
        lines = []
        for row in device_rows:
            if row["method"] != "pofo":
                continue
            same_budget_rows = [
                other
                for other in optimal_rows
                if other["ram"] == row["ram"] and not other["deadline"]
            ]
            if row["energy_j"] is None or not same_budget_rows:
                lines.append((row["ram"], status_text(row), *[""] * 7))
                continue
            no_slower_rows = [
                other for other in optimal_rows if other["makespan_s"] <= row["makespan_s"]
            ]
            smallest_row = min(
                no_slower_rows, key=lambda other: other["peak_ram_bytes"], default=None
            )
            lines.append(
                (
                    row["ram"],
                    *_peak_time_overhead(row),
                    *_peak_time_overhead(same_budget_rows[0]),
                    *_peak_and_savings(row, smallest_row),
                )
            )
        yield Summary(
            title=f"POFO and the optimum: {model}, {device}",
            heads=(
                "RAM",
                *(
                    f"{method} {metric}"
                    for method in ("pofo", "optimal")
                    for metric in _POFO_METRICS
                ),
                "minimum peak, no slower",
                "saves",
            ),
            rows=tuple(lines),
            n_text_columns=1,
        )


_POFO_METRICS: Final = ("peak", "time", "overhead")
"""Metrics that `_peak_time_overhead` formats, in this order."""


def _peak_time_overhead(row: Row) -> tuple[str, str, str]:
    return (
        format_bytes(row["peak_ram_bytes"]),
        format_seconds(row["makespan_s"]),
        format_fraction(overhead_ratio(row)),
    )


def _peak_and_savings(row: Row, smallest_row: Row | None) -> tuple[str, str]:
    """Format the peak of `smallest_row`, and the RAM and time it saves over `row` in percent."""
    if smallest_row is None:
        return "none", ""
    ram_saving, time_saving = (
        1 - smallest_row[name] / row[name] for name in ("peak_ram_bytes", "makespan_s")
    )
    savings_text = f"{format_fraction(ram_saving)} RAM, {format_fraction(time_saving)} time"
    return format_bytes(smallest_row["peak_ram_bytes"]), savings_text
