"""A schedule file together with the problem that it states: graph, costs and limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from poetmodel.cli import graphs, options
from poetmodel.errors import ScheduleError
from poetmodel.units import MAX_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from poetmodel.device.room import DeviceRoom
    from poetmodel.graph import Graph
    from poetmodel.graph.catalogue import InputShape
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule, Verdict
    from poetmodel.schedule.io import ScheduleDocument


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """A valid schedule with the problem that its file states."""

    problem: Problem
    """Graph, costs and limits."""
    schedule: Schedule
    """The relations."""
    verdict: Verdict
    """The figures of the simulator."""
    document: ScheduleDocument
    """What the file says."""
    notes: tuple[str, ...]
    """Assumptions that were made."""

    @property
    def room(self) -> DeviceRoom | None:
        """What the schedule takes of the device's RAM, where there is a device."""
        from poetmodel.schedule import device_room

        return device_room(self.problem, self.verdict)


def read_stated(
    path: Path, graph: str | None, shape: InputShape, *, device: str | None, profile: str | None
) -> Stated:
    """Read a schedule file and its problem, and verify the schedule.

    Raises
    ------
    InputError
        If the graph or the costs are missing.
    ScheduleError
        If the file cannot be read or is for another graph, or the verifier rejects its schedule.
    """
    from poetmodel.planner import verify
    from poetmodel.schedule import check_identity
    from poetmodel.schedule.io import load_document

    document = load_document(path)
    identity = document.schedule.identity
    training_graph = graphs.graph_of(graph, shape, identity, source=str(path)).graph
    try:
        check_identity(training_graph, document.schedule)
        problem, notes = _problem(document, training_graph, device=device, profile=profile)
        verdict = verify(problem, document.schedule)
    except ScheduleError as error:
        raise error.within(str(path)) from None
    if verdict.violations:
        raise ScheduleError(f"{path}: is not valid: {fault}" for fault in verdict.violations)
    return Stated(
        problem=problem,
        schedule=document.schedule,
        verdict=verdict,
        document=document,
        notes=tuple(f"{path}: {note}" for note in notes),
    )


def _problem(
    document: ScheduleDocument, graph: Graph, *, device: str | None, profile: str | None
) -> tuple[Problem, list[str]]:
    from poetmodel.cli.verify import known_device
    from poetmodel.problem import Problem

    named = known_device(document.device)
    notes = []
    if device is None and profile is None and named is not None:
        notes.append(f"costs are the estimates of device {named}, which the file names")
    board = options.read_device(device if device is not None else named)
    costs = options.read_costs(graph, board, profile)
    stated = document.problem
    if stated is None:
        notes.append("the file states no problem: only the limits of the device hold")
        ram = MAX_BYTES if costs.device is None else None
        return Problem(graph, costs, ram=ram), notes
    return stated.problem(graph, costs), notes
