"""``poetmodel plan``: make the program of a device from a schedule; plans for other commands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from poetmodel.cli import options
from poetmodel.cli.failures import (
    ExitStatus,
    print_device_ram_warnings,
    print_errors,
    print_warnings,
)
from poetmodel.cli.inputs import (
    MEASURED_COSTS,
    check_outputs,
    read_file_costs,
    resolve_graph,
    resolve_ram,
)
from poetmodel.cli.output import fact_table, live_line, print_json, print_text, print_written, show
from poetmodel.device import Costs, Device, StorageMode
from poetmodel.device.ram import DeviceRam
from poetmodel.errors import BudgetError, InputError, PlanError, ScheduleError, VerificationError
from poetmodel.plan.alignment import ALIGNMENT
from poetmodel.problem import DeadlineCounts, Limits, Problem
from poetmodel.problem.objective import transfer_mode
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

    from poetmodel.budgets import Budget
    from poetmodel.graph import Graph
    from poetmodel.plan import Arena, ArenaCheck, Plan, PlanCheck
    from poetmodel.result import SolveResult
    from poetmodel.schedule import Schedule
    from poetmodel.schedule.document import ScheduleDocument
    from poetmodel.solver import Fitted


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
) -> None:
    """Make the program that a device executes, from a schedule file."""
    from poetmodel.schedule import check_identity
    from poetmodel.schedule.document import load_document

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
    document = load_document(path)
    graph = resolve_graph(source, document.schedule.identity, source=path).graph
    try:
        check_identity(graph, document.schedule)
        costs, notes = read_file_costs(document.device, graph, costing)
        stated_problem = document.problem
        if stated_problem is not None:
            costs = replace(costs, commit=stated_problem.commit)
        limits = resolve_ram(source, Limits(ram=request.ram))
        budget = _tensor_ram_bytes(document, graph, costs, limits.ram)
        mode, mode_warnings = default_mode(
            costs.device, None if stated_problem is None else stated_problem.deadline_counts
        )
        print_warnings(
            [
                *document.notes,
                *(note + MEASURED_COSTS for note in notes),
                *_cost_notes(document, graph, costs),
                *(mode_warnings if request.mode is None else ()),
            ]
        )
        with live_line(enabled=not output.json, activity="planning"):
            plan_result = PlanResult.from_schedule(
                graph,
                costs,
                document.schedule,
                mode=request.mode or mode,
                ram_budget_bytes=budget,
                aux_bytes=None if stated_problem is None else stated_problem.aux_bytes,
                alignment=alignment if request.arena else None,
                may_delay_transfers=stated_problem is None
                or stated_problem.deadline_counts != "overlap",
            )
    except (ScheduleError, PlanError) as error:
        raise error.with_prefix(str(path)) from None
    if plan_result.violations:
        print_errors(plan_result.violations)
        raise typer.Exit(ExitStatus.INFEASIBLE)
    _save_and_print(plan_result, request, json=output.json)


def _cost_notes(document: ScheduleDocument, graph: Graph, costs: Costs) -> list[str]:
    """Return the notes of `ScheduleDocument.compare_claims`; none if the file has no problem."""
    from poetmodel.planner import verify

    if document.problem is None:
        return []
    problem = document.problem.to_problem(graph, costs)
    if document.costs_sha256 == problem.costs_sha256:
        return []
    verdict = verify(problem, document.schedule)
    return list(document.compare_claims(problem, verdict.simulation, document.claims))


def _tensor_ram_bytes(
    document: ScheduleDocument, graph: Graph, costs: Costs, ram: str | int | Budget | None
) -> int | None:
    """Return the RAM budget of tensors [B]: of the option, else of the file, else of the device.

    Resident bytes of the graph are subtracted from any of these three if the problem of the file
    counts them. Return None if none of the three states a budget. Raises `BudgetError` if the
    budget is invalid, or if resident bytes leave no RAM for tensors.
    """
    stated_problem = document.problem
    if ram is None and stated_problem is None and costs.device is None:
        return None
    problem = Problem(
        graph,
        costs,
        ram=ram if ram is not None or stated_problem is None else stated_problem.ram_budget_bytes,
        count_parameters=stated_problem is not None and stated_problem.count_parameters,
    )
    if problem.usable_ram_bytes < 1:
        raise BudgetError(
            f"ram: {problem.ram_budget_bytes:,} B leave no RAM for tensors: "
            f"{graph.total_resident_bytes:,} bytes are resident"
        )
    return problem.usable_ram_bytes


def _save_and_print(plan_result: PlanResult, request: PlanOptions, *, json: bool) -> None:
    """Write the plan and its picture to the given files; print JSON, text or a table.

    With `json` prints JSON. Otherwise prints the listing or the trace events if one of them is the
    format and ``--out`` is not given, else a table. Warns if the plan does not fit the device.
    """
    if request.out is not None:
        plan_result.save(request.out, request.plan_format)
        print_written(request.out)
    if request.plot is not None:
        from poetmodel.report.drawing import draw_plan

        draw_plan(plan_result.graph, plan_result.plan, plan_result.check, request.plot)
        print_written(request.plot)
    if json:
        print_json(plan_result.plan.to_dict(plan_result.check, plan_result.arena))
    elif request.plan_format in {PlanFormat.TEXT, PlanFormat.TRACE} and request.out is None:
        print_text(*plan_result.format_lines(request.plan_format))
    else:
        facts = (*_plan_facts(plan_result), *device_ram_facts(plan_result.device_ram))
        show(fact_table(f"Plan for {plan_result.graph.name}", facts))
    print_device_ram_warnings(plan_result.device_ram)


def _plan_facts(plan_result: PlanResult) -> Iterator[Fact]:
    """Yield instructions, transfer mode, metrics, addresses, state and binary size of a plan.

    Metrics of storage follow the addresses. Addresses and state are omitted if there are none.
    """
    from poetmodel.plan import Op, encode
    from poetmodel.plan.listing import describe_homes

    plan, check = plan_result.plan, plan_result.check
    op_counts = dict.fromkeys(Op, 0)
    for op, _ in plan.program:
        op_counts[op] += 1
    count_nouns = (
        (op_counts[Op.COMPUTE] - len(plan_result.graph.nodes), "recomputation"),
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
    if plan_result.arena is not None:
        yield from arena_facts(plan_result.arena)
    yield from group_facts(Group.STORAGE)
    homes = describe_homes(plan_result.graph, plan)
    if homes:
        n_first_reads = len(plan.first_reads(plan_result.graph))
        first_reads_text = f", {format_count(n_first_reads)}first reads" if n_first_reads else ""
        yield text_fact(
            "state", format_bytes(plan_result.graph.state_bytes), homes + first_reads_text
        )
    size_text = f"{format_count(len(encode(plan, plan_result.graph)))}B"
    yield text_fact("binary size", size_text, "with --format binary")


def arena_facts(arena: Arena) -> Iterator[Fact]:
    """Yield size, lower bound on the size, fragmentation ratio and alignment of an arena.

    Tables list the size alone, with a note on lower bound and fragmentation.
    """
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """A plan, its addresses if requested, and the verifier's checks of both."""

    graph: Graph
    device: Device | None
    plan: Plan
    check: PlanCheck
    arena: Arena | None = None
    arena_check: ArenaCheck | None = None
    """Check of the addresses; None without addresses."""

    @classmethod
    def from_schedule(
        cls,
        graph: Graph,
        costs: Costs,
        schedule: Schedule,
        *,
        mode: StorageMode,
        ram_budget_bytes: int | None,
        aux_bytes: int | None,
        alignment: int | None = None,
        may_delay_transfers: bool = False,
    ) -> PlanResult:
        """Plan a schedule, with addresses if an alignment is given; verify plan and addresses.

        The result contains the violations of limits. `ram_budget_bytes` is for tensors, None for no
        limit; `aux_bytes` limits the storage, None for that of the device. With
        `may_delay_transfers`, transfers that overlap computation may start later if the addresses
        exceed the budget otherwise. Raises `PlanError` if the schedule violates a rule of
        execution, or the alignment [B] is no power of two.
        """
        from poetmodel.planner import make_plan

        if alignment is None:
            plan = make_plan(graph, costs, schedule, mode=mode, ram_budget_bytes=ram_budget_bytes)
            return cls.from_plan(graph, costs, plan, None, aux_bytes=aux_bytes)
        from poetmodel.solver.fitting import plan_and_place

        plan, arena = plan_and_place(
            graph,
            costs,
            schedule,
            mode=mode,
            ram_budget_bytes=ram_budget_bytes,
            alignment=alignment,
            may_delay_transfers=may_delay_transfers,
        )
        return cls.from_plan(graph, costs, plan, arena, aux_bytes=aux_bytes)

    @classmethod
    def from_plan(
        cls,
        graph: Graph,
        costs: Costs,
        plan: Plan,
        arena: Arena | None,
        *,
        aux_bytes: int | None,
    ) -> PlanResult:
        """Verify a plan and its addresses, if any, and return both with the checks.

        RAM is checked against the plan's own budget. `aux_bytes` limits the storage, None for that
        of the device.
        """
        from poetmodel.plan import check_arena, check_plan

        return cls(
            graph=graph,
            device=costs.device,
            plan=plan,
            check=check_plan(graph, costs, plan, aux_bytes=aux_bytes),
            arena=arena,
            arena_check=None if arena is None else check_arena(graph, plan, arena),
        )

    def with_addresses(self) -> PlanResult:
        """Return the result with new addresses, aligned to `ALIGNMENT`, and their `arena_check`.

        The plan and its check stay. A result whose plan has violations is returned unchanged.
        """
        if self.check.violations:
            return self
        from poetmodel.placement import place
        from poetmodel.plan import check_arena

        arena = place(self.graph, self.plan)
        return replace(self, arena=arena, arena_check=check_arena(self.graph, self.plan, arena))

    @property
    def violations(self) -> tuple[str, ...]:
        """Violations of the plan; if it has none, those of its addresses.

        For addresses beyond the budget, a single violation states the excess and a remedy.
        """
        if self.check.violations or self.arena_check is None or self.arena is None:
            return self.check.violations
        budget = self.plan.ram_budget_bytes
        if budget is None or self.arena.bytes <= budget:
            return self.arena_check.violations
        return (
            f"arena: {self.arena.bytes:,} B are {format_bytes(self.arena.bytes - budget)} above "
            f"the {budget:,} B that tensors may use; 'poetmodel solve' with --plan FILE --arena "
            "searches for another schedule, or give a larger --ram",
        )

    @property
    def device_ram(self) -> DeviceRam | None:
        """Device RAM that the plan uses; None without a device."""
        return DeviceRam.compare(self.device, self.graph, self.check.peak_ram_bytes)

    def format_lines(self, plan_format: PlanFormat) -> list[str]:
        """Return the lines of trace events for the format TRACE, else of a readable listing."""
        from poetmodel.plan.listing import plan_listing
        from poetmodel.plan.trace import trace_events, trace_text

        if plan_format == PlanFormat.TRACE:
            return trace_text(trace_events(self.graph, self.plan, self.check)).splitlines()
        return plan_listing(self.graph, self.plan, self.check, self.arena).splitlines()

    def save(self, path: Path, plan_format: PlanFormat) -> None:
        """Write the plan in a format; JSON and listings include its addresses, if it has any.

        A plan with violations is written, too. Raises `InputError` if the file cannot be written.
        """
        from poetmodel.files import write_bytes, write_text
        from poetmodel.plan import encode

        if plan_format == PlanFormat.BINARY:
            write_bytes(path, encode(self.plan, self.graph))
        elif plan_format in {PlanFormat.TEXT, PlanFormat.TRACE}:
            write_text(
                path,
                "".join(f"{escape_controls(line)}\n" for line in self.format_lines(plan_format)),
            )
        else:
            self.plan.save(path, self.check, self.arena)


