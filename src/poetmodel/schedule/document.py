"""Schedule files as documents: a schedule, its problem, and the metrics that the file states."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from poetmodel.clock import infrequent_gc
from poetmodel.device.ram import DEVICE_RAM_KEYS, gauge_by_json_path
from poetmodel.schedule.identity import (
    GAP_TOLERANCE,
    OBJECTIVE_BOUND,
    OBJECTIVE_GAP,
    OBJECTIVE_VALUE,
    OLD_COSTS_NOTE,
    OTHER_COSTS,
)
from poetmodel.schedule.io import load_file
from poetmodel.schedule.metrics import Display, Group, metrics_at
from poetmodel.schedule.relations import Schedule
from poetmodel.schedule.verification import false_claims

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from poetmodel.problem import Problem
    from poetmodel.schedule.io import ObjectiveEntry, ProblemEntry, ScheduleFile
    from poetmodel.schedule.simulation import Simulation


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
    costs_sha256: str | None = None
    """Digest of the costs that the statements were computed with; None if the file has none."""
    notes: tuple[str, ...] = ()
    """Notes on ignored keys of the file."""

    @property
    def claims(self) -> dict[str, float | None]:
        """The statements of the file that are passed to the verifier, by key.

        Those on objective, gap and proof are omitted if the objective is that of a user's model.
        The verifier ignores None and metrics that it cannot compute.
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

    def has_other_costs(self, problem: Problem) -> bool:
        """Whether the statements were computed with other costs than those of `problem`."""
        return self.costs_sha256 not in (None, problem.costs_sha256)

    def memory_claims(self) -> dict[str, float | None]:
        """Return the stated RAM metrics, which do not depend on costs, by key."""
        return {
            metric.key: self.stated_metrics.get(metric.key)
            for metric in metrics_at(Display.FILE, Group.MEMORY)
        }

    def compare_claims(
        self, problem: Problem, simulation: Simulation, claims: Mapping[str, float | None]
    ) -> Iterator[str]:
        """Yield notes on `claims` that may differ from the simulation because of other costs."""
        memory_keys = self.memory_claims().keys()
        differences = false_claims(
            problem, simulation, {key: claims[key] for key in claims if key not in memory_keys}
        )
        if self.has_other_costs(problem):
            yield f"the schedule was {OTHER_COSTS}: the status and bounds of its file are not used"
            yield from (f"{OTHER_COSTS}: {difference}" for difference in differences)
        elif self.costs_sha256 is None and any(differences):
            yield OLD_COSTS_NOTE

    def without_proofs(self) -> ScheduleDocument:
        """Return the document without bounds, gaps and history; the status is at most feasible."""
        unproven_metrics: dict[str, float | None] = {
            metric.key: None for metric in metrics_at(Display.FILE, Group.PROOF)
        }
        objective = self.objective
        if objective is not None:
            objective = objective.model_copy(update=dict.fromkeys(("value", "bound", "gap")))
        return replace(
            self,
            status="feasible" if self.status == "optimal" else self.status,
            stated_metrics=self.stated_metrics | unproven_metrics,
            objective=objective,
            history=(),
        )


def load_document(path: str | Path, content: bytes | None = None) -> ScheduleDocument:
    """Read a schedule file, or its `content`; `ScheduleError` if it states no valid schedule."""
    file = load_file(path, content)
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
        costs_sha256=file.costs_sha256,
        notes=file.notes,
    )


def _stated_device_ram(file: ScheduleFile) -> dict[str, float | None]:
    """Return the values of `DEVICE_RAM_KEYS`, by key, and of the device gauge, by JSON path."""
    gauge_entry = file.device_ram
    metrics = {key: getattr(file, key) for key in DEVICE_RAM_KEYS}
    return metrics | gauge_by_json_path(None if gauge_entry is None else gauge_entry.model_dump())
