"""A schedule file with the findings of the verifier, and what a report shows about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
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


def document_of(result: SolveResult) -> ScheduleDocument:
    """Return a result as its schedule file would be read."""
    from poetmodel.schedule.document import ScheduleDocument
    from poetmodel.schedule.io import ObjectiveEntry, ProblemEntry

    stated = result.to_dict()
    return ScheduleDocument(
        schedule=result.require_schedule(),
        device=stated["device"],
        problem=ProblemEntry.model_validate(stated["problem"]),
        status=stated["status"],
        stated={metric.key: stated.get(metric.key) for metric in metrics_at(Display.FILE)},
        objective=ObjectiveEntry.model_validate(stated["objective"]),
        history=result.history,
    )


def in_graph(graph: Graph, schedule: Schedule) -> Schedule:
    """Return a schedule without the pairs that name no stage, node or tensor of the graph.

    The verifier reports those; the rest can be drawn.
    """
    n, made_by = len(graph.nodes), graph.node_of
    kept = {
        name: tuple(
            (t, k)
            for t, k in getattr(schedule, name)
            if 0 <= k < (n if name == "R" else len(made_by)) and 0 <= t < n
        )
        for name in RELATIONS
    }
    return Schedule(**kept, resident=schedule.resident, identity=schedule.identity)


def free_costs(graph: Graph) -> Costs:
    """Return costs with which everything takes no time and no energy."""
    nothing, pages = [0.0] * len(graph.nodes), [(0.0, 0.0)] * len(graph.tensors)
    return Costs.from_arrays(
        graph, compute_time_s=nothing, compute_energy_j=nothing, page_in=pages, page_out=pages
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedSchedule:
    """A schedule file with the problem that it states and the findings of the verifier."""

    document: ScheduleDocument
    schedule: Schedule
    """Its relations, without pairs outside the graph (see `in_graph`)."""
    problem: Problem
    """The problem that the file states; without costs, all times and energies are 0."""
    costs: Costs | None
    """Costs for times and energies; None if they were not checked."""
    verdict: Verdict
    notes: tuple[str, ...] = ()
    """Assumptions, and parts that were not checked."""

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self.problem.graph

    @property
    def simulation(self) -> Simulation:
        """The simulated figures."""
        return self.verdict.simulation

    @property
    def room(self) -> DeviceRam | None:
        """RAM of the device that the schedule takes; None without a device."""
        use = self.simulation.peak_use
        use = replace(use, activation_bytes=use.activation_bytes + self.reserved_bytes)
        return DeviceRam.compare(self.problem.costs.device, self.problem.graph, use)

    @property
    def constraints(self) -> tuple[ConstraintValue, ...]:
        """Sums of the own constraints."""
        return constraint_values(self.problem, self.simulation)

    @property
    def reserved_bytes(self) -> int:
        """Bytes reserved beside the schedule; only compiled steps have them [B]."""
        return 0

    @property
    def budget_bytes(self) -> int | None:
        """RAM for tensors, without resident bytes [B]; None if the file states none."""
        if self.document.problem is None:
            return None
        return self.problem.usable_ram_bytes + self.reserved_bytes

    @property
    def peak_ram_bytes(self) -> int:
        """Peak RAM as simulated, with what is reserved [B]."""
        return self.simulation.peak_ram_bytes + self.reserved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The inputs of a report as they were typed, for the commands that reproduce it."""

    schedule: str
    graph: str
    """A graph file or a built-in network."""
    shape: InputShape = DEFAULT_SHAPE
    device: str | None = None
    """A device by name or file, if given."""
    profile: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject(VerifiedSchedule):
    """A schedule of a report."""

    label: str
    """Its label on the page: one or two letters."""
    sources: Sources
    plan: Plan | None = None
    """Its plan, if it can run and there are costs."""
    check: PlanCheck | None = None
    """The verifier's findings on the plan."""
    places: ArenaCheck | None = None
    """The verifier's findings on addresses of the plan, if it was placed."""
    step: Mapping[str, Any] | None = None
    """Facts about the compiled PyTorch step that runs it, if there is one."""

    @property
    def reserved_bytes(self) -> int:
        """Bytes of a compiled step throughout: tensors without decisions, and results [B]."""
        return 0 if self.step is None else int(self.step["reserved_bytes"])

    @property
    def peak_ram_bytes(self) -> int:
        """Peak RAM with what is reserved: as simulated, of a compiled step that of its plan [B].

        Transfers beside the computing may hold more at once than the schedule says.
        """
        planned = self.check if self.step is not None else None
        source = self.simulation if planned is None else planned
        return source.peak_ram_bytes + self.reserved_bytes

    @property
    def keep_all_bytes(self) -> int:
        """The keep-all peak [B]; of a compiled step 100 % of its budget."""
        if self.step is not None:
            return int(self.step["keep_all_bytes"])
        return checkpoint_all_peak_bytes(self.graph)


def solved_subject(
    result: SolveResult,
    *,
    name: str,
    plan: Plan,
    check: PlanCheck,
    step: Mapping[str, Any] | None = None,
) -> Subject:
    """Verify the schedule of a result that runs by a plan, perhaps in a compiled step.

    `step` has what ``step.report()`` of `poetmodel.torch` says of it.
    """
    problem, document = result.problem, document_of(result)
    notes = []
    if step is not None and step["reserved_bytes"]:
        of = ", ".join(f"{what} {format_bytes(size)}" for what, size in step["reserves"].items())
        notes.append(
            f"{format_bytes(step['reserved_bytes'])} of the step's RAM are reserved"
            f"{f': {of}' if of else ''}; all RAM on this page includes them"
        )
    return Subject(
        label="A",
        sources=Sources(schedule=name, graph=name),
        document=document,
        schedule=document.schedule,
        problem=problem,
        costs=problem.costs,
        verdict=verify(problem, document.schedule, stated=document.stated),
        notes=tuple(notes),
        plan=plan,
        check=check,
        step=step,
    )
