"""``poetmodel verify``: verify a schedule file or a plan."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from poetmodel.cli import options
from poetmodel.cli.failures import ExitStatus, print_device_ram_warnings, print_warnings
from poetmodel.cli.inputs import (
    NO_COSTS,
    check_names,
    costs_for_verification,
    resolve_binary_graph,
    resolve_graph,
    resolve_ram,
    verify_document,
)
from poetmodel.cli.output import fact_table, live_line, print_json, print_text, show
from poetmodel.cli.plan import arena_facts
from poetmodel.device import Costs, StorageMode
from poetmodel.device.ram import DeviceRam
from poetmodel.errors import InputError, PlanError, ScheduleError
from poetmodel.files import decode_text, read_bytes
from poetmodel.plan.simulation import check_identity
from poetmodel.problem import Limits, Problem
from poetmodel.problem.rows import is_within
from poetmodel.report.presenter import (
    Fact,
    constraint_facts,
    device_ram_facts,
    format_items,
    format_number,
    metric_facts,
    state_facts,
    to_json_object,
    wear_facts,
)
from poetmodel.report.subject import zero_costs
from poetmodel.schedule.metrics import Display, Group
from poetmodel.units import MAX_BYTES, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.graph import Graph
    from poetmodel.plan import PlanCheck
    from poetmodel.plan.document import PlanDocument
    from poetmodel.report.subject import VerifiedSchedule

MAX_VIOLATIONS: Final = 20
"""Maximum number of printed violations; JSON contains all."""
_PLAN_LIMITS: Final = ("--ram", "--aux", "--deadline")
"""Limit options that apply to plans."""


@options.group
class FileArgument:
    """The file to verify."""

    schedule: Path = options.argument(
        options.REQUIRED,
        "SCHEDULE|PLAN",
        "A schedule file, *.schedule.json, or a plan, *.plan.json or binary.",
    )


@options.command("poetmodel verify mlp.json --graph mlp")
def verify(
    file_argument: FileArgument,
    source: options.FileGraphOptions,
    costing: options.CostOptions,
    limits: Annotated[Limits, options.without("minimize")],
    own: options.ConstraintOptions,
    output: options.OutputOptions,
) -> None:
    """Simulate a schedule or a plan; check rules of execution, limits, and stated metrics.

    A limit on the command line replaces all limits of a schedule file; omitted limits then have
    their defaults. For a plan, --ram replaces the budget of the file, --aux is by default the
    device's, and there is no deadline without --deadline; other limits do not apply.
    """
    content = read_bytes(file_argument.schedule)
    verify_file = _verify_plan if is_plan(content) else _verify_schedule
    with live_line(enabled=not output.json, activity="verifying"):
        facts, title, device_ram = verify_file(
            content, file_argument.schedule, source, costing, limits, own
        )
        values = to_json_object(facts)
    print_warnings(values["notes"])
    if output.json:
        print_json(values)
    else:
        _print_verdict(
            title.partition(" ")[0].lower(),
            values["violations"],
            options.changed_options(limits, own),
        )
        show(fact_table(title, facts))
    print_device_ram_warnings(device_ram)
    raise typer.Exit(ExitStatus.SUCCESS if values["valid"] else ExitStatus.INFEASIBLE)


def _print_verdict(
    document_kind: str, violations: Sequence[str], limit_options: Sequence[str]
) -> None:
    """Print on stdout whether the file is valid, else the number of violations and the first ones.

    A file that is valid within `limit_options` shows that an infeasible result with them is a bug.
    """
    if not violations:
        print_text(f"valid: the {document_kind} meets every rule and limit that was checked", "")
        if limit_options:
            print_text(
                "If 'poetmodel solve' reports infeasible with these limits, it has a bug. Please "
                "report this bug with the graph, this file and both commands.",
                "",
            )
        return
    n_omitted = len(violations) - MAX_VIOLATIONS
    omitted_lines = (f"and {n_omitted:,} more; --json lists all",) if n_omitted > 0 else ()
    count_text = format_items(len(violations), "violation")
    print_text(f"not valid: {count_text}", *violations[:MAX_VIOLATIONS], *omitted_lines, "")


def _verdict_facts(
    graph: Graph, costs: Costs | None, violations: Sequence[str], notes: Sequence[str]
) -> Iterator[Fact]:
    """Yield verdict, violations, notes, graph and source of costs (or None), only for JSON."""
    yield Fact("valid", not violations)
    yield Fact("violations", list(violations))
    yield Fact("notes", list(notes))
    yield Fact("graph", {"name": graph.name, "sha256": graph.sha256})
    yield Fact("costs", None if costs is None else costs.source)


# -- schedules ---------------------------------------------------------------------------------


def _verify_schedule(
    content: bytes,
    path: Path,
    source: options.FileGraphOptions,
    costing: options.CostOptions,
    limits: Limits,
    own: options.ConstraintOptions,
) -> tuple[list[Fact], str, DeviceRam | None]:
    """Verify a schedule; return its facts, the title of their table, and its use of device RAM.

    A single limit in the options replaces all limits of the file.
    """
    from poetmodel.schedule.document import parse_document

    document = parse_document(decode_text(content, source=str(path)), source=str(path))
    graph = resolve_graph(source, document.schedule.identity, source=path).graph
    limits = resolve_ram(source, limits)
    try:
        verified = verify_document(document, graph, costing, limits, own)
    except ScheduleError as error:
        raise error.with_prefix(str(path)) from None
    return list(_schedule_facts(verified)), f"Schedule for {graph.name}", verified.device_ram


def _schedule_facts(verified: VerifiedSchedule) -> Iterator[Fact]:
    graph, simulation = verified.graph, verified.simulation
    peak, tensors = simulation.peak, simulation.peak_tensors
    yield from _verdict_facts(graph, verified.costs, verified.verdict.violations, verified.notes)
    has_costs = verified.costs is not None
    node = graph.nodes[peak.node].name
    notes = {
        "energy_j": f"overhead {format_joules(simulation.overhead_j or 0.0)}",
        "makespan_s": "transfers overlap computation",
        "peak_ram_bytes": f"at stage {peak.stage}, step {peak.node} ({node}), "
        f"with {len(tensors)} tensors",
    }
    group_facts = partial(
        metric_facts, Display.VERIFY, simulation, has_costs=has_costs, notes=notes
    )
    yield from group_facts(Group.ENERGY)
    unlisted_keys = () if simulation.planned_s is not None else ("makespan_s",)
    yield from group_facts(Group.WORK, Group.STEP, unlisted_keys=unlisted_keys)
    yield from group_facts(Group.MEMORY)
    yield from device_ram_facts(verified.device_ram)
    peak_tensor_names = [graph.tensors[i].name for i in tensors]
    yield Fact("peak", {"stage": peak.stage, "node": node, "tensors": peak_tensor_names})
    yield from state_facts(graph, simulation)
    yield from group_facts(Group.STORAGE)
    yield from wear_facts(Display.VERIFY, simulation)
    yield from constraint_facts(verified.constraints)


# -- plans -------------------------------------------------------------------------------------


def is_plan(content: bytes) -> bool:
    """Return whether the content of a file is a plan, in JSON or binary.

    Damaged JSON that contains the name of the format counts as a plan.
    """
    from poetmodel.plan.binary import is_binary
    from poetmodel.plan.versions import FORMAT

    if is_binary(content):
        return True
    if FORMAT.encode() not in content:
        return False
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):  # the reader of plans reports the error
        return True
    return isinstance(values, dict) and values.get("format") == FORMAT


def _verify_plan(
    content: bytes,
    path: Path,
    source: options.FileGraphOptions,
    costing: options.CostOptions,
    limits: Limits,
    own: options.ConstraintOptions,
) -> tuple[list[Fact], str, DeviceRam | None]:
    """Verify a plan; return its facts, the title of their table, and its use of device RAM.

    Also checks addresses and stated metrics, if the file has any. If neither option nor plan states
    a RAM budget, the peak is not checked, which a note states. ``--deadline`` limits the makespan.
    """
    from poetmodel.plan import check_arena, check_plan

    document, graph = _read_plan(content, path, source)
    limits = resolve_ram(source, limits)
    plan = document.plan
    try:
        check_identity(graph, plan)
        check_names(plan.identity, graph)
    except InputError as error:
        raise error.with_prefix(str(path)) from None
    costs, notes = costs_for_verification(plan.device, graph, costing)
    budget_bytes, problem = plan.ram_budget_bytes, _plan_problem(graph, costs, limits, own)
    if limits.ram is not None:
        budget_bytes = problem.usable_ram_bytes
    if budget_bytes is None:
        notes.append("the plan states no RAM budget: its peak was not checked")
    check = check_plan(
        graph,
        costs,
        plan,
        ram_budget_bytes=budget_bytes,
        aux_bytes=None if limits.aux_bytes is None else problem.aux_limit_bytes,
    )
    is_late = check.makespan_s is not None and not is_within(check.makespan_s, problem.deadline_s)
    arena = document.arena
    false_claims, claim_notes = document.check_claims(check)
    notes += (*document.notes, *claim_notes)
    violations = [
        *check.violations,
        *(() if arena is None else check_arena(graph, plan, arena).violations),
        *false_claims,
    ]
    if is_late:
        violations.append(
            f"makespan {format_seconds(check.makespan_s or 0.0)} is above the deadline of "
            f"{format_seconds(problem.deadline_s or 0.0)}"
        )
    device = None if costs is None else costs.device
    device_ram = DeviceRam.compare(device, graph, check.peak_ram_bytes)
    facts = [
        *_verdict_facts(graph, costs, violations, notes),
        *_plan_facts(document, check, device_ram, has_costs=costs is not None),
    ]
    return facts, f"Plan for {graph.name}", device_ram


def _read_plan(
    content: bytes, path: Path, source: options.FileGraphOptions
) -> tuple[PlanDocument, Graph]:
    from poetmodel.plan import decode
    from poetmodel.plan.binary import is_binary
    from poetmodel.plan.document import PlanDocument, parse_document

    if not is_binary(content):
        document = parse_document(decode_text(content, source=str(path)), source=str(path))
        return document, resolve_graph(source, document.plan.identity, source=path).graph
    try:
        graph = resolve_binary_graph(source, content, source=path)
        return PlanDocument(plan=decode(content, graph), stated_metrics={}), graph
    except PlanError as error:
        raise error.with_prefix(str(path)) from None


def _plan_problem(
    graph: Graph, costs: Costs | None, limits: Limits, own: options.ConstraintOptions
) -> Problem:
    """Return the problem of a plan with the RAM, storage limit and deadline of the options.

    Without ``--ram`` the RAM is unlimited. Without costs, all times and energies are 0.
    """
    unsupported_options = [
        name for name in options.changed_options(limits, own) if name not in _PLAN_LIMITS
    ]
    if unsupported_options:
        raise InputError(
            f"{', '.join(unsupported_options)}: does not apply to a plan; verify its schedule file"
        )
    if costs is None and limits.deadline is not None:
        raise InputError(NO_COSTS)
    return Problem.from_limits(
        graph, costs or zero_costs(graph), replace(limits, ram=limits.ram or MAX_BYTES)
    )


def _plan_facts(
    document: PlanDocument, check: PlanCheck, device_ram: DeviceRam | None, *, has_costs: bool
) -> Iterator[Fact]:
    plan = document.plan
    yield Fact("mode", str(plan.mode))
    yield Fact("ram_budget_bytes", plan.ram_budget_bytes)
    n_instructions = len(plan.program)
    yield Fact(
        "instructions", n_instructions, "instructions", format_number, f"{plan.mode} transfers"
    )
    shows_stall = plan.mode == StorageMode.DMA and has_costs
    peak_note = "" if check.peak_position is None else f"at instruction {check.peak_position}"
    notes = {
        "makespan_s": f"stall {format_seconds(check.stall_s or 0.0)}" if shows_stall else "",
        "peak_ram_bytes": peak_note,
    }
    group_facts = partial(metric_facts, Display.VERIFY_PLAN, check, notes=notes)
    yield from group_facts(Group.ENERGY, Group.WORK, Group.STEP, Group.MEMORY)
    yield from device_ram_facts(device_ram)
    yield Fact("peak_instruction", check.peak_position)
    if document.arena is not None:
        yield from arena_facts(document.arena)
    yield from group_facts(Group.STORAGE)
