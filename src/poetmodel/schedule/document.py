"""Schedule files as documents: a schedule, its problem, and the metrics that the file states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from poetmodel.clock import infrequent_gc
from poetmodel.device.ram import DEVICE_RAM_KEYS, gauge_by_json_path
from poetmodel.schedule.identity import (
    GAP_TOLERANCE,
    OBJECTIVE_BOUND,
    OBJECTIVE_GAP,
    OBJECTIVE_VALUE,
)
from poetmodel.schedule.io import load_file, parse_schedule
from poetmodel.schedule.metrics import Display, metrics_at
from poetmodel.schedule.relations import Schedule

if TYPE_CHECKING:
    from pathlib import Path

    from poetmodel.schedule.io import ObjectiveEntry, ProblemEntry, ScheduleFile


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleDocument:
    """A parsed schedule file: the schedule, its problem, and the metrics that the file states."""

    schedule: Schedule
    """The relations, with the identity of the graph."""
    device: str | None
    """Key or name of the device; None if the file states none."""
    problem: ProblemEntry | None
    """The stated problem; None if the file states none."""
    status: str | None
    """The stated status, such as ``optimal`` or ``feasible``; None if the file states none."""
    stated_metrics: dict[str, float | None]
    """The stated metrics, by key; None for metrics that the file lacks."""
    objective: ObjectiveEntry | None = None
    """The stated objective with value, bound and gap; None if the file has none."""
    device_ram: dict[str, float | None] = field(default_factory=dict)
    """The file's statements on the device's RAM, by key in files or JSON path in the gauge."""
    history: tuple[tuple[float, float | None, float | None], ...] = ()
    """Seconds, best value and bound over time; see `SolveResult.history`. Empty if the file has
    none."""

    @property
    def claims(self) -> dict[str, float | None]:
        """The statements of the file that are passed to the verifier, by key.

        They are `stated_metrics` and `device_ram`. If the objective is that of the stated problem,
        not of a user's model, they include its value, bound and gap and, for the status
        ``optimal``, the gap tolerance (else None). The verifier ignores None and metrics that it
        cannot compute, such as the time of the solve.
        """
        entry, problem = self.objective, self.problem
        if entry is None or problem is None or entry.name or entry.minimize != problem.minimize:
            return self.stated_metrics | self.device_ram
        objective_claims = {
            OBJECTIVE_VALUE: entry.value,
            OBJECTIVE_BOUND: entry.bound,
            OBJECTIVE_GAP: entry.gap,
            GAP_TOLERANCE: problem.gap if self.status == "optimal" else None,
        }
        return self.stated_metrics | self.device_ram | objective_claims


def load_document(path: str | Path) -> ScheduleDocument:
    """Read a schedule file.

    Raises
    ------
    ScheduleError
        If the file cannot be read, is invalid (lists its errors), or contains no schedule.
    """
    return _to_document(load_file(path))


def parse_document(text: str, *, source: str) -> ScheduleDocument:
    """Parse the text of a schedule file; `source` names the file in errors.

    Raises `ScheduleError` with the errors of an invalid text, or if it contains no schedule.
    """
    return _to_document(parse_schedule(text, source=source))


def _to_document(file: ScheduleFile) -> ScheduleDocument:
    """Return a validated file as a document; metrics that the file lacks are None."""
    with infrequent_gc():
        schedule = Schedule.from_file(file)
    return ScheduleDocument(
        schedule=schedule,
        device=file.device,
        problem=file.problem,
        status=file.status,
        stated_metrics={
            metric.key: getattr(file, metric.key) for metric in metrics_at(Display.FILE)
        },
        objective=file.objective,
        device_ram=_stated_device_ram(file),
        history=tuple(file.history),
    )


def _stated_device_ram(file: ScheduleFile) -> dict[str, float | None]:
    """Return the values of `DEVICE_RAM_KEYS`, by key, and of the device gauge, by JSON path.

    Values that the file lacks are None; paths are absent without a gauge.
    """
    gauge_entry = file.device_ram
    metrics = {key: getattr(file, key) for key in DEVICE_RAM_KEYS}
    return metrics | gauge_by_json_path(None if gauge_entry is None else gauge_entry.model_dump())
