"""``poetmodel verify``: the verifier for a schedule file or a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from poetmodel.cli import options
from poetmodel.cli.failures import ExitStatus, print_room_warnings, print_warnings
from poetmodel.cli.inputs import (
    check_names,
    costs_to_verify,
    graph_of,
    graph_of_code,
    verify_document,
)
from poetmodel.cli.output import figures, live_line, print_json, print_text, show
from poetmodel.cli.plan import arena_facts
from poetmodel.device import Costs, StorageMode
from poetmodel.device.room import DeviceRoom
from poetmodel.errors import InputError, ScheduleError
from poetmodel.files import as_text, read_bytes
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.plan.simulation import check_identity
from poetmodel.report.presenter import (
    Fact,
    constraint_facts,
    document,
    plural,
    room_facts,
    state_facts,
    wear_facts,
    whole,
)
from poetmodel.units import format_bytes, format_joules, format_seconds, parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.graph import Graph
    from poetmodel.plan import PlanCheck
    from poetmodel.plan.io import PlanDocument
    from poetmodel.report.subject import VerifiedSchedule

MAX_VIOLATIONS: Final = 20


@options.group
class FileArgument:
    """The file."""

    schedule: Path = options.argument(
        options.REQUIRED,
        "SCHEDULE|PLAN",
        "A schedule file, *.schedule.json, or a plan, *.plan.json or binary.",
    )
    aux: str | None = options.limit(
        None,
        "--aux SIZE",
        "Storage for the paged tensors of a plan. Default: the device's; a schedule file states "
        "it.",
    )


@options.command("poetmodel verify mlp.json --graph mlp")
def verify(
    given: FileArgument,
    source: options.FileGraphOptions,
    costing: options.CostOptions,
    output: options.OutputOptions,
) -> None:
    """Simulate a schedule or a plan; check rules of execution, limits, and its stated figures."""
    content = read_bytes(given.schedule)
    planned = is_plan(content)
    if given.aux is not None and not planned:
        raise InputError(f"--aux: {given.schedule} is no plan, and a schedule file states its own")
    with live_line(wanted=not output.json, doing="verifying"):
        if planned:
            facts, title, room = _about_plan(content, given, source, costing)
        else:
            facts, title, room = _about_schedule(content, given.schedule, source, costing)
        values = document(facts)
    print_warnings(values["notes"])
    if output.json:
        print_json(values)
    else:
        _print_verdict(title.partition(" ")[0].lower(), values["violations"])
        show(figures(title, facts))
    print_room_warnings(room)
    raise typer.Exit(ExitStatus.SUCCESS if values["valid"] else ExitStatus.INFEASIBLE)


def _print_verdict(what: str, violations: Sequence[str]) -> None:
    if not violations:
        print_text(f"valid: the {what} keeps every rule and limit that was checked", "")
        return
    more = len(violations) - MAX_VIOLATIONS
    rest = (f"and {more:,} more; --json has them all",) if more > 0 else ()
    many = plural(len(violations), "violation")
    print_text(f"not valid: {many}", *violations[:MAX_VIOLATIONS], *rest, "")


def _verdict(
    graph: Graph, costs: Costs | None, violations: Sequence[str], notes: Sequence[str]
) -> Iterator[Fact]:
    yield Fact("valid", not violations)
    yield Fact("violations", list(violations))
    yield Fact("notes", list(notes))
    yield Fact("graph", {"name": graph.name, "sha256": graph.sha256})
    yield Fact("costs", None if costs is None else costs.source)


# -- schedules ---------------------------------------------------------------------------------


def _about_schedule(
    content: bytes, path: Path, source: options.FileGraphOptions, costing: options.CostOptions
) -> tuple[list[Fact], str, DeviceRoom | None]:
    """Return the facts about a schedule, the title of their table, and the RAM of the device."""
    from poetmodel.schedule.io import parse_document

    stated = parse_document(as_text(content, source=str(path)), source=str(path))
    graph = graph_of(source, stated.schedule.identity, source=path).graph
    try:
        verified = verify_document(stated, graph, costing)
    except ScheduleError as error:
        raise error.within(str(path)) from None
    return list(_schedule_facts(verified)), f"Schedule for {graph.name}", verified.room


def _schedule_facts(verified: VerifiedSchedule) -> Iterator[Fact]:
    """Yield the verdict and the simulated figures; without costs, no times and energies."""
    graph, simulation = verified.graph, verified.simulation
    peak, tensors = simulation.peak, simulation.peak_tensors
    yield from _verdict(graph, verified.costs, verified.verdict.violations, verified.notes)
    timed = verified.costs is not None
    planned = "makespan" if simulation.planned_s is not None else None
    overhead = f"overhead {format_joules(simulation.overhead_j or 0.0)}"
    for key, name, unit, note in (
        ("energy_j", "energy", format_joules, overhead),
        ("baseline_energy_j", None, format_joules, ""),
        ("overhead_j", None, format_joules, ""),
        ("compute_s", "compute time", format_seconds, ""),
        ("transfer_s", "transfer time", format_seconds, ""),
        ("time_s", None, format_seconds, ""),
        ("makespan_s", planned, format_seconds, "transfers overlap computation"),
    ):
        yield Fact(key, getattr(simulation, key) if timed else None, name, unit, note)
    node = graph.nodes[peak.node].name
    at = f"at stage {peak.stage}, step {peak.node} ({node}), with {len(tensors)} tensors"
    yield Fact("peak_ram_bytes", peak.ram_bytes, "peak RAM", format_bytes, at)
    yield from room_facts(verified.room)
    held = [graph.tensors[i].name for i in tensors]
    yield Fact("peak", {"stage": peak.stage, "node": node, "tensors": held})
    yield from state_facts(graph, simulation)
    yield from _moved(simulation)
    yield from wear_facts(simulation)
    yield from constraint_facts(verified.constraints)


def _moved(simulated: object) -> Iterator[Fact]:
    """Yield what a simulated schedule or plan transfers and stores."""
    for key, name in (
        ("written_bytes", "paged out"),
        ("read_bytes", "paged in"),
        ("aux_used_bytes", "storage used"),
    ):
        yield Fact(key, getattr(simulated, key), name, format_bytes)


# -- plans -------------------------------------------------------------------------------------


def is_plan(content: bytes) -> bool:
    """Return whether the content of a file is a plan, binary or JSON."""
    from poetmodel.plan.binary import is_coded
    from poetmodel.plan.program import FORMAT

    if is_coded(content):
        return True
    if FORMAT.encode() not in content:
        return False
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):  # the reader of plans says what is wrong
        return True
    return isinstance(values, dict) and values.get("format") == FORMAT


def _about_plan(
    content: bytes,
    given: FileArgument,
    source: options.FileGraphOptions,
    costing: options.CostOptions,
) -> tuple[list[Fact], str, DeviceRoom | None]:
    """Return the facts about a plan, the title of their table, and the RAM of the device."""
    from poetmodel.plan import check_arena, check_plan
    from poetmodel.plan.simulation import false_claims

    path = given.schedule
    stated, graph = _read_plan(content, path, source)
    plan = stated.plan
    try:
        check_identity(graph, plan)
        check_names(plan.identity, graph)
    except InputError as error:
        raise error.within(str(path)) from None
    costs, notes = costs_to_verify(plan.device, graph, costing)
    if plan.ram_budget_bytes is None:
        notes.append("the plan states no RAM budget: its peak was not checked")
    room_bytes = None
    if given.aux is not None:
        whole_bytes = checkpoint_all_peak_bytes(graph)
        room_bytes = parse_size(given.aux, field="aux", whole_bytes=whole_bytes)
    check = check_plan(graph, costs, plan, aux_bytes=room_bytes)
    arena = stated.arena
    places = () if arena is None else check_arena(graph, plan, arena).violations
    violations = (*check.violations, *false_claims(check, stated.stated), *places)
    device = None if costs is None else costs.device
    room = DeviceRoom.of(device, graph, check.peak_ram_bytes)
    facts = [
        *_verdict(graph, costs, violations, notes),
        *_plan_facts(stated, check, room, timed=costs is not None),
    ]
    return facts, f"Plan for {graph.name}", room


def _read_plan(
    content: bytes, path: Path, source: options.FileGraphOptions
) -> tuple[PlanDocument, Graph]:
    """Return the plan in the content of a file, and the graph that it is for."""
    from poetmodel.plan import decode
    from poetmodel.plan.binary import is_coded
    from poetmodel.plan.io import PlanDocument, parse_document

    if not is_coded(content):
        stated = parse_document(as_text(content, source=str(path)), source=str(path))
        return stated, graph_of(source, stated.plan.identity, source=path).graph
    try:
        coded_for = graph_of_code(source, content, source=path)
        return PlanDocument(plan=decode(coded_for, content), stated={}), coded_for
    except InputError as error:
        raise error.within(str(path)) from None


def _plan_facts(
    stated: PlanDocument, check: PlanCheck, room: DeviceRoom | None, *, timed: bool
) -> Iterator[Fact]:
    """Yield the simulated figures of a plan; times and energies are None without costs."""
    plan = stated.plan
    yield Fact("mode", str(plan.mode))
    yield Fact("ram_budget_bytes", plan.ram_budget_bytes)
    size = len(plan.program)
    yield Fact("instructions", size, "instructions", whole, f"{plan.mode} transfers")
    stalls = plan.mode == StorageMode.DMA and timed
    stall = f"stall {format_seconds(check.stall_s or 0.0)}" if stalls else ""
    yield Fact("makespan_s", check.makespan_s, "makespan", format_seconds, stall)
    yield Fact("stall_s", check.stall_s)
    yield Fact("energy_j", check.energy_j, "energy", format_joules)
    yield Fact("compute_s", check.compute_s, "compute time", format_seconds)
    yield Fact("transfer_s", check.transfer_s, "transfer time", format_seconds)
    at = "" if check.peak_position is None else f"at instruction {check.peak_position}"
    yield Fact("peak_ram_bytes", check.peak_ram_bytes, "peak RAM", format_bytes, at)
    yield from room_facts(room)
    yield Fact("peak_instruction", check.peak_position)
    if stated.arena is not None:
        yield from arena_facts(stated.arena)
    yield from _moved(check)
