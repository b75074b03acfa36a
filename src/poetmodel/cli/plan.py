"""``poetmodel plan``: make the program of a device from a schedule; plans for other commands."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from poetmodel.case.checked_plan import CheckedPlan, blocking_warnings
from poetmodel.cli import options
from poetmodel.cli.failures import (
    ExitStatus,
    print_errors,
    print_warnings,
)
from poetmodel.cli.inputs import check_outputs, print_notes
from poetmodel.cli.output import fact_table, live_line
from poetmodel.cli.reply import Reply
from poetmodel.device import StorageMode
from poetmodel.errors import BudgetError, InputError, PlanError, VerificationError
from poetmodel.plan.alignment import ALIGNMENT
from poetmodel.problem import Limits
from poetmodel.report.presenter import (
    Fact,
    device_ram_facts,
    escape_controls,
    format_count,
    format_items,
    metric_facts,
    text_fact,
)
from poetmodel.schedule.metrics import Display, Group
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from poetmodel.case.opening import Checked
    from poetmodel.plan import Arena
    from poetmodel.result import SolveResult


class PlanFormat(StrEnum):
    """Values of ``--format``: a plan file, a listing, bytes for a device, or trace events."""

    JSON = "json"
    TEXT = "text"
    BINARY = "binary"
    TRACE = "trace"


@options.group
class PlanOptions:
    """The schedule, and the settings of its plan."""

    schedule: Path = options.argument(
        options.REQUIRED, "SCHEDULE", "A schedule file, *.schedule.json."
    )
    mode: StorageMode | None = options.graph_option(
        None,
        "--mode",
        "How transfers run. Default: the device's; else dma for an overlap schedule, else "
        "blocking.",
    )
    arena: bool = options.graph_option(
        False,
        "--arena",
        "Assign a fixed offset in one block of RAM to every copy of a tensor and every workspace.",
    )
    alignment: int | None = options.graph_option(
        None,
        "--alignment BYTES",
        f"With --arena: offsets are multiples of it. Default: {ALIGNMENT}.",
    )
    ram: str | None = options.limit_option(
        None,
        "--ram SIZE",
        "RAM budget: 256KiB, 1.5MB, or 50% of the keep-all peak. Default: the budget "
        "of the schedule, else the device's RAM.",
    )
    out: Path | None = options.output_option(None, "--out FILE", "Write the plan.")
    plan_format: PlanFormat = options.output_option(
        PlanFormat.JSON,
        "--format",
        "json is a plan file, text a readable listing, binary a few hundred bytes for a device, "
        "trace Chrome trace events for Perfetto.",
    )
    plot: Path | None = options.output_option(
        None, "--plot FILE", "Draw RAM over time, core and bus: .html, .svg, .png, .pdf."
    )


@options.command("poetmodel plan mlp.json --graph mlp --format text")
def plan(
    source: options.FileGraphOptions,
    costing: options.CostOptions,
    request: PlanOptions,
    output: options.OutputOptions,
) -> Reply:
    """Make the program that a device executes, from a schedule file."""
    from poetmodel.case.opening import open_schedule

    if request.alignment is not None and not request.arena:
        raise InputError("--alignment: applies to addresses; give --arena too")
    if request.plan_format == PlanFormat.BINARY and request.out is None:
        raise InputError("--format binary: give --out FILE for the bytes")
    if request.plan_format == PlanFormat.BINARY and request.arena:
        raise InputError("--format binary: has no addresses; give --format json with --arena")
    alignment = ALIGNMENT if request.alignment is None else request.alignment
    path = request.schedule
    inputs = (str(path), source.graph, costing.device, costing.profile)
    check_outputs(("--out", request.out), ("--plot", request.plot), inputs=inputs)
    case = source.case(costing)
    checked = open_schedule(path, case, is_input=True)
    problem = checked.problem
    if request.ram is not None:
        asked = replace(checked.case, limits=Limits(ram=request.ram))
        problem = replace(problem, ram=asked.absolute_limits().ram)
    if problem.usable_ram_bytes < 1:
        raise BudgetError(
            f"ram: {problem.ram_budget_bytes:,} B leave no RAM for tensors: "
            f"{problem.graph.total_resident_bytes:,} bytes are resident"
        )
    print_notes(checked)
    print_warnings(blocking_warnings(problem) if request.mode is None else ())
    try:
        with live_line(enabled=not output.json, activity="planning"):
            planned = CheckedPlan.of_schedule(
                problem,
                checked.document.schedule,
                mode=request.mode,
                ram_budget_bytes=problem.usable_ram_bytes
                if _has_budget(checked, request.ram)
                else None,
                alignment=alignment if request.arena else None,
                may_delay_transfers=checked.document.problem is None or not problem.is_overlapping,
            )
    except PlanError as error:
        raise error.with_prefix(str(path)) from None
    if planned.violations:
        print_errors(planned.violations)
        raise typer.Exit(ExitStatus.INFEASIBLE)
    return Reply(
        document=planned.plan.to_dict(planned.check, planned.arena),
        text=_plan_lines(planned, request),
        device_rams=(planned.device_ram,),
        written=tuple(_write_files(planned, request)),  # also if stdout is closed
    )


def _has_budget(checked: Checked, ram: str | None) -> bool:
    """Return whether an option, the file or a device states a budget."""
    stated = (ram, checked.document.problem, checked.problem.costs.device)
    return any(value is not None for value in stated)


def _write_files(planned: CheckedPlan, request: PlanOptions) -> Iterator[Path]:
    """Write plan and picture, if requested; yield each path."""
    if request.out is not None:
        _save_plan(planned, request.out, request.plan_format)
        yield request.out
    if request.plot is not None:
        from poetmodel.report.drawing import draw_plan

        draw_plan(planned.graph, planned.plan, planned.check, request.plot)
        yield request.plot


def _plan_lines(planned: CheckedPlan, request: PlanOptions) -> Iterator[str | Table]:
    if request.plan_format in {PlanFormat.TEXT, PlanFormat.TRACE} and request.out is None:
        yield from _format_lines(planned, request.plan_format)
    else:
        facts = (*_plan_facts(planned), *device_ram_facts(planned.device_ram))
        yield fact_table(f"Plan for {planned.graph.name}", facts)


def _plan_facts(planned: CheckedPlan) -> Iterator[Fact]:
    """Yield counts, metrics, addresses, homes of state and binary size of a plan, for a table."""
    from poetmodel.plan import Op, encode
    from poetmodel.plan.listing import describe_homes

    plan, check = planned.plan, planned.check
    op_counts = dict.fromkeys(Op, 0)
    for op, _ in plan.program:
        op_counts[op] += 1
    count_nouns = (
        (op_counts[Op.COMPUTE] - len(planned.graph.nodes), "recomputation"),
        (op_counts[Op.PAGE_OUT], "page-out"),
        (op_counts[Op.PAGE_IN], "page-in"),
    )
    counts_text = ", ".join(format_items(count, noun) for count, noun in count_nouns)
    yield text_fact("instructions", f"{len(plan.program):,}", counts_text)
    yield text_fact("transfers", str(plan.mode), _MODE_NOTES[plan.mode])
    budget = plan.ram_budget_bytes
    notes = {
        "stall_s": "the core waits for the bus",
        "peak_ram_bytes": "" if budget is None else f"of a budget of {format_bytes(budget)}",
    }
    group_facts = partial(metric_facts, Display.PLAN, check, notes=notes)
    groups = (Group.ENERGY, Group.WORK, Group.STEP, Group.MEMORY)
    yield from group_facts(
        *groups, unlisted_keys=() if plan.mode == StorageMode.DMA else ("stall_s",)
    )
    if planned.arena is not None:
        yield from arena_facts(planned.arena)
    yield from group_facts(Group.STORAGE)
    homes = describe_homes(planned.graph, plan)
    if homes:
        n_first_reads = len(plan.first_reads(planned.graph))
        first_reads_text = f", {format_count(n_first_reads)}first reads" if n_first_reads else ""
        yield text_fact("state", format_bytes(planned.graph.state_bytes), homes + first_reads_text)
    size_text = f"{format_count(len(encode(plan, planned.graph)))}B"
    yield text_fact("binary size", size_text, "with --format binary")


def arena_facts(arena: Arena) -> Iterator[Fact]:
    """Yield size, lower bound on the size, fragmentation ratio and alignment of an arena."""
    from poetmodel.plan.listing import describe_fragmentation

    bound = describe_fragmentation(arena)
    yield Fact("arena_bytes", arena.bytes, "arena", format_bytes, bound)
    yield Fact("arena_lower_bound_bytes", arena.lower_bound_bytes)
    yield Fact("arena_fragmentation", arena.fragmentation_ratio)
    yield Fact("arena_alignment", arena.alignment)


_MODE_NOTES: Final = {
    StorageMode.BLOCKING: "the core waits for each",
    StorageMode.DMA: "one at a time, while the core computes",
}
"""Notes on transfers, by mode."""


# -- plans for commands ------------------------------------------------------------------------


def _format_lines(planned: CheckedPlan, plan_format: PlanFormat) -> list[str]:
    """Return the lines of trace events for `PlanFormat.TRACE`, else those of the listing."""
    from poetmodel.plan.listing import plan_listing
    from poetmodel.plan.trace import trace_events, trace_text

    graph = planned.graph
    if plan_format == PlanFormat.TRACE:
        return trace_text(trace_events(graph, planned.plan, planned.check)).splitlines()
    return plan_listing(graph, planned.plan, planned.check, planned.arena).splitlines()


def _save_plan(planned: CheckedPlan, path: Path, plan_format: PlanFormat) -> None:
    """Write a plan in a format; text and trace events have escaped control characters."""
    from poetmodel.files import write_bytes, write_text
    from poetmodel.plan import encode

    if plan_format == PlanFormat.BINARY:
        write_bytes(path, encode(planned.plan, planned.graph))
    elif plan_format in {PlanFormat.TEXT, PlanFormat.TRACE}:
        lines = _format_lines(planned, plan_format)
        write_text(path, "".join(f"{escape_controls(line)}\n" for line in lines))
    else:
        planned.plan.save(path, planned.check, planned.arena)


def save_plan_and_map(
    result: SolveResult,
    *,
    plan: Path | None,
    plot: Path | None,
    planned: CheckedPlan | None = None,
) -> Iterator[Path]:
    """Write a solve's plan to `plan`, and its map of stages to `plot`; yield each written file.

    The files are written while the caller iterates. The plan is `planned`, else one without
    addresses. If the schedule has violations, a warning is printed in place of the plan.
    """
    problem = result.problem
    if result.schedule is None:
        return
    if plan is not None and result.violations:
        print_warnings([f"{plan} was not written: the schedule violates a rule or a limit"])
    elif plan is not None:
        print_warnings(blocking_warnings(problem))
        if planned is None:
            planned_ram_bytes = (
                None if result.simulation is None else result.simulation.planned_ram_bytes
            )
            planned = CheckedPlan.of_schedule(
                problem,
                result.schedule,
                ram_budget_bytes=planned_ram_bytes or problem.usable_ram_bytes,
            )
        if planned.violations:
            raise VerificationError(planned.violations)
        _save_plan(planned, plan, PlanFormat.JSON)
        yield plan
    if plot is not None:
        from poetmodel.report.drawing import draw_stages

        draw_stages(problem.graph, result.schedule, plot)
        yield plot
