"""Tables of the solver comparison, one for each problem, printed at the end of its session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from poetmodel.result import Status, Termination
from poetmodel.sweeps.measurement import NOT_INSTALLED, REFUSED
from poetmodel.sweeps.summaries import Summary, format_fraction, group_rows, status_text
from poetmodel.units import format_joules

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from poetmodel.sweeps.tables import Row

NOTE: Final = (
    "objective and bound: energy beyond one computation of every node; those of 'paper', and its "
    "gap, are of its own looser model"
)
"""Note below the tables."""
INSTANCE: Final = ("model", "device", "ram")
"""Fields that identify a problem."""
REJECTED: Final = "rejected by the verifier"
"""Status of a run whose schedule violates a rule or limit, as that of ``paper`` may."""
ROUNDING: Final = 1e-9
"""Maximum gap that counts as rounding error."""


def tabulate_solvers(table_rows: Sequence[Row]) -> Iterable[Summary]:
    """Yield a table for each problem, with each solver and formulation in a row; see `NOTE`."""
    for (model, device, ram), rows in group_rows(table_rows, *INSTANCE).items():
        yield Summary(
            title=f"{model} on {device}, {ram} of RAM",
            heads=("solver", "formulation", "limit", "status", "objective", "bound", "gap", "time"),
            rows=tuple(map(_result_row, rows)),
            n_text_columns=4,
        )


def _result_row(row: Row) -> tuple[str, ...]:
    labels = (row["backend"], row["formulation"] or "lazy", f"{row['time_limit_s']:g} s")
    is_paper_model = row["formulation"] == "paper"
    value = row["model_value" if is_paper_model else "overhead_j"]
    bound = row["model_bound" if is_paper_model else "overhead_bound_j"]
    status = row["status"]
    if status in (REFUSED, NOT_INSTALLED):
        return (*labels, status_text(row), "-", "-", "-", "-")
    if value is None and status == Status.FEASIBLE:  # the start schedule, not the solver's
        status = Status.UNKNOWN
    if row["termination"] == Termination.TIME_LIMIT:
        status = f"{status}, time limit" + (" while building" if is_never_begun(row) else "")
    if row["violations"]:
        status = f"{status}, {REJECTED}"
    return (
        *labels,
        status,
        *("-" if energy is None else format_joules(max(0.0, energy)) for energy in (value, bound)),
        format_gap(row) if row["status"] in (Status.OPTIMAL, Status.FEASIBLE) else "-",
        format_seconds(row.get("cpu_s") or row["seconds"]),
    )


def is_never_begun(row: Row) -> bool:
    """Return whether model construction used up the limit, so that the solver was not called."""
    return row["termination"] == Termination.TIME_LIMIT and not row["solve_s"]


def format_gap(row: Row) -> str:
    """Format the gap of the solved model: the problem's, or that of the model of ``paper``.

    If the solver was not called there is none, because the schedule is not its result.
    """
    gap: float | None = row["model_gap"] if row["formulation"] == "paper" else row["gap"]
    if gap is None or is_never_begun(row):
        return "none in time"
    return format_fraction(gap if gap > ROUNDING else 0.0)


def format_seconds(value: float | None) -> str:
    """Format a time with three significant digits; a dash if it is missing."""
    return "-" if value is None else f"{value:.3g} s"


def align_columns(table: Summary) -> list[str]:
    """Return the lines of a table: texts are left-aligned, numbers right-aligned."""
    widths = [
        max(map(len, column_cells)) for column_cells in zip(table.heads, *table.rows, strict=True)
    ]
    return [
        "  ".join(
            cell.ljust(width) if column < table.n_text_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (table.heads, *table.rows)
    ]
