"""``poetmodel verify``: the verifier for a schedule file or a plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from poetmodel.cli import graphs, options, verify_plan
from poetmodel.cli.failures import Status, print_room_warning, print_warnings
from poetmodel.cli.output import figures, print_json, print_text, room_alarms, room_row, show
from poetmodel.data import as_text, read_bytes
from poetmodel.device.room import room_figures
from poetmodel.errors import InputError, ScheduleError
from poetmodel.graph.catalogue import InputShape
from poetmodel.plan.simulation import check_identity as check_plan_identity
from poetmodel.units import MAX_BYTES, format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.device import Costs
    from poetmodel.device.room import DeviceRoom
    from poetmodel.graph import Graph
    from poetmodel.problem import Problem
    from poetmodel.schedule import GraphIdentity, Verdict
    from poetmodel.schedule.io import ScheduleDocument

EPILOG: Final = "Example: poetmodel verify mlp.json --graph mlp"

MEMORY_FIGURES: Final = ("peak_ram_bytes",)
"""Figures of a file that need no costs."""

ScheduleArgument = Annotated[
    Path,
    typer.Argument(
        metavar="SCHEDULE|PLAN",
        help="A schedule file, *.schedule.json, or a plan, *.plan.json or binary.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A verdict, with the costs and the problem that it is for."""

    verdict: Verdict
    """The verifier's verdict."""
    costs: Costs | None
    """Costs for times and energies; None if they were not checked."""
    problem: Problem
    """The problem that the file states; without costs, all times and energies are 0."""
    notes: tuple[str, ...]
    """What was assumed or not checked."""

    @property
    def room(self) -> DeviceRoom | None:
        """What the schedule takes of the device's RAM, where there is a device."""
        from poetmodel.schedule import device_room

        return device_room(self.problem, self.verdict)


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("verify", epilog=EPILOG)(verify)


def verify(
    schedule: ScheduleArgument,
    *,
    graph: graphs.GraphOption = None,
    batch: graphs.BatchOption = None,
    image: graphs.ImageOption = None,
    sequence: graphs.SequenceOption = None,
    device: options.DeviceOption = None,
    profile: options.ProfileOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,  # noqa: ARG001 - acts while it is parsed
) -> None:
    """Simulate a schedule or a plan; check rules of execution, limits, and its stated figures."""
    from poetmodel.schedule.io import parse_document

    shape = InputShape(batch=batch, image=image, sequence=sequence)
    content = read_bytes(schedule)
    if verify_plan.is_plan(content):
        raise typer.Exit(
            _verify_plan(content, schedule, graph, shape, device=device, profile=profile, json=json)
        )
    document = parse_document(as_text(content, source=str(schedule)), source=str(schedule))
    identity = document.schedule.identity
    training_graph = graphs.graph_of(graph, shape, identity, source=str(schedule)).graph
    try:
        judgement = judge(document, training_graph, device=device, profile=profile)
    except ScheduleError as error:
        raise error.within(str(schedule)) from None
    print_warnings(judgement.notes)
    if json:
        print_json(as_dict(judgement, training_graph))
    else:
        _print(judgement, training_graph)
    print_room_warning(judgement.room)
    raise typer.Exit(Status.SUCCESS if judgement.verdict.valid else Status.INFEASIBLE)


def _verify_plan(
    content: bytes,
    path: Path,
    graph: str | None,
    shape: InputShape,
    *,
    device: str | None,
    profile: str | None,
    json: bool,
) -> Status:
    source = str(path)
    document, training_graph = verify_plan.read_plan(content, graph, shape, source=source)
    plan = document.plan
    try:
        check_plan_identity(training_graph, plan)
        _check_names(plan.identity, training_graph)
    except InputError as error:
        raise error.within(source) from None
    costs, notes = _find_costs(plan.device, training_graph, device=device, profile=profile)
    judgement = verify_plan.judge_plan(document, training_graph, costs, notes)
    print_warnings(judgement.notes)
    verify_plan.tell(judgement, as_json=json)
    return Status.SUCCESS if judgement.valid else Status.INFEASIBLE


def judge(
    document: ScheduleDocument, graph: Graph, *, device: str | None, profile: str | None
) -> Judgement:
    """Verify a schedule file against the problem that it states.

    Parameters
    ----------
    document : ScheduleDocument
        The file.
    graph : Graph
        The graph that it should belong to.
    device, profile : str, optional
        As the options. Without both, the costs are those of the device that the file names, if it
        can be found.

    Raises
    ------
    ScheduleError
        If the file belongs to another graph.
    """
    from poetmodel.planner import verify as verify_schedule
    from poetmodel.schedule import check_identity

    check_identity(graph, document.schedule)
    _check_names(document.schedule.identity, graph)
    costs, notes = _find_costs(document.device, graph, device=device, profile=profile)
    problem = _stated_problem(document, graph, costs)
    if document.problem is None:
        notes.append("the file states no problem: no budget and no deadline were checked")
    stated = document.stated | document.room
    if costs is None:
        stated = {key: stated.get(key) for key in MEMORY_FIGURES}
    verdict = verify_schedule(problem, document.schedule, stated=stated)
    return Judgement(verdict=verdict, costs=costs, problem=problem, notes=tuple(notes))


def _check_names(identity: GraphIdentity | None, graph: Graph) -> None:
    if identity is None:
        return
    for key, found, wanted in (
        ("nodes", identity.nodes, tuple(node.name for node in graph.nodes)),
        ("tensors", identity.tensors, tuple(tensor.name for tensor in graph.tensors)),
    ):
        if found == wanted:
            continue
        if len(found) != len(wanted):
            difference = f"expected {len(wanted)} names, got {len(found)}"
        else:
            k = next(k for k, name in enumerate(found) if name != wanted[k])
            difference = f"entry {k}: expected {wanted[k]!r}, got {found[k]!r}"
        msg = f"{key}: {difference}; the list must name the {key} of graph {graph.name!r} in order"
        raise ScheduleError(msg)


