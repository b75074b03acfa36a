"""Verified schedule files, and the subjects of a report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from poetmodel.device import Costs
from poetmodel.device.ram import DeviceRam
from poetmodel.graph import Graph, checkpoint_all_peak_bytes
from poetmodel.graph.catalogue import DEFAULT_SHAPE, InputShape
from poetmodel.planner import verify
from poetmodel.schedule import (
    RELATIONS,
    ConstraintValue,
    Schedule,
    Simulation,
    Verdict,
    constraint_values,
)
from poetmodel.schedule.metrics import Display, metrics_at
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from poetmodel.plan import ArenaCheck, Plan, PlanCheck
    from poetmodel.problem import Problem
    from poetmodel.result import SolveResult
    from poetmodel.schedule.document import ScheduleDocument


def make_document(result: SolveResult) -> ScheduleDocument:
    """Return the schedule document of a result: history unrounded, without `device_ram`."""
    from poetmodel.schedule.document import ScheduleDocument
    from poetmodel.schedule.io import ObjectiveEntry, ProblemEntry

    values = result.to_dict()
    return ScheduleDocument(
        schedule=result.require_schedule(),
        device=values["device"],
        problem=ProblemEntry.model_validate(values["problem"]),
        status=values["status"],
        stated_metrics={metric.key: values.get(metric.key) for metric in metrics_at(Display.FILE)},
        objective=ObjectiveEntry.model_validate(values["objective"]),
        history=result.history,
    )


def drop_unknown_pairs(graph: Graph, schedule: Schedule) -> Schedule:
    """Return a schedule without the pairs whose stage, node or tensor the graph lacks."""
    n_nodes, node_of = len(graph.nodes), graph.node_of
    relations = {
        name: tuple(
            (t, index)
            for t, index in getattr(schedule, name)
            if 0 <= index < (n_nodes if name == "R" else len(node_of)) and 0 <= t < n_nodes
        )
        for name in RELATIONS
    }
    return Schedule(**relations, resident=schedule.resident, identity=schedule.identity)


def zero_costs(graph: Graph) -> Costs:
    """Return costs with zero time and energy for all computations and transfers, with storage."""
    zero_per_node, zero_per_transfer = [0.0] * len(graph.nodes), [(0.0, 0.0)] * len(graph.tensors)
    return Costs.from_arrays(
        graph,
        compute_time_s=zero_per_node,
        compute_energy_j=zero_per_node,
        page_in=zero_per_transfer,
        page_out=zero_per_transfer,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedSchedule:
    """A schedule file with the problem for which it was verified and the verdict."""

    document: ScheduleDocument
    schedule: Schedule
    """Relations of the schedule, without pairs outside the graph (see `drop_unknown_pairs`)."""
    problem: Problem
    """Problem for which the schedule was verified: of the file, or of limits on the command line;
    with neither, it has no limits, or those of the device. Without costs, all times and energies
    are 0 and unlimited."""
    costs: Costs | None
    """Costs of the problem; None if they are unknown, and times and energies were not verified."""
    verdict: Verdict
    notes: tuple[str, ...] = ()
    """Assumptions, and properties that were not verified."""

    @property
    def graph(self) -> Graph:
        """Graph of the problem."""
        return self.problem.graph

    @property
    def simulation(self) -> Simulation:
        """Simulation of the schedule, from the verdict."""
        return self.verdict.simulation

    @property
    def device_ram(self) -> DeviceRam | None:
        """Device RAM that the schedule uses, with reserved bytes; None without a device."""
        peak_use = self.simulation.peak_use.add_reserved_bytes(self.reserved_bytes)
        return DeviceRam.compare(self.problem.costs.device, self.problem.graph, peak_use)

    @property
    def constraints(self) -> tuple[ConstraintValue, ...]:
        """Simulated values of the user-defined constraints."""
        return constraint_values(self.problem, self.simulation)

    @property
    def reserved_bytes(self) -> int:
        """Bytes reserved in addition to the schedule [B]; 0 except for compiled steps."""
        return 0

    @property
    def budget_bytes(self) -> int | None:
        """Usable RAM of the problem plus reserved bytes [B]; None if the file states no problem."""
        if self.document.problem is None:
            return None
        return self.problem.usable_ram_bytes + self.reserved_bytes

    @property
    def peak_ram_bytes(self) -> int:
        """Simulated peak RAM plus reserved bytes [B]."""
        return self.simulation.peak_ram_bytes + self.reserved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Inputs of a report as the user typed them, for the commands that reproduce it."""

    schedule: str
    """Schedule file."""
    graph: str
    """Graph file or built-in network."""
    shape: InputShape = DEFAULT_SHAPE
    """Input of a built-in network."""
    device: str | None = None
    """Name or file of the device, if given."""
    profile: str | None = None
    """File of measured costs, if given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject(VerifiedSchedule):
    """A verified schedule with the plan and the label that a report shows."""

    label: str
    """Label on the page, such as ``A``."""
    sources: Sources
    plan: Plan | None = None
    """Plan of the schedule; None without costs, if there is no plan, or if the schedule violates a
    rule of execution."""
    check: PlanCheck | None = None
    """Check of the plan; None without a plan."""
    arena_check: ArenaCheck | None = None
    """Check of the plan's addresses; None if the plan has none."""
    step: Mapping[str, Any] | None = None
    """Facts about the compiled PyTorch step that executes the plan; None without one."""

    @property
    def reserved_bytes(self) -> int:
        """Bytes that a compiled step reserves: tensors without decisions, and results [B]."""
        return 0 if self.step is None else int(self.step["reserved_bytes"])

    @property
    def peak_ram_bytes(self) -> int:
        """Peak RAM plus reserved bytes [B]: simulated, or that of the plan for a compiled step."""
        checked_plan = self.check if self.step is not None else None
        peak_source = self.simulation if checked_plan is None else checked_plan
        return peak_source.peak_ram_bytes + self.reserved_bytes

    @property
    def keep_all_bytes(self) -> int:
        """Keep-all peak [B]; for a compiled step as in its report, with reserved bytes."""
        if self.step is not None:
            return int(self.step["keep_all_bytes"])
        return checkpoint_all_peak_bytes(self.graph)


def make_subject(
    result: SolveResult,
    *,
    name: str,
    plan: Plan,
    check: PlanCheck,
    step: Mapping[str, Any] | None = None,
) -> Subject:
    """Verify the schedule of a result, and return it as a subject with its plan.

    `name` stands for schedule and graph in `Sources`. `step` is the result of ``step.report()`` of
    `poetmodel.torch` if a compiled step executes the plan.
    """
    problem, document = result.problem, make_document(result)
    notes = []
    if step is not None and step["reserved_bytes"]:
        reserves_text = ", ".join(
            f"{kind} {format_bytes(size)}" for kind, size in step["reserves"].items()
        )
        notes.append(
            f"{format_bytes(step['reserved_bytes'])} of the step's RAM are reserved"
            f"{f': {reserves_text}' if reserves_text else ''}; all RAM on this page includes them"
        )
    return Subject(
        label="A",
        sources=Sources(schedule=name, graph=name),
        document=document,
        schedule=document.schedule,
        problem=problem,
        costs=problem.costs,
        verdict=verify(problem, document.schedule, stated=document.stated_metrics),
        notes=tuple(notes),
        plan=plan,
        check=check,
        step=step,
    )
