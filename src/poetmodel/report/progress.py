"""How incumbent and bound of a solve met, as a chart shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from poetmodel.problem import Quantity
from poetmodel.report.pictures import size_unit, time_unit
from poetmodel.report.presenter import share
from poetmodel.result import relative_gap
from poetmodel.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.problem import Problem
    from poetmodel.report.subject import Subject
    from poetmodel.result import Moment

LEAST: Final = 2
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
    if len(history) < LEAST:
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
    """Return by what values are divided, the unit then, and what they are."""
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