def default_mode(
    device: Device | None, deadline_counts: str | None
) -> tuple[StorageMode, list[str]]:
    """Return the storage mode of a device, or the mode that a deadline implies; and warnings.

    Without a device or its storage, the mode follows from `deadline_counts`, the time that the
    deadline limits: DMA for ``overlap``, else BLOCKING. There is a warning if that time assumes
    overlap, but the device does not overlap transfers.
    """
    mode = transfer_mode(device, deadline_counts)
    counts_overlap = deadline_counts == DeadlineCounts.OVERLAP
    if device is None or mode == StorageMode.DMA or not counts_overlap:
        return mode, []
    return mode, [
        "the time of this schedule assumes that transfers overlap computation, but the core of "
        f"{device.short_name} waits for each transfer, and so does the plan; 'poetmodel "
        "plan --mode dma' makes a plan with overlap"
    ]


def save_plan_and_map(
    result: SolveResult,
    *,
    plan: Path | None,
    plot: Path | None,
    fitted: Fitted | None = None,
) -> Iterator[Path]:
    """Write a solve's plan to `plan`, and its map of stages to `plot`; yield each written file.

    A path of None omits its file and warnings. The files are written while the caller iterates. The
    plan is that of `fitted`, with addresses; if there is none, the schedule is planned without
    addresses. Without a schedule no file is written. If the schedule has violations, a warning is
    printed in place of the plan, and the map is written. If a plan is made, the warnings of
    `default_mode` are printed. Raises `VerificationError` if the plan has violations, and
    `InputError` if a file cannot be written.
    """
    problem = result.problem
    if result.schedule is None:
        return
    if plan is not None and result.violations:
        print_warnings([f"{plan} was not written: the schedule violates a rule or a limit"])
    elif plan is not None:
        mode, mode_warnings = default_mode(problem.costs.device, problem.deadline_counts)
        print_warnings(mode_warnings)
        if fitted is not None and fitted.plan is not None:
            plan_result = PlanResult.from_plan(
                problem.graph,
                problem.costs,
                fitted.plan,
                fitted.arena,
                aux_bytes=problem.aux_limit_bytes,
            )
        else:
            planned_ram_bytes = (
                None if result.simulation is None else result.simulation.planned_ram_bytes
            )
            plan_result = PlanResult.from_schedule(
                problem.graph,
                problem.costs,
                result.schedule,
                mode=mode,
                ram_budget_bytes=planned_ram_bytes or problem.usable_ram_bytes,
                aux_bytes=problem.aux_limit_bytes,
            )
        if plan_result.violations:
            raise VerificationError(plan_result.violations)
        plan_result.save(plan, PlanFormat.JSON)
        yield plan
    if plot is not None:
        from poetmodel.report.drawing import draw_stages

        draw_stages(problem.graph, result.schedule, plot)
        yield plot
