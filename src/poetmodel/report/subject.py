"""One schedule as a report treats it, with what the judges found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from poetmodel.graph.catalogue import OWN_SHAPE, InputShape
from poetmodel.schedule import RELATIONS, Schedule, device_room

if TYPE_CHECKING:
    from collections.abc import Mapping

    from poetmodel.device import Costs
    from poetmodel.device.room import DeviceRoom
    from poetmodel.graph import Graph
    from poetmodel.plan import Plan, PlanCheck
    from poetmodel.problem import Problem
    from poetmodel.schedule import Simulation, Verdict
    from poetmodel.schedule.io import ScheduleDocument


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What a report was asked to read, as it was typed: for the commands that repeat it."""

    schedule: str
    """The schedule file."""
    graph: str
    """A graph file or a network that comes along."""
    shape: InputShape = OWN_SHAPE
    """Sizes of the network's input."""
    device: str | None = None
    """A device by name or file, where one was given."""
    profile: str | None = None
    """Measured costs, where they were given."""


def in_graph(graph: Graph, schedule: Schedule) -> Schedule:
    """Return a schedule without the pairs that name no stage, node or tensor of the graph.

    The judge tells those; what is left can be drawn.
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
    return Schedule(**kept, identity=schedule.identity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A schedule file, judged."""

    label: str
    """One or two letters that stand for it on the page."""
    sources: Sources
    """Where it comes from."""
    document: ScheduleDocument
    """The file."""
    schedule: Schedule
    """Its relations, as far as they name what is in the graph (see `in_graph`)."""
    problem: Problem
    """What the file states, with the costs; without any, all times and energies are 0."""
    costs: Costs | None
    """Costs that times and energies were checked with."""
    verdict: Verdict
    """What the judge says."""
    notes: tuple[str, ...] = ()
    """What was not checked, or assumed."""
    plan: Plan | None = None
    """The program of it, where it can run and there are costs."""
    check: PlanCheck | None = None
    """What the judge of plans found."""
    step: Mapping[str, Any] | None = None
    """What is known of the compiled PyTorch step that runs it, where one does."""

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self.problem.graph

    @property
    def simulation(self) -> Simulation:
        """What the judge measured."""
        return self.verdict.simulation

    @property
    def room(self) -> DeviceRoom | None:
        """What the schedule takes of the device's RAM, where there is a device."""
        return device_room(self.problem, self.verdict)

    @property
    def budget_bytes(self) -> int | None:
        """RAM for tensors, without what is resident [B]; None where the file states none."""
        return None if self.document.problem is None else self.problem.usable_ram_bytes