def known_device(name: str | None) -> str | None:
    """Return the device that a file names, if it can be found."""
    from poetmodel.device.io import device_names

    if name is None or name in device_names() or Path(name).is_file():
        return name
    return None


def _find_costs(
    named_in_file: str | None, graph: Graph, *, device: str | None, profile: str | None
) -> tuple[Costs | None, list[str]]:
    """Return the costs for the verifier, and notes about them."""
    named = known_device(named_in_file)
    chosen = device if device is not None else named
    if chosen is None and profile is None:
        note = "times and energies were not checked: give --device or --profile for the costs"
        return None, [note]
    notes = []
    if device is None and profile is None:
        notes.append(
            f"costs are the estimates of device {named}, which the file names; give --profile if "
            "it was solved with measured costs"
        )
    return options.read_costs(graph, options.read_device(chosen), profile), notes


def _stated_problem(document: ScheduleDocument, graph: Graph, costs: Costs | None) -> Problem:
    """Return the problem that a file states; without costs, all times and energies are 0."""
    from poetmodel.problem import Problem

    stated = document.problem
    known = costs if costs is not None else _no_costs(graph)
    if stated is None:
        return Problem(graph, known, ram=MAX_BYTES, aux_bytes=MAX_BYTES)
    timed = costs is not None
    return Problem(
        graph,
        known,
        ram=stated.ram_budget_bytes,
        deadline=stated.deadline_s if timed else None,
        deadline_counts=stated.deadline_counts,
        aux_bytes=MAX_BYTES if stated.aux_bytes is None else stated.aux_bytes,
        recompute=stated.recompute,
        paging=stated.paging,
        minimize=stated.minimize,
        energy_budget=stated.energy_budget_j if timed else None,
        count_parameters=stated.count_parameters,
    )


def _no_costs(graph: Graph) -> Costs:
    from poetmodel.device import Costs

    nothing = [0.0] * len(graph.nodes)
    pages = [(0.0, 0.0)] * len(graph.tensors)
    return Costs.from_arrays(
        graph,
        compute_time_s=nothing,
        compute_energy_j=nothing,
        page_in=pages,
        page_out=pages,
    )


def as_dict(judgement: Judgement, graph: Graph) -> dict[str, Any]:
    """Return a verdict as plain values; without costs, times and energies are None."""
    simulation, costs = judgement.verdict.simulation, judgement.costs
    timed = costs is not None
    peak = simulation.peak
    return {
        "valid": judgement.verdict.valid,
        "violations": list(judgement.verdict.violations),
        "notes": list(judgement.notes),
        "graph": {"name": graph.name, "sha256": graph.sha256},
        "costs": costs.source if costs is not None else None,
        "energy_j": simulation.energy_j if timed else None,
        "baseline_energy_j": simulation.baseline_energy_j if timed else None,
        "overhead_j": simulation.overhead_j if timed else None,
        "compute_s": simulation.compute_s if timed else None,
        "transfer_s": simulation.transfer_s if timed else None,
        "time_s": simulation.time_s if timed else None,
        "makespan_s": simulation.makespan_s if timed else None,
        "peak_ram_bytes": peak.ram_bytes,
        **room_figures(judgement.room),
        "peak": {
            "stage": peak.stage,
            "node": graph.nodes[peak.node].name,
            "tensors": [graph.tensors[i].name for i in simulation.peak_tensors],
        },
        "aux_used_bytes": simulation.aux_used_bytes,
        "written_bytes": simulation.written_bytes,
        "read_bytes": simulation.read_bytes,
    }


def _print(judgement: Judgement, graph: Graph) -> None:
    violations = judgement.verdict.violations
    if violations:
        many = "1 violation" if len(violations) == 1 else f"{len(violations)} violations"
        more = len(violations) - verify_plan.MAX_VIOLATIONS
        rest = (f"and {more:,} more; --json has them all",) if more > 0 else ()
        print_text(f"not valid: {many}", *violations[: verify_plan.MAX_VIOLATIONS], *rest, "")
    else:
        print_text("valid: the schedule keeps every rule and limit that was checked", "")
    rows, alarms = _rows(judgement, graph), room_alarms(judgement.room)
    show(figures(f"Schedule for {graph.name}", rows, alarms=alarms))


def _rows(judgement: Judgement, graph: Graph) -> Iterator[tuple[str, str, str]]:
    simulation = judgement.verdict.simulation
    peak = simulation.peak
    if judgement.costs is not None:
        overhead = format_joules(simulation.overhead_j or 0.0)
        yield "energy", format_joules(simulation.energy_j or 0.0), f"overhead {overhead}"
        yield "compute time", format_seconds(simulation.compute_s or 0.0), ""
        yield "transfer time", format_seconds(simulation.transfer_s or 0.0), ""
        if simulation.planned_s is not None:
            remark = "transfers overlap computation"
            yield "makespan", format_seconds(simulation.planned_s), remark
    yield (
        "peak RAM",
        format_bytes(peak.ram_bytes),
        f"at stage {peak.stage}, step {peak.node} ({graph.nodes[peak.node].name}), "
        f"with {len(simulation.peak_tensors)} tensors",
    )
    yield from room_row(judgement.room)
    yield "paged out", format_bytes(simulation.written_bytes), ""
    yield "paged in", format_bytes(simulation.read_bytes), ""
    yield "storage used", format_bytes(simulation.aux_used_bytes), ""
