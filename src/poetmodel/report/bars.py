"""Tables whose cells are bars: a row for each schedule or method, a column for each quantity."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from poetmodel.problem import DeadlineCounts, Quantity
from poetmodel.report.comparison import KEEP_ALL, Comparison, Rival
from poetmodel.report.presenter import plural, share
from poetmodel.report.timeline import IN_PARTS
from poetmodel.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from poetmodel.report.subject import Subject
    from poetmodel.schedule import Simulation

TROUBLES: Final = {
    "ram": "does not fit the budget",
    "storage": "needs more storage",
    "deadline": "misses the deadline",
    "energy": "is above the energy limit",
    "other": "breaks an own constraint or choice",
}
"""Remark on a schedule that breaks a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A quantity of the table."""

    name: str
    key: str
    """Its name among the facts."""
    trouble: str = ""
    """Which broken limit is one of this quantity."""
    limit_share: float | None = None
    """Where its limit stands, as a share of the longest bar; None without one."""
    limit_text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A bar."""

    text: str
    value: float | None
    share: float
    """Its length, as a share of the longest one."""
    over: bool
    """Whether it is above the limit of its column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A row of the table."""

    name: str
    note: str
    kind: str
    """``own``, ``other`` or ``broken``."""
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """A table of bars with what is to say about it."""

    title: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    lead: str = ""
    """The sentence before it."""
    notes: tuple[str, ...] = ()
    """Those after it."""


