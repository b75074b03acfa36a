"""The result of a solve: a schedule, the reason for termination, and proven bounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.ram import DeviceRam, device_ram_metrics
from poetmodel.errors import NoScheduleError, quote
from poetmodel.headers import THIS_VERSION, WRITTEN_BY
from poetmodel.problem import USER_OBJECTIVE, Problem, Quantity
from poetmodel.problem.totals import format_terms
from poetmodel.schedule.identity import COSTS, FORMAT, HISTORY, VERSION, GraphIdentity
from poetmodel.schedule.metrics import Display, Group, metrics_at
from poetmodel.schedule.relations import format_document
from poetmodel.units import brief, format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from poetmodel.schedule import Schedule, Simulation

    HistoryEntry = tuple[float, float | None, float | None]
    """Seconds since the start of a solve, best value and best bound, both without the baseline.

    Value and bound are None before the first."""


class Status(StrEnum):
    """Claim of a result; ``optimal`` and ``infeasible`` are proven."""

    OPTIMAL = "optimal"
    """A valid schedule, proven optimal within the gap tolerance."""
    FEASIBLE = "feasible"
    """A schedule whose gap is above the tolerance, or that the verifier refuses (`violations`)."""
    INFEASIBLE = "infeasible"
    """Proven: no schedule meets all limits."""
    UNKNOWN = "unknown"
    """No schedule was found, and infeasibility was not proven."""


class Termination(StrEnum):
    """Reason why a solve stopped."""

    PROVED = "proved"
    """The gap is within the tolerance, or the problem is proven infeasible."""
    TIME_LIMIT = "time_limit"
    """The time limit was reached, or building the model would exceed it."""
    INTERRUPTED = "interrupted"
    """The user or a callback stopped the solve."""
    STALLED = "stalled"
    """The solver or method ended by itself, without a valid schedule within the gap tolerance."""


QUANTITY_NAMES: Final = {
    Quantity.ENERGY: "energy",
    Quantity.TIME: "time",
    Quantity.RAM: "peak RAM",
    Quantity.WRITES: "bytes paged out",
}
"""Display names of quantities to minimize."""

_LAST_GROUPS: Final = (Group.WORK, Group.STEP, Group.EFFORT)
"""Groups of the metrics that come last in a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelObjective:
    """An objective that the user added to a model in place of the problem's."""

    name: str
    """Name of the Pyomo objective."""
    sense: str
    """``minimize`` or ``maximize``."""
    value: float
    """Value of this objective for the schedule."""
    bound: float | None
    """Proven bound: no solution of the model has a better value; None if no bound is proven."""

    @property
    def gap(self) -> float:
        """|value - bound| / |value|, or / |bound| for the value 0; 1 without a bound.

        0 if the value is better than the bound.
        """
        if self.bound is None:
            return 1.0
        difference = (
            self.value - self.bound if self.sense == "minimize" else self.bound - self.value
        )
        return max(0.0, difference) / (abs(self.value) or abs(self.bound) or 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveResult:
    """A schedule with its proven bound, or the reason why there is none.

    Metrics of the schedule come from `simulation`, never from the solver, except the value of
    `model_objective`. Without a schedule, they are None.
    """

    problem: Problem
    """The problem."""
    status: Status
    """Claim about the schedule, or about its absence."""
    termination: Termination
    """Reason why the solve stopped."""
    schedule: Schedule | None = None
    """The best schedule found, the incumbent; None without one."""
    simulation: Simulation | None = None
    """Simulation of the schedule; None without a schedule."""
    violations: tuple[str, ...] = ()
    """Messages on the rules and limits that the schedule violates. `solve` returns a schedule with
    violations only for ``paper``."""
    objective_bound: float | None = None
    """Proven lower bound on the problem's objective, in its unit, baseline included. None with
    `model_objective`; `solve` returns None without a schedule, too."""
    model_objective: ModelObjective | None = None
    """The user's objective of a model in place of the problem's, if there is one. Then status,
    `summary` and the objective in the file refer to this objective."""
    overhead_bound_j: float = 0.0
    """Proven lower bound on the energy overhead, the energy beyond the baseline [J]; 0 if none is
    proven, or if another quantity is minimized."""
    reason: str = ""
    """Reason why there is no schedule, or why the proof of the solver was dropped."""
    formulation: str = ""
    """Name of the formulation."""
    reduction: str = ""
    """Description of the change to a graph that the formulation cannot represent directly; empty
    without a change."""
    backend: str = ""
    """Name of the back end."""
    solver_options: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """Options of the back end, by its names."""
    method: str = "optimal"
    """Name of the method."""
    time_limit_s: float | None = None
    """Time limit [s]."""
    requested_gap: float = 0.0
    """Gap tolerance, as a fraction."""
    build_s: float = 0.0
    """Time to build models and convert them for the solver [s]."""
    solve_s: float = 0.0
    """Time of the solve minus `build_s`: search, solver, verification [s]. Wall time or, where a
    limit on processor time replaces that on wall time, processor time."""
    verify_s: float = 0.0
    """Wall time of the verification of the schedule, included in `solve_s` [s]."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of poetmodel, the solver and its wrapper."""
    history: tuple[HistoryEntry, ...] = field(default=(), repr=False)
    """Incumbents and bounds over time: seconds since the start, best value and best bound up to
    then (None before the first). Values and bounds exclude the baseline."""
    statistics: Mapping[str, Any] = field(default_factory=dict)
    """Sizes of the solved models: columns, rows, nodes, rounds, ..."""
    log: str = field(default="", repr=False)
    """The solver's log."""

    def __repr__(self) -> str:
        """Return graph, status, metrics of the schedule, number of violations, method and time."""
        facts = [f"{self.status}: {self.reason}" if self.reason else str(self.status)]
        if self.simulation is not None and self.energy_j is not None:
            gap = self.gap or 0.0
            energy = f"energy {format_joules(self.energy_j)}"
            if self.minimizes_energy:
                facts += [f"{energy}, gap {gap:.2%}"]
            else:
                is_user_defined = (
                    self.model_objective is not None or self.problem.minimize == USER_OBJECTIVE
                )
                name = "objective" if is_user_defined else self._objective_name()
                facts += [f"{name} {self._format_amount(self.value or 0.0)}, gap {gap:.2%}"]
                facts += [energy] if self.problem.uses_energy or is_user_defined else []
            facts += [f"peak RAM {format_bytes(self.simulation.peak_ram_bytes)}"]
        facts += [f"{len(self.violations)} violations"] if self.violations else []
        wall_text = format_seconds(self.wall_s)
        return brief(
            self, quote(self.problem.graph.name), *facts, f"method {self.method}, {wall_text}"
        )

    @property
    def wall_s(self) -> float:
        """Time of the whole solve: `build_s` plus `solve_s` [s]."""
        return self.build_s + self.solve_s

    @property
    def energy_j(self) -> float | None:
        """Energy of one training step [J]; None without a schedule."""
        return self.simulation.energy_j if self.simulation is not None else None

    @property
    def overhead_j(self) -> float | None:
        """Energy beyond the baseline [J]; None without a schedule."""
        return self.simulation.overhead_j if self.simulation is not None else None

    @property
    def baseline_energy_j(self) -> float:
        """Energy of a single pass: every node computed once [J]."""
        return self.problem.baseline_energy_j

    @property
    def peak_ram_bytes(self) -> int | None:
        """Peak RAM, without resident bytes [B]; None without a schedule."""
        return None if self.simulation is None else self.simulation.peak_ram_bytes

    @property
    def compute_s(self) -> float | None:
        """Compute time of one training step [s]; None without a schedule."""
        return None if self.simulation is None else self.simulation.compute_s

    @property
    def transfer_s(self) -> float | None:
        """Transfer time of one training step [s]; None without a schedule."""
        return None if self.simulation is None else self.simulation.transfer_s

    @property
    def makespan_s(self) -> float | None:
        """Time of one training step from start to end [s]; None without a schedule."""
        return None if self.simulation is None else self.simulation.makespan_s

    @property
    def minimizes_energy(self) -> bool:
        """Whether energy was minimized."""
        return self.model_objective is None and self.problem.minimize == Quantity.ENERGY

    @property
    def bound_j(self) -> float | None:
        """Proven lower bound on the energy of every schedule of the problem [J].

        At most `energy_j`. None without a schedule. If energy was not minimized, None unless
        `overhead_bound_j` is above 0.
        """
        if self.energy_j is None or not self._bounds_energy:
            return None
        return min(self.problem.baseline_energy_j + self.overhead_bound_j, self.energy_j)

    @property
    def value(self) -> float | None:
        """Value of `model_objective` if there is one, else of the problem's objective, in its unit.

        None without a schedule.
        """
        if self.model_objective is not None:
            return self.model_objective.value
        if self.simulation is None:
            return None
        return self.problem.objective.value_of(self.simulation)

    @property
    def bound(self) -> float | None:
        """Proven bound on the objective, in its unit; None without a schedule.

        With `model_objective`, the user's objective of a model, its bound; None if none is proven.
        For the problem's objective, a lower bound, baseline included, at most `value`.
        """
        if self.model_objective is not None:
            return self.model_objective.bound
        if self.simulation is None:
            return None
        if self.minimizes_energy:
            return self.bound_j
        return min(self.proven_bound, self.problem.objective.value_of(self.simulation))

    @property
    def overhead(self) -> float | None:
        """Value of the objective without the baseline, in its unit.

        The objective of a model has no known baseline: its overhead is its value. None without a
        schedule.
        """
        if self.model_objective is not None:
            return self.model_objective.value
        if self.simulation is None:
            return None
        return self.problem.objective.overhead_of(self.simulation)

    @property
    def gap(self) -> float | None:
        """(overhead - bound on the overhead) / overhead of the objective, as a fraction.

        0 if the bound reaches the value; None without a schedule. With a `model_objective`, the gap
        is its `ModelObjective.gap` instead.
        """
        if self.model_objective is not None:
            return self.model_objective.gap
        if self.simulation is None or self.overhead is None:
            return None
        if self.minimizes_energy:
            return relative_gap(self.overhead, self.overhead_bound_j)
        if self.bound == self.value:
            return 0.0
        return relative_gap(self.overhead, self.proven_bound - self.problem.objective.baseline)

    @property
    def gap_over_time(self) -> tuple[tuple[float, float], ...]:
        """Time [s] and gap of each entry of `history`; see the function `gap_over_time`."""
        return gap_over_time(self.history)

    @property
    def primal_integral_s(self) -> float | None:
        """Integral of the primal gap over `history` [s], with its last value as reference.

        None if `history` has no value; see the function `primal_integral_s`.
        """
        return primal_integral_s(self.history)

    @property
    def proven_bound(self) -> float:
        """Proven lower bound on the problem's objective, in its unit.

        The maximum of `objective_bound` and `Objective.baseline`; that baseline if
        `objective_bound` is None. Does not bound `model_objective`. May exceed the value by a
        rounding error.
        """
        baseline = self.problem.objective.baseline
        return baseline if self.objective_bound is None else max(baseline, self.objective_bound)

    @property
    def device_ram(self) -> DeviceRam | None:
        """RAM of the schedule compared with the device's; None without a schedule or a device."""
        if self.simulation is None:
            return None
        device, graph = self.problem.costs.device, self.problem.graph
        return DeviceRam.compare(device, graph, self.simulation.peak_use)

    def require_schedule(self) -> Schedule:
        """Return the schedule; raise `NoScheduleError` with this result if there is none."""
        if self.schedule is None:
            raise NoScheduleError(self)
        return self.schedule

    def summary(self) -> str:
        """Return status, objective, bound, gap and any violations as one line of text.

        Without a schedule, the text has the status and the reason.
        """
        if self.schedule is None:
            return f"{self.status}: {self.reason or 'no schedule was found'}"
        energy = f"energy {self.energy_j:.6g} J"
        bound = "none" if self.bound is None else self._format_amount(self.bound)
        if self.minimizes_energy:
            metrics_text = f"{energy}, bound {self.bound_j:.6g} J, gap {self.gap:.2%}"
        elif self.model_objective is not None or self.problem.minimize == USER_OBJECTIVE:
            metrics_text = (
                f"{self._objective_name()}: {self.value:.6g}, bound {bound}, gap {self.gap:.2%}"
            )
            metrics_text += f"; {energy}"
        else:
            value = self._format_amount(self.value or 0.0)
            metrics_text = f"{self._objective_name()} {value}, bound {bound}, gap {self.gap:.2%}"
            metrics_text += f"; {energy}" if self.problem.uses_energy else ""
        rejection = f"; rejected by the verifier: {'; '.join(self.violations)}"
        return f"{self.status}: {metrics_text}{rejection if self.violations else ''}"

    def to_dict(self) -> dict[str, Any]:
        """Return a schedule file's content; without a schedule, None metrics and no relations."""
        identity, device = GraphIdentity.from_graph(self.problem.graph), self.problem.costs.device
        has_state, schedule = bool(self.problem.graph.state_tensors), self.schedule
        return {
            "format": FORMAT,
            "version": VERSION,
            WRITTEN_BY: THIS_VERSION,
            "graph": {"name": identity.name, "sha256": identity.sha256},
            "device": None if device is None else device.short_name,
            COSTS: {"sha256": self.problem.costs_sha256},
            "problem": {
                **self.problem.to_dict(),
                "method": self.method,
                "formulation": self.formulation,
                "backend": self.backend,
                "time_limit_s": self.time_limit_s,
                "gap": self.requested_gap,
                **({"solver_options": dict(self.solver_options)} if self.solver_options else {}),
            },
            "status": str(self.status),
            "violations": list(self.violations),
            **({"reduction": self.reduction} if self.reduction else {}),
            "objective": self._objective_entry(),
            **self._file_metrics(),
            **(
                {HISTORY: [_round_history_entry(point) for point in self.history]}
                if self.history
                else {}
            ),
            "nodes": list(identity.nodes),
            "tensors": list(identity.tensors),
            **({} if schedule is None else schedule.entries(has_state=has_state)),
        }

    def save(self, path: str | Path) -> None:
        """Write a ``*.schedule.json`` file with the content of `to_dict`; replace an existing file.

        Raises `InputError` if the file cannot be written, and `TooLargeError` like `Schedule.save`.
        """
        from poetmodel.files import write_text

        write_text(path, format_document(self.to_dict()))

    @property
    def _bounds_energy(self) -> bool:
        """Whether energy was minimized, or `overhead_bound_j` is above 0."""
        return self.minimizes_energy or self.overhead_bound_j > 0

    def _objective_name(self) -> str:
        model_objective = self.model_objective
        if model_objective is not None:
            return f"{model_objective.sense} {model_objective.name}"
        if self.problem.minimize == USER_OBJECTIVE:
            return format_terms(self.problem.user_objective)
        return QUANTITY_NAMES[Quantity(self.problem.minimize)]

    def _format_amount(self, value: float) -> str:
        """Format a value of the objective with its unit; without one for `model_objective`."""
        if self.model_objective is not None:
            return f"{value:.6g}"
        return self.problem.objective.format(value)

    def _objective_entry(self) -> dict[str, Any]:
        """Return the entry ``objective`` of a schedule file."""
        model_objective = self.model_objective
        return {
            "minimize": str(self.problem.minimize) if model_objective is None else USER_OBJECTIVE,
            "value": self.value,
            "bound": self.bound,
            "gap": self.gap,
            **(
                {}
                if model_objective is None
                else {"name": model_objective.name, "sense": model_objective.sense}
            ),
        }

    def _file_metrics(self) -> dict[str, Any]:
        """Return a schedule file's metrics by key; their values are None without a schedule."""
        first_groups = (Group.ENERGY, Group.PROOF, Group.MEMORY)
        if self.simulation is None:
            groups = (*first_groups, *_LAST_GROUPS)
            return {metric.key: None for metric in metrics_at(Display.FILE, *groups)}
        device_ram, device = self.device_ram, self.problem.costs.device
        storage = None if device is None else device.storage
        has_endurance = storage is not None and storage.endurance_cycles is not None
        return {
            **self._metrics(self.simulation, *first_groups),
            **({} if device_ram is None else device_ram_metrics(device_ram)),
            **(self._metrics(self.simulation, Group.STORAGE, Group.WEAR) if has_endurance else {}),
            **self._metrics(self.simulation, *_LAST_GROUPS),
        }

    def _metrics(self, simulation: Simulation, *groups: Group) -> dict[str, Any]:
        """Return the metrics of `groups` for a schedule file, by key.

        Bounds, gap and times of the solve are those of this result, not of `simulation`.
        """
        claims = {
            "bound_j": self.bound_j,
            "overhead_bound_j": self.overhead_bound_j if self._bounds_energy else None,
            "gap": self._energy_gap(),
            "build_s": self.build_s,
            "solve_s": self.solve_s,
            "primal_integral_s": self.primal_integral_s,
        }
        return {
            metric.key: claims[metric.key]
            if metric.value_of is None
            else metric.value_of(simulation)
            for metric in metrics_at(Display.FILE, *groups)
        }

    def _energy_gap(self) -> float | None:
        """Return the gap of the energy overhead, as a fraction; None without schedule or bound."""
        if self.overhead_j is None or not self._bounds_energy:
            return None
        return relative_gap(self.overhead_j, self.overhead_bound_j)


def _round_history_entry(entry: HistoryEntry) -> list[float | None]:
    return [None if value is None else float(f"{value:.10g}") for value in entry]


def gap_over_time(history: Sequence[HistoryEntry]) -> tuple[tuple[float, float], ...]:
    """Return (seconds, gap) for each entry of a history; each gap is valid until the next entry.

    The gap is (value - bound) / value without the baseline; 1 before the first schedule.
    """
    return tuple(
        (seconds, 1.0 if value is None else min(1.0, relative_gap(value, bound or 0.0)))
        for seconds, value, bound in history
    )


def primal_integral_s(
    history: Sequence[HistoryEntry], best_value: float | None = None
) -> float | None:
    """Return the primal integral of a history [s]; smaller is better, None without a schedule.

    The primal gap to `best_value` (default: the last value), 1 before the first schedule, is
    integrated from 0 s to the last entry. `best_value` excludes the baseline, like the history.

    Source: Berthold, "Measuring the impact of primal heuristics", Operations Research Letters 41
    (2013).
    """
    last_value = None if not history else history[-1][1]
    if last_value is None:
        return None
    reference = last_value if best_value is None else best_value
    total_s, last_s, primal_gap = 0.0, 0.0, 1.0
    for seconds, value, _ in history:
        total_s += primal_gap * (seconds - last_s)
        last_s = seconds
        primal_gap = 1.0 if value is None else relative_gap(value, reference)
    return total_s


def relative_gap(value: float, bound: float) -> float:
    """Return ``(value - bound) / value``; 0 if the bound reaches the value or the value is <= 0."""
    if value <= 0 or bound >= value:
        return 0.0
    return (value - bound) / value
