"""``poetmodel verify``: verify a schedule file or a plan."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from poetmodel.cli import options
from poetmodel.cli.failures import ExitStatus, print_warnings
from poetmodel.cli.inputs import warn_about_kernels
from poetmodel.cli.output import fact_table, live_line
from poetmodel.cli.plan import arena_facts
from poetmodel.cli.reply import Reply
from poetmodel.device import Costs, StorageMode
from poetmodel.files import read_bytes
from poetmodel.problem import Limits
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
from poetmodel.schedule.metrics import Display, Group
from poetmodel.units import format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.case.opening import Checked, CheckedPlanFile
    from poetmodel.graph import Graph

MAX_VIOLATIONS: Final = 20
"""Maximum number of printed violations; JSON contains all."""


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
) -> Reply:
    """Simulate a schedule or a plan; check rules of execution, limits, and stated metrics.

    A limit on the command line replaces all limits of a schedule file; omitted limits then have
    their defaults. For a plan, --ram replaces the budget of the file, --aux is by default the
    device's, and there is no deadline without --deadline; other limits do not apply.
    """
    from poetmodel.case.opening import open_plan, open_schedule

    path, content = file_argument.schedule, read_bytes(file_argument.schedule)
    case = source.case(costing, limits=limits, own=own)
    with live_line(enabled=not output.json, activity="verifying"):
        if is_plan(content):
            kind, plan_file = "plan", open_plan(path, case, content=content)
            graph, costs, device_ram = plan_file.graph, plan_file.costs, plan_file.device_ram
            violations, notes = plan_file.violations, plan_file.notes
            own_facts = list(_plan_facts(plan_file))
        else:
            kind, checked = "schedule", open_schedule(path, case, content=content)
            graph, costs, device_ram = checked.graph, checked.costs, checked.device_ram
            violations, notes = checked.verdict.violations, checked.notes
            own_facts = list(_schedule_facts(checked))
        facts = [*_verdict_facts(graph, costs, violations, notes), *own_facts]
        values = to_json_object(facts)
    print_warnings(notes)
    if costs is not None:
        warn_about_kernels(graph, costs.device)
    table = fact_table(f"{kind.capitalize()} for {graph.name}", facts)
    return Reply(
        document=values,
        text=(*_verdict_lines(kind, violations, case.limit_options), table),
        device_rams=(device_ram,),
        status=ExitStatus.INFEASIBLE if violations else ExitStatus.SUCCESS,
    )


def _verdict_lines(
    document_kind: str, violations: Sequence[str], limit_options: Sequence[str]
) -> Iterator[str]:
    """Yield that the file is valid, with a note on `limit_options`, or the first violations."""
    if not violations:
        yield f"valid: the {document_kind} meets every rule and limit that was checked"
        yield ""
        if limit_options:
            yield (
                "If 'poetmodel solve' reports infeasible with these limits, it has a bug. Please "
                "report this bug with the graph, this file and both commands."
            )
            yield ""
        return
    n_omitted = len(violations) - MAX_VIOLATIONS
    yield f"not valid: {format_items(len(violations), 'violation')}"
    yield from violations[:MAX_VIOLATIONS]
    if n_omitted > 0:
        yield f"and {n_omitted:,} more; --json lists all"
    yield ""


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


def _schedule_facts(verified: Checked) -> Iterator[Fact]:
    """Yield simulated metrics, device RAM, peak, state and constraints of a schedule."""
    graph, simulation = verified.graph, verified.simulation
    peak, tensors = simulation.peak, simulation.peak_tensors
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
    """Return whether a file's content is a plan; damaged JSON with the format's name counts."""
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


def _plan_facts(opened: CheckedPlanFile) -> Iterator[Fact]:
    """Yield mode, stated budget, simulated metrics, device RAM and addresses of a plan."""
    plan, check = opened.document.plan, opened.check
    yield Fact("mode", str(plan.mode))
    yield Fact("ram_budget_bytes", plan.ram_budget_bytes)
    n_instructions = len(plan.program)
    yield Fact(
        "instructions", n_instructions, "instructions", format_number, f"{plan.mode} transfers"
    )
    shows_stall = plan.mode == StorageMode.DMA and opened.costs is not None
    peak_note = "" if check.peak_position is None else f"at instruction {check.peak_position}"
    notes = {
        "makespan_s": f"stall {format_seconds(check.stall_s or 0.0)}" if shows_stall else "",
        "peak_ram_bytes": peak_note,
    }
    group_facts = partial(metric_facts, Display.VERIFY_PLAN, check, notes=notes)
    yield from group_facts(Group.ENERGY, Group.WORK, Group.STEP, Group.MEMORY)
    yield from device_ram_facts(opened.device_ram)
    yield Fact("peak_instruction", check.peak_position)
    if opened.document.arena is not None:
        yield from arena_facts(opened.document.arena)
    yield from group_facts(Group.STORAGE)