class _Measure(NamedTuple):
    """A quantity of a schedule."""

    column: Column
    read: Callable[[_Entry], float | None]
    words: Callable[[float], str]
    limit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A schedule with what is said of it."""

    name: str
    simulation: Simulation
    reserved_bytes: int = 0
    """Bytes of a compiled step beyond the simulated ones [B]."""
    broken: tuple[str, ...] = ()
    note: str = ""
    is_own: bool = False


def comparison_bars(comparison: Comparison) -> Bars:
    """Return the table of a comparison: the schedules of a report, then the methods."""
    subjects = comparison.subjects
    title = ", ".join(subject.label for subject in subjects)
    if comparison.reason:
        lead = f"Nothing to compare with: {comparison.reason}."
        return Bars(title=title, columns=(), lines=(), lead=lead)
    entries = [_own(subject, several=len(subjects) > 1) for subject in subjects]
    entries += _entries(comparison.rivals, subjects[0])
    measures = [_overhead(subjects[0]), _peak(subjects[0]), _time(subjects[0])]
    columns, lines = _table(entries, measures)
    return Bars(
        title=title,
        columns=columns,
        lines=lines,
        lead=_lead(subjects[0], comparison.rivals),
        notes=tuple(f"{r.name}: {r.reason}" for r in comparison.rivals if r.simulation is None),
    )


def overlay_bars(subjects: Sequence[Subject]) -> Bars:
    """Return energy, peak, time and writes of several schedules beside each other."""
    first = subjects[0]
    budgets = {subject.budget_bytes for subject in subjects}
    deadlines = {(side.problem.deadline_s, side.problem.deadline_counts) for side in subjects}
    measures = [_peak(first if len(budgets) == 1 else None), _WRITTEN]
    if all(subject.costs is not None for subject in subjects):
        measures = [
            _overhead(first),
            measures[0],
            _time(first if len(deadlines) == 1 else None),
            _WRITTEN,
        ]
    columns, lines = _table([_own(subject, several=True) for subject in subjects], measures)
    return Bars(title="schedules", columns=columns, lines=lines)


def _own(subject: Subject, *, several: bool) -> _Entry:
    violations = len(subject.verdict.violations)
    status = {"optimal": "proven optimal", "feasible": "not proven"}
    note = status.get(subject.document.status or "", "")
    return _Entry(
        name=f"{subject.label}: {subject.sources.schedule}" if several else "this schedule",
        simulation=subject.simulation,
        reserved_bytes=subject.peak_ram_bytes - subject.simulation.peak_ram_bytes,
        broken=("rejected",) if violations else (),
        note=f"rejected: {plural(violations, 'violation')}" if violations else note,
        is_own=True,
    )


def _entries(rivals: Iterable[Rival], beside: Subject) -> Iterator[_Entry]:
    for rival in rivals:
        if rival.simulation is not None:
            yield _Entry(
                name=_name(rival, beside),
                simulation=rival.simulation,
                reserved_bytes=rival.peak_ram_bytes(beside) - rival.simulation.peak_ram_bytes,
                broken=rival.broken,
                note=" and ".join(TROUBLES[trouble] for trouble in rival.broken),
            )


def _name(rival: Rival, beside: Subject) -> str:
    is_less = rival.peak_ram_bytes(beside) < beside.keep_all_bytes
    return IN_PARTS if rival.method == KEEP_ALL and is_less else rival.name


# -- quantities -------------------------------------------------------------------------------


def _overhead(subject: Subject) -> _Measure:
    """Return the energy above a single pass, or the time where that is what was asked for."""
    if _is_timed(subject):
        column = Column(name="time above a single pass", key="overtime_ratio")
    else:
        column = Column(name="energy above a single pass", key="overhead_ratio", trouble="energy")
    return _Measure(column, lambda entry: _ratio(subject, entry.simulation), _more)


def _is_timed(subject: Subject) -> bool:
    """Whether time was minimized, or nobody asked for energies."""
    return subject.problem.minimize == Quantity.TIME or not subject.problem.asks_energy


def _peak(limited: Subject | None) -> _Measure:
    column = Column(name="peak RAM", key="peak_ram_bytes", trouble="ram")
    budget = None if limited is None else limited.budget_bytes
    return _Measure(
        column,
        lambda entry: entry.simulation.peak_ram_bytes + entry.reserved_bytes,
        format_bytes,
        budget,
    )


def _time(limited: Subject | None) -> _Measure:
    """Return the time of a step, as the deadline counts it if there is one."""
    deadline_s = None if limited is None else limited.problem.deadline_s
    if limited is None or deadline_s is None:
        column = Column(name="time of a step", key="makespan_s")
        return _Measure(column, lambda entry: entry.simulation.makespan_s, format_seconds)
    computing = limited.problem.deadline_counts == DeadlineCounts.COMPUTE
    name = "time of computing" if computing else "time of a step"
    column = Column(name=name, key="deadline_time_s", trouble="deadline")
    return _Measure(column, lambda entry: entry.simulation.time_s, format_seconds, deadline_s)


def _ratio(subject: Subject, simulation: Simulation) -> float | None:
    """Return the share above a single pass that a schedule of the problem takes."""
    if _is_timed(subject):
        makespan_s, pass_s = simulation.makespan_s, subject.problem.pass_time_s
        return makespan_s / pass_s - 1 if pass_s and makespan_s is not None else None
    baseline_j, overhead_j = simulation.baseline_energy_j, simulation.overhead_j
    return overhead_j / baseline_j if baseline_j and overhead_j is not None else None


def _more(ratio: float) -> str:
    return f"+{share(ratio)}"


_WRITTEN: Final = _Measure(
    Column(name="written to storage", key="written_bytes"),
    lambda entry: entry.simulation.written_bytes,
    format_bytes,
)


def _table(
    entries: Sequence[_Entry], measures: Iterable[_Measure]
) -> tuple[tuple[Column, ...], tuple[Line, ...]]:
    columns: list[Column] = []
    cells: list[list[Cell]] = [[] for _ in entries]
    for plain, read, words, limit in measures:
        values = [read(entry) for entry in entries]
        most = max([value for value in (*values, limit) if value is not None], default=0) or 1
        ratio, text = (None, "") if limit is None else (limit / most, words(limit))
        column = replace(plain, limit_share=ratio, limit_text=text)
        columns.append(column)
        for entry, value, row in zip(entries, values, cells, strict=True):
            cell = Cell(
                text="unknown" if value is None else words(value),
                value=value,
                share=(value or 0.0) / most,
                over=bool(column.trouble) and column.trouble in entry.broken,
            )
            row.append(cell)
    lines = (
        Line(name=entry.name, note=entry.note, kind=_kind(entry), cells=tuple(row))
        for entry, row in zip(entries, cells, strict=True)
    )
    return tuple(columns), tuple(lines)


def _kind(entry: _Entry) -> str:
    if entry.broken:
        return "broken"
    return "own" if entry.is_own else "other"


# -- words ------------------------------------------------------------------------------------


def _lead(subject: Subject, rivals: Sequence[Rival]) -> str:
    """Return a sentence on the result of the comparison."""
    own = _ratio(subject, subject.simulation)
    if own is None or not subject.verdict.valid:
        return ""
    what = f"{_more(own)} {'time' if _is_timed(subject) else 'energy'}"
    ratios = [
        (ratio, rival.name)
        for rival in rivals
        if rival.simulation is not None and not rival.broken
        if (ratio := _ratio(subject, rival.simulation)) is not None
    ]
    if not ratios:
        return f"{what}; none of the earlier methods keeps the limits."
    best, name = min(ratios)
    if best == own:
        return f"{what}, as {name}."
    if best < own:
        return f"{what}; {name} keeps the limits with less, {_more(best)}."
    return f"{what} instead of {_more(best)} by {name}, the best earlier method within the limits."


def limits_in_words(bars: Bars) -> Iterator[str]:
    """Yield the limits that the lines of a table stand for."""
    names = {"ram": "RAM budget", "deadline": "deadline"}
    for column in bars.columns:
        if column.limit_share is not None:
            yield f"{names[column.trouble]} {column.limit_text}"
