"""Schedule files as documents: a schedule, its problem, and what the file states of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from poetmodel.clock import rare_collections
from poetmodel.device.ram import DEVICE_RAM_KEYS, gauge_by_json_path
from poetmodel.schedule.identity import OBJECTIVE_BOUND, OBJECTIVE_GAP, OBJECTIVE_VALUE, PROVED_GAP
from poetmodel.schedule.io import load_file, parse_schedule, validated_schedule
from poetmodel.schedule.metrics import Display, metrics_at
from poetmodel.schedule.relations import Schedule

if TYPE_CHECKING:
    from pathlib import Path

    from poetmodel.schedule.io import ObjectiveEntry, ProblemEntry, ScheduleFile


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleDocument:
    """A whole schedule file: the schedule, the problem it solves, and the figures it states."""

    schedule: Schedule
    """The relations, with the identity of their graph."""
    device: str | None
    problem: ProblemEntry | None
    """None in a file of bare relations."""
    status: str | None
    """``optimal`` or ``feasible``; None in a file of bare relations."""
    stated: dict[str, float | None]
    """The metrics of the file, by key; None where it has none."""
    objective: ObjectiveEntry | None = None
    room: dict[str, float | None] = field(default_factory=dict)
    """Statements of the file on the device's RAM, by key."""
    history: tuple[tuple[float, float | None, float | None], ...] = ()
    """How incumbent and bound met, where the file says so; see `SolveResult.history`."""

    @property
    def claims(self) -> dict[str, float | None]:
        """All that the file says which the simulator knows, by key."""
        said, problem = self.objective, self.problem
        if said is None or problem is None or said.name or said.minimize != problem.minimize:
            return self.stated | self.room
        of_objective = {
            OBJECTIVE_VALUE: said.value,
            OBJECTIVE_BOUND: said.bound,
            OBJECTIVE_GAP: said.gap,
            PROVED_GAP: problem.gap if self.status == "optimal" else None,
        }
        return self.stated | self.room | of_objective


def load_document(path: str | Path) -> ScheduleDocument:
    """Read a schedule file; `ScheduleError` names every fault found, or says what is missing."""
    return _document(load_file(path))


def parse_document(text: str, *, source: str) -> ScheduleDocument:
    """Read the text of a schedule file; `source` names it in errors."""
    return _document(parse_schedule(text, source=source))


def document_from(values: object, *, source: str) -> ScheduleDocument:
    """Return the content of a schedule file as a document; `source` names it in errors."""
    return _document(validated_schedule(values, source=source))


def _document(file: ScheduleFile) -> ScheduleDocument:
    with rare_collections():
        schedule = Schedule.of_file(file)
    return ScheduleDocument(
        schedule=schedule,
        device=file.device,
        problem=file.problem,
        status=file.status,
        stated={metric.key: getattr(file, metric.key) for metric in metrics_at(Display.FILE)},
        objective=file.objective,
        room=_of_device(file),
        history=tuple(file.history),
    )


def _of_device(file: ScheduleFile) -> dict[str, float | None]:
    """Return the file's statements on the RAM of its device."""
    stated = file.device_ram
    figures = {key: getattr(file, key) for key in DEVICE_RAM_KEYS}
    return figures | gauge_by_json_path(None if stated is None else stated.model_dump())
