"""What a solve ends with: why it stopped, what it holds, and how good that is."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from poetmodel.device.room import DeviceRoom
from poetmodel.errors import NoScheduleError
from poetmodel.problem import Quantity
from poetmodel.schedule.document import FORMAT, STATED, VERSION, dump, schedule_to_dict
from poetmodel.schedule.relations import RELATIONS, GraphIdentity

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule, Simulation


class Status(StrEnum):
    """What may be claimed of a result; each claim was proved."""

    OPTIMAL = "optimal"
    """A valid schedule whose gap is at most the one asked for."""
    FEASIBLE = "feasible"
    """A schedule with a larger gap, or one that the judge rejects (see `violations`)."""
    INFEASIBLE = "infeasible"
    """Proved: no schedule keeps the limits."""
    UNKNOWN = "unknown"
    """No schedule was found, and none was ruled out."""


class Termination(StrEnum):
    """Why a solve stopped. Says nothing about what it found."""

    PROVED = "proved"
    """Gap at most the requested one, or infeasibility proved."""
    TIME_LIMIT = "time_limit"
    """The wall-clock limit was reached."""
    INTERRUPTED = "interrupted"
    """The user or a callback asked to stop."""
    STALLED = "stalled"
    """The solver ended by itself with a larger gap than asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveResult:
    """A schedule with its proof, or why there is none.

    Figures are the simulator's, never the solver's.
    """

    problem: Problem
    """What was asked."""
    status: Status
    """What may be claimed."""
    termination: Termination
    """Why the solve stopped."""
    schedule: Schedule | None = None
    """The best schedule found."""
    simulation: Simulation | None = None
    """What the judge found it to do."""
    violations: tuple[str, ...] = ()
    """What the judge objects to; only schedules of ``paper`` may have any."""
    objective_bound: float | None = None
    """Proven lower bound on the minimized quantity, in its own unit."""
    overhead_bound_j: float = 0.0
    """Proven lower bound on the energy beyond the baseline [J]."""
    reason: str = ""
    """In words why there is no schedule, where there is none."""
    formulation: str = ""
    """The formulation that was solved."""
    reduction: str = ""
    """In words how the formulation reduced the graph, where it could not state it as it is."""
    backend: str = ""
    """The back end that solved it."""
    method: str = "optimal"
    """How the schedule was made."""
    time_limit_s: float | None = None
    """The limit given [s]."""
    requested_gap: float = 0.0
    """The gap asked for."""
    build_s: float = 0.0
    """Time to build and compile models [s]."""
    solve_s: float = 0.0
    """Time in the solver [s]."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of poetmodel, the solver and its wrapper."""
    statistics: Mapping[str, Any] = field(default_factory=dict)
    """Size of what was solved: columns, rows, nodes, rounds, ..."""
    log: str = field(default="", repr=False)
    """The solver's log."""

    @property
    def energy_j(self) -> float | None:
        """Energy of one step [J]."""
        return self.simulation.energy_j if self.simulation is not None else None

    @property
    def overhead_j(self) -> float | None:
        """Energy beyond the baseline [J]."""
        return self.simulation.overhead_j if self.simulation is not None else None

    @property
    def baseline_energy_j(self) -> float:
        """Energy of one computation of every node [J]."""
        return self.problem.baseline_energy_j

    @property
    def bound_j(self) -> float | None:
        """Proven lower bound on the energy of every schedule of the problem [J]."""
        if self.simulation is None:
            return None
        return self.baseline_energy_j + self.overhead_bound_j

    @property
    def gap(self) -> float | None:
        """How far the energy overhead may be from the least possible one, as a fraction of it."""
        if self.overhead_j is None:
            return None
        return relative_gap(self.overhead_j, self.overhead_bound_j)

    @property
    def objective_value(self) -> float | None:
        """The minimized quantity, in its own unit."""
        return None if self.simulation is None else measured(self.problem, self.simulation)

    @property
    def objective_gap(self) -> float | None:
        """Gap of the minimized quantity, beyond what every schedule pays (see `unavoidable`)."""
        if self.objective_value is None:
            return None
        if self.problem.minimize == Quantity.ENERGY:
            return self.gap
        paid = unavoidable(self.problem)
        bound = max(paid, self.objective_bound or 0.0)
        return relative_gap(self.objective_value - paid, bound - paid)

    @property
    def room(self) -> DeviceRoom | None:
        """What the schedule takes of the device's RAM; None without a schedule or a device."""
        if self.simulation is None:
            return None
        return DeviceRoom.of(
            self.problem.costs.device, self.problem.graph, self.simulation.peak_ram_bytes
        )

    def require_schedule(self) -> Schedule:
        """Return the schedule, or raise `NoScheduleError` that carries this result."""
        if self.schedule is None:
            raise NoScheduleError(self)
        return self.schedule

    def summary(self) -> str:
        """Return the outcome in one sentence."""
        if self.schedule is None:
            return f"{self.status}: {self.reason or 'no schedule was found'}"
        gap = self.objective_gap if self.objective_gap is not None else 0.0
        figures = f"energy {self.energy_j:.6g} J, bound {self.bound_j:.6g} J, gap {gap:.2%}"
        text = f"{self.status}: {figures}"
        if self.violations:
            text += f"; rejected by the judge: {'; '.join(self.violations)}"
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a schedule file; without a schedule, figures are None."""
        graph = self.problem.graph
        identity = GraphIdentity.of(graph)
        document: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "graph": {"name": identity.name, "sha256": identity.sha256},
            "device": self._device(),
            "problem": {
                **self.problem.to_dict(),
                "method": self.method,
                "formulation": self.formulation,
                "backend": self.backend,
                "time_limit_s": self.time_limit_s,
                "gap": self.requested_gap,
            },
            "status": str(self.status),
            "violations": list(self.violations),
            **({"reduction": self.reduction} if self.reduction else {}),
            "objective": {
                "minimize": str(self.problem.minimize),
                "value": self.objective_value,
                "bound": self._reported_bound(),
                "gap": self.objective_gap,
            },
        }
        document.update(self._figures())
        document["nodes"] = list(identity.nodes)
        document["tensors"] = list(identity.tensors)
        if self.schedule is not None:
            relations = schedule_to_dict(self.schedule)
            document.update((name, relations[name]) for name in RELATIONS)
        return document

    def save(self, path: str | Path) -> None:
        """Write a ``*.schedule.json`` file; see `to_dict`."""
        from poetmodel.data import write_text

        write_text(path, dump(self.to_dict()))

    def _device(self) -> str | None:
        device = self.problem.costs.device
        return None if device is None else device.key or device.name

    def _reported_bound(self) -> float | None:
        if self.simulation is None:
            return None
        if self.problem.minimize == Quantity.ENERGY:
            return self.bound_j
        return max(unavoidable(self.problem), self.objective_bound or 0.0)

    def _figures(self) -> dict[str, float | None]:
        simulation = self.simulation
        if simulation is None:
            return dict.fromkeys(STATED)
        return {
            "energy_j": simulation.energy_j,
            "bound_j": self.bound_j,
            "baseline_energy_j": self.baseline_energy_j,
            "overhead_j": simulation.overhead_j,
            "overhead_bound_j": self.overhead_bound_j,
            "gap": self.gap,
            "peak_ram_bytes": simulation.peak_ram_bytes,
            **({} if self.room is None else self.room.to_dict()),
            "compute_s": simulation.compute_s,
            "transfer_s": simulation.transfer_s,
            "makespan_s": simulation.makespan_s,
            "build_s": self.build_s,
            "solve_s": self.solve_s,
        }


def relative_gap(value: float, bound: float) -> float:
    """Return ``(value - bound) / value``, 0 where the bound reaches the value."""
    if value <= 0 or bound >= value:
        return 0.0
    return (value - bound) / value


def measured(problem: Problem, simulation: Simulation) -> float:
    """Return the quantity that a problem minimizes, as simulated, in its own unit."""
    if problem.minimize == Quantity.RAM:
        return simulation.peak_ram_bytes
    if problem.minimize == Quantity.WRITES:
        return simulation.written_bytes
    figure = simulation.time_s if problem.minimize == Quantity.TIME else simulation.energy_j
    return 0.0 if figure is None else figure


def unavoidable(problem: Problem) -> float:
    """Return the part of the minimized quantity that every schedule pays, in its own unit.

    One computation of every node costs the baseline energy, or the time of one pass; RAM and writes
    have no such part. Gaps are fractions of what is beyond it.
    """
    if problem.minimize == Quantity.ENERGY:
        return problem.baseline_energy_j
    if problem.minimize == Quantity.TIME:
        return problem.pass_time_s
    return 0.0
