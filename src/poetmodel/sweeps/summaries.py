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

PROVEN: Final = 1e-4
"""Largest gap that counts as closed: the gap tolerance of the solves."""
_WORDS: Final[Mapping[str, str]] = {
    NOT_APPLICABLE: "-",
    Status.INFEASIBLE: "impossible",
    Status.UNKNOWN: "none in time",
    REFUSED: "refused by the licence",
    NOT_INSTALLED: "not installed",
}
"""Text in place of a number if there is no schedule, by status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A table of words and numbers."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int
    """Number of leading columns with words; the rest hold numbers."""


def summary(name: str, rows: Sequence[Row]) -> tuple[Summary, ...]:
    """Return the tables of a figure of the paper from rows of `poetmodel.sweeps.tables`."""
    makers = {"figure2": _map_summary, "table3": _pofo_summaries}
    return tuple(makers.get(name, _method_summaries)(rows))


def without(row: Row) -> str:
    """Return the text in place of a number for a row without a schedule."""
    status = str(row["status"])
    return _WORDS.get(status, status)


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Group rows by their values in some columns, in the order of first occurrence."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def overhead_ratio(row: Row) -> float | None:
    """Return the overhead as a fraction of the baseline; None without a schedule."""
    if row["overhead_j"] is None or not row["baseline_energy_j"]:
        return None
    return float(row["overhead_j"] / row["baseline_energy_j"])


def percent(ratio: float | None) -> str:
    """Return a fraction as a percentage with three digits, or a dash."""
    return "-" if ratio is None else f"{100 * ratio:.3g} %"


# -- overheads ---------------------------------------------------------------------------------


def _method_summaries(table: Sequence[Row]) -> Iterable[Summary]:
    """Yield the overheads on each model and device: methods down, budgets across."""
    for (model, device), rows in grouped(table, "model", "device").items():
        budgets = tuple(dict.fromkeys(row["ram"] for row in rows))
        with_deadlines = any(row["deadline"] for row in rows)
        lines = []
        for (deadline, method), line in grouped(rows, "deadline", "method").items():
            text_by_ram = {row["ram"]: _overhead(row) for row in line}
            limits = (deadline or "none",) if with_deadlines else ()
            lines.append((*limits, method, *(text_by_ram.get(ram, "") for ram in budgets)))
        heads = ("deadline", "method") if with_deadlines else ("method",)
        yield Summary(
            title=f"Energy overhead: {model}, {device}",
            heads=(*heads, *budgets),
            rows=tuple(lines),
            words=len(heads),
        )


def _overhead(row: Row) -> str:
    """Return the overhead as text, with the gap if the optimum is not proved."""
    ratio = overhead_ratio(row)
    if ratio is None:
        return without(row)
    text = percent(ratio)
    if row["method"] == "optimal" and row["axis_gap"] is not None and row["axis_gap"] > PROVEN:
        text += f" (gap {percent(row['axis_gap'])})"
    return text


# -- maps --------------------------------------------------------------------------------------


def _map_summary(rows: Sequence[Row]) -> Iterable[Summary]:
    """Yield one table of the recomputations and transfers of each schedule of the maps."""
    lines = []
    for row in rows:
        counts = (_count(row[name]) for name in ("recomputed", "paged_out", "paged_in"))
        lines.append((*(row[name] for name in ("model", "device", "ram")), *counts, _overhead(row)))
    words = ("model", "device", "RAM")
    yield Summary(
        title="Schedules of the maps",
        heads=(*words, "recomputed", "paged out", "paged in", "overhead"),
        rows=tuple(lines),
        words=len(words),
    )


def _count(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


# -- POFO --------------------------------------------------------------------------------------


def _pofo_summaries(table: Sequence[Row]) -> Iterable[Summary]:
    """Yield tables of POFO beside the optimum: at equal RAM, and at the smallest peak as quick."""
    for (model, device), rows in grouped(table, "model", "device").items():
        best = [row for row in rows if row["method"] == "optimal" and row["energy_j"] is not None]
        lines = []
        for row in rows:
            if row["method"] != "pofo":
                continue
            same = [other for other in best if other["ram"] == row["ram"] and not other["deadline"]]
            if row["energy_j"] is None or not same:
                lines.append((row["ram"], without(row), *[""] * 7))
                continue
            quick = [other for other in best if other["makespan_s"] <= row["makespan_s"]]
            smallest = min(quick, key=lambda other: other["peak_ram_bytes"], default=None)
            lines.append(
                (
                    row["ram"],
                    *_peak_time_overhead(row),
                    *_peak_time_overhead(same[0]),
                    *_peak_and_savings(row, smallest),
                )
            )
        yield Summary(
            title=f"POFO and the optimum: {model}, {device}",
            heads=(
                "RAM",
                *(f"{who} {what}" for who in ("pofo", "optimal") for what in _POFO_FIGURES),
                "least peak as quick",
                "saves",
            ),
            rows=tuple(lines),
            words=1,
        )


_POFO_FIGURES: Final = ("peak", "time", "overhead")


def _peak_time_overhead(row: Row) -> tuple[str, str, str]:
    return (
        format_bytes(row["peak_ram_bytes"]),
        format_seconds(row["makespan_s"]),
        percent(overhead_ratio(row)),
    )


def _peak_and_savings(row: Row, smallest: Row | None) -> tuple[str, str]:
    if smallest is None:
        return "none", ""
    ram, time = (1 - smallest[name] / row[name] for name in ("peak_ram_bytes", "makespan_s"))
    return format_bytes(smallest["peak_ram_bytes"]), f"{percent(ram)} RAM, {percent(time)} time"
